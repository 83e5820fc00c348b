//! The host's side of a running program: input and output for two threads.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::client::{Client, ClientError};
use super::message::*;
use super::stream::Stream;
use super::wire::Frame;
use super::{DATA_CHUNK, STDIN_WINDOW};

#[derive(Debug)]
struct Shared<S> {
    writer: Mutex<S>,
    credit: Mutex<Credit>,
    changed: Condvar,
}

#[derive(Debug)]
struct Credit {
    bytes: usize,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding these, and their contents are valid at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running program: its input half and its output half, for two threads or one.
#[derive(Debug)]
pub struct ExecSession<S: Stream> {
    /// Towards the program.
    pub input: ExecInput<S>,
    /// From the program.
    pub output: ExecOutput<S>,
}

/// Everything a program wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// How it ended.
    pub exit: Exit,
}

impl<S: Stream> ExecSession<S> {
    /// The session of a client that has just sent an exec request.
    pub(super) fn new(client: Client<S>, limit: Option<u64>) -> Result<Self, ClientError> {
        let shared = Arc::new(Shared {
            writer: Mutex::new(client.stream.try_clone()?),
            credit: Mutex::new(Credit { bytes: STDIN_WINDOW, closed: false }),
            changed: Condvar::new(),
        });
        Ok(Self {
            input: ExecInput { shared: Arc::clone(&shared) },
            output: ExecOutput { client, shared, left: limit, finished: false },
        })
    }

    /// Waits for the next event; see [`ExecOutput::next_event`].
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn next_event(&mut self) -> Result<ExecEvent, ClientError> {
        self.output.next_event()
    }

    /// The two halves.
    pub fn split(self) -> (ExecInput<S>, ExecOutput<S>) {
        (self.input, self.output)
    }

    /// Closes standard input and collects at most `limit` bytes of output.
    ///
    /// # Errors
    /// See [`ClientError`]; `Failed` if the program could not be started, `TooLarge` beyond the
    /// limit.
    pub fn wait_with_output(mut self, limit: u64) -> Result<Output, ClientError> {
        self.input.close_stdin()?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next_event()? {
                ExecEvent::Started { .. } => {}
                ExecEvent::Stdout(data) => stdout.extend_from_slice(&data),
                ExecEvent::Stderr(data) => stderr.extend_from_slice(&data),
                ExecEvent::Exited(exit) => return Ok(Output { stdout, stderr, exit }),
                ExecEvent::Failed(failure) => return Err(ClientError::Failed(failure)),
            }
            if stdout.len() as u64 + stderr.len() as u64 > limit {
                return Err(ClientError::TooLarge { limit });
            }
        }
    }
}

/// Towards a running program. Clones may be used from several threads.
#[derive(Debug)]
pub struct ExecInput<S: Stream> {
    shared: Arc<Shared<S>>,
}

