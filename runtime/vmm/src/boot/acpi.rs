//! The ACPI tables: a hardware-reduced platform whose DSDT describes the serial port, the virtio
//! windows and the VM generation id.
//!
//! Hardware-reduced, because then Linux looks for no PIT, PIC, RTC, keyboard controller or PM
//! timer (each would have to be emulated or waited for), and powers off and resets through the two
//! registers the FADT names. (ACPI 6.5, sections 4.1, 5.2.9.)

use acpi_tables::aml::{
    Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name, Notify,
    PackageBuilder, Path, ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml::Arg};
use vm_memory::GuestMemoryMmap;

use super::write;
use crate::error::Failure;
use crate::layout;

const OEM: [u8; 6] = *b"PARBKE";
const TABLE: [u8; 8] = *b"PARBAKE ";
const REVISION: u32 = 1;
/// `DSDT` header without body (ACPI 6.5, table 5.4).
const HEADER: u32 = 36;

/// Writes all tables, RSDP first at [`layout::ACPI`].
pub fn write_tables(
    memory: &GuestMemoryMmap,
    vcpus: u8,
    virtio_devices: usize,
) -> Result<(), Failure> {
    // The RSDP has 36 bytes; every table starts on a cache line of its own.
    let mut next = layout::ACPI + 64;
    let mut place = |table: Vec<u8>| -> Result<u64, Failure> {
        let at = next;
        next += (table.len() as u64).next_multiple_of(64);
        if next > layout::GENERATION_ID {
            return Err(Failure::Config(
                "the machine has more devices than its ACPI tables have room for".into(),
            ));
        }
        write(memory, at, &table)?;
        Ok(at)
    };
    let dsdt = place(dsdt(virtio_devices))?;
    let fadt = place(bytes(&fadt(dsdt)))?;
    let madt = place(bytes(&madt(vcpus)))?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(bytes(&xsdt))?;
    write(memory, layout::ACPI, &bytes(&Rsdp::new(OEM, xsdt)))
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    const VGA_NOT_PRESENT: u16 = 1 << 2;
    const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;
    let register =
        |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port));
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // Set means: no fixed-hardware buttons.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::Headless);
    fadt.iapc_boot_arch = (VGA_NOT_PRESENT | CMOS_RTC_NOT_PRESENT).into();
    fadt.reset_reg = register(layout::RESET_PORT);
    fadt.reset_value = layout::RESET_VALUE;
    fadt.sleep_control_reg = register(layout::SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = register(layout::SLEEP_STATUS_PORT);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(TABLE).into();
    fadt.finalize()
}

fn madt(vcpus: u8) -> MADT {
    let mut madt =
        MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(layout::LAPIC));
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC, 0));
    madt
}

fn dsdt(virtio_devices: usize) -> Vec<u8> {
    let mut body = Vec::new();

    let mut s5 = PackageBuilder::new();
    for value in [layout::S5_TYPE, 0, 0, 0] {
        s5.add_element(&value);
    }
    Name::new(Path::new("_S5_"), &s5).to_aml_bytes(&mut body);

    let port = layout::SERIAL_PORT;
    Scope::new(
        Path::new("_SB_"),
        vec![&Device::new(
            Path::new("COM1"),
            vec![
                &Name::new(Path::new("_HID"), &EISAName::new("PNP0501")),
                &Name::new(Path::new("_UID"), &0u8),
                &Name::new(
                    Path::new("_CRS"),
                    &ResourceTemplate::new(vec![
                        &IO::new(port, port, 1, 8),
                        &Interrupt::new(true, true, false, false, layout::SERIAL_GSI),
                    ]),
                ),
            ],
        )],
    )
    .to_aml_bytes(&mut body);

    generation_id(&mut body);

    for index in 0..virtio_devices {
        let (address, gsi) = virtio_window(index);
        Scope::new(
            Path::new("_SB_"),
            vec![&Device::new(
                Path::new(&format!("VR{index:02}")),
                vec![
                    &Name::new(Path::new("_HID"), &"LNRO0005"),
                    &Name::new(Path::new("_UID"), &(index as u8)),
                    &Name::new(Path::new("_CCA"), &1u8),
                    &Name::new(
                        Path::new("_CRS"),
                        &ResourceTemplate::new(vec![
                            // A window lies below 4 GiB: see the layout.
                            &Memory32Fixed::new(true, address as u32, layout::MMIO_WINDOW as u32),
                            &Interrupt::new(true, true, false, false, gsi),
                        ]),
                    ),
                ],
            )],
        )
        .to_aml_bytes(&mut body);
    }

    let mut table = Sdt::new(*b"DSDT", HEADER, 6, OEM, TABLE, REVISION);
    table.append_slice(&body);
    bytes(&table)
}

/// The VM generation id, and the generic event device that tells the guest when it changed.
fn generation_id(body: &mut Vec<u8>) {
    let mut address = PackageBuilder::new();
    address.add_element(&(layout::GENERATION_ID as u32));
    address.add_element(&0u32);
    // The identifier of the specification has 14 characters; Linux 6.12 knows the short one too.
    let mut compatible = PackageBuilder::new();
    compatible.add_element(&"VMGENCTR");
    compatible.add_element(&"VM_Gen_Counter");
    Scope::new(
        Path::new("_SB_"),
        vec![&Device::new(
            Path::new("VGEN"),
            vec![
                &Name::new(Path::new("_HID"), &"PARB0001"),
                &Name::new(Path::new("_CID"), &compatible),
                &Name::new(Path::new("_DDN"), &"VM_Gen_Counter"),
                &Name::new(Path::new("ADDR"), &address),
            ],
        )],
    )
    .to_aml_bytes(body);

    let source = Path::new("\\_SB_.VGEN");
    Scope::new(
        Path::new("_SB_"),
        vec![&Device::new(
            Path::new("GED_"),
            vec![
                &Name::new(Path::new("_HID"), &"ACPI0013"),
                &Name::new(Path::new("_UID"), &0u8),
                &Name::new(
                    Path::new("_CRS"),
                    &ResourceTemplate::new(vec![&Interrupt::new(
                        true,
                        true,
                        false,
                        false,
                        layout::GED_GSI,
                    )]),
                ),
                &Method::new(
                    Path::new("_EVT"),
                    1,
                    true,
                    vec![&If::new(
                        &Equal::new(&Arg(0), &layout::GED_GSI),
                        vec![&Notify::new(&source, &0x80u8)],
                    )],
                ),
            ],
        )],
    )
    .to_aml_bytes(body);
}

/// Address and interrupt line of the virtio device `index`.
pub fn virtio_window(index: usize) -> (u64, u32) {
    (layout::MMIO_BASE + index as u64 * layout::MMIO_WINDOW, layout::MMIO_GSI + index as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_sums_to_zero_and_states_its_length() {
        for table in [dsdt(layout::MMIO_DEVICES), bytes(&fadt(0x1000)), bytes(&madt(4))] {
            let length = u32::from_le_bytes(table[4..8].try_into().expect("length"));
            assert_eq!(length as usize, table.len());
            assert_eq!(table.iter().fold(0u8, |sum, b| sum.wrapping_add(*b)), 0);
        }
    }

    #[test]
    fn the_largest_machine_fits() {
        let memory = crate::memory::anonymous(4).expect("memory");
        write_tables(&memory, u8::MAX, layout::MMIO_DEVICES).expect("tables");
    }
}
