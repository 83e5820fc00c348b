//! Starting a program: fork, become the user in its session and cgroup, exec.
//!
//! Between fork and exec the child of a process with threads may only make system calls: another
//! thread could have held the allocator's lock. So everything is laid out before the fork, and the
//! child reports the step that failed and its errno through a pipe that exec closes.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::ptr;

use libc::{c_char, c_int};
use parbake_protocol::agent::{Bytes, Failure, FailureKind};
use rustix::process::{Pid, PidfdFlags};

use crate::children::Children;
use crate::connection::failure;
use crate::users::User;

/// A program ready to be started.
#[derive(Debug)]
pub struct Program<'a> {
    /// Program and arguments; not empty.
    pub argv: &'a [Bytes],
    /// `NAME=value` entries.
    pub env: &'a [Bytes],
    /// Paths to try for the program, in order.
    pub candidates: &'a [Bytes],
    /// Working directory.
    pub cwd: &'a [u8],
    /// Who it runs as.
    pub user: &'a User,
    /// Its standard input, output and error.
    pub stdio: [&'a OwnedFd; 3],
    /// The first of `stdio` is its controlling terminal.
    pub terminal: bool,
    /// The cgroup it joins: an open `cgroup.procs`.
    pub cgroup: Option<&'a OwnedFd>,
}

/// A program that runs. Its exit status must be collected.
#[derive(Debug)]
pub struct Running {
    /// Its pid, session and process group.
    pub pid: i32,
    /// Readable once it has exited.
    pub pidfd: OwnedFd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    Session = 1,
    Stdio,
    Cgroup,
    User,
    Cwd,
    Exec,
}

/// Starts a program. The child counts as awaited in `children`.
///
/// # Errors
/// What a shell would call 126 or 127, a bad user or directory, or a kernel limit.
pub fn spawn(program: &Program<'_>, children: &Children) -> Result<Running, Failure> {
    let argv = strings(program.argv, "an argument")?;
    let env = strings(program.env, "an environment entry")?;
    let candidates = strings(program.candidates, "the command")?;
    let cwd = string(program.cwd, "the working directory")?;
    let system = |e: io::Error| failure(FailureKind::System, format!("cannot start: {e}"));
    let (report, reporter) = pipe().map_err(system)?;
    let plan = Plan {
        argv: pointers(&argv),
        env: pointers(&env),
        candidates: candidates.iter().map(|c| c.as_c_str()).collect(),
        cwd: &cwd,
        uid: program.user.uid,
        gid: program.user.gid,
        groups: &program.user.groups,
        stdio: program.stdio.map(AsRawFd::as_raw_fd),
        terminal: program.terminal,
        cgroup: program.cgroup.map_or(-1, AsRawFd::as_raw_fd),
        reporter: reporter.as_raw_fd(),
        // SAFETY: no arguments, no failure.
        privileged: unsafe { libc::geteuid() } == 0,
    };
    let running = children.start(|| fork(&plan), |r| r.pid).map_err(system)?;
    drop(reporter);
    let mut answer = [0u8; 5];
    match File::from(report).read_exact(&mut answer) {
        // The pipe closed without a word: exec has happened.
        Err(_) => Ok(running),
        Ok(()) => {
            let _ = rustix::process::waitid(
                rustix::process::WaitId::PidFd(running.pidfd.as_fd()),
                rustix::process::WaitIdOptions::EXITED,
            );
            children.reaped(running.pid);
            let [stage, errno @ ..] = answer;
            Err(explain(stage, i32::from_ne_bytes(errno), program))
        }
    }
}

fn explain(stage: u8, errno: i32, program: &Program<'_>) -> Failure {
    let error = io::Error::from_raw_os_error(errno);
    let command = String::from_utf8_lossy(program.argv.first().map_or(&[], Vec::as_slice));
    let at = |s: Stage| stage == s as u8;
    if at(Stage::Cwd) {
        let cwd = String::from_utf8_lossy(program.cwd);
        return failure(FailureKind::BadCwd, format!("cannot enter the directory {cwd}: {error}"));
    }
    if at(Stage::User) {
        let User { uid, gid, .. } = program.user;
        return failure(FailureKind::System, format!("cannot become user {uid}:{gid}: {error}"));
    }
    if at(Stage::Cgroup) {
        return failure(FailureKind::System, format!("cannot join the user cgroup: {error}"));
    }
    if !at(Stage::Exec) {
        return failure(FailureKind::System, format!("cannot prepare the program: {error}"));
    }
    let exists = program.candidates.iter().any(|c| {
        let path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(c);
        std::fs::symlink_metadata(path).is_ok()
    });
    match errno {
        libc::ENOENT | libc::ENOTDIR if !exists => {
            let place = if command.contains('/') { "" } else { " in the guest's PATH" };
            failure(FailureKind::NotFound, format!("{command}: not found{place}"))
        }
        libc::ENOENT => failure(
            FailureKind::NotExecutable,
            format!("{command}: exists, but its interpreter or loader does not"),
        ),
        libc::ENOEXEC => failure(
            FailureKind::NotExecutable,
            format!("{command}: not a program for this machine, and no #! line"),
        ),
        libc::E2BIG => failure(
            FailureKind::BadRequest,
            format!("{command}: arguments and environment are too long"),
        ),
        _ => failure(FailureKind::NotExecutable, format!("{command}: {error}")),
    }
}

