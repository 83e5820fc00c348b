//! The same artifact dressed as an ordinary image, for registries that refuse what they do not
//! know.
//!
//! Every part becomes an uncompressed tar layer with one file, `parbake/<hex of its digest>`, and
//! the config an ordinary image config; annotations say what each layer holds. The content starts
//! right after the tar header, so that ranges of it can still be fetched: reading is a matter of
//! another digest and an offset. Packs of other artifacts are not built upon in this form.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::Digest;
use crate::artifact::{
    self, ArtifactError, CONFIG_TYPE, Descriptor, INDEX_TYPE, Index, MANIFEST_TYPE, MAX_ITEMS,
    MAX_PACKS, Manifest,
};
use crate::error::StoreError;
use crate::install::BlobSource;
use crate::layout::{BLOCK, write_entry};
use crate::publish::{Blob, Content, Publication, PublishError};

/// Marks a manifest of this form; the value is the form's version.
pub(crate) const MARK: &str = "dev.parbake.compat";
const VERSION: &str = "image-1";
const IMAGE_CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
const BLOB_DIGEST: &str = "dev.parbake.blob.digest";
const BLOB_SIZE: &str = "dev.parbake.blob.size";
const BLOB_TYPE: &str = "dev.parbake.blob.type";

/// An ordinary image's config, as little of it as must be.
#[derive(Serialize)]
struct ImageConfig<'a> {
    architecture: &'a str,
    os: &'a str,
    config: Empty,
    rootfs: RootFs,
}

#[derive(Serialize)]
struct Empty {}

#[derive(Serialize)]
struct RootFs {
    #[serde(rename = "type")]
    kind: &'static str,
    diff_ids: Vec<Digest>,
}

impl Publication {
    /// Dresses the publication as an ordinary image.
    ///
    /// # Errors
    /// When it builds upon packs elsewhere, or a file cannot be written.
    pub fn into_compat_image(mut self) -> Result<Self, PublishError> {
        let mut wrapped: HashMap<Digest, Descriptor> = HashMap::new();
        let mut blobs = Vec::new();
        for blob in std::mem::take(&mut self.blobs) {
            let inside = blob.descriptor.clone();
            let blob = self.wrap(blob)?;
            wrapped.insert(inside.digest, blob.descriptor.clone());
            blobs.push(blob);
        }
        for manifest in &mut self.manifests {
            let Content::Bytes(bytes) = &manifest.content else { continue };
            let inner = Manifest::parse(bytes, &manifest.descriptor.digest, "")?;
            let find = |inside: &Descriptor| {
                wrapped.get(&inside.digest).cloned().ok_or_else(|| {
                    ArtifactError::Inconsistent(format!("{} is not at hand", inside.digest))
                })
            };
            let mut layers = vec![find(&inner.config)?];
            for layer in &inner.layers {
                let mut dressed = find(layer)?;
                dressed.annotations.extend(layer.annotations.clone());
                layers.push(dressed);
            }
            let platform = manifest.descriptor.platform.as_ref();
            let config = artifact::to_json(&ImageConfig {
                architecture: platform.map_or("amd64", |platform| &platform.architecture),
                os: "linux",
                config: Empty {},
                rootfs: RootFs {
                    kind: "layers",
                    // An uncompressed layer's name is that of its content.
                    diff_ids: layers.iter().map(|layer| layer.digest).collect(),
                },
            });
            let size = config.len() as u64;
            let config = Blob {
                descriptor: Descriptor::new(IMAGE_CONFIG_TYPE, Digest::of(&config), size),
                content: Content::Bytes(config),
            };
            let mut annotations = inner.annotations.clone();
            annotations.insert(MARK.to_owned(), VERSION.to_owned());
            let outer = artifact::to_json(&Manifest {
                schema_version: 2,
                media_type: Some(MANIFEST_TYPE.to_owned()),
                artifact_type: None,
                config: config.descriptor.clone(),
                layers,
                annotations: annotations.clone(),
            });
            blobs.push(config);
            manifest.descriptor = Descriptor {
                artifact_type: None,
                annotations,
                digest: Digest::of(&outer),
                size: outer.len() as u64,
                ..manifest.descriptor.clone()
            };
            manifest.content = Content::Bytes(outer);
        }
        let Content::Bytes(bytes) = &self.index.content else { return Ok(self) };
        let old = Index::parse(bytes, &self.index.descriptor.digest)?;
        let index = artifact::to_json(&Index {
            artifact_type: None,
            manifests: self.manifests.iter().map(|blob| blob.descriptor.clone()).collect(),
            ..old
        });
        self.index = Blob {
            descriptor: Descriptor::new(INDEX_TYPE, Digest::of(&index), index.len() as u64),
            content: Content::Bytes(index),
        };
        self.blobs = blobs;
        Ok(self)
    }

