//! What differs between two root filesystems.

use ext4_view::Metadata;

use super::{ContentsError, Entry, RootFs, join, kind};

/// A path that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// From the root, without a leading slash.
    pub path: Vec<u8>,
    /// How it differs.
    pub change: Change,
}

/// How a path differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Only in the second.
    Added(Node),
    /// Only in the first.
    Removed(Node),
    /// In both, and not the same.
    Changed {
        /// In the first.
        before: Node,
        /// In the second.
        after: Node,
        /// What is not the same: `type`, `content`, `target`, `mode`, `owner`, `time`.
        what: Vec<&'static str>,
    },
}

/// What there is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its type's name.
    pub kind: &'static str,
    /// Bytes of contents; of a directory that is only in one of the two, of all below it.
    pub bytes: u64,
    /// 1; of a directory that is only in one of the two, with all below it.
    pub entries: u64,
    /// Permission bits.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since 1970.
    pub mtime: i64,
}

/// Compares two root filesystems, in the order of their paths' bytes. A directory that is only in
/// one of them is one difference, with all that is below it.
///
/// # Errors
/// When one cannot be read.
pub fn compare(before: &RootFs, after: &RootFs) -> Result<Vec<Difference>, ContentsError> {
    let mut found = Vec::new();
    let mut pending: Vec<Vec<u8>> = vec![Vec::new()];
    while let Some(directory) = pending.pop() {
        let mut left = before.list(&directory)?.into_iter().peekable();
        let mut right = after.list(&directory)?.into_iter().peekable();
        loop {
            let order = match (left.peek(), right.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(a), Some(b)) => a.name.cmp(&b.name),
            };
            let a = if order.is_le() { left.next() } else { None };
            let b = if order.is_ge() { right.next() } else { None };
            match (a, b) {
                (Some(a), None) => {
                    let path = join(&directory, &a.name);
                    let change = Change::Removed(whole(before, &path, &a.metadata)?);
                    found.push(Difference { path, change });
                }
                (None, Some(b)) => {
                    let path = join(&directory, &b.name);
                    let change = Change::Added(whole(after, &path, &b.metadata)?);
                    found.push(Difference { path, change });
                }
                (Some(a), Some(b)) => {
                    let path = join(&directory, &a.name);
                    let both_directories = a.metadata.is_dir() && b.metadata.is_dir();
                    if let Some(change) = changed(before, after, &path, &a, &b)? {
                        found.push(Difference { path: path.clone(), change });
                    }
                    if both_directories {
                        pending.push(path);
                    }
                }
                (None, None) => break,
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn changed(
    before: &RootFs,
    after: &RootFs,
    path: &[u8],
    a: &Entry,
    b: &Entry,
) -> Result<Option<Change>, ContentsError> {
    let (a, b) = (&a.metadata, &b.metadata);
    let mut what = Vec::new();
    if a.file_type() != b.file_type() {
        what.push("type");
    } else if a.file_type().is_regular_file() {
        if a.len() != b.len() || !same_content(before, after, path)? {
            what.push("content");
        }
    } else if a.file_type().is_symlink() && before.link_target(path)? != after.link_target(path)? {
        what.push("target");
    }
    if a.mode() != b.mode() {
        what.push("mode");
    }
    if (a.uid(), a.gid()) != (b.uid(), b.gid()) {
        what.push("owner");
    }
    if a.modified() != b.modified() {
        what.push("time");
    }
    if what.is_empty() {
        return Ok(None);
    }
    // What is below a directory that another type took the place of went or came with it.
    let side = |rootfs, own: &Metadata, other: &Metadata| {
        if own.is_dir() && !other.is_dir() { whole(rootfs, path, own) } else { Ok(node(own)) }
    };
    let (before, after) = (side(before, a, b)?, side(after, b, a)?);
    Ok(Some(Change::Changed { before, after, what }))
}

fn same_content(before: &RootFs, after: &RootFs, path: &[u8]) -> Result<bool, ContentsError> {
    const PIECE: usize = 64 * 1024;
    let (mut a, mut b) = (before.open_file(path)?, after.open_file(path)?);
    let (mut left, mut right) = (vec![0; PIECE], vec![0; PIECE]);
    loop {
        let read = fill(&mut a, &mut left).map_err(before.error(path))?;
        let other = fill(&mut b, &mut right).map_err(after.error(path))?;
        if left[..read] != right[..other] {
            return Ok(false);
        }
        if read == 0 {
            return Ok(true);
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut ext4_view::File, buffer: &mut [u8]) -> Result<usize, ext4_view::Ext4Error> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_bytes(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

fn node(metadata: &Metadata) -> Node {
    Node {
        kind: kind(metadata.file_type()),
        bytes: if metadata.file_type().is_regular_file() { metadata.len() } else { 0 },
        entries: 1,
        mode: metadata.mode(),
        uid: metadata.uid(),
        gid: metadata.gid(),
        mtime: metadata.modified().seconds(),
    }
}

/// A node with all that is below it.
fn whole(rootfs: &RootFs, path: &[u8], metadata: &Metadata) -> Result<Node, ContentsError> {
    let mut sum = node(metadata);
    let mut pending = Vec::new();
    if metadata.is_dir() {
        pending.push(path.to_vec());
    }
    while let Some(directory) = pending.pop() {
        for entry in rootfs.list(&directory)? {
            let below = node(&entry.metadata);
            sum.bytes = sum.bytes.saturating_add(below.bytes);
            sum.entries += 1;
            if entry.metadata.is_dir() {
                pending.push(join(&directory, &entry.name));
            }
        }
    }
    Ok(sum)
}
