//! The documents of an image: index, manifest, configuration.
//!
//! Read leniently, as the specification asks: unknown fields are ignored, any optional field may
//! be `null`, media types may be missing or Docker's. What is not an image for this program is
//! refused by what it is (schema 1, artifacts).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use parbake_cache::template::ProcessConfig;

/// Largest index, manifest or configuration read, in bytes. Registries refuse manifests over 4 MiB.
pub const DOCUMENT_MAX: u64 = 8 << 20;

/// A pointer to a blob.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What the blob says it is.
    #[serde(default, deserialize_with = "or_default")]
    pub media_type: String,
    /// Its digest.
    #[serde(default, deserialize_with = "or_default")]
    pub digest: String,
    /// Its size in bytes.
    #[serde(default, deserialize_with = "or_default")]
    pub size: u64,
    /// For which platform, in an index.
    #[serde(default)]
    pub platform: Option<DescriptorPlatform>,
    /// Notes.
    #[serde(default, deserialize_with = "or_default")]
    pub annotations: BTreeMap<String, String>,
    /// The kind of artifact, if it is one.
    #[serde(default, deserialize_with = "or_default")]
    pub artifact_type: String,
    /// Where else the blob may be.
    #[serde(default, deserialize_with = "or_default")]
    pub urls: Vec<String>,
    /// The blob itself in base64.
    #[serde(default)]
    pub data: Option<String>,
}

/// A platform as an index writes it.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct DescriptorPlatform {
    /// Operating system.
    #[serde(default, deserialize_with = "or_default")]
    pub os: String,
    /// Architecture.
    #[serde(default, deserialize_with = "or_default")]
    pub architecture: String,
    /// Variant of the architecture.
    #[serde(default)]
    pub variant: Option<String>,
}

/// An index or a manifest; which of them, its fields decide.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Document {
    /// 2 in everything this program reads.
    #[serde(default)]
    pub schema_version: Option<u64>,
    /// What the document says it is.
    #[serde(default, deserialize_with = "or_default")]
    pub media_type: String,
    /// The kind of artifact, if it is one.
    #[serde(default, deserialize_with = "or_default")]
    pub artifact_type: String,
    /// An index's manifests.
    #[serde(default)]
    pub manifests: Option<Vec<Descriptor>>,
    /// A manifest's configuration.
    #[serde(default)]
    pub config: Option<Descriptor>,
    /// A manifest's layers, lowest first.
    #[serde(default)]
    pub layers: Option<Vec<Descriptor>>,
    /// Schema 1's layers.
    #[serde(default, rename = "fsLayers")]
    pub schema1_layers: Option<serde_json::Value>,
}

/// What a [`Document`] is.
#[derive(Debug, Clone)]
pub enum DocumentKind {
    /// An index of manifests.
    Index(Vec<Descriptor>),
    /// An image.
    Manifest {
        /// Its configuration.
        config: Box<Descriptor>,
        /// Its layers.
        layers: Vec<Descriptor>,
    },
}

/// Why a document is no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Not JSON, or not of the right shape.
    #[error("not a valid manifest: {0}")]
    Json(String),
    /// Docker's first format.
    #[error(
        "a Docker schema 1 manifest, which is obsolete; push the image again with a current tool"
    )]
    Schema1,
    /// An artifact.
    #[error("an artifact of type {0:?}, not an image")]
    Artifact(String),
    /// Neither index nor manifest.
    #[error("neither an image index nor an image manifest (media type {0:?})")]
    Unknown(String),
    /// An artifact or an attestation, by its configuration's type.
    #[error("not an image: its configuration is of type {0:?}")]
    NotAnImage(String),
}

impl Document {
    /// Parses an index or manifest and says which it is.
    pub fn parse(bytes: &[u8]) -> Result<DocumentKind, DocumentError> {
        let document: Self = serde_json::from_slice(bytes)
            .map_err(|error| DocumentError::Json(error.to_string()))?;
        document.kind()
    }

    fn kind(self) -> Result<DocumentKind, DocumentError> {
        if self.schema_version == Some(1)
            || self.schema1_layers.is_some()
            || self.media_type.starts_with("application/vnd.docker.distribution.manifest.v1")
        {
            return Err(DocumentError::Schema1);
        }
        match (self.manifests, self.config, self.layers) {
            (Some(manifests), _, None) => Ok(DocumentKind::Index(manifests)),
            (None, Some(config), layers) => {
                if !is_image_config(&config.media_type) {
                    return Err(if self.artifact_type.is_empty() {
                        DocumentError::NotAnImage(config.media_type)
                    } else {
                        DocumentError::Artifact(self.artifact_type)
                    });
                }
                Ok(DocumentKind::Manifest {
                    config: config.into(),
                    layers: layers.unwrap_or_default(),
                })
            }
            _ if !self.artifact_type.is_empty() => Err(DocumentError::Artifact(self.artifact_type)),
            _ => Err(DocumentError::Unknown(self.media_type)),
        }
    }
}

