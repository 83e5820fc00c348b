//! `parbaked audit verify`.

use std::path::PathBuf;

use parbake_node::terminal::failure::{CliError, CliResult, Kind};
use parbake_node::terminal::output;
use parbake_service::audit::{self, AuditError};
use serde_json::json;

use super::Context;

/// Work with audit logs
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Check that no line of a log was changed, removed or put in
    ///
    /// Lines cut off the end leave no trace in the log itself: compare the last hash with one kept
    /// elsewhere, with --head. `parbaked status` tells it while the service runs.
    Verify {
        /// The log
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// A hash that must be that of a line of this log's end
        #[arg(long, value_name = "HASH")]
        head: Option<String>,
    },
}

/// Checks, and prints how many lines there are and the hash of the last.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let Verb::Verify { file, head } = &args.verb;
    let found = audit::verify(file).map_err(|error| match error {
        error @ AuditError::Broken { .. } => CliError::new(Kind::Refused, error),
        AuditError::File { ref source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            CliError::new(Kind::NotFound, error)
        }
        error => CliError::new(Kind::User, error),
    })?;
    if let Some(head) = head
        && *head != found.head
    {
        let message = format!("the log ends with {}, not with {head}", found.head);
        return Err(CliError::new(Kind::Refused, message));
    }
    if context.json() {
        return output::json(&json!({
            "lines": found.lines,
            "head": found.head,
            "tornBytes": found.torn_bytes,
        }));
    }
    output::line(&format!("{} lines, {}", found.lines, found.head))
}
