//! Cutting a file into chunks and hashing them on every processor.
//!
//! Only the file's data extents are read (`SEEK_DATA`), so a hole of any size costs nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::Digest;
use crate::index::{Chunk, ChunkIndex, IndexError, MAX_CHUNK_SIZE};
use crate::stop::Stop;

static ZEROS: [u8; MAX_CHUNK_SIZE as usize] = [0; MAX_CHUNK_SIZE as usize];

/// A file could not be cut into chunks.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The system refused a read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The image is out of the format's bounds.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// Whether every byte is zero.
#[must_use]
pub fn is_zero(mut bytes: &[u8]) -> bool {
    // A comparison of slices is one memcmp, which beats any loop over bytes.
    while bytes.len() > ZEROS.len() {
        let (head, tail) = bytes.split_at(ZEROS.len());
        if head != ZEROS {
            return false;
        }
        bytes = tail;
    }
    *bytes == ZEROS[..bytes.len()]
}

/// Hashes `file` into an index, and makes holes of the chunks that turn out to be all zero when
/// `punch` is set and the file system can.
///
/// # Errors
/// When the file cannot be read or its size is out of bounds.
pub fn scan(file: &File, chunk_size: u32, punch: bool) -> Result<ChunkIndex, ScanError> {
    scan_until(file, chunk_size, punch, Stop::default())
}

/// The same, unless it is time to stop.
pub(crate) fn scan_until(
    file: &File,
    chunk_size: u32,
    punch: bool,
    stop: Stop,
) -> Result<ChunkIndex, ScanError> {
    let image_size = file.metadata()?.len();
    // Checks the sizes before anything is read.
    ChunkIndex::new(chunk_size, image_size, Vec::new())?;
    let numbers = chunks_with_data(file, chunk_size, image_size)?;
    let next = AtomicUsize::new(0);
    let results = Mutex::new((Vec::with_capacity(numbers.len()), Vec::new()));
    let worker = || -> io::Result<()> {
        let mut buffer = vec![0; chunk_size as usize];
        let (mut chunks, mut zero) = (Vec::new(), Vec::new());
        // Runs of chunks keep each worker's reads sequential.
        const RUN: usize = 16;
        loop {
            let start = next.fetch_add(RUN, Ordering::Relaxed);
            if start >= numbers.len() {
                break;
            }
            for &number in &numbers[start..numbers.len().min(start + RUN)] {
                stop.check()?;
                let offset = u64::from(number) * u64::from(chunk_size);
                let len = (image_size - offset).min(u64::from(chunk_size)) as usize;
                let bytes = &mut buffer[..len];
                file.read_exact_at(bytes, offset)?;
                if is_zero(bytes) {
                    zero.push((offset, len as u64));
                } else {
                    chunks.push(Chunk { number, digest: Digest::of(bytes) });
                }
            }
        }
        let mut results = results.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        results.0.append(&mut chunks);
        results.1.append(&mut zero);
        Ok(())
    };
    in_parallel(numbers.len().div_ceil(64), &worker)?;
    let (mut chunks, zero) =
        results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    chunks.sort_unstable_by_key(|chunk| chunk.number);
    if punch {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (offset, len) in zero {
            // Saves space where it works; the content is the same where it does not.
            if rustix::fs::fallocate(file, mode, offset, len).is_err() {
                break;
            }
        }
    }
    Ok(ChunkIndex::new(chunk_size, image_size, chunks)?)
}

/// Runs `worker` on up to `limit` threads, at most one per processor, and returns the first error.
pub(crate) fn in_parallel<E: Send>(
    limit: usize,
    worker: &(dyn Fn() -> Result<(), E> + Sync),
) -> Result<(), E> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(limit).min(16);
    if threads <= 1 {
        return worker();
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        running.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

/// The numbers of the chunks that touch a data extent, ascending.
pub(crate) fn chunks_with_data(
    file: &File,
    chunk_size: u32,
    image_size: u64,
) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    let mut position = 0;
    while position < image_size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(position)) {
            Ok(start) => start,
            // Nothing but a hole up to the end.
            Err(Errno::NXIO) => break,
            // A file system that knows no holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => position,
            Err(error) => return Err(error.into()),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(image_size),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => image_size,
            Err(error) => return Err(error.into()),
        };
        let first = start / u64::from(chunk_size);
        let past = end.div_ceil(u64::from(chunk_size));
        let fresh = numbers.last().map_or(first, |&last: &u32| first.max(u64::from(last) + 1));
        // `ChunkIndex::new` bounded the number of chunks to 32 bits.
        numbers.extend((fresh..past).map(|number| number as u32));
        position = end.max(start + 1);
    }
    Ok(numbers)
}
