//! The store on disk.
//!
//! One directory holds everything a build, a bake, a pull and a sandbox share. There is no daemon
//! and no database: plain files, `rename`, `fsync` and whole-file `flock`, so that any number of
//! processes, on this kernel or on another that sees the same directory (the lab), may use it.
//!
//! # Directory tree
//! ```text
//! ROOT/
//!   format.json                   what wrote this store, and the feature sets; written last at creation
//!   lock                          the store's one lock
//!   objects/ab/<62 hex>           a blob or a document, named by the SHA-256 of its bytes; mode 0444
//!   indexes/ab/<62 hex>           the chunk index of an image, likewise
//!   images/ab/<62 hex>            the image itself, named by its *index's* digest: sparse, mode 0444
//!   refs/tags/<hex>               {"key": "debian:12", "digest": "sha256:…"}; named by the SHA-256 of the key
//!   refs/kernels/<hex>            the same, for kernel bundles
//!   refs/remotes/<hex>            what was last pushed to or pulled from a registry's tag; keeps nothing
//!   refs/snapshots/<hex>/<hex>    a template's snapshots: directory named by the template
//!   refs/used/<hex>               empty; its time is when the object was last leased
//!   refs/working-sets/<hex>       the working set of the snapshot it is named by
//!   live/<id>                     one per lease, staging area and writing handle; flocked while it lives
//!   partial/<hex>                 an image being pulled, named by its digest; flocked while someone is at it
//!   stage/<id>/                   the private directory of the live/<id> of the same name
//! ```
//!
//! # Objects
//! An object is immutable and named by its content. A **blob** is any bytes; a **document** is a
//! JSON object of at most 4 MiB, stored as a blob; an **image** is a large sparse file known by its
//! chunk index ([`crate::index`]). Objects lie in the form they are used in: an image is opened or
//! mapped where it lies, by every sandbox at once, and nothing is hashed when one is created. An
//! image's file is there only if its index is.
//!
//! A document refers to its parts by [`ObjectRef`] values (`{"digest": …, "size": …}`): those must
//! be present. Any other `sha256:…` string in it is a mention: kept if present.
//!
//! # Roots
//! Kept is what can be reached from: a tag; a kernel reference; a snapshot reference of a template
//! that is itself kept; a live lease; and whatever a live handle has stored or was told it already
//! had (so a build's parts need no reference until the build is done). A handle's own objects are
//! let go when its last clone is dropped: a process that lives for long opens a store per task.
//!
//! # Locking
//! Adding and referring take `lock` shared for the instant of journalling, checking and renaming
//! (hashing and writing are done before). Removing takes it exclusively, from marking to the last
//! unlink. So an object found present cannot vanish before it is referred to. Locks are tried, not
//! waited for in the kernel.
//!
//! A `partial/` file outlives its process, so that a pull that was cut short goes on where it
//! stopped; a collection removes it. What is in it is believed only after hashing.
//!
//! A `live/` file that nobody holds belongs to a dead process, and is swept with its staging
//! directory. Where the other kernel's locks cannot be seen (a server that keeps `flock` local),
//! a file made under another boot counts as dead only when it is a day old.
//!
//! # Crashes
//! Every file is written in a staging directory, synced, renamed to its final name, and the
//! directory synced; a reference is written after all that it needs. Killed at any instant, the
//! store is whole: what was half done lies in a staging directory, or is an object nothing refers
//! to. Removal takes references first, documents before their parts. A full disk is a typed error
//! and leaves nothing.
//!
//! # Evolution
//! `format.json` has a version and three feature sets: `compat` (ignore), `readOnlyCompat`
//! (reading is safe, writing refused) and `incompat` (refused), each by name.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::durable;
use crate::error::StoreError;
use crate::live::Live;
use crate::lock::{self, Mode};
use crate::stop::Stop;
#[allow(unused_imports, reason = "named in the module's documentation")]
use crate::template::ObjectRef;

/// The version of the directory tree.
pub const FORMAT_VERSION: u32 = 1;

const FORMAT_NAME: &str = "parbake store";
const FORMAT_FILE: &str = "format.json";
/// Far more than a format file needs.
const MAX_FORMAT_BYTES: u64 = 64 * 1024;
const DIRECTORIES: [&str; 13] = [
    "objects",
    "indexes",
    "images",
    "refs",
    "refs/tags",
    "refs/kernels",
    "refs/remotes",
    "refs/snapshots",
    "refs/used",
    "refs/working-sets",
    "live",
    "partial",
    "stage",
];

