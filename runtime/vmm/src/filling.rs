//! Running while the images fill up: the monitor's side of [`parbake_protocol::filling`].
#![allow(unsafe_code)]

use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use parbake_protocol::filling::{self, Ask, DISKS, Layer, MEMORY, Region};
use parbake_protocol::vmm::{Event, StopReason};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::control::Events;
use crate::error::{Failure, HostContext};
use crate::vcpu::Enter;

/// The most that is asked for at once.
const MAX_ASK: u64 = 1 << 20;
/// What is known to be there is remembered in pieces of this size.
const PIECE: u64 = 4096;

/// `struct uffdio_api` (Linux, `include/uapi/linux/userfaultfd.h`).
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const UFFD_API: u64 = 0xaa;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const MODE_MISSING: u64 = 1;

/// Both connections.
pub struct Filling {
    /// Unless memory is all there.
    memory: Option<UnixStream>,
    disks: Arc<Mutex<UnixStream>>,
    /// Kept: without it, what is missing would read as zeroes.
    faults: Option<OwnedFd>,
}

/// What a disk asks before it reads.
pub struct DiskFilling {
    stream: Arc<Mutex<UnixStream>>,
    disk: u8,
    /// Pieces known to be there, a bit each, per file.
    known: Mutex<[Vec<u64>; 2]>,
}

impl Filling {
    /// Connects, before the jail closes.
    pub fn connect(socket: &Path, with_memory: bool) -> Result<Self, Failure> {
        let connect = |kind: u8| {
            let mut stream = UnixStream::connect(socket)?;
            stream.write_all(&[kind])?;
            Ok::<_, io::Error>(stream)
        };
        let what = "connecting to what fills the images";
        let memory = with_memory.then(|| connect(MEMORY)).transpose().host(what)?;
        let disks = Arc::new(Mutex::new(connect(DISKS).host(what)?));
        Ok(Self { memory, disks, faults: None })
    }

    /// Lets the host answer the first touch of each page of `memory`, which must be anonymous and
    /// untouched.
    pub fn hand_over(&mut self, memory: &GuestMemoryMmap) -> Result<(), Failure> {
        let what = "letting the host fill guest memory (userfaultfd)";
        let Some(stream) = &self.memory else { return Ok(()) };
        let flags = rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK;
        // SAFETY: creates a descriptor; nothing is registered with it yet.
        let faults = unsafe { rustix::mm::userfaultfd(flags) }.host(what)?;
        let mut api = Api { api: UFFD_API, features: 0, ioctls: 0 };
        // SAFETY: the structure is what this request reads and writes.
        check(unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_API, &raw mut api) }).host(what)?;
        let (mut regions, mut offset) = (Vec::new(), 0);
        for region in memory.iter() {
            let (address, length) = (region.as_ptr() as u64, region.len());
            let mut register =
                Register { start: address, len: length, mode: MODE_MISSING, ioctls: 0 };
            // SAFETY: the structure is what this request reads and writes. It changes who answers
            // faults in a mapping that lives as long as the process.
            check(unsafe { libc::ioctl(faults.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) })
                .host(what)?;
            regions.push(Region { address, length, offset });
            offset += length;
        }
        let mut line = serde_json::to_vec(&regions).unwrap_or_default();
        line.push(b'\n');
        let fds = [faults.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        let slices = [IoSlice::new(&line)];
        rustix::net::sendmsg(stream, &slices, &mut ancillary, SendFlags::NOSIGNAL).host(what)?;
        self.faults = Some(faults);
        Ok(())
    }

    /// Whether memory is filled, too.
    pub fn has_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// For a disk's reads.
    pub fn disk(&self, disk: usize) -> DiskFilling {
        DiskFilling {
            stream: Arc::clone(&self.disks),
            disk: u8::try_from(disk).unwrap_or(u8::MAX),
            known: Mutex::default(),
        }
    }

    /// From now on, ends the machine when its memory cannot be had any more.
    pub fn watch(self, events: Arc<Events>, enter: Enter) -> Result<(), Failure> {
        let Some(memory) = self.memory else { return Ok(()) };
        let faults = self.faults;
        let watch = move || {
            let mut line = Vec::with_capacity(filling::MAX_LINE);
            if let Err(failure) = enter() {
                line.extend(failure.to_string().bytes());
            } else {
                // What comes is the end, whatever it is. This thread never touches guest memory.
                let mut byte = [0];
                while line.len() < filling::MAX_LINE
                    // Not `recv`, which the filter knows for the event loop only.
                    && matches!(rustix::io::read(&memory, &mut byte), Ok(1))
                    && byte[0] != b'\n'
                {
                    line.push(byte[0]);
                }
            }
            let detail = match String::from_utf8_lossy(&line).into_owned() {
                silent if silent.is_empty() => "what fills its memory is gone".to_owned(),
                said => said,
            };
            // Only now: without it, what is missing would read as zeroes.
            let _faults = faults;
            events.send(&Event::Stopped { reason: StopReason::Crash, detail });
            // SAFETY: `_exit` only ends the process; other threads may be waiting for memory.
            unsafe { libc::_exit(1) }
        };
        std::thread::Builder::new()
            .name("filling".into())
            .spawn(watch)
            .map(drop)
            .map_err(|source| Failure::Host { what: "starting the watch over memory", source })
    }
}

impl DiskFilling {
    /// Waits until the bytes of a file are there.
    pub fn ensure(&self, layer: Layer, offset: u64, len: u64) -> io::Result<()> {
        let (first, end) = (offset / PIECE, (offset + len).div_ceil(PIECE));
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = &mut known[usize::from(layer == Layer::Overlay)];
        let words = usize::try_from(end.div_ceil(64)).map_err(io::Error::other)?;
        if known.len() < words {
            known.resize(words, 0);
        }
        let bit = |piece: u64| ((piece / 64) as usize, 1u64 << (piece % 64));
        let mut at = first;
        while at < end {
            let (word, mask) = bit(at);
            if known[word] & mask != 0 {
                at += 1;
                continue;
            }
            // As many as are missing in a row.
            let mut stop = at + 1;
            while stop < end && (stop - at) * PIECE < MAX_ASK && {
                let (word, mask) = bit(stop);
                known[word] & mask == 0
            } {
                stop += 1;
            }
            let len = u32::try_from((stop - at) * PIECE).map_err(io::Error::other)?;
            let ask = Ask { disk: self.disk, layer, len, offset: at * PIECE };
            let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            stream.write_all(&ask.encode())?;
            filling::read_answer(&mut *stream)?.map_err(io::Error::other)?;
            drop(stream);
            for piece in at..stop {
                let (word, mask) = bit(piece);
                known[word] |= mask;
            }
            at = stop;
        }
        Ok(())
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
