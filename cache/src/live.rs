//! Proofs of life: leases, staging areas, and the journals of writing handles.
//!
//! Each is a file in `live/` that its process keeps locked. The kernel lets the lock go when the
//! process dies, however it dies, and the next sweep removes what was left.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::time::Duration;

use crate::Digest;
use crate::error::StoreError;
use crate::lock::{self, Mode};
use crate::store::Store;

/// How old a file made under another boot must be before it counts as dead.
const FOREIGN_AGE: Duration = Duration::from_secs(24 * 3600);
/// More than a handle can sensibly journal.
const MAX_LIVE_BYTES: u64 = 256 * 1024 * 1024;

/// A locked file in `live/`, and perhaps the staging directory of the same name.
#[derive(Debug)]
pub(crate) struct Live {
    root: PathBuf,
    id: String,
    file: File,
}

/// Keeps objects, and all they need, from being collected while it (or a process that inherited
/// its descriptor) lives.
#[derive(Debug)]
pub struct Lease {
    live: Live,
}

/// A private directory inside the store, on the same file system as the objects. Removed when
/// dropped; swept by a later run if the process dies first.
#[derive(Debug)]
pub struct Staging {
    live: Live,
    directory: PathBuf,
}

impl Store {
    /// Makes a directory for work in progress.
    ///
    /// # Errors
    /// When the store cannot be written to.
    pub fn stage(&self) -> Result<Staging, StoreError> {
        if let Some(lock) = self.try_lock_exclusive()? {
            sweep(self.root())?;
            drop(lock);
        }
        let lock = self.lock(Mode::Shared)?;
        let live = Live::create(self.root())?;
        live.make_directory()?;
        drop(lock);
        Ok(Staging { directory: live.directory(), live })
    }

    /// Keeps `roots` and everything they need for as long as the lease lives.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::MissingPart`] when something of it is not there.
    pub fn lease(&self, roots: &[Digest]) -> Result<Lease, StoreError> {
        let lock = self.lock(Mode::Shared)?;
        for root in roots {
            self.check_complete(root)?;
        }
        let mut live = Live::create(self.root())?;
        live.append(roots)?;
        for root in roots {
            note_use(self.root(), root);
        }
        drop(lock);
        Ok(Lease { live })
    }
}

impl Lease {
    /// The leased roots' record, mostly for messages.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.live.id
    }
}

impl AsFd for Lease {
    /// The locked descriptor: a child that inherits it holds the lease, too.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.live.file.as_fd()
    }
}

impl Staging {
    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// `name` in the directory.
    #[must_use]
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.join(name)
    }

    /// The staging area's name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.live.id
    }
}

impl Live {
    /// Creates and locks a file. The caller holds the store's lock shared, so that no sweep can
    /// see the file before it is locked.
    fn create(root: &Path) -> Result<Self, StoreError> {
        let id = random_id();
        let path = root.join("live").join(&id);
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create_new(true)
            .open(&path)
            .map_err(StoreError::io("create", &path, 4096))?;
        lock::try_lock(&file, Mode::Exclusive)
            .and_then(|_| file.write_all(format!("boot {}\n", boot_id()).as_bytes()))
            .map_err(|error| {
                let _ = fs::remove_file(&path);
                StoreError::io("write", &path, 4096)(error)
            })?;
        Ok(Self { root: root.to_owned(), id, file })
    }

    /// The same with a staging directory, taking the lock itself.
    pub(crate) fn create_with_directory(root: &Path) -> Result<Self, StoreError> {
        // Also called while the lock is held shared, which does not exclude itself.
        let lock = lock::acquire(root, &root.join("lock"), Mode::Shared)?;
        let live = Self::create(root)?;
        live.make_directory()?;
        drop(lock);
        Ok(live)
    }

    fn make_directory(&self) -> Result<(), StoreError> {
        let directory = self.directory();
        fs::create_dir(&directory).map_err(StoreError::io("create", &directory, 4096))
    }

    pub(crate) fn directory(&self) -> PathBuf {
        self.root.join("stage").join(&self.id)
    }

