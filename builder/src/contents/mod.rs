//! Looking into a finished root filesystem: what is in it, and what differs between two.
//!
//! Read with `ext4-view`, a reader that has nothing in common with our writer. It shows names,
//! types, modes, owners, times, sizes, link targets and contents; not extended attributes, device
//! numbers, or which names are one file: each name counts for itself.

pub mod difference;
pub mod sizes;

use std::path::{Path, PathBuf};

use ext4_view::{DirEntry, Ext4, Ext4Error, FileType, Metadata};

/// A directory with more entries than this is not read.
const MAX_ENTRIES: usize = 16 << 20;

/// A root filesystem that can be looked into.
pub struct RootFs {
    filesystem: Ext4,
    image: PathBuf,
}

/// Why a root filesystem cannot be looked into.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path} in {}: {source}", image.display())]
pub struct ContentsError {
    image: PathBuf,
    path: String,
    source: Ext4Error,
}

/// Something that has a name in a directory.
struct Entry {
    name: Vec<u8>,
    metadata: Metadata,
}

impl RootFs {
    /// Opens an image file.
    ///
    /// # Errors
    /// When it is not a usable ext4 image.
    pub fn open(image: &Path) -> Result<Self, ContentsError> {
        let failed =
            |source| ContentsError { image: image.to_owned(), path: "/".to_owned(), source };
        let filesystem = Ext4::load_from_path(image).map_err(failed)?;
        Ok(Self { filesystem, image: image.to_owned() })
    }

    fn error(&self, path: &[u8]) -> impl FnOnce(Ext4Error) -> ContentsError {
        let (image, path) = (self.image.clone(), String::from_utf8_lossy(path).into_owned());
        move |source| ContentsError { image, path, source }
    }

    /// A directory's entries in the order of their names' bytes.
    fn list(&self, directory: &[u8]) -> Result<Vec<Entry>, ContentsError> {
        let path = located(directory);
        let entries = self.filesystem.read_dir(path.as_slice()).map_err(self.error(&path))?;
        let mut found = Vec::new();
        for entry in entries.take(MAX_ENTRIES) {
            let entry: DirEntry = entry.map_err(self.error(&path))?;
            let name = entry.file_name().as_ref().to_vec();
            if name == b"." || name == b".." {
                continue;
            }
            let metadata = entry.metadata().map_err(self.error(&path))?;
            found.push(Entry { name, metadata });
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// A small file's bytes, links followed; nothing when there is none. What is over the limit is
    /// left out.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn read(&self, path: &[u8], limit: u64) -> Result<Option<Vec<u8>>, ContentsError> {
        let located = located(path);
        let metadata = match self.filesystem.metadata(located.as_slice()) {
            Ok(metadata) => metadata,
            Err(error) if is_absent(&error) => return Ok(None),
            Err(error) => return Err(self.error(path)(error)),
        };
        if !metadata.file_type().is_regular_file() || metadata.len() > limit {
            return Ok(None);
        }
        self.filesystem.read(located.as_slice()).map(Some).map_err(self.error(path))
    }

    /// The names in a directory, in the order of their bytes; none when there is no such directory.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn names(&self, directory: &[u8]) -> Result<Vec<Vec<u8>>, ContentsError> {
        match self.filesystem.metadata(located(directory).as_slice()) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Ok(Vec::new()),
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            Err(error) => return Err(self.error(directory)(error)),
        }
        Ok(self.list(directory)?.into_iter().map(|entry| entry.name).collect())
    }

    /// The paths of a directory's directories, links left out.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn directories(&self, directory: &[u8]) -> Result<Vec<Vec<u8>>, ContentsError> {
        let entries = self.list(directory)?.into_iter();
        let directories = entries.filter(|entry| entry.metadata.file_type() == FileType::Directory);
        Ok(directories.map(|entry| join(directory, &entry.name)).collect())
    }

    fn link_target(&self, path: &[u8]) -> Result<Vec<u8>, ContentsError> {
        let path = located(path);
        let target = self.filesystem.read_link(path.as_slice()).map_err(self.error(&path))?;
        Ok(target.as_ref().to_vec())
    }

    fn open_file(&self, path: &[u8]) -> Result<ext4_view::File, ContentsError> {
        let path = located(path);
        self.filesystem.open(path.as_slice()).map_err(self.error(&path))
    }
}

/// Whether a path leads nowhere: also through a link to nowhere, or in a circle.
fn is_absent(error: &Ext4Error) -> bool {
    matches!(error, Ext4Error::NotFound | Ext4Error::NotADirectory | Ext4Error::TooManySymlinks)
}

/// Our paths have no leading slash, the reader's must.
fn located(path: &[u8]) -> Vec<u8> {
    [b"/", path].concat()
}

/// `directory/name`.
fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}

/// A type's name.
fn kind(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Regular => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::BlockDevice => "block device",
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
    }
}
