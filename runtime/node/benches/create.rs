//! What a cgroup and a network cost a create: a bare guest restored on `/dev/kvm` with and without.
//!
//! `cargo bench -p parbake-node --bench create [-- RUNS]`, with `PARBAKE_VMM` the monitor as it
//! ships. The variants alternate, so all see the same weather; everything happens in a network
//! namespace of the bench's own. Prints one JSON object with flat keys, in milliseconds from before
//! the first preparation to the first output of the restored guest.
#![allow(missing_docs, unsafe_code)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parbake_cache::template::MachineShape;
use parbake_node::limits::Limits;
use parbake_node::limits::cgroup::Cgroup;
use parbake_node::network::{Egress, Pool, PoolOptions};
use parbake_protocol::vmm::Net;

#[path = "../tests/bare/mod.rs"]
mod bare;
use bare::{Bare, MAC, MEMORY_MIB};

/// How many are made at once, for the figures of a crowd.
const CROWD: usize = 50;

fn main() {
    let vmm = match bare::available() {
        Ok(vmm) => vmm,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    let number = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let runs: usize = number.unwrap_or(100);
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .expect("a network namespace");
    let directory = tempfile::tempdir().expect("directory");
    let bench = Bare::new(vmm, directory.path());
    let none = bench.freeze("none", None);
    let with = bench.freeze("with", Some(Net { tap: None, mac: MAC }));

    let mut samples: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let pool = Pool::new(PoolOptions { ready: 2, ..PoolOptions::default() }).expect("pool");
    let fresh = Pool::new(PoolOptions::default()).expect("pool");
    let egress: Egress = "allow=10.0.0.5:443,allow=10.0.0.6:443".parse().expect("policy");
    let shares = Limits::default().shares(MachineShape { vcpus: 1, memory_mib: MEMORY_MIB }, 0);
    for run in 0..runs + 5 {
        let mut note = |name, since: Instant| {
            if run >= 5 {
                samples.entry(name).or_default().push(since.elapsed().as_secs_f64() * 1000.0);
            }
        };
        while pool.status().ready == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        settle();
        let begun = Instant::now();
        let running = bench.restore(&none, None, None);
        note("create.no_device_ms", begun);
        running.quit();
        settle();
        let begun = Instant::now();
        let running = bench.restore(&with, None, None);
        note("create.device_to_nowhere_ms", begun);
        running.quit();

        settle();
        let name = format!("bench-{run}");
        let begun = Instant::now();
        let group = Cgroup::create(&name, &shares).ok();
        note("cgroup.create_ms", begun);
        let running = bench.restore(&with, None, group.as_ref());
        note("create.cgroup_ms", begun);
        running.quit();
        let begun = Instant::now();
        drop(group);
        note("cgroup.remove_ms", begun);

        settle();
        let begun = Instant::now();
        let lease = pool.take("bench", &egress, None).expect("lease");
        note("network.take_prepared_ms", begun);
        let running = bench.restore(&with, Some(&lease), None);
        note("create.network_ms", begun);
        running.quit();
        let begun = Instant::now();
        drop(lease);
        note("network.let_go_ms", begun);

        settle();
        let begun = Instant::now();
        let lease = fresh.take("bench", &egress, None).expect("lease");
        note("network.take_unprepared_ms", begun);
        drop(lease);

        while pool.status().ready == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        settle();
        let begun = Instant::now();
        let group = Cgroup::create(&name, &shares).ok();
        let lease = pool.take("bench", &egress, None).expect("lease");
        let running = bench.restore(&with, Some(&lease), group.as_ref());
        note("create.network_and_cgroup_ms", begun);
        running.quit();

        settle();
        let mut parent = bench.restore(&none, None, None);
        let (copy, fork) = bench.fork(&mut parent, &none, &format!("fork-{run}"));
        if run >= 5 {
            let mut stage = |name, from: Duration, to: Duration| {
                let value = to.saturating_sub(from).as_secs_f64() * 1000.0;
                samples.entry(name).or_default().push(value);
            };
            stage("fork.pause_ms", Duration::ZERO, fork.paused);
            stage("fork.write_ms", fork.paused, fork.written);
            stage("fork.resume_ms", fork.written, fork.resumed);
            stage("fork.copy_ms", fork.resumed, fork.total);
            stage("fork.total_ms", Duration::ZERO, fork.total);
        }
        copy.quit();
        parent.quit();
    }

    // As many at once as a busy node sees, each with everything.
    let crowd = Pool::new(PoolOptions { ready: CROWD, ..PoolOptions::default() }).expect("pool");
    for _ in 0..runs.div_ceil(20) {
        while crowd.status().ready < CROWD {
            std::thread::sleep(Duration::from_millis(1));
        }
        settle();
        let all = Instant::now();
        let one = |number: usize| {
            let begun = Instant::now();
            let name = format!("crowd-{number}");
            let group = Cgroup::create(&name, &shares).ok();
            let lease = crowd.take(&name, &egress, None).expect("lease");
            let mut running = bench.restore(&with, Some(&lease), group.as_ref());
            let took = begun.elapsed().as_secs_f64() * 1000.0;
            // The bare guest never rests: those made would take the processors from those to come.
            running.pause().expect("pause");
            (took, running, lease, group)
        };
        let made: Vec<_> = std::thread::scope(|scope| {
            let one = &one;
            let threads: Vec<_> =
                (0..CROWD).map(|number| scope.spawn(move || one(number))).collect();
            threads.into_iter().map(|thread| thread.join().expect("create")).collect()
        });
        let all = all.elapsed().as_secs_f64() * 1000.0;
        samples.entry("create.network_and_cgroup_50_at_once_all_ms").or_default().push(all);
        for (took, running, lease, group) in made {
            samples.entry("create.network_and_cgroup_50_at_once_ms").or_default().push(took);
            running.quit();
            drop((lease, group));
        }
    }
    let mut out = serde_json::Map::new();
    // A crowd shares the processors: what it takes beside so many creates after one another, on as
    // many processors.
    let mut median = |name: &str| {
        let values = samples.get_mut(name).expect("measured");
        values.sort_by(f64::total_cmp);
        values[(values.len() - 1) / 2]
    };
    let crowd_ms = median("create.network_and_cgroup_50_at_once_all_ms");
    let alone_ms = median("create.network_and_cgroup_ms");
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let ratio = crowd_ms * processors as f64 / (CROWD as f64 * alone_ms);
    out.insert(
        "create.50_at_once_over_share".to_owned(),
        ((ratio * 1000.0).round() / 1000.0).into(),
    );
    for (name, mut values) in samples {
        values.sort_by(f64::total_cmp);
        for (suffix, quantile) in [("p10", 0.1), ("p50", 0.5), ("p99", 0.99)] {
            let at = ((values.len() - 1) as f64 * quantile).round() as usize;
            let value = (values[at] * 1000.0).round() / 1000.0;
            out.insert(format!("{name}.{suffix}"), value.into());
        }
    }
    println!("{}", serde_json::to_string_pretty(&out).expect("JSON"));
}

/// What the kernel takes apart after one variant must not be the next one's cost.
fn settle() {
    std::thread::sleep(Duration::from_millis(80));
}
