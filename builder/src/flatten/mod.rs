//! From an image's layers to one tree, with file contents written straight into the ext4 image.
//!
//! Each layer is decoded once. Its entries are laid over the tree in order ([`overlay`] has the
//! rules), and file contents go to the image's data area as they come ([`data`]). What a higher
//! layer hides later becomes free space again when the image is finished.

pub mod attribution;
pub mod build;
pub(crate) mod data;
mod entry;
pub mod error;
pub mod overlay;
pub mod path;
mod xattr;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;

use parbake_cache::template::LayerRecord;

use crate::ext4::DataArea;
use crate::image::digest::BlobDigest;
use crate::image::{Event, Image, Layer};
use crate::layer::decode::{DecodeError, Expansion};
use crate::layer::stream::{LayerInput, LayerOutcome, LayerStream};
use crate::layer::tar::TarLimits;
use crate::tree::{Timestamp, Tree};
use attribution::Attribution;
use data::DataWriter;
use entry::{Applied, Applier};
pub use error::{EntryProblem, FlattenError};
use overlay::{Overlay, TreeLimits};

/// Bytes of tar that may be decoded ahead of where the tree is, for each of the two layers that
/// are open at a time.
const RUN_AHEAD: usize = 12 << 20;

/// How an image is flattened.
#[derive(Debug, Clone)]
pub struct FlattenOptions {
    /// 1 decodes on the calling thread; more decodes ahead on others. The result is the same.
    pub threads: usize,
    /// Modification time of directories that layers imply but do not contain.
    pub implied_mtime: Timestamp,
    /// Bounds.
    pub limits: Limits,
    /// Set by another thread to stop.
    pub cancel: Arc<AtomicBool>,
}

impl Default for FlattenOptions {
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, Into::into),
            implied_mtime: Timestamp::default(),
            limits: Limits::default(),
            cancel: Arc::default(),
        }
    }
}

/// Bounds on what an image may take; generous for real images, finite for malicious ones.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// What one layer may decompress to.
    pub expansion: Expansion,
    /// Entries of all layers.
    pub entries: u64,
    /// Bytes of file contents of all layers, holes not counted.
    pub data_bytes: u64,
    /// What one tar entry's headers may take.
    pub tar: TarLimits,
    /// What the tree may take.
    pub tree: TreeLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            expansion: Expansion::default(),
            entries: 20_000_000,
            // What an image can hold at most.
            data_bytes: 504 << 30,
            tar: TarLimits::default(),
            tree: TreeLimits::default(),
        }
    }
}

/// A flattened image: everything the ext4 writer needs, and where it came from.
#[derive(Debug)]
pub struct Flattened {
    /// The tree.
    pub tree: Tree,
    /// The blocks its files' contents were written to.
    pub area: DataArea,
    /// The layers, lowest first, with their verified digests.
    pub layers: Vec<LayerRecord>,
    /// Which layer each node came from.
    pub attribution: Attribution,
}

/// Flattens `image` into a tree, writing file contents to `out`, an empty file.
///
/// # Errors
///
/// Damaged or malicious layers, by layer and entry; limits; failing reads and writes; cancellation.
/// `out` holds nothing of use then.
pub fn flatten(
    image: &Image,
    out: &File,
    options: &FlattenOptions,
    events: &mut dyn FnMut(Event),
) -> Result<Flattened, FlattenError> {
    std::thread::scope(|scope| run(scope, image, out, options, events))
}

