//! Base images from wherever images come from: layouts, archives, registries, plain root
//! filesystems.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use parbake_cache::Digest;
use parbake_recipes::dockerfile::{BaseImage, BaseImages};
use parbake_recipes::plan::{self, Healthcheck, Platform};
use parbake_recipes::resolve::LOCAL_KINDS;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::base::{BaseLayer, BaseLayers, Bases, chain};
use super::unpack::decompress;
use crate::image::{self, Image, ImageOptions, ImageSource};
use crate::layer::decode::Compression;

/// Images by reference. A name without a kind (`debian:12`) is one of a registry.
#[derive(Default)]
pub struct SourceImages {
    /// How registries are spoken to; the platform comes with each request.
    pub options: ImageOptions,
    opened: BTreeMap<(String, Platform), Opened>,
}

#[derive(Clone)]
struct Opened {
    image: Rc<Image>,
    layers: Vec<Known>,
}

/// What a layer's source does not always say.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Known {
    digest: String,
    size: u64,
    diff_id: String,
}

impl SourceImages {
    /// With these ways to speak to registries.
    #[must_use]
    pub fn new(options: ImageOptions) -> Self {
        Self { options, opened: BTreeMap::new() }
    }

    fn open(&mut self, reference: &str, platform: &Platform) -> Result<Opened, String> {
        let key = (reference.to_owned(), platform.clone());
        if let Some(known) = self.opened.get(&key) {
            return Ok(known.clone());
        }
        let source = source(reference)?;
        let mut options = self.options.clone();
        options.platform = image::Platform {
            os: platform.os.clone(),
            architecture: platform.architecture.clone(),
            variant: platform.variant.clone(),
        };
        let image =
            image::open(&source, &options, &mut |_| {}).map_err(|error| chain_of(&error))?;
        let memory = self.memory(&image);
        let known = |index| match memory.as_deref().and_then(recall) {
            Some(known) => Ok(known),
            None => known(&image, index).inspect(|known| {
                if let Some(memory) = &memory {
                    remember(memory, known);
                }
            }),
        };
        let layers = (0..image.layers().len())
            .map(|index| known(index).map_err(|error| error.to_string()))
            .collect::<Result<_, _>>()?;
        let opened = Opened { image: Rc::new(image), layers };
        self.opened.insert(key, opened.clone());
        Ok(opened)
    }

    /// Where it is remembered what a template's files come to as a layer: they never change, and
    /// reading them all again is most of a build that has nothing to do.
    fn memory(&self, image: &Image) -> Option<PathBuf> {
        let ImageSource::Template { .. } = image.source() else { return None };
        let digest = image.manifest_digest()?;
        let place = self.options.store.as_ref()?.join("build/templates");
        // Another version may write another stream.
        Some(place.join(format!("{}-{}.json", digest.hex(), env!("CARGO_PKG_VERSION"))))
    }
}

/// An error and what caused it, in one line.
fn chain_of(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(&format!(": {next}"));
        }
        cause = error.source();
    }
    text
}

/// What a reference of a `FROM` line names.
fn source(reference: &str) -> Result<ImageSource, String> {
    let named = |kind: &&str| reference.starts_with(kind);
    if LOCAL_KINDS.iter().chain(&["docker://"]).any(named) {
        return reference.parse().map_err(|error: image::reference::BadSource| error.to_string());
    }
    // Docker's rules: a first component with a dot, a colon or the name localhost is a host.
    let (first, rest) = reference.split_once('/').unwrap_or(("", reference));
    let is_host = first.contains(['.', ':']) || first == "localhost";
    let full = match (is_host, first) {
        (true, _) => reference.to_owned(),
        (false, "") => format!("docker.io/library/{rest}"),
        (false, _) => format!("docker.io/{reference}"),
    };
    Ok(ImageSource::Registry { reference: full })
}

fn recall(memory: &Path) -> Option<Known> {
    serde_json::from_slice(&std::fs::read(memory).ok()?).ok()
}

/// Remembers, or does not: it only saves work.
fn remember(memory: &Path, known: &Known) {
    let Some(directory) = memory.parent() else { return };
    let write = || {
        std::fs::create_dir_all(directory)?;
        let file = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer(&file, known)?;
        file.persist(memory)?;
        io::Result::Ok(())
    };
    let _ = write();
}

