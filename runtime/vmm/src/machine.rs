//! A machine from its configuration: everything opened, everything set, nothing running yet.
//!
//! The order of the KVM calls is the product of measurement: memory slots before anything that
//! registers on KVM's I/O buses (see [`memory::attach`]); on restore the CPUID table comes from the
//! snapshot, because asking KVM for its own takes longer than creating the machine.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::{IoEventAddress, Kvm, VcpuFd, VmFd};
use parbake_protocol::vmm::{self as protocol, Start, VmmConfig};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use crate::boot::{self, Entry, acpi};
use crate::control::Events;
use crate::device::block::Block;
use crate::device::mmio::{MmioTransport, QUEUE_NOTIFY, SavedTransport};
use crate::device::net::Net;
use crate::device::rng::Rng;
use crate::device::vsock::Vsock;
use crate::device::{DeviceError, VirtioDevice};
use crate::error::{Failure, HostContext, KvmContext};
use crate::filling::Filling;
use crate::layout;
use crate::ports::Ports;
use crate::snapshot::difference::Run;
use crate::snapshot::residency::Residency;
use crate::snapshot::state::{
    Contract, MachineState, STATE_VERSION, Shape, VIRTIO, feature_words, from_bytes, to_bytes,
};
use crate::snapshot::{StateError, contract, format, restore, save, tsc};
use crate::vcpu::{MmioBus, Shared};
use crate::{cpuid, memory};

/// Most vCPUs a machine may have.
pub const MAX_VCPUS: u8 = 64;
/// Least memory a machine may have, in MiB.
pub const MIN_MEMORY_MIB: u32 = 2;

/// Stage names and microseconds since `main`.
pub struct Stages {
    start: std::time::Instant,
    /// What was reached when.
    pub list: Vec<(String, u64)>,
}

impl Stages {
    /// Starts counting.
    pub fn start() -> Self {
        Self { start: std::time::Instant::now(), list: Vec::with_capacity(16) }
    }

    /// `name` is done.
    pub fn mark(&mut self, name: &str) {
        let at = u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.list.push((name.to_owned(), at));
    }
}

/// The virtio devices behind their windows.
pub struct Devices {
    /// In window order: disks, vsock, net, rng, workspace.
    pub all: Vec<Mutex<MmioTransport>>,
    /// How many of the first are disks.
    pub disks: usize,
}

