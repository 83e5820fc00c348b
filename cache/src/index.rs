//! The chunk index: what an image (root filesystem, memory, disk overlay) consists of.
//!
//! An image is cut into chunks of one fixed, page-aligned size; the last may be shorter. Chunks
//! that are all zero are left out. The index lists the others, and its own SHA-256 is the image's
//! digest: whoever trusts that digest can verify any chunk alone. Where a chunk's bytes are kept
//! (in which file or pack) is deliberately not part of it, so that the same image has the same
//! digest wherever it lies.
//!
//! # Encoding (version 1, little endian)
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 8 | `pbindex\n` |
//! | 8 | 2 | version, 1 |
//! | 10 | 2 | mandatory feature bits, 0 |
//! | 12 | 4 | chunk size in bytes: a power of two from 4 KiB to 4 MiB |
//! | 16 | 8 | image size in bytes |
//! | 24 | 4 | number of entries |
//! | 28 | 4 | reserved, 0 |
//! | 32 | 36·n | entries: chunk number (4), SHA-256 of the chunk's bytes (32); strictly ascending |
//!
//! There is exactly one encoding of an index. Its checksum is the digest it is known by, and
//! [`ChunkIndex::decode`] checks that before it looks at anything else.

use crate::Digest;

/// The first bytes of every index.
pub const MAGIC: [u8; 8] = *b"pbindex\n";
/// The version written, and the newest read.
pub const VERSION: u16 = 1;
/// The chunk size used when nothing else is asked for.
pub const DEFAULT_CHUNK_SIZE: u32 = 64 * 1024;
/// The smallest chunk size: a page.
pub const MIN_CHUNK_SIZE: u32 = 4 * 1024;
/// The largest chunk size.
pub const MAX_CHUNK_SIZE: u32 = 4 * 1024 * 1024;
/// The largest encoded index; 128 MiB is 3.7 million chunks.
pub const MAX_INDEX_BYTES: u64 = 128 * 1024 * 1024;
/// The largest image.
pub const MAX_IMAGE_BYTES: u64 = 16 << 40;

const HEADER: usize = 32;
const ENTRY: usize = 36;

/// A chunk that is not all zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Its position in the image, counted in chunks.
    pub number: u32,
    /// SHA-256 of its bytes, up to the image's end.
    pub digest: Digest,
}

/// What an image consists of. Its invariants hold from construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkIndex {
    chunk_size: u32,
    image_size: u64,
    chunks: Vec<Chunk>,
}

/// Bytes that are not a usable chunk index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The bytes do not hash to the digest they were fetched by.
    #[error("its bytes hash to {found}")]
    Digest {
        /// What they do hash to.
        found: Digest,
    },
    /// Something else altogether.
    #[error("it does not start as a chunk index does")]
    Magic,
    /// Written by a newer program.
    #[error("it has version {0} and this program knows up to {VERSION}; use the newer parbake")]
    NewerVersion(u16),
    /// A mandatory feature of a newer program.
    #[error("it needs the feature bits {0:#06x}, which this program does not know")]
    UnknownFeatures(u16),
    /// The length does not fit the number of entries.
    #[error("it is {found} bytes long where {expected} are needed")]
    Length {
        /// What its header calls for.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// A size outside the format's bounds.
    #[error("its {what} {value} is out of bounds")]
    Bounds {
        /// Which field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// Chunk numbers that repeat or go backwards.
    #[error("chunk {0} is out of order")]
    Order(u32),
    /// A chunk past the image's end.
    #[error("chunk {0} lies past the end of the image")]
    PastEnd(u32),
}

impl ChunkIndex {
    /// Makes an index of chunks in ascending order.
    ///
    /// # Errors
    /// When a size is out of bounds or the chunks are out of order or past the image's end.
    pub fn new(chunk_size: u32, image_size: u64, chunks: Vec<Chunk>) -> Result<Self, IndexError> {
        check_sizes(chunk_size, image_size)?;
        let total = image_size.div_ceil(u64::from(chunk_size));
        let mut last = None;
        for chunk in &chunks {
            if last.is_some_and(|last| last >= chunk.number) {
                return Err(IndexError::Order(chunk.number));
            }
            if u64::from(chunk.number) >= total {
                return Err(IndexError::PastEnd(chunk.number));
            }
            last = Some(chunk.number);
        }
        let index = Self { chunk_size, image_size, chunks };
        let size = index.encoded_len();
        if size > MAX_INDEX_BYTES {
            return Err(IndexError::Bounds { what: "encoded size", value: size });
        }
        Ok(index)
    }

    /// Bytes per chunk.
    #[must_use]
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// Logical size of the image in bytes.
    #[must_use]
    pub fn image_size(&self) -> u64 {
        self.image_size
    }

    /// The chunks that are not all zero, in ascending order.
    #[must_use]
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Where chunk `number` starts in the image, and how long it is.
    #[must_use]
    pub fn extent(&self, number: u32) -> (u64, usize) {
        let offset = u64::from(number) * u64::from(self.chunk_size);
        let len = self.image_size.saturating_sub(offset).min(u64::from(self.chunk_size));
        (offset, len as usize)
    }

    /// Bytes of the image that are in listed chunks.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| self.extent(chunk.number).1 as u64).sum()
    }

    fn encoded_len(&self) -> u64 {
        HEADER as u64 + ENTRY as u64 * self.chunks.len() as u64
    }

    /// The one encoding of this index.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.encoded_len() as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(0u16.to_le_bytes());
        bytes.extend(self.chunk_size.to_le_bytes());
        bytes.extend(self.image_size.to_le_bytes());
        // MAX_INDEX_BYTES bounds the count far below 2³².
        bytes.extend((self.chunks.len() as u32).to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        for chunk in &self.chunks {
            bytes.extend(chunk.number.to_le_bytes());
            bytes.extend(chunk.digest.as_bytes());
        }
        bytes
    }

    /// Reads an index known by `digest`.
    ///
    /// # Errors
    /// When the bytes are not that index, or not one this program can use.
    pub fn decode(bytes: &[u8], digest: &Digest) -> Result<Self, IndexError> {
        let found = Digest::of(bytes);
        if found != *digest {
            return Err(IndexError::Digest { found });
        }
        Self::parse(bytes)
    }

    /// Reads an index whose checksum has been seen to.
    ///
    /// # Errors
    /// When the bytes are not an index this program can use.
    pub fn parse(bytes: &[u8]) -> Result<Self, IndexError> {
        let header: &[u8; HEADER] = bytes.first_chunk().ok_or(IndexError::Magic)?;
        let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let u32_at =
            |at: usize| u32::from_le_bytes(*header[at..].first_chunk().expect("in header"));
        if header[..8] != MAGIC {
            return Err(IndexError::Magic);
        }
        match u16_at(8) {
            VERSION => {}
            0 => return Err(IndexError::Magic),
            newer => return Err(IndexError::NewerVersion(newer)),
        }
        match u16_at(10) {
            0 => {}
            features => return Err(IndexError::UnknownFeatures(features)),
        }
        match u32_at(28) {
            0 => {}
            value => {
                return Err(IndexError::Bounds { what: "reserved field", value: value.into() });
            }
        }
        let image_size = u64::from_le_bytes(*header[16..].first_chunk().expect("in header"));
        let expected = HEADER as u64 + ENTRY as u64 * u64::from(u32_at(24));
        let found = bytes.len() as u64;
        if expected != found {
            return Err(IndexError::Length { expected, found });
        }
        let (entries, _) = bytes[HEADER..].as_chunks::<ENTRY>();
        let chunks = entries.iter().map(|entry| {
            let (number, digest) = entry.split_first_chunk().expect("36 bytes");
            Chunk {
                number: u32::from_le_bytes(*number),
                digest: Digest::from_bytes(*digest.first_chunk().expect("32 bytes")),
            }
        });
        Self::new(u32_at(12), image_size, chunks.collect())
    }
}

