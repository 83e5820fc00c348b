//! Installing an artifact: from blobs, wherever they are, to objects in the form they are used in.
//!
//! An image is put together in `partial/`, under its own digest and lock. What is right there
//! already, from a run that was cut short or an image that was damaged, is found by hashing it
//! against the index and not fetched again; nor is what another image of the store has. The rest
//! comes as frames out of packs, whole or by range. Every run is checked against its directory
//! when it arrives, and every chunk against the image's index before the image is published.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Digest;
use crate::artifact::{
    ArtifactConfig, ArtifactError, ArtifactObject, CONFIG_TYPE, Descriptor, MAX_CONFIG_BYTES,
    Manifest,
};
use crate::assembly::{Assembly, Part};
use crate::error::StoreError;
use crate::fetch_plan::{Job, Needed, jobs, needed_frames, read_frame};
use crate::index::{ChunkIndex, IndexError, MAX_INDEX_BYTES};
use crate::object::MAX_DOCUMENT_BYTES;
use crate::pack::{self, Directory, MAX_DIRECTORY_BYTES};
use crate::pagemap::{MAX_MAP_BYTES, PageMap};
use crate::store::Store;
use crate::template::{SnapshotManifest, TemplateManifest};
use crate::working_set::WorkingSet;

/// The largest compressed page map.
const MAX_MAP_LAYER_BYTES: u64 = 64 * 1024 * 1024;
/// The largest blob (kernel, initramfs, state).
const MAX_BLOB_BYTES: u64 = 4 << 30;
/// Where the blobs of an artifact are.
pub trait BlobSource: Sync {
    /// Opens `len` bytes of a blob from `offset` on. The bytes are not trusted.
    ///
    /// # Errors
    /// When the blob cannot be had, after whatever retries make sense there.
    fn open(
        &self,
        blob: &Descriptor,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>>;

    /// How many requests may run side by side.
    fn parallel(&self) -> usize {
        4
    }
}

/// What happens while installing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InstallEvent {
    /// What is to be done.
    Planned {
        /// Bytes of frames to fetch.
        fetch_bytes: u64,
        /// Bytes of images that the store had already.
        reused_bytes: u64,
    },
    /// That many more bytes have arrived.
    Fetched {
        /// Their number.
        bytes: u64,
    },
}

/// What an installation brought.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Installed {
    /// The template.
    pub template: Digest,
    /// The snapshot, if the variant has one.
    pub snapshot: Option<Digest>,
    /// Bytes fetched, all kinds.
    pub fetched_bytes: u64,
    /// Bytes of images that the store had already.
    pub reused_bytes: u64,
}

/// An artifact could not be installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The artifact is not usable.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// A blob could not be had.
    #[error("cannot fetch {digest}: {source}")]
    Fetch {
        /// The blob.
        digest: Digest,
        /// What its source says.
        source: io::Error,
    },
}

/// Installs one variant of an artifact.
pub struct Installer<'a> {
    store: &'a Store,
    source: &'a dyn BlobSource,
    observer: &'a (dyn Fn(InstallEvent) + Sync),
    manifest: &'a Manifest,
    fetched: std::sync::atomic::AtomicU64,
}

impl<'a> Installer<'a> {
    /// Prepares to install what `manifest` describes.
    pub fn new(
        store: &'a Store,
        source: &'a dyn BlobSource,
        manifest: &'a Manifest,
        observer: &'a (dyn Fn(InstallEvent) + Sync),
    ) -> Self {
        Self { store, source, observer, manifest, fetched: 0.into() }
    }

    /// Fetches and checks the config: small, and enough to decide whether to go on.
    ///
    /// # Errors
    /// When it cannot be had or is not usable.
    pub fn config(&self) -> Result<ArtifactConfig, InstallError> {
        let descriptor = &self.manifest.config;
        if descriptor.media_type != CONFIG_TYPE {
            let what = format!("its config has type {:?}", descriptor.media_type);
            return Err(ArtifactError::Inconsistent(what).into());
        }
        let bytes = self.fetch(descriptor, "config", MAX_CONFIG_BYTES)?;
        Ok(ArtifactConfig::parse(&bytes, &descriptor.digest)?)
    }

