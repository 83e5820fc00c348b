//! Decompression of one layer blob: gzip with any number of members, zstd with any number of
//! frames and skippable frames between them, or plain tar. The bytes decide which, not the media
//! type.

use std::io::{self, Read};

use flate2::{Decompress, FlushDecompress, Status};
use zstd::stream::raw::{Decoder as ZstdDecoder, Operation};

/// Size of the buffers compressed bytes are read into.
pub const INPUT_BUFFER: usize = 256 << 10;

/// The largest zstd window accepted: 128 MiB, what `zstd --ultra -22` needs.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// How a blob is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip.
    Gzip,
    /// zstd.
    Zstd,
}

impl Compression {
    /// The usual name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "plain tar",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }
}

/// Why a blob cannot be decompressed.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Reading the blob failed.
    #[error("cannot read the blob")]
    Read(#[source] io::Error),
    /// The compressed stream ends early.
    #[error("the {format} stream is cut short")]
    Truncated {
        /// The compression's name.
        format: &'static str,
    },
    /// The compressed stream is damaged.
    #[error("the {format} stream is damaged: {detail}")]
    Corrupt {
        /// The compression's name.
        format: &'static str,
        /// The decompressor's own words.
        detail: String,
    },
    /// A known compression that layers may not have.
    #[error("compressed with {format}; layers may be gzip, zstd or plain tar")]
    Unsupported {
        /// The compression's name.
        format: &'static str,
    },
    /// The blob decompresses to more than the limits allow.
    #[error(
        "decompresses to more than {limit} bytes from {compressed} bytes; raise the limit if this is meant"
    )]
    Bomb {
        /// The limit that was passed.
        limit: u64,
        /// Compressed bytes read until then.
        compressed: u64,
    },
}

/// How much a blob may decompress to: `floor` bytes plus `ratio` times what was read, and never
/// more than `total`.
#[derive(Debug, Clone, Copy)]
pub struct Expansion {
    /// Allowed whatever the blob's size.
    pub floor: u64,
    /// Allowed per compressed byte. gzip cannot reach more than 1,032.
    pub ratio: u64,
    /// Never more than this.
    pub total: u64,
}

impl Default for Expansion {
    fn default() -> Self {
        Self { floor: 16 << 30, ratio: 2_000, total: 1 << 40 }
    }
}

enum Codec {
    Undetected,
    Plain,
    /// Inside a gzip member.
    Gzip(Box<Decompress>),
    /// Between gzip members; zeros may follow the last one, and then nothing else.
    GzipBetween {
        padding: bool,
    },
    Zstd {
        decoder: ZstdDecoder<'static>,
        between: bool,
    },
}

/// Decompresses a stream step by step.
pub struct Decoder<R> {
    source: R,
    input: Vec<u8>,
    at: usize,
    source_ended: bool,
    codec: Codec,
    compression: Option<Compression>,
    expansion: Expansion,
    read: u64,
    written: u64,
}

impl<R: Read> Decoder<R> {
    /// A decoder at the start of a blob.
    pub fn new(source: R, expansion: Expansion) -> Self {
        Self {
            source,
            input: Vec::new(),
            at: 0,
            source_ended: false,
            codec: Codec::Undetected,
            compression: None,
            expansion,
            read: 0,
            written: 0,
        }
    }

    /// What the first bytes said, once there were any.
    pub fn compression(&self) -> Option<Compression> {
        self.compression
    }

    /// Compressed bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Fills `out` with decompressed bytes from its start; returns how many there are and whether
    /// the blob ended. Less than all of `out` is filled only at the end. `spent` gets every buffer
    /// of compressed bytes once it is used up, in order, and gives an empty one in exchange; it is
    /// told the compression if that is known.
    pub fn step(
        &mut self,
        out: &mut [u8],
        spent: &mut impl FnMut(Vec<u8>, Option<Compression>) -> Vec<u8>,
    ) -> Result<(usize, bool), DecodeError> {
        let mut filled = 0;
        let ended = self.fill(out, &mut filled, spent)?;
        self.written += filled as u64;
        let allowed = (self.read.saturating_mul(self.expansion.ratio))
            .saturating_add(self.expansion.floor)
            .min(self.expansion.total);
        if self.written > allowed {
            return Err(DecodeError::Bomb { limit: allowed, compressed: self.read });
        }
        Ok((filled, ended))
    }

    /// Reads what is left of the blob without decompressing it, so that its digest is known.
    pub fn drain(
        &mut self,
        spent: &mut impl FnMut(Vec<u8>, Option<Compression>) -> Vec<u8>,
    ) -> Result<(), DecodeError> {
        self.at = self.input.len();
        while self.refill(spent)? {
            self.at = self.input.len();
        }
        Ok(())
    }

