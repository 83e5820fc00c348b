//! The command line: one file per verb. Results go to stdout, everything else to stderr.

mod bake;
mod build;
mod builder;
mod cage;
mod df;
mod diff;
mod doctor;
mod export;
mod guest;
mod history;
mod import;
mod inspect;
mod interrupt;
mod kernel;
mod keygen;
mod lab;
mod login;
mod ls;
mod progress;
mod prune;
mod pull;
mod pull_lazily;
mod push;
mod recipe;
mod remote;
mod rm;
mod run;
mod run_lazily;
mod sbom;
mod shell;
mod size;
mod source;
mod steps;
mod tag;
mod trust;
mod verify;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use parbake_cache::Store;
use parbake_node::terminal::{failure as error, output};

use error::{Classify, CliError, CliResult, Kind};
use progress::{Mode, Progress};

/// Build templates for microVM sandboxes, bake them, and run them.
///
/// An OCI image becomes an ext4 root filesystem and a kernel bundle (build), is booted once and
/// frozen (bake), and restored as a fresh, disposable machine for every run.
#[derive(Debug, Parser)]
#[command(name = "parbake", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 refused, 5 build step \
failed, 6 not ready in time, 7 host cannot, 8 registry, 70 internal, 130 interrupted. `run` returns \
the command's own code; 125, 126, 127: sandbox failed, not executable, not found."
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

/// Options of every verb.
#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Where templates, snapshots and kernels are kept
    #[arg(long, global = true, env = "PARBAKE_STORE", value_name = "DIR")]
    store: Option<PathBuf>,
    /// Where guests run: natively on KVM, in the lab (an emulated KVM host), or whichever works
    #[arg(long, global = true, env = "PARBAKE_HOST", value_name = "HOST", default_value = "auto")]
    host: HostChoice,
    /// Form of the results on stdout
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text")]
    format: Format,
    /// Form of the progress on stderr
    #[arg(
        long,
        global = true,
        env = "PARBAKE_PROGRESS",
        value_name = "FORM",
        default_value = "auto"
    )]
    progress: Mode,
    /// No progress; print only what identifies the result
    #[arg(short, long, global = true)]
    quiet: bool,
}

/// `--host`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HostChoice {
    /// KVM where it can run stock guests, else the lab.
    Auto,
    /// This machine's KVM.
    Kvm,
    /// The lab.
    Lab,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs; stable.
    Json,
    /// SPDX 2.3 (`sbom` only).
    #[value(hide = true)]
    Spdx,
    /// CycloneDX 1.6 (`sbom` only).
    #[value(hide = true)]
    Cyclonedx,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Build(Box<build::Args>),
    Recipe(recipe::Args),
    Bake(bake::Args),
    Run(Box<run::Args>),
    Ls(ls::Args),
    Inspect(inspect::Args),
    Rm(rm::Args),
    Tag(tag::Args),
    History(history::Args),
    Diff(diff::Args),
    Push(push::Args),
    Pull(pull::Args),
    Export(export::Args),
    Import(import::Args),
    Login(login::Args),
    Logout(login::LogoutArgs),
    Verify(verify::Args),
    Sbom(sbom::Args),
    Keygen(keygen::Args),
    Prune(prune::Args),
    Df(df::Args),
    Kernel(kernel::Args),
    Lab(lab::Args),
    Doctor(doctor::Args),
    Schema(shell::SchemaArgs),
    Completions(shell::CompletionsArgs),
    #[command(hide = true)]
    Man(shell::ManArgs),
    #[command(hide = true)]
    StepGuest(builder::StepGuestArgs),
}

/// What a verb works with.
#[derive(Debug)]
pub struct Context {
    /// Options of every verb.
    pub global: Global,
    /// The reporter.
    pub progress: Progress,
}

impl Context {
    /// The store, created when it is not there yet. Long work on it ends when the user wants to stop,
    /// where that is watched for.
    pub fn store(&self) -> CliResult<Store> {
        let root = self.store_root();
        let opened = Store::open(&root).map(|store| store.until(interrupt::asked));
        opened.kind(Kind::User).map_err(|error| {
            error
                .hint(format!("--store DIR or PARBAKE_STORE names another than {}", root.display()))
        })
    }

    /// The store's directory, absolute.
    pub fn store_root(&self) -> PathBuf {
        let root = self.global.store.clone().unwrap_or_else(Store::default_root);
        std::path::absolute(&root).unwrap_or(root)
    }

