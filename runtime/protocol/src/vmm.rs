//! Host ↔ monitor: the configuration a `parbake-vmm` process starts with, and its control channel.
//!
//! The monitor is started as `parbake-vmm --control-fd N`. `N` is one end of a stream socket pair.
//! Both directions carry JSON documents, one a line ([`MAX_LINE`] bytes at most). The first line
//! the host sends is a [`VmmConfig`]; the monitor opens everything named there, then drops its
//! privileges, starts the guest and answers with events. After that the host sends [`Request`]s
//! and gets exactly one [`Message::Reply`] for each, in order; [`Message::Event`]s come whenever
//! they happen. When the channel closes, the monitor ends the guest and exits; unless the
//! configuration names a [`VmmConfig::control`] socket: then it goes on and listens there for the
//! host to come back. Whoever connects as the same user takes the channel over, one at a time, and
//! speaks [`Request`]s at once. Events that nobody was there to hear are lost.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The version of this channel and of [`VmmConfig`].
pub const VERSION: u32 = 1;

/// The longest line either side accepts, in bytes.
pub const MAX_LINE: usize = 1 << 20;

/// What the guest reads as the serial number of the disk in the workspace's slot.
pub const WORKSPACE_ID: &str = "parbake-workspace";

/// The I/O port of the doorbell: a 32-bit `OUT` there raises [`Event::Doorbell`] with its value.
pub const DOORBELL_PORT: u16 = 0x5042;

/// The I/O ports of the host's wall clock: a 32-bit `IN` from the first takes the time and gives
/// the low half of the nanoseconds since 1970, one from the second gives the high half of the same
/// moment. A message would be late by as long as it waited for a processor.
pub const CLOCK_PORTS: [u16; 2] = [0x5048, 0x504c];

/// Values the guest agent writes to the doorbell.
pub mod doorbell {
    /// The agent listens; the guest is ready for commands.
    pub const READY: u32 = 1;
    /// The guest asks to be switched off at once.
    pub const POWER_OFF: u32 = 2;
    /// The agent could not bring the guest up; the console log says why.
    pub const BOOT_FAILED: u32 = 3;
    /// User processes wanted more processes than they may have; once for each limit that is set.
    pub const PROCESS_LIMIT: u32 = 4;
    /// First value that bare guests and tests may use freely.
    pub const USER: u32 = 0x1000;
}

/// Everything a monitor needs to run one guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VmmConfig {
    /// Always [`VERSION`].
    pub version: u32,
    /// Virtual CPUs, at least 1.
    pub vcpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// How the guest comes to life.
    pub start: Start,
    /// Disks in order: the first is `/dev/vda`.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// The socket device, if wanted.
    #[serde(default)]
    pub vsock: Option<Vsock>,
    /// The network device, if wanted.
    #[serde(default)]
    pub net: Option<Net>,
    /// An entropy device.
    #[serde(default)]
    pub rng: bool,
    /// A slot for a volume that outlives the machine, behind all other devices.
    #[serde(default)]
    pub workspace: Option<Workspace>,
    /// Where the serial console's output goes; absent: nowhere.
    #[serde(default)]
    pub console: Option<PathBuf>,
    /// The most bytes kept of the console's output; the rest is dropped with one line saying so.
    #[serde(default = "default_console_limit")]
    pub console_limit: u64,
    /// How long the machine lives, in milliseconds from its start; absent: as long as the host wants.
    #[serde(default)]
    pub lifetime_ms: Option<u64>,
    /// Outlive the control channel, and listen here for the host to come back.
    #[serde(default)]
    pub control: Option<PathBuf>,
    /// How tightly the monitor locks itself in.
    #[serde(default)]
    pub jail: Jail,
    /// For a restore from images that are not all there yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filling: Option<Filling>,
}

