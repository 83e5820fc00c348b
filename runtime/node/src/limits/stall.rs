//! A machine that cannot live on the memory it may have.
//!
//! The kernel ends what needs more memory than it may have only once nothing can be taken from it
//! any more. Pages of a snapshot can always be taken, and are read again a moment later: a machine
//! whose limit is below what it touches goes in circles for minutes, and keeps the disks busy. So
//! what waits for memory most of the time is ended (`memory.pressure` of its group; Linux,
//! `Documentation/accounting/psi.rst`).

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// How often is looked.
const INTERVAL: Duration = Duration::from_millis(500);
/// The share of the last ten seconds, in hundredths, in which everything in the group waited.
const MOST: f64 = 60.0;

/// Watches one group for as long as it lives.
#[derive(Debug)]
pub(crate) struct StallWatch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    ended: Arc<AtomicBool>,
}

impl StallWatch {
    /// Watches the group (version 2) in `directory`; none where the kernel does not tell.
    pub(crate) fn start(directory: &Path) -> Option<Self> {
        let pressure = directory.join("memory.pressure");
        share(&fs::read_to_string(&pressure).ok()?)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).ok()?);
        let ended = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            pressure,
            kill: directory.join("cgroup.kill"),
            stop: Arc::clone(&stop),
            ended: Arc::clone(&ended),
        };
        let thread = std::thread::Builder::new().name("memory".to_owned()).stack_size(64 << 10);
        let thread = thread.spawn(move || worker.run()).ok()?;
        Some(Self { stop, thread: Some(thread), ended })
    }

    /// Whether the group was ended.
    pub(crate) fn ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

impl Drop for StallWatch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    pressure: PathBuf,
    kill: PathBuf,
    stop: Arc<OwnedFd>,
    ended: Arc<AtomicBool>,
}

impl Worker {
    fn run(self) {
        let interval = Timespec {
            tv_sec: i64::try_from(INTERVAL.as_secs()).unwrap_or(1),
            tv_nsec: INTERVAL.subsec_nanos().into(),
        };
        loop {
            match poll(&mut [PollFd::new(&*self.stop, PollFlags::IN)], Some(&interval)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return,
            }
            let mut text = String::new();
            let read = fs::File::open(&self.pressure).and_then(|mut f| f.read_to_string(&mut text));
            if read.is_err() {
                return;
            }
            if share(&text).is_some_and(|share| share >= MOST) {
                // Before the end shows.
                self.ended.store(true, Ordering::SeqCst);
                let _ = fs::write(&self.kill, "1");
                return;
            }
        }
    }
}

/// `avg10` of the line `full`.
fn share(pressure: &str) -> Option<f64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("full "))?;
    line.split(' ').find_map(|word| word.strip_prefix("avg10=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_waits_most_of_the_time_is_ended_once() {
        let group = tempfile::tempdir().unwrap();
        let pressure = |share: &str| {
            let text = format!(
                "some avg10=99.00 avg60=0.00 avg300=0.00 total=0\n\
                 full avg10={share} avg60=0.00 avg300=0.00 total=0\n"
            );
            // Whole or not at all, as the kernel's.
            let new = group.path().join("new");
            fs::write(&new, text).unwrap();
            fs::rename(&new, group.path().join("memory.pressure")).unwrap();
        };
        assert!(StallWatch::start(group.path()).is_none(), "nothing tells");
        pressure("59.99");
        fs::write(group.path().join("cgroup.kill"), "").unwrap();
        let watch = StallWatch::start(group.path()).unwrap();
        std::thread::sleep(INTERVAL * 3);
        assert!(!watch.ended());
        pressure("60.00");
        while !watch.ended() {
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(watch);
        assert_eq!(fs::read_to_string(group.path().join("cgroup.kill")).unwrap(), "1");
    }
}
