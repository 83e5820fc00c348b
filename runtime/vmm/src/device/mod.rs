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
//! A device lives behind a mutex in its transport ([`mmio::MmioTransport`]), which owns the queues
//! and lends them to each call. Configuration reads and writes, `activate` and `reset` come from
//! vCPU threads; everything else comes from the event loop's thread. While a device is quiet no
//! vCPU runs and it must touch neither guest memory nor host files.
//!
//! What a guest puts into a queue is foreign input. A broken ring or chain ends in
//! [`DeviceError::Driver`]: the transport sets `DEVICE_NEEDS_RESET` and leaves the device alone
//! until the driver resets it. No call does unbounded work: a device that has more to do than one
//! pass allows says [`Progress::More`], and the transport kicks it again.

#![deny(unsafe_code)]

#[cfg(test)]
mod guest;
#[cfg(test)]
mod hostile;
mod poll;
mod ring;
mod sys;

pub mod block;
pub mod mmio;
pub mod net;
pub mod rng;
pub mod vsock;

use std::fs::File;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

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

impl SavedDevice {
    /// Encodes `payload`.
    fn encode<T: Serialize>(kind: &str, version: u32, payload: &T) -> Result<Self, DeviceError> {
        let payload = postcard::to_stdvec(payload)
            .map_err(|error| DeviceError::state(kind, format!("cannot be encoded: {error}")))?;
        Ok(Self { kind: kind.to_owned(), version, payload })
    }

    /// Decodes the payload of a state that must be of this kind and version, to the last byte.
    fn decode<'a, T: Deserialize<'a>>(
        &'a self,
        kind: &str,
        version: u32,
    ) -> Result<T, DeviceError> {
        if self.kind != kind {
            return Err(DeviceError::state(
                kind,
                format!("it belongs to a device of kind {:?}", self.kind),
            ));
        }
        if self.version != version {
            return Err(DeviceError::state(
                kind,
                format!(
                    "version {} is not known here (version {version} is); bake the template again",
                    self.version
                ),
            ));
        }
        match postcard::take_from_bytes(&self.payload) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => {
                Err(DeviceError::state(kind, format!("{} bytes are left over", rest.len())))
            }
            Err(error) => Err(DeviceError::state(kind, format!("cannot be decoded: {error}"))),
        }
    }
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

impl DeviceError {
    fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Io { what: what.into(), source: source.into() }
    }

    fn state(kind: impl Into<String>, what: impl Into<String>) -> Self {
        Self::State { kind: kind.into(), what: what.into() }
    }
}

/// What an active device works with. The transport owns it and lends it to each call.
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// Its queues in order; those that are ready are validated.
    pub queues: Vec<Queue>,
    /// Features both sides agreed on, `VIRTIO_F_VERSION_1` included.
    pub features: u64,
    /// Raises the device's interrupt.
    pub interrupt: Arc<Interrupt>,
}

/// A device's interrupt line and its status register.
pub struct Interrupt {
    /// Bit 0: used buffers; bit 1: configuration changed.
    pub status: AtomicU32,
    /// Counts configuration changes (`ConfigGeneration`).
    pub generation: AtomicU32,
    /// Wired to the guest's interrupt controller.
    pub event: EventFd,
}

impl Interrupt {
    /// A line that is not raised.
    pub fn new(event: EventFd) -> Self {
        Self { status: AtomicU32::new(0), generation: AtomicU32::new(0), event }
    }

    /// Buffers were used.
    pub fn signal_used(&self) {
        self.raise(1);
    }

    /// The configuration space, or the device status, changed.
    pub fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.raise(2);
    }

    fn raise(&self, bit: u32) {
        self.status.fetch_or(bit, Ordering::SeqCst);
        // Fails only when the counter is full: then the line is raised already.
        let _ = self.event.write(1);
    }
}

/// How far one pass over a queue came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Everything that could be done is done; the driver will kick when there is more.
    Idle,
    /// The pass ended at its limit; the device wants to be called again.
    More,
}

/// A virtio device behind a transport.
pub trait VirtioDevice: Send {
    /// Name used in errors, logs and saved states.
    fn kind(&self) -> &'static str;

    /// Virtio device type (VIRTIO 1.2, section 5).
    fn device_type(&self) -> u32;

    /// Largest size of each queue.
    fn queue_sizes(&self) -> &[u16];

    /// Features offered, without those the transport adds for all: `VIRTIO_F_VERSION_1`,
    /// `VIRTIO_F_INDIRECT_DESC`, `VIRTIO_F_EVENT_IDX`.
    fn features(&self) -> u64;

    /// Reads the configuration space; bytes past its end read as zero. Any time.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the configuration space; what is not writable is ignored. Any time.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// The driver said `DRIVER_OK`. Once after each reset.
    fn activate(&mut self, _active: &mut Activation) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The driver reset the device: forget what belongs to the activation. Any time.
    fn reset(&mut self) {}

    /// The driver kicked queue `index`. Never blocks for long, never does more than one pass.
    fn queue_event(
        &mut self,
        active: &mut Activation,
        index: usize,
    ) -> Result<Progress, DeviceError>;

    /// A descriptor that is readable exactly while the host's side needs [`Self::host_event`] (an
    /// epoll set where there are several); never while quiet. Asked once, after creation.
    fn host_fd(&self) -> Option<RawFd> {
        None
    }

    /// [`Self::host_fd`] is readable; `active` is absent before activation.
    fn host_event(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The vCPUs have stopped: finish or hand back everything in flight; afterwards the queues in
    /// guest memory and the state say the same.
    fn quiesce(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The vCPUs are about to run again without a restore in between. The transport kicks every
    /// queue afterwards.
    fn unquiesce(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The state of a quiet device, without queues and negotiated features (the transport has
    /// those) and without anything of this host: no path, no descriptor, no address.
    fn save(&self) -> Result<SavedDevice, DeviceError>;

    /// Takes over a saved state; `active` is there when the device was active. Before the vCPUs
    /// run. The transport kicks every queue afterwards, since a kick may have been lost.
    fn restore(
        &mut self,
        saved: &SavedDevice,
        active: Option<&mut Activation>,
    ) -> Result<(), DeviceError>;

    /// Writes the disk's changes over its base, flattened, as a sparse file into the empty `out`;
    /// the answer is the number of data bytes. Only while quiet. `None`: this is no disk.
    fn write_disk(&self, _out: &File) -> Result<Option<u64>, DeviceError> {
        Ok(None)
    }

    /// Something on the host's side failed and the guest got an error for it, the first time.
    fn take_trouble(&mut self) -> Option<DeviceError> {
        None
    }

    /// The disk has reached its write limit: true the first time it is asked after that.
    fn take_full(&mut self) -> bool {
        false
    }

    /// Host connections that are open and end with a snapshot. `None`: the device has none.
    fn open_connections(&self) -> Option<u32> {
        None
    }

    /// Bytes the guest holds in the disk's private overlay. `None`: this is no disk.
    fn overlay_bytes(&self) -> Option<u64> {
        None
    }
}

/// Reads from a configuration space of `bytes`.
fn read_bytes(bytes: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let rest = usize::try_from(offset).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
    for (to, from) in data.iter_mut().zip(rest) {
        *to = *from;
    }
}
