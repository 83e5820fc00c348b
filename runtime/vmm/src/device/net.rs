//! The network device (VIRTIO 1.2, 5.1): frames between the guest and a tap interface.
//!
//! The tap speaks the same header as virtio (`IFF_VNET_HDR`), so a frame goes from the tap into the
//! guest's buffers, or back, in one system call and with its offloads. Nothing is held here in
//! between: what the guest has no buffers for waits in the tap, and stays there over a pause.
//!
//! A restored guest keeps the hardware address it was frozen with, as it will not look again; the
//! tap it gets is another, so its offloads are set anew.
//!
//! A device without a tap takes every frame and drops it. Every baked machine has one, so that its
//! sandboxes can be given a network or none.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};

use parbake_protocol::vmm;
use rustix::event::epoll::EventFlags;
use serde::{Deserialize, Serialize};
use virtio_queue::QueueT;

use super::poll::Poll;
use super::ring::{self, Buffers};
use super::{Activation, DeviceError, Progress, SavedDevice, VirtioDevice, sys};

const KIND: &str = "net";
const VERSION: u32 = 1;
const DEVICE_TYPE: u32 = 1;
const QUEUE_SIZES: [u16; 2] = [256, 256];

const RX: usize = 0;
const TX: usize = 1;

const F_CSUM: u64 = 1 << 0;
const F_GUEST_CSUM: u64 = 1 << 1;
const F_MAC: u64 = 1 << 5;
const F_GUEST_TSO4: u64 = 1 << 7;
const F_GUEST_TSO6: u64 = 1 << 8;
const F_GUEST_ECN: u64 = 1 << 9;
const F_HOST_TSO4: u64 = 1 << 11;
const F_HOST_TSO6: u64 = 1 << 12;
const F_HOST_ECN: u64 = 1 << 13;
const F_MRG_RXBUF: u64 = 1 << 15;

/// `struct virtio_net_hdr_v1`, and where in it the number of buffers is.
const HEADER: usize = 12;
const NUM_BUFFERS: usize = 10;

/// The room a frame needs with the header: without segmentation offload, and with it (5.1.6.3.1).
const FRAME: usize = 1526;
const LARGE_FRAME: usize = 65562;

/// The most frames in one pass, in each direction.
const PASS_FRAMES: usize = 64;

const TOKEN: u64 = 0;

/// Sets the offloads of a tap.
pub(super) type SetOffloads = fn(&File, u32) -> std::io::Result<()>;

/// The network device.
pub struct Net {
    tap: Option<File>,
    set_offloads: SetOffloads,
    mac: [u8; 6],
    poll: Poll,
    /// The tap may have frames.
    readable: bool,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    mac: [u8; 6],
}

impl Net {
    /// Attaches to the tap interface that `config` names, which must exist, or takes the open one
    /// that came along.
    pub fn open(config: &vmm::Net, passed: Option<OwnedFd>) -> Result<Self, DeviceError> {
        let tap = match &config.tap {
            None => None,
            Some(vmm::Tap::Name(name)) => Some(sys::open_tap(name).map_err(|error| {
                DeviceError::io(format!("attaching to tap interface {name:?}"), error)
            })?),
            Some(vmm::Tap::Passed) => Some(passed.map(File::from).ok_or_else(|| {
                let error = std::io::Error::from(std::io::ErrorKind::NotFound);
                DeviceError::io("taking a tap that should have come with the configuration", error)
            })?),
        };
        Self::over(tap, config.mac, sys::set_tap_offloads)
    }

    /// The same over a datagram socket, which keeps frames apart as a tap does; for `fuzz`.
    #[doc(hidden)]
    pub fn over_socket(socket: OwnedFd, mac: [u8; 6]) -> Result<Self, DeviceError> {
        Self::over(Some(File::from(socket)), mac, |_, _| Ok(()))
    }

    pub(super) fn over(
        tap: Option<File>,
        mac: [u8; 6],
        set_offloads: SetOffloads,
    ) -> Result<Self, DeviceError> {
        let poll = Poll::new()?;
        if let Some(tap) = &tap {
            poll.watch(tap, TOKEN, EventFlags::IN | EventFlags::ET)?;
        }
        let readable = tap.is_some();
        Ok(Self { tap, set_offloads, mac, poll, readable })
    }

    fn apply_offloads(&self, features: u64) -> Result<(), DeviceError> {
        let mut offloads = 0;
        for (feature, offload) in [
            (F_GUEST_CSUM, sys::TUN_F_CSUM),
            (F_GUEST_TSO4, sys::TUN_F_TSO4),
            (F_GUEST_TSO6, sys::TUN_F_TSO6),
            (F_GUEST_ECN, sys::TUN_F_TSO_ECN),
        ] {
            if features & feature != 0 {
                offloads |= offload;
            }
        }
        // The kernel refuses the others without checksums, and so must a driver (5.1.3.1).
        if offloads & sys::TUN_F_CSUM == 0 {
            offloads = 0;
        }
        let Some(tap) = &self.tap else { return Ok(()) };
        (self.set_offloads)(tap, offloads)
            .map_err(|error| DeviceError::io("setting a tap's offloads", error))
    }

