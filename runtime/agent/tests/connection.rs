//! Who may talk to the agent, what nonsense does to it, and files in and out.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use parbake_agent::listen::Listener;
use parbake_agent::serve::{Options, serve};
use parbake_protocol::agent::{
    AGENT_PROTOCOL, Client, ClientError, ExecRequest, FailureKind, Fixup, Frame, FrameReader,
    HelloVerdict, PutRequest, QuiesceRequest,
};
use support::Served;

fn kind<T: std::fmt::Debug>(result: Result<T, ClientError>) -> FailureKind {
    match result {
        Err(ClientError::Failed(failure)) => failure.kind,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn tokens_are_demanded() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    let listener = Listener::from(listener);
    let options = Options { token: Some(b"0123456789abcdef".to_vec()), ..Options::default() };
    std::thread::spawn(move || serve(&listener, options));
    let ping = |token: &[u8]| {
        Client::with_token(TcpStream::connect(address).expect("connect"), token).ping()
    };
    ping(b"0123456789abcdef").expect("the right one");
    for wrong in [&b""[..], b"0123456789abcdeF", b"0123456789abcde", b"0123456789abcdef0"] {
        assert!(matches!(ping(wrong), Err(ClientError::Token)), "{wrong:?}");
    }
    let client = Client::with_token(TcpStream::connect(address).expect("connect"), b"x");
    let mut session = client.exec(ExecRequest::new(["touch", "/tmp/never"])).expect("sent");
    assert!(matches!(session.next_event(), Err(ClientError::Token)));
}

#[test]
fn another_version_is_told_ours() {
    let agent = Served::start();
    let mut stream = agent.stream();
    let mut bytes = Vec::new();
    let hello = Frame::Hello { protocol: AGENT_PROTOCOL + 1, token: Vec::new() };
    hello.encode(&mut bytes).expect("hello");
    stream.write_all(&bytes).expect("write");
    let answer = FrameReader::new().next(&mut stream).expect("answer");
    let wanted = Frame::Welcome { protocol: AGENT_PROTOCOL, verdict: HelloVerdict::Version };
    assert_eq!(answer, Some(wanted));
}

#[test]
fn nonsense_ends_only_its_own_connection() {
    let agent = Served::start();
    let mut hello = Vec::new();
    Frame::hello(b"").encode(&mut hello).expect("hello");
    let after_hello = |tail: &[u8]| [&hello[..], tail].concat();
    let mut out_of_place = Vec::new();
    for frame in [Frame::StdinEnd, Frame::Credit(1), Frame::hello(b"")] {
        frame.encode(&mut out_of_place).expect("encode");
    }
    let cases: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 64],
        vec![0xff; 4096],
        hello[..7].to_vec(),
        out_of_place.clone(),
        after_hello(&[0, 0, 0, 0]),
        after_hello(&[0xff, 0xff, 0xff, 0x7f, 2]),
        after_hello(&[2, 0, 0, 0, 2, 99]),
        after_hello(&[1, 0, 0, 0, 0x55]),
        after_hello(&out_of_place),
    ];
    for case in cases {
        let mut stream = agent.stream();
        // The agent may have closed before all was written.
        let _ = stream.write_all(&case);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut rest = Vec::new();
        let ended = stream.read_to_end(&mut rest);
        let timed_out = matches!(&ended, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock);
        assert!(!timed_out, "the agent hangs up on {case:02x?}");
        agent.client().ping().expect("others are served");
    }
}

#[test]
fn a_machine_of_others_is_left_alone() {
    let agent = Served::start();
    let fixup = Fixup {
        entropy: [1; 64],
        realtime_ns: 1,
        instance_id: String::new(),
        hostname: "stolen".to_owned(),
        machine_id: [1; 16],
        env: Vec::new(),
        ssh_host_keys: true,
        network: None,
    };
    assert_eq!(kind(agent.client().fixup(fixup)), FailureKind::NotOurs);
    let quiesce = QuiesceRequest { drop_caches: true, ..QuiesceRequest::default() };
    assert_eq!(kind(agent.client().quiesce(quiesce)), FailureKind::NotOurs);
    assert_eq!(kind(agent.client().shutdown()), FailureKind::NotOurs);
}

fn put(path: &std::path::Path) -> PutRequest {
    PutRequest {
        path: path.to_str().expect("utf-8").into(),
        mode: 0o640,
        owner: "12345:54321".to_owned(),
        parents: false,
    }
}

