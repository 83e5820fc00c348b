//! From an index to the one manifest that is wanted, and from that to an [`Image`].

use std::io::Read;
use std::sync::Arc;

use parbake_cache::Digest;

use super::digest::{Algorithm, BlobDigest};
use super::error::ImageError;
use super::manifest::{
    DOCUMENT_MAX, Descriptor, Document, DocumentKind, RawConfig, is_layer, layer_compression,
};
use super::platform::Platform;
use super::{Image, ImageSource, Layer};
use crate::layer::tar::pax::base64;

/// Indexes inside one another.
const DEPTH_MAX: usize = 8;
/// Documents read to find one manifest.
const DOCUMENTS_MAX: usize = 500;
/// Layers of one image; overlay file systems end at 500, registries earlier.
pub(super) const LAYERS_MAX: usize = 2_000;

/// Where blobs are.
pub(super) trait Blobs: Send + Sync {
    /// Opens a layer's blob. `NotFound` if it is not there.
    fn open(&self, descriptor: &BlobPointer) -> std::io::Result<Box<dyn Read + Send>>;
    /// Reads a document, at most `DOCUMENT_MAX` and a byte of it. `NotFound` if it is not there.
    fn document(&self, descriptor: &BlobPointer, place: Place) -> std::io::Result<Vec<u8>>;
    /// Whether a blob can be opened at all, where that is cheap to know, and its size.
    fn size(&self, descriptor: &BlobPointer) -> Option<std::io::Result<u64>>;
}

/// Where a registry keeps a document; layouts make no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Manifests,
    Blobs,
}

/// A blob's digest, checked, and size.
#[derive(Debug, Clone)]
pub(super) struct BlobPointer {
    pub digest: BlobDigest,
    pub size: u64,
}

/// A manifest found, with its own bytes' digest.
pub(super) struct Found {
    pub digest: Digest,
    pub config: Box<Descriptor>,
    pub layers: Vec<Descriptor>,
}

/// Picks manifests out of indexes.
pub(super) struct Selector<'a> {
    pub blobs: &'a dyn Blobs,
    pub platform: &'a Platform,
    pub image: String,
    documents: usize,
    available: Vec<String>,
    refused: Option<ImageError>,
}

impl<'a> Selector<'a> {
    pub fn new(blobs: &'a dyn Blobs, platform: &'a Platform, image: String) -> Self {
        Self { blobs, platform, image, documents: 0, available: Vec::new(), refused: None }
    }

    /// The first of `candidates`, or of the indexes among them, that is an image for the platform.
    pub fn select(mut self, candidates: &[Descriptor]) -> Result<Found, ImageError> {
        if let Some(found) = self.search(candidates, 0)? {
            return Ok(found);
        }
        if self.available.is_empty()
            && let Some(refused) = self.refused
        {
            return Err(refused);
        }
        self.available.dedup();
        let available = match self.available.join(", ") {
            none if none.is_empty() => "none".to_owned(),
            some => some,
        };
        Err(ImageError::NoPlatform {
            image: self.image,
            wanted: self.platform.to_string(),
            available,
        })
    }

    /// Goes on from a document that was got by name, e.g. from a registry.
    pub fn select_document(mut self, bytes: &[u8]) -> Result<Found, ImageError> {
        let image = self.image.clone();
        let kind = Document::parse(bytes)
            .map_err(|source| ImageError::Document { what: image, source })?;
        match kind {
            DocumentKind::Index(manifests) => self.select(&manifests),
            DocumentKind::Manifest { config, layers } => {
                let found = Found { digest: Digest::of(bytes), config, layers };
                match self.fits(&found)? {
                    true => Ok(found),
                    false => self.select(&[]),
                }
            }
        }
    }

