//! `parbake sbom`: what software is in a template.

use parbake_builder::sbom::Format as Sbom;
use serde_json::json;

use super::error::CliResult;
use super::{Context, Format, guest, output, push, trust};

/// Show what software is in a template, from the package databases in it
///
/// --format spdx (2.3) and --format cyclonedx (1.6) write the document that `push --attest`
/// attaches; without, a list. What no package manager knows of is not found.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
}

/// Prints the list or the document.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    let inventory = trust::inventory(context, &store, &template)?;
    let format = match context.global.format {
        Format::Spdx => Some(Sbom::Spdx),
        Format::Cyclonedx => Some(Sbom::CycloneDx),
        Format::Text | Format::Json => None,
    };
    if let Some(format) = format {
        let created = push::source_date_epoch()?.unwrap_or(0);
        return output::json(&format.write(&template, &inventory, created));
    }
    let urls: Vec<String> =
        inventory.packages.iter().map(|package| package.url(&inventory)).collect();
    if context.json() {
        return output::json(&json!({
            "template": template.digest,
            "packages": urls,
            "unread": inventory.unread,
        }));
    }
    urls.iter().try_for_each(|url| output::line(url))
}
