//! How long from starting a monitor to the first output of a restored guest, beside the least the
//! same KVM calls take on this host.
//!
//! `cargo bench -p parbake-vmm --bench restore [-- --runs N --vmm PATH --memory-mib N --verbose]`, with the
//! monitor built as it ships. A bare guest on `/dev/kvm` is frozen once and restored again and
//! again; floor and restore alternate, so both see the same weather. Prints one JSON object with
//! flat keys (milliseconds unless the name says otherwise).
#![allow(missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use kvm_ioctls::{IoEventAddress, Kvm, VcpuExit};
use parbake_protocol::vmm::{Event, Jail, VmmConfig};
use parbake_vmm::snapshot::state::MachineState;
use parbake_vmm::snapshot::{restore, save};
use parbake_vmm::{layout, memory};
use support::{Monitor, Snapshot, boot, guest, open_jail};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

struct Options {
    runs: usize,
    vmm: std::path::PathBuf,
    memory_mib: u32,
    /// Every run on standard error.
    verbose: bool,
}

fn options() -> Options {
    let mut options =
        Options { runs: 200, vmm: support::binary(), memory_mib: 128, verbose: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{name} takes a value"));
        match name.as_str() {
            "--runs" => options.runs = value().parse().expect("a number"),
            "--vmm" => options.vmm = value().into(),
            "--memory-mib" => options.memory_mib = value().parse().expect("a number"),
            "--verbose" => options.verbose = true,
            // What cargo adds.
            "--bench" => {}
            other => panic!("unknown option {other}"),
        }
    }
    options
}

