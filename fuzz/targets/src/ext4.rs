//! Any bytes as an ext4 file system: every inode's data, names, target and attributes are looked at; no
//! panic, nothing outside the image.

use std::io::Write;

use parbake_builder::ext4::read::{ROOT, Reader};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut file = tempfile::tempfile().expect("file");
    file.write_all(bytes).expect("write");
    let Ok(reader) = Reader::open(file) else { return };
    let (mut left, mut seen) = (vec![ROOT], std::collections::HashSet::new());
    while let Some(number) = left.pop() {
        if !seen.insert(number) || seen.len() > 1000 {
            continue;
        }
        let Ok(inode) = reader.inode(number) else { continue };
        let _ = (reader.xattrs(&inode), reader.target(&inode), inode.mtime(), inode.device());
        for stretch in reader.stretches(&inode).unwrap_or_default() {
            assert!(stretch.source + stretch.length <= bytes.len() as u64);
            assert!(stretch.at + stretch.length <= inode.size());
        }
        if inode.mode() & 0xf000 == 0x4000 {
            left.extend(reader.names(&inode).unwrap_or_default().into_iter().map(|(_, at)| at));
        }
    }
}
