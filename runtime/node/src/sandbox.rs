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
//! process that holds it, unless the sandbox was made to [outlive](SandboxOptions::outlive) it:
//!
//! ```text
//!  Ready ──detach, or death of the process──► (alone) ──adopt──► Ready
//! ```

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parbake_cache::template::{MachineShape, ProcessConfig};
use parbake_protocol::agent::{
    self, AGENT_PORT, Client, ClientError, Fixup, FixupReport, GuestConfig, GuestInfo,
    NetworkConfig, QuiesceReport, QuiesceRequest, Step, ZeroFill,
};
use parbake_protocol::vmm::{
    self, Disk, Event, Jail, Net, SnapshotReport, Start, StopReason, Tap, VmmConfig, Vsock,
    doorbell,
};

use crate::event::{EventKind, EventSender, SandboxEvent};
use crate::filling::{Fill, Filler};
use crate::limits::cgroup::Cgroup;
use crate::limits::stall::StallWatch;
use crate::limits::{CgroupError, CgroupPolicy, Limit, LimitHit, Limits};
use crate::monitor::{Monitor, MonitorError, log_tail};
use crate::network::pool::{GATEWAY, GUEST, GUEST_MAC, PREFIX};
use crate::network::{Egress, EgressCounts, Lease, NetworkError, Pool, PoolOptions};
use crate::programs::{self, ProgramMissing};
use crate::rundir::{self, RunDir};
use crate::workspace::Workspace;

/// A guest's context id on its own socket device; each sandbox has a device of its own, so all
/// can have the same.
const GUEST_CID: u32 = 3;