    fn search(
        &mut self,
        candidates: &[Descriptor],
        depth: usize,
    ) -> Result<Option<Found>, ImageError> {
        for descriptor in candidates {
            if is_attestation(descriptor) || !may_be_image(descriptor) {
                continue;
            }
            if let Some(platform) = &descriptor.platform
                && !self.platform.accepts(
                    &platform.os,
                    &platform.architecture,
                    platform.variant.as_deref(),
                )
            {
                self.note(&platform.os, &platform.architecture, platform.variant.as_deref());
                continue;
            }
            self.documents += 1;
            if self.documents > DOCUMENTS_MAX || depth > DEPTH_MAX {
                return Err(ImageError::Layout {
                    path: self.image.clone(),
                    problem: format!(
                        "more than {DOCUMENTS_MAX} manifests, or indexes nested deeper than {DEPTH_MAX}"
                    ),
                });
            }
            let what = format!("manifest {}", descriptor.digest);
            let bytes = read_document(self.blobs, descriptor, &what, Place::Manifests)?;
            match Document::parse(&bytes) {
                Ok(DocumentKind::Index(manifests)) => {
                    if let Some(found) = self.search(&manifests, depth + 1)? {
                        return Ok(Some(found));
                    }
                }
                Ok(DocumentKind::Manifest { config, layers }) => {
                    let found = Found { digest: Digest::of(&bytes), config, layers };
                    // Where the index names a platform, the configuration is not asked again.
                    if descriptor.platform.is_some() || self.fits(&found)? {
                        return Ok(Some(found));
                    }
                }
                Err(source) => self.refused = Some(ImageError::Document { what, source }),
            }
        }
        Ok(None)
    }

    /// Whether a manifest's configuration is for the platform.
    fn fits(&mut self, found: &Found) -> Result<bool, ImageError> {
        let config = read_config(self.blobs, &found.config)?;
        let fits =
            self.platform.accepts(&config.os, &config.architecture, config.variant.as_deref());
        if !fits {
            self.note(&config.os, &config.architecture, config.variant.as_deref());
        }
        Ok(fits)
    }

    fn note(&mut self, os: &str, architecture: &str, variant: Option<&str>) {
        let variant = variant.filter(|variant| !variant.is_empty()).map(str::to_owned);
        let platform =
            Platform { os: os.to_owned(), architecture: architecture.to_owned(), variant };
        if self.available.len() < 50 {
            self.available.push(platform.to_string());
        }
    }
}

/// BuildKit stores provenance beside images, under a platform that cannot be.
fn is_attestation(descriptor: &Descriptor) -> bool {
    descriptor.annotations.contains_key("vnd.docker.reference.type")
        || descriptor
            .platform
            .as_ref()
            .is_some_and(|platform| platform.os == "unknown" && platform.architecture == "unknown")
}

/// Other kinds of content may stand in an index and are passed over (image-index.md).
fn may_be_image(descriptor: &Descriptor) -> bool {
    descriptor.artifact_type.is_empty()
        && matches!(
            descriptor.media_type.as_str(),
            "" | "application/vnd.oci.image.index.v1+json"
                | "application/vnd.oci.image.manifest.v1+json"
                | "application/vnd.docker.distribution.manifest.list.v2+json"
                | "application/vnd.docker.distribution.manifest.v2+json"
                | "application/vnd.docker.distribution.manifest.v1+json"
                | "application/vnd.docker.distribution.manifest.v1+prettyjws"
        )
}

fn pointer(descriptor: &Descriptor, what: &str) -> Result<BlobPointer, ImageError> {
    let digest = descriptor
        .digest
        .parse()
        .map_err(|source| ImageError::Digest { what: what.to_owned(), source })?;
    Ok(BlobPointer { digest, size: descriptor.size })
}

/// Reads a document and checks it against its descriptor.
pub(super) fn read_document(
    blobs: &dyn Blobs,
    descriptor: &Descriptor,
    what: &str,
    place: Place,
) -> Result<Vec<u8>, ImageError> {
    let blob = pointer(descriptor, what)?;
    if blob.size > DOCUMENT_MAX {
        return Err(ImageError::TooLarge { what: what.to_owned(), limit: DOCUMENT_MAX });
    }
    let bytes = match descriptor.data.as_ref().and_then(|data| base64(data.as_bytes())) {
        Some(data) => data,
        None => blobs.document(&blob, place).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => missing(what, descriptor),
            _ => ImageError::read(what, source),
        })?,
    };
    if bytes.len() as u64 > DOCUMENT_MAX {
        return Err(ImageError::TooLarge { what: what.to_owned(), limit: DOCUMENT_MAX });
    }
    check_document(&bytes, &blob, what)?;
    Ok(bytes)
}

/// Checks a document's digest and size.
fn check_document(bytes: &[u8], blob: &BlobPointer, what: &str) -> Result<(), ImageError> {
    let actual = BlobDigest::of(blob.digest.algorithm(), bytes);
    if actual != blob.digest {
        return Err(ImageError::DigestMismatch {
            what: what.to_owned(),
            expected: blob.digest.to_string(),
            actual: actual.to_string(),
        });
    }
    if bytes.len() as u64 != blob.size {
        return Err(ImageError::SizeMismatch {
            what: what.to_owned(),
            expected: blob.size,
            actual: bytes.len() as u64,
        });
    }
    Ok(())
}

