//! From a directory with a Dockerfile or a recipe to an image, and to what a bake of it does.
//!
//! ```text
//! open: file ─► plan, bake spec ─► (lock file compared)       build: plan ─► image
//! ```
//! An installed engine (`buildah`, `buildx`) gets the Dockerfile as it is; then the image alone
//! says what there is to know.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parbake_cache::template::{
    BakeInstructions, GuestCheck, HttpRequest, MachineShape, ReadyInstructions, WarmupStep,
};
use parbake_recipes::dockerfile::NamedContext;
use parbake_recipes::lock::{Lock, LockedKernel, Packages};
use parbake_recipes::plan;
use parbake_recipes::recipe::{self, BakeSpec, Check, Ready};
use parbake_recipes::resolve::{Locked, by_digest};
use parbake_recipes::{LoadRequest, Loaded, RecipeError};

use crate::execute::{
    self, BaseLayers, Bases, BuiltImage, Event, ExecuteError, ExecuteOptions, Executor,
    ExternalOptions, SourceImages, Tool,
};
use crate::image::{ImageConfig, ImageOptions};
use crate::kernel::KernelChoice;

/// The lock file's name, beside the recipe or Dockerfile.
pub const LOCK_FILE: &str = "parbake.lock";

/// Who builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// This program, steps by whichever executor is given.
    #[default]
    Own,
    /// An installed engine.
    External(Tool),
}

/// What to build, and how it is found.
#[derive(Debug, Clone, Default)]
pub struct SourceRequest {
    /// The file, its context and its arguments.
    pub load: LoadRequest,
    /// How registries are spoken to.
    pub images: ImageOptions,
    /// Who builds.
    pub engine: Engine,
    /// Anything that is not as the lock file says is refused.
    pub locked: bool,
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The text, its bases or its lock file.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A step, or the machine.
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// `--locked` without a lock.
    #[error("{} is not there, and a locked build needs it", path.display())]
    NoLock {
        /// Where it was expected.
        path: PathBuf,
    },
    /// Something that this program does not do with what was given.
    #[error("{0}")]
    Unsupported(String),
}

/// A source that was read and understood.
pub struct Source {
    request: SourceRequest,
    images: SourceImages,
    /// Absent for an external engine.
    loaded: Option<Loaded>,
    lock: Option<(PathBuf, Lock, Lock)>,
}

/// What a build made.
#[derive(Debug, Clone)]
pub struct Built {
    /// The image.
    pub image: BuiltImage,
    /// What a bake of it does.
    pub bake: BakeSpec,
    /// As a template remembers it.
    pub instructions: Option<BakeInstructions>,
    /// The file's name, or the recipe's.
    pub reference: String,
}

