//! Any bytes as a kernel image.

use parbake_kernels::{elf, payload};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let _ = payload::unpack(bytes);
    let _ = elf::inspect(bytes);
    let _ = elf::section(bytes, b".init_array");
    let _ = elf::is_static_program(bytes);
}
