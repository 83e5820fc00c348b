//! What a frozen machine consists of, and how its parts become sections of the state file.

use std::collections::BTreeMap;

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::difference::{self, Run};
use super::format::{Section, StateError, decode, encode};
use crate::ports::SavedSerial;

/// Version of the sections' set and order, as `SnapshotReport::state_version` tells it.
pub const STATE_VERSION: u32 = super::format::VERSION;

/// What the machine looks like; a restore must ask for exactly this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// [`crate::layout::LAYOUT_VERSION`].
    pub layout: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Kinds of the virtio devices, in window order.
    pub devices: Vec<String>,
    /// 1 for a cold-booted machine's snapshot, one more for each restore in between.
    pub generation: u32,
}

/// What the machine needs from a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// CPUID vendor.
    pub vendor: String,
    /// `svm`, `vmx` or `soft`.
    pub kvm_kind: String,
    /// Feature words by leaf and register, e.g. `7.0.ebx`.
    pub features: BTreeMap<String, u32>,
    /// The guest's TSC frequency.
    pub tsc_khz: u32,
}

/// A processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VcpuState {
    /// Its processor as the guest sees it, read back from KVM.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Runnable, halted, waiting for a start-up message.
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// System registers.
    pub sregs: kvm_sregs,
    /// Extended state in `XSAVE` layout, in 32-bit words; 1024 at least.
    pub xsave: Vec<u32>,
    /// Extended control registers.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug: kvm_debugregs,
    /// Local interrupt controller.
    pub lapic: kvm_lapic_state,
    /// All readable model-specific registers.
    pub msrs: Vec<kvm_msr_entry>,
    /// Pending events.
    pub events: kvm_vcpu_events,
    /// Distance of its TSC from the first processor's, in ticks.
    pub tsc_skew: i64,
}

/// The interrupt controllers outside the processors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct IrqchipState {
    /// Both PICs and the IOAPIC, in KVM's order.
    pub chips: [kvm_irqchip; 3],
}

/// A frozen machine, memory excepted.
#[derive(Debug, Clone)]
pub struct MachineState {
    /// What it looks like.
    pub shape: Shape,
    /// What it needs.
    pub contract: Contract,
    /// Its processors, in order.
    pub vcpus: Vec<VcpuState>,
    /// Its interrupt controllers.
    pub irqchip: IrqchipState,
    /// Its paravirtual clock.
    pub clock: kvm_clock_data,
    /// Its serial port.
    pub serial: SavedSerial,
    /// Its virtio devices with their transports, in window order, in the transport's encoding.
    pub devices: Vec<Vec<u8>>,
    /// If its memory is not whole: the pages that are laid over the image it differs from.
    pub difference: Option<Vec<Run>>,
}

const SHAPE: &str = "shape";
const CONTRACT: &str = "contract";
const VCPU: &str = "vcpu";
const IRQCHIP: &str = "irqchip";
const CLOCK: &str = "clock";
const SERIAL: &str = "serial";
const DIFFERENCE: &str = "memory-difference";
/// Kind of the sections in [`MachineState::devices`].
pub const VIRTIO: &str = "virtio-mmio";

/// Version of each section's payload.
const PAYLOAD_VERSION: u32 = 1;

