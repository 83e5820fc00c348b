//! The kernel's view: an image is loop-mounted and every attribute compared with the tree.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use parbake_builder::ext4;
use parbake_builder::tree::{FileData, Kind, NodeId, Timestamp, Tree};

/// A loop mount, gone when dropped.
pub struct Mount {
    directory: tempfile::TempDir,
}

impl Mount {
    /// Mounts an image. `None`, with the reason printed, if this process may not mount; panics if
    /// it may and the kernel refuses the image.
    pub fn new(image: &Path, options: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: mounting needs root");
            return None;
        }
        if !Path::new("/dev/loop-control").exists() {
            println!("skipped: there are no loop devices");
            return None;
        }
        let directory = tempfile::tempdir().expect("temporary directory");
        let output = Command::new("mount")
            .args(["-t", "ext4", "-o", &format!("loop,{options}")])
            .args([image, directory.path()])
            .output()
            .expect("mount");
        assert!(output.status.success(), "mount: {}", String::from_utf8_lossy(&output.stderr));
        Some(Self { directory })
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A child another test is just starting holds this process's files until it execs.
        for _ in 0..50 {
            let output = Command::new("umount").arg(self.path()).output().expect("umount");
            if output.status.success() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        if !std::thread::panicking() {
            panic!("umount {}: still busy", self.path().display());
        }
    }
}

/// Asserts that a read-only mount of the image shows the tree: every name, type, mode, owner, time,
/// size, content, link count, identity, device number, target and extended attribute, and nothing
/// else. Contents are compared with the image's own blocks at the places the tree names.
pub fn compare(tree: &Tree, image: &Path) {
    if let Some(mount) = Mount::new(image, "ro") {
        compare_below(tree, image, mount.path());
    }
}