    /// Puts a blob into a tar file of its own.
    fn wrap(&self, blob: Blob) -> Result<Blob, PublishError> {
        let inside = blob.descriptor;
        let name = format!("parbake/{}", inside.digest.hex());
        let write = |out: &mut dyn io::Write, content: &mut dyn Read| -> io::Result<()> {
            let mut out = out;
            write_entry(&mut out, &name, inside.size, content)?;
            io::Write::write_all(&mut out, &[0; 2 * BLOCK])
        };
        let (digest, size, content) = match blob.content {
            Content::Bytes(bytes) => {
                let mut tar = Vec::new();
                write(&mut tar, &mut &*bytes).map_err(StoreError::io(
                    "write",
                    self.staging_path(),
                    inside.size,
                ))?;
                (Digest::of(&tar), tar.len() as u64, Content::Bytes(tar))
            }
            Content::File(path) => {
                let target = path.with_extension("tar");
                let wrap = || -> io::Result<(Digest, u64)> {
                    let mut file = File::create(&target)?;
                    write(&mut file, &mut self.stop.watch(File::open(&path)?))?;
                    std::fs::remove_file(&path)?;
                    let mut file = self.stop.watch(File::open(&target)?);
                    let mut hasher = Sha256::new();
                    let size = io::copy(&mut file, &mut HashWriter(&mut hasher))?;
                    Ok((Digest::from_bytes(hasher.finalize().into()), size))
                };
                let (digest, size) =
                    wrap().map_err(StoreError::io("write", &target, inside.size))?;
                (digest, size, Content::File(target))
            }
            Content::Elsewhere => {
                let what = "an image cannot build upon packs elsewhere".to_owned();
                return Err(ArtifactError::Inconsistent(what).into());
            }
        };
        let mut descriptor = Descriptor::new(LAYER_TYPE, digest, size);
        descriptor.annotations.extend([
            (BLOB_DIGEST.to_owned(), inside.digest.to_string()),
            (BLOB_SIZE.to_owned(), inside.size.to_string()),
            (BLOB_TYPE.to_owned(), inside.media_type),
        ]);
        Ok(Blob { descriptor, content })
    }
}

struct HashWriter<'a>(&'a mut Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes the dress off: serves the parts of an artifact out of the layers of an image.
pub(crate) struct Undressed<'a> {
    source: &'a dyn BlobSource,
    layers: HashMap<Digest, Descriptor>,
}

/// The manifest as it was before it was dressed, and a source of its parts; nothing when it wears
/// no dress.
pub(crate) fn undress<'a>(
    manifest: &Manifest,
    source: &'a dyn BlobSource,
) -> Result<Option<(Manifest, Undressed<'a>)>, ArtifactError> {
    let Some(version) = manifest.annotations.get(MARK) else { return Ok(None) };
    if version != VERSION {
        return Err(ArtifactError::UnknownFeature(format!("compat {version}")));
    }
    if manifest.layers.len() > 2 * (MAX_PACKS + MAX_ITEMS) {
        return Err(ArtifactError::Inconsistent("it has too many layers".to_owned()));
    }
    let mut layers = HashMap::new();
    let mut parts = Vec::new();
    for layer in &manifest.layers {
        let note = |key: &str| layer.annotations.get(key);
        let digest = note(BLOB_DIGEST).and_then(|text| text.parse::<Digest>().ok());
        let size = note(BLOB_SIZE).and_then(|text| text.parse::<u64>().ok());
        let (Some(digest), Some(size), Some(kind)) = (digest, size, note(BLOB_TYPE)) else {
            continue;
        };
        if size.checked_add(BLOCK as u64).is_none_or(|end| end > layer.size) {
            let what = format!("layer {} is too short for what it holds", layer.digest);
            return Err(ArtifactError::Inconsistent(what));
        }
        parts.push(Descriptor {
            annotations: layer.annotations.clone(),
            ..Descriptor::new(kind, digest, size)
        });
        layers.insert(digest, layer.clone());
    }
    let config = parts
        .iter()
        .find(|part| part.media_type == CONFIG_TYPE)
        .cloned()
        .ok_or_else(|| ArtifactError::Inconsistent("it has no config in it".to_owned()))?;
    let bare = Manifest { config, layers: parts, ..manifest.clone() };
    Ok(Some((bare, Undressed { source, layers })))
}

impl BlobSource for Undressed<'_> {
    fn open(
        &self,
        blob: &Descriptor,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>> {
        let layer = self.layers.get(&blob.digest).ok_or(io::ErrorKind::NotFound)?;
        self.source.open(layer, offset.saturating_add(BLOCK as u64), len)
    }

    fn parallel(&self) -> usize {
        self.source.parallel()
    }
}
