use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::device::guest::{Guest, MEMORY, READ, Segment, WRITE};
use crate::device::rng::Rng;

fn plug() -> Guest {
    Guest::plug(Box::new(Rng::new()))
}

fn boot() -> Guest {
    Guest::boot(Box::new(Rng::new()), true)
}

/// One honest request, answered.
fn works(guest: &mut Guest) {
    let at = guest.alloc(16);
    guest.offer(0, &[(at, 16, WRITE)]);
    guest.run();
    assert_eq!(guest.finished(0).len(), 1);
    assert_ne!(guest.bytes(at, 16), [0; 16]);
}

#[test]
fn registers_are_words_and_the_rest_is_silent() {
    let mut guest = plug();
    assert_eq!(guest.get(0x08), 4);
    let mut all = [0xffu8; 8];
    guest.transport.read(0x00, &mut all);
    assert_eq!(all, [0; 8]);
    let mut byte = [0xffu8; 1];
    guest.transport.read(0x00, &mut byte);
    assert_eq!(byte, [0]);
    let mut word = [0xffu8; 4];
    guest.transport.read(0x02, &mut word);
    assert_eq!(word, [0; 4]);
    assert_eq!(guest.get(0xb0), u32::MAX);
    for offset in [0x1000, 0x1_0000, u64::MAX, u64::MAX - 3] {
        assert_eq!(guest.get(offset), 0);
        guest.set(offset, 1);
    }
    guest.transport.write(0x70, &[1]);
    guest.transport.write(0x70, &[]);
    assert_eq!(guest.get(0x70), 0);
}

#[test]
fn features_must_be_ours_and_modern() {
    for (name, features, agreed) in [
        ("nothing", 0, false),
        ("legacy", FEATURE_EVENT_IDX, false),
        ("modern", FEATURE_VERSION_1, true),
        ("not offered", FEATURE_VERSION_1 | 1 << 35, false),
        ("not offered by this device", FEATURE_VERSION_1 | 1, false),
    ] {
        let mut guest = plug();
        guest.set(0x70, 3);
        guest.set_features(features);
        guest.set(0x70, 11);
        assert_eq!(guest.get(0x70) == 11, agreed, "{name}");
        // Too late to change one's mind.
        guest.set(0x24, 0);
        guest.set(0x20, u32::MAX);
        guest.set(0x70, 15);
        assert_eq!(guest.transport.is_active(), agreed, "{name}");
    }
    let mut guest = plug();
    guest.set(0x70, 3);
    guest.set_features(FEATURE_VERSION_1);
    guest.set(0x24, 7);
    guest.set(0x20, 1);
    guest.set(0x70, 11);
    assert_eq!(guest.get(0x70), 3);
    guest.set(0x14, 9);
    assert_eq!(guest.get(0x10), 0);
}

#[test]
fn stages_cannot_be_skipped_or_taken_back() {
    for (status, reached) in [(2, 0), (4, 0), (8, 0), (1 | 4, 1), (1 | 8, 1), (64, 0), (1 | 64, 1)]
    {
        let mut guest = plug();
        guest.set(0x70, status);
        assert_eq!(guest.get(0x70), reached, "{status}");
    }
    let mut guest = boot();
    guest.set(0x70, 3);
    assert_eq!(guest.get(0x70), 15);
    works(&mut guest);
    guest.set(0x70, 15 | 128);
    assert_eq!(guest.get(0x70), 15 | 128);
    guest.bring_up();
    works(&mut guest);
}

#[test]
fn queues_are_set_up_between_features_and_go() {
    let mut guest = plug();
    guest.set(0x70, 3);
    guest.set(0x44, 1);
    assert_eq!(guest.get(0x44), 0, "before FEATURES_OK");
    guest.set_features(FEATURE_VERSION_1);
    guest.set(0x70, 11);
    guest.set(0x30, 1);
    guest.set(0x44, 1);
    assert_eq!((guest.get(0x34), guest.get(0x44)), (0, 0), "no such queue");
    guest.set(0x30, u32::MAX);
    guest.set(0x80, 1);
    guest.set(0x30, 0);
    assert_eq!(guest.get(0x34), 64);

    let mut guest = boot();
    guest.set(0x30, 0);
    for (register, value) in [(0x38, 4), (0x80, 0xdead_0000), (0x94, 7), (0x44, 1)] {
        guest.set(register, value);
    }
    works(&mut guest);
}

