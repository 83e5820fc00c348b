//! What a client makes of agents and monitors that lie, dawdle or vanish.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use parbake_protocol::agent::*;

/// An agent that reads a little and then says exactly these frames.
fn scripted(frames: Vec<Frame>) -> UnixStream {
    let (ours, mut theirs) = UnixStream::pair().expect("pair");
    thread::spawn(move || {
        let mut scrap = [0; 4096];
        let _ = theirs.read(&mut scrap);
        let mut bytes = Vec::new();
        for frame in frames {
            frame.encode(&mut bytes).expect("encode");
        }
        let _ = theirs.write_all(&bytes);
    });
    ours
}

fn welcome() -> Frame {
    Frame::Welcome { protocol: AGENT_PROTOCOL, verdict: HelloVerdict::Accepted }
}

fn file(size: u64) -> Frame {
    Frame::Reply(Reply::File(FileInfo { size, mode: 0o644, uid: 0, gid: 0, mtime: 0 }))
}

#[test]
fn other_versions_and_wrong_tokens_are_told_apart() {
    let ping = |frame| Client::new(scripted(vec![frame])).ping();
    let other = Frame::Welcome { protocol: 9, verdict: HelloVerdict::Version };
    assert!(matches!(ping(other), Err(ClientError::Version { agent: 9 })));
    let refused = Frame::Welcome { protocol: AGENT_PROTOCOL, verdict: HelloVerdict::Token };
    assert!(matches!(ping(refused), Err(ClientError::Token)));
    assert!(matches!(ping(Frame::StdinEnd), Err(ClientError::Unexpected)));
}

#[test]
fn answers_out_of_turn_are_refused() {
    let ping = |frames| Client::new(scripted(frames)).ping();
    assert!(matches!(ping(vec![welcome()]), Err(ClientError::Closed)));
    let stored = Frame::Reply(Reply::Stored { bytes: 1 });
    assert!(matches!(ping(vec![welcome(), stored]), Err(ClientError::Unexpected)));
    assert!(matches!(ping(vec![welcome(), welcome()]), Err(ClientError::Unexpected)));
}

#[test]
fn silence_times_out() {
    let (ours, _theirs) = UnixStream::pair().expect("pair");
    let mut client = Client::new(ours);
    client.set_timeout(Some(Duration::from_millis(50)));
    assert!(matches!(client.ping(), Err(ClientError::TimedOut)));
}

#[test]
fn a_file_is_never_longer_than_allowed() {
    // Says 3 bytes, sends without end.
    let frames = vec![welcome(), file(3), Frame::Data(vec![0; 600]), Frame::Data(vec![0; 600])];
    let mut sink = Vec::new();
    let result = Client::new(scripted(frames)).get_file(b"/x", 1000, &mut sink);
    assert!(matches!(result, Err(ClientError::TooLarge { limit: 1000 })), "{result:?}");
    assert!(sink.len() <= 1000);
    // Says it is huge and sends little: what counts is what came.
    let frames = vec![welcome(), file(u64::MAX), Frame::Data(vec![0; 5]), Frame::DataEnd];
    let info = Client::new(scripted(frames)).get_file(b"/x", 1000, std::io::sink());
    assert_eq!(info.expect("file").size, 5);
    // Stops in the middle.
    let frames = vec![welcome(), file(5), Frame::Data(vec![0; 2])];
    let result = Client::new(scripted(frames)).get_file(b"/x", 1000, std::io::sink());
    assert!(matches!(result, Err(ClientError::Closed)), "{result:?}");
}

#[test]
fn an_agent_cannot_exceed_the_output_limit() {
    let frames = vec![welcome(), Frame::Started(1), Frame::Stdout(vec![0; 11])];
    let request = ExecRequest { output_limit: Some(10), ..ExecRequest::new(["x"]) };
    let mut session = Client::new(scripted(frames)).exec(request).expect("exec");
    assert!(matches!(session.next_event(), Ok(ExecEvent::Started { pid: 1 })));
    assert!(matches!(session.next_event(), Err(ClientError::Unexpected)));
    assert!(matches!(session.next_event(), Err(ClientError::Closed)));
}

#[test]
fn what_a_guest_says_does_not_reach_the_terminal_raw() {
    let message = format!("\x1b]0;owned\x07{}", "x".repeat(100_000));
    let failed = Frame::Reply(Reply::Failed(Failure { kind: FailureKind::System, message }));
    let error = Client::new(scripted(vec![welcome(), failed])).ping().expect_err("failed");
    let shown = error.to_string();
    assert!(!shown.contains('\x1b') && !shown.contains('\x07'), "{shown:?}");
    assert!(shown.len() < 10_000);
}

#[test]
fn a_quiesce_that_closes_waits_for_the_end_of_the_stream() {
    let quiesced = Frame::Reply(Reply::Quiesce(QuiesceReport::default()));
    let request = QuiesceRequest { close_connections: true, ..QuiesceRequest::default() };
    let mut client = Client::new(scripted(vec![welcome(), quiesced.clone()]));
    client.quiesce(request.clone()).expect("closed");
    let mut client = Client::new(scripted(vec![welcome(), quiesced, Frame::DataEnd]));
    assert!(matches!(client.quiesce(request), Err(ClientError::Unexpected)));
}

#[test]
fn credit_from_nowhere_does_not_open_the_window() {
    let credits = vec![Frame::Credit(u32::MAX); 3];
    let frames = [vec![welcome(), Frame::Started(1)], credits].concat();
    let mut session = Client::new(scripted(frames))
        .exec(ExecRequest { stdin: true, ..ExecRequest::new(["x"]) })
        .expect("exec");
    while session.next_event().is_ok() {}
    // The session has ended: a writer is told so rather than left waiting.
    let error = session.input.write_stdin(b"x").expect_err("ended");
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    session.input.signal(15).expect("control of what has ended is nothing");
}

/// A monitor that answers a connection with these bytes.
fn monitor(answer: &'static [u8], hold: Duration) -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("vsock");
    let listener = UnixListener::bind(&path).expect("bind");
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accept");
        let mut line = [0; 13];
        stream.read_exact(&mut line).expect("line");
        assert_eq!(&line, b"CONNECT 1024\n");
        let _ = stream.write_all(answer);
        thread::sleep(hold);
    });
    (directory, path)
}

#[test]
fn monitors_are_asked_for_a_port() {
    let limit = Duration::from_millis(200);
    let connect = |answer, hold| {
        let (_directory, path) = monitor(answer, hold);
        connect_vsock_uds(path, AGENT_PORT, limit)
    };
    let mut stream = connect(b"OK 1073741824\nrest", Duration::ZERO).expect("connected");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("read");
    assert_eq!(rest, "rest", "what follows the line belongs to the guest");
    let kind = |answer, hold| connect(answer, hold).expect_err("refused").kind();
    assert_eq!(kind(b"", Duration::ZERO), ErrorKind::ConnectionRefused);
    assert_eq!(kind(b"NO\n", Duration::ZERO), ErrorKind::InvalidData);
    assert_eq!(kind(b"OK \n", Duration::ZERO), ErrorKind::InvalidData);
    assert_eq!(kind(&[b'x'; 500], Duration::ZERO), ErrorKind::InvalidData);
    let begin = Instant::now();
    assert_eq!(kind(b"OK 1", Duration::from_secs(1)), ErrorKind::TimedOut);
    assert!(begin.elapsed() < Duration::from_millis(900));
    let missing = connect_vsock_uds("/no/such/socket", AGENT_PORT, limit);
    assert_eq!(missing.expect_err("missing").kind(), ErrorKind::NotFound);
}
