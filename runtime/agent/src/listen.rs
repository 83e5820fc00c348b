//! Where clients come from: a vsock port, a unix socket or a TCP address.

use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::SocketFlags;

use crate::kernel;

/// A listening stream socket of any family.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    host_only: bool,
}

impl Listener {
    /// Listens on a vsock port, for the host: a process of this machine that connects to its own
    /// port through the loopback transport would otherwise be root.
    ///
    /// # Errors
    /// The vsock transport is missing or the port is taken.
    pub fn vsock(port: u32) -> io::Result<Self> {
        kernel::vsock_listen(port).map(|socket| Self { socket, host_only: true })
    }

    /// Listens on a unix socket.
    ///
    /// # Errors
    /// The path exists or cannot be made.
    pub fn unix(path: impl AsRef<Path>) -> io::Result<Self> {
        UnixListener::bind(path).map(Self::from)
    }

    /// Listens on a TCP address. Pair it with a token.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub fn tcp(address: impl ToSocketAddrs) -> io::Result<Self> {
        TcpListener::bind(address).map(Self::from)
    }

    /// Waits for a client.
    ///
    /// # Errors
    /// No descriptor left, or the socket is gone.
    pub fn accept(&self) -> io::Result<OwnedFd> {
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) if self.host_only && !kernel::vsock_peer_is_host(&socket) => {}
                Ok(socket) => return Ok(socket),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self { socket: listener.into(), host_only: false }
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self { socket: listener.into(), host_only: false }
    }
}
