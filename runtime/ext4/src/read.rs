//! Reads an ext4 file system: ours, and what `mke2fs` makes. Everything in it is foreign: sizes and
//! positions are checked before they are used, walks end.
//!
//! Sources: Linux, `Documentation/filesystems/ext4/` and `fs/ext4/{ext4,ext4_extents,xattr}.h`.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::acl;
use super::superblock::{OFFSET, ROOT_INODE};

/// Largest directory, symbolic link or attribute that is looked at.
const MAX_DIRECTORY: u64 = 1 << 30;
const MAX_LINK: u64 = 4096;
/// The root directory's inode.
pub const ROOT: u32 = ROOT_INODE;
const EXTENT_MAGIC: u16 = 0xf30a;
const XATTR_MAGIC: u32 = 0xea02_0000;
/// Levels of an extent tree, the kernel's own limit.
const MAX_DEPTH: u16 = 5;

mod incompatible {
    pub const FILETYPE: u32 = 0x2;
    pub const RECOVER: u32 = 0x4;
    pub const EXTENTS: u32 = 0x40;
    pub const BIT64: u32 = 0x80;
    pub const FLEX_BG: u32 = 0x200;
    pub const CSUM_SEED: u32 = 0x2000;
    pub const LARGE_DIR: u32 = 0x4000;
    /// What is read here. The last two change nothing for a reader.
    pub const KNOWN: u32 = FILETYPE | EXTENTS | BIT64 | FLEX_BG | CSUM_SEED | LARGE_DIR;
}

/// Why a file system cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No magic number.
    #[error("it is no ext4 file system")]
    NotExt4,
    /// It was not unmounted.
    #[error("its journal has not been replayed; run `e2fsck -p` on it, or mount and unmount it")]
    Unclean,
    /// A feature that is not read.
    #[error("it uses the ext4 features {0:#x}, which are not read here; copy its files with dir:")]
    Features(u32),
    /// A file in the layout of ext2 and ext3.
    #[error("inode {0} has no extents, as in ext3; copy its files with dir:")]
    NoExtents(u32),
    /// Something that no kernel would accept.
    #[error("it is damaged: {0}")]
    Damaged(String),
}

impl From<ReadError> for io::Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io(error) => error,
            other => Self::new(io::ErrorKind::InvalidData, other),
        }
    }
}

