//! Using a template before it has arrived.
//!
//! ```text
//!            begin                       finish, everything here and checked
//!   nothing ───────► usable ───────────────────────────────────────────────► installed
//!                      │  ensure: what a sandbox touches, first
//!                      │  background: the working set in its order, then the rest
//!                      └─ dropped: what has arrived stays in partial/ for the next time
//! ```
//! `begin` fetches what is small: documents, state, indexes, page maps, directories. The images are
//! files that fill up. Whoever reads one says first which bytes ([`LazyPull::ensure`]), and reads
//! them when that returns: they are there, and every run of pages they came in was checked against
//! the digest in its pack's directory; whole chunks are checked against the image's index before it
//! is published. The files stay the same files then, so nothing needs to be opened again. The kernel,
//! which no restore needs, comes at the end.
//!
//! With [`LazyPull::begin_held`], the background stops after the working set until
//! [`LazyPull::release`]: what the first command of a sandbox waits for has the line for itself.
//!
//! # When the registry goes away
//! A fetch that fails is tried again as long as the pull lives. Whoever waits gets an error that
//! says what happened, at its own deadline or, if it so chooses, at once. Nobody waits for ever.
//!
//! # Who holds what
//! One lock guards the queues; it is never held over input or output. Worker threads fetch; they
//! end when all is here, or when the pull is dropped.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Digest;
use crate::artifact::{ArtifactConfig, ArtifactError, Manifest};
use crate::assembly::{Assembly, Target};
use crate::error::StoreError;
use crate::fetch_plan::{MAX_GAP, needed_frames, read_frame};
use crate::install::{BlobSource, InstallError, Installed, Installer};
use crate::pack::{self, Directory, PAGE};
use crate::store::Store;
use crate::template::{SnapshotManifest, TemplateManifest};
use crate::working_set::{Role, WorkingSet};

/// How much the background fetches in one go: little enough not to keep the urgent waiting.
const BACKGROUND_BYTES: u64 = 2 * 1024 * 1024;
/// The longest pause after a fetch that failed.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// How long a reader waits.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// At most so long.
    pub deadline: Duration,
    /// Give up as soon as a fetch fails, rather than at the deadline.
    pub fail_fast: bool,
}

/// Bytes that are not here and did not come.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyError {
    /// They did not come in time.
    #[error("bytes {start}.. of {image} did not arrive within {seconds:.1} s{last}")]
    Late {
        /// The image.
        image: Digest,
        /// The first byte asked for.
        start: u64,
        /// How long it was waited.
        seconds: f64,
        /// What went wrong last, after a colon; empty when nothing did.
        last: String,
    },
    /// A fetch failed, and the reader did not want to wait for another.
    #[error("cannot fetch bytes {start}.. of {image}: {what}")]
    Lost {
        /// The image.
        image: Digest,
        /// The first byte asked for.
        start: u64,
        /// What went wrong.
        what: String,
    },
    /// They came, twice, and are not what they should be.
    #[error("chunk {chunk} of {image} arrived damaged")]
    Damaged {
        /// The image.
        image: Digest,
        /// The chunk.
        chunk: u32,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The rest could not be installed.
    #[error(transparent)]
    Install(#[from] InstallError),
}

/// How far a pull has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes fetched, all kinds.
    pub fetched_bytes: u64,
    /// Bytes of frames still to fetch.
    pub left_bytes: u64,
}

/// A template that is usable while it arrives.
pub struct LazyPull {
    inner: Option<Arc<Inner>>,
    workers: Vec<JoinHandle<()>>,
    store: Store,
    manifest: Arc<Manifest>,
    config: ArtifactConfig,
    source: Arc<dyn BlobSource + Send + Sync>,
    small_bytes: u64,
    /// The working set's pages.
    wanted: HashSet<(Digest, u32)>,
}

type FrameId = (u16, u32);

