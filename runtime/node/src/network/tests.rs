//! The whole way out, on the kernel at hand: a "host" and a "world" in namespaces of their own, and
//! in place of a guest a third one whose interface is wired to a sandbox's tap. Nothing leaves the
//! machine. They need root and are skipped without, saying so.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use simple_dns::rdata::{A, RData};
use simple_dns::{CLASS, Packet, QTYPE, RCODE, ResourceRecord, TYPE};

use super::egress::Egress;
use super::netlink::Links;
use super::nft::{Batch, Netfilter, entrance_key};
use super::pool::{GATEWAY, GUEST, GUEST_MAC, Lease, PREFIX, Pool, PoolOptions};
use super::{kernel, rules};
use crate::event::{EventKind, SandboxEvent};

const HOST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const WORLD: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 3);
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

fn skipped() -> bool {
    let missing =
        !rustix::process::geteuid().is_root() || !fs::exists("/dev/net/tun").unwrap_or(false);
    if missing {
        eprintln!("skipped: needs root and /dev/net/tun");
    }
    missing
}

fn own() -> OwnedFd {
    File::open("/proc/thread-self/ns/net").unwrap().into()
}

/// Runs `work` on a thread in the namespace.
fn inside<T: Send>(namespace: &OwnedFd, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let enter = || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network).unwrap();
            work()
        };
        scope.spawn(enter).join().unwrap()
    })
}

/// A host with a route to a world, both the test's own. The calling thread becomes the host's.
struct Net {
    world: OwnedFd,
}

impl Net {
    fn new() -> Self {
        kernel::new_network_namespace().unwrap();
        let host = own();
        let world = thread::spawn(move || {
            kernel::new_network_namespace().unwrap();
            let mut links = Links::open().unwrap();
            links.add_pair("w0", "h0", host.as_raw_fd()).unwrap();
            let index = links.index("w0").unwrap();
            for address in [WORLD, ELSEWHERE, METADATA, Ipv4Addr::new(100, 100, 100, 200)] {
                links.add_address(index, address, 24).unwrap();
            }
            links.set_up(index, None).unwrap();
            own()
        })
        .join()
        .unwrap();
        let mut links = Links::open().unwrap();
        for (name, address) in [("lo", Ipv4Addr::LOCALHOST), ("h0", HOST)] {
            let index = links.index(name).unwrap();
            let _ = links.add_address(index, address, 24);
            links.set_up(index, None).unwrap();
        }
        // Everything forbidden could be reached, were it not for the filter.
        links.add_default_route(WORLD).unwrap();
        Self { world }
    }

    /// Greets whoever connects in the world.
    fn greet(&self, port: u16) {
        let listener = inside(&self.world, || TcpListener::bind(("0.0.0.0", port)).unwrap());
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.write_all(b"hello");
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
    }

    /// A name server of the world: what it says, and what it was asked.
    fn serve_names(&self, port: u16) -> Receiver<String> {
        let socket = inside(&self.world, || UdpSocket::bind((WORLD, port)).unwrap());
        let (sender, asked) = sync_channel(1000);
        thread::spawn(move || {
            let mut buffer = [0; 1500];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let query = Packet::parse(&buffer[..length]).unwrap();
                let question = &query.questions[0];
                let name = question.qname.to_string();
                assert_eq!(question.qtype, QTYPE::TYPE(TYPE::A), "{name}");
                let _ = sender.try_send(name.clone());
                let mut reply = Packet::new_reply(query.id());
                reply.questions.push(question.clone());
                let mut say = |address: Ipv4Addr, ttl| {
                    let data = RData::A(A { address: address.into() });
                    reply.answers.push(ResourceRecord::new(
                        question.qname.clone(),
                        CLASS::IN,
                        ttl,
                        data,
                    ));
                };
                match name.as_str() {
                    "packages.example" => say(WORLD, 1),
                    "rebound.example" => say(METADATA, 300),
                    "both.example" => {
                        say(METADATA, 300);
                        say(ELSEWHERE, 300);
                    }
                    _ => *reply.rcode_mut() = RCODE::NameError,
                }
                let bytes = reply.build_bytes_vec_compressed().unwrap();
                let _ = socket.send_to(&bytes, from);
            }
        });
        asked
    }

    fn pool(&self, ready: usize) -> Pool {
        let resolvers = vec![SocketAddr::from((WORLD, 53))];
        Pool::new(PoolOptions { ready, resolvers, ..PoolOptions::default() }).unwrap()
    }
}

