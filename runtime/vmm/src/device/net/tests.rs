use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

use super::*;
use crate::device::guest::{Guest, READ, WRITE};

thread_local! {
    static OFFLOADS: Cell<Option<u32>> = const { Cell::new(None) };
}

fn record(_: &File, offloads: u32) -> std::io::Result<()> {
    OFFLOADS.set(Some(offloads));
    Ok(())
}

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// A device over a datagram socket, which keeps frames apart as a tap does.
fn device(mac: [u8; 6]) -> (Box<Net>, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let tap = File::from(OwnedFd::from(ours));
    (Box::new(Net::over(Some(tap), mac, record).unwrap()), theirs)
}

fn frame(len: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend((0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)));
    frame
}

/// Offers `count` receive buffers of `len` bytes; head and address of each.
fn offer(guest: &mut Guest, count: usize, len: usize) -> Vec<(u16, u64)> {
    (0..count)
        .map(|_| {
            let at = guest.alloc(len);
            (guest.offer(RX, &[(at, len as u32, WRITE)]), at)
        })
        .collect()
}

#[test]
fn frames_go_out_whole() {
    let (net, wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    for round in 0..300u32 {
        let data = frame(60 + round as usize * 4, round as u8);
        let at = guest.put(&data);
        let len = data.len() as u32;
        guest.offer(TX, &[(at, 12, READ), (at + 12, 20, READ), (at + 32, len - 32, READ)]);
        guest.run();
        assert_eq!(guest.finished(TX).len(), 1);
        let mut got = vec![0; 4096];
        let count = wire.recv(&mut got).unwrap();
        assert_eq!(got[..count], data);
    }
}

#[test]
fn frames_come_in_one_buffer_or_in_several() {
    for event_idx in [false, true] {
        let (net, wire) = device(MAC);
        let mut guest = Guest::boot(net, event_idx);
        let mut free = offer(&mut guest, 64, 1536);
        guest.run();
        for (len, buffers) in [(60, 1), (1524, 1), (1525, 2), (4000, 3), (60_000, 40)] {
            let data = frame(len, len as u8);
            wire.send(&data).unwrap();
            guest.run();
            let finished = guest.finished(RX);
            assert_eq!(finished.len(), buffers, "{len}");
            let mut got = Vec::new();
            for (head, len) in finished {
                let index = free.iter().position(|(free, _)| *free == head).unwrap();
                let (_, at) = free.remove(index);
                got.extend(guest.bytes(at, len as usize));
            }
            assert_eq!(got[NUM_BUFFERS..HEADER], (buffers as u16).to_le_bytes());
            assert_eq!(got[HEADER..], data[HEADER..]);
            free.extend(offer(&mut guest, buffers, 1536));
        }
        // Many at once.
        for seed in 0..20 {
            wire.send(&frame(100, seed)).unwrap();
        }
        guest.run();
        assert_eq!(guest.finished(RX).len(), 20);
    }
}

#[test]
fn frames_wait_for_buffers_and_keep_their_order() {
    let (net, wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    for seed in 0..6 {
        wire.send(&frame(200, seed)).unwrap();
    }
    guest.run();
    assert!(!guest.host_is_ready(), "the event loop would spin");
    // Not enough for the largest frame there may be: no frame is cut.
    let mut buffers = offer(&mut guest, 40, 1536);
    guest.run();
    assert!(guest.finished(RX).is_empty());
    buffers.extend(offer(&mut guest, 10, 1536));
    guest.run();
    let finished = guest.finished(RX);
    assert_eq!(finished.len(), 6);
    for (seed, ((head, len), (offered, at))) in finished.into_iter().zip(buffers).enumerate() {
        assert_eq!((head, len as usize), (offered, HEADER + 200));
        assert_eq!(guest.bytes(at, 212)[HEADER..], frame(200, seed as u8)[HEADER..]);
    }
}

#[test]
fn a_driver_with_a_small_queue_gets_frames_too() {
    let (net, wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    wire.send(&frame(200, 1)).unwrap();
    offer(&mut guest, 255, 20);
    guest.run();
    assert!(guest.finished(RX).is_empty());
    offer(&mut guest, 1, 20);
    guest.run();
    assert_eq!(guest.finished(RX).len(), 11);
}

#[test]
fn buffers_that_are_too_small_stop_the_device() {
    let (net, wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    wire.send(&frame(60, 1)).unwrap();
    offer(&mut guest, 1, HEADER - 1);
    guest.run();
    assert!(guest.needs_reset());
    let (net, _wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    let at = guest.alloc(64);
    guest.offer(TX, &[(at, 11, READ)]);
    guest.run();
    assert!(guest.needs_reset());
}

#[test]
fn frames_nobody_takes_are_lost_and_nothing_else() {
    let (net, wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    let at = guest.alloc(70_000);
    guest.offer(TX, &[(at, 70_000, READ)]);
    guest.run();
    assert_eq!(guest.finished(TX).len(), 1);
    // More than the other side's queue holds.
    for _ in 0..1000 {
        guest.offer(TX, &[(at, 100, READ)]);
        guest.run();
    }
    assert_eq!(guest.finished(TX).len(), 1000);
    drop(wire);
    guest.offer(TX, &[(at, 100, READ)]);
    guest.run();
    assert!(!guest.needs_reset());
}

#[test]
fn a_restore_mid_traffic_keeps_the_address_and_sets_offloads_again() {
    let (net, wire) = device(MAC);
    let mut guest = Guest::boot(net, true);
    let all = sys::TUN_F_CSUM | sys::TUN_F_TSO4 | sys::TUN_F_TSO6 | sys::TUN_F_TSO_ECN;
    assert_eq!(OFFLOADS.take(), Some(all));
    offer(&mut guest, 60, 1536);
    wire.send(&frame(60, 1)).unwrap();
    let at = guest.put(&frame(80, 2));
    guest.offer(TX, &[(at, 92, READ)]);
    let frozen = guest.freeze();
    // Silent while quiet, and nothing is lost by it.
    wire.send(&frame(60, 1)).unwrap();
    assert!(!guest.host_is_ready());
    guest.transport.unquiesce().unwrap();
    guest.run();
    assert_eq!((guest.finished(RX).len(), guest.finished(TX).len()), (2, 1));

    let (net, wire) = device([2, 9, 9, 9, 9, 9]);
    wire.send(&frame(70, 3)).unwrap();
    let mut next = Guest::thaw(&frozen, net);
    assert_eq!(OFFLOADS.take(), Some(all));
    next.run();
    assert_eq!((next.finished(RX).len(), next.finished(TX).len()), (1, 1));
    assert_eq!(wire.recv(&mut [0; 200]).unwrap(), 92);
    let mut mac = [0; 6];
    next.transport.read(0x100, &mut mac);
    assert_eq!(mac, MAC);
}

#[test]
fn names_that_are_no_tap_are_refused() {
    for tap in ["", "lo/..", "a-name-that-is-too-long", "tap%d", "nosuchtap0"] {
        let config = vmm::Net { tap: Some(vmm::Tap::Name(tap.into())), mac: MAC };
        assert!(Net::open(&config, None).is_err(), "{tap:?}");
    }
    let config = vmm::Net { tap: Some(vmm::Tap::Passed), mac: MAC };
    assert!(Net::open(&config, None).is_err(), "none came along");
}

#[test]
fn a_device_without_a_tap_drops_what_it_is_given() {
    let config = vmm::Net { tap: None, mac: MAC };
    let mut guest = Guest::boot(Box::new(Net::open(&config, None).unwrap()), true);
    offer(&mut guest, 60, 1536);
    for round in 0..300 {
        let at = guest.put(&frame(80, 2));
        guest.offer(TX, &[(at, 92, READ)]);
        guest.run();
        assert_eq!(guest.finished(TX).len(), 1, "round {round}");
    }
    assert!(!guest.host_is_ready() && !guest.needs_reset());
    assert_eq!(guest.finished(RX).len(), 0);
    let frozen = guest.freeze();
    let mut next = Guest::thaw(&frozen, Box::new(Net::open(&config, None).unwrap()));
    next.run();
    assert!(!next.needs_reset());
    // And with one, later.
    let (net, wire) = device(MAC);
    let mut next = Guest::thaw(&frozen, net);
    wire.send(&frame(70, 3)).unwrap();
    next.run();
    assert_eq!(next.finished(RX).len(), 1);
}

/// A tap of this machine's kernel, where it lets us make one.
struct Tap {
    name: String,
}

impl Tap {
    fn create() -> Option<Self> {
        let name = format!("pbt{}", std::process::id());
        let made = ip(&["tuntap", "add", "dev", &name, "mode", "tap", "vnet_hdr"])
            .then_some(Self { name })?;
        ip(&["link", "set", "dev", &made.name, "up"]).then_some(made)
    }

    fn count(&self, what: &str) -> u64 {
        let path = format!("/sys/class/net/{}/statistics/{what}", self.name);
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        ip(&["link", "delete", "dev", &self.name]);
    }
}

fn ip(arguments: &[&str]) -> bool {
    let outcome = std::process::Command::new("ip").args(arguments).output();
    outcome.is_ok_and(|output| output.status.success())
}

#[test]
fn a_real_tap_takes_and_gives_frames() {
    let Some(tap) = Tap::create() else {
        eprintln!("skipped: this machine lets us make no tap interface (needs root and `ip`)");
        return;
    };
    let config = vmm::Net { tap: Some(vmm::Tap::Name(tap.name.clone())), mac: MAC };
    let mut guest = Guest::boot(Box::new(Net::open(&config, None).unwrap()), true);
    offer(&mut guest, 100, 1536);
    guest.run();

    // A broadcast of a protocol nobody speaks.
    let mut data = vec![0; HEADER];
    data.extend([0xff; 6]);
    data.extend(MAC);
    data.extend([0x88, 0xb5]);
    data.resize(HEADER + 60, 0);
    let before = tap.count("rx_packets");
    let at = guest.put(&data);
    guest.offer(TX, &[(at, data.len() as u32, READ)]);
    guest.run();
    assert_eq!(tap.count("rx_packets"), before + 1);

    // The host asks for a neighbour: ARP requests come to the guest.
    assert!(ip(&["address", "add", "192.0.2.1/24", "dev", &tap.name]));
    let socket = std::net::UdpSocket::bind("192.0.2.1:0").unwrap();
    let _ = socket.send_to(b"x", "192.0.2.2:9");
    let asked = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        guest.run();
        guest.finished(RX).into_iter().any(|(_, len)| len as usize >= HEADER + 42)
    });
    assert!(asked, "no frame came from the tap");
}
