//! Starting a monitor where it finds part of its jail ready.
//!
//! A process inherits its namespaces. What a monitor would have to make for itself while somebody
//! waits (an empty network namespace) it is given, and what it cannot make without starting another
//! process (a process-id namespace) it is given too, by starting it from a thread that is there
//! already. Where the rights for that are missing it starts as it is, and makes what it can; the
//! list of active layers tells.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::network::kernel;

/// Starts `command`.
pub(crate) fn spawn(command: &mut Command) -> io::Result<Child> {
    if !rustix::process::geteuid().is_root() {
        return command.spawn();
    }
    thread::scope(|scope| {
        let start = || {
            if let Some(empty) = empty_network() {
                let _ = move_into_link_name_space(empty.as_fd(), Some(LinkNameSpaceType::Network));
            }
            // For one child only: with the first process of a namespace all of it ends.
            let _ = kernel::new_process_namespace_for_children();
            command.spawn()
        };
        let thread = thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, start)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")))
    })
}

/// A network namespace with nothing in it, for all monitors of this process.
fn empty_network() -> Option<&'static OwnedFd> {
    static EMPTY: OnceLock<Option<OwnedFd>> = OnceLock::new();
    EMPTY
        .get_or_init(|| {
            let make = || {
                kernel::new_network_namespace()?;
                File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
            };
            thread::spawn(make).join().ok()?.ok()
        })
        .as_ref()
}
