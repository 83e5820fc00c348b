//! The event loop: everything that happens while the guest lives.
//!
//! ```text
//!            Pause                    Snapshot
//!  Running ─────────► Paused ─────────────────────► Paused
//!     ▲                 │
//!     └──── Resume ─────┘        guest stops, Quit or end of channel, any time ─► process exits
//! ```
//! With a [`Door`] the end of the channel is not the end: the loop then waits at the door, and
//! everything else goes on as it was.
//!
//! One thread serves the control channel, the queues' kicks and the devices' host sides. It ends
//! the process itself: taking a KVM machine apart takes 15 ms, and nobody should wait for it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parbake_protocol::vmm::{
    Event, Reply, Request, SnapshotFiles, SnapshotReport, Status, StopReason,
};
use rustix::event::epoll;

use crate::control::{ControlError, Door, Events, Requests};
use crate::device::mmio::MmioTransport;
use crate::error::{Failure, HostContext};
use crate::machine::{Devices, Frozen, host_fds, state_version};
use crate::snapshot::StateError;
use crate::vcpu::{Shared, Vcpus};

/// What the loop is about to serve.
pub struct Running {
    /// Shared with the vCPUs.
    pub shared: Arc<Shared>,
    /// The vCPUs.
    pub vcpus: Vcpus,
    /// The devices.
    pub devices: Arc<Devices>,
    /// What a snapshot needs.
    pub frozen: Frozen,
    /// The control channel.
    pub requests: Requests,
    /// Where the host comes back after the channel has closed.
    pub door: Option<Door>,
    /// Its other direction.
    pub events: Arc<Events>,
    /// Whether the guest starts paused.
    pub paused: bool,
    /// Active isolation layers.
    pub jail: Vec<String>,
}

/// What a descriptor of the set means; bits of the epoll data.
#[derive(Debug, Clone, Copy)]
enum Source {
    Control,
    Door,
    Stop,
    Lifetime,
    Queue { device: usize, queue: usize },
    Host { device: usize },
}

/// The epoll set, made before the jail closes.
pub struct Poll {
    set: OwnedFd,
    sources: Vec<Source>,
    /// Expires with the machine's life; kept open.
    _lifetime: Option<OwnedFd>,
}

impl Poll {
    /// Collects everything the loop waits for; `lifetime` begins now.
    pub fn new(
        requests: &Requests,
        shared: &Shared,
        devices: &Devices,
        lifetime: Option<Duration>,
    ) -> Result<Self, Failure> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).host("epoll_create1")?;
        let lifetime = lifetime.map(timer).transpose()?;
        let mut poll = Self { set, sources: Vec::new(), _lifetime: None };
        poll.add(requests.as_fd(), Source::Control)?;
        // Watched only while there is no channel; see `swap`.
        poll.sources.push(Source::Door);
        poll.add(borrow(&shared.stop_event), Source::Stop)?;
        if let Some(timer) = lifetime {
            poll.add(timer.as_fd(), Source::Lifetime)?;
            poll._lifetime = Some(timer);
        }
        for device in 0..devices.all.len() {
            let transport = devices.lock(device);
            for (queue, kick) in transport.queue_events().iter().enumerate() {
                poll.add(borrow(kick), Source::Queue { device, queue })?;
            }
        }
        for (device, fd) in host_fds(devices) {
            poll.add(borrow(&fd), Source::Host { device })?;
        }
        Ok(poll)
    }

    /// Watches `new` in place of `old`: the channel or the door.
    fn swap(
        &self,
        old: BorrowedFd<'_>,
        new: BorrowedFd<'_>,
        source: Source,
    ) -> Result<(), Failure> {
        epoll::delete(&self.set, old).host("epoll_ctl")?;
        let slot = u64::from(matches!(source, Source::Door));
        epoll::add(&self.set, new, epoll::EventData::new_u64(slot), epoll::EventFlags::IN)
            .host("epoll_ctl")
    }

    fn add(&mut self, fd: BorrowedFd<'_>, source: Source) -> Result<(), Failure> {
        let data = epoll::EventData::new_u64(self.sources.len() as u64);
        epoll::add(&self.set, fd, data, epoll::EventFlags::IN).host("epoll_ctl")?;
        self.sources.push(source);
        Ok(())
    }
}

