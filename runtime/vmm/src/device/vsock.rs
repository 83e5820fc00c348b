//! The socket device (VIRTIO 1.2, 5.10), stream sockets only.
//!
//! A host client connects to the device's unix socket, sends `CONNECT <port>\n` and reads
//! `OK <host port>\n`; from there on the stream is the connection. A guest that connects to host
//! port P reaches the listener at `<socket>_P`, if there is one.
//!
//! **Snapshots.** Connections are not part of a snapshot. A restored guest is told so by a
//! `TRANSPORT_RESET` event, delivered before its vCPUs run:
//! ```text
//!              restore of an active device            driver returns the event's buffer
//!   Open ─────────────────────────────► Closed ──────────────────────────────────────► Open
//! ```
//! While the gate is closed nothing goes to the guest, for the guest would throw it away together
//! with its old connections; clients that connect meanwhile wait and are served afterwards. What
//! the guest sends meanwhile belongs to the past and is dropped, except new requests, which are
//! refused. Pausing and running on changes nothing. The context id may be another after a restore:
//! drivers read it again when they see the event.

mod connection;
#[cfg(test)]
mod driver;
mod packet;
mod switch;

use std::os::fd::RawFd;

use parbake_protocol::vmm;
use serde::{Deserialize, Serialize};
use virtio_queue::QueueT;

use self::packet::{HEADER, Header, op};
use self::switch::Switch;
use super::{Activation, DeviceError, Progress, SavedDevice, VirtioDevice, ring};

const KIND: &str = "vsock";
const VERSION: u32 = 1;
const DEVICE_TYPE: u32 = 19;
/// Linux fills the whole receive queue with 4 KiB buffers, which then are in every snapshot.
const QUEUE_SIZES: [u16; 3] = [128, 128, 16];

