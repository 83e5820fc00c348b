//! The superblock, the group descriptors and the journal's superblock.

use super::Options;
use super::checksum::Checksum;
use super::extent::BLOCK_FIELD;
use super::geometry::{
    BLOCK_SIZE, BLOCKS_PER_GROUP, DESCRIPTOR_SIZE, GroupTables, INODE_SIZE, TABLE_BLOCKS,
};

/// Number of the root directory's inode.
pub const ROOT_INODE: u32 = 2;
/// Number of the inode that owns the unused descriptor blocks.
pub const RESIZE_INODE: u32 = 7;
/// Number of the journal's inode.
pub const JOURNAL_INODE: u32 = 8;
/// First inode number that is not reserved.
pub const FIRST_INODE: u32 = 11;

/// Where the superblock is within block 0; in a backup it is at the block's start.
pub const OFFSET: usize = 1024;
/// Bytes of a superblock.
const SIZE: usize = 1024;

const MAGIC: u16 = 0xef53;
const CLEAN: u16 = 1;
const CONTINUE_ON_ERROR: u16 = 1;
const DYNAMIC_REVISION: u32 = 1;
/// Extended attributes and ACLs are on without a mount option.
const DEFAULT_MOUNT_OPTIONS: u32 = 0x4 | 0x8;
/// Half MD4, for new indexed directories.
const DEFAULT_HASH: u8 = 1;
/// Names are hashed as signed bytes on every machine.
const SIGNED_HASH: u32 = 1;
/// Groups of the flexible groups that growth adds, as a power of two.
const LOG_GROUPS_PER_FLEX: u8 = 4;
const CRC32C: u8 = 1;
/// Says that the superblock has a copy of the journal's block field.
const JOURNAL_BLOCKS_COPY: u8 = 1;

mod compatible {
    pub const HAS_JOURNAL: u32 = 0x4;
    pub const EXT_ATTR: u32 = 0x8;
    pub const RESIZE_INODE: u32 = 0x10;
    pub const DIR_INDEX: u32 = 0x20;
}

mod incompatible {
    pub const FILETYPE: u32 = 0x2;
    pub const EXTENTS: u32 = 0x40;
    pub const BIT64: u32 = 0x80;
    pub const FLEX_BG: u32 = 0x200;
}

mod read_only_compatible {
    pub const SPARSE_SUPER: u32 = 0x1;
    pub const LARGE_FILE: u32 = 0x2;
    pub const HUGE_FILE: u32 = 0x8;
    pub const DIR_NLINK: u32 = 0x20;
    pub const EXTRA_ISIZE: u32 = 0x40;
    pub const METADATA_CSUM: u32 = 0x400;
}

/// What the superblock says that differs between images.
#[derive(Debug)]
pub struct Superblock<'o> {
    /// UUID, label, hash seed, time.
    pub options: &'o Options,
    /// Blocks in the image.
    pub blocks: u64,
    /// Free ones among them.
    pub free_blocks: u64,
    /// Inodes in each group.
    pub inodes_per_group: u32,
    /// Inodes in all groups.
    pub inodes: u32,
    /// Free ones among them.
    pub free_inodes: u32,
    /// Descriptor blocks in use; the other of [`TABLE_BLOCKS`] are growth room.
    pub descriptor_blocks: u64,
    /// The journal inode's block field and size, if there is a journal.
    pub journal: Option<([u8; BLOCK_FIELD], u64)>,
}

