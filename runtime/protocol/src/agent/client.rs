//! The host's side: one connection, its requests and its transfers.

use std::io::{self, Read, Write};
use std::time::Duration;

use super::message::*;
use super::session::ExecSession;
use super::stream::Stream;
use super::wire::{Frame, FrameError, FrameReader, HelloVerdict};
use super::{AGENT_PROTOCOL, DATA_CHUNK};

/// How long a plain request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a quiesce may take: overwriting gigabytes under emulation is slow.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a fixup may take that makes SSH host keys.
const KEYS_TIMEOUT: Duration = Duration::from_secs(120);

/// A volume may have much to write.
const WORKSPACE_TIMEOUT: Duration = Duration::from_secs(120);

/// How long the agent may take to hang up after a quiesce.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(5);

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
    pub(super) stream: S,
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

    /// Makes the guest ready to be frozen. The caller checks [`QuiesceReport::complete`]. With
    /// `close_connections` this returns once the agent has hung up, and the client is of no more
    /// use: drop it before the freeze.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn quiesce(&mut self, request: QuiesceRequest) -> Result<QuiesceReport, ClientError> {
        let close = request.close_connections;
        let reply = self.call_for(QUIESCE_TIMEOUT, Request::Quiesce(request))?;
        let Reply::Quiesce(report) = reply else { return Err(ClientError::Unexpected) };
        if close {
            self.stream.set_read_timeout(Some(HANG_UP_TIMEOUT))?;
            match self.receive_raw() {
                Err(ClientError::Closed) => {}
                Err(e) => return Err(e),
                Ok(_) => return Err(ClientError::Unexpected),
            }
        }
        Ok(report)
    }

    /// Makes a restored guest its own machine. The caller checks [`FixupReport::complete`] and
    /// throws the guest away otherwise.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn fixup(&mut self, fixup: Fixup) -> Result<FixupReport, ClientError> {
        self.fix_up(fixup, Request::Fixup)
    }

    /// As [`Client::fixup`], for a machine that continues another one's run: the environment of
    /// that run stays.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn fixup_keeping_env(&mut self, fixup: Fixup) -> Result<FixupReport, ClientError> {
        self.fix_up(fixup, Request::FixupKeepingEnv)
    }

    fn fix_up(
        &mut self,
        fixup: Fixup,
        request: fn(Box<Fixup>) -> Request,
    ) -> Result<FixupReport, ClientError> {
        let least = if fixup.ssh_host_keys { KEYS_TIMEOUT } else { Duration::ZERO };
        match self.call_for(least, request(Box::new(fixup)))? {
            Reply::Fixup(report) => Ok(report),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Lets user processes run again after a quiesce that was followed by no restore.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn thaw(&mut self) -> Result<(), ClientError> {
        self.done(Request::Thaw)
    }

    /// Lets user processes have so many processes and threads together; absent: no limit.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn limit_processes(&mut self, most: Option<u32>) -> Result<(), ClientError> {
        self.done(Request::LimitProcesses(most))
    }

    /// Mounts the volume in the workspace's slot at `path`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn mount_workspace(&mut self, path: &str) -> Result<(), ClientError> {
        let path = path.as_bytes().to_vec();
        self.settled(Request::MountWorkspace { path })
    }

    /// Ends all user processes, writes everything to that volume, and takes it off.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn unmount_workspace(&mut self) -> Result<(), ClientError> {
        self.settled(Request::UnmountWorkspace)
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
        // A program may be silent, and not read, for as long as it likes.
        self.stream.set_write_timeout(None)?;
        self.stream.set_read_timeout(None)?;
        ExecSession::new(self, limit)
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
        self,
        path: &[u8],
        limit: u64,
        sink: impl Write,
    ) -> Result<FileInfo, ClientError> {
        self.get_file_after(path, limit, |_| {}, sink)
    }

    /// As [`Client::get_file`]; `opened` is told about the file before the first byte arrives.
    ///
    /// # Errors
    /// See [`ClientError`]; part of the data may have been written to `sink` by then.
    pub fn get_file_after(
        mut self,
        path: &[u8],
        limit: u64,
        opened: impl FnOnce(&FileInfo),
        mut sink: impl Write,
    ) -> Result<FileInfo, ClientError> {
        let request = Request::Get(GetRequest { path: path.to_vec() });
        let mut info = match self.call(request)? {
            Reply::File(info) => info,
            _ => return Err(ClientError::Unexpected),
        };
        opened(&info);
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

    /// The same for what may have much to write, or a journal to replay.
    fn settled(&mut self, request: Request) -> Result<(), ClientError> {
        match self.call_for(WORKSPACE_TIMEOUT, request)? {
            Reply::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    fn call(&mut self, request: Request) -> Result<Reply, ClientError> {
        self.send(&Frame::Request(request))?;
        self.reply()
    }

    /// As [`Client::call`], waiting at least this long.
    fn call_for(&mut self, least: Duration, request: Request) -> Result<Reply, ClientError> {
        let usual = self.timeout;
        self.timeout = usual.map(|t| t.max(least));
        let reply = self.call(request);
        self.timeout = usual;
        reply
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

    pub(super) fn receive(&mut self) -> Result<Frame, ClientError> {
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
