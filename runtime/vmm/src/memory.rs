//! Guest memory: anonymous for a cold boot, a private view of the snapshot's image on restore.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

use crate::error::{Failure, KvmContext};
use crate::layout;
use crate::snapshot::difference::{self, Run};
use crate::snapshot::residency::Residency;

/// Size of a guest page in bytes.
pub const PAGE: usize = 4096;

/// The regions of a machine with `memory_mib` MiB: guest address and length, in the order they
/// follow each other in the memory image.
pub fn regions(memory_mib: u32) -> Vec<(u64, u64)> {
    let total = u64::from(memory_mib) << 20;
    let low = total.min(layout::LOW_MEMORY_MAX);
    let mut regions = vec![(0, low)];
    if total > low {
        regions.push((layout::HIGH_MEMORY, total - low));
    }
    regions
}

/// Fresh zeroed memory.
pub fn anonymous(memory_mib: u32) -> Result<GuestMemoryMmap, Failure> {
    build(memory_mib, None, true)
}

/// Memory that someone else fills page by page, from an image of the right size.
pub fn to_be_filled(memory_mib: u32, image: &File) -> Result<GuestMemoryMmap, Failure> {
    check_size(memory_mib, image)?;
    build(memory_mib, None, false)
}

/// A private, copy-on-write view of a memory image. An image shorter than the machine's memory is
/// refused: touching the missing part would kill the monitor.
pub fn private_image(memory_mib: u32, image: &File) -> Result<GuestMemoryMmap, Failure> {
    check_size(memory_mib, image)?;
    build(memory_mib, Some(image), false)
}

/// Lays the pages of a difference over a private view of the image it differs from: privately,
/// too, so that copies share what they do not write to. Short runs are read instead of mapped:
/// there are only so many mappings, and each costs as much as reading a few pages.
pub fn lay_over(
    memory_mib: u32,
    memory: &GuestMemoryMmap,
    file: &File,
    runs: &[Run],
) -> Result<(), Failure> {
    /// A quarter of what Linux allows a process (`vm.max_map_count`).
    const MAPPINGS_MAX: usize = 16 << 10;
    check_size(memory_mib, file)?;
    let mut mapped_from = 16;
    while runs.iter().filter(|run| run.count >= mapped_from).count() > MAPPINGS_MAX {
        mapped_from *= 2;
    }
    let mut base = 0u64;
    for region in memory.iter() {
        let pages = region.len() / PAGE as u64;
        for run in runs {
            // The run's part in this region; it may cross into the next one.
            let first = run.first.max(base);
            let last = (run.first + run.count).min(base + pages);
            if first < last {
                let at = usize::try_from((first - base) * PAGE as u64)
                    .map_err(|_| Failure::Memory("a page beyond the address space".into()))?;
                let place = region.as_ptr().wrapping_add(at);
                lay_run(file, first, last - first, place, last - first >= mapped_from)?;
            }
        }
        base += pages;
    }
    Ok(())
}

