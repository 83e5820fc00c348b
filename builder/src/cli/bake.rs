//! `parbake bake`: boot a template once and freeze it.

use parbake_builder::bake::{self, BakeEvent, BakeOptions, Baked};
use parbake_builder::template::Template;
use parbake_cache::Store;
use parbake_cache::template::MachineShape;
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::guest::{self, Place};
use super::progress::bytes;
use super::{Context, output};

/// How long a guest may take to boot, in seconds.
const READY_TIMEOUT: u64 = 120;

/// Boot a template once, freeze it, and keep the snapshot
///
/// The guest boots cold, gets ready as the template says (process, checks, warm-up), drops its
/// caches, and is frozen: memory, processor and device
/// state, and the disk of the same instant. Every later `run` restores that.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    #[command(flatten)]
    shape: ShapeArgs,
    /// How long the guest may take until it is ready, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = READY_TIMEOUT)]
    ready_timeout: u64,
}

/// The machine's shape, where it is not the template's.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct ShapeArgs {
    /// Virtual CPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub cpus: Option<u8>,
    /// Guest memory in MiB
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    pub memory: Option<u32>,
}

impl ShapeArgs {
    /// What to bake: the shape that was asked for, else all that the template wants.
    fn shapes(self, template: &Template) -> Vec<MachineShape> {
        let mut shapes = vec![self.apply(template.manifest.machine)];
        if let (None, None, Some(bake)) = (self.cpus, self.memory, &template.manifest.bake) {
            shapes.extend(&bake.more_machines);
        }
        shapes
    }

    /// `base`, with what was asked for changed.
    pub fn apply(self, base: MachineShape) -> MachineShape {
        MachineShape {
            vcpus: self.cpus.unwrap_or(base.vcpus),
            memory_mib: self.memory.unwrap_or(base.memory_mib),
        }
    }

    /// The shape, if it was asked for completely.
    pub fn wanted(self) -> Option<MachineShape> {
        Some(MachineShape { vcpus: self.cpus?, memory_mib: self.memory? })
    }
}

/// Bakes here or in the lab.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    refuse_without_snapshots(&template)?;
    if let Place::Lab = guest::place(context)? {
        return guest::in_lab(context);
    }
    for shape in args.shape.shapes(&template) {
        let baked = bake(context, &store, &template, shape, args.ready_timeout)?;
        report(context, &template, &baked)?;
    }
    Ok(0)
}

/// Bakes every shape a template wants, on this machine, with reports.
pub fn run_digest(context: &Context, store: &Store, digest: parbake_cache::Digest) -> CliResult {
    let template = guest::find(store, &digest.to_string())?;
    refuse_without_snapshots(&template)?;
    for shape in ShapeArgs::default().shapes(&template) {
        let baked = bake(context, store, &template, shape, READY_TIMEOUT)?;
        report(context, &template, &baked)?;
    }
    Ok(())
}

fn refuse_without_snapshots(template: &Template) -> CliResult {
    if !template.manifest.no_snapshot {
        return Ok(());
    }
    let what = format!("there are to be no snapshots of {}", template.label());
    Err(CliError::new(Kind::Refused, what)
        .hint("its recipe says so with snapshot.enabled: false; `parbake run` boots it cold"))
}

/// Bakes on this machine, with progress.
pub fn bake(
    context: &Context,
    store: &Store,
    template: &Template,
    shape: MachineShape,
    ready_timeout: u64,
) -> CliResult<Baked> {
    let mut options = BakeOptions { machine: Some(shape), ..Default::default() };
    options.sandbox = guest::sandbox_options(context)?;
    options.patience = guest::patience();
    options.sandbox.ready_timeout = std::time::Duration::from_secs(ready_timeout);
    let mut step = context.progress.step(format!("bake {}", template.label()));
    let baked = bake::bake(store, template, &options, |event| match event {
        BakeEvent::Booting => step.update("booting"),
        BakeEvent::Ready(after) => step.update(format!("booted in {:.2} s", after.as_secs_f64())),
        BakeEvent::Starting(command) => step.update(format!("starting {command}")),
        BakeEvent::Checking(what) => step.update(format!("waiting: {what}")),
        BakeEvent::WarmUp { step: at, steps, text } => {
            step.update(format!("warm-up {at}/{steps}: {text}"));
        }
        BakeEvent::Freezing => step.update("dropping caches, freezing"),
        BakeEvent::Installing => step.update("installing"),
    })
    .map_err(|error| match error {
        bake::BakeError::Sandbox(error) => guest::sandbox_error(error, Kind::User),
        error @ (bake::BakeError::NotReady { .. }
        | bake::BakeError::WarmUp { .. }
        | bake::BakeError::Ended { .. }) => CliError::new(Kind::NotReady, error),
        error => guest::classify(error),
    })?;
    step.done(format!(
        "{} of memory, {} of disk",
        bytes(baked.memory_data_bytes),
        bytes(baked.disk_data_bytes)
    ));
    Ok(baked)
}

fn report(context: &Context, template: &Template, baked: &Baked) -> CliResult {
    if !context.json() {
        return output::line(&baked.digest.to_string());
    }
    let milliseconds = |duration: std::time::Duration| duration.as_secs_f64() * 1000.0;
    output::json(&json!({
        "template": template.label(),
        "templateDigest": template.digest,
        "snapshot": baked.digest,
        "machine": baked.snapshot.machine,
        "memoryDataBytes": baked.memory_data_bytes,
        "diskDataBytes": baked.disk_data_bytes,
        "timingsMs": {
            "coldBoot": milliseconds(baked.timings.cold_boot),
            "quiesce": milliseconds(baked.timings.quiesce),
            "write": milliseconds(baked.timings.write),
            "install": milliseconds(baked.timings.install),
            "total": milliseconds(baked.timings.total),
        },
    }))
}
