//! What stages start from: an image's layers flattened into a directory, or a bootstrap.

use std::fs::{self, File};
use std::io::{self, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use parbake_cache::Digest;
use parbake_recipes::plan::{Bootstrap, ImageSource};
use serde_json::{Value, json};

use super::cache::{BuildCache, StepRecord};
use super::error::{Doing as _, ExecuteError};
use super::layout::LayerBlob;
use super::unpack::{Unpack, decompress, unpack};
use crate::image::OpenBlob;

/// An image's layers, as its source has them.
pub struct BaseLayers {
    /// Lowest first.
    pub layers: Vec<BaseLayer>,
    /// The image's history entries, for the result's.
    pub history: Vec<Value>,
}

/// A layer of a base image.
pub struct BaseLayer {
    /// e.g. `application/vnd.oci.image.layer.v1.tar+gzip`.
    pub media_type: String,
    /// Digest of the blob.
    pub digest: String,
    /// Size of the blob in bytes.
    pub size: u64,
    /// Digest of the uncompressed tar.
    pub diff_id: String,
    /// Names beginning with `.wh.` remove; in a plain root filesystem they are names.
    pub whiteouts: bool,
    /// The blob, compressed as it is stored.
    pub open: Arc<OpenBlob>,
}

/// Where layers of base images come from.
pub trait Bases {
    /// The layers of an image that lowering resolved.
    ///
    /// # Errors
    /// A sentence that says why not and what to do.
    fn layers(&mut self, source: &ImageSource) -> Result<BaseLayers, String>;
}

/// No images: for plans that start from `scratch` or a bootstrap.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoImages;

impl Bases for NoImages {
    fn layers(&mut self, _: &ImageSource) -> Result<BaseLayers, String> {
        Err("images cannot be read here".to_owned())
    }
}

/// A base, ready to be mounted.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub tree: PathBuf,
    pub layers: Vec<LayerBlob>,
    pub history: Vec<Value>,
}

/// Digest of a sequence of layers.
pub(crate) fn chain<'a>(diff_ids: impl IntoIterator<Item = &'a str>) -> Digest {
    let text: Vec<&str> = diff_ids.into_iter().collect();
    Digest::of(text.join("\n").as_bytes())
}

/// Unpacks an image's layers, once for each chain of layers.
pub(crate) fn image(cache: &BuildCache, image: &BaseLayers) -> Result<Prepared, ExecuteError> {
    let key = chain(image.layers.iter().map(|layer| layer.diff_id.as_str()));
    let (path, there) = cache.base(key);
    if !there {
        let work = cache.scratch()?;
        let tree = work.path().join("tree");
        fs::create_dir(&tree)
            .and_then(|()| fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)))
            .doing(|| "making a base".to_owned())?;
        for layer in &image.layers {
            let unpack_layer = || -> io::Result<()> {
                let blob = decompress(BufReader::with_capacity(1 << 17, (layer.open)()?))?;
                unpack(blob, &tree, Unpack { layer: true, whiteouts: layer.whiteouts, owner: None })
            };
            unpack_layer().doing(|| format!("unpacking layer {}", layer.digest))?;
        }
        cache.keep_base(&work.keep(), &path)?;
    }
    let layers = image
        .layers
        .iter()
        .map(|layer| LayerBlob {
            media_type: layer.media_type.clone(),
            digest: layer.digest.clone(),
            size: layer.size,
            diff_id: layer.diff_id.clone(),
        })
        .collect();
    Ok(Prepared { tree: path.join("tree"), layers, history: image.history.clone() })
}

/// Installs a distribution with `mmdebstrap` into a directory and a layer of its own.
pub(crate) fn bootstrap(
    cache: &BuildCache,
    spec: &Bootstrap,
    epoch: Option<i64>,
    fresh: bool,
) -> Result<(Prepared, PathBuf), ExecuteError> {
    let mut text = serde_json::to_string(spec).unwrap_or_default();
    text.push_str(&format!("{epoch:?}"));
    let (path, there) = cache.base(Digest::of(text.as_bytes()));
    let record_path = path.join("step.json");
    if !there || fresh {
        let work = cache.scratch()?;
        let tree = work.path().join("tree");
        fs::create_dir(&tree)
            .and_then(|()| fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)))
            .doing(|| "making a base".to_owned())?;
        let tar = work.path().join("bootstrap.tar");
        let mut command = Command::new("mmdebstrap");
        command.arg("--quiet").arg(format!("--variant={}", spec.variant));
        if !spec.packages.is_empty() {
            command.arg(format!("--include={}", spec.packages.join(",")));
        }
        command.arg(&spec.suite).arg(&tar).args(spec.mirror.as_ref());
        if let Some(epoch) = epoch {
            command.env("SOURCE_DATE_EPOCH", epoch.to_string());
        }
        command.stdin(Stdio::null());
        let output = command.output().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => ExecuteError::Host {
                what: "mmdebstrap is not installed".to_owned(),
                hint: "install the package mmdebstrap, or start from an image".to_owned(),
            },
            _ => ExecuteError::Io { what: "starting mmdebstrap".to_owned(), source },
        })?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = message.lines().collect();
            let last = lines[lines.len().saturating_sub(12)..].join("\n");
            return Err(ExecuteError::Host {
                what: format!("mmdebstrap failed:\n{last}"),
                hint: "check suite, packages and the machine's package sources".to_owned(),
            });
        }
        let file = File::open(&tar).doing(|| "opening the bootstrap".to_owned())?;
        unpack(BufReader::new(file), &tree, Unpack::default())
            .doing(|| "unpacking the bootstrap".to_owned())?;
        fs::remove_file(&tar).doing(|| "removing the bootstrap's archive".to_owned())?;
        let layer = work.path().join("layer.tar");
        let out = File::create(&layer).doing(|| "writing the bootstrap's layer".to_owned())?;
        let written = super::layer::write(&tree, io::BufWriter::new(out), epoch, false)
            .doing(|| "writing the bootstrap's layer".to_owned())?;
        let record =
            StepRecord { diff_id: written.digest, size: written.size, entries: written.entries };
        fs::write(work.path().join("step.json"), serde_json::to_vec(&record).unwrap_or_default())
            .doing(|| "recording the bootstrap".to_owned())?;
        if there {
            let _ = fs::remove_dir_all(&path);
        }
        cache.keep_base(&work.keep(), &path)?;
    }
    let record: StepRecord = fs::read(&record_path)
        .and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::from))
        .doing(|| format!("reading {}", record_path.display()))?;
    let digest = record.diff_id.to_string();
    let blob = LayerBlob {
        media_type: super::LAYER_TYPE.to_owned(),
        digest: digest.clone(),
        size: record.size,
        diff_id: digest,
    };
    let history =
        vec![json!({"created_by": format!("mmdebstrap {} {}", spec.variant, spec.suite)})];
    let prepared = Prepared { tree: path.join("tree"), layers: vec![blob], history };
    Ok((prepared, path.join("layer.tar")))
}
