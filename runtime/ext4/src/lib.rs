//! Writes ext4 file systems: a [`Tree`] and the blocks its files were streamed to become an image
//! that any Linux since 4.x mounts read-write, that `e2fsck -fn` finds nothing in, and that is the
//! same to the byte for the same input. ([`mod@read`] goes the other way.)
//!
//! # Why there is an own writer
//!
//! The builder decodes every layer once. File contents must therefore be written while the layers
//! stream by, when neither the number of files nor the size of anything later is known; and names
//! and symlink targets are bytes, as tar has them. Each crate that was tried misses that, or more:
//!
//! - `ext4_rs` has no mkfs and needs a nightly compiler; its symlinks lose their targets, and
//!   e2fsck finds thousands of faults in what it wrote.
//! - `arcbox-ext4` has no devices, index or checksums, stamps the wall clock, accepts names that
//!   corrupt the directory, and writes unmountable images below 128 MiB.
//! - `mkext4` writes clean images, but takes only UTF-8 names, wants the image's size and every
//!   file's size before the first byte of data, and always adds a journal.
//! - `bux-e2fs` and the lwext4 bindings wrap C libraries, with those libraries' limits (no index
//!   for directories made by libext2fs, so that 100,000 names take minutes).
//!
//! # Layout
//!
//! ```text
//! group 0                                  groups 1, 3, 5, 7, 9, 25, 27, 49, ...
//! ┌────────────┬─────────────────────┐     ┌────────────┬─────────────────────┐
//! │ superblock │ 64 descriptor blocks│     │ its backup │ 64 descriptor blocks│
//! └────────────┴─────────────────────┘     └────────────┴─────────────────────┘
//!   the reserved ranges: fixed places, fixed length, whatever the image's size
//!
//! ├─ reserved ─┼─ file data, in order of arrival ─┼─ metadata ───────────┼─ free ─┤
//!                 (reserved ranges stepped over)  │
//!                                                 ├ per inode: directory blocks, long symlink
//!                                                 │   targets, extent tree blocks, attribute blocks
//!                                                 ├ journal (by option), resize inode's block
//!                                                 └ block bitmaps, inode bitmaps, inode tables
//! ```
//!
//! A [`DataArea`] gives out blocks in order from behind the first reserved range. Since the
//! reserved ranges never move, a file's place depends only on what was allocated before it, and two
//! images that begin with the same layers begin with the same blocks. All other metadata follows
//! the data, from the next multiple of 256 KiB on, so that equal metadata behind data of different
//! length makes equal chunks; `flex_bg` allows all that. Blocks of files that a later layer hid are punched out and are
//! free blocks of the image.
//!
//! **Growth.** Of the 64 descriptor blocks, those not needed belong to the resize inode, so that an
//! image can grow to 512 GiB, offline or mounted, without anything being moved; the kernel goes on
//! with `meta_bg` by itself beyond that. The resize inode was chosen over `meta_bg` from the start
//! because it is what mke2fs makes, hence what resize2fs and the kernel's online resize are used
//! with every day. The price is 260 KiB per reserved range, nearly all of it zeros. The writer's own
//! limit is 504 GiB. A group has at least 2048 inodes, so that added groups bring enough of them.
//!
//! **Small decisions.** There is no `lost+found`: it would be a directory the image does not have,
//! and e2fsck makes one when it needs one. `inline_data`, `orphan_file`, `metadata_csum_seed` and
//! `ea_inode` are not used: older guest kernels and tools do not know them. The mode of a symlink
//! is 0777 whatever the tree says, as Linux has it. Access, change and creation time are the
//! modification time. Times outside 1901-12-13 to 2446-05-10 are moved to the nearest end; e2fsck
//! remarks on those after 2310-04-04, without counting that as an error. A file with more than
//! 65,000 names is an error, since a second inode would break the identity of the names.
//!
//! Inode numbers follow the order in which nodes came into the tree, and those of nodes that a
//! higher layer removed stay free: images on one base number its files alike. Nothing depends on the clock, the
//! working directory, addresses or the order of a hash map.
//!
//! # Contract
//!
//! The image file is the caller's: created empty, written only at blocks that the area gave out,
//! and handed to [`finish`] once. After an error its contents are undefined and it must be thrown
//! away. Syncing and naming it are the caller's part.

#![forbid(unsafe_code)]

mod acl;
mod checksum;
mod directory;
mod extent;
mod geometry;
mod hash;
mod inode;
pub mod read;
mod sink;
mod superblock;
mod survey;
mod tables;
pub mod tree;
mod usage;
mod writer;
mod xattr;

use std::fs::File;
use std::io;

pub use acl::AclError;
pub use geometry::DataArea;
pub use xattr::XattrError;

use crate::tree::{Timestamp, Tree};

/// Bytes per block of the image.
pub const BLOCK_SIZE: u32 = geometry::BLOCK_SIZE as u32;

