//! Every device against rings full of rubbish: whatever a driver puts there, the device ends its
//! work, and after a reset it serves an honest driver.

use parbake_protocol::vmm::{Disk, Vsock};
use proptest::prelude::*;
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

use super::VirtioDevice;
use super::guest::{Guest, MEMORY};

fn device(kind: usize, dir: &TempDir) -> Box<dyn VirtioDevice> {
    match kind {
        0 => Box::new(super::rng::Rng::new()),
        1 => {
            let base = dir.path().join("base");
            std::fs::write(&base, vec![7; 1 << 20]).unwrap();
            let write_limit = 256 << 10;
            let disk = Disk { base, overlay: None, scratch: None, read_only: false, write_limit };
            Box::new(super::block::Block::open(&disk).unwrap())
        }
        2 => {
            let (tap, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
            tap.set_nonblocking(true).unwrap();
            let tap = std::fs::File::from(std::os::fd::OwnedFd::from(tap));
            Box::new(super::net::Net::over(Some(tap), [2, 0, 0, 0, 0, 1], |_, _| Ok(())).unwrap())
        }
        _ => {
            let socket = dir.path().join("v");
            Box::new(super::vsock::Vsock::open(&Vsock { guest_cid: 3, socket }).unwrap())
        }
    }
}

#[derive(Debug, Clone)]
struct Rubbish {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Mostly plausible, so that it gets past the first checks.
fn rubbish() -> impl Strategy<Value = Rubbish> {
    let address = prop_oneof![
        6 => 0x10_0000u64..0x10_4000,
        1 => MEMORY / 2 - 64..MEMORY / 2 + 64,
        1 => MEMORY - 64..MEMORY + 64,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        4 => prop::sample::select(vec![0u32, 1, 16, 44, 512, 1024, 4096]),
        2 => 0u32..9000,
        1 => any::<u32>(),
    ];
    let flags = prop_oneof![6 => 0u16..4, 1 => 0u16..8, 1 => any::<u16>()];
    let next = prop_oneof![6 => 0u16..12, 1 => any::<u16>()];
    (address, len, flags, next).prop_map(|(address, len, flags, next)| Rubbish {
        address,
        len,
        flags,
        next,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn rubbish_in_the_rings_is_survived(
        kind in 0usize..4,
        event_idx in any::<bool>(),
        table in prop::collection::vec(rubbish(), 12),
        content in prop::collection::vec(any::<u8>(), 2048),
        sector_like in any::<bool>(),
        rounds in prop::collection::vec(
            (0usize..3, prop::collection::vec(prop_oneof![9 => 0u16..12, 1 => any::<u16>()], 1..20)),
            1..8,
        ),
        freeze in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut guest = Guest::boot(device(kind, &dir), event_idx);
        for (index, byte) in content.iter().enumerate() {
            // Small numbers make headers that mean something.
            let byte = if sector_like && index % 4 != 0 { 0 } else { *byte % 16 };
            guest.memory.write_obj(byte, GuestAddress(0x10_0000 + index as u64)).unwrap();
        }
        for queue in 0..guest.rings.len() {
            let desc = guest.rings[queue].desc;
            for (index, entry) in table.iter().enumerate() {
                let segment = (entry.address, entry.len, entry.flags & 2 != 0);
                let at = desc + index as u64 * 16;
                guest.write_descriptor(at, segment, entry.flags & !2, entry.next);
            }
        }
        for (queue, heads) in rounds {
            let queue = queue % guest.rings.len();
            for head in heads {
                guest.publish(queue, head);
            }
            guest.set(0x50, queue as u32);
            guest.run_device();
        }
        if freeze {
            guest.transport.quiesce().unwrap();
            let saved = guest.transport.save().unwrap();
            guest.transport.unquiesce().unwrap();
            guest.run_device();
            // A fresh device over the same memory may refuse the state, no more.
            let other = tempfile::tempdir().unwrap();
            let mut next = Guest::plug(device(kind, &other));
            next.memory.write_slice(&guest.bytes(0, MEMORY as usize), GuestAddress(0)).unwrap();
            if next.transport.restore(&saved).is_ok() {
                next.run_device();
            }
        }
        guest.bring_up();
        guest.run();
        prop_assert!(!guest.needs_reset());
    }
}