impl Devices {
    /// One device, for the time of the call.
    pub fn lock(&self, index: usize) -> MutexGuard<'_, MmioTransport> {
        self.all[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `visit` with each device until it fails.
    pub fn each<E>(
        &self,
        mut visit: impl FnMut(&mut MmioTransport) -> Result<(), E>,
    ) -> Result<(), E> {
        (0..self.all.len()).try_for_each(|index| visit(&mut self.lock(index)))
    }
}

/// The devices' windows as the vCPUs see them.
struct Windows(Arc<Devices>);

impl Windows {
    fn find(&self, address: u64) -> Option<(MutexGuard<'_, MmioTransport>, u64)> {
        let offset = address.checked_sub(layout::MMIO_BASE)?;
        let index = usize::try_from(offset / layout::MMIO_WINDOW).ok()?;
        (index < self.0.all.len()).then(|| (self.0.lock(index), offset % layout::MMIO_WINDOW))
    }
}

impl MmioBus for Windows {
    fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((mut device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        if let Some((mut device, offset)) = self.find(address) {
            device.write(offset, data);
        }
    }
}

/// A machine ready to run.
pub struct Machine {
    /// What all vCPU threads share.
    pub shared: Arc<Shared>,
    /// Virtio devices.
    pub devices: Arc<Devices>,
    /// The vCPUs, for [`crate::vcpu::Vcpus::spawn`] to take.
    pub vcpu_fds: Vec<VcpuFd>,
    /// What [`Machine::save`] needs and the rest does not.
    pub frozen: Frozen,
    /// Whether the vCPUs wait for a `Resume`.
    pub paused: bool,
    /// While its images fill up.
    pub filling: Option<Filling>,
}

/// The parts of a machine only a snapshot looks at.
pub struct Frozen {
    vm: VmFd,
    memory: GuestMemoryMmap,
    shape: Shape,
    /// Known from the snapshot on restore, made at the first snapshot otherwise.
    contract: Option<Contract>,
    msr_indices: Vec<u32>,
    xsave_words: usize,
    residency: Option<Residency>,
    /// Wired to the generic event device's line; kept open as long as the machine lives.
    _generation_event: EventFd,
}

/// Builds the machine of a configuration.
///
/// `tap` is the descriptor that came along with a configuration that says so.
pub fn open(
    config: &VmmConfig,
    tap: Option<OwnedFd>,
    events: &Arc<Events>,
    stages: &mut Stages,
) -> Result<Machine, Failure> {
    check(config)?;
    let console = config.console.as_deref().map(open_console).transpose()?;
    match &config.start {
        Start::Boot { kernel, initramfs, cmdline } => {
            let kernel = open_for_reading(kernel).map_err(Failure::Kernel)?;
            let initramfs =
                initramfs.as_deref().map(open_for_reading).transpose().map_err(Failure::Kernel)?;
            stages.mark("open");
            cold(config, tap, events, console, (kernel, initramfs, cmdline), stages)
        }
        Start::Restore { state, memory, difference, generation_id, paused } => {
            let state = read_state(state)?;
            let image = open_for_reading(memory).map_err(Failure::Memory)?;
            let difference =
                difference.as_deref().map(open_for_reading).transpose().map_err(Failure::Memory)?;
            stages.mark("state");
            let config = fitting(config, &state.shape)?;
            let frozen = (state, &image, difference.as_ref(), *generation_id);
            let mut machine = thaw(&config, tap, events, console, frozen, stages)?;
            machine.paused = *paused;
            Ok(machine)
        }
    }
}

/// The configuration without a network device that leads nowhere and without an empty slot, for a
/// machine that was frozen without them.
fn fitting<'a>(config: &'a VmmConfig, frozen: &Shape) -> Result<Cow<'a, VmmConfig>, Failure> {
    let lacks = |wanted: &str| frozen.devices.iter().all(|kind| kind != wanted);
    let refuse = |what: &str, wish: &str| {
        Err(StateError::Mismatch(format!(
            "it was taken of a machine without {what}; bake the template anew to give its \
             sandboxes {wish}"
        ))
        .into())
    };
    let mut fitting = Cow::Borrowed(config);
    if let Some(net) = config.net.as_ref().filter(|_| lacks("net")) {
        if net.tap.is_some() {
            return refuse("a network device", "a network");
        }
        fitting.to_mut().net = None;
    }
    if let Some(workspace) = config.workspace.as_ref().filter(|_| lacks("workspace")) {
        if workspace.file.is_some() {
            return refuse("a slot for a workspace", "one");
        }
        fitting.to_mut().workspace = None;
    }
    Ok(fitting)
}

fn check(config: &VmmConfig) -> Result<(), Failure> {
    let refuse = |what: String| Err(Failure::Config(what));
    if config.filling.is_some() && matches!(config.start, Start::Boot { .. }) {
        return refuse("only a restore can begin before its images are there".into());
    }
    if config.version != protocol::VERSION {
        return refuse(format!(
            "version {} where this monitor speaks {}; use the parbake-vmm that came with this parbake",
            config.version,
            protocol::VERSION
        ));
    }
    if !(1..=MAX_VCPUS).contains(&config.vcpus) {
        return refuse(format!("{} vCPUs; 1 to {MAX_VCPUS} are possible", config.vcpus));
    }
    if config.memory_mib < MIN_MEMORY_MIB {
        return refuse(format!(
            "{} MiB of memory; {MIN_MEMORY_MIB} are the least",
            config.memory_mib
        ));
    }
    let devices = kinds(config).len();
    if devices > layout::MMIO_DEVICES {
        return refuse(format!("{devices} devices; {} are possible", layout::MMIO_DEVICES));
    }
    Ok(())
}

