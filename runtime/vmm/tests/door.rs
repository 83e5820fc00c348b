//! A monitor that outlives its control channel, and the host that comes back to it.

mod support;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use parbake_protocol::vmm::{Reply, Request, VmmConfig};
use support::{Monitor, boot, guest, restore, spawn};

/// Where the stranger knocks.
const DOOR: &str = "PARBAKE_TEST_DOOR";

fn config(directory: &tempfile::TempDir) -> VmmConfig {
    let control = Some(directory.path().join("control"));
    VmmConfig { control, ..boot(&guest("ticker"), 16) }
}

fn status(monitor: &mut Monitor) -> String {
    match monitor.request(&Request::Status) {
        Reply::Status(status) => status.state,
        other => panic!("no status: {other:?}"),
    }
}

fn ends(mut child: Child) -> i32 {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("wait") {
            return status.code().unwrap_or(-1);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    panic!("the monitor does not end");
}

#[test]
fn the_host_comes_back_as_often_as_it_likes() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let config = config(&directory);
    let control = config.control.clone().expect("a door");
    let mut monitor = spawn(&config);
    monitor.started();
    monitor.doorbell();
    for _ in 0..20 {
        let child = monitor.abandon();
        monitor = Monitor::come_back(child, &control);
        assert_eq!(status(&mut monitor), "running");
        // The guest never stopped: its heartbeat arrives on the new channel.
        monitor.event();
    }
    assert_eq!(monitor.request(&Request::Pause), Reply::Done);
    let mut monitor = Monitor::come_back(monitor.abandon(), &control);
    assert_eq!(status(&mut monitor), "paused");
    // Descriptors come through the new channel, too, and what they hold restores.
    let (snapshot, _) = monitor.snapshot(directory.path(), 0);
    assert_eq!(monitor.request(&Request::Resume), Reply::Done);
    monitor.quit();
    let mut again = spawn(&VmmConfig { control: None, ..restore(&config, &snapshot) });
    again.started();
    again.doorbell();
    again.quit();
}

#[test]
fn the_host_is_outside_of_the_monitors_process_namespace() {
    needs_kvm!();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: a process namespace needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let config = config(&directory);
    let control = config.control.clone().expect("a door");
    let mut monitor = Monitor::spawn_in_process_namespace(&support::binary(), &config);
    monitor.started();
    let mut monitor = Monitor::come_back(monitor.abandon(), &control);
    assert_eq!(status(&mut monitor), "running");
    monitor.quit();
}

#[test]
fn one_host_at_a_time() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let config = config(&directory);
    let control = config.control.clone().expect("a door");
    let mut first = spawn(&config);
    first.started();
    let second = UnixStream::connect(&control).expect("connect");
    second.set_read_timeout(Some(Duration::from_millis(300))).expect("timeout");
    assert_eq!(status(&mut first), "running");
    // Nobody is let in while the first is there: not even its heartbeats are to be heard.
    let waited = (&second).read(&mut [0]).expect_err("the second host is let in");
    assert_eq!(waited.kind(), std::io::ErrorKind::WouldBlock);
    let child = first.abandon();
    // Now the one that waited has the channel, and nonsense from it does not end the guest.
    second.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
    (&second).read_exact(&mut [0]).expect("a heartbeat");
    std::io::Write::write_all(&mut &second, b"nonsense\n").expect("write");
    drop(second);
    let mut third = Monitor::come_back(child, &control);
    assert_eq!(status(&mut third), "running");
    third.quit();
}

#[test]
fn without_a_door_the_end_of_the_channel_is_the_end() {
    needs_kvm!();
    let mut monitor = spawn(&boot(&guest("ticker"), 16));
    monitor.started();
    assert_eq!(ends(monitor.abandon()), 0);
}

#[test]
fn strangers_are_turned_away() {
    needs_kvm!();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: becoming another user needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let config = config(&directory);
    let control = config.control.clone().expect("a door");
    let mut monitor = spawn(&config);
    monitor.started();
    let child = monitor.abandon();
    // Even where the file system would let them.
    let open = |path: PathBuf| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("mode");
    };
    open(directory.path().to_owned());
    open(control.clone());
    // This test program is not where others may read it.
    let program = directory.path().join("stranger");
    std::fs::copy(std::env::current_exe().expect("program"), &program).expect("copy");
    let stranger = Command::new(program)
        .args(["--exact", "stranger", "--ignored", "--nocapture"])
        .env(DOOR, &control)
        .uid(65534)
        .gid(65534)
        .output()
        .expect("stranger");
    assert!(stranger.status.success(), "{}", String::from_utf8_lossy(&stranger.stdout));
    assert!(String::from_utf8_lossy(&stranger.stdout).contains("turned away"));
    let mut monitor = Monitor::come_back(child, &control);
    assert_eq!(status(&mut monitor), "running");
    monitor.quit();
}

/// Runs as another user, see [`strangers_are_turned_away`].
#[test]
#[ignore = "run by strangers_are_turned_away"]
fn stranger() {
    let Some(door) = std::env::var_os(DOOR) else { return };
    let mut socket = UnixStream::connect(door).expect("connect");
    socket.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
    let mut heard = Vec::new();
    // Closed at once, and not a byte of the guest's events.
    match socket.read_to_end(&mut heard) {
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(e) => panic!("{e}"),
    }
    assert_eq!(heard, b"");
    println!("turned away");
}
