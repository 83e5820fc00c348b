//! Times of a real guest: cold boot, bake, restore, first exec. Run on a host that can run one, or
//! in the lab.
//!
//! usage: guest-bench STORE TEMPLATE PREFIX [RESTORES]
//!
//! Prints one flat JSON object; keys begin with PREFIX (`lab` or `kvm`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use parbake_cache::template::SnapshotManifest;
use parbake_node::sandbox::{Extent, FreezeFiles, RestoreFiles, Sandbox, SandboxOptions};
use parbake_protocol::agent::{ExecEvent, ExecRequest};
use parbake_tests::{Failed, Fixture, quantile, says};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (store, template, prefix, restores) = match arguments.as_slice() {
        [store, template, prefix] => (store, template, prefix, 30),
        [store, template, prefix, count] => (store, template, prefix, count.parse().unwrap_or(30)),
        _ => {
            eprintln!("usage: guest-bench STORE TEMPLATE PREFIX [RESTORES]");
            return ExitCode::from(2);
        }
    };
    match measure(Path::new(store), template, prefix, restores) {
        Ok(figures) => {
            println!("{}", serde_json::to_string(&figures).expect("numbers"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("guest-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(
    store: &Path,
    template: &str,
    prefix: &str,
    restores: usize,
) -> Result<BTreeMap<String, f64>, Failed> {
    let fixture = Fixture::open(store, template)?;
    let shape = fixture.template.manifest.machine;
    let mut figures = BTreeMap::new();
    let mut put = |name: &str, value: f64| {
        figures.insert(format!("{prefix}.{name}"), (value * 1000.0).round() / 1000.0);
    };

    let mut cold = Vec::new();
    for _ in 0..3 {
        let sandbox = fixture.boot(shape)?;
        cold.push(sandbox.timings().ready.as_secs_f64() * 1000.0);
    }
    let baked = fixture.bake(shape)?;
    cold.push(baked.timings.cold_boot.as_secs_f64() * 1000.0);
    put("cold_boot_ms.p50", quantile(&mut cold, 0.5));
    put("bake_ms", baked.timings.total.as_secs_f64() * 1000.0);
    put("bake_quiesce_ms", baked.timings.quiesce.as_secs_f64() * 1000.0);
    put("bake_write_ms", baked.timings.write.as_secs_f64() * 1000.0);
    put("bake_install_ms", baked.timings.install.as_secs_f64() * 1000.0);
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    put("snapshot_memory_mib", baked.memory_data_bytes as f64 / f64::from(1 << 20));

    let (mut started, mut ready, mut exec) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..restores {
        let begun = Instant::now();
        let mut sandbox = fixture.restore(&baked.snapshot)?;
        let mut session = sandbox.connect()?.exec(ExecRequest::new(["true"]))?;
        loop {
            if let ExecEvent::Exited(exit) = session.next_event()? {
                if exit.code != Some(0) {
                    return Err(format!("`true` ended with {exit:?}").into());
                }
                break;
            }
        }
        exec.push(begun.elapsed().as_secs_f64() * 1000.0);
        started.push(sandbox.timings().started.as_secs_f64() * 1000.0);
        ready.push(sandbox.timings().ready.as_secs_f64() * 1000.0);
    }
    for (name, values) in [
        ("restore_started_ms", &mut started),
        ("restore_agent_ready_ms", &mut ready),
        ("restore_first_exec_ms", &mut exec),
    ] {
        put(&format!("{name}.p50"), quantile(values, 0.5));
        put(&format!("{name}.p99"), quantile(values, 0.99));
    }
    let ratio = quantile(&mut cold, 0.5) / quantile(&mut exec, 0.5);
    put("cold_boot_over_first_exec", ratio);

    let mut forks = forks(&fixture, &baked.snapshot, restores.div_ceil(3))?;
    for (name, values) in &mut forks {
        put(&format!("{name}.p50"), quantile(values, 0.5));
    }
    if let Some(whole) = forks.get_mut("fork_ms") {
        put("cold_boot_over_fork", quantile(&mut cold, 0.5) / quantile(whole, 0.5));
    }
    Ok(figures)
}

/// Forks of one running sandbox, split in stages, written as a difference and, in turns, whole.
fn forks(
    fixture: &Fixture,
    snapshot: &SnapshotManifest,
    count: usize,
) -> Result<BTreeMap<String, Vec<f64>>, Failed> {
    let mut figures = BTreeMap::<String, Vec<f64>>::new();
    let base = fixture.template.restore_files(&fixture.store, snapshot)?;
    let mut parent = fixture.restore(snapshot)?;
    says(&mut parent, "echo parent >/root/who")?;
    for _ in 0..count {
        for (extent, name) in [(Extent::Difference, "fork"), (Extent::Whole, "fork_whole")] {
            let directory = tempfile::tempdir()?;
            let mut put = |stage: &str, time: Duration| {
                let key = format!("{name}{stage}_ms");
                figures.entry(key).or_default().push(time.as_secs_f64() * 1000.0);
            };
            // The last copy's end, which nobody waits for, is not part of this fork.
            std::thread::sleep(Duration::from_millis(300));
            let begun = Instant::now();
            let frozen =
                parent.suspend(&FreezeFiles::create_in(directory.path())?, extent, true)?;
            let thawing = Instant::now();
            parent.thaw()?;
            let thawed = Instant::now();
            let written = directory.path().join("memory");
            let (memory, difference) = match frozen.snapshot.difference {
                true => (base.memory.clone(), Some(written)),
                false => (written, None),
            };
            let files = RestoreFiles {
                state: directory.path().join("state"),
                memory,
                difference,
                disk: directory.path().join("disk"),
                rootfs: base.rootfs.clone(),
            };
            let options = SandboxOptions { continues: true, ..Fixture::options() };
            let mut copy = Sandbox::restore(&files, snapshot.machine, &options)?;
            put("", begun.elapsed());
            put("_quiesce", frozen.quiesced);
            put("_pause", frozen.paused.saturating_sub(frozen.quiesced));
            put("_write", frozen.total.saturating_sub(frozen.paused));
            put("_thaw", thawed.duration_since(thawing));
            put("_started", copy.timings().started);
            let mut before = 0;
            for (stage, at) in &copy.timings().stages {
                put(&format!("_monitor_{stage}"), Duration::from_micros(at - before));
                before = *at;
            }
            put("_fixup", copy.timings().ready.saturating_sub(copy.timings().started));
            #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
            let mib = frozen.snapshot.memory_data_bytes as f64 / f64::from(1 << 20);
            figures.entry(format!("{name}_written_mib")).or_default().push(mib);
            if says(&mut copy, "cat /root/who")? != "parent" {
                return Err("the copy is not its parent's".into());
            }
        }
    }
    Ok(figures)
}
