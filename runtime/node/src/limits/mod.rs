//! What one sandbox may use of its host, and what is said when it wants more.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What one sandbox may use. Limits of a single command (its time, its output) are part of the
/// exec request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Host memory in bytes, the guest's and the monitor's own together; absent: what the machine's
    /// shape and its overlay can need at most.
    pub memory_bytes: Option<u64>,
    /// Processor time in thousandths of a processor; absent: as many processors as the guest has.
    pub cpu_milli: Option<u32>,
    /// Threads of the monitor; absent: enough for its vCPUs.
    pub pids: Option<u32>,
    /// Share of the disks' time against other sandboxes, 1 to 10000; absent: 100.
    pub io_weight: Option<u16>,
    /// Bytes of the guest's private disk overlay; absent: as many as its file system has.
    pub disk_bytes: Option<u64>,
    /// How long it lives, from its start; absent: as long as somebody holds it.
    pub lifetime: Option<Duration>,
    /// What happens where the host cannot set limits on processes.
    pub cgroup: CgroupPolicy,
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
    /// [`Limits::disk_bytes`]: the guest's writes fail.
    Disk,
    /// [`Limits::lifetime`]: the machine was ended.
    Lifetime,
    /// The command's own time: it was killed.
    ExecTime,
    /// The command's own output: the rest was dropped.
    ExecOutput,
}
