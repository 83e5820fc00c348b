//! Namespaces of the monitor's own, and a root directory with nothing in it but, where the guest
//! has a socket device, the directory of its sockets.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};
use rustix::thread::UnshareFlags;

use crate::error::Failure;

fn failed(what: &str) -> impl Fn(rustix::io::Errno) -> Failure {
    move |e| {
        Failure::Jail(format!(
            "{what}: {e}; allow unprivileged user namespaces, start the monitor as root, or switch \
             the layer off"
        ))
    }
}

/// Moves into fresh namespaces and an empty root; returns the namespaces' names.
pub(super) fn enter(keep: Option<&Path>) -> Result<Vec<&'static str>, Failure> {
    let mut flags = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    let mut names = vec!["mount", "ipc", "uts"];
    // A network namespace is half of this layer's cost, and taking it apart later slows down its
    // neighbours. A host that starts its monitors in an empty one spares both.
    if network_is_empty() {
        names.push("net(inherited, empty)");
    } else {
        flags |= UnshareFlags::NEWNET;
        names.push("net");
    }
    // That one takes another process to enter: a host that wants it starts its monitors in one.
    if rustix::process::getpid() == rustix::process::Pid::INIT {
        names.push("pid(inherited)");
    }
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if !user.is_root() {
        // Unprivileged, the others come only together with a user namespace.
        flags |= UnshareFlags::NEWUSER;
        names.push("user");
    }
    // SAFETY: the descriptor table stays shared with nobody, and the process has one thread.
    unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(failed("fresh namespaces"))?;
    if !user.is_root() {
        map_self(user.as_raw(), group.as_raw())?;
    }
    empty_root(keep)?;
    Ok(names)
}

/// Whether there is no interface but a loopback that is down.
fn network_is_empty() -> bool {
    let Ok(table) = std::fs::read_to_string("/proc/thread-self/net/dev") else { return false };
    // Two lines of headings, then a line for each interface.
    let mut names = table.lines().skip(2).filter_map(|line| line.split(':').next());
    let only_loopback = names.next().is_some_and(|name| name.trim() == "lo");
    only_loopback && names.next().is_none() && loopback_is_down().unwrap_or(false)
}

fn loopback_is_down() -> Option<bool> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let kind = (AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC);
    let socket = socket_with(kind.0, kind.1, kind.2, None).ok()?;
    // SAFETY: a structure of integers and bytes may be all zero.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed();
    }
    // SAFETY: the request names an interface and takes its flags; it lives through the call.
    let code = unsafe {
        libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&socket), libc::SIOCGIFFLAGS, &raw mut request)
    };
    // SAFETY: after success the kernel has filled in this member.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    (code == 0).then_some(libc::c_int::from(flags) & libc::IFF_UP == 0)
}

/// Keeps our user and group what they were, inside.
fn map_self(user: u32, group: u32) -> Result<(), Failure> {
    let write = |file: &str, text: String| {
        std::fs::write(file, text).map_err(|e| Failure::Jail(format!("{file}: {e}")))
    };
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    write("/proc/self/gid_map", format!("{group} {group} 1"))
}

fn empty_root(keep: Option<&Path>) -> Result<(), Failure> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(failed("private mounts"))?;
    // Taken before the new root can hide it.
    let kept = keep.map(|path| clone_tree(path).map(|tree| (path, tree))).transpose()?;
    // Any directory will do to mount on: nobody else sees it, and it is left in a moment.
    let place = ["/tmp", "/run", "/proc", "/dev"]
        .into_iter()
        .find(|place| Path::new(place).is_dir())
        .ok_or_else(|| Failure::Jail("no directory to build an empty root on".into()))?;
    let careful = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("none", place, "tmpfs", careful, Some(c"size=64k,nr_inodes=64,mode=0755"))
        .map_err(failed("an empty root"))?;
    if let Some((path, tree)) = kept {
        put_tree(Path::new(place), path, &tree)?;
    }
    rustix::mount::mount_remount(place, careful | MountFlags::RDONLY, c"")
        .map_err(failed("a read-only root"))?;
    rustix::process::chdir(place).map_err(failed("the new root"))?;
    match rustix::process::pivot_root(".", ".") {
        // The old root ends up over the new one, at the same place, and goes.
        Ok(()) => rustix::mount::unmount(".", UnmountFlags::DETACH)
            .map_err(failed("leaving the old root"))?,
        // The very first root of a system cannot be pivoted away from, but covered.
        Err(rustix::io::Errno::INVAL) => {
            rustix::mount::mount_move(".", "/").map_err(failed("covering the old root"))?;
            rustix::process::chroot(".").map_err(failed("the new root"))?;
        }
        Err(e) => return Err(failed("the new root")(e)),
    }
    rustix::process::chdir("/").map_err(failed("the new root"))
}

fn clone_tree(path: &Path) -> Result<OwnedFd, Failure> {
    rustix::mount::open_tree(
        CWD,
        path,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )
    .map_err(|e| Failure::Jail(format!("{}: {e}", path.display())))
}

/// Mounts `tree` in the new root where it was in the old one, so that paths stay true.
fn put_tree(root: &Path, path: &Path, tree: &OwnedFd) -> Result<(), Failure> {
    let mut target = PathBuf::from(root);
    for part in path.components() {
        match part {
            Component::RootDir | Component::CurDir | Component::Prefix(_) => continue,
            Component::ParentDir => {
                return Err(Failure::Config(format!(
                    "{} leads through a parent directory",
                    path.display()
                )));
            }
            Component::Normal(name) => target.push(name),
        }
        rustix::fs::mkdir(&target, Mode::from_raw_mode(0o755))
            .map_err(failed("a directory in the new root"))?;
    }
    let place = rustix::fs::open(&target, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed("a directory in the new root"))?;
    rustix::mount::move_mount(
        tree,
        "",
        &place,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
    .map_err(failed("the socket directory in the new root"))
}
