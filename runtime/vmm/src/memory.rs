//! Guest memory: anonymous for a cold boot, a private view of the snapshot's image on restore.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use crate::error::{Failure, KvmContext};
use crate::layout;

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
    build(memory_mib, None)
}

/// A private, copy-on-write view of a memory image. An image shorter than the machine's memory is
/// refused: touching the missing part would kill the monitor.
pub fn private_image(memory_mib: u32, image: &File) -> Result<GuestMemoryMmap, Failure> {
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
    build(memory_mib, Some(image))
}

fn build(memory_mib: u32, image: Option<&File>) -> Result<GuestMemoryMmap, Failure> {
    let mut offset = 0;
    let mut mapped = Vec::new();
    for (start, length) in regions(memory_mib) {
        let size = usize::try_from(length)
            .map_err(|_| Failure::Memory(format!("{length} bytes exceed the address space")))?;
        let mut builder = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(match image {
                None => libc::MAP_PRIVATE | libc::MAP_NORESERVE | libc::MAP_ANONYMOUS,
                Some(_) => libc::MAP_PRIVATE | libc::MAP_NORESERVE,
            });
        if let Some(image) = image {
            let file = image
                .try_clone()
                .map_err(|e| Failure::Memory(format!("the memory image cannot be mapped: {e}")))?;
            builder = builder.with_file_offset(FileOffset::new(file, offset));
        }
        let region = builder
            .build()
            .map_err(|e| Failure::Memory(format!("{size} bytes cannot be mapped: {e}")))?;
        // SAFETY: the range is the mapping just made; the advice changes core dumps only.
        unsafe { libc::madvise(region.as_ptr().cast(), region.size(), libc::MADV_DONTDUMP) };
        mapped.push(
            GuestRegionMmap::new(region, GuestAddress(start))
                .ok_or_else(|| Failure::Memory("a region wraps around".into()))?,
        );
        offset += length;
    }
    GuestMemoryMmap::from_regions(mapped).map_err(|e| Failure::Memory(e.to_string()))
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
pub fn write_image(memory: &GuestMemoryMmap, image: &File) -> std::io::Result<u64> {
    const RUN_MAX: usize = 1 << 20;
    image.set_len(0)?;
    image.set_len(memory.iter().map(GuestMemoryRegion::len).sum())?;
    let (mut written, mut base) = (0u64, 0u64);
    for region in memory.iter() {
        let length = region.size();
        // SAFETY: the mapping is `length` bytes long and lives as long as `region`. The vCPUs are
        // stopped and the devices quiet, so nothing writes to it while the slice exists.
        let bytes = unsafe { std::slice::from_raw_parts(region.as_ptr().cast_const(), length) };
        let mut run = None;
        for (at, page) in (0..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
            let start = match (is_zero(page), run) {
                (false, None) => {
                    run = Some(at);
                    continue;
                }
                (false, Some(start)) if at - start < RUN_MAX => continue,
                (false, Some(start)) => {
                    run = Some(at);
                    start
                }
                (true, Some(start)) => {
                    run = None;
                    start
                }
                (true, None) => continue,
            };
            image.write_all_at(&bytes[start..at], base + start as u64)?;
            written += (at - start) as u64;
        }
        if let Some(start) = run {
            image.write_all_at(&bytes[start..], base + start as u64)?;
            written += (length - start) as u64;
        }
        base += length as u64;
    }
    Ok(written)
}

fn is_zero(page: &[u8]) -> bool {
    // Sixteen words at a time become vector instructions; most pages differ in the first block.
    page.chunks(128).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}
