//! `parbake run`: a fresh sandbox for one command.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use parbake_builder::template::{HostClass, Template};
use parbake_cache::lazy::Progress;
use parbake_cache::registry::RegistryOptions;
use parbake_cache::template::SnapshotManifest;
use parbake_cache::variant::Choice;
use parbake_cache::{Store, TemplateName};
use parbake_node::event::Watch;
use parbake_node::limits::LimitHit;
use parbake_node::monitor::MonitorError;
use parbake_node::pager;
use parbake_node::sandbox::{Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::{ExecRequest, FailureKind};
use serde_json::json;

use super::bake::ShapeArgs;
use super::cage::{self, CageArgs};
use super::error::{Classify, CliError, CliResult, Kind};
use super::guest::{self, Place};
use super::remote::{self, Arrivals, RegistryArgs};
use super::trust::TrustArgs;
use super::workspace::WorkspaceArgs;
use super::{Context, bake, pull, run_lazily};
use parbake_node::terminal::env;
use parbake_node::terminal::stdio::{self, Ended};

/// As for a command whose time is up, and as shells say it for a killed one.
const ENDED_BY_LIMIT: u8 = 124;

/// Run a command in a fresh sandbox, then throw the sandbox away
///
/// Restores the template's snapshot as a machine of its own, runs the image's entrypoint with the
/// given arguments (or the image's default ones), streams standard input and output, and returns
/// the command's exit code. A template that was never baked is baked first.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keep standard input connected even if it is a terminal
    #[arg(short, long)]
    interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    tty: bool,
    /// Set NAME=VALUE for the command; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Read NAME=VALUE lines from a file
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// Run as another user: name, uid, name:group or uid:gid
    #[arg(short, long, value_name = "USER", default_value = "")]
    user: String,
    /// Working directory
    #[arg(short, long, value_name = "DIR", default_value = "")]
    workdir: String,
    /// Replace the image's entrypoint; empty: none
    #[arg(long, value_name = "PROGRAM")]
    entrypoint: Option<String>,
    /// The guest's host name
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// Kill the command after this time, e.g. 30s; a bare number is seconds
    #[arg(long, value_name = "TIME", value_parser = cage::time)]
    timeout: Option<Duration>,
    /// The most output of the command that is passed on, e.g. 10MiB; the rest is dropped
    #[arg(long, value_name = "SIZE", value_parser = super::prune::size)]
    output_limit: Option<u64>,
    #[command(flatten)]
    cage: CageArgs,
    #[command(flatten)]
    workspace: WorkspaceArgs,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Boot cold instead of restoring the snapshot
    #[arg(long)]
    cold: bool,
    /// When the template is not in the store
    #[arg(long, value_name = "WHEN", default_value = "never")]
    pull: Pull,
    /// With --pull lazy: how long a sandbox may wait for what it needs; 0: not at all when a fetch
    /// fails
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    patience: u64,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    trust: TrustArgs,
    /// Write where the time went to a file, as JSON
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// The command
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<std::ffi::OsString>,
}

/// `--pull`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Pull {
    /// That is an error.
    Never,
    /// Pull it first.
    Missing,
    /// Begin at once, and fetch what the sandbox touches as it does.
    Lazy,
}

/// Runs here or in the lab; returns the command's exit code.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    let store = context.store().map_err(sandbox_failure)?;
    let template = match guest::find(&store, &args.template) {
        Err(error) if error.kind == Kind::NotFound && args.pull != Pull::Never => None,
        found => Some(found.map_err(sandbox_failure)?),
    };
    if args.tty && !std::io::stdin().is_terminal() {
        return Err(
            CliError::new(Kind::Sandbox, "standard input is not a terminal").hint("leave out -t")
        );
    }
    let template = match template {
        None if args.pull == Pull::Missing => {
            Some(fetch(context, args, &store).map_err(sandbox_failure)?)
        }
        template => template,
    };
    // What is wrong with the command line is said before a lab is started for it.
    let checked = template.as_ref().map(|template| request(args, template)).transpose()?;
    if let Place::Lab = guest::place(context).map_err(sandbox_failure)? {
        return guest::in_lab_with(context, args.tty, stdio::connect_stdin(args.interactive))
            .map_err(sandbox_failure);
    }
    let (Some(template), Some(request)) = (template, checked) else {
        return run_arriving(context, args, &store).map_err(sandbox_failure);
    };
    run_installed(context, args, &store, &template, request)
}

