//! The files that say which machine this is.
//!
//! Like `docker run` does with `/etc/hosts`, each lies in memory under `/run/parbake` and is bound
//! over its usual place: a fixup then changes no disk, and the image keeps its own files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::mounts;

const DIRECTORY: &str = "/run/parbake";

/// A file that says which machine this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentityFile {
    /// `/etc/hostname`.
    Hostname,
    /// `/etc/hosts`.
    Hosts,
    /// `/etc/resolv.conf`.
    Resolver,
    /// `/etc/machine-id`.
    MachineId,
    /// `/proc/sys/kernel/random/boot_id`, which the kernel never changes on its own.
    BootId,
}

use IdentityFile::{BootId, Hostname, Hosts, MachineId, Resolver};

impl IdentityFile {
    const ALL: [Self; 5] = [Hostname, Hosts, Resolver, MachineId, BootId];

    fn target(self) -> &'static Path {
        Path::new(match self {
            Hostname => "/etc/hostname",
            Hosts => "/etc/hosts",
            Resolver => "/etc/resolv.conf",
            MachineId => "/etc/machine-id",
            BootId => "/proc/sys/kernel/random/boot_id",
        })
    }

    fn source(self) -> PathBuf {
        let name = self.target().file_name().unwrap_or_default();
        Path::new(DIRECTORY).join(name)
    }

    /// Replaces the content: in memory if [`install`] bound the file, else in its usual place.
    ///
    /// # Errors
    /// Names the file.
    pub fn set(self, content: &str) -> io::Result<()> {
        let source = self.source();
        let path = if source.exists() { &source } else { self.target() };
        // In place: the bind holds the inode.
        fs::write(path, content)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot write {}: {e}", path.display())))
    }
}

/// Binds all identity files, with the content the image gives them.
///
/// # Errors
/// Names the file.
pub fn install(hostname: &str) -> io::Result<()> {
    fs::create_dir_all(DIRECTORY)?;
    fs::create_dir_all("/etc")?;
    for file in IdentityFile::ALL {
        let target = file.target();
        let content = match file {
            Hostname => format!("{hostname}\n"),
            Hosts => hosts(hostname, None),
            MachineId => format!("{}\n", hex(&random()?)),
            BootId | Resolver => fs::read_to_string(target).unwrap_or_default(),
        };
        fs::write(file.source(), content)?;
        if fs::metadata(target).is_err() {
            make_place(target)?;
        }
        mounts::bind(&file.source(), target)?;
    }
    Ok(())
}

/// A file to bind over, where the image has none or a link to nowhere.
fn make_place(target: &Path) -> io::Result<()> {
    if fs::File::create(target).is_ok() {
        return Ok(());
    }
    let _ = fs::remove_file(target);
    fs::File::create(target)
        .map(drop)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot make {}: {e}", target.display())))
}

/// The content of `/etc/hosts`.
pub fn hosts(hostname: &str, address: Option<[u8; 4]>) -> String {
    let [a, b, c, d] = address.unwrap_or([127, 0, 1, 1]);
    format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n{a}.{b}.{c}.{d}\t{hostname}\n"
    )
}

/// Sixteen bytes of the kernel's.
///
/// # Errors
/// No random device.
pub fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    io::Read::read_exact(&mut fs::File::open("/dev/urandom")?, &mut bytes)?;
    Ok(bytes)
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A random (version 4) UUID of these bytes.
pub fn uuid(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = hex(&bytes);
    let part = |from, to| digits.get(from..to).unwrap_or_default();
    [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_version_4() {
        let id = uuid([0xff; 16]);
        assert_eq!(id, "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn hosts_names_the_machine() {
        assert!(hosts("box", Some([10, 0, 0, 2])).ends_with("10.0.0.2\tbox\n"));
        assert!(hosts("box", None).contains("127.0.1.1\tbox"));
    }
}
