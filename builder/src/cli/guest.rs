//! Where guests run, and sending a command there: what `bake` and `run` have in common.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use parbake_builder::template::{Template, TemplateError};
use parbake_cache::{Store, StoreError};
use parbake_host::lab::{Lab, LabConfig};
use parbake_host::{HostMode, probe};
use parbake_node::monitor::MonitorError;
use parbake_node::sandbox::{SandboxError, SandboxOptions};
use parbake_protocol::agent::ExecRequest;

use super::error::{CliError, CliResult, Kind};
use super::{Context, HostChoice, interrupt};
use parbake_node::terminal::stdio::{self, Ended};

/// Set in the environment of a command that was sent to the lab: guests run right there.
const IN_LAB: &str = "PARBAKE_IN_LAB";

/// Where guests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Here,
    /// In the lab.
    Lab,
}

/// Decides where guests run.
pub fn place(context: &Context) -> CliResult<Place> {
    let choice = match context.global.host {
        _ if is_lab() => return Ok(Place::Here),
        HostChoice::Auto => parbake_host::HostChoice::Auto,
        HostChoice::Kvm => return Ok(Place::Here),
        HostChoice::Lab => parbake_host::HostChoice::Lab,
    };
    let report = probe::probe(&context.store_root(), LAB_MEMORY_MIB);
    match choice.resolve(&report) {
        Ok(HostMode::Kvm) => Ok(Place::Here),
        Ok(HostMode::Lab) => Ok(Place::Lab),
        Err(error) => {
            let hints = error.hints().to_vec();
            let mut failure = CliError::new(Kind::Host, error);
            failure.hints = hints;
            Err(failure.hint("`parbake doctor` shows what this host can do"))
        }
    }
}

/// What a lab is given, in MiB.
pub const LAB_MEMORY_MIB: u32 = 3072;

/// What the lab of this store is to be.
pub fn lab_config(context: &Context) -> CliResult<LabConfig> {
    // Opened so that it exists, and asked for its path so that links are followed.
    let store = context.store()?;
    let root = store.root().canonicalize().map_err(|error| CliError::new(Kind::User, error))?;
    let agent =
        parbake_node::programs::agent().map_err(|error| CliError::new(Kind::User, error))?;
    Ok(LabConfig { memory_mib: LAB_MEMORY_MIB, ..LabConfig::new(root, agent) })
}

/// The lab, started if it is not running, with a line on stderr that says so.
pub fn lab(context: &Context) -> CliResult<Lab> {
    let config = lab_config(context)?;
    let mut step = None;
    let lab = Lab::ensure_up(&config, &mut |event| {
        let step = step.get_or_insert_with(|| context.progress.step("starting the lab"));
        step.update(event.to_string());
    });
    let lab = lab.map_err(|error| CliError::new(Kind::Host, error))?;
    if let Some(step) = step {
        step.done("up: an emulated KVM host, whose times are not a real host's");
    }
    Ok(lab)
}

/// Runs this very command line in the lab.
pub fn in_lab(context: &Context) -> CliResult<u8> {
    in_lab_with(context, false, false)
}

/// Runs this very command line in the lab, with a terminal or standard input if wanted.
pub fn in_lab_with(context: &Context, tty: bool, stdin: bool) -> CliResult<u8> {
    let words = std::env::args_os().skip(1).map(|word| word.as_bytes().to_vec()).collect();
    command_in_lab(context, words, tty, stdin)
}

/// Runs this program in the lab with other arguments.
pub fn in_lab_as(context: &Context, arguments: &[&str]) -> CliResult<u8> {
    let words = arguments.iter().map(|word| word.as_bytes().to_vec()).collect();
    command_in_lab(context, words, false, false)
}

/// Whether this is the lab already.
pub fn is_lab() -> bool {
    std::env::var_os(IN_LAB).is_some()
}