/// Pulls the template as `parbake pull` would.
fn fetch(context: &Context, args: &Args, store: &Store) -> CliResult<Template> {
    let (name, options) = remote_name(args)?;
    let arrivals = Arrivals::new(context.progress.step(format!("pull {name}")));
    let choice = pull::node_choice(context, &args.shape)?;
    let report = store
        .pull(&name, None, &options, &choice, &|event| arrivals.on(&event))
        .map_err(remote::transport_error)?;
    arrivals.into_step().done("complete");
    Template::load(store, Some(name), report.template)
        .map_err(|error| CliError::new(Kind::User, error))
}

fn remote_name(args: &Args) -> CliResult<(TemplateName, RegistryOptions)> {
    let name: TemplateName =
        args.template.parse().map_err(|error| CliError::new(Kind::Usage, error))?;
    let options = RegistryOptions { trust: args.trust.trust()?, ..args.registry.for_sandboxes()? };
    Ok((name, options))
}

/// Runs while the template arrives.
fn run_arriving(context: &Context, args: &Args, store: &Store) -> CliResult<u8> {
    let (name, options) = remote_name(args)?;
    let begun = Instant::now();
    let choice = Choice::Node { offers: remote::offers(), machine: args.shape.wanted() };
    let deadline = Duration::from_secs(args.patience);
    let arriving = run_lazily::begin(context, store, &name, options, &choice, deadline)?;
    let request = request(args, &arriving.template)?;
    let mut options = guest::sandbox_options(context)?;
    options.hostname.clone_from(&args.hostname);
    let watch = args.cage.apply(&arriving.template.manifest, &mut options)?;
    args.workspace.apply(context, &mut options)?;
    let faults = pager::available();
    if let (Some(_), false, Err(error)) = (&arriving.snapshot, args.cold, &faults) {
        context.progress.note(&format!(
            "this host does not let a machine's memory arrive as it is touched (userfaultfd: {error}): \
             all of {name} comes first; CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1 allow it"
        ));
    }
    let sandbox = match &arriving.snapshot {
        Some(snapshot) if !args.cold && faults.is_ok() => {
            let (files, fill) = arriving.files(store, snapshot)?;
            match Sandbox::restore_from(&files, snapshot.machine, &options, Some(fill)) {
                Err(SandboxError::Monitor(MonitorError::Failed { kind, message }))
                    if kind == "mismatch" =>
                {
                    let text = format!("the snapshot does not fit this host ({message})");
                    context.progress.note(&text);
                    None
                }
                result => Some(result.map_err(|e| guest::sandbox_error(e, Kind::Sandbox))?),
            }
        }
        _ => None,
    };
    let Some(sandbox) = sandbox else {
        // A cold boot, a bake, or memory that cannot be filled on demand: all of it is needed.
        let template = arriving.complete(context, store)?;
        return run_installed(context, args, store, &template, request);
    };
    let mut at_first_exec = 0;
    let on_start = || {
        at_first_exec = arriving.progress().fetched_bytes;
        arriving.release();
    };
    let finished = execute(context, sandbox, &watch, request, begun, on_start);
    let Progress { fetched_bytes, left_bytes } = arriving.progress();
    arriving.end(context, store);
    let mut done = finished?;
    done.timings["how"] = "restored lazily".into();
    done.timings["fetchedBytesAtFirstExec"] = at_first_exec.into();
    done.timings["fetchedBytes"] = fetched_bytes.into();
    done.timings["leftBytes"] = left_bytes.into();
    conclude(context, args, done)
}

