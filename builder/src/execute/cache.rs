//! The build directory: results of steps, unpacked bases, cache mounts.
//!
//! ```text
//! steps/<key>/{tree,layer.tar,step.json}   what a step changed, as a directory and as a layer
//! bases/<chain>/tree                       a base image's layers, flattened
//! mounts/<id>/                             RUN --mount=type=cache
//! downloads/<address>                      files of ADD https://…
//! last/<place>.json                        inputs of the last run of a step, for --explain
//! empty/                                   what `scratch` is
//! disks/<name>.ext4                        bases as disks of build machines
//! tmp/                                     work in progress; anything in it may be removed
//! lock                                     held by every build, see [`claim`]
//! ```
//!
//! An entry is made in `tmp` and renamed into place when it is complete, so a build that was
//! stopped leaves nothing half done.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::error::{Doing as _, ExecuteError};
use super::inputs::Inputs;

/// A build's claim on its directory. While it lives, nobody sweeps.
#[derive(Debug)]
pub struct Claim {
    _lock: fs::File,
}

/// Claims a build directory for one build of several at a time. If there is no other, what killed
/// builds have left in `tmp` is removed first: mounts, then files.
///
/// # Errors
/// When the directory cannot be written.
pub fn claim(root: &Path) -> Result<Claim, ExecuteError> {
    let path = root.join("lock");
    let tmp = root.join("tmp");
    let claimed = || -> io::Result<Claim> {
        fs::create_dir_all(&tmp)?;
        let lock = fs::File::create(&path)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            sweep(&tmp.canonicalize()?);
        }
        // From here on others may claim it, too.
        rustix::fs::flock(&lock, FlockOperation::LockShared)?;
        Ok(Claim { _lock: lock })
    };
    claimed().doing(|| format!("claiming {}", root.display()))
}

/// Empties a directory of what nobody uses. What cannot be removed stays.
fn sweep(directory: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The last ones lie on top.
    for line in mounts.lines().rev() {
        // Names with spaces are escaped there; nothing made here has one below its directory.
        let target = Path::new(line.split(' ').nth(4).unwrap_or_default());
        if target.starts_with(directory) && target != directory {
            let _ = rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH);
        }
    }
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
    }
}

/// Removes everything a build directory remembers; the next build does all its steps again. Returns
/// the bytes of disk that were freed.
///
/// # Errors
/// When a build is running, or something cannot be removed.
pub fn clear(root: &Path) -> Result<u64, ExecuteError> {
    let tmp = root.join("tmp");
    if !tmp.is_dir() {
        return Ok(0);
    }
    let cleared = || -> io::Result<Option<u64>> {
        let lock = fs::File::create(root.join("lock"))?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        sweep(&tmp.canonicalize()?);
        let size = disk_bytes(root);
        // Out of the way first: what is removed by half must not be found by its name.
        let going = tempfile::Builder::new().prefix("going-").tempdir_in(&tmp)?;
        for entry in fs::read_dir(root)? {
            let name = entry?.file_name();
            if name != "tmp" && name != "lock" {
                fs::rename(root.join(&name), going.path().join(&name))?;
            }
        }
        going.close()?;
        Ok(Some(size.saturating_sub(disk_bytes(root))))
    };
    let doing = || format!("clearing {}", root.display());
    cleared().doing(doing)?.ok_or_else(|| ExecuteError::Host {
        what: format!("a build is using {}", root.display()),
        hint: "clear the build cache when it has ended".to_owned(),
    })
}

/// Bytes of disk that a directory takes, each file counted once; what cannot be looked at is not
/// counted.
#[must_use]
pub fn disk_bytes(directory: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let mut seen = std::collections::HashSet::new();
    let (mut total, mut left) = (0, vec![directory.to_owned()]);
    while let Some(path) = left.pop() {
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        if meta.nlink() < 2 || meta.is_dir() || seen.insert((meta.dev(), meta.ino())) {
            total += meta.blocks() * 512;
        }
        if meta.is_dir() {
            left.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()));
        }
    }
    total
}

/// A build directory.
#[derive(Debug, Clone)]
pub(crate) struct BuildCache {
    root: PathBuf,
}

/// What a step left, as recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StepRecord {
    /// Digest of the layer's tar.
    pub diff_id: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// Entries in it; 0 means the step changed no file.
    pub entries: u64,
}

/// A step's result in the cache.
#[derive(Debug, Clone)]
pub(crate) struct StepResult {
    pub record: StepRecord,
    pub tree: PathBuf,
    pub tar: PathBuf,
}