struct Inner {
    source: Arc<dyn BlobSource + Send + Sync>,
    manifest: Arc<Manifest>,
    packs: Vec<Digest>,
    directories: BTreeMap<u16, Directory>,
    assembly: Assembly,
    targets: HashMap<FrameId, Vec<Target>>,
    /// The frame, or the frames, that a page needs.
    frames_of: HashMap<(usize, u32), Vec<FrameId>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Wanted by someone who waits, first come first served.
    urgent: VecDeque<FrameId>,
    /// Wanted sooner or later, in this order.
    background: VecDeque<FrameId>,
    /// The same, but not yet.
    held: VecDeque<FrameId>,
    fetching: HashSet<FrameId>,
    placed: HashSet<FrameId>,
    /// Pages all of whose frames are placed.
    right: HashSet<(usize, u32)>,
    /// Frames that came damaged once.
    suspect: HashSet<FrameId>,
    /// How many fetches have failed, and how the last one did.
    failures: u64,
    last_failure: String,
    broken: Option<(FrameId, String)>,
    fetched_bytes: u64,
    stop: bool,
}

impl LazyPull {
    /// Fetches what is small and starts fetching the rest.
    ///
    /// # Errors
    /// When that cannot be had or is not usable.
    pub fn begin(
        store: &Store,
        source: Arc<dyn BlobSource + Send + Sync>,
        manifest: Manifest,
        config: ArtifactConfig,
    ) -> Result<Self, InstallError> {
        let pull = Self::begin_held(store, source, manifest, config)?;
        pull.release();
        Ok(pull)
    }

    /// The same, but of the rest only the working set, until [`LazyPull::release`].
    ///
    /// # Errors
    /// As [`LazyPull::begin`].
    pub fn begin_held(
        store: &Store,
        source: Arc<dyn BlobSource + Send + Sync>,
        manifest: Manifest,
        config: ArtifactConfig,
    ) -> Result<Self, InstallError> {
        let manifest = Arc::new(manifest);
        let small = std::sync::atomic::AtomicU64::new(0);
        let count = |event| {
            if let crate::install::InstallEvent::Fetched { bytes } = event {
                small.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            }
        };
        let installer = Installer::new(store, &*source, &manifest, &count);
        installer.install_first(&config)?;
        let order = working_set(&installer, store, &config)?;
        let assembly = Assembly::begin(store, installer.parts(&config)?)?;
        let inner = match assembly {
            None => None,
            Some(assembly) => {
                store.ensure_free(assembly.missing_bytes())?;
                let directories = installer.directories(&config, &assembly.needed_packs())?;
                let targets = needed_frames(&assembly, &directories, &config)?;
                let packs = config.packs.iter().map(|record| record.pack).collect();
                let (source, manifest) = (Arc::clone(&source), Arc::clone(&manifest));
                let inner = Inner::new(source, manifest, packs, directories, assembly, targets);
                inner.queue_background(&order);
                Some(Arc::new(inner))
            }
        };
        let workers = match &inner {
            None => Vec::new(),
            Some(inner) => (0..source.parallel().max(1))
                .map(|_| {
                    let inner = Arc::clone(inner);
                    std::thread::spawn(move || inner.work())
                })
                .collect(),
        };
        let small_bytes = small.into_inner();
        let (store, wanted) = (store.clone(), order.into_iter().collect());
        Ok(Self { inner, workers, store, manifest, config, source, small_bytes, wanted })
    }

    /// Where an image of the template is: complete or filling up, it is the same file.
    ///
    /// # Errors
    /// When the template has no such image.
    pub fn path(&self, image: &Digest) -> Result<PathBuf, StoreError> {
        let filling = self.inner.as_ref().and_then(|inner| {
            inner.assembly.position(image).map(|at| inner.assembly.path(at).to_owned())
        });
        filling.map_or_else(|| self.store.path(image), Ok)
    }

    /// Lets the rest come.
    pub fn release(&self) {
        if let Some(inner) = &self.inner {
            let mut state = inner.lock();
            let held = std::mem::take(&mut state.held);
            state.background.extend(held);
            inner.changed.notify_all();
        }
    }

    /// Waits until the bytes are there, and right.
    ///
    /// # Errors
    /// When they do not come in time, or come damaged.
    pub fn ensure(
        &self,
        image: &Digest,
        range: Range<u64>,
        patience: Patience,
    ) -> Result<(), LazyError> {
        let Some(inner) = &self.inner else { return Ok(()) };
        // What is not being put together was there from the beginning.
        let Some(position) = inner.assembly.position(image) else { return Ok(()) };
        inner.ensure(image, position, &range, patience)
    }

