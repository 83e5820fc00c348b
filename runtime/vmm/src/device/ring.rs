//! Descriptor chains as foreign input: a strict walk from the available ring to checked slices of
//! guest memory, and back through the used ring.
//!
//! `virtio-queue` keeps the ring positions and the notification rules. Its chain iterator is not
//! used: it ends silently where a chain is broken, and a device must be able to tell a short chain
//! from a broken one (VIRTIO 1.2, 2.7.5: what a driver must not do).

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Error as QueueError, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

use super::{DeviceError, Interrupt, Progress};

/// The most descriptors in one chain. Drivers may exceed the queue's size with an indirect table
/// (Linux does not check); no driver of our devices comes near this.
const MAX_DESCRIPTORS: usize = 1024;

const DESCRIPTOR_SIZE: u64 = 16;
const FLAG_NEXT: u16 = 1;
const FLAG_WRITE: u16 = 2;
const FLAG_INDIRECT: u16 = 4;
const AVAIL_NO_INTERRUPT: u16 = 1;

/// Slices of guest memory, consumed from the front.
#[derive(Clone, Default)]
pub(super) struct Buffers<'m> {
    slices: Vec<VolatileSlice<'m>>,
    /// Slices before this one are used up.
    first: usize,
    len: usize,
}

impl<'m> Buffers<'m> {
    fn push(&mut self, slice: VolatileSlice<'m>) {
        self.len += slice.len();
        self.slices.push(slice);
    }

    /// Appends all of `other`.
    pub(super) fn append(&mut self, other: &Buffers<'m>) {
        self.len += other.len;
        self.slices.extend_from_slice(other.slices());
    }

    /// Bytes left.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// What is left, in order.
    pub(super) fn slices(&self) -> &[VolatileSlice<'m>] {
        self.slices.get(self.first..).unwrap_or_default()
    }

    /// Takes off the first `count` bytes, or all there are.
    pub(super) fn take(&mut self, count: usize) -> Buffers<'m> {
        let mut taken = Buffers::default();
        while taken.len < count {
            let Some(slice) = self.slices.get_mut(self.first) else { break };
            let wanted = count - taken.len;
            match slice.split_at(wanted) {
                Ok((head, tail)) if !tail.is_empty() => {
                    taken.push(head);
                    *slice = tail;
                }
                // As long as or shorter than what is wanted.
                _ => {
                    taken.push(*slice);
                    self.first += 1;
                }
            }
        }
        self.len -= taken.len;
        taken
    }

    /// Splits off the last `count` bytes; `None` if there are fewer.
    pub(super) fn split_tail(&mut self, count: usize) -> Option<Buffers<'m>> {
        let keep = self.len.checked_sub(count)?;
        let head = self.take(keep);
        Some(std::mem::replace(self, head))
    }

    /// Copies the first bytes out and consumes them; how many there were.
    pub(super) fn read(&mut self, out: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in self.take(out.len()).slices() {
            done += slice.copy_to(&mut out[done..]);
        }
        done
    }

    /// Copies `data` to the front and consumes as much; how much had room.
    pub(super) fn write(&mut self, data: &[u8]) -> usize {
        let mut done = 0;
        for slice in self.take(data.len()).slices() {
            let part = &data[done..done + slice.len()];
            slice.copy_from(part);
            done += part.len();
        }
        done
    }

    /// Zeroes everything that is left.
    pub(super) fn fill_zero(&mut self) {
        const ZERO: [u8; 4096] = [0; 4096];
        while self.len > 0 {
            self.write(&ZERO[..self.len.min(ZERO.len())]);
        }
    }
}

/// One request of a driver: all of it lies in guest memory.
pub(super) struct Chain<'m> {
    /// Index of its first descriptor, to give back.
    pub(super) head: u16,
    /// What the device reads.
    pub(super) readable: Buffers<'m>,
    /// What the device writes.
    pub(super) writable: Buffers<'m>,
}

fn broken(what: impl Into<String>) -> DeviceError {
    DeviceError::Driver(what.into())
}

#[expect(clippy::needless_pass_by_value, reason = "the shape `map_err` wants")]
fn ring_error(error: QueueError) -> DeviceError {
    broken(format!("virtqueue: {error}"))
}

/// Takes the next chain off the available ring; `None` when there is none, or the queue is unused.
pub(super) fn pop<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemoryMmap,
) -> Result<Option<Chain<'m>>, DeviceError> {
    if !queue.ready() {
        return Ok(None);
    }
    let head = match queue.iter(memory).map_err(ring_error)?.next() {
        Some(chain) => chain.head_index(),
        None => return Ok(None),
    };
    walk(queue, memory, head).map(Some)
}

/// Puts back the `count` chains popped last.
pub(super) fn put_back(queue: &mut Queue, count: u16) {
    queue.set_next_avail(queue.next_avail().wrapping_sub(count));
}

/// How many chains the driver has offered so far, as a wrapping count.
pub(super) fn offered(queue: &Queue, memory: &GuestMemoryMmap) -> Result<u16, DeviceError> {
    queue.avail_idx(memory, Ordering::Acquire).map(|index| index.0).map_err(ring_error)
}

/// Gives a chain back to the driver; `len` bytes at its start were written.
pub(super) fn push_used(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    head: u16,
    len: u32,
) -> Result<(), DeviceError> {
    queue.add_used(memory, head, len).map_err(ring_error)
}

