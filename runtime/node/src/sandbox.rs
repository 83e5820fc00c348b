//! One sandbox: a machine made from a template or from its snapshot, used, and gone.
//!
//! ```text
//!            boot                              freeze
//!  (none) ─────────► Booting ──doorbell──► Ready ─────► Frozen ──► (snapshot files)
//!     │    restore                           ▲ │
//!     └────────────► Restoring ──fixed up────┘ └─drop──► (gone)
//!                        └── any item of the fix-up failed ──► (gone)
//! ```
//! [`Sandbox`] exists only while its machine is `Ready` or `Frozen`. Restoring ends with one
//! message to the guest agent that makes the machine its own (entropy, clock, names); until it has
//! been answered completely no user process runs, and if it is not, the machine is destroyed.
//! Dropping a sandbox ends its machine and removes its directory; so does the death of the
//! process that holds it.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parbake_cache::template::{MachineShape, ProcessConfig};
use parbake_protocol::agent::{
    self, AGENT_PORT, Client, ClientError, Fixup, FixupReport, GuestConfig, GuestInfo,
    QuiesceReport, QuiesceRequest, Step, ZeroFill,
};
use parbake_protocol::vmm::{
    self, Disk, Event, Jail, SnapshotReport, Start, StopReason, VmmConfig, Vsock, doorbell,
};

use crate::filling::{Fill, Filler};
use crate::monitor::{Monitor, MonitorError, log_tail};
use crate::pager;
use crate::programs::{self, ProgramMissing};
use crate::rundir::{self, RunDir};

/// A guest's context id on its own socket device; each sandbox has a device of its own, so all
/// can have the same.
const GUEST_CID: u32 = 3;

