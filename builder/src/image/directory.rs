//! A directory as an image of one layer.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{lgetxattr, llistxattr};

use super::error::ImageError;
use super::select::OWN_ALGORITHM;
use super::tree_tar::{Data, Facts, Files, Piece, TreeTar, Type};
use super::{Image, ImageSource};

/// Opens a root filesystem in a directory.
pub(super) fn open(path: &Path, source: &ImageSource) -> Result<Image, ImageError> {
    let read = |error| ImageError::read(path.display().to_string(), error);
    let root = std::fs::canonicalize(path).map_err(read)?;
    if !std::fs::symlink_metadata(&root).map_err(read)?.is_dir() {
        let problem = "not a directory (for a tar file use tar:)".to_owned();
        return Err(ImageError::Archive { path: path.display().to_string(), problem });
    }
    let open = move || {
        let device = std::fs::symlink_metadata(&root)?.dev();
        let directory = Directory { root: root.clone(), device };
        Ok(Box::new(TreeTar::new(directory)) as Box<dyn Read + Send>)
    };
    Ok(Image::of_one_layer(source, Arc::new(open), OWN_ALGORITHM))
}

/// A directory of this machine. Sockets are left out (they are made by whoever listens), and so is
/// what other file systems mounted inside hold.
struct Directory {
    root: PathBuf,
    device: u64,
}

impl Files for Directory {
    type Handle = PathBuf;

    fn root(&self) -> PathBuf {
        self.root.clone()
    }

    fn facts(&mut self, path: &PathBuf) -> io::Result<Option<Facts>> {
        let metadata = std::fs::symlink_metadata(path)?;
        let kind = metadata.file_type();
        let device = || (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
        let kind = match () {
            () if kind.is_socket() => return Ok(None),
            () if kind.is_dir() => Type::Directory { enter: metadata.dev() == self.device },
            () if kind.is_symlink() => {
                Type::Symlink(std::fs::read_link(path)?.into_os_string().into_vec())
            }
            () if kind.is_char_device() => Type::CharDevice(device().0, device().1),
            () if kind.is_block_device() => Type::BlockDevice(device().0, device().1),
            () if kind.is_fifo() => Type::Fifo,
            () => Type::File,
        };
        Ok(Some(Facts {
            kind,
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            mtime: (metadata.mtime(), u32::try_from(metadata.mtime_nsec()).unwrap_or(0)),
            size: metadata.len(),
            several: (metadata.nlink() > 1).then(|| (metadata.dev(), metadata.ino())),
            xattrs: xattrs(path)?,
        }))
    }

    fn children(&mut self, path: &PathBuf) -> io::Result<Vec<(Vec<u8>, PathBuf)>> {
        std::fs::read_dir(path)?
            .map(|entry| entry.map(|entry| (entry.file_name().into_vec(), entry.path())))
            .collect()
    }

    fn data(&mut self, path: &PathBuf, size: u64) -> io::Result<Data> {
        let source = File::open(path)?;
        let pieces = stretches(&source, size)?
            .into_iter()
            .map(|(at, length)| Piece { at, source: at, length })
            .collect();
        Ok(Data { source, pieces })
    }

    fn shown(&self, path: &[u8]) -> String {
        self.root.join(OsStr::from_bytes(path)).display().to_string()
    }
}

/// Where a file has data, by its file system; one stretch of everything where it cannot say.
fn stretches(file: &File, size: u64) -> io::Result<Vec<(u64, u64)>> {
    use rustix::fs::SeekFrom;
    use rustix::io::Errno;
    let mut out = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => return Ok(vec![(0, size)]),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        if start >= end {
            break;
        }
        out.push((start, end - start));
        at = end;
    }
    Ok(out)
}

/// A file's extended attributes, sorted by name.
fn xattrs(path: &Path) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    use rustix::io::Errno;
    let mut list = vec![0; 65_536];
    let length = match llistxattr(path, &mut list) {
        Ok(length) => length,
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut names: Vec<&[u8]> =
        list[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    let mut value = vec![0; 65_536];
    let mut found = Vec::new();
    for name in names {
        let length = match lgetxattr(path, OsStr::from_bytes(name), &mut value) {
            Ok(length) => length,
            // Listed, but not to be read by this user, or gone meanwhile.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => continue,
            Err(error) => return Err(error.into()),
        };
        found.push((name.to_vec(), value[..length].to_vec()));
    }
    Ok(found)
}
