//! What processor the guest sees: the host's, as far as KVM can virtualize it, less what a
//! snapshot could not carry along.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::error::{Failure, KvmContext};

const X2APIC: u32 = 1 << 21;
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
const VMX: u32 = 1 << 5;
const PDCM: u32 = 1 << 15;
const SVM: u32 = 1 << 2;
const PERFCTR_CORE: u32 = 1 << 23;
const PERFCTR_NB: u32 = 1 << 24;

/// KVM's paravirtual features, and the one that spares the guest an exit at the end of most
/// interrupts.
const KVM_FEATURES: u32 = 0x4000_0001;
const PV_EOI: u32 = 1 << 6;

/// The processor of a cold-booted guest, without the parts that differ between its vCPUs.
pub fn base(kvm: &Kvm) -> Result<CpuId, Failure> {
    let mut cpuid =
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).kvm("KVM_GET_SUPPORTED_CPUID")?;
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    // Host topology means nothing to the guest.
    cpuid.retain(|e| !matches!(e.function, 0xb | 0x1f | 0x8000_0026));
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                entry.ecx |= HYPERVISOR | X2APIC;
                if deadline {
                    entry.ecx |= TSC_DEADLINE;
                }
                // Nested state is not part of a snapshot, and a guest hypervisor is attack
                // surface nobody asked for.
                entry.ecx &= !(VMX | PDCM);
            }
            // Performance counters: host-specific state that would tie a snapshot to one model.
            0xa | 0x8000_0022 => {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
            }
            0x8000_0001 => entry.ecx &= !(SVM | PERFCTR_CORE | PERFCTR_NB),
            0x8000_000a => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            KVM_FEATURES if is_emulated() => entry.eax &= !PV_EOI,
            _ => {}
        }
    }
    Ok(cpuid)
}

/// Whether this host's own processor is QEMU's emulation, as in the lab.
///
/// Its VMRUN leaves the vector it has just injected marked as pending, and delivers it once more,
/// interrupts enabled or not, if the emulator kicks that processor before the guest next exits or
/// faults (seen with 7.2: a guest spinning on a lock that its own interrupted handler holds).
/// A guest that writes the end of an interrupt to its APIC exits within some hundred instructions
/// of the injection, which leaves next to no time for that.
pub fn is_emulated() -> bool {
    const HYPERVISOR_NAME: u32 = 0x4000_0000;
    if std::arch::x86_64::__cpuid(1).ecx & HYPERVISOR == 0 {
        return false;
    }
    let leaf = std::arch::x86_64::__cpuid(HYPERVISOR_NAME);
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).concat() == b"TCGTCGTCGTCG"
}

/// The processor `id` of `count`, one core each in a single package.
pub fn for_vcpu(base: &CpuId, id: u8, count: u8) -> Result<CpuId, Failure> {
    let mut cpuid = base.clone();
    let (id, count) = (u32::from(id), u32::from(count));
    let core_bits = count.next_power_of_two().trailing_zeros();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                entry.ebx = (entry.ebx & 0xffff) | (count << 16) | (id << 24);
                const HTT: u32 = 1 << 28;
                entry.edx = if count > 1 { entry.edx | HTT } else { entry.edx & !HTT };
            }
            // Caches: no threads share one, the package holds `count` cores.
            4 if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & 0x3fff) | (((1 << core_bits) - 1) << 26);
            }
            0x8000_0008 => entry.ecx = (core_bits << 12) | (count - 1),
            0x8000_001d if entry.eax & 0x1f != 0 => entry.eax &= !(0xfff << 14),
            0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id & 0xff, 0),
            _ => {}
        }
    }
    let highest = cpuid.as_slice().iter().find(|e| e.function == 0).map_or(0, |e| e.eax);
    if highest >= 0xb {
        for (index, shift, logical, kind) in
            [(0, 0, 1, 1 << 8), (1, core_bits, count, 2 << 8), (2, 0, 0, 0)]
        {
            let entry = kvm_cpuid_entry2 {
                function: 0xb,
                index,
                flags: kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
                eax: shift,
                ebx: logical,
                ecx: index | kind,
                edx: id,
                ..Default::default()
            };
            cpuid
                .push(entry)
                .map_err(|_| Failure::KvmAnswer("the host's CPUID table is full".into()))?;
        }
    }
    Ok(cpuid)
}

/// The vendor string of leaf 0.
pub fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    entries.iter().find(|e| e.function == 0).map_or_else(String::new, |e| {
        let bytes: Vec<u8> = [e.ebx, e.edx, e.ecx].iter().flat_map(|r| r.to_le_bytes()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
