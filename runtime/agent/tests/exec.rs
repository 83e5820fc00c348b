//! What a program run by the agent sees and what its client sees of it.

mod support;

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use parbake_protocol::agent::{
    ClientError, ExecEvent, ExecRequest, ExecSession, ExitReason, FailureKind, GuestConfig,
    STDIN_WINDOW, WindowSize,
};
use support::{Served, eventually};

fn refused(result: Result<parbake_protocol::agent::Output, ClientError>) -> (FailureKind, i32) {
    match result {
        Err(ClientError::Failed(f)) => (f.kind, f.shell_code()),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

fn alive(marker: &str) -> bool {
    std::fs::read_dir("/proc").expect("proc").flatten().any(|entry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|line| line.split(|b| *b == 0).any(|word| word == marker.as_bytes()))
    })
}

#[test]
fn codes_and_signals() {
    let agent = Served::start();
    for code in [0, 1, 3, 126, 127, 255] {
        let exit = agent.sh(&format!("exit {code}")).exit;
        assert_eq!((exit.code, exit.signal, exit.shell_code()), (Some(code), None, code));
    }
    for (name, number) in [("TERM", 15), ("KILL", 9), ("SEGV", 11), ("PIPE", 13)] {
        let exit = agent.sh(&format!("kill -{name} $$; sleep 5")).exit;
        assert_eq!((exit.code, exit.signal), (None, Some(number)), "{name}");
        assert_eq!(exit.shell_code(), 128 + number);
    }
}

#[test]
fn streams_are_kept_apart_and_in_order() {
    let agent = Served::start();
    let output = agent.sh("echo out; echo err >&2; cat; printf end");
    assert_eq!(output.stdout, b"out\nend");
    assert_eq!(output.stderr, b"err\n");
    let lines = agent.sh("seq 1 10000").stdout;
    let wanted: String = (1..=10_000).map(|n| format!("{n}\n")).collect();
    assert!(lines == wanted.as_bytes(), "10,000 lines arrive complete");
}

#[test]
fn what_cannot_be_started_says_why() {
    let agent = Served::start();
    let plain = agent.path("plain");
    std::fs::write(&plain, "x").expect("write");
    let script = agent.path("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").expect("write");
    let text = agent.path("text");
    std::fs::write(&text, "just text\n").expect("write");
    for path in [&script, &text] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(path, mode).expect("mode");
    }
    let run = |command: &str| refused(agent.run(ExecRequest::new([command])));
    assert_eq!(run("no-such-command-here"), (FailureKind::NotFound, 127));
    assert_eq!(run("/no/such/command"), (FailureKind::NotFound, 127));
    assert_eq!(run(plain.to_str().expect("utf-8")), (FailureKind::NotExecutable, 126));
    assert_eq!(run(script.to_str().expect("utf-8")), (FailureKind::NotExecutable, 126));
    assert_eq!(run(text.to_str().expect("utf-8")), (FailureKind::NotExecutable, 126));
    assert_eq!(run("/etc"), (FailureKind::NotExecutable, 126));
    assert_eq!(run(""), (FailureKind::BadRequest, 125));
    assert_eq!(run("nul\0byte"), (FailureKind::BadRequest, 125));
    let nothing = ExecRequest::new::<Vec<u8>>([]);
    assert_eq!(refused(agent.run(nothing)), (FailureKind::BadRequest, 125));
    let cwd = ExecRequest { cwd: b"/no/such/dir".to_vec(), ..ExecRequest::new(["true"]) };
    assert_eq!(refused(agent.run(cwd)), (FailureKind::BadCwd, 125));
    let user = ExecRequest { user: "nobody-here".to_owned(), ..ExecRequest::new(["true"]) };
    assert_eq!(refused(agent.run(user)), (FailureKind::NoSuchUser, 125));
    let huge = ExecRequest {
        env: vec![[b"A=".to_vec(), vec![b'x'; 200_000]].concat()],
        ..ExecRequest::new(["true"])
    };
    assert_eq!(refused(agent.run(huge)), (FailureKind::BadRequest, 125));
}