/// A handle on a store. Clones are the same handle; what it stored is kept while one lives.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<Inner>,
    pub(crate) stop: Stop,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    writable: bool,
    session: Mutex<Option<Session>>,
}

/// What this handle has stored, journalled where a collector of any process sees it.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) live: Live,
    journalled: HashSet<Digest>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Format {
    format: String,
    version: u32,
    #[serde(default)]
    compat: Vec<String>,
    #[serde(default)]
    read_only_compat: Vec<String>,
    #[serde(default)]
    incompat: Vec<String>,
}

impl Store {
    /// Opens the store at `root` for reading and writing, creating it when there is none.
    ///
    /// # Errors
    /// When `root` cannot be created or written to, holds something else, or was written by a
    /// newer program.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        let root = absolute(root)?;
        fs::create_dir_all(&root).map_err(not_writable(&root))?;
        if !root.join(FORMAT_FILE).exists() {
            create(&root)?;
        }
        let format = read_format(&root)?;
        if let Some(feature) = format.read_only_compat.first() {
            return Err(StoreError::UnknownFeature { path: root, feature: feature.clone() });
        }
        rustix::fs::access(&root, rustix::fs::Access::WRITE_OK)
            .map_err(|errno| not_writable(&root)(errno.into()))?;
        for directory in DIRECTORIES {
            durable::create_directory(&root.join(directory)).map_err(|error| match error {
                StoreError::Io { source, .. } => not_writable(&root)(source),
                other => other,
            })?;
        }
        Ok(Self::handle(root, true))
    }

    /// Opens an existing store for looking only: nothing is stored, tagged, leased or removed.
    ///
    /// # Errors
    /// When there is no store at `root`, or one of a newer program.
    pub fn open_read_only(root: &Path) -> Result<Self, StoreError> {
        let root = absolute(root)?;
        read_format(&root)?;
        Ok(Self::handle(root, false))
    }

    /// Where the store is when nobody says: `/var/lib/parbake` for root, and
    /// `$XDG_DATA_HOME/parbake` (`~/.local/share/parbake`) for everyone else.
    #[must_use]
    pub fn default_root() -> PathBuf {
        if rustix::process::geteuid().is_root() {
            return PathBuf::from("/var/lib/parbake");
        }
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        absolute("XDG_DATA_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".local/share")))
            .unwrap_or_else(|| PathBuf::from("/var/tmp"))
            .join("parbake")
    }

    /// The directory this store is in.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.inner.root
    }

    /// Bytes that can still be written, as the file system says.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        crate::error::free_bytes(self.root()).unwrap_or(u64::MAX)
    }

    /// Fails now rather than half-way when `needed` more bytes cannot fit.
    ///
    /// # Errors
    /// [`StoreError::Full`].
    pub fn ensure_free(&self, needed: u64) -> Result<(), StoreError> {
        let available = self.free_bytes();
        if needed > available {
            return Err(StoreError::Full { path: self.root().to_owned(), needed, available });
        }
        Ok(())
    }

    fn handle(root: PathBuf, writable: bool) -> Self {
        let inner = Inner { root, writable, session: Mutex::new(None) };
        Self { inner: Arc::new(inner), stop: Stop::default() }
    }

    /// The same handle, whose long work (hashing, packing, installing) asks between one piece and the
    /// next whether to stop, and then ends with [`StoreError::Interrupted`], leaving nothing but what
    /// the next try takes up.
    #[must_use]
    pub fn until(self, cancelled: fn() -> bool) -> Self {
        Self { stop: Stop::when(Some(cancelled)), ..self }
    }

    /// Takes the store's lock; it is let go when the file is dropped.
    pub(crate) fn lock(&self, mode: Mode) -> Result<fs::File, StoreError> {
        self.writable()?;
        lock::acquire(self.root(), &self.root().join("lock"), mode)
    }

    /// Takes the store's lock exclusively if nobody is in the way.
    pub(crate) fn try_lock_exclusive(&self) -> Result<Option<fs::File>, StoreError> {
        self.writable()?;
        let path = self.root().join("lock");
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(StoreError::io("open", &path, 0))?;
        let locked = lock::try_lock(&file, Mode::Exclusive);
        Ok(locked.map_err(StoreError::io("lock", &path, 0))?.then_some(file))
    }

    fn writable(&self) -> Result<(), StoreError> {
        if self.inner.writable {
            return Ok(());
        }
        Err(StoreError::OpenedReadOnly { path: self.root().to_owned() })
    }

    /// A fresh path in this handle's own staging directory.
    pub(crate) fn scratch(&self) -> Result<PathBuf, StoreError> {
        self.with_session(|session| Ok(session.live.directory().join(crate::live::random_id())))
    }

    /// Writes down that this handle holds `digest`. The caller holds the lock shared.
    pub(crate) fn journal(&self, digest: &Digest) -> Result<(), StoreError> {
        self.with_session(|session| {
            if session.journalled.insert(*digest) {
                session.live.append(std::slice::from_ref(digest))?;
            }
            Ok(())
        })
    }

    fn with_session<T>(
        &self,
        act: impl FnOnce(&mut Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.writable()?;
        let mut slot = self.inner.session.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let session = match &mut *slot {
            Some(session) => session,
            empty => {
                let live = Live::create_with_directory(self.root())?;
                empty.insert(Session { live, journalled: HashSet::new() })
            }
        };
        act(session)
    }
}

