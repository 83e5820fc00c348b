//! `parbake build`: a Dockerfile, a recipe or an image becomes a template, or just a root
//! filesystem.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parbake_builder::assemble::{self, AssembleError, AssembleOptions, Assembled};
use parbake_builder::execute::{self, Event, ExecuteOptions, NetworkAccess};
use parbake_builder::flatten::FlattenError;
use parbake_builder::flatten::build::BuildError;
use parbake_builder::image::{self, Image, ImageError, ImageSource};
use parbake_builder::kernel::KernelChoice;
use parbake_builder::source::{self, Built, Engine, Source, SourceRequest};
use parbake_cache::template::{BakeInstructions, MachineShape};
use parbake_cache::{Digest, Store, TemplateName};
use parbake_node::network::Egress;
use parbake_recipes::lock::Lock;
use serde_json::json;

use super::builder::{BuilderArgs, Choice};
use super::error::{Classify, CliError, CliResult, Kind};
use super::guest::Place;
use super::progress::bytes;
use super::source::{SourceArgs, source_error};
use super::steps::StepView;
use super::{Context, bake, guest, interrupt, kernel, output, recipe, steps, trust};

/// Turn a Dockerfile, a recipe or an image into a template, or into a root filesystem alone
///
/// CONTEXT is a directory with parbake.yaml or a Dockerfile; -f names the file where it lies or is
/// called otherwise; --from takes a finished image instead.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("result").args(["tag", "output"]).required(true).multiple(true))]
#[command(group = clap::ArgGroup::new("what").args(["context", "file", "from"]).required(true).multiple(true))]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// A finished image: oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE[:IMAGE:TAG],
    /// docker://HOST/REPO[:TAG|@DIGEST], template:NAME, tar:FILE, dir:DIR or ext4:FILE
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["context", "file", "target", "build_arg",
        "build_context", "builder", "require_isolation", "egress", "build_cpus", "build_memory", "build_disk", "secret", "ssh", "no_cache", "network", "explain", "locked", "strict"])]
    from: Option<ImageSource>,
    /// Name for the template; may be given again
    #[arg(short, long, value_name = "NAME[:TAG]")]
    tag: Vec<TemplateName>,
    /// Write the root filesystem alone: rootfs=FILE (no kernel; from an image no store and no root)
    #[arg(short, long, value_name = "rootfs=FILE", value_parser = rootfs_file)]
    output: Option<PathBuf>,
    /// Bake at once; the template gets its name only if that succeeds
    #[arg(long, requires = "tag")]
    bake: bool,
    #[command(flatten)]
    builder: BuilderArgs,
    /// A secret for steps that mount it: id=ID,src=FILE or id=ID,env=NAME; may be given again
    #[arg(long, value_name = "SECRET", value_parser = secret)]
    secret: Vec<Secret>,
    /// An SSH agent for steps that mount it: ID[=SOCKET]; may be given again
    #[arg(long, value_name = "ID[=SOCKET]", value_parser = ssh)]
    ssh: Vec<(String, PathBuf)>,
    /// Do every step again
    #[arg(long)]
    no_cache: bool,
    /// What steps may reach
    #[arg(long, value_name = "NETWORK", default_value = "default")]
    network: NetworkChoice,
    /// Say of every step that is done why it is: what differs from last time
    #[arg(long)]
    explain: bool,
    /// Refuse whatever is not as parbake.lock says
    #[arg(long)]
    locked: bool,
    /// Write parbake.lock: bases, context and kernel as they are, and the packages that were
    /// installed
    #[arg(long, conflicts_with_all = ["from", "locked"])]
    lock: bool,
    /// Fail on files that look like credentials, instead of warning
    #[arg(long)]
    strict: bool,
    /// Virtual CPUs of the machine [default: the recipe's, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    cpus: Option<u8>,
    /// Memory of the machine in MiB [default: the recipe's, else 512; 256 with --from]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    memory: Option<u32>,
    /// Free space in the root filesystem in MiB [default: the recipe's, else 512; 1024 with --from]
    #[arg(long, value_name = "MIB")]
    free: Option<u64>,
    /// The kernel: NAME[=VERSION] of a package, deb:FILE or image:FILE [default: the recipe's, else
    /// the distribution's for cloud machines]
    #[arg(long, value_name = "KERNEL")]
    kernel: Option<KernelChoice>,
}

