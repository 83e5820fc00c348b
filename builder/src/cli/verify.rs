//! `parbake verify`: are the store's bytes right, and does a snapshot make sound machines?

use std::collections::HashSet;
use std::path::PathBuf;

use parbake_builder::bake::gate::{self, Check, GateError};
use parbake_builder::template::{HostClass, Template};
use parbake_cache::registry::RegistryOptions;
use parbake_cache::template::SnapshotManifest;
use parbake_cache::variant::Choice;
use parbake_cache::{Digest, Store, TemplateName, VerifyReport};
use parbake_node::sandbox::SandboxError;
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::guest::{self, Place};
use super::progress::bytes;
use super::remote::{self, RegistryArgs};
use super::trust::{self, TrustArgs};
use super::{Context, output};

/// Check that the store's objects are what their digests say, or that snapshots restore
///
/// Hashes every object in the store; with a template, only what belongs to it counts. With
/// --repair, damaged objects are taken out, and templates with a registry's name are fetched again,
/// as far as something is missing. With --restore, a template's snapshots for this host are each
/// restored twice: both machines must be ready, with clocks that are right, a clean file system,
/// and no random bytes, host name or machine id in common. With --signature, the registry is asked
/// instead, and one of the keys must have signed what the name stands for there.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Take damaged objects out and fetch them again
    #[arg(long)]
    repair: bool,
    /// Restore the template's snapshots and compare the machines
    #[arg(long, requires = "template", conflicts_with = "repair")]
    restore: bool,
    /// The content of this file must not be in the template or its snapshots; may be given again
    #[arg(long, value_name = "FILE", requires = "restore")]
    secret: Vec<PathBuf>,
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: Option<String>,
    /// Check what is signed and attached to the template in its registry
    #[arg(long, requires = "template", conflicts_with_all = ["repair", "restore"])]
    signature: bool,
    #[command(flatten)]
    trust: TrustArgs,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Too short to look for: it would be found by chance.
const MIN_SECRET: usize = 8;
/// No secret is longer.
const MAX_SECRET: u64 = 1 << 20;

/// Verifies; not in order is exit code 4.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    match &args.template {
        Some(name) if args.signature => {
            trust::verify(context, name, &args.trust, &args.registry).map(|()| 0)
        }
        Some(name) if args.restore => restore(context, args, name),
        _ => objects(context, args).map(|()| 0),
    }
}

fn objects(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let wanted = match &args.template {
        None => None,
        Some(name) => Some(guest::find_digest(&store, name)?),
    };
    let scope = match &wanted {
        None => None,
        Some(digest) => Some(store.closure(&[*digest]).map_err(guest::store_error)?),
    };
    let step = context.progress.step("verify");
    let mut report = store.verify(args.repair).map_err(guest::store_error)?;
    step.done(format!("{} objects, {}", report.checked, bytes(report.bytes)));
    if let Some(scope) = &scope {
        restrict(&mut report, scope);
    }
    let mut repaired = Vec::new();
    if args.repair && !report.is_clean() {
        repaired = refetch(context, &store, args, wanted.as_ref())?;
        // What counts is what is wrong now.
        let step = context.progress.step("verify again");
        let removed = std::mem::take(&mut report.removed);
        report = store.verify(false).map_err(guest::store_error)?;
        step.done(format!("{} objects, {}", report.checked, bytes(report.bytes)));
        if let Some(scope) = &scope {
            restrict(&mut report, scope);
        }
        report.removed = removed;
    }
    if context.json() {
        let mut document = json!(report);
        document["clean"] = json!(report.is_clean());
        document["fetchedAgain"] = json!(repaired);
        output::json(&document)?;
    } else {
        for digest in &report.removed {
            output::line(&format!("taken out: {digest}"))?;
        }
        for name in &repaired {
            output::line(&format!("fetched again: {name}"))?;
        }
        for damage in &report.damaged {
            output::line(&format!("damaged: {}: {}", damage.digest, damage.what))?;
        }
        for gap in &report.missing {
            output::line(&format!("missing: {}, which {} needs", gap.digest, gap.needed_by))?;
        }
        for text in &report.bad_references {
            output::line(&format!("damaged: {text}"))?;
        }
        if report.is_clean() && !context.global.quiet {
            output::line("clean")?;
        }
    }
    if report.is_clean() {
        return Ok(());
    }
    let count = report.damaged.len() + report.missing.len() + report.bad_references.len();
    let failure =
        CliError::new(Kind::Refused, format!("{count} things in the store are not in order"));
    Err(if args.repair {
        failure.hint("pull or build the templates above again; `parbake rm` gives one up")
    } else {
        failure.hint("`parbake verify --repair` takes damaged objects out and fetches them again")
    })
}

