//! System calls that no safe crate wraps, each behind a safe function.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::{c_int, c_ulong, c_void};

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Listens on a vsock port of this machine, for any peer.
///
/// # Errors
/// No vsock transport, or the port is taken.
pub fn vsock_listen(port: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked before it becomes an owned descriptor.
    let socket = unsafe {
        let fd = check(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0))?;
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: sockaddr_vm is plain data, for which all zeros is a value.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_port = port;
    address.svm_cid = libc::VMADDR_CID_ANY;
    // SAFETY: the pointer and length describe `address`, which outlives the call.
    check(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t,
        )
    })?;
    // SAFETY: no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), 128) })?;
    Ok(socket)
}

/// Whether the other end of a connected vsock stream is the host.
pub fn vsock_peer_is_host(socket: &OwnedFd) -> bool {
    // SAFETY: sockaddr_vm is plain data, for which all zeros is a value.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    let mut length = mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the pointer and length describe `address`; the kernel writes no more than that.
    let result = unsafe {
        libc::getpeername(socket.as_raw_fd(), (&raw mut address).cast(), &raw mut length)
    };
    result == 0 && address.svm_cid == libc::VMADDR_CID_HOST
}

/// Gives this process, or its later children, namespaces of their own.
///
/// # Errors
/// Not allowed; or flags that do more than that, which are refused.
pub fn unshare(flags: c_int) -> io::Result<()> {
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET;
    if flags & !namespaces != 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: no pointers; memory, descriptors and threads stay shared as they are.
    check(unsafe { libc::unshare(flags) }).map(drop)
}

/// Becomes another program; returns only if that failed. Its signals are as programs expect them:
/// Rust's own ignoring of SIGPIPE ends here.
pub fn execute(path: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let list = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (argv, env) = (list(argv), list(env));
    // SAFETY: the default action is no function; the strings and lists are NUL-terminated and
    // outlive the call.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr());
    }
    io::Error::last_os_error()
}