fn damaged<T>(what: impl Into<String>) -> Result<T, ReadError> {
    Err(ReadError::Damaged(what.into()))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// A number in two halves.
fn wide(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// A file system that can be read.
#[derive(Debug)]
pub struct Reader {
    file: File,
    block_size: u64,
    blocks: u64,
    inodes: u32,
    inodes_per_group: u32,
    inode_size: u16,
    /// First block of each group's inode table.
    tables: Vec<u64>,
}

/// An inode as it is stored.
#[derive(Debug, Clone)]
pub struct RawInode {
    number: u32,
    bytes: Vec<u8>,
}

/// Data of a file: where in it, where in the image, how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// Bytes from the beginning of the file.
    pub at: u64,
    /// Bytes from the beginning of the image.
    pub source: u64,
    /// Bytes.
    pub length: u64,
}

/// A name and its value.
pub type Xattr = (Vec<u8>, Vec<u8>);

impl Reader {
    /// Opens a file system in a file.
    ///
    /// # Errors
    /// When it is none, is not clean, or has features that are not read.
    pub fn open(file: File) -> Result<Self, ReadError> {
        let mut sb = [0; 1024];
        if let Err(error) = file.read_exact_at(&mut sb, OFFSET as u64) {
            let short = error.kind() == io::ErrorKind::UnexpectedEof;
            return Err(if short { ReadError::NotExt4 } else { error.into() });
        }
        if u16_at(&sb, 0x38) != 0xef53 {
            return Err(ReadError::NotExt4);
        }
        let features = u32_at(&sb, 0x60);
        if features & incompatible::RECOVER != 0 {
            return Err(ReadError::Unclean);
        }
        if features & !incompatible::KNOWN != 0 || features & incompatible::FILETYPE == 0 {
            return Err(ReadError::Features(features & !incompatible::KNOWN));
        }
        let shift = u32_at(&sb, 0x18);
        if shift > 6 {
            return damaged(format!("its block size is 1024 << {shift}"));
        }
        let block_size = 1024u64 << shift;
        let is_wide = features & incompatible::BIT64 != 0;
        let blocks = wide(u32_at(&sb, 4), if is_wide { u32_at(&sb, 0x150) } else { 0 });
        let length = file.metadata()?.len();
        if blocks == 0 || blocks.checked_mul(block_size).is_none_or(|bytes| bytes > length) {
            return damaged(format!("it says it has {blocks} blocks; the file has {length} bytes"));
        }
        let first = u64::from(u32_at(&sb, 0x14));
        let per_group = u64::from(u32_at(&sb, 0x20));
        let inodes_per_group = u32_at(&sb, 0x28);
        let inode_size = u16_at(&sb, 0x58);
        let inodes = u32_at(&sb, 0);
        if per_group == 0
            || per_group > 8 * block_size
            || inodes_per_group == 0
            || u64::from(inodes_per_group) > 8 * block_size
            || !(128..=4096).contains(&inode_size)
            || !inode_size.is_power_of_two()
            || first >= blocks
        {
            return damaged("its groups make no sense");
        }
        let groups = (blocks - first).div_ceil(per_group);
        let size = if is_wide { usize::from(u16_at(&sb, 0xfe)) } else { 32 };
        if !(32..=1024).contains(&size) || u64::from(inodes) > groups * u64::from(inodes_per_group)
        {
            return damaged("its group descriptors make no sense");
        }
        let mut tables = Vec::new();
        let start = (first + 1) * block_size;
        let mut descriptor = vec![0; size];
        for group in 0..groups {
            file.read_exact_at(&mut descriptor, start + group * size as u64)?;
            let high = if size >= 64 { u32_at(&descriptor, 0x28) } else { 0 };
            tables.push(wide(u32_at(&descriptor, 8), high));
        }
        Ok(Self { file, block_size, blocks, inodes, inodes_per_group, inode_size, tables })
    }

    /// The image.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    fn block(&self, number: u64) -> Result<Vec<u8>, ReadError> {
        if number == 0 || number >= self.blocks {
            return damaged(format!("there is no block {number}"));
        }
        let mut block = vec![0; usize::try_from(self.block_size).unwrap_or(0)];
        self.file.read_exact_at(&mut block, number * self.block_size)?;
        Ok(block)
    }

    /// An inode by its number.
    ///
    /// # Errors
    /// When there is none of that number.
    pub fn inode(&self, number: u32) -> Result<RawInode, ReadError> {
        if number == 0 || number > self.inodes {
            return damaged(format!("there is no inode {number}"));
        }
        let (group, index) =
            ((number - 1) / self.inodes_per_group, (number - 1) % self.inodes_per_group);
        let table = self.tables.get(group as usize).copied().unwrap_or(0);
        let at = table
            .checked_mul(self.block_size)
            .and_then(|at| at.checked_add(u64::from(index) * u64::from(self.inode_size)))
            .filter(|at| {
                table != 0 && at + u64::from(self.inode_size) <= self.blocks * self.block_size
            });
        let Some(at) = at else {
            return damaged(format!("the table with inode {number} lies outside"));
        };
        let mut bytes = vec![0; usize::from(self.inode_size)];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(RawInode { number, bytes })
    }

    /// Where a file's data is, ascending; what lies between are holes.
    ///
    /// # Errors
    /// When its extents make no sense, or it has none and is not empty.
    pub fn stretches(&self, inode: &RawInode) -> Result<Vec<Stretch>, ReadError> {
        let size = inode.size();
        if !inode.has_extents() {
            let empty = size == 0 || inode.sectors() == 0;
            return if empty { Ok(Vec::new()) } else { Err(ReadError::NoExtents(inode.number)) };
        }
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        self.extents(inode.number, inode.block_field(), None, &mut seen, &mut found)?;
        let mut end = 0;
        for stretch in &mut found {
            if stretch.at < end {
                return damaged(format!("extents of inode {} overlap", inode.number));
            }
            end = stretch.at + stretch.length;
            stretch.length = stretch.length.min(size.saturating_sub(stretch.at));
        }
        found.retain(|stretch: &Stretch| stretch.length > 0);
        Ok(found)
    }

    fn extents(
        &self,
        inode: u32,
        node: &[u8],
        depth: Option<u16>,
        seen: &mut HashSet<u64>,
        found: &mut Vec<Stretch>,
    ) -> Result<(), ReadError> {
        let (entries, here) = (usize::from(u16_at(node, 2)), u16_at(node, 6));
        if u16_at(node, 0) != EXTENT_MAGIC
            || 12 + 12 * entries > node.len()
            || depth.map_or(here > MAX_DEPTH, |expected| here != expected)
        {
            return damaged(format!("the extents of inode {inode} make no sense"));
        }
        for entry in node[12..12 + 12 * entries].chunks_exact(12) {
            if here > 0 {
                let child = wide(u32_at(entry, 4), u32::from(u16_at(entry, 8)));
                if !seen.insert(child) {
                    return damaged(format!("the extents of inode {inode} go in a circle"));
                }
                let block = self.block(child)?;
                self.extents(inode, &block, Some(here - 1), seen, found)?;
                continue;
            }
            let length = u16_at(entry, 4);
            // Longer ones are allocated and not written: they read as zeros.
            if length == 0 || length > 32_768 {
                continue;
            }
            let first = wide(u32_at(entry, 8), u32::from(u16_at(entry, 6)));
            if first == 0 || first + u64::from(length) > self.blocks {
                return damaged(format!("data of inode {inode} lies outside"));
            }
            found.push(Stretch {
                at: u64::from(u32_at(entry, 0)) * self.block_size,
                source: first * self.block_size,
                length: u64::from(length) * self.block_size,
            });
        }
        Ok(())
    }

    /// A small file's bytes.
    fn contents(&self, inode: &RawInode, limit: u64) -> Result<Vec<u8>, ReadError> {
        let size = inode.size();
        if size > limit {
            return damaged(format!("inode {} has {size} bytes", inode.number));
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        for stretch in self.stretches(inode)? {
            let (at, length) = (stretch.at as usize, stretch.length as usize);
            self.file.read_exact_at(&mut bytes[at..at + length], stretch.source)?;
        }
        Ok(bytes)
    }

    /// Names and inode numbers in a directory, without `.` and `..`.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn names(&self, inode: &RawInode) -> Result<Vec<(Vec<u8>, u32)>, ReadError> {
        let bytes = self.contents(inode, MAX_DIRECTORY)?;
        let mut found = Vec::new();
        // An index's own blocks look like empty entries to those who do not know it.
        for block in bytes.chunks(usize::try_from(self.block_size).unwrap_or(1)) {
            let mut at = 0;
            while at + 8 <= block.len() {
                let number = u32_at(block, at);
                let length = match usize::from(u16_at(block, at + 4)) {
                    // 65536 does not fit.
                    0 | 65_535 if block.len() == 65_536 => block.len() - at,
                    length => length,
                };
                let name_length = usize::from(block[at + 6]);
                if length < 8
                    || length % 4 != 0
                    || at + length > block.len()
                    || name_length + 8 > length
                {
                    return damaged(format!("directory {} makes no sense", inode.number));
                }
                let name = &block[at + 8..at + 8 + name_length];
                if number != 0 && name != b"." && name != b".." {
                    if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
                        return damaged(format!("directory {} has a bad name", inode.number));
                    }
                    found.push((name.to_vec(), number));
                }
                at += length;
            }
        }
        Ok(found)
    }

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn target(&self, inode: &RawInode) -> Result<Vec<u8>, ReadError> {
        let size = inode.size();
        if !inode.has_extents() && size < 60 {
            return Ok(inode.block_field()[..size as usize].to_vec());
        }
        self.contents(inode, MAX_LINK)
    }

    /// Extended attributes, sorted by name, ACLs in the form of the system calls.
    ///
    /// # Errors
    /// When they are damaged, or kept in inodes of their own.
    pub fn xattrs(&self, inode: &RawInode) -> Result<Vec<Xattr>, ReadError> {
        let mut found = Vec::new();
        let extra = 128 + usize::from(inode.extra());
        if let Some(room) = inode.bytes.get(extra..)
            && room.len() >= 4
            && u32_at(room, 0) == XATTR_MAGIC
        {
            // Values are counted from the first entry.
            attributes(inode.number, &room[4..], 0, &mut found)?;
        }
        let number = wide(u32_at(&inode.bytes, 0x68), u32::from(u16_at(&inode.bytes, 0x76)));
        if number != 0 {
            let block = self.block(number)?;
            if u32_at(&block, 0) != XATTR_MAGIC {
                return damaged(format!("the attributes of inode {} make no sense", inode.number));
            }
            attributes(inode.number, &block, 32, &mut found)?;
        }
        found.sort_unstable();
        Ok(found)
    }
}

