//! What each path costs.

use super::{ContentsError, RootFs, join};

const BLOCK: u64 = 4096;

/// What a path costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSize {
    /// From the root, without a leading slash.
    pub path: Vec<u8>,
    /// Whether it is a directory.
    pub directory: bool,
    /// Bytes of file contents in and below it, in whole blocks. Holes count as if they were
    /// written, and a file with several names counts for each.
    pub bytes: u64,
    /// Names in and below it.
    pub entries: u64,
}

/// What the paths of a root filesystem cost.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Everything.
    pub bytes: u64,
    /// All names.
    pub entries: u64,
    /// Paths down to the depth asked for, the most expensive first.
    pub paths: Vec<PathSize>,
    /// Single files at any depth, the largest first.
    pub files: Vec<PathSize>,
}

/// Sums up `rootfs` down to `depth` components, and finds its `largest` files.
///
/// # Errors
/// When it cannot be read.
pub fn sizes(rootfs: &RootFs, depth: usize, largest: usize) -> Result<Sizes, ContentsError> {
    let mut result = Sizes::default();
    // Directories to read, and where the paths around them stand in `result.paths`.
    let mut pending: Vec<(Vec<u8>, Vec<usize>)> = vec![(Vec::new(), Vec::new())];
    while let Some((directory, around)) = pending.pop() {
        for entry in rootfs.list(&directory)? {
            let path = join(&directory, &entry.name);
            let is_directory = entry.metadata.is_dir();
            let bytes = if entry.metadata.file_type().is_regular_file() {
                entry.metadata.len().div_ceil(BLOCK).saturating_mul(BLOCK)
            } else {
                0
            };
            let mut around = around.clone();
            // Below the depth, a directory's path is one of those around already.
            if around.len() < depth {
                around.push(result.paths.len());
                result.paths.push(PathSize {
                    path: path.clone(),
                    directory: is_directory,
                    bytes: 0,
                    entries: 0,
                });
            }
            for &index in &around {
                result.paths[index].bytes = result.paths[index].bytes.saturating_add(bytes);
                result.paths[index].entries += 1;
            }
            result.bytes = result.bytes.saturating_add(bytes);
            result.entries += 1;
            if is_directory {
                pending.push((path, around));
            } else if bytes > 0 {
                result.files.push(PathSize { path, directory: false, bytes, entries: 1 });
                if result.files.len() >= 4 * largest.max(64) {
                    keep_largest(&mut result.files, largest);
                }
            }
        }
    }
    keep_largest(&mut result.files, largest);
    result.paths.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
    Ok(result)
}

fn keep_largest(files: &mut Vec<PathSize>, count: usize) {
    files.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
    files.truncate(count);
}
