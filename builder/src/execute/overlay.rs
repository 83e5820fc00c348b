//! Mounts that end with their owner.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, lsetxattr, utimensat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount, move_mount, unmount,
};

use super::layer::xattrs;
use super::rootpath::chown;

/// Longest option text the old mount call takes, less what surrounds the layers.
const MAX_OPTIONS: usize = 3500;

/// A mount of this process; gone when dropped.
#[derive(Debug)]
pub(crate) struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a straggler inside must not keep the build from ending.
        let _ = unmount(&self.at, UnmountFlags::DETACH);
    }
}

/// A stack with a directory on top that takes the changes. It can be taken away while somebody else
/// fills that directory: a mounted overlay must not be changed from below.
#[derive(Debug)]
pub(crate) struct Writable<'a> {
    lower: &'a [PathBuf],
    upper: &'a Path,
    work: PathBuf,
    at: PathBuf,
    mounted: Option<Mounted>,
}

impl<'a> Writable<'a> {
    /// Mounts it in `scratch`.
    pub fn mount(lower: &'a [PathBuf], upper: &'a Path, scratch: &Path) -> io::Result<Self> {
        let (work, at) = (scratch.join("work"), scratch.join("merged"));
        let mut writable = Self { lower, upper, work, at, mounted: None };
        writable.mount_again()?;
        Ok(writable)
    }

    /// Where it is, or was.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Takes it away.
    pub fn unmount(&mut self) {
        self.mounted = None;
    }

    /// Mounts it again, with whatever its top holds by now.
    pub fn mount_again(&mut self) -> io::Result<()> {
        let upper = Some((self.upper, self.work.as_path()));
        self.mounted = Some(overlay(self.lower, upper, &self.at)?);
        Ok(())
    }
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Mounts `lower` (lowest first) with changes going to `upper`; without `upper`, read-only.
pub(crate) fn overlay(
    lower: &[PathBuf],
    upper: Option<(&Path, &Path)>,
    at: &Path,
) -> io::Result<Mounted> {
    fs::create_dir_all(at)?;
    let mut options = b"index=off,redirect_dir=off,metacopy=off,lowerdir=".to_vec();
    for (number, path) in lower.iter().rev().enumerate() {
        if number > 0 {
            options.push(b':');
        }
        for byte in path.as_os_str().as_bytes() {
            if matches!(byte, b':' | b',' | b'\\') {
                options.push(b'\\');
            }
            options.push(*byte);
        }
    }
    if let Some((upper, work)) = upper {
        fs::create_dir_all(work)?;
        for (key, path) in [(&b",upperdir="[..], upper), (b",workdir=", work)] {
            options.extend(key);
            options.extend(path.as_os_str().as_bytes());
        }
    }
    let flags = if upper.is_some() { MountFlags::empty() } else { MountFlags::RDONLY };
    if options.len() <= MAX_OPTIONS {
        let options = c_string(&options)?;
        mount("overlay", at, "overlay", flags, options.as_c_str())?;
        return Ok(Mounted { at: at.to_owned() });
    }
    // Too many layers for one page of options: each by itself, which kernels from 6.5 take.
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("index", "off"), ("redirect_dir", "off"), ("metacopy", "off")] {
        fsconfig_set_string(&context, key, value)?;
    }
    for path in lower.iter().rev() {
        fsconfig_set_string(&context, "lowerdir+", path.as_path())?;
    }
    if let Some((upper, work)) = upper {
        fsconfig_set_string(&context, "upperdir", upper)?;
        fsconfig_set_string(&context, "workdir", work)?;
    }
    fsconfig_create(&context)?;
    let attributes = match upper {
        Some(_) => MountAttrFlags::empty(),
        None => MountAttrFlags::MOUNT_ATTR_RDONLY,
    };
    let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    move_mount(&tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    Ok(Mounted { at: at.to_owned() })
}

/// Memory mounted at `at`, for what must never be on a disk.
pub(crate) fn memory(at: &Path) -> io::Result<Mounted> {
    fs::create_dir_all(at)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("tmpfs", at, "tmpfs", flags, c_string(b"mode=0700,size=16m")?.as_c_str())?;
    Ok(Mounted { at: at.to_owned() })
}

/// Whether this process may mount overlays here at all.
pub(crate) fn usable(scratch: &Path) -> io::Result<()> {
    let base = scratch.join("probe");
    let (lower, upper, work) = (base.join("lower"), base.join("upper"), base.join("work"));
    for path in [&lower, &upper, &work] {
        fs::create_dir_all(path)?;
    }
    let mounted = overlay(&[lower], Some((&upper, &work)), &base.join("merged"));
    let result = mounted.map(drop);
    let _ = fs::remove_dir_all(&base);
    result
}

/// Gives `to` the owner, permissions, attributes and time of the directory `from`.
pub(crate) fn copy_directory_metadata(from: &Path, to: &Path) -> io::Result<()> {
    let meta = fs::symlink_metadata(from)?;
    chown(to, meta.uid(), meta.gid())?;
    fs::set_permissions(to, meta.permissions())?;
    for (name, value) in xattrs(from)? {
        lsetxattr(to, c_string(&name)?.as_c_str(), &value, rustix::fs::XattrFlags::empty())?;
    }
    set_time(to, meta.mtime(), meta.mtime_nsec())
}

/// Sets access and modification time without following a link.
pub(crate) fn set_time(path: &Path, seconds: i64, nanos: i64) -> io::Result<()> {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps { last_access: time, last_modification: time };
    Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
