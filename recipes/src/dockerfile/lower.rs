//! Stages of a Dockerfile: what each starts from, who needs whom, and in which order they run.

use std::collections::{BTreeMap, BTreeSet};

use crate::RecipeError;
use crate::error::{Location, nearest};
use crate::plan::{
    Action, Base, BuildPlan, CopyFrom, ImageConfig, ImageSource, MountSource, Platform, Stage,
    Warning,
};

use super::evaluate::{Evaluator, apply_arg, stage_words};
use super::expand::Lexer;
use super::flags::Flags;
use super::mount::mount_from;
use super::parse::{Arguments, Dockerfile, Instruction, parse};
use super::scope::{Variables, platform_arguments};

/// `PATH` of an image that sets none.
pub const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What is decided outside the Dockerfile.
#[derive(Debug, Clone)]
pub struct LowerOptions {
    /// Name of the file in messages.
    pub file: String,
    /// `--build-arg`.
    pub build_args: BTreeMap<String, String>,
    /// `--target`: a stage's name or number; the last stage when absent.
    pub target: Option<String>,
    /// `--platform`.
    pub platform: Platform,
    /// What the build runs on.
    pub build_platform: Platform,
    /// `--label`, over those of the file.
    pub labels: BTreeMap<String, String>,
    /// `--build-context name=…`.
    pub contexts: BTreeMap<String, NamedContext>,
    /// Patterns of the `.dockerignore`.
    pub ignore: Vec<String>,
}

impl Default for LowerOptions {
    fn default() -> Self {
        Self {
            file: "Dockerfile".to_owned(),
            build_args: BTreeMap::new(),
            target: None,
            platform: Platform::host(),
            build_platform: Platform::host(),
            labels: BTreeMap::new(),
            contexts: BTreeMap::new(),
            ignore: Vec::new(),
        }
    }
}

/// What a `--build-context` name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamedContext {
    /// A directory; the caller knows where.
    Directory,
    /// An image.
    Image(String),
}

/// An image as far as lowering needs it.
#[derive(Debug, Clone, Default)]
pub struct BaseImage {
    /// Manifest digest, `sha256:…`.
    pub digest: String,
    /// Its configuration.
    pub config: ImageConfig,
}

/// Where base images are looked up.
pub trait BaseImages {
    /// Finds `reference` for `platform`.
    ///
    /// # Errors
    /// A sentence that says why not and what to do.
    fn resolve(&mut self, reference: &str, platform: &Platform) -> Result<BaseImage, String>;
}

/// Looks nothing up: every image exists and is empty. For `check` without a network.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unresolved;

impl BaseImages for Unresolved {
    fn resolve(&mut self, _: &str, _: &Platform) -> Result<BaseImage, String> {
        Ok(BaseImage::default())
    }
}

/// A stage before evaluation.
struct Draft<'a> {
    from: &'a Instruction,
    instructions: &'a [Instruction],
    name: Option<String>,
    image: String,
    platform: Platform,
    parent: Option<usize>,
    needs: BTreeSet<usize>,
}

