//! What to build from: the arguments that `build` and the `recipe` verbs share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parbake_builder::image::{ImageOptions, Platform};
use parbake_builder::source::SourceError;
use parbake_recipes::dockerfile::{LowerOptions, NamedContext};
use parbake_recipes::{LoadRequest, RecipeError, plan};

use super::error::{CliError, CliResult, Kind};
use super::{Context, steps};

/// A Dockerfile or recipe and its arguments.
#[derive(Debug, clap::Args)]
pub struct SourceArgs {
    /// The build context: a directory with parbake.yaml or a Dockerfile [default for -f: the
    /// file's directory]
    #[arg(value_name = "CONTEXT")]
    pub context: Option<PathBuf>,
    /// The Dockerfile or recipe, where the context does not hold it under its usual name
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The stage to build [default: the last]
    #[arg(long, value_name = "STAGE")]
    pub target: Option<String>,
    /// A value for an ARG; without one, the variable of that name; may be given again
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = argument)]
    pub build_arg: Vec<(String, Option<String>)>,
    /// A further context for `COPY --from=NAME`: a directory or an image; may be given again
    #[arg(long, value_name = "NAME=DIR|IMAGE", value_parser = pair)]
    pub build_context: Vec<(String, String)>,
    /// A label; may be given again
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub label: Vec<(String, String)>,
    /// Platform of the image
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", default_value = "linux/amd64")]
    pub platform: Platform,
    /// Speak plain HTTP to this registry; may be given again (loopback needs no permission)
    #[arg(long, value_name = "HOST[:PORT]")]
    pub insecure_registry: Vec<String>,
    /// Registry credentials, instead of the usual places
    #[arg(long, value_name = "FILE")]
    pub authfile: Option<PathBuf>,
    /// Mirrors and blocked registries, instead of the usual registries.conf
    #[arg(long, value_name = "FILE")]
    pub registries_conf: Option<PathBuf>,
}

fn argument(text: &str) -> Result<(String, Option<String>), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("expected NAME=VALUE".to_owned()),
        Some((name, value)) => Ok((name.to_owned(), Some(value.to_owned()))),
        None => Ok((text.to_owned(), std::env::var(text).ok())),
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

impl SourceArgs {
    /// Where images are looked for, and how registries are spoken to.
    pub fn image_options(&self, context: &Context) -> ImageOptions {
        let mut options = ImageOptions {
            platform: self.platform.clone(),
            store: Some(context.store_root()),
            ..Default::default()
        };
        options.registry.insecure.clone_from(&self.insecure_registry);
        options.registry.authfile.clone_from(&self.authfile);
        options.registry.registries_conf.clone_from(&self.registries_conf);
        options
    }

    /// Labels, sorted.
    pub fn labels(&self) -> BTreeMap<String, String> {
        self.label.iter().cloned().collect()
    }

    /// `--build-context`s that are directories.
    pub fn directories(&self) -> BTreeMap<String, PathBuf> {
        self.build_context
            .iter()
            .filter(|(_, place)| Path::new(place).is_dir())
            .map(|(name, place)| (name.clone(), PathBuf::from(place)))
            .collect()
    }

    /// What to load. Without context and file it is the current directory.
    pub fn load_request(&self) -> CliResult<LoadRequest> {
        let context = match (&self.context, &self.file) {
            (Some(context), _) => context.clone(),
            (None, Some(file)) => match file.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
                _ => PathBuf::from("."),
            },
            (None, None) => PathBuf::from("."),
        };
        if context.is_file() {
            let what = format!("{} is a file, not a build context", context.display());
            let hint = format!("write -f {0}", context.display());
            return Err(CliError::new(Kind::Usage, what).hint(hint));
        }
        if !context.is_dir() {
            let what = format!("there is no directory {}", context.display());
            return Err(CliError::new(Kind::NotFound, what)
                .hint("an image is named with --from, a file with -f"));
        }
        let contexts = self.build_context.iter().map(|(name, place)| {
            let value = if Path::new(place).is_dir() {
                NamedContext::Directory
            } else {
                let image = place.strip_prefix("docker-image://").unwrap_or(place);
                NamedContext::Image(image.replacen("oci-layout://", "oci:", 1))
            };
            (name.clone(), value)
        });
        let arguments =
            self.build_arg.iter().filter_map(|(name, value)| Some((name.clone(), value.clone()?)));
        let options = LowerOptions {
            build_args: arguments.collect(),
            target: self.target.clone(),
            platform: plan::Platform {
                os: self.platform.os.clone(),
                architecture: self.platform.architecture.clone(),
                variant: self.platform.variant.clone(),
            },
            labels: self.labels(),
            contexts: contexts.collect(),
            ..LowerOptions::default()
        };
        Ok(LoadRequest { context, file: self.file.clone(), options })
    }
}

/// A recipe's or Dockerfile's failure, with its exit code.
pub fn recipe_error(error: RecipeError) -> CliError {
    let kind = match &error {
        RecipeError::LockDrift { .. } => Kind::Refused,
        RecipeError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Kind::NotFound
        }
        _ => Kind::User,
    };
    CliError::new(kind, error)
}

/// A source's failure, with its exit code.
pub fn source_error(error: SourceError) -> CliError {
    match error {
        SourceError::Recipe(error) => recipe_error(error),
        SourceError::Execute(error) => steps::execute_error(error),
        SourceError::NoLock { .. } => CliError::new(Kind::NotFound, error)
            .hint("`parbake recipe lock` with the same arguments writes it"),
        SourceError::Unsupported(_) => CliError::new(Kind::User, error),
    }
}
