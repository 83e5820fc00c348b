//! A template as an OCI artifact: the documents that go to a registry.
//!
//! ```text
//! index (per tag)                       one entry per variant: the bare template, and each snapshot
//!   └─ manifest                         artifactType application/vnd.parbake.template.v1
//!        ├─ config                      ArtifactConfig: the compat contract, and where each object is
//!        ├─ documents                   template, kernel bundle, snapshot: as they lie in the store
//!        ├─ indexes, page maps          per image
//!        ├─ kernel, initramfs, state    zstd
//!        └─ packs and their directories content, shared between images, variants, tags, templates
//! ```
//! Everything needed to run is linked from the manifest, never only attached to it. A manifest has
//! two layers per pack, so it stays far below the 4 MiB that registries accept.
//!
//! The bytes are a function of the template, its snapshots, the options and the packs built upon:
//! fields have a fixed order, maps are sorted, and the only time is the one given.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::format::FormatError;
use crate::template::{CompatContract, MachineShape};

/// The artifact's type.
pub const ARTIFACT_TYPE: &str = "application/vnd.parbake.template.v1";
/// The media type of [`ArtifactConfig`].
pub const CONFIG_TYPE: &str = "application/vnd.parbake.template.config.v1+json";
/// The version of [`ArtifactConfig`].
pub const CONFIG_VERSION: u32 = 1;
/// The media type of an OCI image manifest.
pub const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of an OCI image index.
pub const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// A registry commonly refuses more.
pub const MAX_MANIFEST_BYTES: u64 = 4 * 1024 * 1024;
/// More than any config needs.
pub const MAX_CONFIG_BYTES: u64 = 4 * 1024 * 1024;
/// The most packs an artifact may have: page maps count them in 16 bits.
pub const MAX_PACKS: usize = 4096;
/// The most objects and variants an artifact may have.
pub const MAX_ITEMS: usize = 256;

/// Media types of the layers.
pub mod layer {
    /// A document, as it lies in the store.
    pub const DOCUMENT: &str = "application/vnd.parbake.document.v1+json";
    /// A working set, as it lies in the store.
    pub const WORKING_SET: &str = "application/vnd.parbake.working-set.v1+json";
    /// The kernel's parts.
    pub const KERNEL: &str = "application/vnd.parbake.kernel.v1+zstd";
    /// Machine state.
    pub const STATE: &str = "application/vnd.parbake.snapshot.state.v1+zstd";
    /// An image's chunk index.
    pub const INDEX: &str = "application/vnd.parbake.index.v1";
    /// An image's page map.
    pub const MAP: &str = "application/vnd.parbake.map.v1+zstd";
    /// A pack's directory.
    pub const DIRECTORY: &str = "application/vnd.parbake.pack.directory.v1";
    /// A pack.
    pub const PACK: &str = "application/vnd.parbake.pack.v1+zstd";
}

/// The prefix of our annotations.
pub const ANNOTATION_PREFIX: &str = "dev.parbake.";

/// An OCI content descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    pub media_type: String,
    /// SHA-256 of its bytes.
    pub digest: Digest,
    /// Their number.
    pub size: u64,
    /// In an index: the type of the artifact behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// In an index: for which platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Notes; hints only, the config is the authority.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An OCI platform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// E.g. `amd64`.
    pub architecture: String,
    /// `linux`.
    pub os: String,
}

/// An OCI image manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// [`MANIFEST_TYPE`].
    #[serde(default)]
    pub media_type: Option<String>,
    /// [`ARTIFACT_TYPE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The config.
    pub config: Descriptor,
    /// Everything else.
    pub layers: Vec<Descriptor>,
    /// Notes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// An OCI image index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// [`INDEX_TYPE`].
    #[serde(default)]
    pub media_type: Option<String>,
    /// [`ARTIFACT_TYPE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The variants.
    pub manifests: Vec<Descriptor>,
    /// Notes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What one variant is, what it needs, and where each of its objects is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ArtifactConfig {
    /// [`CONFIG_VERSION`].
    pub schema_version: u32,
    /// Features a reader must know; none are defined yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// Guest architecture in OCI spelling.
    pub architecture: String,
    /// `linux`.
    pub os: String,
    /// The template's manifest.
    pub template: Digest,
    /// The snapshot's manifest, unless this is the bare template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Digest>,
    /// The snapshot's machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineShape>,
    /// What the snapshot needs of a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compat: Option<CompatContract>,
    /// The snapshot's working set, a document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<Digest>,
    /// All objects, parts before what refers to them.
    pub objects: Vec<ArtifactObject>,
    /// The packs, in the order page maps count them.
    pub packs: Vec<PackRecord>,
}

/// How an object travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", deny_unknown_fields)]
pub enum ArtifactObject {
    /// As a layer of its own bytes.
    Document {
        /// The object, and the layer.
        digest: Digest,
    },
    /// As a layer of its compressed bytes.
    Blob {
        /// The object.
        digest: Digest,
        /// Its size in bytes.
        size: u64,
        /// The compressed layer.
        layer: Digest,
    },
    /// As pages in packs.
    Image {
        /// The object, and the layer with its chunk index.
        digest: Digest,
        /// Its logical size in bytes.
        size: u64,
        /// The layer with its page map.
        map: Digest,
    },
}

/// A pack and its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PackRecord {
    /// The pack.
    pub pack: Digest,
    /// Its directory.
    pub directory: Digest,
}

