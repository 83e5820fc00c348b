//! `parbake history`: how a template came to be.

use serde_json::json;

use super::error::CliResult;
use super::progress::bytes;
use super::{Context, guest, output};

/// Show the layers a template was built from, the newest first
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// Do not shorten what made a layer
    #[arg(long)]
    no_trunc: bool,
}

/// Long enough to recognise a step by.
const SHORT: usize = 60;

/// Prints one row for each layer.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    let source = &template.manifest.source;
    if context.json() {
        return output::json(&json!({
            "template": template.label(),
            "digest": template.digest,
            "source": source.reference,
            "manifest": source.manifest,
            "layers": source.layers.iter().rev().collect::<Vec<_>>(),
        }));
    }
    let mut rows = Vec::new();
    for (index, layer) in source.layers.iter().enumerate().rev() {
        let made_by = layer.created_by.as_deref().unwrap_or("-");
        let made_by = made_by.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown = if args.no_trunc || made_by.chars().count() <= SHORT {
            made_by
        } else {
            made_by.chars().take(SHORT - 1).chain(['…']).collect()
        };
        let hex = layer.diff_id.split_once(':').map_or(&*layer.diff_id, |(_, hex)| hex);
        rows.push(vec![
            (index + 1).to_string(),
            hex.chars().take(12).collect(),
            bytes(layer.size),
            layer.cost.map_or_else(|| "?".to_owned(), |cost| bytes(cost.live_bytes)),
            shown,
        ]);
    }
    context.progress.note(&format!("{} from {}", template.label(), source.reference));
    output::table(&["LAYER", "DIFF ID", "TAR", "ON DISK", "MADE BY"], &rows)
}
