//! `parbake-agent`: PID 1 of a guest, or a service in one.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use parbake_agent::cgroup::UserCgroup;
use parbake_agent::listen::Listener;
use parbake_agent::serve::{Options, serve};
use parbake_agent::{check, init, lab, step};

const USAGE: &str = "usage: parbake-agent serve (--vsock PORT | --unix PATH | --tcp ADDRESS) \
[--token-file FILE] [--owns-machine]
       parbake-agent check (tcp PORT | http URL STATUS | file PATH | process NAME | alive PID)
       parbake-agent step
       As PID 1 it brings a sandbox up, or with the argument `lab` a lab.";

fn main() -> ExitCode {
    parbake_agent::kernel::share_one_heap();
    let mut arguments = std::env::args_os().skip(1);
    let result = match arguments.next().as_deref().map(OsStrExt::as_bytes) {
        // Process 1 of a namespace of its own, by a word that no kernel passes on.
        Some(b"step-enter") => return step::enter(),
        // The kernel hands its init whatever it did not understand itself, so other words may be
        // there too.
        _ if std::process::id() == 1 => {
            if std::env::args_os().any(|word| word == "lab") {
                lab::run()
            } else {
                init::run()
            }
        }
        Some(b"serve") => serve_command(arguments),
        Some(b"check") => return check::run(arguments),
        Some(b"step") => return step::run(),
        Some(b"step-once") => return step::run_once(),
        Some(b"--version") => {
            println!("parbake-agent {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

fn serve_command(mut arguments: impl Iterator<Item = OsString>) -> Result<(), String> {
    let mut options = Options::default();
    let mut listener = None;
    let mut tcp = false;
    while let Some(argument) = arguments.next() {
        if argument == "--owns-machine" {
            options.owns_machine = true;
            continue;
        }
        let value = arguments.next().ok_or(USAGE)?;
        let text = value.to_string_lossy();
        let shown = |e: std::io::Error| format!("cannot listen on {text}: {e}");
        match argument.as_bytes() {
            b"--vsock" => {
                let port = text.parse().map_err(|_| format!("{text} is no port"))?;
                listener = Some(Listener::vsock(port).map_err(shown)?);
            }
            b"--unix" => listener = Some(Listener::unix(&value).map_err(shown)?),
            b"--tcp" => {
                tcp = true;
                listener = Some(Listener::tcp(&*text).map_err(shown)?);
            }
            b"--token-file" => {
                let token = std::fs::read(&value)
                    .map_err(|e| format!("cannot read the token in {text}: {e}"))?;
                options.token = Some(token.trim_ascii().to_vec());
            }
            _ => return Err(USAGE.to_owned()),
        }
    }
    let listener = listener.ok_or(USAGE)?;
    if options.token.as_ref().is_some_and(|t| t.len() < 16) {
        return Err("a token has at least 16 bytes".to_owned());
    }
    if tcp && options.token.is_none() {
        return Err("whoever reaches a TCP port could run commands: give --token-file".to_owned());
    }
    if options.owns_machine {
        let cgroup = UserCgroup::create(Path::new("/sys/fs/cgroup"));
        options.cgroup = Some(cgroup.map_err(|e| format!("cannot make the user cgroup: {e}"))?);
    }
    serve(&listener, options).map_err(|e| format!("the listener failed: {e}"))
}
