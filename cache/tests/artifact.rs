//! Templates leave one store as an artifact and arrive in another, whole or not at all.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use parbake_cache::artifact::{self, Descriptor, MANIFEST_TYPE, layer};
use parbake_cache::install::{BlobSource, InstallError};
use parbake_cache::layout::Layout;
use parbake_cache::pack::Directory;
use parbake_cache::publish::{BasePack, Content, Publication, PublishOptions};
use parbake_cache::template::{SnapshotManifest, TemplateManifest};
use parbake_cache::variant::{self, Choice, PullReport};
use parbake_cache::working_set::{Role, WorkingSet};
use parbake_cache::{Digest, Store, TemplateName};

mod fixture;
use fixture::pages;

fn store(directory: &Path, name: &str) -> Store {
    Store::open(&directory.join(name)).unwrap()
}

fn name() -> TemplateName {
    "team/py:3.12".parse().unwrap()
}

fn bake(store: &Store, seed: u64) -> (Digest, Digest) {
    let rootfs = pages(seed, 700);
    // The guest's page cache has a part of the file system, scattered; the rest is its own.
    let own = pages(seed + 1, 300);
    let cached = [&rootfs[5 * 4096..9 * 4096], &rootfs[..40 * 4096]];
    fixture::baked(
        store,
        &rootfs,
        &[(4096, &own), (40 << 20, cached[0]), ((50 << 20) + 4096, cached[1])],
    )
}

fn install(
    store: &Store,
    source: &dyn BlobSource,
    root: &Descriptor,
    choice: &Choice,
) -> Result<PullReport, InstallError> {
    variant::install(store, source, root, "reg.example/team/py:3.12", choice, &|_| ())
}

/// Serves a publication from memory, with faults.
#[derive(Default)]
struct Memory {
    blobs: BTreeMap<Digest, Vec<u8>>,
    /// Flips a byte in this many answers for the blob.
    flip: Mutex<BTreeMap<Digest, u32>>,
    /// Ends every answer for the blob after as many bytes in all.
    cut: Mutex<BTreeMap<Digest, u64>>,
    served: AtomicU64,
}

impl Memory {
    fn of(publication: &Publication) -> Self {
        let mut memory = Self::default();
        let all =
            publication.blobs.iter().chain(&publication.manifests).chain([&publication.index]);
        for blob in all {
            let bytes = match &blob.content {
                Content::Bytes(bytes) => bytes.clone(),
                Content::File(path) => std::fs::read(path).unwrap(),
                Content::Elsewhere => continue,
            };
            assert_eq!(Digest::of(&bytes), blob.descriptor.digest);
            assert_eq!(bytes.len() as u64, blob.descriptor.size);
            memory.blobs.insert(blob.descriptor.digest, bytes);
        }
        memory
    }

    fn set(&mut self, media_type: &str, bytes: Vec<u8>) -> Descriptor {
        let descriptor = Descriptor::new(media_type, Digest::of(&bytes), bytes.len() as u64);
        self.blobs.insert(descriptor.digest, bytes);
        descriptor
    }
}

