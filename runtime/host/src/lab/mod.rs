//! The lab: an emulated KVM host for machines whose own KVM cannot run stock guests.
//!
//! ```text
//!            ensure_up                   "ready" on its serial line, answers a ping
//!   down ───────────────► starting ────────────────────────────────────────────────► up
//!    ▲                       │ died, or not up in time                                │
//!    ├───────────────────────┘                                                        │
//!    └───────────── down(), idle for long enough (it ends itself), emulator died ◄────┘
//! ```
//! The lab is three processes: an emulator and two file servers. A file server ends when its
//! emulator does; the emulator ends when the machine in it powers off. So there is no keeper: the
//! lab outlives the command that started it and ends by itself. Whoever changes its state holds
//! the lock of its state directory ([`record`]). A process killed half-way through a start leaves
//! a lab that the next command either finds working or ends.
//!
//! Inside, the machine's own `/` is the root, copy-on-write: what is written there is gone with
//! the lab. Only the store is shared for writing. Programs that may be rebuilt while the lab runs
//! are run by their path below `/.host` ([`Lab::host_path`]).
//!
//! It is for development, tests and trying out. Its user's files are readable in it; its token and
//! state are the user's own. Its times are not a host's times.

mod image;
mod machine;
mod process;
mod record;

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parbake_cache::Digest;
use parbake_kernels::{BundleError, FetchError, KernelSource, initramfs};
use parbake_protocol::agent::{Client, ClientError};

use machine::Machine;
use record::{Record, StateDir};

/// What the lab's init prints on the serial line once its server listens.
const READY: &str = "parbake-lab: ready";
/// What it prints before it gives up.
const FAILED: &str = "parbake-lab: failed: ";
/// How long a start may take. Emulation is slow, and the machine may be busy.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a lab that is up may take to answer.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a lab may take to power off before it is ended.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(5);
/// The vendor of the lab's processor, as CPUID spells it; part of what its snapshots need.
pub const CPU_VENDOR: &str = "AuthenticAMD";
/// How the lab's KVM virtualizes.
pub const KVM_KIND: &str = "svm";
/// Where programs in the lab find what listens on this machine's loopback (QEMU's user network).
const GATEWAY: &str = "10.0.2.2";
/// Where the lab shows the machine's files as they are now.
const HOST: &str = "/.host";

/// Where a program in the lab finds what is `host[:port]` on this machine; nothing for what it finds
/// by the same name.
#[must_use]
pub fn from_inside(host: &str) -> Option<String> {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) => (name, format!(":{port}")),
        None => (host, String::new()),
    };
    let loopback =
        name == "localhost" || name.parse::<Ipv4Addr>().is_ok_and(|address| address.is_loopback());
    loopback.then(|| format!("{GATEWAY}{port}"))
}

/// What a lab is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabConfig {
    /// The store, an existing folder; the lab sees it at the same path.
    pub store: PathBuf,
    /// The static agent.
    pub agent: PathBuf,
    /// The kernel.
    pub kernel: KernelSource,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Virtual CPUs. More than one is not safe with QEMU before 8.1: its emulator can miss that
    /// one processor patches the code another is just translating, and the kernel patches its own
    /// whenever the first guest starts or the last one ends; the other processor then runs into
    /// a breakpoint that is no longer there, for ever.
    pub vcpus: u8,
    /// How long it stays up with nobody connected and nothing running in it.
    pub idle: Duration,
    /// Where its sockets, logs and token lie: one directory per lab, at most 90 bytes long.
    pub state_dir: PathBuf,
    /// Where its kernel and initramfs are kept.
    pub image_dir: PathBuf,
}

impl LabConfig {
    /// The lab of `store` with everything else as usual: 3 GiB, 1 CPU, 10 minutes.
    #[must_use]
    pub fn new(store: impl Into<PathBuf>, agent: impl Into<PathBuf>) -> Self {
        let store = store.into();
        Self {
            agent: agent.into(),
            kernel: KernelSource::default(),
            memory_mib: 3072,
            vcpus: 1,
            idle: Duration::from_secs(600),
            state_dir: default_state_dir(&store),
            image_dir: default_image_dir(),
            store,
        }
    }
}

/// The state directory of the lab of `store`: below `$XDG_RUNTIME_DIR`, or `/run` for root.
#[must_use]
pub fn default_state_dir(store: &Path) -> PathBuf {
    let uid = rustix::process::geteuid();
    let base = match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(path) if path.is_absolute() => path.join("parbake"),
        _ if uid.is_root() => PathBuf::from("/run/parbake"),
        _ => PathBuf::from(format!("/tmp/parbake-{}", uid.as_raw())),
    };
    base.join(format!("lab-{}", Digest::of(store.as_os_str().as_encoded_bytes()).short()))
}

