//! Starting a monitor where it finds part of its jail ready.
//!
//! A process inherits its namespaces and its cgroup. What a monitor would have to make for itself
//! while somebody waits (an empty network namespace) it is given, and what it cannot make without
//! starting another process (a process-id namespace) it is given too. And it is started inside its
//! cgroup, as moving a running process there makes the kernel wait for all processors:
//!
//! ```text
//! cgroup 2            one system call does it all      kernel::spawn_in_cgroup
//! cgroup 1, or none   from a thread that is already in the groups and namespaces
//! no rights           as it is; the monitor makes what it can, and the active layers tell
//! ```

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::limits::cgroup::Cgroup;
use crate::network::kernel;

/// A process that was started.
#[derive(Debug)]
pub(crate) enum Launched {
    /// By the standard library.
    Child(Child),
    /// By us: its number, and a descriptor of it.
    Held(u32, OwnedFd),
}

/// Starts `program` with `arguments`, an empty environment and `streams`, inside `group`. It is in a
/// process group of its own: Ctrl-C is for whoever holds the sandbox, who then ends it in order.
pub(crate) fn spawn(
    program: &Path,
    arguments: &[&str],
    streams: [OwnedFd; 3],
    group: Option<&Cgroup>,
) -> io::Result<Launched> {
    let root = rustix::process::geteuid().is_root();
    if let Some(directory) = group.filter(|_| root).and_then(Cgroup::unified) {
        let text = |text: &[u8]| CString::new(text).map_err(io::Error::other);
        let program = text(program.as_os_str().as_bytes())?;
        let arguments: Vec<CString> =
            arguments.iter().map(|word| text(word.as_bytes())).collect::<Result<_, _>>()?;
        let arguments: Vec<_> = arguments.iter().map(CString::as_c_str).collect();
        let directory = File::open(directory)?;
        let [input, output, error] = &streams;
        let (pid, fd) = kernel::spawn_in_cgroup(
            &program,
            &arguments,
            [input.as_fd(), output.as_fd(), error.as_fd()],
            empty_network().map(AsFd::as_fd),
            directory.as_fd(),
        )?;
        return Ok(Launched::Held(pid, fd));
    }
    let [input, output, error] = streams.map(Stdio::from);
    let mut command = Command::new(program);
    command.args(arguments).env_clear().stdin(input).stdout(output).stderr(error);
    command.process_group(0);
    if !root {
        let child = command.spawn()?;
        if let Some(group) = group {
            group.add(child.id()).map_err(io::Error::other)?;
        }
        return Ok(Launched::Child(child));
    }
    thread::scope(|scope| {
        let start = || {
            if let Some(group) = group {
                group.enter_thread().map_err(io::Error::other)?;
            }
            if let Some(empty) = empty_network() {
                let _ = move_into_link_name_space(empty.as_fd(), Some(LinkNameSpaceType::Network));
            }
            // For one child only: with the first process of a namespace all of it ends.
            let _ = kernel::new_process_namespace_for_children();
            command.spawn().map(Launched::Child)
        };
        let thread = thread::Builder::new().stack_size(64 << 10).spawn_scoped(scope, start)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")))
    })
}

/// A network namespace with nothing in it, for all monitors of this process.
fn empty_network() -> Option<&'static OwnedFd> {
    static EMPTY: OnceLock<Option<OwnedFd>> = OnceLock::new();
    EMPTY
        .get_or_init(|| {
            let make = || {
                kernel::new_network_namespace()?;
                File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
            };
            thread::spawn(make).join().ok()?.ok()
        })
        .as_ref()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;
    use crate::limits::cgroup::Shares;

    #[test]
    fn a_program_starts_inside_its_group_and_namespaces() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let shares = Shares { memory: 64 << 20, cpu_milli: 1000, pids: 8, io_weight: 100 };
        let id = format!("launch-{}", std::process::id());
        let group = Cgroup::create(&id, &shares).ok();
        let (mut reader, writer) = io::pipe().unwrap();
        let null = || File::open("/dev/null").map(OwnedFd::from).unwrap();
        let script = "echo $$; grep -c : /proc/net/dev; cat /proc/self/cgroup; env | wc -l";
        let streams = [null(), writer.into(), null()];
        let started =
            spawn(Path::new("/bin/sh"), &["-c", script], streams, group.as_ref()).unwrap();
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        match started {
            Launched::Child(mut child) => assert!(child.wait().unwrap().success()),
            Launched::Held(_, fd) => {
                let ended = waitid(WaitId::PidFd(fd.as_fd()), WaitIdOptions::EXITED).unwrap();
                assert_eq!(ended.unwrap().exit_status(), Some(0));
            }
        }
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[..2], ["1", "1"], "{said}");
        assert!(group.is_none() || said.contains(&id), "{said}");
        let missing = spawn(Path::new("/nowhere"), &[], [null(), null(), null()], group.as_ref());
        assert!(missing.is_err());
    }
}
