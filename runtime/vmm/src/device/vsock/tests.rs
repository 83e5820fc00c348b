use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::connection::BUFFER;
use super::driver::{Driver, WINDOW};
use super::packet::{HOST_CID, Ports, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};
use super::switch::MAX_CONNECTIONS;
use super::*;
use crate::device::guest::{Guest, READ};

struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn config(&self, name: &str, guest_cid: u32) -> vmm::Vsock {
        vmm::Vsock { guest_cid, socket: self.dir.path().join(name) }
    }

    fn driver(&self) -> Driver {
        Driver::boot(&self.config("v", 3), true)
    }

    fn listen(&self, port: u32) -> UnixListener {
        let listener = UnixListener::bind(self.socket(&format!("v_{port}"))).unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn connect(&self, name: &str, line: &str) -> UnixStream {
        let mut stream = UnixStream::connect(self.socket(name)).unwrap();
        stream.write_all(line.as_bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    }
}

/// What a host stream has now; `None` where it has nothing and has not ended.
fn available(stream: &mut UnixStream) -> Option<Vec<u8>> {
    let mut data = vec![0; 1 << 20];
    match stream.read(&mut data) {
        Ok(count) => {
            data.truncate(count);
            Some(data)
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => panic!("{error}"),
    }
}

fn line(stream: &mut UnixStream) -> String {
    String::from_utf8(available(stream).expect("no line came")).unwrap()
}

/// A connection the host asked for, with both ends.
fn host_connection(bench: &Bench, driver: &mut Driver, port: u32) -> (UnixStream, Ports) {
    let mut stream = bench.connect("v", &format!("CONNECT {port}\n"));
    driver.pump();
    let request = driver.inbox.pop_front().expect("no request came");
    assert_eq!((request.op, request.dst_port), (op::REQUEST, port));
    assert_eq!(request.dst_cid, driver.cid());
    let ports = Ports { host: request.src_port, guest: port };
    assert_eq!(available(&mut stream), None);
    driver.send(ports, op::RESPONSE);
    assert_eq!(line(&mut stream), format!("OK {}\n", ports.host));
    (stream, ports)
}

/// A connection the guest asked for.
fn guest_connection(listener: &UnixListener, driver: &mut Driver, ports: Ports) -> UnixStream {
    driver.send(ports, op::REQUEST);
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RESPONSE);
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

#[test]
fn the_host_connects_and_both_talk() {
    for event_idx in [false, true] {
        let bench = Bench::new();
        let mut driver = Driver::boot(&bench.config("v", 77), event_idx);
        assert_eq!(driver.cid(), 77);
        let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
        for round in 0..300 {
            let text = format!("ping {round}");
            stream.write_all(text.as_bytes()).unwrap();
            driver.pump();
            assert_eq!(driver.read(ports), text.as_bytes());
            assert_eq!(driver.write(ports, text.as_bytes()), text.len());
            driver.pump();
            assert_eq!(available(&mut stream).unwrap(), text.as_bytes());
        }
    }
}

#[test]
fn what_a_client_sends_behind_its_first_line_is_for_the_guest() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let mut stream = bench.connect("v", "CONN");
    driver.pump();
    stream.write_all(b"ECT 7\nearly").unwrap();
    driver.pump();
    let request = driver.inbox.pop_front().unwrap();
    let ports = Ports { host: request.src_port, guest: 7 };
    driver.send(ports, op::RESPONSE);
    assert_eq!(driver.read(ports), b"early");
}

#[test]
fn clients_that_say_nonsense_are_hung_up_on() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    for text in [
        "\n",
        "CONNECT\n",
        "CONNECT x\n",
        "CONNECT 4294967296\n",
        "CONNECT -1\n",
        "connect 5\n",
        "CONNECT 12345678901234567890",
        "GET / HTTP/1.1\r\nHost: x\r\n",
        "\0\0\0\0\n",
    ] {
        let mut stream = bench.connect("v", text);
        driver.pump();
        let ended = match stream.read(&mut [0; 8]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        };
        assert!(ended, "{text:?}");
        assert!(driver.inbox.is_empty(), "{text:?}");
    }
    // One that leaves before the guest was asked; one that never says anything.
    drop(bench.connect("v", "CONN"));
    let _silent = bench.connect("v", "");
    driver.pump();
    host_connection(&bench, &mut driver, 1);
}