fn missing(what: &str, descriptor: &Descriptor) -> ImageError {
    let hint = if descriptor.urls.is_empty() {
        "the image is incomplete; copy it again with all its blobs".to_owned()
    } else {
        format!(
            "its licence keeps it out of the image and it is to be got from {}; put it among the image's blobs",
            descriptor.urls.first().map_or("", String::as_str)
        )
    };
    ImageError::MissingBlob { what: what.to_owned(), hint }
}

fn read_config(blobs: &dyn Blobs, descriptor: &Descriptor) -> Result<RawConfig, ImageError> {
    let what = format!("configuration {}", descriptor.digest);
    let bytes = read_document(blobs, descriptor, &what, Place::Blobs)?;
    parse_config(&bytes, what)
}

pub(super) fn parse_config(bytes: &[u8], what: String) -> Result<RawConfig, ImageError> {
    RawConfig::parse(bytes).map_err(|error| ImageError::Document {
        what,
        source: super::manifest::DocumentError::Json(error.to_string()),
    })
}

/// The diff_ids of a configuration, one for each of `layers` layers.
pub(super) fn diff_ids(config: &RawConfig, layers: usize) -> Result<Vec<BlobDigest>, ImageError> {
    if config.rootfs.kind != "layers" && !(config.rootfs.kind.is_empty() && layers == 0) {
        return Err(ImageError::RootfsType(config.rootfs.kind.clone()));
    }
    if config.rootfs.diff_ids.len() != layers {
        return Err(ImageError::LayerCount { layers, diff_ids: config.rootfs.diff_ids.len() });
    }
    if layers > LAYERS_MAX {
        return Err(ImageError::TooManyLayers { layers, limit: LAYERS_MAX });
    }
    let parse = |(index, text): (usize, &String)| {
        let what = format!("diff_id of layer {}", index + 1);
        text.parse().map_err(|source| ImageError::Digest { what, source })
    };
    config.rootfs.diff_ids.iter().enumerate().map(parse).collect()
}

/// Makes the image of a manifest.
pub(super) fn image(
    source: &ImageSource,
    blobs: &Arc<dyn Blobs>,
    found: Found,
) -> Result<Image, ImageError> {
    let config = read_config(&**blobs, &found.config)?;
    let diff_ids = diff_ids(&config, found.layers.len())?;
    let created_by = config.created_by();
    let mut layers = Vec::new();
    for (index, (descriptor, diff_id)) in found.layers.into_iter().zip(diff_ids).enumerate() {
        let number = index + 1;
        let what = format!("layer {number} ({})", descriptor.digest);
        if !is_layer(&descriptor.media_type) {
            return Err(ImageError::LayerType { layer: number, media_type: descriptor.media_type });
        }
        let blob = pointer(&descriptor, &what)?;
        let inline = descriptor.data.as_ref().and_then(|data| base64(data.as_bytes()));
        if inline.is_none() {
            match blobs.size(&blob) {
                Some(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(missing(&what, &descriptor));
                }
                Some(Err(error)) => return Err(ImageError::read(what, error)),
                Some(Ok(actual)) if actual != blob.size => {
                    return Err(ImageError::SizeMismatch { what, expected: blob.size, actual });
                }
                _ => {}
            }
        }
        layers.push(Layer {
            digest: Some(blob.digest.clone()),
            size: Some(blob.size),
            diff_algorithm: diff_id.algorithm(),
            diff_id: Some(diff_id),
            declared: layer_compression(&descriptor.media_type),
            created_by: created_by.get(index).cloned().flatten(),
            whiteouts: true,
            open: {
                let blobs = Arc::clone(blobs);
                Arc::new(move || match &inline {
                    Some(data) => Ok(Box::new(std::io::Cursor::new(data.clone()))),
                    None => blobs.open(&blob),
                })
            },
        });
    }
    Ok(Image {
        source: source.clone(),
        config: config.into_config(),
        manifest_digest: Some(found.digest),
        layers,
    })
}

/// The algorithm for digests nobody prescribes.
pub(super) const OWN_ALGORITHM: Algorithm = Algorithm::Sha256;