fn run_installed(
    context: &Context,
    args: &Args,
    store: &Store,
    template: &Template,
    request: ExecRequest,
) -> CliResult<u8> {
    let shape = args.shape.apply(template.manifest.machine);
    let _lease = store.lease(&[template.digest]).kind(Kind::Sandbox)?;
    let begun = Instant::now();
    let mut options = guest::sandbox_options(context).map_err(sandbox_failure)?;
    options.hostname.clone_from(&args.hostname);
    let watch = args.cage.apply(&template.manifest, &mut options)?;
    args.workspace.apply(context, &mut options)?;
    let (sandbox, how) = if args.cold || template.manifest.no_snapshot {
        let files = template.boot_files(store).kind(Kind::Sandbox)?;
        let sandbox = Sandbox::boot(&files, shape, &template.manifest.process, &options);
        (sandbox.map_err(|error| guest::sandbox_error(error, Kind::Sandbox))?, "cold")
    } else {
        let snapshot = snapshot(context, store, template, shape).map_err(sandbox_failure)?;
        (restore(context, store, template, &snapshot, &options)?, "restored")
    };
    let mut done = execute(context, sandbox, &watch, request, begun, || ())?;
    done.timings["how"] = how.into();
    conclude(context, args, done)
}

/// Runs the command and throws the sandbox away; says where the time went.
fn execute(
    context: &Context,
    mut sandbox: Sandbox,
    watch: &Watch,
    request: ExecRequest,
    begun: Instant,
    mut on_start: impl FnMut(),
) -> CliResult<Done> {
    let client = sandbox.connect().map_err(|error| guest::sandbox_error(error, Kind::Sandbox))?;
    let ready = begun.elapsed();
    let mut first_exec = Duration::ZERO;
    let ended = stdio::run(client, request, || {
        first_exec = begun.elapsed();
        on_start();
    });
    // A connection that closed does not say why.
    let ended = ended.map_err(|error| sandbox.blame(error));
    let timings = sandbox.timings().clone();
    let counts = sandbox.egress_counts();
    if ended.is_ok()
        && let Err(error) = sandbox.release_workspace()
    {
        context.progress.note(&format!(
            "the workspace could not be taken off in order ({error}); its journal is replayed \
             next time"
        ));
    }
    let by_limit = sandbox.limit_hits().iter().any(|hit| {
        use parbake_node::limits::Limit;
        matches!(hit.limit, Limit::Lifetime | Limit::Memory)
    });
    drop(sandbox);
    for line in watch.lines() {
        context.progress.note(&line);
    }
    let document = json!({
        "startedMs": timings.started.as_secs_f64() * 1000.0,
        "readyMs": timings.ready.as_secs_f64() * 1000.0,
        "connectedMs": ready.as_secs_f64() * 1000.0,
        "firstExecMs": first_exec.as_secs_f64() * 1000.0,
        "totalMs": begun.elapsed().as_secs_f64() * 1000.0,
        "monitorStagesUs": timings.stages,
        "jail": timings.jail,
        "egress": counts,
    });
    Ok(Done { ended, by_limit, timings: document })
}

/// How a run ended.
struct Done {
    ended: Result<Ended, SandboxError>,
    /// A limit ended it, which has been said.
    by_limit: bool,
    timings: serde_json::Value,
}

/// Writes the timings, if they are wanted, and turns the end into an exit code.
fn conclude(context: &Context, args: &Args, done: Done) -> CliResult<u8> {
    let Done { ended, by_limit, timings } = done;
    if let Some(path) = &args.timings {
        std::fs::write(path, format!("{timings}\n")).kind(Kind::Sandbox)?;
    }
    match ended {
        Ok(Ended::Exited(exit)) => {
            for hit in LimitHit::of_exit(&exit) {
                context.progress.note(&format!("limit reached: {}", hit.detail));
            }
            Ok(u8::try_from(exit.shell_code()).unwrap_or(125))
        }
        Ok(Ended::HungUp) => Err(CliError::interrupted()),
        Ok(Ended::Failed(failure)) => {
            let kind = match failure.kind {
                FailureKind::NotFound => Kind::CommandNotFound,
                FailureKind::NotExecutable => Kind::NotExecutable,
                _ => Kind::Sandbox,
            };
            Err(CliError::new(kind, failure.message))
        }
        Err(_) if by_limit => Ok(ENDED_BY_LIMIT),
        Err(error) => Err(guest::sandbox_error(error, Kind::Sandbox)),
    }
}

