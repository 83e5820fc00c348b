//! `parbake import`: a template from an OCI image layout.

use std::path::PathBuf;

use parbake_cache::artifact::ArtifactError;
use parbake_cache::install::{InstallError, InstallEvent};
use parbake_cache::layout::Layout;
use parbake_cache::variant::{self, Choice};
use parbake_cache::{StoreError, TemplateName};

use super::error::{CliError, CliResult, Kind};
use super::remote::{self, Arrivals};
use super::trust::{self, TrustArgs};
use super::{Context, guest, interrupt, pull};

/// Take in a template that was written by `export`, or copied by another tool
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A tar archive or directory: an OCI image layout
    #[arg(value_name = "FILE|DIR")]
    path: PathBuf,
    /// Name for the template, instead of the one it comes with; may be given again
    #[arg(short, long, value_name = "NAME[:TAG]")]
    tag: Vec<TemplateName>,
    /// Which of several artifacts in the layout, by its tag there
    #[arg(long, value_name = "TAG")]
    reference: Option<String>,
    /// Leave its snapshots out
    #[arg(long)]
    no_snapshots: bool,
    #[command(flatten)]
    trust: TrustArgs,
}

/// Imports.
pub fn run(context: &Context, args: &Args) -> CliResult {
    interrupt::watch();
    let layout = Layout::open(&args.path).map_err(|error| match error {
        StoreError::Io { ref source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            let there = args.path.exists();
            let missing = CliError::new(if there { Kind::User } else { Kind::NotFound }, error);
            if there {
                return missing.hint("an OCI image layout has a file `oci-layout` at its top");
            }
            missing
        }
        error => guest::store_error(error),
    })?;
    let what = args.path.display().to_string();
    let (root, found) = layout.root(args.reference.as_deref()).map_err(|error| match error {
        InstallError::Artifact(ArtifactError::Inconsistent(what)) => {
            let kind = if args.reference.is_some() { Kind::NotFound } else { Kind::Usage };
            CliError::new(kind, what)
                .hint("--reference TAG says which; `skopeo inspect` lists them")
        }
        error => remote::install_error(error),
    })?;
    let names = names(args, found)?;
    let trust = args.trust.trust()?;
    for name in &names {
        // A file has no digest that the user named.
        trust.check(name, false, &root, &layout).map_err(trust::trust_error)?;
    }
    let store = context.store()?;
    let choice = if args.no_snapshots { Choice::Template } else { Choice::All };
    let arrivals = Arrivals::new(context.progress.step(format!("import {what}")));
    let observer = |event: InstallEvent| arrivals.on(&event);
    let report = variant::install(&store, &layout, &root, &what, &choice, &observer)
        .map_err(|error| install_error(args, error))?;
    for name in &names {
        store.tag(name, &report.template).map_err(guest::store_error)?;
    }
    let label = names.first().map(ToString::to_string).unwrap_or_default();
    pull::print(context, &label, &report, arrivals)
}

/// What to call it: as asked for, or as it is called there.
fn names(args: &Args, found: Option<String>) -> CliResult<Vec<TemplateName>> {
    if !args.tag.is_empty() {
        return Ok(args.tag.clone());
    }
    // Many tools keep only the tag, which is half a name.
    let whole = found.filter(|name| name.contains([':', '/']));
    match whole.as_deref().map(str::parse) {
        Some(Ok(name)) => Ok(vec![name]),
        _ => Err(CliError::new(
            Kind::Usage,
            format!("{} does not say what the template is called", args.path.display()),
        )
        .hint("--tag NAME gives it a name")),
    }
}

/// An image in a layout is built from that layout.
fn install_error(args: &Args, error: InstallError) -> CliError {
    match error {
        InstallError::Artifact(ArtifactError::NotATemplate { what, found }) => {
            let kind = if args.path.is_dir() { "oci" } else { "oci-archive" };
            CliError::new(Kind::User, format!("{what} is not a parbake template but {found}"))
                .hint(format!("to make one of it: parbake build --from {kind}:{what} -t NAME"))
        }
        error => remote::install_error(error),
    }
}