/// `--network`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum NetworkChoice {
    /// What the file says, else what this machine can reach.
    Default,
    /// As default.
    Host,
    /// Loopback only.
    None,
}

/// `--secret`: its bytes never appear in a message.
#[derive(Clone)]
struct Secret {
    id: String,
    value: Vec<u8>,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "secret {}", self.id)
    }
}

fn rootfs_file(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("rootfs=") {
        Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err("expected rootfs=FILE".to_owned()),
    }
}

fn secret(text: &str) -> Result<Secret, String> {
    let (mut id, mut file, mut variable) = (None, None, None);
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("id", value)) if !value.is_empty() => id = Some(value),
            Some(("src" | "source", value)) => file = Some(value),
            Some(("env", value)) => variable = Some(value),
            Some(("type", "file" | "env")) => {}
            _ => return Err(format!("{part:?}: expected id=ID,src=FILE or id=ID,env=NAME")),
        }
    }
    let id = id.ok_or("id=ID is missing")?.to_owned();
    let value = match (file, variable) {
        (Some(_), Some(_)) => return Err("src and env exclude each other".to_owned()),
        (Some(path), None) => {
            std::fs::read(path).map_err(|error| format!("cannot read {path}: {error}"))?
        }
        (None, variable) => {
            use std::os::unix::ffi::OsStringExt;
            let name = variable.unwrap_or(&id);
            std::env::var_os(name).ok_or(format!("the variable {name} is not set"))?.into_vec()
        }
    };
    Ok(Secret { id, value })
}

fn ssh(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((id, path)) if !id.is_empty() && !path.is_empty() => Ok((id.to_owned(), path.into())),
        Some(_) => Err("expected ID or ID=SOCKET".to_owned()),
        None => match std::env::var_os("SSH_AUTH_SOCK") {
            Some(socket) => Ok((text.to_owned(), socket.into())),
            None => Err("SSH_AUTH_SOCK is not set: start an agent, or write ID=SOCKET".to_owned()),
        },
    }
}

/// An image and everything else a template is made of.
struct Material {
    image: Image,
    reference: String,
    machine: MachineShape,
    free_bytes: u64,
    kernel: KernelChoice,
    kernel_words: Vec<String>,
    labels: BTreeMap<String, String>,
    bake: Option<BakeInstructions>,
    egress: Vec<String>,
    no_snapshot: bool,
    /// What is held against a lock file, or written into one.
    lock: Option<LockWork>,
    /// Steps done and steps found in the cache, where there were steps.
    steps: Option<(usize, usize)>,
    /// Holds the image while it is read.
    _scratch: Option<(tempfile::TempDir, execute::Claim)>,
}

/// What is left to do with a lock file once the packages are known.
enum LockWork {
    Check(Box<Source>),
    Write(PathBuf, Box<Lock>),
}

impl LockWork {
    fn finish(&mut self, context: &Context, rootfs: &Path) -> CliResult {
        let packages = trust::inventory_of(context, rootfs)?.versions();
        match self {
            Self::Check(source) => source.check_packages(&packages).map_err(source_error),
            Self::Write(path, lock) => {
                lock.packages = packages;
                recipe::write_lock(path, lock)
            }
        }
    }
}

fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Builds.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    let cancel = interrupt::watch();
    let mut material = match &args.from {
        Some(from) => from_image(context, args, from)?,
        None => from_source(context, args, &cancel)?,
    };
    let image = &material.image;
    let warn = |text: &str| context.progress.note(&format!("warning: {text}"));
    let secrets = secrets(args);
    let what = args.from.as_ref().map_or_else(|| material.reference.clone(), ToString::to_string);
    let mut step = context.progress.step(format!("build {what}"));
    if let Some(out) = &args.output {
        let free = material.free_bytes;
        let mut update = |text: &str| step.update(text);
        // Only what has passed its checks takes the place of what was there.
        let work = (!secrets.is_empty() || material.lock.is_some())
            .then(|| tempfile::Builder::new().prefix(".parbake-").tempdir_in(directory_of(out)))
            .transpose()
            .kind(Kind::User)?;
        let file = work.as_ref().map_or(out.clone(), |work| work.path().join("rootfs.ext4"));
        let report = assemble::build_rootfs(image, &file, free, &cancel, &mut update, warn)
            .map_err(build_error)?;
        execute::search_file("the root filesystem", &file, &secrets)
            .map_err(steps::execute_error)?;
        if let Some(lock) = material.lock.as_mut().filter(|_| args.tag.is_empty()) {
            lock.finish(context, &file)?;
        }
        if work.is_some() {
            std::fs::rename(&file, out).kind(Kind::User)?;
        }
        step.done(format!("{} in {}", bytes(report.filesystem.size), out.display()));
        if args.tag.is_empty() {
            if context.json() {
                output::json(&json!({ "rootfs": out, "bytes": report.filesystem.size,
                    "inodes": report.filesystem.inodes, "layers": report.layers,
                    "steps": steps_json(material.steps) }))?;
            } else {
                output::line(&out.display().to_string())?;
            }
            return Ok(0);
        }
        step = context.progress.step("template");
    }
    let store = context.store()?;
    // A template that cannot be baked, or is not as locked, does not take the name of one that is.
    let named_later = args.bake || material.lock.is_some();
    let options = AssembleOptions {
        reference: material.reference.clone(),
        names: if named_later { Vec::new() } else { args.tag.clone() },
        machine: material.machine,
        free_bytes: material.free_bytes,
        kernel: material.kernel.clone(),
        kernel_words: material.kernel_words.clone(),
        labels: material.labels.clone(),
        bake: material.bake.clone(),
        egress: material.egress.clone(),
        no_snapshot: material.no_snapshot,
        secrets,
        cache: args.from.is_none().then(|| build_directory(&store).join("rootfs")),
        cancel,
    };
    let built = assemble::assemble(&store, image, &options, |text| step.update(text), warn)
        .map_err(assemble_error)?;
    let reused = if built.reused { ", as before" } else { "" };
    step.done(format!("{} of disk{reused}", bytes(built.manifest.rootfs.size)));
    let _lease = store.lease(&[built.digest]).map_err(guest::store_error)?;
    if let Some(mut lock) = material.lock.take() {
        let rootfs = store.path(&built.manifest.rootfs.digest).map_err(guest::store_error)?;
        lock.finish(context, &rootfs)?;
    }
    report(context, args, &material, &built)?;
    let code =
        if args.bake { bake_now(context, &store, built.digest, &options.secrets)? } else { 0 };
    if named_later && code == 0 {
        for name in &args.tag {
            store.tag(name, &built.digest).map_err(guest::store_error)?;
        }
    }
    Ok(code)
}

/// Bakes here or in the lab, and looks for secrets in what was frozen.
fn bake_now(
    context: &Context,
    store: &Store,
    digest: Digest,
    secrets: &BTreeMap<String, Vec<u8>>,
) -> CliResult<u8> {
    if let Place::Lab = guest::place(context)? {
        let mut words = vec![b"bake".to_vec(), digest.to_string().into_bytes()];
        if context.json() {
            words.push(b"--format=json".to_vec());
        }
        if context.global.quiet {
            words.push(b"--quiet".to_vec());
        }
        let code = guest::command_in_lab(context, words, false, false)?;
        if code != 0 {
            return Ok(code);
        }
    } else {
        bake::run_digest(context, store, digest)?;
    }
    if secrets.is_empty() {
        return Ok(0);
    }
    for (snapshot, manifest) in store.snapshots(&digest).kind(Kind::User)? {
        for (place, part) in
            [("guest memory", &manifest.memory), ("the guest's disk", &manifest.disk)]
        {
            let file = store.path(&part.digest).map_err(guest::store_error)?;
            if let Err(error) = execute::search_file(place, &file, secrets) {
                store.remove_snapshot(&digest, &snapshot).map_err(guest::store_error)?;
                return Err(steps::execute_error(error));
            }
        }
    }
    Ok(0)
}

fn from_image(context: &Context, args: &Args, from: &ImageSource) -> CliResult<Material> {
    let image =
        image::open(from, &args.source.image_options(context), &mut |_| {}).map_err(image_error)?;
    let bake = source::instructions_of_image(image.config());
    Ok(Material {
        image,
        reference: from.portable(),
        machine: MachineShape {
            vcpus: args.cpus.unwrap_or(1),
            memory_mib: args.memory.unwrap_or(256),
        },
        free_bytes: args.free.unwrap_or(1024) << 20,
        kernel: args.kernel.clone().unwrap_or_default(),
        kernel_words: Vec::new(),
        labels: args.source.labels(),
        bake,
        egress: Vec::new(),
        no_snapshot: false,
        lock: None,
        steps: None,
        _scratch: None,
    })
}