/// Puts `count` pages of `file`, from page `first` on, at `place`.
fn lay_run(file: &File, first: u64, count: u64, place: *mut u8, map: bool) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::Memory(format!("changed pages: {e}"));
    let (offset, length) = (first * PAGE as u64, count as usize * PAGE);
    if !map {
        // SAFETY: the caller gives a place inside of a mapping that is `length` bytes long at
        // least and that nothing else uses before the machine is complete.
        let bytes = unsafe { std::slice::from_raw_parts_mut(place, length) };
        return file.read_exact_at(bytes, offset).map_err(failed);
    }
    let offset = libc::off_t::try_from(offset)
        .map_err(|_| Failure::Memory(format!("offset {offset} exceeds what files have")))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces a part of guest memory, page by page and with the same protection, before
    // anything uses it; as before, it goes with the process.
    let mapped =
        unsafe { libc::mmap(place.cast(), length, protection, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED {
        return Err(failed(std::io::Error::last_os_error()));
    }
    // SAFETY: the range is the mapping just made; the advice only changes what core dumps hold.
    unsafe { libc::madvise(mapped, length, libc::MADV_DONTDUMP) };
    Ok(())
}

fn check_size(memory_mib: u32, image: &File) -> Result<(), Failure> {
    let wanted = u64::from(memory_mib) << 20;
    let found = image
        .metadata()
        .map_err(|e| Failure::Memory(format!("the memory image cannot be examined: {e}")))?
        .len();
    if found != wanted {
        return Err(Failure::Memory(format!(
            "the memory image has {found} bytes, but a machine of {memory_mib} MiB needs {wanted}; \
             it is incomplete or belongs to another snapshot: fetch or bake it again"
        )));
    }
    Ok(())
}

/// `huge`: huge pages are welcome.
fn build(memory_mib: u32, image: Option<&File>, huge: bool) -> Result<GuestMemoryMmap, Failure> {
    let mut offset = 0;
    let mut mapped = Vec::new();
    for (start, length) in regions(memory_mib) {
        let size = usize::try_from(length)
            .map_err(|_| Failure::Memory(format!("{length} bytes exceed the address space")))?;
        let region = map(size, image.map(|image| (image, offset)), huge)?;
        mapped.push(
            GuestRegionMmap::new(region, GuestAddress(start))
                .ok_or_else(|| Failure::Memory("a region wraps around".into()))?,
        );
        offset += length;
    }
    GuestMemoryMmap::from_regions(mapped).map_err(|e| Failure::Memory(e.to_string()))
}

/// Maps `size` bytes at an address aligned like the guest's, so that the host can use huge pages
/// for it and KVM can pass them on: a cold boot takes a thirtieth of the page faults then.
fn map(size: usize, image: Option<(&File, u64)>, huge: bool) -> Result<MmapRegion, Failure> {
    const HUGE_PAGE: usize = 2 << 20;
    const PROTECTION: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
    const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let failed = |e: std::io::Error| Failure::Memory(format!("{size} bytes cannot be mapped: {e}"));
    let reserved = size
        .checked_add(HUGE_PAGE)
        .ok_or_else(|| Failure::Memory(format!("{size} bytes exceed the address space")))?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let place = unsafe {
        let flags = PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(std::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0)
    };
    if place == libc::MAP_FAILED {
        return Err(failed(std::io::Error::last_os_error()));
    }
    let wanted = place.wrapping_byte_add(place.align_offset(HUGE_PAGE));
    let (flags, fd, offset) = match image {
        Some((file, offset)) => (PRIVATE | libc::MAP_FIXED, file.as_raw_fd(), offset),
        None => (PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS, -1, 0),
    };
    let offset = libc::off_t::try_from(offset)
        .map_err(|_| Failure::Memory(format!("offset {offset} exceeds what files have")))?;
    // SAFETY: replaces a part of the reservation just made, which nothing else uses.
    let mapped = unsafe { libc::mmap(wanted, size, PROTECTION, flags, fd, offset) };
    if mapped == libc::MAP_FAILED {
        return Err(failed(std::io::Error::last_os_error()));
    }
    // SAFETY: the range is the mapping just made. The advice changes what core dumps hold and
    // which pages the kernel prefers, both at its discretion.
    unsafe {
        libc::madvise(mapped, size, libc::MADV_DONTDUMP);
        if huge {
            libc::madvise(mapped, size, libc::MADV_HUGEPAGE);
        }
    }
    // SAFETY: the mapping has this size, protection and these flags, and is never unmapped: it
    // goes with the process.
    unsafe {
        MmapRegionBuilder::new(size)
            .with_mmap_prot(PROTECTION)
            .with_mmap_flags(flags)
            .with_raw_mmap_pointer(mapped.cast())
    }
    .build()
    .map_err(|e| Failure::Memory(format!("{size} bytes cannot be mapped: {e}")))
}

/// Gives the memory to the virtual machine. Must come before the interrupt controller exists: from
/// Linux 6.18 on, a slot set after an in-kernel I/O device was registered waits out an SRCU grace
/// period (7 ms instead of 0.1).
pub fn attach(vm: &VmFd, memory: &GuestMemoryMmap) -> Result<(), Failure> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the mapping is owned by `memory`, which the machine keeps until the process
        // ends; regions neither overlap nor move.
        unsafe { vm.set_user_memory_region(slot) }.kvm("KVM_SET_USER_MEMORY_REGION")?;
    }
    Ok(())
}