#[test]
fn files_go_in_and_come_out() {
    let agent = Served::start();
    let path = agent.path("file");
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let stored = agent.client().put_file(put(&path), content.as_slice()).expect("put");
    assert_eq!(stored, 3_000_000);
    let meta = std::fs::metadata(&path).expect("meta");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (12345, 54321, 0o640));
    let mut back = Vec::new();
    let name = path.to_str().expect("utf-8").as_bytes();
    let info = agent.client().get_file(name, 4 << 20, &mut back).expect("get");
    assert!(back == content);
    assert_eq!((info.size, info.mode, info.uid, info.gid), (3_000_000, 0o640, 12345, 54321));
    // Replaced as a whole, with bits that a change of owner would clear.
    let request = PutRequest { mode: 0o4755, ..put(&path) };
    agent.client().put_file(request, &b"new"[..]).expect("put");
    assert_eq!(std::fs::read(&path).expect("read"), b"new");
    assert_eq!(std::fs::metadata(&path).expect("meta").mode() & 0o7777, 0o4755);
    // Into directories that are not there yet.
    let deep = agent.path("a/b/c");
    assert_eq!(kind(agent.client().put_file(put(&deep), &b"x"[..])), FailureKind::File);
    let request = PutRequest { parents: true, ..put(&deep) };
    agent.client().put_file(request, &b""[..]).expect("put");
    assert_eq!(std::fs::metadata(agent.path("a/b")).expect("meta").uid(), 12345);
    assert_eq!(std::fs::read(&deep).expect("read"), b"");
}

#[test]
fn files_that_cannot_be_are_refused_and_leave_nothing() {
    let agent = Served::start();
    let directory = agent.path("directory");
    std::fs::create_dir(&directory).expect("mkdir");
    let relative = PutRequest { path: b"relative".to_vec(), ..put(&directory) };
    assert_eq!(kind(agent.client().put_file(relative, &b"x"[..])), FailureKind::BadRequest);
    let root = PutRequest { path: b"/".to_vec(), ..put(&directory) };
    assert_eq!(kind(agent.client().put_file(root, &b"x"[..])), FailureKind::BadRequest);
    // The refusal is heard even while megabytes are still being sent.
    let big = vec![0; 8 << 20];
    let missing = PutRequest { path: b"/no/such/dir/x".to_vec(), ..put(&directory) };
    assert_eq!(kind(agent.client().put_file(missing, big.as_slice())), FailureKind::File);
    assert_eq!(kind(agent.client().put_file(put(&directory), &b"x"[..])), FailureKind::File);
    let get = |path: &[u8]| kind(agent.client().get_file(path, 100, std::io::sink()));
    assert_eq!(get(b"/no/such/file"), FailureKind::File);
    assert_eq!(get(b"/dev/zero"), FailureKind::File);
    assert_eq!(get(b"/proc"), FailureKind::File);
    assert_eq!(get(b"nul\0"), FailureKind::BadRequest);
    // A FIFO nobody writes to holds nobody up.
    let fifo = agent.path("fifo");
    agent.sh(&format!("mkfifo {}", fifo.display()));
    assert_eq!(get(fifo.to_str().expect("utf-8").as_bytes()), FailureKind::File);
    // A sender that breaks off leaves neither the file nor a piece of it.
    struct Breaks;
    impl Read for Breaks {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("gone"))
        }
    }
    let target = agent.path("never");
    let result = agent.client().put_file(put(&target), (&b"abc"[..]).chain(Breaks));
    assert!(matches!(result, Err(ClientError::Local(_))), "{result:?}");
    support::eventually("only what was there is there", || {
        let names = std::fs::read_dir(agent.path("")).expect("list").flatten();
        let mut names: Vec<_> = names.map(|e| e.file_name()).collect();
        names.sort();
        names == ["agent", "directory", "fifo"]
    });
}

#[test]
fn the_program_says_what_it_needs() {
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_parbake-agent"));
        let output = command.args(arguments).output().expect("run");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let directory = tempfile::tempdir().expect("directory");
    let token = directory.path().join("token");
    std::fs::write(&token, "short\n").expect("write");
    let token = token.to_str().expect("utf-8");
    for (arguments, wanted) in [
        (&[][..], "usage"),
        (&["serve"], "usage"),
        (&["serve", "--vsock", "x"], "no port"),
        (&["serve", "--tcp", "127.0.0.1:0"], "--token-file"),
        (&["serve", "--tcp", "127.0.0.1:0", "--token-file", token], "16 bytes"),
        (&["serve", "--unix", "/no/such/dir/socket"], "cannot listen"),
    ] {
        let (code, text) = run(arguments);
        assert_eq!(code, Some(2), "{arguments:?}");
        assert!(text.contains(wanted), "{arguments:?}: {text}");
    }
}

#[test]
fn the_program_serves() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("socket");
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_parbake-agent"))
        .args(["serve", "--unix"])
        .arg(&socket)
        .spawn()
        .expect("spawn");
    support::eventually("it listens", || socket.exists());
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).expect("mode");
    let stream = std::os::unix::net::UnixStream::connect(&socket).expect("connect");
    let session = Client::new(stream).exec(ExecRequest::new(["echo", "served"])).expect("exec");
    let output = session.wait_with_output(100).expect("output");
    child.kill().expect("kill");
    child.wait().expect("wait");
    assert_eq!(output.stdout, b"served\n");
}
