//! What can go wrong in a store, and what the reader can do about it.

use std::io;
use std::path::{Path, PathBuf};

use crate::Digest;
use crate::index::IndexError;
use crate::name::ParseNameError;
use crate::stop::Stopped;

/// An operation on the store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory holds something that is not a store.
    #[error(
        "{path} is not empty and not a parbake store; name an empty directory with --store",
        path = path.display()
    )]
    NotAStore {
        /// The directory.
        path: PathBuf,
    },
    /// The store was written by a newer program.
    #[error(
        "the store {path} has format version {version} and this program knows up to {known}; use the newer parbake",
        path = path.display()
    )]
    NewerFormat {
        /// The store's root.
        path: PathBuf,
        /// What its format file says.
        version: u32,
        /// The newest version known here.
        known: u32,
    },
    /// The store needs a feature this program does not have.
    #[error(
        "the store {path} uses the feature {feature:?}, which this program does not know; use the newer parbake",
        path = path.display()
    )]
    UnknownFeature {
        /// The store's root.
        path: PathBuf,
        /// The feature's name.
        feature: String,
    },
    /// The store cannot be written to.
    #[error(
        "the store {path} cannot be written to ({source}); mend its permissions or name another with --store",
        path = path.display()
    )]
    ReadOnly {
        /// What could not be written.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// This handle was opened for reading only.
    #[error("the store {path} was opened for reading only", path = path.display())]
    OpenedReadOnly {
        /// The store's root.
        path: PathBuf,
    },
    /// The disk, or the user's quota on it, is full.
    #[error(
        "no space left for the store: {path} needs {needed} bytes and {available} are free; run `parbake prune` or free space",
        path = path.display()
    )]
    Full {
        /// The file that did not fit.
        path: PathBuf,
        /// How many bytes the operation needs (a lower bound).
        needed: u64,
        /// How many bytes the file system has left.
        available: u64,
    },
    /// The system refused something.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried, e.g. `read`.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A name that no template has.
    #[error("no template named {name}; `parbake ls` shows what there is")]
    UnknownName {
        /// As asked for.
        name: String,
    },
    /// A short digest that several templates share.
    #[error("{prefix} could be {count} templates; give more digits")]
    Ambiguous {
        /// As asked for.
        prefix: String,
        /// How many it fits.
        count: usize,
    },
    /// An object that the store does not hold.
    #[error("the store has no object {digest}; pull or build the template again")]
    Missing {
        /// The object.
        digest: Digest,
    },
    /// An object that something else refers to is not there.
    #[error(
        "{parent} needs {digest}, which the store does not hold; pull or build the template again"
    )]
    MissingPart {
        /// What refers to it.
        parent: Digest,
        /// The object.
        digest: Digest,
    },
    /// An object's bytes are not what its digest says.
    #[error("{digest} is damaged ({what}); run `parbake verify --repair` and pull it again")]
    Damaged {
        /// The object.
        digest: Digest,
        /// How it differs.
        what: String,
    },
    /// An object is not the document it was read as.
    #[error("{digest} is not a {kind}: {source}")]
    Document {
        /// The object.
        digest: Digest,
        /// The Rust name of the type asked for.
        kind: &'static str,
        /// What the decoder says.
        source: serde_json::Error,
    },
    /// A document of a newer schema.
    #[error(
        "{digest} has schema version {version} and this program knows up to {known}; use the newer parbake"
    )]
    NewerDocument {
        /// The object.
        digest: Digest,
        /// What it says.
        version: u32,
        /// The newest version known here.
        known: u32,
    },
    /// A document too large to be one.
    #[error("a document of {size} bytes is over the limit of {limit}")]
    DocumentTooLarge {
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// A chunk index that cannot be used.
    #[error("the chunk index {digest} is not usable: {source}")]
    Index {
        /// The index.
        digest: Digest,
        /// Why.
        source: IndexError,
    },
    /// A file handed over that is not in this store's staging area.
    #[error("{path} is not inside a staging directory of this store", path = path.display())]
    NotStaged {
        /// The file.
        path: PathBuf,
    },
    /// The user wanted to stop.
    #[error("interrupted")]
    Interrupted,
    /// A malformed name.
    #[error(transparent)]
    Name(#[from] ParseNameError),
    /// Another process holds the store for longer than is reasonable.
    #[error(
        "another process has held the lock of the store {path} for {seconds} s; is a `parbake prune` stuck?",
        path = path.display()
    )]
    Busy {
        /// The store's root.
        path: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A reference file that cannot be read as one.
    #[error("the reference {path} is damaged ({what}); remove it and tag again", path = path.display())]
    BadReference {
        /// The file.
        path: PathBuf,
        /// Why.
        what: String,
    },
}

impl StoreError {
    /// Turns the system's answer into an error that names the file; full disks and read-only
    /// file systems become their own variants.
    pub(crate) fn io(
        action: &'static str,
        path: &Path,
        needed: u64,
    ) -> impl FnOnce(io::Error) -> StoreError {
        let path = path.to_owned();
        move |source| match source.kind() {
            _ if source.get_ref().is_some_and(|inner| inner.is::<Stopped>()) => {
                StoreError::Interrupted
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let available = free_bytes(&path).unwrap_or(0);
                StoreError::Full { path, needed, available }
            }
            io::ErrorKind::ReadOnlyFilesystem => StoreError::ReadOnly { path, source },
            _ => StoreError::Io { action, path, source },
        }
    }
}

/// Bytes an ordinary user may still write on the file system of `path` (or of its nearest
/// existing parent).
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let existing = path.ancestors().find(|p| p.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}
