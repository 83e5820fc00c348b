//! `parbake completions`, `man` and `schema`: made from the program's own definitions.

use std::path::PathBuf;

use super::error::{Classify, CliResult, Kind};
use super::{output, progress};

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: clap_complete::Shell,
}

/// Print the JSON Schema of what other programs read or write
#[derive(Debug, clap::Args)]
pub struct SchemaArgs {
    /// Of what
    of: Schema,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Schema {
    /// Recipes (parbake.yaml)
    Recipe,
    /// The lines of --progress json
    Progress,
}

/// Prints a schema.
pub fn schema(args: &SchemaArgs) -> CliResult {
    let text = match args.of {
        Schema::Recipe => parbake_recipes::recipe::schema(),
        Schema::Progress => progress::schema(),
    };
    output::line(text.trim_end())
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
