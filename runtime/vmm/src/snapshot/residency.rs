//! Which pages of guest memory can hold anything but zeros, so that writing an image does not have
//! to touch (and thereby allocate) the others.
//!
//! A page that was never touched is not in the page table. What it would read as is zero in
//! anonymous memory, and the image's content in a private mapping of one, where holes are zeros.
//! (Linux, `Documentation/admin-guide/mm/pagemap.rst`: bit 63 present, bit 62 swapped or moving.)

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::memory::PAGE;

const ENTRY: usize = 8;
/// Bits 63 and 62, in the entry's last byte.
const TOUCHED: u8 = 0xc0;

/// The page table's view and the image the memory was mapped from, both opened before the jail.
pub struct Residency {
    pagemap: File,
    image: Option<File>,
}

impl Residency {
    /// For memory mapped from `image`, or anonymous memory; none where `/proc` is not mounted.
    pub fn open(image: Option<&File>) -> Option<Self> {
        let image = image.map(File::try_clone).transpose().ok()?;
        Some(Self { pagemap: File::open("/proc/self/pagemap").ok()?, image })
    }

    /// For each page of the mapping at `address`, whether it may hold data. `offset` is where the
    /// mapping begins in the image.
    pub fn of(&self, address: usize, length: usize, offset: u64) -> io::Result<Vec<bool>> {
        const BATCH: usize = 8192;
        let pages = length.div_ceil(PAGE);
        let mut map = Vec::with_capacity(pages);
        let mut buffer = vec![0; BATCH * ENTRY];
        while map.len() < pages {
            let wanted = BATCH.min(pages - map.len()) * ENTRY;
            let at = (address / PAGE + map.len()) * ENTRY;
            self.pagemap.read_exact_at(&mut buffer[..wanted], at as u64)?;
            map.extend(buffer[..wanted].chunks_exact(ENTRY).map(|e| e[ENTRY - 1] & TOUCHED != 0));
        }
        if let Some(image) = &self.image {
            mark_data(image, offset, length as u64, &mut map)?;
        }
        Ok(map)
    }
}

/// Marks the pages the image has data for.
fn mark_data(image: &File, offset: u64, length: u64, map: &mut [bool]) -> io::Result<()> {
    use rustix::fs::{SeekFrom, seek};
    let end = offset.saturating_add(length);
    let mut at = offset;
    while at < end {
        let start = match seek(image, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole up to the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let stop = seek(image, SeekFrom::Hole(start))?;
        let page =
            |position: u64| usize::try_from(position.saturating_sub(offset)).unwrap_or(usize::MAX);
        let first = (page(start) / PAGE).min(map.len());
        let last = page(stop).div_ceil(PAGE).min(map.len());
        map[first..last.max(first)].fill(true);
        at = stop;
    }
    Ok(())
}