/// Sends a signal to a process (`pid > 0`) or a process group (`pid < -1`).
///
/// # Errors
/// No such process, or not a signal number. Never broadcasts: 0 and -1 are refused.
pub fn kill(pid: i32, signal: i32) -> io::Result<()> {
    if pid == 0 || pid == -1 || signal < 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: no pointers.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Waits until some child has exited, without reaping it, and returns its pid.
///
/// # Errors
/// `ECHILD` when there are no children.
pub fn peek_exited_child() -> io::Result<i32> {
    loop {
        // SAFETY: siginfo_t is plain data, for which all zeros is a value.
        let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
        // SAFETY: `info` is valid for writing and outlives the call.
        match check(unsafe {
            libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT)
        }) {
            // SAFETY: waitid succeeded, so the fields of a SIGCHLD siginfo are filled in.
            Ok(_) => return Ok(unsafe { info.si_pid() }),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Reaps one child that has exited.
pub fn reap(pid: i32) {
    // SAFETY: a null status pointer is allowed.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) };
}

/// Lets all threads share one heap: a thread a connection would otherwise each get one of its own,
/// with pages of its own to be faulted in after every restore.
pub fn share_one_heap() {
    // SAFETY: sets a number; called before the first thread is started.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Bytes that can be read from a pipe or terminal right now.
pub fn readable_bytes(fd: &impl AsRawFd) -> usize {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD stores one int through the pointer, which is valid.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    if result < 0 { 0 } else { usize::try_from(count).unwrap_or(0) }
}

/// The kernel's random pool: credits `bytes` as entropy, then rekeys every generator at once.
///
/// # Errors
/// Not permitted, or a kernel without these requests.
pub fn reseed(bytes: &[u8; 64]) -> io::Result<()> {
    // linux/random.h: _IOW('R', 3, int[2]) and _IO('R', 7).
    const RNDADDENTROPY: c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: c_ulong = 0x5207;
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: c_int,
        size: c_int,
        bytes: [u8; 64],
    }
    let pool = PoolInfo { entropy_bits: 512, size: 64, bytes: *bytes };
    let device = std::fs::File::options().write(true).open("/dev/urandom")?;
    // SAFETY: the request reads a rand_pool_info header and `size` bytes behind it: all of `pool`.
    check(unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY as _, &raw const pool) })?;
    // SAFETY: the request takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG as _) })?;
    Ok(())
}

/// A change to a network interface.
#[derive(Debug, Clone, Copy)]
pub enum LinkChange {
    /// Switch it on.
    Up,
    /// Switch it off: forgets routes and neighbours.
    Down,
    /// Its hardware address.
    Mac([u8; 6]),
    /// Its IPv4 address.
    Address([u8; 4]),
    /// Its IPv4 network mask.
    Mask([u8; 4]),
}

/// Changes an interface.
///
/// # Errors
/// No such interface, or a change it does not take.
pub fn change_link(interface: &str, change: LinkChange) -> io::Result<()> {
    let socket = inet_socket()?;
    // SAFETY: ifreq is plain data, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    if interface.is_empty() || interface.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not an interface name"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    let code = match change {
        LinkChange::Up | LinkChange::Down => {
            call_link(&socket, libc::SIOCGIFFLAGS, &mut request)?;
            // SAFETY: SIOCGIFFLAGS has just filled in this member of the union.
            let flags = unsafe { request.ifr_ifru.ifru_flags };
            let up = libc::IFF_UP as libc::c_short;
            request.ifr_ifru.ifru_flags =
                if matches!(change, LinkChange::Up) { flags | up } else { flags & !up };
            libc::SIOCSIFFLAGS
        }
        LinkChange::Mac(mac) => {
            // SAFETY: sockaddr is plain data, for which all zeros is a value.
            let mut address: libc::sockaddr = unsafe { mem::zeroed() };
            address.sa_family = libc::ARPHRD_ETHER;
            for (to, from) in address.sa_data.iter_mut().zip(mac) {
                *to = from.cast_signed();
            }
            request.ifr_ifru.ifru_hwaddr = address;
            libc::SIOCSIFHWADDR
        }
        LinkChange::Address(ip) => {
            request.ifr_ifru.ifru_addr = inet_address(ip);
            libc::SIOCSIFADDR
        }
        LinkChange::Mask(mask) => {
            request.ifr_ifru.ifru_netmask = inet_address(mask);
            libc::SIOCSIFNETMASK
        }
    };
    call_link(&socket, code, &mut request)
}

/// Adds the IPv4 default route.
///
/// # Errors
/// The gateway is on no attached network.
pub fn add_default_route(gateway: [u8; 4]) -> io::Result<()> {
    let socket = inet_socket()?;
    // SAFETY: rtentry is plain data with one nullable pointer; all zeros is a value.
    let mut route: libc::rtentry = unsafe { mem::zeroed() };
    route.rt_dst = inet_address([0; 4]);
    route.rt_genmask = inet_address([0; 4]);
    route.rt_gateway = inet_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: SIOCADDRT reads one rtentry, which outlives the call; its device pointer is null.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT as _, &raw const route) })
        .map(drop)
}

fn inet_socket() -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked before it becomes an owned descriptor.
    unsafe {
        let fd = check(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn call_link(socket: &OwnedFd, code: c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    let argument: *mut c_void = (&raw mut *request).cast();
    // SAFETY: every SIOC?IF* request used here reads or writes exactly one ifreq.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), code as _, argument) }).map(drop)
}

fn inet_address(ip: [u8; 4]) -> libc::sockaddr {
    // SAFETY: sockaddr is plain data, for which all zeros is a value.
    let mut address: libc::sockaddr = unsafe { mem::zeroed() };
    address.sa_family = libc::AF_INET as libc::sa_family_t;
    // sockaddr_in: two bytes of port, then the address in network order.
    for (to, from) in address.sa_data.iter_mut().skip(2).zip(ip) {
        *to = from.cast_signed();
    }
    address
}
