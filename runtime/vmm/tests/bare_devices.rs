//! A bare guest with block, entropy and socket devices (`tests/guests/devices.c`): driven, frozen,
//! restored in fresh processes and driven again.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

use parbake_protocol::vmm::{Disk, VmmConfig, Vsock, doorbell};
use support::{Monitor, boot, guest, number, restore, spawn};

const DONE: u32 = 0x1002;
const RANDOM: u32 = 0x4000_0000;

/// A machine with all devices whose sockets lie in `directory`, and an echoing host port 1234.
fn config(directory: &Path) -> VmmConfig {
    let base = directory.join("base");
    let mut content = vec![0u8; 64 << 10];
    content[..16].copy_from_slice(b"the base's words");
    std::fs::write(&base, content).expect("disk");
    let mut config = boot(&guest("devices"), 16);
    config.disks =
        vec![Disk { base, overlay: None, scratch: None, read_only: false, write_limit: 0 }];
    config.rng = true;
    config.console = Some(directory.join("console"));
    at(&config, &directory.join("boot"))
}

/// The same machine with its sockets in another, new directory.
fn at(config: &VmmConfig, directory: &Path) -> VmmConfig {
    std::fs::create_dir(directory).expect("directory");
    let socket = directory.join("vsock");
    echo(&directory.join("vsock_1234"));
    VmmConfig { vsock: Some(Vsock { guest_cid: 5, socket }), ..config.clone() }
}

fn echo(path: &Path) {
    let listener = UnixListener::bind(path).expect("listener");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("connection");
            std::thread::spawn(move || {
                let mut buffer = [0; 64];
                while let Ok(length @ 1..) = stream.read(&mut buffer) {
                    let _ = stream.write_all(&buffer[..length]);
                }
            });
        }
    });
}

fn ready(monitor: &mut Monitor) -> u32 {
    monitor.started();
    assert_eq!(monitor.doorbell(), doorbell::READY);
    monitor.doorbell()
}

/// What a restored guest says; the result is what it drew.
fn revived(monitor: &mut Monitor, nonce: u32) -> u32 {
    monitor.started();
    assert_eq!(monitor.doorbell(), number::RESTORED);
    assert_eq!(monitor.doorbell(), nonce);
    let drawn = monitor.doorbell();
    assert_eq!(drawn & 0xc000_0000, RANDOM, "failed at line {}", drawn & 0xfffff);
    assert_eq!(monitor.doorbell(), DONE);
    drawn
}

#[test]
fn devices_work_before_and_after_every_restore() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let config = config(directory.path());
    let base = std::fs::read(&config.disks[0].base).expect("base");
    let mut monitor = spawn(&config);
    let nonce = ready(&mut monitor);
    let console = std::fs::read_to_string(directory.path().join("console")).expect("console");
    assert_eq!(console, "the base's words");

    let mut drawn = std::collections::BTreeSet::new();
    for generation in 1..=3 {
        let place = directory.path().join(format!("snapshot{generation}"));
        std::fs::create_dir(&place).expect("directory");
        let (snapshot, report) = monitor.freeze(&place, 1);
        assert_eq!(report.generation, generation);
        assert!(report.overlay_data_bytes[0] >= 512);
        monitor.quit();

        // Two clones at once: same memory, same disk, other random numbers.
        let mut clones: Vec<_> = (0..2)
            .map(|clone| {
                let home = directory.path().join(format!("home{generation}{clone}"));
                spawn(&at(&restore(&config, &snapshot), &home))
            })
            .collect();
        for clone in &mut clones {
            assert!(drawn.insert(revived(clone, nonce)), "drew the same number");
        }
        monitor = clones.pop().expect("a clone");
        clones.into_iter().for_each(Monitor::quit);
    }
    monitor.quit();
    assert_eq!(std::fs::read(&config.disks[0].base).expect("base"), base, "the base changed");
}

#[test]
fn a_frozen_machine_names_nothing_of_its_host() {
    needs_kvm!();
    let directory = tempfile::tempdir().expect("directory");
    let config = config(directory.path());
    let mut monitor = spawn(&config);
    ready(&mut monitor);
    let (snapshot, _) = monitor.freeze(directory.path(), 1);
    monitor.quit();
    let state = std::fs::read(&snapshot.state).expect("state");
    let needle = directory.path().as_os_str().as_encoded_bytes();
    assert!(!state.windows(needle.len()).any(|window| window == needle));
}