/// What an image is to have besides its tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Bytes that can still be written to the file system, rounded up to blocks. Where it is not 0,
    /// what the kernel keeps for itself (2%, at most 16 MiB) comes on top.
    pub free_bytes: u64,
    /// Files that can still be made; at least one for each 16 KiB of free space, as mke2fs has it
    /// (compilers' caches and package trees are small files), and 2048 inodes per 128 MiB.
    pub free_inodes: u64,
    /// The file system's UUID, not all zero.
    pub uuid: [u8; 16],
    /// Seed of the directory hashes.
    pub hash_seed: [u8; 16],
    /// When the file system was made, in seconds since 1970; negative counts as 0. e2fsck complains
    /// about a time that is yet to come.
    pub timestamp: i64,
    /// Whether to make a journal (4 to 64 MiB, by the image's size).
    pub journal: bool,
    /// Volume label, at most 16 bytes.
    pub label: String,
}

impl Options {
    /// No free space, no label, no journal, time 0; the hash seed is the UUID.
    pub fn new(uuid: [u8; 16]) -> Self {
        Self {
            free_bytes: 0,
            free_inodes: 0,
            uuid,
            hash_seed: uuid,
            timestamp: 0,
            journal: false,
            label: String::new(),
        }
    }
}

/// What an image turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Size of the image in bytes.
    pub size: u64,
    /// Size of the image in blocks: the sum of the three kinds below.
    pub blocks: u64,
    /// Inodes, used and free.
    pub inodes: u64,
    /// Free blocks, those that the kernel keeps for itself included.
    pub free_blocks: u64,
    /// Blocks of file contents.
    pub data_blocks: u64,
    /// All other blocks.
    pub metadata_blocks: u64,
}

/// Why an image could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The image file could not be written.
    #[error("cannot write the image: {0}")]
    Io(#[source] io::Error),
    /// The file system below the image file is full.
    #[error(
        "no space for the image: it takes up to {needed} bytes; free some or choose another output directory"
    )]
    OutOfSpace {
        /// Size of the image, as far as it is known, in bytes.
        needed: u64,
    },
    /// The image would exceed what the fixed descriptor blocks describe.
    #[error("the image would be larger than {} GiB, the most this writer makes; ask for less free space or a smaller tree", geometry::MAX_GROUPS / 8)]
    ImageTooLarge,
    /// Inode numbers have 32 bits.
    #[error("the tree has more files than an ext4 file system can number")]
    TooManyInodes,
    /// The label does not fit.
    #[error("the label {0:?} is longer than 16 bytes")]
    Label(String),
    /// e2fsck would replace such a UUID.
    #[error("the file system's UUID must not be all zero")]
    Uuid,
    /// The tree contradicts itself.
    #[error("{path}: {why}; the tree is not consistent")]
    Tree {
        /// Where.
        path: String,
        /// What is wrong.
        why: &'static str,
    },
    /// A file's runs contradict its size, the area, or another file.
    #[error(
        "{path}: the run of {blocks} blocks at block {physical} {why}; the tree is not consistent"
    )]
    Run {
        /// The file.
        path: String,
        /// The run's first block in the image.
        physical: u64,
        /// The run's length.
        blocks: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// A name that no directory can hold.
    #[error("{path}: the name cannot be stored: {why}")]
    Name {
        /// The whole path.
        path: String,
        /// What is wrong.
        why: &'static str,
    },
    /// Link counts end at 65,000.
    #[error("{path}: the file has {links} names, ext4 allows 65000; remove some, or copy the file")]
    TooManyLinks {
        /// The first name.
        path: String,
        /// Number of names.
        links: u32,
    },
    /// Symlink targets have at most 4095 bytes.
    #[error("{path}: the target of the symbolic link has {length} bytes, Linux allows 1 to 4095")]
    SymlinkTarget {
        /// The link.
        path: String,
        /// Length of its target.
        length: usize,
    },
    /// Files end at 16 TiB.
    #[error("{path}: the file has {size} bytes, ext4 allows 17592186040320")]
    FileTooLarge {
        /// The file.
        path: String,
        /// Its size.
        size: u64,
    },
    /// Device numbers have 12 and 20 bits.
    #[error("{path}: the device number {major}:{minor} is larger than 4095:1048575")]
    DeviceNumber {
        /// The device node.
        path: String,
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// An extended attribute that ext4 cannot hold.
    #[error("{path}: extended attribute {name:?}: {source}")]
    Xattr {
        /// The file.
        path: String,
        /// The attribute's full name.
        name: String,
        /// What is wrong.
        source: XattrError,
    },
    /// More extended attributes than an inode and a block hold.
    #[error(
        "{path}: the extended attributes take {needed} bytes, ext4 has room for {}; remove some",
        xattr::Attributes::ROOM
    )]
    XattrsTooLarge {
        /// The file.
        path: String,
        /// Bytes they take, entries included.
        needed: usize,
    },
    /// More entries than a two-level index can hold.
    #[error("{path}: the directory has {entries} entries, too many for its index; divide it")]
    DirectoryTooLarge {
        /// The directory.
        path: String,
        /// Number of entries.
        entries: usize,
    },
}

/// Writes all metadata of an image whose data has been written to the blocks that `area` gave out,
/// and sets the file's size.
///
/// # Errors
///
/// Whatever ext4 cannot hold, by path; and failing writes.
pub fn finish(
    out: &File,
    area: &DataArea,
    tree: &Tree,
    options: &Options,
) -> Result<Report, WriteError> {
    writer::write(out, area, tree, options)
}

/// The time that a file with time `time` has in an image: moved into the range ext4 can hold.
pub fn stored_time(time: Timestamp) -> Timestamp {
    inode::clamp_time(time)
}