/// Restores; a snapshot that only the monitor can tell is not of this host is baked anew, once.
fn restore(
    context: &Context,
    store: &Store,
    template: &Template,
    snapshot: &SnapshotManifest,
    options: &SandboxOptions,
) -> CliResult<Sandbox> {
    let shape = snapshot.machine;
    let failed = |error| guest::sandbox_error(error, Kind::Sandbox);
    let files = template.restore_files(store, snapshot).kind(Kind::Sandbox)?;
    match Sandbox::restore(&files, shape, options) {
        Err(SandboxError::Monitor(MonitorError::Failed { kind, message }))
            if kind == "mismatch" =>
        {
            context.progress.note(&format!("the snapshot does not fit this host ({message})"));
            context.progress.note(&format!("baking {} anew", template.label()));
            let baked =
                bake::bake(context, store, template, shape, 120).map_err(sandbox_failure)?.snapshot;
            let files = template.restore_files(store, &baked).kind(Kind::Sandbox)?;
            Sandbox::restore(&files, shape, options).map_err(failed)
        }
        result => result.map_err(failed),
    }
}

/// The template's snapshot for this host; baked now if there is none.
fn snapshot(
    context: &Context,
    store: &Store,
    template: &Template,
    shape: parbake_cache::template::MachineShape,
) -> CliResult<SnapshotManifest> {
    let host = HostClass::of_this_machine();
    if let Some((_, snapshot)) = template.snapshot(store, shape, &host).map_err(guest::classify)? {
        return Ok(snapshot);
    }
    for (digest, reasons) in template.unfit(store, shape, &host).map_err(guest::classify)? {
        let digest = digest.short();
        context.progress.note(&format!("snapshot {digest} does not fit: {}", reasons.join("; ")));
    }
    context.progress.note(&format!(
        "{} has no snapshot for this host yet; baking it first (only this once)",
        template.label()
    ));
    Ok(bake::bake(context, store, template, shape, 120)?.snapshot)
}

/// The command line in the guest: entrypoint and arguments as the image and the user say.
fn request(args: &Args, template: &Template) -> CliResult<ExecRequest> {
    use std::os::unix::ffi::OsStrExt;
    let process = &template.manifest.process;
    let mut argv: Vec<Vec<u8>> = match &args.entrypoint {
        Some(program) if program.is_empty() => Vec::new(),
        Some(program) => vec![program.clone().into_bytes()],
        None => process.entrypoint.iter().map(|word| word.clone().into_bytes()).collect(),
    };
    if args.command.is_empty() {
        // As in every container runtime, a new entrypoint does away with the default arguments.
        if args.entrypoint.is_none() {
            argv.extend(process.cmd.iter().map(|word| word.clone().into_bytes()));
        }
    } else {
        argv.extend(args.command.iter().map(|word| word.as_bytes().to_vec()));
    }
    let cold = args.cold || template.manifest.no_snapshot;
    let running = template.manifest.bake.as_ref().is_some_and(|bake| bake.start_process);
    if running && !cold && args.command.is_empty() && args.entrypoint.is_none() {
        return Err(CliError::new(
            Kind::Sandbox,
            format!("the process of {} runs in every sandbox of it already", template.label()),
        )
        .hint("name a command to run beside it: parbake run TEMPLATE -- COMMAND")
        .hint("--cold boots a machine where it does not run yet, and runs it as the command"));
    }
    if argv.is_empty() {
        return Err(CliError::new(
            Kind::Sandbox,
            format!("{} has no default command", template.label()),
        )
        .hint("name one: parbake run TEMPLATE -- COMMAND"));
    }
    let mut request = ExecRequest::new(argv);
    request.env = env::read(&args.env_file, &args.env).map_err(sandbox_failure)?;
    request.cwd = args.workdir.clone().into_bytes();
    request.user.clone_from(&args.user);
    request.tty = args.tty.then(stdio::window_size);
    if args.tty {
        let term = std::env::var_os("TERM").unwrap_or_else(|| "xterm".into());
        request.env.insert(0, [b"TERM=", term.as_bytes()].concat());
    }
    request.stdin = stdio::connect_stdin(args.interactive);
    request.timeout_ms =
        args.timeout.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    request.output_limit = args.output_limit;
    Ok(request)
}

/// Whatever fails before the command runs is the sandbox's failure, unless it says more.
fn sandbox_failure(mut error: CliError) -> CliError {
    if !matches!(error.kind, Kind::Interrupted) {
        error.kind = Kind::Sandbox;
    }
    error
}
