//! Whether a snapshot fits the machine that is asked for and the host it is restored on.

use kvm_ioctls::{Cap, Kvm, VcpuFd};

use super::StateError;
use super::state::{Contract, Shape};
use crate::cpuid;
use crate::error::{Failure, KvmContext};

/// Compares the frozen machine with the one the configuration describes.
pub fn check_shape(frozen: &Shape, wanted: &Shape) -> Result<(), StateError> {
    let differ = |what: &str, frozen: &dyn std::fmt::Display, wanted: &dyn std::fmt::Display| {
        Err(StateError::Mismatch(format!(
            "it was taken of a machine with {what} {frozen}, the configuration asks for {wanted}; \
             restore it with the shape it was baked with"
        )))
    };
    if frozen.layout != wanted.layout {
        return differ("layout", &frozen.layout, &wanted.layout);
    }
    if frozen.vcpus != wanted.vcpus {
        return differ("vCPU count", &frozen.vcpus, &wanted.vcpus);
    }
    if frozen.memory_mib != wanted.memory_mib {
        return differ("memory (MiB)", &frozen.memory_mib, &wanted.memory_mib);
    }
    if frozen.devices != wanted.devices {
        return differ("devices", &frozen.devices.join(" "), &wanted.devices.join(" "));
    }
    Ok(())
}

/// Which kind of KVM this host has. The processor tells; a KVM without hardware behind it
/// (`soft`) has its own registers and its own bugs, so states do not cross.
#[must_use]
pub fn kvm_kind() -> &'static str {
    use std::arch::x86_64::__cpuid;
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    if __cpuid(1).ecx & VMX != 0 {
        "vmx"
    } else if __cpuid(0x8000_0000).eax >= 0x8000_0001 && __cpuid(0x8000_0001).ecx & SVM != 0 {
        "svm"
    } else {
        "soft"
    }
}

/// Compares what the guest was promised with this host's processor: a missing feature would end
/// a program of the guest with an illegal instruction, much later.
pub fn check_host(contract: &Contract) -> Result<(), StateError> {
    let kind = kvm_kind();
    if contract.kvm_kind != kind {
        return Err(StateError::Mismatch(format!(
            "it was taken under KVM of kind {}, this host's is {kind}; bake the template here",
            contract.kvm_kind
        )));
    }
    let vendor = host_vendor();
    if contract.vendor != vendor {
        return Err(StateError::Mismatch(format!(
            "it was taken on a processor by {}, this host's is by {vendor}; bake the template here",
            contract.vendor
        )));
    }
    for (word, promised) in &contract.features {
        let Some((host, own)) = host_word(word) else { continue };
        let missing = promised & !host & !own;
        if missing != 0 {
            return Err(StateError::Mismatch(format!(
                "the guest uses processor features this host lacks (CPUID {word}: {missing:#x}); \
                 bake the template here, or with a smaller feature baseline"
            )));
        }
    }
    Ok(())
}

/// The CPUID vendor string of this host.
#[must_use]
pub fn host_vendor() -> String {
    let leaf = std::arch::x86_64::__cpuid(0);
    let bytes: Vec<u8> =
        [leaf.ebx, leaf.edx, leaf.ecx].iter().flat_map(|r| r.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The feature words that snapshots may need of this host, KVM's own bits included; complete, so
/// that what is not in it is not offered.
#[must_use]
pub fn offered_features() -> std::collections::BTreeMap<String, u32> {
    // All that `state::feature_words` records.
    const WORDS: [&str; 13] = [
        "1.ecx",
        "1.edx",
        "7.0.ebx",
        "7.0.ecx",
        "7.0.edx",
        "7.1.eax",
        "7.1.edx",
        "d.0.eax",
        "d.1.eax",
        "80000001.ecx",
        "80000001.edx",
        "80000008.ebx",
        "80000021.eax",
    ];
    let offered = |name: &str| host_word(name).map_or(u32::MAX, |(host, own)| host | own);
    WORDS.iter().map(|name| ((*name).to_owned(), offered(name))).collect()
}

/// The host's feature word, and the bits KVM provides without the processor's help.
fn host_word(name: &str) -> Option<(u32, u32)> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // TSC deadline, x2APIC, hypervisor; OSXSAVE follows the guest's CR4.
    const LEAF_1_ECX: u32 = 1 << 24 | 1 << 21 | 1 << 31 | 1 << 27;
    // Package has several cores.
    const LEAF_1_EDX: u32 = 1 << 28;
    // TSC_ADJUST.
    const LEAF_7_EBX: u32 = 1 << 1;
    // UMIP, RDPID; OSPKE follows the guest's CR4.
    const LEAF_7_ECX: u32 = 1 << 2 | 1 << 22 | 1 << 4;
    Some(match name {
        "1.ecx" => (__cpuid(1).ecx, LEAF_1_ECX),
        "1.edx" => (__cpuid(1).edx, LEAF_1_EDX),
        "7.0.ebx" => (__cpuid_count(7, 0).ebx, LEAF_7_EBX),
        "7.0.ecx" => (__cpuid_count(7, 0).ecx, LEAF_7_ECX),
        "80000001.ecx" => (__cpuid(0x8000_0001).ecx, 0),
        "80000001.edx" => (__cpuid(0x8000_0001).edx, 0),
        // The other words carry mitigations and what KVM makes up itself.
        _ => return None,
    })
}

/// Lets the guest's TSC tick as before. Only frequencies a host can scale to, or its own.
pub fn match_tsc(kvm: &Kvm, vcpus: &[VcpuFd], contract: &Contract) -> Result<(), Failure> {
    let Some(first) = vcpus.first() else { return Ok(()) };
    let Ok(own) = first.get_tsc_khz() else { return Ok(()) };
    // Hosts measure their frequency at boot; the same machine differs by this much. An emulated
    // one measures badly, and its counter is always that of the machine below it.
    let tolerance_ppm: u64 = if cpuid::is_emulated() { 20_000 } else { 250 };
    let distance = u64::from(own.abs_diff(contract.tsc_khz));
    if contract.tsc_khz == 0 || distance * 1_000_000 <= u64::from(own) * tolerance_ppm {
        return Ok(());
    }
    if !kvm.check_extension(Cap::TscControl) {
        return Err(StateError::Mismatch(format!(
            "the guest's time-stamp counter runs at {} kHz, this host's at {own} kHz, and its \
             processor cannot scale it; bake the template here",
            contract.tsc_khz
        ))
        .into());
    }
    vcpus.iter().try_for_each(|fd| fd.set_tsc_khz(contract.tsc_khz).kvm("KVM_SET_TSC_KHZ"))
}
