//! `parbake diff`: what changed between two templates.

use std::collections::BTreeMap;

use parbake_builder::contents::RootFs;
use parbake_builder::contents::difference::{Change, Difference, Node, compare};
use parbake_builder::template::Template;
use parbake_cache::Store;
use serde_json::{Value, json};

use super::error::{CliError, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, output};

/// Show what changed between two templates: files, their sizes, and the configuration
///
/// Each line is a path that was added (A), removed (D) or changed (M), with what changed and how
/// its size did. A directory that is in only one of the two is one line. Extended attributes, device
/// numbers and hard links are not compared.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The first template: a name or a digest
    #[arg(value_name = "BEFORE")]
    before: String,
    /// The second template: a name or a digest
    #[arg(value_name = "AFTER")]
    after: String,
    /// Changed times alone count, too
    #[arg(long)]
    times: bool,
    /// Exit with code 1 if there is a difference
    #[arg(long)]
    exit_code: bool,
}

/// Compares.
pub fn run(context: &Context, args: &Args) -> CliResult<u8> {
    let store = context.store()?;
    let before = guest::find(&store, &args.before)?;
    let after = guest::find(&store, &args.after)?;
    let lease = store.lease(&[before.digest, after.digest]).map_err(guest::store_error)?;
    let config = config_changes(&config(&before), &config(&after));
    let same_image = before.manifest.rootfs == after.manifest.rootfs;
    let mut files = if same_image {
        Vec::new()
    } else {
        let step = context.progress.step("compare the root filesystems");
        let open = |template: &Template| open(&store, template);
        let files = compare(&open(&before)?, &open(&after)?)
            .map_err(|error| CliError::new(Kind::Refused, error))?;
        step.done(format!("{} paths differ", files.len()));
        files
    };
    drop(lease);
    let all = files.len();
    if !args.times {
        files.retain(|difference| match &difference.change {
            Change::Changed { what, .. } => what != &["time"],
            _ => true,
        });
    }
    let differs = !files.is_empty() || !config.is_empty();
    let code = u8::from(args.exit_code && differs);
    if context.json() {
        output::json(&json!({
            "before": before.digest,
            "after": after.digest,
            "sameRootfs": same_image,
            "files": files.iter().map(document).collect::<Vec<_>>(),
            "config": config.iter().map(|(key, (before, after))| {
                json!({ "key": key, "before": before, "after": after })
            }).collect::<Vec<_>>(),
        }))?;
        return Ok(code);
    }
    for difference in &files {
        output::line(&line(difference))?;
    }
    for (key, (before, after)) in &config {
        output::line(&format!("config {key}: {} → {}", shown(before), shown(after)))?;
    }
    if all > files.len() {
        let count = all - files.len();
        context.progress.note(&format!("{count} paths differ in their times alone (--times)"));
    }
    if !same_image && all == 0 {
        context.progress.note(
            "the images differ in what is not compared: extended attributes, device numbers, hard \
             links, or free space",
        );
    }
    Ok(code)
}

/// Opens a template's root filesystem.
pub fn open(store: &Store, template: &Template) -> CliResult<RootFs> {
    let path = store.path(&template.manifest.rootfs.digest).map_err(guest::store_error)?;
    RootFs::open(&path).map_err(|error| CliError::new(Kind::Refused, error))
}