impl BlobSource for Memory {
    fn open(
        &self,
        blob: &Descriptor,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>> {
        let bytes = self.blobs.get(&blob.digest).ok_or(io::ErrorKind::NotFound)?;
        let end = (offset + len).min(bytes.len() as u64);
        let mut answer = bytes[offset as usize..end as usize].to_vec();
        if let Some(times) = self.flip.lock().unwrap().get_mut(&blob.digest).filter(|n| **n > 0) {
            *times -= 1;
            let middle = answer.len() / 2;
            answer[middle] ^= 1;
        }
        if let Some(left) = self.cut.lock().unwrap().get_mut(&blob.digest) {
            answer.truncate(usize::try_from(*left).unwrap());
            *left -= answer.len() as u64;
        }
        self.served.fetch_add(answer.len() as u64, Ordering::Relaxed);
        Ok(Box::new(io::Cursor::new(answer)))
    }
}

fn packs(publication: &Publication) -> Vec<Descriptor> {
    let pack = |descriptor: &&Descriptor| descriptor.media_type == layer::PACK;
    let all = publication.blobs.iter().map(|blob| &blob.descriptor);
    all.filter(pack).cloned().collect()
}

#[test]
fn a_template_travels_as_a_directory_and_as_an_archive() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, snapshot) = bake(&home, 1);
    let touched = WorkingSet::of(snapshot, [(Role::Memory, 7), (Role::Rootfs, 20)]);
    let working_set = home.set_working_set(&touched).unwrap();
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let (dir, tar) = (directory.path().join("layout"), directory.path().join("py.tar"));
    publication.export_directory(&dir, &name()).unwrap();
    publication.export_archive(&tar, &name()).unwrap();
    assert!(publication.export_directory(&dir, &name()).is_err(), "not over something");
    for (path, place) in [(&dir, "away-dir"), (&tar, "away-tar")] {
        let away = store(directory.path(), place);
        let layout = Layout::open(path).unwrap();
        let (root, found) = layout.root(Some("3.12")).unwrap();
        assert_eq!(found.as_deref(), Some("team/py:3.12"));
        let report = install(&away, &layout, &root, &Choice::All).unwrap();
        assert_eq!(report.template, template);
        assert_eq!(away.snapshots(&template).unwrap()[0].0, snapshot);
        away.tag(&name(), &template).unwrap();
        drop(away);
        let away = Store::open(&directory.path().join(place)).unwrap();
        away.collect(None).unwrap();
        assert_eq!(away.working_set(&snapshot).unwrap(), Some((working_set, touched.clone())));
        assert!(away.verify(false).unwrap().is_clean());
        // What was sparse is sparse, and the same documents name the same bytes.
        let manifest: TemplateManifest = away.get_json(&template).unwrap();
        let read = |store: &Store| std::fs::read(store.path(&manifest.rootfs.digest).unwrap());
        assert_eq!(read(&home).unwrap(), read(&away).unwrap());
        assert!(away.usage().unwrap().disk_bytes < 8 << 20);
    }
    assert!(Layout::open(&dir).unwrap().root(Some("3.13")).is_err());
}

#[test]
fn the_same_template_gives_the_same_bytes_anywhere() {
    let directory = tempfile::tempdir().unwrap();
    let options = PublishOptions { created: Some(1_796_040_000), ..PublishOptions::default() };
    let archives = ["a", "b"].map(|place| {
        let store = store(directory.path(), place);
        let (template, _) = bake(&store, 1);
        let path = directory.path().join(format!("{place}.tar"));
        store.publish(&template, &options).unwrap().export_archive(&path, &name()).unwrap();
        std::fs::read(path).unwrap()
    });
    assert!(archives[0] == archives[1]);
}

#[test]
fn pages_travel_once() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, _) = bake(&home, 1);
    let first = home.publish(&template, &PublishOptions::default()).unwrap();
    // 44 of the memory's pages are the file system's.
    assert_eq!(first.stats.new_bytes, (700 + 300) * 4096);
    assert_eq!(first.stats.data_bytes, (700 + 300 + 44) * 4096);

    // The next bake shares all but ten pages of the file system and a third of memory.
    let mut rootfs = pages(1, 700);
    rootfs[100 * 4096..110 * 4096].copy_from_slice(&pages(9, 10));
    let memory = [pages(2, 200), pages(10, 100)].concat();
    let (next, _) = fixture::baked(&home, &rootfs, &[(8192, &memory)]);
    let bases = bases(&first);
    let options = PublishOptions { bases, ..PublishOptions::default() };
    let second = home.publish(&next, &options).unwrap();
    assert_eq!(second.stats.new_bytes, (10 + 100) * 4096);

    // It arrives where the first is, and where it is not, with the first one's packs at hand.
    let mut source = Memory::of(&first);
    source.blobs.extend(Memory::of(&second).blobs);
    let away = store(directory.path(), "away");
    let report = install(&away, &source, &second.index.descriptor, &Choice::All).unwrap();
    assert_eq!(report.template, next);
    let served = source.served.load(Ordering::Relaxed);
    install(&away, &source, &first.index.descriptor, &Choice::All).unwrap();
    let again = source.served.load(Ordering::Relaxed) - served;
    assert!(again < served / 2, "{again} of {served} bytes fetched again");
    assert!(away.verify(false).unwrap().is_clean());
}

