//! One layer as a stream of tar bytes, decompressed and hashed on the way.
//!
//! With threads, a layer is a chain: the decoder inflates into chunks, the hasher digests blob and
//! tar, the reader (the caller's thread) parses. Chunks come from a pool of fixed size and go back
//! to it, so a layer that runs ahead of its reader stops by itself when the pool is empty. Nothing
//! here depends on timing but speed: the reader sees the same bytes in the same order.
//!
//! ```text
//! blob ─► decoder ──chunks──► hasher ──chunks──► reader (BufRead)
//!            ▲                                      │
//!            └──────────────── pool ◄───────────────┘
//! ```

use std::io::{self, BufRead, Read};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::Scope;

use crate::image::digest::{Algorithm, BlobDigest, Hasher};

use super::decode::{Compression, DecodeError, Decoder, Expansion};

/// Bytes of tar in one chunk.
pub const CHUNK: usize = 256 << 10;

/// What is needed to stream a layer.
pub struct LayerInput {
    /// The blob.
    pub blob: Box<dyn Read + Send>,
    /// Hash the blob by this, if its digest is to be known.
    pub blob_algorithm: Option<Algorithm>,
    /// Hash the tar by this.
    pub diff_algorithm: Algorithm,
    /// How much it may decompress to.
    pub expansion: Expansion,
}

/// What a layer turned out to be once its stream was read to the end.
#[derive(Debug)]
pub struct LayerOutcome {
    /// Its compression; `None` for an empty blob.
    pub compression: Option<Compression>,
    /// The blob's digest, when asked for and read to the end.
    pub blob_digest: Option<BlobDigest>,
    /// Bytes of the blob.
    pub blob_size: u64,
    /// The digest of the tar as far as it could be decompressed.
    pub diff_id: BlobDigest,
    /// Bytes of tar.
    pub tar_size: u64,
    /// Why decompression stopped early.
    pub error: Option<DecodeError>,
}

struct Chunk {
    bytes: Vec<u8>,
    length: usize,
}

impl Chunk {
    fn new() -> Self {
        Self { bytes: vec![0; CHUNK], length: 0 }
    }
}

/// A layer being read. [`LayerStream::finish`] gives the digests; dropping it stops the layer's
/// threads.
pub struct LayerStream {
    mode: Mode,
    chunk: Option<Chunk>,
    at: usize,
    outcome: Option<LayerOutcome>,
}

enum Mode {
    Inline(Box<Inline>),
    Threads { chunks: Receiver<ToReader>, pool: Sender<Chunk> },
}

struct Inline {
    decoder: Decoder<Box<dyn Read + Send>>,
    digests: Digests,
}

enum ToHasher {
    Blob(Vec<u8>),
    Tar(Chunk),
    End(End),
}

struct End {
    compression: Option<Compression>,
    blob_size: u64,
    complete: bool,
    error: Option<DecodeError>,
}

enum ToReader {
    Tar(Chunk),
    End(LayerOutcome),
}

/// The digests of a blob and of its tar; one computation when both are the same.
struct Digests {
    blob: Option<(Algorithm, Hasher)>,
    diff: Hasher,
    diff_algorithm: Algorithm,
    tar_size: u64,
}

impl Digests {
    fn new(blob: Option<Algorithm>, diff: Algorithm) -> Self {
        Self {
            blob: blob.map(|algorithm| (algorithm, Hasher::new(algorithm))),
            diff: Hasher::new(diff),
            diff_algorithm: diff,
            tar_size: 0,
        }
    }

    /// Whether the blob's own bytes must be hashed, `compression` being what they are.
    fn wants_blob(
        blob: Option<Algorithm>,
        diff: Algorithm,
        compression: Option<Compression>,
    ) -> bool {
        blob.is_some_and(|algorithm| compression != Some(Compression::None) || algorithm != diff)
    }

    fn blob(&mut self, bytes: &[u8]) {
        if let Some((_, hasher)) = &mut self.blob {
            hasher.update(bytes);
        }
    }

    fn tar(&mut self, bytes: &[u8]) {
        self.diff.update(bytes);
        self.tar_size += bytes.len() as u64;
    }

