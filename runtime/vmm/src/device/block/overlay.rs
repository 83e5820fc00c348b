//! A disk in three layers: shared base, frozen overlay, private overlay.
//!
//! Both overlays are sparse files in which a block lies at its own offset, so finding one is
//! arithmetic, and the [`BlockMap`] says which file has it. The private overlay is a file without a
//! name (`O_TMPFILE`, or a memfd): creating one costs a system call, and it is gone with the
//! monitor, however that ends.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use parbake_protocol::filling::Layer;
use parbake_protocol::vmm::Disk;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};

use super::map::{BLOCK, BlockMap, Place, SavedMap};
use crate::device::ring::Buffers;
use crate::device::{DeviceError, sys};
use crate::filling::DiskFilling;

/// The largest disk; its map takes 512 MiB of address space, and memory only where written.
const MAX_BYTES: u64 = 8 << 40;
const SECTOR: u64 = 512;
/// Bytes copied at once when an overlay is written out.
const COPY: usize = 256 << 10;

/// Why a request on the disk failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum DiskError {
    /// The range leaves the disk.
    #[error("the range leaves the disk")]
    Range,
    /// The guest has written as much as it may.
    #[error("the disk's write limit is reached")]
    Limit,
    /// The host's files failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The layers.
pub(super) struct Layers {
    base: File,
    base_len: u64,
    frozen: Option<File>,
    private: File,
    map: BlockMap,
    /// Most blocks in the private overlay.
    limit: u64,
    /// While base and frozen overlay fill up.
    filling: Option<DiskFilling>,
}

impl Layers {
    /// Opens what `disk` names. Before a restore the frozen overlay counts as empty.
    pub(super) fn open(disk: &Disk) -> Result<Self, DeviceError> {
        let base = open_read_only(&disk.base)?;
        let base_len = length(&base, &disk.base)?;
        if base_len > MAX_BYTES {
            return Err(DeviceError::io(
                format!("disk {}: at most 8 TiB are supported", disk.base.display()),
                io::Error::from(io::ErrorKind::FileTooLarge),
            ));
        }
        let frozen = disk.overlay.as_deref().map(open_read_only).transpose()?;
        let blocks = base_len.div_ceil(BLOCK);
        let private = private_file(disk.scratch.as_deref())?;
        private
            .set_len(blocks * BLOCK)
            .map_err(|error| DeviceError::io("sizing a disk's private overlay", error))?;
        let limit = if disk.write_limit == 0 { u64::MAX } else { disk.write_limit / BLOCK };
        let map = BlockMap::new(blocks);
        Ok(Self { base, base_len, frozen, private, map, limit, filling: None })
    }

    /// Asks before each read of a file that is not all there yet.
    pub(super) fn fill_from(&mut self, filling: DiskFilling) {
        self.filling = Some(filling);
    }

    fn ensure(&self, layer: Layer, offset: u64, len: u64) -> io::Result<()> {
        self.filling.as_ref().map_or(Ok(()), |filling| filling.ensure(layer, offset, len))
    }

    /// Size of the disk in sectors.
    pub(super) fn sectors(&self) -> u64 {
        self.base_len.div_ceil(SECTOR)
    }

    /// Bytes in the private overlay.
    pub(super) fn private_bytes(&self) -> u64 {
        self.map.private() * BLOCK
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        let end = offset.checked_add(len).ok_or(DiskError::Range)?;
        if end > self.sectors() * SECTOR { Err(DiskError::Range) } else { Ok(()) }
    }

