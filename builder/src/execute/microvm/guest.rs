//! The machine of one step, here or in the lab.

use std::ffi::OsString;
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use parbake_cache::template::{MachineShape, ProcessConfig};
use parbake_host::lab::Lab;
use parbake_node::event::EventSender;
use parbake_node::limits::Limits;
use parbake_node::network::Egress;
use parbake_node::sandbox::{BootFiles, Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::{ExecRequest, ExecSession};
use serde::{Deserialize, Serialize};

use crate::execute::ExecuteError;

/// The agent inside the guest, whatever has become of the initramfs it came from.
const AGENT: &str = "/proc/1/exe";

/// Where build machines run.
#[derive(Debug)]
pub enum Ground {
    /// On this machine's KVM.
    Here,
    /// In the lab.
    Lab(InLab),
}

impl Ground {
    pub(super) fn is_here(&self) -> bool {
        matches!(self, Self::Here)
    }
}

/// How a machine is started in the lab.
#[derive(Debug)]
pub struct InLab {
    /// The lab.
    pub lab: Lab,
    /// This program and its words, as the lab finds it; the machine's description is added as one
    /// more. It boots the machine, connects its own input and output to [`step_request`], and says on
    /// its standard error what the machine was denied.
    pub command: Vec<OsString>,
    /// `NAME=value` entries of its environment.
    pub env: Vec<Vec<u8>>,
}

/// The machine of one step.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StepGuest {
    /// The unpacked kernel.
    pub kernel: PathBuf,
    /// Modules and agent.
    pub initramfs: PathBuf,
    /// The kernel's command line.
    pub cmdline: String,
    /// Its root, then the layers. Nothing is written to any of them.
    pub disks: Vec<PathBuf>,
    /// Processors and memory.
    pub machine: MachineShape,
    /// What it may reach.
    pub egress: Egress,
    /// Where what it writes goes; absent: memory.
    pub scratch: Option<PathBuf>,
    /// How long it may take to boot.
    pub ready_timeout_ms: u64,
}

/// Boots a step's machine. What it is denied goes to `events`.
///
/// # Errors
/// See [`SandboxError`]; nothing is left then.
pub fn run_guest(
    guest: &StepGuest,
    cancelled: Option<fn() -> bool>,
    events: EventSender,
) -> Result<Sandbox, SandboxError> {
    let mut disks = guest.disks.iter().cloned();
    let files = BootFiles {
        kernel: guest.kernel.clone(),
        initramfs: guest.initramfs.clone(),
        cmdline: guest.cmdline.clone(),
        rootfs: disks.next().unwrap_or_default(),
        more_disks: disks.collect(),
    };
    let options = SandboxOptions {
        scratch: guest.scratch.clone(),
        ready_timeout: Duration::from_millis(guest.ready_timeout_ms),
        egress: guest.egress.clone(),
        limits: Limits::default(),
        events: Some(events),
        cancelled,
        ..SandboxOptions::default()
    };
    Sandbox::boot(&files, guest.machine, &ProcessConfig::default(), &options)
}

/// What is run in a step's machine: the agent's half of the conversation.
#[must_use]
pub fn step_request() -> ExecRequest {
    ExecRequest { stdin: true, no_template_defaults: true, ..ExecRequest::new([AGENT, "step"]) }
}

/// Begins a step in a machine that runs here.
pub(super) fn step_session(sandbox: &mut Sandbox) -> Result<ExecSession<UnixStream>, SandboxError> {
    sandbox.connect()?.exec(step_request()).map_err(SandboxError::Agent)
}

impl InLab {
    /// Starts a machine in the lab and begins a step in it.
    pub(super) fn session(
        &self,
        guest: &StepGuest,
    ) -> Result<ExecSession<TcpStream>, ExecuteError> {
        let unreachable = |error: &dyn std::error::Error| ExecuteError::Host {
            what: format!("the lab cannot be reached: {error}"),
            hint: "`parbake lab status` tells whether it is still there".to_owned(),
        };
        let description = serde_json::to_vec(guest).map_err(|error| unreachable(&error))?;
        let words = self.command.iter().map(|word| word.as_bytes().to_vec());
        let mut request = ExecRequest::new(words.chain([description]));
        request.env.clone_from(&self.env);
        request.stdin = true;
        let client = self.lab.connect().map_err(|error| unreachable(&error))?;
        client.exec(request).map_err(|error| unreachable(&error))
    }
}

/// Why a step's machine did not come up, or went away.
pub(super) fn boot_failed(error: &SandboxError) -> ExecuteError {
    use std::error::Error as _;
    if matches!(error, SandboxError::Interrupted) {
        return ExecuteError::Interrupted;
    }
    let mut what = format!("the step's build machine: {error}");
    let mut source = error.source();
    while let Some(cause) = source {
        what.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    let hint = "`parbake doctor` shows what this host can do; --builder sandbox needs no machine, \
                and shares this one's kernel";
    ExecuteError::Host { what, hint: hint.to_owned() }
}
