//! The few kernel calls that need memory by address, or change the calling thread: the only unsafe
//! code of this crate.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::process::{WaitId, WaitIdOptions, waitid};
use rustix::thread::UnshareFlags;

/// Moves the calling thread, and what it starts from now on, into a network namespace of its own.
pub(crate) fn new_network_namespace() -> io::Result<()> {
    // SAFETY: descriptor tables stay shared; only CLONE_FILES would make the call unsafe.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?)
}

/// What the calling thread starts from now on lives in a process-id namespace of its own, as its
/// first process.
pub(crate) fn new_process_namespace_for_children() -> io::Result<()> {
    // SAFETY: as above.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) }?)
}

/// Starts `program` with three descriptors as its first ones, an empty environment and no
/// arguments but `arguments`, directly inside a cgroup of version 2, as the first process of a
/// process-id namespace and a process group of its own, and in a network namespace if one is given.
/// The result is its number and a descriptor of it.
///
/// `std::process::Command` moves a process into a cgroup only after it has started, and there the
/// kernel waits for every processor of the host, many milliseconds.
pub(crate) fn spawn_in_cgroup(
    program: &CStr,
    arguments: &[&CStr],
    streams: [BorrowedFd<'_>; 3],
    network: Option<BorrowedFd<'_>>,
    cgroup: BorrowedFd<'_>,
) -> io::Result<(u32, OwnedFd)> {
    let mut argv: Vec<*const libc::c_char> = vec![program.as_ptr()];
    argv.extend(arguments.iter().map(|argument| argument.as_ptr()));
    argv.push(std::ptr::null());
    let envp: [*const libc::c_char; 1] = [std::ptr::null()];
    let mut fd: RawFd = -1;
    // SAFETY: an all-zero `clone_args` is a valid one.
    let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
    // Without CLONE_VM the child has memory of its own; with CLONE_VFORK we wait until it has
    // become the program, or has failed to.
    let flags = libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::CLONE_NEWPID;
    how.flags = u64::from(flags.cast_unsigned()) | CLONE_INTO_CGROUP;
    how.pidfd = (&raw mut fd).addr() as u64;
    how.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    how.cgroup = u64::from(cgroup.as_raw_fd().cast_unsigned());
    // SAFETY: like fork: the child continues here on a copy of this thread's memory. It calls
    // nothing but system calls that need no lock of another thread, and never returns.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of::<libc::clone_args>()) };
    if pid == 0 {
        // SAFETY: as above; all pointers are to memory that was copied along and is not changed.
        unsafe {
            let mut nothing: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut nothing);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const nothing, std::ptr::null_mut());
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            libc::setpgid(0, 0);
            if network.is_none_or(|fd| libc::setns(fd.as_raw_fd(), libc::CLONE_NEWNET) == 0)
                && libc::dup2(streams[0].as_raw_fd(), 0) == 0
                && libc::dup2(streams[1].as_raw_fd(), 1) == 1
                && libc::dup2(streams[2].as_raw_fd(), 2) == 2
            {
                libc::execve(program.as_ptr(), argv.as_ptr(), envp.as_ptr());
            }
            libc::_exit(NOT_STARTED)
        }
    }
    let Ok(pid @ 1..) = u32::try_from(pid) else { return Err(io::Error::last_os_error()) };
    // SAFETY: the kernel just made the descriptor for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let looked = waitid(
        WaitId::PidFd(fd.as_fd()),
        WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT,
    );
    if let Ok(Some(status)) = looked
        && status.exit_status() == Some(NOT_STARTED)
    {
        let _ = waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED);
        return Err(io::Error::other("it cannot be executed"));
    }
    Ok((pid, fd))
}

/// Linux, `include/uapi/linux/sched.h`.
const CLONE_INTO_CGROUP: u64 = 1 << 33;
/// What the child ends with that could not become its program.
const NOT_STARTED: libc::c_int = 127;

/// The virtio header in front of each frame, with the number of buffers.
const VNET_HEADER: libc::c_int = 12;

/// Makes the tap interface `name` in the calling thread's network namespace. It lives as long as
/// the descriptor; frames carry the virtio header.
pub(crate) fn create_tap(name: &str) -> io::Result<OwnedFd> {
    // SAFETY: an all-zero `ifreq` is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.is_empty() || name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an interface name"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL;
    request.ifr_ifru.ifru_flags = (flags & 0xffff) as libc::c_short;
    let tap = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: the request is an initialised `ifreq`, which the call may change.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    let size = VNET_HEADER;
    // SAFETY: the call reads one `int`.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) })?;
    Ok(tap.into())
}

/// The network namespace of a tap interface.
pub(crate) fn namespace_of_tap(tap: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no argument.
    let fd = unsafe { libc::ioctl(tap.as_raw_fd(), TUNGETDEVNETNS) };
    check(fd)?;
    // SAFETY: the kernel just made the descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Linux, `include/uapi/linux/if_tun.h`.
const TUNGETDEVNETNS: libc::c_ulong = 0x54e3;

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
