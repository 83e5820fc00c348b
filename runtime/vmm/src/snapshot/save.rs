//! Reading a stopped machine's state out of KVM.
//!
//! The vCPUs stand still with nothing pending and the devices are quiet before any of this runs:
//! settling a device may raise interrupts, which belong into the saved controllers.
#![allow(unsafe_code)]

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MAX_CPUID_ENTRIES, Msrs,
    Xsave, kvm_irqchip, kvm_msr_entry,
};
use kvm_ioctls::{Cap, VcpuFd, VmFd};

use super::state::{IrqchipState, VcpuState};
use super::tsc;
use crate::error::{Failure, KvmContext};

/// `IA32_TSC`.
pub const MSR_TSC: u32 = 0x10;
/// `IA32_TSC_DEADLINE`.
pub const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// Words of the extended state KVM may return for this machine.
pub fn xsave_words(vm: &VmFd) -> usize {
    const KVM_XSAVE: i32 = 4096;
    (vm.check_extension_int(Cap::Xsave2).max(KVM_XSAVE) as usize).div_ceil(4)
}

/// Reads one vCPU. `msr_indices` is what KVM lists, `first_offset` the first vCPU's TSC offset.
pub fn vcpu(
    fd: &VcpuFd,
    msr_indices: &[u32],
    xsave_words: usize,
    first_offset: Option<u64>,
) -> Result<VcpuState, Failure> {
    // First, because it may still deliver a start-up message to the local APIC.
    let mp_state = fd.get_mp_state().kvm("KVM_GET_MP_STATE")?;
    let regs = fd.get_regs().kvm("KVM_GET_REGS")?;
    let sregs = fd.get_sregs().kvm("KVM_GET_SREGS")?;
    let xsave = xsave(fd, xsave_words)?;
    let xcrs = fd.get_xcrs().kvm("KVM_GET_XCRS")?;
    let debug = fd.get_debug_regs().kvm("KVM_GET_DEBUGREGS")?;
    let lapic = fd.get_lapic().kvm("KVM_GET_LAPIC")?;
    // Read back, not what was once set: KVM itself changes some bits while the guest runs.
    let cpuid = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).kvm("KVM_GET_CPUID2")?;
    let mut msrs = readable_msrs(fd, msr_indices)?;
    substitute_expired_deadline(&mut msrs, &lapic.regs);
    let tsc_skew = match (first_offset, tsc::offset(fd)) {
        (Some(first), Some(own)) => own.wrapping_sub(first).cast_signed(),
        _ => 0,
    };
    // Last: reading other state may queue or change events.
    let events = fd.get_vcpu_events().kvm("KVM_GET_VCPU_EVENTS")?;
    Ok(VcpuState {
        cpuid: cpuid.as_slice().to_vec(),
        mp_state,
        regs,
        sregs,
        xsave,
        xcrs,
        debug,
        lapic,
        msrs,
        events,
        tsc_skew,
    })
}

fn xsave(fd: &VcpuFd, words: usize) -> Result<Vec<u32>, Failure> {
    let extra = words.saturating_sub(1024);
    let mut area = Xsave::new(extra)
        .map_err(|_| Failure::KvmAnswer(format!("xsave area of {words} words")))?;
    // SAFETY: the area has the size KVM named for this machine.
    unsafe { fd.get_xsave2(&mut area) }.kvm("KVM_GET_XSAVE2")?;
    let mut all = area.as_fam_struct_ref().xsave.region.to_vec();
    all.extend_from_slice(area.as_slice());
    Ok(all)
}

/// All registers of the list this vCPU lets itself be asked for. KVM stops at the first it does
/// not, which depends on the guest's CPUID and is no error.
fn readable_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, Failure> {
    /// `KVM_MAX_MSR_ENTRIES` of the kernel.
    const BATCH: usize = 256;
    let mut found = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(BATCH)];
        let entries: Vec<_> = batch
            .iter()
            .map(|&index| kvm_msr_entry { index, ..kvm_msr_entry::default() })
            .collect();
        let mut msrs = Msrs::from_entries(&entries)
            .map_err(|_| Failure::KvmAnswer("the list of registers is too long".into()))?;
        let got = fd.get_msrs(&mut msrs).kvm("KVM_GET_MSRS")?;
        found.extend_from_slice(&msrs.as_slice()[..got.min(batch.len())]);
        let skip = if got < batch.len() { got + 1 } else { got };
        rest = &rest[skip..];
    }
    Ok(found)
}

/// A deadline timer that has expired but not yet interrupted reads as 0, which on restore would
/// mean "disarmed": the vCPU would never tick again. A deadline of now interrupts at once; where
/// the guest had really disarmed the timer, one spurious tick is what it gets.
fn substitute_expired_deadline(msrs: &mut [kvm_msr_entry], lapic: &[std::os::raw::c_char]) {
    /// Local vector table, timer entry (Intel SDM 3A, 11.5.1).
    const LVT_TIMER: usize = 0x320;
    const MASKED: u32 = 1 << 16;
    const DEADLINE_MODE: u32 = 2 << 17;
    let mut lvt = [0; 4];
    for (to, from) in lvt.iter_mut().zip(&lapic[LVT_TIMER..]) {
        *to = *from as u8;
    }
    if u32::from_le_bytes(lvt) & (MASKED | 3 << 17) != DEADLINE_MODE {
        return;
    }
    let Some(now) = msrs.iter().find(|m| m.index == MSR_TSC).map(|m| m.data) else { return };
    for msr in msrs.iter_mut().filter(|m| m.index == MSR_TSC_DEADLINE && m.data == 0) {
        msr.data = now;
    }
}

/// Reads the interrupt controllers outside the vCPUs.
pub fn irqchip(vm: &VmFd) -> Result<IrqchipState, Failure> {
    let read = |chip_id: u32| -> Result<kvm_irqchip, Failure> {
        let mut chip = kvm_irqchip { chip_id, ..kvm_irqchip::default() };
        vm.get_irqchip(&mut chip).kvm("KVM_GET_IRQCHIP")?;
        Ok(chip)
    };
    Ok(IrqchipState {
        chips: [
            read(KVM_IRQCHIP_PIC_MASTER)?,
            read(KVM_IRQCHIP_PIC_SLAVE)?,
            read(KVM_IRQCHIP_IOAPIC)?,
        ],
    })
}
