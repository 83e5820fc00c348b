//! What can go wrong with a sandbox.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use parbake_protocol::agent::{ClientError, Step};

use crate::limits::{CgroupError, LimitHit};
use crate::monitor::MonitorError;
use crate::network::NetworkError;
use crate::programs::ProgramMissing;

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

pub(super) fn console_tail(console: &str) -> String {
    if console.is_empty() { String::new() } else { format!("; its console ends:\n{console}") }
}

pub(super) fn failed(steps: &[Step]) -> String {
    let failed: Vec<String> = steps
        .iter()
        .filter_map(|step| step.error.as_ref().map(|error| format!("{}: {error}", step.name)))
        .collect();
    if failed.is_empty() { "user processes did not start".to_owned() } else { failed.join("; ") }
}
