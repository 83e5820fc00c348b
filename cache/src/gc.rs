//! Collection: removing what nothing needs, and shrinking to a quota.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::Digest;
use crate::error::StoreError;
use crate::live;
use crate::lock::Mode;
use crate::object::Tree;
use crate::reference;
use crate::store::Store;
use crate::template::SnapshotManifest;

/// What a collection did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcReport {
    /// Files removed.
    pub removed: u64,
    /// Disk space they took, in bytes.
    pub freed_bytes: u64,
    /// Disk space the store takes now, in bytes.
    pub kept_bytes: u64,
    /// Snapshots and kernel bundles given up for the quota, least recently used first; each can
    /// be made again.
    pub evicted: Vec<Digest>,
    /// How far the store is still over the quota, because all that is left is tagged or in use.
    pub over_quota_bytes: Option<u64>,
}

/// What the store takes.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Blobs and documents.
    pub objects: u64,
    /// Images.
    pub images: u64,
    /// Sum of their logical sizes in bytes.
    pub logical_bytes: u64,
    /// Disk space taken in bytes, indexes and staging included.
    pub disk_bytes: u64,
    /// Disk space of staging areas and partial images, dead or alive, in bytes.
    pub staging_bytes: u64,
    /// Disk space a collection would free, in bytes.
    pub reclaimable_bytes: u64,
}

/// A reference that may be given up.
struct Candidate {
    used: SystemTime,
    path: PathBuf,
    digest: Digest,
}

impl Store {
    /// Removes what cannot be reached from a root, and the remains of dead processes. With a
    /// quota, then gives up snapshots and kernel bundles that no one uses, least recently used
    /// first, until the store takes at most `keep` bytes. Tags are never removed, and neither are
    /// snapshots of a template that is leased itself, nor those that no bake makes again: of
    /// machines that had been restored before, such as paused sandboxes.
    ///
    /// # Errors
    /// When the store cannot be read or written to; what was removed until then stays removed.
    pub fn collect(&self, keep: Option<u64>) -> Result<GcReport, StoreError> {
        let _lock = self.lock(Mode::Exclusive)?;
        let held = live::sweep(self.root())?;
        crate::install::sweep_partial(self)?;
        let mut report = GcReport::default();
        self.sweep_unreached(&held, &mut report)?;
        let Some(quota) = keep else { return Ok(report) };
        let mut candidates = self.candidates(&held)?;
        while report.kept_bytes > quota {
            let Some(candidate) = candidates.pop() else {
                report.over_quota_bytes = Some(report.kept_bytes - quota);
                break;
            };
            reference::remove(&candidate.path)?;
            report.evicted.push(candidate.digest);
            self.sweep_unreached(&held, &mut report)?;
        }
        Ok(report)
    }