/// Who fills the images while the machine runs (see [`crate::filling`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Filling {
    /// Where the host listens.
    pub socket: PathBuf,
    /// Whether memory is filled, too; otherwise its image is all there, and mapped.
    pub memory: bool,
}

fn default_console_limit() -> u64 {
    4 << 20
}

/// How a guest comes to life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, tag = "kind")]
pub enum Start {
    /// Boot a kernel.
    #[serde(rename_all = "camelCase")]
    Boot {
        /// An ELF image with a PVH entry note, or a 64-bit entry.
        kernel: PathBuf,
        /// Initial file system.
        #[serde(default)]
        initramfs: Option<PathBuf>,
        /// Command line.
        #[serde(default)]
        cmdline: String,
    },
    /// Continue a frozen machine.
    #[serde(rename_all = "camelCase")]
    Restore {
        /// The state file.
        state: PathBuf,
        /// The memory image, mapped privately.
        memory: PathBuf,
        /// Pages to lay over it: what [`SnapshotFiles::difference`] asked for. The state says which.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        difference: Option<PathBuf>,
        /// A fresh VM generation identifier.
        generation_id: [u8; 16],
        /// Leave the vCPUs stopped until [`Request::Resume`].
        #[serde(default)]
        paused: bool,
    },
}

/// A virtio block device: read-only base, frozen overlay, private overlay.
///
/// Reads look in the private overlay, then in `overlay`, then in `base`; writes go to the private
/// overlay, which no other process sees and which vanishes with the monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Disk {
    /// The image all sandboxes of a template share; opened read-only.
    pub base: PathBuf,
    /// The disk's part of a snapshot; opened read-only. The state file says which blocks it holds.
    #[serde(default)]
    pub overlay: Option<PathBuf>,
    /// A directory on a file system with room for the private overlay; absent: memory.
    #[serde(default)]
    pub scratch: Option<PathBuf>,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// The most bytes the guest may write to the private overlay; 0: no limit.
    #[serde(default)]
    pub write_limit: u64,
}

/// A virtio block device for a volume that is no part of the machine, and so of no snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Workspace {
    /// The volume, read and written in place, and locked for as long as the monitor lives. Without
    /// one the device has no sectors, and a frozen machine that has no such device is restored all
    /// the same; with one, a frozen machine is told of the new size.
    #[serde(default)]
    pub file: Option<PathBuf>,
}

/// A virtio socket device with the unix-socket convention: a host client connects to `socket`,
/// sends `CONNECT <port>\n` and reads `OK <port>\n`; a guest connection to host port P arrives at
/// the listener `<socket>_P`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Vsock {
    /// The guest's context id, at least 3.
    pub guest_cid: u32,
    /// Where the monitor listens.
    pub socket: PathBuf,
}

/// A virtio network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Net {
    /// What is behind it. Without anything it leads nowhere: what the guest sends is dropped,
    /// nothing arrives, and a frozen machine that has no such device is restored all the same.
    #[serde(default)]
    pub tap: Option<Tap>,
    /// The guest's hardware address.
    pub mac: [u8; 6],
}

/// An existing tap interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Tap {
    /// Of the monitor's own network namespace, by name.
    Name(String),
    /// Of any namespace: its open descriptor, with virtio headers of 12 bytes, came along with the
    /// configuration's bytes as `SCM_RIGHTS`.
    Passed,
}

/// How tightly the monitor locks itself in once everything is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Jail {
    /// System-call allow-lists, per thread.
    pub seccomp: bool,
    /// File-system and network denial through Landlock.
    pub landlock: bool,
    /// Fresh namespaces with an empty root.
    pub namespaces: bool,
    /// The user and group to become; absent: stay.
    #[serde(default)]
    pub user: Option<(u32, u32)>,
}

impl Default for Jail {
    fn default() -> Self {
        Self { seccomp: true, landlock: true, namespaces: true, user: None }
    }
}

