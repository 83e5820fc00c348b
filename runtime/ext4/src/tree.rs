//! One file system tree in memory: what the layers of an image flatten to and what the ext4
//! writer lays out. File contents are not in here; a regular file only knows where its bytes are.

use std::collections::BTreeMap;

use smallvec::SmallVec;

/// Index of a node in its [`Tree`]. Hard links are several directory entries with one id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

impl NodeId {
    /// The root directory.
    pub const ROOT: Self = Self(0);
}

/// A tree of nodes. Node 0 is the root directory. Nodes that no directory entry reaches any more
/// are dead and are skipped by everyone.
#[derive(Debug, Clone)]
pub struct Tree {
    /// All nodes ever made, dead ones included.
    pub nodes: Vec<Node>,
}

/// An inode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Permissions, owner, time, extended attributes.
    pub meta: Metadata,
    /// What it is.
    pub kind: Kind,
}

/// What a [`Node`] is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File(FileData),
    /// A directory; names are bytes, 1 to 255 of them, without `/` and NUL, never `.` or `..`.
    Directory(BTreeMap<Box<[u8]>, NodeId>),
    /// A symbolic link and its target, opaque bytes, at least one.
    Symlink(Box<[u8]>),
    /// A character device.
    CharDevice(Device),
    /// A block device.
    BlockDevice(Device),
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
}

/// A device's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// Everything about a node but its kind and contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// The low 12 bits of `st_mode`: setuid, setgid, sticky and permissions.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Extended attributes by full name (`user.x`, `security.capability`), sorted by name. POSIX
    /// ACLs are in the form of the `system.posix_acl_*` system calls (version 2, 8-byte entries).
    pub xattrs: Xattrs,
}

/// Extended attributes, sorted by name.
pub type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// Seconds and nanoseconds since 1970; seconds may be negative, nanoseconds are 0 to 999,999,999
/// and count forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp {
    /// Seconds.
    pub seconds: i64,
    /// Nanoseconds.
    pub nanos: u32,
}

/// Where a regular file's bytes are in the image being written: runs of 4 KiB blocks. What no run
/// covers reads as zeros. The last block's tail beyond `size` is zero.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileData {
    /// Size in bytes.
    pub size: u64,
    /// Sorted by `logical`, not overlapping, neighbours merged where both ends touch.
    pub runs: Runs,
}

/// The runs of one file. Nearly every file has one, which then takes no memory of its own.
pub type Runs = SmallVec<[Run; 1]>;

/// A run of blocks of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First block within the file.
    pub logical: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// First block within the image.
    pub physical: u64,
}
