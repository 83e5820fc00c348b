//! Virtual processors: one thread each.
//!
//! ```text
//!   start          pause: flag, kick              resume
//! ────────► Running ───────────────► Parked ─────────────► Running
//!              │                        │
//!              └── stop (power-off, reset, crash): Parked for good, the event loop is told
//! ```
//! The thread holds the lock on its [`VcpuFd`] exactly while it runs, so whoever gets the lock
//! knows the processor stands still, and all its pending port and memory accesses are complete.
//! The kick is a signal that is blocked everywhere but inside `KVM_RUN`: one that arrives between
//! the look at the flag and the entry stays pending and ends `KVM_RUN` at once.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::{VcpuExit, VcpuFd};
use parbake_protocol::vmm::{Event, StopReason};
use vmm_sys_util::eventfd::EventFd;

use crate::control::Events;
use crate::error::{Failure, HostContext};
use crate::ports::{Effect, Ports};

/// What serves memory accesses outside guest memory.
pub trait MmioBus: Send + Sync {
    /// A vCPU reads; what nobody serves reads as ones.
    fn read(&self, address: u64, data: &mut [u8]);
    /// A vCPU writes; what nobody serves is swallowed.
    fn write(&self, address: u64, data: &[u8]);
}

/// What all vCPUs of a machine share.
pub struct Shared {
    /// Port bus.
    pub ports: Ports,
    /// Virtio windows.
    pub mmio: Box<dyn MmioBus>,
    /// Where doorbells go.
    pub events: Arc<Events>,
    gate: Gate,
    stopped: Mutex<Option<(StopReason, String)>>,
    /// Readable once a vCPU ended the guest.
    pub stop_event: EventFd,
}

/// Whether vCPUs may run.
struct Gate {
    hold: AtomicBool,
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    held: bool,
    parked: usize,
    ended: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// A machine whose vCPUs are held until [`Vcpus::resume`].
    pub fn new(ports: Ports, mmio: Box<dyn MmioBus>, events: Arc<Events>) -> Result<Self, Failure> {
        Ok(Self {
            ports,
            mmio,
            events,
            gate: Gate {
                hold: AtomicBool::new(true),
                state: Mutex::new(GateState { held: true, ..GateState::default() }),
                changed: Condvar::new(),
            },
            stopped: Mutex::new(None),
            stop_event: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).host("eventfd")?,
        })
    }

    /// Why the guest ended, if it did.
    pub fn stopped(&self) -> Option<(StopReason, String)> {
        lock(&self.stopped).clone()
    }

    fn stop(&self, reason: StopReason, detail: String) {
        let mut stopped = lock(&self.stopped);
        if stopped.is_none() {
            *stopped = Some((reason, detail));
            let _ = self.stop_event.write(1);
        }
        drop(stopped);
        self.gate.hold.store(true, Ordering::SeqCst);
        let mut state = lock(&self.gate.state);
        state.held = true;
        state.ended = true;
    }
}

/// A vCPU and the thread it runs on.
struct Vcpu {
    fd: Arc<Mutex<VcpuFd>>,
    thread: libc::pthread_t,
}

/// All vCPUs of a machine.
pub struct Vcpus {
    all: Vec<Vcpu>,
    shared: Arc<Shared>,
}

/// Runs in each vCPU's thread before anything else; an error ends the guest before it ran.
pub type Enter = Arc<dyn Fn() -> Result<(), Failure> + Send + Sync>;

/// The first vCPU, for the calling thread to run. Having a thread of its own for it would put a
/// thread's start or wake-up between a restore and the guest's first instruction.
pub struct First {
    fd: Arc<Mutex<VcpuFd>>,
    shared: Arc<Shared>,
    enter: Enter,
}

impl First {
    /// Runs the vCPU; returns only by the end of the process.
    pub fn run(self) -> ! {
        enter_loop(&self.fd, &self.shared, &self.enter)
    }
}

