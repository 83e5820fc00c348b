//! Frames: bytes ↔ typed messages, bounded before anything is allocated or parsed.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{Exit, Failure, Reply, Request, WindowSize};
use super::step::{SocketFrame, StepEnd, StepRequest};
use super::tree::TreeItem;
use super::{AGENT_PROTOCOL, MAX_FRAME};

const MAGIC: [u8; 8] = *b"PBAGENT\0";

/// The longest token a client may present.
const MAX_TOKEN: usize = 256;

/// Room asked of the stream at a time.
const READ_STEP: usize = 64 << 10;

/// One message of either direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// First from the client.
    Hello {
        /// The version the client speaks.
        protocol: u32,
        /// Proof that the client may be here; empty where the transport proves it.
        token: Vec<u8>,
    },
    /// A request.
    Request(Request),
    /// Standard input.
    Stdin(Vec<u8>),
    /// The end of standard input.
    StdinEnd,
    /// The terminal has a new size.
    Resize(WindowSize),
    /// Deliver a signal to the program's process group.
    Signal(i32),
    /// A piece of a file.
    Data(Vec<u8>),
    /// The file is complete.
    DataEnd,
    /// A part of a tree.
    Tree(TreeItem),
    /// A build step.
    Step(Box<StepRequest>),
    /// A part of a connection through a socket of a build step; of both directions.
    Socket(SocketFrame),
    /// First from the agent.
    Welcome {
        /// The version the agent speaks.
        protocol: u32,
        /// Whether the client may go on.
        verdict: HelloVerdict,
    },
    /// The answer to a plain request.
    Reply(Reply),
    /// The program runs under this pid.
    Started(u32),
    /// Standard output.
    Stdout(Vec<u8>),
    /// Standard error.
    Stderr(Vec<u8>),
    /// This many more bytes of standard input may be sent.
    Credit(u32),
    /// The program ended.
    Exited(Exit),
    /// The program could not be started.
    Failed(Failure),
    /// The build step's program ended.
    StepEnd(StepEnd),
}

/// The agent's answer to a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelloVerdict {
    /// Go on.
    Accepted,
    /// Another protocol version.
    Version,
    /// Not the right token.
    Token,
}

/// Why bytes are not a frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream failed, or a timeout passed.
    #[error("the stream failed: {0}")]
    Io(#[from] io::Error),
    /// The stream ended inside a frame.
    #[error("the stream ended in the middle of a message")]
    Truncated,
    /// A length outside the bounds.
    #[error("a message of {0} bytes is outside 1..={MAX_FRAME}")]
    Length(u32),
    /// A kind byte nobody knows.
    #[error("unknown message kind {0:#04x}")]
    Kind(u8),
    /// A payload that is not what its kind promises.
    #[error("malformed message of kind {0:#04x}")]
    Payload(u8),
}

mod kind {
    pub const HELLO: u8 = 0x01;
    pub const REQUEST: u8 = 0x02;
    pub const STDIN: u8 = 0x10;
    pub const STDIN_END: u8 = 0x11;
    pub const RESIZE: u8 = 0x12;
    pub const SIGNAL: u8 = 0x13;
    pub const DATA: u8 = 0x20;
    pub const DATA_END: u8 = 0x21;
    pub const TREE: u8 = 0x22;
    pub const STEP: u8 = 0x23;
    pub const SOCKET: u8 = 0x24;
    pub const WELCOME: u8 = 0x81;
    pub const REPLY: u8 = 0x82;
    pub const STARTED: u8 = 0x90;
    pub const STDOUT: u8 = 0x91;
    pub const STDERR: u8 = 0x92;
    pub const CREDIT: u8 = 0x93;
    pub const EXITED: u8 = 0x94;
    pub const FAILED: u8 = 0x95;
    pub const STEP_END: u8 = 0x96;
}

