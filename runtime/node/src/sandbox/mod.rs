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

mod ending;
mod error;
mod freeze;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parbake_cache::template::{MachineShape, ProcessConfig};
use parbake_protocol::agent::{
    self, AGENT_PORT, Client, ClientError, Fixup, FixupReport, GuestConfig, GuestInfo,
    NetworkConfig,
};
use parbake_protocol::vmm::{self, Disk, Jail, Net, Start, Tap, VmmConfig, Vsock};

use crate::event::EventSender;
use crate::filling::{Fill, Filler};
use crate::limits::cgroup::Cgroup;
use crate::limits::stall::StallWatch;
use crate::limits::{CgroupPolicy, LimitHit, Limits};
use crate::monitor::Monitor;
use crate::network::pool::{GATEWAY, GUEST, GUEST_MAC, PREFIX};
use crate::network::{Egress, EgressCounts, Lease, Pool, PoolOptions};
use crate::programs;
use crate::rundir::{self, RunDir};
use crate::workspace::Workspace;

pub use self::error::SandboxError;
pub use self::freeze::{Extent, FreezeFiles, FreezeMemory, Frozen};

/// A guest's context id on its own socket device; each sandbox has a device of its own, so all
/// can have the same.
const GUEST_CID: u32 = 3;

/// The network device's name in the guest.
const INTERFACE: &str = "eth0";

/// How long the agent of a restored guest may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

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