impl Source {
    /// Reads the file, resolves its bases, and compares the lock file if that was asked for.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn open(request: SourceRequest) -> Result<Self, SourceError> {
        let mut images = SourceImages::new(request.images.clone());
        if let Engine::External(_) = request.engine {
            if request.locked {
                let what = "an external engine resolves images itself; build without --locked";
                return Err(SourceError::Unsupported(what.to_owned()));
            }
            return Ok(Self { request, images, loaded: None, lock: None });
        }
        if !request.locked {
            let loaded = parbake_recipes::load(&request.load, &mut images)?;
            return Ok(Self { request, images, loaded: Some(loaded), lock: None });
        }
        let path = lock_path(&request.load);
        let Some(locked) = Lock::read(&path)? else { return Err(SourceError::NoLock { path }) };
        let mut loaded =
            parbake_recipes::load(&request.load, &mut Locked::new(&mut images, &locked))?;
        let now = lock(&mut loaded)?;
        locked.verify(&now, &path)?;
        Ok(Self { request, images, loaded: Some(loaded), lock: Some((path, locked, now)) })
    }

    /// What was read; nothing when an external engine reads it.
    #[must_use]
    pub fn loaded(&self) -> Option<&Loaded> {
        self.loaded.as_ref()
    }

    /// Compares the kernel with the lock file's.
    ///
    /// # Errors
    /// [`RecipeError::LockDrift`].
    pub fn check_kernel(&mut self, kernel: LockedKernel) -> Result<(), SourceError> {
        if let Some((path, locked, now)) = &mut self.lock {
            now.kernel = Some(kernel);
            locked.verify(now, path)?;
        }
        Ok(())
    }

    /// Compares what was installed with the lock file.
    ///
    /// # Errors
    /// [`RecipeError::LockDrift`].
    pub fn check_packages(&self, packages: &Packages) -> Result<(), SourceError> {
        match &self.lock {
            Some((path, locked, _)) => Ok(locked.verify_packages(packages, path)?),
            None => Ok(()),
        }
    }

    /// What a lock file of this source would say, without kernel and packages, and where it is;
    /// nothing when an external engine reads the source.
    ///
    /// # Errors
    /// When the context cannot be read.
    pub fn lock_now(&mut self) -> Result<Option<(PathBuf, Lock)>, SourceError> {
        let path = lock_path(&self.request.load);
        self.loaded.as_mut().map(|loaded| Ok((path, lock(loaded)?))).transpose()
    }

    /// What a template remembers of the files it was built from, as labels: the digest of the
    /// Dockerfile or recipe, and that of the lock file if it was held to one.
    #[must_use]
    pub fn origin(&self) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        let mut note = |label: &str, path: &Path| {
            if let Ok(bytes) = std::fs::read(path) {
                labels.insert(label.to_owned(), parbake_cache::Digest::of(&bytes).to_string());
            }
        };
        if let Some(loaded) = &self.loaded {
            note(crate::provenance::RECIPE_LABEL, &loaded.path);
        }
        if let Some((path, ..)) = &self.lock {
            note(crate::provenance::LOCK_LABEL, path);
        }
        labels
    }

    /// Builds the image. `options` need no context; `executor` runs the steps, unless an external
    /// engine does.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub fn build(
        &mut self,
        options: &ExecuteOptions,
        executor: Option<&mut (dyn Executor + '_)>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Built, SourceError> {
        let (image, bake, starts, reference) = match (&self.loaded, self.request.engine) {
            (None, Engine::External(tool)) => self.build_external(tool, options, events)?,
            (Some(loaded), _) => {
                let options = ExecuteOptions {
                    context: loaded.context.clone(),
                    source_date_epoch: options.source_date_epoch.or(loaded.bake.source_date_epoch),
                    ..options.clone()
                };
                let mut bases = Pinned { images: &mut self.images, by_digest: self.request.locked };
                let Some(executor) = executor else {
                    return Err(SourceError::Unsupported("nobody runs the steps".to_owned()));
                };
                let image = execute::build(&loaded.plan, &options, executor, &mut bases, events)?;
                let starts = starts_process(loaded);
                (image, loaded.bake.clone(), starts, reference(loaded))
            }
            (None, Engine::Own) => {
                return Err(SourceError::Unsupported("nothing was loaded".to_owned()));
            }
        };
        let has_process = image.config.entrypoint.iter().chain(&image.config.cmd).flatten().count();
        let instructions = instructions(&bake, starts && has_process > 0);
        Ok(Built { image, bake, instructions, reference })
    }

    fn build_external(
        &self,
        tool: Tool,
        options: &ExecuteOptions,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<(BuiltImage, BakeSpec, bool, String), SourceError> {
        let load = &self.request.load;
        let named = |name: &str| load.context.join(name);
        let dockerfile = match &load.file {
            Some(file) => file.clone(),
            None => [named("Dockerfile"), named("Containerfile")]
                .into_iter()
                .find(|path| path.exists())
                .ok_or_else(|| {
                    SourceError::Unsupported(format!(
                        "{} holds no Dockerfile; name one with -f",
                        load.context.display()
                    ))
                })?,
        };
        if is_recipe(&dockerfile) {
            let what = format!(
                "{} is a recipe, and other engines build Dockerfiles only; use --builder sandbox",
                dockerfile.display()
            );
            return Err(SourceError::Unsupported(what));
        }
        if !options.ssh.is_empty() || options.strict {
            let what = "--ssh and --strict are for --builder microvm and sandbox only";
            return Err(SourceError::Unsupported(what.to_owned()));
        }
        let mut extra = Vec::new();
        for (name, value) in &load.options.contexts {
            let place = match value {
                NamedContext::Image(image) => image.clone(),
                NamedContext::Directory => match options.contexts.get(name) {
                    Some(path) => path.display().to_string(),
                    None => continue,
                },
            };
            extra.push(format!("--build-context={name}={place}"));
        }
        if options.network == execute::NetworkAccess::None {
            extra.push("--network=none".to_owned());
        }
        let external = ExternalOptions {
            tool,
            dockerfile: dockerfile.clone(),
            context: load.context.clone(),
            output: options.output.clone(),
            build_args: load.options.build_args.clone(),
            labels: load.options.labels.clone(),
            target: load.options.target.clone(),
            platform: load.options.platform.clone(),
            secrets: options.secrets.clone(),
            no_cache: options.no_cache,
            extra,
        };
        let image = execute::build_external(&external, events)?;
        let bake = BakeSpec {
            ready: Ready::default().or_healthcheck(&image.config),
            labels: load.options.labels.clone(),
            ..BakeSpec::default()
        };
        let starts = !bake.ready.checks.is_empty();
        let name = dockerfile.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok((image, bake, starts, name))
    }
}