/// Writes the memory of a stopped machine to `image`, leaving out zero pages, and returns how many
/// bytes were not zero. `image` gets the machine's size; what it held before is discarded.
/// `residency` saves looking at pages that were never touched.
pub fn write_image(
    memory: &GuestMemoryMmap,
    residency: Option<&Residency>,
    image: &File,
) -> std::io::Result<u64> {
    write_pages(memory, image, |address, length, base| {
        residency.and_then(|known| known.of(address, length, base).ok())
    })
}

/// The same for the pages that differ from the image the memory is a private view of; which.
pub fn write_difference(
    memory: &GuestMemoryMmap,
    residency: &Residency,
    file: &File,
) -> std::io::Result<(u64, Vec<Run>)> {
    let mut maps = Vec::new();
    let (mut runs, mut base) = (Vec::new(), 0u64);
    for region in memory.iter() {
        let map = residency.differing(region.as_ptr() as usize, region.size(), base)?;
        difference::runs(&map, base / PAGE as u64, &mut runs);
        maps.push(map);
        base += region.len();
    }
    let mut maps = maps.into_iter();
    let written = write_pages(memory, file, |_, _, _| maps.next())?;
    Ok((written, runs))
}

/// Writes the pages that are not zero and that `marked` says may be of interest, given the address,
/// the length and the offset in the image of each region; all, where it does not know.
fn write_pages(
    memory: &GuestMemoryMmap,
    image: &File,
    mut marked: impl FnMut(usize, usize, u64) -> Option<Vec<bool>>,
) -> std::io::Result<u64> {
    const RUN_MAX: usize = 1 << 20;
    image.set_len(0)?;
    image.set_len(memory.iter().map(GuestMemoryRegion::len).sum())?;
    let (mut written, mut base) = (0u64, 0u64);
    for region in memory.iter() {
        let (address, length) = (region.as_ptr(), region.size());
        let map = marked(address as usize, length, base);
        let is_marked = |at: usize| map.as_ref().is_none_or(|map| map[at / PAGE]);
        // SAFETY: the mapping is `length` bytes long and lives as long as the process. The vCPUs
        // are stopped and the devices quiet, so nothing writes to it while the slice exists.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast_const(), length) };
        let mut run = 0..0;
        for (at, page) in (0..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
            if !is_marked(at) || is_zero(page) {
                continue;
            }
            if run.end != at || run.len() >= RUN_MAX {
                image.write_all_at(&bytes[run.clone()], base + run.start as u64)?;
                written += run.len() as u64;
                run = at..at;
            }
            run.end = at + page.len();
        }
        image.write_all_at(&bytes[run.clone()], base + run.start as u64)?;
        written += run.len() as u64;
        base += length as u64;
    }
    Ok(written)
}

