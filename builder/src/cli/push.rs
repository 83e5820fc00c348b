//! `parbake push`: a template with its snapshots to a registry.

use std::sync::{Mutex, PoisonError};

use parbake_builder::template::Template;
use parbake_cache::publish::PublishOptions;
use parbake_cache::transport::{PushEvent, PushOptions};
use parbake_cache::{Digest, TemplateName};
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::progress::bytes;
use super::remote::{self, RegistryArgs};
use super::trust::StatementArgs;
use super::{Context, guest, output, verify};

/// Send a template with its snapshots to a registry
///
/// Only what the registry lacks is sent: chunks that an earlier push of this or a related template
/// put there are built upon. The tag is set at the very end. A baked template is restored twice
/// before, and the two machines compared (see `verify --restore`).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template; its name says where to: HOST[:PORT]/REPOSITORY[:TAG]
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// Send it to this name instead of its own
    #[arg(long, value_name = "NAME")]
    to: Option<TemplateName>,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    statements: StatementArgs,
    /// Leave the snapshots out; every node bakes its own
    #[arg(long)]
    no_snapshots: bool,
    /// Do not restore the snapshots before
    #[arg(long)]
    no_verify: bool,
    /// Dress it for registries that refuse what they do not know
    #[arg(long, value_name = "FORM")]
    compat: Option<Compat>,
    /// Send everything, building on nothing that is at the registry
    #[arg(long)]
    fresh: bool,
    /// A template at the same registry to look at first for chunks to build upon
    #[arg(long, value_name = "NAME")]
    build_upon: Vec<TemplateName>,
    /// A note for the artifact; may be given again
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    annotation: Vec<(String, String)>,
}

/// `--compat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Compat {
    /// An ordinary image.
    Image,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("expected KEY=VALUE".to_owned()),
    }
}

/// `SOURCE_DATE_EPOCH`, if set.
pub fn source_date_epoch() -> CliResult<Option<u64>> {
    let Some(text) = std::env::var_os("SOURCE_DATE_EPOCH") else { return Ok(None) };
    match text.to_str().and_then(|text| text.parse().ok()) {
        Some(seconds) => Ok(Some(seconds)),
        None => Err(CliError::new(
            Kind::Usage,
            format!("SOURCE_DATE_EPOCH is {text:?}, not a number of seconds"),
        )),
    }
}

/// Verifies and pushes.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    let name = match (&args.to, &template.name) {
        (Some(name), _) | (None, Some(name)) => name.clone(),
        (None, None) => {
            return Err(CliError::new(Kind::Usage, format!("{} is a digest", args.template))
                .hint("--to NAME says where it goes"));
        }
    };
    if name.registry().is_none() {
        return Err(remote::transport_error(parbake_cache::transport::TransportError::NoRegistry(
            name,
        )));
    }
    let created = source_date_epoch()?;
    let snapshots = if args.no_snapshots {
        Vec::new()
    } else {
        store.snapshots(&template.digest).map_err(guest::store_error)?
    };
    let registry = args.registry.options()?;
    let published: Vec<Digest> = snapshots.iter().map(|(digest, _)| *digest).collect();
    // Before anything takes long: a key that cannot be read is found at once.
    let statements = args.statements.statements(context, &store, &template, &published)?;
    if !snapshots.is_empty() && !args.no_verify {
        gate(context, &template)?;
    }
    let options = PushOptions {
        publish: PublishOptions {
            created,
            annotations: args.annotation.iter().cloned().collect(),
            snapshots: !args.no_snapshots,
            ..PublishOptions::default()
        },
        build_upon: args.build_upon.clone(),
        compat_image: args.compat == Some(Compat::Image),
        fresh: args.fresh,
        statements,
    };
    let mut step = context.progress.step(format!("push {name}"));
    step.update("looking at what the registry has, packing");
    let state = Mutex::new((step, 0, 0));
    let observer = |event: PushEvent| {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let (step, total, done) = &mut *state;
        match event {
            PushEvent::Prepared { total_bytes } => *total = total_bytes,
            PushEvent::Existed { bytes } | PushEvent::Sent { bytes } => *done += bytes,
            _ => {}
        }
        step.update(format!("{} of {}", bytes(*done), bytes(*total)));
    };
    let report = store
        .push(&template.digest, &name, &registry, &options, &observer)
        .map_err(remote::transport_error)?;
    let (step, ..) = state.into_inner().unwrap_or_else(PoisonError::into_inner);
    step.done(format!(
        "{} sent, {} already there of {}",
        bytes(report.sent_bytes),
        bytes(report.existing_bytes + report.mounted_bytes),
        bytes(report.total_bytes)
    ));
    if context.json() {
        return output::json(&json!({
            "name": name,
            "template": template.digest,
            "digest": report.digest,
            "replaced": report.replaced,
            "attached": report.attached,
            "snapshots": snapshots.len(),
            "sentBytes": report.sent_bytes,
            "mountedBytes": report.mounted_bytes,
            "existingBytes": report.existing_bytes,
            "totalBytes": report.total_bytes,
        }));
    }
    let digest = report.digest.map(|digest| digest.to_string()).unwrap_or_default();
    output::line(&digest)
}

/// What is published must restore.
fn gate(context: &Context, template: &Template) -> CliResult {
    verify::before_push(context, template).map_err(|error| {
        error.hint(
            "--no-verify pushes without restoring before; --no-snapshots leaves the snapshots out",
        )
    })
}
