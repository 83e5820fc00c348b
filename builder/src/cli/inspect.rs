//! `parbake inspect`: everything known about one template.

use serde_json::json;

use super::error::{Classify, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, output};

/// Show everything known about a template
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
}

/// Prints the template, its kernel and its snapshots.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let template = guest::find(&store, &args.template)?;
    let snapshots = store.snapshots(&template.digest).kind(Kind::User)?;
    if context.json() {
        return output::json(&json!({
            "name": template.name.as_ref().map(ToString::to_string),
            "digest": template.digest,
            "template": template.manifest,
            "kernel": template.kernel,
            "snapshots": snapshots
                .iter()
                .map(|(digest, manifest)| json!({ "digest": digest, "manifest": manifest }))
                .collect::<Vec<_>>(),
        }));
    }
    let manifest = &template.manifest;
    let process = &manifest.process;
    let mut rows = vec![
        ("template", template.label()),
        ("digest", template.digest.to_string()),
        ("source", manifest.source.reference.clone()),
        ("disk", format!("{} ({})", bytes(manifest.rootfs.size), manifest.rootfs.digest)),
        (
            "kernel",
            format!(
                "{} ({} {})",
                template.kernel.release, template.kernel.package, template.kernel.version
            ),
        ),
        (
            "machine",
            format!("{} vCPU, {} MiB", manifest.machine.vcpus, manifest.machine.memory_mib),
        ),
        ("user", if process.user.is_empty() { "root".to_owned() } else { process.user.clone() }),
        (
            "directory",
            if process.working_dir.is_empty() {
                "/".to_owned()
            } else {
                process.working_dir.clone()
            },
        ),
        ("entrypoint", format!("{:?}", process.entrypoint)),
        ("command", format!("{:?}", process.cmd)),
    ];
    for entry in &process.env {
        rows.push(("env", entry.clone()));
    }
    for layer in &manifest.source.layers {
        let made_by = layer.created_by.as_deref().unwrap_or("");
        rows.push(("layer", format!("{}  {}  {made_by}", layer.diff_id, bytes(layer.size))));
    }
    for (digest, snapshot) in &snapshots {
        rows.push((
            "snapshot",
            format!(
                "{}  {} vCPU, {} MiB  {} {}  generation {}",
                digest.short(),
                snapshot.machine.vcpus,
                snapshot.machine.memory_mib,
                snapshot.compat.cpu_vendor,
                snapshot.compat.kvm_kind,
                snapshot.generation
            ),
        ));
    }
    for (name, value) in rows {
        output::line(&format!("{name:<12}{value}"))?;
    }
    Ok(())
}
