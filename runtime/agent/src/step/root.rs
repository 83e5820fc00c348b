//! The root that a step's program sees, laid out as container runtimes do.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use parbake_protocol::agent::StepMount;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};

use super::os;
use crate::mounts;

const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// What every Linux program expects, in this order: kind, target, flags, options.
const SYSTEM: [(&str, &str, MountFlags, &str); 6] = [
    ("proc", "/proc", PLAIN, ""),
    ("tmpfs", "/dev", MountFlags::NOSUID.union(MountFlags::STRICTATIME), "mode=755,size=65536k"),
    (
        "devpts",
        "/dev/pts",
        MountFlags::NOSUID.union(MountFlags::NOEXEC),
        "newinstance,ptmxmode=0666,mode=0620,gid=5",
    ),
    ("tmpfs", "/dev/shm", PLAIN, "mode=1777,size=65536k"),
    ("mqueue", "/dev/mqueue", PLAIN, ""),
    ("sysfs", "/sys", PLAIN.union(MountFlags::RDONLY), ""),
];

/// Devices by name and number.
const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

const LINKS: [(&str, &str); 6] = [
    ("ptmx", "pts/ptmx"),
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("core", "/proc/kcore"),
];

/// What of the kernel is hidden, and what cannot be written.
const HIDDEN: [&str; 10] = [
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Links followed to a mount point before it is a loop.
const MOST_LINKS: usize = 40;

fn named(what: &str, path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
}

/// Keeps what is mounted from now on from everyone else.
pub fn stay_private() -> io::Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags).map_err(|e| named("make private", Path::new("/"), e))
}

/// Makes what is mounted at `path` the root, and leaves nothing of the old one.
pub fn change(path: &Path) -> io::Result<()> {
    let failed = |e: rustix::io::Errno| named("change the root to", path, e);
    std::env::set_current_dir(path)?;
    // The old root lies on the new one for a moment.
    rustix::process::pivot_root(".", ".").map_err(failed)?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).map_err(failed)?;
    std::env::set_current_dir("/")
}

/// Mounts what every program expects, and makes the devices.
pub fn system() -> io::Result<()> {
    for (kind, target, flags, options) in SYSTEM {
        match mounts::mount(kind, Path::new(target), kind, flags, options) {
            // A kernel without message queues.
            Err(_) if kind == "mqueue" => {}
            result => result?,
        }
    }
    for (name, major, minor) in DEVICES {
        let path = Path::new("/dev").join(name);
        // The mask of permissions is the caller's.
        mknodat(
            CWD,
            &path,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            makedev(major, minor),
        )
        .map_err(|e| named("make", &path, e))?;
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(&path, permissions).map_err(|e| named("make", &path, e))?;
    }
    for (name, target) in LINKS {
        if name == "core" && !Path::new(target).exists() {
            continue;
        }
        let path = Path::new("/dev").join(name);
        symlink(target, &path).map_err(|e| named("make", &path, e))?;
    }
    Ok(())
}

/// Attaches one of the step's mounts; its place is made if there is none.
pub fn attach(mount: &StepMount, tree: Option<&OwnedFd>) -> io::Result<()> {
    let target = resolve(Path::new(os(mount.target())))?;
    let Some(tree) = tree else {
        let StepMount::Memory { size, .. } = mount else { return Ok(()) };
        let mut options = "mode=1777".to_owned();
        if let Some(size) = size {
            options.push_str(&format!(",size={size}"));
        }
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        return mounts::mount("tmpfs", &target, "tmpfs", flags, &options);
    };
    let meta = rustix::fs::fstat(tree)?;
    if FileType::from_raw_mode(meta.st_mode).is_dir() {
        fs::create_dir_all(&target).map_err(|e| named("make", &target, e))?;
    } else if !target.exists() {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(|e| named("make", parent, e))?;
        }
        fs::File::create(&target).map_err(|e| named("make", &target, e))?;
    }
    rustix::mount::move_mount(tree, "", CWD, &target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|e| named("mount", &target, e))?;
    let read_only = match mount {
        StepMount::Tree { read_only, .. } => *read_only,
        StepMount::Socket { .. } => false,
        _ => true,
    };
    if read_only { protect(&target) } else { Ok(()) }
}

/// Hides and protects what a container's program does not get to see or to change.
pub fn hide() -> io::Result<()> {
    for path in HIDDEN.map(Path::new) {
        let Ok(meta) = fs::symlink_metadata(path) else { continue };
        if meta.is_dir() {
            mounts::mount("tmpfs", path, "tmpfs", PLAIN | MountFlags::RDONLY, "")?;
        } else {
            mounts::bind(Path::new("/dev/null"), path)?;
        }
    }
    for path in READ_ONLY.map(Path::new) {
        if path.exists() {
            mounts::bind(path, path)?;
            protect(path)?;
        }
    }
    Ok(())
}

/// Makes one mount read-only.
fn protect(target: &Path) -> io::Result<()> {
    rustix::mount::mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, "")
        .map_err(|e| named("protect", target, e))
}

/// Where a target really is, be it there or not. This process's root is the step's, so that no link
/// leads out.
fn resolve(target: &Path) -> io::Result<PathBuf> {
    let mut path = PathBuf::from("/");
    let mut left: Vec<PathBuf> = parts(target);
    let mut links = 0;
    while let Some(part) = left.pop() {
        if part == Path::new("..") {
            path.pop();
            continue;
        }
        let next = path.join(&part);
        match fs::read_link(&next) {
            Ok(to) => {
                links += 1;
                if links > MOST_LINKS {
                    return Err(named("find", target, rustix::io::Errno::LOOP));
                }
                if to.is_absolute() {
                    path = PathBuf::from("/");
                }
                left.extend(parts(&to));
            }
            Err(_) => path = next,
        }
    }
    Ok(path)
}

/// The parts of a path, the first one last.
fn parts(path: &Path) -> Vec<PathBuf> {
    use std::path::Component;
    let parts = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(PathBuf::from(name)),
        Component::ParentDir => Some(PathBuf::from("..")),
        _ => None,
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_found_through_links() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        fs::create_dir(base.join("run")).unwrap();
        symlink("../x/../run/./stub", base.join("run/relative")).unwrap();
        symlink(base.join("run/relative"), base.join("absolute")).unwrap();
        symlink("loop", base.join("loop")).unwrap();
        let found = |name: &str| resolve(&base.join(name));
        assert_eq!(found("absolute").unwrap(), base.join("run/stub"));
        assert_eq!(found("run/../new/file").unwrap(), base.join("new/file"));
        assert_eq!(found("absolute/more").unwrap(), base.join("run/stub/more"));
        assert!(found("loop").is_err());
    }
}