/// In a guest's place: a namespace whose `eth0` is wired to a lease's tap.
struct Guest {
    lease: Arc<Lease>,
    namespace: OwnedFd,
    events: Receiver<SandboxEvent>,
    stop: Arc<OwnedFd>,
    wire: Option<thread::JoinHandle<()>>,
}

impl Guest {
    fn new(pool: &Pool, egress: &str) -> Self {
        let (sender, events) = sync_channel(1000);
        let egress: Egress = egress.parse().unwrap();
        Self::over(pool.take("test", &egress, Some(sender)).unwrap(), events)
    }

    fn over(lease: Lease, events: Receiver<SandboxEvent>) -> Self {
        let lease = Arc::new(lease);
        let (namespace, tap) = thread::spawn(|| {
            kernel::new_network_namespace().unwrap();
            let tap = kernel::create_tap("eth0").unwrap();
            let mut links = Links::open().unwrap();
            let index = links.index("eth0").unwrap();
            links.set_up(index, Some(GUEST_MAC)).unwrap();
            links.add_address(index, GUEST, PREFIX).unwrap();
            links.add_default_route(GATEWAY).unwrap();
            (own(), tap)
        })
        .join()
        .unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (leased, stopped) = (Arc::clone(&lease), Arc::clone(&stop));
        let wire = Some(thread::spawn(move || {
            let mut frame = vec![0; 70_000];
            loop {
                let taps = [leased.tap(), tap.as_fd()];
                let mut sources = [
                    PollFd::from_borrowed_fd(taps[0], PollFlags::IN),
                    PollFd::from_borrowed_fd(taps[1], PollFlags::IN),
                    PollFd::new(&*stopped, PollFlags::IN),
                ];
                poll(&mut sources, None).unwrap();
                if !sources[2].revents().is_empty() {
                    return;
                }
                for (from, to) in [(taps[0], taps[1]), (taps[1], taps[0])] {
                    while let Ok(length) = rustix::io::read(from, &mut frame) {
                        let _ = rustix::io::write(to, &frame[..length]);
                    }
                }
            }
        }));
        Self { lease, namespace, events, stop, wire }
    }

    /// What is said at an address, over TCP.
    fn tcp(&self, address: Ipv4Addr, port: u16) -> io::Result<String> {
        inside(&self.namespace, || {
            let limit = Duration::from_secs(3);
            let mut stream = TcpStream::connect_timeout(&(address, port).into(), limit)?;
            stream.set_read_timeout(Some(limit))?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    }

    /// What comes back of a datagram.
    fn udp(&self, address: Ipv4Addr, port: u16, data: &[u8]) -> io::Result<Vec<u8>> {
        inside(&self.namespace, || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(Duration::from_secs(3)))?;
            socket.connect((address, port))?;
            socket.send(data)?;
            let mut buffer = vec![0; 1500];
            let length = socket.recv(&mut buffer)?;
            buffer.truncate(length);
            Ok(buffer)
        })
    }

