//! A real lab: started, used from all sides, ended without a trace. Skipped, with the reason,
//! where the emulator, the agent or a kernel is not to be had.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use parbake_host::{Lab, LabConfig, LabError, LabStatus};
use parbake_kernels::KernelSource;
use parbake_protocol::agent::{Client, ExecRequest, Output};

/// The static agent: named by `PARBAKE_TEST_AGENT`, or one that was built in this workspace.
fn agent() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("PARBAKE_TEST_AGENT") {
        return Some(path.into());
    }
    let target =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/x86_64-unknown-linux-gnu");
    let profiles = ["small", "release", "debug"];
    profiles
        .iter()
        .map(|profile| target.join(profile).join("parbake-agent"))
        .find(|path| path.exists())
}

struct Place {
    folder: tempfile::TempDir,
    config: LabConfig,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = Lab::down(&self.config.state_dir);
    }
}

fn place(idle: Duration) -> Option<Place> {
    let Some(agent) = agent() else {
        eprintln!(
            "skipped: no static agent (RUSTFLAGS='-C target-feature=+crt-static' cargo build \
             -p parbake-agent --profile small --target x86_64-unknown-linux-gnu)"
        );
        return None;
    };
    let folder = tempfile::Builder::new().prefix("parbake-lab-").tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let store = root.join("the, store");
    fs::create_dir(&store).unwrap();
    let mut config = LabConfig::new(store, agent);
    config.memory_mib = 1024;
    config.idle = idle;
    config.state_dir = root.join("state");
    if let Some(deb) = std::env::var_os("PARBAKE_TEST_KERNEL_DEB") {
        config.kernel = KernelSource::Deb(deb.into());
    }
    Some(Place { folder, config })
}

impl Place {
    fn up(&self) -> Option<Lab> {
        match Lab::ensure_up(&self.config, &mut |event| eprintln!("{event}")) {
            Ok(lab) => Some(lab),
            Err(error @ (LabError::MissingTool { .. } | LabError::Kernel(_))) => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn pid(&self) -> i32 {
        match Lab::status(&self.config.state_dir).unwrap() {
            LabStatus::Up { pid, .. } => pid,
            other => panic!("{other:?}"),
        }
    }

    /// Processes that have this lab's state directory in their command line.
    fn processes(&self) -> usize {
        let needle = self.config.state_dir.as_os_str().as_encoded_bytes();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        lines.filter(|line| line.windows(needle.len()).any(|window| window == needle)).count()
    }
}

fn run(lab: &Lab, argv: &[&str]) -> Output {
    let session = lab.connect().unwrap().exec(ExecRequest::new(argv.iter().copied())).unwrap();
    session.wait_with_output(1 << 20).unwrap()
}

fn sh(lab: &Lab, script: &str) -> String {
    let output = run(lab, &["/bin/sh", "-c", script]);
    assert_eq!(
        output.exit.shell_code(),
        0,
        "{script}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_lab_is_an_exec_away_and_leaves_nothing_behind() {
    let Some(place) = place(Duration::from_secs(600)) else { return };
    // Two at once get the same one.
    let labs: Vec<Option<Lab>> = std::thread::scope(|scope| {
        let starters = [(); 2].map(|()| scope.spawn(|| place.up()));
        starters.into_iter().map(|starter| starter.join().unwrap()).collect()
    });
    let Some(lab) = labs.into_iter().flatten().next() else { return };
    let pid = place.pid();
    assert_eq!(place.processes(), 3, "an emulator and two file servers");
    assert!(place.up().is_some());
    assert_eq!(place.pid(), pid, "kept warm");

    assert!(sh(&lab, "uname -r").ends_with("-amd64"));
    assert_eq!(run(&lab, &["/bin/sh", "-c", "exit 7"]).exit.shell_code(), 7);
    assert_eq!(run(&lab, &["/bin/sh", "-c", "kill -9 $$"]).exit.shell_code(), 137);
    assert!(
        lab.connect()
            .unwrap()
            .exec(ExecRequest::new(["no-such-program"]))
            .is_ok_and(|session| { session.wait_with_output(1 << 20).is_err() })
    );
    assert_eq!(sh(&lab, "test -w /dev/kvm && grep -o -m1 -w svm /proc/cpuinfo | head -1"), "svm");

    let mut request = ExecRequest::new(["/bin/cat"]);
    request.stdin = true;
    let session = lab.connect().unwrap().exec(request).unwrap();
    session.input.write_stdin(b"through and back").unwrap();
    session.input.close_stdin().unwrap();
    assert_eq!(session.wait_with_output(1 << 20).unwrap().stdout, b"through and back");

    several_commands_run_at_once(&lab);
    the_store_is_shared_and_nothing_else(&place, &lab);

    let stranger = format!("{:064}", 0);
    let port = match Lab::status(&place.config.state_dir).unwrap() {
        LabStatus::Up { port, .. } => port,
        other => panic!("{other:?}"),
    };
    let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert!(Client::with_token(stream, stranger.as_bytes()).ping().is_err(), "a wrong token");

    assert!(Lab::down(&place.config.state_dir).unwrap());
    assert_eq!(place.processes(), 0);
    assert!(!place.config.state_dir.exists());
    assert_eq!(Lab::status(&place.config.state_dir).unwrap(), LabStatus::Down);
    assert!(!Lab::down(&place.config.state_dir).unwrap());
    let left: Vec<_> = fs::read_dir(place.folder.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "only the store: {left:?}");
}

fn several_commands_run_at_once(lab: &Lab) {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..4)
            .map(|number| scope.spawn(move || sh(lab, &format!("sleep 3; echo {number}"))))
            .collect();
        for (number, run) in runs.into_iter().enumerate() {
            assert_eq!(run.join().unwrap(), number.to_string());
        }
    });
    let took = begin.elapsed();
    assert!(took < Duration::from_secs(11), "four sleeps of 3 s took {took:?}");
}

