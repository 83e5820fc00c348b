//! The service from the outside, through its sockets and its command line, without a Linux guest:
//! refusals, keys, events, the audit log; and with bare guests, which have no agent, what becomes of
//! sandboxes when the service dies.
#![allow(missing_docs)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use parbake_cache::Digest;
use parbake_cache::template::MachineShape;
use parbake_protocol::vmm::{Jail, Start, VERSION, VmmConfig, Vsock};
use parbake_service::feed::unix_ms;
use parbake_service::record::Record;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const PARBAKED: &str = env!("CARGO_BIN_EXE_parbaked");

/// A service in a directory of its own.
struct World {
    root: tempfile::TempDir,
    service: Option<Child>,
    arguments: Vec<String>,
}

impl World {
    fn new(arguments: &[&str]) -> Self {
        let root = tempfile::Builder::new().prefix("pd.").tempdir().unwrap();
        let arguments = arguments.iter().map(|a| (*a).to_owned()).collect();
        let mut world = Self { root, service: None, arguments };
        world.start();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(PARBAKED);
        command.env("PARBAKE_STORE", self.path("store")).stdin(Stdio::null());
        command.env("PARBAKED_ADDRESS", format!("unix:{}", self.path("s").display()));
        command.env_remove("PARBAKED_API_KEY").env_remove("NOTIFY_SOCKET");
        command
    }

    fn serve(&self) -> Command {
        let mut command = self.command();
        command.args(["serve", "--scratch", "memory", "--answer-timeout", "1s"]);
        command.args(["--drain-timeout", "2s"]);
        command.arg("--run-dir").arg(self.path("run"));
        command.arg("--audit-log").arg(self.path("audit"));
        command.arg(format!("--listen=unix:{}", self.path("s").display()));
        command.args(&self.arguments);
        command
    }

    fn start(&mut self) {
        let mut child = self.serve().stderr(Stdio::piped()).spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let mut lines = BufReader::new(stderr).lines();
        let serving = lines.any(|line| line.unwrap().contains("serving"));
        assert!(serving, "parbaked did not start: {:?}", child.wait());
        // What it says later is for whoever looks at the test's output.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|l| println!("{l}")));
        self.service = Some(child);
    }

