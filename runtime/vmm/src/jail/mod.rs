//! Locking the monitor in once everything is open and before the guest runs.
//!
//! ```text
//! one thread:   limits ─► namespaces, empty root ─► user, capabilities ─► landlock
//! each thread:  seccomp (vCPU list or event-loop list), the very last step
//! ```
//! A layer the configuration asks for and the host cannot give keeps the guest from starting. The
//! steps without a switch (no new privileges, no core dumps, limits, no capabilities) are always
//! taken. After all of this a monitor that its guest has taken over holds guest memory, its own
//! KVM machine, its disks' descriptors, its console's and its control channel, and the directory
//! of its socket device; it can open nothing, run nothing and talk to nobody else.

mod landlock;
mod limits;
mod namespaces;
mod seccomp;

use std::path::Path;

use parbake_protocol::vmm::VmmConfig;

use crate::error::Failure;
pub use seccomp::Filters;

/// Locks the process in; only while it has a single thread. The result names the active layers,
/// seccomp excepted, which each thread enters by itself.
pub fn enter(config: &VmmConfig) -> Result<Vec<String>, Failure> {
    let mut active = Vec::new();
    limits::no_new_privileges()?;
    limits::restrict()?;
    active.extend(["no_new_privs", "not_dumpable", "rlimits"].map(str::to_owned));
    if config.jail.namespaces {
        // The one place of the file system that a guest's outgoing connection needs.
        let sockets = config.vsock.as_ref().and_then(|vsock| vsock.socket.parent());
        let fresh = namespaces::enter(sockets)?;
        active.extend(fresh.iter().map(|name| format!("namespace:{name}")));
        active.push("empty_root".into());
    }
    if let Some((user, group)) = config.jail.user {
        limits::become_user(user, group)?;
        active.push(format!("user:{user}:{group}"));
    }
    limits::drop_capabilities()?;
    active.push("no_capabilities".into());
    // A change of user turns dumps back on.
    limits::not_dumpable()?;
    if config.jail.landlock {
        let version = landlock::deny_all()?;
        active.push(format!("landlock:{version}"));
    }
    Ok(active)
}

/// Refuses, before anything is opened, what cannot work inside.
pub fn check(config: &VmmConfig) -> Result<(), Failure> {
    let relative = |path: &Path| !path.is_absolute();
    if config.jail.namespaces && config.vsock.iter().any(|vsock| relative(&vsock.socket)) {
        return Err(Failure::Config(
            "the socket device's path must be absolute when the monitor gets a root of its own"
                .into(),
        ));
    }
    Ok(())
}
