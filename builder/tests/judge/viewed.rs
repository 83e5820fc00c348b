//! A second reader's view: the `ext4-view` crate, which verifies checksums as it goes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ext4_view::{Ext4, PathBuf};
use parbake_builder::ext4;
use parbake_builder::tree::{FileData, Kind, NodeId, Tree};

/// Contents above this size are left to the kernel.
const LARGE: u64 = 64 << 20;

/// Asserts that `ext4-view` reads the tree out of the image.
pub fn compare(tree: &Tree, path: &Path) {
    let view = Ext4::load_from_path(path).expect("ext4-view loads the image");
    let image = File::open(path).expect("open image");
    let mut open = vec![(NodeId::ROOT, PathBuf::new("/"))];
    while let Some((id, path)) = open.pop() {
        let node = &tree.nodes[id.0 as usize];
        let time = ext4::stored_time(node.meta.mtime);
        if time.seconds & 0x8000_0000 != 0 {
            // This reader takes the low 32 bits for positive and calls such an inode corrupt.
            continue;
        }
        let found =
            view.symlink_metadata(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let symlink = matches!(node.kind, Kind::Symlink(_));
        let mode = if symlink { 0o777 } else { node.meta.mode };
        assert_eq!(found.mode() & 0o7777, mode, "{path:?}: mode");
        for (what, found) in [
            ("mtime", found.modified()),
            ("atime", found.accessed()),
            ("crtime", found.created().expect("a creation time")),
        ] {
            let found = (found.seconds(), found.nanoseconds());
            assert_eq!(found, (time.seconds, time.nanos), "{path:?}: {what}");
        }
        let owner = (found.uid(), found.gid());
        assert_eq!(owner, (node.meta.uid, node.meta.gid), "{path:?}: owner");
        let kind = found.file_type();
        match &node.kind {
            Kind::Directory(entries) => {
                assert!(kind.is_dir(), "{path:?}: type");
                let mut listed: Vec<Vec<u8>> = view
                    .read_dir(&path)
                    .expect("read directory")
                    .map(|entry| {
                        let entry = entry.expect("entry");
                        entry.file_name().as_ref().to_vec()
                    })
                    .filter(|name| name != b"." && name != b"..")
                    .collect();
                listed.sort_unstable();
                assert!(listed.iter().eq(entries.keys().map(|name| &**name)), "{path:?}: names");
                for (name, &id) in entries {
                    open.push((id, path.join(name)));
                }
            }
            Kind::File(data) => {
                assert!(kind.is_regular_file(), "{path:?}: type");
                assert_eq!(found.len(), data.size, "{path:?}: size");
                if data.size <= LARGE {
                    let bytes = view.read(&path).expect("read file");
                    assert!(bytes == content(data, &image), "{path:?}: content");
                }
            }
            Kind::Symlink(target) => {
                assert!(kind.is_symlink(), "{path:?}: type");
                // A target with an empty or long component is no path to this reader.
                if let Ok(found) = view.read_link(&path) {
                    assert_eq!(found.as_ref(), &**target, "{path:?}: target");
                }
            }
            Kind::CharDevice(_) => assert!(kind.is_char_dev(), "{path:?}: type"),
            Kind::BlockDevice(_) => assert!(kind.is_block_dev(), "{path:?}: type"),
            Kind::Fifo => assert!(kind.is_fifo(), "{path:?}: type"),
            Kind::Socket => assert!(kind.is_socket(), "{path:?}: type"),
        }
    }
}

/// What a file should contain, read from the image at the places the tree names.
fn content(data: &FileData, image: &File) -> Vec<u8> {
    let mut bytes = vec![0; data.size as usize];
    for run in &data.runs {
        let start = run.logical as usize * 4096;
        let end = (start + run.blocks as usize * 4096).min(bytes.len());
        image.read_exact_at(&mut bytes[start..end], run.physical * 4096).expect("read image");
    }
    bytes
}
