use super::*;
use crate::device::guest::{Guest, READ, WRITE};

#[test]
fn requests_are_filled_and_answers_differ() {
    for event_idx in [false, true] {
        let mut guest = Guest::boot(Box::new(Rng::new()), event_idx);
        let mut seen = Vec::new();
        for round in 0..200 {
            let at = guest.alloc(64);
            guest.offer(0, &[(at, 24, WRITE), (at + 24, 40, WRITE)]);
            guest.run();
            assert_eq!(guest.finished(0).len(), 1, "round {round}");
            seen.push(guest.bytes(at, 64));
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 200);
    }
}

#[test]
fn a_huge_request_gets_a_bounded_answer() {
    let mut guest = Guest::boot(Box::new(Rng::new()), true);
    guest.offer(0, &[(1 << 20, 8 << 20, WRITE)]);
    guest.run();
    assert_eq!(guest.finished(0)[0].1, MAX_REQUEST as u32);
    assert_eq!(guest.bytes((1 << 20) + MAX_REQUEST as u64, 64), [0; 64]);
}

#[test]
fn a_request_without_room_is_a_fault_that_a_reset_mends() {
    let mut guest = Guest::boot(Box::new(Rng::new()), true);
    guest.offer(0, &[(0x10_0000, 64, READ)]);
    guest.run();
    assert!(guest.needs_reset());
    assert!(matches!(guest.transport.take_failure(), Some(DeviceError::Driver(_))));
    guest.bring_up();
    let at = guest.alloc(8);
    guest.offer(0, &[(at, 8, WRITE)]);
    guest.run();
    assert_eq!(guest.finished(0).len(), 1);
}

#[test]
fn a_request_frozen_in_the_queue_is_answered_differently_in_each_life() {
    let mut guest = Guest::boot(Box::new(Rng::new()), true);
    let at = guest.alloc(32);
    // The kick is lost: it is in an eventfd nobody reads any more.
    guest.offer(0, &[(at, 32, WRITE)]);
    let frozen = guest.freeze();
    let mut lives: Vec<_> = (0..3)
        .map(|_| {
            let mut life = Guest::thaw(&frozen, Box::new(Rng::new()));
            life.run();
            assert_eq!(life.finished(0).len(), 1);
            life.bytes(at, 32)
        })
        .collect();
    lives.sort();
    lives.dedup();
    assert_eq!(lives.len(), 3);
}
