//! Turning images into packs: every page that is not yet in a pack goes into one, once.
//!
//! Work goes in three steps, the first and last on all processors: hash every page; decide, in
//! order, which pages are new and into which runs they go; compress the runs and append them. The
//! decision alone determines the bytes, so they do not depend on timing.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest as _, Sha256};

use crate::Digest;
use crate::artifact::{MAX_PACKS, PackRecord};
use crate::chunk::{self, is_zero};
use crate::error::StoreError;
use crate::pack::{self, Directory, PAGE, PageHash};
use crate::pagemap::Extent;
use crate::stop::Stop;

/// Where a page is: which run, and which page of it.
#[derive(Debug, Clone, Copy)]
struct Place {
    run: u32,
    page: u16,
}

/// Where a run is.
#[derive(Debug, Clone, Copy)]
struct RunPlace {
    pack: u16,
    frame: u32,
}

/// A pack that this artifact uses.
#[derive(Debug)]
pub(crate) struct UsedPack {
    pub(crate) record: PackRecord,
    pub(crate) pack_len: u64,
    pub(crate) directory_len: u64,
    /// The new pack's file and its directory's bytes; nothing for one that exists elsewhere.
    pub(crate) fresh: Option<(PathBuf, Vec<u8>)>,
}

/// The pages of an image that are not zero.
#[derive(Debug)]
pub(crate) struct HashedImage {
    file: File,
    path: PathBuf,
    size: u64,
    pages: Vec<(u32, PageHash)>,
}

/// How an image is cut into runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// At multiples of the run size in the image, so that the same stretch of data gives the same
    /// runs whatever went before it. For file systems.
    Aligned,
    /// As densely as can be. For memory, where what went before never stays the same.
    Dense,
}

/// An image's pages in terms of runs, until the runs have found their packs.
#[derive(Debug)]
pub(crate) struct PlacedImage {
    pub(crate) size: u64,
    /// First page in the image, count, run, first page in the run.
    extents: Vec<(u32, u32, u32, u16)>,
}

/// Collects runs into packs.
#[derive(Debug)]
pub(crate) struct Packer {
    directory: PathBuf,
    stop: Stop,
    level: i32,
    run_pages: usize,
    known: HashMap<PageHash, Place>,
    runs: Vec<RunPlace>,
    packs: Vec<UsedPack>,
    open: Option<OpenPack>,
    /// New pages, and their bytes compressed.
    pub(crate) new_pages: u64,
}

#[derive(Debug)]
struct OpenPack {
    path: PathBuf,
    file: File,
    hasher: Sha256,
    directory: Directory,
}

impl HashedImage {
    /// Hashes the pages of the image at `path`.
    pub(crate) fn new(path: &Path, stop: Stop) -> Result<Self, StoreError> {
        let io = |error| StoreError::io("read", path, 0)(error);
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        // A stretch is what one worker takes at a time.
        const STRETCH: u32 = 256 * 1024;
        let stretches = chunk::chunks_with_data(&file, STRETCH, size).map_err(io)?;
        let next = AtomicUsize::new(0);
        let found = Mutex::new(Vec::new());
        let worker = || -> std::io::Result<()> {
            let mut buffer = vec![0; STRETCH as usize];
            let mut pages = Vec::new();
            while let Some(&number) = stretches.get(next.fetch_add(1, Ordering::Relaxed)) {
                stop.check()?;
                let offset = u64::from(number) * u64::from(STRETCH);
                let len = (size - offset).min(u64::from(STRETCH)) as usize;
                file.read_exact_at(&mut buffer[..len], offset)?;
                // The image's last page may be short: it is carried with zeros behind it.
                buffer[len..].fill(0);
                let first = (offset / PAGE as u64) as u32;
                for (page, bytes) in
                    (first..).zip(buffer[..len.next_multiple_of(PAGE)].chunks(PAGE))
                {
                    if !is_zero(bytes) {
                        pages.push((page, PageHash::of(bytes)));
                    }
                }
            }
            let mut found = found.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            found.append(&mut pages);
            Ok(())
        };
        chunk::in_parallel(stretches.len(), &worker).map_err(io)?;
        let mut pages = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        pages.sort_unstable_by_key(|(page, _)| *page);
        Ok(Self { file, path: path.to_owned(), size, pages })
    }