fn from_source(context: &Context, args: &Args, cancel: &Arc<AtomicBool>) -> CliResult<Material> {
    let load = args.source.load_request()?;
    let choice = args.builder.choice(context)?;
    let request = SourceRequest {
        load: load.clone(),
        images: args.source.image_options(context),
        engine: match choice {
            Choice::External(tool) => Engine::External(tool),
            _ => Engine::Own,
        },
        locked: args.locked,
    };
    let mut source = Source::open(request).map_err(source_error)?;
    let store = context.store()?;
    if args.locked
        && let Some(loaded) = source.loaded()
    {
        let choice = kernel_choice(args, &loaded.bake, &load.context)?;
        let locked = recipe::locked_kernel(&store, &choice, false)?;
        source.check_kernel(locked).map_err(source_error)?;
    }
    let directory = build_directory(&store);
    let (kernel, egress) = match source.loaded() {
        Some(loaded) => (kernel_choice(args, &loaded.bake, &load.context)?, egress(&loaded.bake)?),
        None => (args.kernel.clone().unwrap_or_default(), Vec::new()),
    };
    let mut executor = args.builder.executor(context, choice, &directory, kernel)?;
    let claim = execute::claim(&directory).map_err(steps::execute_error)?;
    let scratch = tempfile::Builder::new()
        .prefix("image-")
        .tempdir_in(directory.join("tmp"))
        .kind(Kind::User)?;
    let layout = scratch.path().join("image");
    let options = ExecuteOptions {
        directory: directory.clone(),
        contexts: args.source.directories(),
        output: layout.clone(),
        partial: true,
        secrets: secrets(args),
        ssh: args.ssh.iter().cloned().collect(),
        network: match args.network {
            NetworkChoice::Default | NetworkChoice::Host => NetworkAccess::Host,
            NetworkChoice::None => NetworkAccess::None,
        },
        no_cache: args.no_cache,
        source_date_epoch: source_date_epoch()?,
        strict: args.strict,
        require_isolation: args.builder.requires_isolation(),
        interrupt: Some(Arc::clone(cancel)),
        ..ExecuteOptions::default()
    };
    let mut view = StepView::new(&context.progress, args.explain);
    let mut announced = false;
    let announce = choice == Choice::Sandbox { asked: false };
    let built = source.build(&options, executor.as_deref_mut(), &mut |event| {
        if announce && matches!(event, Event::StepReason { .. }) && !announced {
            announced = true;
            context.progress.note(
                "steps share this machine's kernel (--builder sandbox); --builder microvm runs them \
                 in machines of their own",
            );
        }
        view.event(&event);
    });
    drop(view);
    let Built { image: made, bake, instructions, reference } = built.map_err(source_error)?;
    for text in unkept(&bake) {
        context.progress.note(&format!("warning: {text}"));
    }
    let elsewhere = made.elsewhere.clone();
    let image = image::open_partial_layout(&layout, elsewhere, &args.source.image_options(context))
        .map_err(image_error)?;
    let first = bake.machines.first().cloned().unwrap_or_default();
    let machine = source::shape(&first);
    let mut labels = bake.labels.clone();
    labels.extend(args.source.labels());
    labels.extend(source.origin());
    let kernel = kernel_choice(args, &bake, &load.context)?;
    let lock = if args.lock {
        let Some((path, mut lock)) = source.lock_now().map_err(source_error)? else {
            return Err(CliError::new(Kind::Usage, "what another engine builds cannot be locked")
                .hint("build with --builder sandbox, or without --lock"));
        };
        lock.kernel = Some(recipe::locked_kernel(&store, &kernel, false)?);
        Some(LockWork::Write(path, Box::new(lock)))
    } else {
        args.locked.then(|| LockWork::Check(Box::new(source)))
    };
    Ok(Material {
        image,
        reference,
        machine: MachineShape {
            vcpus: args.cpus.unwrap_or(machine.vcpus),
            memory_mib: args.memory.unwrap_or(machine.memory_mib),
        },
        free_bytes: args.free.unwrap_or(u64::from(bake.disk.free_mib)) << 20,
        kernel,
        kernel_words: bake.kernel.cmdline,
        labels,
        bake: instructions,
        egress,
        no_snapshot: !bake.snapshot.enabled,
        lock,
        steps: Some((made.executed, made.cached)),
        _scratch: Some((scratch, claim)),
    })
}