    /// Brings everything into the store, and refers to the snapshot from its template. The
    /// template itself is held by this handle until it is tagged.
    ///
    /// # Errors
    /// When something cannot be had, is damaged, or does not fit; what has arrived is kept for
    /// the next try.
    pub fn install(&self, config: &ArtifactConfig) -> Result<Installed, InstallError> {
        let reused_bytes = self.install_images(config)?;
        self.install_small(config)?;
        // What the documents refer to must all have come along.
        let _: TemplateManifest = self.store.get_json(&config.template)?;
        self.store.check_complete(&config.template)?;
        if let Some(digest) = &config.snapshot {
            let snapshot: SnapshotManifest = self.store.get_json(digest)?;
            let claimed = (Some(snapshot.machine), Some(&snapshot.compat));
            if claimed != (config.machine, config.compat.as_ref()) {
                let what = "its config and its snapshot disagree".to_owned();
                return Err(ArtifactError::Inconsistent(what).into());
            }
            self.store.check_complete(digest)?;
            self.store.set_snapshot(&config.template, digest)?;
            if let Some(set) = &config.working_set {
                let document = self.fetch_working_set(set)?;
                if document.snapshot != *digest {
                    let what = "its working set is of another snapshot".to_owned();
                    return Err(ArtifactError::Inconsistent(what).into());
                }
                self.store.refer_to_working_set(digest, set)?;
            }
        }
        Ok(Installed {
            template: config.template,
            snapshot: config.snapshot,
            fetched_bytes: self.fetched.load(Ordering::Relaxed),
            reused_bytes,
        })
    }

    /// Brings everything but the images.
    pub(crate) fn install_small(&self, config: &ArtifactConfig) -> Result<(), InstallError> {
        self.install_blobs(config, &|_| true)?;
        self.install_documents(config)
    }

    /// Brings what a restore needs before any image: the documents, and the machine's state. A bare
    /// template is booted, and needs its kernel.
    pub(crate) fn install_first(&self, config: &ArtifactConfig) -> Result<(), InstallError> {
        self.install_documents(config)?;
        let state = match &config.snapshot {
            None => None,
            Some(snapshot) => Some(self.store.get_json::<SnapshotManifest>(snapshot)?.state.digest),
        };
        self.install_blobs(config, &|digest| state.is_none_or(|state| state == *digest))
    }

    fn install_documents(&self, config: &ArtifactConfig) -> Result<(), InstallError> {
        for object in &config.objects {
            if let ArtifactObject::Document { digest } = object {
                let layer = self.manifest.layer(digest)?;
                let bytes = self.fetch(layer, "document", MAX_DOCUMENT_BYTES)?;
                self.store.put_blob(&bytes)?;
            }
        }
        Ok(())
    }

    /// Brings a working set.
    pub(crate) fn fetch_working_set(&self, digest: &Digest) -> Result<WorkingSet, InstallError> {
        let layer = self.manifest.layer(digest)?;
        let bytes = self.fetch(layer, "working set", MAX_DOCUMENT_BYTES)?;
        self.store.put_blob(&bytes)?;
        Ok(self.store.get_json(digest)?)
    }

    /// Fetches what is to be known of the images that are not here.
    pub(crate) fn parts(&self, config: &ArtifactConfig) -> Result<Vec<Part>, InstallError> {
        let mut parts = Vec::new();
        for object in &config.objects {
            let ArtifactObject::Image { digest, size, map } = object else { continue };
            if self.store.hold_image(digest)? {
                continue;
            }
            let layer = self.manifest.layer(digest)?;
            let index = self.fetch(layer, "index", MAX_INDEX_BYTES)?;
            let index = ChunkIndex::decode(&index, digest).map_err(|source| match source {
                IndexError::Digest { .. } => unreachable!("fetch has verified it"),
                source => StoreError::Index { digest: *digest, source },
            })?;
            let layer = self.manifest.layer(map)?;
            let map = decode_map(&self.fetch(layer, "page map", MAX_MAP_LAYER_BYTES)?, map)?;
            if index.image_size() != *size || map.image_size() != *size {
                let what = format!("the sizes given for image {digest} differ");
                return Err(ArtifactError::Inconsistent(what).into());
            }
            parts.push(Part { digest: *digest, index, map });
        }
        Ok(parts)
    }

