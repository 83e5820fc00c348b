//! `parbake ls`: the templates in the store.

use parbake_builder::template::Template;
use serde_json::json;

use super::error::{Classify, CliResult, Kind};
use super::progress::bytes;
use super::{Context, output};

/// List the templates in the store
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints one row for each tag.
pub fn run(context: &Context, _args: &Args) -> CliResult {
    let store = context.store()?;
    let mut rows = Vec::new();
    let mut documents = Vec::new();
    for (name, digest) in store.tags().kind(Kind::User)? {
        if context.global.quiet {
            output::line(&digest.to_string())?;
            continue;
        }
        let template = match Template::load(&store, Some(name.clone()), digest) {
            Ok(template) => template,
            Err(error) => {
                eprintln!("warning: {name}: {error}");
                continue;
            }
        };
        let snapshots = store.snapshots(&digest).kind(Kind::User)?;
        let machine = template.manifest.machine;
        rows.push(vec![
            name.to_string(),
            digest.short(),
            bytes(template.manifest.rootfs.size),
            template.kernel.release.clone(),
            format!("{} × {} MiB", machine.vcpus, machine.memory_mib),
            if snapshots.is_empty() { "no".to_owned() } else { snapshots.len().to_string() },
        ]);
        documents.push(json!({
            "name": name.to_string(),
            "digest": digest,
            "rootfsBytes": template.manifest.rootfs.size,
            "kernel": template.kernel.release,
            "machine": machine,
            "snapshots": snapshots.iter().map(|(digest, _)| digest).collect::<Vec<_>>(),
        }));
    }
    if context.global.quiet {
        return Ok(());
    }
    if context.json() {
        return output::json(&documents);
    }
    output::table(&["TEMPLATE", "DIGEST", "DISK", "KERNEL", "MACHINE", "BAKED"], &rows)
}