    fn finish(self, end: End) -> LayerOutcome {
        let diff_id = self.diff.finish();
        let plain = end.compression == Some(Compression::None);
        let blob_digest = self.blob.filter(|_| end.complete).map(|(algorithm, hasher)| {
            if plain && algorithm == self.diff_algorithm {
                diff_id.clone()
            } else {
                hasher.finish()
            }
        });
        LayerOutcome {
            compression: end.compression,
            blob_digest,
            blob_size: end.blob_size,
            diff_id,
            tar_size: self.tar_size,
            error: end.error,
        }
    }
}

/// Ends a decoder: on damage the rest of the blob is read too, so that a wrong digest, which
/// explains the damage, can be told from a damaged original.
fn end<R: Read>(
    decoder: &mut Decoder<R>,
    error: Option<DecodeError>,
    spent: &mut impl FnMut(Vec<u8>, Option<Compression>) -> Vec<u8>,
) -> End {
    let complete = match &error {
        None => true,
        Some(DecodeError::Read(_) | DecodeError::Bomb { .. }) => false,
        Some(_) => decoder.drain(spent).is_ok(),
    };
    End { compression: decoder.compression(), blob_size: decoder.bytes_read(), complete, error }
}

impl LayerStream {
    /// Streams a layer on the reader's own thread.
    pub fn inline(input: LayerInput) -> Self {
        let digests = Digests::new(input.blob_algorithm, input.diff_algorithm);
        let decoder = Decoder::new(input.blob, input.expansion);
        Self::new(Mode::Inline(Box::new(Inline { decoder, digests })))
    }

    /// Starts a layer's threads; at most `chunks` chunks of [`CHUNK`] bytes run ahead.
    pub fn spawn<'scope>(
        scope: &'scope Scope<'scope, '_>,
        input: LayerInput,
        chunks: usize,
    ) -> io::Result<Self> {
        let (pool, free) = channel();
        let (to_hasher, from_decoder) = sync_channel(8);
        let (to_reader, from_hasher) = channel();
        let (spent_pool, spent_free) = channel();
        let (blob_algorithm, diff_algorithm) = (input.blob_algorithm, input.diff_algorithm);
        let wants = move |c| Digests::wants_blob(blob_algorithm, diff_algorithm, c);
        let decoder = Decoder::new(input.blob, input.expansion);
        std::thread::Builder::new().name("layer-decode".to_owned()).spawn_scoped(
            scope,
            move || {
                decode(decoder, &to_hasher, &free, &spent_free, chunks.max(2), wants);
            },
        )?;
        let digests = Digests::new(blob_algorithm, diff_algorithm);
        std::thread::Builder::new()
            .name("layer-hash".to_owned())
            .spawn_scoped(scope, move || hash(digests, &from_decoder, &to_reader, &spent_pool))?;
        Ok(Self::new(Mode::Threads { chunks: from_hasher, pool }))
    }

    fn new(mode: Mode) -> Self {
        Self { mode, chunk: None, at: 0, outcome: None }
    }

    /// Reads the rest of the layer and gives its digests.
    pub fn finish(mut self) -> io::Result<LayerOutcome> {
        loop {
            if let Some(outcome) = self.outcome.take() {
                return Ok(outcome);
            }
            self.next_chunk()?;
        }
    }

    fn next_chunk(&mut self) -> io::Result<()> {
        self.at = 0;
        match &mut self.mode {
            Mode::Threads { chunks, pool } => {
                if let Some(chunk) = self.chunk.take() {
                    // A decoder that has ended takes no chunk back.
                    let _ = pool.send(chunk);
                }
                match chunks.recv() {
                    Ok(ToReader::Tar(chunk)) => self.chunk = Some(chunk),
                    Ok(ToReader::End(outcome)) => self.outcome = Some(outcome),
                    Err(_) => return Err(io::Error::other("a layer's thread ended early")),
                }
            }
            Mode::Inline(inline) => {
                let Inline { decoder, digests } = &mut **inline;
                let mut chunk = self.chunk.take().unwrap_or_else(Chunk::new);
                let (blob, diff) = (digests.blob.as_ref().map(|(a, _)| *a), digests.diff_algorithm);
                let mut spent = |buffer: Vec<u8>, compression| {
                    if Digests::wants_blob(blob, diff, compression) {
                        digests.blob(&buffer);
                    }
                    buffer
                };
                let finished = match decoder.step(&mut chunk.bytes, &mut spent) {
                    Ok((length, ended)) => {
                        chunk.length = length;
                        ended.then_some(None)
                    }
                    Err(error) => {
                        chunk.length = 0;
                        Some(Some(error))
                    }
                };
                let ended = finished.map(|error| end(decoder, error, &mut spent));
                digests.tar(&chunk.bytes[..chunk.length]);
                if chunk.length > 0 {
                    self.chunk = Some(chunk);
                }
                if let Some(ended) = ended {
                    let empty = Digests::new(None, digests.diff_algorithm);
                    self.outcome = Some(std::mem::replace(digests, empty).finish(ended));
                }
            }
        }
        Ok(())
    }
}