/// What the host asks of a running monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, tag = "op")]
pub enum Request {
    /// Stop the vCPUs and drain the devices.
    Pause,
    /// Let the vCPUs run.
    Resume,
    /// Write the frozen machine into files the host has opened (see [`SnapshotFiles`]). Only while
    /// paused. The guest stays paused.
    Snapshot(SnapshotFiles),
    /// What the monitor is doing.
    Status,
    /// End the guest and exit.
    Quit,
}

/// Where a snapshot goes: one descriptor each, passed as `SCM_RIGHTS` with the request's bytes, in
/// this order: state, memory, then one for each disk. (The jailed monitor can open nothing.)
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotFiles {
    /// How many descriptors come along: 2 and one per disk.
    pub files: u32,
    /// Of memory only the pages that may differ from the image this machine was restored from,
    /// if it was; [`SnapshotReport::difference`] says. For copies on this host.
    #[serde(default)]
    pub difference: bool,
}

/// What the monitor says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Message {
    /// The answer to a [`Request`].
    Reply(Reply),
    /// Something happened.
    Event(Event),
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    /// Done.
    Done,
    /// A snapshot was written.
    Snapshot(SnapshotReport),
    /// The answer to [`Request::Status`].
    Status(Status),
    /// Not done, and why.
    Failed {
        /// For people.
        message: String,
    },
}

/// What a snapshot consists of and how long it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotReport {
    /// Size of the state file in bytes.
    pub state_bytes: u64,
    /// Bytes of memory that are not zero, and were written.
    pub memory_data_bytes: u64,
    /// The memory is what differs from the image the machine was restored from, not whole.
    #[serde(default)]
    pub difference: bool,
    /// Bytes of each disk's overlay.
    pub overlay_data_bytes: Vec<u64>,
    /// 1 for a snapshot of a cold-booted machine, n+1 for one of a restored generation n.
    pub generation: u32,
    /// CPUID vendor of the guest.
    pub cpu_vendor: String,
    /// Feature words of the guest's CPUID, by leaf and register.
    pub cpu_features: std::collections::BTreeMap<String, u32>,
    /// `svm`, `vmx` or `soft`.
    pub kvm_kind: String,
    /// Version of the state format.
    pub state_version: u32,
}

/// What the monitor is doing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// `running` or `paused`.
    pub state: String,
    /// The isolation layers in force, by name.
    pub jail: Vec<String>,
    /// Bytes the guest has written to each disk's private overlay.
    pub overlay_bytes: Vec<u64>,
}

/// Something happened in the monitor or the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    /// The vCPUs run. Stage names and microseconds since the process's first instruction in
    /// `main`, in order.
    Started {
        /// `(stage, microseconds)`.
        stages: Vec<(String, u64)>,
        /// The isolation layers in force, by name.
        jail: Vec<String>,
    },
    /// The guest wrote to the doorbell.
    Doorbell {
        /// What it wrote.
        value: u32,
    },
    /// The guest wrote as much to a disk as it may; further writes fail. Told once for each disk.
    DiskFull {
        /// Its place in [`VmmConfig::disks`].
        disk: u32,
    },
    /// The guest is gone; the monitor exits next.
    Stopped {
        /// Why.
        reason: StopReason,
        /// More for people, e.g. the exit KVM reported.
        detail: String,
    },
    /// The guest could not be started; the monitor exits next.
    Failed {
        /// A stable word: `config`, `kvm`, `kernel`, `memory`, `state`, `disk`, `workspace`, `jail`,
        /// `device`, or `mismatch`: the state is sound but not of this machine or this host.
        kind: String,
        /// For people.
        message: String,
    },
}

/// Why a guest is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StopReason {
    /// It switched itself off.
    PowerOff,
    /// It asked for a reset (a kernel panic, too).
    Reset,
    /// KVM could not go on: triple fault, internal error, failed entry.
    Crash,
    /// The host asked.
    Quit,
    /// [`VmmConfig::lifetime_ms`] is over.
    Expired,
}
