//! Frames survive the way through bytes, and bytes that are no frames hurt nobody.

use std::io::{self, Read};

use parbake_protocol::agent::*;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..40)
}

fn lists() -> impl Strategy<Value = Vec<Vec<u8>>> {
    vec(bytes(), 0..6)
}

fn size() -> impl Strategy<Value = WindowSize> {
    any::<(u16, u16)>().prop_map(|(rows, columns)| WindowSize { rows, columns })
}

fn failure() -> impl Strategy<Value = Failure> {
    use FailureKind::*;
    let kind = prop::sample::select(vec![
        NotFound,
        NotExecutable,
        NoSuchUser,
        BadCwd,
        BadRequest,
        Frozen,
        NotOurs,
        File,
        System,
    ]);
    (kind, ".{0,20}").prop_map(|(kind, message)| Failure { kind, message })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = ("[a-z_]{1,9}", option::of(".{0,9}"), ".{0,9}", any::<u64>())
        .prop_map(|(name, error, note, micros)| Step { name, error, note, micros });
    vec(step, 0..5)
}

fn exec() -> impl Strategy<Value = ExecRequest> {
    let numbers = (option::of(size()), option::of(any::<u64>()), option::of(any::<u64>()));
    (lists(), lists(), bytes(), ".{0,9}", numbers, any::<[bool; 3]>()).prop_map(
        |(argv, env, cwd, user, (tty, timeout_ms, output_limit), [a, b, c])| ExecRequest {
            argv,
            env,
            cwd,
            user,
            tty,
            stdin: a,
            timeout_ms,
            output_limit,
            no_template_defaults: b,
            detach: c,
        },
    )
}

fn fixup() -> impl Strategy<Value = Fixup> {
    let network = (".{0,15}", option::of(any::<[u8; 6]>()), any::<[u8; 4]>(), any::<u8>())
        .prop_map(|(interface, mac, address, prefix)| NetworkConfig {
            interface,
            mac,
            address,
            prefix,
            gateway: mac.map(|m| [m[0], m[1], m[2], m[3]]),
            dns: vec![address; usize::from(prefix % 3)],
        });
    let random = (any::<[u8; 32]>(), any::<[u8; 32]>(), any::<u64>(), any::<[u8; 16]>());
    (random, ".{0,9}", ".{0,9}", lists(), any::<bool>(), option::of(network)).prop_map(
        |((a, b, realtime_ns, machine_id), instance_id, hostname, env, ssh_host_keys, network)| {
            let mut entropy = [0; 64];
            entropy[..32].copy_from_slice(&a);
            entropy[32..].copy_from_slice(&b);
            Fixup {
                entropy,
                realtime_ns,
                instance_id,
                hostname,
                machine_id,
                env,
                ssh_host_keys,
                network,
            }
        },
    )
}

