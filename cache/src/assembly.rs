//! Images being put together: which chunks are right already, and which pages are wanted.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::FallocateFlags;

use crate::Digest;
use crate::chunk::{self, ScanError, is_zero};
use crate::error::StoreError;
use crate::index::{Chunk, ChunkIndex};
use crate::lock::{self, Mode};
use crate::object::Tree;
use crate::pack::PAGE;
use crate::pagemap::{Extent, PageMap};
use crate::stop::Stop;
use crate::store::Store;

/// An image to be put together.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) digest: Digest,
    pub(crate) index: ChunkIndex,
    pub(crate) map: PageMap,
}

/// A stretch of pages that is wanted, and the image it is wanted in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) image: usize,
    pub(crate) extent: Extent,
}

/// Images being put together, each under its own lock.
#[derive(Debug)]
pub(crate) struct Assembly {
    store: Store,
    images: Vec<Image>,
    reused_bytes: u64,
}

#[derive(Debug)]
struct Image {
    part: Part,
    path: PathBuf,
    file: File,
    /// Chunks that are not there yet, ascending.
    missing: Vec<Chunk>,
}

impl Assembly {
    /// Takes up the images, waiting for another process that is at one of them; nothing when they
    /// are all there afterwards.
    pub(crate) fn begin(store: &Store, parts: Vec<Part>) -> Result<Option<Self>, StoreError> {
        let mut images = Vec::new();
        // One order for everybody, so that no two wait for each other.
        let mut parts = parts;
        parts.sort_by_key(|part| part.digest);
        parts.dedup_by_key(|part| part.digest);
        for part in parts {
            if let Some(image) = Image::open(store, part)? {
                images.push(image);
            }
        }
        if images.is_empty() {
            return Ok(None);
        }
        let mut assembly = Self { store: store.clone(), images, reused_bytes: 0 };
        let whole: u64 = assembly.images.iter().map(|image| image.part.index.data_bytes()).sum();
        assembly.find_missing()?;
        assembly.reuse_local()?;
        assembly.reused_bytes = whole - assembly.missing_bytes();
        Ok(Some(assembly))
    }

    /// Where the image of that digest is, counted among those being put together.
    pub(crate) fn position(&self, digest: &Digest) -> Option<usize> {
        self.images.iter().position(|image| image.part.digest == *digest)
    }

    /// The file that an image is put together in. It stays the same file when published.
    pub(crate) fn path(&self, image: usize) -> &std::path::Path {
        &self.images[image].path
    }

    /// Bytes of the images that were there already.
    pub(crate) fn reused_bytes(&self) -> u64 {
        self.reused_bytes
    }

    /// Bytes that are still to come.
    pub(crate) fn missing_bytes(&self) -> u64 {
        let bytes = |image: &Image| -> u64 {
            let len = |chunk: &Chunk| image.part.index.extent(chunk.number).1 as u64;
            image.missing.iter().map(len).sum()
        };
        self.images.iter().map(bytes).sum()
    }

    /// The packs that missing pages are in.
    pub(crate) fn needed_packs(&self) -> HashSet<u16> {
        self.targets().map(|target| target.extent.pack).collect()
    }

    /// The pages that missing chunks need.
    pub(crate) fn targets(&self) -> impl Iterator<Item = Target> {
        self.images.iter().enumerate().flat_map(|(number, image)| {
            let per_chunk = (image.part.index.chunk_size() as usize / PAGE) as u32;
            let wanted: HashSet<u32> = image.missing.iter().map(|chunk| chunk.number).collect();
            image
                .part
                .map
                .extents()
                .iter()
                .filter(move |extent| {
                    let last = extent.page + extent.count - 1;
                    (extent.page / per_chunk..=last / per_chunk).any(|n| wanted.contains(&n))
                })
                .map(move |extent| Target { image: number, extent: *extent })
        })
    }

    /// Writes the pages a run has for a target. The target fits the run.
    pub(crate) fn place(&self, target: &Target, run: &[u8]) -> Result<(), StoreError> {
        let image = &self.images[target.image];
        let first = usize::from(target.extent.first) * PAGE;
        let offset = u64::from(target.extent.page) * PAGE as u64;
        let len = (target.extent.count as usize * PAGE)
            .min((image.part.index.image_size() - offset) as usize);
        image.file.write_all_at(&run[first..first + len], offset).map_err(StoreError::io(
            "write",
            &image.path,
            len as u64,
        ))
    }