    fn install_images(&self, config: &ArtifactConfig) -> Result<u64, InstallError> {
        let parts = self.parts(config)?;
        if parts.is_empty() {
            return Ok(0);
        }
        let Some(mut assembly) = Assembly::begin(self.store, parts)? else { return Ok(0) };
        // Once more if chunks turn out wrong although every run was right: they may have been
        // changed on the disk.
        for attempt in 0.. {
            let directories = self.directories(config, &assembly.needed_packs())?;
            let needed = needed_frames(&assembly, &directories, config)?;
            let jobs = jobs(&needed, &directories);
            let fetch_bytes = jobs.iter().map(|job| job.span(&directories).1).sum();
            let reused_bytes = assembly.reused_bytes();
            self.store.ensure_free(assembly.missing_bytes())?;
            (self.observer)(InstallEvent::Planned { fetch_bytes, reused_bytes });
            self.run_jobs(config, &directories, &needed, &jobs, &assembly)?;
            match assembly.check()?.first() {
                None => return Ok(assembly.finish()?),
                Some(_) if attempt == 0 => {}
                Some((image, chunk)) => {
                    let what = format!("its chunk {chunk} is not what its index says");
                    return Err(ArtifactError::Damaged { digest: *image, what }.into());
                }
            }
        }
        unreachable!("the loop ends by returning")
    }

    pub(crate) fn directories(
        &self,
        config: &ArtifactConfig,
        packs: &HashSet<u16>,
    ) -> Result<BTreeMap<u16, Directory>, InstallError> {
        let mut directories = BTreeMap::new();
        for &number in packs {
            let record = config.packs.get(usize::from(number)).ok_or_else(|| {
                ArtifactError::Inconsistent(format!("a page map names pack {number}"))
            })?;
            let layer = self.manifest.layer(&record.directory)?;
            let bytes = self.fetch(layer, "pack directory", MAX_DIRECTORY_BYTES)?;
            let directory = Directory::parse(&bytes)
                .map_err(|source| ArtifactError::Format { digest: record.directory, source })?;
            let pack = self.manifest.layer(&record.pack)?;
            if directory.pack_len() != pack.size {
                let what = format!(
                    "the directory of pack {} describes {} bytes and the pack has {}",
                    record.pack,
                    directory.pack_len(),
                    pack.size
                );
                return Err(ArtifactError::Inconsistent(what).into());
            }
            directories.insert(number, directory);
        }
        Ok(directories)
    }

    fn run_jobs(
        &self,
        config: &ArtifactConfig,
        directories: &BTreeMap<u16, Directory>,
        needed: &Needed,
        jobs: &[Job],
        assembly: &Assembly,
    ) -> Result<(), InstallError> {
        let next = AtomicUsize::new(0);
        let failure = Mutex::new(None);
        let worker = || {
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let record = &config.packs[usize::from(job.pack)];
                let directory = &directories[&job.pack];
                let result = self
                    .manifest
                    .layer(&record.pack)
                    .map_err(InstallError::from)
                    .and_then(|pack| self.run_job(pack, job, directory, needed, assembly));
                if let Err(error) = result {
                    // The others stop after what they are at.
                    next.store(jobs.len(), Ordering::Relaxed);
                    let mut failure =
                        failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    failure.get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.source.parallel().min(jobs.len()) {
                scope.spawn(worker);
            }
        });
        let failure = failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        failure.map_or(Ok(()), Err)
    }

