//! `parbake rm`: take a template's name away, and what nothing needs any more with it.

use parbake_cache::TemplateName;
use serde_json::json;

use super::error::{Classify, CliError, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, output};

/// Remove templates, and every object that nothing else needs
///
/// What a running sandbox or a build uses stays until it is done.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The templates' names
    #[arg(value_name = "TEMPLATE", required = true)]
    templates: Vec<String>,
}

/// Removes the tags, then collects.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let mut names = Vec::new();
    for text in &args.templates {
        let name: TemplateName = text.parse().kind(Kind::Usage)?;
        // All are looked up before any is removed.
        let template = guest::find(&store, text)?;
        if template.name.is_none() {
            return Err(CliError::new(Kind::Usage, format!("{text} is a digest, not a name"))
                .hint("`parbake ls` shows the names"));
        }
        names.push(name);
    }
    for name in &names {
        store.untag(name).map_err(guest::store_error)?;
    }
    let report = store.collect(None).map_err(guest::store_error)?;
    if context.json() {
        let removed: Vec<String> = names.iter().map(ToString::to_string).collect();
        return output::json(&json!({ "removed": removed, "freedBytes": report.freed_bytes }));
    }
    for name in names {
        output::line(&name.to_string())?;
    }
    context.progress.note(&format!("freed {}", bytes(report.freed_bytes)));
    Ok(())
}
