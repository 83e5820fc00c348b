//! Putting a saved state into a fresh KVM machine, in the order KVM needs.
#![allow(unsafe_code)]

use kvm_bindings::{CpuId, Msrs, Xsave, kvm_clock_data, kvm_msr_entry};
use kvm_ioctls::{VcpuFd, VmFd};

use super::StateError;
use super::save::{MSR_TSC, MSR_TSC_DEADLINE};
use super::state::{IrqchipState, VcpuState};
use super::tsc;
use crate::error::{Failure, KvmContext};

/// The bit of a task segment's type that says it is in use (AMD manual 2, 4.8.3).
const TASK_SEGMENT_BUSY: u8 = 2;

/// Sets one vCPU. `first_offset` is the first vCPU's TSC offset on this host, none for the first
/// itself; the result is this vCPU's.
///
/// The order matters: CPUID decides which registers exist; `SREGS` holds the APIC base, so it
/// comes before the LAPIC; the LAPIC's mode decides whether a timer deadline is accepted, so MSRs
/// come after it; `SREGS` and `REGS` drop pending events, so these come last.
pub fn vcpu(
    fd: &VcpuFd,
    state: &VcpuState,
    xsave_words: usize,
    first_offset: Option<u64>,
) -> Result<Option<u64>, Failure> {
    let cpuid = CpuId::from_entries(&state.cpuid).map_err(|_| impossible("CPUID table"))?;
    fd.set_cpuid2(&cpuid).kvm("KVM_SET_CPUID2")?;
    fd.set_mp_state(state.mp_state).kvm("KVM_SET_MP_STATE")?;
    fd.set_regs(&state.regs).kvm("KVM_SET_REGS")?;
    let mut sregs = state.sregs;
    if super::contract::kvm_kind() == "svm" {
        // KVM reports a busy task segment where SVM has an available one, and takes what it is
        // given. Processors do not mind; an emulated one then refuses every port to user mode.
        sregs.tr.type_ &= !TASK_SEGMENT_BUSY;
    }
    fd.set_sregs(&sregs).kvm("KVM_SET_SREGS")?;
    set_xsave(fd, &state.xsave, xsave_words)?;
    if state.xcrs.nr_xcrs > 0 {
        // A processor without XSAVE has none, and KVM refuses even an empty list then.
        fd.set_xcrs(&state.xcrs).kvm("KVM_SET_XCRS")?;
    }
    fd.set_debug_regs(&state.debug).kvm("KVM_SET_DEBUGREGS")?;
    fd.set_lapic(&state.lapic).kvm("KVM_SET_LAPIC")?;

    let follows = first_offset
        .is_some_and(|first| tsc::set_offset(fd, first.wrapping_add_signed(state.tsc_skew)));
    set_msrs(fd, &state.msrs, follows)?;
    fd.set_vcpu_events(&state.events).kvm("KVM_SET_VCPU_EVENTS")?;
    Ok(tsc::offset(fd))
}

fn impossible(what: &str) -> StateError {
    StateError::Invalid { what: what.into(), why: "KVM cannot take it".into() }
}

fn set_xsave(fd: &VcpuFd, words: &[u32], host_words: usize) -> Result<(), Failure> {
    let (head, tail) = words.split_at_checked(1024).ok_or_else(|| impossible("xsave area"))?;
    if tail[host_words.saturating_sub(1024).min(tail.len())..].iter().any(|&word| word != 0) {
        return Err(StateError::Mismatch(
            "the guest uses more extended processor state than this host has; restore it on the \
             kind of processor it was baked on, or bake the template again"
                .into(),
        )
        .into());
    }
    let mut area =
        Xsave::new(host_words.saturating_sub(1024)).map_err(|_| impossible("xsave area"))?;
    for (to, from) in area.as_mut_slice().iter_mut().zip(tail) {
        *to = *from;
    }
    // SAFETY: only the fixed part is written, not the length of what follows it.
    unsafe { area.as_mut_fam_struct() }.xsave.region.copy_from_slice(head);
    // SAFETY: the area has the size KVM named for this machine.
    unsafe { fd.set_xsave2(&area) }.kvm("KVM_SET_XSAVE")
}

