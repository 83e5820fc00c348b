//! Extended attributes: what fits goes into the inode, the rest into one block, which inodes with
//! the same rest share.

use std::borrow::Cow;
use std::collections::HashMap;

use super::acl::{self, AclError};
use super::checksum::Checksum;
use super::geometry::BLOCK_SIZE;
use crate::tree::{Kind, Node};

const MAGIC: u32 = 0xea02_0000;
/// Bytes behind the inode's fixed fields.
pub const INODE_ROOM: usize = 96;
/// Bytes for entries and values in the inode: less the magic number and the end mark.
const IN_INODE: usize = INODE_ROOM - 4 - 4;
const HEADER: usize = 32;
/// Bytes for entries and values in a block: less the header and the end mark.
const IN_BLOCK: usize = BLOCK_SIZE - HEADER - 4;
const ENTRY: usize = 16;
/// Most inodes one block is shared by, the kernel's own limit.
const MAX_SHARED: u32 = 1024;

/// Why an attribute cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum XattrError {
    /// The name has no prefix ext4 knows, or nothing behind it, or too much.
    #[error(
        "ext4 cannot store an attribute of this name (known are user., trusted., security. and POSIX ACLs)"
    )]
    Name,
    /// A default ACL on something that is not a directory.
    #[error("only a directory can have a default ACL")]
    DefaultAcl,
    /// A symlink with an ACL.
    #[error("a symbolic link cannot have an ACL")]
    SymlinkAcl,
    /// A malformed ACL.
    #[error(transparent)]
    Acl(#[from] AclError),
}

/// An attribute in ext4's terms. Ordered as a block's entries are: by prefix, name length, name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attribute<'t> {
    prefix: u8,
    length: usize,
    name: &'t [u8],
    value: Cow<'t, [u8]>,
}

impl Attribute<'_> {
    fn size(&self) -> usize {
        (ENTRY + self.name.len()).next_multiple_of(4) + self.value.len().next_multiple_of(4)
    }

    fn hash(&self) -> u32 {
        let mut hash =
            self.name.iter().fold(0u32, |hash, &byte| hash.rotate_left(5) ^ u32::from(byte));
        for bytes in self.value.chunks(4) {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            hash = hash.rotate_left(16) ^ u32::from_le_bytes(word);
        }
        hash
    }
}

/// A node's attributes, divided.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Attributes<'t> {
    inline: Vec<Attribute<'t>>,
    outside: Vec<Attribute<'t>>,
}

/// Why a node's attributes cannot be stored.
#[derive(Debug)]
pub enum Unstorable<'t> {
    /// One of them.
    Attribute(&'t [u8], XattrError),
    /// All together; the bytes they need.
    TooLarge(usize),
}

impl<'t> Attributes<'t> {
    /// Bytes that an inode and a block hold together.
    pub const ROOM: usize = IN_INODE + IN_BLOCK;

    /// Translates and divides a node's attributes.
    pub fn of(node: &'t Node) -> Result<Self, Unstorable<'t>> {
        let mut all = Vec::with_capacity(node.meta.xattrs.len());
        for (name, value) in &node.meta.xattrs {
            match translate(&node.kind, name, value) {
                Ok(attribute) => all.extend(attribute),
                Err(error) => return Err(Unstorable::Attribute(name, error)),
            }
        }
        all.sort_unstable();
        divide(all)
    }

    /// What goes to a block, in the block's order; empty if none is needed.
    pub fn outside(self) -> Vec<Attribute<'t>> {
        self.outside
    }

    /// Writes the inode's part.
    pub fn write_inline(&self, out: &mut [u8; INODE_ROOM]) {
        if !self.inline.is_empty() {
            out[..4].copy_from_slice(&MAGIC.to_le_bytes());
            write_entries(&mut out[4..], 0, &self.inline);
        }
    }
}

fn translate<'t>(
    kind: &Kind,
    name: &'t [u8],
    value: &'t [u8],
) -> Result<Option<Attribute<'t>>, XattrError> {
    let default = match name {
        b"system.posix_acl_access" => Some(false),
        b"system.posix_acl_default" => Some(true),
        _ => None,
    };
    if let Some(default) = default {
        if matches!(kind, Kind::Symlink(_)) {
            return Err(XattrError::SymlinkAcl);
        }
        if default && !matches!(kind, Kind::Directory(_)) {
            return Err(XattrError::DefaultAcl);
        }
        let list = acl::encode(value, default)?;
        return Ok(list.map(|value| Attribute {
            prefix: if default { 3 } else { 2 },
            length: 0,
            name: b"",
            value: value.into(),
        }));
    }
    let prefixes: [(&[u8], u8); 3] = [(b"user.", 1), (b"trusted.", 4), (b"security.", 6)];
    for (prefix, index) in prefixes {
        if let Some(name) = name.strip_prefix(prefix)
            && (1..=255).contains(&name.len())
            && !name.contains(&0)
        {
            return Ok(Some(Attribute {
                prefix: index,
                length: name.len(),
                name,
                value: value.into(),
            }));
        }
    }
    Err(XattrError::Name)
}