impl BuildCache {
    /// Opens a build directory and makes what is missing.
    pub fn open(root: &Path) -> Result<Self, ExecuteError> {
        let root = std::path::absolute(root).doing(|| format!("finding {}", root.display()))?;
        for name in ["steps", "bases", "mounts", "downloads", "last", "empty", "tmp"] {
            let path = root.join(name);
            fs::create_dir_all(&path).doing(|| format!("making {}", path.display()))?;
        }
        // What steps leave may be readable by others inside a stage; not on this machine.
        fs::set_permissions(&root, fs::Permissions::from_mode(0o700))
            .doing(|| format!("protecting {}", root.display()))?;
        let empty = root.join("empty");
        fs::set_permissions(&empty, fs::Permissions::from_mode(0o755))
            .doing(|| format!("protecting {}", empty.display()))?;
        Ok(Self { root })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn empty(&self) -> PathBuf {
        self.root.join("empty")
    }

    /// A directory for work in progress, removed with its handle.
    pub fn scratch(&self) -> Result<tempfile::TempDir, ExecuteError> {
        let path = self.root.join("tmp");
        tempfile::Builder::new()
            .prefix("w")
            .tempdir_in(&path)
            .doing(|| format!("making a directory in {}", path.display()))
    }

    /// The result stored under a key.
    pub fn step(&self, key: Digest) -> Option<StepResult> {
        let path = self.root.join("steps").join(key.hex());
        let record = serde_json::from_slice(&fs::read(path.join("step.json")).ok()?).ok()?;
        let result = StepResult { record, tree: path.join("tree"), tar: path.join("layer.tar") };
        (result.tree.is_dir() && result.tar.is_file()).then_some(result)
    }

    /// Stores a finished step: `work` holds `tree` and `layer.tar`. The first one stays when two
    /// builds finish the same step.
    pub fn keep(
        &self,
        key: Digest,
        work: &Path,
        record: &StepRecord,
    ) -> Result<StepResult, ExecuteError> {
        let text = serde_json::to_vec(record).unwrap_or_default();
        fs::write(work.join("step.json"), text).doing(|| "recording a step".to_owned())?;
        let path = self.root.join("steps").join(key.hex());
        if let Err(error) = fs::rename(work, &path) {
            let there = self.step(key);
            if let Some(result) = there {
                return Ok(result);
            }
            // A leftover that is no result: replace it.
            let _ = fs::remove_dir_all(&path);
            fs::rename(work, &path).map_err(|_| ExecuteError::Io {
                what: format!("storing a step in {}", path.display()),
                source: error,
            })?;
        }
        Ok(StepResult {
            record: record.clone(),
            tree: path.join("tree"),
            tar: path.join("layer.tar"),
        })
    }

    /// Where a base with these layers is unpacked, and whether it already is.
    pub fn base(&self, chain: Digest) -> (PathBuf, bool) {
        let path = self.root.join("bases").join(chain.hex());
        let there = path.is_dir();
        (path, there)
    }

    /// Moves an unpacked base into place.
    pub fn keep_base(&self, work: &Path, to: &Path) -> Result<(), ExecuteError> {
        match fs::rename(work, to) {
            Ok(()) => Ok(()),
            Err(_) if to.is_dir() => Ok(()),
            Err(source) => {
                Err(ExecuteError::Io { what: format!("storing {}", to.display()), source })
            }
        }
    }

    /// Where the last download of an address is.
    pub fn download(&self, url: &str) -> PathBuf {
        self.root.join("downloads").join(Digest::of(url.as_bytes()).hex())
    }

    /// The directory of a cache mount.
    pub fn mount(&self, id: &str) -> PathBuf {
        self.root.join("mounts").join(Digest::of(id.as_bytes()).hex())
    }

    /// Compares a step's inputs with those of its last run and remembers them.
    pub fn remember(&self, place: &str, inputs: &Inputs) -> Option<String> {
        let path = self.root.join("last").join(Digest::of(place.as_bytes()).hex());
        let before: Option<Inputs> =
            fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        // Only explanations depend on it, so that a failure to write is no failure to build.
        if before.as_ref() != Some(inputs)
            && let Ok(bytes) = serde_json::to_vec(inputs)
        {
            let _: io::Result<()> = fs::write(&path, bytes);
        }
        before.map(|before| inputs.difference(&before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_are_swept_and_the_living_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let left = |name: &str| {
            fs::create_dir_all(root.join("tmp").join(name).join("sub")).unwrap();
            fs::write(root.join("tmp").join(name).join("sub/file"), "x").unwrap();
            root.join("tmp").join(name)
        };
        let dead = left("w1");
        if rustix::process::geteuid().is_root() {
            super::super::overlay::memory(&dead.join("memory")).map(std::mem::forget).unwrap();
        }
        let first = claim(root).unwrap();
        assert!(!dead.exists());
        let living = left("w2");
        let second = claim(root).unwrap();
        assert!(living.exists());
        drop(first);
        drop(claim(root).unwrap());
        assert!(living.exists());
        drop(second);
        claim(root).unwrap();
        assert!(!living.exists());
    }

    #[test]
    fn a_cleared_cache_remembers_nothing_and_is_left_alone_while_it_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        assert_eq!(clear(&root.join("none")).unwrap(), 0);
        let cache = BuildCache::open(root).unwrap();
        let work = cache.scratch().unwrap();
        fs::create_dir(work.path().join("tree")).unwrap();
        fs::write(work.path().join("layer.tar"), vec![1; 1 << 20]).unwrap();
        let record = StepRecord { diff_id: Digest::of(b"x"), size: 1 << 20, entries: 1 };
        let key = Digest::of(b"key");
        cache.keep(key, &work.keep(), &record).unwrap();
        let build = claim(root).unwrap();
        assert!(clear(root).unwrap_err().to_string().contains("a build is using"));
        assert!(cache.step(key).is_some());
        drop(build);
        assert!(clear(root).unwrap() >= 1 << 20);
        assert!(cache.step(key).is_none());
        assert!(disk_bytes(root) < 64 << 10);
        BuildCache::open(root).unwrap();
    }
}
