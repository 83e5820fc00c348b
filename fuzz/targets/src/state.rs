//! Any bytes as the state of a frozen machine, with a checksum that fits.

use parbake_vmm::snapshot::format::{self, Section};
use parbake_vmm::snapshot::state::{MachineState, VIRTIO, from_bytes};

use crate::machine::{Input, reborn};

const KINDS: [&str; 9] = [
    "shape",
    "contract",
    "vcpu",
    "irqchip",
    "clock",
    "serial",
    "memory-difference",
    VIRTIO,
    "something else",
];

/// Runs one input: as a file; and as sections, each a kind and a version in a byte, a length in two,
/// and the payload.
pub fn run(bytes: &[u8]) {
    let _ = MachineState::decode(bytes);
    let (mut input, mut sections) = (Input::new(bytes), Vec::new());
    while !input.is_empty() && sections.len() < 64 {
        let (kind, length) = (input.byte(), input.half());
        let payload = input.bytes(usize::from(length).min(input.left()));
        let name = KINDS[usize::from(kind & 0xf) % KINDS.len()];
        if name == VIRTIO
            && let Ok(saved) = from_bytes(VIRTIO, &payload)
        {
            reborn(&saved);
        }
        sections.push(Section {
            kind: name.into(),
            version: if kind & 0x20 == 0 { 1 } else { 2 },
            mandatory: kind & 0x10 == 0,
            payload,
        });
    }
    let file = format::encode(&sections);
    let read = format::decode(&file).expect("what was written is read");
    assert_eq!(read, sections);
    if let Ok(state) = MachineState::decode(&file) {
        let again = state.encode().expect("what was read is written");
        MachineState::decode(&again).expect("and read again");
    }
}
