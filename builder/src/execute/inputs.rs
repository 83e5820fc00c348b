//! What a step depends on, as named digests: the cache's key and the answer to "why again?".

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use parbake_recipes::glob::PatternSet;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::copy::Source;
use super::layer::xattrs;

/// Format of the key; a change of what a step's result looks like changes it.
const VERSION: &str = "parbake step 1";

/// Files named one by one in [`Inputs`]; beyond, all others together are one input.
const NAMED_FILES: usize = 4096;

/// A step's inputs in the order in which a difference is reported.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inputs(Vec<(String, Digest)>);

impl Inputs {
    pub fn add(&mut self, name: impl Into<String>, content: &[u8]) {
        self.0.push((name.into(), Digest::of(content)));
    }

    pub fn add_digest(&mut self, name: impl Into<String>, digest: Digest) {
        self.0.push((name.into(), digest));
    }

    /// The key of the step's result.
    pub fn key(&self) -> Digest {
        let mut text = VERSION.to_owned();
        for (name, digest) in &self.0 {
            text.push_str(&format!("\n{}:{name}={digest}", name.len()));
        }
        Digest::of(text.as_bytes())
    }

    /// The first input that differs from last time, as a sentence.
    pub fn difference(&self, before: &Self) -> String {
        let known = |inputs: &Self, name: &str| {
            inputs.0.iter().find(|(known, _)| known == name).map(|(_, digest)| *digest)
        };
        for (name, digest) in &self.0 {
            match known(before, name) {
                None => return format!("{name} is new"),
                Some(old) if old != *digest => return format!("{name} changed"),
                Some(_) => {}
            }
        }
        match before.0.iter().find(|(name, _)| known(self, name).is_none()) {
            Some((name, _)) => format!("{name} is gone"),
            None => "its result is no longer in the cache".to_owned(),
        }
    }
}

/// Adds everything a copy of `selected` would bring, by content and never by time.
pub(crate) fn add_files(
    inputs: &mut Inputs,
    source: &Source<'_>,
    selected: &[PathBuf],
    exclude: &PatternSet,
) -> io::Result<()> {
    let mut files = Vec::new();
    for path in selected {
        let from = super::rootpath::resolve(source.root, path)?;
        walk(source, &from, path, &PathBuf::new(), exclude, &mut files)?;
    }
    let rest = files.split_off(files.len().min(NAMED_FILES));
    for (name, digest) in files {
        inputs.add_digest(format!("file {name}"), digest);
    }
    if !rest.is_empty() {
        let mut hash = Sha256::new();
        for (name, digest) in &rest {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(digest.as_bytes());
        }
        let digest = Digest::from_bytes(hash.finalize().into());
        inputs.add_digest(format!("{} more files", rest.len()), digest);
    }
    Ok(())
}

fn walk(
    source: &Source<'_>,
    from: &Path,
    named: &Path,
    relative: &Path,
    exclude: &PatternSet,
    files: &mut Vec<(String, Digest)>,
) -> io::Result<()> {
    let meta = fs::symlink_metadata(from)?;
    let inside = from.strip_prefix(source.root).unwrap_or(from).to_string_lossy();
    let nested = !relative.as_os_str().is_empty();
    let wanted = !nested
        || !(source.ignore.matches(&inside) || exclude.matches(&relative.to_string_lossy()));
    if wanted {
        let mut hash = Sha256::new();
        let mut field = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(&meta.mode().to_le_bytes());
        if source.keep_owner {
            field(&meta.uid().to_le_bytes());
            field(&meta.gid().to_le_bytes());
        }
        for (name, value) in xattrs(from)? {
            field(&name);
            field(&value);
        }
        if meta.is_symlink() {
            field(fs::read_link(from)?.as_os_str().as_bytes());
        } else if meta.is_file() {
            field(&meta.len().to_le_bytes());
            let mut file = File::open(from)?;
            let mut buffer = vec![0; 1 << 16];
            loop {
                let read = file.read(&mut buffer)?;
                if read == 0 {
                    break;
                }
                hash.update(&buffer[..read]);
            }
        } else if !meta.is_dir() {
            field(&meta.rdev().to_le_bytes());
        }
        let name = if nested { named.join(relative) } else { named.to_owned() };
        files.push((
            name.to_string_lossy().into_owned(),
            Digest::from_bytes(hash.finalize().into()),
        ));
    }
    if meta.is_dir() && (wanted || source.ignore.has_exceptions() || exclude.has_exceptions()) {
        let mut names = fs::read_dir(from)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<Result<Vec<_>, _>>()?;
        names.sort();
        for name in names {
            let child = relative.join(&name);
            walk(source, &from.join(&name), named, &child, exclude, files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let mut before = Inputs::default();
        before.add("instruction", b"RUN a");
        before.add("file a", b"1");
        let mut now = before.clone();
        assert_eq!(now.difference(&before), "its result is no longer in the cache");
        now.add("file b", b"2");
        assert_eq!(now.difference(&before), "file b is new");
        assert_eq!(before.difference(&now), "file b is gone");
        let mut other = Inputs::default();
        other.add("instruction", b"RUN b");
        other.add("file a", b"1");
        assert_eq!(other.difference(&before), "instruction changed");
        assert_ne!(other.key(), before.key());
    }
}
