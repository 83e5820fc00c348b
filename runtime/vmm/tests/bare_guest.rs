//! A bare guest on `/dev/kvm`, through the real binary: cold boot, freeze, restore elsewhere.
//!
//! The guest (`tests/guests/ticker.S`) keeps a nonce and a tick counter in memory only, so that a
//! reboot cannot pass for a restore.

mod support;

use parbake_protocol::vmm::{Event, Net, Reply, Request, Start, StopReason, Tap, doorbell};
use support::{Monitor, boot, guest, number, restore, spawn};

/// Boots the ticker and returns it with its nonce.
fn ticker(memory_mib: u32) -> (Monitor, parbake_protocol::vmm::VmmConfig, u32) {
    let config = boot(&guest("ticker"), memory_mib);
    let mut monitor = spawn(&config);
    monitor.started();
    assert_eq!(monitor.doorbell(), doorbell::READY);
    let nonce = monitor.doorbell();
    assert!(nonce & number::NONCE != 0);
    (monitor, config, nonce)
}

#[test]
fn a_guest_boots_and_quit_ends_it() {
    needs_kvm!();
    let (monitor, _, _) = ticker(16);
    monitor.quit();
}

#[test]
fn the_end_of_the_channel_ends_the_monitor() {
    needs_kvm!();
    let (monitor, _, _) = ticker(16);
    assert_eq!(monitor.wait(), 0);
}

#[test]
fn the_console_file_holds_what_the_guest_printed() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let console = directory.path().join("console");
    let mut config = boot(&guest("ticker"), 16);
    config.console = Some(console.clone());
    let mut monitor = spawn(&config);
    monitor.started();
    monitor.doorbell();
    let nonce = monitor.doorbell();
    monitor.quit();
    assert_eq!(std::fs::read_to_string(console).expect("console"), format!("up {nonce:08x}\n"));
}

#[test]
fn a_paused_guest_stands_still_until_resumed() {
    needs_kvm!();
    let (mut monitor, _, _) = ticker(16);
    assert_eq!(monitor.request(&Request::Pause), Reply::Done);
    monitor.pending.clear();
    std::thread::sleep(std::time::Duration::from_millis(400));
    assert!(matches!(monitor.request(&Request::Status), Reply::Status(s) if s.state == "paused"));
    assert!(monitor.pending.is_empty(), "it beat while paused: {:?}", monitor.pending);
    assert_eq!(monitor.request(&Request::Resume), Reply::Done);
    let Event::Doorbell { value } = monitor.event() else { panic!("no beat") };
    assert_eq!(value >> 29, 1);
    monitor.quit();
}

#[test]
fn a_lifetime_ends_the_machine_and_says_so() {
    needs_kvm!();
    let mut config = boot(&guest("ticker"), 16);
    config.lifetime_ms = Some(700);
    let mut monitor = spawn(&config);
    monitor.started();
    // Standing still does not prolong it.
    assert_eq!(monitor.request(&Request::Pause), Reply::Done);
    let reason = loop {
        if let Event::Stopped { reason, .. } = monitor.event() {
            break reason;
        }
    };
    assert_eq!(reason, StopReason::Expired);
    let lived = monitor.spawned.elapsed().as_millis();
    assert!((600..5000).contains(&lived), "{lived} ms");
    assert_eq!(monitor.wait(), 0);
}

#[test]
fn a_network_device_that_leads_nowhere_fits_every_snapshot() {
    needs_kvm!();
    let nowhere = Some(Net { tap: None, mac: [2, 0, 0, 0, 0, 1] });
    let directory = tempfile::tempdir().expect("directory");
    // Frozen without one, as before there was any; and with one.
    for (index, net) in [None, nowhere.clone()].into_iter().enumerate() {
        let place = directory.path().join(index.to_string());
        std::fs::create_dir(&place).expect("directory");
        let mut config = boot(&guest("ticker"), 16);
        config.net = net;
        let mut monitor = spawn(&config);
        monitor.started();
        assert_eq!(monitor.doorbell(), doorbell::READY);
        monitor.doorbell();
        let (snapshot, _) = monitor.freeze(&place, 0);
        monitor.quit();
        let mut restored = restore(&config, &snapshot);
        restored.net = nowhere.clone();
        let mut monitor = spawn(&restored);
        monitor.started();
        let Event::Doorbell { .. } = monitor.event() else { panic!("no beat") };
        monitor.quit();
    }
    // A network is another matter.
    let place = directory.path().join("0");
    let snapshot = support::Snapshot {
        state: place.join("state"),
        memory: place.join("memory"),
        disks: Vec::new(),
    };
    let mut restored = restore(&boot(&guest("ticker"), 16), &snapshot);
    restored.net = Some(Net { tap: Some(Tap::Passed), mac: [2, 0, 0, 0, 0, 1] });
    let (kind, message) = spawn(&restored).failed();
    assert_eq!(kind, "mismatch", "{message}");
    assert!(message.contains("bake"), "{message}");
}

