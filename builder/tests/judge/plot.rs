//! Trees and their data, for tests: an image being planted.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parbake_builder::ext4::{self, DataArea, Options, Report, WriteError};
use parbake_builder::tree::{
    Device, FileData, Kind, Metadata, Node, NodeId, Run, Runs, Timestamp, Tree, Xattrs,
};

/// An image file, its data area and its tree.
pub struct Plot {
    pub path: PathBuf,
    pub file: File,
    pub area: DataArea,
    pub tree: Tree,
    _directory: tempfile::TempDir,
}

pub fn meta(mode: u16) -> Metadata {
    Metadata {
        mode,
        uid: 0,
        gid: 0,
        mtime: Timestamp { seconds: 1_700_000_000, nanos: 123_456_789 },
        xattrs: Xattrs::new(),
    }
}

pub fn options() -> Options {
    Options {
        hash_seed: *b"0123456789abcdef",
        timestamp: 1_700_000_000,
        ..Options::new(*b"parbake-test-uid")
    }
}

impl Plot {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("image");
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .expect("image file");
        Self {
            path,
            file,
            area: DataArea::new(),
            tree: Tree {
                nodes: vec![Node { meta: meta(0o755), kind: Kind::Directory(BTreeMap::new()) }],
            },
            _directory: directory,
        }
    }

    /// Adds a node without a name.
    pub fn node(&mut self, kind: Kind, meta: Metadata) -> NodeId {
        self.tree.nodes.push(Node { meta, kind });
        NodeId(u32::try_from(self.tree.nodes.len() - 1).expect("few nodes"))
    }

    /// Gives a node a name.
    pub fn link(&mut self, parent: NodeId, name: impl AsRef<[u8]>, id: NodeId) {
        let Kind::Directory(entries) = &mut self.tree.nodes[parent.0 as usize].kind else {
            panic!("not a directory");
        };
        entries.insert(name.as_ref().into(), id);
    }

    pub fn add(&mut self, parent: NodeId, name: impl AsRef<[u8]>, kind: Kind) -> NodeId {
        let mode = if matches!(kind, Kind::Directory(_)) { 0o755 } else { 0o644 };
        let id = self.node(kind, meta(mode));
        self.link(parent, name, id);
        id
    }

    pub fn directory(&mut self, parent: NodeId, name: impl AsRef<[u8]>) -> NodeId {
        self.add(parent, name, Kind::Directory(BTreeMap::new()))
    }

    pub fn symlink(&mut self, parent: NodeId, name: impl AsRef<[u8]>, target: &[u8]) -> NodeId {
        self.add(parent, name, Kind::Symlink(target.into()))
    }

    pub fn device(major: u32, minor: u32) -> Device {
        Device { major, minor }
    }

    /// Writes contents to the data area.
    pub fn data(&mut self, bytes: &[u8]) -> FileData {
        let mut data = FileData { size: bytes.len() as u64, runs: Runs::new() };
        let mut logical = 0;
        let mut rest = bytes;
        let file = &self.file;
        self.area.allocate((bytes.len() as u64).div_ceil(4096), |physical, blocks| {
            let take = rest.len().min(blocks as usize * 4096);
            file.write_all_at(&rest[..take], physical * 4096).expect("write data");
            rest = &rest[take..];
            data.runs.push(Run { logical, blocks, physical });
            logical += blocks;
        });
        data
    }

    pub fn file(&mut self, parent: NodeId, name: impl AsRef<[u8]>, bytes: &[u8]) -> NodeId {
        let data = self.data(bytes);
        self.add(parent, name, Kind::File(data))
    }

    /// A file whose blocks were allocated but never written; they read as zeros.
    pub fn unwritten(&mut self, parent: NodeId, name: impl AsRef<[u8]>, blocks: u32) -> NodeId {
        let mut runs = Vec::new();
        let mut logical = 0;
        self.area.allocate(u64::from(blocks), |physical, blocks| {
            runs.push(Run { logical, blocks, physical });
            logical += blocks;
        });
        let size = u64::from(blocks) * 4096;
        self.add(parent, name, Kind::File(FileData { size, runs: runs.into() }))
    }

    pub fn meta(&mut self, id: NodeId) -> &mut Metadata {
        &mut self.tree.nodes[id.0 as usize].meta
    }

    pub fn xattr(&mut self, id: NodeId, name: &str, value: impl AsRef<[u8]>) {
        self.meta(id).xattrs.insert(name.as_bytes().into(), value.as_ref().into());
    }

    pub fn try_finish(&self, options: &Options) -> Result<Report, WriteError> {
        ext4::finish(&self.file, &self.area, &self.tree, options)
    }

    pub fn finish(&self, options: &Options) -> Report {
        let report = self.try_finish(options).expect("a storable tree");
        let size = self.file.metadata().expect("metadata").len();
        assert_eq!(size, report.size);
        assert_eq!(report.size, report.blocks * 4096);
        assert_eq!(report.blocks, report.data_blocks + report.metadata_blocks + report.free_blocks);
        assert!(report.free_blocks * 4096 >= options.free_bytes);
        report
    }

    /// All judges.
    pub fn judge(&self) {
        super::fsck(&self.path);
        super::viewed::compare(&self.tree, &self.path);
        super::mounted::compare(&self.tree, &self.path);
    }
}

/// Sha-256 of a file in hex.
pub fn digest(path: &Path) -> String {
    use sha2::Digest;
    let mut hash = sha2::Sha256::new();
    let mut file = File::open(path).expect("open");
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = std::io::Read::read(&mut file, &mut buffer).expect("read");
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that look like nothing, the same for the same seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        })
        .collect()
}
