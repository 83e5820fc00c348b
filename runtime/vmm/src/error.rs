//! Why a guest could not be started, or a request not be done.

use kvm_ioctls::Error as KvmError;

/// A failure with the stable word [`Failure::kind`] the host sees in `Event::Failed`.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The configuration asks for something impossible.
    #[error("configuration: {0}")]
    Config(String),
    /// A call to KVM failed.
    #[error("KVM: {what}: {source}")]
    Kvm {
        /// The call.
        what: &'static str,
        /// What KVM said.
        source: KvmError,
    },
    /// KVM answered, but not with what a machine needs.
    #[error("KVM: {0}")]
    KvmAnswer(String),
    /// The kernel, initramfs or command line cannot be loaded.
    #[error("kernel: {0}")]
    Kernel(String),
    /// Guest memory or the memory image.
    #[error("memory: {0}")]
    Memory(String),
    /// The state file.
    #[error("state: {0}")]
    State(#[from] crate::snapshot::StateError),
    /// A disk.
    #[error("disk: {0}")]
    Disk(String),
    /// The volume that outlives the machine.
    #[error("{0}")]
    Workspace(String),
    /// A required isolation layer cannot be had.
    #[error("jail: {0}")]
    Jail(String),
    /// Another device.
    #[error("device: {0}")]
    Device(String),
    /// A descriptor, thread or event of the monitor's own.
    #[error("monitor: {what}: {source}")]
    Host {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl Failure {
    /// The stable word for `Event::Failed`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Config(_) => "config",
            Self::Kvm { .. } | Self::KvmAnswer(_) | Self::Host { .. } => "kvm",
            Self::Kernel(_) => "kernel",
            Self::Memory(_) => "memory",
            Self::State(crate::snapshot::StateError::Mismatch(_)) => "mismatch",
            Self::State(_) => "state",
            Self::Disk(_) => "disk",
            Self::Workspace(_) => "workspace",
            Self::Jail(_) => "jail",
            Self::Device(_) => "device",
        }
    }
}

/// Names the KVM call an error came from.
pub(crate) trait KvmContext<T> {
    /// Wraps the error.
    fn kvm(self, what: &'static str) -> Result<T, Failure>;
}

impl<T> KvmContext<T> for Result<T, KvmError> {
    fn kvm(self, what: &'static str) -> Result<T, Failure> {
        self.map_err(|source| Failure::Kvm { what, source })
    }
}

/// Names what the monitor was doing when the host's kernel refused.
pub(crate) trait HostContext<T> {
    /// Wraps the error.
    fn host(self, what: &'static str) -> Result<T, Failure>;
}

impl<T, E: Into<std::io::Error>> HostContext<T> for Result<T, E> {
    fn host(self, what: &'static str) -> Result<T, Failure> {
        self.map_err(|source| Failure::Host { what, source: source.into() })
    }
}
