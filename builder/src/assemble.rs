//! From an image to a template: the root filesystem, the kernel bundle, and the document that
//! names both.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parbake_cache::template::{
    MachineShape, ProcessConfig, SCHEMA_VERSION, TemplateManifest, TemplateSource,
};
use parbake_cache::{Digest, Store, StoreError, TemplateName};

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
    /// Labels on top of the image's.
    pub labels: BTreeMap<String, String>,
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
}

/// A finished template.
#[derive(Debug)]
pub struct Assembled {
    /// Digest of the manifest.
    pub digest: Digest,
    /// The manifest.
    pub manifest: TemplateManifest,
    /// What the root filesystem consists of.
    pub report: BuildReport,
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
    let kernel = kernel::ensure(store, &options.kernel, false, &mut events)?;
    let staging = store.stage()?;
    let file = staging.path().join("rootfs.ext4");
    let report =
        build_rootfs(image, &file, options.free_bytes, &options.cancel, &mut events, warnings)?;
    events("installing");
    let rootfs = store.adopt_image(file)?;
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
        rootfs,
        kernel,
        process: process(config),
        machine: options.machine,
        source: TemplateSource {
            reference: options.reference.clone(),
            manifest: image.manifest_digest(),
            layers: report.layers.clone(),
        },
        labels,
    };
    let digest = store.put_json(&manifest)?.digest;
    for name in &options.names {
        store.tag(name, &digest)?;
    }
    Ok(Assembled { digest, manifest, report })
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
