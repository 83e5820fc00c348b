//! `parbake run`: a fresh sandbox for one command.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use parbake_builder::template::Template;
use parbake_cache::lazy::Progress;
use parbake_cache::registry::RegistryOptions;
use parbake_cache::template::SnapshotManifest;
use parbake_cache::variant::Choice;
use parbake_cache::{Store, TemplateName};
use parbake_node::monitor::MonitorError;
use parbake_node::sandbox::{Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::{ExecRequest, FailureKind};
use serde_json::json;

use super::bake::ShapeArgs;
use super::error::{Classify, CliError, CliResult, Kind};
use super::guest::{self, Place};
use super::remote::{self, Arrivals, RegistryArgs};
use super::stdio::{self, Ended};
use super::trust::TrustArgs;
use super::{Context, bake, pull, run_lazily};

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
    /// Kill the command after so many seconds
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
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
    let sandbox = match &arriving.snapshot {
        Some(snapshot) if !args.cold => {
            let mut options = guest::sandbox_options(context)?;
            options.hostname.clone_from(&args.hostname);
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
        // A cold boot, or a bake, needs all of it.
        let template = arriving.complete(context, store)?;
        return run_installed(context, args, store, &template, request);
    };
    let mut at_first_exec = 0;
    let on_start = || {
        at_first_exec = arriving.progress().fetched_bytes;
        arriving.release();
    };
    let finished = execute(sandbox, request, begun, on_start);
    let Progress { fetched_bytes, left_bytes } = arriving.progress();
    arriving.end(context, store);
    let (ended, mut timings) = finished?;
    timings["how"] = "restored lazily".into();
    timings["fetchedBytesAtFirstExec"] = at_first_exec.into();
    timings["fetchedBytes"] = fetched_bytes.into();
    timings["leftBytes"] = left_bytes.into();
    conclude(args, ended, &timings)
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
    let (sandbox, how) = if args.cold {
        let files = template.boot_files(store).kind(Kind::Sandbox)?;
        let sandbox = Sandbox::boot(&files, shape, &template.manifest.process, &options);
        (sandbox.map_err(|error| guest::sandbox_error(error, Kind::Sandbox))?, "cold")
    } else {
        let snapshot = snapshot(context, store, template, shape).map_err(sandbox_failure)?;
        (restore(context, store, template, &snapshot, &options)?, "restored")
    };
    let (ended, mut timings) = execute(sandbox, request, begun, || ())?;
    timings["how"] = how.into();
    conclude(args, ended, &timings)
}

/// Runs the command and throws the sandbox away; says where the time went.
fn execute(
    mut sandbox: Sandbox,
    request: ExecRequest,
    begun: Instant,
    mut on_start: impl FnMut(),
) -> CliResult<(Result<Ended, SandboxError>, serde_json::Value)> {
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
    drop(sandbox);
    let document = json!({
        "startedMs": timings.started.as_secs_f64() * 1000.0,
        "readyMs": timings.ready.as_secs_f64() * 1000.0,
        "connectedMs": ready.as_secs_f64() * 1000.0,
        "firstExecMs": first_exec.as_secs_f64() * 1000.0,
        "totalMs": begun.elapsed().as_secs_f64() * 1000.0,
        "monitorStagesUs": timings.stages,
        "jail": timings.jail,
    });
    Ok((ended, document))
}

/// Writes the timings, if they are wanted, and turns the end into an exit code.
fn conclude(
    args: &Args,
    ended: Result<Ended, SandboxError>,
    document: &serde_json::Value,
) -> CliResult<u8> {
    if let Some(path) = &args.timings {
        std::fs::write(path, format!("{document}\n")).kind(Kind::Sandbox)?;
    }
    match ended {
        Ok(Ended::Exited(exit)) => Ok(u8::try_from(exit.shell_code()).unwrap_or(125)),
        Ok(Ended::HungUp) => Err(CliError::interrupted()),
        Ok(Ended::Failed(failure)) => {
            let kind = match failure.kind {
                FailureKind::NotFound => Kind::CommandNotFound,
                FailureKind::NotExecutable => Kind::NotExecutable,
                _ => Kind::Sandbox,
            };
            Err(CliError::new(kind, failure.message))
        }
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
    let host = guest::host_class();
    if let Some((_, snapshot)) = template.snapshot(store, shape, &host).map_err(guest::classify)? {
        return Ok(snapshot);
    }
    for (digest, snapshot) in store.snapshots(&template.digest).map_err(guest::classify)? {
        let mut reasons = host.unmet(&snapshot.compat);
        let other = snapshot.machine;
        if other != shape {
            reasons.push(format!(
                "it is of a machine with {} vCPU and {} MiB, not {} vCPU and {} MiB",
                other.vcpus, other.memory_mib, shape.vcpus, shape.memory_mib
            ));
        }
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
    if argv.is_empty() {
        return Err(CliError::new(
            Kind::Sandbox,
            format!("{} has no default command", template.label()),
        )
        .hint("name one: parbake run TEMPLATE -- COMMAND"));
    }
    let mut request = ExecRequest::new(argv);
    request.env = environment(args)?;
    request.cwd = args.workdir.clone().into_bytes();
    request.user.clone_from(&args.user);
    request.tty = args.tty.then(stdio::window_size);
    if args.tty {
        let term = std::env::var_os("TERM").unwrap_or_else(|| "xterm".into());
        request.env.insert(0, [b"TERM=", term.as_bytes()].concat());
    }
    request.stdin = stdio::connect_stdin(args.interactive);
    request.timeout_ms = args.timeout.map(|seconds| seconds.saturating_mul(1000));
    Ok(request)
}

fn environment(args: &Args) -> CliResult<Vec<Vec<u8>>> {
    use std::os::unix::ffi::OsStringExt;
    let mut entries = Vec::new();
    for path in &args.env_file {
        let text = std::fs::read(path).map_err(|error| {
            CliError::new(Kind::Sandbox, format!("cannot read {}: {error}", path.display()))
        })?;
        for (number, line) in text.split(|&byte| byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            if !line.contains(&b'=') {
                let place = format!("{}:{}", path.display(), number + 1);
                return Err(CliError::new(Kind::Sandbox, format!("{place}: not NAME=VALUE")));
            }
            entries.push(line.to_vec());
        }
    }
    for entry in &args.env {
        if entry.is_empty() || entry.starts_with('=') {
            return Err(CliError::new(Kind::Sandbox, format!("--env {entry:?} has no name")));
        }
        if entry.contains('=') {
            entries.push(entry.clone().into_bytes());
        } else if let Some(value) = std::env::var_os(entry) {
            entries.push([entry.as_bytes(), b"=", &value.into_vec()].concat());
        }
    }
    Ok(entries)
}

/// Whatever fails before the command runs is the sandbox's failure, unless it says more.
fn sandbox_failure(mut error: CliError) -> CliError {
    if !matches!(error.kind, Kind::Interrupted) {
        error.kind = Kind::Sandbox;
    }
    error
}