    pub(crate) fn append(&mut self, digests: &[Digest]) -> Result<(), StoreError> {
        let lines: String = digests.iter().map(|digest| format!("{digest}\n")).collect();
        let path = self.root.join("live").join(&self.id);
        self.file.write_all(lines.as_bytes()).map_err(StoreError::io(
            "write",
            &path,
            lines.len() as u64,
        ))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // A sweep does the same later if this fails.
        let _ = fs::remove_dir_all(self.directory());
        let _ = fs::remove_file(self.root.join("live").join(&self.id));
    }
}

/// Removes what dead processes left, and returns what the living hold. The caller holds the
/// store's lock exclusively.
pub(crate) fn sweep(root: &Path) -> Result<Vec<Digest>, StoreError> {
    let mut held = Vec::new();
    let mut alive = std::collections::HashSet::new();
    let directory = root.join("live");
    for entry in fs::read_dir(&directory).map_err(StoreError::io("read", &directory, 0))? {
        let entry = entry.map_err(StoreError::io("read", &directory, 0))?;
        let path = entry.path();
        // A holder may remove its own file at any time.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        let (boot, digests) = read(&file, &path)?;
        let unheld =
            lock::try_lock(&file, Mode::Exclusive).map_err(StoreError::io("lock", &path, 0))?;
        let foreign = boot.is_some_and(|boot| boot != boot_id());
        let young = entry
            .metadata()
            .and_then(|m| m.modified())
            .is_ok_and(|time| time.elapsed().is_ok_and(|age| age < FOREIGN_AGE));
        if unheld && !(foreign && young) {
            let _ = fs::remove_dir_all(root.join("stage").join(entry.file_name()));
            let _ = fs::remove_file(&path);
        } else {
            held.extend(digests);
            alive.insert(entry.file_name());
        }
    }
    let directory = root.join("stage");
    for entry in fs::read_dir(&directory).map_err(StoreError::io("read", &directory, 0))? {
        let entry = entry.map_err(StoreError::io("read", &directory, 0))?;
        if !alive.contains(&entry.file_name()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(held)
}

/// What anyone holds, dead or alive, without removing anything.
pub(crate) fn held(root: &Path) -> Result<Vec<Digest>, StoreError> {
    let directory = root.join("live");
    let mut held = Vec::new();
    for entry in fs::read_dir(&directory).map_err(StoreError::io("read", &directory, 0))? {
        let path = entry.map_err(StoreError::io("read", &directory, 0))?.path();
        if let Ok(file) = File::open(&path) {
            held.extend(read(&file, &path)?.1);
        }
    }
    Ok(held)
}

fn read(file: &File, path: &Path) -> Result<(Option<String>, Vec<Digest>), StoreError> {
    use std::io::Read as _;
    let mut text = Vec::new();
    file.take(MAX_LIVE_BYTES).read_to_end(&mut text).map_err(StoreError::io("read", path, 0))?;
    let text = String::from_utf8_lossy(&text);
    let mut lines = text.lines();
    let boot = lines.next().and_then(|line| line.strip_prefix("boot ")).map(str::to_owned);
    // The last line of a process that died while writing it means nothing any more.
    Ok((boot, lines.filter_map(|line| Digest::from_str(line).ok()).collect()))
}

/// When an object was last leased, if ever.
pub(crate) fn last_use(root: &Path, digest: &Digest) -> Option<std::time::SystemTime> {
    fs::metadata(root.join("refs/used").join(digest.hex())).and_then(|m| m.modified()).ok()
}

/// Writes down that an object is used now. A hint for a quota: nothing depends on it.
fn note_use(root: &Path, digest: &Digest) {
    let path = root.join("refs/used").join(digest.hex());
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let _ = file.and_then(|file| file.set_modified(std::time::SystemTime::now()));
}

/// 128 random bits in hexadecimal.
pub(crate) fn random_id() -> String {
    let mut bytes = [0; 16];
    if getrandom::fill(&mut bytes).is_err() {
        // No entropy at all: the clock and the process tell writers apart well enough, and
        // files are created exclusively.
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        bytes = (now ^ (u128::from(std::process::id()) << 96)).to_le_bytes();
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Which boot of which kernel this is.
fn boot_id() -> &'static str {
    static BOOT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    BOOT.get_or_init(|| {
        fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
    })
}