/// As [`compare`], for an image that is mounted already.
pub fn compare_below(tree: &Tree, image: &Path, root: &Path) {
    let mut names: HashMap<NodeId, u32> = HashMap::new();
    for node in live_directories(tree) {
        for &id in node {
            *names.entry(id).or_default() += 1;
        }
    }
    let image = File::open(image).expect("open image");
    let mut inodes: HashMap<NodeId, u64> = HashMap::new();
    let mut open: Vec<(NodeId, PathBuf)> = vec![(NodeId::ROOT, root.into())];
    while let Some((id, path)) = open.pop() {
        let node = &tree.nodes[id.0 as usize];
        let found = fs::symlink_metadata(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        if let Some(&known) = inodes.get(&id) {
            assert_eq!(found.ino(), known, "{path:?}: names of one file");
            continue;
        }
        inodes.insert(id, found.ino());
        let symlink = matches!(node.kind, Kind::Symlink(_));
        let mode = if symlink { 0o777 } else { node.meta.mode };
        assert_eq!(found.mode() & 0o7777, u32::from(mode), "{path:?}: mode");
        assert_eq!(found.uid(), node.meta.uid, "{path:?}: owner");
        assert_eq!(found.gid(), node.meta.gid, "{path:?}: group");
        let time = ext4::stored_time(node.meta.mtime);
        for (what, seconds, nanos) in [
            ("mtime", found.mtime(), found.mtime_nsec()),
            ("ctime", found.ctime(), found.ctime_nsec()),
            ("atime", found.atime(), found.atime_nsec()),
        ] {
            let nanos = u32::try_from(nanos).expect("nanoseconds");
            assert_eq!(Timestamp { seconds, nanos }, time, "{path:?}: {what}");
        }
        let mut links = u64::from(names.get(&id).copied().unwrap_or(0));
        let kind = found.file_type();
        match &node.kind {
            Kind::File(data) => {
                assert!(kind.is_file(), "{path:?}: type");
                assert_eq!(found.len(), data.size, "{path:?}: size");
                compare_content(data, &image, &path);
            }
            Kind::Directory(entries) => {
                assert!(kind.is_dir(), "{path:?}: type");
                let mut listed: Vec<Vec<u8>> = fs::read_dir(&path)
                    .expect("read directory")
                    .map(|entry| entry.expect("entry").file_name().as_bytes().to_vec())
                    .collect();
                listed.sort_unstable();
                let expected: Vec<&[u8]> = entries.keys().map(|name| &**name).collect();
                assert!(
                    listed.iter().eq(&expected),
                    "{path:?}: {} entries listed, {} expected",
                    listed.len(),
                    expected.len()
                );
                links = 2;
                for (name, &id) in entries {
                    links += u64::from(is_directory(tree, id));
                    open.push((id, path.join(OsStr::from_bytes(name))));
                }
                if links > 65_000 {
                    links = 1;
                }
            }
            Kind::Symlink(target) => {
                assert!(kind.is_symlink(), "{path:?}: type");
                let found = fs::read_link(&path).expect("read link");
                assert_eq!(found.as_os_str().as_bytes(), &**target, "{path:?}: target");
            }
            Kind::CharDevice(device) | Kind::BlockDevice(device) => {
                let character = matches!(node.kind, Kind::CharDevice(_));
                assert_eq!(kind.is_char_device(), character, "{path:?}: type");
                assert_eq!(kind.is_block_device(), !character, "{path:?}: type");
                let numbers = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
                assert_eq!(numbers, (device.major, device.minor), "{path:?}: device");
            }
            Kind::Fifo => assert!(kind.is_fifo(), "{path:?}: type"),
            Kind::Socket => assert!(kind.is_socket(), "{path:?}: type"),
        }
        assert_eq!(found.nlink(), links, "{path:?}: link count");
        compare_xattrs(tree, id, &path);
    }
}

fn is_directory(tree: &Tree, id: NodeId) -> bool {
    matches!(tree.nodes[id.0 as usize].kind, Kind::Directory(_))
}

/// The targets in every directory that can be reached.
fn live_directories(tree: &Tree) -> Vec<Vec<&NodeId>> {
    let mut found = Vec::new();
    let mut open = vec![NodeId::ROOT];
    while let Some(id) = open.pop() {
        if let Kind::Directory(entries) = &tree.nodes[id.0 as usize].kind {
            open.extend(entries.values().filter(|&&id| is_directory(tree, id)));
            found.push(entries.values().collect());
        }
    }
    found
}

fn compare_content(data: &FileData, image: &File, path: &Path) {
    let file = File::open(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut expected = vec![0; 1 << 20];
    let mut found = vec![0; 1 << 20];
    let mut zeros = 0;
    for run in &data.runs {
        assert_zero(&file, zeros, u64::from(run.logical) * 4096, path);
        for block in (0..run.blocks).step_by(256) {
            let from = (u64::from(run.logical) + u64::from(block)) * 4096;
            let blocks = (run.blocks - block).min(256);
            let length = (data.size - from).min(u64::from(blocks) * 4096) as usize;
            let physical = (run.physical + u64::from(block)) * 4096;
            image.read_exact_at(&mut expected[..length], physical).expect("read image");
            file.read_exact_at(&mut found[..length], from).expect("read file");
            assert!(expected[..length] == found[..length], "{path:?}: content at {from}");
        }
        zeros = (u64::from(run.logical) + u64::from(run.blocks)) * 4096;
    }
    assert_zero(&file, zeros, data.size, path);
}

/// Compares the ends of a hole with zeros; holes may be too large to read in full.
fn assert_zero(file: &File, start: u64, end: u64, path: &Path) {
    if start >= end {
        return;
    }
    let mut bytes = vec![1; (end - start).min(1 << 16) as usize];
    for at in [start, end - bytes.len() as u64] {
        file.read_exact_at(&mut bytes, at).expect("read hole");
        assert!(bytes.iter().all(|&byte| byte == 0), "{path:?}: hole at {at}");
    }
}

fn compare_xattrs(tree: &Tree, id: NodeId, path: &Path) {
    let node = &tree.nodes[id.0 as usize];
    let mut list = vec![0; 1 << 16];
    let length = rustix::fs::llistxattr(path, &mut list[..]).expect("list attributes");
    let mut listed: Vec<&[u8]> =
        list[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    listed.sort_unstable();
    let file_or_directory = matches!(node.kind, Kind::File(_) | Kind::Directory(_));
    let mut expected: Vec<(&[u8], &[u8])> = Vec::new();
    for (name, value) in &node.meta.xattrs {
        // Three base entries (or none) say what the mode says and are not kept.
        let entries = value.len().saturating_sub(4) / 8;
        let implied = match &**name {
            b"system.posix_acl_access" => entries <= 3,
            b"system.posix_acl_default" => entries == 0,
            _ => false,
        };
        if !implied {
            expected.push((name, value));
        }
    }
    let names: Vec<&[u8]> = expected.iter().map(|(name, _)| *name).collect();
    assert_eq!(listed, names, "{path:?}: attribute names");
    let mut found = vec![0; 1 << 16];
    for (name, value) in expected {
        if name.starts_with(b"user.") && !file_or_directory {
            // Linux lists these on other kinds, but does not let them be read.
            continue;
        }
        let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut found[..])
            .unwrap_or_else(|error| panic!("{path:?}: {:?}: {error}", OsStr::from_bytes(name)));
        assert_eq!(&found[..length], value, "{path:?}: {:?}", OsStr::from_bytes(name));
    }
}
