//! The host's side.

use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::message::*;
use super::stream::Stream;
use super::wire::{Frame, FrameError, FrameReader, HelloVerdict};
use super::{AGENT_PROTOCOL, DATA_CHUNK, STDIN_WINDOW};

/// How long a plain request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a quiesce may take: overwriting gigabytes under emulation is slow.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(600);

/// Why a client got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The stream or what came over it.
    #[error("talking to the guest agent: {0}")]
    Frame(#[from] FrameError),
    /// The stream ended.
    #[error("the guest agent closed the connection")]
    Closed,
    /// No answer in time.
    #[error("the guest agent did not answer in time")]
    TimedOut,
    /// The agent speaks another version.
    #[error(
        "the guest agent speaks protocol {agent}, this program {AGENT_PROTOCOL}: bake the template again"
    )]
    Version {
        /// What the agent speaks.
        agent: u32,
    },
    /// The token was refused.
    #[error("the guest agent refused the token")]
    Token,
    /// The agent's answer does not fit the question.
    #[error("the guest agent answered out of turn")]
    Unexpected,
    /// The agent did not do it.
    #[error("{0}")]
    Failed(Failure),
    /// The file is longer than the caller allows.
    #[error("the file is larger than {limit} bytes")]
    TooLarge {
        /// The caller's limit.
        limit: u64,
    },
    /// The caller's own reader or writer failed.
    #[error("{0}")]
    Local(#[source] io::Error),
}

impl From<io::Error> for ClientError {
    fn from(e: io::Error) -> Self {
        Self::from(FrameError::Io(e)).timeouts()
    }
}

impl ClientError {
    fn timeouts(self) -> Self {
        match self {
            Self::Frame(FrameError::Io(e))
                if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                Self::TimedOut
            }
            other => other,
        }
    }
}

/// A connection to a guest agent, for any number of plain requests and one streaming operation.
#[derive(Debug)]
pub struct Client<S: Stream> {
    stream: S,
    reader: FrameReader,
    greeting: Greeting,
    token: Vec<u8>,
    timeout: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Greeting {
    Unsent,
    Unanswered,
    Done,
}

impl<S: Stream> Client<S> {
    /// A client over a connected stream. Sends nothing yet.
    pub fn new(stream: S) -> Self {
        Self::with_token(stream, &[])
    }

    /// As [`Client::new`], presenting a token, as agents on TCP demand.
    pub fn with_token(stream: S, token: &[u8]) -> Self {
        Self {
            stream,
            reader: FrameReader::new(),
            greeting: Greeting::Unsent,
            token: token.to_vec(),
            timeout: Some(REQUEST_TIMEOUT),
        }
    }

    /// How long each plain request may take; `None`: for ever. Default 30 s.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Returns once the agent answers.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn ping(&mut self) -> Result<(), ClientError> {
        self.done(Request::Ping)
    }

    /// Describes the guest.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn info(&mut self) -> Result<GuestInfo, ClientError> {
        match self.call(Request::Info)? {
            Reply::Info(info) => Ok(info),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Hands the agent the image's process defaults.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn configure(&mut self, config: GuestConfig) -> Result<(), ClientError> {
        self.done(Request::Configure(config))
    }