/// Reads a layer once where its source does not name its digests.
fn known(image: &Image, index: usize) -> io::Result<Known> {
    let layer = &image.layers()[index];
    if let (Some(digest), Some(size), Some(diff_id)) =
        (layer.digest(), layer.size(), layer.diff_id())
    {
        return Ok(Known { digest: digest.to_string(), size, diff_id: diff_id.to_string() });
    }
    let mut blob = Counting { inner: layer.open()?, hash: Sha256::new(), size: 0 };
    io::copy(&mut blob, &mut io::sink())?;
    let digest = Digest::from_bytes(blob.hash.finalize().into()).to_string();
    let diff_id = match layer.diff_id() {
        Some(diff_id) => diff_id.to_string(),
        None => {
            let tar = decompress(io::BufReader::new(layer.open()?))?;
            let mut tar = Counting { inner: tar, hash: Sha256::new(), size: 0 };
            io::copy(&mut tar, &mut io::sink())?;
            Digest::from_bytes(tar.hash.finalize().into()).to_string()
        }
    };
    Ok(Known { digest, size: blob.size, diff_id })
}

struct Counting<R> {
    inner: R,
    hash: Sha256,
    size: u64,
}

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        self.size += read as u64;
        Ok(read)
    }
}

impl BaseImages for SourceImages {
    fn resolve(&mut self, reference: &str, platform: &Platform) -> Result<BaseImage, String> {
        let opened = self.open(reference, platform)?;
        let digest = match opened.image.manifest_digest() {
            Some(digest) => digest,
            // No manifest: the content is the identity.
            None => chain(opened.layers.iter().map(|layer| layer.diff_id.as_str())),
        };
        Ok(BaseImage { digest: digest.to_string(), config: config(opened.image.config()) })
    }
}

pub(crate) fn config(image: &image::ImageConfig) -> plan::ImageConfig {
    let positive = |value: i64| u64::try_from(value).unwrap_or(0);
    plan::ImageConfig {
        user: image.user.clone(),
        exposed_ports: image.exposed_ports.iter().cloned().collect(),
        env: image.env.clone(),
        entrypoint: image.entrypoint.clone(),
        cmd: image.cmd.clone(),
        volumes: image.volumes.iter().cloned().collect(),
        working_dir: image.working_dir.clone(),
        labels: image.labels.clone(),
        stop_signal: image.stop_signal.clone(),
        healthcheck: image.healthcheck.as_ref().map(|check| Healthcheck {
            test: check.test.clone(),
            interval: positive(check.interval),
            timeout: positive(check.timeout),
            start_period: positive(check.start_period),
            start_interval: positive(check.start_interval),
            retries: positive(check.retries),
        }),
        shell: image.shell.clone(),
        on_build: image.on_build.clone(),
    }
}

impl Bases for SourceImages {
    fn layers(&mut self, source: &plan::ImageSource) -> Result<BaseLayers, String> {
        let opened = self.open(&source.reference, &source.platform)?;
        let mut layers = Vec::new();
        let mut history = Vec::new();
        for (index, known) in opened.layers.iter().enumerate() {
            let layer = &opened.image.layers()[index];
            let suffix = match layer.declared_compression() {
                Some(Compression::Gzip) => "+gzip",
                Some(Compression::Zstd) => "+zstd",
                Some(Compression::None) => "",
                None if known.digest == known.diff_id => "",
                None => "+gzip",
            };
            history.push(json!({"created_by": layer.created_by().unwrap_or("base image")}));
            layers.push(BaseLayer {
                media_type: format!("application/vnd.oci.image.layer.v1.tar{suffix}"),
                digest: known.digest.clone(),
                size: known.size,
                diff_id: known.diff_id.clone(),
                whiteouts: layer.has_whiteouts(),
                open: layer.opener(),
            });
        }
        Ok(BaseLayers { layers, history })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_docker_reads_them() {
        for (text, expected) in [
            ("debian", "docker.io/library/debian"),
            ("team/app:1", "docker.io/team/app:1"),
            ("localhost/app", "localhost/app"),
            ("localhost:5000/app@sha256:00", "localhost:5000/app@sha256:00"),
            ("r.example/a/b:c", "r.example/a/b:c"),
            ("docker://r.example/a", "r.example/a"),
        ] {
            let ImageSource::Registry { reference } = source(text).unwrap() else { panic!() };
            assert_eq!(reference, expected);
        }
        assert!(matches!(source("oci:/x:y").unwrap(), ImageSource::OciLayout { .. }));
        assert!(source("oci:").is_err());
    }
}
