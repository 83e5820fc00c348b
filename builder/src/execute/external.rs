//! The external executor: an installed engine builds the Dockerfile, its OCI result is taken over.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use parbake_recipes::dockerfile::BaseImages as _;
use parbake_recipes::plan::Platform;

use super::error::{Doing as _, ExecuteError};
use super::{BuiltImage, Event, SourceImages, Stream};
use crate::image::BlobsElsewhere;

/// The engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// `buildah bud`.
    Buildah,
    /// `docker buildx build`.
    Buildx,
}

/// What the engine is told.
#[derive(Debug, Clone)]
pub struct ExternalOptions {
    /// Which.
    pub tool: Tool,
    /// The Dockerfile.
    pub dockerfile: PathBuf,
    /// The build context.
    pub context: PathBuf,
    /// Where the result goes: an OCI layout, made anew.
    pub output: PathBuf,
    /// `--build-arg`.
    pub build_args: BTreeMap<String, String>,
    /// `--label`.
    pub labels: BTreeMap<String, String>,
    /// `--target`.
    pub target: Option<String>,
    /// `--platform`.
    pub platform: Platform,
    /// Secrets by id.
    pub secrets: BTreeMap<String, Vec<u8>>,
    /// `--no-cache`.
    pub no_cache: bool,
    /// Arguments passed on as they are, e.g. `--isolation=chroot`.
    pub extra: Vec<String>,
}

/// Builds with the engine.
///
/// # Errors
/// When the engine is not installed, or fails; its own words are in the error.
pub fn build_external(
    options: &ExternalOptions,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<BuiltImage, ExecuteError> {
    let name = match options.tool {
        Tool::Buildah => "buildah",
        Tool::Buildx => "buildx",
    };
    events(Event::Executor { name, isolated: false });
    if options.output.exists() {
        fs::remove_dir_all(&options.output)
            .doing(|| format!("replacing {}", options.output.display()))?;
    }
    let scratch = tempfile::tempdir().doing(|| "making a directory".to_owned())?;
    let mut arguments = Vec::new();
    for (name, value) in &options.build_args {
        arguments.push(format!("--build-arg={name}={value}"));
    }
    for (name, value) in &options.labels {
        arguments.push(format!("--label={name}={value}"));
    }
    arguments.extend(options.target.iter().map(|target| format!("--target={target}")));
    for (number, (id, value)) in options.secrets.iter().enumerate() {
        let path = scratch.path().join(format!("secret{number}"));
        super::mounts::secret_file(&path, value, 0o400, 0, 0)
            .doing(|| "writing a secret".to_owned())?;
        arguments.push(format!("--secret=id={id},src={}", path.display()));
    }
    if options.no_cache {
        arguments.push("--no-cache".to_owned());
    }
    arguments.push(format!("--platform={}", options.platform));
    arguments.extend(options.extra.iter().cloned());
    match options.tool {
        Tool::Buildah => {
            let id = scratch.path().join("image-id");
            let mut build = Command::new("buildah");
            build.args(["bud", "--format=docker", "--quiet"]).args(&arguments);
            build.arg("--iidfile").arg(&id);
            build.arg("-f").arg(&options.dockerfile).arg(&options.context);
            run(&mut build, events)?;
            let image = fs::read_to_string(&id).doing(|| "reading the image's id".to_owned())?;
            let mut push = Command::new("buildah");
            // Docker's format keeps SHELL and HEALTHCHECK, which the OCI one drops.
            push.args(["push", "--format=v2s2", "--quiet", image.trim()]);
            push.arg(format!("dir:{}", scratch.path().join("dir").display()));
            run(&mut push, events)?;
            adopt_directory(&scratch.path().join("dir"), options)?;
        }
        Tool::Buildx => {
            let tar = scratch.path().join("image.tar");
            let mut build = Command::new("docker");
            build.args(["buildx", "build", "--provenance=false"]).args(&arguments);
            build.arg(format!("--output=type=oci,dest={}", tar.display()));
            build.arg("-f").arg(&options.dockerfile).arg(&options.context);
            run(&mut build, events)?;
            let file = fs::File::open(&tar).doing(|| "opening the result".to_owned())?;
            fs::create_dir_all(&options.output)
                .doing(|| format!("making {}", options.output.display()))?;
            super::unpack::unpack(file, &options.output, super::unpack::Unpack::default())
                .doing(|| "unpacking the result".to_owned())?;
        }
    }
    let reference = format!("oci:{}", options.output.display());
    let image = SourceImages::default()
        .resolve(&reference, &options.platform)
        .map_err(|what| ExecuteError::Host { what, hint: format!("{name} wrote no image") })?;
    let manifest = image.digest.parse().map_err(|error| ExecuteError::Host {
        what: format!("{error}"),
        hint: format!("{name} wrote an image with another kind of digest"),
    })?;
    Ok(BuiltImage {
        oci_layout: options.output.clone(),
        elsewhere: BlobsElsewhere::default(),
        manifest,
        config: image.config,
        executed: 0,
        cached: 0,
        findings: Vec::new(),
    })
}

/// Makes a layout of the plain directory an image was pushed to.
fn adopt_directory(from: &std::path::Path, options: &ExternalOptions) -> Result<(), ExecuteError> {
    let text = fs::read(from.join("manifest.json")).doing(|| "reading the manifest".to_owned())?;
    let manifest: serde_json::Value = serde_json::from_slice(&text)
        .map_err(std::io::Error::from)
        .doing(|| "reading the manifest".to_owned())?;
    super::layout::create(&options.output)?;
    let layers = manifest["layers"].as_array().cloned().unwrap_or_default();
    for part in std::iter::once(&manifest["config"]).chain(&layers) {
        let digest = part["digest"].as_str().unwrap_or_default();
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        super::layout::add_file(&options.output, digest, &from.join(hex))?;
    }
    let digest = parbake_cache::Digest::of(&text);
    super::layout::add_file(&options.output, &digest.to_string(), &from.join("manifest.json"))?;
    let index = serde_json::json!({
        "schemaVersion": 2,
        "manifests": [{
            "mediaType": manifest["mediaType"], "digest": digest, "size": text.len(),
        }],
    });
    fs::write(options.output.join("index.json"), index.to_string())
        .doing(|| "writing the index".to_owned())
}

fn run(command: &mut Command, events: &mut dyn FnMut(Event<'_>)) -> Result<(), ExecuteError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => ExecuteError::Host {
            what: format!("{program} is not installed"),
            hint: "install it, or build without --builder".to_owned(),
        },
        _ => ExecuteError::Io { what: format!("starting {program}"), source },
    })?;
    events(Event::Output { stream: Stream::Stdout, bytes: &output.stdout });
    events(Event::Output { stream: Stream::Stderr, bytes: &output.stderr });
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().collect();
    Err(ExecuteError::Host {
        what: format!("{program} failed:\n{}", lines[lines.len().saturating_sub(15)..].join("\n")),
        hint: "the Dockerfile was built by that program; its message above says why".to_owned(),
    })
}
