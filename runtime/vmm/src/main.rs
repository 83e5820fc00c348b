//! `parbake-vmm --control-fd N`: runs one guest and is controlled over descriptor N.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parbake_protocol::vmm::{Event, VmmConfig};
use parbake_vmm::control::{Events, Requests};
use parbake_vmm::error::Failure;
use parbake_vmm::machine::{self, Stages};
use parbake_vmm::run::{self, Poll, Running};
use parbake_vmm::vcpu::{Enter, Vcpus};

const USAGE: &str = "usage: parbake-vmm --control-fd N | --version";

fn main() {
    let stages = Stages::start();
    let mut arguments = std::env::args().skip(1);
    let code = match (arguments.next().as_deref(), arguments.next(), arguments.next()) {
        (Some("--version"), None, None) => {
            println!("parbake-vmm {}", env!("CARGO_PKG_VERSION"));
            0
        }
        (Some("--control-fd"), Some(number), None) => match number.parse().ok().and_then(adopt) {
            Some(socket) => control(socket, stages),
            None => {
                eprintln!(
                    "parbake-vmm: {number} is not the number of an inherited socket\n{USAGE}"
                );
                2
            }
        },
        _ => {
            eprintln!("{USAGE}");
            2
        }
    };
    // No destructors: taking the machine apart takes longer than building it, and the kernel does
    // it without us.
    // SAFETY: `_exit` only ends the process.
    unsafe { libc::_exit(code) }
}

/// Takes over the inherited descriptor, if it is a socket.
fn adopt(number: RawFd) -> Option<UnixStream> {
    const STANDARD: RawFd = 2;
    if number <= STANDARD {
        return None;
    }
    // SAFETY: a number that names no descriptor makes `fstat` fail; nothing is done with it then.
    if !run::is_socket(unsafe { BorrowedFd::borrow_raw(number) }) {
        return None;
    }
    // SAFETY: the caller handed the descriptor over by naming it; nothing else here knows it.
    Some(unsafe { UnixStream::from_raw_fd(number) })
}

fn control(socket: UnixStream, stages: Stages) -> i32 {
    let Ok(sender) = socket.try_clone() else { return 1 };
    let events = Arc::new(Events::new(sender));
    match start(socket, &events, stages) {
        Ok((running, poll)) => run::serve(running, &poll),
        Err(failure) => {
            events.send(&Event::Failed {
                kind: failure.kind().to_owned(),
                message: failure.to_string(),
            });
            1
        }
    }
}

fn start(
    socket: UnixStream,
    events: &Arc<Events>,
    mut stages: Stages,
) -> Result<(Running, Poll), Failure> {
    let mut requests = Requests::new(socket);
    let line = requests.wait_line().map_err(|e| Failure::Config(e.to_string()))?;
    let config: VmmConfig =
        serde_json::from_slice(&line).map_err(|e| Failure::Config(e.to_string()))?;
    stages.mark("config");
    let machine = machine::open(&config, events, &mut stages)?;
    let poll = Poll::new(&requests, &machine.shared, &machine.devices)?;
    let jail: Vec<String> = Vec::new();
    let enter: Enter = Arc::new(|| Ok(()));
    let vcpus = Vcpus::spawn(machine.vcpu_fds, &machine.shared, &enter)?;
    stages.mark("threads");
    events.send(&Event::Started { stages: stages.list, jail: jail.clone() });
    let running = Running {
        shared: machine.shared,
        vcpus,
        devices: machine.devices,
        frozen: machine.frozen,
        requests,
        events: Arc::clone(events),
        paused: machine.paused,
        jail,
    };
    Ok((running, poll))
}
