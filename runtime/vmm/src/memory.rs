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
    const RUN_MAX: usize = 1 << 20;
    image.set_len(0)?;
    image.set_len(memory.iter().map(GuestMemoryRegion::len).sum())?;
    let (mut written, mut base) = (0u64, 0u64);
    for region in memory.iter() {
        let (address, length) = (region.as_ptr(), region.size());
        let touched = residency.and_then(|known| known.of(address as usize, length, base).ok());
        let may_hold_data = |at: usize| touched.as_ref().is_none_or(|map| map[at / PAGE]);
        // SAFETY: the mapping is `length` bytes long and lives as long as the process. The vCPUs
        // are stopped and the devices quiet, so nothing writes to it while the slice exists.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast_const(), length) };
        let mut run = 0..0;
        for (at, page) in (0..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
            if !may_hold_data(at) || is_zero(page) {
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
        let residency = Residency::open(None).expect("pagemap");
        let now = write(&memory, 5 * PAGE - 1, b"across two pages");
        let image = check(&memory, &residency, &now);

        // Mapped from the image: changes in its data, in its holes, and data turned to zeros.
        let memory = private_image(16, &image).expect("memory");
        let residency = Residency::open(Some(&image)).expect("pagemap");
        let now = write(&memory, 4 * PAGE + 9, b"changed");
        check(&memory, &residency, &now);
        write(&memory, 10 << 20, &[7; 3 * PAGE]);
        write(&memory, (16 << 20) - 1, &[9]);
        let now = write(&memory, 5 * PAGE - 1, &[0; 16]);
        let image = check(&memory, &residency, &now);

        let memory = private_image(16, &image).expect("memory");
        let residency = Residency::open(Some(&image)).expect("pagemap");
        check(&memory, &residency, &now);
    }

    #[test]
    fn memory_beyond_the_gap_follows_in_the_image() {
        assert_eq!(regions(3072), [(0, 3 << 30)]);
        assert_eq!(regions(3073), [(0, 3 << 30), (4 << 30, 1 << 20)]);
    }
}
