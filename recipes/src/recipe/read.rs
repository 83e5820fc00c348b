//! YAML → [`Recipe`], with the line and column of everything that is wrong.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_saphyr::Spanned;

use crate::RecipeError;
use crate::error::Location;

use super::{BuildNetwork, Check, MAX_SIZE, Recipe, WarmupStep};

/// Lines of the parts of a recipe that become steps; 0 where the part is absent.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// `base`.
    pub base: u32,
    /// `packages`.
    pub packages: u32,
    /// Each of `users`.
    pub users: Vec<u32>,
    /// Each of `files`.
    pub files: Vec<u32>,
    /// Each of `build.steps`.
    pub steps: Vec<u32>,
    /// `env`, `metadata` and `process`: what only configures.
    pub process: u32,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Spans {
    base: Option<Spanned<IgnoredAny>>,
    packages: Option<Spanned<IgnoredAny>>,
    users: Vec<Spanned<IgnoredAny>>,
    files: Vec<Spanned<IgnoredAny>>,
    build: BuildSpans,
    process: Option<Spanned<IgnoredAny>>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct BuildSpans {
    steps: Vec<Spanned<IgnoredAny>>,
}

/// Reads a recipe. `file` is its name in messages.
///
/// # Errors
/// Syntax errors, duplicate and unknown keys, wrong types and values that contradict each other.
pub fn read(file: &str, text: &str) -> Result<(Recipe, Places), RecipeError> {
    if text.len() > MAX_SIZE {
        return Err(Location::line(file, 0).error(
            format!("is larger than {} KiB", MAX_SIZE >> 10),
            "a recipe is a page of text; check that -f names the right file",
        ));
    }
    let options = || serde_saphyr::options! { strict_booleans: true, with_snippet: false };
    let recipe: Recipe =
        serde_saphyr::from_str_with_options(text, options()).map_err(|error| at(file, &error))?;
    let spans: Spans =
        serde_saphyr::from_str_with_options(text, options()).map_err(|error| at(file, &error))?;
    let line = |span: &Spanned<IgnoredAny>| u32::try_from(span.referenced.line()).unwrap_or(0);
    let one = |span: &Option<Spanned<IgnoredAny>>| span.as_ref().map_or(0, line);
    let places = Places {
        base: one(&spans.base),
        packages: one(&spans.packages),
        users: spans.users.iter().map(line).collect(),
        files: spans.files.iter().map(line).collect(),
        steps: spans.build.steps.iter().map(line).collect(),
        process: one(&spans.process),
    };
    check(file, &recipe, &places)?;
    Ok((recipe, places))
}

fn at(file: &str, error: &serde_saphyr::Error) -> RecipeError {
    let mut at = Location::line(file, 0);
    if let Some(location) = error.location() {
        at.line = u32::try_from(location.line()).unwrap_or(0);
        at.column = u32::try_from(location.column()).ok();
    }
    let full = error.without_snippet().to_string();
    let message = full.split('\n').next().unwrap_or_default();
    // The parser appends the place it knows; ours is in front already.
    let message = message.split(" at line ").next().unwrap_or(message);
    let message = message
        .split_once(": ")
        .filter(|(head, _)| head.starts_with("error"))
        .map_or(message, |(_, rest)| rest);
    let hint = if message.contains("unknown field") || message.contains("unknown variant") {
        "`parbake recipe schema` lists all keys"
    } else if message.contains("duplicate") {
        "keep one of the two"
    } else if message.contains("missing field `apiVersion`") {
        "write apiVersion: parbake.dev/v1 in the first line"
    } else {
        "`parbake recipe schema` describes what is expected"
    };
    at.error(message, hint)
}

/// What types alone do not forbid.
fn check(file: &str, recipe: &Recipe, places: &Places) -> Result<(), RecipeError> {
    let line =
        |lines: &[u32], index: usize| Location::line(file, lines.get(index).copied().unwrap_or(0));
    for (index, spec) in recipe.files.iter().enumerate() {
        let at = line(&places.files, index);
        if spec.src.is_some() == spec.content.is_some() {
            return Err(at.error(
                format!("file {} needs exactly one of src and content", spec.dest),
                "keep one of them",
            ));
        }
        if spec.content.is_some() && !spec.exclude.is_empty() {
            return Err(at.error(
                format!("file {} has content, of which nothing can be excluded", spec.dest),
                "remove exclude; it is for src",
            ));
        }
        if !spec.dest.starts_with('/') {
            return Err(at.error(
                format!("dest {:?} is not absolute", spec.dest),
                format!("write /{}", spec.dest.trim_start_matches("./")),
            ));
        }
        if let Some(mode) = &spec.mode
            && u32::from_str_radix(mode, 8).map_or(true, |mode| mode > 0o7777)
        {
            return Err(at.error(format!("mode {mode:?} is not octal"), "write e.g. \"0644\""));
        }
    }
    for (index, user) in recipe.users.iter().enumerate() {
        let at = line(&places.users, index);
        let plain = |text: &str| {
            !text.is_empty()
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-/".contains(c))
        };
        let home = user.home.as_deref().unwrap_or("/");
        if !plain(&user.name) || user.name.contains('/') || user.name.len() > 32 {
            return Err(at.error(
                format!("user name {:?} is not plain", user.name),
                "use letters, digits, '_', '-' and '.'",
            ));
        }
        if !plain(&user.shell) || !plain(home) || !home.starts_with('/') {
            return Err(at.error(
                format!("home or shell of user {} is no plain absolute path", user.name),
                "use letters, digits and /_.-",
            ));
        }
    }
    for secret in &recipe.build.secrets {
        for name in [Some(&secret.id), secret.env.as_ref()].into_iter().flatten() {
            if recipe.env.contains_key(name) || recipe.build.env.contains_key(name) {
                return Err(Location::line(file, 0).error(
                    format!("secret {name} is also set in env"),
                    format!("remove it there; a step reads /run/secrets/{}", secret.id),
                ));
            }
        }
        if !recipe.build.steps.iter().any(|step| step.secrets.contains(&secret.id)) {
            return Err(Location::line(file, 0).error(
                format!("secret {} is declared in build.secrets, and no step sees it", secret.id),
                format!("add secrets: [{}] to the step that needs it, or remove it", secret.id),
            ));
        }
    }
    for (index, step) in recipe.build.steps.iter().enumerate() {
        let at = line(&places.steps, index);
        for id in &step.secrets {
            if !recipe.build.secrets.iter().any(|secret| secret.id == *id) {
                return Err(at.error(
                    format!("step uses secret {id}, which is not declared"),
                    format!("add {{id: {id}}} to build.secrets"),
                ));
            }
        }
        if (recipe.build.network, step.network) == (BuildNetwork::None, Some(BuildNetwork::Full)) {
            return Err(at.error(
                "step asks for a network, and build.network is none for all of them",
                "leave build.network out and write network: none on the steps that need none",
            ));
        }
        if let Some(path) = step.cache.iter().find(|path| !path.starts_with('/') || *path == "/") {
            return Err(at.error(
                format!("cache {path:?} is no absolute directory"),
                "write e.g. /root/.cache/pip",
            ));
        }
    }
    for machine in std::iter::once(&recipe.machine).chain(&recipe.more_machines) {
        if machine.vcpus == 0 || machine.memory_mib < 64 {
            return Err(Location::line(file, 0).error(
                format!("a machine of {} vCPUs and {} MiB", machine.vcpus, machine.memory_mib),
                "give it at least 1 vCPU and 64 MiB",
            ));
        }
    }
    let addresses = recipe
        .ready
        .checks
        .iter()
        .filter_map(|check| match check {
            Check::Http(http) => Some(http),
            _ => None,
        })
        .chain(recipe.warmup.steps.iter().filter_map(|step| match step {
            WarmupStep::Http(http) => Some(http),
            WarmupStep::Exec(_) => None,
        }));
    for http in addresses {
        if !http.get.starts_with("http://") {
            return Err(Location::line(file, 0).error(
                format!("{:?} is no http:// address", http.get),
                "checks run inside the guest; write http://127.0.0.1:PORT/…",
            ));
        }
    }
    Ok(())
}