/// Lowers the text of a Dockerfile to a plan.
///
/// # Errors
/// Anything that BuildKit would refuse and anything that is not supported, with file, line and
/// what to write instead.
pub fn lower(
    text: &str,
    options: &LowerOptions,
    images: &mut dyn BaseImages,
) -> Result<BuildPlan, RecipeError> {
    let parsed = parse(&options.file, text)?;
    let mut warnings = Vec::new();
    let starts: Vec<usize> = parsed
        .instructions
        .iter()
        .enumerate()
        .filter(|(_, instruction)| instruction.keyword == "FROM")
        .map(|(index, _)| index)
        .collect();
    let Some(&first) = starts.first() else {
        let at = &parsed.instructions[0].at;
        return Err(at.error("there is no FROM", "start the file with FROM image"));
    };
    let stage_name = options.target.as_deref();
    let mut globals = platform_arguments(&options.build_platform, &options.platform, stage_name);
    for instruction in &parsed.instructions[..first] {
        if instruction.keyword != "ARG" {
            return Err(instruction.at.error(
                format!("{} comes before the first FROM", instruction.keyword),
                "only ARG may; move it below FROM",
            ));
        }
        let known = globals.clone();
        for (name, value) in stage_words(instruction, parsed.escape)? {
            let value = apply_arg(instruction, &parsed, &name, value, &known, options, None)?;
            if let Some(value) = value {
                globals.set(&name, &value);
            }
        }
    }
    let mut drafts = Vec::new();
    for (number, &start) in starts.iter().enumerate() {
        let end = starts.get(number + 1).copied().unwrap_or(parsed.instructions.len());
        let body = &parsed.instructions[start + 1..end];
        let draft = draft(&parsed, start, body, &globals, &drafts, options)?;
        drafts.push(draft);
    }
    for index in 0..drafts.len() {
        drafts[index].needs = needs(&drafts, index)?;
    }
    refuse_cycles(&drafts)?;
    let target = target(&drafts, options)?;
    let order = reachable(&drafts, target)?;
    let mut stages: Vec<Stage> = Vec::new();
    let mut ids: BTreeMap<usize, usize> = BTreeMap::new();
    let mut variables: Vec<(Variables, Vec<String>)> = Vec::new();
    let mut used_args = BTreeSet::new();
    for &index in &order {
        let draft = &drafts[index];
        let mut resolve = |reference: &str, at: &Location| {
            resolve_image(reference, &draft.platform, at, &drafts, images)
        };
        let (base, mut config, inherited) = match draft.parent {
            Some(parent) => {
                let id = ids[&parent];
                let mut config = stages[id].config.clone();
                config.on_build.clear();
                (Base::Stage { stage: id }, config, variables[id].clone())
            }
            None if draft.image == "scratch" => {
                let config = ImageConfig { working_dir: "/".to_owned(), ..ImageConfig::default() };
                (Base::Scratch, config, Default::default())
            }
            None => {
                let (source, config) = resolve(&draft.image, &draft.from.at)?;
                if let Some(trigger) = config.on_build.first() {
                    return Err(draft.from.at.error(
                        format!("base image {} has ONBUILD triggers ({trigger})", draft.image),
                        "they are not run; use an image without them and write the instructions here",
                    ));
                }
                (Base::Image(source), config, Default::default())
            }
        };
        if !config.env.iter().any(|line| line.starts_with("PATH=")) {
            config.env.push(DEFAULT_PATH.to_owned());
        }
        let author = match &base {
            Base::Stage { stage } => stages[*stage].author.clone(),
            _ => None,
        };
        let mut evaluator = Evaluator {
            dockerfile: &parsed,
            options,
            globals: &globals,
            variables: inherited.0,
            declared: inherited.1,
            config,
            author,
            steps: Vec::new(),
            cmd_set: false,
            warnings: &mut warnings,
            used_args: &mut used_args,
            find: &mut |name, at| {
                Ok(match find(&drafts, index, name, at)? {
                    Some(stage) => CopyFrom::Stage { stage: ids[&stage] },
                    None if name == "scratch" => CopyFrom::Scratch,
                    None => match options.contexts.get(name) {
                        Some(NamedContext::Directory) => CopyFrom::Named { name: name.to_owned() },
                        Some(NamedContext::Image(image)) => CopyFrom::Image(resolve(image, at)?.0),
                        None => CopyFrom::Image(resolve(name, at)?.0),
                    },
                })
            },
        };
        evaluator.inherit();
        for instruction in draft.instructions {
            evaluator.instruction(instruction)?;
        }
        let Evaluator { steps, config, author, variables: left, declared, .. } = evaluator;
        ids.insert(index, stages.len());
        variables.push((left, declared));
        stages.push(Stage {
            name: draft.name.clone(),
            at: draft.from.at.clone(),
            base,
            steps,
            config,
            author,
        });
    }
    if let Some(last) = stages.last_mut() {
        last.config.labels.extend(options.labels.clone());
    }
    let global_names: BTreeSet<&str> = globals.names().collect();
    for name in options.build_args.keys() {
        if !used_args.contains(name)
            && !global_names.contains(name.as_str())
            && !super::scope::PROXY_ARGUMENTS.contains(&name.to_lowercase().as_str())
            && name != "SOURCE_DATE_EPOCH"
        {
            warnings.push(Warning {
                at: Location::line(&options.file, 0),
                message: format!(
                    "--build-arg {name} is not used: no ARG {name} in the stages built"
                ),
            });
        }
    }
    if let Some(syntax) = &parsed.syntax
        && !is_standard_syntax(syntax)
    {
        return Err(Location::line(&options.file, 1).error(
            format!("# syntax={syntax} names a front end that is not the Dockerfile's own"),
            "remove the line, or build with --builder buildx and import the result",
        ));
    }
    let mut plan = BuildPlan {
        platform: options.platform.clone(),
        stages,
        ignore: options.ignore.clone(),
        secrets: BTreeMap::new(),
        warnings,
    };
    collect_secrets(&mut plan)?;
    Ok(plan)
}