    /// Fetches a job's frames and puts their pages where they belong. A connection that breaks
    /// is taken up again where it broke; a frame that is damaged is fetched once more.
    fn run_job(
        &self,
        pack: &Descriptor,
        job: &Job,
        directory: &Directory,
        needed: &Needed,
        assembly: &Assembly,
    ) -> Result<(), InstallError> {
        const BREAKS: u32 = 5;
        let frame = |number: u32| &directory.frames()[number as usize];
        let fetch_error = |source| InstallError::Fetch { digest: pack.digest, source };
        let (mut done, mut breaks, mut damaged) = (0, 0, None);
        while done < job.frames.len() {
            let rest = Job { pack: job.pack, frames: job.frames[done..].to_vec() };
            let (mut position, len) = rest.span_in(directory);
            let mut reader = self.source.open(pack, position, len).map_err(fetch_error)?;
            for &number in &rest.frames {
                self.store.stop.check().map_err(|_| StoreError::Interrupted)?;
                let frame = frame(number);
                let read = read_frame(&mut *reader, &mut position, frame);
                let bytes = match read {
                    Ok(bytes) => bytes,
                    Err(_) if breaks < BREAKS => {
                        breaks += 1;
                        break;
                    }
                    Err(error) => return Err(fetch_error(error)),
                };
                self.note(bytes.len() as u64);
                let run = match pack::decompress(frame, &bytes) {
                    Ok(run) => run,
                    Err(_) if damaged != Some(number) => {
                        damaged = Some(number);
                        break;
                    }
                    Err(error) => {
                        let what = error.to_string();
                        let digest = pack.digest;
                        return Err(ArtifactError::Damaged { digest, what }.into());
                    }
                };
                for target in &needed[&(job.pack, number)] {
                    assembly.place(target, &run)?;
                }
                done += 1;
            }
        }
        Ok(())
    }

    fn install_blobs(
        &self,
        config: &ArtifactConfig,
        wanted: &dyn Fn(&Digest) -> bool,
    ) -> Result<(), InstallError> {
        let staging = self.store.stage()?;
        for object in &config.objects {
            let ArtifactObject::Blob { digest, size, layer } = object else { continue };
            if !wanted(digest) || self.store.hold_blob(digest)? {
                continue;
            }
            let layer = self.manifest.layer(layer)?;
            if *size > MAX_BLOB_BYTES || layer.size > MAX_BLOB_BYTES {
                return Err(ArtifactError::TooLarge {
                    kind: "blob",
                    digest: *digest,
                    size: *size,
                    limit: MAX_BLOB_BYTES,
                }
                .into());
            }
            self.store.ensure_free(*size)?;
            let path = staging.join(digest.hex());
            let mut last = None;
            // Once more if it comes damaged.
            for _ in 0..2 {
                last = self.fetch_blob(layer, digest, *size, &path)?;
                if last.is_none() {
                    break;
                }
            }
            if let Some(what) = last {
                return Err(ArtifactError::Damaged { digest: *digest, what }.into());
            }
            self.store.adopt_blob(path)?;
        }
        Ok(())
    }

    /// Decompresses a layer into a file; says what is wrong with it, if something is.
    fn fetch_blob(
        &self,
        layer: &Descriptor,
        digest: &Digest,
        size: u64,
        path: &PathBuf,
    ) -> Result<Option<String>, InstallError> {
        let fetch_error = |source| InstallError::Fetch { digest: layer.digest, source };
        let reader = self.source.open(layer, 0, layer.size).map_err(fetch_error)?;
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .map_err(StoreError::io("create", path, size))?;
        let mut decoder = zstd::stream::read::Decoder::new(reader)
            .map_err(StoreError::io("decompress", path, 0))?
            .take(size + 1);
        let mut buffer = vec![0; 256 * 1024];
        loop {
            self.store.stop.check().map_err(|_| StoreError::Interrupted)?;
            let count = match decoder.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) => return Ok(Some(error.to_string())),
            };
            io::Write::write_all(&mut file, &buffer[..count])
                .map_err(StoreError::io("write", path, size))?;
        }
        self.note(layer.size);
        let (found, length) =
            crate::object::hash(&file, self.store.stop).map_err(StoreError::io("read", path, 0))?;
        if length > size {
            return Ok(Some(format!("it is larger than the {size} bytes announced")));
        }
        Ok((found != *digest).then(|| format!("it hashes to {found}")))
    }

    /// Fetches a small blob, verified.
    fn fetch(
        &self,
        blob: &Descriptor,
        kind: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, InstallError> {
        let bytes = fetch_verified(self.source, blob, kind, limit)?;
        self.note(bytes.len() as u64);
        Ok(bytes)
    }

    fn note(&self, bytes: u64) {
        self.fetched.fetch_add(bytes, Ordering::Relaxed);
        (self.observer)(InstallEvent::Fetched { bytes });
    }
}