fn main() {
    if let Some(reason) = support::skip_reason() {
        eprintln!("skipped: {reason}");
        return;
    }
    let options = options();
    // As a node does: monitors start in a network namespace that is empty already.
    // SAFETY: this process has one thread.
    if let Err(e) = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
    {
        eprintln!("monitors make a network namespace each: {e}");
    }
    let directory = tempfile::tempdir().expect("directory");
    let (config, snapshot) = bake(&options, directory.path());
    let state = std::fs::read(&snapshot.state).expect("state");

    let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut note = |name: &str, value: f64| samples.entry(name.into()).or_default().push(value);
    for run in 0..options.runs + 5 {
        let floor = floor(&config, &snapshot, &state);
        let jailed = restored(&options.vmm, &config, &snapshot, Jail::default());
        let open = restored(&options.vmm, &config, &snapshot, open_jail());
        // The first rounds warm caches up.
        if run < 5 {
            continue;
        }
        if options.verbose {
            eprintln!("{floor:.3} {:.3} {:?}", jailed.first_output, jailed.stages);
        }
        note("restore.kvm.floor_ms", floor);
        note("restore.kvm.spawn_to_first_output_ms", jailed.first_output);
        note("restore.kvm.no_jail.spawn_to_first_output_ms", open.first_output);
        note("restore.kvm.quit_ms", jailed.quit);
        note("restore.kvm.stage.spawn_ms", jailed.spawn);
        for (name, value) in &jailed.stages {
            note(&format!("restore.kvm.stage.{name}_ms"), *value);
        }
        for (name, value) in &open.stages {
            note(&format!("restore.kvm.no_jail.stage.{name}_ms"), *value);
        }
    }
    let mut out = serde_json::Map::new();
    for (name, mut values) in samples {
        values.sort_by(f64::total_cmp);
        for (suffix, quantile) in [("p50", 0.5), ("p99", 0.99)] {
            let at = ((values.len() - 1) as f64 * quantile).round() as usize;
            out.insert(format!("{name}.{suffix}"), rounded(values[at]).into());
        }
    }
    out.insert("restore.kvm.runs".into(), options.runs.into());
    out.insert("restore.kvm.memory_mib".into(), options.memory_mib.into());
    let overhead = overhead(&options.vmm, &config, &snapshot);
    out.insert("restore.kvm.vmm_overhead_mib".into(), rounded(overhead).into());
    let size = std::fs::metadata(&options.vmm).expect("monitor").len();
    out.insert("restore.kvm.vmm_binary_mib".into(), rounded(size as f64 / 1048576.0).into());
    println!("{}", serde_json::to_string_pretty(&out).expect("JSON"));
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Boots the guest once and freezes it.
fn bake(options: &Options, directory: &Path) -> (VmmConfig, Snapshot) {
    let mut config = boot(&guest("ticker"), options.memory_mib);
    config.jail = open_jail();
    let mut monitor = Monitor::spawn_binary(&options.vmm, &config);
    monitor.started();
    monitor.doorbell();
    monitor.doorbell();
    let (snapshot, _) = monitor.freeze(directory, 0);
    monitor.quit();
    (config, snapshot)
}

struct Restored {
    /// From before the spawn to the doorbell of the restored guest.
    first_output: f64,
    /// What `main` had not yet begun to count: everything but the stages and the guest itself.
    spawn: f64,
    /// Each stage's share.
    stages: Vec<(String, f64)>,
    /// From the request to end to the end of the channel.
    quit: f64,
}

fn restored(vmm: &Path, config: &VmmConfig, snapshot: &Snapshot, jail: Jail) -> Restored {
    let mut config = support::restore(config, snapshot);
    config.jail = jail;
    let mut monitor = Monitor::spawn_alone(vmm, &config);
    let (marks, _) = monitor.started();
    let started = monitor.spawned.elapsed();
    // A heartbeat that was under way counts as well: it is output of the restored guest.
    let Event::Doorbell { .. } = monitor.event() else { panic!("not restored") };
    let first_output = monitor.spawned.elapsed();
    let mut stages = Vec::new();
    let mut before = 0;
    for (name, at) in marks {
        stages.push((name, (at - before) as f64 / 1000.0));
        before = at;
    }
    stages.push(("first_output".into(), milliseconds(first_output - started)));
    let asked = Instant::now();
    monitor.request(&parbake_protocol::vmm::Request::Quit);
    let quit = milliseconds(asked.elapsed());
    monitor.wait();
    let spawn = milliseconds(started) - before as f64 / 1000.0;
    Restored { first_output: milliseconds(first_output), spawn, stages, quit }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// The same machine brought to its first exit by the KVM calls alone, in this process: nothing is
/// read, parsed, checked or started besides.
fn floor(config: &VmmConfig, snapshot: &Snapshot, state: &[u8]) -> f64 {
    let state = MachineState::decode(state).expect("state");
    let image = File::open(&snapshot.memory).expect("memory");
    let start = Instant::now();
    let kvm = Kvm::new().expect("kvm");
    let memory = memory::private_image(config.memory_mib, &image).expect("memory");
    let vm = kvm.create_vm().expect("vm");
    memory::attach(&vm, &memory).expect("memslots");
    vm.set_tss_address(layout::TSS).expect("tss");
    vm.create_irq_chip().expect("irqchip");
    let mut vcpu = vm.create_vcpu(0).expect("vcpu");
    restore::vcpu(&vcpu, &state.vcpus[0], save::xsave_words(&vm), None).expect("vcpu state");
    restore::clock(&vm, &state.clock).expect("clock");
    restore::irqchip(&vm, &state.irqchip).expect("irqchip state");
    let lines: Vec<_> = (0..4)
        .map(|n| {
            let line = EventFd::new(0).expect("eventfd");
            vm.register_irqfd(&line, layout::SERIAL_GSI + n).expect("irqfd");
            let address = IoEventAddress::Mmio(layout::MMIO_BASE + u64::from(n) * 0x1000);
            vm.register_ioevent(&line, &address, n).expect("ioeventfd");
            line
        })
        .collect();
    memory.write_slice(&[0x5a; 16], GuestAddress(layout::GENERATION_ID)).expect("generation");
    match vcpu.run().expect("run") {
        VcpuExit::IoOut(parbake_protocol::vmm::DOORBELL_PORT, _) => {}
        other => panic!("{other:?}"),
    }
    let time = milliseconds(start.elapsed());
    drop((vcpu, vm, lines, memory));
    time
}

/// Resident memory of an idle restored monitor without its guest's pages, in MiB.
fn overhead(vmm: &Path, config: &VmmConfig, snapshot: &Snapshot) -> f64 {
    let mut monitor = Monitor::spawn_binary(vmm, &support::restore(config, snapshot));
    monitor.started();
    monitor.doorbell();
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", monitor.child.id()))
        .expect("smaps of a child");
    let guest = snapshot.memory.to_string_lossy();
    let (mut kib, mut counts) = (0u64, false);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") if counts => {
                kib += words.next().and_then(|n| n.parse::<u64>().ok()).expect("a number");
            }
            // A mapping's head names its file last.
            Some(range) if range.contains('-') => counts = !line.ends_with(guest.as_ref()),
            _ => {}
        }
    }
    monitor.quit();
    kib as f64 / 1024.0
}
