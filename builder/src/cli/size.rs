//! `parbake inspect --size`: which layers and which paths cost what.

use parbake_builder::contents::sizes::{PathSize, sizes};
use parbake_builder::template::Template;
use parbake_cache::Store;
use serde_json::{Value, json};

use super::error::{CliError, CliResult, Kind};
use super::progress::bytes;
use super::{Context, diff, guest, output};

/// Prints layers as the build recorded them, and paths as the root filesystem has them.
pub fn run(
    context: &Context,
    store: &Store,
    template: &Template,
    depth: usize,
    top: usize,
) -> CliResult {
    let _lease = store.lease(&[template.digest]).map_err(guest::store_error)?;
    let rootfs = diff::open(store, template)?;
    let sizes = sizes(&rootfs, depth, top).map_err(|error| CliError::new(Kind::Refused, error))?;
    let layers = &template.manifest.source.layers;
    if context.json() {
        let path = |path: &PathSize| {
            json!({
                "path": format!("/{}", String::from_utf8_lossy(&path.path)),
                "directory": path.directory,
                "bytes": path.bytes,
                "entries": path.entries,
            })
        };
        let shown = |paths: &[PathSize]| paths.iter().take(top).map(path).collect::<Vec<Value>>();
        return output::json(&json!({
            "template": template.label(),
            "digest": template.digest,
            "diskBytes": template.manifest.rootfs.size,
            "fileBytes": sizes.bytes,
            "entries": sizes.entries,
            "layers": layers,
            "paths": shown(&sizes.paths),
            "files": shown(&sizes.files),
        }));
    }
    output::line(&format!(
        "{}: {} of files in {} entries, on a disk of {}",
        template.label(),
        bytes(sizes.bytes),
        sizes.entries,
        bytes(template.manifest.rootfs.size)
    ))?;
    let unknown = || "?".to_owned();
    let rows: Vec<Vec<String>> = layers
        .iter()
        .enumerate()
        .map(|(index, layer)| {
            let made_by = layer.created_by.as_deref().unwrap_or("-");
            let made_by = made_by.split_whitespace().collect::<Vec<_>>().join(" ");
            vec![
                (index + 1).to_string(),
                layer.cost.map_or_else(unknown, |cost| bytes(cost.live_bytes)),
                layer.cost.map_or_else(unknown, |cost| bytes(cost.hidden_bytes)),
                layer.cost.map_or_else(unknown, |cost| cost.live_nodes.to_string()),
                bytes(layer.size),
                made_by.chars().take(60).collect(),
            ]
        })
        .collect();
    output::line("")?;
    output::table(&["LAYER", "ON DISK", "HIDDEN", "NODES", "TAR", "MADE BY"], &rows)?;
    let table = |heading: &str, paths: &[PathSize]| {
        let rows: Vec<Vec<String>> = paths
            .iter()
            .filter(|path| path.bytes > 0)
            .take(top)
            .map(|path| {
                let slash = if path.directory { "/" } else { "" };
                let text = format!("{}{slash}", diff::path_text(&path.path));
                vec![bytes(path.bytes), path.entries.to_string(), text]
            })
            .collect();
        output::line("")?;
        output::table(&["ON DISK", "ENTRIES", heading], &rows)
    };
    table("PATH", &sizes.paths)?;
    table("LARGEST FILE", &sizes.files)
}
