//! The command line: `serve`, and a verb for everything the service does. Results go to stdout,
//! everything else to stderr.

mod audit;
mod copy;
mod cp;
mod create;
mod events;
mod exec;
mod list;
mod remove;
mod serve;
mod shell;
mod values;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use parbake_node::terminal::failure::{Classify, CliError, CliResult, Kind};
use parbake_service::client::{Client, ClientError, Endpoint};

/// The node service: sandboxes for many callers, and the client that talks to it.
///
/// `parbaked serve` runs the service; every other verb asks it to do something. `parbake` builds
/// and bakes the templates that sandboxes are made from.
#[derive(Debug, Parser)]
#[command(name = "parbaked", version, propagate_version = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 refused, 6 not ready in \
time, 7 host cannot, 70 internal, 130 interrupted. `exec` returns the command's own code; 125, 126, \
127: sandbox failed, not executable, not found."
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
    /// Where the service listens: unix:PATH or HOST:PORT
    #[arg(long, global = true, env = "PARBAKED_ADDRESS", value_name = "ADDRESS")]
    address: Option<Endpoint>,
    /// The key for a service on TCP
    #[arg(
        long,
        global = true,
        env = "PARBAKED_API_KEY",
        hide_env_values = true,
        value_name = "KEY"
    )]
    api_key: Option<String>,
    /// How results are printed
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs; stable.
    Json,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Serve(Box<serve::Args>),
    Create(create::Args),
    Exec(exec::Args),
    Cp(cp::Args),
    Logs(events::LogsArgs),
    Ps(list::PsArgs),
    Inspect(list::InspectArgs),
    Stats(list::StatsArgs),
    Fork(copy::ForkArgs),
    Pause(copy::PauseArgs),
    Resume(copy::ResumeArgs),
    Rm(remove::Args),
    Events(events::EventsArgs),
    Status(list::StatusArgs),
    Audit(audit::Args),
    Openapi(shell::OpenapiArgs),
    Completions(shell::CompletionsArgs),
    #[command(hide = true)]
    Man(shell::ManArgs),
}

/// What a verb works with.
#[derive(Debug)]
pub struct Context {
    global: Global,
}

impl Context {
    /// Whether results are JSON.
    fn json(&self) -> bool {
        self.global.format == Format::Json
    }

    /// A client of the service.
    fn client(&self) -> CliResult<Client> {
        let endpoint = self.global.address.clone();
        let endpoint = endpoint.unwrap_or_else(|| Endpoint::Unix(default_socket()));
        Client::new(endpoint, self.global.api_key.clone()).kind(Kind::Internal)
    }
}

/// Where the service of this user listens when nobody says.
fn default_socket() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !rustix::process::geteuid().is_root() && !dir.is_empty() => {
            PathBuf::from(dir).join("parbake.sock")
        }
        _ => PathBuf::from("/run/parbake.sock"),
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
    let context = Context { global: cli.global };
    match run_verb(&context, &cli.verb) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            error.print(context.json());
            ExitCode::from(error.kind.exit_code())
        }
    }
}

fn run_verb(context: &Context, verb: &Verb) -> CliResult<u8> {
    let done = match verb {
        Verb::Exec(args) => return exec::run(context, args),
        Verb::Serve(args) => serve::run(context, args),
        Verb::Create(args) => create::run(context, args),
        Verb::Cp(args) => cp::run(context, args),
        Verb::Logs(args) => events::logs(context, args),
        Verb::Ps(args) => list::ps(context, args),
        Verb::Inspect(args) => list::inspect(context, args),
        Verb::Stats(args) => list::stats(context, args),
        Verb::Fork(args) => copy::fork(context, args),
        Verb::Pause(args) => copy::pause(context, args),
        Verb::Resume(args) => copy::resume(context, args),
        Verb::Rm(args) => remove::run(context, args),
        Verb::Events(args) => events::events(context, args),
        Verb::Status(args) => list::status(context, args),
        Verb::Audit(args) => audit::run(context, args),
        Verb::Openapi(args) => shell::openapi(args),
        Verb::Completions(args) => shell::completions(args),
        Verb::Man(args) => shell::man(args),
    };
    done.map(|()| 0)
}

/// A refusal of the service's, or no answer from it, with its exit code.
fn refused(error: ClientError) -> CliError {
    match error {
        ClientError::Refused(problem) => {
            let mut failure = CliError::new(problem.kind.exit(), Told::new(&problem));
            failure.hints = problem.hints;
            failure
        }
        error @ ClientError::Connect { .. } => CliError::new(Kind::Host, error)
            .hint("`parbaked serve` runs the service; --address or PARBAKED_ADDRESS says where"),
        error @ ClientError::Local(_) => CliError::new(Kind::User, error),
        error => CliError::new(Kind::Host, error),
    }
}

/// A refusal's sentence with its causes, as an error of this side.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
struct Told {
    message: String,
    source: Option<Box<Told>>,
}

impl Told {
    fn new(problem: &parbake_service::problem::Problem) -> Self {
        let chain =
            |source, message: &String| Some(Box::new(Self { message: message.clone(), source }));
        let source = problem.causes.iter().rev().fold(None, chain);
        Self { message: problem.message.clone(), source }
    }
}

/// A part of a path, percent-encoded.
fn part(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// The command line's definition, for completions and man pages.
fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    #[test]
    fn the_command_line_is_consistent() {
        super::command().debug_assert();
    }

    /// Global options and a verb's own share one space of names, which only parsing shows.
    #[test]
    fn every_verb_parses() {
        for line in [
            "parbaked serve --listen unix:/run/x.sock --listen 127.0.0.1:7 --api-key-file F",
            "parbaked create py:3.12 --ttl 15m --cpus 1 --env-file E --secret TOKEN=x --label a=b",
            "parbaked exec -it -e A=1 ID -- python3 -c 1",
            "parbaked cp -r DIR ID:/x",
            "parbaked logs --follow ID",
            "parbaked ps --format json",
            "parbaked inspect ID",
            "parbaked stats ID",
            "parbaked fork ID --count 3",
            "parbaked pause ID",
            "parbaked resume ID --keep",
            "parbaked rm ID ID2",
            "parbaked events --follow",
            "parbaked status",
            "parbaked audit verify FILE",
            "parbaked openapi",
            "parbaked completions bash",
            "parbaked man DIR",
        ] {
            if let Err(error) = super::Cli::try_parse_from(line.split(' ')) {
                panic!("{line}: {error}");
            }
        }
    }
}