    /// Makes the guest ready to be frozen. The caller checks [`QuiesceReport::complete`].
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn quiesce(&mut self, request: QuiesceRequest) -> Result<QuiesceReport, ClientError> {
        let usual = self.timeout;
        self.timeout = Some(QUIESCE_TIMEOUT.max(usual.unwrap_or_default()));
        let reply = self.call(Request::Quiesce(request));
        self.timeout = usual;
        match reply? {
            Reply::Quiesce(report) => Ok(report),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Makes a restored guest its own machine. The caller checks [`FixupReport::complete`] and
    /// throws the guest away otherwise.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn fixup(&mut self, fixup: Fixup) -> Result<FixupReport, ClientError> {
        match self.call(Request::Fixup(Box::new(fixup)))? {
            Reply::Fixup(report) => Ok(report),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Asks the guest to sync and switch itself off. The stream may end before the answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn shutdown(&mut self) -> Result<(), ClientError> {
        match self.done(Request::Shutdown) {
            Err(ClientError::Closed) => Ok(()),
            other => other,
        }
    }

    /// Starts a program. Whether it could be started is the session's first event.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn exec(mut self, request: ExecRequest) -> Result<ExecSession<S>, ClientError> {
        let limit = request.output_limit;
        self.send(&Frame::Request(Request::Exec(request)))?;
        let writer = self.stream.try_clone()?;
        // A program may be silent, and not read, for as long as it likes.
        self.stream.set_write_timeout(None)?;
        self.stream.set_read_timeout(None)?;
        let shared = Arc::new(Shared {
            writer: Mutex::new(writer),
            credit: Mutex::new(Credit { bytes: STDIN_WINDOW, closed: false }),
            changed: Condvar::new(),
        });
        Ok(ExecSession {
            input: ExecInput { shared: Arc::clone(&shared) },
            output: ExecOutput { client: self, shared, left: limit, finished: false },
        })
    }

    /// Stores a file in the guest and returns its size.
    ///
    /// # Errors
    /// See [`ClientError`]; `Local` if `data` fails, and then nothing is stored.
    pub fn put_file(
        mut self,
        request: PutRequest,
        mut data: impl Read,
    ) -> Result<u64, ClientError> {
        self.send(&Frame::Request(Request::Put(request)))?;
        let mut chunk = vec![0; DATA_CHUNK];
        let mut bytes = Vec::with_capacity(DATA_CHUNK + 8);
        loop {
            let n = match data.read(&mut chunk) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(ClientError::Local(e)),
            };
            bytes.clear();
            if n == 0 {
                Frame::DataEnd.encode(&mut bytes)?;
            } else {
                Frame::Data(chunk[..n].to_vec()).encode(&mut bytes)?;
            }
            // A refusal arrives while we still write: read it rather than report a broken pipe.
            if let Err(e) = self.stream.write_all(&bytes) {
                return match self.reply() {
                    Err(failed @ ClientError::Failed(_)) => Err(failed),
                    _ => Err(e.into()),
                };
            }
            if n == 0 {
                break;
            }
        }
        match self.reply()? {
            Reply::Stored { bytes } => Ok(bytes),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Fetches a file of at most `limit` bytes from the guest.
    ///
    /// # Errors
    /// See [`ClientError`]; part of the data may have been written to `sink` by then.
    pub fn get_file(
        mut self,
        path: &[u8],
        limit: u64,
        mut sink: impl Write,
    ) -> Result<FileInfo, ClientError> {
        let request = Request::Get(GetRequest { path: path.to_vec() });
        let mut info = match self.call(request)? {
            Reply::File(info) => info,
            _ => return Err(ClientError::Unexpected),
        };
        let mut received = 0u64;
        loop {
            match self.receive()? {
                Frame::Data(data) => {
                    received = received.saturating_add(data.len() as u64);
                    if received > limit {
                        return Err(ClientError::TooLarge { limit });
                    }
                    sink.write_all(&data).map_err(ClientError::Local)?;
                }
                Frame::DataEnd => break,
                Frame::Reply(Reply::Failed(failure)) => return Err(ClientError::Failed(failure)),
                _ => return Err(ClientError::Unexpected),
            }
        }
        sink.flush().map_err(ClientError::Local)?;
        info.size = received;
        Ok(info)
    }

    fn done(&mut self, request: Request) -> Result<(), ClientError> {
        match self.call(request)? {
            Reply::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    fn call(&mut self, request: Request) -> Result<Reply, ClientError> {
        self.send(&Frame::Request(request))?;
        self.reply()
    }

    fn reply(&mut self) -> Result<Reply, ClientError> {
        match self.receive()? {
            Frame::Reply(Reply::Failed(failure)) => Err(ClientError::Failed(failure)),
            Frame::Reply(reply) => Ok(reply),
            _ => Err(ClientError::Unexpected),
        }
    }

    fn send(&mut self, frame: &Frame) -> Result<(), ClientError> {
        let mut bytes = Vec::new();
        if self.greeting == Greeting::Unsent {
            Frame::hello(&self.token).encode(&mut bytes)?;
        }
        frame.encode(&mut bytes)?;
        self.stream.set_write_timeout(self.timeout)?;
        self.stream.set_read_timeout(self.timeout)?;
        if self.greeting == Greeting::Unsent {
            self.greeting = Greeting::Unanswered;
        }
        self.stream.write_all(&bytes)?;
        self.stream.flush()?;
        Ok(())
    }

    fn receive(&mut self) -> Result<Frame, ClientError> {
        if self.greeting == Greeting::Unanswered {
            match self.receive_raw()? {
                Frame::Welcome { verdict: HelloVerdict::Token, .. } => {
                    return Err(ClientError::Token);
                }
                Frame::Welcome { protocol, verdict }
                    if protocol != AGENT_PROTOCOL || verdict == HelloVerdict::Version =>
                {
                    return Err(ClientError::Version { agent: protocol });
                }
                Frame::Welcome { .. } => self.greeting = Greeting::Done,
                _ => return Err(ClientError::Unexpected),
            }
        }
        self.receive_raw()
    }

    fn receive_raw(&mut self) -> Result<Frame, ClientError> {
        match self.reader.next(&mut self.stream) {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(ClientError::Closed),
            Err(FrameError::Io(e)) if e.kind() == io::ErrorKind::ConnectionReset => {
                Err(ClientError::Closed)
            }
            Err(e) => Err(ClientError::from(e).timeouts()),
        }
    }
}

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
