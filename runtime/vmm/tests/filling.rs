//! A bare guest whose memory and disks fill up while it runs, with the real host side; and what
//! happens when they do not.

mod support;

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use parbake_node::filling::{Fill, Filler, Image};
use parbake_node::pager;
use parbake_protocol::vmm::{Event, Filling, StopReason, VmmConfig, doorbell};
use support::{Monitor, Snapshot, boot, guest, number, restore, spawn};

/// Copies what is asked for from a complete image to one that is empty at first.
struct Late {
    from: File,
    to: File,
    asked: Mutex<BTreeSet<u64>>,
    lost: AtomicBool,
}

impl Fill for Late {
    fn ensure(&self, image: Image, range: Range<u64>) -> Result<(), String> {
        assert_eq!(image, Image::Memory);
        if self.lost.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(200));
            return Err("the registry is gone\u{7}".to_owned());
        }
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
        self.from.read_exact_at(&mut bytes, range.start).unwrap();
        self.to.write_all_at(&bytes, range.start).unwrap();
        self.asked.lock().unwrap().insert(range.start / 4096);
        Ok(())
    }

    /// Every second page comes along with the first.
    fn is_there(&self, _: Image, range: Range<u64>) -> bool {
        range.start / 4096 % 2 == 1 && self.ensure(Image::Memory, range).is_ok()
    }
}

/// A frozen ticker: its configuration, snapshot and nonce.
fn frozen(directory: &Path) -> (VmmConfig, Snapshot, u32) {
    let config = boot(&guest("ticker"), 64);
    let mut monitor = spawn(&config);
    monitor.started();
    assert_eq!(monitor.doorbell(), doorbell::READY);
    let nonce = monitor.doorbell();
    let (snapshot, _) = monitor.freeze(directory, 0);
    monitor.quit();
    (config, snapshot, nonce)
}

fn start(
    directory: &Path,
    of: &VmmConfig,
    snapshot: &Snapshot,
    lost: bool,
) -> (Monitor, Arc<Late>, Filler) {
    let empty = directory.join("filling");
    let to =
        File::options().read(true).write(true).create(true).truncate(true).open(&empty).unwrap();
    let from = File::open(&snapshot.memory).unwrap();
    to.set_len(from.metadata().unwrap().len()).unwrap();
    let late = Arc::new(Late { from, to, asked: Mutex::default(), lost: lost.into() });
    let socket = directory.join("socket");
    let filler = Filler::start(&socket, &empty, Arc::clone(&late) as Arc<dyn Fill>).unwrap();
    let mut config = restore(of, snapshot);
    let parbake_protocol::vmm::Start::Restore { memory, .. } = &mut config.start else { panic!() };
    *memory = empty;
    config.filling = Some(Filling { socket, memory: true });
    (spawn(&config), late, filler)
}

#[test]
fn memory_arrives_as_it_is_touched() {
    needs_kvm!();
    if let Err(error) = pager::available() {
        eprintln!("skipped: this user may not answer page faults: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (config, snapshot, nonce) = frozen(directory.path());
    let (mut monitor, late, filler) = start(directory.path(), &config, &snapshot, false);
    monitor.started();
    assert_eq!(monitor.doorbell(), number::RESTORED);
    assert_eq!(monitor.doorbell(), nonce);
    let ticks = monitor.doorbell() & !number::TICKS;
    let asked = late.asked.lock().unwrap().len();
    assert!((1..1000).contains(&asked), "{asked} of 16384 pages");
    // Frozen again, all of its memory is in the image, touched or not.
    let place = directory.path().join("again");
    std::fs::create_dir(&place).unwrap();
    let (again, _) = monitor.freeze(&place, 0);
    monitor.quit();
    drop(filler);
    assert_eq!(late.asked.lock().unwrap().len(), 16384);
    let mut monitor = spawn(&restore(&config, &again));
    monitor.started();
    assert_eq!(monitor.doorbell(), number::RESTORED);
    assert_eq!(monitor.doorbell(), nonce);
    assert!(monitor.doorbell() & !number::TICKS > ticks);
    monitor.quit();
}

#[test]
fn a_machine_whose_memory_does_not_come_ends_and_says_why() {
    needs_kvm!();
    if let Err(error) = pager::available() {
        eprintln!("skipped: this user may not answer page faults: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (config, snapshot, _) = frozen(directory.path());
    // From some time after the restore on: what is touched while it starts comes.
    let (mut monitor, late, _filler) = start(directory.path(), &config, &snapshot, false);
    monitor.started();
    monitor.doorbell();
    late.lost.store(true, Ordering::Relaxed);
    // The freeze touches all of it.
    let place = directory.path().join("never");
    std::fs::create_dir(&place).unwrap();
    let ended = std::thread::spawn(move || {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(monitor.freeze(&place, 0))))
            .is_err()
            .then(|| monitor.pending.iter().cloned().collect::<Vec<Event>>())
    });
    let pending = ended.join().unwrap().expect("it went on without its memory");
    let said = pending.iter().any(|event| {
        matches!(event, Event::Stopped { reason: StopReason::Crash, detail }
            if detail.contains("its memory did not arrive: the registry is gone"))
    });
    assert!(said, "{pending:?}");
}

#[test]
fn a_machine_whose_filler_is_gone_ends() {
    needs_kvm!();
    if let Err(error) = pager::available() {
        eprintln!("skipped: this user may not answer page faults: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (config, snapshot, _) = frozen(directory.path());
    let (mut monitor, _, filler) = start(directory.path(), &config, &snapshot, false);
    monitor.started();
    monitor.doorbell();
    drop(filler);
    loop {
        match monitor.event() {
            Event::Stopped { reason: StopReason::Crash, detail } => {
                assert!(detail.contains("is gone"), "{detail}");
                break;
            }
            Event::Doorbell { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn only_a_restore_can_begin_early() {
    let mut config = boot(Path::new("/none"), 16);
    config.filling = Some(Filling { socket: "/none".into(), memory: true });
    let mut monitor = spawn(&config);
    match monitor.event() {
        Event::Failed { kind, message } => {
            assert_eq!(kind, "config");
            assert!(message.contains("only a restore"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}