fn string(bytes: &[u8], what: &str) -> Result<CString, Failure> {
    CString::new(bytes)
        .map_err(|_| failure(FailureKind::BadRequest, format!("{what} contains a NUL byte")))
}

fn strings(list: &[Bytes], what: &str) -> Result<Vec<CString>, Failure> {
    list.iter().map(|s| string(s, what)).collect()
}

fn pointers(list: &[CString]) -> Vec<*const c_char> {
    list.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// A pipe whose ends exec closes.
///
/// # Errors
/// No descriptor left.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Everything the child needs, with nothing left to allocate.
struct Plan<'a> {
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    candidates: Vec<&'a CStr>,
    cwd: &'a CStr,
    uid: u32,
    gid: u32,
    groups: &'a [u32],
    stdio: [RawFd; 3],
    terminal: bool,
    cgroup: RawFd,
    reporter: RawFd,
    privileged: bool,
}

fn fork(plan: &Plan<'_>) -> io::Result<Running> {
    // SAFETY: the child only runs `child`, which makes system calls and touches memory laid out
    // before the fork, and ends in exec or _exit.
    let pid = unsafe { libc::fork() };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => child(plan),
        pid => {
            // Not reaped by anyone yet, so the pid is still this child's.
            let handle = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidData)?;
            match rustix::process::pidfd_open(handle, PidfdFlags::empty()) {
                Ok(pidfd) => Ok(Running { pid, pidfd }),
                Err(e) => {
                    let _ = crate::kernel::kill(pid, libc::SIGKILL);
                    // SAFETY: a null status pointer is allowed; the child was just killed.
                    unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
                    Err(e.into())
                }
            }
        }
    }
}

/// In the child: becomes the program, or reports why not.
fn child(plan: &Plan<'_>) -> ! {
    let (stage, errno) = become_program(plan);
    let e = errno.to_ne_bytes();
    let answer = [stage as u8, e[0], e[1], e[2], e[3]];
    // SAFETY: the buffer is valid for its length; the descriptor is the pipe's. _exit runs nothing
    // of this process' own.
    unsafe {
        libc::write(plan.reporter, answer.as_ptr().cast(), answer.len());
        libc::_exit(127)
    }
}

/// Returns only if a step failed, with its errno.
fn become_program(plan: &Plan<'_>) -> (Stage, c_int) {
    // SAFETY: system calls on plain numbers and on memory that the plan keeps alive; all strings
    // and lists are NUL-terminated; the process has one thread and ends right after a failure.
    unsafe {
        if libc::setsid() < 0 {
            return (Stage::Session, errno());
        }
        // Above the standard streams, so that no dup2 below overwrites a source still needed.
        let mut stdio = [-1; 3];
        for (to, from) in stdio.iter_mut().zip(plan.stdio) {
            *to = libc::fcntl(from, libc::F_DUPFD_CLOEXEC, 3);
            if *to < 0 {
                return (Stage::Stdio, errno());
            }
        }
        for (number, fd) in (0..).zip(stdio) {
            if libc::dup2(fd, number) < 0 {
                return (Stage::Stdio, errno());
            }
        }
        if plan.terminal && libc::ioctl(0, libc::TIOCSCTTY as _, 0) < 0 {
            return (Stage::Session, errno());
        }
        if plan.cgroup >= 0 && libc::write(plan.cgroup, c"0".as_ptr().cast(), 1) < 0 {
            return (Stage::Cgroup, errno());
        }
        // The agent may be shielded from the out-of-memory killer; programs are not.
        let score =
            libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if score >= 0 {
            libc::write(score, c"0".as_ptr().cast(), 1);
            libc::close(score);
        }
        // Ignored signals and the mask survive exec; a program expects the defaults.
        // The library refuses those it uses itself, so the kernel is asked: a sigaction of zeros
        // is the default action; SIGKILL and SIGSTOP refuse, which is as good.
        let default = [0usize; 4];
        for signal in 1..=64 {
            let nothing = ptr::null_mut::<usize>();
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), nothing, 8usize);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        libc::umask(0o022);
        if plan.privileged {
            // Raw calls: the library's own broadcast to all threads, of which there is one.
            let groups = plan.groups;
            if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
                || libc::syscall(libc::SYS_setresgid, plan.gid, plan.gid, plan.gid) < 0
                || libc::syscall(libc::SYS_setresuid, plan.uid, plan.uid, plan.uid) < 0
            {
                return (Stage::User, errno());
            }
        } else if libc::geteuid() != plan.uid {
            return (Stage::User, libc::EPERM);
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return (Stage::Cwd, errno());
        }
        // Descriptors somebody opened without close-on-exec stay here. Old kernels: they do not.
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        let mut reason = libc::ENOENT;
        for candidate in &plan.candidates {
            libc::execve(candidate.as_ptr(), plan.argv.as_ptr(), plan.env.as_ptr());
            match errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                // Found but not allowed: a later directory may have one that is.
                libc::EACCES => reason = libc::EACCES,
                other => return (Stage::Exec, other),
            }
        }
        (Stage::Exec, reason)
    }
}

fn errno() -> c_int {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *libc::__errno_location() }
}
