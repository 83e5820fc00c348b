//! A machine that cannot live on the memory it may have.
//!
//! The kernel ends what needs more memory than it may have only once nothing can be taken from it
//! any more. Pages of a snapshot can always be taken, and are read again a moment later: a machine
//! whose limit is below what it touches goes in circles for minutes, and keeps the disks busy. So
//! what waits for memory most of the time is ended (`memory.pressure` of its group; Linux,
//! `Documentation/accounting/psi.rst`), and so is what has no file pages left to speak of and reads
//! all it may have again and again (`memory.stat`): where the disk is fast or its contents are
//! cached, going in circles costs the processor more than it waits.

use std::collections::VecDeque;
use std::fs;
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

/// Over how many looks pages that were read again are counted: five seconds.
const WINDOW: usize = 10;
/// How often all it may have is read again in that time.
const TIMES: u64 = 2;
/// File pages of less than this part of the limit are none to speak of.
const FILE_PART: u64 = 16;
const PAGE: u64 = 4096;

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
        let files = ["memory.pressure", "memory.stat", "memory.max"].map(|n| directory.join(n));
        let [pressure, stat, most] = files;
        let limit = fs::read_to_string(most).ok()?.trim().parse().ok()?;
        if !pressure.exists() && !stat.exists() {
            return None;
        }
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).ok()?);
        let ended = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            pressure,
            stat,
            limit,
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
    stat: PathBuf,
    /// Bytes.
    limit: u64,
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
        let mut seen = VecDeque::new();
        loop {
            match poll(&mut [PollFd::new(&*self.stop, PollFlags::IN)], Some(&interval)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) | Err(_) => return,
            }
            // A kernel without the one may have the other.
            let waits = fs::read_to_string(&self.pressure).unwrap_or_default();
            let stat = fs::read_to_string(&self.stat).unwrap_or_default();
            if waits.is_empty() && stat.is_empty() {
                return;
            }
            let waits = share(&waits).is_some_and(|share| share >= MOST);
            if waits || circles(&mut seen, &stat, self.limit) {
                // Before the end shows.
                self.ended.store(true, Ordering::SeqCst);
                let _ = fs::write(&self.kill, "1");
                return;
            }
        }
    }
}

/// Whether a group that may have `limit` bytes goes in circles; `seen` is how many pages it had
/// read again at the looks before.
fn circles(seen: &mut VecDeque<u64>, stat: &str, limit: u64) -> bool {
    let value = |name: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    let (Some(again), Some(file)) = (value("workingset_refault_file"), value("file")) else {
        return false;
    };
    let oldest = seen.front().copied().unwrap_or(again);
    seen.push_back(again);
    if seen.len() > WINDOW {
        seen.pop_front();
    }
    let bytes = again.saturating_sub(oldest).saturating_mul(PAGE);
    file < limit / FILE_PART && bytes >= limit.saturating_mul(TIMES)
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
        fs::write(group.path().join("memory.max"), "33554432\n").unwrap();
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
        fs::write(group.path().join("memory.max"), "max\n").unwrap();
        assert!(StallWatch::start(group.path()).is_none(), "there is no limit");
    }

    #[test]
    fn reading_everything_again_and_again_is_going_in_circles() {
        const LIMIT: u64 = 32 << 20;
        let looks = |file: u64, step: u64| {
            let mut seen = VecDeque::new();
            (0..40).any(|look| {
                let again = 1000 + look * step;
                let stat = format!(
                    "anon 1\nfile {file}\nfile_mapped 7\nworkingset_refault_anon 9\n\
                     workingset_refault_file {again}\n"
                );
                circles(&mut seen, &stat, LIMIT)
            })
        };
        // As measured: a machine with 32 MiB read 7,700 pages again at each look.
        assert!(looks(500 << 10, 7700));
        // Much is read again, but there is room for it: a large file, from end to end.
        assert!(!looks(16 << 20, 7700));
        // A little is.
        assert!(!looks(500 << 10, 1500));
        assert!(!circles(&mut VecDeque::new(), "anon 1\n", LIMIT));
    }
}