/// The stock front end under any tag; others may read the file differently.
fn is_standard_syntax(syntax: &str) -> bool {
    let name = syntax.split('@').next().unwrap_or(syntax);
    let name = name.strip_prefix("docker.io/").unwrap_or(name);
    let name = name.split(':').next().unwrap_or(name);
    matches!(name, "docker/dockerfile" | "docker/dockerfile-upstream")
}

fn draft<'a>(
    parsed: &'a Dockerfile,
    start: usize,
    body: &'a [Instruction],
    globals: &Variables,
    earlier: &[Draft<'a>],
    options: &LowerOptions,
) -> Result<Draft<'a>, RecipeError> {
    let from = &parsed.instructions[start];
    let at = &from.at;
    let Arguments::Text(text) = &from.arguments else {
        return Err(at.error("FROM takes no JSON array", "write FROM image"));
    };
    let words: Vec<&str> = text.split_whitespace().collect();
    let (image, name) = match words.as_slice() {
        [image] => (*image, None),
        [image, word, name] if word.eq_ignore_ascii_case("as") => {
            let name = name.to_lowercase();
            let mut chars = name.chars();
            let good = chars.next().is_some_and(|c| c.is_ascii_lowercase())
                && chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c));
            if !good {
                return Err(at.error(
                    format!("{name:?} is no name for a stage"),
                    "start it with a letter; letters, digits, '-', '_' and '.' may follow",
                ));
            }
            (*image, Some(name))
        }
        _ => {
            return Err(at.error(
                format!("FROM takes one image and maybe AS name, not {text:?}"),
                "write FROM image or FROM image AS name",
            ));
        }
    };
    let expand = |what: &str, text: &str| {
        let lookup = |name: &str| globals.get(name).map(str::to_owned);
        let expansion = Lexer::new(parsed.escape)
            .word(text, &lookup)
            .map_err(|error| at.error(format!("FROM {text}: {error}"), "correct the expression"))?;
        if let Some(unset) = expansion.unset.first() {
            let hint = match nearest(unset, globals.names()) {
                Some(known) => format!("did you mean ${known}?"),
                None => format!(
                    "declare ARG {unset}=… before the first FROM or pass --build-arg {unset}=…"
                ),
            };
            return Err(at.error(format!("${unset} has no value in FROM's {what}"), hint));
        }
        if expansion.text.is_empty() {
            return Err(at.error(
                format!("FROM's {what} {text} expands to nothing"),
                "give the ARG a default or pass --build-arg",
            ));
        }
        Ok(expansion.text)
    };
    let flags = Flags::read(at, "FROM", &from.flags, &["platform="])?;
    let platform = match flags.get("platform") {
        None => options.platform.clone(),
        Some(text) => {
            let text = expand("platform", text)?;
            Platform::parse(&text).ok_or_else(|| {
                at.error(format!("{text:?} is no platform"), "write e.g. linux/amd64")
            })?
        }
    };
    if platform.os != "linux" {
        return Err(at.error(
            format!("platform {platform} is not Linux"),
            "templates are Linux guests; use linux/…",
        ));
    }
    let mut image = expand("image", image)?;
    let context = options.contexts.get(image.as_str());
    let parent = earlier
        .iter()
        .rposition(|draft| draft.name.as_deref() == Some(image.to_lowercase().as_str()));
    match context {
        Some(NamedContext::Image(other)) if parent.is_none() => image.clone_from(other),
        Some(NamedContext::Directory) if parent.is_none() => {
            return Err(at.error(
                format!("FROM {image}: the build context of that name is a directory"),
                "FROM needs an image; use COPY --from for a directory",
            ));
        }
        _ => {}
    }
    let platform = match parent {
        Some(parent) => earlier[parent].platform.clone(),
        None => platform,
    };
    Ok(Draft { from, instructions: body, name, image, platform, parent, needs: BTreeSet::new() })
}

