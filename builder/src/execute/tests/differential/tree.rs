//! A directory as lines, one for each file, that are the same wherever it lies.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use parbake_cache::Digest;

use crate::execute::layer::xattrs;

/// What of `root` is not as in `base`: `-` gone, `+` there or changed.
pub fn difference(base: &Path, root: &Path) -> String {
    let (before, after) = (lines(base), lines(root));
    let mut out = String::new();
    for path in before.keys().filter(|path| !after.contains_key(*path)) {
        out.push_str(&format!("- {path}\n"));
    }
    for (path, line) in &after {
        if before.get(path) != Some(line) {
            out.push_str(&format!("+ {path} {line}\n"));
        }
    }
    out
}

fn lines(root: &Path) -> BTreeMap<String, String> {
    let mut names: BTreeMap<(u64, u64), String> = BTreeMap::new();
    let mut out = BTreeMap::new();
    walk(root, Path::new("/"), &mut names, &mut out);
    out
}

fn walk(
    root: &Path,
    path: &Path,
    names: &mut BTreeMap<(u64, u64), String>,
    out: &mut BTreeMap<String, String>,
) {
    let full = root.join(path.strip_prefix("/").unwrap());
    let meta = fs::symlink_metadata(&full).unwrap();
    let kind = meta.file_type();
    let shown = path.to_string_lossy().into_owned();
    let mut line = format!("{:04o} {}:{}", meta.mode() & 0o7777, meta.uid(), meta.gid());
    if kind.is_dir() {
        line = format!("directory {line}");
    } else if kind.is_symlink() {
        let target = fs::read_link(&full).unwrap();
        line = format!("link {}:{} → {}", meta.uid(), meta.gid(), target.display());
    } else if kind.is_file() {
        let bytes = fs::read(&full).unwrap();
        line = match std::str::from_utf8(&bytes) {
            Ok(text) if bytes.len() < 400 => format!("file {line} {text:?}"),
            _ => format!("file {line} {} {}", bytes.len(), Digest::of(&bytes).short()),
        };
    } else if kind.is_fifo() {
        line = format!("fifo {line}");
    } else if kind.is_char_device() || kind.is_block_device() {
        line = format!("device {line} {:x}", meta.rdev());
    }
    if !kind.is_dir() && meta.nlink() > 1 {
        let first = names.entry((meta.dev(), meta.ino())).or_insert_with(|| shown.clone());
        if *first != shown {
            line.push_str(&format!(" = {first}"));
        }
    }
    for (name, value) in xattrs(&full).unwrap() {
        line.push_str(&format!(" {}={:02x?}", String::from_utf8_lossy(&name), value));
    }
    out.insert(shown, line);
    if kind.is_dir() {
        let mut children: Vec<_> =
            fs::read_dir(&full).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        children.sort();
        for name in children {
            walk(root, &path.join(name), names, out);
        }
    }
}

/// Lines only one side has.
pub fn line_difference(expected: &str, found: &str) -> String {
    let (left, right): (Vec<&str>, Vec<&str>) =
        (expected.lines().collect(), found.lines().collect());
    let mut out = String::new();
    for line in left.iter().filter(|line| !right.contains(line)) {
        out.push_str(&format!("- {line}\n"));
    }
    for line in right.iter().filter(|line| !left.contains(line)) {
        out.push_str(&format!("+ {line}\n"));
    }
    if out.is_empty() && expected != found {
        out.push_str("the same lines, in another order or number\n");
    }
    out
}