#[test]
fn a_guest_without_a_listener_refuses() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let mut stream = bench.connect("v", "CONNECT 9\n");
    driver.pump();
    let request = driver.inbox.pop_front().unwrap();
    driver.send(Ports { host: request.src_port, guest: 9 }, op::RST);
    assert_eq!(available(&mut stream), Some(vec![]));
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));
}

#[test]
fn a_client_that_gives_up_takes_its_request_back() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let stream = bench.connect("v", "CONNECT 9\n");
    driver.pump();
    let request = driver.inbox.pop_front().unwrap();
    drop(stream);
    driver.pump();
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    // The guest's answer crossed it.
    driver.send(Ports { host: request.src_port, guest: 9 }, op::RESPONSE);
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));
}

#[test]
fn the_guest_connects_where_someone_listens() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let listener = bench.listen(80);
    let ports = Ports { host: 80, guest: 4000 };
    let mut stream = guest_connection(&listener, &mut driver, ports);
    driver.write(ports, b"from the guest");
    driver.pump();
    assert_eq!(available(&mut stream).unwrap(), b"from the guest");
    stream.write_all(b"from the host").unwrap();
    driver.pump();
    assert_eq!(driver.read(ports), b"from the host");

    driver.send(Ports { host: 81, guest: 4000 }, op::REQUEST);
    let refusal = driver.inbox.pop_front().unwrap();
    assert_eq!((refusal.op, refusal.src_port, refusal.dst_port), (op::RST, 81, 4000));
}

#[test]
fn packets_that_lead_nowhere_are_refused() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let ports = Ports { host: 5, guest: 6 };
    let mut expect = |name, change: &dyn Fn(&mut Header), answer| {
        let mut header = driver.header(ports, op::RW, 3);
        change(&mut header);
        driver.send_raw(&header, b"abc");
        driver.pump();
        let got = driver.inbox.pop_front().map(|header| header.op);
        assert_eq!(got, answer, "{name}");
    };
    expect("no such connection", &|_| {}, Some(op::RST));
    expect("a reset for nothing", &|header| header.op = op::RST, None);
    expect("an unknown operation", &|header| header.op = 99, Some(op::RST));
    expect("someone else's packet", &|header| header.src_cid = 99, None);
}

#[test]
fn packets_for_others_are_refused() {
    let bench = Bench::new();
    let mut guest = Guest::boot(Box::new(Vsock::open(&bench.config("v", 3)).unwrap()), true);
    let at = guest.alloc(4200);
    let base = Header {
        src_cid: 3,
        dst_cid: HOST_CID,
        src_port: 1,
        dst_port: 2,
        kind: TYPE_STREAM,
        op: op::REQUEST,
        ..Header::default()
    };
    for header in [Header { dst_cid: 1, ..base }, Header { kind: 2, ..base }] {
        guest.offer(0, &[(at, 4200, crate::device::guest::WRITE)]);
        let raw = guest.put(&header.encode());
        guest.offer(1, &[(raw, HEADER as u32, READ)]);
        guest.run();
        assert_eq!(guest.finished(0).len(), 1);
        let answer = Header::decode(guest.bytes(at, HEADER).as_slice().try_into().unwrap());
        assert_eq!(answer, header.reset_for());
    }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 7 + i / 251 + seed) % 253) as u8).collect()
}

