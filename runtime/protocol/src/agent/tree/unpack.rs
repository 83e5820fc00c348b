//! From frames to a directory. The sender is not trusted.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, chmodat,
    chownat, linkat, lsetxattr, makedev, mkdirat, mknodat, openat, symlinkat, utimensat,
};

use super::{OPAQUE, TreeEntry, TreeItem, TreeKind, by_descriptor, is_portable};
use crate::agent::{Bytes, Frame, FrameError};

/// The longest name of a file.
const MAX_NAME: usize = 255;

/// The longest target of a symbolic link.
const MAX_TARGET: usize = 4095;

/// Bounds on what a tree may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Entries, the root included.
    pub entries: u64,
    /// Bytes of all files, holes included.
    pub bytes: u64,
    /// Directories within one another.
    pub depth: usize,
}

impl Default for Limits {
    /// Five million entries, 16 GiB, 1,000 levels.
    fn default() -> Self {
        Self { entries: 5_000_000, bytes: 16 << 30, depth: 1000 }
    }
}

/// What was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unpacked {
    /// Entries, the root included.
    pub entries: u64,
    /// Bytes of all files, holes included.
    pub bytes: u64,
}

/// Why a tree was not made, or not all of it.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The stream.
    #[error(transparent)]
    Stream(#[from] FrameError),
    /// It ended too early.
    #[error("the stream ended in the middle of a tree")]
    Ended,
    /// What came makes no tree.
    #[error("{}: {what}", shown(path))]
    Malformed {
        /// Where, below the root.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// More than is allowed.
    #[error("{}: the tree has more than {limit} {what}", shown(path))]
    TooMuch {
        /// Where, below the root.
        path: PathBuf,
        /// Of what.
        what: &'static str,
        /// How many are allowed.
        limit: u64,
    },
    /// The file system refused.
    #[error("cannot make {}: {source}", shown(path))]
    Io {
        /// Where, below the root.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A name chosen by others, for a message: no control characters, not too long.
fn shown(path: &Path) -> String {
    let text = path.to_string_lossy();
    let clean = text.chars().take(300).map(|c| if c.is_control() { '\u{fffd}' } else { c });
    format!("/{}", clean.collect::<String>())
}

/// Makes a tree of the frames that `next` gives (nothing: the stream has ended). It lies at `dest`,
/// which does not exist yet and whose parent is the caller's own. Owners are set where this
/// process may; attributes where the file system has them.
///
/// # Errors
/// See [`TreeError`]; what had been made by then stays.
pub fn unpack(
    next: &mut dyn FnMut() -> Result<Option<Frame>, FrameError>,
    dest: &Path,
    limits: Limits,
) -> Result<Unpacked, TreeError> {
    let (Some(parent), Some(name)) = (dest.parent(), dest.file_name()) else {
        let what = "the destination has no name";
        return Err(TreeError::Malformed { path: PathBuf::new(), what });
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let io =
        |error: rustix::io::Errno| TreeError::Io { path: PathBuf::new(), source: error.into() };
    let directory = openat(CWD, parent, flags, Mode::empty()).map_err(io)?;
    let mut unpacker = Unpacker {
        next,
        limits,
        done: Unpacked::default(),
        directory,
        top: None,
        levels: Vec::new(),
        path: PathBuf::new(),
        files: HashMap::new(),
        privileged: rustix::process::geteuid().is_root(),
    };
    unpacker.run(name)?;
    Ok(unpacker.done)
}

/// A directory that was entered, to be finished when it is left.
struct Level {
    entry: TreeEntry,
    name: Vec<u8>,
}

struct Unpacker<'a> {
    next: &'a mut dyn FnMut() -> Result<Option<Frame>, FrameError>,
    limits: Limits,
    done: Unpacked,
    /// Where entries are made now.
    directory: OwnedFd,
    /// The root, once it was made.
    top: Option<OwnedFd>,
    levels: Vec<Level>,
    /// The same place as a path below the root.
    path: PathBuf,
    /// Files that links may name, by number: paths below the root, of directories made here.
    files: HashMap<u64, PathBuf>,
    privileged: bool,
}

impl Unpacker<'_> {
    fn run(&mut self, root: &OsStr) -> Result<(), TreeError> {
        let first = self.entry()?;
        if !first.name.is_empty() {
            return Err(self.malformed("the root has a name"));
        }
        match first.kind {
            TreeKind::Directory => {
                self.enter(root, first)?;
                self.top = Some(self.directory.try_clone().map_err(|e| self.failed(e))?);
            }
            TreeKind::File { .. } => return self.make(root, &first),
            _ => return Err(self.malformed("the root is neither a directory nor a file")),
        }
        while !self.levels.is_empty() {
            match self.item()? {
                TreeItem::Leave => self.leave()?,
                TreeItem::Hole(_) => return Err(self.malformed("a hole outside of a file")),
                TreeItem::Entry(entry) => {
                    self.count()?;
                    let name = entry.name.clone();
                    self.check_name(&name)?;
                    let name = OsStr::from_bytes(&name);
                    if entry.kind == TreeKind::Directory {
                        self.enter(name, *entry)?;
                    } else {
                        self.path.push(name);
                        self.make(name, &entry)?;
                        self.path.pop();
                    }
                }
            }
        }
        Ok(())
    }

    fn frame(&mut self) -> Result<Frame, TreeError> {
        (self.next)()?.ok_or(TreeError::Ended)
    }

    fn item(&mut self) -> Result<TreeItem, TreeError> {
        match self.frame()? {
            Frame::Tree(item) => Ok(item),
            _ => Err(self.malformed("something else where the tree goes on")),
        }
    }

    fn entry(&mut self) -> Result<TreeEntry, TreeError> {
        match self.item()? {
            TreeItem::Entry(entry) => {
                self.count()?;
                Ok(*entry)
            }
            _ => Err(self.malformed("no root")),
        }
    }

    fn count(&mut self) -> Result<(), TreeError> {
        self.done.entries += 1;
        if self.done.entries > self.limits.entries {
            return Err(self.too_much("entries", self.limits.entries));
        }
        Ok(())
    }

    fn check_name(&self, name: &[u8]) -> Result<(), TreeError> {
        let good = !matches!(name, b"" | b"." | b"..")
            && name.len() <= MAX_NAME
            && !name.iter().any(|byte| matches!(byte, 0 | b'/'));
        if good { Ok(()) } else { Err(self.malformed("an entry whose name is none")) }
    }

    /// Makes a directory and goes into it.
    fn enter(&mut self, name: &OsStr, entry: TreeEntry) -> Result<(), TreeError> {
        if self.levels.len() >= self.limits.depth {
            let limit = u64::try_from(self.limits.depth).unwrap_or(u64::MAX);
            return Err(self.too_much("directories within one another", limit));
        }
        if !self.levels.is_empty() {
            self.path.push(name);
        }
        let made = || -> io::Result<OwnedFd> {
            // Not yet with the permissions it shall have: they might forbid what comes.
            mkdirat(&self.directory, name, Mode::RWXU)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Ok(openat(&self.directory, name, flags, Mode::empty())?)
        };
        self.directory = made().map_err(|error| self.failed(error))?;
        self.levels.push(Level { entry, name: name.as_bytes().to_vec() });
        Ok(())
    }

    /// Finishes a directory and goes back to the one above.
    fn leave(&mut self) -> Result<(), TreeError> {
        let Some(Level { entry, name }) = self.levels.pop() else {
            return Err(self.malformed("a directory is left that was not entered"));
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Nobody moves directories meanwhile: the parent's own directory is this one's.
        let above = openat(&self.directory, "..", flags, Mode::empty())
            .map_err(|error| self.failed(error.into()))?;
        self.describe(above.as_fd(), OsStr::from_bytes(&name), &entry)?;
        self.directory = above;
        if !self.levels.is_empty() {
            self.path.pop();
        }
        Ok(())
    }

    /// Makes anything but a directory.
    fn make(&mut self, name: &OsStr, entry: &TreeEntry) -> Result<(), TreeError> {
        let node = |kind, (major, minor)| -> io::Result<()> {
            let mode = Mode::RUSR | Mode::WUSR;
            Ok(mknodat(&self.directory, name, kind, mode, makedev(major, minor))?)
        };
        match &entry.kind {
            TreeKind::Directory => return Err(self.malformed("a directory out of place")),
            TreeKind::File { size } => self.file(name, *size)?,
            TreeKind::Link { number } => return self.link(name, *number),
            TreeKind::Symlink(target) => {
                let good = (1..=MAX_TARGET).contains(&target.len()) && !target.contains(&0);
                if !good {
                    return Err(self.malformed("a symbolic link to what is no path"));
                }
                symlinkat(OsStr::from_bytes(target), &self.directory, name)
                    .map_err(|error| self.failed(error.into()))?;
            }
            TreeKind::CharDevice { major, minor } => {
                let made = node(FileType::CharacterDevice, (*major, *minor));
                made.map_err(|error| self.failed(error))?;
            }
            TreeKind::BlockDevice { major, minor } => {
                let made = node(FileType::BlockDevice, (*major, *minor));
                made.map_err(|error| self.failed(error))?;
            }
            TreeKind::Fifo => {
                node(FileType::Fifo, (0, 0)).map_err(|error| self.failed(error))?;
            }
        }
        if let Some(number) = entry.number {
            self.files.insert(number, self.path.clone());
        }
        self.describe(self.directory.as_fd(), name, entry)
    }

    fn link(&mut self, name: &OsStr, number: u64) -> Result<(), TreeError> {
        let (Some(top), Some(first)) = (&self.top, self.files.get(&number)) else {
            return Err(self.malformed("a link to a file that did not come before"));
        };
        // Each part of the path is a directory made here, and nothing replaces one.
        linkat(top, first, &self.directory, name, AtFlags::empty())
            .map_err(|error| self.failed(error.into()))
    }

    fn file(&mut self, name: &OsStr, size: u64) -> Result<(), TreeError> {
        let left = self.limits.bytes.saturating_sub(self.done.bytes);
        if size > left {
            return Err(self.too_much("bytes of content", self.limits.bytes));
        }
        self.done.bytes += size;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR);
        let file: File = file.map_err(|error| self.failed(error.into()))?.into();
        let mut at = 0u64;
        while at < size {
            let (length, data): (u64, Option<Bytes>) = match self.frame()? {
                Frame::Data(data) => (data.len() as u64, Some(data)),
                Frame::Tree(TreeItem::Hole(length)) => (length, None),
                _ => return Err(self.malformed("something else where its content goes on")),
            };
            if length == 0 || length > size - at {
                return Err(self.malformed("its content is not as long as was said"));
            }
            if let Some(data) = data {
                file.write_all_at(&data, at).map_err(|error| self.failed(error))?;
            }
            at += length;
        }
        file.set_len(size).map_err(|error| self.failed(error))
    }

    /// Owner, attributes, permissions, time; in this order, as owners clear bits and attributes.
    fn describe(
        &self,
        directory: BorrowedFd<'_>,
        name: &OsStr,
        entry: &TreeEntry,
    ) -> Result<(), TreeError> {
        let failed = |error: rustix::io::Errno| self.failed(error.into());
        // The highest number means "unchanged" to the kernel, and is nobody's.
        if entry.uid == u32::MAX || entry.gid == u32::MAX {
            return Err(self.malformed("an owner that is none"));
        }
        if entry.mtime.1 >= 1_000_000_000 || entry.mode > 0o7777 {
            return Err(self.malformed("a time or permissions that are none"));
        }
        let owner = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        match chownat(directory, name, Some(owner.0), Some(owner.1), AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::PERM) if !self.privileged => {}
            result => result.map_err(failed)?,
        }
        if !matches!(entry.kind, TreeKind::Symlink(_)) {
            // Made here a moment ago, and not a link.
            chmodat(directory, name, Mode::from_raw_mode(entry.mode), AtFlags::empty())
                .map_err(failed)?;
        }
        let path = by_descriptor(directory, name);
        for (key, value) in &entry.xattrs {
            let opaque = key == OPAQUE && value == b"y" && entry.kind == TreeKind::Directory;
            if !(is_portable(key) || opaque) {
                return Err(self.malformed("an attribute that is not the file's own"));
            }
            let key = CString::new(key.as_slice())
                .map_err(|_| self.malformed("an attribute whose name is none"))?;
            match lsetxattr(&path, key.as_c_str(), value, XattrFlags::empty()) {
                // Nobody can keep what the file system does not know.
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(rustix::io::Errno::PERM) if !self.privileged => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let (tv_sec, nanos) = entry.mtime;
        let time = Timespec { tv_sec, tv_nsec: nanos.into() };
        let times = Timestamps { last_access: time, last_modification: time };
        utimensat(directory, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }

    fn malformed(&self, what: &'static str) -> TreeError {
        TreeError::Malformed { path: self.path.clone(), what }
    }

    fn too_much(&self, what: &'static str, limit: u64) -> TreeError {
        TreeError::TooMuch { path: self.path.clone(), what, limit }
    }

    fn failed(&self, source: io::Error) -> TreeError {
        TreeError::Io { path: self.path.clone(), source }
    }
}