#[test]
fn rings_that_are_not_in_memory_stop_the_device() {
    for (name, register, value) in [
        ("descriptors past the end", 0x80, MEMORY as u32 - 16),
        ("descriptors far away", 0x84, 0xffff_ffff),
        ("available ring past the end", 0x90, MEMORY as u32 - 2),
        ("used ring far away", 0xa4, 1),
    ] {
        let mut guest = plug();
        guest.set(0x70, 3);
        guest.set_features(FEATURE_VERSION_1);
        guest.set(0x70, 11);
        for (register, value) in [(0x80, 0x1_0000), (0x90, 0x2_0000), (0xa0, 0x3_0000)] {
            guest.set(register, value);
        }
        guest.set(register, value);
        guest.set(0x44, 1);
        guest.set(0x70, 15);
        assert_eq!(guest.get(0x70), 15 | 64, "{name}");
        assert!(guest.interrupted(), "{name}");
        assert_eq!(guest.get(0x60), 2, "{name}");
        assert!(matches!(guest.transport.take_failure(), Some(DeviceError::Driver(_))));
        guest.bring_up();
        works(&mut guest);
    }
}

#[test]
fn sizes_that_are_not_allowed_change_nothing() {
    for size in [0, 3, 65, 128, 0x1_0000, u32::MAX] {
        let mut guest = plug();
        guest.set(0x70, 3);
        guest.set_features(FEATURE_VERSION_1);
        guest.set(0x70, 11);
        guest.set(0x38, size);
        assert_eq!(guest.transport.idle_queues[0].size(), 64, "{size}");
    }
}

#[test]
fn a_queue_taken_away_stops_the_device() {
    let mut guest = boot();
    guest.set(0x30, 0);
    guest.set(0x44, 0);
    assert_eq!(guest.get(0x44), 0);
    assert!(guest.needs_reset());
    guest.set(0x50, 0);
    guest.run_device();
    guest.bring_up();
    works(&mut guest);
}

#[test]
fn interrupts_stay_until_they_are_acknowledged() {
    let mut guest = boot();
    let at = guest.alloc(16);
    guest.offer(0, &[(at, 16, WRITE)]);
    guest.run_device();
    assert!(guest.interrupted());
    assert_eq!(guest.get(0x60), 1);
    guest.set(0x64, 2);
    assert_eq!(guest.get(0x60), 1);
    guest.set(0x64, 1);
    assert_eq!(guest.get(0x60), 0);
}

#[test]
fn a_pending_interrupt_and_a_lost_kick_survive_a_restore() {
    for event_idx in [false, true] {
        let mut guest = Guest::boot(Box::new(Rng::new()), event_idx);
        // One answered, its interrupt not taken; one offered, its kick not seen.
        let (first, second) = (guest.alloc(16), guest.alloc(16));
        guest.offer(0, &[(first, 16, WRITE)]);
        guest.run_device();
        assert!(guest.interrupted());
        guest.offer(0, &[(second, 16, WRITE)]);
        let frozen = guest.freeze();
        let mut next = Guest::thaw(&frozen, Box::new(Rng::new()));
        assert!(next.handle_interrupt(), "the interrupt was lost");
        next.run();
        assert_eq!(next.finished(0).len(), 2, "the kick was lost");
        works(&mut next);

        // The original runs on, too.
        guest.transport.unquiesce().unwrap();
        assert!(guest.handle_interrupt());
        guest.run();
        assert_eq!(guest.finished(0).len(), 2);
        works(&mut guest);
    }
}

