//! `parbake recipe`: writing, checking and locking recipes and Dockerfiles.

use std::path::{Path, PathBuf};

use parbake_builder::execute::SourceImages;
use parbake_builder::kernel::{self as kernels, KernelChoice};
use parbake_builder::source::{self, LOCK_FILE};
use parbake_cache::Store;
use parbake_cache::template::KernelBundle;
use parbake_recipes::Loaded;
use parbake_recipes::lock::{Lock, LockedKernel};
use parbake_recipes::recipe::init::{STARTERS, starter};
use serde_json::json;

use super::error::{Classify, CliError, CliResult, Kind};
use super::source::{SourceArgs, recipe_error, source_error};
use super::{Context, guest, kernel, output};

/// Write, check, show and lock recipes
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Write a ready-made recipe to start from
    Init(InitArgs),
    /// Read a recipe or Dockerfile and say what is wrong with it, without a network
    Check(SourceArgs),
    /// Print a recipe, or with --resolved everything it comes to
    Show {
        #[command(flatten)]
        source: SourceArgs,
        /// With every default, and base images by digest
        #[arg(long)]
        resolved: bool,
    },
    /// Write parbake.lock: what bases, context and kernel are today (`build --lock` adds packages)
    Lock(SourceArgs),
    /// Tell what is no longer as parbake.lock says
    Outdated(SourceArgs),
    /// Print the JSON Schema of recipes
    Schema,
}

#[derive(Debug, clap::Args)]
struct InitArgs {
    /// Which [default: blank]
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Where parbake.yaml is written
    #[arg(short = 'C', long, value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Only list what there is
    #[arg(long, conflicts_with = "name")]
    list: bool,
}

/// Does what was asked.
pub fn run(context: &Context, args: &Args) -> CliResult {
    match &args.verb {
        Verb::Init(args) => init(context, args),
        Verb::Check(source) => check(context, source),
        Verb::Show { source, resolved } => show(context, source, *resolved),
        Verb::Lock(source) => lock(context, source),
        Verb::Outdated(source) => outdated(context, source),
        Verb::Schema => output::line(parbake_recipes::recipe::schema().trim_end()),
    }
}

fn init(context: &Context, args: &InitArgs) -> CliResult {
    if args.list {
        if context.json() {
            return output::json(&STARTERS.iter().map(|one| one.name).collect::<Vec<_>>());
        }
        for one in &STARTERS {
            let about = one.text.lines().next().unwrap_or_default().trim_start_matches("# ");
            output::line(&format!("{:<18}{about}", one.name))?;
        }
        return Ok(());
    }
    let name = args.name.as_deref().unwrap_or("blank");
    let Some(text) = starter(name) else {
        return Err(CliError::new(Kind::NotFound, format!("there is no recipe {name}"))
            .hint("`parbake recipe init --list` shows what there is"));
    };
    std::fs::create_dir_all(&args.directory).kind(Kind::User)?;
    let path = args.directory.join("parbake.yaml");
    let mut file = match std::fs::File::create_new(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let what = format!("{} is there already", path.display());
            return Err(CliError::new(Kind::User, what)
                .hint("remove it, or name another directory with -C"));
        }
        Err(error) => return Err(error).kind(Kind::User),
    };
    std::io::Write::write_all(&mut file, text.as_bytes()).kind(Kind::User)?;
    if context.json() {
        return output::json(&json!({ "path": path, "recipe": name }));
    }
    output::line(&path.display().to_string())
}

fn check(context: &Context, args: &SourceArgs) -> CliResult {
    let loaded = parbake_recipes::check(&args.load_request()?).map_err(recipe_error)?;
    source::kernel_choice(&loaded.bake.kernel, &loaded.context).map_err(source_error)?;
    let steps: usize = loaded.plan.stages.iter().map(|stage| stage.steps.len()).sum();
    if context.json() {
        let warnings = loaded
            .plan
            .warnings
            .iter()
            .map(|warning| json!({ "at": warning.at.to_string(), "message": warning.message }));
        return output::json(&json!({
            "path": loaded.path,
            "stages": loaded.plan.stages.len(),
            "steps": steps,
            "secrets": loaded.plan.secrets,
            "warnings": warnings.collect::<Vec<_>>(),
        }));
    }
    for warning in &loaded.plan.warnings {
        context.progress.note(&format!("warning: {}: {}", warning.at, warning.message));
    }
    let stages = loaded.plan.stages.len();
    output::line(&format!("{}: {stages} stages, {steps} steps", loaded.path.display()))
}

