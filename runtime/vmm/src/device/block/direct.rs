//! A volume that outlives the machine: a file of the host's, read and written in place.
//!
//! The file is locked for as long as the monitor lives, so that no two machines ever have it. What
//! the guest flushes is on the host's disk when the flush is answered.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{FallocateFlags, FlockOperation};

use super::overlay::DiskError;
use crate::device::ring::Buffers;
use crate::device::{DeviceError, sys};

const SECTOR: u64 = 512;

/// The file, or none: then the device has no sectors.
pub(super) struct Direct {
    file: Option<File>,
    len: u64,
}

impl Direct {
    /// Opens and locks the file.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, DeviceError> {
        let Some(path) = path else { return Ok(Self { file: None, len: 0 }) };
        let failed = |error| DeviceError::io(format!("workspace {}", path.display()), error);
        let file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            let kind = io::ErrorKind::InvalidInput;
            return Err(failed(io::Error::new(kind, "not a regular file")));
        }
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            failed(match error {
                rustix::io::Errno::WOULDBLOCK => io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "another sandbox uses it; end that one first, or use another workspace",
                ),
                other => other.into(),
            })
        })?;
        Ok(Self { len: metadata.len() / SECTOR * SECTOR, file: Some(file) })
    }

    /// Whether there is a file.
    pub(super) fn is_there(&self) -> bool {
        self.file.is_some()
    }

    /// Its size in sectors.
    pub(super) fn sectors(&self) -> u64 {
        self.len / SECTOR
    }

    fn file(&self, offset: u64, len: u64) -> Result<&File, DiskError> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        self.file.as_ref().filter(|_| fits).ok_or(DiskError::Range)
    }

    /// Reads from `offset` until `out` is full.
    pub(super) fn read(&self, offset: u64, mut out: Buffers<'_>) -> Result<(), DiskError> {
        let file = self.file(offset, out.len() as u64)?;
        let mut at = offset;
        while out.len() > 0 {
            let count = sys::preadv(file, out.slices(), at)?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            out.take(count);
            at += count as u64;
        }
        Ok(())
    }

    /// Writes all of `data` at `offset`.
    pub(super) fn write(&self, offset: u64, mut data: Buffers<'_>) -> Result<(), DiskError> {
        let file = self.file(offset, data.len() as u64)?;
        let mut at = offset;
        while data.len() > 0 {
            let count = sys::pwritev(file, data.slices(), at)?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
            data.take(count);
            at += count as u64;
        }
        Ok(())
    }

    /// Makes a range read as zeros and gives its space back where the file system can.
    pub(super) fn zero(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        use std::os::unix::fs::FileExt;
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let file = self.file(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(file, flags, offset, len) {
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let (mut at, end) = (offset, offset + len);
                while at < end {
                    let count = usize::try_from(end - at).unwrap_or(usize::MAX).min(ZEROS.len());
                    file.write_all_at(&ZEROS[..count], at)?;
                    at += count as u64;
                }
                Ok(())
            }
            other => Ok(other.map_err(io::Error::from)?),
        }
    }

    /// Waits until everything written is on the host's disk.
    pub(super) fn flush(&self) -> Result<(), DiskError> {
        match &self.file {
            Some(file) => Ok(file.sync_data()?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, request, write};
    use super::super::{Block, S_IOERR, S_OK, T_DISCARD, T_FLUSH, T_IN};
    use super::*;
    use crate::device::guest::{Guest, READ, WRITE};

    const SIZE: usize = 1 << 20;

    fn volume() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..SIZE).map(|i| (i / 512 % 251) as u8 + 1).collect();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn open(path: Option<&Path>) -> Box<Block> {
        Box::new(Block::open_volume(path).unwrap())
    }

    fn sectors(guest: &mut Guest) -> u32 {
        guest.get(0x100)
    }

    #[test]
    fn writes_are_in_the_file_and_stay_there() {
        let file = volume();
        let mut expected = std::fs::read(file.path()).unwrap();
        let mut guest = Guest::boot(open(Some(file.path())), true);
        assert_eq!(sectors(&mut guest) as usize, SIZE / 512);
        write(&mut guest, 5, &[0xee; 1024]);
        expected[5 * 512..7 * 512].fill(0xee);
        assert_eq!(request(&mut guest, T_FLUSH, 0, &[]).0, S_OK);
        let segment: Vec<u8> =
            [8u64.to_le_bytes().as_slice(), &8u32.to_le_bytes(), &[0; 4]].concat();
        let at = guest.put(&segment);
        assert_eq!(request(&mut guest, T_DISCARD, 0, &[(at, 16, READ)]).0, S_OK);
        expected[8 * 512..16 * 512].fill(0);
        assert_eq!(read(&mut guest, 0, SIZE), expected);
        assert_eq!(std::fs::read(file.path()).unwrap(), expected);
        let at = guest.alloc(1024);
        let beyond = SIZE as u64 / 512 - 1;
        assert_eq!(request(&mut guest, T_IN, beyond, &[(at, 1024, WRITE)]).0, S_IOERR);
        drop(guest);
        assert_eq!(read(&mut Guest::boot(open(Some(file.path())), false), 0, SIZE), expected);
    }

    #[test]
    fn a_frozen_empty_slot_is_told_of_its_volume() {
        let file = volume();
        let mut guest = Guest::boot(open(None), true);
        assert_eq!(sectors(&mut guest), 0);
        let at = guest.alloc(512);
        assert_eq!(request(&mut guest, T_IN, 0, &[(at, 512, WRITE)]).0, S_IOERR);
        let frozen = guest.freeze();
        let mut still_empty = Guest::thaw(&frozen, open(None));
        assert_eq!(still_empty.get(0x60) & 2, 0, "told of nothing");
        let mut guest = Guest::thaw(&frozen, open(Some(file.path())));
        assert_eq!(guest.get(0x60) & 2, 2, "not told");
        assert_eq!(sectors(&mut guest) as usize, SIZE / 512);
        assert_eq!(read(&mut guest, 0, 512), vec![1; 512]);
        // With one it is not frozen.
        guest.transport.quiesce().unwrap();
        assert!(guest.transport.save().is_err());
    }

    #[test]
    fn a_volume_is_for_one_at_a_time() {
        let file = volume();
        let first = open(Some(file.path()));
        let Err(refused) = Block::open_volume(Some(file.path())) else { panic!("it has it twice") };
        assert!(refused.to_string().contains("another sandbox uses it"), "{refused}");
        drop(first);
        drop(open(Some(file.path())));
        let directory = tempfile::tempdir().unwrap();
        assert!(Block::open_volume(Some(directory.path())).is_err());
        assert!(Block::open_volume(Some(&directory.path().join("none"))).is_err());
    }
}
