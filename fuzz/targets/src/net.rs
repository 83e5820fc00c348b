//! The network device, and whoever is on its wire.

use std::os::unix::net::UnixDatagram;

use parbake_vmm::device::VirtioDevice;
use parbake_vmm::device::net::Net;

use crate::machine::{Bench, Input, drive};

struct Wire {
    other: Option<UnixDatagram>,
}

impl Bench for Wire {
    fn device(&mut self) -> Box<dyn VirtioDevice> {
        let (ours, theirs) = UnixDatagram::pair().expect("sockets");
        for socket in [&ours, &theirs] {
            socket.set_nonblocking(true).expect("nonblocking");
        }
        self.other = Some(theirs);
        Box::new(Net::over_socket(ours.into(), [2, 0, 0, 0, 0, 7]).expect("device"))
    }

    fn header(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        // Flags, segmentation, lengths, checksum, buffers.
        let mut header = vec![input.byte() % 8, [0, 1, 3, 4, 5, 0x81][usize::from(input.byte() % 6)]];
        header.extend(input.bytes(8));
        header.extend(u16::from(input.byte() % 4).to_le_bytes());
        header
    }

    fn host(&mut self, input: &mut Input<'_>) {
        let Some(wire) = &self.other else { return };
        if input.byte() % 16 == 15 {
            self.other = None;
            return;
        }
        let most = usize::from(input.byte() % 12);
        let mut frame = input.bytes(most);
        frame.resize(frame.len() + usize::from(input.half()), 0x5a);
        let _ = wire.send(&frame);
        let mut out = vec![0; 1 << 16];
        while wire.recv(&mut out).is_ok() {}
    }
}

/// Runs one input.
pub fn run(data: &[u8]) {
    drive(&mut Wire { other: None }, data);
}
