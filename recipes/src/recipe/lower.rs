//! [`Recipe`] → [`BuildPlan`] and [`BakeSpec`]. Everything a recipe says about the filesystem
//! becomes ordinary steps, so that executors, cache and lock know one language only.

use std::path::Path;

use crate::RecipeError;
use crate::dockerfile::{self, BaseImages, LowerOptions, Variables};
use crate::error::Location;
use crate::glob::clean;
use crate::plan::{
    Action, Base, Bootstrap, BuildPlan, Chmod, Copy, CopyFrom, CopySource, ImageConfig,
    ImageSource, InlineFile, Mount, MountSource, Network, Run, Sharing, Stage, Step, Warning,
};

use super::read::Places;
use super::{BakeSpec, BaseSpec, BuildNetwork, Recipe, Snapshot, StepSpec, User, Variant};

const DEBIAN_QUIET: &str = "DEBIAN_FRONTEND=noninteractive";

/// A base that is looked up.
fn from_image(
    name: &str,
    at: &Location,
    options: &LowerOptions,
    images: &mut dyn BaseImages,
) -> Result<(Base, ImageConfig), RecipeError> {
    let image = images.resolve(name, &options.platform).map_err(|reason| {
        RecipeError::BaseImage { at: at.clone(), reference: name.to_owned(), reason }
    })?;
    let source = ImageSource {
        reference: name.to_owned(),
        digest: image.digest,
        platform: options.platform.clone(),
    };
    Ok((Base::Image(source), image.config))
}

/// Lowers a recipe. `directory` is where it lies: a Dockerfile it names is read from there.
///
/// # Errors
/// When the base cannot be resolved or the Dockerfile it names is wrong.
pub fn lower(
    recipe: &Recipe,
    places: &Places,
    directory: &Path,
    options: &LowerOptions,
    images: &mut dyn BaseImages,
) -> Result<(BuildPlan, BakeSpec), RecipeError> {
    let file = options.file.as_str();
    let at = Location::line(file, places.base);
    let mut stages = Vec::new();
    let mut ignore = options.ignore.clone();
    let mut warnings = Vec::new();
    let (base, config) = match &recipe.base {
        BaseSpec::Image(name) if name == "scratch" => {
            (Base::Scratch, ImageConfig { working_dir: "/".to_owned(), ..ImageConfig::default() })
        }
        BaseSpec::Image(name) => from_image(name, &at, options, images)?,
        BaseSpec::Template(name) => from_image(&format!("template:{name}"), &at, options, images)?,
        BaseSpec::Dockerfile(spec) => {
            let inside = clean(&format!("/{}", spec.path));
            let path = directory.join(inside.trim_start_matches('/'));
            let text = std::fs::read_to_string(&path)
                .map_err(|source| RecipeError::Read { path: path.clone(), source })?;
            let mut nested = options.clone();
            nested.file.clone_from(&spec.path);
            nested.target.clone_from(&spec.target);
            nested.labels.clear();
            for (name, value) in &spec.args {
                nested.build_args.entry(name.clone()).or_insert_with(|| value.clone());
            }
            let plan = dockerfile::lower(&text, &nested, images)?;
            stages = plan.stages;
            ignore = plan.ignore;
            warnings = plan.warnings;
            let config = stages.last().map(|stage| stage.config.clone()).unwrap_or_default();
            (Base::Stage { stage: stages.len().saturating_sub(1) }, config)
        }
        BaseSpec::Bootstrap(spec) => {
            let variant = match spec.variant {
                Variant::Essential => "essential",
                Variant::Apt => "apt",
                Variant::Minbase => "minbase",
                Variant::Important => "important",
            };
            let bootstrap = Bootstrap {
                suite: spec.suite.clone(),
                variant: variant.to_owned(),
                packages: recipe.packages.apt.clone(),
                mirror: spec.mirror.clone(),
            };
            (Base::Bootstrap(bootstrap), ImageConfig::default())
        }
    };
    let mut lowering = Lowering { recipe, places, file, config, steps: Vec::new() };
    lowering.environment();
    if !matches!(recipe.base, BaseSpec::Bootstrap(_)) {
        lowering.apt();
    }
    lowering.users();
    lowering.languages();
    lowering.files();
    for index in 0..recipe.build.steps.len() {
        lowering.step(index);
    }
    lowering.process();
    let Lowering { steps, config, .. } = lowering;
    let bake = bake(recipe, options, &config);
    let author = stages.last().and_then(|stage| stage.author.clone());
    stages.push(Stage { name: recipe.metadata.name.clone(), at, base, steps, config, author });
    let mut plan = BuildPlan {
        platform: options.platform.clone(),
        stages,
        ignore,
        secrets: std::collections::BTreeMap::new(),
        warnings,
    };
    dockerfile::collect_secrets(&mut plan)?;
    if let Some(keys) = idle(recipe) {
        let message = format!("snapshot.enabled is false, so nothing comes of {keys}");
        plan.warnings.push(Warning { at: Location::line(file, 0), message });
    }
    Ok((plan, bake))
}

