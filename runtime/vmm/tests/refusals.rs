//! What a monitor refuses: each with an event that says what is wrong, and the process ends.

mod support;

use std::path::PathBuf;

use parbake_protocol::vmm::{Event, Reply, Request, Start, VmmConfig, doorbell};
use parbake_vmm::snapshot::format::{self, Section};
use support::{Monitor, Snapshot, boot, guest, restore, spawn};

/// A frozen ticker.
fn frozen(directory: &std::path::Path) -> (VmmConfig, Snapshot) {
    let config = boot(&guest("ticker"), 16);
    let mut monitor = spawn(&config);
    monitor.started();
    assert_eq!(monitor.doorbell(), doorbell::READY);
    let (snapshot, _) = monitor.freeze(directory, 0);
    monitor.quit();
    (config, snapshot)
}

/// The monitor must refuse with this kind, and a message that contains `what`; then it must end.
fn refused(config: &VmmConfig, kind: &str, what: &str) {
    let mut monitor = spawn(config);
    let (found, message) = monitor.failed();
    assert_eq!(found, kind, "{message}");
    assert!(message.contains(what), "{message:?} does not speak of {what:?}");
    assert_eq!(monitor.wait(), 1);
}

#[test]
fn a_bad_configuration() {
    let good = boot(&PathBuf::from("/dev/null"), 16);
    refused(&VmmConfig { version: 7, ..good.clone() }, "config", "version 7");
    refused(&VmmConfig { vcpus: 0, ..good.clone() }, "config", "0 vCPUs");
    refused(&VmmConfig { memory_mib: 0, ..good.clone() }, "config", "0 MiB");
    refused(&good, "kernel", "vmlinux");
    let nowhere = boot(&PathBuf::from("/nowhere/vmlinux"), 16);
    refused(&nowhere, "kernel", "/nowhere/vmlinux");
}

#[test]
fn a_kernel_that_does_not_fit() {
    needs_kvm!();
    let mut config = boot(&guest("ticker"), 16);
    let Start::Boot { cmdline, .. } = &mut config.start else { unreachable!() };
    *cmdline = "x".repeat(4096);
    refused(&config, "kernel", "4096 bytes");
    let Start::Boot { cmdline, .. } = &mut config.start else { unreachable!() };
    cmdline.clear();
    let large = tempfile::NamedTempFile::new().expect("file");
    large.as_file().set_len(64 << 20).expect("length");
    let Start::Boot { initramfs, .. } = &mut config.start else { unreachable!() };
    *initramfs = Some(large.path().into());
    refused(&config, "kernel", "more memory");
}

#[test]
fn something_that_is_no_configuration() {
    let mut monitor = Monitor::spawn_line(&support::binary(), b"{\"version\":1}\n");
    let (kind, message) = monitor.failed();
    assert_eq!(kind, "config");
    assert!(message.contains("vcpus"), "{message}");
    assert_eq!(monitor.wait(), 1);
}

#[test]
fn a_state_file_that_is_missing_cut_flipped_or_newer() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (config, snapshot) = frozen(directory.path());
    let good = std::fs::read(&snapshot.state).expect("state");
    let try_with = |bytes: &[u8], what: &str| {
        let damaged = Snapshot { state: directory.path().join("damaged"), ..snapshot.clone() };
        std::fs::write(&damaged.state, bytes).expect("write");
        refused(&restore(&config, &damaged), "state", what);
    };
    try_with(&[], "not a parbake state");
    try_with(b"PBKSTATE", "cut off");
    try_with(&good[..good.len() / 2], "cut off");
    try_with(&good[..good.len() - 1], "cut off");
    let mut longer = good.clone();
    longer.push(0);
    try_with(&longer, "overwritten");
    for at in [36, 40, good.len() / 3, good.len() - 1] {
        let mut flipped = good.clone();
        flipped[at] ^= 0x10;
        try_with(&flipped, "checksum");
    }
    let mut newer = good;
    newer[8] = 2;
    try_with(&newer, "version 2");
    let missing = Snapshot { state: directory.path().join("gone"), ..snapshot.clone() };
    refused(&restore(&config, &missing), "state", "gone");
    // And the good one is good.
    let mut monitor = spawn(&restore(&config, &snapshot));
    monitor.started();
    monitor.quit();
}

#[test]
fn a_state_with_a_valid_checksum_and_foreign_content() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (config, snapshot) = frozen(directory.path());
    let sections = format::decode(&std::fs::read(&snapshot.state).expect("state")).expect("good");
    let try_with = |sections: &[Section], what: &str| {
        let damaged = Snapshot { state: directory.path().join("foreign"), ..snapshot.clone() };
        std::fs::write(&damaged.state, format::encode(sections)).expect("write");
        refused(&restore(&config, &damaged), "state", what);
    };
    let with = |change: &dyn Fn(&mut Vec<Section>)| {
        let mut changed = sections.clone();
        change(&mut changed);
        changed
    };
    let unknown = |mandatory| Section {
        kind: "hologram".into(),
        version: 3,
        mandatory,
        payload: vec![1, 2, 3],
    };
    try_with(&with(&|s| s.push(unknown(true))), "hologram version 3");
    try_with(&with(&|s| s[0].version = 9), "shape version 9");
    try_with(&with(&|s| s.retain(|section| section.kind != "clock")), "lacks its clock");
    try_with(&with(&|s| s.push(sections[0].clone())), "there twice");
    try_with(&with(&|s| s.iter_mut().for_each(|s| s.payload.truncate(3))), "impossible");
    try_with(&with(&|s| s.iter_mut().for_each(|s| s.payload.push(0))), "left over");
    // An unknown section that is not mandatory is skipped.
    let skipped = Snapshot { state: directory.path().join("skipped"), ..snapshot.clone() };
    std::fs::write(&skipped.state, format::encode(&with(&|s| s.push(unknown(false)))))
        .expect("write");
    let mut monitor = spawn(&restore(&config, &skipped));
    monitor.started();
    monitor.quit();
}

