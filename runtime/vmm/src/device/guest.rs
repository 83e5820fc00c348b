//! A driver for tests: guest memory, rings in it, and the registers' protocol, as a well-behaved
//! guest uses them. It looks into a used ring only after an interrupt and kicks only where the
//! device asked for it, so that a lost interrupt or kick makes a test hang and fail.

use std::collections::HashMap;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::VirtioDevice;
use super::mmio::{FEATURE_EVENT_IDX, FEATURE_VERSION_1, MmioTransport, SavedTransport};

/// Size of guest memory: two regions that touch in the middle.
pub(super) const MEMORY: u64 = 16 << 20;
const HEAP: u64 = 1 << 20;

pub(super) const READ: bool = false;
pub(super) const WRITE: bool = true;

/// A buffer in a chain: address, length, whether the device writes it.
pub(super) type Segment = (u64, u32, bool);

/// The driver's view of one queue.
#[derive(Clone)]
pub(super) struct Ring {
    pub(super) desc: u64,
    pub(super) avail: u64,
    pub(super) used: u64,
    pub(super) size: u16,
    free: Vec<u16>,
    pub(super) offered: u16,
    kicked: u16,
    seen: u16,
    chains: HashMap<u16, Vec<u16>>,
}

/// A guest with one device.
pub(super) struct Guest {
    pub(super) memory: GuestMemoryMmap,
    pub(super) transport: MmioTransport,
    pub(super) rings: Vec<Ring>,
    interrupt: EventFd,
    /// The machine's event loop.
    host: Epoll,
    event_idx: bool,
    heap: u64,
    /// Finished chains by queue: head and length.
    done: HashMap<usize, Vec<(u16, u32)>>,
}

/// A guest between two lives.
pub(super) struct Frozen {
    saved: SavedTransport,
    memory: Vec<u8>,
    rings: Vec<Ring>,
    event_idx: bool,
    heap: u64,
    done: HashMap<usize, Vec<(u16, u32)>>,
}

pub(super) fn memory() -> GuestMemoryMmap {
    let half = MEMORY as usize / 2;
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), half), (GuestAddress(half as u64), half)])
        .unwrap()
}

impl Guest {
    /// Brings `device` up as a driver does, with all features offered, or without `EVENT_IDX`.
    pub(super) fn boot(device: Box<dyn VirtioDevice>, event_idx: bool) -> Self {
        let mut guest = Self::plug(device);
        guest.event_idx = event_idx;
        guest.bring_up();
        guest
    }

    /// A guest whose driver has not touched `device` yet.
    pub(super) fn plug(device: Box<dyn VirtioDevice>) -> Self {
        let memory = memory();
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let line = interrupt.try_clone().unwrap();
        let transport = MmioTransport::new(device, memory.clone(), line).unwrap();
        let host = Epoll::new().unwrap();
        if let Some(fd) = transport.host_fd() {
            let event = EpollEvent::new(EventSet::IN, 0);
            host.ctl(ControlOperation::Add, fd, event).unwrap();
        }
        Self {
            memory,
            transport,
            rings: Vec::new(),
            interrupt,
            host,
            event_idx: true,
            heap: HEAP,
            done: HashMap::new(),
        }
    }

    /// Reset, features, queues, `DRIVER_OK`.
    pub(super) fn bring_up(&mut self) {
        assert_eq!(self.get(0x00), 0x7472_6976);
        assert_eq!(self.get(0x04), 2);
        self.set(0x70, 0);
        self.set(0x70, 1);
        self.set(0x70, 3);
        let mut features = self.offered_features();
        assert_ne!(features & FEATURE_VERSION_1, 0);
        if !self.event_idx {
            features &= !FEATURE_EVENT_IDX;
        }
        self.set_features(features);
        self.set(0x70, 11);
        assert_eq!(self.get(0x70), 11, "the device refused its own features");
        self.rings.clear();
        self.done.clear();
        for index in 0.. {
            self.set(0x30, index);
            let size = self.get(0x34);
            if size == 0 {
                break;
            }
            self.set_up_queue(index, size as u16);
        }
        self.set(0x70, 15);
        assert_eq!(self.get(0x70), 15);
    }

    pub(super) fn offered_features(&mut self) -> u64 {
        self.set(0x14, 0);
        let low = self.get(0x10);
        self.set(0x14, 1);
        u64::from(low) | u64::from(self.get(0x10)) << 32
    }