/// Kinds of the configured devices, in window order.
fn kinds(config: &VmmConfig) -> Vec<String> {
    let mut kinds = vec!["block".to_owned(); config.disks.len()];
    kinds.extend(config.vsock.iter().map(|_| "vsock".to_owned()));
    kinds.extend(config.net.iter().map(|_| "net".to_owned()));
    if config.rng {
        kinds.push("rng".into());
    }
    kinds.extend(config.workspace.iter().map(|_| "workspace".to_owned()));
    kinds
}

fn open_for_reading(path: &Path) -> Result<File, String> {
    File::open(path).map_err(|e| format!("{} cannot be opened: {e}", path.display()))
}

fn open_console(path: &Path) -> Result<File, Failure> {
    File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|e| Failure::Device(format!("console {} cannot be opened: {e}", path.display())))
}

fn read_state(path: &Path) -> Result<MachineState, Failure> {
    let failed = |e: std::io::Error| StateError::Io(format!("{}: {e}", path.display()));
    let mut file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    if length > format::MAX_BYTES {
        return Err(StateError::TooLarge(length).into());
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    (&mut file).take(format::MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    Ok(MachineState::decode(&bytes)?)
}

/// The bare virtual machine: memory first.
fn create_vm(kvm: &Kvm, memory: &GuestMemoryMmap, stages: &mut Stages) -> Result<VmFd, Failure> {
    let vm = kvm.create_vm().kvm("KVM_CREATE_VM")?;
    stages.mark("vm");
    memory::attach(&vm, memory)?;
    stages.mark("memslots");
    // Only Intel's KVM uses these pages, but nobody minds.
    vm.set_tss_address(layout::TSS).kvm("KVM_SET_TSS_ADDR")?;
    vm.create_irq_chip().kvm("KVM_CREATE_IRQCHIP")?;
    Ok(vm)
}

fn open_kvm() -> Result<Kvm, Failure> {
    let kvm = Kvm::new().kvm("opening /dev/kvm")?;
    match kvm.get_api_version() {
        12 => Ok(kvm),
        other => Err(Failure::KvmAnswer(format!("API version {other}, 12 is needed"))),
    }
}

fn line(vm: &VmFd, gsi: u32) -> Result<EventFd, Failure> {
    let event = event()?;
    vm.register_irqfd(&event, gsi).kvm("KVM_IRQFD")?;
    Ok(event)
}

fn event() -> Result<EventFd, Failure> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).host("eventfd")
}

/// Opens the configured devices and wires them to the machine.
fn devices(
    config: &VmmConfig,
    tap: Option<OwnedFd>,
    vm: &VmFd,
    memory: &GuestMemoryMmap,
    filling: Option<&Filling>,
) -> Result<Devices, Failure> {
    let mut all = Vec::new();
    for (index, device) in open_devices(config, tap, filling)?.into_iter().enumerate() {
        let (address, gsi) = acpi::virtio_window(index);
        let transport = MmioTransport::new(device, memory.clone(), line(vm, gsi)?)
            .map_err(|e| Failure::Device(e.to_string()))?;
        for (queue, kick) in (0u32..).zip(transport.queue_events()) {
            let notify = IoEventAddress::Mmio(address + QUEUE_NOTIFY);
            vm.register_ioevent(kick, &notify, queue).kvm("KVM_IOEVENTFD")?;
        }
        all.push(Mutex::new(transport));
    }
    Ok(Devices { all, disks: config.disks.len() })
}

fn open_devices(
    config: &VmmConfig,
    tap: Option<OwnedFd>,
    filling: Option<&Filling>,
) -> Result<Vec<Box<dyn VirtioDevice>>, Failure> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    for (index, disk) in config.disks.iter().enumerate() {
        let mut block = Block::open(disk).map_err(|e| Failure::Disk(e.to_string()))?;
        block.set_id(&format!("parbake-{index}"));
        if let Some(filling) = filling {
            block.fill_from(filling.disk(index));
        }
        devices.push(Box::new(block));
    }
    if let Some(vsock) = &config.vsock {
        let vsock = Vsock::open(vsock).map_err(|e| Failure::Device(e.to_string()))?;
        devices.push(Box::new(vsock));
    }
    if let Some(net) = &config.net {
        let net = Net::open(net, tap).map_err(|e| Failure::Device(e.to_string()))?;
        devices.push(Box::new(net));
    }
    if config.rng {
        devices.push(Box::new(Rng::new()));
    }
    if let Some(workspace) = &config.workspace {
        let volume = Block::open_volume(workspace.file.as_deref());
        let mut volume = volume.map_err(|e| Failure::Workspace(e.to_string()))?;
        volume.set_id(protocol::WORKSPACE_ID);
        devices.push(Box::new(volume));
    }
    Ok(devices)
}