impl Vcpus {
    /// Takes the vCPUs, held until [`Self::resume`]: all but the first get a thread. `enter` runs
    /// first in each (the thread's own jail).
    pub fn spawn(
        fds: Vec<VcpuFd>,
        shared: &Arc<Shared>,
        enter: &Enter,
    ) -> Result<(Self, First), Failure> {
        block_kick()?;
        let mut all = Vec::new();
        let mut first = None;
        for (index, fd) in fds.into_iter().enumerate() {
            accept_kick_in_kvm_run(&fd)?;
            let fd = Arc::new(Mutex::new(fd));
            let (mine, shared, enter) = (Arc::clone(&fd), Arc::clone(shared), Arc::clone(enter));
            let thread = if index == 0 {
                first = Some(First { fd: mine, shared, enter });
                this_thread()
            } else {
                spawn_thread(index, move || enter_loop(&mine, &shared, &enter))?
            };
            all.push(Vcpu { fd, thread });
        }
        let first = first.ok_or_else(|| Failure::Config("a machine without vCPUs".into()))?;
        Ok((Self { all, shared: Arc::clone(shared) }, first))
    }

    /// Lets the vCPUs run. Does nothing when they do, or once the guest has ended.
    pub fn resume(&self) {
        let mut state = lock(&self.shared.gate.state);
        if state.ended {
            return;
        }
        state.held = false;
        self.shared.gate.hold.store(false, Ordering::SeqCst);
        self.shared.gate.changed.notify_all();
    }

    /// Stops all vCPUs and waits until they stand still with nothing pending.
    pub fn pause(&self) {
        self.shared.gate.hold.store(true, Ordering::SeqCst);
        let mut state = lock(&self.shared.gate.state);
        state.held = true;
        for vcpu in &self.all {
            kick(vcpu.thread);
        }
        while state.parked < self.all.len() {
            state = self.shared.gate.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The descriptors of paused vCPUs, in order.
    pub fn paused(&self) -> Vec<MutexGuard<'_, VcpuFd>> {
        self.all.iter().map(|vcpu| lock(&vcpu.fd)).collect()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }
}

fn spawn_thread(
    index: usize,
    body: impl FnOnce() + Send + 'static,
) -> Result<libc::pthread_t, Failure> {
    use std::os::unix::thread::JoinHandleExt;
    std::thread::Builder::new()
        .name(format!("vcpu{index}"))
        .stack_size(128 << 10)
        .spawn(body)
        // Never joined: the threads end with the process.
        .map(JoinHandleExt::into_pthread_t)
        .host("starting a vCPU thread")
}

fn enter_loop(fd: &Mutex<VcpuFd>, shared: &Shared, enter: &Enter) -> ! {
    match enter() {
        Ok(()) => run_loop(fd, shared),
        Err(failure) => {
            shared.stop(StopReason::Crash, failure.to_string());
            // Never to be kicked again, but its id stays alive.
            loop {
                std::thread::park();
            }
        }
    }
}

fn run_loop(fd: &Mutex<VcpuFd>, shared: &Shared) -> ! {
    loop {
        let mut state = lock(&shared.gate.state);
        state.parked += 1;
        shared.gate.changed.notify_all();
        while state.held {
            state = shared.gate.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.parked -= 1;
        drop(state);

        let mut fd = lock(fd);
        // The guest's watchdogs must not count the time it stood still. Fails in guests without
        // a paravirtual clock, which have no such watchdog either.
        let _ = fd.kvmclock_ctrl();
        while !shared.gate.hold.load(Ordering::SeqCst) {
            step(&mut fd, shared);
        }
        // A port or memory read handed to us is completed by the next KVM_RUN only; without this
        // the saved registers would still stand before it.
        fd.set_kvm_immediate_exit(1);
        let _ = fd.run();
        fd.set_kvm_immediate_exit(0);
        drain_kick();
    }
}

/// One `KVM_RUN` and what it asks for.
fn step(fd: &mut VcpuFd, shared: &Shared) {
    let crash = |detail: String| shared.stop(StopReason::Crash, detail);
    match fd.run() {
        Ok(VcpuExit::IoOut(port, data)) => match shared.ports.write(port, data) {
            Effect::None => {}
            Effect::Doorbell(value) => shared.events.send(&Event::Doorbell { value }),
            Effect::Stop(reason) => shared.stop(reason, String::new()),
        },
        Ok(VcpuExit::IoIn(port, data)) => shared.ports.read(port, data),
        Ok(VcpuExit::MmioRead(address, data)) => shared.mmio.read(address, data),
        Ok(VcpuExit::MmioWrite(address, data)) => shared.mmio.write(address, data),
        Ok(VcpuExit::Hlt | VcpuExit::Intr) => {}
        Ok(VcpuExit::Shutdown) => crash("triple fault".into()),
        Ok(VcpuExit::FailEntry(reason, cpu)) => {
            crash(format!(
                "the processor refused the guest's state: reason {reason:#x} on CPU {cpu}"
            ));
        }
        Ok(VcpuExit::InternalError) => {
            let detail = describe_internal_error(fd);
            crash(detail);
        }
        Ok(VcpuExit::SystemEvent(kind, _)) => match kind {
            kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => {
                shared.stop(StopReason::PowerOff, String::new());
            }
            kvm_bindings::KVM_SYSTEM_EVENT_RESET => shared.stop(StopReason::Reset, String::new()),
            _ => crash(format!("KVM system event {kind}")),
        },
        Ok(other) => {
            let detail = format!("unexpected exit {other:?}");
            crash(detail);
        }
        Err(e) => match e.errno() {
            libc::EINTR => drain_kick(),
            libc::EAGAIN => {}
            _ => {
                let detail = format!("KVM_RUN: {e}; {}", registers(fd));
                crash(detail);
            }
        },
    }
}

fn describe_internal_error(fd: &mut VcpuFd) -> String {
    let run = fd.get_kvm_run();
    // SAFETY: the exit reason says that this member of the union is the valid one; it consists of
    // integers only.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let data: Vec<String> = internal
        .data
        .iter()
        .take(internal.ndata.min(16) as usize)
        .map(|word| format!("{word:#x}"))
        .collect();
    let what = match internal.suberror {
        1 => "an instruction KVM cannot emulate",
        2 => "an exception during event delivery",
        3 => "an event delivery that cannot be repeated",
        4 => "an unexpected exit",
        _ => "an internal error",
    };
    format!(
        "KVM met {what} (suberror {}, data [{}]); {}",
        internal.suberror,
        data.join(" "),
        registers(fd)
    )
}

fn registers(fd: &VcpuFd) -> String {
    match (fd.get_regs(), fd.get_sregs()) {
        (Ok(r), Ok(s)) => format!(
            "rip {:#x} rsp {:#x} rflags {:#x} cs {:#x} cr0 {:#x} cr2 {:#x} cr3 {:#x} cr4 {:#x}",
            r.rip, r.rsp, r.rflags, s.cs.selector, s.cr0, s.cr2, s.cr3, s.cr4
        ),
        _ => "registers unreadable".into(),
    }
}

/// The signal that brings a vCPU out of `KVM_RUN`.
fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

fn kick_set() -> libc::sigset_t {
    // SAFETY: the set is initialised by `sigemptyset` before it is used.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, kick_signal());
        set
    }
}

/// Blocks the kick in this thread and the ones it starts.
fn block_kick() -> Result<(), Failure> {
    // SAFETY: both pointers are valid for the call; the old mask is not asked for.
    let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &kick_set(), std::ptr::null_mut()) };
    match code {
        0 => Ok(()),
        e => Err(std::io::Error::from_raw_os_error(e)).host("blocking the kick signal"),
    }
}

