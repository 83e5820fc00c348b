//! The part of a recipe that concerns the machine: kernel, shape, warm-up, readiness, snapshot.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plan::ImageConfig;

use super::Command;
use super::units::Time;

/// The guest kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kernel {
    /// A package name, or a path to a kernel image or package below the recipe's directory.
    /// Absent: the distribution's kernel for cloud machines.
    pub source: Option<String>,
    /// The package's version. Absent: the newest there is; the lock file records it.
    pub version: Option<String>,
    /// Words added to the kernel command line. Absent: none.
    pub cmdline: Vec<String>,
    /// Modules added to the initramfs, by name. Absent: only what the machine needs.
    pub modules: Vec<String>,
}

/// The virtual machine's shape. A snapshot belongs to exactly one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Machine {
    /// Virtual CPUs. Absent: 1.
    #[schemars(range(min = 1, max = 64))]
    pub vcpus: u8,
    /// Memory in MiB. Absent: 512.
    #[schemars(range(min = 64))]
    pub memory_mib: u32,
}

impl Default for Machine {
    fn default() -> Self {
        Self { vcpus: 1, memory_mib: 512 }
    }
}

/// The root disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Disk {
    /// Free space a sandbox finds, in MiB. Absent: 512.
    pub free_mib: u32,
}

impl Default for Disk {
    fn default() -> Self {
        Self { free_mib: 512 }
    }
}

/// What runs in the booted guest before the freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Warmup {
    /// In order, after the guest is ready. Absent: none.
    pub steps: Vec<WarmupStep>,
    /// For all steps together. Absent: 2 minutes.
    pub timeout: Time,
}

impl Default for Warmup {
    fn default() -> Self {
        Self { steps: Vec::new(), timeout: Time::seconds(120) }
    }
}

/// One warm-up step; it fails the bake when it fails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum WarmupStep {
    /// A command: a line for the shell, or an argument list. It must exit with 0.
    Exec(Command),
    /// A request to the guest itself.
    Http(HttpCheck),
}

/// When the guest counts as ready: all checks hold, then `settle` passes and they hold again.
/// They are checked once more right before the freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Ready {
    /// Absent: the base's health check; without one, a booted guest is ready.
    pub checks: Vec<Check>,
    /// Between rounds of checks. Absent: 200ms.
    pub interval: Time,
    /// Until the bake fails. Absent: 60s.
    pub timeout: Time,
    /// Quiet time after the checks first hold. Absent: 500ms.
    pub settle: Time,
}

impl Default for Ready {
    fn default() -> Self {
        Self {
            checks: Vec::new(),
            interval: Time::millis(200),
            timeout: Time::seconds(60),
            settle: Time::millis(500),
        }
    }
}

impl Ready {
    /// Takes over an image's health check where no checks are given.
    #[must_use]
    pub fn or_healthcheck(mut self, config: &ImageConfig) -> Self {
        let Some(check) = config.healthcheck.as_ref().filter(|_| self.checks.is_empty()) else {
            return self;
        };
        let command = match check.test.split_first() {
            Some((kind, args)) if kind == "CMD" => args.to_vec(),
            Some((kind, [line])) if kind == "CMD-SHELL" => {
                let shell = config.shell.clone();
                let mut args = shell.unwrap_or_else(|| vec!["/bin/sh".into(), "-c".into()]);
                args.push(line.clone());
                args
            }
            _ => return self,
        };
        self.checks = vec![Check::Exec(Command::Args(command))];
        // A health check polls a running service, some every half minute; a bake waits for it, so
        // it looks more often than the image says and gives up no sooner.
        let nanos = Duration::from_nanos;
        if check.interval > 0 {
            self.interval = Time(nanos(check.interval).min(Duration::from_secs(1)));
        }
        let retries = u32::try_from(check.retries.max(1)).unwrap_or(1);
        let patience = nanos(check.start_period) + nanos(check.interval) * retries;
        self.timeout = Time(self.timeout.0.max(patience));
        self
    }
}

/// One condition, looked at inside the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Check {
    /// A TCP port of the guest accepts connections.
    Tcp(u16),
    /// A request is answered as expected.
    Http(HttpCheck),
    /// A file exists.
    File(String),
    /// A command exits with 0: a line for the shell, or an argument list.
    Exec(Command),
    /// A process of this name runs.
    Process(String),
}

/// An HTTP request to the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpCheck {
    /// An `http://` address inside the guest. Required.
    pub get: String,
    /// The status that counts. Absent: 200.
    #[serde(default = "ok_status")]
    pub expect: u16,
}

fn ok_status() -> u16 {
    200
}

/// How the snapshot is taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Snapshot {
    /// Bake one at all; otherwise sandboxes boot cold. Absent: true.
    pub enabled: bool,
    /// Drop the guest's file caches before the freeze: smaller snapshot, slower first reads.
    /// Absent: true.
    pub drop_caches: bool,
    /// Zero the guest's free memory before the freeze, so that it costs nothing. Absent: true.
    pub zero_free_memory: bool,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self { enabled: true, drop_caches: true, zero_free_memory: true }
    }
}

/// What sandboxes may reach, which the node that runs them enforces.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NetworkPolicy {
    /// Outgoing connections. Absent: none allowed.
    pub egress: Egress,
    /// TCP ports that are meant to be reached, for people to read: none is forwarded, and the build
    /// says so. Absent: none.
    pub ports: Vec<u16>,
}

/// Outgoing connections.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Egress {
    /// `host:port`, `*.host:port` or `address/prefix:port` that may be reached. Absent: none.
    pub allow: Vec<String>,
}

/// What the bake needs of a recipe or of a Dockerfile, every default filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BakeSpec {
    /// The guest kernel.
    pub kernel: Kernel,
    /// The shapes, at least one; the first is the template's own.
    pub machines: Vec<Machine>,
    /// The root disk.
    pub disk: Disk,
    /// Before the freeze.
    pub warmup: Warmup,
    /// When the guest is ready.
    pub ready: Ready,
    /// How the snapshot is taken.
    pub snapshot: Snapshot,
    /// What sandboxes may reach.
    pub network: NetworkPolicy,
    /// Labels of the template.
    pub labels: BTreeMap<String, String>,
    /// Time of everything the build makes, in seconds since 1970.
    pub source_date_epoch: Option<i64>,
}

impl Default for BakeSpec {
    fn default() -> Self {
        Self {
            kernel: Kernel::default(),
            machines: vec![Machine::default()],
            disk: Disk::default(),
            warmup: Warmup::default(),
            ready: Ready::default(),
            snapshot: Snapshot::default(),
            network: NetworkPolicy::default(),
            labels: BTreeMap::new(),
            source_date_epoch: None,
        }
    }
}