/// How long the agent of a restored guest may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// What can go wrong with a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The monitor is not installed.
    #[error(transparent)]
    Program(#[from] ProgramMissing),
    /// The sandbox's own directory.
    #[error("cannot prepare {}", path.display())]
    RunDir {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No random bytes from the host.
    #[error("the host gives no random bytes: {0}")]
    Entropy(String),
    /// The monitor.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    /// The guest agent.
    #[error("the guest does not answer as it should")]
    Agent(#[source] ClientError),
    /// The guest ended before it was ready.
    #[error("the guest ended before it was ready ({reason}){}", console_tail(.console))]
    GuestEnded {
        /// How.
        reason: String,
        /// The end of its console.
        console: String,
    },
    /// The guest was not ready in time.
    #[error("the guest was not ready within {} s{}", .after.as_secs(), console_tail(.console))]
    NotReady {
        /// The limit.
        after: Duration,
        /// The end of its console.
        console: String,
    },
    /// The restored guest could not be made its own machine; it was destroyed.
    #[error("the restored machine could not be made its own: {}", failed(.0))]
    Fixup(Vec<Step>),
    /// The guest could not be made ready for the freeze.
    #[error("the guest could not be made ready for the freeze: {}", failed(.0))]
    Quiesce(Vec<Step>),
    /// Interrupted by the user.
    #[error("interrupted")]
    Interrupted,
}

fn console_tail(console: &str) -> String {
    if console.is_empty() { String::new() } else { format!("; its console ends:\n{console}") }
}

fn failed(steps: &[Step]) -> String {
    let failed: Vec<String> = steps
        .iter()
        .filter_map(|step| step.error.as_ref().map(|error| format!("{}: {error}", step.name)))
        .collect();
    if failed.is_empty() { "user processes did not start".to_owned() } else { failed.join("; ") }
}

/// The files a cold boot needs, installed and immutable.
#[derive(Debug, Clone)]
pub struct BootFiles {
    /// The unpacked kernel.
    pub kernel: PathBuf,
    /// Modules and agent.
    pub initramfs: PathBuf,
    /// Kernel command line.
    pub cmdline: String,
    /// The root filesystem, shared read-only by all sandboxes of the template.
    pub rootfs: PathBuf,
}

/// The files a restore needs, installed and immutable.
#[derive(Debug, Clone)]
pub struct RestoreFiles {
    /// vCPU, irqchip and device state.
    pub state: PathBuf,
    /// Guest memory.
    pub memory: PathBuf,
    /// The disk's part of the snapshot.
    pub disk: PathBuf,
    /// The root filesystem.
    pub rootfs: PathBuf,
}

/// What a person may choose for one sandbox.
#[derive(Debug, Clone)]
pub struct SandboxOptions {
    /// Where private disk overlays go; absent: memory.
    pub scratch: Option<PathBuf>,
    /// How tightly the monitor locks itself in.
    pub jail: Jail,
    /// How long the guest may take until it is ready.
    pub ready_timeout: Duration,
    /// The guest's host name; absent: the sandbox's id.
    pub hostname: Option<String>,
    /// `NAME=value` entries for every command of this run.
    pub env: Vec<Vec<u8>>,
    /// Looked at while waiting: give up when it returns true.
    pub cancelled: Option<fn() -> bool>,
}

impl Default for SandboxOptions {
    fn default() -> Self {
        Self {
            scratch: None,
            jail: Jail::default(),
            ready_timeout: Duration::from_secs(60),
            hostname: None,
            env: Vec::new(),
            cancelled: None,
        }
    }
}

/// Where the time of a create went.
#[derive(Debug, Clone, Default)]
pub struct Timings {
    /// Spawning the monitor to its vCPUs running.
    pub started: Duration,
    /// Spawning the monitor to the guest agent's first answer (boot: its doorbell).
    pub ready: Duration,
    /// The monitor's own stages: name and microseconds since its `main`.
    pub stages: Vec<(String, u64)>,
    /// The isolation layers in force.
    pub jail: Vec<String>,
}

/// A machine and the directory with its sockets.
#[derive(Debug)]
pub struct Sandbox {
    // Dropped in this order: the machine first, then its directory.
    monitor: Monitor,
    first: Option<Client<UnixStream>>,
    _filler: Option<Filler>,
    rundir: RunDir,
    id: String,
    timings: Timings,
    fixup: Option<FixupReport>,
}

impl Sandbox {
    /// Boots a template's kernel and waits until the agent rings.
    ///
    /// # Errors
    /// See [`SandboxError`]; nothing is left running or on disk.
    pub fn boot(
        files: &BootFiles,
        shape: MachineShape,
        process: &ProcessConfig,
        options: &SandboxOptions,
    ) -> Result<Self, SandboxError> {
        let start = Start::Boot {
            kernel: files.kernel.clone(),
            initramfs: Some(files.initramfs.clone()),
            cmdline: files.cmdline.clone(),
        };
        let disk = Disk {
            base: files.rootfs.clone(),
            overlay: None,
            scratch: options.scratch.clone(),
            read_only: false,
            write_limit: 0,
        };
        let begun = Instant::now();
        let mut sandbox = Self::spawn(start, shape, disk, options, None)?;
        sandbox.wait_ready(begun, options)?;
        sandbox.timings.ready = begun.elapsed();
        let mut client = sandbox.connect()?;
        client.configure(guest_config(process)).map_err(SandboxError::Agent)?;
        sandbox.first = Some(client);
        Ok(sandbox)
    }

    /// Restores a snapshot and makes the machine its own.
    ///
    /// # Errors
    /// See [`SandboxError`]; nothing is left running or on disk.
    pub fn restore(
        files: &RestoreFiles,
        shape: MachineShape,
        options: &SandboxOptions,
    ) -> Result<Self, SandboxError> {
        Self::restore_from(files, shape, options, None)
    }

    /// The same from images that `fill` completes while the machine runs.
    ///
    /// # Errors
    /// See [`SandboxError`]; nothing is left running or on disk.
    pub fn restore_from(
        files: &RestoreFiles,
        shape: MachineShape,
        options: &SandboxOptions,
        fill: Option<Arc<dyn Fill>>,
    ) -> Result<Self, SandboxError> {
        let fill = fill.map(|fill| (files.memory.as_path(), fill));
        let start = Start::Restore {
            state: files.state.clone(),
            memory: files.memory.clone(),
            generation_id: random()?,
            paused: false,
        };
        let disk = Disk {
            base: files.rootfs.clone(),
            overlay: Some(files.disk.clone()),
            scratch: options.scratch.clone(),
            read_only: false,
            write_limit: 0,
        };
        let begun = Instant::now();
        let mut sandbox = Self::spawn(start, shape, disk, options, fill)?;
        sandbox.wait_started(begun, options)?;
        let mut client = sandbox.connect()?;
        let fixup = Fixup {
            entropy: random()?,
            instance_id: sandbox.id.clone(),
            hostname: options.hostname.clone().unwrap_or_else(|| sandbox.id.clone()),
            machine_id: random()?,
            env: options.env.clone(),
            ssh_host_keys: true,
            network: None,
            // Last, so that it is as fresh as can be.
            realtime_ns: realtime_ns(),
        };
        let report = client.fixup(fixup).map_err(|error| sandbox.blame(error))?;
        if !report.complete() {
            return Err(SandboxError::Fixup(report.items));
        }
        sandbox.timings.ready = begun.elapsed();
        sandbox.fixup = Some(report);
        sandbox.first = Some(client);
        Ok(sandbox)
    }

    fn spawn(
        start: Start,
        shape: MachineShape,
        disk: Disk,
        options: &SandboxOptions,
        fill: Option<(&Path, Arc<dyn Fill>)>,
    ) -> Result<Self, SandboxError> {
        let program = programs::vmm()?;
        rundir::sweep();
        let id = new_id()?;
        let rundir = RunDir::create(&id)
            .map_err(|source| SandboxError::RunDir { path: rundir::base().join(&id), source })?;
        let filler = match fill {
            None => None,
            Some((memory, fill)) => {
                let filler = Filler::start(&rundir.filling(), memory, fill);
                let path = rundir.filling();
                Some(filler.map_err(|source| SandboxError::RunDir { path, source })?)
            }
        };
        let config = VmmConfig {
            version: vmm::VERSION,
            vcpus: shape.vcpus,
            memory_mib: shape.memory_mib,
            start,
            disks: vec![disk],
            vsock: Some(Vsock { guest_cid: GUEST_CID, socket: rundir.socket() }),
            net: None,
            rng: true,
            console: Some(rundir.console()),
            console_limit: 4 << 20,
            jail: options.jail.clone(),
            filling: filler
                .is_some()
                .then(|| vmm::Filling { socket: rundir.filling(), memory: pager::available() }),
        };
        let monitor = Monitor::spawn(&program, &config, &rundir.monitor_log())?;
        let timings = Timings::default();
        Ok(Self { monitor, first: None, _filler: filler, rundir, id, timings, fixup: None })
    }

    /// Waits until the vCPUs run.
    fn wait_started(
        &mut self,
        begun: Instant,
        options: &SandboxOptions,
    ) -> Result<(), SandboxError> {
        loop {
            if let Event::Started { stages, jail } = self.next_event(begun, options)? {
                self.timings.started = begun.elapsed();
                self.timings.stages = stages;
                self.timings.jail = jail;
                return Ok(());
            }
        }
    }

    /// Waits until the agent rings the doorbell.
    fn wait_ready(&mut self, begun: Instant, options: &SandboxOptions) -> Result<(), SandboxError> {
        self.wait_started(begun, options)?;
        loop {
            match self.next_event(begun, options)? {
                Event::Doorbell { value: doorbell::READY } => return Ok(()),
                Event::Doorbell { value: doorbell::BOOT_FAILED } => {
                    return Err(self.ended("the agent could not bring it up".to_owned()));
                }
                _ => {}
            }
        }
    }

    /// The next event that does not end the machine.
    fn next_event(
        &mut self,
        begun: Instant,
        options: &SandboxOptions,
    ) -> Result<Event, SandboxError> {
        let limit = begun + options.ready_timeout;
        loop {
            if options.cancelled.is_some_and(|cancelled| cancelled()) {
                return Err(SandboxError::Interrupted);
            }
            let soon = Instant::now() + Duration::from_millis(200);
            match self.monitor.next_event(limit.min(soon)) {
                Ok(Event::Failed { kind, message }) => {
                    return Err(MonitorError::Failed { kind, message }.into());
                }
                Ok(Event::Stopped { reason, detail }) => {
                    let how = match reason {
                        StopReason::PowerOff => "it switched itself off",
                        StopReason::Reset => "it reset itself, as after a kernel panic",
                        StopReason::Crash => "its processor stopped",
                        StopReason::Quit => "it was ended",
                    };
                    let detail =
                        if detail.is_empty() { String::new() } else { format!(": {detail}") };
                    return Err(self.ended(format!("{how}{detail}")));
                }
                Ok(event) => return Ok(event),
                Err(MonitorError::Timeout(_)) if Instant::now() >= limit => {
                    return Err(SandboxError::NotReady {
                        after: options.ready_timeout,
                        console: log_tail(&self.rundir.console()),
                    });
                }
                Err(MonitorError::Timeout(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn ended(&self, reason: String) -> SandboxError {
        SandboxError::GuestEnded { reason, console: log_tail(&self.rundir.console()) }
    }

    /// An agent that stops answering often means a machine that is gone; that says more.
    pub fn blame(&mut self, error: ClientError) -> SandboxError {
        let options =
            SandboxOptions { ready_timeout: Duration::from_millis(200), ..Default::default() };
        let begun = Instant::now();
        loop {
            match self.next_event(begun, &options) {
                // Of no matter; the end may come after it.
                Ok(_) => {}
                Err(ended @ (SandboxError::GuestEnded { .. } | SandboxError::Monitor(_))) => {
                    return ended;
                }
                Err(_) => return SandboxError::Agent(error),
            }
        }
    }

    /// The sandbox's id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The monitor's process id.
    #[must_use]
    pub fn monitor_pid(&self) -> u32 {
        self.monitor.pid()
    }

    /// Where the guest's console goes.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.rundir.console()
    }

    /// Where the time of the create went.
    #[must_use]
    pub fn timings(&self) -> &Timings {
        &self.timings
    }

    /// What the fix-up after the restore did; absent after a cold boot.
    #[must_use]
    pub fn fixup_report(&self) -> Option<&FixupReport> {
        self.fixup.as_ref()
    }

    /// What the monitor is doing.
    ///
    /// # Errors
    /// [`SandboxError::Monitor`].
    pub fn status(&mut self) -> Result<vmm::Status, SandboxError> {
        Ok(self.monitor.status()?)
    }

    /// A connection to the guest agent, for requests and one exec or file transfer.
    ///
    /// # Errors
    /// [`SandboxError::Agent`].
    pub fn connect(&mut self) -> Result<Client<UnixStream>, SandboxError> {
        if let Some(client) = self.first.take() {
            return Ok(client);
        }
        match agent::connect_vsock_uds(self.rundir.socket(), AGENT_PORT, CONNECT_TIMEOUT) {
            Ok(stream) => Ok(Client::new(stream)),
            Err(error) => Err(self.blame(error.into())),
        }
    }

    /// The guest, as its agent describes it.
    ///
    /// # Errors
    /// [`SandboxError::Agent`].
    pub fn info(&mut self) -> Result<GuestInfo, SandboxError> {
        self.connect()?.info().map_err(SandboxError::Agent)
    }

    /// Freezes the machine and writes it into `files`: caches dropped, free memory overwritten,
    /// user processes stopped, connections closed, devices drained. Afterwards only dropping
    /// the sandbox makes sense.
    ///
    /// # Errors
    /// See [`SandboxError`]; the files are then incomplete.
    pub fn freeze(&mut self, files: &FreezeFiles) -> Result<Frozen, SandboxError> {
        self.freeze_with(files, FreezeMemory::default())
    }

    /// As [`Sandbox::freeze`], with a choice of what becomes of memory nobody uses.
    ///
    /// # Errors
    /// See [`SandboxError`]; the files are then incomplete.
    pub fn freeze_with(
        &mut self,
        files: &FreezeFiles,
        memory: FreezeMemory,
    ) -> Result<Frozen, SandboxError> {
        let begun = Instant::now();
        let mut client = self.connect()?;
        let request = QuiesceRequest {
            end_sessions: false,
            freeze: true,
            forget_identity: true,
            sync: true,
            drop_caches: !memory.keep_caches,
            zero_free_memory: (!memory.keep_free_memory).then(ZeroFill::default),
            close_connections: true,
        };
        let report = client.quiesce(request).map_err(SandboxError::Agent)?;
        drop(client);
        if !report.complete() {
            return Err(SandboxError::Quiesce(report.steps));
        }
        let quiesced = begun.elapsed();
        self.monitor.pause()?;
        let snapshot = self.monitor.snapshot(
            &files.state,
            &files.memory,
            std::slice::from_ref(&files.disk),
        )?;
        Ok(Frozen { snapshot, report, quiesced, total: begun.elapsed() })
    }
}

/// What becomes of memory nobody uses at the freeze.
#[derive(Debug, Clone, Copy, Default)]
pub struct FreezeMemory {
    /// File caches stay.
    pub keep_caches: bool,
    /// Free memory is not overwritten with zeros.
    pub keep_free_memory: bool,
}

/// Open, empty, writable files for [`Sandbox::freeze`].
#[derive(Debug)]
pub struct FreezeFiles {
    /// For vCPU, irqchip and device state.
    pub state: File,
    /// For guest memory.
    pub memory: File,
    /// For what the disk differs in from its base.
    pub disk: File,
}

impl FreezeFiles {
    /// Creates `state`, `memory` and `disk` in `directory`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create_in(directory: &Path) -> io::Result<Self> {
        let create = |name| {
            File::options().read(true).write(true).create_new(true).open(directory.join(name))
        };
        Ok(Self { state: create("state")?, memory: create("memory")?, disk: create("disk")? })
    }
}

/// A frozen machine.
#[derive(Debug)]
pub struct Frozen {
    /// What the monitor wrote.
    pub snapshot: SnapshotReport,
    /// What the agent did before.
    pub report: QuiesceReport,
    /// How long the agent took.
    pub quiesced: Duration,
    /// How long everything took.
    pub total: Duration,
}

fn guest_config(process: &ProcessConfig) -> GuestConfig {
    GuestConfig {
        env: process.env.iter().map(|entry| entry.clone().into_bytes()).collect(),
        user: process.user.clone(),
        cwd: process.working_dir.clone().into_bytes(),
    }
}

fn random<const N: usize>() -> Result<[u8; N], SandboxError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| SandboxError::Entropy(error.to_string()))?;
    Ok(bytes)
}

/// Twelve letters and digits, the first a letter: a host name, a file name, and easy to say.
fn new_id() -> Result<String, SandboxError> {
    const LETTERS: &[u8; 32] = b"abcdefghjkmnpqrstvwxyz0123456789";
    let bytes: [u8; 12] = random()?;
    let letter = |(index, byte): (usize, &u8)| {
        let choice = if index == 0 { byte % 22 } else { byte % 32 };
        char::from(LETTERS[usize::from(choice)])
    };
    Ok(bytes.iter().enumerate().map(letter).collect())
}

fn realtime_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
