//! The devices a guest sees, and the one trait they share.
//!
//! ```text
//!            activate                quiesce              save
//!   Reset ───────────────► Active ───────────► Quiet ───────────► (state file)
//!     ▲  ◄─── reset ─────    ▲  │                │
//!     │                      │  └─ queue_event,  │ unquiesce
//!     │                      │     host_event    │
//!     └── restore ───────────┴───────────────────┘
//! ```
//! A device lives behind a mutex in its transport. Configuration reads and writes, `activate` and
//! `reset` come from vCPU threads; everything else comes from the event loop's thread. While a
//! device is quiet no vCPU runs and it must touch neither guest memory nor host files.

use std::os::fd::RawFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

/// What a saved device consists of: the transport refuses a kind or version it does not know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDevice {
    /// `block`, `vsock`, `rng`, `net`.
    pub kind: String,
    /// Version of `payload`.
    pub version: u32,
    /// The device's own encoding.
    pub payload: Vec<u8>,
}

/// What can go wrong in a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The host's side failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The driver broke the rules; the device needs a reset and does nothing until then.
    #[error("the driver broke the device's rules: {0}")]
    Driver(String),
    /// A saved state that is not for this device, or is damaged.
    #[error("saved state of {kind}: {what}")]
    State {
        /// Which device.
        kind: String,
        /// What is wrong.
        what: String,
    },
}

/// What an active device works with.
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// Its queues, ready and validated, in order.
    pub queues: Vec<Queue>,
    /// Features both sides agreed on, `VIRTIO_F_VERSION_1` included.
    pub features: u64,
    /// Raises the device's interrupt.
    pub interrupt: Arc<Interrupt>,
}

/// A device's interrupt line and its status register.
pub struct Interrupt {
    /// Bit 0: used buffers; bit 1: configuration changed.
    pub status: std::sync::atomic::AtomicU32,
    /// Wired to the guest's interrupt controller.
    pub event: EventFd,
}

/// A virtio device behind a transport.
pub trait VirtioDevice: Send {
    /// Name used in errors, logs and saved states.
    fn kind(&self) -> &'static str;

    /// Virtio device type (VIRTIO 1.2, section 5).
    fn device_type(&self) -> u32;

    /// Largest size of each queue.
    fn queue_sizes(&self) -> &[u16];

    /// Features offered, without `VIRTIO_F_VERSION_1`, which the transport adds.
    fn features(&self) -> u64;

    /// Reads the configuration space; bytes past its end read as zero. Any time.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the configuration space; what is not writable is ignored. Any time.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The driver said `DRIVER_OK`. Once after each reset.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;

    /// The driver reset the device: forget the activation. Any time.
    fn reset(&mut self);

    /// The driver kicked queue `index`. Only while active. Never blocks for long.
    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError>;

    /// A descriptor that becomes readable when the host's side needs [`Self::host_event`] (an
    /// epoll set where there are several). Asked once, after creation.
    fn host_fd(&self) -> Option<RawFd> {
        None
    }

    /// [`Self::host_fd`] is readable.
    fn host_event(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The vCPUs have stopped: finish or hand back everything in flight; afterwards the queues in
    /// guest memory and the state say the same.
    fn quiesce(&mut self) -> Result<(), DeviceError>;

    /// The vCPUs are about to run again without a restore in between.
    fn unquiesce(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The state of a quiet device, without queues and negotiated features (the transport has
    /// those) and without anything of this host: no path, no descriptor, no address.
    fn save(&self) -> Result<SavedDevice, DeviceError>;

    /// Takes over a saved state; `activation` is there when the device was active. Before the
    /// vCPUs run. Also looks at every queue once, since a kick may have been lost.
    fn restore(
        &mut self,
        saved: &SavedDevice,
        activation: Option<Activation>,
    ) -> Result<(), DeviceError>;
}
