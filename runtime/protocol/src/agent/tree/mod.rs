//! A directory tree as frames: everything a file system knows about it, in one pass, without names
//! that lead anywhere.
//!
//! ```text
//!  TREE(Entry "" directory)                      the root
//!    TREE(Entry "bin" directory)
//!      TREE(Entry "sh" file, 120000) DATA* (TREE(Hole) DATA*)*
//!      TREE(Entry "ash" link)                    to a file sent before
//!    TREE(Leave)
//!    TREE(Entry "old" device 0:0)                overlayfs' whiteout
//!  TREE(Leave)
//! ```
//! A tree can be a single file: its entry and its content. An entry has the name of one directory
//! level only; where it lies follows from what was entered and not left. So whoever sends it, there
//! is no path in it to climb out with: [`unpack()`] makes each entry anew in a directory it has made
//! itself, never follows a link, and refuses what is there already.

mod pack;
mod unpack;

use serde::{Deserialize, Serialize};

use super::Bytes;

pub use pack::{Attributes, pack};
pub use unpack::{Limits, TreeError, Unpacked, unpack};

/// The mark of a directory that hides what is below it in lower layers of an overlay.
pub const OPAQUE: &[u8] = b"trusted.overlay.opaque";

/// One step through a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TreeItem {
    /// Something in the directory that was entered last; a directory is entered by it.
    Entry(Box<TreeEntry>),
    /// So many bytes of the current file are zero and take no space.
    Hole(u64),
    /// The directory that was entered last is complete.
    Leave,
}

/// A file of any kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeEntry {
    /// Its name in its directory; empty for the root.
    pub name: Bytes,
    /// What it is.
    pub kind: TreeKind,
    /// Links to it may follow that name this number.
    pub number: Option<u64>,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time: seconds since 1970, and nanoseconds that count forward.
    pub mtime: (i64, u32),
    /// Extended attributes by full name.
    pub xattrs: Vec<(Bytes, Bytes)>,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TreeKind {
    /// A directory.
    Directory,
    /// A regular file; its content follows.
    File {
        /// Its size in bytes.
        size: u64,
    },
    /// Another name of a file that was sent with this number. The rest of the entry says nothing.
    Link {
        /// The file's number.
        number: u64,
    },
    /// A symbolic link and its target.
    Symlink(Bytes),
    /// A character device; 0:0 is a whiteout.
    CharDevice {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A block device.
    BlockDevice {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A named pipe.
    Fifo,
}

/// Whether an attribute belongs to the file and not to the file system it lies on.
fn is_portable(name: &[u8]) -> bool {
    name.starts_with(b"user.")
        || name == b"security.capability"
        || name.starts_with(b"system.posix_acl_")
}

/// The path by which calls that take no descriptor reach `name` in an open directory.
fn by_descriptor(
    directory: std::os::fd::BorrowedFd<'_>,
    name: &std::ffi::OsStr,
) -> std::path::PathBuf {
    use std::os::fd::AsRawFd as _;
    let mut path = std::path::PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    path.push(name);
    path
}
