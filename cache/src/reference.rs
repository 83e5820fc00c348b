//! References: the mutable part of the store. Tags, a template's snapshots, known kernels.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::durable;
use crate::error::StoreError;
use crate::lock::Mode;
use crate::name::TemplateName;
use crate::object::read_bounded;
use crate::store::Store;
use crate::template::SnapshotManifest;

/// More than any reference needs.
const MAX_REFERENCE_BYTES: u64 = 64 * 1024;
/// The fewest digits a digest may be cut to.
const MIN_PREFIX: usize = 6;

/// The content of a reference file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reference {
    pub(crate) key: String,
    pub(crate) digest: Digest,
}

impl Store {
    /// Gives a template a name, taking it from whatever had it.
    ///
    /// # Errors
    /// When the template or a part of it is missing, or the store cannot be written to.
    pub fn tag(&self, name: &TemplateName, digest: &Digest) -> Result<(), StoreError> {
        self.set_reference(&self.root().join("refs/tags"), &name.to_string(), digest)
    }

    /// Takes a name away and returns what had it. The template goes at the next collection,
    /// unless something else keeps it.
    ///
    /// # Errors
    /// When there is no such name.
    pub fn untag(&self, name: &TemplateName) -> Result<Digest, StoreError> {
        let directory = self.root().join("refs/tags");
        let key = name.to_string();
        let _lock = self.lock(Mode::Shared)?;
        let reference = self
            .reference(&directory, &key)?
            .ok_or_else(|| StoreError::UnknownName { name: key.clone() })?;
        remove(&keyed(&directory, &key))?;
        Ok(reference.digest)
    }

    /// All names and what they stand for, sorted by name.
    ///
    /// # Errors
    /// When a reference cannot be read.
    pub fn tags(&self) -> Result<Vec<(TemplateName, Digest)>, StoreError> {
        let mut tags = Vec::new();
        for (path, reference) in list(&self.root().join("refs/tags"))? {
            let name = reference.key.parse().map_err(|error: crate::name::ParseNameError| {
                StoreError::BadReference { path, what: error.to_string() }
            })?;
            tags.push((name, reference.digest));
        }
        tags.sort();
        Ok(tags)
    }

    /// Finds a template by name, by `sha256:` digest, or by the first digits of the digest of a
    /// tagged one.
    ///
    /// # Errors
    /// When nothing, or more than one template, fits.
    pub fn resolve(
        &self,
        name_or_digest: &str,
    ) -> Result<(Option<TemplateName>, Digest), StoreError> {
        let unknown = || StoreError::UnknownName { name: name_or_digest.to_owned() };
        if let Ok(digest) = name_or_digest.parse::<Digest>() {
            let tags = self.tags()?;
            let name = tags.into_iter().find(|(_, tagged)| *tagged == digest).map(|(name, _)| name);
            return match name {
                None if !self.has(&digest) => Err(unknown()),
                name => Ok((name, digest)),
            };
        }
        let parsed = name_or_digest.parse::<TemplateName>();
        if let Ok(name) = &parsed
            && let Some(found) =
                self.reference(&self.root().join("refs/tags"), &name.to_string())?
        {
            return Ok((parsed.ok(), found.digest));
        }
        let prefix = name_or_digest.strip_prefix("sha256:").unwrap_or(name_or_digest);
        if (MIN_PREFIX..64).contains(&prefix.len())
            && prefix.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        {
            let mut fitting = self.tags()?;
            fitting.retain(|(_, digest)| digest.hex().starts_with(prefix));
            let mut digests: Vec<_> = fitting.iter().map(|(_, digest)| *digest).collect();
            digests.sort_unstable();
            digests.dedup();
            match digests.len() {
                0 => {}
                1 => {
                    let (name, digest) = fitting.swap_remove(0);
                    return Ok((Some(name), digest));
                }
                count => {
                    return Err(StoreError::Ambiguous { prefix: prefix.to_owned(), count });
                }
            }
        }
        parsed?;
        Err(unknown())
    }

    /// Records that `snapshot` was baked from `template`.
    ///
    /// # Errors
    /// When either is missing, or the snapshot names another template.
    pub fn set_snapshot(&self, template: &Digest, snapshot: &Digest) -> Result<(), StoreError> {
        let manifest: SnapshotManifest = self.get_json(snapshot)?;
        if manifest.template != *template {
            let what = format!("it is a snapshot of {}, not of {template}", manifest.template);
            return Err(StoreError::Damaged { digest: *snapshot, what });
        }
        let directory = self.root().join("refs/snapshots").join(template.hex());
        durable::create_directory(&directory)?;
        self.set_reference(&directory, &snapshot.to_string(), snapshot)
    }

