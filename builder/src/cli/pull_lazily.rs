//! `parbake pull --lazy`: what is needed first comes first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parbake_cache::artifact::{ArtifactConfig, Manifest};
use parbake_cache::find;
use parbake_cache::install::{BlobSource, Installer};
use parbake_cache::lazy::{LazyError, LazyPull, Patience};
use parbake_cache::registry::{RegistryOptions, Repository};
use parbake_cache::variant::{self, Choice};
use parbake_cache::{Digest, Store, StoreError, TemplateName};
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, interrupt, output, remote};

/// How long nothing may arrive before the pull is given up. What has arrived is kept.
const SILENCE: Duration = Duration::from_secs(120);
/// How often the progress is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// Pulls one variant; returns when all of it is here.
pub fn run(
    context: &Context,
    store: &Store,
    name: &TemplateName,
    pinned: Option<Digest>,
    registry: &RegistryOptions,
    choice: &Choice,
    tags: &[TemplateName],
) -> CliResult {
    let began = Instant::now();
    let mut step = context.progress.step(format!("pull {name}"));
    let found = find::template(name, pinned.as_ref(), registry).map_err(remote::transport_error)?;
    for reason in &found.passed_over {
        context.progress.note(reason);
    }
    let (source, root) = (found.source, found.root.descriptor);
    let (manifest, config, refused) = choose(store, &source, &root, name, choice)?;
    for reason in refused {
        context.progress.note(&reason);
    }
    let (template, snapshot) = (config.template, config.snapshot);
    let source: Arc<dyn BlobSource + Send + Sync> = Arc::new(source);
    let mut pull =
        LazyPull::begin(store, source, manifest, config).map_err(remote::install_error)?;
    let patience = Patience { deadline: SILENCE, fail_fast: false };
    pull.ensure_working_set(patience).map_err(lazy_error)?;
    let usable = (pull.progress().fetched_bytes, began.elapsed());
    // What there is to fetch altogether.
    let mut all;
    let installed = loop {
        let progress = pull.progress();
        all = progress.fetched_bytes + progress.left_bytes;
        step.update(format!(
            "usable since {}; {} of {}",
            bytes(usable.0),
            bytes(progress.fetched_bytes),
            bytes(all)
        ));
        if let Some(installed) = wait(&mut pull, progress.fetched_bytes)? {
            break installed;
        }
    };
    for name in std::iter::once(name).chain(tags) {
        store.tag(name, &template).map_err(guest::store_error)?;
    }
    step.done(format!(
        "{} fetched; usable after {} and {:.2} s",
        bytes(all),
        bytes(usable.0),
        usable.1.as_secs_f64()
    ));
    if context.json() {
        return output::json(&json!({
            "name": name,
            "digest": template,
            "snapshots": snapshot.into_iter().collect::<Vec<_>>(),
            "fetchedBytes": all,
            "reusedBytes": installed.reused_bytes,
            "usableBytes": usable.0,
            "usableSeconds": usable.1.as_secs_f64(),
        }));
    }
    output::line(&template.to_string())
}

/// Waits a little for the rest; fails when nothing has come for too long, or the user wants to stop.
pub fn wait(
    pull: &mut LazyPull,
    before: u64,
) -> CliResult<Option<parbake_cache::install::Installed>> {
    let began = Instant::now();
    loop {
        if interrupt::asked() {
            return Err(remote::interrupted());
        }
        match pull.finish(Patience { deadline: LOOK, fail_fast: false }) {
            Ok(installed) => return Ok(Some(installed)),
            Err(LazyError::Late { .. }) if pull.progress().fetched_bytes > before => {
                return Ok(None);
            }
            Err(LazyError::Late { .. }) if began.elapsed() < SILENCE => {}
            Err(error) => return Err(lazy_error(error)),
        }
    }
}

/// The variant to pull, and why others were not taken.
pub fn choose(
    store: &Store,
    source: &Repository,
    root: &parbake_cache::artifact::Descriptor,
    name: &TemplateName,
    choice: &Choice,
) -> CliResult<(Manifest, ArtifactConfig, Vec<String>)> {
    let what = name.to_string();
    let mut refused = Vec::new();
    let (mut best, mut bare) = (None, None);
    for descriptor in variant::manifests(source, root, &what).map_err(remote::install_error)? {
        let fetched =
            source.manifest(&descriptor.digest.to_string()).map_err(remote::registry_error)?;
        let manifest = Manifest::parse(&fetched.bytes, &descriptor.digest, &what)
            .map_err(remote::artifact_error)?;
        let config =
            Installer::new(store, source, &manifest, &|_| ()).config().map_err(|error| {
                remote::install_error(error)
                    .hint("an artifact dressed as an image is pulled without --lazy")
            })?;
        let Some(needs) = &config.compat else {
            bare = Some((manifest, config));
            continue;
        };
        let fits = match choice {
            Choice::Template => false,
            Choice::All => true,
            Choice::Node { offers, machine } => {
                let reasons = variant::unmet(needs, offers);
                if !reasons.is_empty() {
                    let short = descriptor.digest.short();
                    refused.push(format!("left out the snapshot {short}: {}", reasons.join("; ")));
                }
                reasons.is_empty() && machine.is_none_or(|wanted| config.machine == Some(wanted))
            }
        };
        if fits && best.is_none() {
            best = Some((manifest, config));
        }
    }
    let (manifest, config) = best.or(bare).ok_or_else(|| {
        CliError::new(Kind::NotFound, format!("{name} has no variant that fits this host"))
            .hint("without --lazy, the bare template is taken out of another variant")
    })?;
    Ok((manifest, config, refused))
}

fn lazy_error(error: LazyError) -> CliError {
    let kept = "what has arrived is kept: the same command goes on where this one stopped";
    match error {
        LazyError::Store(StoreError::Interrupted) => remote::interrupted(),
        LazyError::Store(error) => guest::store_error(error),
        LazyError::Install(error) => remote::install_error(error),
        LazyError::Damaged { .. } => CliError::new(Kind::Refused, error),
        error => CliError::new(Kind::Registry, error).hint(kept),
    }
}