#[test]
fn what_is_touched_first_lies_together() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, snapshot) = bake(&home, 1);
    // Scattered pages of the memory's own, which starts at page 1.
    let touched: Vec<u32> = (0..20).map(|n| 290 - 14 * n).collect();
    let pages = touched.iter().map(|page| (Role::Memory, *page));
    home.set_working_set(&WorkingSet::of(snapshot, pages)).unwrap();
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let source = Memory::of(&publication);
    let manifest = &publication.manifests[0].descriptor.digest;
    let manifest = artifact::Manifest::parse(&source.blobs[manifest], manifest, "x").unwrap();
    let map = manifest
        .layers
        .iter()
        .filter(|l| l.media_type == layer::MAP)
        .find(|l| l.annotations["dev.parbake.role"] == "memory")
        .unwrap();
    let map = zstd::stream::decode_all(&*source.blobs[&map.digest]).unwrap();
    let map = parbake_cache::pagemap::PageMap::parse(&map).unwrap();
    let places = touched.iter().map(|page| {
        let holds = |e: &&parbake_cache::pagemap::Extent| (e.page..e.page + e.count).contains(page);
        let extent = map.extents().iter().find(holds).unwrap();
        (extent.pack, extent.frame, extent.first + (page - extent.page) as u16)
    });
    // One frame, in the order of touching.
    let places: Vec<_> = places.collect();
    let expected: Vec<_> = (0..20).map(|n| (places[0].0, 0, n)).collect();
    assert_eq!(places, expected);
    let away = store(directory.path(), "away");
    install(&away, &source, &publication.index.descriptor, &Choice::All).unwrap();
    assert!(away.verify(false).unwrap().is_clean());
}

fn bases(publication: &Publication) -> Vec<BasePack> {
    let memory = Memory::of(publication);
    publication
        .manifests
        .iter()
        .flat_map(|manifest| {
            let bytes = &memory.blobs[&manifest.descriptor.digest];
            let manifest =
                artifact::Manifest::parse(bytes, &manifest.descriptor.digest, "x").unwrap();
            let bytes = &memory.blobs[&manifest.config.digest];
            artifact::ArtifactConfig::parse(bytes, &manifest.config.digest).unwrap().packs
        })
        .map(|record| (record.pack, record))
        .collect::<BTreeMap<_, _>>()
        .into_values()
        .map(|record| {
            let bytes = &memory.blobs[&record.directory];
            let directory = Directory::parse(bytes).unwrap();
            BasePack { record, directory, directory_len: bytes.len() as u64 }
        })
        .collect()
}

#[test]
fn damage_on_the_way_is_fetched_again_once_and_then_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, _) = bake(&home, 1);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let digests: Vec<Digest> = Memory::of(&publication).blobs.keys().copied().collect();
    for (number, digest) in digests.iter().enumerate() {
        for (times, arrives) in [(1, true), (u32::MAX, false)] {
            let source = Memory::of(&publication);
            source.flip.lock().unwrap().insert(*digest, times);
            let away = store(directory.path(), &format!("away-{number}-{arrives}"));
            let result = install(&away, &source, &publication.index.descriptor, &Choice::All);
            match result {
                Ok(_) => assert!(arrives, "{digest}"),
                Err(error) => {
                    assert!(!arrives, "{digest}: {error}");
                    let text = error.to_string();
                    // A blob is named by its object, anything else by itself.
                    assert!(text.contains("damaged") && text.contains("sha256:"), "{text}");
                    assert!(away.tags().unwrap().is_empty());
                }
            }
            assert!(away.verify(false).unwrap().is_clean());
        }
    }
}

#[test]
fn a_pull_that_was_cut_short_goes_on_where_it_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, _) = bake(&home, 1);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let pack = packs(&publication).into_iter().max_by_key(|pack| pack.size).unwrap();
    let source = Memory::of(&publication);
    source.cut.lock().unwrap().insert(pack.digest, pack.size / 2);
    let root = &publication.index.descriptor;
    let away = store(directory.path(), "away");
    let error = install(&away, &source, root, &Choice::All).unwrap_err();
    assert!(matches!(error, InstallError::Fetch { digest, .. } if digest == pack.digest));
    assert!(!away.has(&template));
    source.cut.lock().unwrap().clear();
    source.served.store(0, Ordering::Relaxed);
    drop(away);
    let away = store(directory.path(), "away");
    let report = install(&away, &source, root, &Choice::All).unwrap();
    assert!(report.installed[0].reused_bytes > 0);
    let whole: u64 = source.blobs.values().map(|bytes| bytes.len() as u64).sum();
    let served = source.served.load(Ordering::Relaxed);
    assert!(served < whole - pack.size / 3, "{served} of {whole} bytes");
    away.tag(&name(), &template).unwrap();
    assert!(away.verify(false).unwrap().is_clean());
}

#[test]
fn a_damaged_image_is_mended_from_the_artifact() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, snapshot) = bake(&home, 1);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let source = Memory::of(&publication);
    let root = &publication.index.descriptor;
    let away = store(directory.path(), "away");
    install(&away, &source, root, &Choice::All).unwrap();
    let memory = away.get_json::<SnapshotManifest>(&snapshot).unwrap().memory.digest;
    let path = away.path(&memory).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"?", 200_000).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"?", 100 << 20).unwrap();
    let report = away.verify(true).unwrap();
    assert_eq!(report.damaged.len(), 1);
    source.served.store(0, Ordering::Relaxed);
    let report = install(&away, &source, root, &Choice::All).unwrap();
    assert!(report.installed[0].reused_bytes > 1 << 20);
    let whole: u64 = source.blobs.values().map(|bytes| bytes.len() as u64).sum();
    assert!(source.served.load(Ordering::Relaxed) < whole / 2);
    assert!(away.verify(false).unwrap().is_clean());
}

