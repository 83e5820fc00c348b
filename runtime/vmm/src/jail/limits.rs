//! What every monitor gives up, whatever the configuration says.
#![allow(unsafe_code)]

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::error::Failure;

/// Descriptors the monitor may hold: its own, two a socket connection, a snapshot's.
const MAX_DESCRIPTORS: u64 = 2048;

fn failed(what: &str) -> impl Fn(rustix::io::Errno) -> Failure {
    move |e| Failure::Jail(format!("{what}: {e}"))
}

/// No program gains privileges by being executed; also what lets seccomp and Landlock in.
pub(super) fn no_new_privileges() -> Result<(), Failure> {
    rustix::thread::set_no_new_privs(true).map_err(failed("no new privileges"))
}

/// Nobody but the superuser looks into this process.
pub(super) fn not_dumpable() -> Result<(), Failure> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("not dumpable"))
}

/// No core dump with guest memory in it, a bounded number of descriptors.
pub(super) fn restrict() -> Result<(), Failure> {
    let fixed = |most| Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Core, fixed(0)).map_err(failed("core limit"))?;
    let allowed = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    setrlimit(Resource::Nofile, fixed(MAX_DESCRIPTORS.min(allowed)))
        .map_err(failed("descriptor limit"))?;
    not_dumpable()
}

/// Becomes another user, for good.
pub(super) fn become_user(user: u32, group: u32) -> Result<(), Failure> {
    let check = |what: &str, code: libc::c_int| match code {
        0 => Ok(()),
        _ => Err(Failure::Jail(format!(
            "{what} to {user}:{group}: {}; start the monitor as root, or without a user",
            std::io::Error::last_os_error()
        ))),
    };
    // SAFETY: an empty list; the pointer is not read.
    check("dropping groups", unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: no memory is involved.
    check("changing the group", unsafe { libc::setresgid(group, group, group) })?;
    // SAFETY: no memory is involved.
    check("changing the user", unsafe { libc::setresuid(user, user, user) })
}

/// Drops every capability; root without them owns files but rules nothing.
pub(super) fn drop_capabilities() -> Result<(), Failure> {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).map_err(failed("dropping capabilities"))
}