    /// A template's snapshots, newest first.
    ///
    /// # Errors
    /// When a reference or a manifest cannot be read.
    pub fn snapshots(
        &self,
        template: &Digest,
    ) -> Result<Vec<(Digest, SnapshotManifest)>, StoreError> {
        let directory = self.root().join("refs/snapshots").join(template.hex());
        let mut found = Vec::new();
        for (path, reference) in list(&directory)? {
            let made =
                fs::metadata(&path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            found.push((made, reference.digest, path));
        }
        found.sort_by(|a, b| b.cmp(a));
        let mut snapshots = Vec::new();
        for (_, digest, path) in found {
            match self.get_json(&digest) {
                Ok(manifest) => snapshots.push((digest, manifest)),
                // Given up meanwhile.
                Err(StoreError::Missing { .. }) if !path.exists() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(snapshots)
    }

    /// Forgets a snapshot; it goes at the next collection.
    ///
    /// # Errors
    /// When the template has no such snapshot.
    pub fn remove_snapshot(&self, template: &Digest, snapshot: &Digest) -> Result<(), StoreError> {
        let directory = self.root().join("refs/snapshots").join(template.hex());
        let _lock = self.lock(Mode::Shared)?;
        remove(&keyed(&directory, &snapshot.to_string())).map_err(|error| match error {
            StoreError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                StoreError::Missing { digest: *snapshot }
            }
            other => other,
        })
    }

    /// The kernel bundle known by `key` (what it was made from and with).
    ///
    /// # Errors
    /// When the reference cannot be read.
    pub fn kernel(&self, key: &str) -> Result<Option<Digest>, StoreError> {
        let reference = self.reference(&self.root().join("refs/kernels"), key)?;
        Ok(reference.map(|reference| reference.digest).filter(|digest| self.has(digest)))
    }

    /// All known kernel bundles as `(key, bundle)`, sorted by key.
    ///
    /// # Errors
    /// When a reference cannot be read.
    pub fn kernels(&self) -> Result<Vec<(String, Digest)>, StoreError> {
        let references = list(&self.root().join("refs/kernels"))?;
        let mut kernels: Vec<_> = references
            .into_iter()
            .map(|(_, reference)| (reference.key, reference.digest))
            .collect();
        kernels.sort();
        Ok(kernels)
    }

    /// Remembers a kernel bundle.
    ///
    /// # Errors
    /// When the bundle or a part of it is missing.
    pub fn set_kernel(&self, key: &str, digest: &Digest) -> Result<(), StoreError> {
        self.set_reference(&self.root().join("refs/kernels"), key, digest)
    }

    /// Forgets a kernel bundle; `false` when none was known by `key`.
    ///
    /// # Errors
    /// When the store cannot be written to.
    pub fn remove_kernel(&self, key: &str) -> Result<bool, StoreError> {
        let path = keyed(&self.root().join("refs/kernels"), key);
        let _lock = self.lock(Mode::Shared)?;
        if !path.exists() {
            return Ok(false);
        }
        remove(&path).map(|()| true)
    }

    /// Remembers what a tag at a registry stood for: a hint where packs may be found.
    pub(crate) fn remember_remote(
        &self,
        name: &TemplateName,
        index: &Digest,
    ) -> Result<(), StoreError> {
        let reference = Reference { key: name.to_string(), digest: *index };
        let bytes = serde_json::to_vec(&reference).expect("plain structures always encode");
        let scratch = self.scratch()?;
        durable::write_file(&scratch, &bytes)?;
        durable::publish(&scratch, &keyed(&self.root().join("refs/remotes"), &reference.key))
    }

    fn set_reference(
        &self,
        directory: &Path,
        key: &str,
        digest: &Digest,
    ) -> Result<(), StoreError> {
        let reference = Reference { key: key.to_owned(), digest: *digest };
        let bytes = serde_json::to_vec(&reference).expect("plain structures always encode");
        let scratch = self.scratch()?;
        durable::write_file(&scratch, &bytes)?;
        // Checked and set under one hold of the lock: nothing of it can be collected in between.
        let _lock = self.lock(Mode::Shared)?;
        self.check_complete(digest)
            .and_then(|()| durable::publish(&scratch, &keyed(directory, key)))
            .inspect_err(|_| drop(fs::remove_file(&scratch)))
    }

    fn reference(&self, directory: &Path, key: &str) -> Result<Option<Reference>, StoreError> {
        let path = keyed(directory, key);
        Ok(read(&path)?.filter(|reference| reference.key == key))
    }
}

/// The reference files of a directory; none when there is no such directory.
pub(crate) fn list(directory: &Path) -> Result<Vec<(PathBuf, Reference)>, StoreError> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(StoreError::io("read", directory, 0)(error)),
    };
    let mut references = Vec::new();
    for entry in entries {
        let path = entry.map_err(StoreError::io("read", directory, 0))?.path();
        // One that was removed meanwhile is none.
        if let Some(reference) = read(&path)? {
            references.push((path, reference));
        }
    }
    Ok(references)
}

/// Removes a reference and makes that survive a crash.
pub(crate) fn remove(path: &Path) -> Result<(), StoreError> {
    fs::remove_file(path).map_err(StoreError::io("remove", path, 0))?;
    durable::sync_directory(path.parent().unwrap_or(Path::new(".")))
}

fn keyed(directory: &Path, key: &str) -> PathBuf {
    directory.join(Digest::of(key.as_bytes()).hex())
}

pub(crate) fn read(path: &Path) -> Result<Option<Reference>, StoreError> {
    let bytes = match read_bounded(path, MAX_REFERENCE_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StoreError::io("read", path, 0)(error)),
    };
    let bad = |error: serde_json::Error| StoreError::BadReference {
        path: path.to_owned(),
        what: error.to_string(),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(bad)
}
