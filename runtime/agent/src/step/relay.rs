//! What passes between a step's program and the host while it runs: its two outputs, and connections
//! through the sockets that are mounted for it.
//!
//! One thread does all of it: the process that waits for the program can make no other.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Child;

use parbake_protocol::agent::{
    DATA_CHUNK, Frame, FrameReader, MOST_CONNECTIONS, SocketEvent, SocketFrame, StepMount,
};
use rustix::event::{PollFd, PollFlags, poll};

use super::send;

/// What one connection may leave unread before it is ended.
const MOST_UNREAD: usize = 1 << 20;

/// The sockets of a step, and who is connected.
#[derive(Default)]
pub struct Sockets {
    listeners: Vec<(u32, UnixListener)>,
    connections: BTreeMap<u32, Connection>,
    /// The number of the next connection.
    next: u32,
    /// The host says nothing more.
    deaf: bool,
}

struct Connection {
    stream: UnixStream,
    /// From the host, not yet taken.
    unread: Vec<u8>,
    /// The host said its last.
    ended: bool,
}

/// Something to wait for.
#[derive(Clone, Copy)]
enum Waiting {
    Output(usize),
    Host,
    Listener(usize),
    Connection(u32),
}

impl Sockets {
    /// Listens at `path` for the mount of this number, if it is a socket.
    pub fn listen(&mut self, number: usize, mount: &StepMount, path: &Path) -> io::Result<()> {
        let StepMount::Socket { mode, uid, gid, .. } = mount else { return Ok(()) };
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        chown(path, Some(*uid), Some(*gid))?;
        fs::set_permissions(path, fs::Permissions::from_mode(*mode))?;
        self.listeners.push((u32::try_from(number).unwrap_or(u32::MAX), listener));
        Ok(())
    }

    fn accept(&mut self, listener: usize) -> io::Result<()> {
        let (mount, listener) = &self.listeners[listener];
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // Gone again, or a moment without descriptors.
            Err(_) => return Ok(()),
        };
        if self.connections.len() >= MOST_CONNECTIONS || stream.set_nonblocking(true).is_err() {
            return Ok(());
        }
        let connection = self.next;
        self.next = self.next.wrapping_add(1);
        self.connections
            .insert(connection, Connection { stream, unread: Vec::new(), ended: false });
        tell(connection, SocketEvent::Opened { mount: *mount })
    }

    /// A frame of the host's.
    fn take(&mut self, frame: Frame) -> io::Result<()> {
        let Frame::Socket(SocketFrame { connection, event }) = frame else { return Ok(()) };
        let Some(known) = self.connections.get_mut(&connection) else { return Ok(()) };
        match event {
            SocketEvent::Data(bytes) => known.unread.extend(bytes),
            SocketEvent::End => known.ended = true,
            SocketEvent::Opened { .. } => {}
        }
        self.move_on(connection, PollFlags::OUT)
    }

    /// Writes what can be written, reads what there is, and ends what is over.
    fn move_on(&mut self, number: u32, ready: PollFlags) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let mut over = false;
        while !over && !connection.unread.is_empty() {
            match connection.stream.write(&connection.unread) {
                Ok(written) => drop(connection.unread.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => over = true,
            }
        }
        over |= connection.unread.len() > MOST_UNREAD;
        over |= connection.ended && connection.unread.is_empty();
        if !over && ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            let mut buffer = vec![0; DATA_CHUNK];
            match connection.stream.read(&mut buffer) {
                Ok(0) => over = true,
                Ok(length) => {
                    buffer.truncate(length);
                    return tell(number, SocketEvent::Data(buffer));
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => over = true,
            }
        }
        if over {
            self.connections.remove(&number);
            return tell(number, SocketEvent::End);
        }
        Ok(())
    }

    /// What to wait for.
    fn waiting(&self) -> Vec<(Waiting, BorrowedFd<'_>, PollFlags)> {
        let mut all = Vec::new();
        for (index, (_, listener)) in self.listeners.iter().enumerate() {
            all.push((Waiting::Listener(index), listener.as_fd(), PollFlags::IN));
        }
        for (number, connection) in &self.connections {
            let write =
                if connection.unread.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            all.push((
                Waiting::Connection(*number),
                connection.stream.as_fd(),
                PollFlags::IN | write,
            ));
        }
        all
    }
}

fn tell(connection: u32, event: SocketEvent) -> io::Result<()> {
    send(Frame::Socket(SocketFrame { connection, event }))
}

/// Passes everything on until both outputs end. That is when the program ends: its namespace goes
/// with it.
pub fn relay(child: &mut Child, sockets: &mut Sockets, input: &mut FrameReader) -> io::Result<()> {
    let mut pipes: [Option<OwnedFd>; 2] =
        [child.stdout.take().map(Into::into), child.stderr.take().map(Into::into)];
    let mut buffer = vec![0; DATA_CHUNK];
    let stdin = io::stdin();
    while pipes.iter().any(Option::is_some) {
        let hears = !sockets.listeners.is_empty() && !sockets.deaf;
        if hears {
            while let Some(frame) = input.next_buffered().map_err(io::Error::other)? {
                sockets.take(frame)?;
            }
        }
        let ready: Vec<(Waiting, PollFlags)> = {
            let mut all = sockets.waiting();
            if hears {
                all.push((Waiting::Host, stdin.as_fd(), PollFlags::IN));
            }
            for (index, pipe) in pipes.iter().enumerate() {
                if let Some(pipe) = pipe {
                    all.push((Waiting::Output(index), pipe.as_fd(), PollFlags::IN));
                }
            }
            let mut wanted: Vec<PollFd<'_>> = all
                .iter()
                .map(|(_, descriptor, flags)| PollFd::from_borrowed_fd(*descriptor, *flags))
                .collect();
            match poll(&mut wanted, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let flags = wanted.iter().map(PollFd::revents);
            all.iter().map(|(what, ..)| *what).zip(flags).collect()
        };
        for (what, flags) in ready.into_iter().filter(|(_, flags)| !flags.is_empty()) {
            match what {
                Waiting::Listener(index) => sockets.accept(index)?,
                Waiting::Connection(number) => sockets.move_on(number, flags)?,
                Waiting::Host => sockets.deaf = input.fill(&mut stdin.lock())? == 0,
                Waiting::Output(index) => {
                    let Some(pipe) = pipes[index].as_ref() else { continue };
                    match rustix::io::read(pipe, &mut buffer[..]) {
                        Ok(0) => pipes[index] = None,
                        Ok(length) => {
                            let bytes = buffer[..length].to_vec();
                            let frame = if index == 0 {
                                Frame::Stdout(bytes)
                            } else {
                                Frame::Stderr(bytes)
                            };
                            send(frame)?;
                        }
                        Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
    }
    Ok(())
}