#[test]
fn three_generations_keep_nonce_and_ticks() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (mut monitor, config, nonce) = ticker(128);
    let mut ticks = 0;
    for generation in 1..=3 {
        let place = directory.path().join(generation.to_string());
        std::fs::create_dir(&place).expect("directory");
        let (snapshot, report) = monitor.freeze(&place, 0);
        assert_eq!(report.generation, generation);
        assert!(report.memory_data_bytes > 0 && report.memory_data_bytes < 1 << 20);
        monitor.quit();

        monitor = spawn(&restore(&config, &snapshot));
        monitor.started();
        assert_eq!(monitor.doorbell(), number::RESTORED);
        assert_eq!(monitor.doorbell(), nonce);
        let now = monitor.doorbell() & !number::TICKS;
        assert!(now > ticks, "{now} ticks after {ticks}");
        ticks = now;
    }
    monitor.quit();
}

#[test]
fn a_frozen_guest_runs_on_after_its_snapshot() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (mut monitor, config, nonce) = ticker(16);
    let (snapshot, _) = monitor.freeze(directory.path(), 0);
    monitor.pending.clear();
    assert_eq!(monitor.request(&Request::Resume), Reply::Done);
    assert!(matches!(monitor.event(), Event::Doorbell { value } if value >> 29 == 1));
    // And two clones of it run beside it.
    let mut clones: Vec<_> = (0..2).map(|_| spawn(&restore(&config, &snapshot))).collect();
    for clone in &mut clones {
        clone.started();
        assert_eq!(clone.doorbell(), number::RESTORED);
        assert_eq!(clone.doorbell(), nonce);
    }
    clones.into_iter().for_each(Monitor::quit);
    monitor.quit();
}

#[test]
fn forks_of_forks_share_the_first_image() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let place = |name: &str| {
        let place = directory.path().join(name);
        std::fs::create_dir(&place).expect("directory");
        place
    };
    let (mut monitor, config, nonce) = ticker(128);
    // Of a machine that was booted, there is nothing to differ from.
    let (whole, report) = monitor.branch(&place("booted"), 0);
    assert!(!report.difference);
    monitor.quit();
    let mut monitor = spawn(&restore(&config, &whole));
    monitor.started();
    let mut ticks = 0;
    for generation in 2..=5 {
        assert_eq!(monitor.doorbell(), number::RESTORED);
        assert_eq!(monitor.doorbell(), nonce);
        let now = monitor.doorbell() & !number::TICKS;
        assert!(now > ticks, "{now} ticks after {ticks}");
        ticks = now;
        let (branch, report) = monitor.branch(&place(&generation.to_string()), 0);
        assert!(report.difference);
        assert_eq!(report.generation, generation);
        assert!((1..256 << 10).contains(&report.memory_data_bytes), "{report:?}");
        // The parent goes on, and its copy runs beside it.
        monitor.pending.clear();
        assert_eq!(monitor.request(&Request::Resume), Reply::Done);
        assert!(matches!(monitor.event(), Event::Doorbell { value } if value >> 29 == 1));
        let mut copy = restore(&config, &branch);
        let Start::Restore { memory, difference, .. } = &mut copy.start else { unreachable!() };
        // Without the image it is of no use, and the image alone is not it.
        let (kind, message) = spawn(&restore(&config, &branch)).failed();
        assert_eq!(kind, "mismatch", "{message}");
        *difference = Some(std::mem::replace(memory, whole.memory.clone()));
        let old = std::mem::replace(&mut monitor, spawn(&copy));
        monitor.started();
        old.quit();
    }
    monitor.quit();
}

#[test]
fn a_restored_guest_can_wait_for_resume() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (mut monitor, config, _) = ticker(16);
    let (snapshot, _) = monitor.freeze(directory.path(), 0);
    monitor.quit();
    let mut config = restore(&config, &snapshot);
    let Start::Restore { paused, .. } = &mut config.start else { unreachable!() };
    *paused = true;
    let mut monitor = spawn(&config);
    monitor.started();
    assert!(matches!(monitor.request(&Request::Status), Reply::Status(s) if s.state == "paused"));
    assert!(monitor.pending.is_empty());
    assert_eq!(monitor.request(&Request::Resume), Reply::Done);
    assert_eq!(monitor.doorbell(), number::RESTORED);
    monitor.quit();
}

#[test]
fn a_snapshot_needs_a_pause_and_the_right_descriptors() {
    needs_kvm!();
    let (mut monitor, _, _) = ticker(16);
    let file = tempfile::tempfile().expect("file");
    use std::os::fd::AsFd;
    let ask = |files| {
        Request::Snapshot(parbake_protocol::vmm::SnapshotFiles { files, difference: false })
    };
    let both = [file.as_fd(), file.as_fd()];
    let refused = |reply| matches!(reply, Reply::Failed { .. });
    assert!(refused(monitor.request_with(&ask(2), &both)), "running");
    assert_eq!(monitor.request(&Request::Pause), Reply::Done);
    assert!(refused(monitor.request(&ask(2))), "no descriptors");
    assert!(refused(monitor.request_with(&ask(1), &both[..1])), "too few");
    monitor.quit();
}

#[test]
fn a_triple_fault_is_reported_as_a_crash() {
    needs_kvm!();
    let mut monitor = spawn(&boot(&guest("fault"), 16));
    monitor.started();
    match monitor.news() {
        Event::Stopped { reason: StopReason::Crash, detail } => assert!(!detail.is_empty()),
        other => panic!("{other:?}"),
    }
    assert_eq!(monitor.wait(), 0);
}