impl Superblock<'_> {
    /// Encodes the copy for one group.
    pub fn encode(&self, group: u64) -> [u8; SIZE] {
        let options = self.options;
        let mut out = [0; SIZE];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        // 40 bits of unsigned seconds.
        let time = options.timestamp.clamp(0, (1 << 40) - 1);
        let (time, time_high) = ((time as u32).to_le_bytes(), [(time >> 32) as u8]);
        let mut features = compatible::EXT_ATTR | compatible::RESIZE_INODE | compatible::DIR_INDEX;
        if self.journal.is_some() {
            features |= compatible::HAS_JOURNAL;
        }
        let reserved = TABLE_BLOCKS - self.descriptor_blocks;
        put(0x00, &self.inodes.to_le_bytes());
        put(0x04, &(self.blocks as u32).to_le_bytes());
        put(0x0c, &(self.free_blocks as u32).to_le_bytes());
        put(0x10, &self.free_inodes.to_le_bytes());
        put(0x18, &2u32.to_le_bytes()); // block size: 1024 << 2
        put(0x1c, &2u32.to_le_bytes()); // cluster size, the same
        put(0x20, &(BLOCKS_PER_GROUP as u32).to_le_bytes());
        put(0x24, &(BLOCKS_PER_GROUP as u32).to_le_bytes());
        put(0x28, &self.inodes_per_group.to_le_bytes());
        put(0x30, &time); // last write
        put(0x36, &u16::MAX.to_le_bytes()); // no check after so many mounts
        put(0x38, &MAGIC.to_le_bytes());
        put(0x3a, &CLEAN.to_le_bytes());
        put(0x3c, &CONTINUE_ON_ERROR.to_le_bytes());
        put(0x40, &time); // last check
        put(0x4c, &DYNAMIC_REVISION.to_le_bytes());
        put(0x54, &FIRST_INODE.to_le_bytes());
        put(0x58, &(INODE_SIZE as u16).to_le_bytes());
        put(0x5a, &(group as u16).to_le_bytes());
        put(0x5c, &features.to_le_bytes());
        let incompatible = incompatible::FILETYPE
            | incompatible::EXTENTS
            | incompatible::BIT64
            | incompatible::FLEX_BG;
        put(0x60, &incompatible.to_le_bytes());
        let read_only = read_only_compatible::SPARSE_SUPER
            | read_only_compatible::LARGE_FILE
            | read_only_compatible::HUGE_FILE
            | read_only_compatible::DIR_NLINK
            | read_only_compatible::EXTRA_ISIZE
            | read_only_compatible::METADATA_CSUM;
        put(0x64, &read_only.to_le_bytes());
        put(0x68, &options.uuid);
        put(0x78, options.label.as_bytes());
        put(0xce, &(reserved as u16).to_le_bytes());
        put(0xec, &options.hash_seed);
        put(0xfc, &[DEFAULT_HASH]);
        put(0xfe, &(DESCRIPTOR_SIZE as u16).to_le_bytes());
        put(0x100, &DEFAULT_MOUNT_OPTIONS.to_le_bytes());
        put(0x108, &time); // made
        if let Some((field, size)) = &self.journal {
            put(0xe0, &JOURNAL_INODE.to_le_bytes());
            put(0xfd, &[JOURNAL_BLOCKS_COPY]);
            put(0x10c, field);
            put(0x148, &((size >> 32) as u32).to_le_bytes());
            put(0x14c, &(*size as u32).to_le_bytes());
        }
        put(0x150, &((self.blocks >> 32) as u32).to_le_bytes());
        put(0x158, &((self.free_blocks >> 32) as u32).to_le_bytes());
        put(0x15c, &32u16.to_le_bytes()); // extra inode bytes, least
        put(0x15e, &32u16.to_le_bytes()); // and wanted
        put(0x160, &SIGNED_HASH.to_le_bytes());
        put(0x174, &[LOG_GROUPS_PER_FLEX]);
        put(0x175, &[CRC32C]);
        put(0x274, &time_high); // last write
        put(0x276, &time_high); // made
        put(0x277, &time_high); // last check
        let sum = Checksum::START.with(&out[..SIZE - 4]).value();
        out[SIZE - 4..].copy_from_slice(&sum.to_le_bytes());
        out
    }
}

/// A group's descriptor.
#[derive(Debug)]
pub struct Descriptor {
    /// Where its bitmaps and inodes are.
    pub tables: GroupTables,
    /// Free blocks.
    pub free_blocks: u32,
    /// Free inodes.
    pub free_inodes: u32,
    /// Inodes at the end of the table that were never used.
    pub untouched_inodes: u32,
    /// Directories among the used ones.
    pub directories: u32,
    /// Checksum of the block bitmap.
    pub block_bitmap: Checksum,
    /// Checksum of the inode bitmap; `None` where no inode was ever used and no bitmap written.
    pub inode_bitmap: Option<Checksum>,
}

impl Descriptor {
    /// Encodes the descriptor of a group.
    pub fn encode(&self, group: u32, seed: Checksum) -> [u8; DESCRIPTOR_SIZE] {
        const INODES_UNUSED: u16 = 1;
        const TABLE_IS_ZERO: u16 = 4;
        let mut out = [0; DESCRIPTOR_SIZE];
        // Every number has its low half in the first 32 bytes and its high half in the others.
        let mut word = |low: usize, high: usize, value: u64| {
            out[low..low + 4].copy_from_slice(&(value as u32).to_le_bytes());
            out[high..high + 4].copy_from_slice(&((value >> 32) as u32).to_le_bytes());
        };
        word(0x00, 0x20, self.tables.block_bitmap);
        word(0x04, 0x24, self.tables.inode_bitmap);
        word(0x08, 0x28, self.tables.inode_table);
        let mut half = |low: usize, high: usize, value: u32| {
            out[low..low + 2].copy_from_slice(&(value as u16).to_le_bytes());
            out[high..high + 2].copy_from_slice(&((value >> 16) as u16).to_le_bytes());
        };
        half(0x0c, 0x2c, self.free_blocks);
        half(0x0e, 0x2e, self.free_inodes);
        half(0x10, 0x30, self.directories);
        half(0x18, 0x38, self.block_bitmap.value());
        half(0x1a, 0x3a, self.inode_bitmap.map_or(0, Checksum::value));
        half(0x1c, 0x32, self.untouched_inodes);
        let flags = match self.inode_bitmap {
            Some(_) => TABLE_IS_ZERO,
            None => TABLE_IS_ZERO | INODES_UNUSED,
        };
        out[0x12..0x14].copy_from_slice(&flags.to_le_bytes());
        let (sum, _) = seed.with(&group.to_le_bytes()).with(&out).halves();
        out[0x1e..0x20].copy_from_slice(&sum.to_le_bytes());
        out
    }
}

/// The first block of an empty journal (JBD2, version 2, big-endian).
pub fn journal_superblock(blocks: u32, uuid: &[u8; 16]) -> [u8; BLOCK_SIZE] {
    let mut out = [0; BLOCK_SIZE];
    let mut put = |at: usize, value: u32| out[at..at + 4].copy_from_slice(&value.to_be_bytes());
    put(0x00, 0xc03b_3998); // magic
    put(0x04, 4); // a version 2 superblock
    put(0x0c, BLOCK_SIZE as u32);
    put(0x10, blocks);
    put(0x14, 1); // first block of the log
    put(0x18, 1); // first sequence number expected
    put(0x40, 1); // users
    out[0x30..0x40].copy_from_slice(uuid);
    out
}
