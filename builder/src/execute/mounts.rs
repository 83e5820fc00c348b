//! What a `RUN` step sees besides its own files, prepared on this machine before it starts.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use super::overlay::set_time;
use super::rootpath::resolve;

/// Mount points that are made for a step and are not part of its result.
#[derive(Debug)]
pub(crate) struct Stubs {
    /// Deepest first.
    missing: Vec<PathBuf>,
    /// Directories that get an entry, and their times.
    parents: Vec<(PathBuf, i64, i64)>,
}

impl Stubs {
    /// Notes what of `targets` is not there yet.
    pub fn note<'a>(root: &Path, targets: impl IntoIterator<Item = &'a str>) -> io::Result<Self> {
        let mut stubs = Self { missing: Vec::new(), parents: Vec::new() };
        for target in targets {
            let path = resolve(root, Path::new(target))?;
            let mut current = path.as_path();
            while current != root && fs::symlink_metadata(current).is_err() {
                if !stubs.missing.iter().any(|known| known == current) {
                    stubs.missing.push(current.to_owned());
                }
                match current.parent() {
                    Some(parent) => current = parent,
                    None => break,
                }
            }
            if current != path {
                let meta = fs::symlink_metadata(current)?;
                if !stubs.parents.iter().any(|(known, ..)| known == current) {
                    stubs.parents.push((current.to_owned(), meta.mtime(), meta.mtime_nsec()));
                }
            }
        }
        stubs.missing.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        Ok(stubs)
    }

    /// Removes what is still empty.
    pub fn remove(self) -> io::Result<()> {
        for path in self.missing {
            let Ok(meta) = fs::symlink_metadata(&path) else { continue };
            if meta.is_dir() {
                // Not empty: the step put something there, and keeps it.
                let _ = fs::remove_dir(&path);
            } else if meta.is_file() && meta.len() == 0 {
                fs::remove_file(&path)?;
            }
        }
        for (path, seconds, nanos) in self.parents {
            if path.is_dir() {
                set_time(&path, seconds, nanos)?;
            }
        }
        Ok(())
    }
}

/// Writes a file that only its owner may read, unless `mode` says more.
pub(crate) fn secret_file(
    path: &Path,
    value: &[u8],
    mode: u32,
    uid: u32,
    gid: u32,
) -> io::Result<()> {
    fs::write(path, value)?;
    super::rootpath::chown(path, uid, gid)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