/// Where lab images are kept: `$XDG_CACHE_HOME`, `~/.cache`, or `/var/cache`.
#[must_use]
pub fn default_image_dir() -> PathBuf {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    base.unwrap_or_else(|| PathBuf::from("/var/cache")).join("parbake").join("lab")
}

/// What happens while a lab starts or ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Kernel and initramfs of the lab are made; they are kept.
    MakingImage,
    /// The kernel is fetched.
    Kernel(parbake_kernels::Event),
    /// The machine is started.
    Starting,
    /// A lab that was found does not work and is started again.
    Replacing {
        /// What is wrong with it.
        why: String,
    },
    /// The lab answers.
    Ready {
        /// From the start of the emulator.
        after: Duration,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MakingImage => f.write_str("making the lab's kernel image"),
            Self::Kernel(parbake_kernels::Event::Resolving { name }) => {
                write!(f, "looking up {name}")
            }
            Self::Kernel(parbake_kernels::Event::Downloading(found)) => {
                write!(f, "downloading {} {}", found.package, found.version)
            }
            Self::Kernel(parbake_kernels::Event::Unpacking { path }) => {
                write!(f, "unpacking {}", path.display())
            }
            Self::Starting => f.write_str("starting the lab (an emulated KVM host: slow)"),
            Self::Replacing { why } => {
                write!(f, "the lab does not answer ({why}); starting it again")
            }
            Self::Ready { after } => write!(f, "lab ready after {:.1} s", after.as_secs_f64()),
        }
    }
}