fn shape(config: &VmmConfig, generation: u32) -> Shape {
    Shape {
        layout: layout::LAYOUT_VERSION,
        vcpus: config.vcpus,
        memory_mib: config.memory_mib,
        devices: kinds(config),
        generation,
    }
}

fn create_vcpus(vm: &VmFd, count: u8) -> Result<Vec<VcpuFd>, Failure> {
    (0..count).map(|id| vm.create_vcpu(u64::from(id)).kvm("KVM_CREATE_VCPU")).collect()
}

fn cold(
    config: &VmmConfig,
    tap: Option<OwnedFd>,
    events: &Arc<Events>,
    console: Option<File>,
    (mut kernel, mut initramfs, cmdline): (File, Option<File>, &str),
    stages: &mut Stages,
) -> Result<Machine, Failure> {
    let kvm = open_kvm()?;
    let memory = memory::anonymous(config.memory_mib)?;
    let entry = boot::load(&memory, &mut kernel, initramfs.as_mut(), cmdline)?;
    acpi::write_tables(&memory, config.vcpus, kinds(config).len())?;
    let mut id = [0; 16];
    getrandom::fill(&mut id)
        .map_err(|e| Failure::KvmAnswer(format!("no entropy for the generation id: {e}")))?;
    boot::write(&memory, layout::GENERATION_ID, &id)?;
    stages.mark("memory");

    let vm = create_vm(&kvm, &memory, stages)?;
    let vcpu_fds = create_vcpus(&vm, config.vcpus)?;
    let base = cpuid::base(&kvm)?;
    for (id, fd) in (0..).zip(&vcpu_fds) {
        let table = cpuid::for_vcpu(&base, id, config.vcpus)?;
        fd.set_cpuid2(&table).kvm("KVM_SET_CPUID2")?;
        default_msrs(fd, &cpuid::vendor(table.as_slice()))?;
        if id == 0 {
            enter(fd, entry)?;
        }
    }
    stages.mark("vcpus");
    let devices = Arc::new(devices(config, tap, &vm, &memory, None)?);
    let ports = Ports::new(console, config.console_limit, line(&vm, layout::SERIAL_GSI)?);
    let generation_event = line(&vm, layout::GED_GSI)?;
    stages.mark("devices");
    let shared = Shared::new(ports, Box::new(Windows(Arc::clone(&devices))), Arc::clone(events))?;
    let xsave_words = save::xsave_words(&vm);
    Ok(Machine {
        shared: Arc::new(shared),
        devices,
        vcpu_fds,
        frozen: Frozen {
            msr_indices: msr_indices(&kvm)?,
            vm,
            memory,
            shape: shape(config, 0),
            contract: None,
            xsave_words,
            residency: Residency::open(None, Vec::new()),
            _generation_event: generation_event,
        },
        paused: false,
        filling: None,
    })
}

/// All registers KVM can save.
fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, Failure> {
    Ok(kvm.get_msr_index_list().kvm("KVM_GET_MSR_INDEX_LIST")?.as_slice().to_vec())
}

