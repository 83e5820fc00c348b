//! The PVH entry: 32-bit protected mode, flat segments, no paging, `ebx` pointing at a start info
//! (Xen, `public/arch-x86/hvm/start_info.h`, version 1).

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::GuestMemoryMmap;

use super::{Initramfs, memory_map, write};
use crate::error::Failure;
use crate::layout;

/// `XEN_HVM_START_MAGIC_VALUE`.
const START_MAGIC: u32 = 0x336e_c578;
const TYPE_RAM: u32 = 1;
const TYPE_RESERVED: u32 = 2;

/// Writes start info, module list and memory map.
pub(super) fn write_start_info(
    memory: &GuestMemoryMmap,
    initramfs: Option<Initramfs>,
) -> Result<(), Failure> {
    let mut entries = Vec::new();
    let map = memory_map(memory);
    for &(address, length, usable) in &map {
        let kind = if usable { TYPE_RAM } else { TYPE_RESERVED };
        entries.extend_from_slice(&address.to_le_bytes());
        entries.extend_from_slice(&length.to_le_bytes());
        entries.extend_from_slice(&kind.to_le_bytes());
        entries.extend_from_slice(&[0; 4]);
    }
    write(memory, layout::PVH_MEMMAP, &entries)?;

    if let Some(initramfs) = initramfs {
        let mut module = Vec::new();
        for word in [initramfs.address, initramfs.length, 0, 0] {
            module.extend_from_slice(&word.to_le_bytes());
        }
        write(memory, layout::PVH_MODULES, &module)?;
    }

    let mut info = Vec::new();
    for word in [START_MAGIC, 1, 0, u32::from(initramfs.is_some())] {
        info.extend_from_slice(&word.to_le_bytes());
    }
    let modules = if initramfs.is_some() { layout::PVH_MODULES } else { 0 };
    for word in [modules, layout::CMDLINE, layout::ACPI, layout::PVH_MEMMAP] {
        info.extend_from_slice(&word.to_le_bytes());
    }
    info.extend_from_slice(&(map.len() as u32).to_le_bytes());
    info.extend_from_slice(&[0; 4]);
    write(memory, layout::PVH_START_INFO, &info)
}

/// The boot processor's registers at the entry.
pub fn enter(regs: &mut kvm_regs, sregs: &mut kvm_sregs, entry: u64) {
    let flat = |selector, type_| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = flat(0x08, 0xb);
    let data = flat(0x10, 0x3);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: 0,
        limit: 0x67,
        selector: 0x18,
        type_: 0xb,
        present: 1,
        ..kvm_segment::default()
    };
    const PE: u64 = 1;
    sregs.cr0 = (sregs.cr0 | PE) & 0xffff_ffff & !(1 << 31);
    sregs.cr4 = 0;
    sregs.efer = 0;
    *regs = kvm_regs { rip: entry, rbx: layout::PVH_START_INFO, rflags: 2, ..kvm_regs::default() };
}