fn show(context: &Context, args: &SourceArgs, resolved: bool) -> CliResult {
    let request = args.load_request()?;
    if !resolved {
        let loaded = parbake_recipes::check(&request).map_err(recipe_error)?;
        let text = std::fs::read_to_string(&loaded.path).kind(Kind::User)?;
        return output::line(text.trim_end());
    }
    let loaded = load(context, args)?;
    if context.json() {
        return output::json(&json!({
            "path": loaded.path,
            "recipe": loaded.recipe,
            "plan": loaded.plan,
            "bake": loaded.bake,
            "bases": loaded.bases,
        }));
    }
    output::line(loaded.show_resolved().map_err(recipe_error)?.trim_end())
}

fn load(context: &Context, args: &SourceArgs) -> CliResult<Loaded> {
    let mut images = SourceImages::new(args.image_options(context));
    parbake_recipes::load(&args.load_request()?, &mut images).map_err(recipe_error)
}

fn lock(context: &Context, args: &SourceArgs) -> CliResult {
    let path = source::lock_path(&args.load_request()?);
    let mut loaded = load(context, args)?;
    let mut lock = source::lock(&mut loaded).map_err(recipe_error)?;
    let choice =
        source::kernel_choice(&loaded.bake.kernel, &loaded.context).map_err(source_error)?;
    let mut step = context.progress.step("kernel");
    step.update(choice.to_string());
    lock.kernel = Some(locked_kernel(&context.store()?, &choice, false)?);
    drop(step);
    write_lock(&path, &lock)?;
    if context.json() {
        return output::json(&lock);
    }
    output::line(&path.display().to_string())
}

/// Replaces a lock file; whoever is interrupted keeps the old one.
pub fn write_lock(path: &Path, lock: &Lock) -> CliResult {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let file =
        tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new("."))).kind(Kind::User)?;
    std::fs::write(file.path(), lock.to_text()).kind(Kind::User)?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(file.path(), mode).kind(Kind::User)?;
    file.persist(path).kind(Kind::User)?;
    Ok(())
}

/// The kernel by content, as a lock file has it.
pub fn locked_kernel(
    store: &Store,
    choice: &KernelChoice,
    refresh: bool,
) -> CliResult<LockedKernel> {
    let object = kernels::ensure(store, choice, refresh, |_| {}).map_err(kernel::kernel_error)?;
    let bundle: KernelBundle = store.get_json(&object.digest).map_err(guest::store_error)?;
    Ok(LockedKernel { package: bundle.package, version: bundle.version, digest: bundle.source })
}

fn outdated(context: &Context, args: &SourceArgs) -> CliResult {
    let path = source::lock_path(&args.load_request()?);
    let Some(locked) = Lock::read(&path).map_err(recipe_error)? else {
        return Err(CliError::new(Kind::NotFound, format!("there is no {}", path.display()))
            .hint("`parbake recipe lock` writes it"));
    };
    let mut images = SourceImages::new(args.image_options(context));
    let mut moved: Vec<[String; 3]> = locked
        .outdated(&mut images)
        .into_iter()
        .map(|one| [one.reference, one.locked, one.current])
        .collect();
    // The file, its context and its arguments; bases have been looked at.
    let now = load(context, args)
        .and_then(|mut loaded| source::lock(&mut loaded).map_err(recipe_error))?;
    if now.context != locked.context {
        moved.push(["context".into(), locked.context.to_string(), now.context.to_string()]);
    }
    // The digest of the recipe covers its bases, so it says something only where they are the same.
    if now.recipe != locked.recipe && now.bases == locked.bases {
        moved.push(["recipe".into(), locked.recipe.to_string(), now.recipe.to_string()]);
    }
    if context.json() {
        let rows = moved.iter().map(
            |[what, locked, current]| json!({ "what": what, "locked": locked, "current": current }),
        );
        return output::json(&rows.collect::<Vec<_>>());
    }
    if moved.is_empty() {
        return output::line(&format!("everything is as {LOCK_FILE} says"));
    }
    let rows: Vec<Vec<String>> = moved.into_iter().map(Vec::from).collect();
    output::table(&["WHAT", "LOCKED", "NOW"], &rows)
}