/// Divides attributes between inode and block. What comes first goes into the inode as long as it
/// fits; where the block then overflows, the inode is filled as far as possible instead.
fn divide(all: Vec<Attribute<'_>>) -> Result<Attributes<'_>, Unstorable<'_>> {
    let total: usize = all.iter().map(Attribute::size).sum();
    if total > Attributes::ROOM {
        return Err(Unstorable::TooLarge(total));
    }
    let mut inside = vec![false; all.len()];
    let mut room = IN_INODE;
    for (inside, attribute) in inside.iter_mut().zip(&all) {
        if attribute.size() <= room {
            room -= attribute.size();
            *inside = true;
        }
    }
    if total - (IN_INODE - room) > IN_BLOCK {
        inside = fullest(&all);
    }
    let mut divided = Attributes::default();
    for (inside, attribute) in inside.into_iter().zip(all) {
        if inside {
            divided.inline.push(attribute);
        } else {
            divided.outside.push(attribute);
        }
    }
    let outside: usize = divided.outside.iter().map(Attribute::size).sum();
    if outside > IN_BLOCK {
        return Err(Unstorable::TooLarge(total));
    }
    Ok(divided)
}

/// Chooses the attributes that fill the inode best (a subset sum over units of 4 bytes).
fn fullest(all: &[Attribute<'_>]) -> Vec<bool> {
    const UNITS: usize = IN_INODE / 4 + 1;
    let mut reached: [Option<Vec<usize>>; UNITS] = [const { None }; UNITS];
    reached[0] = Some(Vec::new());
    for (number, attribute) in all.iter().enumerate() {
        let units = attribute.size() / 4;
        for sum in (units..UNITS).rev() {
            if reached[sum].is_none()
                && let Some(chosen) = &reached[sum - units]
            {
                let mut chosen = chosen.clone();
                chosen.push(number);
                reached[sum] = Some(chosen);
            }
        }
    }
    let mut inside = vec![false; all.len()];
    for number in reached.into_iter().flatten().next_back().unwrap_or_default() {
        inside[number] = true;
    }
    inside
}

/// Writes entries upwards from the start of `out` and values downwards from its end. Offsets count
/// from `origin` bytes before `out`.
fn write_entries(out: &mut [u8], origin: usize, attributes: &[Attribute<'_>]) {
    let mut at = 0;
    let mut end = out.len();
    for attribute in attributes {
        let value = &attribute.value;
        let mut offset = 0;
        if !value.is_empty() {
            end -= value.len().next_multiple_of(4);
            offset = origin + end;
            out[end..end + value.len()].copy_from_slice(value);
        }
        out[at] = attribute.name.len() as u8;
        out[at + 1] = attribute.prefix;
        out[at + 2..at + 4].copy_from_slice(&(offset as u16).to_le_bytes());
        out[at + 8..at + 12].copy_from_slice(&(value.len() as u32).to_le_bytes());
        out[at + 12..at + 16].copy_from_slice(&attribute.hash().to_le_bytes());
        out[at + ENTRY..at + ENTRY + attribute.name.len()].copy_from_slice(attribute.name);
        at += (ENTRY + attribute.name.len()).next_multiple_of(4);
    }
}

/// An attribute block and the number of inodes that use it.
#[derive(Debug)]
pub struct SharedBlock<'t> {
    /// Where it is in the image.
    pub physical: u64,
    users: u32,
    attributes: Vec<Attribute<'t>>,
}

impl SharedBlock<'_> {
    /// The block's bytes.
    pub fn encode(&self, seed: Checksum) -> [u8; BLOCK_SIZE] {
        let mut out = [0; BLOCK_SIZE];
        write_entries(&mut out[HEADER..], HEADER, &self.attributes);
        let mut hash = 0u32;
        for attribute in &self.attributes {
            let entry = attribute.hash();
            if entry == 0 {
                // The kernel's way to say "do not share".
                hash = 0;
                break;
            }
            hash = hash.rotate_left(16) ^ entry;
        }
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&self.users.to_le_bytes());
        out[8..12].copy_from_slice(&1u32.to_le_bytes());
        out[12..16].copy_from_slice(&hash.to_le_bytes());
        let sum = seed.with(&self.physical.to_le_bytes()).with(&out);
        out[16..20].copy_from_slice(&sum.value().to_le_bytes());
        out
    }
}

/// All attribute blocks of an image.
#[derive(Debug, Default)]
pub struct SharedBlocks<'t> {
    /// In the order of their first use.
    pub blocks: Vec<SharedBlock<'t>>,
    /// The block last made for some contents. Looked up only, never walked.
    latest: HashMap<Vec<Attribute<'t>>, usize>,
}

impl<'t> SharedBlocks<'t> {
    /// Finds or makes the block for some contents and returns where it is; `place` says where a new
    /// one goes.
    pub fn share(&mut self, attributes: Vec<Attribute<'t>>, place: impl FnOnce() -> u64) -> u64 {
        if let Some(&known) = self.latest.get(&attributes) {
            let block = &mut self.blocks[known];
            if block.users < MAX_SHARED {
                block.users += 1;
                return block.physical;
            }
        }
        let physical = place();
        self.blocks.push(SharedBlock { physical, users: 1, attributes: attributes.clone() });
        self.latest.insert(attributes, self.blocks.len() - 1);
        physical
    }
}
