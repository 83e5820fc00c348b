//! The system calls that take guest memory by address, and those of tap interfaces: the only unsafe
//! code of the devices.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;

use vm_memory::VolatileSlice;

/// The most slices the kernel takes at once (`UIO_MAXIOV`).
const MAX_SLICES: u16 = 1024;

/// Raw vectors into guest memory, and the guards that keep it mapped while they are used.
struct Vectors<G> {
    raw: Vec<libc::iovec>,
    _guards: Vec<G>,
}

impl<G> Vectors<G> {
    fn count(&self) -> libc::c_int {
        u16::try_from(self.raw.len()).unwrap_or(MAX_SLICES).into()
    }
}

/// Reads from `file` at `offset` into `slices`; how many bytes, 0 at the end of the file.
pub(super) fn preadv(
    file: impl AsFd,
    slices: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let vectors = writable(slices);
    let offset = file_offset(offset)?;
    retry(|| {
        // SAFETY: every vector points to `len` writable bytes of a live mapping (a `VolatileSlice`'s
        // invariant), which the guards keep; the kernel treats the bytes as opaque.
        unsafe {
            libc::preadv(file.as_fd().as_raw_fd(), vectors.raw.as_ptr(), vectors.count(), offset)
        }
    })
}

/// Writes `slices` to `file` at `offset`; how many bytes.
pub(super) fn pwritev(
    file: impl AsFd,
    slices: &[VolatileSlice<'_>],
    offset: u64,
) -> io::Result<usize> {
    let vectors = readable(slices);
    let offset = file_offset(offset)?;
    retry(|| {
        // SAFETY: as in `preadv`, with readable bytes.
        unsafe {
            libc::pwritev(file.as_fd().as_raw_fd(), vectors.raw.as_ptr(), vectors.count(), offset)
        }
    })
}

/// Reads from the stream or device `fd` into `slices`; how many bytes, 0 at its end.
pub(super) fn readv(fd: impl AsFd, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let vectors = writable(slices);
    retry(|| {
        // SAFETY: as in `preadv`.
        unsafe { libc::readv(fd.as_fd().as_raw_fd(), vectors.raw.as_ptr(), vectors.count()) }
    })
}

/// Sends `slices` on a socket without waiting and without `SIGPIPE`; how many bytes went.
pub(super) fn send(socket: impl AsFd, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let mut vectors = readable(slices);
    // SAFETY: an all-zero `msghdr` is a valid, empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.raw.as_mut_ptr();
    message.msg_iovlen = vectors.raw.len();
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    retry(|| {
        // SAFETY: the header names the vectors, which live until after the call, as in `pwritev`.
        unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) }
    })
}

/// Writes `slices` to the device `fd` as one message; how many bytes.
pub(super) fn writev(fd: impl AsFd, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    let vectors = readable(slices);
    retry(|| {
        // SAFETY: as in `pwritev`.
        unsafe { libc::writev(fd.as_fd().as_raw_fd(), vectors.raw.as_ptr(), vectors.count()) }
    })
}

/// The guest takes frames whose checksum is still missing.
pub(super) const TUN_F_CSUM: u32 = libc::TUN_F_CSUM;
/// The guest takes large TCP segments over IPv4.
pub(super) const TUN_F_TSO4: u32 = libc::TUN_F_TSO4;
/// The guest takes large TCP segments over IPv6.
pub(super) const TUN_F_TSO6: u32 = libc::TUN_F_TSO6;
/// Those may carry ECN bits.
pub(super) const TUN_F_TSO_ECN: u32 = libc::TUN_F_TSO_ECN;

/// The virtio header in front of each frame, with the number of buffers.
const VNET_HEADER: libc::c_int = 12;

/// Attaches to the existing tap interface `name`, nonblocking.
pub(super) fn open_tap(name: &str) -> io::Result<File> {
    let mut request: libc::ifreq = {
        // SAFETY: an all-zero `ifreq` is a valid one.
        unsafe { std::mem::zeroed() }
    };
    // The kernel wants a final zero byte, and takes a `%` as a pattern for a new name.
    if name.is_empty() || name.len() >= request.ifr_name.len() || name.contains(['%', '/', '\0']) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an interface name"));
    }
    // Attaching to a name that does not exist would create it.
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    rustix::net::netdevice::name_to_index(&socket, name)?;
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
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
    Ok(tap)
}

/// Tells a tap what the guest can receive.
pub(super) fn set_tap_offloads(tap: &File, offloads: u32) -> io::Result<()> {
    // SAFETY: the argument is a number.
    check(unsafe {
        libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads))
    })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn writable<'a>(
    slices: &'a [VolatileSlice<'a>],
) -> Vectors<vm_memory::volatile_memory::PtrGuardMut> {
    let guards: Vec<_> =
        slices.iter().take(MAX_SLICES.into()).map(VolatileSlice::ptr_guard_mut).collect();
    let raw = guards
        .iter()
        .map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() })
        .collect();
    Vectors { raw, _guards: guards }
}

fn readable<'a>(slices: &'a [VolatileSlice<'a>]) -> Vectors<vm_memory::volatile_memory::PtrGuard> {
    let guards: Vec<_> =
        slices.iter().take(MAX_SLICES.into()).map(VolatileSlice::ptr_guard).collect();
    let raw = guards
        .iter()
        .map(|guard| libc::iovec {
            iov_base: guard.as_ptr().cast_mut().cast(),
            iov_len: guard.len(),
        })
        .collect();
    Vectors { raw, _guards: guards }
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn retry(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
