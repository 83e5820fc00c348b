//! What a cgroup and a network cost a create: a bare guest restored on `/dev/kvm` with and without.
//!
//! `cargo bench -p parbake-node --bench create [-- RUNS]`, with `PARBAKE_VMM` the monitor as it
//! ships. The variants alternate, so all see the same weather; everything happens in a network
//! namespace of the bench's own. Prints one JSON object with flat keys, in milliseconds from before
//! the first preparation to the first output of the restored guest.
#![allow(missing_docs, unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use parbake_cache::template::MachineShape;
use parbake_node::limits::Limits;
use parbake_node::limits::cgroup::Cgroup;
use parbake_node::monitor::Monitor;
use parbake_node::network::{Egress, Lease, Pool, PoolOptions};
use parbake_protocol::vmm::{Event, Jail, Net, Start, Tap, VERSION, VmmConfig};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const MEMORY_MIB: u32 = 128;

fn main() {
    let Some(vmm) = std::env::var_os("PARBAKE_VMM").map(PathBuf::from) else {
        eprintln!("skipped: PARBAKE_VMM does not name a monitor");
        return;
    };
    if File::options().read(true).write(true).open("/dev/kvm").is_err()
        || !rustix::process::geteuid().is_root()
    {
        eprintln!("skipped: needs root and /dev/kvm");
        return;
    }
    let number = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let runs: usize = number.unwrap_or(100);
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .expect("a network namespace");
    let directory = tempfile::tempdir().expect("directory");
    let guest = assemble(directory.path());
    let bench = Bench { vmm, directory: directory.path().to_owned(), guest };
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
    }
    let mut out = serde_json::Map::new();
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

fn assemble(directory: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/guests");
    let out = directory.join("guest");
    let status = Command::new("cc")
        .current_dir(sources)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noexecstack"])
        .args(["-Wl,--no-warn-rwx-segments", "-I.", "-T", "guest.ld", "-o"])
        .arg(&out)
        .arg("ticker.S")
        .status()
        .expect("cc (package gcc) assembles the guest");
    assert!(status.success());
    out
}

struct Bench {
    vmm: PathBuf,
    directory: PathBuf,
    guest: PathBuf,
}

impl Bench {
    fn start(&self, config: &VmmConfig, lease: Option<&Lease>, group: Option<&Cgroup>) -> Monitor {
        let log = self.directory.join("log");
        let tap = lease.map(Lease::tap);
        Monitor::spawn(&self.vmm, config, &log, None, tap, group).expect("monitor")
    }

    fn freeze(&self, name: &str, net: Option<Net>) -> VmmConfig {
        let mut config = VmmConfig {
            version: VERSION,
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            start: Start::Boot {
                kernel: self.guest.clone(),
                initramfs: None,
                cmdline: String::new(),
            },
            disks: vec![],
            vsock: None,
            net,
            rng: false,
            console: None,
            console_limit: 1 << 20,
            lifetime_ms: None,
            control: None,
            jail: Jail::default(),
            filling: None,
        };
        let mut monitor = self.start(&config, None, None);
        doorbell(&mut monitor);
        doorbell(&mut monitor);
        monitor.pause().expect("pause");
        let path = |what: &str| self.directory.join(format!("{name}-{what}"));
        let create = |what: &str| File::create_new(path(what)).expect("file");
        monitor.snapshot(&create("state"), &create("memory"), &[], false).expect("snapshot");
        monitor.quit();
        config.start = Start::Restore {
            state: path("state"),
            memory: path("memory"),
            difference: None,
            generation_id: [7; 16],
            paused: false,
        };
        config
    }

    /// To the first output of the restored guest. Ending it is not part of a create.
    fn restore(
        &self,
        config: &VmmConfig,
        lease: Option<&Lease>,
        group: Option<&Cgroup>,
    ) -> Monitor {
        let mut config = config.clone();
        if lease.is_some() {
            config.net = Some(Net { tap: Some(Tap::Passed), mac: MAC });
        }
        let mut monitor = self.start(&config, lease, group);
        doorbell(&mut monitor);
        monitor
    }
}

/// What the kernel takes apart after one variant must not be the next one's cost.
fn settle() {
    std::thread::sleep(Duration::from_millis(80));
}

fn doorbell(monitor: &mut Monitor) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Event::Doorbell { .. } = monitor.next_event(deadline).expect("event") {
            return;
        }
    }
}