/// Where the lock file of a request is.
#[must_use]
pub fn lock_path(request: &LoadRequest) -> PathBuf {
    let beside = request.file.as_deref().and_then(Path::parent).unwrap_or(&request.context);
    beside.join(LOCK_FILE)
}

/// The lock of what was loaded. The lock file itself is no part of what it locks.
///
/// # Errors
/// When the context cannot be read.
pub fn lock(loaded: &mut Loaded) -> Result<Lock, RecipeError> {
    loaded.plan.ignore.push(LOCK_FILE.to_owned());
    let lock = loaded.lock();
    loaded.plan.ignore.pop();
    lock
}

fn is_recipe(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// What a template says it came from: nothing about the machine it was made on.
fn reference(loaded: &Loaded) -> String {
    let file = loaded.path.file_name().unwrap_or_default().to_string_lossy();
    match loaded.recipe.as_ref().and_then(|recipe| recipe.metadata.name.as_deref()) {
        Some(name) => format!("{file} ({name})"),
        None => file.into_owned(),
    }
}

/// Whether a bake starts the image's process: when something looks at it. That is a health check,
/// which is about the running process by definition, or a check that only a running one can pass.
/// Commands and files can be looked at in a guest where nothing runs.
fn starts_process(loaded: &Loaded) -> bool {
    let needs_one =
        |check: &Check| matches!(check, Check::Tcp(_) | Check::Http(_) | Check::Process(_));
    let asks = |step: &recipe::WarmupStep| matches!(step, recipe::WarmupStep::Http(_));
    let health_check = match &loaded.recipe {
        Some(recipe) => recipe.ready.checks.is_empty(),
        None => true,
    };
    let checks = &loaded.bake.ready.checks;
    (health_check && !checks.is_empty())
        || checks.iter().any(needs_one)
        || loaded.bake.warmup.steps.iter().any(asks)
}

/// What a template remembers for its bake; nothing when a booted guest is all there is to it.
#[must_use]
pub fn instructions(spec: &BakeSpec, start_process: bool) -> Option<BakeInstructions> {
    let request =
        |check: &recipe::HttpCheck| HttpRequest { url: check.get.clone(), status: check.expect };
    let milliseconds = |time: recipe::Time| u64::try_from(time.0.as_millis()).unwrap_or(u64::MAX);
    let checks = spec.ready.checks.iter().map(|check| match check {
        Check::Tcp(port) => GuestCheck::Tcp(*port),
        Check::Http(check) => GuestCheck::Http(request(check)),
        Check::File(path) => GuestCheck::File(path.clone()),
        Check::Exec(command) => GuestCheck::Exec(command.args()),
        Check::Process(name) => GuestCheck::Process(name.clone()),
    });
    let warmup = spec.warmup.steps.iter().map(|step| match step {
        recipe::WarmupStep::Exec(command) => WarmupStep::Exec(command.args()),
        recipe::WarmupStep::Http(check) => WarmupStep::Http(request(check)),
    });
    let instructions = BakeInstructions {
        start_process,
        ready: ReadyInstructions {
            checks: checks.collect(),
            interval_ms: milliseconds(spec.ready.interval),
            timeout_ms: milliseconds(spec.ready.timeout),
            settle_ms: milliseconds(spec.ready.settle),
        },
        warmup: warmup.collect(),
        warmup_timeout_ms: milliseconds(spec.warmup.timeout),
        keep_caches: !spec.snapshot.drop_caches,
        keep_free_memory: !spec.snapshot.zero_free_memory,
        more_machines: spec.machines.iter().skip(1).map(shape).collect(),
    };
    let nothing = !instructions.start_process
        && instructions.ready.checks.is_empty()
        && instructions.warmup.is_empty()
        && !instructions.keep_caches
        && !instructions.keep_free_memory
        && instructions.more_machines.is_empty();
    (!nothing).then_some(instructions)
}

/// What a bake of a finished image does: its health check is the ready check, and its process is
/// started for it.
#[must_use]
pub fn instructions_of_image(config: &ImageConfig) -> Option<BakeInstructions> {
    let config = execute::plan_config(config);
    let ready = Ready::default().or_healthcheck(&config);
    let has_process = config.entrypoint.iter().chain(&config.cmd).flatten().count() > 0;
    let starts = has_process && !ready.checks.is_empty();
    instructions(&BakeSpec { ready, ..BakeSpec::default() }, starts)
}

/// The machine's shape a recipe asks for.
#[must_use]
pub fn shape(machine: &recipe::Machine) -> MachineShape {
    MachineShape { vcpus: machine.vcpus, memory_mib: machine.memory_mib }
}

/// The kernel a recipe asks for; paths are below its directory.
///
/// # Errors
/// [`SourceError::Unsupported`].
pub fn kernel_choice(kernel: &recipe::Kernel, context: &Path) -> Result<KernelChoice, SourceError> {
    if !kernel.modules.is_empty() {
        let what = format!(
            "kernel.modules ({}): bundles carry the drivers of the machine only; name a kernel \
             that has them built in with kernel.source",
            kernel.modules.join(", ")
        );
        return Err(SourceError::Unsupported(what));
    }
    let package = KernelChoice::default().to_string();
    let source = kernel.source.as_deref().unwrap_or(&package);
    let path = context.join(source);
    let text = if source.ends_with(".deb") {
        format!("deb:{}", path.display())
    } else if source.contains('/') || path.is_file() {
        format!("image:{}", path.display())
    } else {
        match &kernel.version {
            Some(version) => format!("{source}={version}"),
            None => source.to_owned(),
        }
    };
    text.parse().map_err(|why| SourceError::Unsupported(format!("kernel.source: {why}")))
}

/// Bases as they were resolved: with a lock file, by digest and no longer by name.
struct Pinned<'a> {
    images: &'a mut SourceImages,
    by_digest: bool,
}

