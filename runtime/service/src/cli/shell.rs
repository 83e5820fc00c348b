//! `parbaked completions`, `man` and `openapi`: made from the program's own definitions.

use std::path::PathBuf;

use parbake_node::terminal::failure::{Classify, CliResult, Kind};
use parbake_node::terminal::output;

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Write the man pages into a directory
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// The directory
    directory: PathBuf,
}

/// Print the API's OpenAPI document
#[derive(Debug, clap::Args)]
pub struct OpenapiArgs {}

/// Prints the script.
pub fn completions(args: &CompletionsArgs) -> CliResult {
    let mut stdout = std::io::stdout().lock();
    clap_complete::generate(args.shell, &mut super::command(), "parbaked", &mut stdout);
    Ok(())
}

/// Writes `parbaked.1` and one page for every verb.
pub fn man(args: &ManArgs) -> CliResult {
    std::fs::create_dir_all(&args.directory).kind(Kind::User)?;
    clap_mangen::generate_to(super::command(), &args.directory).kind(Kind::User)
}

/// Prints the document.
pub fn openapi(_: &OpenapiArgs) -> CliResult {
    output::line(parbake_service::api::openapi().trim_end())
}