impl<S: Stream> Clone for ExecInput<S> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<S: Stream> ExecInput<S> {
    /// Sends standard input. Waits while the program does not read and the window is full; the
    /// window opens as another thread calls [`ExecOutput::next_event`].
    ///
    /// # Errors
    /// `BrokenPipe` once the program has ended; the stream's.
    pub fn write_stdin(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let n = self.take_credit(data.len().min(DATA_CHUNK))?;
            let (now, later) = data.split_at(n);
            self.send(&Frame::Stdin(now.to_vec()))?;
            data = later;
        }
        Ok(())
    }

    /// Ends standard input. With a terminal this sends its end-of-file character. Like every
    /// control message, it is nothing to a program that has ended.
    ///
    /// # Errors
    /// The stream's.
    pub fn close_stdin(&self) -> io::Result<()> {
        self.control(&Frame::StdinEnd)
    }

    /// Gives the terminal a new size.
    ///
    /// # Errors
    /// The stream's.
    pub fn resize(&self, size: WindowSize) -> io::Result<()> {
        self.control(&Frame::Resize(size))
    }

    /// Sends a signal to the program's process group.
    ///
    /// # Errors
    /// The stream's.
    pub fn signal(&self, number: i32) -> io::Result<()> {
        self.control(&Frame::Signal(number))
    }

    /// Hangs up: the agent kills the program and everything it started.
    ///
    /// # Errors
    /// The stream's.
    pub fn hang_up(&self) -> io::Result<()> {
        lock(&self.shared.writer).shutdown_both()
    }

    fn take_credit(&self, wanted: usize) -> io::Result<usize> {
        let mut credit = lock(&self.shared.credit);
        loop {
            if credit.closed {
                return Err(io::Error::new(
                    io::ErrorKind::BrokenPipe,
                    "the program has ended or closed its input",
                ));
            }
            if credit.bytes > 0 {
                let n = wanted.min(credit.bytes);
                credit.bytes -= n;
                return Ok(n);
            }
            credit = self.shared.changed.wait(credit).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn control(&self, frame: &Frame) -> io::Result<()> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
        match self.send(frame) {
            // How it ended is for the output half to tell.
            Err(e) if matches!(e.kind(), BrokenPipe | ConnectionReset | NotConnected) => Ok(()),
            other => other,
        }
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).map_err(io::Error::other)?;
        let mut writer = lock(&self.shared.writer);
        if lock(&self.shared.credit).closed {
            return Ok(());
        }
        writer.write_all(&bytes)?;
        writer.flush()
    }
}

/// From a running program. Dropping it hangs up.
#[derive(Debug)]
pub struct ExecOutput<S: Stream> {
    client: Client<S>,
    shared: Arc<Shared<S>>,
    /// Output bytes the agent may still send, if the request set a limit.
    left: Option<u64>,
    finished: bool,
}

impl<S: Stream> ExecOutput<S> {
    /// How long [`ExecOutput::next_event`] may wait; `None` (the default): for ever.
    ///
    /// # Errors
    /// The stream's, or a timeout of zero.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.client.stream.set_read_timeout(timeout)
    }

    /// Waits for the next event. `Exited` and `Failed` are the last.
    ///
    /// # Errors
    /// `TimedOut` leaves the session as it was; any other error ends it.
    pub fn next_event(&mut self) -> Result<ExecEvent, ClientError> {
        let result = self.advance();
        match &result {
            Ok(ExecEvent::Exited(_) | ExecEvent::Failed(_)) => self.finish(),
            Ok(_) | Err(ClientError::TimedOut) => {}
            Err(_) => self.finish(),
        }
        result
    }

    fn advance(&mut self) -> Result<ExecEvent, ClientError> {
        if self.finished {
            return Err(ClientError::Closed);
        }
        loop {
            let event = match self.client.receive()? {
                Frame::Started(pid) => ExecEvent::Started { pid },
                Frame::Stdout(data) => {
                    self.count(data.len())?;
                    ExecEvent::Stdout(data)
                }
                Frame::Stderr(data) => {
                    self.count(data.len())?;
                    ExecEvent::Stderr(data)
                }
                Frame::Credit(n) => {
                    let mut credit = lock(&self.shared.credit);
                    // The agent's word never opens the window further than it began.
                    credit.bytes = credit.bytes.saturating_add(n as usize).min(STDIN_WINDOW);
                    self.shared.changed.notify_all();
                    continue;
                }
                Frame::Exited(exit) => ExecEvent::Exited(exit),
                Frame::Failed(failure) => ExecEvent::Failed(failure),
                Frame::Reply(Reply::Failed(failure)) => return Err(ClientError::Failed(failure)),
                _ => return Err(ClientError::Unexpected),
            };
            return Ok(event);
        }
    }

    fn count(&mut self, bytes: usize) -> Result<(), ClientError> {
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(bytes as u64).ok_or(ClientError::Unexpected)?;
        }
        Ok(())
    }

    fn finish(&mut self) {
        self.finished = true;
        lock(&self.shared.credit).closed = true;
        self.shared.changed.notify_all();
        // Unblocks a writer; the peer may be gone already.
        let _ = self.client.stream.shutdown_both();
    }
}

impl<S: Stream> Drop for ExecOutput<S> {
    fn drop(&mut self) {
        self.finish();
    }
}
