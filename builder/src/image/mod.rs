//! Where images come from: what they are called, which of several is meant, what they say about
//! themselves, and where their layers' bytes are.
//!
//! [`open`] resolves a source down to one manifest and its configuration, both checked against
//! their digests; layers are opened only when [`crate::flatten`] reads them.

mod archive;
pub mod digest;
mod directory;
mod docker;
mod error;
mod filesystem;
mod layout;
pub mod manifest;
pub mod platform;
pub mod reference;
mod registry;
mod select;
mod tree_tar;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parbake_cache::Digest;

use crate::layer::decode::Compression;
use digest::{Algorithm, BlobDigest};
pub use error::ImageError;
pub use manifest::{Healthcheck, ImageConfig};
pub use platform::Platform;
pub use reference::ImageSource;

/// How an image is found.
#[derive(Debug, Clone, Default)]
pub struct ImageOptions {
    /// Which platform's image of several; default is Linux on this machine's architecture.
    pub platform: Platform,
    /// How registries are spoken to.
    pub registry: RegistryOptions,
    /// The store that templates are looked for in.
    pub store: Option<PathBuf>,
}

/// How registries are spoken to.
#[derive(Debug, Clone, Default)]
pub struct RegistryOptions {
    /// `host` or `host:port` of registries that speak plain HTTP. Loopback hosts always may.
    pub insecure: Vec<String>,
    /// A file of credentials that is used instead of the usual ones.
    pub authfile: Option<PathBuf>,
    /// A `registries.conf` that is used instead of the usual ones.
    pub registries_conf: Option<PathBuf>,
}

/// What happens while an image is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A layer's first bytes are being read.
    LayerStarted {
        /// The layer, counted from 0.
        layer: usize,
        /// Layers of the image.
        layers: usize,
        /// Bytes of its blob, if known.
        blob_size: Option<u64>,
    },
    /// More of a layer was laid into the image. Sent every few MiB.
    Progress {
        /// The layer, counted from 0.
        layer: usize,
        /// Bytes of its tar read so far.
        tar_bytes: u64,
    },
    /// A layer is complete and its digests are right.
    LayerFinished {
        /// The layer, counted from 0.
        layer: usize,
        /// Bytes of its tar.
        tar_bytes: u64,
        /// Entries in it.
        entries: u64,
    },
    /// Something to know that stops nothing.
    Warning(String),
}

/// An image: a manifest, a configuration, and layers not yet read.
pub struct Image {
    source: ImageSource,
    config: ImageConfig,
    manifest_digest: Option<Digest>,
    layers: Vec<Layer>,
}

/// Opens a blob anew, as it is stored.
pub type OpenBlob = dyn Fn() -> io::Result<Box<dyn Read + Send>> + Send + Sync;

/// Blobs by digest that are kept somewhere else than the image that names them.
#[derive(Clone, Default)]
pub struct BlobsElsewhere(pub BTreeMap<String, Arc<OpenBlob>>);

impl std::fmt::Debug for BlobsElsewhere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// A layer of an image.
pub struct Layer {
    digest: Option<BlobDigest>,
    size: Option<u64>,
    diff_id: Option<BlobDigest>,
    diff_algorithm: Algorithm,
    declared: Option<Compression>,
    created_by: Option<String>,
    whiteouts: bool,
    open: Arc<OpenBlob>,
}

impl Layer {
    /// The blob's digest, where the source names one.
    #[must_use]
    pub fn digest(&self) -> Option<&BlobDigest> {
        self.digest.as_ref()
    }

    /// The blob's size in bytes, where the source names it.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// The digest of the uncompressed tar, where the configuration names one.
    #[must_use]
    pub fn diff_id(&self) -> Option<&BlobDigest> {
        self.diff_id.as_ref()
    }

    /// What made the layer, as its history entry says.
    #[must_use]
    pub fn created_by(&self) -> Option<&str> {
        self.created_by.as_deref()
    }

    /// The algorithm its tar is hashed by.
    pub(crate) fn diff_algorithm(&self) -> Algorithm {
        self.diff_algorithm
    }

    /// How its media type says it is compressed.
    pub(crate) fn declared_compression(&self) -> Option<Compression> {
        self.declared
    }

    /// Whether names beginning with `.wh.` are markers; in a plain root filesystem they are names.
    pub(crate) fn has_whiteouts(&self) -> bool {
        self.whiteouts
    }