/// Which stage `name` is for the stage `current`; `None` when it is an image.
fn find(
    drafts: &[Draft<'_>],
    current: usize,
    name: &str,
    at: &Location,
) -> Result<Option<usize>, RecipeError> {
    let lower = name.to_lowercase();
    let found = match name.parse::<usize>() {
        Ok(number) if number < drafts.len() => Some(number),
        Ok(number) => {
            return Err(at.error(
                format!("there is no stage {number}"),
                format!("stages are numbered from 0 to {}", drafts.len() - 1),
            ));
        }
        Err(_) => drafts.iter().rposition(|draft| draft.name.as_deref() == Some(&lower)),
    };
    match found {
        Some(stage) if stage == current => Err(at.error(
            format!("the stage copies from itself (--from={name})"),
            "name an earlier stage",
        )),
        Some(stage) if stage > current => Err(at.error(
            format!("stage {name} begins later, at line {}", drafts[stage].from.at.line),
            "move that stage above the one that uses it",
        )),
        found => Ok(found),
    }
}

/// All stages a stage names, later ones included.
fn needs(drafts: &[Draft<'_>], index: usize) -> Result<BTreeSet<usize>, RecipeError> {
    let mut needs: BTreeSet<usize> = drafts[index].parent.into_iter().collect();
    for instruction in drafts[index].instructions {
        let mut names = Vec::new();
        for flag in &instruction.flags {
            match (instruction.keyword, flag.split_once('=')) {
                ("COPY", Some(("--from", name))) => {
                    if name.contains('$') {
                        return Err(instruction.at.error(
                            format!("--from={name} holds a variable"),
                            "write FROM $IMAGE AS name and COPY --from=name",
                        ));
                    }
                    names.push(name.to_owned());
                }
                ("RUN", Some(("--mount", mount))) => {
                    names.extend(mount_from(&instruction.at, mount)?);
                }
                _ => {}
            }
        }
        for name in names {
            let lower = name.to_lowercase();
            match name.parse::<usize>() {
                Ok(number) if number < drafts.len() => {
                    needs.insert(number);
                }
                Ok(_) => {
                    find(drafts, index, &name, &instruction.at)?;
                }
                Err(_) => needs
                    .extend(drafts.iter().rposition(|draft| draft.name.as_deref() == Some(&lower))),
            }
        }
    }
    Ok(needs)
}

fn label(drafts: &[Draft<'_>], index: usize) -> String {
    drafts[index].name.clone().unwrap_or_else(|| index.to_string())
}

fn refuse_cycles(drafts: &[Draft<'_>]) -> Result<(), RecipeError> {
    fn visit(drafts: &[Draft<'_>], at: usize, path: &mut Vec<usize>, done: &mut [bool]) -> bool {
        if done[at] {
            return false;
        }
        let looped = path.contains(&at);
        path.push(at);
        if looped || drafts[at].needs.iter().any(|&next| visit(drafts, next, path, done)) {
            return true;
        }
        path.pop();
        done[at] = true;
        false
    }
    let mut done = vec![false; drafts.len()];
    for index in 0..drafts.len() {
        let mut path = Vec::new();
        if visit(drafts, index, &mut path, &mut done) {
            let last = path[path.len() - 1];
            let start = path.iter().position(|&stage| stage == last).unwrap_or(0);
            let ring = &path[start..];
            let names: Vec<String> = ring.iter().map(|&stage| label(drafts, stage)).collect();
            if let [only, _] = ring
                && drafts[*only].needs.contains(only)
            {
                return Err(drafts[*only].from.at.error(
                    format!("stage {} copies from itself", names[0]),
                    "name an earlier stage in --from",
                ));
            }
            return Err(drafts[last].from.at.error(
                format!("stages form a cycle: {}", names.join(" → ")),
                "let each stage use earlier ones only",
            ));
        }
    }
    Ok(())
}

fn target(drafts: &[Draft<'_>], options: &LowerOptions) -> Result<usize, RecipeError> {
    let Some(name) = options.target.as_deref().filter(|name| !name.is_empty()) else {
        return Ok(drafts.len() - 1);
    };
    let lower = name.to_lowercase();
    let named = drafts.iter().rposition(|draft| draft.name.as_deref() == Some(&lower));
    let numbered = name.parse::<usize>().ok().filter(|number| *number < drafts.len());
    named.or(numbered).ok_or_else(|| {
        let names: Vec<&str> = drafts.iter().filter_map(|draft| draft.name.as_deref()).collect();
        let hint = match nearest(name, names.iter().copied()) {
            Some(known) => format!("did you mean {known}?"),
            None if names.is_empty() => "no stage has a name; add AS name to a FROM".to_owned(),
            None => format!("the stages are {}", names.join(", ")),
        };
        Location::line(&options.file, 0)
            .error(format!("there is no stage {name:?} (--target)"), hint)
    })
}

/// The target and all it needs, each after what it needs.
fn reachable(drafts: &[Draft<'_>], target: usize) -> Result<Vec<usize>, RecipeError> {
    let mut wanted = BTreeSet::from([target]);
    let mut queue = vec![target];
    while let Some(stage) = queue.pop() {
        queue.extend(drafts[stage].needs.iter().copied().filter(|&next| wanted.insert(next)));
    }
    // A stage may only use earlier ones (checked where it names them), so file order is right,
    // and the target is last unless a later stage is named from an earlier one.
    let mut order: Vec<usize> = wanted.into_iter().collect();
    if let Some(&later) = order.iter().find(|&&stage| stage > target) {
        let user = drafts.iter().find(|draft| draft.needs.contains(&later));
        let at = user.map_or(&drafts[target].from.at, |draft| &draft.from.at);
        return Err(at.error(
            format!(
                "stage {} begins later, at line {}",
                label(drafts, later),
                drafts[later].from.at.line
            ),
            "move that stage above the one that uses it",
        ));
    }
    order.sort_unstable();
    Ok(order)
}

fn resolve_image(
    reference: &str,
    platform: &Platform,
    at: &Location,
    drafts: &[Draft<'_>],
    images: &mut dyn BaseImages,
) -> Result<(ImageSource, ImageConfig), RecipeError> {
    match images.resolve(reference, platform) {
        Ok(image) => Ok((
            ImageSource {
                reference: reference.to_owned(),
                digest: image.digest,
                platform: platform.clone(),
            },
            image.config,
        )),
        Err(mut reason) => {
            let names = drafts.iter().filter_map(|draft| draft.name.as_deref());
            if let Some(known) = nearest(reference, names) {
                reason = format!("{reason}; did you mean the stage {known}?");
            }
            Err(RecipeError::BaseImage { at: at.clone(), reference: reference.to_owned(), reason })
        }
    }
}

/// Lists the secrets of all steps and refuses one whose name is also plain configuration.
pub(crate) fn collect_secrets(plan: &mut BuildPlan) -> Result<(), RecipeError> {
    for stage in &plan.stages {
        for step in &stage.steps {
            let Action::Run(run) = &step.action else { continue };
            for mount in &run.mounts {
                let MountSource::Secret { id, env, required, .. } = &mount.source else { continue };
                for name in [Some(id), env.as_ref()].into_iter().flatten() {
                    if stage
                        .config
                        .env
                        .iter()
                        .any(|line| line.split_once('=').is_some_and(|(key, _)| key == name))
                    {
                        return Err(step.at.error(
                            format!(
                                "secret {name} is also set by ENV, which stays in the template"
                            ),
                            format!("remove ENV {name}; a step reads /run/secrets/{id}"),
                        ));
                    }
                }
                *plan.secrets.entry(id.clone()).or_default() |= required;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