impl MachineState {
    /// The state file's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        let mut sections = vec![
            section(SHAPE, &self.shape)?,
            section(CONTRACT, &self.contract)?,
            section(IRQCHIP, &self.irqchip)?,
            section(CLOCK, &self.clock)?,
            section(SERIAL, &self.serial)?,
        ];
        for vcpu in &self.vcpus {
            sections.push(section(VCPU, vcpu)?);
        }
        for device in &self.devices {
            sections.push(raw(VIRTIO, device.clone()));
        }
        if let Some(runs) = &self.difference {
            sections.push(section(DIFFERENCE, runs)?);
        }
        Ok(encode(&sections))
    }

    /// Reads a state file. Nothing is believed before the checksum is verified.
    pub fn decode(file: &[u8]) -> Result<Self, StateError> {
        let (mut shape, mut contract, mut irqchip, mut clock, mut serial) =
            (None, None, None, None, None);
        let (mut vcpus, mut devices, mut difference) = (Vec::new(), Vec::new(), None);
        for section in decode(file)? {
            let known = section.version == PAYLOAD_VERSION;
            match section.kind.as_str() {
                SHAPE if known => once(&mut shape, &section)?,
                CONTRACT if known => once(&mut contract, &section)?,
                IRQCHIP if known => once(&mut irqchip, &section)?,
                CLOCK if known => once(&mut clock, &section)?,
                SERIAL if known => once(&mut serial, &section)?,
                DIFFERENCE if known => once(&mut difference, &section)?,
                VCPU if known => vcpus.push(payload(&section)?),
                VIRTIO if known => devices.push(section.payload),
                _ if section.mandatory => {
                    return Err(StateError::UnknownSection {
                        kind: section.kind,
                        version: section.version,
                    });
                }
                _ => {}
            }
        }
        let state = Self {
            shape: shape.ok_or(StateError::Missing(SHAPE))?,
            contract: contract.ok_or(StateError::Missing(CONTRACT))?,
            irqchip: irqchip.ok_or(StateError::Missing(IRQCHIP))?,
            clock: clock.ok_or(StateError::Missing(CLOCK))?,
            serial: serial.ok_or(StateError::Missing(SERIAL))?,
            vcpus,
            devices,
            difference,
        };
        state.validate()?;
        Ok(state)
    }

    /// Bounds what the rest of the monitor takes for granted.
    fn validate(&self) -> Result<(), StateError> {
        let invalid = |what: &str, why: String| StateError::Invalid { what: what.into(), why };
        if self.vcpus.len() != usize::from(self.shape.vcpus) || self.vcpus.is_empty() {
            return Err(invalid(
                VCPU,
                format!("{} for a machine of {}", self.vcpus.len(), self.shape.vcpus),
            ));
        }
        if self.devices.len() != self.shape.devices.len() {
            return Err(invalid(
                VIRTIO,
                format!("{} for {} devices", self.devices.len(), self.shape.devices.len()),
            ));
        }
        for vcpu in &self.vcpus {
            if !(1024..=16 << 10).contains(&vcpu.xsave.len()) {
                return Err(invalid("xsave area", format!("{} words", vcpu.xsave.len())));
            }
            if vcpu.cpuid.len() > kvm_bindings::KVM_MAX_CPUID_ENTRIES {
                return Err(invalid("CPUID table", format!("{} entries", vcpu.cpuid.len())));
            }
            if vcpu.msrs.len() > 4096 {
                return Err(invalid("register list", format!("{} entries", vcpu.msrs.len())));
            }
            if vcpu.xcrs.nr_xcrs as usize > vcpu.xcrs.xcrs.len() {
                return Err(invalid("xcr list", format!("{} entries", vcpu.xcrs.nr_xcrs)));
            }
        }
        let pages = (u64::from(self.shape.memory_mib) << 20) / crate::memory::PAGE as u64;
        difference::check(self.difference.as_deref().unwrap_or_default(), pages)
    }
}

fn raw(kind: &str, payload: Vec<u8>) -> Section {
    Section { kind: kind.into(), version: PAYLOAD_VERSION, mandatory: true, payload }
}

fn section<T: Serialize>(kind: &str, value: &T) -> Result<Section, StateError> {
    Ok(raw(kind, to_bytes(kind, value)?))
}

/// A payload's bytes.
pub fn to_bytes<T: Serialize>(kind: &str, value: &T) -> Result<Vec<u8>, StateError> {
    postcard::to_stdvec(value)
        .map_err(|e| StateError::Invalid { what: kind.into(), why: e.to_string() })
}

/// A payload read back; leftover bytes are an error.
pub fn from_bytes<T: DeserializeOwned>(kind: &str, payload: &[u8]) -> Result<T, StateError> {
    let invalid = |why: String| StateError::Invalid { what: kind.into(), why };
    let (value, rest) = postcard::take_from_bytes(payload).map_err(|e| invalid(e.to_string()))?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(invalid(format!("{} bytes left over", rest.len())))
    }
}

fn payload<T: DeserializeOwned>(section: &Section) -> Result<T, StateError> {
    from_bytes(&section.kind, &section.payload)
}

fn once<T: DeserializeOwned>(slot: &mut Option<T>, section: &Section) -> Result<(), StateError> {
    if slot.is_some() {
        return Err(StateError::Invalid {
            what: section.kind.clone(),
            why: "it is there twice".into(),
        });
    }
    *slot = Some(payload(section)?);
    Ok(())
}

/// The feature words of a processor that programs in the guest look at.
pub fn feature_words(entries: &[kvm_cpuid_entry2]) -> BTreeMap<String, u32> {
    let mut words = BTreeMap::new();
    for e in entries {
        let registers: &[(&str, u32)] = match (e.function, e.index) {
            (1, _) => &[("1.ecx", e.ecx), ("1.edx", e.edx)],
            (7, 0) => &[("7.0.ebx", e.ebx), ("7.0.ecx", e.ecx), ("7.0.edx", e.edx)],
            (7, 1) => &[("7.1.eax", e.eax), ("7.1.edx", e.edx)],
            (0xd, 0) => &[("d.0.eax", e.eax)],
            (0xd, 1) => &[("d.1.eax", e.eax)],
            (0x8000_0001, _) => &[("80000001.ecx", e.ecx), ("80000001.edx", e.edx)],
            (0x8000_0008, _) => &[("80000008.ebx", e.ebx)],
            (0x8000_0021, _) => &[("80000021.eax", e.eax)],
            _ => &[],
        };
        words.extend(registers.iter().map(|(name, value)| ((*name).to_owned(), *value)));
    }
    words
}