fn is_zero(page: &[u8]) -> bool {
    // Sixteen words at a time become vector instructions; most pages differ in the first block.
    page.chunks(128).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use vm_memory::Bytes;

    /// Writes the image, with and without knowing what was touched; both must be the memory.
    fn check(memory: &GuestMemoryMmap, residency: &Residency, expected: &[u8]) -> File {
        let mut files = [Some(residency), None].map(|residency| {
            let file = tempfile::tempfile().expect("file");
            let written = write_image(memory, residency, &file).expect("image");
            let pages = expected.chunks(PAGE).filter(|page| !is_zero(page)).count();
            assert_eq!(written, (pages * PAGE) as u64);
            let mut found = vec![0; expected.len()];
            file.read_exact_at(&mut found, 0).expect("read");
            assert!(found == expected, "the image is not the memory");
            assert!(file.metadata().expect("metadata").blocks() * 512 < 4 << 20, "not sparse");
            file
        });
        std::mem::replace(&mut files[0], tempfile::tempfile().expect("file"))
    }

    #[test]
    fn an_image_holds_exactly_the_memory_over_generations() {
        let mut expected = vec![0u8; 16 << 20];
        let mut write = |memory: &GuestMemoryMmap, at: usize, bytes: &[u8]| {
            memory.write_slice(bytes, GuestAddress(at as u64)).expect("write");
            expected[at..at + bytes.len()].copy_from_slice(bytes);
            expected.clone()
        };
        let memory = anonymous(16).expect("memory");
        let residency = Residency::open(None, Vec::new()).expect("pagemap");
        let now = write(&memory, 5 * PAGE - 1, b"across two pages");
        let image = check(&memory, &residency, &now);

        // Mapped from the image: changes in its data, in its holes, and data turned to zeros.
        let memory = private_image(16, &image).expect("memory");
        let residency = Residency::open(Some(&image), Vec::new()).expect("pagemap");
        let now = write(&memory, 4 * PAGE + 9, b"changed");
        check(&memory, &residency, &now);
        write(&memory, 10 << 20, &[7; 3 * PAGE]);
        write(&memory, (16 << 20) - 1, &[9]);
        let now = write(&memory, 5 * PAGE - 1, &[0; 16]);
        let image = check(&memory, &residency, &now);

        let memory = private_image(16, &image).expect("memory");
        let residency = Residency::open(Some(&image), Vec::new()).expect("pagemap");
        check(&memory, &residency, &now);
    }

    #[test]
    fn a_difference_over_its_image_is_the_memory_over_generations() {
        let mut expected = vec![0u8; 16 << 20];
        for at in (1 << 20..6 << 20).step_by(PAGE) {
            expected[at] = (at / PAGE) as u8;
        }
        let image = tempfile::tempfile().expect("image");
        image.set_len(16 << 20).expect("size");
        image.write_all_at(&expected[1 << 20..6 << 20], 1 << 20).expect("image");
        let whole = |memory: &GuestMemoryMmap| {
            let mut found = vec![0; 16 << 20];
            memory.read_slice(&mut found, GuestAddress(0)).expect("read");
            found
        };
        let mut laid_over: (Option<File>, Vec<Run>) = (None, Vec::new());
        for generation in 0..4usize {
            let memory = private_image(16, &image).expect("memory");
            if let Some(file) = &laid_over.0 {
                lay_over(16, &memory, file, &laid_over.1).expect("laid over");
            }
            let residency = Residency::open(Some(&image), laid_over.1.clone()).expect("pagemap");
            assert!(whole(&memory) == expected, "generation {generation} began otherwise");
            // A long run, single pages, in data and in holes, and data turned to zeros.
            let mut write = |at: usize, bytes: &[u8]| {
                memory.write_slice(bytes, GuestAddress(at as u64)).expect("write");
                expected[at..at + bytes.len()].copy_from_slice(bytes);
            };
            write((2 << 20) + generation * 90 * PAGE, &vec![generation as u8 + 1; 80 * PAGE]);
            write((7 << 20) + generation * PAGE * 2, b"alone");
            write((5 << 20) + generation * PAGE, &[0; PAGE]);
            let file = tempfile::tempfile().expect("file");
            let (written, runs) = write_difference(&memory, &residency, &file).expect("difference");
            // 80 + 1 each time, and a zero page that is listed and not written.
            assert_eq!(written, ((generation + 1) * 81 * PAGE) as u64);
            let listed: u64 = runs.iter().map(|run| run.count).sum();
            assert_eq!(listed, (generation as u64 + 1) * 82);
            // Made whole, it holds the same.
            let all = tempfile::tempfile().expect("file");
            write_image(&memory, Some(&residency), &all).expect("image");
            let mut found = vec![0; 16 << 20];
            all.read_exact_at(&mut found, 0).expect("read");
            assert!(found == expected, "the whole image of generation {generation} is wrong");
            laid_over = (Some(file), runs);
        }
        let short = tempfile::tempfile().expect("file");
        let memory = private_image(16, &image).expect("memory");
        assert!(lay_over(16, &memory, &short, &laid_over.1).is_err());
    }

    #[test]
    fn memory_beyond_the_gap_follows_in_the_image() {
        assert_eq!(regions(3072), [(0, 3 << 30)]);
        assert_eq!(regions(3073), [(0, 3 << 30), (4 << 30, 1 << 20)]);
    }
}