/// `KVM_SET_SIGNAL_MASK`: inside `KVM_RUN` everything else stays as it was, the kick is open.
fn accept_kick_in_kvm_run(fd: &VcpuFd) -> Result<(), Failure> {
    /// `_IOW(KVMIO, 0x8b, struct kvm_signal_mask)`.
    const KVM_SET_SIGNAL_MASK: libc::c_ulong = 0x4004_ae8b;
    #[repr(C, packed)]
    struct SignalMask {
        length: u32,
        blocked: u64,
    }
    // Nothing blocked: SIGRTMIN opens, and no other signal has a handler here.
    let mask = SignalMask { length: 8, blocked: 0 };
    // SAFETY: the structure has the layout of `struct kvm_signal_mask` with an 8-byte set, as its
    // length says, and lives through the call.
    let code = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_SET_SIGNAL_MASK, &raw const mask) };
    if code == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error()).host("KVM_SET_SIGNAL_MASK")
    }
}

fn this_thread() -> libc::pthread_t {
    // SAFETY: no preconditions.
    unsafe { libc::pthread_self() }
}

fn kick(thread: libc::pthread_t) {
    // SAFETY: vCPU threads never return while the process lives, so the id is alive.
    unsafe { libc::pthread_kill(thread, kick_signal()) };
}

/// Takes a delivered or left-over kick off the pending set.
fn drain_kick() {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the set and the timeout are valid for the call; no details are asked for.
    unsafe { libc::sigtimedwait(&kick_set(), std::ptr::null_mut(), &now) };
}
