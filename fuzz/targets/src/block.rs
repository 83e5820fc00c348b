//! The block device over a small disk with a write limit.

use std::sync::LazyLock;

use parbake_protocol::vmm::Disk;
use parbake_vmm::device::VirtioDevice;
use parbake_vmm::device::block::Block;
use crate::machine::{Bench, Input, drive};
use tempfile::TempDir;

static DIRECTORY: LazyLock<TempDir> = LazyLock::new(|| {
    let directory = tempfile::tempdir().expect("temporary directory");
    std::fs::write(directory.path().join("base"), vec![0x5a; 133 * 512]).expect("base");
    std::fs::write(directory.path().join("overlay"), vec![0xa5; 8192]).expect("overlay");
    directory
});

struct Disks;

impl Bench for Disks {
    fn device(&mut self) -> Box<dyn VirtioDevice> {
        let disk = Disk {
            base: DIRECTORY.path().join("base"),
            overlay: Some(DIRECTORY.path().join("overlay")),
            scratch: None,
            read_only: false,
            write_limit: 32 << 10,
        };
        Box::new(Block::open(&disk).expect("disk"))
    }

    fn header(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let kind = [0u32, 1, 4, 8, 11, 13, 0, 1][usize::from(input.byte() % 8)];
        let mut header = Vec::from(kind.to_le_bytes());
        header.extend([0; 4]);
        header.extend(u64::from(input.byte()).to_le_bytes());
        // The segment of a discard, should it follow.
        header.extend(u64::from(input.byte()).to_le_bytes());
        header.extend(u32::from(input.byte()).to_le_bytes());
        header.extend(u32::from(input.byte() % 3).to_le_bytes());
        header
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    drive(&mut Disks, data);
}
