//! What one sandbox may use of its host, and what is said when it wants more.

use std::time::Duration;

use parbake_cache::template::MachineShape;
use parbake_protocol::agent::{Exit, ExitReason};
use serde::{Deserialize, Serialize};

pub mod cgroup;
pub(crate) mod stall;

pub use cgroup::CgroupError;
use cgroup::Shares;

/// What a monitor may need beside its guest's memory: itself, connections, and page tables.
const MONITOR_BYTES: u64 = 96 << 20;
/// What its threads may need beside the vCPUs.
const MONITOR_CPU_MILLI: u32 = 500;
const MONITOR_PIDS: u32 = 16;

/// What one sandbox may use. Limits of a single command (its time, its output) are part of the
/// exec request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Host memory in bytes, the guest's and the monitor's own together; absent: what the machine's
    /// shape and its overlay can need at most.
    pub memory_bytes: Option<u64>,
    /// Processor time in thousandths of a processor; absent: as many processors as the guest has,
    /// and half a one for its devices.
    pub cpu_milli: Option<u32>,
    /// Threads of the monitor; absent: enough for its vCPUs.
    pub pids: Option<u32>,
    /// Share of the disks' time against other sandboxes, 1 to 10000; absent: 100.
    pub io_weight: Option<u16>,
    /// Processes and threads inside the guest, the agent's own aside; absent: as many as it likes.
    pub guest_processes: Option<u32>,
    /// Bytes of the guest's private disk overlay; absent: as many as its file system has.
    pub disk_bytes: Option<u64>,
    /// How long it lives, from its start; absent: as long as somebody holds it.
    pub lifetime: Option<Duration>,
    /// What happens where the host cannot set limits on processes.
    pub cgroup: CgroupPolicy,
}

impl Limits {
    /// What a machine of `shape` gets whose private overlay takes `overlay` bytes of memory at most.
    #[must_use]
    pub fn shares(&self, shape: MachineShape, overlay: u64) -> Shares {
        let guest = u64::from(shape.memory_mib) << 20;
        let most = guest.saturating_add(guest / 16).saturating_add(overlay);
        let vcpus = u32::from(shape.vcpus);
        Shares {
            memory: self.memory_bytes.unwrap_or(most.saturating_add(MONITOR_BYTES)),
            cpu_milli: self.cpu_milli.unwrap_or(vcpus * 1000 + MONITOR_CPU_MILLI),
            pids: self.pids.unwrap_or(vcpus + MONITOR_PIDS),
            io_weight: self.io_weight.unwrap_or(100).clamp(1, 10_000),
        }
    }
}

/// What happens where the host cannot set limits on processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CgroupPolicy {
    /// The sandbox runs without, and its active layers say so.
    #[default]
    IfPossible,
    /// The sandbox does not start.
    Required,
    /// None are set.
    Off,
}

/// A limit that was reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitHit {
    /// Which.
    pub limit: Limit,
    /// What became of it, for people.
    pub detail: String,
}

/// The limits there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Limit {
    /// [`Limits::memory_bytes`]: the host ended the machine.
    Memory,
    /// [`Limits::cpu_milli`]: the machine was held back.
    Cpu,
    /// [`Limits::pids`].
    Pids,
    /// [`Limits::guest_processes`]: starting another one fails.
    GuestProcesses,
    /// [`Limits::disk_bytes`]: the guest's writes fail.
    Disk,
    /// [`Limits::lifetime`]: the machine was ended.
    Lifetime,
    /// The command's own time: it was killed.
    ExecTime,
    /// The command's own output: the rest was dropped.
    ExecOutput,
}

impl LimitHit {
    /// The limits of its own that a command reached.
    #[must_use]
    pub fn of_exit(exit: &Exit) -> Vec<Self> {
        let mut hits = Vec::new();
        if exit.reason == ExitReason::Timeout {
            let detail = "the command was killed: its time was up".to_owned();
            hits.push(Self { limit: Limit::ExecTime, detail });
        }
        if exit.truncated {
            let detail = "the rest of the command's output was dropped".to_owned();
            hits.push(Self { limit: Limit::ExecOutput, detail });
        }
        hits
    }
}