/// What firmware would have set: memory is write-back by default, and string moves are fast.
fn default_msrs(fd: &VcpuFd, vendor: &str) -> Result<(), Failure> {
    const MTRR_DEF_TYPE: u32 = 0x2ff;
    const ENABLED_WRITE_BACK: u64 = 0x806;
    const MISC_ENABLE: u32 = 0x1a0;
    const FAST_STRINGS: u64 = 1;
    let mut wanted = vec![(MTRR_DEF_TYPE, ENABLED_WRITE_BACK)];
    if vendor == "GenuineIntel" {
        wanted.push((MISC_ENABLE, FAST_STRINGS));
    }
    for (index, data) in wanted {
        let entry = kvm_bindings::kvm_msr_entry { index, data, ..Default::default() };
        let msrs = kvm_bindings::Msrs::from_entries(&[entry])
            .map_err(|_| Failure::KvmAnswer("register list".into()))?;
        // A KVM without the register has a guest that cannot miss it.
        fd.set_msrs(&msrs).kvm("KVM_SET_MSRS")?;
    }
    Ok(())
}

fn enter(fd: &VcpuFd, entry: Entry) -> Result<(), Failure> {
    let mut regs = fd.get_regs().kvm("KVM_GET_REGS")?;
    let mut sregs = fd.get_sregs().kvm("KVM_GET_SREGS")?;
    match entry {
        Entry::Pvh { address } => boot::pvh::enter(&mut regs, &mut sregs, address),
        Entry::Linux64 { address } => boot::linux64::enter(&mut regs, &mut sregs, address),
    }
    fd.set_sregs(&sregs).kvm("KVM_SET_SREGS")?;
    fd.set_regs(&regs).kvm("KVM_SET_REGS")
}

fn thaw(
    config: &VmmConfig,
    tap: Option<OwnedFd>,
    events: &Arc<Events>,
    console: Option<File>,
    (state, image, difference, generation_id): (MachineState, &File, Option<&File>, [u8; 16]),
    stages: &mut Stages,
) -> Result<Machine, Failure> {
    let shape = shape(config, state.shape.generation);
    contract::check_shape(&state.shape, &shape)?;
    contract::check_host(&state.contract)?;
    let connect = |filling: &protocol::Filling| Filling::connect(&filling.socket, filling.memory);
    let mut filling = config.filling.as_ref().map(connect).transpose()?;
    let filled = filling.as_ref().is_some_and(Filling::has_memory);
    let memory = match &mut filling {
        Some(filling) if filled => {
            let memory = memory::to_be_filled(config.memory_mib, image)?;
            filling.hand_over(&memory)?;
            memory
        }
        _ => memory::private_image(config.memory_mib, image)?,
    };
    let laid_over = match (&state.difference, difference) {
        (None, None) => Vec::new(),
        (Some(runs), Some(file)) if !filled => {
            memory::lay_over(config.memory_mib, &memory, file, runs)?;
            runs.clone()
        }
        _ => {
            return Err(StateError::Mismatch(
                "its state and the configuration do not agree on whether its memory is whole or \
                 changed pages to lay over an image that is all there"
                    .into(),
            )
            .into());
        }
    };
    // Of memory that is filled from elsewhere, what was not touched is not zero.
    let residency = if filled { None } else { Residency::open(Some(image), laid_over) };
    stages.mark("memory");

    let kvm = open_kvm()?;
    let vm = create_vm(&kvm, &memory, stages)?;
    let vcpu_fds = create_vcpus(&vm, config.vcpus)?;
    stages.mark("vcpus");
    let xsave_words = save::xsave_words(&vm);
    contract::match_tsc(&kvm, &vcpu_fds, &state.contract)?;
    let mut first_offset = None;
    for (fd, saved) in vcpu_fds.iter().zip(&state.vcpus) {
        let own = restore::vcpu(fd, saved, xsave_words, first_offset)?;
        first_offset = first_offset.or(own);
    }
    restore::clock(&vm, &state.clock)?;
    restore::irqchip(&vm, &state.irqchip)?;
    stages.mark("cpu_state");

    let devices = Arc::new(devices(config, tap, &vm, &memory, filling.as_ref())?);
    for (index, saved) in state.devices.iter().enumerate() {
        let saved: SavedTransport = from_bytes(VIRTIO, saved)?;
        devices.lock(index).restore(&saved).map_err(|e| match e {
            DeviceError::Io { .. } => Failure::Device(e.to_string()),
            _ => Failure::State(StateError::Invalid {
                what: shape.devices[index].clone(),
                why: e.to_string(),
            }),
        })?;
    }
    let serial = line(&vm, layout::SERIAL_GSI)?;
    let ports =
        Ports::restored(console, config.console_limit, serial, &state.serial).ok_or_else(|| {
            StateError::Invalid { what: "serial port".into(), why: "no such state".into() }
        })?;
    memory
        .write_slice(&generation_id, GuestAddress(layout::GENERATION_ID))
        .map_err(|e| Failure::Memory(format!("the generation id: {e}")))?;
    let generation_event = line(&vm, layout::GED_GSI)?;
    generation_event.write(1).host("announcing the new generation")?;
    stages.mark("devices");
    let shared = Shared::new(ports, Box::new(Windows(Arc::clone(&devices))), Arc::clone(events))?;
    Ok(Machine {
        shared: Arc::new(shared),
        devices,
        vcpu_fds,
        frozen: Frozen {
            msr_indices: msr_indices(&kvm)?,
            vm,
            memory,
            shape,
            contract: Some(state.contract),
            xsave_words,
            residency,
            _generation_event: generation_event,
        },
        paused: false,
        filling,
    })
}

