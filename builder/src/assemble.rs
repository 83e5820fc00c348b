//! From an image to a template: the root filesystem, the kernel bundle, and the document that
//! names both.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parbake_cache::template::{
    BakeInstructions, KernelBundle, LayerRecord, MachineShape, ObjectRef, ProcessConfig,
    SCHEMA_VERSION, TemplateManifest, TemplateSource,
};
use parbake_cache::{Digest, Store, StoreError, TemplateName};

use serde::{Deserialize, Serialize};

use crate::execute::{ExecuteError, search_file};
use crate::flatten::build::{self, BuildError, BuildOptions, BuildReport};
use crate::image::{Event, Image, ImageConfig, Platform};
use crate::kernel::{self, KernelChoice, KernelError};

/// What a template is made of besides the image.
#[derive(Debug, Clone)]
pub struct AssembleOptions {
    /// As the user wrote the source.
    pub reference: String,
    /// Names for the template.
    pub names: Vec<TemplateName>,
    /// The machine's shape.
    pub machine: MachineShape,
    /// Free space in the root filesystem, in bytes.
    pub free_bytes: u64,
    /// The kernel.
    pub kernel: KernelChoice,
    /// Words added to the kernel's command line.
    pub kernel_words: Vec<String>,
    /// Labels on top of the image's.
    pub labels: BTreeMap<String, String>,
    /// What a bake does.
    pub bake: Option<BakeInstructions>,
    /// What sandboxes may reach where nobody says otherwise.
    pub egress: Vec<String>,
    /// There are to be no snapshots of it.
    pub no_snapshot: bool,
    /// Secrets of the build, which must not be in the root filesystem.
    pub secrets: BTreeMap<String, Vec<u8>>,
    /// A directory that remembers which root filesystem the same layers gave before.
    pub cache: Option<PathBuf>,
    /// Set to stop.
    pub cancel: Arc<AtomicBool>,
}

/// Why there is no template. Nothing of it is left behind.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// The root filesystem.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A secret is in the root filesystem.
    #[error(transparent)]
    Secret(#[from] ExecuteError),
}

/// A finished template.
#[derive(Debug)]
pub struct Assembled {
    /// Digest of the manifest.
    pub digest: Digest,
    /// The manifest.
    pub manifest: TemplateManifest,
    /// Inodes of the root filesystem, used and free.
    pub inodes: u64,
    /// The root filesystem was there already.
    pub reused: bool,
}

/// A root filesystem in the store.
#[derive(Debug, Serialize, Deserialize)]
struct Installed {
    rootfs: ObjectRef,
    layers: Vec<LayerRecord>,
    inodes: u64,
}

/// Builds a template in the store and gives it its names.
///
/// # Errors
/// See [`AssembleError`].
pub fn assemble(
    store: &Store,
    image: &Image,
    options: &AssembleOptions,
    mut events: impl FnMut(&str),
    warnings: impl FnMut(&str),
) -> Result<Assembled, AssembleError> {
    let mut kernel = kernel::ensure(store, &options.kernel, false, &mut events)?;
    if !options.kernel_words.is_empty() {
        let mut bundle: KernelBundle = store.get_json(&kernel.digest)?;
        bundle.cmdline = format!("{} {}", bundle.cmdline, options.kernel_words.join(" "));
        kernel = store.put_json(&bundle)?;
    }
    // From here to the names, what was found in the store stays there.
    let staging = store.stage()?;
    let record =
        options.cache.as_deref().and_then(|cache| record(cache, image, options.free_bytes));
    let known = record.as_deref().and_then(|record| remembered(store, record));
    let reused = known.is_some();
    let installed = match known {
        Some(installed) => {
            let file = store.path(&installed.rootfs.digest)?;
            search_file("the root filesystem", &file, &options.secrets)?;
            installed
        }
        None => {
            let file = staging.path().join("rootfs.ext4");
            let free = options.free_bytes;
            let report = build_rootfs(image, &file, free, &options.cancel, &mut events, warnings)?;
            search_file("the root filesystem", &file, &options.secrets)?;
            events("installing");
            let rootfs = store.adopt_image(file)?;
            let inodes = report.filesystem.inodes;
            let installed = Installed { rootfs, layers: report.layers, inodes };
            if let Some(path) = record {
                remember(&path, &installed);
            }
            installed
        }
    };
    let config = image.config();
    let mut labels = config.labels.clone();
    labels.extend(options.labels.clone());
    let manifest = TemplateManifest {
        schema_version: SCHEMA_VERSION,
        // A plain root filesystem does not say; it is for this host.
        architecture: if config.architecture.is_empty() {
            Platform::default().architecture
        } else {
            config.architecture.clone()
        },
        rootfs: installed.rootfs,
        kernel,
        process: process(config),
        machine: options.machine,
        source: TemplateSource {
            reference: options.reference.clone(),
            manifest: image.manifest_digest(),
            layers: installed.layers,
        },
        labels,
        bake: options.bake.clone(),
        egress: options.egress.clone(),
        no_snapshot: options.no_snapshot,
    };
    let digest = store.put_json(&manifest)?.digest;
    for name in &options.names {
        store.tag(name, &digest)?;
    }
    Ok(Assembled { digest, manifest, inodes: installed.inodes, reused })
}

