//! `parbake lab`: the emulated KVM host.

use parbake_host::lab::{self, Lab, LabStatus};
use parbake_protocol::agent::ExecRequest;
use serde_json::json;

use super::error::{Classify, CliError, CliResult, Kind};
use super::{Context, guest, output};
use parbake_node::terminal::stdio::{self, Ended};

/// Control the lab, an emulated KVM host for machines without one
///
/// The lab boots a distribution kernel in QEMU with this machine's own files, copy-on-write, and
/// this store, read-write. It is for development, tests and trying out.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Start the lab if it is not running
    Up,
    /// Tell whether the lab is running
    Status,
    /// Run a command in the lab
    Exec {
        /// Give the command a terminal
        #[arg(short, long)]
        tty: bool,
        /// The command
        #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
        command: Vec<std::ffi::OsString>,
    },
    /// End the lab
    Down,
}

/// Does what was asked.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    let root = context.store_root();
    let state = lab::default_state_dir(&root.canonicalize().unwrap_or(root));
    match &args.verb {
        Verb::Up => {
            guest::lab(context)?;
            Ok(0)
        }
        Verb::Status => {
            let status = Lab::status(&state).kind(Kind::Host)?;
            if context.json() {
                output::json(&json!(status))?;
            } else {
                output::line(&describe(&status))?;
            }
            Ok(if matches!(status, LabStatus::Up { .. }) { 0 } else { 3 })
        }
        Verb::Down => {
            Lab::down(&state).kind(Kind::Host)?;
            Ok(0)
        }
        Verb::Exec { tty, command } => {
            use std::os::unix::ffi::OsStrExt;
            let lab = guest::lab(context)?;
            let argv = command.iter().map(|word| word.as_bytes().to_vec());
            let mut request = ExecRequest::new(argv);
            request.stdin = stdio::connect_stdin(*tty);
            request.tty = tty.then(stdio::window_size);
            if let Ok(directory) = std::env::current_dir() {
                request.cwd = directory.as_os_str().as_bytes().to_vec();
            }
            if let Some(path) = std::env::var_os("PATH") {
                request.env.push([b"PATH=", path.as_bytes()].concat());
            }
            let client = lab.connect().kind(Kind::Host)?;
            match stdio::run(client, request, || {}).kind(Kind::Host)? {
                Ended::Exited(exit) => Ok(u8::try_from(exit.shell_code()).unwrap_or(125)),
                Ended::HungUp => Err(CliError::interrupted()),
                Ended::Failed(failure) => {
                    let kind = match failure.shell_code() {
                        127 => Kind::CommandNotFound,
                        126 => Kind::NotExecutable,
                        _ => Kind::Sandbox,
                    };
                    Err(CliError::new(kind, failure.message))
                }
            }
        }
    }
}

fn describe(status: &LabStatus) -> String {
    match status {
        LabStatus::Down => "down".to_owned(),
        LabStatus::Up { pid, uptime_s, memory_mib, vcpus, kernel, sessions, .. } => format!(
            "up for {uptime_s} s: kernel {kernel}, {vcpus} vCPUs, {memory_mib} MiB, {sessions} \
             sessions, process {pid}"
        ),
        LabStatus::Unresponsive { pids, why } => {
            format!("not answering ({why}); processes {pids:?}; `parbake lab down` ends them")
        }
    }
}
