//! Answering a machine's first touches of its memory (userfaultfd(2)).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use parbake_protocol::filling::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Memory is filled in pieces of this size: what is touched once is mostly touched around, too.
pub const PIECE: u64 = 64 * 1024;
const PAGE: u64 = 4096;
/// `UFFD_EVENT_PAGEFAULT` (Linux, `include/uapi/linux/userfaultfd.h`).
const EVENT_PAGEFAULT: u8 = 0x12;
/// `struct uffd_msg`.
const MESSAGE: usize = 32;

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPage {
    start: u64,
    len: u64,
    mode: u64,
    zeroed: i64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

const UFFDIO_WAKE: libc::Ioctl = 0x8010_aa02_u32 as libc::Ioctl;
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03_u32 as libc::Ioctl;
const UFFDIO_ZEROPAGE: libc::Ioctl = 0xc020_aa04_u32 as libc::Ioctl;

/// Another process's memory, filled from an image as it is touched.
pub struct Pager {
    faults: OwnedFd,
    regions: Vec<Region>,
    image: File,
    /// A flag for each piece of the image that was filled.
    filled: Vec<bool>,
}

impl Pager {
    /// Takes over the faults of `regions`.
    ///
    /// # Errors
    /// When the regions make no sense.
    pub fn new(faults: OwnedFd, regions: Vec<Region>, image: File) -> io::Result<Self> {
        let size = image.metadata()?.len();
        let sound = regions.iter().all(|region| {
            region.address % PAGE == 0
                && region.length % PAGE == 0
                && region.offset % PAGE == 0
                && region.address.checked_add(region.length).is_some()
                && region.offset.checked_add(region.length).is_some_and(|end| end <= size)
        });
        if !sound {
            return Err(io::Error::other("the monitor's memory regions make no sense"));
        }
        let pieces = usize::try_from(size.div_ceil(PIECE)).map_err(io::Error::other)?;
        Ok(Self { faults, regions, image, filled: vec![false; pieces] })
    }

    /// Answers faults until `stop` says so. `ensure` waits until bytes of the image are there.
    ///
    /// # Errors
    /// When memory cannot be had; the machine must end then.
    pub fn serve(
        &mut self,
        stop: &dyn Fn() -> bool,
        ensure: &dyn Fn(std::ops::Range<u64>) -> Result<(), String>,
    ) -> Result<(), String> {
        let text = |error: rustix::io::Errno| error.to_string();
        while !stop() {
            let wait = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let mut fds = [PollFd::new(&self.faults, PollFlags::IN)];
            match poll(&mut fds, Some(&wait)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(text(error)),
            }
            let mut messages = [0u8; 16 * MESSAGE];
            let count = match rustix::io::read(self.faults.as_fd(), &mut messages) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(text(error)),
            };
            for message in messages[..count].chunks_exact(MESSAGE) {
                // event, three reserved bytes and four more, flags, address.
                let address = message[16..24].try_into().map(u64::from_le_bytes);
                if let (EVENT_PAGEFAULT, Ok(address)) = (message[0], address) {
                    self.fill(address, ensure)?;
                }
            }
        }
        Ok(())
    }

    fn fill(
        &mut self,
        address: u64,
        ensure: &dyn Fn(std::ops::Range<u64>) -> Result<(), String>,
    ) -> Result<(), String> {
        let region = self
            .regions
            .iter()
            .find(|region| (region.address..region.address + region.length).contains(&address))
            .ok_or("a fault outside of the machine's memory")?;
        let at = region.offset + (address - region.address);
        let piece = at / PIECE;
        let start = (piece * PIECE).max(region.offset);
        let end = ((piece + 1) * PIECE).min(region.offset + region.length);
        let target = region.address + (start - region.offset);
        let index = usize::try_from(piece).map_err(|error| error.to_string())?;
        // Two regions may share a piece of the image, but not what was filled of it.
        let whole = end - start == PIECE;
        if whole && self.filled.get(index) == Some(&true) {
            // Another processor touched it before it was filled.
            return self.wake(target, end - start);
        }
        ensure(start..end)?;
        let mut bytes = vec![0; usize::try_from(end - start).map_err(|e| e.to_string())?];
        self.image.read_exact_at(&mut bytes, start).map_err(|error| error.to_string())?;
        if whole && let Some(filled) = self.filled.get_mut(index) {
            *filled = true;
        }
        self.place(target, &bytes)
    }

    /// Puts bytes where nothing is yet.
    fn place(&self, target: u64, bytes: &[u8]) -> Result<(), String> {
        match self.place_once(target, bytes) {
            Ok(()) => Ok(()),
            // A part of it is there: one page at a time, then.
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                for (page, at) in bytes.chunks(PAGE as usize).zip((target..).step_by(PAGE as usize))
                {
                    match self.place_once(at, page) {
                        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => {
                            return self.gone(&error);
                        }
                        _ => {}
                    }
                }
                self.wake(target, bytes.len() as u64)
            }
            Err(error) => self.gone(&error),
        }
    }

    fn place_once(&self, target: u64, bytes: &[u8]) -> io::Result<()> {
        let fd = self.faults.as_raw_fd();
        let len = bytes.len() as u64;
        loop {
            let result = if bytes.iter().all(|byte| *byte == 0) {
                let mut zero = ZeroPage { start: target, len, mode: 0, zeroed: 0 };
                // SAFETY: the structure is what this request reads and writes; it changes the memory
                // of the process that has registered it, and only where nothing is.
                unsafe { libc::ioctl(fd, UFFDIO_ZEROPAGE, &raw mut zero) }
            } else {
                let src = bytes.as_ptr() as u64;
                let mut copy = Copy { dst: target, src, len, mode: 0, copied: 0 };
                // SAFETY: as above; the source is readable for `len` bytes.
                unsafe { libc::ioctl(fd, UFFDIO_COPY, &raw mut copy) }
            };
            if result >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            // The other side's mappings are changing this moment.
            if error.raw_os_error() != Some(libc::EAGAIN) {
                return Err(error);
            }
            std::thread::yield_now();
        }
    }

    /// A process that has ended needs no memory.
    fn gone(&self, error: &io::Error) -> Result<(), String> {
        match error.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Ok(()),
            _ => Err(format!("guest memory cannot be filled: {error}")),
        }
    }

    fn wake(&self, start: u64, len: u64) -> Result<(), String> {
        let mut range = Range { start, len };
        // SAFETY: the structure is what this request reads.
        let result = unsafe { libc::ioctl(self.faults.as_raw_fd(), UFFDIO_WAKE, &raw mut range) };
        if result < 0 { self.gone(&io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Whether this process may let another's faults be answered, kernel's touches included.
#[must_use]
pub fn available() -> bool {
    let flags = rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK;
    // SAFETY: creates a descriptor, with which nothing is registered.
    unsafe { rustix::mm::userfaultfd(flags) }.is_ok()
}
