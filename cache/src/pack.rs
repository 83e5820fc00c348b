//! Packs: the blobs that carry content between stores.
//!
//! A pack is a concatenation of zstd frames and nothing else, so that any zstd tool can read it.
//! Each frame holds one **run**: up to [`MAX_RUN_PAGES`] pages of 4 KiB, one after the other,
//! compressed on their own so that any run can be fetched by a range request and verified alone.
//!
//! Beside each pack goes its **directory**, a small blob that says for every frame where it lies,
//! the SHA-256 of its run, and a short hash of each page. The short hashes let a later push see
//! which of its pages a pack already has without fetching it; they decide nothing at pull, where
//! every run is checked against its full hash and every image against its index.
//!
//! # Directory encoding (version 1, little endian)
//! | size | field |
//! | --- | --- |
//! | 12 | `pbpdir\n\0`, version 1, feature bits 0 |
//! | 8 | length of the pack in bytes |
//! | 4 | number of frames |
//! | per frame: 32 | SHA-256 of the run |
//! | 4 | length of the frame in bytes |
//! | 4 | pages in the run |
//! | 8·pages | first eight bytes of each page's SHA-256 |
//!
//! Frames follow one another without gaps; their lengths add up to the pack's.

use std::io::Read as _;

use crate::Digest;
use crate::format::{FormatError, Kind};

/// Bytes per page.
pub const PAGE: usize = 4096;
/// The most pages in a run: 1 MiB.
pub const MAX_RUN_PAGES: u32 = 256;
/// A pack is closed at this size at the latest.
pub const MAX_PACK_BYTES: u64 = 64 * 1024 * 1024;
/// A pack is not closed below this size, unless nothing follows.
pub const MIN_PACK_BYTES: u64 = 8 * 1024 * 1024;
/// The largest pack accepted from elsewhere.
pub const MAX_FOREIGN_PACK_BYTES: u64 = 1 << 30;
/// The largest directory: 64 MiB of pack in incompressible pages needs far less.
pub const MAX_DIRECTORY_BYTES: u64 = 64 * 1024 * 1024;

const KIND: Kind = Kind { name: "pack directory", magic: *b"pbpdir\n\0", version: 1 };
/// zstd may not grow a run by more than this (`ZSTD_compressBound`).
const MAX_FRAME_BYTES: u32 = MAX_RUN_PAGES * PAGE as u32 + 16 * 1024;

/// The short hash of a page: the first eight bytes of its SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHash(pub u64);

impl PageHash {
    /// Hashes one page.
    #[must_use]
    pub fn of(page: &[u8]) -> Self {
        let digest = Digest::of(page);
        Self(u64::from_le_bytes(*digest.as_bytes().first_chunk().expect("32 bytes")))
    }
}

/// One frame of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// SHA-256 of the run.
    pub digest: Digest,
    /// Where the frame starts in the pack.
    pub offset: u64,
    /// The frame's length in bytes.
    pub len: u32,
    /// The short hash of each page of the run.
    pub pages: Vec<PageHash>,
}

/// What is in a pack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directory {
    frames: Vec<Frame>,
}

/// A frame that does not hold the run it should.
#[derive(Debug, thiserror::Error)]
#[error("a frame does not decompress to the run {digest}")]
pub struct FrameError {
    /// The run.
    pub digest: Digest,
}

impl Directory {
    /// The frames, in the pack's order.
    #[must_use]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Appends a frame at the pack's end.
    pub fn push(&mut self, digest: Digest, len: u32, pages: Vec<PageHash>) {
        let offset = self.pack_len();
        self.frames.push(Frame { digest, offset, len, pages });
    }

    /// The pack's length in bytes.
    #[must_use]
    pub fn pack_len(&self) -> u64 {
        self.frames.last().map_or(0, |last| last.offset + u64::from(last.len))
    }