    /// Frames of the guest to the tap.
    fn transmit(&self, active: &mut Activation) -> Result<Progress, DeviceError> {
        let Activation { memory, queues, interrupt, .. } = active;
        let Some(queue) = queues.get_mut(TX) else { return Ok(Progress::Idle) };
        let mut frames = 0;
        let progress = loop {
            if frames == PASS_FRAMES {
                break Progress::More;
            }
            let Some(chain) = ring::pop(queue, memory)? else {
                break ring::rearm(queue, memory)?;
            };
            if chain.readable.len() < HEADER {
                return Err(DeviceError::Driver("a frame without a whole header".into()));
            }
            // Like any network card: what cannot be sent is lost. That includes headers the kernel
            // finds wrong and frames it will not take.
            if let Some(tap) = &self.tap
                && chain.readable.len() <= LARGE_FRAME
            {
                let _ = sys::writev(tap, chain.readable.slices());
            }
            ring::push_used(queue, memory, chain.head, 0)?;
            frames += 1;
        };
        if frames > 0 {
            ring::notify(queue, memory, interrupt)?;
        }
        Ok(progress)
    }

    /// Frames of the tap to the guest.
    fn receive(&mut self, active: &mut Activation) -> Result<Progress, DeviceError> {
        let Activation { memory, queues, interrupt, features } = active;
        let Some(queue) = queues.get_mut(RX) else { return Ok(Progress::Idle) };
        let Some(tap) = &self.tap else { return Ok(Progress::Idle) };
        let mergeable = *features & F_MRG_RXBUF != 0;
        let large = *features & (F_GUEST_TSO4 | F_GUEST_TSO6) != 0;
        let needed = if large { LARGE_FRAME } else { FRAME };

        let mut pool: VecDeque<(u16, Buffers<'_>)> = VecDeque::new();
        let mut room = 0;
        let mut frames = 0;
        let mut spread = false;
        let mut progress = Progress::Idle;
        while self.readable {
            if frames == PASS_FRAMES {
                progress = Progress::More;
                break;
            }
            // A frame's size shows only when it is read: have room for the largest.
            while room < needed && (mergeable || pool.is_empty()) {
                let Some(chain) = ring::pop(queue, memory)? else { break };
                let smallest = if mergeable { HEADER } else { needed };
                if chain.writable.len() < smallest {
                    return Err(DeviceError::Driver(format!(
                        "a receive buffer of {} bytes, it must have {smallest}",
                        chain.writable.len()
                    )));
                }
                room += chain.writable.len();
                pool.push_back((chain.head, chain.writable));
            }
            // A driver that has offered all it can gets what fits.
            if room < needed && pool.len() < usize::from(queue.size()) {
                progress = ring::rearm(queue, memory)?;
                // Buffers that came since count from the first one that is put back.
                break;
            }
            let mut target = Buffers::default();
            for (_, buffers) in &pool {
                target.append(buffers);
            }
            let target = target.take(needed);
            let len = match sys::readv(tap, target.slices()) {
                Ok(len) if len > 0 => len,
                // Nothing there; or the interface is down or gone, and if it comes back, the poll
                // set says so.
                Ok(_) | Err(_) => {
                    self.readable = false;
                    break;
                }
            };
            frames += 1;
            if len < HEADER {
                continue;
            }
            let mut used = Vec::with_capacity(1);
            let mut left = len;
            while left > 0 {
                let Some((head, buffers)) = pool.pop_front() else { break };
                let here = left.min(buffers.len());
                left -= here;
                room -= buffers.len();
                used.push((head, here as u32));
            }
            let count = used.len() as u16;
            let mut header = target;
            header.take(NUM_BUFFERS);
            header.write(&count.to_le_bytes());
            spread |= count > 1;
            ring::push_used_together(queue, memory, &used)?;
        }
        ring::put_back(queue, pool.len() as u16);
        if frames > 0 {
            ring::notify(queue, memory, interrupt)?;
            if spread {
                // The count of used buffers behind `notify` missed some.
                interrupt.signal_used();
            }
        }
        Ok(progress)
    }
}

impl VirtioDevice for Net {
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
        F_CSUM
            | F_GUEST_CSUM
            | F_MAC
            | F_GUEST_TSO4
            | F_GUEST_TSO6
            | F_GUEST_ECN
            | F_HOST_TSO4
            | F_HOST_TSO6
            | F_HOST_ECN
            | F_MRG_RXBUF
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        super::read_bytes(&self.mac, offset, data);
    }

    fn activate(&mut self, active: &mut Activation) -> Result<(), DeviceError> {
        self.apply_offloads(active.features)
    }

    fn reset(&mut self) {
        // Frames that arrive before the next driver are not for it; what the tap does with offloads
        // meanwhile does not matter, activation sets them.
    }

    fn queue_event(
        &mut self,
        active: &mut Activation,
        index: usize,
    ) -> Result<Progress, DeviceError> {
        if index == RX { self.receive(active) } else { self.transmit(active) }
    }

    fn host_fd(&self) -> Option<RawFd> {
        Some(self.poll.fd())
    }

    fn host_event(&mut self, active: Option<&mut Activation>) -> Result<(), DeviceError> {
        self.readable |= !self.poll.events()?.is_empty();
        if let Some(active) = active
            && self.receive(active)? == Progress::More
        {
            self.poll.ring();
        }
        Ok(())
    }

    fn quiesce(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        self.poll.pause()
    }

    fn unquiesce(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        self.poll.resume()
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        SavedDevice::encode(KIND, VERSION, &Saved { mac: self.mac })
    }

    fn restore(
        &mut self,
        saved: &SavedDevice,
        active: Option<&mut Activation>,
    ) -> Result<(), DeviceError> {
        let saved: Saved = saved.decode(KIND, VERSION)?;
        self.mac = saved.mac;
        self.poll.resume()?;
        self.readable = self.tap.is_some();
        active.map_or(Ok(()), |active| self.apply_offloads(active.features))
    }
}

#[cfg(test)]
mod tests;
