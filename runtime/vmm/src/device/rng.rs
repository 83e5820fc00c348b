//! The entropy device (VIRTIO 1.2, 5.4): fills buffers from the host's generator.
//!
//! Nothing is kept between requests, so nothing of it can be in a snapshot: a request that was
//! waiting when the machine froze is answered after the restore, with fresh bytes. Bytes the guest
//! fetched earlier and still holds are the guest's; reseeding it is the agent's task.

use super::{Activation, DeviceError, Progress, SavedDevice, VirtioDevice, ring};

const KIND: &str = "rng";
const VERSION: u32 = 1;
const DEVICE_TYPE: u32 = 4;
const QUEUE_SIZES: [u16; 1] = [64];

/// The most bytes one request gets; the driver asks again for more (it may, 5.4.6.1).
const MAX_REQUEST: usize = 16 << 10;
/// The most requests answered in one pass.
const MAX_CHAINS: usize = 64;

/// The entropy device.
#[derive(Debug, Default)]
pub struct Rng {}

impl Rng {
    /// A device without state.
    pub fn new() -> Self {
        Self::default()
    }
}

impl VirtioDevice for Rng {
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

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn queue_event(
        &mut self,
        active: &mut Activation,
        _index: usize,
    ) -> Result<Progress, DeviceError> {
        let Activation { memory, queues, interrupt, .. } = active;
        let Some(queue) = queues.first_mut() else { return Ok(Progress::Idle) };
        let mut answered = 0;
        let progress = loop {
            let Some(mut chain) = ring::pop(queue, memory)? else {
                break ring::rearm(queue, memory)?;
            };
            if chain.writable.len() == 0 {
                return Err(DeviceError::Driver("an entropy request without room".into()));
            }
            let mut bytes = [0u8; MAX_REQUEST];
            let wanted = chain.writable.len().min(MAX_REQUEST);
            getrandom::fill(&mut bytes[..wanted]).map_err(|error| {
                DeviceError::io("reading random bytes", std::io::Error::other(error.to_string()))
            })?;
            let written = chain.writable.write(&bytes[..wanted]);
            ring::push_used(queue, memory, chain.head, written as u32)?;
            answered += 1;
            if answered == MAX_CHAINS {
                break Progress::More;
            }
        };
        if answered > 0 {
            ring::notify(queue, memory, interrupt)?;
        }
        Ok(progress)
    }

    fn save(&self) -> Result<SavedDevice, DeviceError> {
        SavedDevice::encode(KIND, VERSION, &())
    }

    fn restore(
        &mut self,
        saved: &SavedDevice,
        _active: Option<&mut Activation>,
    ) -> Result<(), DeviceError> {
        saved.decode(KIND, VERSION)
    }
}

#[cfg(test)]
mod tests;