#[test]
fn environment_is_merged() {
    let agent = Served::start();
    let config = GuestConfig {
        env: vec![b"FROM_IMAGE=1".to_vec(), b"BOTH=image".to_vec(), b"PATH=/usr/bin:/bin".to_vec()],
        user: "nobody".to_owned(),
        cwd: b"/usr".to_vec(),
    };
    agent.client().configure(config).expect("configure");
    let request = ExecRequest {
        env: vec![b"BOTH=request".to_vec(), b"RAW=\xff\xfe".to_vec()],
        ..ExecRequest::new(["sh", "-c", "env; pwd; id -un"])
    };
    let output = agent.run(request.clone()).expect("run").stdout;
    let lines: Vec<_> = output.split(|b| *b == b'\n').collect();
    for wanted in [
        &b"FROM_IMAGE=1"[..],
        b"BOTH=request",
        b"PATH=/usr/bin:/bin",
        b"RAW=\xff\xfe",
        b"HOME=/nonexistent",
        b"USER=nobody",
        b"/usr",
        b"nobody",
    ] {
        assert!(
            lines.contains(&wanted),
            "{} in {:?}",
            String::from_utf8_lossy(wanted),
            String::from_utf8_lossy(&output)
        );
    }
    assert!(!lines.iter().any(|l| l.starts_with(b"TERM=") || l.starts_with(b"CARGO")));
    let bare = ExecRequest { no_template_defaults: true, ..request };
    let output = agent.run(bare).expect("run").stdout;
    let text = String::from_utf8_lossy(&output);
    assert!(text.contains("HOME=/root\n") && text.contains("\n/\nroot\n"), "{text}");
    assert!(text.contains("PATH=/usr/local/sbin:") && !text.contains("FROM_IMAGE"), "{text}");
}

#[test]
fn users_and_groups_are_the_guests() {
    let agent = Served::start();
    let id = |user: &str| {
        let request = ExecRequest {
            user: user.to_owned(),
            ..ExecRequest::new(["sh", "-c", "echo $(id -u) $(id -g) $(id -G)"])
        };
        String::from_utf8(agent.run(request).expect(user).stdout).expect("text")
    };
    assert_eq!(id("12345:54321"), "12345 54321 54321\n");
    assert_eq!(id("12345"), "12345 0 0\n");
    assert_eq!(id("daemon"), "1 1 1\n");
    assert_eq!(id("daemon:tty"), "1 5 5\n");
    // Standard streams can be reopened by their user.
    let request = ExecRequest {
        user: "12345".to_owned(),
        ..ExecRequest::new(["sh", "-c", "echo again > /proc/self/fd/1"])
    };
    assert_eq!(agent.run(request).expect("run").stdout, b"again\n");
}

#[test]
fn arguments_need_not_be_text() {
    let agent = Served::start();
    let request = ExecRequest::new([&b"printf"[..], b"%s|", b"\xff\x80", b"", b"a b"]);
    assert_eq!(agent.run(request).expect("run").stdout, b"\xff\x80||a b|");
}

#[test]
fn programs_start_clean() {
    let agent = Served::start();
    let output = agent
        .sh("ls /proc/self/fd | wc -l; grep -E '^Sig(Blk|Ign)' /proc/self/status; umask; \
         test $$ = $(ps -o sid= $$) && echo leader");
    let text = String::from_utf8_lossy(&output.stdout).replace('\t', " ");
    // Three streams and the directory ls itself reads.
    assert!(text.starts_with("4\n"), "{text}");
    assert!(text.contains("SigBlk: 0000000000000000\nSigIgn: 0000000000000000\n0022\n"), "{text}");
    assert!(text.ends_with("leader\n"), "{text}");
}

/// Feeds `input` in one thread and returns everything that comes back.
fn pump(session: ExecSession<std::os::unix::net::UnixStream>, input: Vec<u8>) -> (Vec<u8>, i32) {
    let (writer, mut output) = session.split();
    let feeder = thread::spawn(move || {
        // The program may end without reading it all.
        let _ = writer.write_stdin(&input);
        writer.close_stdin().expect("close");
    });
    let mut all = Vec::new();
    let code = loop {
        match output.next_event().expect("event") {
            ExecEvent::Stdout(data) => all.extend_from_slice(&data),
            ExecEvent::Exited(exit) => break exit.shell_code(),
            ExecEvent::Failed(failure) => panic!("{failure}"),
            ExecEvent::Started { .. } | ExecEvent::Stderr(_) => {}
        }
    };
    feeder.join().expect("feeder");
    (all, code)
}

