//! `parbake-vmm --control-fd N`: runs one guest and is controlled over descriptor N.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use parbake_protocol::vmm::{Event, Tap, VmmConfig};
use parbake_vmm::control::{Door, Events, Requests};
use parbake_vmm::error::Failure;
use parbake_vmm::jail::{self, Filters};
use parbake_vmm::machine::{self, Stages};
use parbake_vmm::run::{self, Poll, Running};
use parbake_vmm::vcpu::{Enter, First, Vcpus};

const USAGE: &str = "usage: parbake-vmm --control-fd N | --version";

fn main() {
    let stages = Stages::start();
    // One heap for all threads: the C library opens a file of /proc when a thread's own heap
    // shrinks, and behind the jail no thread may open anything.
    // SAFETY: no other thread runs yet, and the call only sets a number.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
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
    exit(code)
}

/// Takes over the inherited descriptor, if it is a socket.
fn adopt(number: RawFd) -> Option<UnixStream> {
    // Standard input may be it: that is the one descriptor every way of starting a process can
    // hand over. Standard output and error may not.
    if !(number == 0 || number > 2) {
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
    let socket = Arc::new(socket);
    let events = Arc::new(Events::new(Arc::clone(&socket)));
    match start(socket, &events, stages) {
        // The guest's first processor runs right here.
        Ok(first) => first.run(),
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
    socket: Arc<UnixStream>,
    events: &Arc<Events>,
    mut stages: Stages,
) -> Result<First, Failure> {
    let mut requests = Requests::new(socket);
    let line = requests.wait_line().map_err(|e| Failure::Config(e.to_string()))?;
    let config: VmmConfig =
        serde_json::from_slice(&line).map_err(|e| Failure::Config(e.to_string()))?;
    stages.mark("config");
    jail::check(&config)?;
    let door =
        config.control.as_deref().map(Door::open).transpose().map_err(|source| Failure::Host {
            what: "listening for a host that comes back",
            source,
        })?;
    let passed = config.net.as_ref().is_some_and(|net| net.tap == Some(Tap::Passed));
    let tap = if passed { requests.take_files(1).and_then(|mut files| files.pop()) } else { None };
    let machine = machine::open(&config, tap, events, &mut stages)?;
    let lifetime = config.lifetime_ms.map(Duration::from_millis);
    let poll = Poll::new(&requests, &machine.shared, &machine.devices, lifetime)?;
    let filters = config.jail.seccomp.then(Filters::compile).transpose()?.map(Arc::new);
    stages.mark("filters");
    let mut jail = jail::enter(&config)?;
    if filters.is_some() {
        jail.push("seccomp".into());
    }
    stages.mark("jail");
    let vcpu_filters = filters.clone();
    let enter: Enter =
        Arc::new(move || vcpu_filters.as_ref().map_or(Ok(()), |filters| filters.enter_vcpu()));
    let (vcpus, first) = Vcpus::spawn(machine.vcpu_fds, &machine.shared, &enter)?;
    if let Some(filling) = machine.filling {
        let filters = filters.clone();
        let enter: Enter =
            Arc::new(move || filters.as_ref().map_or(Ok(()), |filters| filters.enter_vcpu()));
        filling.watch(Arc::clone(events), enter)?;
    }
    stages.mark("threads");
    events.send(&Event::Started { stages: stages.list, jail: jail.clone() });
    let running = Running {
        shared: machine.shared,
        vcpus,
        devices: machine.devices,
        frozen: machine.frozen,
        requests,
        door,
        events: Arc::clone(events),
        paused: machine.paused,
        jail,
    };
    if !machine.paused {
        running.vcpus.resume();
    }
    std::thread::Builder::new()
        .name("events".into())
        .spawn(move || {
            exit(match filters.as_ref().map_or(Ok(()), |filters| filters.enter_events()) {
                Ok(()) => run::serve(running, &poll),
                Err(failure) => running.fail(&failure),
            })
        })
        .map_err(|source| Failure::Host { what: "starting the event loop", source })?;
    Ok(first)
}

/// Ends the process without destructors: taking the machine apart takes longer than building it,
/// and the kernel does it without us.
fn exit(code: i32) -> ! {
    // SAFETY: `_exit` only ends the process.
    unsafe { libc::_exit(code) }
}
