//! System-call allow-lists: one for the vCPU threads, one for the event loop. Anything else kills
//! the process.
//!
//! `ioctl` is allowed by request number, memory only without execute permission, sockets only of
//! the unix family.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::error::Failure;
use crate::snapshot::tsc::KVM_GET_DEVICE_ATTR;

/// `KVM_*` requests (Linux, `include/uapi/linux/kvm.h`).
mod kvm {
    pub const RUN: u64 = 0xae80;
    pub const GET_REGS: u64 = 0x8090_ae81;
    pub const GET_SREGS: u64 = 0x8138_ae83;
    pub const GET_MSRS: u64 = 0xc008_ae88;
    pub const GET_LAPIC: u64 = 0x8400_ae8e;
    pub const GET_CPUID2: u64 = 0xc008_ae91;
    pub const GET_MP_STATE: u64 = 0x8004_ae98;
    pub const GET_VCPU_EVENTS: u64 = 0x8040_ae9f;
    pub const GET_DEBUGREGS: u64 = 0x8080_aea1;
    pub const GET_TSC_KHZ: u64 = 0xaea3;
    pub const GET_XCRS: u64 = 0x8188_aea6;
    pub const KVMCLOCK_CTRL: u64 = 0xaead;
    pub const GET_XSAVE2: u64 = 0x9000_aecf;
    pub const GET_IRQCHIP: u64 = 0xc208_ae62;
    pub const GET_CLOCK: u64 = 0x8030_ae7c;
}

/// Both kinds of threads: memory, locks, the control channel, ending.
const COMMON: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_sendto,
    libc::SYS_close,
    libc::SYS_futex,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_epoll_ctl,
    libc::SYS_shutdown,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_sched_yield,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_tgkill,
    libc::SYS_exit_group,
];

/// The event loop: devices, requests, snapshots.
const EVENTS: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_copy_file_range,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_timerfd_settime,
];

/// The event loop's `ioctl` requests: reading the machine's state, and the devices' own.
const EVENTS_IOCTL: &[u64] = &[
    kvm::GET_REGS,
    kvm::GET_SREGS,
    kvm::GET_MSRS,
    kvm::GET_LAPIC,
    kvm::GET_CPUID2,
    kvm::GET_MP_STATE,
    kvm::GET_VCPU_EVENTS,
    kvm::GET_DEBUGREGS,
    kvm::GET_TSC_KHZ,
    kvm::GET_XSAVE2,
    kvm::GET_XCRS,
    kvm::GET_IRQCHIP,
    kvm::GET_CLOCK,
    KVM_GET_DEVICE_ATTR,
    FIONBIO,
];

/// A vCPU's: running, what a crash report says, and activating a network device.
const VCPU_IOCTL: &[u64] =
    &[kvm::RUN, kvm::KVMCLOCK_CTRL, kvm::GET_REGS, kvm::GET_SREGS, TUNSETOFFLOAD];

const FIONBIO: u64 = 0x5421;
/// Linux, `include/uapi/linux/if_tun.h`.
const TUNSETOFFLOAD: u64 = 0x4004_54d0;

/// Both lists, compiled.
pub struct Filters {
    vcpu: BpfProgram,
    events: BpfProgram,
}

impl Filters {
    /// Compiles the lists.
    pub fn compile() -> Result<Self, Failure> {
        let mut vcpu = rules(COMMON)?;
        vcpu.insert(libc::SYS_ioctl, any_of(1, VCPU_IOCTL)?);
        vcpu.insert(libc::SYS_rt_sigtimedwait, vec![]);
        let mut events = rules(COMMON)?;
        events.extend(EVENTS.iter().map(|&call| (call, vec![])));
        events.insert(libc::SYS_ioctl, any_of(1, EVENTS_IOCTL)?);
        events.insert(libc::SYS_socket, any_of(0, &[libc::AF_UNIX as u64])?);
        // Who knocks at the door.
        let of_socket = SeccompCondition::new(
            1,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            libc::SOL_SOCKET as u64,
        );
        let credentials = SeccompCondition::new(
            2,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            libc::SO_PEERCRED as u64,
        );
        let who = of_socket
            .and_then(|level| credentials.and_then(|name| SeccompRule::new(vec![level, name])))
            .map_err(|e| Failure::Jail(format!("system-call filter: {e}")))?;
        events.insert(libc::SYS_getsockopt, vec![who]);
        // Status flags of sockets; and, in debug builds, whether a descriptor is open.
        let commands = [libc::F_GETFL, libc::F_SETFL, libc::F_GETFD].map(|c| c as u64);
        events.insert(libc::SYS_fcntl, any_of(1, &commands)?);
        vcpu.insert(libc::SYS_fcntl, any_of(1, &[libc::F_GETFD as u64])?);
        Ok(Self { vcpu: program(vcpu)?, events: program(events)? })
    }

    /// Locks in the calling vCPU thread.
    pub fn enter_vcpu(&self) -> Result<(), Failure> {
        apply(&self.vcpu)
    }

    /// Locks in the calling event-loop thread.
    pub fn enter_events(&self) -> Result<(), Failure> {
        apply(&self.events)
    }
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules(calls: &[i64]) -> Result<Rules, Failure> {
    let mut rules: Rules = calls.iter().map(|&call| (call, vec![])).collect();
    // Memory is never executable: no code but the program's own.
    let exec = libc::PROT_EXEC as u64;
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![condition(2, SeccompCmpOp::MaskedEq(exec), 0)?]);
    }
    Ok(rules)
}

fn any_of(argument: u8, values: &[u64]) -> Result<Vec<SeccompRule>, Failure> {
    values.iter().map(|&value| condition(argument, SeccompCmpOp::Eq, value)).collect()
}

fn condition(argument: u8, op: SeccompCmpOp, value: u64) -> Result<SeccompRule, Failure> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, op, value)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(|e| Failure::Jail(format!("system-call filter: {e}")))
}

fn program(rules: Rules) -> Result<BpfProgram, Failure> {
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, TargetArch::x86_64)
        .and_then(TryInto::try_into)
        .map_err(|e| Failure::Jail(format!("system-call filter: {e}")))
}

fn apply(program: &BpfProgram) -> Result<(), Failure> {
    seccompiler::apply_filter(program).map_err(|e| {
        Failure::Jail(format!(
            "system-call filter: {e}; enable seccomp on this host or switch the layer off"
        ))
    })
}