impl Frozen {
    /// The state of a machine whose vCPUs are paused (`vcpus` proves it) and whose devices are
    /// quiet.
    pub fn save(
        &mut self,
        vcpus: &[MutexGuard<'_, VcpuFd>],
        shared: &Shared,
        devices: &Devices,
    ) -> Result<MachineState, Failure> {
        let mut saved_devices = Vec::new();
        devices.each(|device| {
            let saved = device.save().map_err(|e| Failure::Device(e.to_string()))?;
            saved_devices.push(to_bytes(VIRTIO, &saved)?);
            Ok::<_, Failure>(())
        })?;
        let first_offset = vcpus.first().and_then(|fd| tsc::offset(fd));
        let states = vcpus
            .iter()
            .map(|fd| save::vcpu(fd, &self.msr_indices, self.xsave_words, first_offset))
            .collect::<Result<Vec<_>, _>>()?;
        let clock = self.vm.get_clock().kvm("KVM_GET_CLOCK")?;
        let irqchip = save::irqchip(&self.vm)?;
        let tsc_khz = vcpus.first().and_then(|fd| fd.get_tsc_khz().ok()).unwrap_or(0);
        let entries = states.first().map_or(&[][..], |vcpu| &vcpu.cpuid);
        let contract = Contract {
            vendor: cpuid::vendor(entries),
            kvm_kind: match &self.contract {
                Some(contract) => contract.kvm_kind.clone(),
                None => contract::kvm_kind().to_owned(),
            },
            features: feature_words(entries),
            tsc_khz,
        };
        let generation = self.shape.generation.saturating_add(1);
        Ok(MachineState {
            shape: Shape { generation, ..self.shape.clone() },
            contract,
            vcpus: states,
            irqchip,
            clock,
            serial: shared.ports.save(),
            devices: saved_devices,
            difference: None,
        })
    }

    /// Writes guest memory; returns how many bytes were not zero. With `differing`, and if this
    /// machine was restored from a whole image, only what differs from it, and which pages do.
    pub fn write_memory(
        &self,
        differing: bool,
        image: &File,
    ) -> std::io::Result<(u64, Option<Vec<Run>>)> {
        match &self.residency {
            Some(residency) if differing && residency.has_image() => {
                let (written, runs) = memory::write_difference(&self.memory, residency, image)?;
                Ok((written, Some(runs)))
            }
            residency => {
                let written = memory::write_image(&self.memory, residency.as_ref(), image)?;
                Ok((written, None))
            }
        }
    }
}

/// Version of the state format, for reports.
pub const fn state_version() -> u32 {
    STATE_VERSION
}

/// The descriptors of the devices' host sides, with the index of the device.
pub fn host_fds(devices: &Devices) -> Vec<(usize, RawFd)> {
    (0..devices.all.len()).filter_map(|i| devices.lock(i).host_fd().map(|fd| (i, fd))).collect()
}
