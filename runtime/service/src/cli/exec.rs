//! `parbaked exec`.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use parbake_node::terminal::failure::{CliError, CliResult, Kind};
use parbake_node::terminal::{env, stdio};
use parbake_protocol::agent::FailureKind;
use parbake_service::model::{Data, ExecRequest, WindowSize, Word};

use super::values::{duration, text};
use super::{Context, part, refused};

/// Run a command in a sandbox
///
/// Streams standard input and output, passes signals on, and returns the command's exit code. When
/// this program ends, the command does, unless it is detached.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keep standard input connected even if it is a terminal
    #[arg(short, long)]
    interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    tty: bool,
    /// Start it and return at once
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    detach: bool,
    /// Set NAME=VALUE for the command; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Read NAME=VALUE lines from a file
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// Run as another user: name, uid, name:group or uid:gid
    #[arg(short, long, value_name = "USER")]
    user: Option<String>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Kill the command after this time
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<Duration>,
    /// Forward at most so many bytes of output
    #[arg(long, value_name = "BYTES")]
    output_limit: Option<u64>,
    /// Say yes to what the guard asked
    #[arg(long)]
    confirm: bool,
    /// The sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// The command
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs it; returns its exit code.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    if args.tty && !std::io::stdin().is_terminal() {
        return Err(
            CliError::new(Kind::Sandbox, "standard input is not a terminal").hint("leave out -t")
        );
    }
    let request = request(args).map_err(sandbox)?;
    let client = context.client().map_err(sandbox)?;
    let path = format!("/v1/sandboxes/{}/exec", part(&args.id));
    if args.detach {
        let body = serde_json::to_vec(&request).map_err(|e| CliError::new(Kind::Internal, e))?;
        let answer = client.read(hyper::Method::POST, &path, Some(&body));
        let mut lines = std::io::BufReader::new(answer.map_err(refused).map_err(sandbox)?);
        return detached(&mut lines);
    }
    let (input, output) = client.exec(&path, &request).map_err(refused).map_err(sandbox)?;
    let what = stdio::Attach { tty: args.tty, stdin: request.stdin };
    match stdio::attach(&input, output, what, || {}) {
        Ok(stdio::Ended::Exited(exit)) => Ok(u8::try_from(exit.shell_code()).unwrap_or(125)),
        Ok(stdio::Ended::HungUp) => Err(CliError::interrupted()),
        Ok(stdio::Ended::Failed(failure)) => {
            let kind = match failure.kind {
                FailureKind::NotFound => Kind::CommandNotFound,
                FailureKind::NotExecutable => Kind::NotExecutable,
                _ => Kind::Sandbox,
            };
            Err(CliError::new(kind, failure.to_string()))
        }
        Err(error) => Err(CliError::new(Kind::Sandbox, error)),
    }
}

fn detached(lines: &mut impl std::io::BufRead) -> CliResult<u8> {
    use parbake_service::model::ExecEvent;
    let mut line = String::new();
    let failed = |error: &dyn std::fmt::Display| CliError::new(Kind::Sandbox, error.to_string());
    lines.read_line(&mut line).map_err(|error| failed(&error))?;
    match serde_json::from_str(&line).map_err(|error| failed(&error))? {
        ExecEvent::Started { .. } => Ok(0),
        ExecEvent::Failed(failure) => {
            let kind = match failure.exit_code {
                127 => Kind::CommandNotFound,
                126 => Kind::NotExecutable,
                _ => Kind::Sandbox,
            };
            Err(CliError::new(kind, failure.message))
        }
        _ => Err(CliError::new(Kind::Sandbox, "parbaked spoke out of turn")),
    }
}

fn request(args: &Args) -> CliResult<ExecRequest> {
    let word = |word: &OsString| match word.to_str() {
        Some(text) => Word::Text(text.to_owned()),
        None => Word::Data(Data::new(word.as_bytes().to_vec())),
    };
    let env: CliResult<_> = env::read(&args.env_file, &args.env)?.into_iter().map(text).collect();
    let mut request = ExecRequest {
        argv: args.command.iter().map(word).collect(),
        env: env?,
        cwd: args.workdir.clone(),
        user: args.user.clone(),
        timeout_ms: args.timeout.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
        output_limit_bytes: args.output_limit,
        detach: args.detach,
        confirmed: args.confirm,
        stdin: !args.detach && stdio::connect_stdin(args.interactive),
        ..ExecRequest::default()
    };
    if args.tty {
        let size = stdio::window_size();
        request.tty = Some(WindowSize { rows: size.rows, columns: size.columns });
        let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
        request.env.entry("TERM".to_owned()).or_insert(term);
    }
    Ok(request)
}

/// Whatever fails before the command runs is the sandbox's failure, unless it says more.
fn sandbox(mut error: CliError) -> CliError {
    if !matches!(error.kind, Kind::Interrupted) {
        error.kind = Kind::Sandbox;
    }
    error
}
