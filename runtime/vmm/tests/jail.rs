//! What is left to a monitor once its guest runs.

mod support;

use std::path::Path;

use parbake_protocol::vmm::{Jail, Request, VmmConfig};
use support::{Monitor, boot, guest, open_jail, spawn};

/// A running monitor, ready, with the names of its layers.
fn running(jail: Jail, vcpus: u8) -> (Monitor, Vec<String>) {
    let mut monitor = spawn(&VmmConfig { jail, vcpus, ..boot(&guest("ticker"), 16) });
    let (_, layers) = monitor.started();
    monitor.doorbell();
    // Answered by the event loop, which has entered its filter then.
    monitor.request(&Request::Status);
    (monitor, layers)
}

fn status(directory: &Path, field: &str) -> String {
    let text = std::fs::read_to_string(directory.join("status")).expect("status");
    let line = text.lines().find(|line| line.starts_with(field)).expect("field");
    line.split_once(':').expect("value").1.trim().to_owned()
}

fn namespace(pid: u32, name: &str) -> std::path::PathBuf {
    std::fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("namespace")
}

#[test]
fn every_thread_is_locked_in() {
    needs_kvm!();
    let (monitor, layers) = running(Jail::default(), 2);
    for wanted in ["seccomp", "empty_root", "no_new_privs", "no_capabilities", "namespace:net"] {
        assert!(layers.iter().any(|layer| layer == wanted), "{wanted} is not in {layers:?}");
    }
    assert!(layers.iter().any(|layer| layer.starts_with("landlock:")), "{layers:?}");
    let tasks: Vec<_> = std::fs::read_dir(format!("/proc/{}/task", monitor.child.id()))
        .expect("threads")
        .map(|entry| entry.expect("thread").path())
        // KVM's own, which never leaves the kernel.
        .filter(|task| !status(task, "Name").starts_with("kvm-"))
        .collect();
    assert_eq!(tasks.len(), 3, "two vCPUs and the event loop");
    for task in tasks {
        // Each enters its filter by itself, before it does anything else.
        let entered = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            status(&task, "Seccomp") == "2"
        });
        assert!(entered, "{task:?}");
        assert_eq!(status(&task, "NoNewPrivs"), "1", "{task:?}");
        for set in ["CapEff", "CapPrm", "CapInh"] {
            assert_eq!(status(&task, set), "0000000000000000", "{task:?} {set}");
        }
    }
    monitor.quit();
}

#[test]
fn its_root_is_empty_and_its_namespaces_are_its_own() {
    needs_kvm!();
    let (monitor, _) = running(Jail::default(), 1);
    let pid = monitor.child.id();
    assert_eq!(std::fs::read_dir(format!("/proc/{pid}/root/")).expect("root").count(), 0);
    assert_eq!(std::fs::read_dir(format!("/proc/{pid}/cwd/")).expect("cwd").count(), 0);
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).expect("mounts");
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    for name in ["mnt", "net", "ipc", "uts"] {
        assert_ne!(namespace(pid, name), namespace(std::process::id(), name), "{name}");
    }
    monitor.quit();
}

/// A host may start its monitors in an empty network namespace; then they stay there.
#[test]
fn an_empty_network_namespace_is_kept() {
    needs_kvm!();
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make a network namespace");
        return;
    }
    std::thread::spawn(|| {
        // SAFETY: only this thread moves; it shares nothing that depends on the namespace.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
            .expect("a network namespace");
        let own = std::fs::read_link("/proc/thread-self/ns/net").expect("namespace");
        let (monitor, layers) = running(Jail::default(), 1);
        assert_eq!(namespace(monitor.child.id(), "net"), own);
        assert!(layers.iter().any(|layer| layer == "namespace:net(inherited, empty)"));
        monitor.quit();
    })
    .join()
    .expect("thread");
}

#[test]
fn it_holds_nothing_it_does_not_need() {
    needs_kvm!();
    let (monitor, _) = running(Jail::default(), 1);
    // Its own, to write sparse images.
    let pagemap = format!("/proc/{}/pagemap", monitor.child.id());
    for entry in std::fs::read_dir(format!("/proc/{}/fd", monitor.child.id())).expect("fds") {
        let target = std::fs::read_link(entry.expect("fd").path()).expect("target");
        let target = target.to_string_lossy().into_owned();
        // Where this test's own output goes; the monitor inherits it.
        let own = [1, 2].iter().any(|number| {
            std::fs::read_link(format!("/proc/self/fd/{number}"))
                .is_ok_and(|path| path.as_os_str() == target.as_str())
        });
        let known = own
            || ["socket:", "pipe:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]"]
                .iter()
                .chain(
                    [
                        pagemap.as_str(),
                        "anon_inode:kvm-vm",
                        "anon_inode:kvm-vcpu",
                        "/dev/null",
                        "/dev/pts",
                    ]
                    .iter(),
                )
                .any(|known| target.starts_with(known));
        assert!(known, "it still holds {target}");
    }
    monitor.quit();
}