    /// The addresses of a name, as the sandbox's resolver tells them; or why not.
    fn resolve(&self, name: &str, kind: TYPE) -> Result<Vec<Ipv4Addr>, RCODE> {
        let mut query = Packet::new_query(7);
        query.questions.push(simple_dns::Question::new(
            simple_dns::Name::new_unchecked(name),
            QTYPE::TYPE(kind),
            simple_dns::QCLASS::CLASS(CLASS::IN),
            false,
        ));
        let reply = self.udp(GATEWAY, 53, &query.build_bytes_vec().unwrap()).unwrap();
        let reply = Packet::parse(&reply).unwrap();
        assert_eq!(reply.id(), 7);
        if reply.rcode() != RCODE::NoError {
            return Err(reply.rcode());
        }
        let address = |record: &ResourceRecord<'_>| match &record.rdata {
            RData::A(a) => Ipv4Addr::from(a.address),
            other => panic!("{other:?}"),
        };
        Ok(reply.answers.iter().map(address).collect())
    }

    /// Puts a frame on the wire as it is.
    fn frame(&self, kind: u16, packet: &[u8]) {
        let to = [0x02, 0x70, 0x62, 0, 0, 1];
        let frame = [&[0; 12][..], &to, &GUEST_MAC, &kind.to_be_bytes(), packet].concat();
        rustix::io::write(self.lease.tap(), &frame).unwrap();
    }

    /// Waits for an event that `wanted` takes.
    fn event(&self, wanted: impl Fn(&EventKind) -> bool) -> EventKind {
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut others = Vec::new();
        while let Ok(event) = self.events.recv_timeout(deadline - Instant::now().min(deadline)) {
            assert_eq!(event.sandbox, "test");
            if wanted(&event.kind) {
                return event.kind;
            }
            others.push(event.kind);
        }
        panic!("no such event, but {others:?}");
    }

    fn denied(&self, address: Ipv4Addr, port: Option<u16>, protocol: &str, reason: &str) {
        let wanted = EventKind::EgressDenied {
            destination: address.to_string(),
            port,
            protocol: protocol.to_owned(),
            reason: reason.to_owned(),
        };
        self.event(|event| *event == wanted);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        self.wire.take().unwrap().join().unwrap();
    }
}

#[test]
fn only_what_is_allowed_gets_out() {
    if skipped() {
        return;
    }
    let net = Net::new();
    net.greet(443);
    net.greet(80);
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=10.9.0.2:443");
    assert_eq!(guest.tcp(WORLD, 443).unwrap(), "hello");
    let begun = Instant::now();
    assert!(guest.tcp(WORLD, 80).is_err());
    assert!(guest.tcp(ELSEWHERE, 443).is_err());
    assert!(begun.elapsed() < Duration::from_secs(2), "the sender is not told");
    guest.denied(WORLD, Some(80), "tcp", "not allowed");
    guest.denied(ELSEWHERE, Some(443), "tcp", "not allowed");
    // The same port, the other protocol.
    assert!(guest.udp(WORLD, 443, b"x").is_err());
    guest.denied(WORLD, Some(443), "udp", "not allowed");
    assert!(guest.tcp(GATEWAY, 53).is_err());
    guest.denied(GATEWAY, Some(53), "tcp", "not allowed");
    let counts = guest.lease.counts();
    assert!(counts.denied >= 4 && counts.blocked == 0, "{counts:?}");
}

#[test]
fn a_wide_rule_opens_neither_host_nor_metadata_nor_neighbour() {
    if skipped() {
        return;
    }
    let net = Net::new();
    net.greet(80);
    let host = TcpListener::bind((HOST, 80)).unwrap();
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=0.0.0.0/0");
    assert_eq!(guest.tcp(WORLD, 80).unwrap(), "hello");
    for address in [HOST, METADATA, Ipv4Addr::new(100, 100, 100, 200)] {
        assert!(guest.tcp(address, 80).is_err(), "{address}");
        guest.denied(address, Some(80), "tcp", "blocked");
    }
    // Addresses of wires: the host's end of its own, and both of a neighbour's.
    let neighbour = Guest::new(&pool, "allow=10.9.0.2:80");
    let wires: Vec<Ipv4Addr> = Links::open().unwrap().addresses().unwrap();
    let wires: Vec<_> = wires.into_iter().filter(|wire| wire.octets()[0] == 198).collect();
    assert_eq!(wires.len(), 2);
    for wire in wires {
        for address in [wire, Ipv4Addr::from(u32::from(wire) + 1)] {
            assert!(guest.tcp(address, 80).is_err(), "{address}");
        }
    }
    assert!(guest.tcp(Ipv4Addr::LOCALHOST, 80).is_err());
    assert!(guest.lease.counts().blocked >= 5);
    host.set_nonblocking(true).unwrap();
    assert!(host.accept().is_err(), "the host was reached");
    assert_eq!(neighbour.lease.counts().denied, 0);
}

