//! The 256 bytes of an inode.

use super::checksum::Checksum;
use super::extent::BLOCK_FIELD;
use super::geometry::INODE_SIZE;
use super::xattr::INODE_ROOM;
use crate::tree::{Device, Kind, Timestamp};

/// The inode's blocks are an extent tree.
pub const EXTENTS: u32 = 0x8_0000;
/// The directory has a hashed index.
pub const INDEX: u32 = 0x1000;

/// Bytes of fixed fields behind the first 128.
const EXTRA: u16 = 32;
/// Earliest time, 1901-12-13.
const FIRST_SECOND: i64 = i32::MIN as i64;
/// Latest time, 2446-05-10: 34 bits of seconds, counted from the earliest.
const LAST_SECOND: i64 = FIRST_SECOND + (1 << 34) - 1;

/// An inode to be encoded.
#[derive(Debug, Clone)]
pub struct Inode {
    /// Type and permissions.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Names that lead here.
    pub links: u16,
    /// Blocks of 4 KiB, those of trees and attributes included.
    pub blocks: u64,
    /// [`EXTENTS`], [`INDEX`].
    pub flags: u32,
    /// All four times.
    pub time: Timestamp,
    /// Extent tree, fast symlink target or device number.
    pub block: [u8; BLOCK_FIELD],
    /// Block of further attributes, 0 for none.
    pub xattr_block: u64,
    /// Attributes within.
    pub xattrs: [u8; INODE_ROOM],
}

impl Inode {
    /// An inode without content or meaning.
    pub fn empty() -> Self {
        Self {
            mode: 0,
            uid: 0,
            gid: 0,
            size: 0,
            links: 0,
            blocks: 0,
            flags: 0,
            time: Timestamp::default(),
            block: [0; BLOCK_FIELD],
            xattr_block: 0,
            xattrs: [0; INODE_ROOM],
        }
    }

    /// Encodes the inode with its checksum. `seed` is the file system's.
    pub fn encode(&self, number: u32, seed: Checksum, out: &mut [u8; INODE_SIZE]) {
        let (seconds, extra) = encode_time(self.time);
        let sectors = self.blocks * 8;
        out.fill(0);
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x00, &self.mode.to_le_bytes());
        put(0x02, &(self.uid as u16).to_le_bytes());
        put(0x04, &(self.size as u32).to_le_bytes());
        put(0x08, &seconds);
        put(0x0c, &seconds);
        put(0x10, &seconds);
        put(0x18, &(self.gid as u16).to_le_bytes());
        put(0x1a, &self.links.to_le_bytes());
        put(0x1c, &(sectors as u32).to_le_bytes());
        put(0x20, &self.flags.to_le_bytes());
        put(0x28, &self.block);
        put(0x68, &(self.xattr_block as u32).to_le_bytes());
        put(0x6c, &((self.size >> 32) as u32).to_le_bytes());
        put(0x74, &((sectors >> 32) as u16).to_le_bytes());
        put(0x76, &((self.xattr_block >> 32) as u16).to_le_bytes());
        put(0x78, &((self.uid >> 16) as u16).to_le_bytes());
        put(0x7a, &((self.gid >> 16) as u16).to_le_bytes());
        put(0x80, &EXTRA.to_le_bytes());
        put(0x84, &extra);
        put(0x88, &extra);
        put(0x8c, &extra);
        put(0x90, &seconds);
        put(0x94, &extra);
        put(INODE_SIZE - INODE_ROOM, &self.xattrs);
        let (low, high) = seed.of_inode(number).with(out).halves();
        out[0x7c..0x7e].copy_from_slice(&low.to_le_bytes());
        out[0x82..0x84].copy_from_slice(&high.to_le_bytes());
    }
}

/// Moves a time into ext4's range; what lies outside becomes the nearest whole second in it, as
/// the kernel does.
pub fn clamp_time(time: Timestamp) -> Timestamp {
    let seconds = time.seconds.clamp(FIRST_SECOND, LAST_SECOND);
    let nanos = if seconds == time.seconds { time.nanos.min(999_999_999) } else { 0 };
    Timestamp { seconds, nanos }
}