    /// Whether the bytes belong to the working set and are there and right, without waiting.
    #[must_use]
    pub fn is_there(&self, image: &Digest, range: Range<u64>) -> bool {
        let Some(inner) = &self.inner else { return false };
        let Some(position) = inner.assembly.position(image) else { return false };
        let state = inner.lock();
        let placed = |page: u64| {
            let Ok(page) = u32::try_from(page) else { return false };
            if !self.wanted.contains(&(*image, page)) {
                return false;
            }
            let frames = inner.frames_of.get(&(position, page));
            frames.is_none_or(|frames| frames.iter().all(|id| state.placed.contains(id)))
        };
        (range.start / PAGE as u64..range.end.div_ceil(PAGE as u64)).all(placed)
    }

    /// Waits until the working set is there; without one, for nothing.
    ///
    /// # Errors
    /// As [`LazyPull::ensure`].
    pub fn ensure_working_set(&self, patience: Patience) -> Result<(), LazyError> {
        let started = Instant::now();
        let Some(digest) = &self.config.working_set else { return Ok(()) };
        let set: WorkingSet = self.store.get_json(digest)?;
        let images = images(&self.store, &self.config)?;
        for touch in &set.touches {
            let Some(image) = images.get(&touch.0) else { continue };
            let start = u64::from(touch.1) * PAGE as u64;
            let end = start + u64::from(touch.2) * PAGE as u64;
            let left = patience.deadline.saturating_sub(started.elapsed());
            self.ensure(image, start..end, Patience { deadline: left, ..patience })?;
        }
        Ok(())
    }

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let Some(inner) = &self.inner else {
            return Progress { fetched_bytes: self.small_bytes, left_bytes: 0 };
        };
        let state = inner.lock();
        let left = inner.targets.keys().filter(|id| !state.placed.contains(*id));
        Progress {
            fetched_bytes: self.small_bytes + state.fetched_bytes,
            left_bytes: left.map(|id| u64::from(inner.frame(*id).len)).sum(),
        }
    }

    /// Waits for everything and installs it: from then on the template is as any other. Nothing
    /// happens when the deadline passes; call it again.
    ///
    /// # Errors
    /// When it is not all there in time, or not right.
    pub fn finish(&mut self, patience: Patience) -> Result<Installed, LazyError> {
        if let Some(inner) = &self.inner {
            inner.wait_for_all(patience)?;
            for worker in self.workers.drain(..) {
                let _ = worker.join();
            }
        }
        if let Some(inner) = self.inner.take() {
            // The workers had the only other ones.
            let mut assembly = Arc::into_inner(inner).map(|inner| inner.assembly);
            if let Some(assembly) = &mut assembly
                && let Some((image, chunk)) = assembly.check()?.first()
            {
                return Err(LazyError::Damaged { image: *image, chunk: *chunk });
            }
            assembly.map(Assembly::finish).transpose()?;
        }
        let installer = Installer::new(&self.store, &*self.source, &self.manifest, &|_| ());
        Ok(installer.install(&self.config)?)
    }
}

