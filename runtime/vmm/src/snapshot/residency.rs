//! Which pages of guest memory can hold anything but zeros, or anything but what the image has, so
//! that writing a snapshot does not have to touch (and thereby allocate) the others.
//!
//! A page that was never touched is not in the page table. What it would read as is zero in
//! anonymous memory, and the image's content in a private mapping of one, where holes are zeros.
//! A page of such a mapping that was written to is the process's own; one that was only read, and
//! was not, is the file's.
//! (Linux, `Documentation/admin-guide/mm/pagemap.rst`: bit 63 present, bit 62 swapped or moving,
//! bit 61 of a file or shared. A page on its way belongs to whom its page belongs; one swapped out
//! is the process's own.)

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::difference::Run;
use crate::memory::PAGE;

const ENTRY: usize = 8;
/// Bits 63 and 62, in the entry's last byte.
const TOUCHED: u8 = 0xc0;
/// Bit 61.
const OF_FILE: u8 = 0x20;

/// The page table's view and the image the memory was mapped from, both opened before the jail.
pub struct Residency {
    pagemap: File,
    image: Option<File>,
    laid_over: Vec<Run>,
}

impl Residency {
    /// For memory mapped from `image` with other pages laid over it, or anonymous memory; none
    /// where `/proc` is not mounted.
    pub fn open(image: Option<&File>, laid_over: Vec<Run>) -> Option<Self> {
        let image = image.map(File::try_clone).transpose().ok()?;
        Some(Self { pagemap: File::open("/proc/self/pagemap").ok()?, image, laid_over })
    }

    /// Whether there is an image that memory can differ from.
    pub fn has_image(&self) -> bool {
        self.image.is_some()
    }

    /// For each page of the mapping at `address`, whether it may hold data. `offset` is where the
    /// mapping begins in the image.
    pub fn of(&self, address: usize, length: usize, offset: u64) -> io::Result<Vec<bool>> {
        let mut map = self.entries(address, length, |flags| flags & TOUCHED != 0)?;
        if let Some(image) = &self.image {
            mark_data(image, offset, length as u64, &mut map)?;
        }
        self.mark_laid_over(offset, &mut map);
        Ok(map)
    }

    /// The same: whether it may differ from the image.
    pub fn differing(&self, address: usize, length: usize, offset: u64) -> io::Result<Vec<bool>> {
        let own = |flags: u8| flags & TOUCHED != 0 && flags & OF_FILE == 0;
        let mut map = self.entries(address, length, own)?;
        self.mark_laid_over(offset, &mut map);
        Ok(map)
    }

    fn entries(
        &self,
        address: usize,
        length: usize,
        wanted: impl Fn(u8) -> bool,
    ) -> io::Result<Vec<bool>> {
        const BATCH: usize = 8192;
        let pages = length.div_ceil(PAGE);
        let mut map = Vec::with_capacity(pages);
        let mut buffer = vec![0; BATCH * ENTRY];
        while map.len() < pages {
            let count = BATCH.min(pages - map.len()) * ENTRY;
            let at = (address / PAGE + map.len()) * ENTRY;
            self.pagemap.read_exact_at(&mut buffer[..count], at as u64)?;
            map.extend(buffer[..count].chunks_exact(ENTRY).map(|entry| wanted(entry[ENTRY - 1])));
        }
        Ok(map)
    }

    fn mark_laid_over(&self, offset: u64, map: &mut [bool]) {
        let base = offset / PAGE as u64;
        for run in &self.laid_over {
            let place = |page: u64| {
                usize::try_from(page.saturating_sub(base)).unwrap_or(usize::MAX).min(map.len())
            };
            let (first, last) = (place(run.first), place(run.first.saturating_add(run.count)));
            map[first..last].fill(true);
        }
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
