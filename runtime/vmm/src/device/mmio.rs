//! The virtio-mmio transport, version 2 (VIRTIO 1.2, 4.2.2): one window of registers per device.
//!
//! ```text
//!  status:  0 ─► ACKNOWLEDGE ─► +DRIVER ─► +FEATURES_OK ─► +DRIVER_OK     (each only on the last)
//!           ▲        features ──┘             │queues ─┘        │device works
//!           │ write 0 at any time             │                 │
//!           └─────────────────────────────────┴── +DEVICE_NEEDS_RESET ◄── driver broke the rules
//! ```
//! Registers that belong to another stage are ignored when written. Between `DRIVER_OK` and a reset
//! the queues belong to [`Activation`]; otherwise they lie in `idle_queues` for the driver to set
//! up. Queue kicks normally arrive through an ioeventfd on the window's `QueueNotify`; a kick that
//! arrives as a register write is turned into the same event.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Activation, DeviceError, Interrupt, Progress, SavedDevice, VirtioDevice};

/// Size of a device's window in guest physical memory.
pub const WINDOW: u64 = 0x1000;

/// Where in the window the driver kicks; the value written is the queue's index.
pub const QUEUE_NOTIFY: u64 = 0x50;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VENDOR: u32 = u32::from_le_bytes(*b"pbke");
const CONFIG: u64 = 0x100;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 64;
const FAILED: u32 = 128;

/// `VIRTIO_F_INDIRECT_DESC`.
pub const FEATURE_INDIRECT: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`.
pub const FEATURE_EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1`.
pub const FEATURE_VERSION_1: u64 = 1 << 32;

const KIND: &str = "virtio-mmio";

/// A queue's part of [`SavedTransport`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQueue {
    max_size: u16,
    size: u16,
    ready: bool,
    next_avail: u16,
    next_used: u16,
    desc_table: u64,
    avail_ring: u64,
    used_ring: u64,
}

/// A frozen transport and its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTransport {
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    interrupt_status: u32,
    generation: u32,
    queues: Vec<SavedQueue>,
    device: SavedDevice,
}

/// One device and its register window. Lives behind a mutex; see [`super`] for who calls what.
pub struct MmioTransport {
    device: Box<dyn VirtioDevice>,
    memory: GuestMemoryMmap,
    interrupt: Arc<Interrupt>,
    kicks: Vec<EventFd>,
    active: Option<Activation>,
    idle_queues: Vec<Queue>,
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    quiet: bool,
    failure: Option<DeviceError>,
}