#[test]
fn a_node_gets_the_snapshot_it_can_restore_or_the_bare_template() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, snapshot) = bake(&home, 1);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let source = Memory::of(&publication);
    let root = &publication.index.descriptor;
    let manifest: SnapshotManifest = home.get_json(&snapshot).unwrap();
    let mut offers = manifest.compat.clone();
    let node = |offers, machine| Choice::Node { offers, machine };
    let fits = store(directory.path(), "fits");
    let report = install(&fits, &source, root, &node(offers.clone(), None)).unwrap();
    assert_eq!(report.installed.len(), 1);
    assert_eq!(report.installed[0].snapshot, Some(snapshot));
    offers.cpu_vendor = "GenuineIntel".to_owned();
    let other = store(directory.path(), "other");
    source.served.store(0, Ordering::Relaxed);
    let report = install(&other, &source, root, &node(offers, None)).unwrap();
    assert_eq!(report.installed[0].snapshot, None);
    assert!(report.refused[0].reasons[0].contains("GenuineIntel"), "{report:?}");
    assert!(other.has(&template) && !other.has(&manifest.memory.digest));
    let bare = store(directory.path(), "bare");
    install(&bare, &source, root, &Choice::Template).unwrap();
    assert!(bare.has(&template) && bare.snapshots(&template).unwrap().is_empty());
    // A tag of one variant only still gives the bare template to a node it does not fit.
    let single = &publication.manifests[0].descriptor;
    let lone = store(directory.path(), "lone");
    let report = install(&lone, &source, single, &Choice::Template).unwrap();
    assert_eq!(report.installed[0].snapshot, None);
    lone.tag(&name(), &template).unwrap();
    assert!(!lone.has(&snapshot) && lone.verify(false).unwrap().is_clean());
}

#[test]
fn what_is_no_template_or_a_newer_one_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, _) = bake(&home, 1);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let good = Memory::of(&publication);
    let bare = publication.manifests.last().unwrap().descriptor.digest;
    let manifest = String::from_utf8(good.blobs[&bare].clone()).unwrap();
    let parsed = artifact::Manifest::parse(manifest.as_bytes(), &bare, "x").unwrap();
    let config = String::from_utf8(good.blobs[&parsed.config.digest].clone()).unwrap();
    let refuse = |change: &dyn Fn(&mut Memory) -> Descriptor, why: &str| {
        let mut source = Memory::of(&publication);
        let root = change(&mut source);
        let away = store(directory.path(), "away");
        let error = install(&away, &source, &root, &Choice::All).unwrap_err().to_string();
        assert!(error.contains(why), "{error}\n  should say: {why}");
        assert!(away.tags().unwrap().is_empty() && away.verify(false).unwrap().is_clean());
    };
    let with_config = |source: &mut Memory, config: String| {
        let descriptor = source.set(artifact::CONFIG_TYPE, config.into_bytes());
        let mut changed = parsed.clone();
        changed.config = descriptor;
        source.set(MANIFEST_TYPE, artifact::to_json(&changed))
    };
    refuse(&|s| with_config(s, config.replacen(":1,", ":2,", 1)), "version 2");
    refuse(&|s| with_config(s, config.replacen(":1,", ":1,\"features\":[\"tpm\"],", 1)), "\"tpm\"");
    refuse(&|s| with_config(s, config.replacen(":1,", ":1,\"more\":0,", 1)), "`more`");
    refuse(&|s| with_config(s, "{".to_owned()), "malformed");
    let image = r#"{"schemaVersion":2,"config":{"mediaType":
        "application/vnd.oci.image.config.v1+json","digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2},"layers":[]}"#;
    refuse(&|s| s.set(MANIFEST_TYPE, image.into()), "parbake build --from docker://reg.example");
    refuse(
        &|s| s.set("application/vnd.docker.distribution.manifest.v2+json", image.into()),
        "ordinary image",
    );
    refuse(
        &|s| {
            let newer = manifest.replace("template.v1\"", "template.v7\"");
            let newer = newer.replace("template.config.v1", "template.config.v7");
            s.set(MANIFEST_TYPE, newer.into_bytes())
        },
        "version 7",
    );
    refuse(
        &|s| {
            let mut huge = s.set(MANIFEST_TYPE, manifest.clone().into_bytes());
            huge.size = 5 << 20;
            huge
        },
        "over the limit",
    );
    // A page map that points outside of its pack, and one for an image of another size.
    let map_layer = parsed.layers.iter().find(|l| l.media_type == layer::MAP).unwrap().digest;
    let map = zstd::stream::decode_all(&*good.blobs[&map_layer]).unwrap();
    let with_map = |source: &mut Memory, at: usize, byte: u8| {
        let mut map = map.clone();
        map[at] = byte;
        let packed = zstd::bulk::compress(&map, 1).unwrap();
        let descriptor = source.set(layer::MAP, packed);
        let swap =
            |text: String| text.replace(&map_layer.to_string(), &descriptor.digest.to_string());
        let mut changed = parsed.clone();
        let config = swap(config.clone()).into_bytes();
        changed.config = source.set(artifact::CONFIG_TYPE, config);
        for layer in &mut changed.layers {
            if layer.digest == map_layer {
                *layer = descriptor.clone();
            }
        }
        source.set(MANIFEST_TYPE, artifact::to_json(&changed))
    };
    // Extents start at 24: page, count, pack, first, frame.
    refuse(&|s| with_map(s, 24 + 13, 0xff), "outside of pack");
    refuse(&|s| with_map(s, 24 + 8, 0xff), "names pack");
    refuse(&|s| with_map(s, 24 + 7, 0xff), "out of bounds");
    refuse(&|s| with_map(s, 12, 0xff), "differ");
    refuse(&|s| with_map(s, 8, 9), "version 9");
    // Pages of the right pack but in the wrong place are found by the index.
    refuse(&|s| with_map(s, 24 + 12, 1), "not what its index says");
}

