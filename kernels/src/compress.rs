//! The compressions that kernels, modules and packages come in, always read up to a stated limit.

use std::io::{self, Read};

/// How much memory an xz decoder may take, in KiB: the format's presets stay under 65 MiB, kernel
/// images are packed with dictionaries up to 128 MiB.
const XZ_MEMORY_KIB: u32 = 192 * 1024;

/// LZ4 legacy frames hold blocks that decompress to at most this many bytes each.
const LZ4_BLOCK: usize = 8 << 20;

const LZ4_LEGACY_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

/// A compression this crate reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// The frame format that `lz4 -l` writes and kernels use.
    Lz4Legacy,
    /// Zstandard.
    Zstd,
    /// gzip.
    Gzip,
    /// xz, with or without a branch filter.
    Xz,
}

/// Why compressed data was refused.
#[derive(Debug, thiserror::Error)]
pub enum DecompressError {
    /// A format that no current distribution uses for kernels.
    #[error("compressed with {0}, which is not supported (LZ4, zstd, gzip and xz are)")]
    Unsupported(&'static str),
    /// None of the known magic numbers.
    #[error("neither plain nor in a known compression (first bytes {0:02x?})")]
    Unknown(Vec<u8>),
    /// The data is damaged or ends early.
    #[error("damaged {kind:?} data: {source}")]
    Damaged {
        /// The compression it claims to be.
        kind: Compression,
        /// What the decoder said.
        source: io::Error,
    },
    /// More output than the caller allows.
    #[error("decompresses to more than the {limit} bytes allowed")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
}

impl Compression {
    /// Names the compression by the magic number that `bytes` start with.
    ///
    /// # Errors
    /// A known but unsupported compression is named; anything else is unknown.
    pub fn detect(bytes: &[u8]) -> Result<Self, DecompressError> {
        let known: [(&[u8], Result<Self, &'static str>); 8] = [
            (&LZ4_LEGACY_MAGIC, Ok(Self::Lz4Legacy)),
            (&[0x28, 0xb5, 0x2f, 0xfd], Ok(Self::Zstd)),
            (&[0x1f, 0x8b], Ok(Self::Gzip)),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Ok(Self::Xz)),
            (b"BZh", Err("bzip2")),
            (&[0x5d, 0, 0], Err("LZMA")),
            (&[0x89, b'L', b'Z', b'O'], Err("LZO")),
            (&[0x04, 0x22, 0x4d, 0x18], Err("the LZ4 frame format")),
        ];
        for (magic, kind) in known {
            if bytes.starts_with(magic) {
                return kind.map_err(DecompressError::Unsupported);
            }
        }
        Err(DecompressError::Unknown(bytes.iter().take(6).copied().collect()))
    }

    /// Wraps `input` in a streaming decoder of its first frame or stream.
    ///
    /// # Errors
    /// A decoder that cannot be set up.
    pub fn reader<'a, R: Read + 'a>(self, input: R) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::Lz4Legacy => Box::new(Lz4LegacyReader::new(input)),
            Self::Zstd => Box::new(zstd::Decoder::new(input)?.single_frame()),
            Self::Gzip => Box::new(flate2::read::GzDecoder::new(input)),
            Self::Xz => Box::new(lzma_rust2::XzReader::new_mem_limit(input, false, XZ_MEMORY_KIB)),
        })
    }

    /// Decompresses `input` whole; bytes after the first stream are ignored.
    ///
    /// # Errors
    /// Damaged data, and output over `limit` bytes.
    pub fn decompress(self, input: &[u8], limit: usize) -> Result<Vec<u8>, DecompressError> {
        let damaged = |source| DecompressError::Damaged { kind: self, source };
        let mut output = Vec::new();
        self.reader(input)
            .map_err(damaged)?
            .take(limit as u64 + 1)
            .read_to_end(&mut output)
            .map_err(damaged)?;
        if output.len() > limit {
            return Err(DecompressError::TooLarge { limit });
        }
        Ok(output)
    }
}

/// Reads the LZ4 legacy frame: a magic number, then blocks of a little-endian compressed size and
/// the block. The frame has no end mark: it ends where the input does.
struct Lz4LegacyReader<R> {
    input: R,
    started: bool,
    packed: Vec<u8>,
    block: Vec<u8>,
    at: usize,
}

impl<R: Read> Lz4LegacyReader<R> {
    fn new(input: R) -> Self {
        Self { input, started: false, packed: Vec::new(), block: Vec::new(), at: 0 }
    }

    /// Reads four bytes, or `None` at the end of the input.
    fn word(&mut self) -> io::Result<Option<[u8; 4]>> {
        let mut word = Vec::with_capacity(4);
        self.input.by_ref().take(4).read_to_end(&mut word)?;
        match <[u8; 4]>::try_from(word.as_slice()) {
            Ok(word) => Ok(Some(word)),
            Err(_) if word.is_empty() => Ok(None),
            Err(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Decodes the next block into `self.block`; false at the end.
    fn next_block(&mut self) -> io::Result<bool> {
        let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let size = loop {
            match self.word()? {
                // Concatenated frames each start with the magic number again.
                Some(LZ4_LEGACY_MAGIC) => self.started = true,
                Some(_) if !self.started => return Err(bad("no LZ4 magic number".into())),
                Some(word) => break u32::from_le_bytes(word) as usize,
                None => return Ok(false),
            }
        };
        // The worst case of an incompressible block, as the format's reference defines it.
        if size == 0 || size > LZ4_BLOCK + LZ4_BLOCK / 255 + 16 {
            return Err(bad(format!("a block of {size} bytes")));
        }
        self.packed.clear();
        self.input.by_ref().take(size as u64).read_to_end(&mut self.packed)?;
        if self.packed.len() != size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.block.resize(LZ4_BLOCK, 0);
        let length = lz4_flex::block::decompress_into(&self.packed, &mut self.block)
            .map_err(|error| bad(error.to_string()))?;
        self.block.truncate(length);
        self.at = 0;
        Ok(true)
    }
}

impl<R: Read> Read for Lz4LegacyReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.block.len() {
            if buffer.is_empty() || !self.next_block()? {
                return Ok(0);
            }
        }
        let count = buffer.len().min(self.block.len() - self.at);
        buffer[..count].copy_from_slice(&self.block[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