fn is_image_config(media_type: &str) -> bool {
    matches!(
        media_type,
        ""
            | "application/vnd.oci.image.config.v1+json"
            | "application/vnd.docker.container.image.v1+json"
            // Old tools wrote these for images too.
            | "application/json"
            | "application/octet-stream"
    )
}

/// How a layer's media type says it is compressed: `Some(name)` of gzip, zstd or plain tar, or
/// `None` if the type says nothing.
#[must_use]
pub fn layer_compression(media_type: &str) -> Option<crate::layer::decode::Compression> {
    use crate::layer::decode::Compression;
    if media_type.ends_with("+gzip") || media_type.ends_with(".tar.gzip") {
        Some(Compression::Gzip)
    } else if media_type.ends_with("+zstd") || media_type.ends_with(".tar.zstd") {
        Some(Compression::Zstd)
    } else if media_type.ends_with(".tar") {
        Some(Compression::None)
    } else {
        None
    }
}

/// Whether a layer of this media type is a tar of file system changes; encrypted layers and
/// artifacts are not.
#[must_use]
pub fn is_layer(media_type: &str) -> bool {
    media_type.is_empty()
        || (layer_compression(media_type).is_some() && !media_type.ends_with("+encrypted"))
}

/// The configuration as images write it.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct RawConfig {
    #[serde(default, deserialize_with = "or_default")]
    pub architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    pub os: String,
    #[serde(default)]
    pub variant: Option<String>,
    #[serde(default)]
    pub created: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub config: RawProcess,
    #[serde(default, deserialize_with = "or_default")]
    pub rootfs: RawRootfs,
    #[serde(default, deserialize_with = "or_default")]
    pub history: Vec<RawHistory>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct RawRootfs {
    #[serde(default, rename = "type", deserialize_with = "or_default")]
    pub kind: String,
    #[serde(default, deserialize_with = "or_default")]
    pub diff_ids: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct RawHistory {
    #[serde(default)]
    pub created_by: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub empty_layer: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct RawProcess {
    #[serde(default, deserialize_with = "or_default")]
    pub user: String,
    #[serde(default, deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub working_dir: String,
    #[serde(default)]
    pub entrypoint: Option<Vec<String>>,
    #[serde(default)]
    pub cmd: Option<Vec<String>>,
    #[serde(default)]
    pub stop_signal: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub exposed_ports: BTreeMap<String, serde_json::Value>,
    #[serde(default, deserialize_with = "or_default")]
    pub volumes: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    pub healthcheck: Option<Healthcheck>,
    #[serde(default)]
    pub shell: Option<Vec<String>>,
    #[serde(default, deserialize_with = "or_default")]
    pub on_build: Vec<String>,
}

/// How a container's health is asked for, as Docker writes it; durations in nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Healthcheck {
    /// `NONE`, `CMD` and arguments, or `CMD-SHELL` and a line.
    #[serde(default, deserialize_with = "or_default")]
    pub test: Vec<String>,
    /// Time between two checks.
    #[serde(default, deserialize_with = "or_default")]
    pub interval: i64,
    /// Time after which a check has failed.
    #[serde(default, deserialize_with = "or_default")]
    pub timeout: i64,
    /// Time at the start in which failures do not count.
    #[serde(default, deserialize_with = "or_default")]
    pub start_period: i64,
    /// Time between two checks while starting.
    #[serde(default, deserialize_with = "or_default")]
    pub start_interval: i64,
    /// Failures in a row until unhealthy.
    #[serde(default, deserialize_with = "or_default")]
    pub retries: i64,
}

/// What an image says about how it is run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// Operating system; empty if the image does not say.
    pub os: String,
    /// Architecture in OCI spelling; empty if the image does not say.
    pub architecture: String,
    /// Variant of the architecture.
    pub variant: Option<String>,
    /// When the image says it was made (RFC 3339).
    pub created: Option<String>,
    /// `NAME=value`; of several with one name the last value, at the first one's place.
    pub env: Vec<String>,
    /// User, or user and group, by name or number.
    pub user: String,
    /// Working directory.
    pub working_dir: String,
    /// Entrypoint; absent and empty differ, as an empty one overrides.
    pub entrypoint: Option<Vec<String>>,
    /// Command or the entrypoint's arguments.
    pub cmd: Option<Vec<String>>,
    /// Signal that asks the process to end.
    pub stop_signal: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Ports, e.g. `80/tcp`, sorted.
    pub exposed_ports: Vec<String>,
    /// Directories meant to be volumes, sorted.
    pub volumes: Vec<String>,
    /// Health check.
    pub healthcheck: Option<Healthcheck>,
    /// Shell of shell-form commands.
    pub shell: Option<Vec<String>>,
    /// Instructions for whoever builds on the image.
    pub on_build: Vec<String>,
}