/// Where it is remembered which root filesystem these layers give; `None` where the image does not
/// say what its layers are before they are read.
fn record(cache: &Path, image: &Image, free_bytes: u64) -> Option<PathBuf> {
    // Another writer may write other bytes: an entry belongs to the program that made it.
    let program = fs::metadata(std::env::current_exe().ok()?).ok()?;
    let mut text = format!("{} {:?} {free_bytes}", program.len(), program.modified().ok()?);
    for layer in image.layers() {
        let created_by = layer.created_by().unwrap_or_default();
        text.push_str(&format!("\n{} {created_by:?}", layer.diff_id()?));
    }
    Some(cache.join(format!("{}.json", Digest::of(text.as_bytes()).hex())))
}

/// What is remembered, if the store still has it.
fn remembered(store: &Store, record: &Path) -> Option<Installed> {
    let installed: Installed = serde_json::from_slice(&fs::read(record).ok()?).ok()?;
    store.path(&installed.rootfs.digest).ok()?;
    Some(installed)
}

/// Remembers, or does not: it only saves work.
fn remember(record: &Path, installed: &Installed) {
    let Some(directory) = record.parent() else { return };
    let write = || {
        fs::create_dir_all(directory)?;
        let file = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer(&file, installed)?;
        file.persist(record)?;
        std::io::Result::Ok(())
    };
    let _ = write();
}

/// Builds only the root filesystem, into `out`.
///
/// # Errors
/// See [`BuildError`]; a file that was at `out` is then still there.
pub fn build_rootfs(
    image: &Image,
    out: &Path,
    free_bytes: u64,
    cancel: &Arc<AtomicBool>,
    mut events: impl FnMut(&str),
    mut warnings: impl FnMut(&str),
) -> Result<BuildReport, BuildError> {
    let mut options = BuildOptions { free_bytes, ..Default::default() };
    options.flatten.cancel = Arc::clone(cancel);
    let mut layers = 0;
    build::build_ext4(image, out, &options, &mut |event| match event {
        Event::LayerStarted { layer, layers: all, .. } => {
            layers = all;
            events(&format!("layer {}/{all}", layer + 1));
        }
        Event::Progress { layer, tar_bytes } => {
            events(&format!("layer {}/{layers}: {} MiB", layer + 1, tar_bytes >> 20));
        }
        Event::Warning(text) => warnings(&text),
        Event::LayerFinished { .. } => {}
    })
}

fn process(config: &ImageConfig) -> ProcessConfig {
    ProcessConfig {
        env: config.env.clone(),
        user: config.user.clone(),
        working_dir: config.working_dir.clone(),
        entrypoint: config.entrypoint.clone().unwrap_or_default(),
        cmd: config.cmd.clone().unwrap_or_default(),
        stop_signal: config.stop_signal.clone(),
    }
}