/// Reads the entries that begin at `at` in `room`, whose values are counted from its beginning.
fn attributes(
    inode: u32,
    room: &[u8],
    mut at: usize,
    found: &mut Vec<Xattr>,
) -> Result<(), ReadError> {
    let bad = || damaged(format!("the attributes of inode {inode} make no sense"));
    while at + 4 <= room.len() && u32_at(room, at) != 0 {
        let Some(entry) = room.get(at..at + 16) else { return bad() };
        let (name_length, prefix) = (usize::from(entry[0]), entry[1]);
        let (offset, size) = (usize::from(u16_at(entry, 2)), u32_at(entry, 8) as usize);
        let Some(name) = room.get(at + 16..at + 16 + name_length) else { return bad() };
        if u32_at(entry, 4) != 0 {
            return damaged(format!("inode {inode} keeps an attribute in another inode"));
        }
        let value = match size {
            0 => &[][..],
            _ => match offset.checked_add(size).and_then(|end| room.get(offset..end)) {
                Some(value) => value,
                None => return bad(),
            },
        };
        let (start, value): (&[u8], Vec<u8>) = match prefix {
            1 => (b"user.", value.to_vec()),
            2 | 3 => {
                let Some(list) = acl::decode(value) else { return bad() };
                let which: &[u8] = if prefix == 2 {
                    b"system.posix_acl_access"
                } else {
                    b"system.posix_acl_default"
                };
                (which, list)
            }
            4 => (b"trusted.", value.to_vec()),
            6 => (b"security.", value.to_vec()),
            7 => (b"system.", value.to_vec()),
            _ => return bad(),
        };
        found.push(([start, name].concat(), value));
        at += (16 + name_length).next_multiple_of(4);
    }
    Ok(())
}

