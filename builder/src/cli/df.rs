//! `parbake df`: what the store takes.

use std::collections::{BTreeMap, HashSet};
use std::os::unix::fs::MetadataExt;

use parbake_builder::execute;
use parbake_cache::{Digest, Store};
use serde_json::json;

use super::build::build_directory;
use super::error::CliResult;
use super::progress::bytes;
use super::{Context, guest, output};

/// Show what the store takes, and what each template in it does
#[derive(Debug, clap::Args)]
pub struct Args {}

/// What a template takes.
struct Cost {
    names: Vec<String>,
    disk: u64,
    alone: u64,
    snapshots: usize,
}

/// Prints totals and one row for each template.
pub fn run(context: &Context, _args: &Args) -> CliResult {
    let store = context.store()?;
    let usage = store.usage().map_err(guest::store_error)?;
    let costs = costs(&store)?;
    let free = store.free_bytes();
    if context.json() {
        return output::json(&json!({
            "store": store.root(),
            "usage": usage,
            "freeBytes": free,
            "buildCacheBytes": execute::disk_bytes(&build_directory(&store)),
            "templates": costs.iter().map(|(digest, cost)| json!({
                "digest": digest,
                "names": cost.names,
                "diskBytes": cost.disk,
                "ownBytes": cost.alone,
                "snapshots": cost.snapshots,
            })).collect::<Vec<_>>(),
        }));
    }
    let rows: Vec<Vec<String>> = costs
        .iter()
        .map(|(digest, cost)| {
            vec![
                digest.short(),
                bytes(cost.disk),
                bytes(cost.alone),
                cost.snapshots.to_string(),
                cost.names.join(", "),
            ]
        })
        .collect();
    output::table(&["DIGEST", "ON DISK", "OF THAT ITS OWN", "SNAPSHOTS", "TEMPLATE"], &rows)?;
    for (name, value) in [
        ("store", store.root().display().to_string()),
        ("objects", format!("{} and {} images", usage.objects, usage.images)),
        (
            "on disk",
            format!("{} (sparse; {} in full)", bytes(usage.disk_bytes), bytes(usage.logical_bytes)),
        ),
        ("under way", bytes(usage.staging_bytes)),
        ("to prune", bytes(usage.reclaimable_bytes)),
        (
            "builds",
            format!("{} in the build cache", bytes(execute::disk_bytes(&build_directory(&store)))),
        ),
        ("free", bytes(free)),
    ] {
        output::line(&format!("{name:<12}{value}"))?;
    }
    Ok(())
}

/// Each tagged template's disk space, and how much of it no other template shares.
fn costs(store: &Store) -> CliResult<Vec<(Digest, Cost)>> {
    let mut names: BTreeMap<Digest, Vec<String>> = BTreeMap::new();
    for (name, digest) in store.tags().map_err(guest::store_error)? {
        names.entry(digest).or_default().push(name.to_string());
    }
    let mut parts: Vec<(Digest, HashSet<Digest>)> = Vec::new();
    let mut sharers: BTreeMap<Digest, usize> = BTreeMap::new();
    for digest in names.keys() {
        let closure = store.closure(&[*digest]).map_err(guest::store_error)?;
        for part in &closure {
            *sharers.entry(*part).or_default() += 1;
        }
        parts.push((*digest, closure));
    }
    let mut costs = Vec::new();
    for (digest, closure) in parts {
        let (mut disk, mut alone) = (0, 0);
        for part in &closure {
            let size = disk_bytes(store, part);
            disk += size;
            if sharers[part] == 1 {
                alone += size;
            }
        }
        let snapshots = store.snapshots(&digest).map_or(0, |snapshots| snapshots.len());
        let names = names.remove(&digest).unwrap_or_default();
        costs.push((digest, Cost { names, disk, alone, snapshots }));
    }
    costs.sort_by(|a, b| a.1.names.cmp(&b.1.names));
    Ok(costs)
}

/// A part's disk space; one that is mentioned but not here takes none.
fn disk_bytes(store: &Store, part: &Digest) -> u64 {
    let path = store.path(part).ok();
    let metadata = path.and_then(|path| std::fs::metadata(path).ok());
    metadata.map_or(0, |metadata| metadata.blocks() * 512)
}
