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
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens on a vsock port, for the host only in effect: guests cannot reach each other.
    ///
    /// # Errors
    /// The vsock transport is missing or the port is taken.
    pub fn vsock(port: u32) -> io::Result<Self> {
        kernel::vsock_listen(port).map(Self)
    }

    /// Listens on a unix socket.
    ///
    /// # Errors
    /// The path exists or cannot be made.
    pub fn unix(path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self(UnixListener::bind(path)?.into()))
    }

    /// Listens on a TCP address. Pair it with a token.
    ///
    /// # Errors
    /// The address is taken or not ours.
    pub fn tcp(address: impl ToSocketAddrs) -> io::Result<Self> {
        Ok(Self(TcpListener::bind(address)?.into()))
    }

    /// Waits for a client.
    ///
    /// # Errors
    /// No descriptor left, or the socket is gone.
    pub fn accept(&self) -> io::Result<OwnedFd> {
        loop {
            match rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
                Ok(socket) => return Ok(socket),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self(listener.into())
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self(listener.into())
    }
}
