//! What can be wrong with an image before its layers are read.

use std::io;

use super::digest::BadDigest;
use super::manifest::DocumentError;

/// Why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Something could not be read.
    #[error("cannot read {what}: {source}")]
    Read {
        /// What.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// Not an OCI image layout.
    #[error("{path}: not an OCI image layout: {problem}")]
    Layout {
        /// The layout.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// Not an archive of the expected kind.
    #[error("{path}: {problem}")]
    Archive {
        /// The archive.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// An index, manifest or configuration is not usable.
    #[error("{what}: {source}")]
    Document {
        /// Which.
        what: String,
        /// What is wrong.
        source: DocumentError,
    },
    /// A digest that cannot be checked.
    #[error("{what}: {source}")]
    Digest {
        /// Where it stands.
        what: String,
        /// What is wrong.
        source: BadDigest,
    },
    /// Content is not what its digest says.
    #[error(
        "{what} has digest {actual}, expected {expected}; the image is damaged or was tampered with"
    )]
    DigestMismatch {
        /// What.
        what: String,
        /// The digest it should have.
        expected: String,
        /// The digest it has.
        actual: String,
    },
    /// Content is not as long as it should be.
    #[error("{what} has {actual} bytes, expected {expected}; the image is damaged or incomplete")]
    SizeMismatch {
        /// What.
        what: String,
        /// The size it should have.
        expected: u64,
        /// The size it has.
        actual: u64,
    },
    /// A document is larger than any real one.
    #[error("{what} has more than {limit} bytes")]
    TooLarge {
        /// What.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// No image of that name.
    #[error("{image}: no image named {wanted:?}; there are: {available}")]
    NoSuchReference {
        /// Where.
        image: String,
        /// The name asked for.
        wanted: String,
        /// The names there are.
        available: String,
    },
    /// No template of that name.
    #[error("there is no template {name} to start from: {reason}")]
    NoTemplate {
        /// As it was asked for.
        name: String,
        /// Why not.
        reason: String,
    },
    /// Several images and no choice.
    #[error("{image}: there are several images, name one of them: {available}")]
    Ambiguous {
        /// Where.
        image: String,
        /// The names there are.
        available: String,
    },
    /// No image for the platform.
    #[error("{image}: no image for {wanted}; there are: {available}")]
    NoPlatform {
        /// Where.
        image: String,
        /// The platform asked for.
        wanted: String,
        /// The platforms there are.
        available: String,
    },
    /// Configuration and manifest contradict each other.
    #[error("the configuration lists {diff_ids} layers (rootfs.diff_ids), the manifest {layers}")]
    LayerCount {
        /// Layers in the manifest.
        layers: usize,
        /// Layers in the configuration.
        diff_ids: usize,
    },
    /// More layers than allowed.
    #[error("the image has {layers} layers, more than {limit}")]
    TooManyLayers {
        /// Its layers.
        layers: usize,
        /// The limit.
        limit: usize,
    },
    /// `rootfs.type` is something else.
    #[error("the configuration's rootfs.type is {0:?}, expected \"layers\"")]
    RootfsType(String),
    /// A layer is no tar of file system changes.
    #[error("layer {layer} is of type {media_type:?}, which is not a file system layer")]
    LayerType {
        /// The layer, counted from 1.
        layer: usize,
        /// Its type.
        media_type: String,
    },
    /// A blob is not there.
    #[error("{what} is missing: {hint}")]
    MissingBlob {
        /// Which.
        what: String,
        /// What to do.
        hint: String,
    },
    /// The registry refused or could not be reached.
    #[error("{reference}: {problem}")]
    Registry {
        /// The image.
        reference: String,
        /// What happened.
        problem: String,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

impl ImageError {
    pub(super) fn read(what: impl Into<String>, source: io::Error) -> Self {
        Self::Read { what: what.into(), source }
    }
}