    fn kill(&mut self) {
        let mut child = self.service.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// SIGTERM, and the service's end.
    fn terminate(&mut self) {
        let mut child = self.service.take().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the service does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn http(&self, request: &[u8]) -> (u16, Value) {
        answer(UnixStream::connect(self.path("s")).unwrap(), request)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        self.http(&request(method, path, "", body.as_bytes()))
    }

    /// Demands a refusal of this kind.
    fn refused(&self, method: &str, path: &str, body: &str, status: u16, kind: &str) {
        let (got, document) = self.ask(method, path, body);
        let word = document["error"]["kind"].as_str().unwrap_or_default();
        assert_eq!((got, word), (status, kind), "{method} {path} {body}: {document}");
        assert!(!document["error"]["message"].as_str().unwrap().is_empty());
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    fn events(&self) -> Vec<Value> {
        let output = self.run(&["events", "--format", "json"]);
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.service.is_some() {
            self.kill();
        }
    }
}

fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\
         {headers}\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn answer(mut stream: impl Read + Write, request: &[u8]) -> (u16, Value) {
    // A body that is too large is refused while it is being sent.
    let _ = stream.write_all(request);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let status = text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

#[test]
fn refusals_are_typed_and_leave_nothing() {
    let world = World::new(&[]);
    for (method, path) in [
        ("GET", "/v1/sandboxes/nosuch"),
        ("DELETE", "/v1/sandboxes/nosuch"),
        ("GET", "/v1/sandboxes/nosuch/stats"),
        ("GET", "/v1/sandboxes/nosuch/logs"),
        ("GET", "/v1/sandboxes/nosuch/files?path=/etc/passwd"),
        ("PUT", "/v1/sandboxes/nosuch/files?path=/x"),
        ("GET", "/v1/sandboxes/nosuch/archive?path=/etc"),
        ("PUT", "/v1/sandboxes/nosuch/archive?path=/x"),
        ("POST", "/v1/sandboxes/nosuch/fork"),
        ("POST", "/v1/sandboxes/nosuch/pause"),
        ("POST", "/v1/sandboxes/nosuch/resume"),
        ("DELETE", "/v1/sandboxes/..%2f..%2fetc"),
        ("POST", "/v1/sandboxes/..%2f..%2fetc/resume"),
    ] {
        world.refused(method, path, "", 404, "unknownSandbox");
    }
    world.refused(
        "POST",
        "/v1/sandboxes/nosuch/exec",
        r#"{"argv":["true"]}"#,
        404,
        "unknownSandbox",
    );
    world.refused("GET", "/v1/nosuch", "", 404, "unknownPath");
    world.refused("PATCH", "/v1/sandboxes", "", 405, "wrongMethod");
    world.refused("POST", "/v1/sandboxes", r#"{"template":"nosuch"}"#, 404, "unknownTemplate");
    let missing = format!(r#"{{"template":"sha256:{}"}}"#, "0".repeat(64));
    world.refused("POST", "/v1/sandboxes", &missing, 404, "unknownTemplate");
    for bad in [
        "",
        "{",
        "[]",
        r#"{"template":7}"#,
        r#"{"template":"x","unknown":1}"#,
        r#"{"template":"x","ttlSeconds":0}"#,
        r#"{"template":"x","ttlSeconds":-1}"#,
        r#"{"template":"x","cpus":300}"#,
        r#"{"template":"x","env":{"A=B":"c"}}"#,
        r#"{"template":"x","secrets":{"../x":"c"}}"#,
        r#"{"template":"x","egress":["allow=everything:everywhere"]}"#,
        r#"{"template":"x","limits":{"memory":1}}"#,
    ] {
        world.refused("POST", "/v1/sandboxes", bad, 400, "badRequest");
    }
    for bad in ["", r#"{"argv":[]}"#, r#"{"argv":[""]}"#, r#"{"argv":["x"],"stdin":true}"#] {
        world.refused("POST", "/v1/sandboxes/nosuch/exec", bad, 400, "badRequest");
    }
    for bad in ["files", "files?path=x", "files?path=/x&path=/y", "archive?path=/%00"] {
        world.refused("GET", &format!("/v1/sandboxes/nosuch/{bad}"), "", 400, "badRequest");
    }
    let invalid = request("POST", "/v1/sandboxes", "", b"{\"template\":\"\xff\"}");
    assert_eq!(world.http(&invalid).1["error"]["kind"], "badRequest");
    let upgrade = "connection: upgrade\r\nupgrade: websocket\r\n";
    let body = br#"{"argv":["true"]}"#;
    let other = request("POST", "/v1/sandboxes/nosuch/exec", upgrade, body);
    assert_eq!(world.http(&other).1["error"]["kind"], "badRequest");
    let long = format!("idempotency-key: {}\r\n", "k".repeat(200));
    let keyed = request("POST", "/v1/sandboxes", &long, br#"{"template":"x"}"#);
    assert_eq!(world.http(&keyed).1["error"]["kind"], "badRequest");
    let large = format!(r#"{{"template":"{}"}}"#, "x".repeat(2 << 20));
    world.refused("POST", "/v1/sandboxes", &large, 413, "tooLarge");
    // A length that is only claimed is refused before anything of it is read.
    let claims = "PUT /v1/sandboxes/nosuch/files?path=/x HTTP/1.1\r\nhost: x\r\n\
                  content-length: 99999999999999\r\n\r\n";
    assert_eq!(world.http(claims.as_bytes()).0, 413);

    let (status, list) = world.ask("GET", "/v1/sandboxes", "");
    assert_eq!((status, list["sandboxes"].as_array().unwrap().len()), (200, 0));
    assert_eq!(fs::read_dir(world.path("run/sandboxes")).unwrap().count(), 0);
    let descriptors = || {
        let id = world.service.as_ref().unwrap().id();
        fs::read_dir(format!("/proc/{id}/fd")).unwrap().count()
    };
    let before = descriptors();
    for _ in 0..50 {
        world.refused("POST", "/v1/sandboxes", r#"{"template":"nosuch"}"#, 404, "unknownTemplate");
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while descriptors() > before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(descriptors() <= before, "{before} descriptors became {}", descriptors());
}

#[test]
fn the_command_line_has_the_exit_codes_of_its_help() {
    let mut world = World::new(&[]);
    let code = |arguments: &[&str]| world.run(arguments).status.code().unwrap();
    assert_eq!(code(&["ps"]), 0);
    assert_eq!(code(&["status"]), 0);
    assert_eq!(code(&["rm", "nosuch"]), 3);
    assert_eq!(code(&["rm", "--force", "nosuch"]), 0);
    assert_eq!(code(&["stats", "nosuch"]), 3);
    assert_eq!(code(&["create", "nosuch"]), 3);
    assert_eq!(code(&["resume", "nosuch"]), 3);
    assert_eq!(code(&["exec", "nosuch", "--", "true"]), 125);
    assert_eq!(code(&["exec", "-d", "nosuch", "--", "true"]), 125);
    assert_eq!(code(&["create"]), 2);
    assert_eq!(code(&["cp", "/etc/hostname", "/tmp/x"]), 2);
    assert_eq!(code(&["cp", "nosuch:/x", "/tmp/x"]), 3);
    let json = world.run(&["rm", "nosuch", "--format", "json"]);
    let document: Value = serde_json::from_slice(&json.stderr).unwrap();
    assert_eq!(document["error"]["kind"], "notFound");
    assert_eq!(document["error"]["exitCode"], 3);
    world.kill();
    assert_eq!(world.run(&["ps"]).status.code(), Some(7));
}

#[test]
fn keys_are_needed_on_tcp() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let keys = tempfile::NamedTempFile::new().unwrap();
    fs::write(keys.path(), "ci:0123456789abcdef\n").unwrap();
    let (address, file) = (free.to_string(), keys.path().to_str().unwrap());
    let world = World::new(&["--listen", &address, "--api-key-file", file]);
    let ask = |header: &str, path: &str| {
        answer(TcpStream::connect(free).unwrap(), &request("GET", path, header, b"")).0
    };
    for bad in [
        "",
        "authorization: Bearer \r\n",
        "authorization: Bearer 0123456789abcdeF\r\n",
        "authorization: Basic 0123456789abcdef\r\n",
        "authorization: 0123456789abcdef\r\n",
    ] {
        for path in ["/v1/sandboxes", "/metrics", "/healthz", "/v1/openapi.json", "/nosuch"] {
            assert_eq!(ask(bad, path), 401, "{bad} {path}");
        }
    }
    let good = "authorization: Bearer 0123456789abcdef\r\n";
    assert_eq!(ask(good, "/v1/sandboxes"), 200);
    let mut client = world.command();
    client.env("PARBAKED_ADDRESS", &address).args(["create", "nosuch"]);
    assert_eq!(client.output().unwrap().status.code(), Some(4));
    assert_eq!(
        client.env("PARBAKED_API_KEY", "0123456789abcdef").output().unwrap().status.code(),
        Some(3)
    );
    // Who asked is written down; the key is not.
    let audit = fs::read_to_string(world.path("audit")).unwrap();
    assert!(audit.contains("\"key:ci\"") && !audit.contains("0123456789abcdef"), "{audit}");
}

#[test]
fn what_must_not_be_served_is_refused_at_the_start() {
    let world = World::new(&[]);
    let refused = |change: &dyn Fn(&mut Command)| {
        let mut command = world.command();
        command.arg("serve").arg("--audit-log=none").arg("--run-dir").arg(world.path("run2"));
        change(&mut command);
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let keys = world.path("keys");
    fs::write(&keys, "ci:0123456789abcdef\n").unwrap();
    fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let key_file = format!("--api-key-file={}", keys.display());
    let no_keys = refused(&|c| {
        c.arg("--listen=127.0.0.1:0");
    });
    assert!(no_keys.0 == 2 && no_keys.1.contains("--api-key-file"), "{no_keys:?}");
    let open = refused(&|c| {
        c.args(["--listen=0.0.0.0:0", &key_file]);
    });
    assert!(open.0 == 2 && open.1.contains("--allow-remote"), "{open:?}");
    let socket = format!("--listen=unix:{}", world.path("s").display());
    let taken = refused(&|c| {
        c.arg(&socket);
    });
    assert!(taken.0 == 7 && taken.1.contains("in use"), "{taken:?}");
    // The same run directory, and the same audit log, belong to one service only.
    let output = world.serve().output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    assert!(String::from_utf8_lossy(&output.stderr).contains("another parbaked"));
    let mut command = world.command();
    command.arg("serve").arg("--audit-log").arg(world.path("audit"));
    let output = command.arg("--run-dir").arg(world.path("run3")).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("another process"));
    // And the first one is none the worse.
    assert_eq!(world.ask("GET", "/healthz", "").0, 200);
}

#[test]
fn documents_metrics_and_events() {
    let mut world = World::new(&[]);
    let (status, document) = world.ask("GET", "/v1/openapi.json", "");
    assert_eq!(status, 200);
    let committed: Value = serde_json::from_str(include_str!("../openapi.json")).unwrap();
    assert!(document == committed, "the document that is served is not the committed one");
    world.refused("POST", "/v1/sandboxes", r#"{"template":"nosuch"}"#, 404, "unknownTemplate");
    let mut stream = UnixStream::connect(world.path("s")).unwrap();
    stream.write_all(&request("GET", "/metrics", "", b"")).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    for name in [
        "parbake_restore_seconds_bucket",
        "parbake_agent_ready_seconds_count 0",
        "parbake_first_exec_seconds_sum",
        "parbake_denied_egress_total 0",
        "parbake_failures_total{operation=\"create\",kind=\"unknownTemplate\"} 1",
        "# EOF",
    ] {
        assert!(text.contains(name), "{name} is not in {text}");
    }
    // What was, what is, and the end of the service.
    let mut follow = world.command();
    let mut follow = follow
        .args(["events", "--follow", "--format", "json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    assert_eq!(next()["kind"], "started");
    let failed = next();
    assert_eq!((&failed["kind"], &failed["sequence"]), (&"failed".into(), &2.into()));
    world.refused("DELETE", "/v1/sandboxes/nosuch", "", 404, "unknownSandbox");
    world.refused("POST", "/v1/sandboxes/nosuch/pause", "", 404, "unknownSandbox");
    assert_eq!(next()["detail"]["operation"], "pause");
    world.terminate();
    assert_eq!(next()["kind"], "draining");
    assert_eq!(follow.wait().unwrap().code(), Some(7));
    // All of it is in the log, which nobody can change unseen.
    let audit = world.path("audit");
    let audit = audit.to_str().unwrap();
    let verified = world.run(&["audit", "verify", audit, "--format", "json"]);
    let verified: Value = serde_json::from_slice(&verified.stdout).unwrap();
    let text = fs::read_to_string(audit).unwrap();
    assert_eq!(verified["lines"], text.lines().count());
    let head = verified["head"].as_str().unwrap();
    assert_eq!(world.run(&["audit", "verify", audit, "--head", head]).status.code(), Some(0));
    let cut: Vec<&str> = text.lines().take(2).collect();
    fs::write(audit, cut.join("\n") + "\n").unwrap();
    assert_eq!(world.run(&["audit", "verify", audit]).status.code(), Some(0));
    assert_eq!(world.run(&["audit", "verify", audit, "--head", head]).status.code(), Some(4));
    fs::write(audit, text.replacen("unknownTemplate", "unknownSandbox", 1)).unwrap();
    assert_eq!(world.run(&["audit", "verify", audit]).status.code(), Some(4));
    let broken = world.serve().output().unwrap();
    assert!(String::from_utf8_lossy(&broken.stderr).contains("was changed"));
}

/// A bare guest's kernel and the monitor, or `None` with the reason.
fn bare() -> Option<(PathBuf, PathBuf)> {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        println!("skipped: /dev/kvm cannot be opened");
        return None;
    }
    let Some(vmm) = std::env::var_os("PARBAKE_BIN").map(|bin| Path::new(&bin).join("parbake-vmm"))
    else {
        println!("skipped: PARBAKE_BIN is not set (use `make unit`)");
        return None;
    };
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/guests");
    let kernel = tempfile::Builder::new()
        .prefix("ticker")
        .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
        .unwrap()
        .into_temp_path()
        .keep()
        .unwrap();
    let status = Command::new("cc")
        .current_dir(sources)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noexecstack"])
        .args(["-Wl,--no-warn-rwx-segments", "-I.", "-T", "guest.ld", "-o"])
        .arg(&kernel)
        .arg("ticker.S")
        .status()
        .unwrap();
    assert!(status.success());
    Some((kernel, vmm))
}

/// A sandbox as a service leaves it, with a guest that never answers.
fn leave_sandbox(world: &World, bare: &(PathBuf, PathBuf), id: &str) -> Child {
    let (kernel, vmm) = bare;
    let directory = world.path("run/sandboxes").join(id);
    fs::create_dir_all(&directory).unwrap();
    let lock = fs::File::create(directory.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    let config = VmmConfig {
        filling: None,
        workspace: None,
        version: VERSION,
        vcpus: 1,
        memory_mib: 16,
        start: Start::Boot { kernel: kernel.clone(), initramfs: None, cmdline: String::new() },
        disks: vec![],
        vsock: Some(Vsock { guest_cid: 3, socket: directory.join("vsock") }),
        net: None,
        rng: false,
        console: Some(directory.join("console.log")),
        console_limit: 1 << 20,
        lifetime_ms: None,
        control: Some(directory.join("control")),
        jail: Jail::default(),
    };
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let line = serde_json::to_string(&config).unwrap() + "\n";
    ours.write_all(line.as_bytes()).unwrap();
    let child = Command::new(vmm)
        .args(["--control-fd", "0"])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
        .stdout(lock)
        .process_group(0)
        .spawn()
        .unwrap();
    let mut started = String::new();
    BufReader::new(&ours).read_line(&mut started).unwrap();
    assert!(started.contains("started"), "{started}");
    child
}

fn record(world: &World, id: &str, change: impl FnOnce(&mut Record)) {
    let shape = MachineShape { vcpus: 1, memory_mib: 16 };
    let mut record = Record::new(id, "bare:1", Digest::of(b"bare"), shape);
    change(&mut record);
    record.write(&world.path("run/sandboxes").join(id)).unwrap();
}

fn ends(child: &mut Child) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

#[test]
fn a_service_that_dies_loses_no_sandbox() {
    let Some(bare) = bare() else { return };
    let mut world = World::new(&[]);
    world.kill();
    let mut kept = leave_sandbox(&world, &bare, "kept");
    record(&world, "kept", |record| {
        record.labels.insert("job".to_owned(), "7".to_owned());
        record.secrets.push("TOKEN".to_owned());
    });
    let mut expired = leave_sandbox(&world, &bare, "expired");
    record(&world, "expired", |record| record.expires_unix_ms = Some(unix_ms() + 1500));
    // Killed while it made this one: nobody was ever told of it.
    let mut unheard = leave_sandbox(&world, &bare, "unheard");
    // This one's monitor died while nobody was there.
    let mut dead = leave_sandbox(&world, &bare, "dead");
    record(&world, "dead", |_| {});
    dead.kill().unwrap();
    dead.wait().unwrap();

    world.start();
    assert!(ends(&mut unheard), "a sandbox nobody knows of lives on");
    let (_, list) = world.ask("GET", "/v1/sandboxes", "");
    let ids: Vec<&str> =
        list["sandboxes"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["kept", "expired"]);
    let (_, view) = world.ask("GET", "/v1/sandboxes/kept", "");
    assert_eq!(view["labels"]["job"], "7");
    assert_eq!(view["monitorPid"], kept.id());
    assert!(view["jail"].as_array().unwrap().iter().any(|layer| layer == "seccomp"));
    let kinds: Vec<String> = world
        .events()
        .iter()
        .map(|e| format!("{} {}", e["kind"].as_str().unwrap(), e["sandbox"].as_str().unwrap_or("")))
        .collect();
    for told in ["adopted kept", "adopted expired", "lost unheard", "lost dead"] {
        assert!(kinds.iter().any(|kind| kind == told), "{told}: {kinds:?}");
    }
    assert!(ends(&mut expired), "a sandbox whose time is up lives on");

    // A guest that never answers is an answer of ours, in time, and costs nothing.
    let begun = Instant::now();
    for (method, path, body) in [
        ("POST", "exec", r#"{"argv":["true"]}"#),
        ("PUT", "files?path=/x", "data"),
        ("GET", "files?path=/x", ""),
        ("GET", "archive?path=/x", ""),
        ("PUT", "archive?path=/x", "data"),
        ("POST", "fork", r#"{"withSecrets":true}"#),
    ] {
        let path = format!("/v1/sandboxes/kept/{path}");
        if method == "POST" && path.ends_with("fork") {
            // Its template is in no store.
            world.refused(method, &path, body, 404, "unknownTemplate");
        } else {
            world.refused(method, &path, body, 504, "guestUnresponsive");
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
    world.refused("POST", "/v1/sandboxes/kept/fork", "", 409, "holdsSecrets");
    world.refused("POST", "/v1/sandboxes/kept/pause", "", 409, "holdsSecrets");
    world.refused("POST", "/v1/sandboxes/kept/resume", "", 409, "wrongState");
    let stats = world.ask("GET", "/v1/sandboxes/kept/stats", "").1;
    assert!(stats["memoryProportionalBytes"].as_u64().unwrap() > 0, "{stats}");
    assert_eq!(stats["executions"], 0);

    // Killed, and asked to end, it leaves the sandbox; the next one has it again.
    world.kill();
    world.start();
    assert_eq!(world.ask("GET", "/v1/sandboxes/kept", "").0, 200);
    world.terminate();
    assert!(kept.try_wait().unwrap().is_none(), "a sandbox ended with its service");
    world.start();
    assert_eq!(world.ask("DELETE", "/v1/sandboxes/kept", "").0, 204);
    assert!(ends(&mut kept));
    world.refused("DELETE", "/v1/sandboxes/kept", "", 404, "unknownSandbox");
    assert_eq!(fs::read_dir(world.path("run/sandboxes")).unwrap().count(), 0);
}

#[test]
fn a_monitor_that_dies_is_noticed() {
    let Some(bare) = bare() else { return };
    let mut world = World::new(&[]);
    world.kill();
    let mut child = leave_sandbox(&world, &bare, "gone");
    record(&world, "gone", |_| {});
    world.start();
    assert_eq!(world.ask("GET", "/v1/sandboxes/gone", "").0, 200);
    child.kill().unwrap();
    child.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while world.ask("GET", "/v1/sandboxes/gone", "").0 == 200 {
        assert!(Instant::now() < deadline, "a dead sandbox is still listed");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(world.events().iter().any(|e| e["kind"] == "ended" && e["sandbox"] == "gone"));
    assert_eq!(fs::read_dir(world.path("run/sandboxes")).unwrap().count(), 0);
}

#[test]
fn a_service_that_is_to_take_its_sandboxes_along_does() {
    let Some(bare) = bare() else { return };
    let mut world = World::new(&["--on-stop", "end"]);
    world.kill();
    let mut children = Vec::new();
    for id in ["one", "two", "three"] {
        children.push(leave_sandbox(&world, &bare, id));
        record(&world, id, |_| {});
    }
    world.start();
    world.terminate();
    for child in &mut children {
        assert!(ends(child), "a sandbox outlives a service that ends them");
    }
    assert_eq!(fs::read_dir(world.path("run/sandboxes")).unwrap().count(), 0);
    assert!(!world.path("s").exists());
}
