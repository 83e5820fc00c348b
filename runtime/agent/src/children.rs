//! Who waits for which child.
//!
//! As PID 1 the agent inherits every orphan and must reap it, but must not snatch the exit status
//! of a child that a session waits for. So whoever starts a child does it under this registry's
//! lock and notes the pid; the reaper looks at exited children without reaping them and leaves the
//! noted ones alone.

use std::collections::BTreeSet;
use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::kernel;

/// The children somebody waits for.
#[derive(Debug, Default)]
pub struct Children {
    awaited: Mutex<BTreeSet<i32>>,
    changed: Condvar,
}

impl Children {
    /// Starts a child with `start` so that the reaper leaves it to the caller, who reaps it and
    /// then calls [`Children::reaped`].
    ///
    /// # Errors
    /// Those of `start`.
    pub fn start<T, E>(
        &self,
        start: impl FnOnce() -> Result<T, E>,
        pid: impl FnOnce(&T) -> i32,
    ) -> Result<T, E> {
        let mut awaited = self.lock();
        let child = start();
        if let Ok(child) = &child {
            awaited.insert(pid(child));
        }
        // Even a failed start may have left a child for the reaper.
        self.changed.notify_all();
        child
    }

    /// The caller has reaped this child, or leaves it to the reaper.
    pub fn reaped(&self, pid: i32) {
        self.lock().remove(&pid);
        self.changed.notify_all();
    }

    /// Runs a command of the agent's own to its end.
    ///
    /// # Errors
    /// It could not be started.
    pub fn run(&self, command: &mut Command) -> io::Result<ExitStatus> {
        let id = |c: &Child| i32::try_from(c.id()).unwrap_or(0);
        let mut child = self.start(|| command.spawn(), id)?;
        let status = child.wait();
        self.reaped(id(&child));
        status
    }

    /// Reaps orphans for ever. Only for PID 1.
    pub fn reap_orphans(&self) -> ! {
        loop {
            match kernel::peek_exited_child() {
                Ok(pid) => {
                    let awaited = self.lock();
                    if awaited.contains(&pid) {
                        // Its session is about to reap it; looking again earlier shows it again.
                        drop(self.changed.wait_timeout(awaited, Duration::from_millis(20)));
                    } else {
                        kernel::reap(pid);
                    }
                }
                // No children at all: only a new one can change that.
                Err(_) => {
                    let awaited = self.lock();
                    drop(self.changed.wait_timeout(awaited, Duration::from_secs(60)));
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<i32>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
