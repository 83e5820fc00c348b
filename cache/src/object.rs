//! Putting objects in and getting them out.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use crate::chunk::{self, ScanError};
use crate::error::StoreError;
use crate::index::{ChunkIndex, DEFAULT_CHUNK_SIZE, IndexError, MAX_INDEX_BYTES};
use crate::lock::Mode;
use crate::stop::Stop;
use crate::store::Store;
use crate::template::{ObjectRef, SCHEMA_VERSION};
use crate::{Digest, durable};

/// The largest document.
pub const MAX_DOCUMENT_BYTES: u64 = 4 * 1024 * 1024;

/// Which of the store's three trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tree {
    Objects,
    Indexes,
    Images,
}

impl Tree {
    pub(crate) const ALL: [Self; 3] = [Self::Objects, Self::Images, Self::Indexes];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Objects => "objects",
            Self::Indexes => "indexes",
            Self::Images => "images",
        }
    }
}

impl Store {
    /// Stores bytes.
    ///
    /// # Errors
    /// When the store cannot be written to or is full.
    pub fn put_blob(&self, bytes: &[u8]) -> Result<ObjectRef, StoreError> {
        let digest = Digest::of(bytes);
        self.publish_bytes(Tree::Objects, &digest, bytes)?;
        Ok(ObjectRef { digest, size: bytes.len() as u64 })
    }

    /// Stores a document: compact JSON, fields in the type's order.
    ///
    /// # Errors
    /// As [`Store::put_blob`]; also when it is too large to be a document.
    pub fn put_json<T: Serialize>(&self, value: &T) -> Result<ObjectRef, StoreError> {
        let bytes = serde_json::to_vec(value).map_err(|source| StoreError::Document {
            digest: Digest::of(&[]),
            kind: short_type_name::<T>(),
            source,
        })?;
        let size = bytes.len() as u64;
        if size > MAX_DOCUMENT_BYTES {
            return Err(StoreError::DocumentTooLarge { size, limit: MAX_DOCUMENT_BYTES });
        }
        self.put_blob(&bytes)
    }

