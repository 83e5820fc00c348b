//! What a build depends on besides its text: the context's content, and bases by digest.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use sha2::{Digest as _, Sha256};

use crate::dockerfile::{BaseImage, BaseImages};
use crate::glob::PatternSet;
use crate::lock::Lock;
use crate::plan::Platform;
use crate::{Location, RecipeError};

/// Hashes a build context: names, kinds, permission bits, link targets and contents of everything
/// the ignore patterns leave, in name order; never times, owners or the directory's own name.
///
/// # Errors
/// When something in it cannot be read.
pub fn context_digest(directory: &Path, ignore: &[String]) -> Result<Digest, RecipeError> {
    let patterns = PatternSet::new(ignore).map_err(|error| {
        Location::line(".dockerignore", 0).error(error.to_string(), "correct it")
    })?;
    let mut hash = Sha256::new();
    walk(directory, "", &patterns, &mut hash)?;
    Ok(Digest::from_bytes(hash.finalize().into()))
}

fn walk(
    directory: &Path,
    prefix: &str,
    ignore: &PatternSet,
    hash: &mut Sha256,
) -> Result<(), RecipeError> {
    let failed = |path: PathBuf| move |source| RecipeError::Read { path, source };
    let mut entries = fs::read_dir(directory)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .map_err(failed(directory.to_owned()))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let relative = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        let excluded = ignore.matches(&relative);
        let meta = fs::symlink_metadata(&path).map_err(failed(path.clone()))?;
        if excluded && !(meta.is_dir() && ignore.has_exceptions()) {
            continue;
        }
        let mut field = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        if !excluded {
            field(entry.file_name().as_bytes());
            field(relative.as_bytes());
            field(&(meta.mode() & 0o170_000 | meta.permissions().mode() & 0o7777).to_le_bytes());
        }
        if meta.is_dir() {
            walk(&path, &relative, ignore, hash)?;
        } else if meta.is_symlink() {
            let target = fs::read_link(&path).map_err(failed(path.clone()))?;
            field(target.as_os_str().as_bytes());
        } else if meta.is_file() {
            field(&meta.len().to_le_bytes());
            let mut file = fs::File::open(&path).map_err(failed(path.clone()))?;
            let mut buffer = vec![0; 1 << 16];
            loop {
                let read = file.read(&mut buffer).map_err(failed(path.clone()))?;
                if read == 0 {
                    break;
                }
                hash.update(&buffer[..read]);
            }
        }
    }
    Ok(())
}

/// Remembers what bases resolved to, for the lock file, and asks each only once.
pub struct Recorder<'a> {
    inner: &'a mut dyn BaseImages,
    seen: BTreeMap<(String, Platform), BaseImage>,
}

impl<'a> Recorder<'a> {
    /// Around another resolver.
    pub fn new(inner: &'a mut dyn BaseImages) -> Self {
        Self { inner, seen: BTreeMap::new() }
    }

    /// Reference, platform and digest of every base asked for, sorted.
    pub fn bases(&self) -> impl Iterator<Item = (&str, &Platform, &str)> {
        self.seen
            .iter()
            .map(|((name, platform), image)| (name.as_str(), platform, image.digest.as_str()))
    }
}

impl BaseImages for Recorder<'_> {
    fn resolve(&mut self, reference: &str, platform: &Platform) -> Result<BaseImage, String> {
        let key = (reference.to_owned(), platform.clone());
        if let Some(known) = self.seen.get(&key) {
            return Ok(known.clone());
        }
        let image = self.inner.resolve(reference, platform)?;
        self.seen.insert(key, image.clone());
        Ok(image)
    }
}

/// Kinds of image references whose content is on this machine; everything else is in a registry.
pub const LOCAL_KINDS: [&str; 7] =
    ["oci:", "oci-archive:", "docker-archive:", "tar:", "dir:", "ext4:", "template:"];

/// A registry's reference by digest instead of by tag; what is on this machine, and what has a
/// digest already, as it is.
#[must_use]
pub fn by_digest(reference: &str, digest: &str) -> String {
    let local = LOCAL_KINDS.iter().any(|kind| reference.starts_with(kind));
    if local || digest.is_empty() || reference.contains('@') {
        return reference.to_owned();
    }
    // A colon before the last slash is a port's.
    let slash = reference.rfind('/').map_or(0, |slash| slash + 1);
    let name = reference[slash..].find(':').map_or(reference, |colon| &reference[..slash + colon]);
    format!("{name}@{digest}")
}

/// Resolves through a lock file: the recorded digest or nothing.
pub struct Locked<'a> {
    inner: &'a mut dyn BaseImages,
    lock: &'a Lock,
}

impl<'a> Locked<'a> {
    /// Around another resolver.
    pub fn new(inner: &'a mut dyn BaseImages, lock: &'a Lock) -> Self {
        Self { inner, lock }
    }
}

impl BaseImages for Locked<'_> {
    fn resolve(&mut self, reference: &str, platform: &Platform) -> Result<BaseImage, String> {
        let Some(digest) = self.lock.base(reference, platform) else {
            return Err("it is not in the lock file; run `parbake recipe lock`".to_owned());
        };
        let image = self.inner.resolve(&by_digest(reference, digest), platform)?;
        if image.digest != digest {
            return Err(format!(
                "it is {} and the lock file says {digest}; run `parbake recipe lock` to accept it",
                image.digest
            ));
        }
        Ok(image)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_give_way_to_digests_in_registries_only() {
        for (reference, pinned) in [
            ("debian", "debian@sha256:1"),
            ("host:5000/a/b:c", "host:5000/a/b@sha256:1"),
            ("docker://host:5000/a", "docker://host:5000/a@sha256:1"),
            ("a@sha256:0", "a@sha256:0"),
            ("dir:/x", "dir:/x"),
            ("oci:./x:y", "oci:./x:y"),
            ("template:a:1", "template:a:1"),
            // A repository may be called so.
            ("host/oci:1", "host/oci@sha256:1"),
        ] {
            assert_eq!(by_digest(reference, "sha256:1"), pinned);
        }
        assert_eq!(by_digest("debian:12", ""), "debian:12");
    }

    #[test]
    fn only_content_counts() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for dir in [&a, &b] {
            fs::create_dir(dir.path().join("d")).unwrap();
            fs::write(dir.path().join("d/x"), "1").unwrap();
            fs::write(dir.path().join("skip.md"), dir.path().to_string_lossy().as_bytes()).unwrap();
        }
        let ignore = vec!["*.md".to_owned()];
        let digest = |dir: &tempfile::TempDir| context_digest(dir.path(), &ignore).unwrap();
        assert_eq!(digest(&a), digest(&b));
        fs::set_permissions(b.path().join("d/x"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_ne!(digest(&a), digest(&b));
        fs::set_permissions(b.path().join("d/x"), fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(b.path().join("d/x"), "2").unwrap();
        assert_ne!(digest(&a), digest(&b));
    }
}