/// An address that the host got after the sandbox did: only the host's own wall knows it.
#[test]
fn what_only_the_host_keeps_back_is_told_to_who_runs_the_sandbox() {
    if skipped() {
        return;
    }
    let net = Net::new();
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=0.0.0.0/0");
    let neighbour = Guest::new(&pool, "allow=0.0.0.0/0");
    let later = Ipv4Addr::new(10, 9, 0, 77);
    let mut links = Links::open().unwrap();
    let index = links.index("h0").unwrap();
    links.add_address(index, later, 24).unwrap();
    let host = TcpListener::bind((later, 80)).unwrap();
    host.set_nonblocking(true).unwrap();
    assert!(guest.tcp(later, 80).is_err());
    assert!(host.accept().is_err(), "the host was reached");
    guest.denied(later, Some(80), "tcp", "kept back by the host");
    assert!(neighbour.events.try_recv().is_err(), "told to another");
    // A second listener on the same host is told nothing, and does no harm.
    let other = net.pool(0);
    let stranger = Guest::new(&other, "allow=0.0.0.0/0");
    assert!(stranger.tcp(later, 80).is_err());
    assert!(stranger.events.try_recv().is_err());
}

#[test]
fn anywhere_is_everywhere_but_what_is_blocked() {
    if skipped() {
        return;
    }
    let net = Net::new();
    net.greet(80);
    let _asked = net.serve_names(53);
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=*");
    assert_eq!(guest.resolve("packages.example", TYPE::A), Ok(vec![WORLD]));
    assert_eq!(guest.tcp(WORLD, 80).unwrap(), "hello");
    for address in [HOST, METADATA] {
        assert!(guest.tcp(address, 80).is_err(), "{address}");
        guest.denied(address, Some(80), "tcp", "blocked");
    }
    assert_eq!(guest.resolve("rebound.example", TYPE::A), Ok(vec![]));
    let guest = Guest::new(&pool, "allow=*:443");
    assert_eq!(guest.resolve("packages.example", TYPE::A), Ok(vec![WORLD]));
    assert!(guest.tcp(WORLD, 80).is_err(), "another port than the one that is allowed");
}

#[test]
fn what_is_named_is_reached() {
    if skipped() {
        return;
    }
    let net = Net::new();
    net.greet(80);
    let host = TcpListener::bind((HOST, 80)).unwrap();
    thread::spawn(move || {
        for mut stream in host.incoming().flatten() {
            let _ = stream.write_all(b"host");
        }
    });
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=169.254.169.254:80,allow=10.9.0.1:80");
    assert_eq!(guest.tcp(METADATA, 80).unwrap(), "hello");
    assert_eq!(guest.tcp(HOST, 80).unwrap(), "host");
    assert!(guest.tcp(HOST, 81).is_err());
    assert!(guest.tcp(WORLD, 80).is_err());
    // Nobody else's, and gone with the sandbox.
    let other = Guest::new(&pool, "allow=0.0.0.0/0:80");
    assert!(other.tcp(HOST, 80).is_err());
    let named = || Netfilter::open().unwrap().elements(rules::HOST_TABLE, rules::NAMED).unwrap();
    assert_eq!(named().len(), 2);
    drop(guest);
    assert_eq!(named(), Vec::<Vec<u8>>::new());
}

