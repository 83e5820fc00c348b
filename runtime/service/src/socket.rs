//! A connected socket, of either family, for threads.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;

use bytes::Bytes;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;

/// A connected stream socket.
#[derive(Debug)]
pub enum Socket {
    /// Of the unix family.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Socket {
    /// Takes an upgraded connection out of the asynchronous world, and with it what was read of it
    /// already.
    ///
    /// # Errors
    /// It is no socket of ours.
    pub fn of(upgraded: Upgraded) -> io::Result<(Self, Bytes)> {
        let upgraded = match upgraded.downcast::<TokioIo<tokio::net::UnixStream>>() {
            Ok(parts) => {
                let stream = parts.io.into_inner().into_std()?;
                stream.set_nonblocking(false)?;
                return Ok((Self::Unix(stream), parts.read_buf));
            }
            Err(upgraded) => upgraded,
        };
        let parts = upgraded
            .downcast::<TokioIo<tokio::net::TcpStream>>()
            .map_err(|_| io::Error::other("not a socket"))?;
        let stream = parts.io.into_inner().into_std()?;
        stream.set_nonblocking(false)?;
        Ok((Self::Tcp(stream), parts.read_buf))
    }

    /// A second handle.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
        }
    }

    /// Ends both directions, for all handles.
    pub fn shut_down(&self) {
        // It may have ended already.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
