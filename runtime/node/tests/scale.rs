//! Made and ended again and again, and many at a time: nothing is left, of bare guests with a
//! directory, a cgroup, a network and the whole jail each.
//!
//! Needs root, `/dev/kvm` and `PARBAKE_BIN`, and is skipped, with the reason, elsewhere.
//! `PARBAKE_SCALE` is how many are made in a row; a tenth of them at once.
#![allow(unsafe_code)]

mod bare;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bare::{Bare, MAC, MEMORY_MIB};
use parbake_cache::template::MachineShape;
use parbake_node::limits::Limits;
use parbake_node::limits::cgroup::Cgroup;
use parbake_node::monitor::Monitor;
use parbake_node::network::{Egress, Lease, Pool, PoolOptions};
use parbake_node::rundir::RunDir;
use parbake_protocol::vmm::{Net, VmmConfig};

struct World<'a> {
    bare: Bare,
    config: VmmConfig,
    pool: &'a Pool,
    run: &'a Path,
}

type Made = (Monitor, Lease, Option<Cgroup>, RunDir);

impl World<'_> {
    fn make(&self, id: &str) -> Made {
        let egress: Egress = "allow=10.0.0.5:443".parse().unwrap();
        let shares = Limits::default().shares(MachineShape { vcpus: 1, memory_mib: MEMORY_MIB }, 0);
        let rundir = RunDir::create_in(self.run, id).unwrap();
        let group = Cgroup::create(id, &shares).ok();
        let lease = self.pool.take(id, &egress, None).unwrap();
        let monitor = self.bare.restore(&self.config, Some(&lease), group.as_ref());
        (monitor, lease, group, rundir)
    }
}

/// What could be left behind, counted; nothing that other processes of the host have, too.
fn leftovers(run: &Path, directory: &Path) -> BTreeMap<&'static str, u64> {
    let count = |path: &Path| fs::read_dir(path).map_or(0, |entries| entries.count() as u64);
    let mine = std::process::id().to_string();
    let children = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // Its parent is the second word after the name.
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)) == Some(&mine)
    });
    let groups = groups_below(Path::new("/sys/fs/cgroup"));
    BTreeMap::from([
        ("processes", children.count() as u64),
        ("descriptors", count(Path::new("/proc/self/fd"))),
        ("threads", count(Path::new("/proc/self/task"))),
        ("links", count(Path::new("/proc/sys/net/ipv4/conf"))),
        ("groups", groups),
        ("directories", count(run)),
        ("files", count(directory)),
    ])
}

fn groups_below(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| {
            let ours = entry.path().parent().is_some_and(|parent| parent.ends_with("parbake"));
            let made = entry.file_name().to_string_lossy().starts_with("scale-");
            u64::from(ours && made) + groups_below(&entry.path())
        })
        .sum()
}

#[test]
fn nothing_is_left_of_many() {
    let vmm = match bare::available() {
        Ok(vmm) => vmm,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let many: usize =
        std::env::var("PARBAKE_SCALE").ok().and_then(|n| n.parse().ok()).unwrap_or(50);
    // In a thread of its own, so that the rest of the test process stays where it is.
    let run = move || {
        // SAFETY: it concerns this thread and those it starts.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let run = tempfile::tempdir().unwrap();
        let bare = Bare::new(vmm, directory.path());
        let config = bare.freeze("scale", Some(Net { tap: None, mac: MAC }));
        let pool = Pool::new(PoolOptions { ready: 0, most: 512, ..Default::default() }).unwrap();
        let world = World { bare, config, pool: &pool, run: run.path() };
        // The first of everything takes what is then kept.
        for n in 0..3 {
            end(world.make(&format!("scale-warm-{n}")));
        }
        let before = at_rest(run.path(), directory.path());
        let begun = std::time::Instant::now();
        for n in 0..many {
            end(world.make(&format!("scale-{n}")));
        }
        let each = begun.elapsed().as_secs_f64() * 1000.0 / many as f64;
        assert_eq!(settled(&before, run.path(), directory.path()), before, "{many} in a row");
        let crowd = many.div_ceil(10);
        let world = &world;
        let made: Vec<Made> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..crowd)
                .map(|n| scope.spawn(move || world.make(&format!("scale-crowd-{n}"))))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let during = leftovers(run.path(), directory.path());
        assert_eq!(during["processes"], before["processes"] + crowd as u64);
        made.into_iter().for_each(end);
        assert_eq!(settled(&before, run.path(), directory.path()), before, "{crowd} at once");
        println!("{many} in a row ({each:.1} ms each), {crowd} at once: {before:?}");
    };
    std::thread::spawn(run).join().unwrap();
}

fn end((monitor, lease, group, rundir): Made) {
    monitor.quit();
    drop(lease);
    drop(group);
    drop(rundir);
}

/// What there is once it has not changed for a second: the kernel takes networks apart when it gets
/// to it.
fn at_rest(run: &Path, directory: &Path) -> BTreeMap<&'static str, u64> {
    let mut last = leftovers(run, directory);
    let mut same = 0;
    while same < 10 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = leftovers(run, directory);
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    last
}

/// What is left once the kernel has taken apart what it takes apart by itself.
fn settled(
    wanted: &BTreeMap<&'static str, u64>,
    run: &Path,
    directory: &Path,
) -> BTreeMap<&'static str, u64> {
    let mut now = leftovers(run, directory);
    for _ in 0..100 {
        if now == *wanted {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        now = leftovers(run, directory);
    }
    now
}