/// Leaves only what is in `scope`.
fn restrict(report: &mut VerifyReport, scope: &HashSet<Digest>) {
    report.damaged.retain(|damage| scope.contains(&damage.digest));
    report.missing.retain(|gap| scope.contains(&gap.digest));
    report.bad_references.clear();
}

/// Pulls the templates that lack something and have a registry's name.
fn refetch(
    context: &Context,
    store: &Store,
    args: &Args,
    only: Option<&Digest>,
) -> CliResult<Vec<TemplateName>> {
    let mut fetched: Vec<TemplateName> = Vec::new();
    let mut whole: HashSet<Digest> = HashSet::new();
    for (name, digest) in store.tags().map_err(guest::store_error)? {
        let wanted = only.is_none_or(|only| *only == digest) && name.registry().is_some();
        if !wanted || whole.contains(&digest) || is_whole(store, &digest) {
            continue;
        }
        let step = context.progress.step(format!("pull {name}"));
        let options = RegistryOptions { trust: args.trust.trust()?, ..args.registry.options()? };
        // Everything, since any of its snapshots may be what was damaged.
        match store.pull(&name, None, &options, &Choice::All, &|_| ()) {
            Ok(report) if report.template == digest => {
                step.done("complete");
                whole.insert(digest);
                fetched.push(name);
            }
            Ok(report) => {
                step.done(format!("the tag has moved on to {}", report.template.short()));
                fetched.push(name);
            }
            Err(error) => {
                drop(step);
                let error = remote::transport_error(error);
                context.progress.note(&format!("cannot fetch {name} again: {error}"));
            }
        }
    }
    Ok(fetched)
}

fn is_whole(store: &Store, template: &Digest) -> bool {
    let closure = store.closure(&[*template]);
    store.check_complete(template).is_ok()
        && closure.is_ok_and(|closure| {
            let snapshots = store.snapshots(template).unwrap_or_default();
            snapshots
                .iter()
                .all(|(digest, _)| closure.contains(digest) && store.check_complete(digest).is_ok())
        })
}

fn restore(context: &Context, args: &Args, name: &str) -> CliResult<u8> {
    let store = context.store()?;
    let template = guest::find(&store, name)?;
    let secrets = secrets(&args.secret)?;
    let snapshots = store.snapshots(&template.digest).map_err(guest::store_error)?;
    if snapshots.is_empty() {
        return Err(CliError::new(Kind::NotFound, format!("{} has no snapshot", template.label()))
            .hint(format!("`parbake bake {name}` makes one")));
    }
    if !secrets.is_empty() && !guest::is_lab() {
        // Here, where files are fast, rather than in the lab.
        let step = context.progress.step("look for secrets");
        for (digest, snapshot) in &snapshots {
            let checks =
                gate::search(&store, &template, Some(snapshot), &secrets).map_err(gate_error)?;
            conclude(context, digest, &checks, false)?;
        }
        step.done("none found");
    }
    if let Place::Lab = guest::place(context)? {
        return guest::in_lab(context);
    }
    let verified = restore_here(context, &store, &template, &snapshots)?;
    if verified == 0 {
        return Err(CliError::new(
            Kind::NotFound,
            format!("{} has no snapshot that this host can restore", template.label()),
        )
        .hint(format!("`parbake bake {name}` makes one")));
    }
    Ok(0)
}

