//! `parbake tag`: another name for a template.

use parbake_cache::TemplateName;
use serde_json::json;

use super::error::CliResult;
use super::{Context, guest, output};

/// Give a template another name
///
/// A name that something else has is taken from it. A name with a registry's host in it is where
/// `push` sends the template.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// The new name
    #[arg(value_name = "NAME")]
    name: TemplateName,
}

/// Tags.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    let before = store.tags().map_err(guest::store_error)?;
    let replaced = before.iter().find(|(name, _)| *name == args.name).map(|(_, digest)| *digest);
    store.tag(&args.name, &template.digest).map_err(guest::store_error)?;
    let replaced = replaced.filter(|digest| *digest != template.digest);
    if context.json() {
        return output::json(&json!({
            "name": args.name,
            "digest": template.digest,
            "replaced": replaced,
        }));
    }
    if let Some(digest) = replaced {
        context.progress.note(&format!("{} was {} until now", args.name, digest.short()));
    }
    output::line(&args.name.to_string())
}