impl MmioTransport {
    /// Puts `device` behind a window; `interrupt_event` is wired to its interrupt line.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemoryMmap,
        interrupt_event: EventFd,
    ) -> Result<Self, DeviceError> {
        let idle_queues = fresh_queues(device.queue_sizes())?;
        let kicks = idle_queues
            .iter()
            .map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC))
            .collect::<Result<_, _>>()
            .map_err(|error| DeviceError::io("creating a queue's eventfd", error))?;
        Ok(Self {
            device,
            memory,
            interrupt: Arc::new(Interrupt::new(interrupt_event)),
            kicks,
            active: None,
            idle_queues,
            status: 0,
            driver_features: 0,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            quiet: false,
            failure: None,
        })
    }

    /// The device's kind, for logs and errors.
    pub fn kind(&self) -> &'static str {
        self.device.kind()
    }

    /// The device itself, for what is particular to it.
    pub fn device(&self) -> &dyn VirtioDevice {
        &*self.device
    }

    /// True between the driver's `DRIVER_OK` and its reset, unless it broke the rules.
    pub fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// What made the device ask for a reset, or the first request it had to fail for the host's
    /// sake. Each is told once.
    pub fn take_failure(&mut self) -> Option<DeviceError> {
        self.failure.take().or_else(|| self.device.take_trouble())
    }

    /// Whether the disk has reached its write limit, the first time.
    pub fn take_full(&mut self) -> bool {
        self.device.take_full()
    }

    /// A read in the window. Registers are 32 bits wide and aligned (4.2.2.2); anything else reads
    /// as zero. The configuration space takes any width.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= CONFIG {
            if offset < WINDOW {
                self.device.read_config(offset - CONFIG, data);
            }
            return;
        }
        if let (Ok(out), true) = (<&mut [u8; 4]>::try_from(data), offset.is_multiple_of(4)) {
            *out = self.read_register(offset).to_le_bytes();
        }
    }

    /// A write in the window, with the same rules.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if offset >= CONFIG {
            let usable = self.status & (DRIVER | FAILED | NEEDS_RESET) == DRIVER;
            if usable && offset < WINDOW {
                self.device.write_config(offset - CONFIG, data);
            }
            return;
        }
        if let (Ok(value), true) = (<[u8; 4]>::try_from(data), offset.is_multiple_of(4)) {
            self.write_register(offset, u32::from_le_bytes(value));
        }
    }

    /// One eventfd per queue: the machine registers each as an ioeventfd on [`QUEUE_NOTIFY`] with
    /// the queue's index as data match, and polls it.
    pub fn queue_events(&self) -> &[EventFd] {
        &self.kicks
    }

    /// The eventfd of queue `index` is readable. Reads it, so the caller need not.
    pub fn queue_event(&mut self, index: usize) {
        let Some(kick) = self.kicks.get(index) else { return };
        // Nothing to read: someone else took the kick, and looking once more does no harm.
        let _ = kick.read();
        if self.quiet {
            return;
        }
        let Some(active) = self.active.as_mut() else { return };
        match self.device.queue_event(active, index) {
            Ok(Progress::Idle) => {}
            Ok(Progress::More) => {
                let _ = kick.write(1);
            }
            Err(error) => self.fail(error),
        }
    }

    /// What to poll for the device's host side, if it has one. Does not change.
    pub fn host_fd(&self) -> Option<RawFd> {
        self.device.host_fd()
    }

    /// [`Self::host_fd`] is readable.
    pub fn host_event(&mut self) {
        if self.quiet {
            return;
        }
        if let Err(error) = self.device.host_event(self.active.as_mut()) {
            self.fail(error);
        }
    }

    /// The vCPUs have stopped: settles the device so that it can be saved. Idempotent.
    pub fn quiesce(&mut self) -> Result<(), DeviceError> {
        if !self.quiet {
            match self.device.quiesce(self.active.as_mut()) {
                Err(error @ DeviceError::Driver(_)) => self.fail(error),
                other => other?,
            }
            self.quiet = true;
        }
        Ok(())
    }

    /// The vCPUs are about to run on.
    pub fn unquiesce(&mut self) -> Result<(), DeviceError> {
        if self.quiet {
            self.quiet = false;
            self.device.unquiesce(self.active.as_mut())?;
            self.replay();
        }
        Ok(())
    }

    /// The state of a quiet device.
    pub fn save(&self) -> Result<SavedTransport, DeviceError> {
        if !self.quiet {
            return Err(DeviceError::state(self.kind(), "asked for while the device is not quiet"));
        }
        let queues = self.active.as_ref().map_or(&self.idle_queues, |active| &active.queues);
        Ok(SavedTransport {
            status: self.status,
            driver_features: self.driver_features,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            interrupt_status: self.interrupt.status.load(Ordering::SeqCst),
            generation: self.interrupt.generation.load(Ordering::SeqCst),
            queues: queues.iter().map(|queue| SavedQueue::from(queue.state())).collect(),
            device: self.device.save()?,
        })
    }

    /// Takes over a saved state, before the vCPUs run; `self` must be fresh. The device works from
    /// here on: kicks and interrupts that may have been lost are raised again.
    pub fn restore(&mut self, saved: &SavedTransport) -> Result<(), DeviceError> {
        let sizes = self.device.queue_sizes();
        if saved.queues.len() != sizes.len() {
            return Err(DeviceError::state(
                KIND,
                format!("{} queues where the device has {}", saved.queues.len(), sizes.len()),
            ));
        }
        if saved.driver_features & !self.offered() != 0 {
            return Err(DeviceError::state(
                KIND,
                format!(
                    "the driver uses features {:#x}, the device offers {:#x}",
                    saved.driver_features,
                    self.offered()
                ),
            ));
        }
        let event_idx = saved.driver_features & FEATURE_EVENT_IDX != 0;
        let queues = (saved.queues.iter().zip(sizes))
            .map(|(queue, size)| queue.revive(*size, event_idx))
            .collect::<Result<Vec<_>, _>>()?;
        self.status = saved.status;
        self.driver_features = saved.driver_features;
        self.device_features_select = saved.device_features_select;
        self.driver_features_select = saved.driver_features_select;
        self.queue_select = saved.queue_select;
        self.interrupt.status.store(saved.interrupt_status & 3, Ordering::SeqCst);
        self.interrupt.generation.store(saved.generation, Ordering::SeqCst);
        self.quiet = false;
        if self.status & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK {
            self.idle_queues = fresh_queues(self.device.queue_sizes())?;
            self.active =
                Some(self.activation(queues).map_err(|what| DeviceError::state(KIND, what))?);
        } else {
            self.active = None;
            self.idle_queues = queues;
        }
        self.device.restore(&saved.device, self.active.as_mut())?;
        self.replay();
        Ok(())
    }

    /// Raises again what may have been lost while nothing ran: a kick that was in an eventfd, an
    /// interrupt that was on its way. With `EVENT_IDX` the driver would never repeat either.
    fn replay(&mut self) {
        if let Some(active) = &self.active {
            for (kick, queue) in self.kicks.iter().zip(&active.queues) {
                if queue.ready() {
                    let _ = kick.write(1);
                }
            }
        }
        if self.interrupt.status.load(Ordering::SeqCst) != 0 {
            let _ = self.interrupt.event.write(1);
        }
    }

    fn offered(&self) -> u64 {
        self.device.features() | FEATURE_VERSION_1 | FEATURE_INDIRECT | FEATURE_EVENT_IDX
    }

    /// Checks that the ready queues lie in guest memory and hands them to the device.
    fn activation(&self, queues: Vec<Queue>) -> Result<Activation, String> {
        for (index, queue) in queues.iter().enumerate() {
            if queue.ready() && !queue.is_valid(&self.memory) {
                return Err(format!("queue {index} is not in guest memory"));
            }
        }
        Ok(Activation {
            memory: self.memory.clone(),
            queues,
            features: self.driver_features,
            interrupt: self.interrupt.clone(),
        })
    }

    /// Stops the device until the driver resets it (2.1.2).
    fn fail(&mut self, error: DeviceError) {
        self.failure = Some(error);
        if self.status & NEEDS_RESET != 0 {
            return;
        }
        if let Some(active) = self.active.take() {
            self.idle_queues = active.queues;
        }
        self.device.reset();
        self.status |= NEEDS_RESET;
        if self.status & DRIVER_OK != 0 {
            self.interrupt.signal_config();
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            0x00 => MAGIC,
            0x04 => 2,
            0x08 => self.device.device_type(),
            0x0c => VENDOR,
            0x10 => half(self.offered(), self.device_features_select),
            0x34 => self.selected_size(),
            0x44 => self.selected_queue().is_some_and(QueueT::ready).into(),
            0x60 => self.interrupt.status.load(Ordering::SeqCst),
            0x70 => self.status,
            // No shared memory regions: their length reads as -1.
            0xb0..=0xbc => u32::MAX,
            0xfc => self.interrupt.generation.load(Ordering::SeqCst),
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32) {
        match offset {
            0x14 => self.device_features_select = value,
            0x20 => self.set_driver_features(value),
            0x24 => self.driver_features_select = value,
            0x30 => self.queue_select = value,
            // A size that is not allowed changes nothing. The driver cannot see that; it gets a
            // queue that does not fit its rings, which is its own harm.
            0x38 => self.set_queue(|queue| {
                let _ = u16::try_from(value).map(|size| queue.try_set_size(size));
            }),
            0x44 => self.set_queue_ready(value),
            QUEUE_NOTIFY => {
                if let Some(kick) = usize::try_from(value).ok().and_then(|i| self.kicks.get(i)) {
                    let _ = kick.write(1);
                }
            }
            0x64 => {
                self.interrupt.status.fetch_and(!value, Ordering::SeqCst);
            }
            0x70 => self.set_status(value),
            0x80 => self.set_queue(|queue| queue.set_desc_table_address(Some(value), None)),
            0x84 => self.set_queue(|queue| queue.set_desc_table_address(None, Some(value))),
            0x90 => self.set_queue(|queue| queue.set_avail_ring_address(Some(value), None)),
            0x94 => self.set_queue(|queue| queue.set_avail_ring_address(None, Some(value))),
            0xa0 => self.set_queue(|queue| queue.set_used_ring_address(Some(value), None)),
            0xa4 => self.set_queue(|queue| queue.set_used_ring_address(None, Some(value))),
            _ => {}
        }
    }

    fn set_driver_features(&mut self, value: u32) {
        let stage = ACKNOWLEDGE | DRIVER | FEATURES_OK | FAILED;
        if self.status & stage != ACKNOWLEDGE | DRIVER {
            return;
        }
        match self.driver_features_select {
            0 => self.driver_features = self.driver_features & !0xffff_ffff | u64::from(value),
            1 => {
                self.driver_features =
                    self.driver_features & 0xffff_ffff | (u64::from(value) << 32);
            }
            // Bits we never offer: agreeing to any makes FEATURES_OK fail.
            _ if value != 0 => self.driver_features |= 1 << 63,
            _ => {}
        }
    }

    fn selected_size(&self) -> u32 {
        let index = usize::try_from(self.queue_select).unwrap_or(usize::MAX);
        self.device.queue_sizes().get(index).copied().unwrap_or(0).into()
    }

    fn selected_queue(&self) -> Option<&Queue> {
        let queues = self.active.as_ref().map_or(&self.idle_queues, |active| &active.queues);
        queues.get(usize::try_from(self.queue_select).ok()?)
    }

    /// Changes the selected queue, at the one stage where that is allowed.
    fn set_queue(&mut self, change: impl FnOnce(&mut Queue)) {
        if self.status & (FEATURES_OK | DRIVER_OK | FAILED | NEEDS_RESET) != FEATURES_OK {
            return;
        }
        let index = usize::try_from(self.queue_select).unwrap_or(usize::MAX);
        if let Some(queue) = self.idle_queues.get_mut(index).filter(|queue| !queue.ready()) {
            change(queue);
        }
    }

    fn set_queue_ready(&mut self, value: u32) {
        if value == 1 {
            self.set_queue(|queue| queue.set_ready(true));
            return;
        }
        if value != 0 {
            return;
        }
        if self.selected_queue().is_none_or(|queue| !queue.ready()) {
            return;
        }
        if self.active.is_some() {
            // The driver takes one queue away from a working device. Single queues cannot be reset
            // (VIRTIO_F_RING_RESET is not offered), so the device as a whole stops.
            self.fail(DeviceError::Driver("a queue was disabled while in use".into()));
        }
        let index = usize::try_from(self.queue_select).unwrap_or(usize::MAX);
        if let Some(queue) = self.idle_queues.get_mut(index) {
            queue.set_ready(false);
        }
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            self.reset();
            return;
        }
        let value = value & (ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED);
        if self.status & !NEEDS_RESET & !value != 0 {
            // Bits go away only by a reset (2.1.1).
            return;
        }
        self.status |= value & (ACKNOWLEDGE | FAILED);
        if self.status & FAILED != 0 {
            return;
        }
        if value & DRIVER != 0 && self.status & ACKNOWLEDGE != 0 {
            self.status |= DRIVER;
        }
        if value & FEATURES_OK != 0 && self.status & (DRIVER | FEATURES_OK) == DRIVER {
            let known = self.driver_features & !self.offered() == 0;
            if known && self.driver_features & FEATURE_VERSION_1 != 0 {
                self.status |= FEATURES_OK;
            }
        }
        let stage = FEATURES_OK | DRIVER_OK | NEEDS_RESET;
        if value & DRIVER_OK != 0 && self.status & stage == FEATURES_OK {
            self.status |= DRIVER_OK;
            self.activate();
        }
    }

    fn activate(&mut self) {
        let event_idx = self.driver_features & FEATURE_EVENT_IDX != 0;
        let mut queues = std::mem::take(&mut self.idle_queues);
        for queue in &mut queues {
            queue.set_event_idx(event_idx);
        }
        // On failure the driver sees empty, unready queues until its reset.
        self.idle_queues = fresh_queues(self.device.queue_sizes()).unwrap_or_default();
        match self.activation(queues) {
            Ok(active) => {
                let active = self.active.insert(active);
                if let Err(error) = self.device.activate(active) {
                    self.fail(error);
                    return;
                }
                // Buffers may have been offered, and kicked, before DRIVER_OK.
                self.replay();
            }
            Err(what) => self.fail(DeviceError::Driver(what)),
        }
    }

    fn reset(&mut self) {
        self.active = None;
        self.device.reset();
        self.idle_queues = fresh_queues(self.device.queue_sizes()).unwrap_or_default();
        self.status = 0;
        self.driver_features = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.queue_select = 0;
        self.interrupt.status.store(0, Ordering::SeqCst);
        for kick in &self.kicks {
            let _ = kick.read();
        }
    }
}

impl From<QueueState> for SavedQueue {
    fn from(state: QueueState) -> Self {
        Self {
            max_size: state.max_size,
            size: state.size,
            ready: state.ready,
            next_avail: state.next_avail,
            next_used: state.next_used,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        }
    }
}

impl SavedQueue {
    fn revive(&self, max_size: u16, event_idx_enabled: bool) -> Result<Queue, DeviceError> {
        if self.max_size != max_size {
            return Err(DeviceError::state(
                KIND,
                format!("a queue of at most {} where the device has {max_size}", self.max_size),
            ));
        }
        Queue::try_from(QueueState {
            max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled,
            size: self.size,
            ready: self.ready,
            desc_table: self.desc_table,
            avail_ring: self.avail_ring,
            used_ring: self.used_ring,
        })
        .map_err(|error| DeviceError::state(KIND, error.to_string()))
    }
}

fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

fn fresh_queues(sizes: &[u16]) -> Result<Vec<Queue>, DeviceError> {
    (sizes.iter().map(|size| Queue::new(*size)))
        .collect::<Result<_, _>>()
        .map_err(|error| DeviceError::state(KIND, error.to_string()))
}

#[cfg(test)]
mod tests;