#[test]
fn ten_megabytes_cross_in_both_directions_at_once() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    let (down, up) = (pattern(10 << 20, 1), pattern(10 << 20, 2));
    stream.set_nonblocking(false).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let to_guest = down.clone();
    let writing = std::thread::spawn(move || stream.write_all(&to_guest).map(|()| stream));
    let reading = std::thread::spawn(move || {
        let mut data = vec![0; 10 << 20];
        reader.read_exact(&mut data).map(|()| data)
    });
    let (mut sent, mut received) = (0, Vec::new());
    let start = std::time::Instant::now();
    while sent < up.len() || received.len() < down.len() {
        assert!(start.elapsed().as_secs() < 60, "stuck at {sent} and {}", received.len());
        sent += driver.write(ports, &up[sent..]);
        driver.pump();
        received.extend(driver.read(ports));
    }
    assert!(received == down);
    while !reading.is_finished() {
        assert!(start.elapsed().as_secs() < 60);
        driver.pump();
    }
    assert!(reading.join().unwrap().unwrap() == up);
    writing.join().unwrap().unwrap();
}

#[test]
fn each_direction_ends_by_itself() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    // The host ends first.
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    stream.write_all(b"last words").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    driver.pump();
    assert_eq!(driver.read(ports), b"last words");
    let end = driver.inbox.pop_front().unwrap();
    assert_eq!((end.op, end.flags), (op::SHUTDOWN, SHUTDOWN_SEND));
    driver.write(ports, b"answer");
    driver.shut_down(ports, SHUTDOWN_SEND);
    assert_eq!(available(&mut stream).unwrap(), b"answer");
    assert_eq!(available(&mut stream), Some(vec![]));
    drop(stream);
    driver.pump();
    let end = driver.inbox.pop_front().unwrap();
    assert_eq!((end.op, end.flags), (op::SHUTDOWN, SHUTDOWN_BOTH));
    driver.send(ports, op::RST);
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));

    // The guest ends first.
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5001);
    driver.write(ports, b"bye");
    driver.shut_down(ports, SHUTDOWN_SEND);
    assert_eq!(available(&mut stream).unwrap(), b"bye");
    assert_eq!(available(&mut stream), Some(vec![]));
    stream.write_all(b"still here").unwrap();
    driver.pump();
    assert_eq!(driver.read(ports), b"still here");
    driver.shut_down(ports, SHUTDOWN_RECEIVE);
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    assert!(stream.write_all(b"too late").is_err());
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));

    // The host is gone at once, while the guest still sends.
    let (stream, ports) = host_connection(&bench, &mut driver, 5002);
    drop(stream);
    driver.write(ports, b"into the void");
    driver.pump();
    // Perhaps after one that says only that nothing more can be delivered.
    let end = driver.inbox.drain(..).next_back().unwrap();
    assert_eq!((end.op, end.flags), (op::SHUTDOWN, SHUTDOWN_BOTH));
    driver.shut_down(ports, SHUTDOWN_BOTH);
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));
}

#[test]
fn a_slow_reader_gets_everything_after_the_guest_has_left() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    let data = pattern(4 << 20, 3);
    let mut sent = 0;
    loop {
        let count = driver.write(ports, &data[sent..]);
        driver.pump();
        if count == 0 {
            break;
        }
        sent += count;
    }
    assert!(sent >= BUFFER as usize && sent < data.len(), "no backpressure: {sent}");
    driver.shut_down(ports, SHUTDOWN_BOTH);
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    // The ports are free again at once.
    driver.send(ports, op::RST);
    let mut received = Vec::new();
    loop {
        match available(&mut stream) {
            Some(part) if part.is_empty() => break,
            Some(part) => received.extend(part),
            None => {}
        }
        driver.pump();
    }
    assert!(received == data[..sent]);
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));
}

#[test]
fn a_guest_that_only_sends_is_given_credit_as_the_host_reads() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    let data = pattern(4 << 20, 6);
    let (mut sent, mut received) = (0, Vec::new());
    for _ in 0..10_000 {
        sent += driver.write(ports, &data[sent..]);
        driver.pump();
        received.extend(available(&mut stream).unwrap_or_default());
        driver.pump();
        if received.len() == data.len() {
            break;
        }
    }
    assert!(received == data, "stuck at {sent} sent and {} received", received.len());
    assert!(driver.inbox.is_empty());
}

