//! Overwriting free memory with zeros, so that a snapshot does not carry what was freed.
//!
//! A child takes almost all free memory, which the kernel clears page by page as it hands it out,
//! and exits. It offers itself to the out-of-memory killer first, leaves the kernel its reserves
//! and looks at what is free before each portion, so nothing else ever suffers.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::ptr;

use parbake_protocol::agent::ZeroFill;

use crate::children::Children;
use crate::spawn::pipe;

/// Taken at a time. Large enough for huge pages, small enough to look around in between.
const PORTION: u64 = 16 << 20;

/// Less is not worth a system call.
const SMALLEST: u64 = 64 << 10;

const PAGE: u64 = 4096;

/// Does all passes; returns the bytes overwritten in the last.
///
/// # Errors
/// The child could not be started, or was killed.
pub fn fill(request: &ZeroFill, children: &Children) -> io::Result<u64> {
    // Huge pages halve the time, and small guests have them switched off. The kernel shall hand out
    // those it has and not move others' pages around to make more.
    let reserve = fs::read_to_string(RESERVE);
    let _huge = Setting::change("/sys/kernel/mm/transparent_hugepage/enabled", "always");
    let _quick = Setting::change("/sys/kernel/mm/transparent_hugepage/defrag", "never");
    if let Ok(reserve) = reserve {
        // Switching them on has raised it, for good.
        fs::write(RESERVE, reserve)?;
    }
    let margin = request.margin_bytes.saturating_add(low_water());
    let limit = request.limit_bytes.unwrap_or(u64::MAX);
    let mut bytes = 0;
    for _ in 0..request.passes.clamp(1, 8) {
        bytes = pass(margin, limit, children)?;
    }
    Ok(bytes)
}

/// What the kernel keeps free for itself.
const RESERVE: &str = "/proc/sys/vm/min_free_kbytes";

/// A kernel setting with alternatives, changed while this lives.
struct Setting {
    path: &'static str,
    old: Option<String>,
}

impl Setting {
    fn change(path: &'static str, value: &str) -> Self {
        // The alternative in force is the one in brackets.
        let old = fs::read_to_string(path).ok().and_then(|text| {
            text.split_whitespace()
                .find_map(|w| w.strip_prefix('[')?.strip_suffix(']').map(str::to_owned))
        });
        let changed = old.as_deref().is_some_and(|o| o != value) && fs::write(path, value).is_ok();
        Self { path, old: old.filter(|_| changed) }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Some(old) = &self.old {
            let _ = fs::write(self.path, old);
        }
    }
}

fn pass(margin: u64, limit: u64, children: &Children) -> io::Result<u64> {
    let (report, reporter) = pipe()?;
    let child = children.start(
        || {
            // SAFETY: the child only runs `take_all`, which makes system calls and touches its own
            // stack, and ends in _exit.
            match unsafe { libc::fork() } {
                -1 => Err(io::Error::last_os_error()),
                0 => take_all(margin, limit, reporter.as_raw_fd()),
                pid => Ok(pid),
            }
        },
        |pid| *pid,
    )?;
    drop(reporter);
    let mut answer = [0; 8];
    let heard = File::from(report).read_exact(&mut answer);
    // The memory is free again only once the child is gone.
    // SAFETY: a null status pointer is allowed; the child is ours and awaited.
    while unsafe { libc::waitpid(child, ptr::null_mut(), 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    children.reaped(child);
    heard
        .map_err(|_| io::Error::other("the kernel ended the pass early; leave a larger margin"))?;
    Ok(u64::from_ne_bytes(answer))
}

/// In the child: takes memory until only the margin is free, reports, exits.
fn take_all(margin: u64, limit: u64, reporter: i32) -> ! {
    let mut taken = 0u64;
    // SAFETY: system calls only. Every mapping is fresh and private, and nothing refers to it; the
    // pages of a mapping that could not be populated are touched within its bounds.
    unsafe {
        let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        if score >= 0 {
            libc::write(score, c"1000".as_ptr().cast(), 4);
        }
        loop {
            let mut info: libc::sysinfo = std::mem::zeroed();
            if libc::sysinfo(&raw mut info) < 0 {
                break;
            }
            let free = info.freeram.saturating_mul(info.mem_unit.into());
            let wanted = free.saturating_sub(margin).min(PORTION).min(limit.saturating_sub(taken))
                / PAGE
                * PAGE;
            if wanted < SMALLEST {
                break;
            }
            let length = wanted as usize;
            let memory = libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if memory == libc::MAP_FAILED {
                break;
            }
            libc::madvise(memory, length, libc::MADV_HUGEPAGE);
            if libc::madvise(memory, length, libc::MADV_POPULATE_WRITE) < 0 {
                if *libc::__errno_location() != libc::EINVAL {
                    break;
                }
                // Before 5.14: a write to each page.
                for offset in (0..length).step_by(PAGE as usize) {
                    memory.cast::<u8>().add(offset).write_volatile(0);
                }
            }
            taken += wanted;
        }
        let answer = taken.to_ne_bytes();
        libc::write(reporter, answer.as_ptr().cast(), answer.len());
        libc::_exit(0)
    }
}

/// Bytes below which the kernel starts to reclaim: the zones' high-water marks.
fn low_water() -> u64 {
    let zones = fs::read_to_string("/proc/zoneinfo").unwrap_or_default();
    zones
        .lines()
        .filter_map(|l| l.trim_start().strip_prefix("high "))
        .filter_map(|n| n.trim().parse::<u64>().ok())
        .fold(0, |sum, pages| sum.saturating_add(pages.saturating_mul(PAGE)))
}
