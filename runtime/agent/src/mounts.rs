//! The file systems a Linux program expects.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// One file system without a disk.
struct Pseudo {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: &'static str,
}

const NO_PROGRAMS: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// What both the initial and the final root need, parents first.
const EARLY: [Pseudo; 3] = [
    Pseudo { kind: "proc", target: "/proc", flags: NO_PROGRAMS, data: "" },
    Pseudo { kind: "sysfs", target: "/sys", flags: NO_PROGRAMS, data: "" },
    Pseudo { kind: "devtmpfs", target: "/dev", flags: MountFlags::NOSUID, data: "mode=0755" },
];

/// What only the final root needs.
const LATE: [Pseudo; 4] = [
    Pseudo {
        kind: "devpts",
        target: "/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        data: "gid=5,mode=0620,ptmxmode=0666",
    },
    Pseudo {
        kind: "tmpfs",
        target: "/dev/shm",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        data: "mode=1777",
    },
    Pseudo {
        kind: "tmpfs",
        target: "/run",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        data: "mode=0755",
    },
    Pseudo { kind: "cgroup2", target: "/sys/fs/cgroup", flags: NO_PROGRAMS, data: "nsdelegate" },
];

/// Mounts one file system, making its directory if need be. What is mounted already stays.
///
/// # Errors
/// Names the target.
pub fn mount(
    source: &str,
    target: &Path,
    kind: &str,
    flags: MountFlags,
    data: &str,
) -> io::Result<()> {
    if !target.is_dir() {
        fs::create_dir_all(target).map_err(|e| named("make", target, &e))?;
    }
    let data = CString::new(data).map_err(io::Error::other)?;
    match rustix::mount::mount(source, target, kind, flags, data.as_c_str()) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(e) => Err(named(&format!("mount {kind} on"), target, &e.into())),
    }
}

/// Makes a file or directory appear at a second place.
///
/// # Errors
/// Names the target.
pub fn bind(source: &Path, target: &Path) -> io::Result<()> {
    rustix::mount::mount_bind(source, target).map_err(|e| named("bind on", target, &e.into()))
}

/// Mounts `/proc`, `/sys` and `/dev`.
///
/// # Errors
/// Names the target.
pub fn early() -> io::Result<()> {
    all(&EARLY)
}

/// Mounts everything else and makes the links in `/dev`.
///
/// # Errors
/// Names the target.
pub fn late() -> io::Result<()> {
    all(&LATE)?;
    for (name, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        match symlink(target, name) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(named("link", Path::new(name), &e));
            }
            _ => {}
        }
    }
    let tmp = Path::new("/tmp");
    if !tmp.is_dir() {
        fs::create_dir(tmp).map_err(|e| named("make", tmp, &e))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
        fs::set_permissions(tmp, mode).map_err(|e| named("set the mode of", tmp, &e))?;
    }
    Ok(())
}

/// Makes the file system mounted on `new_root` the root, takes `/proc`, `/sys` and `/dev` along and
/// empties the initial one, whose files occupy memory. Only while the process has one thread.
///
/// # Errors
/// Names the step.
pub fn switch_root(new_root: &Path) -> io::Result<()> {
    for Pseudo { target, .. } in &EARLY {
        let moved = new_root.join(target.trim_start_matches('/'));
        if !moved.is_dir() {
            fs::create_dir_all(&moved).map_err(|e| named("make", &moved, &e))?;
        }
        rustix::mount::mount_move(*target, &moved)
            .map_err(|e| named("move", Path::new(target), &e.into()))?;
    }
    let old_root = fs::File::open("/")?;
    std::env::set_current_dir(new_root)?;
    rustix::mount::mount_move(".", "/").map_err(|e| named("move", new_root, &e.into()))?;
    rustix::process::chroot(".")?;
    std::env::set_current_dir("/")?;
    empty(&old_root);
    Ok(())
}

/// Removes what lies on the file system of `directory`, and does not cross into others.
fn empty(directory: &fs::File) {
    use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, statat, unlinkat};
    let Ok(device) = rustix::fs::fstat(directory).map(|s| s.st_dev) else { return };
    let Ok(entries) = Dir::read_from(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_bytes() == b"." || name.to_bytes() == b".." {
            continue;
        }
        let Ok(meta) = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if meta.st_dev != device {
            continue;
        }
        if rustix::fs::FileType::from_raw_mode(meta.st_mode).is_dir() {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Ok(inner) = openat(directory, name, flags, Mode::empty()) {
                empty(&inner.into());
            }
            let _ = unlinkat(directory, name, AtFlags::REMOVEDIR);
        } else {
            let _ = unlinkat(directory, name, AtFlags::empty());
        }
    }
}

/// Detaches a file system at once; it ends when its last user does.
pub fn detach(target: &Path) {
    let _ = rustix::mount::unmount(target, UnmountFlags::DETACH);
}

fn all(list: &[Pseudo]) -> io::Result<()> {
    list.iter().try_for_each(|p| mount(p.kind, Path::new(p.target), p.kind, p.flags, p.data))
}

fn named(verb: &str, path: &Path, error: &io::Error) -> io::Error {
    let shown = String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned();
    io::Error::new(error.kind(), format!("cannot {verb} {shown}: {error}"))
}
