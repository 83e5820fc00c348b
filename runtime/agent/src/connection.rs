//! One client's stream: frames over a polled, non-blocking socket.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use parbake_protocol::agent::{Failure, FailureKind, Frame, FrameError, FrameReader, Reply};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

/// How long a client may take to accept one message outside of exec.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the last bytes may take to be fetched once both sides are done.
const LINGER: Duration = Duration::from_secs(2);

/// A connected client.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    reader: FrameReader,
}

/// The socket itself, without the frames.
struct Raw<'a>(&'a OwnedFd);

impl Read for Raw<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (received, _) = rustix::net::recv(self.0, buffer, RecvFlags::empty())?;
        Ok(received)
    }
}

impl Connection {
    /// Takes over an accepted socket.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket, reader: FrameReader::new() })
    }

    /// The socket, for polling.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// A second handle on the socket, with which others can end the connection.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn handle(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Receives what is there without waiting. False at the end of the stream.
    ///
    /// # Errors
    /// The socket's, but not `WouldBlock`.
    pub fn fill(&mut self) -> io::Result<bool> {
        match self.reader.fill(&mut Raw(&self.socket)) {
            Ok(0) => Ok(false),
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// The next frame that has been received completely.
    ///
    /// # Errors
    /// Bytes that are no frame.
    pub fn buffered(&mut self) -> Result<Option<Frame>, FrameError> {
        self.reader.next_buffered()
    }

    /// Waits for a frame; `None` at the end of the stream.
    ///
    /// # Errors
    /// The socket's, bytes that are no frame, or `TimedOut`.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Option<Frame>, FrameError> {
        let deadline = timeout.map(|t| Instant::now() + t);
        loop {
            if let Some(frame) = self.reader.next_buffered()? {
                return Ok(Some(frame));
            }
            wait(&self.socket, PollFlags::IN, deadline)?;
            if !self.fill()? {
                return if self.reader.is_empty() { Ok(None) } else { Err(FrameError::Truncated) };
            }
        }
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// The socket's, or `TimedOut`.
    pub fn send(&mut self, frame: &Frame) -> Result<(), FrameError> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes)?;
        let deadline = Instant::now() + SEND_TIMEOUT;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match self.send_some(rest)? {
                0 => wait(&self.socket, PollFlags::OUT, Some(deadline))?,
                n => rest = rest.get(n..).unwrap_or_default(),
            }
        }
        Ok(())
    }

    /// Sends as much as goes without waiting; 0 if nothing does.
    ///
    /// # Errors
    /// The socket's, but not `WouldBlock`.
    pub fn send_some(&self, bytes: &[u8]) -> io::Result<usize> {
        match rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(n) => Ok(n),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(0),
            Err(e) => Err(e.into()),
        }
    }

    /// Sends the answer to a plain request.
    ///
    /// # Errors
    /// As [`Connection::send`].
    pub fn reply(&mut self, result: Result<Reply, Failure>) -> Result<(), FrameError> {
        self.send(&Frame::Reply(result.unwrap_or_else(Reply::Failed)))
    }

    /// Ends the stream so that what was sent last arrives: says so, then reads until the client
    /// has gone, for a moment at most.
    pub fn finish(mut self) {
        let deadline = Instant::now() + LINGER;
        if rustix::net::shutdown(&self.socket, Shutdown::Write).is_err() {
            return;
        }
        // Whatever still comes is not wanted; reading it keeps a reset from overtaking our data.
        let mut scrap = [0; 4096];
        while wait(&self.socket, PollFlags::IN, Some(deadline)).is_ok() {
            match Raw(&self.socket).read(&mut scrap) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
        self.reader = FrameReader::new();
    }
}

/// Waits until `events` are there. Hang-ups and errors count as events.
fn wait(fd: impl AsFd, events: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
    loop {
        let timeout = deadline.map(|d| to_timespec(d.saturating_duration_since(Instant::now())));
        match poll(&mut [PollFd::new(&fd, events)], timeout.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// A duration as the kernel takes it.
pub(crate) fn to_timespec(duration: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// A failure with its message.
pub(crate) fn failure(kind: FailureKind, message: impl Into<String>) -> Failure {
    Failure { kind, message: message.into() }
}