#[test]
fn it_becomes_the_user_it_is_told_to() {
    needs_kvm!();
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become somebody else");
        return;
    }
    let (monitor, layers) = running(Jail { user: Some((4242, 4343)), ..Jail::default() }, 1);
    assert!(layers.iter().any(|layer| layer == "user:4242:4343"), "{layers:?}");
    let directory = format!("/proc/{}", monitor.child.id());
    let four = |id: &str| [id; 4].join("\t");
    assert_eq!(status(Path::new(&directory), "Uid"), four("4242"));
    assert_eq!(status(Path::new(&directory), "Gid"), four("4343"));
    assert_eq!(status(Path::new(&directory), "Groups"), "");
    monitor.quit();
}

#[test]
fn layers_that_are_off_are_not_claimed() {
    needs_kvm!();
    let (monitor, layers) = running(open_jail(), 1);
    let off = ["seccomp", "landlock", "empty_root", "namespace"];
    assert!(!layers.iter().any(|layer| off.iter().any(|off| layer.starts_with(off))), "{layers:?}");
    assert_eq!(
        namespace(monitor.child.id(), "mnt"),
        namespace(std::process::id(), "mnt"),
        "namespaces were off"
    );
    monitor.quit();
}

/// What the two filters let through and what they kill, from inside: a child enters the filter and
/// makes one call.
mod filters {
    use parbake_vmm::jail::Filters;

    /// How a child ends that enters `filter` and makes `call`: its exit code, or its signal.
    fn ends(filter: impl FnOnce(&Filters), call: impl FnOnce() -> i64) -> Result<i32, i32> {
        let filters = Filters::compile().expect("filters");
        // SAFETY: the child makes system calls only and ends by `_exit`.
        match unsafe { libc::fork() } {
            0 => {
                filter(&filters);
                call();
                // SAFETY: ends the child.
                unsafe { libc::syscall(libc::SYS_exit_group, 7) };
                unreachable!()
            }
            child => {
                let mut status = 0;
                // SAFETY: `status` is valid for the call.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                if libc::WIFEXITED(status) {
                    Ok(libc::WEXITSTATUS(status))
                } else {
                    Err(libc::WTERMSIG(status))
                }
            }
        }
    }

    fn vcpu(filters: &Filters) {
        filters.enter_vcpu().expect("filter");
    }

    fn events(filters: &Filters) {
        filters.enter_events().expect("filter");
    }

    /// SAFETY of all calls below: no pointer among the arguments is valid, so nothing is touched.
    fn raw(number: i64, a: u64, b: u64, c: u64) -> i64 {
        // SAFETY: see above.
        unsafe { libc::syscall(number, a, b, c) }
    }

    #[test]
    fn allowed_calls_pass_and_others_kill() {
        use libc::*;
        let bad_fd = u64::from(u32::MAX);
        let killed = Err(SIGSYS);
        let exec = (PROT_READ | PROT_EXEC) as u64;
        // Number, three arguments, what a vCPU thread and what the event loop gets.
        let cases: [(&str, i64, u64, u64, u64, bool, bool); 19] = [
            ("read", SYS_read, bad_fd, 0, 0, true, true),
            ("write", SYS_write, bad_fd, 0, 0, true, true),
            ("KVM_RUN", SYS_ioctl, bad_fd, 0xae80, 0, true, false),
            ("KVM_GET_LAPIC", SYS_ioctl, bad_fd, 0x8400_ae8e, 0, false, true),
            ("KVM_SET_USER_MEMORY_REGION", SYS_ioctl, bad_fd, 0x4020_ae46, 0, false, false),
            ("KVM_CREATE_VM", SYS_ioctl, bad_fd, 0xae01, 0, false, false),
            ("TIOCSTI", SYS_ioctl, 0, 0x5412, 0, false, false),
            ("mmap", SYS_mmap, 0, 0, PROT_READ as u64, true, true),
            ("mmap exec", SYS_mmap, 0, 0, exec, false, false),
            ("mprotect exec", SYS_mprotect, 0, 0, exec, false, false),
            ("unix socket", SYS_socket, AF_UNIX as u64, SOCK_STREAM as u64, 0, false, true),
            ("inet socket", SYS_socket, AF_INET as u64, SOCK_STREAM as u64, 0, false, false),
            ("netlink socket", SYS_socket, AF_NETLINK as u64, SOCK_RAW as u64, 0, false, false),
            ("open", SYS_openat, bad_fd, 0, 0, false, false),
            ("execve", SYS_execve, 0, 0, 0, false, false),
            ("fork", SYS_fork, 0, 0, 0, false, false),
            ("ptrace", SYS_ptrace, 0, 0, 0, false, false),
            ("kill", SYS_kill, 0, 0, 0, false, false),
            ("setuid", SYS_setuid, 0, 0, 0, false, false),
        ];
        for (name, number, a, b, c, in_vcpu, in_events) in cases {
            let expected = |allowed| if allowed { Ok(7) } else { killed };
            assert_eq!(ends(vcpu, || raw(number, a, b, c)), expected(in_vcpu), "{name} in a vCPU");
            assert_eq!(
                ends(events, || raw(number, a, b, c)),
                expected(in_events),
                "{name} in the event loop"
            );
        }
    }
}
