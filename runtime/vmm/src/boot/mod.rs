//! Bringing a kernel to its first instruction.

pub mod acpi;
pub mod linux64;
pub mod pvh;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{KernelLoader, KernelLoaderResult};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::Failure;
use crate::layout;

/// Real-mode code at the reset vector: writes to the ACPI reset register, then halts.
///
/// Linux restarts a hardware-reduced machine by EFI, even where there is none, and then enters the
/// BIOS (`reboot_init` and `native_machine_emergency_restart` in `arch/x86/kernel/reboot.c`). It
/// never gets to the reset register by itself.
const RESET_CODE: [u8; 9] = {
    let [low, high] = layout::RESET_PORT.to_le_bytes();
    // mov al, RESET_VALUE; mov dx, RESET_PORT; out dx, al; hlt; jmp to the hlt
    [0xb0, layout::RESET_VALUE, 0xba, low, high, 0xee, 0xf4, 0xeb, 0xfd]
};

/// How the boot processor enters the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// 32-bit protected mode without paging (Xen's PVH protocol).
    Pvh {
        /// First instruction.
        address: u64,
    },
    /// Long mode with identity-mapped memory (Linux's 64-bit protocol).
    Linux64 {
        /// First instruction.
        address: u64,
    },
}

/// Where the initramfs was put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Initramfs {
    /// Guest address.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

/// Puts kernel, initramfs and command line into memory and describes them and the machine's
/// memory the way the entry's protocol wants it.
pub fn load(
    memory: &GuestMemoryMmap,
    kernel: &mut File,
    initramfs: Option<&mut File>,
    cmdline: &str,
) -> Result<Entry, Failure> {
    let loaded: KernelLoaderResult =
        Elf::load(memory, None, kernel, Some(GuestAddress(layout::HIGH_START))).map_err(|e| {
            Failure::Kernel(format!(
                "the image cannot be loaded: {e}; it must be an uncompressed 64-bit ELF (vmlinux) \
                 that fits into the machine's memory"
            ))
        })?;
    let initramfs = match initramfs {
        Some(file) => Some(load_initramfs(memory, file, loaded.kernel_end)?),
        None => None,
    };
    write_cmdline(memory, cmdline)?;
    write(memory, layout::RESET_VECTOR, &RESET_CODE)?;
    match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(address) => {
            pvh::write_start_info(memory, initramfs)?;
            Ok(Entry::Pvh { address: address.0 })
        }
        PvhBootCapability::PvhEntryNotPresent | PvhBootCapability::PvhEntryIgnored => {
            linux64::write_boot_params(memory, initramfs, cmdline.len())?;
            Ok(Entry::Linux64 { address: loaded.kernel_load.0 })
        }
    }
}

/// Puts the initramfs at the end of low memory, where no kernel decompresses or relocates to.
fn load_initramfs(
    memory: &GuestMemoryMmap,
    file: &mut File,
    kernel_end: u64,
) -> Result<Initramfs, Failure> {
    let failed = |e: std::io::Error| Failure::Kernel(format!("the initramfs cannot be read: {e}"));
    let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let low = memory.iter().next().map_or(0, GuestMemoryRegion::len);
    let address = low
        .checked_sub(length)
        .map(|address| address & !0xfff)
        .filter(|&address| address >= kernel_end && length > 0)
        .ok_or_else(|| {
            Failure::Kernel(format!(
                "an initramfs of {length} bytes does not fit between the kernel's end at \
                 {kernel_end:#x} and the end of low memory at {low:#x}: give the machine more memory"
            ))
        })?;
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    while done < length {
        let want = buffer.len().min(usize::try_from(length - done).unwrap_or(usize::MAX));
        file.read_exact(&mut buffer[..want]).map_err(failed)?;
        write(memory, address + done, &buffer[..want])?;
        done += want as u64;
    }
    Ok(Initramfs { address, length })
}

fn write_cmdline(memory: &GuestMemoryMmap, cmdline: &str) -> Result<(), Failure> {
    if cmdline.len() >= layout::CMDLINE_MAX {
        return Err(Failure::Kernel(format!(
            "the command line has {} bytes, {} are the most",
            cmdline.len(),
            layout::CMDLINE_MAX - 1
        )));
    }
    if cmdline.bytes().any(|b| b == 0) {
        return Err(Failure::Kernel("the command line contains a NUL byte".into()));
    }
    write(memory, layout::CMDLINE, cmdline.as_bytes())?;
    write(memory, layout::CMDLINE + cmdline.len() as u64, &[0])
}

/// The machine's memory as `(address, length, usable)`.
pub(crate) fn memory_map(memory: &GuestMemoryMmap) -> Vec<(u64, u64, bool)> {
    let mut map =
        vec![(0, layout::LOW_END, true), (layout::ACPI, layout::HIGH_START - layout::ACPI, false)];
    for region in memory.iter() {
        match region.start_addr().0 {
            0 => map.push((layout::HIGH_START, region.len() - layout::HIGH_START, true)),
            start => map.push((start, region.len(), true)),
        }
    }
    map
}

/// Writes below what the kernel owns; fails only when the machine has less memory than a page
/// of low memory.
pub(crate) fn write(memory: &GuestMemoryMmap, at: u64, bytes: &[u8]) -> Result<(), Failure> {
    memory
        .write_slice(bytes, GuestAddress(at))
        .map_err(|e| Failure::Memory(format!("{} bytes at {at:#x}: {e}", bytes.len())))
}
