//! Workspaces: volumes that outlive the sandboxes that use them, one at a time.
//!
//! A workspace is an ext4 file system in a sparse file. A sandbox's monitor holds a lock on the
//! file for as long as it lives; the guest mounts it after the fix-up and takes it off before the
//! sandbox ends. One whose sandbox was killed has a journal, which the next guest replays.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use parbake_ext4::tree::{Kind, Metadata, Node, Timestamp, Tree, Xattrs};
use parbake_ext4::{DataArea, Options, WriteError};

/// Where workspaces with names are, below the store.
pub const DIRECTORY: &str = "workspaces";
/// Where a workspace is mounted unless somebody wants it elsewhere.
pub const PATH: &str = "/workspace";
/// How large a new workspace is unless somebody wants another size, in bytes.
pub const SIZE: u64 = 1 << 30;
/// The smallest size that makes sense, in bytes.
pub const SIZE_MIN: u64 = 16 << 20;

/// A workspace for a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workspace {
    /// The file with its file system.
    pub file: PathBuf,
    /// Where the guest mounts it: an absolute path.
    pub path: String,
}

/// Why there is no workspace.
#[derive(Debug, thiserror::Error)]
pub enum WorkspaceError {
    /// Not a size.
    #[error("a workspace of {0} bytes is too small; {SIZE_MIN} are the least")]
    TooSmall(u64),
    /// Not a name.
    #[error(
        "{0:?} is no name of a workspace: up to 64 letters, digits, '-', '_' and '.' are, not beginning with '.'"
    )]
    Name(String),
    /// Not a place.
    #[error("{0:?} is no place for a workspace: an absolute path other than / is")]
    Path(String),
    /// Something else is there.
    #[error("{} is no workspace: it holds no ext4 file system", .0.display())]
    NotOne(PathBuf),
    /// The file cannot be made.
    #[error("the workspace {} cannot be made", file.display())]
    Create {
        /// Its file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its file system cannot be written.
    #[error("the workspace {} cannot be made", file.display())]
    Format {
        /// Its file.
        file: PathBuf,
        /// Why.
        source: WriteError,
    },
}

/// The file of the workspace `name` in `directory`.
///
/// # Errors
/// [`WorkspaceError::Name`].
pub fn named(directory: &Path, name: &str) -> Result<PathBuf, WorkspaceError> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(fine) {
        return Err(WorkspaceError::Name(name.to_owned()));
    }
    Ok(directory.join(format!("{name}.ext4")))
}

/// Checks where a workspace is to be mounted.
///
/// # Errors
/// [`WorkspaceError::Path`].
pub fn check_path(path: &str) -> Result<(), WorkspaceError> {
    let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
    let named = parts.peek().is_some() && parts.all(|part| part != ".." && part != ".");
    if path.starts_with('/') && named && !path.contains('\0') && path.len() < 4096 {
        return Ok(());
    }
    Err(WorkspaceError::Path(path.to_owned()))
}

/// Makes an empty workspace of about `bytes` at `file`, unless there is one; whether it was made.
/// It appears complete, or not at all.
///
/// # Errors
/// See [`WorkspaceError`]; nothing is left.
pub fn ensure(file: &Path, bytes: u64) -> Result<bool, WorkspaceError> {
    let failed = |source| WorkspaceError::Create { file: file.to_owned(), source };
    if file.exists() {
        return if is_ext4(file).map_err(failed)? {
            Ok(false)
        } else {
            Err(WorkspaceError::NotOne(file.to_owned()))
        };
    }
    if bytes < SIZE_MIN {
        return Err(WorkspaceError::TooSmall(bytes));
    }
    let directory = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(directory).map_err(failed)?;
    let new =
        tempfile::Builder::new().prefix(".workspace-").tempfile_in(directory).map_err(failed)?;
    format(new.as_file(), bytes)
        .map_err(|source| WorkspaceError::Format { file: file.to_owned(), source })?;
    new.as_file().sync_all().map_err(failed)?;
    match new.persist_noclobber(file) {
        Ok(_) => Ok(true),
        // Made by somebody else this moment.
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(failed(error.error)),
    }
}

fn format(out: &std::fs::File, bytes: u64) -> Result<(), WriteError> {
    let mut uuid = [0; 16];
    getrandom::fill(&mut uuid).map_err(|error| WriteError::Io(io::Error::other(error)))?;
    // Version 4, variant 1 (RFC 9562), so that it is not all zero either.
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let seconds = i64::try_from(now).unwrap_or(0);
    let mtime = Timestamp { seconds, nanos: 0 };
    // Whoever the sandbox's commands run as may use it.
    let meta = Metadata { mode: 0o1777, uid: 0, gid: 0, mtime, xattrs: Xattrs::new() };
    let root = Node { meta, kind: Kind::Directory(std::collections::BTreeMap::new()) };
    let options = Options {
        free_bytes: bytes,
        timestamp: seconds,
        journal: true,
        label: "workspace".to_owned(),
        ..Options::new(uuid)
    };
    parbake_ext4::finish(out, &DataArea::new(), &Tree { nodes: vec![root] }, &options).map(drop)
}

/// Whether the file begins as an ext4 file system does.
fn is_ext4(file: &Path) -> io::Result<bool> {
    use std::os::unix::fs::FileExt;
    const MAGIC_AT: u64 = 1024 + 56;
    let mut magic = [0; 2];
    let file = std::fs::File::open(file)?;
    match file.read_exact_at(&mut magic, MAGIC_AT) {
        Ok(()) => Ok(magic == [0x53, 0xef]),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_new_workspace_is_sound_has_a_journal_and_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let file = named(directory.path(), "job-7").unwrap();
        assert!(ensure(&file, 64 << 20).unwrap());
        let size = file.metadata().unwrap().len();
        assert!(size >= 64 << 20);
        // There is one: its size is its own.
        assert!(!ensure(&file, 1 << 40).unwrap());
        assert_eq!(file.metadata().unwrap().len(), size);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        let check = Command::new("e2fsck").args(["-fn"]).arg(&file).output();
        let Ok(check) = check else {
            eprintln!("skipped: e2fsck is not installed");
            return;
        };
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
        let shown = Command::new("dumpe2fs").arg("-h").arg(&file).output().unwrap();
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains("has_journal") && shown.contains("workspace"), "{shown}");
    }

    #[test]
    fn what_is_no_workspace_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "something else").unwrap();
        assert!(matches!(ensure(&file, SIZE), Err(WorkspaceError::NotOne(_))));
        assert_eq!(std::fs::read(&file).unwrap(), b"something else");
        let small = directory.path().join("small");
        assert!(matches!(ensure(&small, 4096), Err(WorkspaceError::TooSmall(4096))));
        assert!(!small.exists());
        for name in ["", "a/b", "..", ".hidden", "ä", &"x".repeat(65)] {
            assert!(named(directory.path(), name).is_err(), "{name}");
        }
        for path in ["", "workspace", "/", "//", "/a/../b", "/a/./b", "/a\0"] {
            assert!(check_path(path).is_err(), "{path}");
        }
        check_path("/home/agent/work/").unwrap();
    }
}