    pub(super) fn set_features(&mut self, features: u64) {
        self.set(0x24, 0);
        self.set(0x20, features as u32);
        self.set(0x24, 1);
        self.set(0x20, (features >> 32) as u32);
    }

    fn set_up_queue(&mut self, index: u32, size: u16) {
        let base = 0x1_0000 * (u64::from(index) + 1);
        let ring = Ring {
            desc: base,
            avail: base + 0x4000,
            used: base + 0x6000,
            size,
            free: (0..size).rev().collect(),
            offered: 0,
            kicked: 0,
            seen: 0,
            chains: HashMap::new(),
        };
        let zero = [0u8; 0x8000];
        self.memory.write_slice(&zero, GuestAddress(base)).unwrap();
        self.set(0x38, size.into());
        for (register, address) in [(0x80, ring.desc), (0x90, ring.avail), (0xa0, ring.used)] {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
        self.set(0x44, 1);
        assert_eq!(self.get(0x44), 1);
        self.rings.push(ring);
    }

    pub(super) fn get(&mut self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub(super) fn set(&mut self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    /// Guest memory for a buffer, never given back.
    pub(super) fn alloc(&mut self, len: usize) -> u64 {
        let at = self.heap;
        self.heap += (len as u64).next_multiple_of(64);
        assert!(self.heap <= MEMORY, "the test's guest ran out of memory");
        at
    }

    /// A buffer with `data` in it.
    pub(super) fn put(&mut self, data: &[u8]) -> u64 {
        let at = self.alloc(data.len());
        self.memory.write_slice(data, GuestAddress(at)).unwrap();
        at
    }

    pub(super) fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory.read_slice(&mut data, GuestAddress(at)).unwrap();
        data
    }

    pub(super) fn write_descriptor(&self, at: u64, segment: Segment, flags: u16, next: u16) {
        let (address, len, write) = segment;
        let flags = flags | if write { 2 } else { 0 };
        let mut raw = Vec::with_capacity(16);
        raw.extend(address.to_le_bytes());
        raw.extend(len.to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(next.to_le_bytes());
        self.memory.write_slice(&raw, GuestAddress(at)).unwrap();
    }

    /// Whether queue `queue` has room for a chain of `count`.
    pub(super) fn has_room(&self, queue: usize, count: usize) -> bool {
        self.rings[queue].free.len() >= count
    }

    /// Offers a chain and kicks if the device wants that.
    pub(super) fn offer(&mut self, queue: usize, segments: &[Segment]) -> u16 {
        let head = self.offer_quietly(queue, segments);
        self.kick(queue);
        head
    }

    /// Offers a chain without kicking.
    pub(super) fn offer_quietly(&mut self, queue: usize, segments: &[Segment]) -> u16 {
        let ring = &mut self.rings[queue];
        let ids: Vec<u16> = segments.iter().map(|_| ring.free.pop().expect("ring full")).collect();
        let desc = ring.desc;
        for (index, segment) in segments.iter().enumerate() {
            let next = ids.get(index + 1).copied();
            let at = desc + u64::from(ids[index]) * 16;
            self.write_descriptor(at, *segment, next.is_some().into(), next.unwrap_or(0));
        }
        let head = ids[0];
        self.rings[queue].chains.insert(head, ids);
        self.publish(queue, head);
        head
    }

    /// Puts `head` into the available ring, whatever it is.
    pub(super) fn publish(&mut self, queue: usize, head: u16) {
        let ring = &mut self.rings[queue];
        let slot = ring.avail + 4 + u64::from(ring.offered % ring.size) * 2;
        self.memory.write_obj(head, GuestAddress(slot)).unwrap();
        ring.offered = ring.offered.wrapping_add(1);
        self.memory.write_obj(ring.offered, GuestAddress(ring.avail + 2)).unwrap();
    }

    /// Kicks if the device asked for it.
    pub(super) fn kick(&mut self, queue: usize) {
        let ring = &mut self.rings[queue];
        let (old, new) = (ring.kicked, ring.offered);
        ring.kicked = new;
        let wanted = if self.event_idx {
            let at = ring.used + 4 + u64::from(ring.size) * 8;
            let event: u16 = self.memory.read_obj(GuestAddress(at)).unwrap();
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags: u16 = self.memory.read_obj(GuestAddress(ring.used)).unwrap();
            flags & 1 == 0
        };
        if wanted {
            self.set(0x50, queue as u32);
        }
    }

    /// Lets the host's event loop run until it has nothing to do, and handles interrupts.
    pub(super) fn run(&mut self) {
        for _ in 0..10_000 {
            let mut idle = true;
            for index in 0..self.transport.queue_events().len() {
                if self.transport.queue_events()[index].read().is_ok() {
                    self.transport.queue_event(index);
                    idle = false;
                }
            }
            if self.host_is_ready() {
                self.transport.host_event();
                idle = false;
            }
            idle &= !self.handle_interrupt();
            if idle {
                return;
            }
        }
        panic!("the event loop never comes to rest");
    }

    /// Lets the event loop run for a driver that may be mad: what it gets back is not looked at.
    pub(super) fn run_device(&mut self) {
        for _ in 0..1000 {
            let mut idle = true;
            for index in 0..self.transport.queue_events().len() {
                if self.transport.queue_events()[index].read().is_ok() {
                    self.transport.queue_event(index);
                    idle = false;
                }
            }
            if self.host_is_ready() {
                self.transport.host_event();
                idle = false;
            }
            if idle {
                return;
            }
        }
        panic!("the device never comes to rest");
    }

    /// Whether the interrupt line was raised since the last look.
    pub(super) fn interrupted(&mut self) -> bool {
        self.interrupt.read().is_ok()
    }

    pub(super) fn host_is_ready(&self) -> bool {
        self.host.wait(0, &mut [EpollEvent::default()]).unwrap() > 0
    }

    /// Takes an interrupt, if there is one, and collects finished chains.
    pub(super) fn handle_interrupt(&mut self) -> bool {
        if self.interrupt.read().is_err() {
            return false;
        }
        let status = self.get(0x60);
        self.set(0x64, status);
        if status & 1 != 0 {
            for queue in 0..self.rings.len() {
                self.collect(queue);
            }
        }
        true
    }

    fn collect(&mut self, queue: usize) {
        let event_idx = self.event_idx;
        let ring = &mut self.rings[queue];
        let used: u16 = self.memory.read_obj(GuestAddress(ring.used + 2)).unwrap();
        while ring.seen != used {
            let slot = ring.used + 4 + u64::from(ring.seen % ring.size) * 8;
            let head: u32 = self.memory.read_obj(GuestAddress(slot)).unwrap();
            let len: u32 = self.memory.read_obj(GuestAddress(slot + 4)).unwrap();
            let head = u16::try_from(head).unwrap();
            let ids = ring.chains.remove(&head).expect("a chain that was never offered");
            ring.free.extend(ids);
            self.done.entry(queue).or_default().push((head, len));
            ring.seen = ring.seen.wrapping_add(1);
        }
        if event_idx {
            let at = ring.avail + 4 + u64::from(ring.size) * 2;
            self.memory.write_obj(ring.seen, GuestAddress(at)).unwrap();
        }
    }

    /// Chains of a queue that came back since the last call.
    pub(super) fn finished(&mut self, queue: usize) -> Vec<(u16, u32)> {
        self.done.remove(&queue).unwrap_or_default()
    }

    pub(super) fn needs_reset(&mut self) -> bool {
        self.get(0x70) & 64 != 0
    }

    /// Stops the guest and takes a snapshot of it. The guest can run on after `unquiesce`.
    pub(super) fn freeze(&mut self) -> Frozen {
        self.transport.quiesce().unwrap();
        let saved = self.transport.save().unwrap();
        // The way through the state file.
        let saved = postcard::from_bytes(&postcard::to_stdvec(&saved).unwrap()).unwrap();
        Frozen {
            saved,
            memory: self.bytes(0, MEMORY as usize),
            rings: self.rings.clone(),
            event_idx: self.event_idx,
            heap: self.heap,
            done: self.done.clone(),
        }
    }

    /// Continues a frozen guest with a fresh `device`, as another process would.
    pub(super) fn thaw(frozen: &Frozen, device: Box<dyn VirtioDevice>) -> Self {
        let mut guest = Self::plug(device);
        guest.memory.write_slice(&frozen.memory, GuestAddress(0)).unwrap();
        guest.rings.clone_from(&frozen.rings);
        guest.event_idx = frozen.event_idx;
        guest.heap = frozen.heap;
        guest.done.clone_from(&frozen.done);
        guest.transport.restore(&frozen.saved).unwrap();
        guest
    }
}
