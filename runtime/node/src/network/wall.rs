//! What the host's own wall kept back, told to whoever runs the sandbox it came from.
//!
//! A namespace's filter denies nearly everything first, and tells it. What gets past it and is kept
//! back here went to an address that the host was given later, or came out of a namespace whose
//! filter failed. The kernel gives each log group to one listener only: the first pool on the host
//! that asks; for the others, such packets are counted and not told.

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::log::Log;
use super::rules;
use crate::event::{EventKind, EventSender, SandboxEvent};

/// Who is behind an address of a wire, and who is told.
type Known = HashMap<Ipv4Addr, (String, EventSender)>;

/// The sandboxes this pool's wall knows, and its listener.
#[derive(Debug)]
pub(crate) struct Wall {
    known: Arc<Mutex<Known>>,
    listener: Option<(Arc<OwnedFd>, JoinHandle<()>)>,
}

impl Wall {
    /// Listens in the network namespace of the calling thread, unless somebody else does.
    pub(crate) fn start() -> Self {
        let known = Arc::<Mutex<Known>>::default();
        let listener = listen(Arc::clone(&known)).ok();
        Self { known, listener }
    }

    /// From now until the result is dropped, `address` is that of sandbox `id`.
    pub(crate) fn know(&self, address: Ipv4Addr, id: &str, events: Option<EventSender>) -> Face {
        if let Some(events) = events {
            lock(&self.known).insert(address, (id.to_owned(), events));
        }
        Face { known: Arc::clone(&self.known), address }
    }
}

impl Drop for Wall {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.listener.take() {
            let _ = rustix::io::write(&stop, &1u64.to_ne_bytes());
            let _ = thread.join();
        }
    }
}

/// A sandbox that the wall knows.
#[derive(Debug)]
pub(crate) struct Face {
    known: Arc<Mutex<Known>>,
    address: Ipv4Addr,
}

impl Drop for Face {
    fn drop(&mut self) {
        lock(&self.known).remove(&self.address);
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

fn listen(known: Arc<Mutex<Known>>) -> io::Result<(Arc<OwnedFd>, JoinHandle<()>)> {
    let log = Log::open(rules::HOST_LOG_GROUP)?;
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let stopped = Arc::clone(&stop);
    let run = move || {
        loop {
            let mut sources =
                [PollFd::new(&*stopped, PollFlags::IN), PollFd::new(&log, PollFlags::IN)];
            match poll(&mut sources, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            let ended = !sources[0].revents().is_empty();
            tell(&log, &known);
            if ended {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("wall".to_owned()).stack_size(128 << 10).spawn(run)?;
    Ok((stop, thread))
}

fn tell(log: &Log, known: &Mutex<Known>) {
    for denied in log.take() {
        let Some((id, events)) = denied.source.and_then(|source| lock(known).get(&source).cloned())
        else {
            continue;
        };
        let kind = EventKind::EgressDenied {
            destination: denied.destination,
            port: denied.port,
            protocol: denied.protocol,
            reason: rules::reason(&denied.prefix).to_owned(),
        };
        // What does not fit is dropped, as everywhere; the counters have it.
        let _ = events.try_send(SandboxEvent { sandbox: id, at: SystemTime::now(), kind });
    }
}