    /// What opens the blob, for whoever outlives the image.
    pub(crate) fn opener(&self) -> Arc<OpenBlob> {
        Arc::clone(&self.open)
    }

    /// Opens the blob.
    pub(crate) fn open(&self) -> io::Result<Box<dyn Read + Send>> {
        (self.open)()
    }
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layer")
            .field("digest", &self.digest)
            .field("size", &self.size)
            .field("diff_id", &self.diff_id)
            .finish_non_exhaustive()
    }
}

impl Image {
    fn of_one_layer(source: &ImageSource, open: Arc<OpenBlob>, diff_algorithm: Algorithm) -> Self {
        let layer = Layer {
            digest: None,
            size: None,
            diff_id: None,
            diff_algorithm,
            declared: None,
            created_by: None,
            whiteouts: false,
            open,
        };
        Self {
            source: source.clone(),
            config: ImageConfig::default(),
            manifest_digest: None,
            layers: vec![layer],
        }
    }

    /// An image of layers that are in memory, each a tar archive, compressed or not, lowest first;
    /// `source` is only what it says it came from.
    #[must_use]
    pub fn of_memory(source: &ImageSource, layers: Vec<Arc<[u8]>>) -> Self {
        let layers = layers.into_iter().map(|bytes| Layer {
            digest: None,
            size: Some(bytes.len() as u64),
            diff_id: None,
            diff_algorithm: select::OWN_ALGORITHM,
            declared: None,
            created_by: None,
            whiteouts: true,
            open: Arc::new(move || Ok(Box::new(io::Cursor::new(Arc::clone(&bytes))))),
        });
        Self {
            source: source.clone(),
            config: ImageConfig::default(),
            manifest_digest: None,
            layers: layers.collect(),
        }
    }

    /// Where it came from.
    #[must_use]
    pub fn source(&self) -> &ImageSource {
        &self.source
    }

    /// What it says about how it is run; nothing for a plain root filesystem.
    #[must_use]
    pub fn config(&self) -> &ImageConfig {
        &self.config
    }

    /// SHA-256 of its manifest; `None` where there is no manifest (archives of `docker save`,
    /// plain root filesystems).
    #[must_use]
    pub fn manifest_digest(&self) -> Option<Digest> {
        self.manifest_digest
    }

    /// Its layers, lowest first.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }
}

/// Opens the only image of the layout in `path`, some of whose layers are `elsewhere`.
///
/// # Errors
/// As [`open`].
pub fn open_partial_layout(
    path: &Path,
    elsewhere: BlobsElsewhere,
    options: &ImageOptions,
) -> Result<Image, ImageError> {
    let source = ImageSource::OciLayout { path: path.to_owned(), reference: None };
    let files = layout::LayoutFiles::directory(path)?.with(elsewhere);
    layout::open(files, &source, None, options)
}

/// Finds the image that `source` names.
///
/// # Errors
///
/// When it is not there, not one image, not for the platform, damaged, or no image at all.
pub fn open(
    source: &ImageSource,
    options: &ImageOptions,
    events: &mut dyn FnMut(Event),
) -> Result<Image, ImageError> {
    let image = match source {
        ImageSource::OciLayout { path, reference } => {
            let files = layout::LayoutFiles::directory(path)?;
            layout::open(files, source, reference.as_deref(), options)
        }
        ImageSource::OciArchive { path, reference } => {
            let files = layout::LayoutFiles::archive(archive::Archive::open(path)?);
            layout::open(files, source, reference.as_deref(), options)
        }
        ImageSource::DockerArchive { path, reference } => {
            docker::open(archive::Archive::open(path)?, source, reference.as_deref(), options)
        }
        ImageSource::Tar { path } => docker::open_tar(path, source),
        ImageSource::Directory { path } => directory::open(path, source),
        ImageSource::Ext4 { path } => filesystem::open(path, source),
        ImageSource::Template { name } => {
            filesystem::open_template(options.store.as_deref(), name, source)
        }
        ImageSource::Registry { reference } => registry::open(reference, source, options),
    }?;
    let config = &image.config;
    if image.manifest_digest.is_some() && (config.os.is_empty() || config.architecture.is_empty()) {
        let wanted = &options.platform;
        events(Event::Warning(format!("the image does not say its platform; taken for {wanted}")));
    }
    Ok(image)
}
