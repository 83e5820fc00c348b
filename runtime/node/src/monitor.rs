//! One `parbake-vmm` process and its control channel, seen from the host.
//!
//! ```text
//!  spawn ──► Starting ──Started──► Running ◄──pause/resume──► Paused ──snapshot──► Paused
//!               │                     │                          │
//!               └──Failed──►  Gone ◄──┴───── Stopped, quit ──────┘
//! ```
//! The process ends when this end of the channel closes, so dropping a [`Monitor`] (or killing the
//! process that holds it) ends the guest. A monitor with a [`VmmConfig::control`] socket stays when
//! its host dies or [detaches](Monitor::detach), and [`Monitor::adopt`] takes it over.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use parbake_protocol::vmm::{
    Event, MAX_LINE, Message, Reply, Request, SnapshotFiles, SnapshotReport, Status, VmmConfig,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{
    PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};

use crate::launch::{self, Launched};
use crate::limits::cgroup::Cgroup;

/// How long a monitor may take to answer an ordinary request.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long writing a snapshot may take.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(600);

/// What can go wrong between the host and a monitor.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The program could not be started.
    #[error("cannot start {}", program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The channel failed.
    #[error("the monitor's control channel failed")]
    Channel(#[source] io::Error),
    /// The other side does not speak the protocol.
    #[error("the monitor sent something that is not a message: {0}")]
    Protocol(String),
    /// The monitor ended without a word.
    #[error("the monitor ended unexpectedly ({status}){}", tail(.log))]
    Died {
        /// How: its exit code, or the signal that killed it.
        status: String,
        /// The end of its stderr.
        log: String,
    },
    /// The monitor could not start the guest.
    #[error("the monitor could not start the machine ({kind}): {message}")]
    Failed {
        /// A stable word; see [`Event::Failed`].
        kind: String,
        /// For people.
        message: String,
    },
    /// The monitor refused a request.
    #[error("the monitor refused to {op}: {message}")]
    Refused {
        /// The request.
        op: &'static str,
        /// Why.
        message: String,
    },
    /// No answer in time.
    #[error("no answer from the monitor within {0:?}")]
    Timeout(Duration),
}

fn tail(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!(": {log}") }
}

/// The process: started here, or found running.
#[derive(Debug)]
enum Process {
    Child(Child),
    /// `ours`: this process is its parent, and is told how it ended.
    Held {
        pid: u32,
        fd: OwnedFd,
        ours: bool,
    },
}

/// A running monitor.
#[derive(Debug)]
pub struct Monitor {
    process: Process,
    /// Let go: the process is somebody else's now.
    detached: bool,
    control: UnixStream,
    inbox: Vec<u8>,
    events: VecDeque<Event>,
    log: PathBuf,
}

impl Monitor {
    /// Starts `program`, sends it `config`, and returns at once; what the guest does arrives as
    /// events. The process's stderr goes to `log`. It holds `keep` open for as long as it lives,
    /// and with it the lock on that file. `tap` goes along where the configuration says so. It is in
    /// `group` from its first instruction.
    ///
    /// # Errors
    /// [`MonitorError::Spawn`] or [`MonitorError::Channel`].
    pub fn spawn(
        program: &Path,
        config: &VmmConfig,
        log: &Path,
        keep: Option<OwnedFd>,
        tap: Option<BorrowedFd<'_>>,
        group: Option<&Cgroup>,
    ) -> Result<Self, MonitorError> {
        let spawn_error = |source| MonitorError::Spawn { program: program.to_owned(), source };
        let (control, theirs) = UnixStream::pair().map_err(spawn_error)?;
        let stderr = File::create(log).map_err(spawn_error)?;
        let mut line = serde_json::to_vec(config).expect("a configuration is plain data");
        line.push(b'\n');
        // Sent before the process exists, so that it finds the line waiting.
        send(&control, &line, tap.as_slice()).map_err(MonitorError::Channel)?;
        // It writes nothing to its output; any descriptor will do.
        let output = match keep {
            Some(keep) => keep,
            None => File::options().write(true).open("/dev/null").map_err(spawn_error)?.into(),
        };
        let streams = [theirs.into(), output, stderr.into()];
        let launched = launch::spawn(program, &["--control-fd", "0"], streams, group);
        let process = match launched.map_err(spawn_error)? {
            Launched::Child(child) => Process::Child(child),
            Launched::Held(pid, fd) => Process::Held { pid, fd, ours: true },
        };
        Ok(Self::over(process, control, log))
    }