fn check_sizes(chunk_size: u32, image_size: u64) -> Result<(), IndexError> {
    if !chunk_size.is_power_of_two() || !(MIN_CHUNK_SIZE..=MAX_CHUNK_SIZE).contains(&chunk_size) {
        return Err(IndexError::Bounds { what: "chunk size", value: chunk_size.into() });
    }
    if image_size > MAX_IMAGE_BYTES
        || image_size.div_ceil(u64::from(chunk_size)) > u64::from(u32::MAX)
    {
        return Err(IndexError::Bounds { what: "image size", value: image_size });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn indexes_round_trip_and_have_one_encoding(
            steps in prop::collection::vec((0..100u32, any::<[u8; 32]>()), 0..40),
            shift in 12..=22u32,
            tail in 1..4096u64,
        ) {
            let mut next = 0;
            let chunks: Vec<_> = steps
                .into_iter()
                .map(|(gap, digest)| {
                    let number = next + gap;
                    next = number + 1;
                    Chunk { number, digest: Digest::from_bytes(digest) }
                })
                .collect();
            let size = (u64::from(next) << shift) + tail;
            let index = ChunkIndex::new(1 << shift, size, chunks).unwrap();
            let bytes = index.encode();
            let digest = Digest::of(&bytes);
            prop_assert_eq!(&ChunkIndex::decode(&bytes, &digest).unwrap(), &index);
            prop_assert!(ChunkIndex::parse(&bytes[..bytes.len() - 1]).is_err());
            let mut flipped = bytes;
            flipped[8] ^= 0x80;
            let refused = matches!(
                ChunkIndex::decode(&flipped, &digest),
                Err(IndexError::Digest { .. })
            );
            prop_assert!(refused);
        }

        #[test]
        fn any_bytes_are_an_index_or_refused(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            header in any::<bool>(),
        ) {
            if header {
                bytes.splice(0..0, [&MAGIC[..], &[1, 0, 0, 0]].concat());
            }
            if let Ok(index) = ChunkIndex::parse(&bytes) {
                prop_assert_eq!(index.encode(), bytes);
            }
        }
    }

    #[test]
    fn impossible_indexes_are_refused() {
        let digest = Digest::of(b"x");
        let chunk = |number| Chunk { number, digest };
        for (chunk_size, image_size, chunks) in [
            (4096, 8192, vec![chunk(1), chunk(1)]),
            (4096, 8192, vec![chunk(1), chunk(0)]),
            (4096, 8192, vec![chunk(2)]),
            (5000, 8192, vec![]),
            (2048, 8192, vec![]),
            (8 << 20, 8192, vec![]),
            (4096, MAX_IMAGE_BYTES + 1, vec![]),
            (0, 0, vec![]),
        ] {
            assert!(ChunkIndex::new(chunk_size, image_size, chunks).is_err());
        }
    }
}