/// What a recipe says of a snapshot that it does not want.
fn idle(recipe: &Recipe) -> Option<String> {
    if recipe.snapshot.enabled {
        return None;
    }
    let plain = Snapshot { enabled: false, ..Snapshot::default() };
    let keys: Vec<&str> = [
        ("warmup", !recipe.warmup.steps.is_empty()),
        ("ready", !recipe.ready.checks.is_empty()),
        ("moreMachines", !recipe.more_machines.is_empty()),
        ("the rest of snapshot", recipe.snapshot != plain),
    ]
    .into_iter()
    .filter_map(|(key, said)| said.then_some(key))
    .collect();
    (!keys.is_empty()).then(|| keys.join(", "))
}

fn bake(recipe: &Recipe, options: &LowerOptions, config: &ImageConfig) -> BakeSpec {
    let ready = recipe.ready.clone().or_healthcheck(config);
    let mut labels = recipe.metadata.labels.clone();
    labels.extend(options.labels.clone());
    BakeSpec {
        kernel: recipe.kernel.clone(),
        machines: std::iter::once(&recipe.machine).chain(&recipe.more_machines).cloned().collect(),
        disk: recipe.disk.clone(),
        warmup: recipe.warmup.clone(),
        ready,
        snapshot: recipe.snapshot.clone(),
        network: recipe.network.clone(),
        labels,
        source_date_epoch: recipe.reproducibility.source_date_epoch,
    }
}

struct Lowering<'a> {
    recipe: &'a Recipe,
    places: &'a Places,
    file: &'a str,
    config: ImageConfig,
    steps: Vec<Step>,
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn quoted(words: &[String]) -> String {
    words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")
}

