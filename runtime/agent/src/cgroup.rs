//! The user cgroup: every process the agent starts for a user lives in it, one child group a
//! session, so that all of them can be frozen across a snapshot or killed together.

use std::fs;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::connection::to_timespec;

/// How long the kernel may take to stop every user process.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(10);

/// The cgroup (v2) of all user processes.
#[derive(Debug)]
pub struct UserCgroup {
    directory: PathBuf,
    next: AtomicU64,
    /// Groups of sessions that ended and left processes behind.
    leftovers: Mutex<Vec<PathBuf>>,
    /// Somebody watches for the limit on processes.
    watched: AtomicBool,
    /// The limit was reached since it was set last.
    reached: Arc<AtomicBool>,
}

/// One session's part of it.
#[derive(Debug)]
pub struct SessionCgroup {
    directory: PathBuf,
}

impl UserCgroup {
    /// Makes `<root>/user`, where `root` is a mounted cgroup v2 hierarchy.
    ///
    /// # Errors
    /// Not a cgroup v2 hierarchy, or one that cannot freeze.
    pub fn create(root: &Path) -> io::Result<Self> {
        let directory = root.join("user");
        match fs::create_dir(&directory) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        if !directory.join("cgroup.freeze").exists() {
            return Err(io::Error::other(format!("{} cannot be frozen", directory.display())));
        }
        // A kernel without the controller has no limits on processes; who asks for one is told.
        let _ = fs::write(root.join("cgroup.subtree_control"), "+pids");
        Ok(Self {
            directory,
            next: AtomicU64::new(0),
            leftovers: Mutex::default(),
            watched: AtomicBool::new(false),
            reached: Arc::default(),
        })
    }

    /// Makes a group for one session.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn session(&self) -> io::Result<SessionCgroup> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let directory = self.directory.join(format!("session-{number}"));
        fs::create_dir(&directory)?;
        Ok(SessionCgroup { directory })
    }

    /// Lets user processes have so many processes and threads, and calls `tell` the first time
    /// they want more.
    ///
    /// # Errors
    /// The kernel has no such controller, or refused.
    pub fn limit_processes(&self, most: Option<u32>, tell: fn()) -> io::Result<()> {
        let value = most.map_or_else(|| "max".to_owned(), |most| most.to_string());
        let events = self.directory.join("pids.events");
        if most.is_some() && !self.watched.swap(true, Ordering::SeqCst) {
            let mut file = fs::File::open(events)?;
            let mut before = denied(&mut file)?;
            let reached = Arc::clone(&self.reached);
            let watch = move || -> io::Result<()> {
                loop {
                    poll(&mut [PollFd::new(&file, PollFlags::PRI)], None)?;
                    let now = denied(&mut file)?;
                    if now > before && !reached.swap(true, Ordering::SeqCst) {
                        tell();
                    }
                    before = now;
                }
            };
            let thread = thread::Builder::new().name("process limit".to_owned());
            thread.stack_size(64 << 10).spawn(watch)?;
        }
        fs::write(self.directory.join("pids.max"), value)?;
        self.reached.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Stops all user processes and waits until they have.
    ///
    /// # Errors
    /// Some process could not be stopped in time.
    pub fn freeze(&self) -> io::Result<()> {
        let mut events = fs::File::open(self.directory.join("cgroup.events"))?;
        fs::write(self.directory.join("cgroup.freeze"), "1")?;
        let deadline = Instant::now() + FREEZE_TIMEOUT;
        loop {
            let mut text = String::new();
            // A seek and a full read re-arm the poll below.
            io::Seek::rewind(&mut events)?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|l| l == "frozen 1") {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = to_timespec(left);
            match poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&timeout)) {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        "some user process does not stop",
                    ));
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Lets user processes run.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn thaw(&self) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.freeze"), "0")
    }

    /// Kills all user processes.
    pub fn kill(&self) {
        let _ = fs::write(self.directory.join("cgroup.kill"), "1");
    }

    /// The session has ended: removes its group, and those of earlier sessions whose background
    /// processes have ended since.
    pub fn retire(&self, session: SessionCgroup) {
        let mut leftovers = self.leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        leftovers.push(session.directory);
        // Removing a group that still has processes fails, which is what is wanted here.
        leftovers.retain(|directory| fs::remove_dir(directory).is_err());
    }
}

/// How often the kernel has denied a process, from the beginning of `pids.events`. Reading it all
/// re-arms its poll.
fn denied(events: &mut fs::File) -> io::Result<u64> {
    let mut text = String::new();
    io::Seek::rewind(events)?;
    events.read_to_string(&mut text)?;
    Ok(text.lines().find_map(|line| line.strip_prefix("max ")?.parse().ok()).unwrap_or(0))
}

impl SessionCgroup {
    /// The file a process writes `0` to in order to join.
    ///
    /// # Errors
    /// The group is gone.
    pub fn entrance(&self) -> io::Result<OwnedFd> {
        let file = fs::File::options().write(true).open(self.directory.join("cgroup.procs"))?;
        Ok(file.into())
    }

    /// Kills every process of the session, including those that left its process group.
    ///
    /// # Errors
    /// A kernel before 5.14.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.kill"), "1")
    }
}
