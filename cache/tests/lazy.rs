//! A template is usable before it has arrived, and says so when it will not arrive.

use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use parbake_cache::artifact::{Descriptor, Manifest, layer};
use parbake_cache::install::{BlobSource, Installer};
use parbake_cache::layout::Layout;
use parbake_cache::lazy::{LazyError, LazyPull, Patience};
use parbake_cache::publish::PublishOptions;
use parbake_cache::template::{SnapshotManifest, TemplateManifest};
use parbake_cache::working_set::{Role, WorkingSet};
use parbake_cache::{Digest, Store};

mod fixture;
use fixture::pages;

const SECOND: Patience = Patience { deadline: Duration::from_secs(20), fail_fast: false };

/// A registry of which the line can be cut, slowed down, or bent.
struct Line {
    layout: Layout,
    cut: AtomicBool,
    /// Packs are only served while this is set.
    packs: AtomicBool,
    served: AtomicU64,
    flip: Mutex<Option<(Digest, u32)>>,
}

impl BlobSource for Line {
    fn open(
        &self,
        blob: &Descriptor,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>> {
        if self.cut.load(Ordering::Relaxed) {
            return Err(io::Error::other("the line is cut"));
        }
        if blob.media_type == layer::PACK && !self.packs.load(Ordering::Relaxed) {
            return Err(io::Error::other("not now"));
        }
        let mut bytes = Vec::new();
        self.layout.open(blob, offset, len)?.read_to_end(&mut bytes)?;
        self.served.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if let Some((digest, times)) = &mut *self.flip.lock().unwrap()
            && *digest == blob.digest
            && *times > 0
        {
            *times -= 1;
            bytes[0] ^= 0x80;
        }
        Ok(Box::new(io::Cursor::new(bytes)))
    }

    fn parallel(&self) -> usize {
        2
    }
}

struct Scene {
    _directory: tempfile::TempDir,
    line: Arc<Line>,
    manifest: Manifest,
    away: Store,
    template: Digest,
    rootfs: (Digest, Vec<u8>),
    memory: (Digest, Vec<u8>),
    whole: u64,
}

fn scene() -> Scene {
    let directory = tempfile::tempdir().unwrap();
    let home = Store::open(&directory.path().join("home")).unwrap();
    let memory = pages(2, 1000);
    let (template, snapshot) = fixture::baked(&home, &pages(1, 3000), &[(1 << 20, &memory)]);
    let first = (1 << 20) / 4096;
    let touched = (first + 700..first + 720).map(|page| (Role::Memory, page));
    home.set_working_set(&WorkingSet::of(snapshot, touched)).unwrap();
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let path = directory.path().join("a.tar");
    publication.export_archive(&path, &"a:1".parse().unwrap()).unwrap();
    let layout = Layout::open(&path).unwrap();
    let descriptor = &publication.manifests[0].descriptor;
    let mut bytes = Vec::new();
    layout.open(descriptor, 0, descriptor.size).unwrap().read_to_end(&mut bytes).unwrap();
    let manifest = Manifest::parse(&bytes, &descriptor.digest, "a:1").unwrap();
    let content = |digest: Digest| (digest, std::fs::read(home.path(&digest).unwrap()).unwrap());
    Scene {
        away: Store::open(&directory.path().join("away")).unwrap(),
        rootfs: content(home.get_json::<TemplateManifest>(&template).unwrap().rootfs.digest),
        memory: content(home.get_json::<SnapshotManifest>(&snapshot).unwrap().memory.digest),
        whole: publication.blobs.iter().map(|blob| blob.descriptor.size).sum(),
        line: Arc::new(Line {
            layout,
            cut: false.into(),
            packs: true.into(),
            served: 0.into(),
            flip: Mutex::default(),
        }),
        manifest,
        template,
        _directory: directory,
    }
}

impl Scene {
    fn begin(&self) -> LazyPull {
        let installer = Installer::new(&self.away, &*self.line, &self.manifest, &|_| ());
        let config = installer.config().unwrap();
        let source: Arc<dyn BlobSource + Send + Sync> = self.line.clone();
        LazyPull::begin(&self.away, source, self.manifest.clone(), config).unwrap()
    }

    fn pack(&self) -> Digest {
        let largest = |layers: &[Descriptor]| {
            let packs = layers.iter().filter(|layer| layer.media_type == layer::PACK);
            packs.max_by_key(|pack| pack.size).unwrap().digest
        };
        largest(&self.manifest.layers)
    }
}

fn read(path: &Path, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, range.start as u64).unwrap();
    bytes
}