impl Lowering<'_> {
    fn environment(&mut self) {
        if !self.config.env.iter().any(|line| line.starts_with("PATH=")) {
            self.config.env.push(dockerfile::DEFAULT_PATH.to_owned());
        }
        let mut env = Variables::from_lines(&self.config.env);
        for (name, value) in &self.recipe.env {
            env.set(name, value);
        }
        self.config.env = env.lines();
    }

    /// Environment of a step: the template's, then the build's.
    fn step_environment(&self, extra: &[&str]) -> Vec<String> {
        let mut env = Variables::from_lines(&self.config.env);
        for (name, value) in &self.recipe.build.env {
            env.set(name, value);
        }
        for line in extra {
            if let Some((name, value)) = line.split_once('=')
                && env.get(name).is_none()
            {
                env.set(name, value);
            }
        }
        env.lines()
    }

    fn push(&mut self, line: u32, text: String, action: Action) {
        let at = Location::line(self.file, line);
        self.steps.push(Step { at, created_by: text.clone(), text, action });
    }

    fn network(&self) -> Network {
        match self.recipe.build.network {
            BuildNetwork::Full => Network::Default,
            BuildNetwork::None => Network::None,
        }
    }

    fn shell(&mut self, line: u32, text: String, script: String, env: &[&str], mounts: Vec<Mount>) {
        let run = Run {
            args: vec!["/bin/sh".into(), "-ec".into(), script],
            env: self.step_environment(env),
            uncached_env: Vec::new(),
            working_dir: "/".to_owned(),
            user: String::new(),
            mounts,
            network: self.network(),
            script: None,
        };
        self.push(line, text, Action::Run(Box::new(run)));
    }

    fn apt(&mut self) {
        let apt = &self.recipe.packages.apt;
        if apt.is_empty() {
            return;
        }
        let list = quoted(apt);
        let script = format!(
            "apt-get update\napt-get install -y --no-install-recommends {list}\n\
             rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache \
             /var/log/apt /var/log/dpkg.log /var/log/alternatives.log"
        );
        let line = self.places.packages;
        self.shell(line, format!("apt packages {list}"), script, &[DEBIAN_QUIET], Vec::new());
    }

    fn users(&mut self) {
        for (index, user) in self.recipe.users.iter().enumerate() {
            let line = self.places.users.get(index).copied().unwrap_or(0);
            self.shell(line, format!("user {}", user.name), user_script(user), &[], Vec::new());
        }
    }

    fn languages(&mut self) {
        let packages = &self.recipe.packages;
        if packages.is_empty() {
            return;
        }
        let line = self.places.packages;
        let pip = "python3 -m pip install --no-cache-dir --no-compile --root-user-action=ignore";
        let pip_env = ["PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_DISABLE_PIP_VERSION_CHECK=1"];
        if let Some(path) = packages.pip_requirements.clone() {
            let target = "/run/parbake/requirements.txt";
            let mount = Mount {
                target: target.to_owned(),
                source: MountSource::Bind {
                    from: CopyFrom::Context,
                    path: clean(&format!("/{path}")),
                },
                read_only: true,
            };
            let text = format!("pip requirements {path}");
            self.shell(line, text, format!("{pip} -r {target}"), &pip_env, vec![mount]);
        }
        if !packages.pip.is_empty() {
            let list = quoted(&packages.pip);
            let script = format!("{pip} {list}");
            self.shell(line, format!("pip packages {list}"), script, &pip_env, Vec::new());
        }
        if !packages.npm.is_empty() {
            let list = quoted(&packages.npm);
            let script = format!("npm install --global --no-audit --no-fund {list}\nrm -rf ~/.npm");
            self.shell(line, format!("npm packages {list}"), script, &[], Vec::new());
        }
    }

    fn files(&mut self) {
        for (index, spec) in self.recipe.files.iter().enumerate() {
            let line = self.places.files.get(index).copied().unwrap_or(0);
            let source = match (&spec.src, &spec.content) {
                (Some(src), _) => CopySource::Path { path: src.clone() },
                (None, content) => {
                    let name = spec.dest.rsplit('/').next().unwrap_or_default().to_owned();
                    let data = content.clone().unwrap_or_default();
                    CopySource::Inline(InlineFile { name, data })
                }
            };
            let copy = Copy {
                from: CopyFrom::Context,
                sources: vec![source],
                dest: spec.dest.clone(),
                chown: spec.owner.clone(),
                chmod: spec
                    .mode
                    .as_deref()
                    .and_then(|mode| u32::from_str_radix(mode, 8).ok())
                    .map(Chmod::Octal),
                link: false,
                parents: false,
                exclude: spec.exclude.clone(),
                unpack: false,
            };
            let from = spec.src.as_deref().unwrap_or("content");
            self.push(line, format!("file {from} → {}", spec.dest), Action::Copy(Box::new(copy)));
        }
    }

    fn step(&mut self, index: usize) {
        let spec: &StepSpec = &self.recipe.build.steps[index];
        let line = self.places.steps.get(index).copied().unwrap_or(0);
        let mut mounts: Vec<Mount> = spec
            .cache
            .iter()
            .map(|path| Mount {
                target: clean(path),
                source: MountSource::Cache {
                    id: clean(path),
                    sharing: Sharing::Locked,
                    from: None,
                    path: "/".to_owned(),
                    mode: 0o755,
                    uid: 0,
                    gid: 0,
                },
                read_only: false,
            })
            .collect();
        for id in &spec.secrets {
            let declared = self.recipe.build.secrets.iter().find(|secret| secret.id == *id);
            mounts.push(Mount {
                target: format!("/run/secrets/{id}"),
                source: MountSource::Secret {
                    id: id.clone(),
                    env: declared.and_then(|secret| secret.env.clone()),
                    required: declared.is_none_or(|secret| secret.required),
                    mode: 0o400,
                    uid: 0,
                    gid: 0,
                },
                read_only: true,
            });
        }
        let directory = spec
            .working_dir
            .clone()
            .or_else(|| self.recipe.process.working_dir.clone())
            .unwrap_or_else(|| self.config.working_dir.clone());
        let run = Run {
            args: spec.run.args(),
            env: self.step_environment(&[]),
            uncached_env: Vec::new(),
            working_dir: clean(&format!("/{directory}")),
            user: spec.user.clone().unwrap_or_default(),
            mounts,
            network: match spec.network {
                Some(BuildNetwork::None) => Network::None,
                _ => self.network(),
            },
            script: None,
        };
        let text = format!("run {}", spec.run.args().last().cloned().unwrap_or_default());
        self.push(line, text, Action::Run(Box::new(run)));
    }

    fn process(&mut self) {
        let process = &self.recipe.process;
        if let Some(entrypoint) = &process.entrypoint {
            self.config.entrypoint = Some(entrypoint.clone()).filter(|args| !args.is_empty());
            self.config.cmd = None;
        }
        if let Some(cmd) = &process.cmd {
            self.config.cmd = Some(cmd.clone());
        }
        if let Some(user) = &process.user {
            self.config.user.clone_from(user);
        }
        if process.stop_signal.is_some() {
            self.config.stop_signal.clone_from(&process.stop_signal);
        }
        self.config.labels.extend(self.recipe.metadata.labels.clone());
        if let Some(directory) = &process.working_dir {
            let path = clean(&format!("/{directory}"));
            self.config.working_dir.clone_from(&path);
            if path != "/" {
                let user = self.config.user.clone();
                let text = format!("working directory {path}");
                self.push(self.places.process, text, Action::MakeDirectory { path, user });
            }
        }
    }
}

/// Adds a user without `useradd`, which small images lack. Names were checked to be plain.
fn user_script(user: &User) -> String {
    let User { name, uid, shell, .. } = user;
    let gid = user.gid.unwrap_or(*uid);
    let home = user.home.clone().unwrap_or_else(|| format!("/home/{name}"));
    format!(
        "if grep -q '^{name}:' /etc/passwd 2>/dev/null; then\n\
           grep -q '^{name}:[^:]*:{uid}:{gid}:' /etc/passwd || \
             {{ echo 'user {name} exists with another uid or gid' >&2; exit 1; }}\n\
         else\n\
           grep -q '^[^:]*:[^:]*:{gid}:' /etc/group 2>/dev/null || echo '{name}:x:{gid}:' >>/etc/group\n\
           echo '{name}:x:{uid}:{gid}::{home}:{shell}' >>/etc/passwd\n\
           if [ -f /etc/shadow ]; then echo '{name}:!:19000:0:99999:7:::' >>/etc/shadow; fi\n\
         fi\n\
         mkdir -p {home}\n\
         chown {uid}:{gid} {home}"
    )
}