/// Sets the TSC first and the deadline, which is relative to it, last. A register that cannot be
/// written is an error unless it holds the wanted value anyway (read-only identification).
fn set_msrs(fd: &VcpuFd, msrs: &[kvm_msr_entry], without_tsc: bool) -> Result<(), Failure> {
    let pick = |index| msrs.iter().copied().filter(move |m: &kvm_msr_entry| m.index == index);
    if !without_tsc && let Some(tsc) = pick(MSR_TSC).next() {
        write_msrs(fd, &[tsc])?;
        correct_tsc(fd, tsc.data)?;
    }
    let mut ordered: Vec<kvm_msr_entry> = Vec::with_capacity(msrs.len());
    ordered.extend(msrs.iter().filter(|m| m.index != MSR_TSC && m.index != MSR_TSC_DEADLINE));
    ordered.extend(pick(MSR_TSC_DEADLINE));
    write_msrs(fd, &ordered)
}

fn write_msrs(fd: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<(), Failure> {
    /// `KVM_MAX_MSR_ENTRIES` of the kernel.
    const BATCH: usize = 256;
    let mut rest = msrs;
    while !rest.is_empty() {
        let batch = &rest[..rest.len().min(BATCH)];
        let entries = Msrs::from_entries(batch).map_err(|_| impossible("register list"))?;
        let set = fd.set_msrs(&entries).kvm("KVM_SET_MSRS")?;
        if set >= batch.len() {
            rest = &rest[batch.len()..];
            continue;
        }
        let refused = batch[set];
        let mut current = Msrs::from_entries(&[kvm_msr_entry { data: 0, ..refused }])
            .map_err(|_| impossible("register list"))?;
        let read = fd.get_msrs(&mut current).kvm("KVM_GET_MSRS")?;
        if read != 1 || current.as_slice()[0].data != refused.data {
            return Err(StateError::Mismatch(format!(
                "this host's KVM does not take {:#x} for register {:#x}; restore on a host like \
                 the one it was baked on, or bake the template again",
                refused.data, refused.index
            ))
            .into());
        }
        rest = &rest[set + 1..];
    }
    Ok(())
}

/// KVM takes a counter set within a second of where a fresh one would stand for an attempt to
/// synchronize it, and does not set it: that of a guest frozen in its first second. The offset is
/// taken at its word.
fn correct_tsc(fd: &VcpuFd, wanted: u64) -> Result<(), Failure> {
    let Some(offset) = tsc::offset(fd) else { return Ok(()) };
    let mut now = Msrs::from_entries(&[kvm_msr_entry { index: MSR_TSC, ..Default::default() }])
        .map_err(|_| impossible("register list"))?;
    if fd.get_msrs(&mut now).kvm("KVM_GET_MSRS")? != 1 {
        return Ok(());
    }
    let distance = wanted.wrapping_sub(now.as_slice()[0].data).cast_signed();
    // What passed since it was set is not to be taken back.
    let slack = i64::from(fd.get_tsc_khz().unwrap_or(0));
    if !(-slack..=0).contains(&distance) {
        tsc::set_offset(fd, offset.wrapping_add_signed(distance));
    }
    Ok(())
}

/// Sets the interrupt controllers outside the vCPUs.
pub fn irqchip(vm: &VmFd, state: &IrqchipState) -> Result<(), Failure> {
    for (chip_id, chip) in (0..).zip(&state.chips) {
        if chip.chip_id != chip_id {
            return Err(impossible("interrupt controller").into());
        }
        vm.set_irqchip(chip).kvm("KVM_SET_IRQCHIP")?;
    }
    Ok(())
}

/// Lets the guest's clock go on where it stood: without `KVM_CLOCK_REALTIME` the monotonic clock
/// does not jump by the snapshot's age. The wall clock is the agent's business.
pub fn clock(vm: &VmFd, state: &kvm_clock_data) -> Result<(), Failure> {
    let clock = kvm_clock_data { clock: state.clock, ..kvm_clock_data::default() };
    vm.set_clock(&clock).kvm("KVM_SET_CLOCK")
}