#[test]
fn ten_megabytes_both_ways() {
    let agent = Served::start();
    let input: Vec<u8> =
        (0..10_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let request = ExecRequest { stdin: true, ..ExecRequest::new(["cat"]) };
    let (output, code) = pump(agent.client().exec(request).expect("exec"), input.clone());
    assert_eq!(code, 0);
    assert!(output == input, "{} bytes came back", output.len());
}

#[test]
fn input_nobody_reads_blocks_nobody() {
    let agent = Served::start();
    // Ends without reading.
    let request = ExecRequest { stdin: true, ..ExecRequest::new(["true"]) };
    let (_, code) = pump(agent.client().exec(request).expect("exec"), vec![0; 2_000_000]);
    assert_eq!(code, 0);
    // Closes its input and lives on: the rest is accepted and dropped.
    let request = ExecRequest {
        stdin: true,
        ..ExecRequest::new(["sh", "-c", "exec <&-; sleep 0.3; echo ok"])
    };
    let (output, _) = pump(agent.client().exec(request).expect("exec"), vec![0; 2_000_000]);
    assert_eq!(output, b"ok\n");
    // Never reads: a signal still gets through behind a full window.
    let request = ExecRequest { stdin: true, ..ExecRequest::new(["sleep", "60"]) };
    let (input, mut output) = agent.client().exec(request).expect("exec").split();
    let writer = input.clone();
    let feeder = thread::spawn(move || writer.write_stdin(&vec![0; 4 * STDIN_WINDOW]));
    assert!(matches!(output.next_event(), Ok(ExecEvent::Started { .. })));
    output.set_timeout(Some(Duration::from_millis(200))).expect("timeout");
    // The pipe's own capacity may give back some credit, then nothing moves.
    assert!(matches!(output.next_event(), Err(ClientError::TimedOut)));
    assert!(!feeder.is_finished());
    input.signal(15).expect("signal");
    output.set_timeout(Some(Duration::from_secs(10))).expect("timeout");
    let event = output.next_event().expect("event");
    assert!(matches!(&event, ExecEvent::Exited(e) if e.signal == Some(15)), "{event:?}");
    // Told of the end or, between the pipe's end and the program's, rid of its data: not stuck.
    let _ = feeder.join().expect("feeder");
}

#[test]
fn background_children_do_not_hold_the_session() {
    let agent = Served::start();
    let begin = Instant::now();
    let output = agent.sh("sleep 30.125 & echo $!");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    eventually("it is left running, as docker exec does", || alive("30.125"));
    let pid = String::from_utf8(output.stdout).expect("a pid");
    agent.sh(&format!("kill {pid}"));
    // One that never stops writing does not hold it either.
    let noise = "timeout 3 sh -c 'while :; do echo noise; done'";
    let output = agent.sh(&format!("{noise} & sleep 0.2; echo last >&2; exit 5"));
    assert_eq!((output.exit.code, output.stderr.as_slice()), (Some(5), &b"last\n"[..]));
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}

#[test]
fn a_client_that_vanishes_takes_its_programs_along() {
    let agent = Served::start();
    let request = ExecRequest::new(["sh", "-c", "sleep 61.25 & sleep 61.5; true"]);
    let mut session = agent.client().exec(request).expect("exec");
    assert!(matches!(session.next_event(), Ok(ExecEvent::Started { .. })));
    eventually("both run", || alive("61.25") && alive("61.5"));
    drop(session);
    eventually("both are gone", || !alive("61.25") && !alive("61.5"));
    eventually("the session is forgotten", || agent.client().info().expect("info").sessions == 0);
}

#[test]
fn timeouts_end_the_whole_group() {
    let agent = Served::start();
    let request = ExecRequest {
        timeout_ms: Some(200),
        ..ExecRequest::new(["sh", "-c", "echo before; sleep 62.25 & sleep 62.5; true"])
    };
    let begin = Instant::now();
    let output = agent.run(request).expect("run");
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(output.stdout, b"before\n");
    assert_eq!((output.exit.reason, output.exit.shell_code()), (ExitReason::Timeout, 124));
    assert_eq!(output.exit.signal, Some(9));
    eventually("all are gone", || !alive("62.25") && !alive("62.5"));
    // One that is met in time changes nothing.
    let request = ExecRequest { timeout_ms: Some(60_000), ..ExecRequest::new(["true"]) };
    assert_eq!(agent.run(request).expect("run").exit.reason, ExitReason::Ended);
}

#[test]
fn a_client_that_does_not_read_slows_only_its_program() {
    let agent = Served::start();
    let request = ExecRequest { timeout_ms: Some(400), ..ExecRequest::new(["cat", "/dev/zero"]) };
    let mut session = agent.client().exec(request).expect("exec");
    thread::sleep(Duration::from_millis(200));
    agent.client().ping().expect("others are served");
    thread::sleep(Duration::from_millis(400));
    let mut bytes = 0;
    let exit = loop {
        match session.next_event().expect("event") {
            ExecEvent::Stdout(data) => bytes += data.len(),
            ExecEvent::Exited(exit) => break exit,
            _ => {}
        }
    };
    assert_eq!(exit.reason, ExitReason::Timeout);
    assert!(bytes < 4 << 20, "{bytes} bytes were produced with nobody reading");
}

#[test]
fn output_limits_hold() {
    let agent = Served::start();
    let request = ExecRequest {
        output_limit: Some(1000),
        ..ExecRequest::new(["sh", "-c", "seq 1 100000; exit 4"])
    };
    let output = agent.run(request).expect("run");
    assert_eq!(output.stdout.len() + output.stderr.len(), 1000);
    assert_eq!((output.exit.code, output.exit.truncated), (Some(4), true));
    let request = ExecRequest { output_limit: Some(2), ..ExecRequest::new(["echo", "1"]) };
    assert!(!agent.run(request).expect("run").exit.truncated);
}

#[test]
fn terminals() {
    let agent = Served::start();
    let size = WindowSize { rows: 33, columns: 101 };
    let script = "stty size; tty; echo TERM=$TERM; echo err >&2; \
                  trap 'stty size; exit 7' WINCH; echo ready; while :; do sleep 0.05; done";
    let request =
        ExecRequest { tty: Some(size), stdin: true, ..ExecRequest::new(["sh", "-c", script]) };
    let mut session = agent.client().exec(request).expect("exec");
    let mut text = String::new();
    let mut resized = false;
    let exit = loop {
        match session.next_event().expect("event") {
            ExecEvent::Stdout(data) => text.push_str(&String::from_utf8_lossy(&data)),
            ExecEvent::Exited(exit) => break exit,
            ExecEvent::Started { .. } => {}
            other => panic!("{other:?}"),
        }
        if text.contains("ready") && !resized {
            resized = true;
            session.input.resize(WindowSize { rows: 12, columns: 34 }).expect("resize");
        }
    };
    assert!(text.starts_with("33 101\r\n/dev/pts/"), "{text:?}");
    assert!(text.contains("TERM=xterm\r\nerr\r\nready\r\n12 34\r\n"), "{text:?}");
    assert_eq!(exit.code, Some(7));
}

#[test]
fn terminals_take_input_and_its_end() {
    let agent = Served::start();
    let tty = Some(WindowSize { rows: 24, columns: 80 });
    // Control-C reaches the foreground job.
    let request = ExecRequest { tty, stdin: true, ..ExecRequest::new(["sleep", "63"]) };
    let mut session = agent.client().exec(request).expect("exec");
    assert!(matches!(session.next_event(), Ok(ExecEvent::Started { .. })));
    session.input.write_stdin(b"\x03").expect("write");
    let exit = loop {
        if let ExecEvent::Exited(exit) = session.next_event().expect("event") {
            break exit;
        }
    };
    assert_eq!(exit.signal, Some(2));
    // End of input, with an open line and without.
    for line in [&b"line\n"[..], b"open"] {
        let script = "stty -echo; echo ready; cat; echo done";
        let request = ExecRequest { tty, stdin: true, ..ExecRequest::new(["sh", "-c", script]) };
        let mut session = agent.client().exec(request).expect("exec");
        let mut text = Vec::new();
        let mut fed = false;
        loop {
            match session.next_event().expect("event") {
                ExecEvent::Stdout(data) => text.extend_from_slice(&data),
                ExecEvent::Exited(exit) => {
                    assert_eq!(exit.code, Some(0));
                    break;
                }
                _ => {}
            }
            if !fed && text.windows(5).any(|w| w == b"ready") {
                fed = true;
                session.input.write_stdin(line).expect("write");
                session.input.close_stdin().expect("close");
            }
        }
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains(line.escape_ascii().to_string().trim_end_matches("\\n")), "{text:?}");
        assert!(text.ends_with("done\r\n"), "{text:?}");
    }
    // All output of a terminal arrives, however fast its program ends.
    let request = ExecRequest { tty, ..ExecRequest::new(["seq", "1", "20000"]) };
    let output = agent.run(request).expect("run").stdout;
    let wanted: String = (1..=20_000).map(|n| format!("{n}\r\n")).collect();
    assert!(output == wanted.as_bytes(), "{} of {} bytes", output.len(), wanted.len());
}