#[test]
fn each_stage_survives_a_restore() {
    for status in [0, 1, 3, 11] {
        let mut guest = plug();
        guest.set(0x70, status & 3);
        guest.set_features(FEATURE_VERSION_1);
        guest.set(0x70, status);
        guest.set(0x90, 0x2_0000);
        let frozen = guest.freeze();
        let mut next = Guest::thaw(&frozen, Box::new(Rng::new()));
        assert_eq!(next.get(0x70), status);
        assert_eq!(next.transport.idle_queues, guest.transport.idle_queues);
        next.bring_up();
        works(&mut next);
    }
    let mut guest = boot();
    guest.offer(0, &[(0, 1, READ)]);
    guest.run_device();
    assert!(guest.needs_reset());
    let frozen = guest.freeze();
    let mut next = Guest::thaw(&frozen, Box::new(Rng::new()));
    assert!(next.needs_reset() && !next.transport.is_active());
    next.bring_up();
    works(&mut next);
}

#[test]
fn only_a_quiet_device_is_saved_and_only_a_fitting_state_restored() {
    let mut guest = boot();
    assert!(guest.transport.save().is_err());
    guest.transport.quiesce().unwrap();
    guest.transport.quiesce().unwrap();
    let saved = guest.transport.save().unwrap();
    let queue = |change: &dyn Fn(&mut SavedQueue)| {
        let mut queue = saved.queues[0].clone();
        change(&mut queue);
        SavedTransport { queues: vec![queue], ..saved.clone() }
    };
    for (name, damaged) in [
        ("no queues", SavedTransport { queues: vec![], ..saved.clone() }),
        ("features", SavedTransport { driver_features: u64::MAX, ..saved.clone() }),
        ("largest size", queue(&|queue| queue.max_size = 256)),
        ("size", queue(&|queue| queue.size = 48)),
        ("alignment", queue(&|queue| queue.desc_table = 8)),
        ("place", queue(&|queue| queue.used_ring = u64::MAX - 3)),
        (
            "device",
            SavedTransport {
                device: SavedDevice { kind: "net".into(), ..saved.device.clone() },
                ..saved.clone()
            },
        ),
    ] {
        assert!(plug().transport.restore(&damaged).is_err(), "{name}");
    }
    plug().transport.restore(&saved).unwrap();
}