#[test]
fn a_memory_image_of_the_wrong_length() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (config, snapshot) = frozen(directory.path());
    for (length, what) in [(16 << 20 >> 1, "8388608"), (0, "0 bytes"), (17 << 20, "17825792")] {
        let short = Snapshot { memory: directory.path().join("short"), ..snapshot.clone() };
        std::fs::copy(&snapshot.memory, &short.memory).expect("copy");
        let file = std::fs::File::options().write(true).open(&short.memory).expect("open");
        file.set_len(length).expect("length");
        refused(&restore(&config, &short), "memory", what);
    }
    let missing = Snapshot { memory: directory.path().join("gone"), ..snapshot };
    refused(&restore(&config, &missing), "memory", "gone");
}

#[test]
fn another_machine_shape() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (config, snapshot) = frozen(directory.path());
    let restored = restore(&config, &snapshot);
    refused(&VmmConfig { vcpus: 2, ..restored.clone() }, "mismatch", "vCPU count");
    refused(&VmmConfig { memory_mib: 32, ..restored.clone() }, "mismatch", "memory");
    refused(&VmmConfig { rng: true, ..restored }, "mismatch", "devices");
}

#[test]
fn a_disk_that_cannot_be_opened() {
    needs_kvm!();
    let mut config = boot(&guest("ticker"), 16);
    config.disks.push(parbake_protocol::vmm::Disk {
        base: "/nowhere/disk".into(),
        overlay: None,
        scratch: None,
        read_only: false,
        write_limit: 0,
    });
    refused(&config, "disk", "/nowhere/disk");
}

#[test]
fn a_line_that_is_no_request_is_answered_and_the_guest_lives_on() {
    needs_kvm!();
    let mut monitor = spawn(&boot(&guest("ticker"), 16));
    monitor.started();
    for line in [&b"nonsense\n"[..], b"{\"op\":\"dance\"}\n", b"\xff\xfe\n", b"\n"] {
        assert!(matches!(monitor.raw_request(line), Reply::Failed { .. }));
    }
    assert!(matches!(monitor.request(&Request::Status), Reply::Status(s) if s.state == "running"));
    monitor.quit();
}

#[test]
fn a_request_line_without_end_ends_the_monitor() {
    needs_kvm!();
    let mut monitor = spawn(&boot(&guest("ticker"), 16));
    monitor.started();
    monitor.raw(&vec![b'x'; parbake_protocol::vmm::MAX_LINE + 1]);
    loop {
        match monitor.news() {
            Event::Failed { message, .. } => {
                assert!(message.contains("bytes"), "{message}");
                break;
            }
            Event::Doorbell { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(monitor.wait(), 1);
}

/// Random damage behind a valid checksum: the monitor refuses it, or runs a guest that may crash;
/// it never dies of it itself.
#[test]
fn a_mutated_state_never_kills_the_monitor() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let (config, snapshot) = frozen(directory.path());
    let sections = format::decode(&std::fs::read(&snapshot.state).expect("state")).expect("good");
    let mutated = Snapshot { state: directory.path().join("mutated"), ..snapshot };
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random >> 33).expect("31 bits") % below
    };
    let (mut refused, mut started) = (0, 0);
    for _ in 0..60 {
        let mut sections = sections.clone();
        for _ in 0..=next(3) {
            let section = next(sections.len());
            let payload = &mut sections[section].payload;
            let at = next(payload.len().max(1));
            match (next(4), payload.get_mut(at)) {
                (0, _) => payload.truncate(at),
                (1, _) => payload.insert(at.min(payload.len()), 0xff),
                (2, Some(byte)) => *byte = 0xff,
                (_, Some(byte)) => *byte ^= 1 << next(8),
                _ => {}
            }
        }
        std::fs::write(&mutated.state, format::encode(&sections)).expect("write");
        let mut monitor = spawn(&restore(&config, &mutated));
        match monitor.event() {
            Event::Failed { message, .. } => {
                assert!(!message.is_empty());
                assert_eq!(monitor.wait(), 1);
                refused += 1;
            }
            Event::Started { .. } => {
                // The guest may have crashed already, which ends the monitor properly, too.
                monitor.raw(b"{\"op\":\"quit\"}\n");
                assert_eq!(monitor.wait(), 0);
                started += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(refused > 5 && started > 5, "{refused} refused, {started} started");
}