    /// The pages, those in `first` before the others.
    fn in_order(&self, first: &[u32]) -> Vec<(u32, PageHash)> {
        let mut done = std::collections::HashSet::new();
        let mut order = Vec::with_capacity(self.pages.len());
        for page in first {
            if let Ok(at) = self.pages.binary_search_by_key(page, |(page, _)| *page)
                && done.insert(*page)
            {
                order.push(self.pages[at]);
            }
        }
        order.extend(self.pages.iter().filter(|(page, _)| !done.contains(page)));
        order
    }

    pub(crate) fn hashes(&self) -> impl Iterator<Item = PageHash> {
        self.pages.iter().map(|(_, hash)| *hash)
    }
}

impl Packer {
    /// Packs go to `directory`, in runs of at most `run_pages` pages.
    pub(crate) fn new(directory: &Path, level: i32, run_pages: u32, stop: Stop) -> Self {
        Self {
            directory: directory.to_owned(),
            stop,
            level,
            run_pages: run_pages.clamp(1, pack::MAX_RUN_PAGES) as usize,
            known: HashMap::new(),
            runs: Vec::new(),
            packs: Vec::new(),
            open: None,
            new_pages: 0,
        }
    }

    /// Makes the pages of a pack that exists elsewhere known.
    pub(crate) fn build_upon(
        &mut self,
        record: PackRecord,
        directory: &Directory,
        encoded_len: u64,
    ) {
        if self.packs.len() >= MAX_PACKS / 2 {
            return;
        }
        let pack = self.packs.len() as u16;
        for (frame, content) in (0..).zip(directory.frames()) {
            let run = self.runs.len() as u32;
            self.runs.push(RunPlace { pack, frame });
            for (page, hash) in (0..).zip(&content.pages) {
                self.known.entry(*hash).or_insert(Place { run, page });
            }
        }
        self.packs.push(UsedPack {
            record,
            pack_len: directory.pack_len(),
            directory_len: encoded_len,
            fresh: None,
        });
    }

    /// Puts those of the image's pages into packs that are not in one. The pages named in `first`
    /// go first, in that order, so that they lie together.
    pub(crate) fn add(
        &mut self,
        image: &HashedImage,
        cut: Cut,
        first: &[u32],
    ) -> Result<PlacedImage, StoreError> {
        let first_run = self.runs.len() as u32;
        let mut new_runs: Vec<Vec<u32>> = Vec::new();
        let mut window = None;
        let mut placed: Vec<(u32, Place)> = Vec::with_capacity(image.pages.len());
        for (page, hash) in image.in_order(first) {
            let place = self.known.get(&hash).copied().unwrap_or_else(|| {
                let here = page / self.run_pages as u32;
                let full = new_runs.last().is_none_or(|run| run.len() >= self.run_pages);
                if full || cut == Cut::Aligned && window != Some(here) {
                    new_runs.push(Vec::with_capacity(self.run_pages));
                    window = Some(here);
                }
                let run = first_run + new_runs.len() as u32 - 1;
                let pages = new_runs.last_mut().expect("pushed above");
                pages.push(page);
                let place = Place { run, page: pages.len() as u16 - 1 };
                self.known.insert(hash, place);
                place
            });
            placed.push((page, place));
        }
        placed.sort_unstable_by_key(|(page, _)| *page);
        let mut extents: Vec<(u32, u32, u32, u16)> = Vec::new();
        for (page, place) in placed {
            match extents.last_mut() {
                Some((first, count, run, start))
                    if *first + *count == page
                        && *run == place.run
                        && u32::from(*start) + *count == u32::from(place.page) =>
                {
                    *count += 1;
                }
                _ => extents.push((page, 1, place.run, place.page)),
            }
        }
        self.write_runs(image, &new_runs)?;
        Ok(PlacedImage { size: image.size, extents })
    }