fn request() -> impl Strategy<Value = Request> {
    let quiesce = (any::<[bool; 6]>(), option::of((any::<u8>(), any::<u64>()))).prop_map(
        |([a, b, c, d, e, f], fill)| QuiesceRequest {
            end_sessions: a,
            freeze: b,
            forget_identity: c,
            sync: d,
            drop_caches: e,
            zero_free_memory: fill.map(|(passes, margin_bytes)| ZeroFill {
                passes,
                margin_bytes,
                limit_bytes: (passes > 9).then_some(margin_bytes),
            }),
            close_connections: f,
        },
    );
    prop_oneof![
        Just(Request::Ping),
        Just(Request::Info),
        Just(Request::Shutdown),
        (lists(), ".{0,9}", bytes()).prop_map(|(env, user, cwd)| Request::Configure(GuestConfig {
            env,
            user,
            cwd
        })),
        quiesce.prop_map(Request::Quiesce),
        fixup().prop_map(|f| Request::Fixup(Box::new(f))),
        exec().prop_map(Request::Exec),
        (bytes(), any::<u32>(), ".{0,9}", any::<bool>()).prop_map(
            |(path, mode, owner, parents)| {
                Request::Put(PutRequest { path, mode, owner, parents })
            }
        ),
        bytes().prop_map(|path| Request::Get(GetRequest { path })),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    let info = (vec(".{0,9}", 5..6), any::<[bool; 2]>(), any::<[u32; 3]>(), any::<[u64; 2]>())
        .prop_map(
            |(text, [init, frozen], [protocol, fixups, sessions], [memory_bytes, uptime_ms])| {
                GuestInfo {
                    protocol,
                    agent_version: text[0].clone(),
                    kernel: text[1].clone(),
                    boot_id: text[2].clone(),
                    hostname: text[3].clone(),
                    instance_id: text[4].clone(),
                    init,
                    frozen,
                    fixups,
                    sessions,
                    memory_bytes,
                    uptime_ms,
                    boot_stages: vec![(text[0].clone(), uptime_ms)],
                }
            },
        );
    prop_oneof![
        Just(Reply::Done),
        info.prop_map(Reply::Info),
        (steps(), any::<u64>()).prop_map(|(steps, zeroed_bytes)| Reply::Quiesce(QuiesceReport {
            steps,
            zeroed_bytes
        })),
        (steps(), any::<bool>())
            .prop_map(|(items, running)| Reply::Fixup(FixupReport { items, running })),
        any::<(u64, u32, u32, u32, i64)>().prop_map(|(size, mode, uid, gid, mtime)| {
            Reply::File(FileInfo { size, mode, uid, gid, mtime })
        }),
        any::<u64>().prop_map(|bytes| Reply::Stored { bytes }),
        failure().prop_map(Reply::Failed),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    let verdict = prop::sample::select(vec![
        HelloVerdict::Accepted,
        HelloVerdict::Version,
        HelloVerdict::Token,
    ]);
    let reason =
        prop::sample::select(vec![ExitReason::Ended, ExitReason::Timeout, ExitReason::Killed]);
    let exit = (option::of(any::<i32>()), option::of(any::<i32>()), reason, any::<bool>())
        .prop_map(|(code, signal, reason, truncated)| Exit { code, signal, reason, truncated });
    let end = prop::sample::select(vec![Frame::StdinEnd, Frame::DataEnd]);
    let event = prop_oneof![
        any::<u32>().prop_map(|mount| SocketEvent::Opened { mount }),
        bytes().prop_map(SocketEvent::Data),
        Just(SocketEvent::End),
    ];
    let socket = (any::<u32>(), event)
        .prop_map(|(connection, event)| Frame::Socket(SocketFrame { connection, event }));
    prop_oneof![
        (any::<u32>(), bytes()).prop_map(|(protocol, token)| Frame::Hello { protocol, token }),
        (any::<u32>(), verdict)
            .prop_map(|(protocol, verdict)| Frame::Welcome { protocol, verdict }),
        request().prop_map(Frame::Request),
        reply().prop_map(Frame::Reply),
        bytes().prop_map(Frame::Stdin),
        bytes().prop_map(Frame::Stdout),
        bytes().prop_map(Frame::Stderr),
        bytes().prop_map(Frame::Data),
        end,
        socket,
        size().prop_map(Frame::Resize),
        any::<i32>().prop_map(Frame::Signal),
        any::<u32>().prop_map(Frame::Started),
        any::<u32>().prop_map(Frame::Credit),
        exit.prop_map(Frame::Exited),
        failure().prop_map(Frame::Failed),
    ]
}

/// Hands out its bytes in pieces of the given sizes, with a timeout between any two.
struct Pieces {
    bytes: Vec<u8>,
    sizes: Vec<usize>,
    turn: usize,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.turn += 1;
        if self.turn.is_multiple_of(2) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let size = self.sizes[self.turn % self.sizes.len()].clamp(1, buffer.len());
        let n = size.min(self.bytes.len());
        buffer[..n].copy_from_slice(&self.bytes[..n]);
        self.bytes.drain(..n);
        Ok(n)
    }
}

proptest! {
    #[test]
    fn frames_survive_any_cutting(
        frames in vec(frame(), 0..8),
        sizes in vec(1usize..200, 1..5),
    ) {
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.encode(&mut bytes).expect("short enough");
        }
        let mut stream = Pieces { bytes, sizes, turn: 0 };
        let mut reader = FrameReader::new();
        let mut received = Vec::new();
        loop {
            match reader.next(&mut stream) {
                Ok(Some(frame)) => received.push(frame),
                Ok(None) => break,
                Err(FrameError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => panic!("{e}"),
            }
        }
        prop_assert_eq!(received, frames);
    }

    #[test]
    fn noise_is_refused_or_is_a_frame(kind in any::<u8>(), noise in vec(any::<u8>(), 0..300)) {
        if let Ok(frame) = Frame::decode(kind, &noise) {
            // What was understood says the same when said again.
            let mut bytes = Vec::new();
            frame.encode(&mut bytes).expect("encode");
            let again = FrameReader::new().next(&mut bytes.as_slice()).expect("frame");
            prop_assert_eq!(again, Some(frame));
        }
        let mut reader = FrameReader::new();
        reader.push(&noise);
        for _ in 0..100 {
            if !matches!(reader.next_buffered(), Ok(Some(_))) { break }
        }
    }

    #[test]
    fn damaged_frames_hurt_nobody(
        frame in frame(),
        position in any::<prop::sample::Index>(),
        value in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).expect("encode");
        let shorter = &bytes[..cut.index(bytes.len())];
        let result = FrameReader::new().next(&mut &*shorter);
        let truncated = matches!(result, Err(FrameError::Truncated));
        prop_assert!(truncated || shorter.is_empty(), "{:?}", result);
        let at = position.index(bytes.len());
        bytes[at] = value;
        let mut reader = FrameReader::new();
        let mut stream = bytes.as_slice();
        while let Ok(Some(_)) = reader.next(&mut stream) {}
    }
}