    /// The same, for a part of a verb whose results are not the verb's.
    pub fn silent(&self) -> Self {
        let global = Global { quiet: true, format: Format::Text, ..self.global.clone() };
        let mode = if self.global.quiet { Mode::Quiet } else { self.global.progress };
        Self { progress: Progress::new(mode), global }
    }

    /// Whether results are JSON.
    pub fn json(&self) -> bool {
        self.global.format == Format::Json
    }
}

/// Parses, runs, reports.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    let json = cli.global.format == Format::Json;
    let mode = if cli.global.quiet { Mode::Quiet } else { cli.global.progress };
    let context = Context { progress: Progress::new(mode), global: cli.global };
    if matches!(context.global.format, Format::Spdx | Format::Cyclonedx)
        && !matches!(cli.verb, Verb::Sbom(_))
    {
        let error =
            CliError::new(Kind::Usage, "only `parbake sbom` has the formats spdx and cyclonedx")
                .hint("--format takes text and json here");
        error.print(json);
        return ExitCode::from(error.kind.exit_code());
    }
    match run_verb(&context, &cli.verb) {
        Ok(code) => ExitCode::from(code),
        Err(mut error) => {
            // Whatever it was that failed, it failed because it was told to stop.
            if interrupt::asked() {
                error.kind = Kind::Interrupted;
            }
            error.print(json);
            ExitCode::from(error.kind.exit_code())
        }
    }
}

fn run_verb(context: &Context, verb: &Verb) -> Result<u8, CliError> {
    match verb {
        Verb::Build(args) => build::run(context, args),
        Verb::Recipe(args) => recipe::run(context, args).map(|()| 0),
        Verb::Bake(args) => bake::run(context, args),
        Verb::Run(args) => run::run(context, args),
        Verb::Ls(args) => ls::run(context, args).map(|()| 0),
        Verb::Inspect(args) => inspect::run(context, args).map(|()| 0),
        Verb::Rm(args) => rm::run(context, args).map(|()| 0),
        Verb::Tag(args) => tag::run(context, args).map(|()| 0),
        Verb::History(args) => history::run(context, args).map(|()| 0),
        Verb::Diff(args) => diff::run(context, args),
        Verb::Push(args) => push::run(context, args).map(|()| 0),
        Verb::Pull(args) => pull::run(context, args).map(|()| 0),
        Verb::Export(args) => export::run(context, args).map(|()| 0),
        Verb::Import(args) => import::run(context, args).map(|()| 0),
        Verb::Login(args) => login::run(context, args).map(|()| 0),
        Verb::Logout(args) => login::logout(context, args).map(|()| 0),
        Verb::Verify(args) => verify::run(context, args),
        Verb::Sbom(args) => sbom::run(context, args).map(|()| 0),
        Verb::Keygen(args) => keygen::run(context, args).map(|()| 0),
        Verb::Prune(args) => prune::run(context, args).map(|()| 0),
        Verb::Df(args) => df::run(context, args).map(|()| 0),
        Verb::Kernel(args) => kernel::run(context, args).map(|()| 0),
        Verb::Lab(args) => lab::run(context, args),
        Verb::Doctor(args) => doctor::run(context, args),
        Verb::Schema(args) => shell::schema(args).map(|()| 0),
        Verb::Completions(args) => shell::completions(args).map(|()| 0),
        Verb::Man(args) => shell::man(args).map(|()| 0),
        Verb::StepGuest(args) => builder::step_guest(args),
    }
}

/// The command line's definition, for completions and man pages.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        super::command().debug_assert();
    }

    /// Global options and a verb's own share one space of names, which only parsing shows.
    #[test]
    fn verbs_do_not_take_the_global_options_names() {
        use clap::Parser;
        let command = super::command();
        let mut globals: Vec<String> =
            command.get_arguments().map(|argument| argument.get_id().to_string()).collect();
        globals.retain(|name| name != "help" && name != "version");
        assert!(globals.contains(&"host".to_owned()), "{globals:?}");
        for verb in command.get_subcommands() {
            for argument in verb.get_arguments() {
                let name = argument.get_id().to_string();
                assert!(!globals.contains(&name), "{}: {name}", verb.get_name());
            }
        }
        assert!(super::Cli::try_parse_from(["parbake", "logout", "localhost:5000"]).is_ok());
    }
}
