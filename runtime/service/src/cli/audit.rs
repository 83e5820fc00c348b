//! `parbaked audit verify`.

use std::path::PathBuf;

use parbake_node::terminal::failure::{CliError, CliResult, Kind};
use parbake_node::terminal::output;
use parbake_service::audit::{self, AuditConfig, AuditError, Key};
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
    /// Check that no line of a log was changed, removed or put in, over all its files
    ///
    /// Lines cut off the end leave no trace in the log itself: the anchor has them, or compare the
    /// last hash with one kept elsewhere, with --head. `parbaked status` tells it while the service
    /// runs. Without a key, who can write the log can make all hashes anew.
    Verify {
        /// The log
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// A hash that must be that of a line of this log's end
        #[arg(long, value_name = "HASH")]
        head: Option<String>,
        /// The key it was written with
        #[arg(long, value_name = "FILE")]
        key_file: Option<PathBuf>,
        /// Its anchor; absent: beside the log if there is a key
        #[arg(long, value_name = "FILE")]
        anchor: Option<PathBuf>,
        /// Finished files may have been put away: what is left may begin in the middle
        #[arg(long)]
        partial: bool,
    },
}

/// Checks, and prints how many lines there are and the hash of the last.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let Verb::Verify { file, head, key_file, anchor, partial } = &args.verb;
    let key = key_file.as_deref().map(Key::read).transpose();
    let key = key.map_err(|error| CliError::new(Kind::User, error))?;
    let beside = || key.as_ref().map(|_| PathBuf::from(format!("{}.anchor", file.display())));
    let anchor = anchor.clone().or_else(beside);
    let config = AuditConfig { key, anchor, ..AuditConfig::new(file) };
    let found = audit::verify(&config).map_err(|error| match error {
        error @ (AuditError::Broken { .. } | AuditError::Anchor { .. }) => {
            CliError::new(Kind::Refused, error)
        }
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
    if found.first > 1 && !partial {
        let message =
            format!("the log begins with line {}: what was before is missing", found.first);
        return Err(
            CliError::new(Kind::Refused, message).hint("if it was put away in order: --partial")
        );
    }
    if context.json() {
        return output::json(&json!({
            "firstLine": found.first,
            "lines": found.lines,
            "files": found.files,
            "head": found.head,
            "tornBytes": found.torn_bytes,
        }));
    }
    output::line(&format!("{} lines, {}", found.lines, found.head))
}