#[test]
fn lengths_are_bounded_before_anything_is_kept() {
    for length in [0u32, MAX_FRAME as u32 + 1, u32::MAX] {
        let mut reader = FrameReader::new();
        reader.push(&length.to_le_bytes());
        assert!(matches!(reader.next_buffered(), Err(FrameError::Length(n)) if n == length));
    }
    let mut out = Vec::new();
    assert!(Frame::Data(vec![0; MAX_FRAME]).encode(&mut out).is_err() && out.is_empty());
    Frame::Data(vec![7; MAX_FRAME - 1]).encode(&mut out).expect("the longest");
    let longest = FrameReader::new().next(&mut out.as_slice()).expect("frame");
    assert!(matches!(longest, Some(Frame::Data(d)) if d.len() == MAX_FRAME - 1));
}

#[test]
fn inner_lengths_that_lie_are_refused() {
    // A request whose argv claims 2^60 entries.
    let mut lie = postcard::to_stdvec(&Request::Exec(ExecRequest::default())).expect("encode");
    lie.truncate(1);
    lie.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert!(matches!(Frame::decode(0x02, &lie), Err(FrameError::Payload(2))));
    // Trailing bytes.
    let mut long = postcard::to_stdvec(&Request::Ping).expect("encode");
    long.push(0);
    assert!(matches!(Frame::decode(0x02, &long), Err(FrameError::Payload(2))));
}

#[test]
fn secrets_are_not_shown() {
    let fixup = Fixup {
        entropy: [0xab; 64],
        realtime_ns: 1,
        instance_id: "i".to_owned(),
        hostname: "h".to_owned(),
        machine_id: [1; 16],
        env: vec![b"TOKEN=hunter2".to_vec()],
        ssh_host_keys: false,
        network: None,
    };
    let exec = ExecRequest { env: vec![b"TOKEN=hunter2".to_vec()], ..ExecRequest::new(["x"]) };
    let shown = format!("{fixup:?} {exec:?}");
    assert!(!shown.contains("171") && !shown.contains("104"), "{shown}");
}