/// Readable once `after` has passed, which the guest's being paused does not stop.
fn timer(after: Duration) -> Result<OwnedFd, Failure> {
    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    let timer =
        timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).host("timerfd_create")?;
    // Zero would switch it off.
    let after = after.max(Duration::from_millis(1));
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    let value = Timespec {
        tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: after.subsec_nanos().into(),
    };
    let setting = Itimerspec { it_interval: zero, it_value: value };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &setting).host("timerfd_settime")?;
    Ok(timer)
}

/// Borrows a descriptor for the time of an `epoll_ctl`.
#[allow(unsafe_code)]
fn borrow(fd: &impl std::os::fd::AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: the owner is borrowed for as long as the result.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

/// Serves until the guest or the host ends it, and returns the process's exit code.
pub fn serve(mut running: Running, poll: &Poll) -> i32 {
    if running.paused {
        // The devices must not touch memory while the host thinks the machine stands still.
        if let Err(failure) = running.quiesce() {
            return running.fail(&failure);
        }
    }
    let mut ready = Vec::with_capacity(32);
    loop {
        ready.clear();
        let waited = epoll::wait(&poll.set, rustix::buffer::spare_capacity(&mut ready), None);
        match waited {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return 1,
        }
        for event in &ready {
            let Some(source) =
                usize::try_from(event.data.u64()).ok().and_then(|i| poll.sources.get(i))
            else {
                continue;
            };
            match *source {
                Source::Control => {
                    if let Some(code) = running.control(poll) {
                        return code;
                    }
                }
                Source::Door => {
                    if let Err(failure) = running.welcome(poll) {
                        return running.fail(&failure);
                    }
                }
                Source::Stop => {
                    if let Some((reason, detail)) = running.shared.stopped() {
                        running.events.send(&Event::Stopped { reason, detail });
                        return 0;
                    }
                }
                Source::Lifetime => {
                    running.events.send(&Event::Stopped {
                        reason: StopReason::Expired,
                        detail: String::new(),
                    });
                    return 0;
                }
                Source::Queue { device, queue } => {
                    let mut transport = running.devices.lock(device);
                    transport.queue_event(queue);
                    report_failure(&mut transport);
                    if transport.take_full() {
                        let disk = u32::try_from(device).unwrap_or(u32::MAX);
                        running.events.send(&Event::DiskFull { disk });
                    }
                }
                Source::Host { device } => {
                    let mut transport = running.devices.lock(device);
                    transport.host_event();
                    report_failure(&mut transport);
                }
            }
        }
    }
}

/// Says on standard error why a device stopped until its driver resets it. It happens once for each
/// reset, so a guest cannot fill a log with it quickly.
fn report_failure(device: &mut MmioTransport) {
    if let Some(failure) = device.take_failure() {
        eprintln!("parbake-vmm: {}: {failure}", device.kind());
    }
}

impl Running {
    /// Reports why the machine cannot go on; the result is the exit code.
    pub fn fail(&self, failure: &Failure) -> i32 {
        self.events
            .send(&Event::Failed { kind: failure.kind().to_owned(), message: failure.to_string() });
        1
    }

    /// Serves what came over the control channel; an exit code when it is time to end.
    fn control(&mut self, poll: &Poll) -> Option<i32> {
        if let Err(error) = self.requests.receive() {
            return self.channel_ended(&error, poll);
        }
        loop {
            let line = match self.requests.line() {
                Ok(Some(line)) => line,
                Ok(None) => return None,
                Err(error) => return self.channel_ended(&error, poll),
            };
            let reply = match serde_json::from_slice(&line) {
                Ok(Request::Quit) => {
                    self.events.reply(Reply::Done);
                    self.events
                        .send(&Event::Stopped { reason: StopReason::Quit, detail: String::new() });
                    return Some(0);
                }
                Ok(request) => self.request(&request),
                Err(error) => Reply::Failed { message: format!("not a request: {error}") },
            };
            self.events.reply(reply);
        }
    }

    /// The end, or waiting at the door. A host that sends nonsense is as good as gone.
    fn channel_ended(&self, error: &ControlError, poll: &Poll) -> Option<i32> {
        if let Some(door) = &self.door {
            let waiting = poll.swap(self.requests.as_fd(), door.as_fd(), Source::Door);
            self.requests.hang_up();
            return waiting.err().map(|failure| self.fail(&failure));
        }
        if matches!(error, ControlError::Closed) {
            return Some(0);
        }
        self.events.send(&Event::Failed { kind: "config".into(), message: error.to_string() });
        Some(1)
    }

    /// Takes a new channel, if who knocks may have it.
    fn welcome(&mut self, poll: &Poll) -> Result<(), Failure> {
        let Some(door) = &self.door else { return Ok(()) };
        let Some(socket) = door.admit() else { return Ok(()) };
        let requests = Requests::new(std::sync::Arc::clone(&socket));
        poll.swap(door.as_fd(), requests.as_fd(), Source::Control)?;
        self.requests = requests;
        self.events.redirect(socket);
        Ok(())
    }

    fn request(&mut self, request: &Request) -> Reply {
        let result = match request {
            Request::Pause => self.pause().map(|()| Reply::Done),
            Request::Resume => self.resume().map(|()| Reply::Done),
            Request::Snapshot(files) => self.snapshot(files).map(Reply::Snapshot),
            Request::Status => Ok(Reply::Status(self.status())),
            Request::Quit => Ok(Reply::Done),
        };
        result.unwrap_or_else(|failure| Reply::Failed { message: failure.to_string() })
    }

    fn pause(&mut self) -> Result<(), Failure> {
        if self.paused {
            return Ok(());
        }
        self.vcpus.pause();
        self.paused = true;
        self.quiesce()
    }

    fn quiesce(&self) -> Result<(), Failure> {
        self.devices.each(|device| device.quiesce().map_err(|e| Failure::Device(e.to_string())))
    }

    fn resume(&mut self) -> Result<(), Failure> {
        if !self.paused {
            return Ok(());
        }
        self.devices
            .each(|device| device.unquiesce().map_err(|e| Failure::Device(e.to_string())))?;
        self.paused = false;
        self.vcpus.resume();
        Ok(())
    }

    fn status(&self) -> Status {
        let state = if self.paused { "paused" } else { "running" };
        let overlay_bytes = (0..self.devices.disks)
            .map(|disk| self.devices.lock(disk).device().overlay_bytes().unwrap_or(0))
            .collect();
        Status { state: state.into(), jail: self.jail.clone(), overlay_bytes }
    }

    /// Writes state, memory and disks into the descriptors that came along.
    fn snapshot(&mut self, request: &SnapshotFiles) -> Result<SnapshotReport, Failure> {
        let (count, wanted) = (request.files, 2 + self.devices.disks);
        // Whatever happens, descriptors sent with this request must not wait for the next.
        let files = usize::try_from(count).ok().and_then(|count| self.requests.take_files(count));
        let files: Vec<File> = match files {
            Some(files) if files.len() == wanted => files.into_iter().map(File::from).collect(),
            _ => {
                return Err(Failure::Config(format!(
                    "{count} files announced for a snapshot that takes {wanted} descriptors"
                )));
            }
        };
        if !self.paused {
            return Err(Failure::Config("a snapshot needs a paused machine".into()));
        }
        let vcpus = self.vcpus.paused();
        let mut state = self.frozen.save(&vcpus, &self.shared, &self.devices)?;
        drop(vcpus);
        let (state_file, rest) = files.split_at(1);
        let (memory_data_bytes, difference) = self
            .frozen
            .write_memory(request.difference, &rest[0])
            .map_err(|e| Failure::Memory(format!("the image cannot be written: {e}")))?;
        state.difference = difference;
        let bytes = state.encode()?;
        write_state(&state_file[0], &bytes)
            .map_err(|e| StateError::Io(format!("cannot be written: {e}")))?;
        let mut overlay_data_bytes = Vec::new();
        for (disk, file) in rest[1..].iter().enumerate() {
            let written = self
                .devices
                .lock(disk)
                .device()
                .write_disk(file)
                .map_err(|e| Failure::Disk(e.to_string()))?;
            overlay_data_bytes.push(written.unwrap_or(0));
        }
        Ok(SnapshotReport {
            state_bytes: bytes.len() as u64,
            memory_data_bytes,
            difference: state.difference.is_some(),
            overlay_data_bytes,
            generation: state.shape.generation,
            cpu_vendor: state.contract.vendor,
            cpu_features: state.contract.features,
            kvm_kind: state.contract.kvm_kind,
            state_version: state_version(),
        })
    }
}

fn write_state(file: &File, bytes: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    file.set_len(0)?;
    file.write_all_at(bytes, 0)
}

/// Whether a descriptor is a socket this process can be controlled through.
pub fn is_socket(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(fd.as_fd())
        .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_socket())
}
