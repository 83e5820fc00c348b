//! The guest's half of the socket device for tests: keeps the receive queue filled, answers events,
//! counts credit.

use std::collections::{HashMap, VecDeque};

use super::packet::{HEADER, HOST_CID, Header, Ports, TYPE_STREAM, op};
use super::{EVENT, RX, TX, Vsock};
use crate::device::guest::{Frozen, Guest, READ, WRITE};
use parbake_protocol::vmm;

const PAGE: usize = 4096;
/// Credit the simulated sockets give; no multiple of a packet.
pub(super) const WINDOW: u32 = 64_000;

/// One socket of the guest.
#[derive(Default, Clone)]
pub(super) struct Socket {
    pub(super) received: Vec<u8>,
    /// Bytes received, taken by the application, sent, and what the device says of its side.
    arrived: u32,
    taken: u32,
    sent: u32,
    device_buffer: u32,
    device_taken: u32,
}

impl Socket {
    fn room(&self) -> u32 {
        self.device_buffer - self.sent.wrapping_sub(self.device_taken)
    }
}

#[derive(Clone, Default)]
struct State {
    cid: u64,
    rx: HashMap<u16, u64>,
    tx: HashMap<u16, u64>,
    tx_free: Vec<u64>,
    events: HashMap<u16, u64>,
}

/// The driver.
pub(super) struct Driver {
    pub(super) guest: Guest,
    state: State,
    /// Packets that are not data, in order.
    pub(super) inbox: VecDeque<Header>,
    pub(super) sockets: HashMap<Ports, Socket>,
    pub(super) resets: usize,
    /// Whether used buffers go back into their queues.
    pub(super) refill: bool,
    pub(super) answer_events: bool,
    held_events: Vec<u64>,
    held: Vec<u64>,
}

pub(super) struct FrozenDriver {
    guest: Frozen,
    state: State,
}

impl Driver {
    pub(super) fn boot(config: &vmm::Vsock, event_idx: bool) -> Self {
        let guest = Guest::boot(Box::new(Vsock::open(config).unwrap()), event_idx);
        let mut driver = Self::around(guest, State::default());
        driver.read_cid();
        for index in 0.. {
            if !driver.guest.has_room(RX, 2) {
                break;
            }
            let at = driver.guest.alloc(HEADER + PAGE);
            driver.offer_receive(at, index % 2 == 0);
        }
        for _ in 0..8 {
            let at = driver.guest.alloc(8);
            driver.offer_event(at);
        }
        for _ in 0..24 {
            let at = driver.guest.alloc(HEADER + PAGE * 16);
            driver.state.tx_free.push(at);
        }
        driver.pump();
        driver
    }

    fn around(guest: Guest, state: State) -> Self {
        Self {
            guest,
            state,
            inbox: VecDeque::new(),
            sockets: HashMap::new(),
            resets: 0,
            refill: true,
            answer_events: true,
            held_events: Vec::new(),
            held: Vec::new(),
        }
    }

    pub(super) fn freeze(&mut self) -> FrozenDriver {
        FrozenDriver { guest: self.guest.freeze(), state: self.state.clone() }
    }

    pub(super) fn thaw(frozen: &FrozenDriver, config: &vmm::Vsock) -> Self {
        let device = Box::new(Vsock::open(config).unwrap());
        Self::around(Guest::thaw(&frozen.guest, device), frozen.state.clone())
    }

    fn read_cid(&mut self) {
        let low = self.guest.get(0x100);
        self.state.cid = u64::from(low) | u64::from(self.guest.get(0x104)) << 32;
    }

    pub(super) fn cid(&self) -> u64 {
        self.state.cid
    }

    fn offer_receive(&mut self, at: u64, whole: bool) {
        let head = if whole {
            self.guest.offer(RX, &[(at, (HEADER + PAGE) as u32, WRITE)])
        } else {
            let payload = at + HEADER as u64;
            self.guest.offer(RX, &[(at, HEADER as u32, WRITE), (payload, PAGE as u32, WRITE)])
        };
        self.state.rx.insert(head, at);
    }

    fn offer_event(&mut self, at: u64) {
        let head = self.guest.offer(EVENT, &[(at, 8, WRITE)]);
        self.state.events.insert(head, at);
    }

