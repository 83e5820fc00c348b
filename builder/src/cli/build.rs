//! `parbake build`: an image becomes a template, or just a root filesystem.

use std::collections::BTreeMap;
use std::path::PathBuf;

use parbake_builder::assemble::{self, AssembleError, AssembleOptions, Assembled};
use parbake_builder::flatten::FlattenError;
use parbake_builder::flatten::build::BuildError;
use parbake_builder::image::{self, Image, ImageError, ImageOptions, ImageSource, Platform};
use parbake_builder::kernel::KernelChoice;
use parbake_cache::TemplateName;
use parbake_cache::template::MachineShape;
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, interrupt, kernel, output};

/// Turn a container image into a template, or into a root filesystem alone
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("result").args(["tag", "output"]).required(true).multiple(true))]
pub struct Args {
    /// Where the image is: oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE[:IMAGE:TAG],
    /// docker://HOST/REPO[:TAG|@DIGEST], tar:FILE or dir:DIR
    #[arg(long, value_name = "IMAGE")]
    from: ImageSource,
    /// Name for the template; may be given again
    #[arg(short, long, value_name = "NAME[:TAG]")]
    tag: Vec<TemplateName>,
    /// Write the root filesystem alone: rootfs=FILE (no store, no kernel, no root needed)
    #[arg(short, long, value_name = "rootfs=FILE", value_parser = rootfs_file)]
    output: Option<PathBuf>,
    /// Platform of the image
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", default_value = "linux/amd64")]
    platform: Platform,
    /// Virtual CPUs of the machine
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    cpus: u8,
    /// Memory of the machine in MiB
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    memory: u32,
    /// Free space in the root filesystem in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    free: u64,
    /// The kernel: NAME[=VERSION] of a package, deb:FILE or image:FILE
    #[arg(long, value_name = "KERNEL", default_value_t)]
    kernel: KernelChoice,
    /// A label; may be given again
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
    /// Speak plain HTTP to this registry; may be given again (loopback needs no permission)
    #[arg(long, value_name = "HOST[:PORT]")]
    insecure_registry: Vec<String>,
    /// Registry credentials, instead of the usual places
    #[arg(long, value_name = "FILE")]
    authfile: Option<PathBuf>,
}

fn rootfs_file(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("rootfs=") {
        Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err("expected rootfs=FILE".to_owned()),
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

/// Builds.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let cancel = interrupt::watch();
    let mut options = ImageOptions { platform: args.platform.clone(), ..Default::default() };
    options.registry.insecure.clone_from(&args.insecure_registry);
    options.registry.authfile.clone_from(&args.authfile);
    let mut step = context.progress.step(format!("build {}", args.from));
    let image = image::open(&args.from, &options, &mut |_| {}).map_err(image_error)?;
    let warn = |text: &str| context.progress.note(&format!("warning: {text}"));
    let free_bytes = args.free << 20;

    if let Some(out) = &args.output {
        let report = assemble::build_rootfs(
            &image,
            out,
            free_bytes,
            &cancel,
            |text| step.update(text),
            warn,
        )
        .map_err(build_error)?;
        step.done(format!("{} in {}", bytes(report.filesystem.size), out.display()));
        if args.tag.is_empty() {
            return if context.json() {
                output::json(&json!({ "rootfs": out, "bytes": report.filesystem.size,
                    "inodes": report.filesystem.inodes, "layers": report.layers }))
            } else {
                output::line(&out.display().to_string())
            };
        }
        step = context.progress.step("template");
    }
    let store = context.store()?;
    let assemble_options = AssembleOptions {
        reference: args.from.portable(),
        names: args.tag.clone(),
        machine: MachineShape { vcpus: args.cpus, memory_mib: args.memory },
        free_bytes,
        kernel: args.kernel.clone(),
        labels: args.label.iter().cloned().collect::<BTreeMap<_, _>>(),
        cancel,
    };
    let built =
        assemble::assemble(&store, &image, &assemble_options, |text| step.update(text), warn)
            .map_err(assemble_error)?;
    step.done(format!("{} of disk", bytes(built.manifest.rootfs.size)));
    report(context, args, &image, &built)
}

fn report(context: &Context, args: &Args, image: &Image, built: &Assembled) -> CliResult {
    if !context.json() {
        return output::line(&built.digest.to_string());
    }
    output::json(&json!({
        "digest": built.digest,
        "names": args.tag.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "image": image.manifest_digest(),
        "rootfs": built.manifest.rootfs,
        "kernel": built.manifest.kernel,
        "inodes": built.report.filesystem.inodes,
        "layers": built.report.layers,
    }))
}

fn image_error(error: ImageError) -> CliError {
    let kind = match &error {
        ImageError::NoSuchReference { .. } | ImageError::MissingBlob { .. } => Kind::NotFound,
        ImageError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Kind::NotFound
        }
        ImageError::Digest { .. }
        | ImageError::DigestMismatch { .. }
        | ImageError::SizeMismatch { .. } => Kind::Refused,
        ImageError::Registry { .. } => Kind::Registry,
        ImageError::Cancelled => Kind::Interrupted,
        _ => Kind::User,
    };
    CliError::new(kind, error)
}

fn build_error(error: BuildError) -> CliError {
    let kind = match &error {
        BuildError::Flatten(FlattenError::Cancelled) => Kind::Interrupted,
        BuildError::Flatten(
            FlattenError::BlobDigest { .. }
            | FlattenError::BlobSize { .. }
            | FlattenError::DiffId { .. },
        ) => Kind::Refused,
        _ => Kind::User,
    };
    CliError::new(kind, error)
}

fn assemble_error(error: AssembleError) -> CliError {
    match error {
        AssembleError::Build(error) => build_error(error),
        AssembleError::Kernel(error) => kernel::kernel_error(error),
        AssembleError::Store(error) => guest::store_error(error),
    }
}
