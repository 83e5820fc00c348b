//! The processes of a lab: found by the sockets in their command lines, so that a crash between
//! start and record, a reused process number or a removed record can neither hide one nor hit
//! another.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A running process of a lab.
#[derive(Debug)]
pub(super) struct Process {
    pub pid: i32,
    pub emulator: bool,
    handle: OwnedFd,
}

/// Whether a command line is one of the lab in `state`; if so, whether it is the emulator's.
fn recognize(command_line: &[u8], state: &Path) -> Option<bool> {
    let mut arguments = command_line.split(|byte| *byte == 0);
    let program = arguments.next()?.rsplit(|byte| *byte == b'/').next()?;
    let emulator = program.starts_with(b"qemu-system");
    if !emulator && program != b"virtiofsd" {
        return None;
    }
    let state = state.as_os_str().as_bytes();
    let ours = |argument: &[u8]| {
        [b"/root.sock".as_slice(), b"/store.sock"].into_iter().any(|socket| {
            let path = argument.strip_suffix(socket).and_then(|rest| rest.strip_suffix(state));
            path.is_some_and(|before| before.ends_with(b"="))
        })
    };
    arguments.any(ours).then_some(emulator)
}

/// The processes of the lab in `state`.
pub(super) fn find(state: &Path) -> io::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let read = || recognize(&fs::read(format!("/proc/{pid}/cmdline")).ok()?, state);
        if read().is_none() {
            continue;
        }
        let Some(number) = Pid::from_raw(pid) else { continue };
        let Ok(handle) = pidfd_open(number, PidfdFlags::empty()) else { continue };
        // Looked at again now that the handle holds it: the number may have changed hands.
        if let Some(emulator) = read() {
            found.push(Process { pid, emulator, handle });
        }
    }
    Ok(found)
}

impl Process {
    fn ended(&self, wait: Duration) -> bool {
        let mut fds = [PollFd::new(&self.handle, PollFlags::IN)];
        let timeout =
            Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: wait.subsec_nanos().into() };
        matches!(poll(&mut fds, Some(&timeout)), Ok(count) if count > 0)
    }
}

/// Waits until all have ended; false when the time is over.
pub(super) fn wait_for_end(processes: &[Process], limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    processes
        .iter()
        .all(|process| process.ended(deadline.saturating_duration_since(Instant::now())))
}

/// Ends all processes of the lab in `state` and returns once they are gone.
pub(super) fn end_all(state: &Path) -> io::Result<()> {
    let processes = find(state)?;
    for (signal, limit) in
        [(Signal::TERM, Duration::from_secs(2)), (Signal::KILL, Duration::from_secs(10))]
    {
        for process in &processes {
            // One that ended by itself meanwhile is what was wanted.
            let _ = pidfd_send_signal(&process.handle, signal);
        }
        if wait_for_end(&processes, limit) {
            return Ok(());
        }
    }
    let left = processes.iter().find(|process| !process.ended(Duration::ZERO));
    let pid = left.map_or(0, |process| process.pid);
    Err(io::Error::other(format!("process {pid} does not end")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_of_this_lab_are_recognized() {
        let state = Path::new("/run/parbake/lab-1");
        let cases: [(&[u8], Option<bool>); 7] = [
            (b"/usr/lib/qemu/virtiofsd\0--socket-path=/run/parbake/lab-1/root.sock\0", Some(false)),
            (
                b"qemu-system-x86_64\0-chardev\0socket,id=s,path=/run/parbake/lab-1/store.sock\0",
                Some(true),
            ),
            (b"virtiofsd\0--socket-path=/run/parbake/lab-12/root.sock\0", None),
            (b"virtiofsd\0--socket-path=/other/run/parbake/lab-1/root.sock\0", None),
            (b"vi\0--socket-path=/run/parbake/lab-1/root.sock\0", None),
            (b"qemu-system-x86_64\0-version\0", None),
            (b"", None),
        ];
        for (line, expected) in cases {
            assert_eq!(recognize(line, state), expected, "{}", String::from_utf8_lossy(line));
        }
    }
}