/// Gives several chains back so that the driver sees all of them or none. ([`notify`] then knows of
/// the last one only.)
pub(super) fn push_used_together(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    chains: &[(u16, u32)],
) -> Result<(), DeviceError> {
    let Some((&(head, len), rest)) = chains.split_last() else { return Ok(()) };
    for (head, len) in rest {
        let slot = u64::from(queue.next_used() % queue.size());
        let at = queue.used_ring().checked_add(4 + 8 * slot);
        let at = at.ok_or_else(|| broken("a used ring that wraps around"))?;
        let mut element = [0u8; 8];
        element[..4].copy_from_slice(&u32::from(*head).to_le_bytes());
        element[4..].copy_from_slice(&len.to_le_bytes());
        memory
            .write_slice(&element, GuestAddress(at))
            .map_err(|error| broken(format!("used ring: {error}")))?;
        queue.set_next_used(queue.next_used().wrapping_add(1));
    }
    push_used(queue, memory, head, len)
}

/// Raises the interrupt unless the driver asked not to be disturbed.
pub(super) fn notify(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    interrupt: &Interrupt,
) -> Result<(), DeviceError> {
    let wanted = queue.needs_notification(memory).map_err(ring_error)?;
    if !wanted {
        return Ok(());
    }
    if !queue.event_idx_enabled() {
        let flags: u16 = memory
            .load(GuestAddress(queue.avail_ring()), Ordering::Relaxed)
            .map_err(|error| broken(format!("available ring: {error}")))?;
        if u16::from_le(flags) & AVAIL_NO_INTERRUPT != 0 {
            return Ok(());
        }
    }
    interrupt.signal_used();
    Ok(())
}

/// Asks the driver to kick at the next chain. `More` when one is there already: the caller's pass
/// ends all the same, or a driver that plays with the index could keep it busy for ever.
pub(super) fn rearm(queue: &mut Queue, memory: &GuestMemoryMmap) -> Result<Progress, DeviceError> {
    if !queue.ready() {
        return Ok(Progress::Idle);
    }
    let more = queue.enable_notification(memory).map_err(ring_error)?;
    Ok(if more { Progress::More } else { Progress::Idle })
}

/// Asks the driver to kick when it offers a chain beyond the `seen` ones, although some of those
/// are still untouched; `More` when it has done so already. ([`rearm`] asks for a kick at the next
/// untouched chain, which here was offered long ago: with `EVENT_IDX` none would ever come.)
pub(super) fn rearm_at(
    queue: &Queue,
    memory: &GuestMemoryMmap,
    seen: u16,
) -> Result<Progress, DeviceError> {
    if queue.event_idx_enabled() {
        let at = queue.used_ring().checked_add(4 + 8 * u64::from(queue.size()));
        let at = at.ok_or_else(|| broken("a used ring that wraps around"))?;
        memory
            .store(seen.to_le(), GuestAddress(at), Ordering::Relaxed)
            .map_err(|error| broken(format!("used ring: {error}")))?;
        fence(Ordering::SeqCst);
    }
    Ok(if offered(queue, memory)? == seen { Progress::Idle } else { Progress::More })
}

/// Follows the chain at `head`.
fn walk<'m>(
    queue: &Queue,
    memory: &'m GuestMemoryMmap,
    head: u16,
) -> Result<Chain<'m>, DeviceError> {
    let mut chain = Chain { head, readable: Buffers::default(), writable: Buffers::default() };
    let mut table = queue.desc_table();
    let mut table_len = u32::from(queue.size());
    let mut indirect = false;
    let mut index = u32::from(head);
    let mut total = 0u64;
    // A table's entries can each be seen once; one more is a loop.
    let mut left = table_len;
    let mut seen = 0usize;
    loop {
        if index >= table_len {
            return Err(broken(format!("descriptor {index} of a table of {table_len}")));
        }
        if left == 0 || seen == MAX_DESCRIPTORS {
            return Err(broken("a descriptor chain that loops or is too long"));
        }
        left -= 1;
        seen += 1;
        let mut raw = [0u8; DESCRIPTOR_SIZE as usize];
        let at = table
            .checked_add(u64::from(index) * DESCRIPTOR_SIZE)
            .ok_or_else(|| broken("a descriptor table that wraps around"))?;
        memory
            .read_slice(&mut raw, GuestAddress(at))
            .map_err(|error| broken(format!("descriptor at {at:#x}: {error}")))?;
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = raw;
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        let flags = u16::from_le_bytes([f0, f1]);
        let next = u16::from_le_bytes([n0, n1]);

        if flags & FLAG_INDIRECT != 0 {
            if indirect || flags & FLAG_NEXT != 0 {
                return Err(broken("an indirect descriptor inside or before another"));
            }
            if len == 0 || u64::from(len) % DESCRIPTOR_SIZE != 0 {
                return Err(broken(format!("an indirect table of {len} bytes")));
            }
            table = address;
            table_len = len / DESCRIPTOR_SIZE as u32;
            left = table_len;
            indirect = true;
            index = 0;
            continue;
        }

        total += u64::from(len);
        if total > u64::from(u32::MAX) {
            return Err(broken("a descriptor chain of more than 4 GiB"));
        }
        if len > 0 {
            let side = if flags & FLAG_WRITE != 0 {
                &mut chain.writable
            } else if chain.writable.len() == 0 {
                &mut chain.readable
            } else {
                return Err(broken("a readable descriptor after a writable one"));
            };
            for slice in memory.get_slices(GuestAddress(address), len as usize) {
                side.push(slice.map_err(|error| {
                    broken(format!("descriptor for {len} bytes at {address:#x}: {error}"))
                })?);
            }
        }
        if flags & FLAG_NEXT == 0 {
            return Ok(chain);
        }
        index = u32::from(next);
    }
}