/// What a recipe lets its sandboxes reach, if that can be understood.
fn egress(bake: &parbake_recipes::recipe::BakeSpec) -> CliResult<Vec<String>> {
    let rules = &bake.network.egress.allow;
    for rule in rules {
        Egress::parse(rule).map_err(|error| {
            CliError::new(Kind::User, error)
                .hint("network.egress.allow takes HOST:PORT, *.HOST:PORT, ADDRESS/PREFIX:PORT or *")
        })?;
    }
    Ok(rules.clone())
}

/// What a recipe may say and a template cannot keep yet.
fn unkept(bake: &parbake_recipes::recipe::BakeSpec) -> Vec<String> {
    let mut texts = Vec::new();
    if !bake.network.ports.is_empty() {
        texts.push("network.ports are not kept in the template; nothing is forwarded".into());
    }
    texts
}

fn kernel_choice(
    args: &Args,
    bake: &parbake_recipes::recipe::BakeSpec,
    context: &Path,
) -> CliResult<KernelChoice> {
    match &args.kernel {
        Some(kernel) => Ok(kernel.clone()),
        None => source::kernel_choice(&bake.kernel, context).map_err(source_error),
    }
}

fn source_date_epoch() -> CliResult<Option<i64>> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) if !text.is_empty() => text.parse().map(Some).map_err(|_| {
            CliError::new(Kind::Usage, format!("SOURCE_DATE_EPOCH={text} is no number of seconds"))
        }),
        _ => Ok(None),
    }
}

fn secrets(args: &Args) -> BTreeMap<String, Vec<u8>> {
    args.secret.iter().map(|secret| (secret.id.clone(), secret.value.clone())).collect()
}

/// Step results, unpacked bases, cache mounts: beside the store's own, so that one disk holds both.
pub fn build_directory(store: &Store) -> PathBuf {
    store.root().join("build")
}

fn steps_json(steps: Option<(usize, usize)>) -> Option<serde_json::Value> {
    steps.map(|(executed, cached)| json!({ "executed": executed, "cached": cached }))
}

fn report(context: &Context, args: &Args, material: &Material, built: &Assembled) -> CliResult {
    if !context.json() {
        return output::line(&built.digest.to_string());
    }
    output::json(&json!({
        "digest": built.digest,
        "names": args.tag.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "image": material.image.manifest_digest(),
        "rootfs": built.manifest.rootfs,
        "kernel": built.manifest.kernel,
        "inodes": built.inodes,
        "layers": built.manifest.source.layers,
        "steps": steps_json(material.steps),
        "bake": built.manifest.bake,
    }))
}

fn image_error(error: ImageError) -> CliError {
    let kind = match &error {
        ImageError::NoSuchReference { .. }
        | ImageError::MissingBlob { .. }
        | ImageError::NoTemplate { .. } => Kind::NotFound,
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
        AssembleError::Secret(error) => steps::execute_error(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_read_and_never_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hunter22").unwrap();
        let read = secret(&format!("id=tok,src={}", file.path().display())).unwrap();
        assert_eq!((read.id.as_str(), read.value.as_slice()), ("tok", &b"hunter22"[..]));
        assert!(!format!("{read:?}").contains("hunter22"));
        assert!(!secret("id=p,env=PATH").unwrap().value.is_empty());
        assert!(secret("id=PATH").is_ok());
        for bad in
            ["", "src=x", "id=a,src=/no/such", "id=a,env=NO_SUCH_VAR", "id=a,src=x,env=y", "id=a,b"]
        {
            assert!(secret(bad).is_err(), "{bad}");
        }
        assert_eq!(ssh("git=/run/a").unwrap(), ("git".to_owned(), PathBuf::from("/run/a")));
        assert!(ssh("=x").is_err());
    }
}