#[test]
fn names_open_what_they_stand_for_and_nothing_else() {
    if skipped() {
        return;
    }
    let net = Net::new();
    net.greet(443);
    let asked = net.serve_names(53);
    let pool = net.pool(0);
    let guest = Guest::new(
        &pool,
        "allow=packages.example:443,allow=rebound.example:80,allow=both.example:443",
    );
    assert!(guest.tcp(WORLD, 443).is_err(), "open before anybody asked");
    assert_eq!(guest.resolve("Packages.Example", TYPE::A), Ok(vec![WORLD]));
    assert_eq!(guest.tcp(WORLD, 443).unwrap(), "hello");
    assert!(guest.tcp(WORLD, 80).is_err());
    let opened = guest.event(|event| matches!(event, EventKind::NameOpened { .. }));
    let name = "packages.example".to_owned();
    assert_eq!(opened, EventKind::NameOpened { name, addresses: vec![WORLD], ttl_seconds: 5 });

    // Data in names goes nowhere.
    for name in ["evil.example", "c2vjcmv0.packages.example", "packages.example.evil"] {
        assert_eq!(guest.resolve(name, TYPE::A), Err(RCODE::Refused));
        guest.event(|e| matches!(e, EventKind::NameDenied { name: told, .. } if told == name));
    }
    assert_eq!(guest.resolve("packages.example", TYPE::TXT), Ok(vec![]));
    assert_eq!(guest.resolve("packages.example", TYPE::AAAA), Ok(vec![]));
    // A name cannot open what is blocked.
    assert_eq!(guest.resolve("rebound.example", TYPE::A), Ok(vec![]));
    guest.event(|e| matches!(e, EventKind::NameDenied { name, .. } if name == "rebound.example"));
    assert_eq!(guest.resolve("both.example", TYPE::A), Ok(vec![ELSEWHERE]));
    assert!(guest.tcp(METADATA, 80).is_err());
    let asked: BTreeSet<String> = asked.try_iter().collect();
    let wanted = ["both.example", "packages.example", "rebound.example"];
    assert_eq!(asked, wanted.map(str::to_owned).into());
    assert!(guest.lease.counts().names >= 4);

    // Five seconds it was to live, and five more are given.
    thread::sleep(Duration::from_secs(11));
    assert!(guest.tcp(WORLD, 443).is_err(), "still open after the answer has expired");
    assert_eq!(guest.tcp(ELSEWHERE, 443).unwrap(), "hello");
    // Twice in a row prolongs it.
    for _ in 0..2 {
        assert_eq!(guest.resolve("packages.example", TYPE::A), Ok(vec![WORLD]));
    }
    assert_eq!(guest.tcp(WORLD, 443).unwrap(), "hello");
}

#[test]
fn floods_of_questions_are_bounded() {
    if skipped() {
        return;
    }
    let net = Net::new();
    let asked = net.serve_names(53);
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=*.zone.example:443");
    let answers: Vec<_> =
        (0..200).map(|n| guest.resolve(&format!("data{n}.zone.example"), TYPE::A)).collect();
    let refused = answers.iter().filter(|answer| **answer == Err(RCODE::Refused)).count();
    assert!(refused > 0, "200 questions in a row were all passed on");
    assert!(asked.try_iter().count() < 200);
    assert_eq!(guest.lease.counts().names, refused as u64);
}