/// Fetches a small blob and checks its digest; once more if it comes damaged.
///
/// # Errors
/// When it cannot be had, is larger than `limit`, or comes damaged twice.
pub fn fetch_verified(
    source: &dyn BlobSource,
    blob: &Descriptor,
    kind: &'static str,
    limit: u64,
) -> Result<Vec<u8>, InstallError> {
    let (digest, size) = (blob.digest, blob.size);
    if size > limit {
        return Err(ArtifactError::TooLarge { kind, digest, size, limit }.into());
    }
    let mut what = String::new();
    for _ in 0..2 {
        let mut bytes = Vec::new();
        let read = source
            .open(blob, 0, size)
            .and_then(|reader| reader.take(size + 1).read_to_end(&mut bytes));
        read.map_err(|source| InstallError::Fetch { digest, source })?;
        let found = Digest::of(&bytes);
        if found == digest {
            return Ok(bytes);
        }
        what = format!("its {} bytes hash to {found}", bytes.len());
    }
    Err(ArtifactError::Damaged { digest, what }.into())
}

fn decode_map(layer: &[u8], digest: &Digest) -> Result<PageMap, InstallError> {
    let mut bytes = Vec::new();
    let decoded = zstd::stream::read::Decoder::with_buffer(layer)
        .and_then(|decoder| decoder.take(MAX_MAP_BYTES + 1).read_to_end(&mut bytes));
    if let Err(error) = decoded {
        let what = format!("page map {digest} does not decompress ({error})");
        return Err(ArtifactError::Inconsistent(what).into());
    }
    let size = bytes.len() as u64;
    if size > MAX_MAP_BYTES {
        let limit = MAX_MAP_BYTES;
        let error = ArtifactError::TooLarge { kind: "page map", digest: *digest, size, limit };
        return Err(error.into());
    }
    PageMap::parse(&bytes)
        .map_err(|source| ArtifactError::Format { digest: *digest, source }.into())
}

impl Store {
    /// Journals an image and says whether it is here.
    pub(crate) fn hold_image(&self, digest: &Digest) -> Result<bool, StoreError> {
        let _lock = self.lock(crate::lock::Mode::Shared)?;
        self.hold_if_present(crate::object::Tree::Images, digest)
    }

    /// Journals a blob and says whether it is here.
    pub(crate) fn hold_blob(&self, digest: &Digest) -> Result<bool, StoreError> {
        let _lock = self.lock(crate::lock::Mode::Shared)?;
        self.hold_if_present(crate::object::Tree::Objects, digest)
    }
}

/// Removes the partial images that nobody is working on.
pub(crate) fn sweep_partial(store: &Store) -> Result<(), StoreError> {
    let directory = store.root().join("partial");
    for entry in fs::read_dir(&directory).map_err(StoreError::io("read", &directory, 0))? {
        let path = entry.map_err(StoreError::io("read", &directory, 0))?.path();
        let Ok(file) = File::options().read(true).write(true).open(&path) else { continue };
        let unheld = crate::lock::try_lock(&file, crate::lock::Mode::Exclusive);
        if unheld.map_err(StoreError::io("lock", &path, 0))? {
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}
