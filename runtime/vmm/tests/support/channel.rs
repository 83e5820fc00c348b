//! The host's end of a control channel.
#![allow(dead_code, missing_docs)]

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use parbake_protocol::vmm::{
    Event, Message, Reply, Request, SnapshotFiles, SnapshotReport, VmmConfig,
};

#[derive(Debug, Clone)]
pub struct Snapshot {
    pub state: PathBuf,
    pub memory: PathBuf,
    pub disks: Vec<PathBuf>,
}

/// A running monitor.
pub struct Monitor {
    pub child: Child,
    socket: UnixStream,
    reader: BufReader<UnixStream>,
    pub spawned: Instant,
    pub pending: std::collections::VecDeque<Event>,
}

impl Monitor {
    pub fn spawn_binary(binary: &Path, config: &VmmConfig) -> Self {
        Self::spawn_line(binary, &config_line(config))
    }

    /// Like [`Self::spawn_binary`], with any bytes for a configuration.
    pub fn spawn_line(binary: &Path, line: &[u8]) -> Self {
        Self::start(line, |theirs| {
            let fd = theirs.as_raw_fd();
            let mut command = Command::new(binary);
            command.arg("--control-fd").arg("3").stdin(Stdio::null());
            // SAFETY: between fork and exec, only dup2 and fcntl are called.
            unsafe {
                command.pre_exec(move || {
                    if libc::dup2(fd, 3) < 0 || (fd == 3 && libc::fcntl(3, libc::F_SETFD, 0) < 0) {
                        return Err(std::io::Error::last_os_error());
                    }
                    Ok(())
                });
            }
            command.spawn()
        })
    }

