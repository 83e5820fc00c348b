//! Answering a machine's first touches of its memory (userfaultfd(2)).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use parbake_protocol::filling::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PAGE: u64 = 4096;
/// How far pages may lie from one that is touched to come along with it: 2 MiB.
const WINDOW: u64 = 512;
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
    /// A flag for each page of the image that was filled.
    filled: Vec<bool>,
}

/// Where a pager's bytes come from.
pub struct Source<'a> {
    /// Waits until bytes of the image are there.
    pub ensure: &'a dyn Fn(std::ops::Range<u64>) -> Result<(), String>,
    /// Whether they are wanted soon and there, without waiting.
    pub is_there: &'a dyn Fn(std::ops::Range<u64>) -> bool,
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
        let pages = usize::try_from(size.div_ceil(PAGE)).map_err(io::Error::other)?;
        Ok(Self { faults, regions, image, filled: vec![false; pages] })
    }

    /// Answers faults until `stop` says so.
    ///
    /// # Errors
    /// When memory cannot be had; the machine must end then.
    pub fn serve(&mut self, stop: &dyn Fn() -> bool, source: &Source<'_>) -> Result<(), String> {
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
                    self.fill(address, source)?;
                }
            }
        }
        Ok(())
    }

    fn fill(&mut self, address: u64, source: &Source<'_>) -> Result<(), String> {
        let region = *self
            .regions
            .iter()
            .find(|region| (region.address..region.address + region.length).contains(&address))
            .ok_or("a fault outside of the machine's memory")?;
        let offset = region.offset + (address - region.address) / PAGE * PAGE;
        let page = offset / PAGE;
        if self.is_filled(page) {
            // Another processor touched it before it was filled.
            return self.wake(region.address + (offset - region.offset), PAGE);
        }
        (source.ensure)(offset..offset + PAGE)?;
        // What is wanted soon, lies near, and is there already comes along.
        let window = page / WINDOW * WINDOW;
        let within = window.max(region.offset / PAGE)
            ..(window + WINDOW).min((region.offset + region.length) / PAGE);
        let comes = |at: u64| {
            at == page || !self.is_filled(at) && (source.is_there)(at * PAGE..(at + 1) * PAGE)
        };
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for at in within.filter(|at| comes(*at)) {
            match runs.last_mut() {
                Some(run) if run.end == at => run.end = at + 1,
                _ => runs.push(at..at + 1),
            }
        }
        // The one that is waited for first.
        runs.sort_by_key(|run| !run.contains(&page));
        for run in runs {
            let len = usize::try_from((run.end - run.start) * PAGE).map_err(|e| e.to_string())?;
            let mut bytes = vec![0; len];
            self.image.read_exact_at(&mut bytes, run.start * PAGE).map_err(|e| e.to_string())?;
            let target = region.address + (run.start * PAGE - region.offset);
            for page in run {
                let flag = usize::try_from(page).ok().and_then(|page| self.filled.get_mut(page));
                flag.into_iter().for_each(|flag| *flag = true);
            }
            self.place(target, &bytes)?;
        }
        Ok(())
    }

    fn is_filled(&self, page: u64) -> bool {
        usize::try_from(page).ok().and_then(|page| self.filled.get(page)) == Some(&true)
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

/// Whether a machine that this process starts may have its faults answered, the kernel's touches
/// included. Without that, its memory must be whole before it starts.
///
/// # Errors
/// Why not: the kernel lets only those with `CAP_SYS_PTRACE` do so, unless it is told otherwise
/// (`vm.unprivileged_userfaultfd`), and a container's filter may forbid it altogether.
pub fn available() -> io::Result<()> {
    let flags = rustix::mm::UserfaultfdFlags::CLOEXEC | rustix::mm::UserfaultfdFlags::NONBLOCK;
    // SAFETY: creates a descriptor, with which nothing is registered.
    unsafe { rustix::mm::userfaultfd(flags) }.map(drop).map_err(io::Error::from)
}