/// A path for people: control characters escaped.
pub fn path_text(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let mut shown = String::from("/");
    for character in text.chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

fn line(difference: &Difference) -> String {
    let path = path_text(&difference.path);
    let one = |letter: char, sign: char, node: &Node| {
        let size = match (node.kind, node.entries) {
            ("directory", entries) if entries > 1 => {
                format!("/  {entries} entries, {sign}{}", bytes(node.bytes))
            }
            ("directory", _) => "/".to_owned(),
            ("file", _) => format!("  {sign}{}", bytes(node.bytes)),
            (kind, _) => format!("  {kind}"),
        };
        format!("{letter} {path}{size}")
    };
    match &difference.change {
        Change::Added(node) => one('A', '+', node),
        Change::Removed(node) => one('D', '-', node),
        Change::Changed { before, after, what } => {
            let mut details: Vec<String> = Vec::new();
            for word in what {
                details.push(match *word {
                    "type" => format!("{} → {}", before.kind, after.kind),
                    "content" if before.bytes == after.bytes => "content".to_owned(),
                    "content" => {
                        let grown = after.bytes >= before.bytes;
                        let by = after.bytes.abs_diff(before.bytes);
                        format!("content, {}{}", if grown { '+' } else { '-' }, bytes(by))
                    }
                    "mode" => format!("mode {:o} → {:o}", before.mode, after.mode),
                    "owner" => {
                        format!("owner {}:{} → {}:{}", before.uid, before.gid, after.uid, after.gid)
                    }
                    other => other.to_owned(),
                });
            }
            format!("M {path}  {}", details.join("; "))
        }
    }
}

fn document(difference: &Difference) -> Value {
    let node = |node: &Node| {
        json!({
            "type": node.kind,
            "bytes": node.bytes,
            "entries": node.entries,
            "mode": format!("{:04o}", node.mode),
            "uid": node.uid,
            "gid": node.gid,
            "mtime": node.mtime,
        })
    };
    let path = format!("/{}", String::from_utf8_lossy(&difference.path));
    match &difference.change {
        Change::Added(after) => json!({ "path": path, "change": "added", "after": node(after) }),
        Change::Removed(before) => {
            json!({ "path": path, "change": "removed", "before": node(before) })
        }
        Change::Changed { before, after, what } => json!({
            "path": path,
            "change": "changed",
            "what": what,
            "before": node(before),
            "after": node(after),
        }),
    }
}

/// Everything about a template that is not in its root filesystem.
fn config(template: &Template) -> Value {
    let manifest = &template.manifest;
    let process = &manifest.process;
    // By name: their order does not matter, and what changed is one variable.
    let env: BTreeMap<&str, &str> =
        process.env.iter().map(|entry| entry.split_once('=').unwrap_or((entry, ""))).collect();
    json!({
        "architecture": manifest.architecture,
        "machine": manifest.machine,
        "env": env,
        "user": process.user,
        "workingDir": process.working_dir,
        "entrypoint": process.entrypoint,
        "cmd": process.cmd,
        "stopSignal": process.stop_signal,
        "labels": manifest.labels,
        "kernel": {
            "package": template.kernel.package,
            "version": template.kernel.version,
            "release": template.kernel.release,
            "cmdline": template.kernel.cmdline,
            "agent": template.kernel.agent,
        },
        "source": { "reference": manifest.source.reference, "manifest": manifest.source.manifest },
        "diskBytes": manifest.rootfs.size,
    })
}

/// The leaves in which two documents differ.
fn config_changes(before: &Value, after: &Value) -> BTreeMap<String, (Value, Value)> {
    let mut changes = BTreeMap::new();
    collect("", before, after, &mut changes);
    changes
}

fn collect(
    key: &str,
    before: &Value,
    after: &Value,
    changes: &mut BTreeMap<String, (Value, Value)>,
) {
    if let (Value::Object(a), Value::Object(b)) = (before, after) {
        let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for name in keys {
            let below = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            let side = |fields: &serde_json::Map<String, Value>| {
                fields.get(name).cloned().unwrap_or(Value::Null)
            };
            collect(&below, &side(a), &side(b), changes);
        }
    } else if before != after {
        changes.insert(key.to_owned(), (before.clone(), after.clone()));
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "(none)".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_differs_leaf_by_leaf() {
        let before = json!({ "env": { "A": "1", "B": "2" }, "cmd": ["x"], "same": 1 });
        let after =
            json!({ "env": { "A": "1", "B": "3", "C": "4" }, "cmd": ["x", "y"], "same": 1 });
        let changes = config_changes(&before, &after);
        let keys: Vec<&str> = changes.keys().map(String::as_str).collect();
        assert_eq!(keys, ["cmd", "env.B", "env.C"]);
        assert_eq!(changes["env.C"], (Value::Null, json!("4")));
        assert!(config_changes(&before, &before).is_empty());
    }

    #[test]
    fn lines_say_what_changed() {
        let node = |kind, bytes, entries| Node {
            kind,
            bytes,
            entries,
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime: 0,
        };
        let line = |path: &[u8], change| line(&Difference { path: path.to_vec(), change });
        assert_eq!(line(b"a\nb", Change::Added(node("file", 2048, 1))), "A /a\\nb  +2.0 KiB");
        assert_eq!(
            line(b"opt", Change::Removed(node("directory", 10, 3))),
            "D /opt/  3 entries, -10 B"
        );
        let before = node("file", 100, 1);
        let after = Node { mode: 0o755, ..node("file", 90, 1) };
        let what = vec!["content", "mode"];
        assert_eq!(
            line(b"x", Change::Changed { before, after, what }),
            "M /x  content, -10 B; mode 644 → 755"
        );
    }
}
