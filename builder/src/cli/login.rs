//! `parbake login` and `parbake logout`: credentials for registries.

use std::io::{BufRead, IsTerminal, Write};

use parbake_cache::credentials::{Credential, Credentials};
use parbake_cache::registry::{RegistryError, RegistryOptions, Repository};
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::remote::{self, RegistryArgs};
use super::{Context, output};

/// No registry's password is longer.
const MAX_PASSWORD: u64 = 64 * 1024;

/// Sign in to a registry, and keep the credentials for this user
///
/// They are tried first, and kept where `podman`, `skopeo` and `buildah` look for them, too.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The registry: HOST[:PORT]
    #[arg(value_name = "HOST")]
    registry_host: String,
    /// The user
    #[arg(short, long, value_name = "NAME")]
    username: Option<String>,
    /// Read the password from standard input
    #[arg(long)]
    password_stdin: bool,
    #[command(flatten)]
    registry: RegistryArgs,
}

/// Forget the credentials for a registry
#[derive(Debug, clap::Args)]
pub struct LogoutArgs {
    /// The registry: HOST[:PORT]
    #[arg(value_name = "HOST")]
    registry_host: String,
    /// Registry credentials, instead of the usual places
    #[arg(long, value_name = "FILE")]
    authfile: Option<std::path::PathBuf>,
}

/// Signs in.
pub fn run(context: &Context, args: &Args) -> CliResult {
    check_host(&args.registry_host)?;
    let user = match &args.username {
        Some(user) => user.clone(),
        None if args.password_stdin || !std::io::stdin().is_terminal() => {
            return Err(CliError::new(Kind::Usage, "no user is given").hint("--username NAME"));
        }
        None => ask("user: ")?,
    };
    let password = if args.password_stdin {
        read_line(std::io::stdin().lock())?
    } else if std::io::stdin().is_terminal() {
        let quiet = NoEcho::begin();
        let password = ask("password: ");
        drop(quiet);
        eprintln!();
        password?
    } else {
        return Err(CliError::new(Kind::Usage, "standard input is not a terminal")
            .hint("--password-stdin reads the password from it"));
    };
    if user.is_empty() || user.contains(':') || password.is_empty() {
        return Err(CliError::new(
            Kind::Usage,
            "user or password is empty, or the user has a colon",
        ));
    }
    let credential = Credential::Basic { user: user.clone(), password };
    let credentials = args.registry.credentials();
    let trial = RegistryOptions {
        credentials: Credentials::fixed(credential.clone()),
        retries: 1,
        ..args.registry.options()?
    };
    Repository::sign_in(&trial, &args.registry_host).map_err(|error| match error {
        RegistryError::Unauthorized { .. } => CliError::new(
            Kind::Registry,
            format!("{} does not accept this user and password", args.registry_host),
        ),
        error => remote::registry_error(error),
    })?;
    credentials.login(&args.registry_host, &credential).map_err(remote::credential_error)?;
    let file = credentials.login_file();
    if file.is_none() {
        return Err(CliError::new(Kind::User, "there is no place to keep credentials in")
            .hint("--authfile FILE, REGISTRY_AUTH_FILE or HOME names one"));
    }
    if context.json() {
        return output::json(&json!({ "host": args.registry_host, "user": user, "file": file }));
    }
    output::line(&format!("signed in to {} as {user}", args.registry_host))
}

/// Forgets.
pub fn logout(context: &Context, args: &LogoutArgs) -> CliResult {
    check_host(&args.registry_host)?;
    let credentials = Credentials::from_environment(args.authfile.as_deref());
    let known = credentials.logout(&args.registry_host).map_err(remote::credential_error)?;
    if !known {
        return Err(CliError::new(
            Kind::NotFound,
            format!("not signed in to {}", args.registry_host),
        ));
    }
    if context.json() {
        return output::json(
            &json!({ "host": args.registry_host, "file": credentials.login_file() }),
        );
    }
    output::line(&format!("signed out of {}", args.registry_host))
}

fn check_host(host: &str) -> CliResult {
    if host.is_empty() || host.contains(['/', '@']) || host.contains(char::is_whitespace) {
        return Err(CliError::new(Kind::Usage, format!("{host:?} is not a registry's host"))
            .hint("write HOST or HOST:PORT, without a scheme or a path"));
    }
    Ok(())
}

fn ask(prompt: &str) -> CliResult<String> {
    let mut err = std::io::stderr();
    let _ = write!(err, "{prompt}").and_then(|()| err.flush());
    read_line(std::io::stdin().lock())
}

fn read_line(input: impl BufRead) -> CliResult<String> {
    let mut line = String::new();
    std::io::Read::take(input, MAX_PASSWORD)
        .read_line(&mut line)
        .map_err(|error| CliError::new(Kind::User, error))?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

/// Keeps a terminal from showing what is typed, as long as it lives.
struct NoEcho(Option<rustix::termios::Termios>);

impl NoEcho {
    fn begin() -> Self {
        use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
        let input = std::io::stdin();
        let Ok(before) = tcgetattr(&input) else { return Self(None) };
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        let _ = tcsetattr(&input, OptionalActions::Flush, &quiet);
        Self(Some(before))
    }
}

impl Drop for NoEcho {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let now = rustix::termios::OptionalActions::Now;
            let _ = rustix::termios::tcsetattr(std::io::stdin(), now, before);
        }
    }
}