    /// Like [`Self::spawn_binary`], as the first process of a namespace of its own.
    pub fn spawn_in_process_namespace(binary: &Path, config: &VmmConfig) -> Self {
        Self::start(&config_line(config), |theirs| {
            Command::new("unshare")
                .args(["--pid", "--fork", "--kill-child"])
                .arg(binary)
                .args(["--control-fd", "0"])
                .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs.try_clone()?)))
                .spawn()
        })
    }

    /// Like [`Self::spawn_binary`], but lets the standard library use `posix_spawn`, which is
    /// faster. Another child started meanwhile would inherit the descriptor, too: only for
    /// programs that start one child at a time.
    pub fn spawn_alone(binary: &Path, config: &VmmConfig) -> Self {
        Self::start(&config_line(config), |theirs| {
            // SAFETY: the descriptor is open.
            unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFD, 0) };
            Command::new(binary)
                .arg("--control-fd")
                .arg(theirs.as_raw_fd().to_string())
                .stdin(Stdio::null())
                .spawn()
        })
    }

    fn start(line: &[u8], spawn: impl FnOnce(&UnixStream) -> std::io::Result<Child>) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("socket pair");
        ours.set_read_timeout(Some(Duration::from_secs(30))).expect("timeout");
        // Before the spawn: the monitor finds its configuration waiting.
        (&ours).write_all(line).expect("config");
        let spawned = Instant::now();
        let child = spawn(&theirs).expect("parbake-vmm starts");
        let reader = BufReader::new(ours.try_clone().expect("clone"));
        Self { child, socket: ours, reader, spawned, pending: std::collections::VecDeque::new() }
    }

    /// How long to wait for the next message.
    pub fn patience(&self, time: Duration) {
        self.socket.set_read_timeout(Some(time)).expect("timeout");
    }

    pub fn message(&mut self) -> Option<Message> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"))),
            Err(e) => panic!("nothing from the monitor: {e}"),
        }
    }

    /// The next event; panics at the end of the channel.
    pub fn event(&mut self) -> Event {
        if let Some(event) = self.pending.pop_front() {
            return event;
        }
        match self.message() {
            Some(Message::Event(event)) => event,
            Some(Message::Reply(reply)) => panic!("unexpected {reply:?}"),
            None => panic!("the monitor closed the channel"),
        }
    }

    /// The next event that is no heartbeat.
    pub fn news(&mut self) -> Event {
        loop {
            match self.event() {
                Event::Doorbell { value } if value >> 29 == 1 => {}
                event => return event,
            }
        }
    }

    pub fn started(&mut self) -> (Vec<(String, u64)>, Vec<String>) {
        match self.event() {
            Event::Started { stages, jail } => (stages, jail),
            other => panic!("not started: {other:?}"),
        }
    }

    pub fn doorbell(&mut self) -> u32 {
        match self.news() {
            Event::Doorbell { value } => value,
            other => panic!("no doorbell: {other:?}"),
        }
    }

    pub fn failed(&mut self) -> (String, String) {
        match self.event() {
            Event::Failed { kind, message } => (kind, message),
            other => panic!("not refused: {other:?}"),
        }
    }

    pub fn request(&mut self, request: &Request) -> Reply {
        self.request_with(request, &[])
    }

    pub fn request_with(&mut self, request: &Request, files: &[BorrowedFd<'_>]) -> Reply {
        let mut line = serde_json::to_vec(request).expect("request");
        line.push(b'\n');
        self.send(&line, files);
        self.reply()
    }

    /// Sends a line as it is, and returns the answer.
    pub fn raw_request(&mut self, line: &[u8]) -> Reply {
        self.raw(line);
        self.reply()
    }

    /// Sends bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) {
        // The monitor may end in the middle of it.
        let _ = (&self.socket).write_all(bytes);
    }

    fn send(&mut self, line: &[u8], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(files)));
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(line)],
            &mut ancillary,
            rustix::net::SendFlags::NOSIGNAL,
        )
        .expect("request");
    }

    fn reply(&mut self) -> Reply {
        loop {
            match self.message() {
                Some(Message::Reply(reply)) => return reply,
                Some(Message::Event(event)) => self.pending.push_back(event),
                None => panic!("the monitor closed the channel"),
            }
        }
    }

    /// Pauses and writes a snapshot into `directory`.
    pub fn freeze(&mut self, directory: &Path, disks: usize) -> (Snapshot, SnapshotReport) {
        assert_eq!(self.request(&Request::Pause), Reply::Done);
        self.snapshot(directory, disks)
    }

    pub fn snapshot(&mut self, directory: &Path, disks: usize) -> (Snapshot, SnapshotReport) {
        self.write(directory, disks, false)
    }

    /// Pauses and writes what differs from the image it was restored from into `directory`.
    pub fn branch(&mut self, directory: &Path, disks: usize) -> (Snapshot, SnapshotReport) {
        assert_eq!(self.request(&Request::Pause), Reply::Done);
        self.write(directory, disks, true)
    }

    fn write(
        &mut self,
        directory: &Path,
        disks: usize,
        difference: bool,
    ) -> (Snapshot, SnapshotReport) {
        let snapshot = Snapshot {
            state: directory.join("state"),
            memory: directory.join("memory"),
            disks: (0..disks).map(|n| directory.join(format!("disk{n}"))).collect(),
        };
        let files: Vec<_> = [&snapshot.state, &snapshot.memory]
            .into_iter()
            .chain(&snapshot.disks)
            .map(|path| std::fs::File::create_new(path).expect("new file"))
            .collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let request = Request::Snapshot(SnapshotFiles { files: fds.len() as u32, difference });
        match self.request_with(&request, &fds) {
            Reply::Snapshot(report) => (snapshot, report),
            other => panic!("no snapshot: {other:?}"),
        }
    }

    /// Waits for the process, and returns its exit code.
    pub fn wait(mut self) -> i32 {
        drop(self.socket);
        drop(self.reader);
        self.child.wait().expect("wait").code().unwrap_or(-1)
    }

    /// Closes the channel and leaves the process alone.
    pub fn abandon(self) -> Child {
        self.child
    }

    /// Takes over the channel of a monitor that was abandoned.
    pub fn come_back(child: Child, control: &Path) -> Self {
        let socket = UnixStream::connect(control).expect("the monitor listens");
        socket.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
        let reader = BufReader::new(socket.try_clone().expect("clone"));
        let pending = std::collections::VecDeque::new();
        Self { child, socket, reader, spawned: Instant::now(), pending }
    }

    pub fn quit(mut self) {
        assert_eq!(self.request(&Request::Quit), Reply::Done);
        assert_eq!(self.wait(), 0);
    }

    /// Kills the process.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn config_line(config: &VmmConfig) -> Vec<u8> {
    let mut line = serde_json::to_vec(config).expect("config");
    line.push(b'\n');
    line
}
