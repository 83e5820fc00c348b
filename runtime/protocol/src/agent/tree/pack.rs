//! From a directory to frames.

use std::collections::HashSet;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, lgetxattr, llistxattr, major, minor, openat,
    readlinkat, statat,
};

use super::{OPAQUE, TreeEntry, TreeItem, TreeKind, by_descriptor, is_portable};
use crate::agent::{DATA_CHUNK, Frame};

/// The most bytes of attribute names, and of one value, that Linux keeps.
const MAX_XATTR: usize = 64 << 10;

/// Which attributes are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attributes {
    /// Those of the files.
    Portable,
    /// Also overlayfs' mark of opaque directories: the tree is the upper one of an overlay.
    Overlay,
}

/// A directory whose entries are being sent.
struct Level {
    names: std::vec::IntoIter<OsString>,
}

/// Sends what lies at `path`, a directory or a file. Sockets are left out, which mean nothing
/// without their process. Links are not followed.
///
/// # Errors
/// What cannot be read, by path; and `send`'s.
pub fn pack(
    path: &Path,
    attributes: Attributes,
    send: &mut dyn FnMut(Frame) -> io::Result<()>,
) -> io::Result<()> {
    let at =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mut packer = Packer { attributes, send, numbers: HashSet::new() };
    let stat = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| at(e.into()))?;
    if !FileType::from_raw_mode(stat.st_mode).is_dir() {
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let parent = open_directory(CWD, parent.as_os_str()).map_err(at)?;
        let name = path.file_name().ok_or_else(|| at(io::ErrorKind::InvalidInput.into()))?;
        return packer.entry(parent.as_fd(), name, b"", &stat).map(drop).map_err(at);
    }
    packer.tree(path, &stat).map_err(at)
}

struct Packer<'a> {
    attributes: Attributes,
    send: &'a mut dyn FnMut(Frame) -> io::Result<()>,
    /// Files with several names that have been sent.
    numbers: HashSet<u64>,
}