    /// Reads from `offset` until `out` is full.
    pub(super) fn read(&self, offset: u64, mut out: Buffers<'_>) -> Result<(), DiskError> {
        self.check(offset, out.len() as u64)?;
        let mut at = offset;
        while out.len() > 0 {
            let (len, place) = self.extent(at, out.len() as u64);
            let mut part = out.take(len as usize);
            at += len;
            let start = at - len;
            match place {
                Place::Zero => part.fill_zero(),
                Place::Base => {
                    self.ensure(Layer::Base, start, len)?;
                    read_file(&self.base, start, &mut part)?;
                    // Behind the end of a base that is not a whole number of blocks.
                    if start + len - part.len() as u64 >= self.base_len {
                        part.fill_zero();
                    }
                }
                Place::Frozen => {
                    self.ensure(Layer::Overlay, start, len)?;
                    read_file(self.frozen()?, start, &mut part)?;
                }
                Place::Private => read_file(&self.private, start, &mut part)?,
            }
            if part.len() > 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(())
    }

    /// Writes all of `data` at `offset`, to the private overlay.
    pub(super) fn write(&mut self, offset: u64, mut data: Buffers<'_>) -> Result<(), DiskError> {
        self.check(offset, data.len() as u64)?;
        let len = data.len() as u64;
        if len == 0 {
            return Ok(());
        }
        self.reserve(offset, len)?;
        self.complete_edges(offset, len)?;
        let mut at = offset;
        while data.len() > 0 {
            let count = sys::pwritev(&self.private, data.slices(), at)?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
            data.take(count);
            at += count as u64;
        }
        let first = offset / BLOCK;
        self.map.set(first, (offset + len).div_ceil(BLOCK) - first, Place::Private);
        Ok(())
    }

    /// Makes a range read as zeroes and gives its space back.
    pub(super) fn zero(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.check(offset, len)?;
        let end = offset + len;
        // The disk's last block may be cut off by its end.
        let whole_end =
            if end == self.sectors() * SECTOR { end.next_multiple_of(BLOCK) } else { end };
        let first = offset.div_ceil(BLOCK);
        let last = whole_end / BLOCK;
        if first >= last {
            // Inside one block, or over the border of two without covering either.
            let border = (offset / BLOCK + 1) * BLOCK;
            self.zero_part(offset, len.min(border - offset))?;
            if end > border {
                self.zero_part(border, end - border)?;
            }
            return Ok(());
        }
        self.zero_part(offset, first * BLOCK - offset)?;
        if end > last * BLOCK {
            self.zero_part(last * BLOCK, end - last * BLOCK)?;
        }
        if self.map.run(first, last - first).count < last - first
            || self.map.get(first) == Place::Private
        {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (at, count) = (first * BLOCK, (last - first) * BLOCK);
            match rustix::fs::fallocate(&self.private, flags, at, count) {
                // The file system cannot: the space stays used, the map still says zero.
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        self.map.set(first, last - first, Place::Zero);
        Ok(())
    }

    /// Zeroes a part of one block.
    fn zero_part(&mut self, offset: u64, len: u64) -> Result<(), DiskError> {
        if len == 0 || self.map.get(offset / BLOCK) == Place::Zero {
            return Ok(());
        }
        self.reserve(offset, len)?;
        self.complete_edges(offset, len)?;
        let zeroes = [0u8; BLOCK as usize];
        self.private.write_all_at(&zeroes[..len as usize], offset)?;
        self.map.set(offset / BLOCK, 1, Place::Private);
        Ok(())
    }

    /// Checks that the limit leaves room for the blocks a write would add.
    fn reserve(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        if self.limit == u64::MAX {
            return Ok(());
        }
        let end = (offset + len).div_ceil(BLOCK);
        let mut block = offset / BLOCK;
        let mut added = 0;
        while block < end {
            let run = self.map.run(block, end - block);
            if run.place != Place::Private {
                added += run.count;
            }
            block += run.count;
        }
        let room = self.limit.saturating_sub(self.map.private());
        if added > room { Err(DiskError::Limit) } else { Ok(()) }
    }

    /// Brings the rest of blocks that a write covers only in part into the private overlay. They
    /// are marked once the write is done.
    fn complete_edges(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        let end = offset + len;
        let first = offset / BLOCK;
        let last = (end - 1) / BLOCK;
        if !offset.is_multiple_of(BLOCK) {
            self.complete(first)?;
        }
        if !end.is_multiple_of(BLOCK) && (last != first || offset.is_multiple_of(BLOCK)) {
            self.complete(last)?;
        }
        Ok(())
    }

    fn complete(&self, block: u64) -> Result<(), DiskError> {
        let mut bytes = [0u8; BLOCK as usize];
        let at = block * BLOCK;
        match self.map.get(block) {
            Place::Private => return Ok(()),
            Place::Zero => {}
            Place::Base => {
                let len = self.base_len.saturating_sub(at).min(BLOCK) as usize;
                self.ensure(Layer::Base, at, BLOCK)?;
                self.base.read_exact_at(&mut bytes[..len], at)?;
            }
            Place::Frozen => {
                self.ensure(Layer::Overlay, at, BLOCK)?;
                self.frozen()?.read_exact_at(&mut bytes, at)?;
            }
        }
        Ok(self.private.write_all_at(&bytes, at)?)
    }

    /// How many bytes from `at`, at most `limit`, one place has.
    fn extent(&self, at: u64, limit: u64) -> (u64, Place) {
        let into = at % BLOCK;
        let run = self.map.run(at / BLOCK, (into + limit).div_ceil(BLOCK));
        ((run.count * BLOCK).saturating_sub(into).clamp(1, limit), run.place)
    }

    fn frozen(&self) -> io::Result<&File> {
        self.frozen.as_ref().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    /// What a snapshot must know about the file [`Self::write_overlay`] writes.
    pub(super) fn saved_map(&self) -> SavedMap {
        SavedMap::flatten(&self.map)
    }

    /// Takes over the map of the frozen overlay.
    pub(super) fn restore_map(&mut self, saved: &SavedMap) -> Result<(), String> {
        if saved.blocks != self.map.blocks() {
            return Err(format!(
                "it was taken over a base of {} blocks, this one has {}",
                saved.blocks,
                self.map.blocks()
            ));
        }
        let (map, data_end) = saved.revive()?;
        if data_end > 0 {
            let frozen = self.frozen.as_ref().ok_or("it needs an overlay file, none is given")?;
            let len = frozen.metadata().map_err(|error| error.to_string())?.len();
            if len < data_end * BLOCK {
                return Err(format!(
                    "the overlay file has {len} bytes, its map needs {}",
                    data_end * BLOCK
                ));
            }
        }
        self.map = map;
        Ok(())
    }

    /// Writes frozen and private blocks, flattened, into the empty file `out`; how many bytes.
    pub(super) fn write_overlay(&self, out: &File) -> io::Result<u64> {
        let mut written = 0;
        let mut end = 0;
        let mut buffer = Vec::new();
        for run in self.map.runs() {
            let from = match run.place {
                Place::Private => &self.private,
                Place::Frozen => self.frozen()?,
                Place::Base | Place::Zero => continue,
            };
            let (mut at, bytes) = (run.start * BLOCK, run.count * BLOCK);
            end = at + bytes;
            written += bytes;
            if run.place == Place::Frozen {
                self.ensure(Layer::Overlay, at, bytes)?;
            }
            while at < end {
                let wanted = usize::try_from(end - at).unwrap_or(COPY).min(COPY);
                let mut target = at;
                let mut source = at;
                // In the kernel where it can (reflink or a copy without us); else through a buffer.
                match rustix::fs::copy_file_range(
                    from,
                    Some(&mut source),
                    out,
                    Some(&mut target),
                    (end - at) as usize,
                ) {
                    Ok(count) if count > 0 => at += count as u64,
                    _ => {
                        buffer.resize(wanted, 0);
                        from.read_exact_at(&mut buffer, at)?;
                        out.write_all_at(&buffer, at)?;
                        at += wanted as u64;
                    }
                }
            }
        }
        if end > 0 {
            out.set_len(end)?;
        }
        Ok(written)
    }
}

fn read_file(file: &File, offset: u64, out: &mut Buffers<'_>) -> io::Result<()> {
    let mut at = offset;
    while out.len() > 0 {
        let count = sys::preadv(file, out.slices(), at)?;
        if count == 0 {
            break;
        }
        out.take(count);
        at += count as u64;
    }
    Ok(())
}

fn open_read_only(path: &Path) -> Result<File, DeviceError> {
    File::options()
        .read(true)
        .open(path)
        .map_err(|error| DeviceError::io(format!("opening disk image {}", path.display()), error))
}

fn length(file: &File, path: &Path) -> Result<u64, DeviceError> {
    let metadata = file
        .metadata()
        .map_err(|error| DeviceError::io(format!("disk image {}", path.display()), error))?;
    if !metadata.is_file() {
        return Err(DeviceError::io(
            format!("disk image {}", path.display()),
            io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"),
        ));
    }
    Ok(metadata.len())
}

fn private_file(scratch: Option<&Path>) -> Result<File, DeviceError> {
    let Some(directory) = scratch else {
        return rustix::fs::memfd_create("parbake-overlay", MemfdFlags::CLOEXEC)
            .map(File::from)
            .map_err(|error| DeviceError::io("creating a disk's private overlay", error));
    };
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    let mode = Mode::RUSR | Mode::WUSR;
    rustix::fs::open(directory, flags | OFlags::TMPFILE, mode)
        .or_else(|error| {
            // Network and user-space file systems often lack O_TMPFILE.
            if error != rustix::io::Errno::OPNOTSUPP {
                return Err(error);
            }
            let name = directory.join(format!(".overlay-{}", std::process::id()));
            let file = rustix::fs::open(&name, flags | OFlags::CREATE, mode)?;
            rustix::fs::unlink(&name)?;
            Ok(file)
        })
        .map(File::from)
        .map_err(|error| {
            DeviceError::io(
                format!("creating a disk's private overlay in {}", directory.display()),
                error,
            )
        })
}
