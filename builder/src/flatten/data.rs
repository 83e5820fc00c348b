//! File contents on their way into the image: cut into blocks, holes left out, blocks taken from
//! the data area in order of arrival, written in large pieces.
//!
//! Which blocks a file gets depends on its bytes and on what came before it, never on the sizes
//! of the pieces they arrive in: blocks of zeros are not stored, all others are allocated in order,
//! and the area is a cursor, so that allocating two blocks at once or one after the other is the
//! same.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::ext4::DataArea;
use crate::tree::{FileData, Run, Runs};

/// Bytes of one block.
pub const BLOCK: usize = 4096;
/// Blocks are gathered until this many bytes can be written at once.
const STAGE: usize = 512 << 10;
/// Pieces at least this large are written as they are.
const DIRECT: usize = 64 << 10;

/// Writes the contents of one file after another.
pub struct DataWriter<'f> {
    out: &'f File,
    area: DataArea,
    /// Adjacent blocks not written yet, and the first one's number.
    stage: Vec<u8>,
    stage_at: u64,
    /// The file system of the image is full; from then on blocks are only counted.
    full: bool,
    file: FileData,
    /// The block being put together, if any of its bytes are there.
    partial: Option<u64>,
    block: Vec<u8>,
    written: u64,
}

impl<'f> DataWriter<'f> {
    /// A writer into the empty file `out`.
    pub fn new(out: &'f File) -> Self {
        Self {
            out,
            area: DataArea::new(),
            stage: Vec::with_capacity(STAGE),
            stage_at: 0,
            full: false,
            file: FileData::default(),
            partial: None,
            block: vec![0; BLOCK],
            written: 0,
        }
    }

    /// Begins a file of `size` bytes.
    pub fn begin(&mut self, size: u64) {
        self.file = FileData { size, runs: Runs::new() };
        self.partial = None;
    }

    /// Adds bytes at `offset`, which must not be before the end of the last ones.
    pub fn write(&mut self, offset: u64, mut bytes: &[u8]) -> io::Result<()> {
        const UNIT: u64 = BLOCK as u64;
        let mut offset = offset;
        while !bytes.is_empty() {
            let logical = offset / UNIT;
            let within = usize::try_from(offset % UNIT).unwrap_or(0);
            if self.partial.is_some_and(|partial| partial != logical) {
                self.flush_partial()?;
            }
            let taken = if within == 0 && bytes.len() >= BLOCK && self.partial.is_none() {
                let whole = bytes.len() - bytes.len() % BLOCK;
                self.blocks(logical, &bytes[..whole])?;
                whole
            } else {
                if self.partial.is_none() {
                    self.block.fill(0);
                    self.partial = Some(logical);
                }
                let length = bytes.len().min(BLOCK - within);
                self.block[within..within + length].copy_from_slice(&bytes[..length]);
                if within + length == BLOCK {
                    self.flush_partial()?;
                }
                length
            };
            bytes = &bytes[taken..];
            offset += taken as u64;
        }
        Ok(())
    }

    /// Ends the file and says where its bytes are.
    pub fn end(&mut self) -> io::Result<FileData> {
        self.flush_partial()?;
        let mut file = std::mem::take(&mut self.file);
        file.runs.shrink_to_fit();
        Ok(file)
    }

    /// Bytes of blocks allocated so far.
    pub fn bytes_allocated(&self) -> u64 {
        self.written
    }

    /// Writes what is left.
    pub fn finish(mut self) -> io::Result<(DataArea, bool)> {
        self.flush_stage()?;
        Ok((self.area, self.full))
    }

    fn flush_partial(&mut self) -> io::Result<()> {
        if let Some(logical) = self.partial.take() {
            let block = std::mem::take(&mut self.block);
            let result = self.blocks(logical, &block);
            self.block = block;
            result?;
        }
        Ok(())
    }

    /// Stores whole blocks from `logical` on, those of zeros left out.
    fn blocks(&mut self, logical: u64, bytes: &[u8]) -> io::Result<()> {
        let mut logical = logical;
        let mut rest = bytes;
        while !rest.is_empty() {
            let zeros = rest.chunks_exact(BLOCK).take_while(|block| is_zero(block)).count();
            rest = &rest[zeros * BLOCK..];
            logical += zeros as u64;
            let used = rest.chunks_exact(BLOCK).take_while(|block| !is_zero(block)).count();
            if used > 0 {
                self.store(logical, &rest[..used * BLOCK])?;
                rest = &rest[used * BLOCK..];
                logical += used as u64;
            }
        }
        Ok(())
    }

