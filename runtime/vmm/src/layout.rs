//! Where things are in the guest's physical address and port space.
//!
//! A snapshot is only good with the layout it was taken under: [`LAYOUT_VERSION`] goes into the
//! state file and changes with every constant here.
//!
//! ```text
//! 0x0000_0500  GDT (64-bit entry only)          0x0000_6000  PVH start info, module list
//! 0x0000_7000  memory map / boot_params         0x0000_9000  page tables (64-bit entry)
//! 0x0002_0000  command line                     0x000e_0000  ACPI tables, RSDP first
//! 0x000f_e000  VM generation id                 0x000f_fff0  reset vector
//! 0x0010_0000  kernel and free memory
//! 0xc000_0000  end of low memory                0xd000_0000  virtio-mmio windows
//! 0xfec0_0000  IOAPIC    0xfee0_0000  LAPIC     0x1_0000_0000  high memory
//! ```

/// Changes whenever a constant of this module does.
pub const LAYOUT_VERSION: u32 = 1;

/// The global descriptor table of the 64-bit entry.
pub const GDT: u64 = 0x500;
/// `hvm_start_info`, followed by the module list.
pub const PVH_START_INFO: u64 = 0x6000;
/// The module list of the PVH protocol.
pub const PVH_MODULES: u64 = 0x6100;
/// The memory map of the PVH protocol.
pub const PVH_MEMMAP: u64 = 0x7000;
/// `boot_params` of the 64-bit protocol.
pub const BOOT_PARAMS: u64 = 0x7000;
/// Top-level page table of the 64-bit entry; six pages follow each other.
pub const PAGE_TABLES: u64 = 0x9000;
/// A stack for the 64-bit entry, growing down.
pub const BOOT_STACK: u64 = 0x8ff0;
/// The kernel's command line.
pub const CMDLINE: u64 = 0x2_0000;
/// The longest command line, with its end (`COMMAND_LINE_SIZE` of Linux on x86).
pub const CMDLINE_MAX: usize = 2048;
/// End of conventional memory; above lies what a BIOS would use.
pub const LOW_END: u64 = 0x9_fc00;
/// ACPI tables; the RSDP comes first, where a scan also finds it.
pub const ACPI: u64 = 0xe_0000;
/// The VM generation identifier: 16 bytes at the start of a page of its own.
pub const GENERATION_ID: u64 = 0xf_e000;
/// Where a BIOS would be entered to restart the machine.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Start of memory a kernel may be loaded to.
pub const HIGH_START: u64 = 0x10_0000;

/// End of low memory at most.
pub const LOW_MEMORY_MAX: u64 = 0xc000_0000;
/// Start of high memory.
pub const HIGH_MEMORY: u64 = 0x1_0000_0000;

/// The first virtio-mmio window.
pub const MMIO_BASE: u64 = 0xd000_0000;
/// Size of one virtio-mmio window.
pub const MMIO_WINDOW: u64 = 0x1000;
/// Most virtio devices: one interrupt line each.
pub const MMIO_DEVICES: usize = 16;

/// The IOAPIC's registers.
pub const IOAPIC: u32 = 0xfec0_0000;
/// The local APIC's registers.
pub const LAPIC: u32 = 0xfee0_0000;
/// Three pages Intel's KVM needs below 4 GiB, outside guest memory.
pub const TSS: usize = 0xfffb_d000;

/// The serial port's interrupt line.
pub const SERIAL_GSI: u32 = 4;
/// The line of the generic event device, which announces a new VM generation id.
pub const GED_GSI: u32 = 5;
/// The first virtio device's line. 23 is the IOAPIC's last.
pub const MMIO_GSI: u32 = 6;

/// First serial port.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Keyboard controller's command port: only its reset command is served.
pub const I8042_PORT: u16 = 0x64;
/// ACPI sleep control register (hardware-reduced).
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status register (hardware-reduced).
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI reset register.
pub const RESET_PORT: u16 = 0x602;
/// What to write to the reset register.
pub const RESET_VALUE: u8 = 1;
/// `SLP_TYP` of the soft-off state.
pub const S5_TYPE: u8 = 5;