#[test]
fn forged_and_ipv6_packets_are_dropped_and_told() {
    if skipped() {
        return;
    }
    let net = Net::new();
    let sink = inside(&net.world, || UdpSocket::bind((WORLD, 9)).unwrap());
    sink.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let pool = net.pool(0);
    let guest = Guest::new(&pool, "allow=0.0.0.0/0");
    let packet = |source: Ipv4Addr| {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(source.octets());
        packet.extend(WORLD.octets());
        let sum: u32 = packet.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum();
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend([0, 99, 0, 9, 0, 8, 0, 0]);
        packet
    };
    guest.frame(0x0800, &packet(GUEST));
    assert!(sink.recv(&mut [0; 10]).is_ok(), "a packet of its own does not arrive");
    guest.frame(0x0800, &packet(Ipv4Addr::new(10, 9, 0, 77)));
    guest.denied(WORLD, Some(9), "udp", "forged source");
    assert!(sink.recv(&mut [0; 10]).is_err(), "a forged packet got out");
    let mut six = vec![0x60, 0, 0, 0, 0, 8, 17, 64];
    six.extend([0xfd; 16]);
    six.extend([0xfd, 0, 0x0e, 0xc2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0x54]);
    six.extend([0, 99, 0, 80, 0, 8, 0, 0]);
    guest.frame(0x86dd, &six);
    let told = guest.event(|event| matches!(event, EventKind::EgressDenied { .. }));
    let EventKind::EgressDenied { destination, reason, .. } = told else { unreachable!() };
    assert_eq!((destination.as_str(), reason.as_str()), ("fd00:ec2::254", "IPv6"));
    let counts = guest.lease.counts();
    assert_eq!((counts.forged, counts.ipv6), (1, 1), "{counts:?}");
}

#[test]
fn connections_are_bounded() {
    if skipped() {
        return;
    }
    let net = Net::new();
    let listener = inside(&net.world, || TcpListener::bind((WORLD, 80)).unwrap());
    let resolvers = vec![SocketAddr::from((WORLD, 53))];
    let pool =
        Pool::new(PoolOptions { connections: 5, resolvers, ..PoolOptions::default() }).unwrap();
    let guest = Guest::new(&pool, "allow=10.9.0.2:80");
    let open: usize = inside(&guest.namespace, || {
        let limit = Duration::from_millis(300);
        let connect = |_| TcpStream::connect_timeout(&(WORLD, 80).into(), limit).ok();
        (0..12).filter_map(connect).collect::<Vec<_>>().len()
    });
    assert!((1..=6).contains(&open), "{open} connections");
    guest.denied(WORLD, Some(80), "tcp", "too many connections");
    drop(listener);
}

