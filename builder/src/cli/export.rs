//! `parbake export`: a template as an OCI image layout.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use parbake_cache::publish::{PublishError, PublishOptions};
use parbake_cache::{Digest, TemplateName};
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::progress::bytes;
use super::trust::StatementArgs;
use super::{Context, guest, interrupt, output, push, remote};

/// Write a template with its snapshots to an archive or a directory
///
/// The result is an OCI image layout: `skopeo copy` takes it anywhere, and `import` takes it back.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// A tar archive; or a directory, if it is there and empty or ends in a slash
    #[arg(short, long, value_name = "FILE|DIR/")]
    output: PathBuf,
    /// Leave the snapshots out
    #[arg(long)]
    no_snapshots: bool,
    #[command(flatten)]
    statements: StatementArgs,
}

/// Exports.
pub fn run(context: &Context, args: &Args) -> CliResult {
    interrupt::watch();
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    let name = match &template.name {
        Some(name) => name.clone(),
        None => nameless(&template.digest)?,
    };
    let options = PublishOptions {
        created: push::source_date_epoch()?,
        snapshots: !args.no_snapshots,
        ..PublishOptions::default()
    };
    let mut published: Vec<Digest> = Vec::new();
    if !args.no_snapshots {
        let snapshots = store.snapshots(&template.digest).map_err(guest::store_error)?;
        published.extend(snapshots.iter().map(|(digest, _)| *digest));
    }
    let statements = args.statements.statements(context, &store, &template, &published)?;
    let mut step = context.progress.step(format!("export {}", template.label()));
    step.update("packing");
    let mut publication =
        store.publish(&template.digest, &options).map_err(|error| match error {
            PublishError::Store(error) => guest::store_error(error),
            PublishError::Artifact(error) => remote::artifact_error(error),
        })?;
    publication.attach(&statements, &name);
    step.update("writing");
    let out = &args.output;
    if is_directory(out) {
        publication.export_directory(out, &name).map_err(guest::store_error)?;
    } else {
        publication.export_archive(out, &name).map_err(guest::store_error)?;
    }
    let size: u64 = publication.blobs.iter().map(|blob| blob.descriptor.size).sum();
    step.done(format!("{} in {}", bytes(size), out.display()));
    let digest = publication.index.descriptor.digest;
    if context.json() {
        return output::json(&json!({
            "name": name,
            "template": template.digest,
            "digest": digest,
            "output": out,
            "bytes": size,
            "snapshots": publication.manifests.len().saturating_sub(1),
        }));
    }
    output::line(&digest.to_string())
}

fn is_directory(path: &Path) -> bool {
    path.is_dir() || path.as_os_str().as_bytes().ends_with(b"/")
}

/// A layout's entries have names; so gets what has none here.
fn nameless(digest: &Digest) -> CliResult<TemplateName> {
    let hex: String = digest.hex().chars().take(12).collect();
    format!("template:{hex}").parse().map_err(|error| CliError::new(Kind::Internal, error))
}
