//! Locks that die with their holder: whole-file `flock`, never waited for inside the kernel.
//!
//! A store may lie on a file system shared between two kernels (the lab sees the host's through
//! virtiofs), and servers of such file systems commonly refuse to block in `flock`. So a lock is
//! tried and tried again with growing pauses.

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::StoreError;

/// How long a lock is tried for.
const PATIENCE: Duration = Duration::from_secs(120);

/// How the store's one lock is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By anyone who adds or refers to objects, for the instant that takes.
    Shared,
    /// By who removes objects.
    Exclusive,
}

/// Opens `path` and locks it, or says that it stayed busy.
pub(crate) fn acquire(root: &Path, path: &Path, mode: Mode) -> Result<File, StoreError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(StoreError::io("open", path, 0))?;
    let started = Instant::now();
    let mut pause = Duration::from_micros(200);
    while !try_lock(&file, mode).map_err(StoreError::io("lock", path, 0))? {
        if started.elapsed() > PATIENCE {
            return Err(StoreError::Busy { path: root.to_owned(), seconds: PATIENCE.as_secs() });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    Ok(file)
}

/// Locks `file` if no one else holds it in the way.
pub(crate) fn try_lock(file: &File, mode: Mode) -> std::io::Result<bool> {
    let operation = match mode {
        Mode::Shared => FlockOperation::NonBlockingLockShared,
        Mode::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    loop {
        match rustix::fs::flock(file, operation) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
