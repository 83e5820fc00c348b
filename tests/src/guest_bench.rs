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
use std::time::Instant;

use parbake_protocol::agent::{ExecEvent, ExecRequest};
use parbake_tests::{Failed, Fixture, quantile};

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
    Ok(figures)
}