impl Frame {
    /// Appends the frame's bytes to `out`.
    ///
    /// # Errors
    /// A payload that would exceed [`MAX_FRAME`]; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        match self {
            Self::Hello { protocol, token } => {
                let mut body = Vec::with_capacity(12 + token.len());
                body.extend_from_slice(&MAGIC);
                body.extend_from_slice(&protocol.to_le_bytes());
                body.extend_from_slice(token);
                raw(out, kind::HELLO, &body)
            }
            Self::Welcome { protocol, verdict } => {
                let mut body = Vec::with_capacity(13);
                body.extend_from_slice(&MAGIC);
                body.extend_from_slice(&protocol.to_le_bytes());
                body.push(match verdict {
                    HelloVerdict::Accepted => 0,
                    HelloVerdict::Version => 1,
                    HelloVerdict::Token => 2,
                });
                raw(out, kind::WELCOME, &body)
            }
            Self::Request(v) => structured(out, kind::REQUEST, v),
            Self::Stdin(d) => raw(out, kind::STDIN, d),
            Self::StdinEnd => raw(out, kind::STDIN_END, &[]),
            Self::Resize(v) => structured(out, kind::RESIZE, v),
            Self::Signal(n) => raw(out, kind::SIGNAL, &n.to_le_bytes()),
            Self::Data(d) => raw(out, kind::DATA, d),
            Self::DataEnd => raw(out, kind::DATA_END, &[]),
            Self::Tree(v) => structured(out, kind::TREE, v),
            Self::Step(v) => structured(out, kind::STEP, v),
            Self::Socket(v) => structured(out, kind::SOCKET, v),
            Self::Reply(v) => structured(out, kind::REPLY, v),
            Self::Started(pid) => raw(out, kind::STARTED, &pid.to_le_bytes()),
            Self::Stdout(d) => raw(out, kind::STDOUT, d),
            Self::Stderr(d) => raw(out, kind::STDERR, d),
            Self::Credit(n) => raw(out, kind::CREDIT, &n.to_le_bytes()),
            Self::Exited(v) => structured(out, kind::EXITED, v),
            Self::Failed(v) => structured(out, kind::FAILED, v),
            Self::StepEnd(v) => structured(out, kind::STEP_END, v),
        }
    }

    /// Parses a frame's kind byte and payload.
    ///
    /// # Errors
    /// An unknown kind, or a payload that does not fit it exactly.
    pub fn decode(kind: u8, payload: &[u8]) -> Result<Self, FrameError> {
        let bad = FrameError::Payload(kind);
        let empty = |frame: Self| {
            if payload.is_empty() { Ok(frame) } else { Err(FrameError::Payload(kind)) }
        };
        Ok(match kind {
            kind::HELLO => {
                let (protocol, token) = greeting(payload).ok_or(bad)?;
                if token.len() > MAX_TOKEN {
                    return Err(FrameError::Payload(kind));
                }
                Self::Hello { protocol, token: token.to_vec() }
            }
            kind::WELCOME => {
                let (protocol, rest) = greeting(payload).ok_or(bad)?;
                let verdict = match rest {
                    [0] => HelloVerdict::Accepted,
                    [1] => HelloVerdict::Version,
                    [2] => HelloVerdict::Token,
                    _ => return Err(FrameError::Payload(kind)),
                };
                Self::Welcome { protocol, verdict }
            }
            kind::REQUEST => Self::Request(parse(kind, payload)?),
            kind::STDIN => Self::Stdin(payload.to_vec()),
            kind::STDIN_END => empty(Self::StdinEnd)?,
            kind::RESIZE => Self::Resize(parse(kind, payload)?),
            kind::SIGNAL => Self::Signal(i32::from_le_bytes(payload.try_into().map_err(|_| bad)?)),
            kind::DATA => Self::Data(payload.to_vec()),
            kind::DATA_END => empty(Self::DataEnd)?,
            kind::TREE => Self::Tree(parse(kind, payload)?),
            kind::STEP => Self::Step(parse(kind, payload)?),
            kind::SOCKET => Self::Socket(parse(kind, payload)?),
            kind::REPLY => Self::Reply(parse(kind, payload)?),
            kind::STARTED => {
                Self::Started(u32::from_le_bytes(payload.try_into().map_err(|_| bad)?))
            }
            kind::STDOUT => Self::Stdout(payload.to_vec()),
            kind::STDERR => Self::Stderr(payload.to_vec()),
            kind::CREDIT => Self::Credit(u32::from_le_bytes(payload.try_into().map_err(|_| bad)?)),
            kind::EXITED => Self::Exited(parse(kind, payload)?),
            kind::FAILED => Self::Failed(parse(kind, payload)?),
            kind::STEP_END => Self::StepEnd(parse(kind, payload)?),
            other => return Err(FrameError::Kind(other)),
        })
    }

    /// The greeting of a client of this version.
    pub fn hello(token: &[u8]) -> Self {
        Self::Hello { protocol: AGENT_PROTOCOL, token: token.to_vec() }
    }
}