#[test]
fn detached_programs_outlive_their_stream() {
    let agent = Served::start();
    let request = ExecRequest { detach: true, ..ExecRequest::new(["sleep", "64.5"]) };
    let mut session = agent.client().exec(request).expect("exec");
    let Ok(ExecEvent::Started { pid }) = session.next_event() else { panic!("not started") };
    assert!(matches!(session.next_event(), Err(ClientError::Closed)));
    drop(session);
    thread::sleep(Duration::from_millis(100));
    assert!(alive("64.5"));
    agent.sh(&format!("kill {pid}"));
    eventually("it is gone and reaped", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn many_at_once() {
    let agent = Served::start();
    thread::scope(|scope| {
        for n in 0..16 {
            let agent = &agent;
            scope.spawn(move || {
                for round in 0..5 {
                    let code = (n * 5 + round) % 100;
                    let output = agent.sh(&format!("echo {code}; exit {code}"));
                    assert_eq!(output.exit.code, Some(code));
                    assert_eq!(output.stdout, format!("{code}\n").into_bytes());
                }
            });
        }
    });
    assert_eq!(agent.client().info().expect("info").sessions, 0);
}

#[test]
fn one_connection_serves_requests_and_then_a_program() {
    let agent = Served::start();
    let mut client = agent.client();
    client.ping().expect("ping");
    let info = client.info().expect("info");
    assert!(!info.init && !info.frozen && info.memory_bytes > 0 && !info.kernel.is_empty());
    assert_eq!(info.boot_id.len(), 36);
    let output = client.exec(ExecRequest::new(["echo", "hi"])).expect("exec");
    assert_eq!(output.wait_with_output(100).expect("output").stdout, b"hi\n");
}

#[test]
fn output_written_just_before_exit_is_complete() {
    let agent = Served::start();
    for _ in 0..30 {
        let output = agent.sh("head -c 65536 /dev/zero; head -c 3000 /dev/zero >&2");
        assert_eq!((output.stdout.len(), output.stderr.len()), (65536, 3000));
    }
}

#[test]
fn too_much_input_is_refused() {
    use parbake_protocol::agent::{Frame, FrameReader, Request};
    let agent = Served::start();
    let mut stream = agent.stream();
    let mut bytes = Vec::new();
    Frame::hello(b"").encode(&mut bytes).expect("hello");
    let request = ExecRequest { stdin: true, ..ExecRequest::new(["sleep", "65.75"]) };
    Frame::Request(Request::Exec(request)).encode(&mut bytes).expect("exec");
    stream.write_all(&bytes).expect("write");
    let mut reader = FrameReader::new();
    assert!(matches!(reader.next(&mut stream), Ok(Some(Frame::Welcome { .. }))));
    assert!(matches!(reader.next(&mut stream), Ok(Some(Frame::Started(_)))));
    bytes.clear();
    for _ in 0..4 {
        Frame::Stdin(vec![0; STDIN_WINDOW]).encode(&mut bytes).expect("stdin");
    }
    // The agent may hang up before all of it is written.
    let _ = stream.write_all(&bytes);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    eventually("the program is gone", || !alive("65.75"));
}