const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET`.
const TRANSPORT_RESET: u32 = 0;

/// The most packets in one pass, in each direction.
const PASS_PACKETS: usize = 256;

/// What stands between the host and a restored guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Gate {
    /// The event could not be delivered yet: the driver offers no buffer.
    event_due: bool,
    /// Closed until the event queue's available index gets here.
    closed_until: Option<u16>,
}

impl Gate {
    fn is_closed(self) -> bool {
        self.event_due || self.closed_until.is_some()
    }
}

#[derive(Serialize, Deserialize)]
struct Saved {
    gate: Gate,
    /// For people: connections that ended with the snapshot.
    connections: u32,
}

/// The socket device.
pub struct Vsock {
    cid: u64,
    switch: Switch,
    gate: Gate,
}

impl Vsock {
    /// Listens on the configured socket.
    pub fn open(config: &vmm::Vsock) -> Result<Self, DeviceError> {
        if config.guest_cid < 3 || config.guest_cid == u32::MAX {
            return Err(DeviceError::io(
                format!("guest context id {}: choose one from 3 up", config.guest_cid),
                std::io::Error::from(std::io::ErrorKind::InvalidInput),
            ));
        }
        let switch = Switch::open(&config.socket)?;
        Ok(Self { cid: config.guest_cid.into(), switch, gate: Gate::default() })
    }

    /// Takes packets off the transmit queue.
    fn take_packets(&mut self, active: &mut Activation) -> Result<Progress, DeviceError> {
        let Activation { memory, queues, interrupt, .. } = active;
        let Some(queue) = queues.get_mut(TX) else { return Ok(Progress::Idle) };
        let mut taken = 0;
        let progress = loop {
            if taken == PASS_PACKETS {
                break Progress::More;
            }
            let Some(mut chain) = ring::pop(queue, memory)? else {
                break ring::rearm(queue, memory)?;
            };
            let mut raw = [0u8; HEADER];
            if chain.readable.read(&mut raw) < HEADER {
                return Err(DeviceError::Driver("a vsock packet without a whole header".into()));
            }
            let header = Header::decode(&raw);
            if header.len as usize > chain.readable.len() {
                return Err(DeviceError::Driver(
                    "a vsock packet shorter than its header says".into(),
                ));
            }
            let data = chain.readable.take(header.len as usize);
            if self.gate.is_closed() {
                if header.op == op::REQUEST {
                    self.switch.refuse(&header);
                }
            } else if header.src_cid == self.cid {
                self.switch.packet(&header, data);
            }
            ring::push_used(queue, memory, chain.head, 0)?;
            taken += 1;
        };
        if taken > 0 {
            ring::notify(queue, memory, interrupt)?;
        }
        Ok(progress)
    }

    /// Puts packets into the receive queue.
    fn give_packets(&mut self, active: &mut Activation) -> Result<Progress, DeviceError> {
        if self.gate.is_closed() {
            return Ok(Progress::Idle);
        }
        let Activation { memory, queues, interrupt, .. } = active;
        let Some(queue) = queues.get_mut(RX) else { return Ok(Progress::Idle) };
        let mut given = 0;
        let mut progress = Progress::Idle;
        while self.switch.has_packets() {
            if given == PASS_PACKETS {
                progress = Progress::More;
                break;
            }
            let Some(mut chain) = ring::pop(queue, memory)? else {
                progress = ring::rearm(queue, memory)?;
                break;
            };
            if chain.writable.len() <= HEADER {
                return Err(DeviceError::Driver("a vsock buffer without room for data".into()));
            }
            let mut front = chain.writable.take(HEADER);
            let Some(header) = self.switch.next_packet(self.cid, &chain.writable) else {
                ring::put_back(queue, 1);
                break;
            };
            front.write(&header.encode());
            ring::push_used(queue, memory, chain.head, HEADER as u32 + header.len)?;
            given += 1;
        }
        if given > 0 {
            ring::notify(queue, memory, interrupt)?;
        }
        Ok(progress)
    }

    /// Delivers a reset event that is due, and opens the gate when the driver has seen it.
    fn tend_gate(&mut self, active: &mut Activation) -> Result<Progress, DeviceError> {
        let Activation { memory, queues, interrupt, .. } = active;
        let Some(queue) = queues.get_mut(EVENT).filter(|queue| queue.ready()) else {
            // This driver cannot be told anything.
            self.gate = Gate::default();
            return Ok(Progress::Idle);
        };
        let offered = ring::offered(queue, memory)?;
        if self.gate.event_due
            && let Some(mut chain) = ring::pop(queue, memory)?
        {
            if chain.writable.write(&TRANSPORT_RESET.to_le_bytes()) < 4 {
                return Err(DeviceError::Driver("a vsock event buffer too small".into()));
            }
            ring::push_used(queue, memory, chain.head, 4)?;
            ring::notify(queue, memory, interrupt)?;
            self.gate.event_due = false;
            // An event the driver has not seen yet keeps its claim on the first buffer.
            let until = self.gate.closed_until.unwrap_or(offered);
            self.gate.closed_until = Some(until.wrapping_add(1));
        }
        let returned = |until: u16| offered.wrapping_sub(until).cast_signed() >= 0;
        if self.gate.closed_until.is_some_and(returned) {
            self.gate.closed_until = None;
        }
        if self.gate.is_closed() {
            ring::rearm_at(queue, memory, offered)
        } else {
            Ok(Progress::Idle)
        }
    }

    /// One pass in both directions.
    fn exchange(&mut self, active: &mut Activation, index: usize) -> Result<Progress, DeviceError> {
        let mut progress = Progress::Idle;
        match index {
            TX => progress = self.take_packets(active)?,
            EVENT => progress = self.tend_gate(active)?,
            _ => {}
        }
        if self.give_packets(active)? == Progress::More {
            self.switch.poll.ring();
        }
        Ok(progress)
    }
}

impl VirtioDevice for Vsock {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn device_type(&self) -> u32 {
        DEVICE_TYPE
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        0
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_bytes(&self.cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, _active: &mut Activation) -> Result<(), DeviceError> {
        self.gate = Gate::default();
        Ok(())
    }

    fn reset(&mut self) {
        self.gate = Gate::default();
        self.switch.drop_known();
    }

    fn queue_event(
        &mut self,
        active: &mut Activation,
        index: usize,
    ) -> Result<Progress, DeviceError> {
        self.exchange(active, index)
    }

    fn host_fd(&self) -> Option<RawFd> {
        Some(self.switch.poll.fd())
    }

    fn host_event(&mut self, active: Option<&mut Activation>) -> Result<(), DeviceError> {
        self.switch.host_event()?;
        if let Some(active) = active {
            self.exchange(active, RX)?;
        }
        Ok(())
    }

    fn quiesce(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        self.switch.poll.pause()
    }

    fn unquiesce(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        self.switch.poll.resume()
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        let connections = u32::try_from(self.switch.count()).unwrap_or(u32::MAX);
        SavedDevice::encode(KIND, VERSION, &Saved { gate: self.gate, connections })
    }

    fn restore(
        &mut self,
        saved: &SavedDevice,
        active: Option<&mut Activation>,
    ) -> Result<(), DeviceError> {
        let saved: Saved = saved.decode(KIND, VERSION)?;
        self.switch.drop_known();
        self.switch.poll.resume()?;
        self.gate = Gate::default();
        if let Some(active) = active {
            self.gate = Gate { event_due: true, closed_until: saved.gate.closed_until };
            self.tend_gate(active)?;
        }
        Ok(())
    }

    fn open_connections(&self) -> Option<u32> {
        u32::try_from(self.switch.count()).ok()
    }
}

#[cfg(test)]
mod tests;
