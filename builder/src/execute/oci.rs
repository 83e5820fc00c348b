//! Base images from OCI layout directories: `oci:DIR[:TAG]`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use parbake_recipes::dockerfile::{BaseImage, BaseImages};
use parbake_recipes::plan::{ImageConfig, ImageSource, Platform};
use serde::Deserialize;
use serde_json::Value;

use super::base::{BaseLayer, BaseLayers, Bases};

/// Largest document that is read.
const MAX_DOCUMENT: u64 = 4 << 20;

/// Images of layout directories, and names that stand for them.
#[derive(Debug, Clone, Default)]
pub struct LayoutImages {
    /// Plain names (`debian:12`) and the directories meant by them.
    pub names: std::collections::BTreeMap<String, PathBuf>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Value>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    config: Option<ImageConfig>,
    rootfs: RootFs,
    #[serde(default)]
    history: Vec<Value>,
}

#[derive(Deserialize)]
struct RootFs {
    diff_ids: Vec<String>,
}

fn blob(directory: &Path, digest: &str) -> Result<PathBuf, String> {
    let (algorithm, hex) = digest.split_once(':').unwrap_or(("", ""));
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric());
    if !plain(algorithm) || !plain(hex) {
        return Err(format!("{digest:?} is not a digest"));
    }
    Ok(directory.join("blobs").join(algorithm).join(hex))
}

fn document<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, String> {
    let read = || -> std::io::Result<T> {
        if fs::metadata(path)?.len() > MAX_DOCUMENT {
            return Err(std::io::Error::other("it is too large"));
        }
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    };
    read().map_err(|error| format!("{}: {error}", path.display()))
}

impl LayoutImages {
    fn find(&self, reference: &str, platform: &Platform) -> Result<(PathBuf, Descriptor), String> {
        let (directory, wanted) = match reference.strip_prefix("oci:") {
            Some(rest) => match rest.rsplit_once(':') {
                Some((path, tag)) if !tag.contains('/') => (PathBuf::from(path), Some(tag)),
                _ => (PathBuf::from(rest), None),
            },
            None => match self.names.get(reference) {
                Some(directory) => (directory.clone(), None),
                None => return Err("only oci:DIR[:TAG] is known here".to_owned()),
            },
        };
        let mut index: Index = document(&directory.join("index.json"))?;
        for _ in 0..3 {
            let fits = |descriptor: &Descriptor| {
                let name = descriptor.annotations.get("org.opencontainers.image.ref.name");
                let right_name = wanted.is_none_or(|tag| name.is_none_or(|name| name == tag));
                let right_platform = descriptor.platform.as_ref().is_none_or(|found| {
                    found["os"] == platform.os.as_str()
                        && found["architecture"] == platform.architecture.as_str()
                });
                right_name && right_platform
            };
            let found = index.manifests.into_iter().find(fits).ok_or_else(|| {
                format!("{} has no image for {platform} of that name", directory.display())
            })?;
            if !found.media_type.ends_with("index.v1+json")
                && !found.media_type.ends_with("manifest.list.v2+json")
            {
                return Ok((directory, found));
            }
            index = document(&blob(&directory, &found.digest)?)?;
        }
        Err("its indexes are nested too deeply".to_owned())
    }

    fn read(
        &self,
        reference: &str,
        platform: &Platform,
    ) -> Result<(PathBuf, String, Manifest, Config), String> {
        let (directory, found) = self.find(reference, platform)?;
        let manifest: Manifest = document(&blob(&directory, &found.digest)?)?;
        let config: Config = document(&blob(&directory, &manifest.config.digest)?)?;
        if config.rootfs.diff_ids.len() != manifest.layers.len() {
            return Err("its manifest and configuration have different layers".to_owned());
        }
        Ok((directory, found.digest, manifest, config))
    }
}

impl BaseImages for LayoutImages {
    fn resolve(&mut self, reference: &str, platform: &Platform) -> Result<BaseImage, String> {
        let (_, digest, _, config) = self.read(reference, platform)?;
        Ok(BaseImage { digest, config: config.config.unwrap_or_default() })
    }
}

impl Bases for LayoutImages {
    fn layers(&mut self, source: &ImageSource) -> Result<BaseLayers, String> {
        let (directory, _, manifest, config) = self.read(&source.reference, &source.platform)?;
        let layers = manifest
            .layers
            .into_iter()
            .zip(config.rootfs.diff_ids)
            .map(|(layer, diff_id)| {
                let path = blob(&directory, &layer.digest)?;
                Ok(BaseLayer {
                    media_type: layer.media_type,
                    digest: layer.digest,
                    size: layer.size,
                    diff_id,
                    open: Box::new(move || Ok(Box::new(File::open(&path)?))),
                })
            })
            .collect::<Result<_, String>>()?;
        Ok(BaseLayers { layers, history: config.history })
    }
}