/// The contents of the files, less a line's end.
fn secrets(files: &[PathBuf]) -> CliResult<Vec<(String, Vec<u8>)>> {
    let mut secrets = Vec::new();
    for path in files {
        let name = path.display().to_string();
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| {
                std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_SECRET), &mut bytes)
            })
            .map_err(|error| CliError::new(Kind::User, format!("cannot read {name}: {error}")))?;
        let bytes = bytes.trim_ascii_end().to_vec();
        if bytes.len() < MIN_SECRET {
            return Err(CliError::new(
                Kind::User,
                format!("{name} has less than {MIN_SECRET} bytes, which are found by chance"),
            ));
        }
        secrets.push((name, bytes));
    }
    Ok(secrets)
}

/// Restores each snapshot that fits this very machine twice; returns how many there were.
fn restore_here(
    context: &Context,
    store: &Store,
    template: &Template,
    snapshots: &[(Digest, SnapshotManifest)],
) -> CliResult<usize> {
    let host = HostClass::of_this_machine();
    let mut verified = 0;
    for (digest, snapshot) in snapshots {
        let reasons = host.unmet(&snapshot.compat);
        if !reasons.is_empty() {
            let reasons = reasons.join("; ");
            context.progress.note(&format!("snapshot {} was not tried: {reasons}", digest.short()));
            continue;
        }
        let options = guest::sandbox_options(context)?;
        let mut step = context.progress.step(format!(
            "verify snapshot {} of {}",
            digest.short(),
            template.label()
        ));
        let checks =
            gate::gate(store, template, (digest, snapshot), &options, guest::patience(), |text| {
                step.update(text);
            })
            .map_err(gate_error)?;
        let passed = checks.iter().filter(|check| check.passed).count();
        step.done(format!("{passed} of {} checks passed", checks.len()));
        conclude(context, digest, &checks, true)?;
        verified += 1;
    }
    Ok(verified)
}

/// Prints the checks; one that failed is an error.
fn conclude(context: &Context, snapshot: &Digest, checks: &[Check], show: bool) -> CliResult {
    let failed: Vec<String> = checks
        .iter()
        .filter(|check| !check.passed)
        .map(|check| format!("{} ({})", check.name, check.detail))
        .collect();
    if show && context.json() {
        output::json(&json!({
            "snapshot": snapshot,
            "passed": failed.is_empty(),
            "checks": checks,
        }))?;
    } else if show && !context.global.quiet {
        for check in checks {
            let verdict = if check.passed { "ok" } else { "FAILED" };
            output::line(&format!("{:<12}{verdict:<8}{}", check.name, check.detail))?;
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(CliError::new(
        Kind::Refused,
        format!("snapshot {} did not pass: {}", snapshot.short(), failed.join("; ")),
    )
    .hint("`parbake bake` makes another snapshot"))
}

fn gate_error(error: GateError) -> CliError {
    match error {
        GateError::Store(error) => guest::store_error(error),
        GateError::Template(_) => CliError::new(Kind::User, error),
        GateError::Sandbox { source: SandboxError::Interrupted, .. } => {
            CliError::new(Kind::Interrupted, error)
        }
        GateError::Sandbox { number, source } => {
            // A machine that does not come up has failed the verification.
            let mut failure = guest::sandbox_error(source, Kind::Refused);
            failure.source = format!("restore {number} of 2: {}", failure.source).into();
            failure
        }
    }
}

/// As `verify --restore`, for `push`.
pub fn before_push(context: &Context, template: &Template) -> CliResult {
    let store = context.store()?;
    let snapshots = store.snapshots(&template.digest).map_err(guest::store_error)?;
    if let Place::Here = guest::place(context)? {
        // Results on stdout are the push's.
        let quiet = context.silent();
        restore_here(&quiet, &store, template, &snapshots)?;
        return Ok(());
    }
    let digest = template.digest.to_string();
    // First, as it has a progress of its own.
    guest::lab(context)?;
    let step = context.progress.step(format!("verify snapshots of {}", template.label()));
    let code = guest::in_lab_as(context, &["-q", "verify", "--restore", &digest])?;
    let kind = match code {
        0 => {
            step.done("restored twice each, all checks passed");
            return Ok(());
        }
        // None of the snapshots is for the lab.
        3 => {
            step.done("none that can be restored here");
            return Ok(());
        }
        6 => Kind::NotReady,
        7 => Kind::Host,
        130 => Kind::Interrupted,
        _ => Kind::Refused,
    };
    Err(CliError::new(kind, format!("a snapshot of {} did not pass", template.label())))
}