#[test]
fn a_guest_that_overruns_its_credit_loses_the_connection() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (_stream, ports) = host_connection(&bench, &mut driver, 5000);
    let (_other, other) = host_connection(&bench, &mut driver, 5001);
    let chunk = [1u8; 60 << 10];
    for _ in 0..64 {
        let header = driver.header(ports, op::RW, chunk.len());
        driver.send_raw(&header, &chunk);
        driver.pump();
    }
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    assert_eq!(driver.guest.transport.device().open_connections(), Some(1));
    assert_eq!(driver.write(other, b"fine"), 4);
}

#[test]
fn the_host_waits_for_the_guests_credit_and_asks_for_it() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    let data = pattern(1 << 20, 4);
    let mut written = 0;
    let mut received = Vec::new();
    for round in 0..100_000 {
        match stream.write(&data[written..]) {
            Ok(count) => written += count,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        driver.pump();
        if round == 3 {
            assert_eq!(driver.sockets[&ports].received.len(), WINDOW as usize);
            assert_eq!(driver.inbox.pop_front().unwrap().op, op::CREDIT_REQUEST);
            assert!(driver.inbox.is_empty(), "asked more than once");
        }
        if round > 3 {
            received.extend(driver.read(ports));
            driver.pump();
            driver.inbox.clear();
        }
        if received.len() == data.len() {
            break;
        }
    }
    assert!(received == data);
}

#[test]
fn a_guest_that_does_not_refill_its_queue_stops_the_flow_and_nothing_else() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    driver.refill = false;
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    let data = pattern(60 << 10, 5);
    stream.set_nonblocking(false).unwrap();
    // Small packets: 127 at most.
    let mut received = Vec::new();
    for part in data.chunks(256) {
        stream.write_all(part).unwrap();
        driver.pump();
        received.extend(driver.read(ports));
        driver.pump();
    }
    assert!(received.len() < data.len());
    assert!(!driver.guest.host_is_ready(), "the event loop would spin");
    driver.refill = true;
    while received.len() < data.len() {
        driver.pump();
        let part = driver.read(ports);
        assert!(!part.is_empty(), "the flow does not go on");
        received.extend(part);
    }
    assert!(received == data);
}

#[test]
fn many_connections_at_once_and_not_one_more() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let listener = bench.listen(80);
    let mut open = Vec::new();
    for index in 0..MAX_CONNECTIONS as u32 {
        if index % 2 == 0 {
            open.push(host_connection(&bench, &mut driver, 5000));
        } else {
            let ports = Ports { host: 80, guest: 10_000 + index };
            open.push((guest_connection(&listener, &mut driver, ports), ports));
        }
    }
    for (index, (stream, ports)) in open.iter_mut().enumerate() {
        stream.write_all(format!("to {index}").as_bytes()).unwrap();
        driver.write(*ports, format!("from {index}").as_bytes());
    }
    driver.pump();
    for (index, (stream, ports)) in open.iter_mut().enumerate() {
        assert_eq!(driver.read(*ports), format!("to {index}").as_bytes());
        assert_eq!(available(stream).unwrap(), format!("from {index}").as_bytes());
    }
    driver.pump();
    assert_eq!(driver.inbox.pop_front(), None);

    // Full: the guest is refused, a client waits.
    driver.send(Ports { host: 80, guest: 9 }, op::REQUEST);
    assert_eq!(driver.inbox.pop_front().unwrap().op, op::RST);
    let _waiting = bench.connect("v", "CONNECT 1\n");
    driver.pump();
    assert!(driver.inbox.is_empty());
    let (_, ports) = open.pop().unwrap();
    driver.send(ports, op::RST);
    driver.pump();
    // Room was made by the guest, not by the poll set: the next event finds it.
    open.pop();
    driver.pump();
    assert!(driver.inbox.iter().any(|header| header.op == op::REQUEST && header.dst_port == 1));
    let hosts: std::collections::HashSet<_> =
        open.iter().filter(|(_, ports)| ports.guest == 5000).map(|(_, ports)| ports.host).collect();
    assert!(hosts.len() >= MAX_CONNECTIONS / 2 - 1, "host ports collide");
}