    fn store(&mut self, logical: u64, bytes: &[u8]) -> io::Result<()> {
        let mut places = Vec::new();
        let count = (bytes.len() / BLOCK) as u64;
        self.area.allocate(count, |physical, blocks| places.push((physical, blocks)));
        self.written += bytes.len() as u64;
        let mut logical = u32::try_from(logical).map_err(|_| {
            io::Error::new(io::ErrorKind::FileTooLarge, "a file ends beyond 16 TiB")
        })?;
        let mut rest = bytes;
        for (physical, blocks) in places {
            let (piece, after) = rest.split_at(blocks as usize * BLOCK);
            rest = after;
            match self.file.runs.last_mut() {
                Some(run)
                    if run.logical + run.blocks == logical
                        && run.physical + u64::from(run.blocks) == physical =>
                {
                    run.blocks += blocks;
                }
                _ => {
                    self.file.runs.push(Run { logical, blocks, physical });
                }
            }
            logical = logical.saturating_add(blocks);
            self.emit(physical, piece)?;
        }
        Ok(())
    }

    fn emit(&mut self, physical: u64, bytes: &[u8]) -> io::Result<()> {
        if self.full {
            return Ok(());
        }
        let adjacent = self.stage_at + (self.stage.len() / BLOCK) as u64 == physical;
        if !adjacent || self.stage.len() + bytes.len() > STAGE || bytes.len() >= DIRECT {
            self.flush_stage()?;
            self.stage_at = physical;
        }
        if bytes.len() >= DIRECT {
            self.put(physical, bytes)?;
            self.stage_at = physical + (bytes.len() / BLOCK) as u64;
        } else {
            self.stage.extend_from_slice(bytes);
        }
        Ok(())
    }

    fn flush_stage(&mut self) -> io::Result<()> {
        let stage = std::mem::take(&mut self.stage);
        let result = self.put(self.stage_at, &stage);
        self.stage_at += (stage.len() / BLOCK) as u64;
        self.stage = stage;
        self.stage.clear();
        result
    }

    fn put(&mut self, physical: u64, bytes: &[u8]) -> io::Result<()> {
        if self.full || bytes.is_empty() {
            return Ok(());
        }
        match self.out.write_all_at(bytes, physical * BLOCK as u64) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
                ) =>
            {
                self.full = true;
                Ok(())
            }
            other => other,
        }
    }
}

fn is_zero(block: &[u8]) -> bool {
    let (words, rest) = block.as_chunks::<64>();
    words.iter().all(|word| word == &[0; 64]) && rest.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes one file in pieces of `piece` bytes and reads it back through its runs.
    fn round_trip(contents: &[u8], piece: usize) -> (FileData, Vec<u8>) {
        let out = tempfile::tempfile().unwrap();
        let mut writer = DataWriter::new(&out);
        writer.begin(contents.len() as u64);
        for (at, part) in contents.chunks(piece).enumerate() {
            writer.write((at * piece) as u64, part).unwrap();
        }
        let file = writer.end().unwrap();
        writer.finish().unwrap();
        let mut back = vec![0; contents.len().next_multiple_of(BLOCK)];
        for run in &file.runs {
            let at = run.logical as usize * BLOCK;
            let length = run.blocks as usize * BLOCK;
            out.read_exact_at(&mut back[at..at + length], run.physical * BLOCK as u64).unwrap();
        }
        assert!(back[contents.len()..].iter().all(|&byte| byte == 0), "the tail is zero");
        back.truncate(contents.len());
        (file, back)
    }

    #[test]
    fn pieces_of_any_size_give_the_same_blocks() {
        let mut contents: Vec<u8> = (0..300_000u32).map(|at| (at % 251) as u8 + 1).collect();
        contents[8192..40_960].fill(0);
        contents[100_000..110_000].fill(0);
        contents[290_000..].fill(0);
        let (want, back) = round_trip(&contents, contents.len());
        assert_eq!(back, contents);
        assert!(want.runs.len() > 1);
        for piece in [1, 100, 511, 4096, 5000, 65_536, 262_144] {
            let (file, back) = round_trip(&contents, piece);
            assert_eq!(file, want, "{piece}");
            assert_eq!(back, contents, "{piece}");
        }
    }

    #[test]
    fn holes_take_no_blocks() {
        let out = tempfile::tempfile().unwrap();
        let mut writer = DataWriter::new(&out);
        writer.begin(5 << 30);
        writer.write((4 << 30) + 10, b"x").unwrap();
        writer.write((4 << 30) + 4095, b"yz").unwrap();
        let file = writer.end().unwrap();
        assert_eq!(file.runs.len(), 1);
        assert_eq!((file.runs[0].logical, file.runs[0].blocks), (1 << 20, 2));
        writer.begin(1 << 20);
        writer.write(0, &vec![0; 1 << 20]).unwrap();
        assert!(writer.end().unwrap().runs.is_empty());
        assert_eq!(writer.bytes_allocated(), 8192);
    }
}
