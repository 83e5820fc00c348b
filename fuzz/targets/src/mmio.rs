//! The transport and its queues, with the simplest device behind.

use parbake_vmm::device::VirtioDevice;
use parbake_vmm::device::rng::Rng;
use crate::machine::{Bench, Input, drive};

struct Mmio;

impl Bench for Mmio {
    fn device(&mut self) -> Box<dyn VirtioDevice> {
        Box::new(Rng::new())
    }

    fn header(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        input.bytes(16)
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    drive(&mut Mmio, data);
}