#[test]
fn pausing_resets_nothing_and_is_silent() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    for round in 0..3 {
        driver.guest.transport.quiesce().unwrap();
        stream.write_all(b"while paused").unwrap();
        let waiting = bench.connect("v", &format!("CONNECT {round}\n"));
        assert!(!driver.guest.host_is_ready(), "the event loop would spin");
        driver.guest.run();
        assert!(driver.inbox.is_empty());
        driver.guest.transport.unquiesce().unwrap();
        driver.pump();
        assert_eq!(driver.read(ports), b"while paused");
        assert_eq!(driver.inbox.pop_front().unwrap().op, op::REQUEST);
        drop(waiting);
        driver.pump();
        driver.inbox.clear();
    }
    assert_eq!(driver.resets, 0);
}

#[test]
fn a_restored_guest_is_reset_before_anything_reaches_it() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, ports) = host_connection(&bench, &mut driver, 5000);
    // Traffic in both directions, a kick lost.
    stream.write_all(b"on its way").unwrap();
    driver.write(ports, b"never kicked");
    let frozen = driver.freeze();
    assert_eq!(driver.guest.transport.device().open_connections(), Some(1));

    // The original goes on as if nothing had happened.
    driver.guest.transport.unquiesce().unwrap();
    driver.pump();
    assert_eq!(driver.read(ports), b"on its way");
    assert_eq!(available(&mut stream).unwrap(), b"never kicked");

    for life in 0..2 {
        let name = format!("life-{life}");
        let cid = 100 + life;
        let mut next = Driver::thaw(&frozen, &bench.config(&name, cid));
        let mut client = bench.connect(&name, "CONNECT 5000\n");
        next.answer_events = false;
        next.pump();
        assert!(next.inbox.is_empty(), "a packet went before the reset");
        // What the guest still sends from its past leads nowhere; a new request is refused.
        next.send(ports, op::CREDIT_UPDATE);
        next.send(Ports { host: 1, guest: 2 }, op::REQUEST);
        assert!(next.inbox.is_empty());
        next.answer_events = true;
        next.pump();
        assert_eq!(next.resets, 1);
        assert_eq!(next.cid(), u64::from(cid));
        let refusal = next.inbox.pop_front().unwrap();
        assert_eq!((refusal.op, refusal.dst_port), (op::RST, 2));
        let request = next.inbox.pop_front().expect("the waiting client was lost");
        assert_eq!((request.op, request.dst_cid), (op::REQUEST, u64::from(cid)));
        assert_ne!(request.src_port, ports.host);
        let ports = Ports { host: request.src_port, guest: 5000 };
        next.send(ports, op::RESPONSE);
        assert_eq!(line(&mut client), format!("OK {}\n", ports.host));
        client.write_all(b"new life").unwrap();
        next.pump();
        assert_eq!(next.read(ports), b"new life");
    }
}

#[test]
fn a_snapshot_of_a_guest_that_has_not_seen_its_reset_yet_resets_again() {
    for event_idx in [false, true] {
        let bench = Bench::new();
        let mut driver = Driver::boot(&bench.config("v", 3), event_idx);
        let mut frozen = driver.freeze();
        let lives = 4;
        for life in 0..lives {
            let mut next = Driver::thaw(&frozen, &bench.config(&format!("a{life}"), 3));
            frozen = next.freeze();
        }
        let mut last = Driver::thaw(&frozen, &bench.config("b", 3));
        let _client = bench.connect("b", "CONNECT 5000\n");
        last.pump();
        assert_eq!(last.resets, lives + 1);
        assert_eq!(last.inbox.pop_front().unwrap().op, op::REQUEST);
        // And a generation in which all is settled needs one only.
        let frozen = last.freeze();
        let mut settled = Driver::thaw(&frozen, &bench.config("c", 3));
        settled.pump();
        assert_eq!(settled.resets, 1);
    }
}

