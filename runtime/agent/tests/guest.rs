//! The agent as PID 1 of a real guest: its mounts, its quiesce, its fixup, its end.
//!
//! Needs a freshly booted guest whose init the agent is, on a Debian root file system, and its
//! vsock socket in `PARBAKE_TEST_GUEST` (any monitor with the `CONNECT` convention). The guest is
//! switched off at the end. Without the variable the test says that it was skipped.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime};

use parbake_protocol::agent::{
    AGENT_PORT, Client, ClientError, ExecEvent, ExecRequest, ExitReason, FailureKind, Fixup,
    GuestConfig, NetworkConfig, QuiesceRequest, ZeroFill, connect_vsock_uds,
};

fn client() -> Client<UnixStream> {
    let socket = std::env::var_os("PARBAKE_TEST_GUEST").expect("checked before");
    let begin = Instant::now();
    loop {
        match connect_vsock_uds(&socket, AGENT_PORT, Duration::from_secs(5)) {
            Ok(stream) => return Client::new(stream),
            Err(e) if begin.elapsed() > Duration::from_secs(90) => panic!("no guest: {e}"),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn sh(script: &str) -> String {
    let session = client().exec(ExecRequest::new(["sh", "-c", script])).expect("exec");
    let output = session.wait_with_output(1 << 20).expect(script);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.exit.code, Some(0), "{script}: {text}{:?}", output.stderr.escape_ascii());
    text
}

fn fixup(number: u8) -> Fixup {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    Fixup {
        entropy: [number; 64],
        realtime_ns: u64::try_from(now.as_nanos()).expect("before 2500"),
        instance_id: format!("instance-{number}"),
        hostname: format!("clone-{number}"),
        machine_id: [number; 16],
        env: vec![format!("RUN={number}").into_bytes()],
        ssh_host_keys: true,
        network: (number == 2).then(|| NetworkConfig {
            // The one interface every guest has.
            interface: "lo".to_owned(),
            mac: None,
            address: [10, 9, 8, 7],
            prefix: 24,
            gateway: Some([10, 9, 8, 1]),
            dns: vec![[10, 9, 8, 3], [10, 9, 8, 4]],
        }),
    }
}

#[test]
fn a_guest_lives() {
    if std::env::var_os("PARBAKE_TEST_GUEST").is_none() {
        eprintln!("skipped: PARBAKE_TEST_GUEST names no guest's vsock socket");
        return;
    }
    boots();
    programs_run();
    freezes();
    mends();
    client().shutdown().expect("shutdown");
}

fn boots() {
    let info = client().info().expect("info");
    println!("{info:#?}");
    assert!(info.init && !info.frozen && info.fixups == 0);
    let mounts = sh("cat /proc/mounts");
    for wanted in [
        " / ext4 rw,noatime",
        " /proc proc ",
        " /sys sysfs ",
        " /dev devtmpfs ",
        " /dev/pts devpts ",
        " /dev/shm tmpfs ",
        " /run tmpfs ",
        " /sys/fs/cgroup cgroup2 ",
        " /etc/machine-id tmpfs ",
    ] {
        assert!(mounts.contains(wanted), "{wanted} in {mounts}");
    }
    assert_eq!(sh("ls / | grep -c newroot || true"), "0\n");
    assert!(sh("ip addr show lo 2>/dev/null || cat /proc/net/if_inet6").contains("lo"));
    assert_eq!(sh("cat /proc/self/cgroup | cut -c1-15"), "0::/user/sessio\n");
    assert_eq!(sh("cat /proc/self/oom_score_adj; cat /proc/1/oom_score_adj"), "0\n-1000\n");
    assert_eq!(sh("hostname; cat /etc/hostname"), "parbake\nparbake\n");
    assert_eq!(sh("wc -c < /etc/machine-id"), "33\n");
    println!("agent memory: {}", sh("grep -E 'VmRSS|VmLck|Threads' /proc/1/status"));
    println!("memory: {}", sh("cat /proc/meminfo | head -3"));
}

fn programs_run() {
    client()
        .configure(GuestConfig {
            env: vec![b"IMAGE=yes".to_vec()],
            user: String::new(),
            cwd: b"/made/by/configure".to_vec(),
        })
        .expect("configure");
    assert_eq!(sh("pwd; echo $IMAGE"), "/made/by/configure\nyes\n");
    let begin = Instant::now();
    for _ in 0..10 {
        sh("true");
    }
    println!("connect + exec sh -c true: {:?} each", begin.elapsed() / 10);
    // Orphans are reaped, and nobody's exit status is lost to the reaper.
    for code in 0..20 {
        let script = format!("(setsid sleep 0.02 &) ; exit {code}");
        let session = client().exec(ExecRequest::new(["sh", "-c", &script])).expect("exec");
        assert_eq!(session.wait_with_output(10).expect("output").exit.code, Some(code));
    }
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(sh("ps -eo stat= | grep -c ^Z || true"), "0\n");
    // Whoever leaves the process group is still in the cgroup.
    let request = ExecRequest {
        timeout_ms: Some(1500),
        ..ExecRequest::new(["sh", "-c", "setsid sleep 71.5 & setsid sleep 71.75"])
    };
    let output = client().exec(request).expect("exec").wait_with_output(10).expect("output");
    assert_eq!(output.exit.reason, ExitReason::Timeout);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(sh("pgrep -fc 'sleep 71' || true").trim(), "1", "only the shell that asks");
    assert_eq!(sh("ls -d /sys/fs/cgroup/user/session-* | wc -l"), "1\n");
}

fn freezes() {
    // A daemon from before the freeze, counting.
    let script = "n=0; while :; do n=$((n+1)); echo $n > /run/count; sleep 0.05; done";
    let request = ExecRequest { detach: true, ..ExecRequest::new(["sh", "-c", script]) };
    let mut session = client().exec(request).expect("exec");
    assert!(matches!(session.next_event(), Ok(ExecEvent::Started { .. })));
    // A session that runs is in the way, unless it may be ended.
    let mut running = client().exec(ExecRequest::new(["sleep", "72"])).expect("exec");
    assert!(matches!(running.next_event(), Ok(ExecEvent::Started { .. })));
    let freeze = QuiesceRequest { freeze: true, ..QuiesceRequest::default() };
    assert!(matches!(client().quiesce(freeze), Err(ClientError::Failed(_))));
    sh("echo seed > /var/lib/systemd/random-seed; \
        dd if=/dev/urandom of=/dev/shm/x bs=1M count=60 2>/dev/null; rm /dev/shm/x");
    let mut asking = client();
    let report = asking
        .quiesce(QuiesceRequest {
            end_sessions: true,
            freeze: true,
            forget_identity: true,
            sync: true,
            drop_caches: true,
            zero_free_memory: Some(ZeroFill::default()),
            close_connections: true,
        })
        .expect("quiesce");
    println!("{report:#?}");
    assert!(report.complete());
    assert!(report.zeroed_bytes > 100 << 20, "{} bytes zeroed", report.zeroed_bytes);
    assert!(matches!(asking.ping(), Err(ClientError::Closed | ClientError::Frame(_))));
    match running.next_event() {
        Ok(ExecEvent::Exited(exit)) => assert_eq!(exit.reason, ExitReason::Killed),
        Err(ClientError::Closed) => {}
        other => panic!("{other:?}"),
    }
    // Still answers, but runs nothing.
    assert!(client().info().expect("info").frozen);
    let refused = client().exec(ExecRequest::new(["true"])).expect("sent").wait_with_output(1);
    assert!(matches!(refused, Err(ClientError::Failed(f)) if f.kind == FailureKind::Frozen));
}

fn mends() {
    let get = |path: &[u8]| {
        let mut content = Vec::new();
        client().get_file(path, 4096, &mut content).expect("get");
        String::from_utf8(content).expect("text")
    };
    let count = get(b"/run/count");
    let boot_id = get(b"/proc/sys/kernel/random/boot_id");
    let key = get(b"/etc/ssh/ssh_host_ed25519_key.pub");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(get(b"/run/count"), count, "the daemon is frozen");
    let bad = Fixup { hostname: "a b".to_owned(), ..fixup(1) };
    assert!(matches!(client().fixup(bad), Err(ClientError::Failed(_))));
    for number in [1, 2] {
        let begin = Instant::now();
        // The first command travels behind the fixup, on the same stream.
        let mut mending = client();
        let report = mending.fixup(fixup(number)).expect("fixup");
        let mended = begin.elapsed();
        assert!(report.complete(), "{report:#?}");
        let session = mending.exec(ExecRequest::new(["sh", "-c", "echo $RUN"])).expect("exec");
        let output = session.wait_with_output(100).expect("output").stdout;
        assert_eq!(output, format!("{number}\n").into_bytes());
        println!("fixup {mended:?}, with first exec {:?}: {report:#?}", begin.elapsed());
    }
    let wanted = "clone-2\nclone-2\n02020202020202020202020202020202\n";
    assert_eq!(sh("hostname; cat /etc/hostname /etc/machine-id"), wanted);
    assert!(sh("getent hosts clone-2").contains("10.9.8.7"));
    assert_eq!(get(b"/etc/resolv.conf"), "nameserver 10.9.8.3\nnameserver 10.9.8.4\n");
    let routes = sh("cat /proc/net/route");
    // Destination, gateway and mask, as the kernel writes them: little-endian.
    assert!(routes.contains("lo\t00000000\t0108090A\t0003"), "{routes}");
    assert!(sh("cat /proc/net/fib_trie").contains("10.9.8.0/24"));
    assert_ne!(get(b"/proc/sys/kernel/random/boot_id"), boot_id);
    assert_ne!(get(b"/etc/ssh/ssh_host_ed25519_key.pub"), key);
    let guest: f64 = sh("date +%s.%N").trim().parse().expect("a time");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    let skew = now.as_secs_f64() - guest;
    println!("clock skew with one exec's delay: {skew:.3} s");
    assert!(skew.abs() < 2.0, "{skew}");
    std::thread::sleep(Duration::from_millis(500));
    assert_ne!(get(b"/run/count"), count, "the daemon goes on");
    assert_eq!(sh("ls /var/lib/systemd/random-seed 2>/dev/null | wc -l"), "0\n");
    let info = client().info().expect("info");
    assert_eq!((info.fixups, info.instance_id.as_str(), info.frozen), (2, "instance-2", false));
}
