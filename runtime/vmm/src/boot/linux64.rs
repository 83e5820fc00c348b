//! The 64-bit entry of kernels without a PVH note (Linux, `Documentation/arch/x86/boot.rst`,
//! "64-bit boot protocol"): long mode, the first 4 GiB mapped to themselves, `rsi` pointing at
//! `boot_params`.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::GuestMemoryMmap;

use super::{Initramfs, memory_map, write};
use crate::error::Failure;
use crate::layout;

/// Offsets in `boot_params` (Linux, `arch/x86/include/uapi/asm/bootparam.h`).
mod offset {
    pub const ACPI_RSDP: usize = 0x070;
    pub const E820_ENTRIES: usize = 0x1e8;
    pub const BOOT_FLAG: usize = 0x1fe;
    pub const HEADER: usize = 0x202;
    pub const VERSION: usize = 0x206;
    pub const LOADER: usize = 0x210;
    pub const RAMDISK_IMAGE: usize = 0x218;
    pub const RAMDISK_SIZE: usize = 0x21c;
    pub const CMDLINE: usize = 0x228;
    pub const KERNEL_ALIGNMENT: usize = 0x230;
    pub const CMDLINE_SIZE: usize = 0x238;
    pub const E820_TABLE: usize = 0x2d0;
}

const BOOT_PARAMS_SIZE: usize = 4096;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Writes `boot_params`, descriptor table and page tables.
pub(super) fn write_boot_params(
    memory: &GuestMemoryMmap,
    initramfs: Option<Initramfs>,
    cmdline_length: usize,
) -> Result<(), Failure> {
    let mut params = vec![0u8; BOOT_PARAMS_SIZE];
    let mut put = |at: usize, bytes: &[u8]| params[at..at + bytes.len()].copy_from_slice(bytes);
    let word = |value: u64| -> Result<[u8; 4], Failure> {
        u32::try_from(value)
            .map(u32::to_le_bytes)
            .map_err(|_| Failure::Kernel(format!("{value:#x} does not fit the boot protocol")))
    };
    put(offset::ACPI_RSDP, &layout::ACPI.to_le_bytes());
    put(offset::BOOT_FLAG, &0xaa55u16.to_le_bytes());
    put(offset::HEADER, b"HdrS");
    put(offset::VERSION, &0x020fu16.to_le_bytes());
    put(offset::LOADER, &[0xff]);
    put(offset::CMDLINE, &word(layout::CMDLINE)?);
    put(offset::CMDLINE_SIZE, &word(cmdline_length as u64)?);
    put(offset::KERNEL_ALIGNMENT, &0x0100_0000u32.to_le_bytes());
    if let Some(initramfs) = initramfs {
        put(offset::RAMDISK_IMAGE, &word(initramfs.address)?);
        put(offset::RAMDISK_SIZE, &word(initramfs.length)?);
    }
    let map = memory_map(memory);
    put(offset::E820_ENTRIES, &[map.len() as u8]);
    for (index, (address, length, usable)) in map.into_iter().enumerate() {
        let at = offset::E820_TABLE + index * 20;
        put(at, &address.to_le_bytes());
        put(at + 8, &length.to_le_bytes());
        let kind = if usable { E820_RAM } else { E820_RESERVED };
        put(at + 16, &kind.to_le_bytes());
    }
    write(memory, layout::BOOT_PARAMS, &params)?;

    // Null, null, 64-bit code, data, as the protocol's __BOOT_CS (0x10) and __BOOT_DS (0x18).
    let gdt = [0u64, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
    let gdt: Vec<u8> = gdt.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    write(memory, layout::GDT, &gdt)?;

    const PRESENT_WRITABLE: u64 = 3;
    const HUGE: u64 = 1 << 7;
    let level3 = layout::PAGE_TABLES + 0x1000;
    write(memory, layout::PAGE_TABLES, &(level3 | PRESENT_WRITABLE).to_le_bytes())?;
    for gib in 0..4u64 {
        let level2 = layout::PAGE_TABLES + 0x2000 + gib * 0x1000;
        write(memory, level3 + gib * 8, &(level2 | PRESENT_WRITABLE).to_le_bytes())?;
        let entries: Vec<u8> = (0..512u64)
            .flat_map(|n| ((gib << 30) | (n << 21) | PRESENT_WRITABLE | HUGE).to_le_bytes())
            .collect();
        write(memory, level2, &entries)?;
    }
    Ok(())
}

/// The boot processor's registers at the entry.
pub fn enter(regs: &mut kvm_regs, sregs: &mut kvm_sregs, entry: u64) {
    let code = kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: 0x10,
        type_: 0xb,
        present: 1,
        l: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    let data = kvm_segment { selector: 0x18, type_: 0x3, db: 1, l: 0, ..code };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = 31;
    const PE: u64 = 1;
    const ET: u64 = 1 << 4;
    const PG: u64 = 1 << 31;
    const PAE: u64 = 1 << 5;
    const LME_LMA: u64 = 0x500;
    sregs.cr0 = PE | ET | PG;
    sregs.cr3 = layout::PAGE_TABLES;
    sregs.cr4 = PAE;
    sregs.efer = LME_LMA;
    *regs = kvm_regs {
        rip: entry,
        rsi: layout::BOOT_PARAMS,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rflags: 2,
        ..kvm_regs::default()
    };
}