/// Runs another command line of this program in the lab.
pub fn command_in_lab(
    context: &Context,
    words: Vec<Vec<u8>>,
    tty: bool,
    stdin: bool,
) -> CliResult<u8> {
    let lab = lab(context)?;
    let (program, env) = program_in_lab(context, &lab)?;
    let mut argv = vec![program.as_os_str().as_bytes().to_vec()];
    argv.extend(words);
    let mut request = ExecRequest::new(argv);
    let here = std::env::current_dir().map_err(|error| CliError::new(Kind::Internal, error))?;
    request.cwd = here.as_os_str().as_bytes().to_vec();
    request.stdin = stdin;
    request.tty = tty.then(stdio::window_size);
    request.env = env;
    if !std::io::stderr().is_terminal() || tty {
        request.env.push(b"PARBAKE_PROGRESS=plain".to_vec());
    }
    let client = lab.connect().map_err(|error| CliError::new(Kind::Host, error))?;
    match stdio::run(client, request, || {}) {
        Ok(Ended::Exited(exit)) => Ok(u8::try_from(exit.shell_code()).unwrap_or(125)),
        Ok(Ended::HungUp) => Err(CliError::interrupted()),
        Ok(Ended::Failed(failure)) => Err(CliError::new(Kind::Host, failure.message)
            .hint("the lab sees this machine's files; `parbake lab down` starts it afresh")),
        Err(error) => Err(CliError::new(Kind::Host, error)
            .hint("`parbake lab status` tells whether the lab is still there")),
    }
}

/// This program as the lab finds it, and the environment it has there.
pub fn program_in_lab(context: &Context, lab: &Lab) -> CliResult<(PathBuf, Vec<Vec<u8>>)> {
    let program = std::env::current_exe().map_err(|error| CliError::new(Kind::Internal, error))?;
    // All of this process's environment, as --env NAME and the tools' own variables need it; the
    // last entry of a name wins.
    let ours = std::env::vars_os().map(|(name, value)| [name, value]);
    let more = [
        [IN_LAB.into(), "1".into()],
        ["PARBAKE_STORE".into(), context.store_root().into_os_string()],
    ];
    let entry = |[name, value]: [OsString; 2]| [name.as_bytes(), b"=", value.as_bytes()].concat();
    // Programs are taken from the machine as it is now, not as it was when the lab started.
    Ok((lab.host_path(&program), ours.chain(more).map(entry).collect()))
}

/// How often a template's times count: guests of the lab are emulated twice.
pub fn patience() -> u32 {
    if std::env::var_os(IN_LAB).is_some() { 8 } else { 1 }
}

/// How sandboxes of this command run.
pub fn sandbox_options(context: &Context) -> CliResult<SandboxOptions> {
    interrupt::watch();
    // A guest's writes go beside the store, where there is room, not into memory; but not through
    // the lab's file server, which is slower than the lab's memory.
    let scratch = if is_lab() { None } else { Some(context.store()?.root().to_owned()) };
    Ok(SandboxOptions { scratch, cancelled: Some(interrupt::asked), ..Default::default() })
}

/// Finds a template; not there is its own exit code.
pub fn find(store: &Store, name: &str) -> CliResult<Template> {
    Template::find(store, name).map_err(|error| match error {
        TemplateError::Store(error) => store_error(error),
        error => CliError::new(Kind::User, error),
    })
}

/// Finds a template's digest without reading it: it may be damaged.
pub fn find_digest(store: &Store, name: &str) -> CliResult<parbake_cache::Digest> {
    store.resolve(name).map(|(_, digest)| digest).map_err(store_error)
}

/// A store's failure, with its exit code.
pub fn store_error(error: StoreError) -> CliError {
    let kind = match &error {
        StoreError::UnknownName { .. } | StoreError::Missing { .. } => Kind::NotFound,
        StoreError::Damaged { .. } => Kind::Refused,
        StoreError::Interrupted => Kind::Interrupted,
        _ => Kind::User,
    };
    let failure = CliError::new(kind, error);
    if kind == Kind::NotFound {
        return failure.hint("`parbake ls` shows what is in the store");
    }
    failure
}

/// A template's failure.
pub fn classify(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CliError {
    CliError::new(Kind::User, error)
}

/// A sandbox's failure; `otherwise` where nothing more is known.
pub fn sandbox_error(error: SandboxError, otherwise: Kind) -> CliError {
    let kind = match &error {
        SandboxError::Interrupted => Kind::Interrupted,
        SandboxError::NotReady { .. } if otherwise != Kind::Sandbox => Kind::NotReady,
        SandboxError::Monitor(MonitorError::Failed { kind, .. })
            if kind == "kvm" && otherwise != Kind::Sandbox =>
        {
            Kind::Host
        }
        _ => otherwise,
    };
    CliError::new(kind, error)
}