fn the_store_is_shared_and_nothing_else(place: &Place, lab: &Lab) {
    let store = place.config.store.to_str().unwrap();
    let file = place.config.store.join("name");
    // What the lab writes is there for the machine.
    sh(lab, &format!("echo from the lab > '{store}/name'"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "from the lab\n");
    // What the machine renames into place or appends is there for the lab at once, also when the
    // lab has just read what was there before.
    for round in 0..3 {
        let fresh = place.config.store.join("fresh");
        fs::write(&fresh, format!("round {round}\n")).unwrap();
        fs::rename(&fresh, &file).unwrap();
        assert_eq!(sh(lab, &format!("cat '{store}/name'")), format!("round {round}"));
    }
    let mut options = fs::File::options();
    let mut appended = options.append(true).open(&file).unwrap();
    std::io::Write::write_all(&mut appended, b"more\n").unwrap();
    assert_eq!(sh(lab, &format!("cat '{store}/name'")), "round 2\nmore");
    fs::remove_file(&file).unwrap();
    assert_eq!(sh(lab, &format!("ls '{store}'")), "");
    // Locks reach across, both ways.
    fs::write(&file, "").unwrap();
    let locked = fs::File::open(&file).unwrap();
    locked.lock().unwrap();
    let attempt = format!("flock -n '{store}/name' true");
    assert_eq!(run(lab, &["/bin/sh", "-c", &attempt]).exit.shell_code(), 1, "held by the machine");
    locked.unlock().unwrap();
    assert_eq!(run(lab, &["/bin/sh", "-c", &attempt]).exit.shell_code(), 0);

    // Everything else is copy-on-write.
    let outside = place.folder.path().join("outside");
    let outside = outside.to_str().unwrap();
    sh(lab, &format!("echo x > '{outside}'; test -e '{outside}'"));
    assert!(!Path::new(outside).exists());
    // Below `/.host` the machine's files are as they are now, even when replaced.
    let program = place.folder.path().canonicalize().unwrap().join("program");
    for round in 0..2 {
        let fresh = place.folder.path().join("fresh");
        fs::write(&fresh, format!("#!/bin/sh\necho build {round}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&fresh, mode).unwrap();
        fs::rename(&fresh, &program).unwrap();
        // A second is how long the share of the root may be behind.
        std::thread::sleep(Duration::from_millis(1500));
        let path = lab.host_path(&program);
        assert_eq!(sh(lab, path.to_str().unwrap()), format!("build {round}"));
    }
    fs::remove_file(&program).unwrap();
}

#[test]
fn a_lab_ends_by_itself_and_survives_crashes_of_its_parts() {
    let Some(place) = place(Duration::from_secs(4)) else { return };
    let Some(lab) = place.up() else { return };
    // A program that runs on without a client keeps it up.
    let mut request = ExecRequest::new(["/bin/sleep", "12"]);
    request.detach = true;
    drop(lab.connect().unwrap().exec(request).unwrap());
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(place.processes(), 3, "something runs in it");
    let deadline = Instant::now() + Duration::from_secs(60);
    while place.processes() > 0 {
        assert!(Instant::now() < deadline, "idle, but still up");
        std::thread::sleep(Duration::from_millis(100));
    }

    let Some(lab) = place.up() else { return };
    let pid = place.pid();
    let killed = Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(killed.success());
    let deadline = Instant::now() + Duration::from_secs(10);
    while place.processes() > 0 {
        assert!(Instant::now() < deadline, "the file servers outlive their emulator");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(lab.connect().is_err());
    assert_eq!(Lab::status(&place.config.state_dir).unwrap(), LabStatus::Down);

    // Leftovers of the crash do not keep a new one from starting.
    let Some(lab) = place.up() else { return };
    assert_eq!(sh(&lab, "echo again"), "again");
    // A lab whose record is lost cannot be used, but is found and ended.
    fs::remove_file(place.config.state_dir.join("lab.json")).unwrap();
    assert!(matches!(
        Lab::status(&place.config.state_dir).unwrap(),
        LabStatus::Unresponsive { .. }
    ));
    assert!(Lab::down(&place.config.state_dir).unwrap());
    assert_eq!(place.processes(), 0);
}

#[test]
fn a_store_that_cannot_be_shared_is_refused_before_anything_starts() {
    let Some(mut place) = place(Duration::from_secs(60)) else { return };
    let link = place.folder.path().join("link");
    std::os::unix::fs::symlink(&place.config.store, &link).unwrap();
    for store in [link, "/proc".into(), "/".into(), place.folder.path().join("missing")] {
        place.config.store = store;
        match Lab::ensure_up(&place.config, &mut |_| {}) {
            Err(LabError::MissingTool { .. }) => return eprintln!("skipped: no emulator"),
            Err(LabError::Store { .. } | LabError::State { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(place.processes(), 0);
    }
    place.config.state_dir = "/tmp/a,b".into();
    let error = Lab::ensure_up(&place.config, &mut |_| {}).unwrap_err();
    assert!(matches!(error, LabError::StatePath { .. }), "{error}");
    let mut text = String::new();
    assert!(
        fs::File::open("/tmp/a,b").and_then(|mut file| file.read_to_string(&mut text)).is_err()
    );
}