impl Drop for LazyPull {
    fn drop(&mut self) {
        if let Some(inner) = &self.inner {
            inner.lock().stop = true;
            inner.changed.notify_all();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl Inner {
    fn new(
        source: Arc<dyn BlobSource + Send + Sync>,
        manifest: Arc<Manifest>,
        packs: Vec<Digest>,
        directories: BTreeMap<u16, Directory>,
        assembly: Assembly,
        targets: HashMap<FrameId, Vec<Target>>,
    ) -> Self {
        let mut frames_of: HashMap<(usize, u32), Vec<FrameId>> = HashMap::new();
        for (id, targets) in &targets {
            for target in targets {
                for number in target.extent.page..target.extent.page + target.extent.count {
                    let frames = frames_of.entry((target.image, number)).or_default();
                    if frames.last() != Some(id) {
                        frames.push(*id);
                    }
                }
            }
        }
        let state = Mutex::default();
        let changed = Condvar::new();
        Self { source, manifest, packs, directories, assembly, targets, frames_of, state, changed }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn frame(&self, (pack, number): FrameId) -> &pack::Frame {
        &self.directories[&pack].frames()[number as usize]
    }

    /// Queues the working set in its order; holds everything else, in the packs' order.
    fn queue_background(&self, order: &[(Digest, u32)]) {
        let mut state = self.lock();
        let mut queued = HashSet::new();
        for (image, page) in order {
            let Some(position) = self.assembly.position(image) else { continue };
            for id in self.frames_of.get(&(position, *page)).into_iter().flatten() {
                if queued.insert(*id) {
                    state.background.push_back(*id);
                }
            }
        }
        let mut rest: Vec<_> =
            self.targets.keys().copied().filter(|id| !queued.contains(id)).collect();
        rest.sort_unstable();
        state.held.extend(rest);
    }

    fn ensure(
        &self,
        image: &Digest,
        position: usize,
        range: &Range<u64>,
        patience: Patience,
    ) -> Result<(), LazyError> {
        let started = Instant::now();
        let pages: Vec<u32> = (range.start / PAGE as u64..range.end.div_ceil(PAGE as u64))
            .filter_map(|number| u32::try_from(number).ok())
            .filter(|number| self.frames_of.contains_key(&(position, *number)))
            .collect();
        let mut state = self.lock();
        let failures_before = state.failures;
        for page in pages {
            let key = (position, page);
            loop {
                if state.right.contains(&key) {
                    break;
                }
                let frames = &self.frames_of[&key];
                let absent: Vec<FrameId> =
                    frames.iter().copied().filter(|id| !state.placed.contains(id)).collect();
                if absent.is_empty() {
                    state.right.insert(key);
                    break;
                }
                if let Some((id, what)) = &state.broken
                    && frames.contains(id)
                {
                    let what = what.clone();
                    return Err(LazyError::Lost { image: *image, start: range.start, what });
                }
                if patience.fail_fast && state.failures > failures_before {
                    let what = state.last_failure.clone();
                    return Err(LazyError::Lost { image: *image, start: range.start, what });
                }
                for id in absent {
                    if !state.fetching.contains(&id) && !state.urgent.contains(&id) {
                        state.urgent.push_back(id);
                    }
                }
                self.changed.notify_all();
                let Some(left) = patience.deadline.checked_sub(started.elapsed()) else {
                    let seconds = started.elapsed().as_secs_f64();
                    let last = match state.last_failure.as_str() {
                        "" => String::new(),
                        what => format!(": {what}"),
                    };
                    return Err(LazyError::Late {
                        image: *image,
                        start: range.start,
                        seconds,
                        last,
                    });
                };
                state = self
                    .changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(std::sync::PoisonError::into_inner)
                    .0;
            }
        }
        Ok(())
    }

    fn wait_for_all(&self, patience: Patience) -> Result<(), LazyError> {
        let started = Instant::now();
        let mut state = self.lock();
        let before = state.failures;
        while state.placed.len() < self.targets.len() {
            let image = Digest::of(&[]);
            let image = self.packs.first().copied().unwrap_or(image);
            if let Some((_, what)) = &state.broken {
                return Err(LazyError::Lost { image, start: 0, what: what.clone() });
            }
            if patience.fail_fast && state.failures > before {
                let what = state.last_failure.clone();
                return Err(LazyError::Lost { image, start: 0, what });
            }
            let Some(left) = patience.deadline.checked_sub(started.elapsed()) else {
                let seconds = started.elapsed().as_secs_f64();
                let last = format!(": {}", state.last_failure);
                return Err(LazyError::Late { image, start: 0, seconds, last });
            };
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    /// A worker's life.
    fn work(&self) {
        let mut failed_in_a_row = 0;
        while let Some(batch) = self.take() {
            match self.fetch(&batch) {
                Ok(()) => failed_in_a_row = 0,
                Err(error) => {
                    failed_in_a_row += 1;
                    let mut state = self.lock();
                    state.failures += 1;
                    state.last_failure = error;
                    for id in batch.iter().rev() {
                        // Those that came before it broke are placed.
                        if state.fetching.remove(id) && !state.placed.contains(id) {
                            state.background.push_front(*id);
                        }
                    }
                    self.changed.notify_all();
                    let pause = Duration::from_millis(50 << failed_in_a_row.min(7)).min(MAX_PAUSE);
                    // Woken early when the pull ends.
                    let _ = self.changed.wait_timeout_while(state, pause, |state| !state.stop);
                }
            }
        }
    }

    /// The next frames to fetch, close together in one pack; nothing when all is done.
    fn take(&self) -> Option<Vec<FrameId>> {
        let mut state = self.lock();
        loop {
            if state.stop || state.placed.len() == self.targets.len() || state.broken.is_some() {
                self.changed.notify_all();
                return None;
            }
            let State { urgent, background, fetching, placed, .. } = &mut *state;
            let open = |id: &FrameId| !fetching.contains(id) && !placed.contains(id);
            urgent.retain(open);
            while background.front().is_some_and(|id| !open(id)) {
                background.pop_front();
            }
            let (queue, limit) =
                if urgent.is_empty() { (background, BACKGROUND_BYTES) } else { (urgent, u64::MAX) };
            let mut batch: Vec<FrameId> = Vec::new();
            while let Some(&id) = queue.front() {
                if !fetching.contains(&id) && !placed.contains(&id) {
                    if let (Some(&first), Some(&last)) = (batch.first(), batch.last()) {
                        let (first, last, next) =
                            (self.frame(first), self.frame(last), self.frame(id));
                        let end = last.offset + u64::from(last.len);
                        let near = batch[0].0 == id.0
                            && next.offset >= end
                            && next.offset - end <= MAX_GAP
                            && next.offset + u64::from(next.len) - first.offset <= limit;
                        if !near {
                            break;
                        }
                    }
                    batch.push(id);
                }
                queue.pop_front();
            }
            if !batch.is_empty() {
                state.fetching.extend(&batch);
                return Some(batch);
            }
            // The rest is being fetched by others.
            state = self
                .changed
                .wait_timeout(state, Duration::from_millis(500))
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
    }

    fn fetch(&self, batch: &[FrameId]) -> Result<(), String> {
        let (first, last) = match batch {
            [] => return Ok(()),
            [first, .., last] => (*first, *last),
            [only] => (*only, *only),
        };
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let pack = self.packs.get(usize::from(first.0)).ok_or("no such pack")?;
        let layer = self.manifest.layer(pack).map_err(|error| text(&error))?;
        let mut position = self.frame(first).offset;
        let end = self.frame(last).offset + u64::from(self.frame(last).len);
        let mut reader =
            self.source.open(layer, position, end - position).map_err(|error| text(&error))?;
        for &id in batch {
            let frame = self.frame(id);
            let bytes = read_frame(&mut *reader, &mut position, frame)
                .map_err(|error: io::Error| text(&error))?;
            let run = match pack::decompress(frame, &bytes) {
                Ok(run) => run,
                Err(error) => {
                    let mut state = self.lock();
                    let what = ArtifactError::Damaged { digest: *pack, what: text(&error) };
                    if !state.suspect.insert(id) {
                        state.broken = Some((id, text(&what)));
                    }
                    return Err(text(&what));
                }
            };
            for target in &self.targets[&id] {
                self.assembly.place(target, &run).map_err(|error| text(&error))?;
            }
            let mut state = self.lock();
            state.fetched_bytes += bytes.len() as u64;
            state.fetching.remove(&id);
            state.placed.insert(id);
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }
}

/// The working set's pages in their order, by image.
fn working_set(
    installer: &Installer<'_>,
    store: &Store,
    config: &ArtifactConfig,
) -> Result<Vec<(Digest, u32)>, InstallError> {
    let Some(digest) = &config.working_set else { return Ok(Vec::new()) };
    let set = installer.fetch_working_set(digest)?;
    let images = images(store, config)?;
    Ok(set.pages().filter_map(|(role, page)| Some((*images.get(&role)?, page))).collect())
}

/// The images by their roles.
fn images(store: &Store, config: &ArtifactConfig) -> Result<HashMap<Role, Digest>, StoreError> {
    let template: TemplateManifest = store.get_json(&config.template)?;
    let mut images = HashMap::from([(Role::Rootfs, template.rootfs.digest)]);
    if let Some(snapshot) = &config.snapshot {
        let snapshot: SnapshotManifest = store.get_json(snapshot)?;
        images.insert(Role::Memory, snapshot.memory.digest);
        images.insert(Role::Disk, snapshot.disk.digest);
    }
    Ok(images)
}