    /// Takes over the monitor that listens at `control` and belongs to nobody any more.
    ///
    /// # Errors
    /// [`MonitorError::Channel`] where nobody listens; [`MonitorError::Timeout`] where another
    /// host still has the channel.
    pub fn adopt(control: &Path, log: &Path) -> Result<(Self, Status), MonitorError> {
        let socket = UnixStream::connect(control).map_err(MonitorError::Channel)?;
        let failed = |error: rustix::io::Errno| MonitorError::Channel(error.into());
        let listener = rustix::net::sockopt::socket_peercred(&socket).map_err(failed)?.pid;
        let fd = pidfd_open(listener, PidfdFlags::empty()).map_err(failed)?;
        let pid = listener.as_raw_nonzero().get().unsigned_abs();
        let mut monitor = Self::over(Process::Held { pid, fd, ours: false }, socket, log);
        // Not ours to end until it has answered; and since it has, the descriptor is its own.
        monitor.detached = true;
        let status = monitor.status()?;
        monitor.detached = false;
        Ok((monitor, status))
    }

    fn over(process: Process, control: UnixStream, log: &Path) -> Self {
        Self {
            process,
            detached: false,
            control,
            inbox: Vec::with_capacity(4096),
            events: VecDeque::new(),
            log: log.to_owned(),
        }
    }

    /// Lets go without ending the guest, if its monitor can do without.
    pub fn detach(mut self) {
        self.detached = true;
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        match &self.process {
            Process::Child(child) => child.id(),
            Process::Held { pid, .. } => *pid,
        }
    }

    /// The control channel, to wait on together with other descriptors.
    #[must_use]
    pub fn control_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// The next event, waiting for it until `deadline`.
    ///
    /// # Errors
    /// [`MonitorError::Timeout`] at the deadline, [`MonitorError::Died`] when the process ended.
    pub fn next_event(&mut self, deadline: Instant) -> Result<Event, MonitorError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(event);
        }
        match self.read_message(deadline)? {
            Message::Event(event) => Ok(event),
            Message::Reply(reply) => {
                Err(MonitorError::Protocol(format!("a reply to nothing: {reply:?}")))
            }
        }
    }

    /// Stops the vCPUs and drains the devices.
    ///
    /// # Errors
    /// [`MonitorError::Refused`] or a failed channel.
    pub fn pause(&mut self) -> Result<(), MonitorError> {
        self.simple("pause", &Request::Pause)
    }

    /// Lets the vCPUs run.
    ///
    /// # Errors
    /// [`MonitorError::Refused`] or a failed channel.
    pub fn resume(&mut self) -> Result<(), MonitorError> {
        self.simple("resume", &Request::Resume)
    }

    /// Writes the paused machine into `state`, `memory` and one file per disk; with `difference`,
    /// of its memory only what differs from the image it was restored from, if it was.
    ///
    /// # Errors
    /// [`MonitorError::Refused`] or a failed channel; the files are then incomplete.
    pub fn snapshot(
        &mut self,
        state: &File,
        memory: &File,
        disks: &[File],
        difference: bool,
    ) -> Result<SnapshotReport, MonitorError> {
        let mut files = vec![state.as_fd(), memory.as_fd()];
        files.extend(disks.iter().map(AsFd::as_fd));
        let count = u32::try_from(files.len()).unwrap_or(u32::MAX);
        let request = Request::Snapshot(SnapshotFiles { files: count, difference });
        match self.request("snapshot", &request, &files, SNAPSHOT_TIMEOUT)? {
            Reply::Snapshot(report) => Ok(report),
            other => Err(MonitorError::Protocol(format!("{other:?} after a snapshot request"))),
        }
    }

    /// What the monitor is doing.
    ///
    /// # Errors
    /// A failed channel.
    pub fn status(&mut self) -> Result<Status, MonitorError> {
        match self.request("tell its status", &Request::Status, &[], REPLY_TIMEOUT)? {
            Reply::Status(status) => Ok(status),
            other => Err(MonitorError::Protocol(format!("{other:?} after a status request"))),
        }
    }

    fn simple(&mut self, op: &'static str, request: &Request) -> Result<(), MonitorError> {
        match self.request(op, request, &[], REPLY_TIMEOUT)? {
            Reply::Done => Ok(()),
            other => Err(MonitorError::Protocol(format!("{other:?} after a {op} request"))),
        }
    }

    fn request(
        &mut self,
        op: &'static str,
        request: &Request,
        files: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<Reply, MonitorError> {
        let mut line = serde_json::to_vec(request).expect("a request is plain data");
        line.push(b'\n');
        if let Err(error) = send(&self.control, &line, files) {
            return Err(match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => self.died(),
                _ => MonitorError::Channel(error),
            });
        }
        let deadline = Instant::now() + timeout;
        loop {
            match self.read_message(deadline) {
                Ok(Message::Event(event)) => self.events.push_back(event),
                Ok(Message::Reply(Reply::Failed { message })) => {
                    return Err(MonitorError::Refused { op, message });
                }
                Ok(Message::Reply(reply)) => return Ok(reply),
                Err(MonitorError::Timeout(_)) => return Err(MonitorError::Timeout(timeout)),
                Err(error) => return Err(error),
            }
        }
    }

    fn read_message(&mut self, deadline: Instant) -> Result<Message, MonitorError> {
        let started = Instant::now();
        loop {
            if let Some(end) = self.inbox.iter().position(|&byte| byte == b'\n') {
                let message = serde_json::from_slice(&self.inbox[..end])
                    .map_err(|error| MonitorError::Protocol(error.to_string()));
                self.inbox.drain(..=end);
                return message;
            }
            if self.inbox.len() > MAX_LINE {
                return Err(MonitorError::Protocol("a line without end".to_owned()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(MonitorError::Timeout(started.elapsed()));
            }
            self.control.set_read_timeout(Some(left)).map_err(MonitorError::Channel)?;
            let mut buffer = [0; 4096];
            match self.control.read(&mut buffer) {
                Ok(0) => return Err(self.died()),
                Ok(count) => self.inbox.extend_from_slice(&buffer[..count]),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock
                            | io::ErrorKind::TimedOut
                            | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(self.died());
                }
                Err(error) => return Err(MonitorError::Channel(error)),
            }
        }
    }

    fn died(&mut self) -> MonitorError {
        let status = match &mut self.process {
            Process::Child(child) => match child.wait() {
                // What the system-call filter does to a monitor that strays.
                Ok(status) if status.signal() == Some(Signal::SYS.as_raw()) => {
                    "it was killed for a forbidden system call".to_owned()
                }
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            },
            Process::Held { fd, ours: true, .. } => {
                match waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED) {
                    Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => format!("exit status: {code}"),
                        (_, Some(signal)) if signal == Signal::SYS.as_raw() => {
                            "it was killed for a forbidden system call".to_owned()
                        }
                        (_, signal) => format!("signal: {}", signal.unwrap_or(0)),
                    },
                    _ => "nobody knows how".to_owned(),
                }
            }
            // Only its parent, which is gone, would be told.
            Process::Held { .. } => "nobody knows how".to_owned(),
        };
        MonitorError::Died { status, log: log_tail(&self.log) }
    }

    /// Ends the guest and waits for the process.
    pub fn quit(mut self) {
        self.end();
    }

    fn end(&mut self) {
        if self.detached {
            return;
        }
        // Most end by themselves when the channel closes, those with a socket of their own when
        // they are told; the kill is for one that can do neither.
        let mut line = serde_json::to_vec(&Request::Quit).expect("a request is plain data");
        line.push(b'\n');
        let _ = self.control.set_write_timeout(Some(Duration::from_millis(200)));
        let _ = send(&self.control, &line, &[]);
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        if !self.process.ends_within(Duration::from_secs(2)) {
            self.process.kill();
        }
    }
}