/// Why there is no lab.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A program is not installed.
    #[error("the lab needs {name}, which is not installed: {install}")]
    MissingTool {
        /// The program.
        name: &'static str,
        /// The command that installs it.
        install: &'static str,
    },
    /// Its kernel could not be fetched.
    #[error("the lab's kernel: {0}")]
    Kernel(#[source] Box<FetchError>),
    /// Its image could not be made.
    #[error("the lab's image: {0}")]
    Bundle(#[source] Box<BundleError>),
    /// A path that cannot be a state directory.
    #[error(
        "{path} cannot hold the lab's state: it must be absolute, without commas and at most {limit} bytes long"
    )]
    StatePath {
        /// The path.
        path: PathBuf,
        /// The limit in bytes.
        limit: usize,
    },
    /// The state directory is somebody else's, or open to others.
    #[error("{path} must be a folder of your own with mode 0700: remove it or choose another")]
    StateNotOurs {
        /// The path.
        path: PathBuf,
    },
    /// Another process holds the lock for too long.
    #[error("another process has been starting or ending the lab for minutes (lock {path})")]
    Busy {
        /// The lock.
        path: PathBuf,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    State {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The store's path cannot be handed to the lab.
    #[error("the store {path} cannot be shared with a lab: {why}")]
    Store {
        /// The path.
        path: PathBuf,
        /// Why not.
        why: &'static str,
    },
    /// A program could not be started.
    #[error("cannot start {program}: {source}")]
    Spawn {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A program ended before the lab was up.
    #[error("{program} ended before the lab was up: {said} (log: {log})")]
    Died {
        /// The program.
        program: &'static str,
        /// The end of its log.
        said: String,
        /// The log.
        log: PathBuf,
    },
    /// The lab did not come up.
    #[error("the lab did not come up: {said} (log: {log})")]
    NotReady {
        /// The end of its log.
        said: String,
        /// The log.
        log: PathBuf,
    },
    /// The lab could not be reached.
    #[error("the lab does not answer: {0}")]
    Connect(#[source] io::Error),
    /// The lab did not understand.
    #[error("the lab does not answer: {0}")]
    Client(#[from] ClientError),
    /// Its processes could not be ended.
    #[error("the lab's processes cannot be ended: {0}")]
    End(#[source] io::Error),
}

impl LabError {
    fn died(program: &'static str, log: &Path) -> Self {
        Self::Died { program, said: last_lines(log), log: log.to_owned() }
    }
}

/// The end of a log, in one line.
fn last_lines(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.contains("warning: TCG doesn't support"))
        .collect();
    if lines.is_empty() {
        return "it said nothing".to_owned();
    }
    lines[lines.len().saturating_sub(3)..].join("; ").chars().take(500).collect()
}

/// What a look at a lab shows.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "state", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum LabStatus {
    /// Nothing runs.
    Down,
    /// It answers.
    Up {
        /// The emulator's process.
        pid: i32,
        /// TCP port on 127.0.0.1.
        port: u16,
        /// Since the emulator was started, in seconds.
        uptime_s: u64,
        /// Memory in MiB.
        memory_mib: u32,
        /// Virtual CPUs.
        vcpus: u8,
        /// The store it shares.
        store: PathBuf,
        /// The kernel that runs in it.
        kernel: String,
        /// Commands running through its server.
        sessions: u32,
    },
    /// Its processes run, but it does not answer (yet).
    Unresponsive {
        /// Its processes.
        pids: Vec<i32>,
        /// Why it is thought so.
        why: String,
    },
}

/// A lab that is up.
#[derive(Debug, Clone)]
pub struct Lab {
    state: StateDir,
    record: Record,
}

impl Lab {
    /// The lab of `config`: the one that runs, or a new one. Returns when it answers.
    ///
    /// # Errors
    /// What is missing, or why it did not come up; nothing is left running then.
    pub fn ensure_up(config: &LabConfig, events: &mut dyn FnMut(Event)) -> Result<Self, LabError> {
        let state = StateDir::open(&config.state_dir)?;
        let _lock = state.lock()?;
        match Self::attach(&state, START_TIMEOUT) {
            Ok(Some(lab)) => return Ok(lab),
            Ok(None) => {}
            Err(error) => events(Event::Replacing { why: error.to_string() }),
        }
        process::end_all(state.path()).map_err(LabError::End)?;
        state.clear();
        let started = Self::start(&state, config, events);
        if started.is_err() {
            // The logs stay: the error names them.
            process::end_all(state.path()).map_err(LabError::End)?;
            state.clear();
        }
        started
    }

    /// The lab that runs in `state`, if one does.
    fn attach(state: &StateDir, patience: Duration) -> Result<Option<Self>, LabError> {
        let processes = process::find(state.path()).map_err(LabError::End)?;
        let Some(record) = state.read() else { return Ok(None) };
        if !processes.iter().any(|process| process.emulator) {
            return Ok(None);
        }
        let lab = Self { state: state.clone(), record };
        // It may be one that another command started and did not live to see.
        lab.wait_until_ready(patience, || {
            Ok(process::find(state.path())
                .is_ok_and(|found| found.iter().any(|process| process.emulator)))
        })?;
        lab.ping()?;
        Ok(Some(lab))
    }

    fn start(
        state: &StateDir,
        config: &LabConfig,
        events: &mut dyn FnMut(Event),
    ) -> Result<Self, LabError> {
        Machine::check_tools()?;
        let store = check_store(&config.store)?;
        let image = image::prepare(config, events)?;
        let io = |name: &str| {
            let path = state.file(name);
            move |source| LabError::State { path, source }
        };
        let token = record::new_token().map_err(io("lab.json"))?;
        let mut archive = fs::read(&image.initramfs).map_err(io("initrd"))?;
        let settings = settings(&token, &store, config);
        archive.extend(initramfs::files(&[("lab.conf", 0o600, &settings)]));
        state.write_private("initrd", &archive)?;
        drop(archive);

        let port = machine::free_port().map_err(io("lab.json"))?;
        let lab = Self { state: state.clone(), record: Record::new(port, token, config) };
        state.write(&lab.record)?;
        events(Event::Starting);
        let begin = Instant::now();
        let mut machine = Machine::start(state, &image, config, port)?;
        let ready = lab.wait_until_ready(START_TIMEOUT, || {
            Ok(machine.emulator.try_wait().map_err(LabError::End)?.is_none())
        });
        machine.detach();
        ready?;
        lab.ping()?;
        let _ = fs::remove_file(state.file("initrd"));
        events(Event::Ready { after: begin.elapsed() });
        Ok(lab)
    }

    /// Waits for the lab's word on its serial line while `alive` holds.
    fn wait_until_ready(
        &self,
        patience: Duration,
        mut alive: impl FnMut() -> Result<bool, LabError>,
    ) -> Result<(), LabError> {
        let log = self.state.file("serial.log");
        let deadline = Instant::now() + patience;
        loop {
            let said = fs::read(&log).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            if said.contains(READY) {
                return Ok(());
            }
            if let Some(at) = said.find(FAILED) {
                let why = said[at + FAILED.len()..].lines().next().unwrap_or_default();
                return Err(LabError::NotReady { said: why.trim().to_owned(), log });
            }
            if !alive()? {
                // A machine that powered off said why on its console; an emulator that could not
                // start, in its own log.
                let log = if said.trim().is_empty() { self.state.file("qemu.log") } else { log };
                return Err(LabError::died("qemu", &log));
            }
            if Instant::now() > deadline {
                return Err(LabError::NotReady { said: last_lines(&log), log });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn ping(&self) -> Result<(), LabError> {
        let mut client = self.connect()?;
        client.set_timeout(Some(PING_TIMEOUT));
        Ok(client.ping()?)
    }

    /// A new connection to the server inside, for requests, files or one command.
    ///
    /// # Errors
    /// The lab is gone.
    pub fn connect(&self) -> Result<Client<TcpStream>, LabError> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.record.port));
        let stream =
            TcpStream::connect_timeout(&address, PING_TIMEOUT).map_err(LabError::Connect)?;
        stream.set_nodelay(true).map_err(LabError::Connect)?;
        Ok(Client::with_token(stream, self.record.token.as_bytes()))
    }

    /// Where the lab finds the machine's file `path` as it is now: the store at its own path,
    /// everything else below `/.host`. Use it for programs, which may be rebuilt while the lab
    /// is up.
    #[must_use]
    pub fn host_path(&self, path: &Path) -> PathBuf {
        if path.starts_with(&self.record.store) {
            return path.to_owned();
        }
        Path::new(HOST).join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The kernel's and init's messages.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.state.file("serial.log")
    }

    /// Looks at the lab in `state_dir` without starting or changing anything.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn status(state_dir: &Path) -> Result<LabStatus, LabError> {
        let processes = process::find(state_dir).map_err(LabError::End)?;
        if processes.is_empty() {
            return Ok(LabStatus::Down);
        }
        let state = StateDir::open(state_dir)?;
        let pids = processes.iter().map(|process| process.pid).collect();
        let info = match Self::attach(&state, Duration::ZERO) {
            Ok(Some(lab)) => lab.connect().and_then(|mut client| Ok((client.info()?, lab))),
            Ok(None) => return Ok(LabStatus::Unresponsive { pids, why: "no emulator".into() }),
            Err(error) => Err(error),
        };
        let emulator = processes.iter().find(|process| process.emulator);
        match (info, emulator) {
            (Ok((info, lab)), Some(emulator)) => {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                let now = now.map_or(0, |since| since.as_secs());
                Ok(LabStatus::Up {
                    pid: emulator.pid,
                    port: lab.record.port,
                    uptime_s: now.saturating_sub(lab.record.started),
                    memory_mib: lab.record.memory_mib,
                    vcpus: lab.record.vcpus,
                    store: lab.record.store,
                    kernel: info.kernel,
                    sessions: info.sessions,
                })
            }
            (Err(error), _) => Ok(LabStatus::Unresponsive { pids, why: error.to_string() }),
            (Ok(_), None) => Ok(LabStatus::Down),
        }
    }

    /// Ends the lab in `state_dir`: asks it to power off, then ends what is left. Returns whether
    /// anything was running; afterwards nothing is.
    ///
    /// # Errors
    /// A process that does not end even when killed.
    pub fn down(state_dir: &Path) -> Result<bool, LabError> {
        if !state_dir.exists() && process::find(state_dir).map_err(LabError::End)?.is_empty() {
            return Ok(false);
        }
        let state = StateDir::open(state_dir)?;
        let lock = state.lock()?;
        let processes = process::find(state.path()).map_err(LabError::End)?;
        if let Ok(Some(lab)) = Self::attach(&state, Duration::ZERO)
            && let Ok(mut client) = lab.connect()
        {
            // The store's dirty pages are written before it goes.
            client.set_timeout(Some(POWER_OFF_TIMEOUT));
            let accepted = client.shutdown().is_ok();
            // It waits for its last client to hang up.
            drop(client);
            if accepted {
                process::wait_for_end(&processes, POWER_OFF_TIMEOUT);
            }
        }
        process::end_all(state.path()).map_err(LabError::End)?;
        state.remove(lock);
        Ok(!processes.is_empty())
    }
}

/// The store's real path, if a lab can show it under that path.
fn check_store(store: &Path) -> Result<PathBuf, LabError> {
    let refuse = |why| LabError::Store { path: store.to_owned(), why };
    let real = store
        .canonicalize()
        .map_err(|source| LabError::State { path: store.to_owned(), source })?;
    if real != store {
        return Err(refuse("its path must be absolute and without links"));
    }
    if real.as_os_str().as_encoded_bytes().contains(&b'\n') {
        return Err(refuse("its path has a line break"));
    }
    if ["/proc", "/sys", "/dev", "/run"].iter().any(|hidden| real.starts_with(hidden))
        || real == Path::new("/")
    {
        return Err(refuse("the lab has its own /, /proc, /sys, /dev and /run"));
    }
    Ok(real)
}

/// The settings for init: `key=value` lines.
fn settings(token: &str, store: &Path, config: &LabConfig) -> Vec<u8> {
    let mut text =
        format!("token={token}\nport={}\nidle={}\n", machine::GUEST_PORT, config.idle.as_secs());
    text.push_str("store=");
    let mut bytes = text.into_bytes();
    bytes.extend(store.as_os_str().as_encoded_bytes());
    bytes.push(b'\n');
    bytes
}