#[test]
fn the_way_out_of_a_monitor_that_lives_on_is_taken_over() {
    if skipped() {
        return;
    }
    let net = Net::new();
    net.greet(443);
    net.greet(80);
    let _asked = net.serve_names(53);
    let pool = net.pool(0);
    let egress: Egress = "allow=packages.example:443,allow=10.9.0.3:80".parse().unwrap();
    let lease = pool.take("test", &egress, None).unwrap();
    // In place of a monitor: a process that has the tap.
    let tap = lease.tap().try_clone_to_owned().unwrap();
    let mut monitor = std::process::Command::new("sleep").arg("60").stdin(tap).spawn().unwrap();
    drop(lease);
    assert_eq!(pool.status().in_use, 0);
    let (sender, events) = sync_channel(1000);
    let lease = pool.adopt("test", monitor.id(), &egress, Some(sender)).unwrap();
    let guest = Guest::over(lease, events);
    assert_eq!(guest.tcp(ELSEWHERE, 80).unwrap(), "hello");
    assert_eq!(guest.resolve("packages.example", TYPE::A), Ok(vec![WORLD]));
    assert_eq!(guest.tcp(WORLD, 443).unwrap(), "hello");
    assert!(guest.tcp(WORLD, 80).is_err());
    guest.denied(WORLD, Some(80), "tcp", "not allowed");
    drop(guest);
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    assert!(pool.adopt("test", std::process::id() + 100_000, &egress, None).is_err());
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn wires() -> usize {
    let list = Links::open().unwrap().list().unwrap();
    list.iter().filter(|(_, name)| name.starts_with("pbk-")).count()
}

#[test]
fn nothing_is_left_of_two_hundred() {
    if skipped() {
        return;
    }
    let _net = Net::new();
    let egress: Egress =
        "allow=10.9.0.2:443,allow=packages.example:443,allow=10.9.0.1:1".parse().unwrap();
    let resolvers = vec![SocketAddr::from((WORLD, 53))];
    let options = PoolOptions { ready: 4, most: 8, resolvers, ..PoolOptions::default() };
    // Other tests of this process come and go; what a leak would add is far more.
    let before = descriptors();
    let pool = Pool::new(options).unwrap();
    for _ in 0..200 {
        drop(pool.take("test", &egress, None).unwrap());
    }
    assert_eq!(pool.status().in_use, 0);
    assert!(pool.status().ready <= 4);
    assert_eq!(pool.trouble(), None);
    drop(pool);
    let deadline = Instant::now() + Duration::from_secs(60);
    while wires() > 0 {
        assert!(Instant::now() < deadline, "{} wires are left", wires());
        thread::sleep(Duration::from_millis(50));
    }
    let left = Netfilter::open().unwrap().elements(rules::HOST_TABLE, rules::NAMED).unwrap();
    assert_eq!(left, Vec::<Vec<u8>>::new());
    let after = descriptors();
    assert!(after < before + 100, "{before} descriptors before, {after} after");
}

#[test]
fn a_pool_has_an_end_and_sweeps_what_the_dead_left() {
    if skipped() {
        return;
    }
    let net = Net::new();
    drop(net.pool(0));
    let mut left = Batch::of(rules::HOST_TABLE);
    left.add_element(rules::NAMED, &entrance_key(0x7fff_0000, HOST), None);
    let living = Links::open().unwrap().index("h0").unwrap();
    left.add_element(rules::NAMED, &entrance_key(living, HOST), None);
    Netfilter::open().unwrap().commit(&left).unwrap();
    let pool = Pool::new(PoolOptions { most: 1, ..PoolOptions::default() }).unwrap();
    let elements = Netfilter::open().unwrap().elements(rules::HOST_TABLE, rules::NAMED).unwrap();
    assert_eq!(elements, [entrance_key(living, HOST)]);
    let egress: Egress = "allow=10.9.0.2:443".parse().unwrap();
    let first = pool.take("one", &egress, None).unwrap();
    let error = pool.take("two", &egress, None).unwrap_err();
    assert!(matches!(error, super::NetworkError::Exhausted(1)), "{error}");
    drop(first);
    pool.take("three", &egress, None).unwrap();
}

#[test]
fn a_host_that_forwarded_nothing_goes_on_forwarding_nothing_else() {
    if skipped() {
        return;
    }
    let net = Net::new();
    fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
    net.greet(80);
    // A machine behind the host that is no sandbox.
    let host = own();
    let third = thread::spawn(move || {
        kernel::new_network_namespace().unwrap();
        let mut links = Links::open().unwrap();
        links.add_pair("t0", "h1", host.as_raw_fd()).unwrap();
        let index = links.index("t0").unwrap();
        links.add_address(index, Ipv4Addr::new(10, 8, 0, 2), 24).unwrap();
        links.set_up(index, None).unwrap();
        links.add_default_route(Ipv4Addr::new(10, 8, 0, 1)).unwrap();
        own()
    })
    .join()
    .unwrap();
    let mut links = Links::open().unwrap();
    let index = links.index("h1").unwrap();
    links.add_address(index, Ipv4Addr::new(10, 8, 0, 1), 24).unwrap();
    links.set_up(index, None).unwrap();
    inside(&net.world, || {
        Links::open().unwrap().add_default_route(HOST).unwrap();
    });
    let reach = || {
        inside(&third, || {
            TcpStream::connect_timeout(&(WORLD, 80).into(), Duration::from_millis(500)).is_ok()
        })
    };
    assert!(!reach(), "forwarded before");
    let pool = net.pool(0);
    assert_eq!(fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap().trim(), "1");
    assert!(!reach(), "forwarded for a stranger");
    let guest = Guest::new(&pool, "allow=10.9.0.2:80");
    assert_eq!(guest.tcp(WORLD, 80).unwrap(), "hello");
}
