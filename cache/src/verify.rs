//! Verification: does every object still have the bytes its name promises?

use std::fs::{self, File};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::Digest;
use crate::chunk;
use crate::error::StoreError;
use crate::lock::Mode;
use crate::object::{Tree, hash};
use crate::reference;
use crate::store::Store;

/// An object whose bytes are not what its digest says.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Damage {
    /// The object.
    pub digest: Digest,
    /// How it differs.
    pub what: String,
    /// For an image: the numbers of the chunks that differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<u32>,
}

/// An object that something needs and that is not there.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gap {
    /// The object.
    pub digest: Digest,
    /// The document or reference that needs it.
    pub needed_by: String,
}

/// What a verification found.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VerifyReport {
    /// Objects looked at.
    pub checked: u64,
    /// Bytes hashed.
    pub bytes: u64,
    /// Damaged objects.
    pub damaged: Vec<Damage>,
    /// Missing objects.
    pub missing: Vec<Gap>,
    /// Reference files that cannot be read as one.
    pub bad_references: Vec<String>,
    /// Damaged objects that were taken out, so that a pull or build puts them in afresh.
    pub removed: Vec<Digest>,
}

impl VerifyReport {
    /// Nothing was found wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.damaged.is_empty() && self.missing.is_empty() && self.bad_references.is_empty()
    }
}

impl Store {
    /// Hashes every object. With `repair`, takes damaged ones out, so that the next pull or build
    /// puts them in afresh: an object present is trusted to be right.
    ///
    /// # Errors
    /// When the store cannot be read; damage is a finding, not an error.
    pub fn verify(&self, repair: bool) -> Result<VerifyReport, StoreError> {
        let mut work = Vec::new();
        for tree in Tree::ALL {
            self.walk(tree, |digest, path, metadata| {
                if metadata.is_file() {
                    work.push((tree, digest, path.to_owned()));
                }
                Ok(())
            })?;
        }
        let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
        let found = Mutex::new(Vec::new());
        let worker = || -> Result<(), StoreError> {
            while let Some((tree, digest, path)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                let Some(digest) = digest else { continue };
                let (read, damage) = self.inspect(*tree, digest, path)?;
                bytes.fetch_add(read, Ordering::Relaxed);
                if let Some(damage) = damage {
                    let mut found = found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    found.push((*tree, damage, path.clone()));
                }
            }
            Ok(())
        };
        chunk::in_parallel(work.len(), &worker)?;
        let mut found = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        found.sort_by_key(|(tree, damage, _)| (tree.name(), damage.digest));
        let mut report = VerifyReport {
            checked: work.len() as u64,
            bytes: bytes.into_inner(),
            ..VerifyReport::default()
        };
        if repair && !found.is_empty() {
            let _lock = self.lock(Mode::Exclusive)?;
            for (tree, damage, path) in &found {
                // Someone may have put it right, or taken it away, since it was looked at.
                if self.inspect(*tree, &damage.digest, path)?.1.is_none() {
                    continue;
                }
                let taken = match tree {
                    // Where a pull finds it, and fetches only what is wrong with it.
                    Tree::Images => {
                        fs::rename(path, self.root().join("partial").join(damage.digest.hex()))
                    }
                    _ => fs::remove_file(path),
                };
                match taken {
                    Ok(()) => report.removed.push(damage.digest),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => return Err(StoreError::io("remove", path, 0)(error)),
                }
            }
        }
        report.damaged = found.into_iter().map(|(_, damage, _)| damage).collect();
        self.check_references(&mut report)?;
        Ok(report)
    }

    fn check_references(&self, report: &mut VerifyReport) -> Result<(), StoreError> {
        let mut directories = vec![self.root().join("refs/tags"), self.root().join("refs/kernels")];
        let snapshots = self.root().join("refs/snapshots");
        for template in fs::read_dir(&snapshots).map_err(StoreError::io("read", &snapshots, 0))? {
            directories.push(template.map_err(StoreError::io("read", &snapshots, 0))?.path());
        }
        let mut roots = Vec::new();
        for directory in directories {
            match reference::list(&directory) {
                Ok(references) => {
                    for (_, reference) in references {
                        if !self.has(&reference.digest) {
                            report
                                .missing
                                .push(Gap { digest: reference.digest, needed_by: reference.key });
                        }
                        roots.push(reference.digest);
                    }
                }
                Err(error @ StoreError::BadReference { .. }) => {
                    report.bad_references.push(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        match self.reach(roots, true) {
            Ok((_, missing)) => {
                let gap =
                    |(digest, by): (Digest, Digest)| Gap { digest, needed_by: by.to_string() };
                report.missing.extend(missing.into_iter().map(gap));
            }
            // Already reported above.
            Err(StoreError::BadReference { .. }) => {}
            Err(error) => return Err(error),
        }
        report.missing.sort_by(|a, b| (a.digest, &a.needed_by).cmp(&(b.digest, &b.needed_by)));
        Ok(())
    }

    /// Hashes one object; a file that vanished meanwhile was collected and is in order.
    fn inspect(
        &self,
        tree: Tree,
        digest: &Digest,
        path: &std::path::Path,
    ) -> Result<(u64, Option<Damage>), StoreError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((0, None)),
            Err(error) => return Err(StoreError::io("open", path, 0)(error)),
        };
        let damage = |what: String, chunks| Damage { digest: *digest, what, chunks };
        if tree != Tree::Images {
            let (found, size) = hash(&file, self.stop).map_err(StoreError::io("read", path, 0))?;
            let damaged = (found != *digest)
                .then(|| damage(format!("its {size} bytes hash to {found}"), Vec::new()));
            return Ok((size, damaged));
        }
        let index = match self.index(digest) {
            Ok(index) => index,
            Err(StoreError::Missing { .. }) if !path.exists() => return Ok((0, None)),
            Err(error) => {
                return Ok((0, Some(damage(format!("no usable index: {error}"), vec![]))));
            }
        };
        let size = file.metadata().map_err(StoreError::io("read", path, 0))?.len();
        if size != index.image_size() {
            let what = format!("it is {size} bytes long and should be {}", index.image_size());
            return Ok((0, Some(damage(what, Vec::new()))));
        }
        let found = match chunk::scan_until(&file, index.chunk_size(), false, self.stop) {
            Ok(found) => found,
            Err(chunk::ScanError::Io(source)) => {
                return Err(StoreError::io("read", path, 0)(source));
            }
            Err(error) => return Ok((0, Some(damage(error.to_string(), Vec::new())))),
        };
        let read = found.data_bytes();
        let differing = differing_chunks(&index, &found);
        let what = || format!("{} of its chunks differ", differing.len());
        Ok((read, (!differing.is_empty()).then(|| damage(what(), differing.clone()))))
    }
}

/// The numbers of the chunks in which two images of one size differ, ascending.
pub(crate) fn differing_chunks(
    a: &crate::index::ChunkIndex,
    b: &crate::index::ChunkIndex,
) -> Vec<u32> {
    let by_number = |index: &crate::index::ChunkIndex| -> std::collections::BTreeMap<u32, Digest> {
        index.chunks().iter().map(|chunk| (chunk.number, chunk.digest)).collect()
    };
    let (a, b) = (by_number(a), by_number(b));
    let mut numbers: Vec<u32> =
        a.keys().chain(b.keys()).copied().filter(|n| a.get(n) != b.get(n)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}
