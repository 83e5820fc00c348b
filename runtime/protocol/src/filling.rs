//! Host ↔ monitor: a machine that runs while its images are still filling up.
//!
//! Before its jail closes, the monitor connects twice to the socket its configuration names, and
//! says with the first byte what for:
//! - [`MEMORY`]: guest memory is anonymous, and its first touches are faults that the host answers.
//!   A line of JSON follows, a list of [`Region`]s; the `userfaultfd` comes with it as `SCM_RIGHTS`.
//!   The host says nothing on this connection until memory cannot be had any more: then one line for
//!   people, and the monitor ends the machine. It does so, too, when the connection closes: faults
//!   would wait for ever.
//! - [`DISKS`]: before each read from a file that is not all there, an [`Ask`], and the host answers
//!   when the bytes are there, or cannot be had; then the guest gets an I/O error.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// The first byte of a connection about memory.
pub const MEMORY: u8 = b'M';
/// The first byte of a connection about disks.
pub const DISKS: u8 = b'D';
/// The longest line.
pub const MAX_LINE: usize = 64 * 1024;

/// A region of guest memory in the monitor, and where its content is in the memory image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Region {
    /// Where it begins in the monitor's address space.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Where its content begins in the memory image.
    pub offset: u64,
}

/// A file of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layer {
    /// The shared base.
    Base,
    /// The snapshot's overlay.
    Overlay,
}

/// Bytes that are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Which disk, counted from 0.
    pub disk: u8,
    /// Which of its files.
    pub layer: Layer,
    /// How many bytes.
    pub len: u32,
    /// From where on.
    pub offset: u64,
}

impl Ask {
    /// Sixteen bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0] = self.disk;
        bytes[1] = u8::from(self.layer == Layer::Overlay);
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// The other way round; nothing for what no monitor sends.
    #[must_use]
    pub fn decode(bytes: &[u8; 16]) -> Option<Self> {
        let [disk, layer, 0, 0, l0, l1, l2, l3, offset @ ..] = *bytes else { return None };
        let layer = match layer {
            0 => Layer::Base,
            1 => Layer::Overlay,
            _ => return None,
        };
        let (len, offset) = (u32::from_le_bytes([l0, l1, l2, l3]), u64::from_le_bytes(offset));
        offset.checked_add(u64::from(len))?;
        Some(Self { disk, layer, len, offset })
    }
}

/// Answers an [`Ask`].
///
/// # Errors
/// When the monitor is gone.
pub fn answer(mut stream: impl Write, outcome: Result<(), &str>) -> io::Result<()> {
    let text = outcome.err().unwrap_or_default().as_bytes();
    let text = &text[..text.len().min(1000)];
    let status = u8::from(outcome.is_err());
    let [low, high] = u16::try_from(text.len()).unwrap_or(0).to_le_bytes();
    stream.write_all(&[&[status, low, high][..], text].concat())
}

/// Reads the answer to an [`Ask`]; the inner error is the host's.
///
/// # Errors
/// When the host is gone.
pub fn read_answer(mut stream: impl Read) -> io::Result<Result<(), String>> {
    let mut head = [0; 3];
    stream.read_exact(&mut head)?;
    let [status, low, high] = head;
    let mut text = vec![0; usize::from(u16::from_le_bytes([low, high]))];
    stream.read_exact(&mut text)?;
    Ok(if status == 0 { Ok(()) } else { Err(String::from_utf8_lossy(&text).into_owned()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_and_answers_round_trip() {
        let ask = Ask { disk: 3, layer: Layer::Overlay, len: 4096, offset: 1 << 40 };
        assert_eq!(Ask::decode(&ask.encode()), Some(ask));
        for (at, byte) in [(1, 2), (2, 1), (3, 1), (15, 0xff)] {
            let mut bytes = Ask { len: u32::MAX, offset: u64::MAX >> 1, ..ask }.encode();
            bytes[at] = byte;
            if at == 15 {
                bytes[8..].fill(0xff);
            }
            assert_eq!(Ask::decode(&bytes), None, "{at}");
        }
        for outcome in [Ok(()), Err("gone"), Err("")] {
            let mut bytes = Vec::new();
            answer(&mut bytes, outcome).unwrap();
            assert_eq!(read_answer(&*bytes).unwrap(), outcome.map_err(str::to_owned));
        }
        let mut bytes = Vec::new();
        answer(&mut bytes, Err(&"x".repeat(5000))).unwrap();
        assert_eq!(read_answer(&*bytes).unwrap(), Err("x".repeat(1000)));
        assert!(read_answer(&bytes[..100]).is_err());
    }
}