/// An artifact that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// It is an image, or some other artifact.
    #[error(
        "{what} is not a parbake template but {found}; to make one of it: parbake build --from docker://{what}"
    )]
    NotATemplate {
        /// As it was asked for.
        what: String,
        /// What it says it is.
        found: String,
    },
    /// JSON that is not what it should be.
    #[error("{kind} {digest} is malformed: {source}")]
    Json {
        /// Manifest, index or config.
        kind: &'static str,
        /// Which.
        digest: Digest,
        /// What the decoder says.
        source: serde_json::Error,
    },
    /// A newer program's artifact.
    #[error(
        "the artifact has version {version} and this program knows up to {known}; use the newer parbake"
    )]
    Newer {
        /// What it says.
        version: u32,
        /// The newest known here.
        known: u32,
    },
    /// A mandatory feature of a newer program.
    #[error(
        "the artifact needs the feature {0:?}, which this program does not know; use the newer parbake"
    )]
    UnknownFeature(String),
    /// A layer that cannot be read.
    #[error("{digest} is {source}")]
    Format {
        /// The layer.
        digest: Digest,
        /// Why.
        source: FormatError,
    },
    /// Something that contradicts itself or is out of bounds.
    #[error("the artifact is inconsistent: {0}")]
    Inconsistent(String),
    /// Bytes that are not what their digest says.
    #[error("{digest} is damaged ({what}); it was fetched twice")]
    Damaged {
        /// The blob or object.
        digest: Digest,
        /// How it differs.
        what: String,
    },
    /// More than is ever needed.
    #[error("{kind} {digest} is {size} bytes, over the limit of {limit}")]
    TooLarge {
        /// What it is.
        kind: &'static str,
        /// Which.
        digest: Digest,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
}

impl Descriptor {
    /// A descriptor without notes.
    #[must_use]
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            artifact_type: None,
            platform: None,
            annotations: BTreeMap::new(),
        }
    }
}

impl Manifest {
    /// Reads a manifest known by `digest` that should be a template's.
    ///
    /// # Errors
    /// When it is something else; `what` is how the user named it.
    pub fn parse(bytes: &[u8], digest: &Digest, what: &str) -> Result<Self, ArtifactError> {
        let manifest: Self = parse_json("manifest", bytes, digest, MAX_MANIFEST_BYTES)?;
        let compat = manifest.annotations.contains_key(crate::compat_image::MARK);
        let found = manifest.artifact_type.as_deref().unwrap_or(&manifest.config.media_type);
        if found == ARTIFACT_TYPE || manifest.config.media_type == CONFIG_TYPE || compat {
            return Ok(manifest);
        }
        let newer = found.strip_prefix("application/vnd.parbake.template.v");
        if let Some(version) = newer.and_then(|version| version.parse().ok()) {
            return Err(ArtifactError::Newer { version, known: CONFIG_VERSION });
        }
        let found = match found {
            "application/vnd.oci.image.config.v1+json"
            | "application/vnd.docker.container.image.v1+json" => "an ordinary image".to_owned(),
            other => format!("an artifact of type {other:?}"),
        };
        Err(ArtifactError::NotATemplate { what: what.to_owned(), found })
    }

    /// The layer with this digest.
    ///
    /// # Errors
    /// When the manifest does not link it.
    pub fn layer(&self, digest: &Digest) -> Result<&Descriptor, ArtifactError> {
        self.layers.iter().find(|layer| layer.digest == *digest).ok_or_else(|| {
            ArtifactError::Inconsistent(format!("its manifest does not link {digest}"))
        })
    }
}

impl Index {
    /// Reads an index known by `digest`.
    ///
    /// # Errors
    /// When it is malformed or has too many entries.
    pub fn parse(bytes: &[u8], digest: &Digest) -> Result<Self, ArtifactError> {
        let index: Self = parse_json("index", bytes, digest, MAX_MANIFEST_BYTES)?;
        if index.manifests.len() > MAX_ITEMS {
            let what = format!("its index has {} entries", index.manifests.len());
            return Err(ArtifactError::Inconsistent(what));
        }
        Ok(index)
    }
}

impl ArtifactConfig {
    /// Reads a config known by `digest`; version and features first.
    ///
    /// # Errors
    /// When it is malformed, of a newer program, or contradicts itself.
    pub fn parse(bytes: &[u8], digest: &Digest) -> Result<Self, ArtifactError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Head {
            schema_version: u32,
            #[serde(default)]
            features: Vec<String>,
        }
        let head: Head = parse_json("config", bytes, digest, MAX_CONFIG_BYTES)?;
        if head.schema_version > CONFIG_VERSION {
            return Err(ArtifactError::Newer {
                version: head.schema_version,
                known: CONFIG_VERSION,
            });
        }
        if let Some(feature) = head.features.into_iter().next() {
            return Err(ArtifactError::UnknownFeature(feature));
        }
        let config: Self = parse_json("config", bytes, digest, MAX_CONFIG_BYTES)?;
        if config.packs.len() > MAX_PACKS || config.objects.len() > MAX_ITEMS {
            return Err(ArtifactError::Inconsistent("it has too many parts".to_owned()));
        }
        if config.snapshot.is_some() != config.compat.is_some()
            || config.snapshot.is_some() != config.machine.is_some()
        {
            let what = "a snapshot needs a machine and a compat contract".to_owned();
            return Err(ArtifactError::Inconsistent(what));
        }
        Ok(config)
    }
}

/// Encodes one of this module's documents.
#[must_use]
pub fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain structures always encode")
}

fn parse_json<T: serde::de::DeserializeOwned>(
    kind: &'static str,
    bytes: &[u8],
    digest: &Digest,
    limit: u64,
) -> Result<T, ArtifactError> {
    let size = bytes.len() as u64;
    if size > limit {
        return Err(ArtifactError::TooLarge { kind, digest: *digest, size, limit });
    }
    serde_json::from_slice(bytes).map_err(|source| ArtifactError::Json {
        kind,
        digest: *digest,
        source,
    })
}