impl Bases for Pinned<'_> {
    fn layers(&mut self, source: &plan::ImageSource) -> Result<BaseLayers, String> {
        if !self.by_digest {
            return self.images.layers(source);
        }
        let reference = by_digest(&source.reference, &source.digest);
        self.images.layers(&plan::ImageSource { reference, ..source.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(name: &str, text: &str) -> Loaded {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(name), text).unwrap();
        let context = directory.path().to_owned();
        parbake_recipes::check(&LoadRequest { context, ..LoadRequest::default() }).unwrap()
    }

    const RECIPE: &str = "apiVersion: parbake.dev/v1\nbase: {image: scratch}\n";

    #[test]
    fn a_process_is_started_for_whoever_looks_at_it() {
        for (rest, starts) in [
            ("", false),
            ("ready: {checks: [exec: [/bin/true]]}\n", false),
            ("ready: {checks: [file: /x]}\n", false),
            ("ready: {checks: [tcp: 80]}\n", true),
            ("ready: {checks: [process: postgres]}\n", true),
            ("warmup: {steps: [exec: [/bin/true]]}\n", false),
            ("warmup: {steps: [http: {get: 'http://localhost/'}]}\n", true),
        ] {
            let loaded = loaded("parbake.yaml", &format!("{RECIPE}{rest}"));
            assert_eq!(starts_process(&loaded), starts, "{rest}");
        }
        assert!(!starts_process(&loaded("Dockerfile", "FROM scratch\nCMD [\"/x\"]\n")));
        let text = "FROM scratch\nCMD [\"/x\"]\nHEALTHCHECK CMD [\"/y\"]\n";
        assert!(starts_process(&loaded("Dockerfile", text)));
    }

    #[test]
    fn a_template_remembers_only_what_a_bake_does() {
        assert_eq!(instructions(&loaded("Dockerfile", "FROM scratch\n").bake, false), None);
        let text = format!(
            "{RECIPE}ready: {{checks: [tcp: 80], timeout: 3s, settle: 0s}}\n\
             warmup: {{steps: [exec: echo hi]}}\n"
        );
        let found = instructions(&loaded("parbake.yaml", &text).bake, true).unwrap();
        assert_eq!(found.ready.checks, [GuestCheck::Tcp(80)]);
        assert_eq!((found.ready.timeout_ms, found.ready.settle_ms), (3000, 0));
        let argv = ["/bin/sh", "-ec", "echo hi"].map(str::to_owned);
        assert_eq!(found.warmup, [WarmupStep::Exec(argv.to_vec())]);
        let text = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<BakeInstructions>(&text).unwrap(), found);
    }

    #[test]
    fn a_finished_images_health_check_is_the_ready_check() {
        use crate::image::manifest::Healthcheck;
        assert_eq!(instructions_of_image(&ImageConfig::default()), None);
        let check = |test: &[&str]| Healthcheck {
            test: test.iter().map(ToString::to_string).collect(),
            interval: 5_000_000_000,
            ..Healthcheck::default()
        };
        let with = |test: &[&str]| ImageConfig {
            cmd: Some(vec!["/srv".to_owned()]),
            healthcheck: Some(check(test)),
            ..ImageConfig::default()
        };
        let found = instructions_of_image(&with(&["CMD-SHELL", "curl localhost"])).unwrap();
        assert!(found.start_process);
        let argv = ["/bin/sh", "-c", "curl localhost"].map(str::to_owned);
        assert_eq!(found.ready.checks, [GuestCheck::Exec(argv.to_vec())]);
        assert_eq!(found.ready.interval_ms, 1000);
        assert_eq!(instructions_of_image(&with(&["NONE"])), None);
    }

    #[test]
    fn kernels_are_packages_or_files_of_the_context() {
        let choose = |source: Option<&str>, version: Option<&str>| {
            let kernel = recipe::Kernel {
                source: source.map(str::to_owned),
                version: version.map(str::to_owned),
                ..recipe::Kernel::default()
            };
            kernel_choice(&kernel, Path::new("/ctx")).unwrap().to_string()
        };
        let package = KernelChoice::default().to_string();
        assert_eq!(choose(None, None), package);
        assert_eq!(choose(None, Some("1")), format!("{package}=1"));
        assert_eq!(choose(Some("k.deb"), None), "deb:/ctx/k.deb");
        assert_eq!(choose(Some("boot/vmlinux"), None), "image:/ctx/boot/vmlinux");
        let kernel = recipe::Kernel { modules: vec!["fuse".into()], ..recipe::Kernel::default() };
        assert!(kernel_choice(&kernel, Path::new("/")).unwrap_err().to_string().contains("fuse"));
    }
}