    /// Reads a document, verifying its bytes and its schema version first.
    ///
    /// # Errors
    /// When it is missing, damaged, of a newer schema, or not a `T`.
    pub fn get_json<T: DeserializeOwned>(&self, digest: &Digest) -> Result<T, StoreError> {
        #[derive(serde::Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Versioned {
            #[serde(default)]
            schema_version: Option<u32>,
        }
        let bytes = self.read_verified(Tree::Objects, digest, MAX_DOCUMENT_BYTES)?;
        let decode_error =
            |source| StoreError::Document { digest: *digest, kind: short_type_name::<T>(), source };
        let versioned: Versioned = serde_json::from_slice(&bytes).map_err(decode_error)?;
        match versioned.schema_version {
            Some(version) if version > SCHEMA_VERSION => {
                Err(StoreError::NewerDocument { digest: *digest, version, known: SCHEMA_VERSION })
            }
            _ => serde_json::from_slice(&bytes).map_err(decode_error),
        }
    }

    /// Takes a file out of a staging area as a blob.
    ///
    /// # Errors
    /// When `file` is not a regular file in a staging area of this store, or cannot be stored.
    pub fn adopt_blob(&self, file: impl Into<PathBuf>) -> Result<ObjectRef, StoreError> {
        let file = file.into();
        let handle = self.open_staged(&file)?;
        let (digest, size) = hash(&handle, self.stop).map_err(StoreError::io("read", &file, 0))?;
        durable::seal(&file, &handle, size)?;
        let _lock = self.lock(Mode::Shared)?;
        self.publish_file(Tree::Objects, &digest, &file)?;
        Ok(ObjectRef { digest, size })
    }

    /// Takes a large, sparse file out of a staging area as an image, in chunks of
    /// [`DEFAULT_CHUNK_SIZE`]. Its digest is that of its chunk index.
    ///
    /// # Errors
    /// As [`Store::adopt_blob`].
    pub fn adopt_image(&self, file: impl Into<PathBuf>) -> Result<ObjectRef, StoreError> {
        self.adopt_image_in_chunks(file, DEFAULT_CHUNK_SIZE)
    }

    /// [`Store::adopt_image`] with another chunk size.
    ///
    /// # Errors
    /// As [`Store::adopt_blob`]; also when the chunk size is out of bounds.
    pub fn adopt_image_in_chunks(
        &self,
        file: impl Into<PathBuf>,
        chunk_size: u32,
    ) -> Result<ObjectRef, StoreError> {
        let file = file.into();
        let handle = self.open_staged(&file)?;
        let index =
            chunk::scan_until(&handle, chunk_size, true, self.stop).map_err(
                |error| match error {
                    ScanError::Io(source) => StoreError::io("read", &file, 0)(source),
                    ScanError::Index(source) => {
                        StoreError::Index { digest: Digest::of(&[]), source }
                    }
                },
            )?;
        self.adopt_indexed(&file, &handle, &index)
    }

    /// Takes a file whose content is known to be what `index` says.
    pub(crate) fn adopt_indexed(
        &self,
        file: &Path,
        handle: &File,
        index: &ChunkIndex,
    ) -> Result<ObjectRef, StoreError> {
        durable::seal(file, handle, index.data_bytes())?;
        let encoded = index.encode();
        let digest = Digest::of(&encoded);
        self.publish_bytes(Tree::Indexes, &digest, &encoded)?;
        let _lock = self.lock(Mode::Shared)?;
        self.publish_file(Tree::Images, &digest, file)?;
        Ok(ObjectRef { digest, size: index.image_size() })
    }

    /// Where an object lies, ready to be opened or mapped. Nothing is hashed.
    ///
    /// # Errors
    /// [`StoreError::Missing`].
    pub fn path(&self, digest: &Digest) -> Result<PathBuf, StoreError> {
        [Tree::Images, Tree::Objects]
            .into_iter()
            .map(|tree| self.object_path(tree, digest))
            .find(|path| path.exists())
            .ok_or(StoreError::Missing { digest: *digest })
    }

    /// Whether the object is there.
    #[must_use]
    pub fn has(&self, digest: &Digest) -> bool {
        self.path(digest).is_ok()
    }

    /// The chunk index of an image, whether or not the image itself is there.
    ///
    /// # Errors
    /// When it is missing, damaged, or of a newer version.
    pub fn index(&self, digest: &Digest) -> Result<ChunkIndex, StoreError> {
        let path = self.object_path(Tree::Indexes, digest);
        let bytes = read_bounded(&path, MAX_INDEX_BYTES).map_err(self.read_error(&path, digest))?;
        ChunkIndex::decode(&bytes, digest).map_err(|source| match source {
            IndexError::Digest { found } => {
                StoreError::Damaged { digest: *digest, what: format!("it hashes to {found}") }
            }
            source => StoreError::Index { digest: *digest, source },
        })
    }

    /// The bytes of a small blob, verified.
    ///
    /// # Errors
    /// When it is missing, damaged or larger than `limit`.
    pub fn get_blob(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, StoreError> {
        self.read_verified(Tree::Objects, digest, limit)
    }

    pub(crate) fn object_path(&self, tree: Tree, digest: &Digest) -> PathBuf {
        let hex = digest.hex();
        let (shard, rest) = hex.split_at(2);
        self.root().join(tree.name()).join(shard).join(rest)
    }

    pub(crate) fn read_verified(
        &self,
        tree: Tree,
        digest: &Digest,
        limit: u64,
    ) -> Result<Vec<u8>, StoreError> {
        let path = self.object_path(tree, digest);
        let bytes = read_bounded(&path, limit).map_err(self.read_error(&path, digest))?;
        if bytes.len() as u64 > limit {
            let size = fs::metadata(&path).map_or(limit, |metadata| metadata.len());
            return Err(StoreError::DocumentTooLarge { size, limit });
        }
        let found = Digest::of(&bytes);
        if found != *digest {
            let what = format!("it hashes to {found}");
            return Err(StoreError::Damaged { digest: *digest, what });
        }
        Ok(bytes)
    }

    fn read_error(&self, path: &Path, digest: &Digest) -> impl FnOnce(io::Error) -> StoreError {
        let (path, digest) = (path.to_owned(), *digest);
        move |source| match source.kind() {
            io::ErrorKind::NotFound => StoreError::Missing { digest },
            _ => StoreError::io("read", &path, 0)(source),
        }
    }

    /// Opens a file that someone staged here.
    fn open_staged(&self, file: &Path) -> Result<File, StoreError> {
        let staged = file.strip_prefix(self.root().join("stage")).is_ok_and(|inside| {
            inside.components().count() >= 2
                && inside.components().all(|part| matches!(part, Component::Normal(_)))
        });
        let regular = || fs::symlink_metadata(file).is_ok_and(|metadata| metadata.is_file());
        if !staged || !regular() {
            return Err(StoreError::NotStaged { path: file.to_owned() });
        }
        // Written to only to make holes of zero chunks.
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(file)
            .map_err(StoreError::io("open", file, 0))
    }

    pub(crate) fn publish_bytes(
        &self,
        tree: Tree,
        digest: &Digest,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        {
            let _lock = self.lock(Mode::Shared)?;
            if self.hold_if_present(tree, digest)? {
                return Ok(());
            }
        }
        let scratch = self.scratch()?;
        durable::write_file(&scratch, bytes)?;
        let sealed = File::open(&scratch).map_err(StoreError::io("open", &scratch, 0));
        sealed.and_then(|file| durable::seal(&scratch, &file, bytes.len() as u64))?;
        let _lock = self.lock(Mode::Shared)?;
        self.publish_file(tree, digest, &scratch)
    }

    /// Moves a sealed file to its place, or drops it when the object is already there. The
    /// caller holds the lock shared.
    fn publish_file(&self, tree: Tree, digest: &Digest, file: &Path) -> Result<(), StoreError> {
        if self.hold_if_present(tree, digest)? {
            return fs::remove_file(file).map_err(StoreError::io("remove", file, 0));
        }
        durable::publish(file, &self.object_path(tree, digest))
    }

    /// Journals the object and says whether it is present. The caller holds the lock shared.
    pub(crate) fn hold_if_present(&self, tree: Tree, digest: &Digest) -> Result<bool, StoreError> {
        self.journal(digest)?;
        let path = self.object_path(tree, digest);
        if !path.exists() {
            return Ok(false);
        }
        // Whoever put it there may not have come to this yet.
        durable::sync_directory(path.parent().unwrap_or(self.root()))?;
        Ok(true)
    }
}

/// Reads at most one byte more than `limit`.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// SHA-256 and length of a file's bytes.
pub(crate) fn hash(file: &File, stop: Stop) -> io::Result<(Digest, u64)> {
    use std::os::unix::fs::FileExt as _;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 256 * 1024];
    let mut position = 0;
    loop {
        stop.check()?;
        match file.read_at(&mut buffer, position) {
            Ok(0) => return Ok((Digest::from_bytes(hasher.finalize().into()), position)),
            Ok(count) => {
                hasher.update(&buffer[..count]);
                position += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn short_type_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    name.rsplit("::").next().unwrap_or(name)
}
