//! The directory with a sandbox's sockets and logs, owned by one process.
//!
//! ```text
//! /run/parbake/sandboxes/  or below $XDG_RUNTIME_DIR/parbake, or /tmp/parbake-UID
//!   <id>/lock              held (flock) by owner and monitor for as long as one of them lives
//!   <id>/vsock             the sandbox's socket
//!   <id>/control           where a monitor that outlives its owner can be taken over
//!   <id>/filling            while its images fill up: where it asks for them
//!   <id>/console.log       the guest's serial console
//!   <id>/monitor.log       what the monitor wrote to stderr
//! ```
//! The owner removes its directory when it lets go. One whose owner was killed has a free lock
//! and is removed by whoever next makes one. Sandboxes that outlive their owner have directories
//! elsewhere, where nobody sweeps but the owner.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// A sandbox's own directory; removed on drop.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Absent where only the monitor still holds it.
    lock: Option<File>,
    stays: bool,
}

impl RunDir {
    /// Makes the directory for sandbox `id` below [`base`].
    ///
    /// # Errors
    /// What the file system says; `AlreadyExists` where the id is taken.
    pub fn create(id: &str) -> io::Result<Self> {
        Self::create_in(&base(), id)
    }

    /// Makes the directory for sandbox `id` below `base`.
    ///
    /// # Errors
    /// What the file system says; `AlreadyExists` where the id is taken.
    pub fn create_in(base: &Path, id: &str) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(base)?;
        let path = base.join(id);
        DirBuilder::new().mode(0o700).create(&path)?;
        let lock = File::create(path.join("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { path, lock: Some(lock), stays: false })
    }

    /// Takes over a directory whose monitor lives.
    #[must_use]
    pub fn adopt(path: &Path) -> Self {
        Self { path: path.to_owned(), lock: None, stays: false }
    }

    /// A second descriptor of the lock, for the monitor to hold.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn shared_lock(&self) -> io::Result<Option<OwnedFd>> {
        self.lock.as_ref().map(|lock| lock.try_clone().map(OwnedFd::from)).transpose()
    }

    /// Leaves the directory to whoever comes next.
    pub fn leave(&mut self) {
        self.stays = true;
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the sandbox's vsock listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.path.join("vsock")
    }

    /// Where the monitor waits for a new owner.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.path.join("control")
    }

    /// Where a machine asks for what is missing of its images.
    #[must_use]
    pub fn filling(&self) -> PathBuf {
        self.path.join("filling")
    }

    /// Where the guest's console goes.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.path.join("console.log")
    }

    /// Where the monitor's stderr goes.
    #[must_use]
    pub fn monitor_log(&self) -> PathBuf {
        self.path.join("monitor.log")
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if !self.stays {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// The directory that holds all sandboxes' directories of this user.
#[must_use]
pub fn base() -> PathBuf {
    let uid = rustix::process::geteuid();
    let ours = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if uid.is_root() => PathBuf::from("/run/parbake"),
        Some(dir) if !dir.is_empty() => PathBuf::from(dir).join("parbake"),
        _ => PathBuf::from(format!("/tmp/parbake-{}", uid.as_raw())),
    };
    ours.join("sandboxes")
}

/// Removes the directories whose owner is gone. Returns how many.
pub fn sweep() -> usize {
    sweep_in(&base())
}

/// Whether the directory's owner and monitor are both gone, or it never had any.
#[must_use]
pub fn is_abandoned(path: &Path) -> bool {
    File::open(path.join("lock"))
        .is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok())
}

fn sweep_in(base: &Path) -> usize {
    let Ok(entries) = fs::read_dir(base) else { return 0 };
    let mut removed = 0;
    for entry in entries.flatten() {
        let path = entry.path();
        // A directory without a lock file is one being made or removed this very moment.
        let Ok(lock) = File::open(path.join("lock")) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
            && fs::remove_dir_all(&path).is_ok()
        {
            removed += 1;
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abandoned_directory_is_swept_and_a_living_one_is_not() {
        let base = tempfile::tempdir().unwrap();
        let living = RunDir::create_in(base.path(), "living").unwrap();
        let dead = RunDir::create_in(base.path(), "dead").unwrap();
        let dead_path = dead.path().to_owned();
        // As after a kill: the lock is released, the directory stays.
        let RunDir { lock, .. } = &dead;
        flock(lock.as_ref().unwrap(), FlockOperation::Unlock).unwrap();
        assert_eq!(sweep_in(base.path()), 1);
        assert!(!dead_path.exists());
        assert!(living.path().join("lock").exists());
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }
}
