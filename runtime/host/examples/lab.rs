//! Drives a lab by hand: `lab up|status|down|time|doctor`, or `lab exec PROGRAM ARGUMENTS…`.
//!
//! The environment says which: `PARBAKE_STORE`, `PARBAKE_AGENT`, and maybe `PARBAKE_KERNEL_DEB`.
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Instant;

use parbake_host::{Lab, LabConfig, probe};
use parbake_kernels::KernelSource;
use parbake_protocol::agent::{ExecEvent, ExecRequest};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let store = variable("PARBAKE_STORE").ok_or("PARBAKE_STORE is not set")?;
    let mut config = LabConfig::new(store, variable("PARBAKE_AGENT").unwrap_or_default());
    if let Some(deb) = variable("PARBAKE_KERNEL_DEB") {
        config.kernel = KernelSource::Deb(deb);
    }
    let mut arguments = std::env::args_os().skip(1);
    let verb = arguments.next().unwrap_or_default();
    let up = |config: &LabConfig| Lab::ensure_up(config, &mut |event| eprintln!("{event}"));
    match verb.to_str() {
        Some("up") => println!("log: {}", up(&config)?.log().display()),
        Some("status") => println!("{:#?}", Lab::status(&config.state_dir)?),
        Some("down") => println!("was up: {}", Lab::down(&config.state_dir)?),
        Some("doctor") => {
            let report = probe::probe(&config.store, config.memory_mib);
            println!("{}", serde_json::to_string_pretty(&report)?);
        }
        Some("time") => {
            let lab = up(&config)?;
            let mut times: Vec<_> = (0..50)
                .map(|_| {
                    let begin = Instant::now();
                    let session = lab.connect()?.exec(ExecRequest::new(["/bin/true"]))?;
                    session.wait_with_output(1 << 20)?;
                    Ok::<_, Box<dyn std::error::Error>>(begin.elapsed())
                })
                .collect::<Result<_, _>>()?;
            times.sort();
            println!(
                "exec /bin/true: min {:?} median {:?} max {:?}",
                times[0], times[25], times[49]
            );
        }
        Some("exec") => {
            let argv: Vec<Vec<u8>> = arguments.map(OsStringExt::into_vec).collect();
            let mut session = up(&config)?.connect()?.exec(ExecRequest::new(argv))?;
            loop {
                match session.next_event()? {
                    ExecEvent::Started { .. } => {}
                    ExecEvent::Stdout(bytes) => std::io::stdout().write_all(&bytes)?,
                    ExecEvent::Stderr(bytes) => std::io::stderr().write_all(&bytes)?,
                    ExecEvent::Exited(exit) => std::process::exit(exit.shell_code()),
                    ExecEvent::Failed(failure) => {
                        eprintln!("{}", failure.message);
                        std::process::exit(failure.shell_code());
                    }
                }
            }
        }
        _ => return Err("usage: lab up|status|down|time|doctor|exec".into()),
    }
    Ok(())
}
