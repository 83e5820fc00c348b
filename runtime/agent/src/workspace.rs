//! A volume that outlives the machine: mounted when the host has attached it, and taken off again
//! before the machine ends.
//!
//! Its device was there when the machine was frozen, without any sectors; the host gives it some
//! and says so by a configuration interrupt, which the kernel works off in its own time.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use parbake_protocol::agent::{Failure, FailureKind};
use parbake_protocol::vmm::WORKSPACE_ID;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::connection::failure;
use crate::serve::Agent;
use crate::{files, mounts};

/// How long the kernel may take to see how large the device is.
const SIZE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long what uses the volume may take to be gone.
const FREE_TIMEOUT: Duration = Duration::from_secs(5);

/// Mounts the volume at `path`.
///
/// # Errors
/// The machine is not the agent's, it has no such device, or the kernel refuses.
pub fn mount(agent: &Agent, path: &[u8]) -> Result<(), Failure> {
    agent.must_own_machine()?;
    let target = files::path(path)?;
    if agent.state().workspace.is_some() {
        return Err(failure(FailureKind::BadRequest, "a workspace is mounted already"));
    }
    let system = |error: io::Error| failure(FailureKind::System, format!("workspace: {error}"));
    let device = device().map_err(system)?;
    // Programs on it are welcome; what would give them power is not: it comes from another run.
    let flags = MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::NODEV;
    mounts::mount(&device, target, "ext4", flags, "").map_err(system)?;
    agent.state().workspace = Some(target.to_owned());
    Ok(())
}

/// Ends all user processes, writes everything to the volume and takes it off. If it cannot be taken
/// off, it is at least written and read-only from here on.
///
/// # Errors
/// It could be neither; nothing is mounted is no error.
pub fn unmount(agent: &Agent) -> Result<(), Failure> {
    agent.must_own_machine()?;
    let Some(path) = agent.state().workspace.take() else { return Ok(()) };
    let system = |error: io::Error| failure(FailureKind::System, format!("workspace: {error}"));
    if let Some(cgroup) = &agent.options.cgroup {
        cgroup.kill();
        let _ = cgroup.thaw();
    }
    let deadline = Instant::now() + FREE_TIMEOUT;
    loop {
        match rustix::mount::unmount(&path, UnmountFlags::empty()) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::BUSY) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(2));
            }
            Err(_) => {
                rustix::fs::sync();
                let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
                return rustix::mount::mount_remount(&path, flags, c"")
                    .map_err(|error| system(error.into()));
            }
        }
    }
}

/// The volume's device, once it has sectors.
fn device() -> io::Result<String> {
    let missing = || io::Error::other("this machine has no device for one; bake its template anew");
    let found = find(Path::new("/sys/block"))?.ok_or_else(missing)?;
    let deadline = Instant::now() + SIZE_TIMEOUT;
    while fs::read_to_string(found.join("size"))?.trim() == "0" {
        if Instant::now() > deadline {
            return Err(io::Error::other("its device has no sectors"));
        }
        thread::sleep(Duration::from_millis(1));
    }
    let name = found.file_name().unwrap_or(OsStr::new(""));
    Ok(format!("/dev/{}", String::from_utf8_lossy(name.as_bytes())))
}

fn find(devices: &Path) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(devices)? {
        let path = entry?.path();
        let serial = fs::read_to_string(path.join("serial")).unwrap_or_default();
        if serial.trim_matches(['\0', '\n', ' ']) == WORKSPACE_ID {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_found_by_its_serial_number_alone() {
        let devices = tempfile::tempdir().unwrap();
        let with = |name: &str, serial: Option<&str>| {
            let device = devices.path().join(name);
            fs::create_dir(&device).unwrap();
            if let Some(serial) = serial {
                fs::write(device.join("serial"), serial).unwrap();
            }
        };
        with("loop0", None);
        with("vda", Some("parbake-0"));
        assert_eq!(find(devices.path()).unwrap(), None);
        with("vdq", Some(WORKSPACE_ID));
        assert_eq!(find(devices.path()).unwrap(), Some(devices.path().join("vdq")));
    }
}