impl RawInode {
    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Type and permissions.
    #[must_use]
    pub fn mode(&self) -> u16 {
        u16_at(&self.bytes, 0)
    }

    /// Owner.
    #[must_use]
    pub fn uid(&self) -> u32 {
        u32::from(u16_at(&self.bytes, 2)) | u32::from(u16_at(&self.bytes, 0x78)) << 16
    }

    /// Group.
    #[must_use]
    pub fn gid(&self) -> u32 {
        u32::from(u16_at(&self.bytes, 0x18)) | u32::from(u16_at(&self.bytes, 0x7a)) << 16
    }

    /// Names it has.
    #[must_use]
    pub fn links(&self) -> u16 {
        u16_at(&self.bytes, 0x1a)
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        wide(u32_at(&self.bytes, 4), u32_at(&self.bytes, 0x6c))
    }

    /// Last change of the contents: seconds since 1970, nanoseconds.
    #[must_use]
    pub fn mtime(&self) -> (i64, u32) {
        let low = i64::from(u32_at(&self.bytes, 0x10).cast_signed());
        let extra = if self.extra() >= 12 { u32_at(&self.bytes, 0x88) } else { 0 };
        (low + (i64::from(extra & 3) << 32), (extra >> 2).min(999_999_999))
    }

    /// A device's major and minor number.
    #[must_use]
    pub fn device(&self) -> (u32, u32) {
        let (old, new) = (u32_at(self.block_field(), 0), u32_at(self.block_field(), 4));
        if old != 0 {
            return (old >> 8 & 0xff, old & 0xff);
        }
        (new >> 8 & 0xfff, new & 0xff | new >> 12 & 0xf_ff00)
    }

    fn block_field(&self) -> &[u8] {
        &self.bytes[0x28..0x28 + 60]
    }

    fn has_extents(&self) -> bool {
        u32_at(&self.bytes, 0x20) & super::inode::EXTENTS != 0
    }

    fn sectors(&self) -> u64 {
        wide(u32_at(&self.bytes, 0x1c), u32::from(u16_at(&self.bytes, 0x74)))
    }

    fn extra(&self) -> u16 {
        if self.bytes.len() > 128 { u16_at(&self.bytes, 0x80) } else { 0 }
    }
}
