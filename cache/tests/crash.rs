//! Killed at any instant, the store is whole: processes that store, tag, bake and collect are
//! killed at random, two of them at once, and after each the store verifies clean.

use std::process::{Child, Command};
use std::time::Duration;

use parbake_cache::{Store, TemplateName};

mod fixture;

const WORKER: &str = "PARBAKE_CRASH_WORKER";
const KILLS: u64 = 220;

fn main() {
    if let Some(root) = std::env::var_os(WORKER) {
        work(root.as_ref());
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("store");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut other = spawn(&root);
    let (mut tagged, mut interrupted) = (0, 0);
    for kill in 0..KILLS {
        let mut worker = spawn(&root);
        std::thread::sleep(Duration::from_micros(2_000 + random.below(40_000)));
        end(&mut worker);
        if kill % 8 == 7 {
            end(&mut other);
            other = spawn(&root);
        }
        let store = Store::open(&root).unwrap();
        let report = store.verify(false).unwrap();
        // The other worker goes on meanwhile, but what is referred to is always complete.
        assert!(report.damaged.is_empty() && report.bad_references.is_empty(), "{report:?}");
        for (name, digest) in store.tags().unwrap() {
            tagged += 1;
            if let Err(error) = store.lease(&[digest]) {
                let gone = !store.tags().unwrap().contains(&(name, digest));
                assert!(gone, "{error}");
            }
        }
        interrupted += u64::from(std::fs::read_dir(root.join("stage")).unwrap().count() > 1);
    }
    end(&mut other);
    // Otherwise this has tested nothing.
    assert!(tagged > KILLS && interrupted > KILLS / 4, "{tagged} tags, {interrupted} interrupted");

    let store = Store::open(&root).unwrap();
    assert!(store.verify(false).unwrap().is_clean());
    store.collect(None).unwrap();
    assert_eq!(std::fs::read_dir(root.join("live")).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(root.join("stage")).unwrap().count(), 0);
    for (name, _) in store.tags().unwrap() {
        store.untag(&name).unwrap();
    }
    store.collect(None).unwrap();
    assert_eq!(store.usage().unwrap().disk_bytes, 0);
    println!("{KILLS} kills: clean; {tagged} tags seen, {interrupted} times with work in progress");
}

fn spawn(root: &std::path::Path) -> Child {
    Command::new(std::env::current_exe().unwrap()).env(WORKER, root).spawn().unwrap()
}

fn end(worker: &mut Child) {
    // A worker that ended by itself has found a fault.
    assert_eq!(worker.try_wait().unwrap(), None, "a worker failed");
    worker.kill().unwrap();
    worker.wait().unwrap();
}

/// Does everything a store is for, until killed.
fn work(root: &std::path::Path) -> ! {
    let mut random = Random(u64::from(std::process::id()).wrapping_mul(0x2545_f491_4f6c_dd1d) | 1);
    loop {
        let store = Store::open(root).unwrap();
        for _ in 0..3 {
            let seed = random.below(6).to_string();
            let name: TemplateName = format!("t{}", random.below(4)).parse().unwrap();
            match random.below(8) {
                0 => drop(store.collect((random.below(2) == 0).then_some(1)).unwrap()),
                1 => drop(store.untag(&name)),
                _ => {
                    let template = fixture::template(&store, seed.as_bytes());
                    fixture::snapshot(&store, template, seed.as_bytes());
                    store.tag(&name, &template).unwrap();
                    let _lease = store.lease(&[template]).unwrap();
                }
            }
        }
    }
}

/// A xorshift generator: reproducible, and no dependency.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
