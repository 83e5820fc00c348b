//! Host ↔ guest agent: what the host may ask of a guest, and the frames that carry it.
//!
//! One byte stream carries any number of plain requests, each answered before the next, and at most
//! one streaming operation (exec, put, get), which ends the stream. The client speaks first and
//! need not wait: its greeting and its first request travel together.
//!
//! ```text
//!  client                                  agent
//!  HELLO(magic, version, token) ─────────►
//!  REQUEST(...) ─────────────────────────►
//!                                   ◄───── WELCOME(magic, version, verdict)
//!                                   ◄───── REPLY(...)            plain request: next REQUEST may follow
//!  REQUEST(Exec) ────────────────────────►
//!                                   ◄───── STARTED | FAILED
//!  STDIN* STDIN_END RESIZE* SIGNAL* ─────►
//!                                   ◄───── (STDOUT | STDERR | CREDIT)* EXITED
//!  REQUEST(Put) DATA* DATA_END ──────────►
//!                                   ◄───── REPLY
//!  REQUEST(Get) ─────────────────────────►
//!                                   ◄───── REPLY(File) DATA* (DATA_END | REPLY(Failed))
//! ```
//!
//! A frame is a little-endian `u32` length of what follows (at most [`MAX_FRAME`]), a kind byte and
//! a payload. Structured payloads are postcard; bulk data is raw. Nobody allocates more than a
//! frame on the word of the other side, and the host treats everything the agent says as hostile.
//!
//! Standard input is flow-controlled by credit ([`STDIN_WINDOW`]), so that a signal or a resize is
//! never stuck behind input the process does not read. Output needs none: nothing queues behind it.

mod client;
mod message;
mod session;
mod step;
mod stream;
pub mod tree;
mod wire;

pub use client::{Client, ClientError};
pub use message::*;
pub use session::{ExecInput, ExecOutput, ExecSession, Output};
pub use step::{
    MOST_CONNECTIONS, SocketEvent, SocketFrame, StepEnd, StepLayer, StepMount, StepRequest,
};
pub use stream::{Stream, connect_vsock_uds};
pub use wire::{Frame, FrameError, FrameReader, HelloVerdict, write_frame};

/// The vsock port the agent listens on.
pub const AGENT_PORT: u32 = 1024;

/// The version of this protocol. Both sides must agree exactly; a snapshot names the version its
/// frozen agent speaks.
pub const AGENT_PROTOCOL: u32 = 1;

/// The longest frame, kind byte included.
pub const MAX_FRAME: usize = 1 << 20;

/// The most payload bytes put into one frame of bulk data.
pub const DATA_CHUNK: usize = 64 << 10;

/// Standard-input bytes a client may have sent beyond those the agent gave credit for.
pub const STDIN_WINDOW: usize = 256 << 10;
