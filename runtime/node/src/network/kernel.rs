//! The few kernel calls that need memory by address, or change the calling thread: the only unsafe
//! code of this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

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

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
