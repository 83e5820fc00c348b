//! The whole way from an image to a finished ext4 file.

use std::fs::File;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use parbake_cache::template::LayerRecord;

use crate::ext4;
use crate::image::{Event, Image};

use super::attribution::{Attribution, LayerCost, PathCost};
use super::{FlattenError, FlattenOptions, Flattened, flatten};

/// What the file system is to have beside the image's own tree.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// How layers are read.
    pub flatten: FlattenOptions,
    /// Bytes that can still be written to the file system.
    pub free_bytes: u64,
    /// Files that can still be made; at least one for each 16 KiB of free space.
    pub free_inodes: u64,
    /// Whether to make a journal.
    pub journal: bool,
    /// Volume label, at most 16 bytes.
    pub label: String,
    /// When the file system was made, in seconds since 1970.
    pub timestamp: i64,
    /// Depth of the paths in [`BuildReport::paths`].
    pub path_depth: usize,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            flatten: FlattenOptions::default(),
            free_bytes: 0,
            free_inodes: 0,
            journal: false,
            label: String::new(),
            timestamp: 0,
            path_depth: 2,
        }
    }
}

/// What was built.
#[derive(Debug)]
pub struct BuildReport {
    /// The file system.
    pub filesystem: ext4::Report,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// The layers, lowest first.
    pub layers: Vec<LayerRecord>,
    /// What each layer costs, lowest first.
    pub layer_costs: Vec<LayerCost>,
    /// What the paths near the root cost.
    pub paths: Vec<PathCost>,
}

/// Why no file system was built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The image.
    #[error(transparent)]
    Flatten(#[from] FlattenError),
    /// The file system cannot hold the image.
    #[error(transparent)]
    Filesystem(#[from] ext4::WriteError),
    /// The output file.
    #[error("cannot write {path}: {source}")]
    Output {
        /// The output file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// There is no name to give the file.
    #[error("{path}: not the name of a file")]
    Name {
        /// What was given.
        path: String,
    },
}

/// Builds the ext4 file `out` from `image`. It appears under its name only when it is complete and
/// on disk; until then, and after any error, what was there before stays.
///
/// # Errors
///
/// See [`BuildError`].
pub fn build_ext4(
    image: &Image,
    out: &Path,
    options: &BuildOptions,
    events: &mut dyn FnMut(Event),
) -> Result<BuildReport, BuildError> {
    let output = |source| BuildError::Output { path: out.display().to_string(), source };
    if out.file_name().is_none() || out.is_dir() {
        return Err(BuildError::Name { path: out.display().to_string() });
    }
    let directory = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let temporary = tempfile::Builder::new()
        .prefix(".parbake-rootfs-")
        // Less the umask: an image is an ordinary file.
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(directory)
        .map_err(output)?;
    let file = temporary.as_file();
    let report = std::thread::scope(|scope| {
        let (finished, ended) = mpsc::channel();
        let flusher = scope.spawn(move || keep_flushing(file, &ended));
        let report = write(image, file, options, events);
        drop(finished);
        let flushed = flusher.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
        report.and_then(|report| flushed.map(|()| report).map_err(output))
    })?;
    file.sync_all().map_err(output)?;
    temporary.persist(out).map_err(|error| output(error.error))?;
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(output)?;
    Ok(report)
}

/// Sends what has been written to `file` on to the disk while more is being written, so that the
/// disk is not idle until the end and then everybody waits for it. Ends with `ended`'s sender.
///
/// # Errors
///
/// The kernel reports a failed write-back once for each open file: it must be asked for here.
fn keep_flushing(file: &File, ended: &mpsc::Receiver<()>) -> io::Result<()> {
    /// Often enough that little is left at the end, seldom enough that each is a large write.
    const FLUSH: u64 = 32 << 20;
    const LOOK: Duration = Duration::from_millis(10);
    let mut flushed = 0;
    while ended.recv_timeout(LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
        let written = file.metadata()?.len();
        if written.saturating_sub(flushed) >= FLUSH {
            file.sync_data()?;
            flushed = written;
        }
    }
    Ok(())
}

/// Builds into `out`, an empty file, without naming or syncing it.
///
/// # Errors
///
/// See [`BuildError`]. `out` holds nothing of use then.
pub fn write(
    image: &Image,
    out: &File,
    options: &BuildOptions,
    events: &mut dyn FnMut(Event),
) -> Result<BuildReport, BuildError> {
    let flattened = flatten(image, out, &options.flatten, events)?;
    let Flattened { tree, area, mut layers, attribution } = flattened;
    // Every checksum of metadata depends on the UUID and every indexed directory on the seed: were
    // they the whole image's, images on one base would have no metadata in common.
    let base = &layers[..layers.len().min(1)];
    let uuid = identity(b"uuid", base);
    let filesystem = ext4::finish(
        out,
        &area,
        &tree,
        &ext4::Options {
            free_bytes: options.free_bytes,
            free_inodes: options.free_inodes,
            uuid,
            hash_seed: identity(b"hash seed", base),
            timestamp: options.timestamp,
            journal: options.journal,
            label: options.label.clone(),
        },
    )?;
    let (layer_costs, paths) = costs(&attribution, &tree, options);
    for (layer, cost) in layers.iter_mut().zip(&layer_costs) {
        layer.cost = Some(parbake_cache::template::LayerCost {
            live_bytes: cost.live_bytes,
            hidden_bytes: cost.hidden_bytes(),
            live_nodes: cost.live_nodes,
            entries: cost.input.entries,
        });
    }
    Ok(BuildReport { filesystem, uuid, layers, layer_costs, paths })
}

fn costs(
    attribution: &Attribution,
    tree: &crate::tree::Tree,
    options: &BuildOptions,
) -> (Vec<LayerCost>, Vec<PathCost>) {
    (attribution.layers(tree), attribution.paths(tree, options.path_depth))
}

/// A UUID (version 8: made by own rules) that depends on nothing but the layers' contents, so that
/// other compression or another manifest around the same layers gives the same image. It tells
/// images of different bases apart, not images on one base.
fn identity(purpose: &[u8], layers: &[LayerRecord]) -> [u8; 16] {
    let mut hasher = Sha256::new();
    hasher.update(b"parbake ext4 ");
    hasher.update(purpose);
    for layer in layers {
        hasher.update(b"\n");
        hasher.update(layer.diff_id.as_bytes());
    }
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hasher.finalize()[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}
