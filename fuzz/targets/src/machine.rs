//! A driver gone mad: reads a program from the fuzzer's bytes and does it to a device.
//!
//! The program is a list of one-byte operations with their operands. Everything a guest can do is
//! one of them; honest steps (a ring entry, a header that means something) have their own, so that
//! the fuzzer gets past the first checks.

use parbake_vmm::device::VirtioDevice;
use parbake_vmm::device::mmio::{MmioTransport, SavedTransport};
use parbake_vmm::device::rng::Rng;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Guest memory: two regions that touch.
const MEMORY: u64 = 1 << 20;
/// Buffers lie here, rings before.
const BUFFERS: u64 = 0x4_0000;
const MAX_STEPS: usize = 256;

/// The fuzzer's bytes; zeroes when they are used up.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Starts at the front.
    pub fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    /// Nothing left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many are left.
    pub fn left(&self) -> usize {
        self.0.len()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    /// The next two bytes.
    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// The next four bytes.
    pub fn word(&mut self) -> u32 {
        u32::from(self.half()) | u32::from(self.half()) << 16
    }

    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}

/// What is particular to a device.
pub trait Bench {
    /// A fresh device.
    fn device(&mut self) -> Box<dyn VirtioDevice>;

    /// A request header that means something.
    fn header(&mut self, input: &mut Input<'_>) -> Vec<u8>;

    /// Something on the host's side.
    fn host(&mut self, _input: &mut Input<'_>) {}
}

struct Driver {
    memory: GuestMemoryMmap,
    transport: MmioTransport,
    offered: [u16; 3],
    event_idx: bool,
}

impl Driver {
    fn new(device: Box<dyn VirtioDevice>, memory: GuestMemoryMmap, event_idx: bool) -> Self {
        let line = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        let transport = MmioTransport::new(device, memory.clone(), line).expect("transport");
        Self { memory, transport, offered: [0; 3], event_idx }
    }

    fn set(&mut self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn get(&mut self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn base(queue: usize) -> u64 {
        0x1_0000 * (queue as u64 + 1)
    }

    fn bring_up(&mut self) {
        self.set(0x70, 0);
        self.set(0x70, 3);
        for half in 0..2 {
            self.set(0x14, half);
            let mut features = self.get(0x10);
            if half == 0 && !self.event_idx {
                features &= !(1 << 29);
            }
            self.set(0x24, half);
            self.set(0x20, features);
        }
        self.set(0x70, 11);
        for queue in 0..3 {
            self.set(0x30, queue);
            if self.get(0x34) == 0 {
                break;
            }
            let base = Self::base(queue as usize);
            let _ = self.memory.write_slice(&[0; 0x8000], GuestAddress(base));
            self.set(0x38, 16);
            self.set(0x80, base as u32);
            self.set(0x90, base as u32 + 0x4000);
            self.set(0xa0, base as u32 + 0x6000);
            self.set(0x44, 1);
        }
        self.offered = [0; 3];
        self.set(0x70, 15);
        assert_eq!(self.get(0x70), 15, "an honest driver is served after any past");
    }

    fn offer(&mut self, queue: usize, head: u16) {
        let avail = Self::base(queue) + 0x4000;
        let slot = avail + 4 + u64::from(self.offered[queue] % 16) * 2;
        let _ = self.memory.write_obj(head, GuestAddress(slot));
        self.offered[queue] = self.offered[queue].wrapping_add(1);
        let _ = self.memory.write_obj(self.offered[queue], GuestAddress(avail + 2));
    }

    fn run(&mut self) {
        for _ in 0..64 {
            let mut idle = true;
            for index in 0..self.transport.queue_events().len() {
                if self.transport.queue_events()[index].read().is_ok() {
                    self.transport.queue_event(index);
                    idle = false;
                }
            }
            if idle {
                self.transport.host_event();
                return;
            }
        }
        panic!("the device never comes to rest");
    }
}

fn memory() -> GuestMemoryMmap {
    let half = MEMORY as usize / 2;
    let ranges = [(GuestAddress(0), half), (GuestAddress(half as u64), half)];
    GuestMemoryMmap::from_ranges(&ranges).expect("memory")
}

/// A device that takes a state from elsewhere: it refuses it, or works on and can be brought up anew.
pub fn reborn(saved: &SavedTransport) {
    let mut driver = Driver::new(Box::new(Rng::new()), memory(), true);
    if driver.transport.restore(saved).is_ok() {
        driver.run();
    }
    driver.bring_up();
}

/// Does the program in `data` to devices of `bench`.
pub fn drive(bench: &mut dyn Bench, data: &[u8]) {
    let mut input = Input::new(data);
    let memory = memory();
    let event_idx = input.byte() & 1 != 0;
    let mut driver = Driver::new(bench.device(), memory.clone(), event_idx);
    driver.bring_up();
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        match input.byte() % 12 {
            0 => {
                let (offset, value) = (u64::from(input.half() % 0x140), input.word());
                driver.set(offset, value);
            }
            1 => {
                let (offset, width) = (u64::from(input.half()), usize::from(input.byte() % 9));
                driver.transport.read(offset, &mut vec![0; width]);
            }
            2 => {
                let (at, count) = (BUFFERS + u64::from(input.half()), input.byte().into());
                let _ = memory.write_slice(&input.bytes(count), GuestAddress(at));
            }
            3 | 4 => {
                // A descriptor whose buffer is in memory.
                let (queue, index) = (input.byte() % 3, input.byte() % 16);
                let at = Driver::base(queue.into()) + u64::from(index) * 16;
                let mut raw = Vec::from((BUFFERS + u64::from(input.half())).to_le_bytes());
                raw.extend(u32::from(input.half()).to_le_bytes());
                raw.extend([input.byte() % 8, 0, input.byte() % 17, 0]);
                let _ = memory.write_slice(&raw, GuestAddress(at));
            }
            5 => {
                // A descriptor of any kind.
                let (queue, index) = (input.byte() % 3, input.byte() % 16);
                let at = Driver::base(queue.into()) + u64::from(index) * 16;
                let _ = memory.write_slice(&input.bytes(16), GuestAddress(at));
            }
            6 => {
                let (queue, head) = (input.byte() % 3, input.byte() % 18);
                driver.offer(queue.into(), head.into());
            }
            7 => {
                let queue = input.byte() % 4;
                driver.set(0x50, queue.into());
                driver.run();
            }
            8 => {
                let at = BUFFERS + u64::from(input.half());
                let header = bench.header(&mut input);
                let _ = memory.write_slice(&header, GuestAddress(at));
            }
            9 => {
                // Anything in the rings.
                let (at, value) = (0x1_0000 + u64::from(input.word() % 0x3_0000), input.half());
                let _ = memory.write_obj(value, GuestAddress(at));
            }
            10 => match input.byte() % 3 {
                0 => driver.bring_up(),
                1 => {
                    driver.transport.quiesce().expect("quiesce");
                    driver.run();
                    driver.transport.unquiesce().expect("unquiesce");
                }
                _ => {
                    // Another life, if its device takes the state.
                    driver.transport.quiesce().expect("quiesce");
                    let saved = driver.transport.save().expect("save");
                    let mut next = Driver::new(bench.device(), memory.clone(), event_idx);
                    next.offered = driver.offered;
                    if next.transport.restore(&saved).is_ok() {
                        driver = next;
                    } else {
                        driver.transport.unquiesce().expect("unquiesce");
                    }
                }
            },
            _ => {
                bench.host(&mut input);
                driver.run();
            }
        }
    }
    driver.run();
    driver.bring_up();
}
