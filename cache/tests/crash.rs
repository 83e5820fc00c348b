//! Killed at any instant, the store is whole: processes that store, tag, bake, collect, push and
//! pull are killed at random, two of them at once, and after each the store verifies clean.

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use parbake_cache::registry::RegistryOptions;
use parbake_cache::transport::PushOptions;
use parbake_cache::variant::Choice;
use parbake_cache::{Digest, Store, TemplateName};

mod fixture;
#[allow(dead_code, reason = "not every test needs all of it")]
#[path = "fixture/server.rs"]
mod server;

const WORKER: &str = "PARBAKE_CRASH_WORKER";
const REGISTRY: &str = "PARBAKE_CRASH_REGISTRY";
const KILLS: u64 = 220;

fn main() {
    if let Some(root) = std::env::var_os(WORKER) {
        match std::env::var(REGISTRY) {
            Ok(host) => travel(root.as_ref(), &host),
            Err(_) => work(root.as_ref()),
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("store");
    kill_often(&root, None, 40_000);
    let store = Store::open(&root).unwrap();
    for (name, _) in store.tags().unwrap() {
        store.untag(&name).unwrap();
    }
    store.collect(None).unwrap();
    assert_eq!(store.usage().unwrap().disk_bytes, 0);

    let Some(registry) = server::DockerRegistry::start(directory.path(), false) else { return };
    let source = Store::open(&directory.path().join("source")).unwrap();
    let names = [0, 1].map(|number| remote(&registry.host, number));
    let templates = [0, 1].map(|number| publish(&source, &names[number], number as u64));
    let root = directory.path().join("node");
    kill_often(&root, Some(&registry.host), 120_000);
    // The next run completes, here and for everybody else.
    for node in [root, directory.path().join("fresh")] {
        let store = Store::open(&node).unwrap();
        for (name, template) in names.iter().zip(templates) {
            let report =
                store.pull(name, None, &RegistryOptions::default(), &Choice::All, &|_| ()).unwrap();
            assert_eq!(report.template, template);
        }
        assert!(store.verify(false).unwrap().is_clean());
    }
}

/// Kills workers on the store at `root` and looks at it after each.
fn kill_often(root: &Path, registry: Option<&str>, longest_us: u64) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut other = spawn(root, registry);
    let (mut tagged, mut interrupted) = (0, 0);
    for kill in 0..KILLS {
        let mut worker = spawn(root, registry);
        std::thread::sleep(Duration::from_micros(2_000 + random.below(longest_us)));
        end(&mut worker);
        if kill % 8 == 7 {
            end(&mut other);
            other = spawn(root, registry);
        }
        let store = Store::open(root).unwrap();
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
        let working = |name: &str| std::fs::read_dir(root.join(name)).unwrap().count() as u64;
        interrupted += u64::from(working("stage") + working("partial") > 1);
    }
    end(&mut other);
    // Otherwise this has tested nothing.
    assert!(tagged.min(interrupted) > KILLS / 8, "{tagged} tags, {interrupted} interrupted");
    let store = Store::open(root).unwrap();
    assert!(store.verify(false).unwrap().is_clean());
    store.collect(None).unwrap();
    for directory in ["live", "stage", "partial"] {
        assert_eq!(std::fs::read_dir(root.join(directory)).unwrap().count(), 0, "{directory}");
    }
    println!("{KILLS} kills: clean; {tagged} tags seen, {interrupted} times with work in progress");
}

fn spawn(root: &Path, registry: Option<&str>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(WORKER, root).envs(registry.map(|host| (REGISTRY, host)));
    command.spawn().unwrap()
}

fn end(worker: &mut Child) {
    // A worker that ended by itself has found a fault.
    assert_eq!(worker.try_wait().unwrap(), None, "a worker failed");
    worker.kill().unwrap();
    worker.wait().unwrap();
}

/// Does everything a store is for on its own, until killed.
fn work(root: &Path) -> ! {
    let mut random = Random::of_this_process();
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

/// Pulls, pushes and prunes, until killed.
fn travel(root: &Path, host: &str) -> ! {
    let mut random = Random::of_this_process();
    let options = RegistryOptions::default();
    loop {
        let store = Store::open(root).unwrap();
        for _ in 0..2 {
            let name = remote(host, random.below(2));
            match random.below(8) {
                0 => drop(store.collect((random.below(2) == 0).then_some(1)).unwrap()),
                1 => drop(store.untag(&name)),
                2 => {
                    // The other worker may have taken the name away.
                    let found = store.resolve(&name.to_string());
                    let held = found.and_then(|(_, found)| Ok((store.lease(&[found])?, found)));
                    if let Ok((_lease, template)) = held {
                        let to = format!("{host}/copy:{}", random.below(3)).parse().unwrap();
                        let pushed =
                            store.push(&template, &to, &options, &PushOptions::default(), &|_| ());
                        // What is leased is whole, whatever others collect.
                        assert!(pushed.is_ok(), "{pushed:?}");
                    }
                }
                _ => drop(store.pull(&name, None, &options, &Choice::All, &|_| ()).unwrap()),
            }
        }
    }
}

fn remote(host: &str, number: u64) -> TemplateName {
    format!("{host}/team/t{number}:1").parse().unwrap()
}

fn publish(store: &Store, name: &TemplateName, seed: u64) -> Digest {
    let rootfs = fixture::pages(seed + 1, 300);
    let memory = fixture::pages(seed + 10, 200);
    let (template, _) = fixture::baked(store, &rootfs, &[(8192, &memory), (0, &rootfs[..4096])]);
    let pushed =
        store.push(&template, name, &RegistryOptions::default(), &PushOptions::default(), &|_| ());
    pushed.unwrap();
    template
}

/// A xorshift generator: reproducible, and no dependency.
struct Random(u64);

impl Random {
    fn of_this_process() -> Self {
        Self(u64::from(std::process::id()).wrapping_mul(0x2545_f491_4f6c_dd1d) | 1)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