fn run<'scope>(
    scope: &'scope Scope<'scope, '_>,
    image: &'scope Image,
    out: &File,
    options: &FlattenOptions,
    events: &mut dyn FnMut(Event),
) -> Result<Flattened, FlattenError> {
    let layers = image.layers();
    let mut applier = Applier {
        overlay: Overlay::new(options.limits.tree, options.implied_mtime),
        data: DataWriter::new(out),
        limits: options.limits,
        cancel: &options.cancel,
        entries: 0,
    };
    let mut records = Vec::new();
    let mut costs = Vec::new();
    let mut next = None;
    for (index, layer) in layers.iter().enumerate() {
        if options.cancel.load(Ordering::Relaxed) {
            return Err(FlattenError::Cancelled);
        }
        let stream = match next.take() {
            Some(stream) => stream,
            None => start(scope, layer, index, options)?,
        };
        // The next layer's threads begin now; they stop by themselves when they are ahead enough.
        if options.threads > 1
            && let Some(following) = layers.get(index + 1)
        {
            next = Some(start(scope, following, index + 1, options)?);
        }
        events(Event::LayerStarted { layer: index, layers: layers.len(), blob_size: layer.size() });
        let before = applier.data.bytes_allocated();
        let Applied { outcome, entries } = applier.layer(layer, index, stream, events)?;
        check(layer, index, &outcome, events)?;
        events(Event::LayerFinished { layer: index, tar_bytes: outcome.tar_size, entries });
        costs.push(attribution::LayerInput {
            blob_bytes: outcome.blob_size,
            written_bytes: applier.data.bytes_allocated() - before,
            entries,
        });
        records.push(LayerRecord {
            diff_id: outcome.diff_id.to_string(),
            size: outcome.tar_size,
            created_by: layer.created_by().map(str::to_owned),
            // Known once all layers are.
            cost: None,
        });
    }
    let Applier { overlay, data, .. } = applier;
    let needed = data.bytes_allocated();
    let (area, full) = data.finish().map_err(FlattenError::Write)?;
    if full {
        return Err(FlattenError::NoSpace { needed });
    }
    let (tree, origin) = overlay.into_tree();
    Ok(Flattened { tree, area, layers: records, attribution: Attribution::new(origin, costs) })
}

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    layer: &Layer,
    index: usize,
    options: &FlattenOptions,
) -> Result<LayerStream, FlattenError> {
    let read = |source| FlattenError::Blob { layer: name(layer, index), source };
    let blob = layer.open().map_err(read)?;
    let blob: Box<dyn io::Read + Send> = match layer.size() {
        // One byte more shows that there are more.
        Some(size) => Box::new(io::Read::take(blob, size.saturating_add(1))),
        None => blob,
    };
    let input = LayerInput {
        blob,
        blob_algorithm: layer.digest().map(BlobDigest::algorithm),
        diff_algorithm: layer.diff_algorithm(),
        expansion: options.limits.expansion,
    };
    if options.threads > 1 {
        LayerStream::spawn(scope, input, RUN_AHEAD / crate::layer::stream::CHUNK).map_err(read)
    } else {
        Ok(LayerStream::inline(input))
    }
}

/// Checks what a layer turned out to be against what the image says.
fn check(
    layer: &Layer,
    index: usize,
    outcome: &LayerOutcome,
    events: &mut dyn FnMut(Event),
) -> Result<(), FlattenError> {
    check_blob(layer, index, outcome)?;
    if let Some(expected) = layer.diff_id()
        && *expected != outcome.diff_id
    {
        return Err(FlattenError::DiffId {
            layer: name(layer, index),
            expected: expected.to_string(),
            actual: outcome.diff_id.to_string(),
        });
    }
    if let (Some(declared), Some(actual)) = (layer.declared_compression(), outcome.compression)
        && declared != actual
    {
        events(Event::Warning(format!(
            "{}: is {}, though its media type says {}",
            name(layer, index),
            actual.name(),
            declared.name()
        )));
    }
    Ok(())
}

/// Checks a layer's blob: its size, then its digest.
fn check_blob(layer: &Layer, index: usize, outcome: &LayerOutcome) -> Result<(), FlattenError> {
    if matches!(outcome.error, Some(DecodeError::Read(_) | DecodeError::Bomb { .. })) {
        return Ok(());
    }
    if let Some(expected) = layer.size()
        && outcome.blob_size != expected
    {
        return Err(FlattenError::BlobSize {
            layer: name(layer, index),
            expected,
            actual: outcome.blob_size,
        });
    }
    match (layer.digest(), &outcome.blob_digest) {
        (Some(expected), Some(actual)) if expected != actual => Err(FlattenError::BlobDigest {
            layer: name(layer, index),
            expected: expected.to_string(),
            actual: actual.to_string(),
        }),
        (Some(_), None) if outcome.error.is_none() => Err(FlattenError::BlobDigest {
            layer: name(layer, index),
            expected: "a digest".to_owned(),
            actual: "none".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// A layer in messages: its number from 1 and the beginning of its digest.
fn name(layer: &Layer, index: usize) -> String {
    match layer.digest().or(layer.diff_id()) {
        Some(digest) => {
            format!("layer {} ({}:{})", index + 1, digest.algorithm_name(), &digest.hex()[..12])
        }
        None => format!("layer {}", index + 1),
    }
}