    /// Closes the pack being written, so that what follows is not mixed with what went before.
    pub(crate) fn close(&mut self) -> Result<(), StoreError> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let directory = open.directory.encode();
        let pack = Digest::from_bytes(open.hasher.finalize().into());
        let path = self.directory.join(pack.hex());
        std::fs::rename(&open.path, &path).map_err(StoreError::io("rename", &path, 0))?;
        self.packs.push(UsedPack {
            record: PackRecord { pack, directory: Digest::of(&directory) },
            pack_len: open.directory.pack_len(),
            directory_len: directory.len() as u64,
            fresh: Some((path, directory)),
        });
        Ok(())
    }

    /// The packs so far. Everything must be closed.
    pub(crate) fn packs(&self) -> &[UsedPack] {
        &self.packs
    }

    /// The packs an image needs, and the image's pages in terms of all packs. Everything must be
    /// closed.
    pub(crate) fn extents(&self, image: &PlacedImage) -> Vec<Extent> {
        let extent = |&(page, count, run, first): &(u32, u32, u32, u16)| {
            let RunPlace { pack, frame } = self.runs[run as usize];
            Extent { page, count, pack, frame, first }
        };
        image.extents.iter().map(extent).collect()
    }

    fn write_runs(&mut self, image: &HashedImage, runs: &[Vec<u32>]) -> Result<(), StoreError> {
        // Enough runs at a time to keep every processor busy, few enough to keep in memory.
        const BATCH: usize = 128;
        for batch in runs.chunks(BATCH) {
            let next = AtomicUsize::new(0);
            let done: Mutex<Vec<_>> = Mutex::new((0..batch.len()).map(|_| None).collect());
            let worker = || -> std::io::Result<()> {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(pages) = batch.get(number) else { return Ok(()) };
                    self.stop.check()?;
                    let run = read_pages(image, pages)?;
                    let hashes = run.chunks(PAGE).map(PageHash::of).collect();
                    let frame = pack::compress(&run, self.level)?;
                    let result = (Digest::of(&run), hashes, frame);
                    let mut done = done.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    done[number] = Some(result);
                }
            };
            chunk::in_parallel(batch.len(), &worker).map_err(StoreError::io(
                "read",
                &image.path,
                0,
            ))?;
            let done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
            for (digest, hashes, frame) in done.into_iter().flatten() {
                self.append(digest, hashes, &frame)?;
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        digest: Digest,
        hashes: Vec<PageHash>,
        frame: &[u8],
    ) -> Result<(), StoreError> {
        let open = match &mut self.open {
            Some(open) => open,
            empty => {
                let path = self.directory.join(format!("pack-{}", self.packs.len()));
                let file = File::create_new(&path).map_err(StoreError::io("create", &path, 0))?;
                let directory = Directory::default();
                empty.insert(OpenPack { path, file, hasher: Sha256::new(), directory })
            }
        };
        open.file.write_all(frame).map_err(StoreError::io(
            "write",
            &open.path,
            frame.len() as u64,
        ))?;
        open.hasher.update(frame);
        self.new_pages += hashes.len() as u64;
        // Packs are counted up to MAX_PACKS, which the artifact checks.
        self.runs.push(RunPlace {
            pack: self.packs.len() as u16,
            frame: open.directory.frames().len() as u32,
        });
        open.directory.push(digest, frame.len() as u32, hashes);
        if pack::closes_after(&digest, open.directory.pack_len()) {
            self.close()?;
        }
        Ok(())
    }
}

/// The bytes of some pages of an image, one after the other.
fn read_pages(image: &HashedImage, pages: &[u32]) -> std::io::Result<Vec<u8>> {
    let mut run = vec![0; pages.len() * PAGE];
    let mut done = 0;
    for stretch in pages.chunk_by(|a, b| a + 1 == *b) {
        let offset = u64::from(stretch[0]) * PAGE as u64;
        let len = image.size.saturating_sub(offset).min((stretch.len() * PAGE) as u64) as usize;
        image.file.read_exact_at(&mut run[done..done + len], offset)?;
        done += stretch.len() * PAGE;
    }
    Ok(run)
}