/// Chains that break a rule, each alone.
#[test]
fn broken_chains_stop_the_device() {
    type Case = (&'static str, Vec<(Segment, u16, u16)>);
    let good = (0x10_0000, 16, WRITE);
    let table = 0x20_0000;
    let cases: Vec<Case> = vec![
        ("points at itself", vec![(good, 1, 0)]),
        ("goes round", vec![(good, 1, 1), (good, 1, 2), (good, 1, 0)]),
        ("next out of range", vec![(good, 1, 64)]),
        ("next far out of range", vec![(good, 1, u16::MAX)]),
        ("address out of range", vec![((MEMORY, 1, WRITE), 0, 0)]),
        ("runs out of memory", vec![((MEMORY - 8, 16, WRITE), 0, 0)]),
        ("address wraps", vec![((u64::MAX - 4, 16, WRITE), 0, 0)]),
        ("length wraps", vec![((0x10_0000, u32::MAX, WRITE), 0, 0)]),
        ("4 GiB in total", vec![((0, 1 << 31, WRITE), 1, 1), ((0, 1 << 31, WRITE), 0, 0)]),
        ("readable after writable", vec![(good, 1, 1), ((0x10_0000, 4, READ), 0, 0)]),
        ("only readable", vec![((0x10_0000, 4, READ), 0, 0)]),
        ("nothing at all", vec![((0x10_0000, 0, WRITE), 0, 0)]),
        ("empty indirect table", vec![((table, 0, READ), 4, 0)]),
        ("ragged indirect table", vec![((table, 24, READ), 4, 0)]),
        ("indirect and next", vec![((table, 16, READ), 5, 1), (good, 0, 0)]),
        ("indirect table out of range", vec![((MEMORY, 16, READ), 4, 0)]),
        ("huge indirect table that loops", vec![((table, 0xffff_fff0, READ), 4, 0)]),
        ("indirect in indirect", vec![((table + 0x100, 16, READ), 4, 0)]),
        ("indirect next out of range", vec![((table + 0x200, 16, READ), 4, 0)]),
    ];
    for (name, chain) in cases {
        let mut guest = boot();
        guest.write_descriptor(table, (0x10_0000, 4, WRITE), 1, 0);
        guest.write_descriptor(table + 0x100, (table, 16, READ), 4, 0);
        guest.write_descriptor(table + 0x200, (0x10_0000, 4, WRITE), 1, 1);
        let desc = guest.rings[0].desc;
        for (index, (segment, flags, next)) in chain.into_iter().enumerate() {
            guest.write_descriptor(desc + index as u64 * 16, segment, flags, next);
        }
        guest.publish(0, 0);
        guest.kick(0);
        guest.run_device();
        assert!(guest.needs_reset(), "{name}");
        assert_eq!(guest.get(0x60) & 2, 2, "{name}");
        guest.bring_up();
        works(&mut guest);
    }
}

#[test]
fn broken_available_rings_stop_the_device() {
    for head in [64, 1000, u16::MAX] {
        let mut guest = boot();
        guest.publish(0, head);
        guest.kick(0);
        guest.run_device();
        assert!(guest.needs_reset(), "head {head}");
    }
    for jump in [65u16, 1000, 0x8000, u16::MAX] {
        let mut guest = boot();
        let at = GuestAddress(guest.rings[0].avail + 2);
        guest.memory.write_obj(jump, at).unwrap();
        guest.set(0x50, 0);
        guest.run_device();
        assert!(guest.needs_reset(), "index {jump}");
    }
}

#[test]
fn unusual_chains_that_break_no_rule_work() {
    let half = MEMORY / 2;
    let table = 0x20_0000;
    for (name, place, len, chain) in [
        ("over the border of two regions", half - 8, 16, vec![((half - 8, 16, WRITE), 0, 0)]),
        (
            "empty parts",
            0x10_0000,
            8,
            vec![((0, 0, READ), 1, 1), ((0x10_0000, 8, WRITE), 1, 2), ((u64::MAX, 0, WRITE), 0, 0)],
        ),
        ("indirect, unaligned table", 0x10_0000, 8, vec![((table + 3, 32, READ), 4, 0)]),
        (
            "direct, then indirect",
            0x10_0000,
            16,
            vec![((0x10_0008, 8, WRITE), 1, 1), ((table + 3, 32, READ), 4, 0)],
        ),
    ] {
        let mut guest = boot();
        guest.write_descriptor(table + 3, (0x10_0000, 4, WRITE), 1, 1);
        guest.write_descriptor(table + 19, (0x10_0004, 4, WRITE), 0, 0);
        let desc = guest.rings[0].desc;
        for (index, (segment, flags, next)) in chain.into_iter().enumerate() {
            guest.write_descriptor(desc + index as u64 * 16, segment, flags, next);
        }
        guest.publish(0, 0);
        guest.kick(0);
        guest.run_device();
        assert!(!guest.needs_reset(), "{name}");
        let used = GuestAddress(guest.rings[0].used + 8);
        assert_eq!(guest.memory.read_obj::<u32>(used).unwrap(), len, "{name}");
        assert_ne!(guest.bytes(place, len as usize), vec![0; len as usize], "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// No sequence of register writes, in any width, at any stage, breaks the transport; a reset
    /// always leads back to a working device.
    #[test]
    fn any_register_writes_are_survived(
        writes in prop::collection::vec(
            (prop_oneof![0u64..0x110, Just(0x70), Just(0x44), any::<u64>()],
             prop_oneof![0u32..16, any::<u32>()],
             prop_oneof![8 => Just(4usize), 1 => 0usize..4]),
            0..200,
        )
    ) {
        let mut guest = plug();
        for (offset, value, width) in writes {
            guest.transport.write(offset, &value.to_le_bytes()[..width]);
            let mut data = vec![0; width];
            guest.transport.read(offset, &mut data);
            guest.run_device();
        }
        guest.bring_up();
        works(&mut guest);
    }
}