/// The low 32 bits of the seconds; and two more bits ("epoch") with the nanoseconds above them.
fn encode_time(time: Timestamp) -> ([u8; 4], [u8; 4]) {
    let time = clamp_time(time);
    let low = time.seconds as i32;
    let epoch = ((time.seconds - i64::from(low)) >> 32) as u32 & 3;
    (low.to_le_bytes(), (epoch | time.nanos << 2).to_le_bytes())
}

/// The type bits of a mode.
pub fn type_bits(kind: &Kind) -> u16 {
    match kind {
        Kind::Fifo => 0x1000,
        Kind::CharDevice(_) => 0x2000,
        Kind::Directory(_) => 0x4000,
        Kind::BlockDevice(_) => 0x6000,
        Kind::File(_) => 0x8000,
        Kind::Symlink(_) => 0xa000,
        Kind::Socket => 0xc000,
    }
}

/// The type in a directory entry.
pub fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Directory(_) => super::directory::DIRECTORY,
        Kind::CharDevice(_) => 3,
        Kind::BlockDevice(_) => 4,
        Kind::Fifo => 5,
        Kind::Socket => 6,
        Kind::Symlink(_) => 7,
    }
}

/// The block field of a device: the old 8:8 encoding where it suffices, else 12:20 in the second
/// word. `None` if the numbers are larger than that.
pub fn device_field(device: Device) -> Option<[u8; BLOCK_FIELD]> {
    let Device { major, minor } = device;
    let mut out = [0; BLOCK_FIELD];
    if major < 0x100 && minor < 0x100 {
        out[..4].copy_from_slice(&(major << 8 | minor).to_le_bytes());
    } else if major < 0x1000 && minor < 0x10_0000 {
        let number = (minor & 0xff) | major << 8 | (minor & !0xff) << 12;
        out[4..8].copy_from_slice(&number.to_le_bytes());
    } else {
        return None;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(seconds: [u8; 4], extra: [u8; 4]) -> (i64, u32) {
        let extra = u32::from_le_bytes(extra);
        let low = i64::from(i32::from_le_bytes(seconds));
        (low + (i64::from(extra & 3) << 32), extra >> 2)
    }

    #[test]
    fn times_keep_34_bits_and_nanoseconds() {
        for (given, kept) in [
            ((0, 0), (0, 0)),
            ((-5, 999_999_999), (-5, 999_999_999)),
            ((FIRST_SECOND, 1), (FIRST_SECOND, 1)),
            ((FIRST_SECOND - 1, 7), (FIRST_SECOND, 0)),
            ((0x7fff_ffff, 1), (0x7fff_ffff, 1)),
            ((0x8000_0000, 1), (0x8000_0000, 1)),
            ((2_208_988_800, 3), (2_208_988_800, 3)),
            ((LAST_SECOND, 5), (15_032_385_535, 5)),
            ((i64::MAX, 5), (15_032_385_535, 0)),
            ((i64::MIN, 5), (-2_147_483_648, 0)),
        ] {
            let (seconds, extra) = encode_time(Timestamp { seconds: given.0, nanos: given.1 });
            assert_eq!(decode(seconds, extra), kept, "{given:?}");
        }
    }

    #[test]
    fn devices_use_the_new_encoding_only_where_they_must() {
        let field = |major, minor| device_field(Device { major, minor });
        assert_eq!(field(1, 3).map(|f| f[..8].to_vec()), Some(vec![3, 1, 0, 0, 0, 0, 0, 0]));
        assert_eq!(
            field(259, 0x1_2345).map(|f| f[..8].to_vec()),
            Some(vec![0, 0, 0, 0, 0x45, 0x03, 0x31, 0x12])
        );
        assert!(field(0xfff, 0xf_ffff).is_some());
        assert_eq!(field(0x1000, 0), None);
        assert_eq!(field(0, 0x10_0000), None);
    }
}