fn greeting(payload: &[u8]) -> Option<(u32, &[u8])> {
    let rest = payload.strip_prefix(&MAGIC)?;
    let (version, rest) = rest.split_first_chunk::<4>()?;
    Some((u32::from_le_bytes(*version), rest))
}

fn raw(out: &mut Vec<u8>, kind: u8, payload: &[u8]) -> Result<(), FrameError> {
    let length = payload.len() + 1;
    if length > MAX_FRAME {
        return Err(FrameError::Length(u32::try_from(length).unwrap_or(u32::MAX)));
    }
    // Checked above: it fits.
    out.extend_from_slice(&(length as u32).to_le_bytes());
    out.push(kind);
    out.extend_from_slice(payload);
    Ok(())
}

fn structured<T: Serialize>(out: &mut Vec<u8>, kind: u8, value: &T) -> Result<(), FrameError> {
    let body = postcard::to_stdvec(value).map_err(|_| FrameError::Payload(kind))?;
    raw(out, kind, &body)
}

fn parse<T: DeserializeOwned>(kind: u8, payload: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(payload) {
        Ok((value, [])) => Ok(value),
        _ => Err(FrameError::Payload(kind)),
    }
}

/// Writes one frame and flushes.
///
/// # Errors
/// The stream's, or a frame that is too long.
pub fn write_frame(stream: &mut impl Write, frame: &Frame) -> Result<(), FrameError> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes)?;
    stream.write_all(&bytes)?;
    stream.flush()?;
    Ok(())
}

/// Cuts a byte stream into frames. Partial frames survive timeouts and `WouldBlock`, so the same
/// reader serves blocking and polled streams.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    /// Bytes of `buffer` already handed out.
    taken: usize,
}

impl FrameReader {
    /// A reader at a frame boundary.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that were received.
    pub fn push(&mut self, bytes: &[u8]) {
        self.make_room();
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame among the bytes received, if there is one.
    ///
    /// # Errors
    /// Bytes that are no frame; the stream is then useless.
    pub fn next_buffered(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length);
        let wanted = length as usize;
        if wanted == 0 || wanted > MAX_FRAME {
            return Err(FrameError::Length(length));
        }
        let Some((kind, payload)) = rest.get(..wanted).and_then(<[u8]>::split_first) else {
            return Ok(None);
        };
        let frame = Frame::decode(*kind, payload)?;
        self.taken += 4 + wanted;
        Ok(Some(frame))
    }

    /// Receives once. Returns the number of bytes; 0 is the end of the stream.
    ///
    /// # Errors
    /// The stream's, timeouts and `WouldBlock` among them.
    pub fn fill(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        self.make_room();
        let old = self.buffer.len();
        self.buffer.resize(old + READ_STEP, 0);
        let result = loop {
            match stream.read(&mut self.buffer[old..]) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        let received = result.as_ref().copied().unwrap_or(0).min(READ_STEP);
        self.buffer.truncate(old + received);
        result
    }

    /// Waits for the next frame; `None` is the end of the stream at a frame boundary.
    ///
    /// # Errors
    /// The stream's, or bytes that are no frame.
    pub fn next(&mut self, stream: &mut impl Read) -> Result<Option<Frame>, FrameError> {
        loop {
            if let Some(frame) = self.next_buffered()? {
                return Ok(Some(frame));
            }
            if self.fill(stream)? == 0 {
                return if self.is_empty() { Ok(None) } else { Err(FrameError::Truncated) };
            }
        }
    }

    /// Whether no byte waits to be handed out.
    pub fn is_empty(&self) -> bool {
        self.taken >= self.buffer.len()
    }

    fn make_room(&mut self) {
        if self.taken > 0 {
            self.buffer.drain(..self.taken.min(self.buffer.len()));
            self.taken = 0;
        }
    }
}