#[test]
fn what_is_asked_for_comes_first_and_the_rest_follows() {
    let scene = scene();
    // The background does not get far while packs are withheld.
    scene.line.packs.store(false, Ordering::Relaxed);
    let mut pull = scene.begin();
    let small = scene.line.served.load(Ordering::Relaxed);
    assert!(small * 10 < scene.whole, "{small} of {}", scene.whole);
    let path = pull.path(&scene.memory.0).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    scene.line.packs.store(true, Ordering::Relaxed);
    pull.ensure_working_set(SECOND).unwrap();
    let at = (1 << 20) + 700 * 4096;
    assert_eq!(read(&path, at..at + 20 * 4096), scene.memory.1[at..at + 20 * 4096]);
    for at in [0, 100_000, 5 << 20, scene.rootfs.1.len() - 5000] {
        let range = at..at + 5000;
        let path = pull.path(&scene.rootfs.0).unwrap();
        pull.ensure(&scene.rootfs.0, range.start as u64..range.end as u64, SECOND).unwrap();
        assert_eq!(read(&path, range.clone()), scene.rootfs.1[range]);
    }
    assert!(scene.away.tags().unwrap().is_empty());
    let installed = pull.finish(SECOND).unwrap();
    assert_eq!(installed.template, scene.template);
    assert_eq!(pull.progress().left_bytes, 0);
    scene.away.tag(&"a:1".parse().unwrap(), &scene.template).unwrap();
    assert!(scene.away.verify(false).unwrap().is_clean());
    // The file that was opened at the start is the image now.
    use std::os::unix::fs::MetadataExt as _;
    let image = std::fs::metadata(scene.away.path(&scene.memory.0).unwrap()).unwrap();
    assert_eq!(file.metadata().unwrap().ino(), image.ino());
    // Begun again, it is there at once.
    let mut again = scene.begin();
    scene.line.cut.store(true, Ordering::Relaxed);
    again.ensure(&scene.memory.0, 0..1 << 30, SECOND).unwrap();
    scene.line.cut.store(false, Ordering::Relaxed);
    again.finish(SECOND).unwrap();
}

#[test]
fn a_line_that_is_cut_is_an_error_in_time_and_mends() {
    let scene = scene();
    scene.line.packs.store(false, Ordering::Relaxed);
    let mut pull = scene.begin();
    let ensure = |pull: &LazyPull, millis, fail_fast| {
        let patience = Patience { deadline: Duration::from_millis(millis), fail_fast };
        let started = Instant::now();
        let result = pull.ensure(&scene.rootfs.0, 8 << 20..(8 << 20) + 4096, patience);
        (result, started.elapsed())
    };
    let (result, took) = ensure(&pull, 300, false);
    let error = result.unwrap_err();
    assert!(matches!(error, LazyError::Late { .. }), "{error}");
    assert!(error.to_string().contains("not now"), "{error}");
    assert!((300..3000).contains(&took.as_millis()), "{took:?}");
    let (result, took) = ensure(&pull, 60_000, true);
    assert!(matches!(result, Err(LazyError::Lost { .. })));
    assert!(took < Duration::from_secs(20), "{took:?}");
    let short = Patience { deadline: Duration::from_millis(50), fail_fast: false };
    assert!(matches!(pull.finish(short), Err(LazyError::Late { .. })));
    scene.line.packs.store(true, Ordering::Relaxed);
    assert!(ensure(&pull, 20_000, false).0.is_ok());
    pull.finish(SECOND).unwrap();
    assert!(scene.away.verify(false).unwrap().is_clean());
}

#[test]
fn dropped_half_way_it_goes_on_where_it_was() {
    let scene = scene();
    let pull = scene.begin();
    pull.ensure(&scene.rootfs.0, 0..8 << 20, SECOND).unwrap();
    drop(pull);
    let before = scene.line.served.load(Ordering::Relaxed);
    let mut pull = scene.begin();
    pull.finish(SECOND).unwrap();
    let after = scene.line.served.load(Ordering::Relaxed) - before;
    assert!(after < scene.whole * 3 / 4, "{after} of {} again", scene.whole);
    assert!(scene.away.verify(false).unwrap().is_clean());
}

#[test]
fn damage_is_fetched_again_once_and_then_an_error() {
    for (times, arrives) in [(1, true), (u32::MAX, false)] {
        let scene = scene();
        *scene.line.flip.lock().unwrap() = Some((scene.pack(), times));
        let mut pull = scene.begin();
        let result = pull.finish(SECOND);
        assert_eq!(result.is_ok(), arrives, "{result:?}");
        if let Err(error) = result {
            assert!(error.to_string().contains("damaged"), "{error}");
        }
        drop(pull);
        assert!(scene.away.verify(false).unwrap().is_clean());
    }
}