impl Process {
    /// Waits for the end of the process; whether it came.
    fn ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        match self {
            Self::Child(child) => {
                while Instant::now() < deadline {
                    if !matches!(child.try_wait(), Ok(None)) {
                        return true;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                false
            }
            Self::Held { fd, ours, .. } => loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let left = Timespec {
                    tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                    tv_nsec: left.subsec_nanos().into(),
                };
                match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&left)) {
                    Err(rustix::io::Errno::INTR) => {}
                    Ok(0) | Err(_) => return false,
                    Ok(_) => {
                        if *ours {
                            let _ = waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED);
                        }
                        return true;
                    }
                }
            },
        }
    }

    fn kill(&mut self) {
        match self {
            Self::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Held { fd, .. } => {
                let _ = pidfd_send_signal(&*fd, Signal::KILL);
                self.ends_within(Duration::from_secs(2));
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.end();
    }
}

/// The last kilobyte of a log, trimmed.
pub(crate) fn log_tail(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let start = bytes.len().saturating_sub(1024);
    String::from_utf8_lossy(&bytes[start..]).trim().to_owned()
}

/// Sends all of `bytes`, and `files` along with its first part.
fn send(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut sent = 0;
    while sent < bytes.len() {
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !files.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(files)), "at most 16 files");
        }
        match rustix::net::sendmsg(
            stream,
            &[IoSlice::new(&bytes[sent..])],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        ) {
            Ok(count) => sent += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