    /// Hashes the chunks that were missing; those that are still wrong stay missing and are
    /// returned.
    pub(crate) fn check(&mut self) -> Result<Vec<(Digest, u32)>, StoreError> {
        let mut wrong = Vec::new();
        for image in &mut self.images {
            let missing = std::mem::take(&mut image.missing);
            image.missing = differing(&image.file, &image.part.index, &missing, self.store.stop)
                .map_err(StoreError::io("read", &image.path, 0))?;
            wrong.extend(image.missing.iter().map(|chunk| (image.part.digest, chunk.number)));
        }
        Ok(wrong)
    }

    /// Publishes the images. All have been checked. Returns how many bytes were there before.
    pub(crate) fn finish(self) -> Result<u64, StoreError> {
        for image in &self.images {
            self.store.adopt_indexed(&image.path, &image.file, &image.part.index)?;
        }
        Ok(self.reused_bytes)
    }

    /// Finds out what is right in the partial files, and clears what is not.
    fn find_missing(&mut self) -> Result<(), StoreError> {
        for image in &mut self.images {
            let index = &image.part.index;
            let found =
                match chunk::scan_until(&image.file, index.chunk_size(), false, self.store.stop) {
                    Ok(found) => found,
                    Err(ScanError::Io(error)) => {
                        return Err(StoreError::io("read", &image.path, 0)(error));
                    }
                    Err(ScanError::Index(source)) => {
                        return Err(StoreError::Index { digest: image.part.digest, source });
                    }
                };
            let found: HashMap<u32, Digest> =
                found.chunks().iter().map(|chunk| (chunk.number, chunk.digest)).collect();
            let right = |chunk: &Chunk| found.get(&chunk.number) == Some(&chunk.digest);
            let (have, missing): (Vec<Chunk>, Vec<Chunk>) =
                index.chunks().iter().copied().partition(right);
            image.missing = missing;
            let have: HashSet<u32> = have.iter().map(|chunk| chunk.number).collect();
            for &number in found.keys().filter(|number| !have.contains(number)) {
                let (offset, len) = index.extent(number);
                clear(&image.file, offset, len).map_err(StoreError::io(
                    "write",
                    &image.path,
                    len as u64,
                ))?;
            }
        }
        Ok(())
    }