    /// Sums up what the store takes.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn usage(&self) -> Result<Usage, StoreError> {
        let mut usage = Usage::default();
        let mut roots = self.reference_roots()?;
        roots.extend(self.held_digests()?);
        let (reached, _) = self.reach(roots, true)?;
        for tree in Tree::ALL {
            self.walk(tree, |digest, _, metadata| {
                let disk = metadata.blocks() * 512;
                usage.disk_bytes += disk;
                match tree {
                    Tree::Objects => usage.objects += 1,
                    Tree::Images => usage.images += 1,
                    Tree::Indexes => {}
                }
                if tree != Tree::Indexes {
                    usage.logical_bytes += metadata.len();
                }
                if !digest.is_some_and(|digest| reached.contains(&digest)) {
                    usage.reclaimable_bytes += disk;
                }
                Ok(())
            })?;
        }
        usage.staging_bytes = disk_bytes_below(&self.root().join("stage"))
            + disk_bytes_below(&self.root().join("partial"));
        usage.disk_bytes += usage.staging_bytes;
        Ok(usage)
    }

    fn sweep_unreached(&self, held: &[Digest], report: &mut GcReport) -> Result<(), StoreError> {
        let mut roots = self.reference_roots()?;
        roots.extend(held);
        let (reached, _) = self.reach(roots, true)?;
        // References of what goes, first: a reference never dangles.
        for directory in ["refs/snapshots", "refs/working-sets", "refs/used"] {
            let directory = self.root().join(directory);
            for entry in fs::read_dir(&directory).map_err(StoreError::io("read", &directory, 0))? {
                let path = entry.map_err(StoreError::io("read", &directory, 0))?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let owner = format!("sha256:{name}").parse::<Digest>();
                if owner.is_ok_and(|owner| reached.contains(&owner)) {
                    continue;
                }
                let removed =
                    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                removed.map_err(StoreError::io("remove", &path, 0))?;
            }
        }
        report.kept_bytes = 0;
        // Documents before what they refer to, images before their indexes.
        for tree in Tree::ALL {
            let mut doomed = Vec::new();
            self.walk(tree, |digest, path, metadata| {
                let disk = metadata.blocks() * 512;
                if digest.is_some_and(|digest| reached.contains(&digest)) {
                    report.kept_bytes += disk;
                } else {
                    doomed.push((path.to_owned(), metadata.len(), disk));
                }
                Ok(())
            })?;
            // The small ones are the documents.
            doomed.sort_by_key(|(_, len, _)| *len);
            for (path, _, disk) in doomed {
                match fs::remove_file(&path) {
                    Ok(()) => {
                        report.removed += 1;
                        report.freed_bytes += disk;
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => return Err(StoreError::io("remove", &path, 0)(error)),
                }
            }
        }
        Ok(())
    }

    /// What tags and kernel references name.
    pub(crate) fn reference_roots(&self) -> Result<HashSet<Digest>, StoreError> {
        let mut roots = HashSet::new();
        for directory in ["refs/tags", "refs/kernels"] {
            let references = reference::list(&self.root().join(directory))?;
            roots.extend(references.into_iter().map(|(_, reference)| reference.digest));
        }
        Ok(roots)
    }

    fn held_digests(&self) -> Result<Vec<Digest>, StoreError> {
        live::held(self.root())
    }

    /// Whether it is a snapshot of a machine with a run behind it, which is nowhere else.
    fn is_of_a_run(&self, digest: &Digest) -> bool {
        let snapshot = self.get_json::<SnapshotManifest>(digest);
        snapshot.is_ok_and(|snapshot| snapshot.generation > 1)
    }

    /// What may be given up for a quota, most recently used first.
    fn candidates(&self, held: &[Digest]) -> Result<Vec<Candidate>, StoreError> {
        let (mut in_use, _) = self.reach(held.iter().copied(), false)?;
        // Whoever holds a template may be about to use any of its snapshots.
        for root in held {
            let snapshots = self.root().join("refs/snapshots").join(root.hex());
            in_use.extend(reference::list(&snapshots)?.into_iter().map(|(_, found)| found.digest));
        }
        let mut directories = vec![self.root().join("refs/kernels")];
        for template in fs::read_dir(self.root().join("refs/snapshots")).into_iter().flatten() {
            let template = template.map_err(StoreError::io("read", self.root(), 0))?;
            directories.push(template.path());
        }
        let mut candidates = Vec::new();
        for directory in directories {
            for (path, reference) in reference::list(&directory)? {
                if in_use.contains(&reference.digest) || self.is_of_a_run(&reference.digest) {
                    continue;
                }
                let made = fs::metadata(&path).and_then(|m| m.modified()).ok();
                let used = live::last_use(self.root(), &reference.digest);
                candidates.push(Candidate {
                    used: made.max(used).unwrap_or(SystemTime::UNIX_EPOCH),
                    path,
                    digest: reference.digest,
                });
            }
        }
        candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.used));
        Ok(candidates)
    }
}

fn disk_bytes_below(directory: &std::path::Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.path(), fs::symlink_metadata(entry.path()).ok()?)))
        .map(|(path, metadata)| {
            let below = if metadata.is_dir() { disk_bytes_below(&path) } else { 0 };
            metadata.blocks() * 512 + below
        })
        .sum()
}
