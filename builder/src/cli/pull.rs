//! `parbake pull`: a template from a registry.

use parbake_cache::install::InstallEvent;
use parbake_cache::registry::RegistryOptions;
use parbake_cache::variant::{Choice, PullReport};
use parbake_cache::{Digest, TemplateName};
use serde_json::json;

use super::bake::ShapeArgs;
use super::error::{CliError, CliResult, Kind};
use super::guest::{self, Place};
use super::progress::bytes;
use super::remote::{self, Arrivals, RegistryArgs};
use super::trust::TrustArgs;
use super::{Context, HostChoice, output, pull_lazily};

/// Fetch a template from a registry
///
/// Of the snapshots, the one that fits this machine comes along; what it needs is compared before
/// anything large is fetched; where guests run in the lab, the one that fits the lab. What the store
/// has already, in whatever template, is not fetched again, and a pull that was cut short goes on where
/// it stopped.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]; a digest must be what the registry has
    #[arg(value_name = "TEMPLATE")]
    template: String,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    trust: TrustArgs,
    /// All snapshots, whether they fit this machine or not
    #[arg(long, conflicts_with = "no_snapshots")]
    all: bool,
    /// No snapshots; bake here
    #[arg(long)]
    no_snapshots: bool,
    /// First what every sandbox needs at once, in the order it is touched, then the rest; tells
    /// after how many bytes the template was usable
    #[arg(long)]
    lazy: bool,
    /// Give the template this name, too
    #[arg(short, long, value_name = "NAME")]
    tag: Vec<TemplateName>,
    #[command(flatten)]
    shape: ShapeArgs,
}

/// Pulls.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let (text, pinned) = match args.template.split_once('@') {
        None => (args.template.as_str(), None),
        Some((name, digest)) => {
            let digest = digest.parse::<Digest>().map_err(|error| {
                CliError::new(Kind::Usage, format!("{}: {error}", args.template))
            })?;
            (name, Some(digest))
        }
    };
    let name: TemplateName = text.parse().map_err(|error| CliError::new(Kind::Usage, error))?;
    let store = context.store()?;
    let choice = choice(context, args)?;
    let options = RegistryOptions { trust: args.trust.trust()?, ..args.registry.options()? };
    if args.lazy {
        return pull_lazily::run(context, &store, &name, pinned, &options, &choice, &args.tag);
    }
    let arrivals = Arrivals::new(context.progress.step(format!("pull {name}")));
    let report = store
        .pull(&name, pinned.as_ref(), &options, &choice, &|event: InstallEvent| {
            arrivals.on(&event);
        })
        .map_err(remote::transport_error)?;
    for other in &args.tag {
        store.tag(other, &report.template).map_err(guest::store_error)?;
    }
    print(context, &name.to_string(), &report, arrivals)
}

/// Which snapshots to take.
fn choice(context: &Context, args: &Args) -> CliResult<Choice> {
    if args.all {
        return Ok(Choice::All);
    }
    if args.no_snapshots {
        return Ok(Choice::Template);
    }
    node_choice(context, &args.shape)
}

/// What fits where guests run.
pub fn node_choice(context: &Context, shape: &ShapeArgs) -> CliResult<Choice> {
    match guest::place(context) {
        Ok(Place::Here) => {
            let machine = shape.wanted();
            Ok(Choice::Node { offers: remote::offers(), machine })
        }
        Ok(Place::Lab) => {
            let machine = shape.wanted();
            Ok(Choice::Node { offers: remote::lab_offers(), machine })
        }
        Err(error) if context.global.host != HostChoice::Auto => Err(error),
        Err(_) => {
            context
                .progress
                .note("guests do not run here: snapshots are left out (--all fetches them)");
            Ok(Choice::Template)
        }
    }
}

/// Ends the progress and prints what came; also for `import`.
pub fn print(context: &Context, name: &str, report: &PullReport, arrivals: Arrivals) -> CliResult {
    let fetched: u64 = report.installed.iter().map(|part| part.fetched_bytes).sum();
    let reused: u64 = report.installed.iter().map(|part| part.reused_bytes).sum();
    let snapshots: Vec<Digest> = report.installed.iter().filter_map(|part| part.snapshot).collect();
    arrivals.into_step().done(format!(
        "{} fetched, {} were here; {}",
        bytes(fetched),
        bytes(reused),
        match snapshots.len() {
            0 => "no snapshot".to_owned(),
            1 => "1 snapshot".to_owned(),
            count => format!("{count} snapshots"),
        }
    ));
    for refusal in &report.refused {
        context.progress.note(&format!(
            "left out the snapshot {}: {}",
            refusal.manifest.short(),
            refusal.reasons.join("; ")
        ));
    }
    if snapshots.is_empty() && !report.refused.is_empty() {
        context.progress.note(&format!("`parbake bake {name}` makes one that fits this machine"));
    }
    if context.json() {
        return output::json(&json!({
            "name": name,
            "digest": report.template,
            "snapshots": snapshots,
            "refused": report.refused,
            "fetchedBytes": fetched,
            "reusedBytes": reused,
        }));
    }
    output::line(&report.template.to_string())
}