    /// Pages in all runs.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.frames.iter().map(|frame| frame.pages.len() as u64).sum()
    }

    /// The one encoding of this directory.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = KIND.header();
        bytes.extend(self.pack_len().to_le_bytes());
        bytes.extend((self.frames.len() as u32).to_le_bytes());
        for frame in &self.frames {
            bytes.extend(frame.digest.as_bytes());
            bytes.extend(frame.len.to_le_bytes());
            bytes.extend((frame.pages.len() as u32).to_le_bytes());
            bytes.extend(frame.pages.iter().flat_map(|page| page.0.to_le_bytes()));
        }
        bytes
    }

    /// Reads a directory whose checksum has been seen to.
    ///
    /// # Errors
    /// When the bytes are not a directory this program can use.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut fields = KIND.open(bytes)?;
        let pack_len = fields.u64()?;
        fields.check(pack_len <= MAX_FOREIGN_PACK_BYTES, "pack length", pack_len)?;
        let count = fields.count(48)?;
        let mut directory = Self { frames: Vec::with_capacity(count) };
        for _ in 0..count {
            let digest = Digest::from_bytes(*fields.array()?);
            let len = fields.u32()?;
            fields.check((1..=MAX_FRAME_BYTES).contains(&len), "frame length", len.into())?;
            let pages = fields.count(8)?;
            let in_bounds = (1..=MAX_RUN_PAGES as usize).contains(&pages);
            fields.check(in_bounds, "page count", pages as u64)?;
            let pages: Result<Vec<_>, _> = (0..pages).map(|_| fields.u64().map(PageHash)).collect();
            directory.push(digest, len, pages?);
            let end = directory.pack_len();
            fields.check(end <= pack_len, "frame end", end)?;
        }
        fields.check(directory.pack_len() == pack_len, "pack length", pack_len)?;
        fields.end()?;
        Ok(directory)
    }
}

/// Compresses a run into a frame.
///
/// # Errors
/// When zstd fails, which it does not on memory.
pub fn compress(run: &[u8], level: i32) -> std::io::Result<Vec<u8>> {
    zstd::bulk::compress(run, level)
}

/// Decompresses a frame, never to more than its run can be, and verifies the run.
///
/// # Errors
/// When the frame does not hold exactly that run.
pub fn decompress(frame: &Frame, bytes: &[u8]) -> Result<Vec<u8>, FrameError> {
    let error = || FrameError { digest: frame.digest };
    let len = frame.pages.len() * PAGE;
    let mut run = Vec::with_capacity(len);
    // A frame that claims to be larger is cut off one byte past the run, and refused.
    zstd::stream::read::Decoder::with_buffer(bytes)
        .map_err(|_| error())?
        .single_frame()
        .take(len as u64 + 1)
        .read_to_end(&mut run)
        .map_err(|_| error())?;
    if run.len() != len || Digest::of(&run) != frame.digest {
        return Err(error());
    }
    Ok(run)
}

/// Whether a pack of `len` bytes is closed after the run `digest`.
///
/// The boundary depends on content, not on what was packed before: two images that begin alike
/// and then differ, or have a stretch in common, get the same packs for it.
#[must_use]
pub fn closes_after(digest: &Digest, len: u64) -> bool {
    // One run in 64 closes a pack that is large enough.
    len >= MAX_PACK_BYTES - u64::from(MAX_FRAME_BYTES)
        || len >= MIN_PACK_BYTES && digest.as_bytes()[31] & 0x3f == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn directory() -> impl Strategy<Value = Directory> {
        let frame = (any::<[u8; 32]>(), 1..5000u32, prop::collection::vec(any::<u64>(), 1..20));
        prop::collection::vec(frame, 0..20).prop_map(|frames| {
            let mut directory = Directory::default();
            for (digest, len, pages) in frames {
                let pages = pages.into_iter().map(PageHash).collect();
                directory.push(Digest::from_bytes(digest), len, pages);
            }
            directory
        })
    }

    proptest! {
        #[test]
        fn directories_round_trip_and_have_one_encoding(directory in directory()) {
            let bytes = directory.encode();
            prop_assert_eq!(Directory::parse(&bytes).unwrap(), directory);
            for cut in [0, 1, 11, bytes.len() / 2, bytes.len() - 1] {
                prop_assert!(Directory::parse(&bytes[..cut]).is_err());
            }
        }

        #[test]
        fn any_bytes_are_a_directory_or_refused(
            mut bytes in prop::collection::vec(any::<u8>(), 0..400),
            header in any::<bool>(),
        ) {
            if header {
                bytes.splice(0..0, KIND.header());
            }
            if let Ok(directory) = Directory::parse(&bytes) {
                prop_assert_eq!(directory.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_frame_yields_its_run_or_an_error_never_a_bomb() {
        let run = [vec![7; PAGE], b"x".repeat(PAGE)].concat();
        let bytes = compress(&run, 3).unwrap();
        let mut frame = Frame {
            digest: Digest::of(&run),
            offset: 0,
            len: bytes.len() as u32,
            pages: run.chunks(PAGE).map(PageHash::of).collect(),
        };
        assert_eq!(decompress(&frame, &bytes).unwrap(), run);
        assert!(decompress(&frame, &bytes[..bytes.len() - 1]).is_err());
        assert!(decompress(&frame, b"").is_err());
        let bomb = compress(&vec![0; 64 << 20], 3).unwrap();
        assert!(decompress(&frame, &bomb).is_err());
        frame.pages.pop();
        assert!(decompress(&frame, &bytes).is_err());
    }
}
