//! The host's side of a monitor: starts the real binary, speaks the control channel, assembles
//! bare guests.
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
    Event, Jail, Message, Reply, Request, SnapshotFiles, SnapshotReport, Start, VmmConfig,
};

pub mod number {
    pub const RESTORED: u32 = 0x1001;
    pub const NONCE: u32 = 0x8000_0000;
    pub const TICKS: u32 = 0x4000_0000;
    pub const BEAT: u32 = 0x2000_0000;
}

/// A guest from `tests/guests`, assembled once per test program.
pub fn guest(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/guests");
    let out = tempfile::Builder::new()
        .prefix(name)
        .suffix(".elf")
        .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
        .expect("temporary file")
        .into_temp_path()
        .keep()
        .expect("keep");
    let status = Command::new("cc")
        .current_dir(&sources)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noexecstack"])
        .args(["-Wl,--no-warn-rwx-segments", "-I.", "-T", "guest.ld", "-o"])
        .arg(&out)
        .arg(format!("{name}.S"))
        .status()
        .expect("cc (package gcc) assembles the bare guests");
    assert!(status.success(), "assembling {name}");
    out
}

/// Why bare guests cannot run here, if so.
pub fn skip_reason() -> Option<String> {
    match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => None,
        Err(e) => Some(format!("/dev/kvm cannot be opened: {e}")),
    }
}

#[macro_export]
macro_rules! needs_kvm {
    () => {
        if let Some(reason) = support::skip_reason() {
            eprintln!("skipped: {reason}");
            return;
        }
    };
}

pub fn binary() -> PathBuf {
    std::env::var_os("PARBAKE_VMM")
        .map_or_else(|| env!("CARGO_BIN_EXE_parbake-vmm").into(), Into::into)
}

pub fn open_jail() -> Jail {
    Jail { seccomp: false, landlock: false, namespaces: false, user: None }
}

pub fn boot(kernel: &Path, memory_mib: u32) -> VmmConfig {
    VmmConfig {
        version: parbake_protocol::vmm::VERSION,
        vcpus: 1,
        memory_mib,
        start: Start::Boot { kernel: kernel.into(), initramfs: None, cmdline: String::new() },
        disks: vec![],
        vsock: None,
        net: None,
        rng: false,
        console: None,
        console_limit: 1 << 20,
        jail: Jail::default(),
    }
}

pub fn restore(of: &VmmConfig, snapshot: &Snapshot) -> VmmConfig {
    let mut generation_id = [0; 16];
    std::io::Read::read_exact(
        &mut std::fs::File::open("/dev/urandom").expect("urandom"),
        &mut generation_id,
    )
    .expect("random");
    VmmConfig {
        start: Start::Restore {
            state: snapshot.state.clone(),
            memory: snapshot.memory.clone(),
            generation_id,
            paused: false,
        },
        disks: of
            .disks
            .iter()
            .zip(&snapshot.disks)
            .map(|(disk, overlay)| parbake_protocol::vmm::Disk {
                overlay: Some(overlay.clone()),
                ..disk.clone()
            })
            .collect(),
        ..of.clone()
    }
}

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
    pub fn spawn(config: &VmmConfig) -> Self {
        Self::spawn_binary(&binary(), config)
    }

    pub fn spawn_binary(binary: &Path, config: &VmmConfig) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("socket pair");
        ours.set_read_timeout(Some(Duration::from_secs(30))).expect("timeout");
        let mut line = serde_json::to_vec(config).expect("config");
        line.push(b'\n');
        // Before the spawn: the monitor finds its configuration waiting.
        (&ours).write_all(&line).expect("config");
        let mut command = Command::new(binary);
        let fd = theirs.as_raw_fd();
        command.arg("--control-fd").arg("3").stdin(Stdio::null());
        // SAFETY: between fork and exec, only dup2 is called.
        unsafe {
            command.pre_exec(move || {
                if libc::dup2(fd, 3) < 0 || (fd == 3 && libc::fcntl(3, libc::F_SETFD, 0) < 0) {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let spawned = Instant::now();
        let child = command.spawn().expect("parbake-vmm starts");
        let reader = BufReader::new(ours.try_clone().expect("clone"));
        Self { child, socket: ours, reader, spawned, pending: std::collections::VecDeque::new() }
    }

    fn message(&mut self) -> Option<Message> {
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
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(files)));
        }
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&line)],
            &mut ancillary,
            rustix::net::SendFlags::NOSIGNAL,
        )
        .expect("request");
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
        let request = Request::Snapshot(SnapshotFiles { files: fds.len() as u32 });
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

    pub fn quit(mut self) {
        assert_eq!(self.request(&Request::Quit), Reply::Done);
        assert_eq!(self.wait(), 0);
    }

    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