    /// Takes chunks from other images of the store.
    fn reuse_local(&mut self) -> Result<(), StoreError> {
        let mut wanted: HashSet<Digest> = HashSet::new();
        for image in &self.images {
            wanted.extend(image.missing.iter().map(|chunk| chunk.digest));
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let mut found: HashMap<Digest, (usize, u64)> = HashMap::new();
        let mut files = Vec::new();
        let mut present = Vec::new();
        self.store.walk(Tree::Images, |digest, _, _| {
            present.extend(digest);
            Ok(())
        })?;
        // So that a tie is broken the same way every time.
        present.sort_unstable();
        for digest in present {
            // One that is damaged or being collected just does not help.
            let (Ok(index), Ok(path)) = (self.store.index(&digest), self.store.path(&digest))
            else {
                continue;
            };
            let useful = |chunk: &&Chunk| wanted.contains(&chunk.digest);
            let mut useful = index.chunks().iter().filter(useful).peekable();
            if useful.peek().is_none() {
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            for chunk in useful {
                let place = (files.len(), index.extent(chunk.number).0);
                found.entry(chunk.digest).or_insert(place);
            }
            files.push(file);
        }
        for image in &mut self.images {
            let index = &image.part.index;
            let mut copied = Vec::new();
            for chunk in &image.missing {
                let Some(&(file, from)) = found.get(&chunk.digest) else { continue };
                let (offset, len) = index.extent(chunk.number);
                let stopped = |_| StoreError::Interrupted;
                self.store.stop.check().map_err(stopped)?;
                copy_range(&files[file], &image.file, (from, offset), len)
                    .map_err(StoreError::io("write", &image.path, len as u64))?;
                copied.push(*chunk);
            }
            // What another image has is trusted no more than what comes from elsewhere.
            let wrong = differing(&image.file, index, &copied, self.store.stop)
                .map_err(StoreError::io("read", &image.path, 0))?;
            for chunk in &wrong {
                let (offset, len) = index.extent(chunk.number);
                clear(&image.file, offset, len).map_err(StoreError::io(
                    "write",
                    &image.path,
                    len as u64,
                ))?;
            }
            let wrong: HashSet<u32> = wrong.iter().map(|chunk| chunk.number).collect();
            let right: HashSet<u32> =
                copied.iter().map(|chunk| chunk.number).filter(|n| !wrong.contains(n)).collect();
            image.missing.retain(|chunk| !right.contains(&chunk.number));
        }
        Ok(())
    }
}

impl Image {
    /// Opens and locks the partial file; nothing when the image is there by now.
    fn open(store: &Store, part: Part) -> Result<Option<Self>, StoreError> {
        let path = store.root().join("partial").join(part.digest.hex());
        loop {
            let file = {
                // Not while a collector looks at who is working on what.
                let _lock = store.lock(Mode::Shared)?;
                // One that was about to be published is read-only already.
                let _ = fs::set_permissions(&path, fs::Permissions::from_mode(0o644));
                let file = File::options()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(&path)
                    .map_err(StoreError::io("create", &path, 4096))?;
                lock::try_lock(&file, Mode::Exclusive)
                    .map_err(StoreError::io("lock", &path, 0))?
                    .then_some(file)
            };
            let Some(file) = file else {
                std::thread::sleep(std::time::Duration::from_millis(100));
                if store.hold_image(&part.digest)? {
                    return Ok(None);
                }
                continue;
            };
            if store.hold_image(&part.digest)? {
                let _ = fs::remove_file(&path);
                return Ok(None);
            }
            // The one who held it may have published or removed it under this name.
            let same = fs::metadata(&path).is_ok_and(|named| {
                use std::os::unix::fs::MetadataExt as _;
                file.metadata().is_ok_and(|open| open.ino() == named.ino())
            });
            if !same {
                continue;
            }
            file.set_len(part.index.image_size()).map_err(StoreError::io("write", &path, 0))?;
            return Ok(Some(Self { part, path, file, missing: Vec::new() }));
        }
    }
}

/// Those of `chunks` that the file does not have as the index says.
fn differing(
    file: &File,
    index: &ChunkIndex,
    chunks: &[Chunk],
    stop: Stop,
) -> io::Result<Vec<Chunk>> {
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    let worker = || -> io::Result<()> {
        let mut buffer = vec![0; index.chunk_size() as usize];
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            stop.check()?;
            let (offset, len) = index.extent(chunk.number);
            file.read_exact_at(&mut buffer[..len], offset)?;
            if Digest::of(&buffer[..len]) != chunk.digest {
                wrong.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(*chunk);
            }
        }
        Ok(())
    };
    chunk::in_parallel(chunks.len().div_ceil(8), &worker)?;
    let mut wrong = wrong.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    wrong.sort_unstable_by_key(|chunk| chunk.number);
    Ok(wrong)
}

/// Makes a stretch of a file zero, as a hole where that works.
fn clear(file: &File, offset: u64, len: usize) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(file, mode, offset, len as u64).is_ok() {
        return Ok(());
    }
    let zeros = vec![0; len];
    debug_assert!(is_zero(&zeros));
    file.write_all_at(&zeros, offset)
}

/// Chunks of a file as another image has them, for reuse.
fn copy_range(from: &File, to: &File, offset: (u64, u64), len: usize) -> io::Result<()> {
    // Shares blocks where the file system can, and copies in the kernel where it cannot.
    let (mut at, mut put, mut left) = (offset.0, offset.1, len);
    while left > 0 {
        match rustix::fs::copy_file_range(from, Some(&mut at), to, Some(&mut put), left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => left -= count,
            Err(_) => {
                let mut buffer = vec![0; left];
                from.read_exact_at(&mut buffer, at)?;
                to.write_all_at(&buffer, put)?;
                left = 0;
            }
        }
    }
    Ok(())
}