    /// Runs host and guest until neither has anything to do.
    pub(super) fn pump(&mut self) {
        loop {
            self.guest.run();
            let mut busy = false;
            for (head, _) in self.guest.finished(TX) {
                let at = self.state.tx.remove(&head).unwrap();
                self.state.tx_free.push(at);
            }
            for (head, len) in self.guest.finished(EVENT) {
                assert_eq!(len, 4);
                let at = self.state.events.remove(&head).unwrap();
                assert_eq!(self.guest.bytes(at, 4), [0; 4]);
                self.held_events.push(at);
            }
            if self.answer_events {
                for at in std::mem::take(&mut self.held_events) {
                    self.resets += 1;
                    self.sockets.clear();
                    self.read_cid();
                    self.offer_event(at);
                    busy = true;
                }
            }
            for (head, len) in self.guest.finished(RX) {
                let at = self.state.rx.remove(&head).unwrap();
                self.receive(at, len as usize);
                self.held.push(at);
                busy = true;
            }
            if self.refill {
                for at in std::mem::take(&mut self.held) {
                    self.offer_receive(at, true);
                    busy = true;
                }
            }
            if !busy {
                return;
            }
        }
    }

    fn receive(&mut self, at: u64, len: usize) {
        let raw = self.guest.bytes(at, len);
        let (head, data) = raw.split_at(HEADER);
        let header = Header::decode(head.try_into().unwrap());
        assert_eq!(header.len as usize, data.len());
        assert_eq!((header.src_cid, header.kind), (HOST_CID, TYPE_STREAM));
        let ports = Ports { host: header.src_port, guest: header.dst_port };
        if header.op != op::RST {
            let socket = self.sockets.entry(ports).or_default();
            socket.device_buffer = header.buf_alloc;
            socket.device_taken = header.fwd_cnt;
            if header.op == op::RW {
                assert!(!data.is_empty());
                socket.arrived = socket.arrived.wrapping_add(header.len);
                let outstanding = socket.arrived.wrapping_sub(socket.taken);
                assert!(outstanding <= WINDOW, "the device overran the guest's buffer");
                socket.received.extend(data);
                return;
            }
        }
        if header.op != op::CREDIT_UPDATE {
            self.inbox.push_back(header);
        }
    }

    /// Sends a packet with this payload, in pieces if `pieces`.
    pub(super) fn send_raw(&mut self, header: &Header, data: &[u8]) {
        while self.state.tx_free.is_empty() || !self.guest.has_room(TX, 3) {
            self.pump();
        }
        let at = self.state.tx_free.pop().unwrap();
        let raw = [&header.encode()[..], data].concat();
        use vm_memory::Bytes;
        self.guest.memory.write_slice(&raw, vm_memory::GuestAddress(at)).unwrap();
        let len = data.len() as u32;
        let body = at + HEADER as u64;
        let mut chain = vec![(at, HEADER as u32, READ)];
        if len > 1 {
            chain.push((body, len / 2, READ));
        }
        chain.push((body + u64::from(len / 2), len - len / 2, READ));
        let head = self.guest.offer(TX, &chain);
        self.state.tx.insert(head, at);
    }

    pub(super) fn header(&mut self, ports: Ports, op: u16, len: usize) -> Header {
        let socket = self.sockets.entry(ports).or_default();
        Header {
            src_cid: self.state.cid,
            dst_cid: HOST_CID,
            src_port: ports.guest,
            dst_port: ports.host,
            len: len as u32,
            kind: TYPE_STREAM,
            op,
            flags: 0,
            buf_alloc: WINDOW,
            fwd_cnt: socket.taken,
        }
    }

    pub(super) fn send(&mut self, ports: Ports, op: u16) {
        let header = self.header(ports, op, 0);
        self.send_raw(&header, &[]);
        self.pump();
    }

    pub(super) fn shut_down(&mut self, ports: Ports, flags: u32) {
        let header = Header { flags, ..self.header(ports, op::SHUTDOWN, 0) };
        self.send_raw(&header, &[]);
        self.pump();
    }

    /// Sends as much of `data` as the credit allows; how much.
    pub(super) fn write(&mut self, ports: Ports, data: &[u8]) -> usize {
        let room = self.sockets[&ports].room() as usize;
        let len = data.len().min(room).min(PAGE * 16);
        if len > 0 {
            let header = self.header(ports, op::RW, len);
            self.sockets.get_mut(&ports).unwrap().sent += len as u32;
            self.send_raw(&header, &data[..len]);
        }
        len
    }

    /// The application takes what arrived, and the host is told.
    pub(super) fn read(&mut self, ports: Ports) -> Vec<u8> {
        let socket = self.sockets.get_mut(&ports).unwrap();
        let data = std::mem::take(&mut socket.received);
        socket.taken = socket.arrived;
        if !data.is_empty() {
            let header = self.header(ports, op::CREDIT_UPDATE, 0);
            self.send_raw(&header, &[]);
        }
        data
    }
}
