//! `parbake completions` and `parbake man`: made from the command line's own definition.

use std::path::PathBuf;

use super::error::{Classify, CliResult, Kind};

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

/// Prints the script.
pub fn completions(args: &CompletionsArgs) -> CliResult {
    clap_complete::generate(
        args.shell,
        &mut super::command(),
        "parbake",
        &mut std::io::stdout().lock(),
    );
    Ok(())
}

/// Writes `parbake.1` and one page for every verb.
pub fn man(args: &ManArgs) -> CliResult {
    std::fs::create_dir_all(&args.directory).kind(Kind::User)?;
    clap_mangen::generate_to(super::command(), &args.directory).kind(Kind::User)
}