#[test]
fn dressed_as_an_image_it_is_the_same_inside() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, snapshot) = bake(&home, 1);
    let publish = || home.publish(&template, &PublishOptions::default()).unwrap();
    let image = publish().into_compat_image().unwrap();
    let source = Memory::of(&image);
    for blob in &image.blobs {
        let kind = &blob.descriptor.media_type;
        assert!(kind.starts_with("application/vnd.oci.image."), "{kind}");
    }
    let away = store(directory.path(), "away");
    install(&away, &source, &image.index.descriptor, &Choice::All).unwrap();
    assert_eq!(away.snapshots(&template).unwrap()[0].0, snapshot);
    assert!(away.verify(false).unwrap().is_clean());
    // Other tools take it for an image, and every layer is a tar file they can read.
    let path = directory.path().join("image.tar");
    image.export_archive(&path, &name()).unwrap();
    let layer = directory.path().join("layer.tar");
    for blob in image.blobs.iter().filter(|b| b.descriptor.media_type.ends_with("tar")).take(3) {
        std::fs::write(&layer, &source.blobs[&blob.descriptor.digest]).unwrap();
        let output = std::process::Command::new("tar").arg("-tf").arg(&layer).output().unwrap();
        let inside = &blob.descriptor.annotations["dev.parbake.blob.digest"];
        let expected = format!("parbake/{}\n", &inside["sha256:".len()..]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    }
    // What builds upon others cannot be dressed.
    let bases = bases(&publish());
    let options = PublishOptions { bases, ..PublishOptions::default() };
    assert!(home.publish(&template, &options).unwrap().into_compat_image().is_err());
}

#[test]
fn skopeo_copies_what_is_exported() {
    if std::process::Command::new("skopeo").arg("--version").output().is_err() {
        eprintln!("skipped: there is no skopeo here");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let (template, snapshot) = bake(&home, 1);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    publication.export_archive(Path::new(&at("py.tar")), &name()).unwrap();
    publication.export_directory(Path::new(&at("layout")), &name()).unwrap();
    for from in [format!("oci-archive:{}:3.12", at("py.tar")), format!("oci:{}:3.12", at("layout"))]
    {
        let _ = std::fs::remove_dir_all(at("copy"));
        let output = std::process::Command::new("skopeo")
            .args(["copy", "--all", "--quiet", &from, &format!("oci:{}:3.12", at("copy"))])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let away = store(directory.path(), &format!("away{}", from.len()));
        let layout = Layout::open(Path::new(&at("copy"))).unwrap();
        let (root, _) = layout.root(None).unwrap();
        install(&away, &layout, &root, &Choice::All).unwrap();
        assert_eq!(away.snapshots(&template).unwrap()[0].0, snapshot);
        assert!(away.verify(false).unwrap().is_clean());
    }
}