impl BufRead for LayerStream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        loop {
            let left = self.chunk.as_ref().is_some_and(|chunk| self.at < chunk.length);
            if left || self.outcome.is_some() {
                break;
            }
            self.next_chunk()?;
        }
        if let Some(chunk) = &self.chunk
            && self.at < chunk.length
        {
            return Ok(&chunk.bytes[self.at..chunk.length]);
        }
        match &self.outcome {
            // The outcome has the reason; this only stops whoever reads.
            Some(LayerOutcome { error: Some(error), .. }) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
            }
            _ => Ok(&[]),
        }
    }

    fn consume(&mut self, amount: usize) {
        self.at += amount;
    }
}

impl Read for LayerStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let piece = self.fill_buf()?;
        let length = piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&piece[..length]);
        self.consume(length);
        Ok(length)
    }
}

/// The decoder's thread. Any failure to send means that the reader has gone.
fn decode<R: Read>(
    mut decoder: Decoder<R>,
    to_hasher: &SyncSender<ToHasher>,
    free: &Receiver<Chunk>,
    spent_free: &Receiver<Vec<u8>>,
    chunks: usize,
    wants_blob: impl Fn(Option<Compression>) -> bool,
) {
    let mut spent = |buffer: Vec<u8>, compression| {
        if !wants_blob(compression) {
            return buffer;
        }
        // A hasher that has gone means that nobody wants the digest any more.
        let _ = to_hasher.send(ToHasher::Blob(buffer));
        spent_free.try_recv().unwrap_or_default()
    };
    let mut made = 0;
    let error = loop {
        let mut chunk = match free.try_recv() {
            Ok(chunk) => chunk,
            Err(_) if made < chunks => {
                made += 1;
                Chunk::new()
            }
            Err(_) => match free.recv() {
                Ok(chunk) => chunk,
                Err(_) => return,
            },
        };
        match decoder.step(&mut chunk.bytes, &mut spent) {
            Ok((length, ended)) => {
                chunk.length = length;
                if length > 0 && to_hasher.send(ToHasher::Tar(chunk)).is_err() {
                    return;
                }
                if ended {
                    break None;
                }
            }
            Err(error) => break Some(error),
        }
    };
    let end = end(&mut decoder, error, &mut spent);
    let _ = to_hasher.send(ToHasher::End(end));
}

/// The hasher's thread.
fn hash(
    mut digests: Digests,
    from_decoder: &Receiver<ToHasher>,
    to_reader: &Sender<ToReader>,
    spent_pool: &Sender<Vec<u8>>,
) {
    for message in from_decoder {
        let sent = match message {
            ToHasher::Blob(buffer) => {
                digests.blob(&buffer);
                let _ = spent_pool.send(buffer);
                Ok(())
            }
            ToHasher::Tar(chunk) => {
                digests.tar(&chunk.bytes[..chunk.length]);
                to_reader.send(ToReader::Tar(chunk))
            }
            ToHasher::End(end) => {
                let _ = to_reader.send(ToReader::End(digests.finish(end)));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}