impl Packer<'_> {
    fn tree(&mut self, path: &Path, stat: &Stat) -> io::Result<()> {
        let mut directory = open_directory(CWD, path.as_os_str())?;
        self.item(TreeItem::Entry(Box::new(TreeEntry {
            kind: TreeKind::Directory,
            xattrs: self.xattrs(directory.as_fd(), OsStr::new("."))?,
            ..described(b"", stat)
        })))?;
        let device = stat.st_dev;
        let mut levels = vec![Level { names: names(&directory)? }];
        // The path for messages only.
        let mut below = path.to_owned();
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.next() else {
                levels.pop();
                self.item(TreeItem::Leave)?;
                if !levels.is_empty() {
                    below.pop();
                    // Nothing moves directories meanwhile.
                    directory = open_directory(directory.as_fd(), OsStr::new(".."))?;
                }
                continue;
            };
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", below.join(&name).display()))
            };
            let stat = statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| named(error.into()))?;
            let entered =
                self.entry(directory.as_fd(), &name, name.as_bytes(), &stat).map_err(named)?;
            if !entered {
                continue;
            }
            if stat.st_dev == device {
                directory = open_directory(directory.as_fd(), &name).map_err(named)?;
                levels.push(Level { names: names(&directory).map_err(named)? });
                below.push(&name);
            } else {
                // Another file system begins here; the place where it lies is all there is.
                self.item(TreeItem::Leave)?;
            }
        }
        Ok(())
    }

    /// Sends one entry and a file's content; whether it is a directory.
    fn entry(
        &mut self,
        directory: BorrowedFd<'_>,
        name: &OsStr,
        sent_name: &[u8],
        stat: &Stat,
    ) -> io::Result<bool> {
        let file_type = FileType::from_raw_mode(stat.st_mode);
        let (major, minor) = (major(stat.st_rdev), minor(stat.st_rdev));
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let number = (stat.st_nlink > 1).then_some(stat.st_ino);
        let kind = match file_type {
            FileType::Directory => TreeKind::Directory,
            FileType::Socket | FileType::Unknown => return Ok(false),
            _ if number.is_some_and(|number| self.numbers.contains(&number)) => {
                TreeKind::Link { number: stat.st_ino }
            }
            FileType::RegularFile => TreeKind::File { size },
            FileType::Symlink => {
                let target = readlinkat(directory, name, Vec::new())?;
                TreeKind::Symlink(target.into_bytes())
            }
            FileType::CharacterDevice => TreeKind::CharDevice { major, minor },
            FileType::BlockDevice => TreeKind::BlockDevice { major, minor },
            FileType::Fifo => TreeKind::Fifo,
        };
        let is_link = matches!(kind, TreeKind::Link { .. });
        let xattrs = if is_link { Vec::new() } else { self.xattrs(directory, name)? };
        let number = number.filter(|_| !is_link && file_type != FileType::Directory);
        self.numbers.extend(number);
        self.item(TreeItem::Entry(Box::new(TreeEntry {
            kind,
            number,
            xattrs,
            ..described(sent_name, stat)
        })))?;
        if !is_link && file_type == FileType::RegularFile {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let file = openat(directory, name, flags, Mode::empty())?;
            self.content(file.into(), size)?;
        }
        Ok(file_type == FileType::Directory)
    }

    fn content(&mut self, mut file: File, size: u64) -> io::Result<()> {
        let mut at = 0;
        while at < size {
            let data = stretch(&file, rustix::fs::SeekFrom::Data(at), size)?.max(at);
            if data > at {
                self.item(TreeItem::Hole(data - at))?;
            }
            let end = if data < size {
                stretch(&file, rustix::fs::SeekFrom::Hole(data), size)?
            } else {
                size
            };
            file.seek(SeekFrom::Start(data))?;
            at = data;
            while at < end {
                let want = usize::try_from(end - at).unwrap_or(DATA_CHUNK).min(DATA_CHUNK);
                let mut bytes = vec![0; want];
                file.read_exact(&mut bytes)?;
                (self.send)(Frame::Data(bytes))?;
                at += want as u64;
            }
        }
        Ok(())
    }

    fn xattrs(
        &self,
        directory: BorrowedFd<'_>,
        name: &OsStr,
    ) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let path = by_descriptor(directory, name);
        let mut list = vec![0; MAX_XATTR];
        let length = match llistxattr(&path, &mut list[..]) {
            Ok(length) => length,
            Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let mut found = Vec::new();
        for attribute in list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let wanted = is_portable(attribute)
                || (self.attributes == Attributes::Overlay && attribute == OPAQUE);
            if !wanted {
                continue;
            }
            let mut value = vec![0; MAX_XATTR];
            let key = CString::new(attribute)?;
            let length = lgetxattr(&path, key.as_c_str(), &mut value[..])?;
            value.truncate(length);
            found.push((attribute.to_vec(), value));
        }
        found.sort();
        Ok(found)
    }

    fn item(&mut self, item: TreeItem) -> io::Result<()> {
        (self.send)(Frame::Tree(item))
    }
}

/// The next place of a kind in a file; its end where there is none, or where nobody can tell.
fn stretch(file: &File, from: rustix::fs::SeekFrom, size: u64) -> io::Result<u64> {
    match rustix::fs::seek(file, from) {
        Ok(at) => Ok(at.min(size)),
        Err(rustix::io::Errno::NXIO) => Ok(size),
        Err(rustix::io::Errno::INVAL) => match from {
            rustix::fs::SeekFrom::Data(at) => Ok(at),
            _ => Ok(size),
        },
        Err(error) => Err(error.into()),
    }
}

fn open_directory(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, name, flags, Mode::empty())?)
}

/// The names in a directory, in order, so that the same tree gives the same frames.
fn names(directory: &OwnedFd) -> io::Result<std::vec::IntoIter<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    names.sort_unstable();
    Ok(names.into_iter())
}

fn described(name: &[u8], stat: &Stat) -> TreeEntry {
    TreeEntry {
        name: name.to_vec(),
        kind: TreeKind::Directory,
        number: None,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (stat.st_mtime, u32::try_from(stat.st_mtime_nsec).unwrap_or(0)),
        xattrs: Vec::new(),
    }
}
