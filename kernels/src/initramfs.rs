//! The initramfs: a cpio archive (format "newc", kernel documentation
//! `driver-api/early-userspace/buffer-format.rst`) of the agent as `/init` and the modules.
//!
//! Nothing of the machine that makes it goes in: no times, no owners, no inode numbers of its
//! files. The same input gives the same bytes. It is not compressed: unpacking would cost the
//! guest more than copying does.

use crate::modules::Module;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const CONSOLE: u32 = 0o020_600;

/// Writes entries of a newc archive.
struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        let links = if mode == FOLDER { 2 } else { 1 };
        let size = u32::try_from(content.len()).expect("callers bound every file below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        self.bytes.extend_from_slice(b"070701");
        // Inode, mode, uid, gid, links, mtime, size, device of the file system (2), device (2),
        // length of the name, checksum (unused in this format).
        let inode = if name == TRAILER { 0 } else { self.next_inode };
        let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend_from_slice(content);
        self.pad(4);
        self.next_inode += 1;
    }

    fn pad(&mut self, unit: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(unit), 0);
    }
}

const TRAILER: &str = "TRAILER!!!";

/// Builds the archive: `/init` is `agent`, `/modules/NN-name.ko` are `modules`, numbered in load
/// order so that sorting by name restores it, and `/dev/console` gives init its output.
#[must_use]
pub fn build(agent: &[u8], modules: &[Module]) -> Vec<u8> {
    let size = agent.len() + modules.iter().map(|module| module.bytes.len() + 256).sum::<usize>();
    let mut archive = Archive { bytes: Vec::with_capacity(size + 4096), next_inode: 1 };
    for folder in ["dev", "modules", "proc", "sys", "run", "newroot"] {
        archive.entry(folder, FOLDER, (0, 0), &[]);
    }
    archive.entry("dev/console", CONSOLE, (5, 1), &[]);
    archive.entry("init", PROGRAM, (0, 0), agent);
    for (index, module) in modules.iter().enumerate() {
        let name = format!("modules/{index:02}-{}.ko", module.name);
        archive.entry(&name, FILE, (0, 0), &module.bytes);
    }
    archive.entry(TRAILER, 0, (0, 0), &[]);
    archive.pad(512);
    archive.bytes
}

/// Builds an archive of plain files `(name, permissions, content)`, to be put behind another one:
/// the kernel unpacks both.
#[must_use]
pub fn files(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut archive = Archive { bytes: Vec::new(), next_inode: 1 };
    for (name, permissions, content) in files {
        archive.entry(name, 0o100_000 | (permissions & 0o777), (0, 0), content);
    }
    archive.entry(TRAILER, 0, (0, 0), &[]);
    archive.pad(512);
    archive.bytes
}