    fn fill(
        &mut self,
        out: &mut [u8],
        filled: &mut usize,
        spent: &mut impl FnMut(Vec<u8>, Option<Compression>) -> Vec<u8>,
    ) -> Result<bool, DecodeError> {
        while *filled < out.len() {
            if self.at == self.input.len() && !self.refill(spent)? {
                return match &self.codec {
                    Codec::Gzip(_) => Err(DecodeError::Truncated { format: "gzip" }),
                    Codec::Zstd { between: false, .. } => {
                        // The decompressor may still hold output of the last block.
                        if self.flush_zstd(out, filled)? {
                            continue;
                        } else {
                            Err(DecodeError::Truncated { format: "zstd" })
                        }
                    }
                    _ => Ok(true),
                };
            }
            let input = &self.input[self.at..];
            match &mut self.codec {
                Codec::Undetected => {
                    let compression = detect(input)?;
                    self.compression = Some(compression);
                    self.codec = match compression {
                        Compression::None => Codec::Plain,
                        Compression::Gzip => Codec::Gzip(Box::new(Decompress::new_gzip(15))),
                        Compression::Zstd => {
                            Codec::Zstd { decoder: zstd_decoder()?, between: true }
                        }
                    };
                }
                Codec::Plain => {
                    let length = input.len().min(out.len() - *filled);
                    out[*filled..*filled + length].copy_from_slice(&input[..length]);
                    self.at += length;
                    *filled += length;
                }
                Codec::Gzip(inflate) => {
                    let before = (inflate.total_in(), inflate.total_out());
                    let status =
                        inflate.decompress(input, &mut out[*filled..], FlushDecompress::None);
                    let used = usize::try_from(inflate.total_in() - before.0).unwrap_or(0);
                    let made = usize::try_from(inflate.total_out() - before.1).unwrap_or(0);
                    self.at += used;
                    *filled += made;
                    match status {
                        Ok(Status::StreamEnd) => self.codec = Codec::GzipBetween { padding: false },
                        Ok(_) if used == 0 && made == 0 => {
                            return Err(DecodeError::Corrupt {
                                format: "gzip",
                                detail: "the decompressor makes no progress".to_owned(),
                            });
                        }
                        Ok(_) => {}
                        Err(error) => {
                            return Err(DecodeError::Corrupt {
                                format: "gzip",
                                detail: error.to_string(),
                            });
                        }
                    }
                }
                Codec::GzipBetween { padding } => match input[0] {
                    0 => {
                        *padding = true;
                        self.at += input.iter().take_while(|&&byte| byte == 0).count();
                    }
                    0x1f if !*padding => {
                        self.codec = Codec::Gzip(Box::new(Decompress::new_gzip(15)));
                    }
                    _ => {
                        return Err(DecodeError::Corrupt {
                            format: "gzip",
                            detail: "something that is no gzip member follows the last one"
                                .to_owned(),
                        });
                    }
                },
                Codec::Zstd { decoder, between } => {
                    let status = decoder.run_on_buffers(input, &mut out[*filled..]);
                    let status = status.map_err(|error| DecodeError::Corrupt {
                        format: "zstd",
                        detail: error.to_string(),
                    })?;
                    self.at += status.bytes_read;
                    *filled += status.bytes_written;
                    *between = status.remaining == 0;
                }
            }
        }
        Ok(false)
    }

    fn flush_zstd(&mut self, out: &mut [u8], filled: &mut usize) -> Result<bool, DecodeError> {
        let Codec::Zstd { decoder, between } = &mut self.codec else { return Ok(false) };
        let status = decoder.run_on_buffers(&[], &mut out[*filled..]);
        let status = status
            .map_err(|error| DecodeError::Corrupt { format: "zstd", detail: error.to_string() })?;
        *filled += status.bytes_written;
        *between = status.remaining == 0;
        Ok(status.bytes_written > 0 || *between)
    }

    /// Reads the next buffer; `false` at the blob's end.
    fn refill(
        &mut self,
        spent: &mut impl FnMut(Vec<u8>, Option<Compression>) -> Vec<u8>,
    ) -> Result<bool, DecodeError> {
        if self.source_ended {
            return Ok(false);
        }
        let mut buffer = std::mem::take(&mut self.input);
        if !buffer.is_empty() {
            buffer = spent(buffer, self.compression);
        }
        buffer.clear();
        buffer.reserve(INPUT_BUFFER);
        self.at = 0;
        let reader = &mut self.source;
        // Filling the whole buffer gives the magic at least its bytes, however the source reads.
        let length =
            reader.take(INPUT_BUFFER as u64).read_to_end(&mut buffer).map_err(DecodeError::Read)?;
        self.input = buffer;
        self.read += length as u64;
        self.source_ended = length == 0;
        Ok(length > 0)
    }
}

fn zstd_decoder() -> Result<ZstdDecoder<'static>, DecodeError> {
    let corrupt =
        |error: io::Error| DecodeError::Corrupt { format: "zstd", detail: error.to_string() };
    let mut decoder = ZstdDecoder::new().map_err(corrupt)?;
    decoder
        .set_parameter(zstd::zstd_safe::DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX))
        .map_err(corrupt)?;
    Ok(decoder)
}

fn detect(input: &[u8]) -> Result<Compression, DecodeError> {
    let unsupported = |format| Err(DecodeError::Unsupported { format });
    match input {
        [0x1f, 0x8b, ..] => Ok(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Compression::Zstd),
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, ..] => unsupported("bzip2"),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => unsupported("xz"),
        [0x04, 0x22, 0x4d, 0x18, ..] => unsupported("lz4"),
        _ => Ok(Compression::None),
    }
}
