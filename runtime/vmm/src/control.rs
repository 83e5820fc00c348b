//! The control channel: one stream socket, JSON lines both ways, descriptors along with requests.
//!
//! The first channel is inherited. A monitor that is to outlive it has a [`Door`] besides, a
//! listening socket at which the host can take the channel over once the last one has closed.

use std::collections::VecDeque;
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use parbake_protocol::vmm::{Event, MAX_LINE, Message, Reply};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Most descriptors waiting for the request that claims them.
const MAX_FILES: usize = 64;

/// The sending side; shared by all threads.
pub struct Events {
    socket: Mutex<Arc<UnixStream>>,
}

impl Events {
    /// Sends on `socket`.
    pub fn new(socket: Arc<UnixStream>) -> Self {
        Self { socket: Mutex::new(socket) }
    }

    /// Sends on another socket from now on.
    pub fn redirect(&self, socket: Arc<UnixStream>) {
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = socket;
    }

    /// Reports an event. A host that is gone does not hear it; the event loop notices that.
    pub fn send(&self, event: &Event) {
        self.write(&Message::Event(event.clone()));
    }

    /// Answers a request.
    pub fn reply(&self, reply: Reply) {
        self.write(&Message::Reply(reply));
    }

    fn write(&self, message: &Message) {
        let Ok(mut line) = serde_json::to_vec(message) else { return };
        line.push(b'\n');
        // One write for a line, under the lock: lines never interleave.
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = (&**socket).write_all(&line);
    }
}

/// What reading the channel can end with.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The host closed its end.
    #[error("the host closed the control channel")]
    Closed,
    /// A line without end.
    #[error("a control line has more than {MAX_LINE} bytes")]
    TooLong,
    /// Descriptors nobody asked for.
    #[error("more than {MAX_FILES} descriptors came without a request that takes them")]
    TooManyFiles,
    /// The socket failed.
    #[error("reading the control channel: {0}")]
    Io(#[from] std::io::Error),
}

/// The receiving side.
pub struct Requests {
    socket: Arc<UnixStream>,
    buffer: Vec<u8>,
    /// How much of `buffer` is known to hold no line end.
    searched: usize,
    files: VecDeque<OwnedFd>,
}

impl Requests {
    /// Receives from `socket`.
    pub fn new(socket: Arc<UnixStream>) -> Self {
        Self { socket, buffer: Vec::new(), searched: 0, files: VecDeque::new() }
    }

    /// For waiting until there is something to [`Self::receive`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Tells the host that nobody listens any more.
    pub fn hang_up(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Reads once from the socket; blocks if there is nothing.
    pub fn receive(&mut self) -> Result<(), ControlError> {
        const CHUNK: usize = 16 << 10;
        let filled = self.buffer.len();
        self.buffer.resize(filled + CHUNK, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let result = rustix::io::retry_on_intr(|| {
            recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut self.buffer[filled..])],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        });
        let bytes = result.as_ref().map_or(0, |received| received.bytes);
        self.buffer.truncate(filled + bytes);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        match result {
            // What a host leaves that went with events unread.
            Err(rustix::io::Errno::CONNRESET) => return Err(ControlError::Closed),
            other => other.map_err(std::io::Error::from)?,
        };
        if self.files.len() > MAX_FILES {
            return Err(ControlError::TooManyFiles);
        }
        if bytes == 0 {
            return Err(ControlError::Closed);
        }
        Ok(())
    }

    /// The next complete line, without its end.
    pub fn line(&mut self) -> Result<Option<Vec<u8>>, ControlError> {
        match self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
            Some(at) => {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                if line.len() > MAX_LINE { Err(ControlError::TooLong) } else { Ok(Some(line)) }
            }
            None if self.buffer.len() > MAX_LINE => Err(ControlError::TooLong),
            None => {
                self.searched = self.buffer.len();
                Ok(None)
            }
        }
    }

    /// Blocks until there is a complete line.
    pub fn wait_line(&mut self) -> Result<Vec<u8>, ControlError> {
        loop {
            if let Some(line) = self.line()? {
                return Ok(line);
            }
            self.receive()?;
        }
    }

    /// Takes the first `count` descriptors that came along, if there are so many.
    pub fn take_files(&mut self, count: usize) -> Option<Vec<OwnedFd>> {
        (count <= self.files.len()).then(|| self.files.drain(..count).collect())
    }
}

/// Where the host comes back to a monitor that outlived its channel.
pub struct Door {
    listener: UnixListener,
    owner: u32,
}

impl Door {
    /// Listens at `path`, for processes of this process's user.
    ///
    /// # Errors
    /// The socket's.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let owner = rustix::process::geteuid().as_raw();
        Ok(Self { listener: UnixListener::bind(path)?, owner })
    }

    /// For waiting until somebody knocks.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Lets in who knocks, if it is the owner.
    pub fn admit(&self) -> Option<Arc<UnixStream>> {
        let (socket, _) = self.listener.accept().ok()?;
        (user_of(&socket)? == self.owner).then(|| Arc::new(socket))
    }
}

/// The user at the other end. Asked by hand: whoever comes from outside of this process's namespace
/// has no process id in it, which a type for process ids cannot say.
#[allow(unsafe_code)]
fn user_of(socket: &UnixStream) -> Option<u32> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: both places live through the call, and the second says how large the first is.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    (code == 0 && length as usize == size_of_val(&peer)).then_some(peer.uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (UnixStream, Requests) {
        let (ours, theirs) = UnixStream::pair().expect("socket pair");
        (ours, Requests::new(Arc::new(theirs)))
    }

    #[test]
    fn lines_are_split_wherever_the_stream_breaks_them() {
        let (mut host, mut requests) = pair();
        host.write_all(b"one\ntw").expect("write");
        assert_eq!(requests.wait_line().expect("line"), b"one");
        assert_eq!(requests.line().expect("none yet"), None);
        host.write_all(b"o\n\n").expect("write");
        assert_eq!(requests.wait_line().expect("line"), b"two");
        assert_eq!(requests.wait_line().expect("line"), b"");
        drop(host);
        assert!(matches!(requests.wait_line(), Err(ControlError::Closed)));
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let (mut host, mut requests) = pair();
        let sender = std::thread::spawn(move || {
            let _ = host.write_all(&vec![b'x'; MAX_LINE + (64 << 10)]);
        });
        assert!(matches!(requests.wait_line(), Err(ControlError::TooLong)));
        drop(requests);
        sender.join().expect("sender");
    }
}