#[test]
fn the_gate_stays_shut_until_every_reset_was_seen() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let frozen = driver.freeze();
    let frozen = Driver::thaw(&frozen, &bench.config("a", 3)).freeze();
    let vsock = Vsock::open(&bench.config("b", 3)).unwrap();
    assert!(!vsock.gate.is_closed());
    let mut last = Driver::thaw(&frozen, &bench.config("c", 3));
    last.answer_events = false;
    let _client = bench.connect("c", "CONNECT 5000\n");
    last.pump();
    // Returns one of the two.
    let at = last.guest.alloc(8);
    last.guest.offer(EVENT, &[(at, 8, crate::device::guest::WRITE)]);
    last.guest.run();
    assert!(last.guest.finished(RX).is_empty());
    last.guest.offer(EVENT, &[(at, 8, crate::device::guest::WRITE)]);
    last.guest.run();
    assert_eq!(last.guest.finished(RX).len(), 1);
}

#[test]
fn a_driver_without_event_buffers_gets_the_reset_when_it_offers_one() {
    let bench = Bench::new();
    let mut guest = Guest::boot(Box::new(Vsock::open(&bench.config("v", 3)).unwrap()), true);
    let frozen = guest.freeze();
    let mut next = Guest::thaw(&frozen, Box::new(Vsock::open(&bench.config("w", 3)).unwrap()));
    next.run();
    let at = next.alloc(8);
    next.offer(EVENT, &[(at, 8, crate::device::guest::WRITE)]);
    next.run();
    assert_eq!(next.finished(EVENT).len(), 1);
}

#[test]
fn a_device_restored_before_its_driver_works_afterwards() {
    let bench = Bench::new();
    let mut guest = Guest::plug(Box::new(Vsock::open(&bench.config("v", 3)).unwrap()));
    let frozen = guest.freeze();
    let mut next = Guest::thaw(&frozen, Box::new(Vsock::open(&bench.config("w", 3)).unwrap()));
    let _early = bench.connect("w", "CONNECT 5000\n");
    next.run();
    next.bring_up();
    let at = next.alloc(4200);
    next.offer(RX, &[(at, 4200, crate::device::guest::WRITE)]);
    next.run();
    assert_eq!(next.finished(RX).len(), 1, "the early client was lost");
    assert!(next.finished(EVENT).is_empty());
}

#[test]
fn a_driver_that_starts_over_finds_no_old_connections() {
    let bench = Bench::new();
    let mut driver = bench.driver();
    let (mut stream, _) = host_connection(&bench, &mut driver, 5000);
    driver.guest.set(0x70, 0);
    assert_eq!(available(&mut stream), Some(vec![]));
    assert_eq!(driver.guest.transport.device().open_connections(), Some(0));
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    let bench = Bench::new();
    for cid in [0, 1, 2, u32::MAX] {
        assert!(Vsock::open(&bench.config("x", cid)).is_err(), "{cid}");
    }
    std::fs::write(bench.socket("taken"), "").unwrap();
    let error = Vsock::open(&bench.config("taken", 3)).err().unwrap().to_string();
    assert!(error.contains("taken"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any packets whatever: nothing panics, memory stays bounded, and a well-behaved connection
    /// beside them works on.
    #[test]
    fn hostile_packets_hurt_nobody_else(
        packets in prop::collection::vec(
            (0u16..9, 0u32..4, 0u32..5, any::<u32>(), any::<u32>(), any::<u32>(), 0usize..3000),
            1..120,
        )
    ) {
        let bench = Bench::new();
        let mut driver = bench.driver();
        let _listener = bench.listen(2);
        let (mut good, ports) = host_connection(&bench, &mut driver, 5000);
        for (op, host, guest, flags, buf_alloc, fwd_cnt, len) in packets {
            let header = Header {
                src_cid: driver.cid(),
                dst_cid: HOST_CID,
                src_port: guest,
                dst_port: host,
                len: len as u32,
                kind: TYPE_STREAM,
                op,
                flags,
                buf_alloc,
                fwd_cnt,
            };
            driver.send_raw(&header, &vec![0x41; len]);
            driver.pump();
        }
        prop_assert!(!driver.guest.needs_reset());
        good.write_all(b"still").unwrap();
        driver.pump();
        prop_assert_eq!(driver.read(ports), b"still");
        driver.write(ports, b"alive");
        driver.pump();
        prop_assert_eq!(available(&mut good).unwrap(), b"alive");
    }
}
