//! Finds a recipe or Dockerfile, reads it and lowers it: what `build`, `check` and `lock` share.

use std::path::{Path, PathBuf};

use parbake_cache::Digest;

use crate::dockerfile::{self, BaseImages, LowerOptions, Unresolved, ignore};
use crate::lock::{Lock, LockedBase, SCHEMA_VERSION};
use crate::plan::BuildPlan;
use crate::recipe::{self, BakeSpec, Ready, Recipe};
use crate::resolve::{Recorder, context_digest};
use crate::{Location, RecipeError};

/// What to load and how.
#[derive(Debug, Clone, Default)]
pub struct LoadRequest {
    /// The build context; for a recipe also what its paths are below.
    pub context: PathBuf,
    /// `-f`: absent looks for `parbake.yaml`, then `Dockerfile`, in the context.
    pub file: Option<PathBuf>,
    /// Build arguments, target, platform, labels, contexts. `file` and `ignore` are filled in.
    pub options: LowerOptions,
}

/// A recipe or Dockerfile, lowered.
#[derive(Debug)]
pub struct Loaded {
    /// The file.
    pub path: PathBuf,
    /// The build context's directory.
    pub context: PathBuf,
    /// The recipe, where it is one.
    pub recipe: Option<Recipe>,
    /// What to build.
    pub plan: BuildPlan,
    /// What to bake.
    pub bake: BakeSpec,
    /// What the bases resolved to, sorted.
    pub bases: Vec<LockedBase>,
}

/// Names looked for in the context, first found wins.
pub const FILE_NAMES: [&str; 4] = ["parbake.yaml", "parbake.yml", "Dockerfile", "Containerfile"];

/// Loads and lowers, resolving bases with `images`.
///
/// # Errors
/// When there is no such file, or anything in it is wrong or not supported.
pub fn load(request: &LoadRequest, images: &mut dyn BaseImages) -> Result<Loaded, RecipeError> {
    let path = find(request)?;
    let text = std::fs::read_to_string(&path)
        .map_err(|source| RecipeError::Read { path: path.clone(), source })?;
    let mut options = request.options.clone();
    options.file = shown(&path, &request.context);
    let mut recorder = Recorder::new(images);
    let is_recipe = path
        .extension()
        .is_some_and(|ext| ext.eq_ignore_ascii_case("yaml") || ext.eq_ignore_ascii_case("yml"));
    let (recipe, plan, bake) = if is_recipe {
        options.ignore = ignore::load(&request.context, None)?;
        let (recipe, places) = recipe::read(&options.file, &text)?;
        let (plan, bake) =
            recipe::lower(&recipe, &places, &request.context, &options, &mut recorder)?;
        (Some(recipe), plan, bake)
    } else {
        options.ignore = ignore::load(&request.context, Some(&path))?;
        let plan = dockerfile::lower(&text, &options, &mut recorder)?;
        let config = plan.stages.last().map(|stage| stage.config.clone()).unwrap_or_default();
        let bake = BakeSpec {
            ready: Ready::default().or_healthcheck(&config),
            labels: options.labels.clone(),
            ..BakeSpec::default()
        };
        (None, plan, bake)
    };
    let bases = recorder
        .bases()
        .map(|(reference, platform, digest)| LockedBase {
            reference: reference.to_owned(),
            platform: platform.to_string(),
            digest: digest.to_owned(),
        })
        .collect();
    Ok(Loaded { path, context: request.context.clone(), recipe, plan, bake, bases })
}

/// Loads without looking bases up: everything that can be said without a network.
///
/// # Errors
/// As [`load`], but for bases that do not exist.
pub fn check(request: &LoadRequest) -> Result<Loaded, RecipeError> {
    load(request, &mut Unresolved)
}

fn find(request: &LoadRequest) -> Result<PathBuf, RecipeError> {
    if let Some(file) = &request.file {
        return Ok(file.clone());
    }
    FILE_NAMES.iter().map(|name| request.context.join(name)).find(|path| path.exists()).ok_or_else(
        || {
            Location::line(&request.context.to_string_lossy(), 0).error(
                "holds neither parbake.yaml nor Dockerfile",
                "name one with -f, or write one with `parbake recipe init`",
            )
        },
    )
}

/// The name in messages: below the context without it, elsewhere as given.
fn shown(path: &Path, context: &Path) -> String {
    path.strip_prefix(context).unwrap_or(path).to_string_lossy().into_owned()
}

impl Loaded {
    /// The recipe with every default in it, as YAML; for a Dockerfile, what it comes to as one.
    ///
    /// # Errors
    /// When it cannot be written, which does not happen for a recipe that was read.
    pub fn show_resolved(&self) -> Result<String, RecipeError> {
        let failed = |error: &dyn std::fmt::Display| {
            Location::line(&self.path.to_string_lossy(), 0).error(error.to_string(), "")
        };
        match &self.recipe {
            Some(recipe) => serde_saphyr::to_string(recipe).map_err(|error| failed(&error)),
            None => {
                #[derive(serde::Serialize)]
                struct Resolved<'a> {
                    plan: &'a BuildPlan,
                    bake: &'a BakeSpec,
                }
                let resolved = Resolved { plan: &self.plan, bake: &self.bake };
                serde_saphyr::to_string(&resolved).map_err(|error| failed(&error))
            }
        }
    }

    /// The lock file for this state of things. Kernel and packages are the builder's to add.
    ///
    /// # Errors
    /// When the context cannot be read.
    pub fn lock(&self) -> Result<Lock, RecipeError> {
        // The plan holds every default, every argument and every digest; places do not count.
        let mut plan = self.plan.clone();
        for stage in &mut plan.stages {
            stage.at = Location::line("", 0);
            for step in &mut stage.steps {
                step.at = Location::line("", 0);
            }
        }
        plan.warnings.clear();
        let effective = serde_json::to_vec(&(plan, &self.bake)).unwrap_or_default();
        Ok(Lock {
            schema_version: SCHEMA_VERSION,
            tool: env!("CARGO_PKG_VERSION").to_owned(),
            recipe: Digest::of(&effective),
            context: context_digest(&self.context, &self.plan.ignore)?,
            bases: self.bases.clone(),
            kernel: None,
            packages: std::collections::BTreeMap::new(),
        })
    }
}