/// The network device's name in the guest.
const INTERFACE: &str = "eth0";

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
    /// The guest's agent is of another build.
    #[error(
        "the guest's agent is too old to limit processes; build and bake its template again, or do \
         without that limit"
    )]
    OldAgent,
    /// The guest is gone.
    #[error("the guest ended ({reason}){}", console_tail(.console))]
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
    /// Its way out could not be prepared.
    #[error("the sandbox gets no network")]
    Network(#[from] NetworkError),
    /// The host cannot hold it to its limits, which was required.
    #[error("the sandbox cannot be held to its limits")]
    Cgroup(#[from] CgroupError),
    /// A limit was reached that ends the machine.
    #[error("the sandbox was ended: {}", .0.detail)]
    Limit(LimitHit),
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
    /// Further disks, `/dev/vdb` and on, which the guest cannot write to.
    pub more_disks: Vec<PathBuf>,
}

/// The files a restore needs, installed and immutable.
#[derive(Debug, Clone)]
pub struct RestoreFiles {
    /// vCPU, irqchip and device state.
    pub state: PathBuf,
    /// Guest memory.
    pub memory: PathBuf,
    /// Pages that are laid over it: those of [`Extent::Difference`].
    pub difference: Option<PathBuf>,
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
    /// What it may reach; nothing: its network device leads nowhere.
    pub egress: Egress,
    /// Where its network comes from; absent: prepared while it waits.
    pub network_pool: Option<Arc<Pool>>,
    /// What it may use of the host.
    pub limits: Limits,
    /// Where events go (denied egress, limits reached); absent: nowhere.
    pub events: Option<EventSender>,
    /// Looked at while waiting: give up when it returns true.
    pub cancelled: Option<fn() -> bool>,
    /// The sandbox's id: a word of letters, digits and `-`; absent: a new one.
    pub id: Option<String>,
    /// The sandbox outlives this process, in a directory of its own below this one, from which
    /// [`Sandbox::adopt`] takes it over. Absent: it ends with this process.
    pub outlive: Option<PathBuf>,
    /// A volume that outlives it.
    pub workspace: Option<Workspace>,
    /// The sandbox continues the run that was frozen: the environment of that run stays.
    pub continues: bool,
}

impl Default for SandboxOptions {
    fn default() -> Self {
        Self {
            scratch: None,
            jail: Jail::default(),
            ready_timeout: Duration::from_secs(60),
            hostname: None,
            env: Vec::new(),
            egress: Egress::default(),
            network_pool: None,
            limits: Limits::default(),
            events: None,
            cancelled: None,
            id: None,
            outlive: None,
            workspace: None,
            continues: false,
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
    lease: Option<Lease>,
    /// Of a machine with a memory limit of its own.
    stall: Option<StallWatch>,
    cgroup: Option<Cgroup>,
    _filler: Option<Filler>,
    rundir: RunDir,
    id: String,
    events: Option<EventSender>,
    /// Limits reached so far, each once.
    hits: Vec<LimitHit>,
    timings: Timings,
    fixup: Option<FixupReport>,
    /// A workspace is mounted.
    has_workspace: bool,
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
            write_limit: options.limits.disk_bytes.unwrap_or(0),
        };
        let begun = Instant::now();
        let more = files.more_disks.iter().map(|base| Disk {
            base: base.clone(),
            overlay: None,
            scratch: None,
            read_only: true,
            write_limit: 0,
        });
        let disks = std::iter::once(disk).chain(more).collect();
        let mut sandbox = Self::spawn(start, shape, disks, options, None)?;
        sandbox.wait_ready(begun, options)?;
        sandbox.timings.ready = begun.elapsed();
        let mut client = sandbox.connect()?;
        client.configure(guest_config(process)).map_err(SandboxError::Agent)?;
        sandbox.limit_processes(&mut client, options)?;
        if sandbox.lease.is_some() {
            // The only message that brings an interface up. The rest of it does no harm.
            let report = client.fixup(sandbox.identity(options)?).map_err(SandboxError::Agent)?;
            if !report.complete() {
                return Err(SandboxError::Fixup(report.items));
            }
        }
        sandbox.attach(&mut client, options)?;
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

    /// The same from images that `fill` completes while the machine runs, which takes what
    /// [`crate::pager::available`] looks for.
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
            difference: files.difference.clone(),
            generation_id: random()?,
            paused: false,
        };
        let disk = Disk {
            base: files.rootfs.clone(),
            overlay: Some(files.disk.clone()),
            scratch: options.scratch.clone(),
            read_only: false,
            write_limit: options.limits.disk_bytes.unwrap_or(0),
        };
        let begun = Instant::now();
        let mut sandbox = Self::spawn(start, shape, vec![disk], options, fill)?;
        sandbox.wait_started(begun, options)?;
        let mut client = sandbox.connect()?;
        // Before user processes run.
        sandbox.limit_processes(&mut client, options)?;
        let fixup = sandbox.identity(options)?;
        let report = match options.continues {
            true => client.fixup_keeping_env(fixup),
            false => client.fixup(fixup),
        }
        .map_err(|error| sandbox.blame(error))?;
        if !report.complete() {
            return Err(SandboxError::Fixup(report.items));
        }
        sandbox.attach(&mut client, options)?;
        sandbox.timings.ready = begun.elapsed();
        sandbox.fixup = Some(report);
        sandbox.first = Some(client);
        Ok(sandbox)
    }

    fn limit_processes(
        &mut self,
        client: &mut Client<UnixStream>,
        options: &SandboxOptions,
    ) -> Result<(), SandboxError> {
        if options.limits.guest_processes.is_some() {
            let limited = client.limit_processes(options.limits.guest_processes);
            limited.map_err(|error| match self.blame(error) {
                // What it does not know, it hangs up on.
                SandboxError::Agent(ClientError::Closed) => SandboxError::OldAgent,
                other => other,
            })?;
        }
        Ok(())
    }

    /// Has the guest mount its workspace.
    fn attach(
        &mut self,
        client: &mut Client<UnixStream>,
        options: &SandboxOptions,
    ) -> Result<(), SandboxError> {
        if let Some(workspace) = &options.workspace {
            let mounted = client.mount_workspace(&workspace.path);
            mounted.map_err(|error| self.blame(error))?;
            self.has_workspace = true;
        }
        Ok(())
    }

    /// Ends all user processes and has the guest write its workspace and take it off, if it has
    /// one. To be called before the sandbox is dropped; without, a journal is replayed next time,
    /// and what was not written yet is lost.
    ///
    /// # Errors
    /// See [`SandboxError`]; the sandbox can only be dropped then.
    pub fn release_workspace(&mut self) -> Result<(), SandboxError> {
        if !std::mem::take(&mut self.has_workspace) {
            return Ok(());
        }
        let mut client = self.connect()?;
        client.unmount_workspace().map_err(|error| self.blame(error))
    }

    /// Whether a workspace is mounted in it.
    #[must_use]
    pub fn has_workspace(&self) -> bool {
        self.has_workspace
    }

    /// Says of an adopted sandbox that a workspace is mounted in it.
    pub fn adopt_workspace(&mut self) {
        self.has_workspace = true;
    }

    /// What makes the machine its own.
    fn identity(&self, options: &SandboxOptions) -> Result<Fixup, SandboxError> {
        let network = self.lease.is_some().then(|| NetworkConfig {
            interface: INTERFACE.to_owned(),
            mac: Some(GUEST_MAC),
            address: GUEST.octets(),
            prefix: PREFIX,
            gateway: Some(GATEWAY.octets()),
            dns: vec![GATEWAY.octets()],
        });
        Ok(Fixup {
            entropy: random()?,
            instance_id: self.id.clone(),
            hostname: options.hostname.clone().unwrap_or_else(|| self.id.clone()),
            machine_id: random()?,
            env: options.env.clone(),
            ssh_host_keys: true,
            network,
            // Last, so that it is as fresh as can be.
            realtime_ns: realtime_ns(),
        })
    }

    fn spawn(
        start: Start,
        shape: MachineShape,
        disks: Vec<Disk>,
        options: &SandboxOptions,
        fill: Option<(&Path, Arc<dyn Fill>)>,
    ) -> Result<Self, SandboxError> {
        let program = programs::vmm()?;
        let id = options.id.clone().map_or_else(new_id, Ok)?;
        let base = options.outlive.clone().unwrap_or_else(|| {
            rundir::sweep();
            rundir::base()
        });
        let failed = |source| SandboxError::RunDir { path: base.join(&id), source };
        let rundir = RunDir::create_in(&base, &id).map_err(failed)?;
        let lock = rundir.shared_lock().map_err(failed)?;
        let lease = way_out(&id, options)?;
        // What of the disk can end up in the monitor's own memory.
        let overlay = match &options.scratch {
            Some(_) => 0,
            None => disks.iter().filter(|disk| !disk.read_only).map(overlay_most).sum(),
        };
        let (cgroup, layer) = group(&id, &options.limits, shape, overlay)?;
        let tap = lease.as_ref().map(|_| Tap::Passed);
        let lifetime = options.limits.lifetime;
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
            disks,
            vsock: Some(Vsock { guest_cid: GUEST_CID, socket: rundir.socket() }),
            // Always there, so that every snapshot can be given a network.
            net: Some(Net { tap, mac: GUEST_MAC }),
            rng: true,
            // The same.
            workspace: Some(vmm::Workspace {
                file: options.workspace.as_ref().map(|workspace| workspace.file.clone()),
            }),
            console: Some(rundir.console()),
            console_limit: 4 << 20,
            lifetime_ms: lifetime.map(|life| u64::try_from(life.as_millis()).unwrap_or(u64::MAX)),
            control: options.outlive.is_some().then(|| rundir.control()),
            jail: options.jail.clone(),
            filling: filler
                .is_some()
                .then(|| vmm::Filling { socket: rundir.filling(), memory: true }),
        };
        let tap = lease.as_ref().map(Lease::tap);
        let log = rundir.monitor_log();
        let monitor = Monitor::spawn(&program, &config, &log, lock, tap, cgroup.as_ref())?;
        // With what a machine of its shape can need, it never waits.
        let limited = cgroup.as_ref().filter(|_| options.limits.memory_bytes.is_some());
        let stall = limited.and_then(Cgroup::unified).and_then(StallWatch::start);
        let timings = Timings { jail: layer.into_iter().collect(), ..Timings::default() };
        let events = options.events.clone();
        Ok(Self {
            monitor,
            first: None,
            lease,
            stall,
            cgroup,
            _filler: filler,
            rundir,
            id,
            events,
            hits: Vec::new(),
            timings,
            fixup: None,
            has_workspace: false,
        })
    }

    /// Takes over the sandbox that lives in `directory` and belongs to nobody any more. Its timings
    /// are not known any more, but the isolation layers are.
    ///
    /// # Errors
    /// [`SandboxError::Monitor`] when it does not answer; it is left alone then.
    pub fn adopt(directory: &Path) -> Result<Self, SandboxError> {
        let mut rundir = RunDir::adopt(directory);
        rundir.leave();
        let (monitor, status) = Monitor::adopt(&rundir.control(), &rundir.monitor_log())?;
        let id = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let timings = Timings { jail: status.jail, ..Timings::default() };
        let rundir = RunDir::adopt(directory);
        let cgroup = Cgroup::find(&id);
        Ok(Self {
            monitor,
            first: None,
            lease: None,
            stall: None,
            cgroup,
            _filler: None,
            rundir,
            id,
            events: None,
            hits: Vec::new(),
            timings,
            fixup: None,
            has_workspace: false,
        })
    }

    /// Takes over the network of an adopted sandbox that was made with `egress`. Until then its rules
    /// hold, but no name is answered and no denial told.
    ///
    /// # Errors
    /// [`SandboxError::Network`].
    pub fn adopt_network(
        &mut self,
        pool: &Pool,
        egress: &Egress,
        events: Option<EventSender>,
    ) -> Result<(), SandboxError> {
        if !egress.is_none() && self.lease.is_none() {
            let pid = self.monitor.pid();
            self.lease = Some(pool.adopt(&self.id, pid, egress, events.clone())?);
        }
        self.events = events;
        Ok(())
    }

    /// Goes on ending an adopted sandbox that cannot live on its memory limit.
    pub fn adopt_memory_limit(&mut self) {
        let directory = self.cgroup.as_ref().and_then(Cgroup::unified);
        self.stall = directory.and_then(StallWatch::start);
    }

    /// Lets go of a sandbox that was made to outlive this process.
    pub fn detach(mut self) {
        self.rundir.leave();
        if let Some(group) = self.cgroup.take() {
            group.leave();
        }
        self.monitor.detach();
    }

    /// What it was denied of the network so far; absent: it has none.
    #[must_use]
    pub fn egress_counts(&self) -> Option<EgressCounts> {
        self.lease.as_ref().map(Lease::counts)
    }

    /// The limits it has reached so far, each once; looks, and does not wait.
    pub fn limit_hits(&mut self) -> &[LimitHit] {
        let _ = self.ended_by_itself();
        if let Some(group) = &self.cgroup {
            let (kills, denied, throttled) =
                (group.memory_kills(), group.pids_denied(), group.throttled());
            if kills > 0 && !self.stall.as_ref().is_some_and(StallWatch::ended) {
                self.hit(Limit::Memory, "it needed more host memory than it may have");
            }
            if denied > 0 {
                self.hit(Limit::Pids, "its monitor wanted more threads than it may have");
            }
            if throttled > 0 {
                self.hit(Limit::Cpu, "it was held back to its share of the processors");
            }
        }
        &self.hits
    }

    fn hit(&mut self, limit: Limit, detail: &str) {
        if self.hits.iter().any(|hit| hit.limit == limit) {
            return;
        }
        let hit = LimitHit { limit, detail: detail.to_owned() };
        self.hits.push(hit.clone());
        if let Some(events) = &self.events {
            let (sandbox, at) = (self.id.clone(), SystemTime::now());
            let _ = events.try_send(SandboxEvent { sandbox, at, kind: EventKind::LimitHit(hit) });
        }
    }

    /// How the machine ended, if it has; looks, and does not wait.
    pub fn ended_by_itself(&mut self) -> Option<SandboxError> {
        loop {
            let soon = Instant::now() + Duration::from_millis(1);
            let event = self.monitor.next_event(soon).map_err(|error| self.gone(error));
            match event.and_then(|event| self.unless_ended(event)) {
                Ok(_) => {}
                Err(SandboxError::Monitor(MonitorError::Timeout(_))) => return None,
                Err(ended) => return Some(ended),
            }
        }
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
                self.timings.jail.splice(0..0, jail);
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
                Ok(event) => return self.unless_ended(event),
                Err(MonitorError::Timeout(_)) if Instant::now() >= limit => {
                    return Err(SandboxError::NotReady {
                        after: options.ready_timeout,
                        console: log_tail(&self.rundir.console()),
                    });
                }
                Err(MonitorError::Timeout(_)) => {}
                Err(error) => return Err(self.gone(error)),
            }
        }
    }

    /// The event, unless it says that the machine is gone.
    fn unless_ended(&mut self, event: Event) -> Result<Event, SandboxError> {
        match event {
            Event::DiskFull { .. } => {
                self.hit(
                    Limit::Disk,
                    "it wrote as much to its disk as it may; further writes fail",
                );
                Ok(event)
            }
            Event::Doorbell { value: doorbell::PROCESS_LIMIT } => {
                self.hit(Limit::GuestProcesses, "it has as many processes as it may have");
                Ok(event)
            }
            Event::Stopped { reason: StopReason::Expired, .. } => {
                self.hit(Limit::Lifetime, "its lifetime is over");
                Err(self.limit(Limit::Lifetime))
            }
            Event::Failed { kind, message } => Err(MonitorError::Failed { kind, message }.into()),
            Event::Stopped { reason, detail } => {
                let how = match reason {
                    StopReason::PowerOff => "it switched itself off",
                    StopReason::Reset => "it reset itself, as after a kernel panic",
                    StopReason::Crash => "its processor stopped",
                    StopReason::Quit | StopReason::Expired => "it was ended",
                };
                let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
                Err(self.ended(format!("{how}{detail}")))
            }
            event => Ok(event),
        }
    }

    /// Why a monitor that is gone is gone, as far as its group knows.
    fn gone(&mut self, error: MonitorError) -> SandboxError {
        let stalled = self.stall.as_ref().is_some_and(StallWatch::ended);
        if matches!(error, MonitorError::Died { .. }) && stalled {
            self.hit(
                Limit::Memory,
                "it needed more host memory than it may have: nearly all of its time went into \
                 reading again what had to make room",
            );
            return self.limit(Limit::Memory);
        }
        let killed = self.cgroup.as_ref().is_some_and(|group| group.memory_kills() > 0);
        if matches!(error, MonitorError::Died { .. }) && killed {
            self.hit(Limit::Memory, "it needed more host memory than it may have");
            return self.limit(Limit::Memory);
        }
        error.into()
    }

    fn limit(&self, limit: Limit) -> SandboxError {
        let hit = self.hits.iter().find(|hit| hit.limit == limit);
        let detail = hit.map(|hit| hit.detail.clone()).unwrap_or_default();
        SandboxError::Limit(LimitHit { limit, detail })
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
                Err(
                    ended @ (SandboxError::GuestEnded { .. }
                    | SandboxError::Limit(_)
                    | SandboxError::Monitor(_)),
                ) => return ended,
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

    /// The sandbox's own directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.rundir.path()
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
        let request = QuiesceRequest {
            end_sessions: false,
            freeze: true,
            forget_identity: true,
            sync: true,
            drop_caches: !memory.keep_caches,
            zero_free_memory: (!memory.keep_free_memory).then(ZeroFill::default),
            close_connections: true,
        };
        self.write_frozen(files, Extent::Whole, request)
    }

    /// Freezes the machine as it is, as quickly as may be, and writes it into `files`: user
    /// processes stopped where they are, connections closed. The machine stands still until
    /// [`Sandbox::thaw`]. Running commands are ended if `end_sessions`, else a failure. Whether
    /// the memory is whole, [`SnapshotReport::difference`] says.
    ///
    /// # Errors
    /// See [`SandboxError`]; the files are then incomplete, and the machine may stand still.
    pub fn suspend(
        &mut self,
        files: &FreezeFiles,
        extent: Extent,
        end_sessions: bool,
    ) -> Result<Frozen, SandboxError> {
        let request = QuiesceRequest {
            end_sessions,
            freeze: true,
            forget_identity: true,
            sync: true,
            drop_caches: false,
            zero_free_memory: None,
            close_connections: true,
        };
        self.write_frozen(files, extent, request)
    }

    /// Lets a machine go on that stands still after [`Sandbox::suspend`], or after one that failed.
    ///
    /// # Errors
    /// See [`SandboxError`]; the machine is of no use then.
    pub fn thaw(&mut self) -> Result<(), SandboxError> {
        self.monitor.resume()?;
        self.first = None;
        let mut client = self.connect()?;
        client.thaw().map_err(|error| self.blame(error))
    }

    fn write_frozen(
        &mut self,
        files: &FreezeFiles,
        extent: Extent,
        request: QuiesceRequest,
    ) -> Result<Frozen, SandboxError> {
        let begun = Instant::now();
        let mut client = self.connect()?;
        let report = client.quiesce(request).map_err(SandboxError::Agent)?;
        drop(client);
        if !report.complete() {
            return Err(SandboxError::Quiesce(report.steps));
        }
        let quiesced = begun.elapsed();
        self.monitor.pause()?;
        let paused = begun.elapsed();
        let snapshot = self.monitor.snapshot(
            &files.state,
            &files.memory,
            std::slice::from_ref(&files.disk),
            extent == Extent::Difference,
        )?;
        Ok(Frozen { snapshot, report, quiesced, paused, total: begun.elapsed() })
    }
}

