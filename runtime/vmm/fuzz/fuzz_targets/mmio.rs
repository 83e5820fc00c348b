//! The transport and its queues, with the simplest device behind.
#![no_main]

use libfuzzer_sys::fuzz_target;
use parbake_vmm::device::VirtioDevice;
use parbake_vmm::device::rng::Rng;
use parbake_vmm_fuzz::{Bench, Input, drive};

struct Mmio;

impl Bench for Mmio {
    fn device(&mut self) -> Box<dyn VirtioDevice> {
        Box::new(Rng::new())
    }

    fn header(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        input.bytes(16)
    }
}

fuzz_target!(|data: &[u8]| drive(&mut Mmio, data));
