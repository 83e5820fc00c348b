//! Landlock with no exception: nothing can be opened, no network port bound or connected, no
//! process outside signalled. (Linux, `Documentation/userspace-api/landlock.rst`; three system
//! calls, no rule.)
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::Failure;

/// `struct landlock_ruleset_attr` up to version 6 of the interface.
#[repr(C)]
#[derive(Default)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

const CREATE_RULESET_VERSION: u32 = 1;
/// All file-system rights of version 1: execute to make_sym.
const FS_V1: u64 = (1 << 13) - 1;
const FS_REFER_V2: u64 = 1 << 13;
const FS_TRUNCATE_V3: u64 = 1 << 14;
const FS_IOCTL_DEV_V5: u64 = 1 << 15;
/// Bind and connect over TCP.
const NET_V4: u64 = 3;
/// Abstract unix sockets and signals.
const SCOPE_V6: u64 = 3;

/// Denies everything this kernel's Landlock can deny, and returns its version.
pub(super) fn deny_all() -> Result<i64, Failure> {
    let unavailable = |what: &str| {
        Failure::Jail(format!(
            "Landlock: {what}: {}; enable it on this host (lsm=landlock, Linux 5.13) or switch the \
             layer off",
            std::io::Error::last_os_error()
        ))
    };
    // SAFETY: with this flag the kernel reads no attributes.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<RulesetAttr>(),
            0usize,
            CREATE_RULESET_VERSION,
        )
    };
    if version < 1 {
        return Err(unavailable("this kernel has none"));
    }
    let since = |first: i64, rights: u64| if version >= first { rights } else { 0 };
    let attr = RulesetAttr {
        handled_access_fs: FS_V1
            | since(2, FS_REFER_V2)
            | since(3, FS_TRUNCATE_V3)
            | since(5, FS_IOCTL_DEV_V5),
        handled_access_net: since(4, NET_V4),
        scoped: since(6, SCOPE_V6),
    };
    let size: usize = match version {
        ..4 => 8,
        4..6 => 16,
        6.. => 24,
    };
    // SAFETY: `attr` lives through the call and is at least `size` bytes long.
    let fd =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size, 0u32) };
    let Ok(fd @ 0..) = i32::try_from(fd) else { return Err(unavailable("creating a ruleset")) };
    // SAFETY: the kernel just made the descriptor for us.
    let ruleset = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: no memory is involved.
    match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0u32) } {
        0 => Ok(version),
        _ => Err(unavailable("entering the ruleset")),
    }
}
