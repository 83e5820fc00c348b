//! Writes that are either wholly there after a crash or not at all.
//!
//! The order is always: write, sync the file, rename it to its final name, sync the directory.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use crate::error::StoreError;

/// The mode of everything content-addressed: it never changes again.
const IMMUTABLE: u32 = 0o444;

/// Makes a directory's entries survive a crash.
pub(crate) fn sync_directory(path: &Path) -> Result<(), StoreError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(StoreError::io("sync", path, 0))
}

/// Creates `path` if it is missing, and makes its entry in the parent survive a crash.
pub(crate) fn create_directory(path: &Path) -> Result<(), StoreError> {
    match fs::create_dir(path) {
        Ok(()) => sync_directory(path.parent().unwrap_or(Path::new("."))),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(StoreError::io("create", path, 4096)(error)),
    }
}

/// Writes `bytes` to the new file `path` and syncs it; nothing is left when that fails.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let written = (|| {
        let mut file = File::create_new(path)?;
        std::io::Write::write_all(&mut file, bytes)?;
        file.sync_all()
    })();
    written.map_err(|error| {
        let _ = fs::remove_file(path);
        StoreError::io("write", path, bytes.len() as u64)(error)
    })
}

/// Makes the file read-only and syncs its content, ready to be moved to its final place.
pub(crate) fn seal(path: &Path, file: &File, size: u64) -> Result<(), StoreError> {
    file.set_permissions(fs::Permissions::from_mode(IMMUTABLE))
        .and_then(|()| file.sync_all())
        .map_err(StoreError::io("sync", path, size))
}

/// Moves a synced file to its final place and makes that survive a crash.
pub(crate) fn publish(from: &Path, to: &Path) -> Result<(), StoreError> {
    let parent = to.parent().unwrap_or(Path::new("."));
    create_directory(parent)?;
    fs::rename(from, to).map_err(StoreError::io("move into place", to, 0))?;
    sync_directory(parent)
}