/// How much of a machine's memory is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All that is not zero: for another host, another time.
    Whole,
    /// What differs from the image it was restored from, which a copy needs besides. All, if it
    /// was not restored, or from an image that was still filling up.
    Difference,
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
    /// When the machine stood still, counted from the beginning.
    pub paused: Duration,
    /// How long everything took.
    pub total: Duration,
}

/// The sandbox's network, if it may reach anything.
fn way_out(id: &str, options: &SandboxOptions) -> Result<Option<Lease>, SandboxError> {
    if options.egress.is_none() {
        return Ok(None);
    }
    let events = options.events.clone();
    let lease = match &options.network_pool {
        Some(pool) => pool.take(id, &options.egress, events)?,
        None => Pool::new(PoolOptions::default())?.take(id, &options.egress, events)?,
    };
    Ok(Some(lease))
}

/// A group with the sandbox's limits, and its name among the active layers.
fn group(
    id: &str,
    limits: &Limits,
    shape: MachineShape,
    overlay: u64,
) -> Result<(Option<Cgroup>, Option<String>), SandboxError> {
    if limits.cgroup == CgroupPolicy::Off {
        return Ok((None, None));
    }
    match Cgroup::create(id, &limits.shares(shape, overlay)) {
        Ok(group) => {
            let name = group.describe();
            Ok((Some(group), Some(name)))
        }
        Err(error) if limits.cgroup == CgroupPolicy::Required => Err(error.into()),
        Err(error) => Ok((None, Some(format!("no_cgroup: {error}")))),
    }
}

/// Most bytes of a disk's private overlay.
fn overlay_most(disk: &Disk) -> u64 {
    let size = std::fs::metadata(&disk.base).map_or(0, |metadata| metadata.len());
    if disk.write_limit == 0 { size } else { size.min(disk.write_limit) }
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
///
/// # Errors
/// [`SandboxError::Entropy`].
pub fn new_id() -> Result<String, SandboxError> {
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
