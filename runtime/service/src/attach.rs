//! The client's two halves of a running command, see [`crate::wire`].

use std::io::{self, Cursor, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use parbake_node::terminal::stdio::{Input, Output};
use parbake_protocol::agent::{ExecEvent, Exit, Failure, WindowSize};

use crate::model;
use crate::socket::Socket;
use crate::wire::{Frame, WINDOW};

/// How much of standard input is sent at a time.
const CHUNK: usize = 32 << 10;

#[derive(Debug)]
struct Shared {
    writer: Mutex<Socket>,
    credit: Mutex<Credit>,
    changed: Condvar,
}

#[derive(Debug)]
struct Credit {
    bytes: usize,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What goes to the command.
#[derive(Debug, Clone)]
pub struct RemoteInput {
    shared: Arc<Shared>,
}

/// What comes from it.
#[derive(Debug)]
pub struct RemoteOutput {
    reader: io::Chain<Cursor<Bytes>, Socket>,
    shared: Arc<Shared>,
}

impl RemoteOutput {
    /// Both halves, over an upgraded connection of which `rest` has been read.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn over(socket: Socket, rest: Bytes) -> io::Result<(RemoteInput, Self)> {
        let shared = Arc::new(Shared {
            writer: Mutex::new(socket.try_clone()?),
            credit: Mutex::new(Credit { bytes: WINDOW, closed: false }),
            changed: Condvar::new(),
        });
        let input = RemoteInput { shared: Arc::clone(&shared) };
        Ok((input, Self { reader: Cursor::new(rest).chain(socket), shared }))
    }

    fn finish(&self) {
        lock(&self.shared.credit).closed = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for RemoteOutput {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Output for RemoteOutput {
    type Error = io::Error;

    fn next_event(&mut self) -> io::Result<ExecEvent> {
        loop {
            let event = match Frame::read(&mut self.reader)? {
                Some(Frame::Started(pid)) => ExecEvent::Started { pid },
                Some(Frame::Stdout(bytes)) => ExecEvent::Stdout(bytes),
                Some(Frame::Stderr(bytes)) => ExecEvent::Stderr(bytes),
                Some(Frame::Exited(status)) => ExecEvent::Exited(Exit::from(&status)),
                Some(Frame::Failed(failure)) => {
                    ExecEvent::Failed(Failure { kind: failure.kind(), message: failure.message })
                }
                Some(Frame::Credit(count)) => {
                    let mut credit = lock(&self.shared.credit);
                    credit.bytes = credit.bytes.saturating_add(count as usize).min(WINDOW);
                    self.shared.changed.notify_all();
                    continue;
                }
                Some(_) => return Err(io::Error::other("parbaked spoke out of turn")),
                None => {
                    return Err(io::Error::other(
                        "parbaked closed the connection; the command was ended",
                    ));
                }
            };
            if matches!(event, ExecEvent::Exited(_) | ExecEvent::Failed(_)) {
                self.finish();
            }
            return Ok(event);
        }
    }
}

impl RemoteInput {
    fn send(&self, frame: &Frame) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        match frame.write(&mut *lock(&self.shared.writer)) {
            // How it ended is for the output half to tell.
            Err(e) if matches!(e.kind(), BrokenPipe | ConnectionReset | NotConnected) => Ok(()),
            other => other,
        }
    }

    fn take_credit(&self, wanted: usize) -> io::Result<usize> {
        let mut credit = lock(&self.shared.credit);
        loop {
            if credit.closed {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if credit.bytes > 0 {
                let count = wanted.min(credit.bytes);
                credit.bytes -= count;
                return Ok(count);
            }
            credit = self.shared.changed.wait(credit).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Input for RemoteInput {
    fn write_stdin(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let count = self.take_credit(data.len().min(CHUNK))?;
            let (now, later) = data.split_at(count);
            self.send(&Frame::Stdin(now.to_vec()))?;
            data = later;
        }
        Ok(())
    }

    fn close_stdin(&self) -> io::Result<()> {
        self.send(&Frame::StdinEnd)
    }

    fn resize(&self, size: WindowSize) -> io::Result<()> {
        let WindowSize { rows, columns } = size;
        self.send(&Frame::Resize(model::WindowSize { rows, columns }))
    }

    fn signal(&self, number: i32) -> io::Result<()> {
        self.send(&Frame::Signal(number))
    }

    fn hang_up(&self) -> io::Result<()> {
        lock(&self.shared.writer).shut_down();
        Ok(())
    }
}
