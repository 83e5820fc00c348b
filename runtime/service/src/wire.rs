//! `parbake-exec/1`: a running command over an upgraded HTTP connection.
//!
//! The client sends `POST /v1/sandboxes/ID/exec` with `Connection: Upgrade`, `Upgrade:
//! parbake-exec/1` and an [`ExecRequest`](crate::model::ExecRequest) as its body. Refusals are
//! ordinary responses; `101` means that the command was handed to the guest. From then on both
//! directions carry frames: a little-endian `u32` length of what follows (at most [`MAX_FRAME`]), a
//! kind byte, a payload.
//!
//! | kind | direction | payload |
//! | --- | --- | --- |
//! | `0x10` stdin | to the command | bytes |
//! | `0x11` end of stdin | to | none |
//! | `0x12` window size | to | JSON `{"rows": 24, "columns": 80}` |
//! | `0x13` signal | to | JSON, its number |
//! | `0x90` started | from | JSON `{"pid": 7}` |
//! | `0x91` stdout | from | bytes |
//! | `0x92` stderr | from | bytes |
//! | `0x93` credit | from | JSON, a number of bytes |
//! | `0x94` exited | from | JSON [`ExitStatus`], then the connection closes |
//! | `0x95` failed | from | JSON [`StartFailure`], then the connection closes |
//!
//! The client may have [`WINDOW`] bytes of standard input under way; `credit` says that so many of
//! them have reached the command. A connection that closes ends the command and everything it
//! started.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::model::{ExitStatus, StartFailure, WindowSize};

/// The value of the `Upgrade` header.
pub const PROTOCOL: &str = "parbake-exec/1";
/// The longest frame, kind byte included.
pub const MAX_FRAME: usize = 1 << 20;
/// How many bytes of standard input may be under way.
pub const WINDOW: usize = 256 << 10;

/// One message of either direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Standard input.
    Stdin(Vec<u8>),
    /// Its end.
    StdinEnd,
    /// The terminal has a new size.
    Resize(WindowSize),
    /// Deliver a signal.
    Signal(i32),
    /// The command runs.
    Started(u32),
    /// Standard output.
    Stdout(Vec<u8>),
    /// Standard error.
    Stderr(Vec<u8>),
    /// So many bytes of standard input have arrived.
    Credit(u32),
    /// The command ended.
    Exited(ExitStatus),
    /// It could not be started, or its machine is gone.
    Failed(StartFailure),
}

#[derive(Serialize, serde::Deserialize)]
struct Pid {
    pid: u32,
}

impl Frame {
    /// Sends the frame with a single write.
    ///
    /// # Errors
    /// The stream's; `InvalidInput` for a frame that is too long.
    pub fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        let (kind, payload) = match self {
            Self::Stdin(bytes) => (0x10, bytes.clone()),
            Self::StdinEnd => (0x11, Vec::new()),
            Self::Resize(size) => (0x12, json(size)?),
            Self::Signal(number) => (0x13, json(number)?),
            Self::Started(pid) => (0x90, json(&Pid { pid: *pid })?),
            Self::Stdout(bytes) => (0x91, bytes.clone()),
            Self::Stderr(bytes) => (0x92, bytes.clone()),
            Self::Credit(count) => (0x93, json(count)?),
            Self::Exited(status) => (0x94, json(status)?),
            Self::Failed(failure) => (0x95, json(failure)?),
        };
        let length = payload.len() + 1;
        if length > MAX_FRAME {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a frame is too long"));
        }
        let mut bytes = Vec::with_capacity(4 + length);
        // Checked above: it fits.
        bytes.extend_from_slice(&(length as u32).to_le_bytes());
        bytes.push(kind);
        bytes.extend_from_slice(&payload);
        stream.write_all(&bytes)?;
        stream.flush()
    }

    /// Receives a frame; `None` is the end of the stream between two.
    ///
    /// # Errors
    /// The stream's; `InvalidData` for what is no frame.
    pub fn read(stream: &mut impl Read) -> io::Result<Option<Self>> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let mut head = [0; 4];
        let mut filled = 0;
        while filled < head.len() {
            match stream.read(&mut head[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let length = u32::from_le_bytes(head) as usize;
        if length == 0 || length > MAX_FRAME {
            return Err(invalid("a frame's length is out of bounds"));
        }
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes)?;
        let payload = bytes.split_off(1);
        Ok(Some(match bytes[0] {
            0x10 => Self::Stdin(payload),
            0x11 if payload.is_empty() => Self::StdinEnd,
            0x12 => Self::Resize(parse(&payload)?),
            0x13 => Self::Signal(parse(&payload)?),
            0x90 => Self::Started(parse::<Pid>(&payload)?.pid),
            0x91 => Self::Stdout(payload),
            0x92 => Self::Stderr(payload),
            0x93 => Self::Credit(parse(&payload)?),
            0x94 => Self::Exited(parse(&payload)?),
            0x95 => Self::Failed(parse(&payload)?),
            _ => return Err(invalid("a frame of an unknown kind")),
        }))
    }
}

fn json<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::other)
}

fn parse<T: DeserializeOwned>(payload: &[u8]) -> io::Result<T> {
    serde_json::from_slice(payload)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_back_and_anything_else_is_refused() {
        let frames = [
            Frame::Stdin(vec![0, 255, 10]),
            Frame::StdinEnd,
            Frame::Resize(WindowSize { rows: 24, columns: 80 }),
            Frame::Signal(15),
            Frame::Started(7),
            Frame::Stdout(vec![1; 100_000]),
            Frame::Stderr(Vec::new()),
            Frame::Credit(65_536),
            Frame::Exited(ExitStatus {
                exit_code: 137,
                code: None,
                signal: Some(9),
                reason: "ended".to_owned(),
                truncated: true,
            }),
            Frame::Failed(StartFailure { exit_code: 127, message: "gone".to_owned() }),
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes).unwrap());
        let mut stream = bytes.as_slice();
        for frame in &frames {
            assert_eq!(Frame::read(&mut stream).unwrap().as_ref(), Some(frame));
        }
        assert_eq!(Frame::read(&mut stream).unwrap(), None);
        // A promise of four gigabytes allocates nothing.
        for bad in [
            &[255u8, 255, 255, 255][..],
            &[0, 0, 0, 0],
            &[1, 0, 0, 0, 0x77],
            &[2, 0, 0, 0, 0x11, 0],
            &[2, 0, 0, 0, 0x12, b'{'],
            &[9, 0, 0, 0, 0x10, 1],
            &[1, 0],
        ] {
            assert!(Frame::read(&mut &bad[..]).is_err(), "{bad:?}");
        }
        let long = Frame::Stdout(vec![0; MAX_FRAME]);
        assert!(long.write(&mut Vec::new()).is_err());
    }
}