impl ImageConfig {
    /// The part that a template keeps.
    #[must_use]
    pub fn process(&self) -> ProcessConfig {
        ProcessConfig {
            env: self.env.clone(),
            user: self.user.clone(),
            working_dir: self.working_dir.clone(),
            entrypoint: self.entrypoint.clone().unwrap_or_default(),
            cmd: self.cmd.clone().unwrap_or_default(),
            stop_signal: self.stop_signal.clone(),
        }
    }
}

impl RawConfig {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes)
    }

    /// The history's commands, one for each layer.
    pub(super) fn created_by(&self) -> Vec<Option<String>> {
        let layers = self.history.iter().filter(|entry| !entry.empty_layer);
        layers.map(|entry| entry.created_by.clone()).collect()
    }

    pub(super) fn into_config(self) -> ImageConfig {
        let process = self.config;
        ImageConfig {
            os: self.os,
            architecture: self.architecture,
            variant: self.variant.filter(|variant| !variant.is_empty()),
            created: self.created,
            env: last_wins(process.env),
            user: process.user,
            working_dir: process.working_dir,
            entrypoint: process.entrypoint,
            cmd: process.cmd,
            stop_signal: process.stop_signal.filter(|signal| !signal.is_empty()),
            labels: process.labels,
            exposed_ports: process.exposed_ports.into_keys().collect(),
            volumes: process.volumes.into_keys().collect(),
            healthcheck: process.healthcheck,
            shell: process.shell,
            on_build: process.on_build,
        }
    }
}

fn last_wins(env: Vec<String>) -> Vec<String> {
    let mut places = BTreeMap::new();
    let mut out: Vec<String> = Vec::with_capacity(env.len());
    for variable in env {
        let name = variable.split('=').next().unwrap_or_default().to_owned();
        match places.get(&name) {
            Some(&place) => out[place] = variable,
            None => {
                places.insert(name, out.len());
                out.push(variable);
            }
        }
    }
    out
}

/// `null` is the same as absent.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_told_apart() {
        let kind = |text: &str| Document::parse(text.as_bytes());
        assert!(matches!(kind(r#"{"manifests":[]}"#), Ok(DocumentKind::Index(_))));
        let manifest = r#"{"schemaVersion":2,"config":{"digest":"x"},"layers":null,"new":1}"#;
        assert!(matches!(kind(manifest), Ok(DocumentKind::Manifest { .. })));
        for (text, want) in [
            (r#"{"schemaVersion":1,"fsLayers":[]}"#, DocumentError::Schema1),
            (r#"{"schemaVersion":2,"mediaType":"m"}"#, DocumentError::Unknown("m".into())),
            (
                r#"{"artifactType":"a/b","config":{"mediaType":"application/vnd.oci.empty.v1+json"},"layers":[]}"#,
                DocumentError::Artifact("a/b".into()),
            ),
            (
                r#"{"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json"},"layers":[]}"#,
                DocumentError::NotAnImage("application/vnd.cncf.helm.config.v1+json".into()),
            ),
        ] {
            assert_eq!(kind(text).unwrap_err(), want);
        }
        assert!(matches!(kind("["), Err(DocumentError::Json(_))));
    }

    #[test]
    fn configuration_reads_nulls_and_unknown_fields() {
        let text = r#"{"architecture":"amd64","os":"linux","config":{"Env":["A=1","B=2","A=3"],
            "Entrypoint":null,"Cmd":[],"Labels":null,"ExposedPorts":{"80/tcp":{}},"ArgsEscaped":true,
            "Healthcheck":{"Test":["CMD","true"],"Retries":null}},
            "rootfs":{"type":"layers","diff_ids":["x","y"]},
            "history":[{"created_by":"one"},{"created_by":"env","empty_layer":true},{}],"moby.x":1}"#;
        let raw = RawConfig::parse(text.as_bytes()).unwrap();
        assert_eq!(raw.created_by(), [Some("one".to_owned()), None]);
        let config = raw.into_config();
        assert_eq!(config.env, ["A=3", "B=2"]);
        assert_eq!((config.entrypoint, config.cmd), (None, Some(vec![])));
        assert_eq!(config.exposed_ports, ["80/tcp"]);
        assert_eq!(
            RawConfig::parse(b"{\"config\":null}").unwrap().into_config(),
            ImageConfig::default()
        );
    }

    #[test]
    fn layer_types() {
        use crate::layer::decode::Compression::{Gzip, None as Plain, Zstd};
        for (text, want) in [
            ("application/vnd.oci.image.layer.v1.tar", Some(Plain)),
            ("application/vnd.oci.image.layer.v1.tar+gzip", Some(Gzip)),
            ("application/vnd.oci.image.layer.v1.tar+zstd", Some(Zstd)),
            ("application/vnd.docker.image.rootfs.diff.tar.gzip", Some(Gzip)),
            ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", Some(Gzip)),
            ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", None),
        ] {
            assert_eq!(layer_compression(text), want, "{text}");
            assert_eq!(is_layer(text), want.is_some(), "{text}");
        }
    }
}
