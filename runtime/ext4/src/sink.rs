//! Metadata on its way to the image: adjacent blocks are gathered into large writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::geometry::{BLOCK_BYTES, BLOCK_SIZE};

const BUFFER: usize = 1 << 20;

/// The image file with one buffer in front of it.
#[derive(Debug)]
pub struct Sink<'f> {
    file: &'f File,
    buffer: Vec<u8>,
    /// Where in the file the buffer begins.
    start: u64,
}

impl<'f> Sink<'f> {
    /// Nothing is buffered yet.
    pub fn new(file: &'f File) -> Self {
        Self { file, buffer: Vec::with_capacity(BUFFER), start: 0 }
    }

    /// Writes whole blocks from `block` on.
    pub fn put(&mut self, block: u64, bytes: &[u8]) -> io::Result<()> {
        debug_assert_eq!(bytes.len() % BLOCK_SIZE, 0);
        let at = block * BLOCK_BYTES;
        let adjacent = self.start + self.buffer.len() as u64 == at;
        if !adjacent || self.buffer.len() + bytes.len() > BUFFER {
            self.flush()?;
            self.start = at;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Writes what is buffered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.start)?;
        self.buffer.clear();
        Ok(())
    }

    /// Makes a range of blocks read as zeros, as a hole where the file system below can.
    pub fn punch(&mut self, block: u64, blocks: u64) -> io::Result<()> {
        let (offset, length) = (block * BLOCK_BYTES, blocks * BLOCK_BYTES);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.file, flags, offset, length) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => zero(self.file, offset, length),
            Err(error) => Err(error.into()),
        }
    }
}

fn zero(file: &File, mut offset: u64, length: u64) -> io::Result<()> {
    let zeros = vec![0; BUFFER];
    let end = offset + length;
    while offset < end {
        let piece = (end - offset).min(BUFFER as u64);
        file.write_all_at(&zeros[..usize::try_from(piece).unwrap_or(BUFFER)], offset)?;
        offset += piece;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_written_where_holes_cannot_be_punched() {
        let file = tempfile::tempfile().expect("temporary file");
        file.write_all_at(&vec![7; 3 * BUFFER], 0).expect("fill");
        zero(&file, 100, 2 * BUFFER as u64 + 5).expect("zero");
        let mut all = vec![1; 3 * BUFFER];
        file.read_exact_at(&mut all, 0).expect("read");
        assert!(all[..100].iter().all(|&byte| byte == 7));
        assert!(all[100..2 * BUFFER + 105].iter().all(|&byte| byte == 0));
        assert!(all[2 * BUFFER + 105..].iter().all(|&byte| byte == 7));
    }
}