fn absolute(root: &Path) -> Result<PathBuf, StoreError> {
    std::path::absolute(root).map_err(StoreError::io("find", root, 0))
}

fn not_writable(root: &Path) -> impl FnOnce(std::io::Error) -> StoreError {
    let path = root.to_owned();
    move |source| match source.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            StoreError::ReadOnly { path, source }
        }
        _ => StoreError::io("create", &path, 4096)(source),
    }
}

/// Makes `root` a store. Two processes may do so at once.
fn create(root: &Path) -> Result<(), StoreError> {
    let entries = fs::read_dir(root).map_err(StoreError::io("read", root, 0))?;
    for entry in entries {
        let name = entry.map_err(StoreError::io("read", root, 0))?.file_name();
        // A creation that was cut short, or is under way, has at most such files.
        let name = name.to_string_lossy();
        let ours = name.starts_with(".format-") || name == FORMAT_FILE || name == "lost+found";
        if !ours {
            // Someone else may have finished meanwhile.
            if root.join(FORMAT_FILE).exists() {
                return Ok(());
            }
            return Err(StoreError::NotAStore { path: root.to_owned() });
        }
    }
    let format = Format {
        format: FORMAT_NAME.to_owned(),
        version: FORMAT_VERSION,
        compat: Vec::new(),
        read_only_compat: Vec::new(),
        incompat: Vec::new(),
    };
    let mut bytes = serde_json::to_vec_pretty(&format).expect("plain structures always encode");
    bytes.push(b'\n');
    let temporary = root.join(format!(".format-{}", crate::live::random_id()));
    durable::write_file(&temporary, &bytes).map_err(|error| match error {
        StoreError::Io { source, .. } => not_writable(root)(source),
        other => other,
    })?;
    // The content is the same whoever wins.
    durable::publish(&temporary, &root.join(FORMAT_FILE))
}

fn read_format(root: &Path) -> Result<Format, StoreError> {
    let path = root.join(FORMAT_FILE);
    let read = |path: &Path| -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = fs::File::open(path)?;
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_FORMAT_BYTES), &mut bytes)?;
        Ok(bytes)
    };
    let bytes = read(&path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => StoreError::NotAStore { path: root.to_owned() },
        _ => StoreError::io("read", &path, 0)(source),
    })?;
    let not_a_store = |_| StoreError::NotAStore { path: root.to_owned() };
    let format: Format = serde_json::from_slice(&bytes).map_err(not_a_store)?;
    if format.format != FORMAT_NAME {
        return Err(StoreError::NotAStore { path: root.to_owned() });
    }
    if format.version > FORMAT_VERSION {
        return Err(StoreError::NewerFormat {
            path: root.to_owned(),
            version: format.version,
            known: FORMAT_VERSION,
        });
    }
    if let Some(feature) = format.incompat.first() {
        return Err(StoreError::UnknownFeature { path: root.to_owned(), feature: feature.clone() });
    }
    Ok(format)
}
