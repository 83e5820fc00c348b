//! The store's contract, as its users meet it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use parbake_cache::index::{ChunkIndex, DEFAULT_CHUNK_SIZE};
use parbake_cache::template::{MachineShape, ObjectRef, TemplateManifest};
use parbake_cache::{Digest, Store, StoreError, TemplateName};

mod fixture;
use fixture::{snapshot, snapshot_of, template};

fn store() -> (tempfile::TempDir, Store) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(&directory.path().join("store")).unwrap();
    (directory, store)
}

fn name(text: &str) -> TemplateName {
    text.parse().unwrap()
}

fn files_below(directory: &Path) -> usize {
    fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(
            |entry| {
                if entry.file_type().unwrap().is_dir() { files_below(&entry.path()) } else { 1 }
            },
        )
        .sum()
}

#[test]
fn blobs_and_documents_come_back_and_are_stored_once() {
    let (_directory, store) = store();
    let first = store.put_blob(b"hello").unwrap();
    assert_eq!(first, store.put_blob(b"hello").unwrap());
    assert_eq!(first.digest, Digest::of(b"hello"));
    let path = store.path(&first.digest).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hello");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o444);
    assert_eq!(files_below(&store.root().join("objects")), 1);
    let document = store.put_json(&first).unwrap();
    assert_eq!(store.get_json::<ObjectRef>(&document.digest).unwrap(), first);
    let wrong = store.get_json::<MachineShape>(&document.digest).unwrap_err().to_string();
    assert!(wrong.contains("is not a MachineShape"), "{wrong}");
    let missing = Digest::of(b"missing");
    assert!(matches!(store.path(&missing), Err(StoreError::Missing { .. })));
}

#[test]
fn an_image_is_named_by_its_index_and_stays_sparse() {
    let (_directory, store) = store();
    let staging = store.stage().unwrap();
    let path = staging.join("image");
    let size = (1 << 30) + 12_345;
    let file = File::create_new(&path).unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(b"start", 0).unwrap();
    // A chunk of written zeros, which is made a hole again.
    file.write_all_at(&vec![0; 256 * 1024], 1 << 20).unwrap();
    file.write_all_at(b"end", size - 3).unwrap();
    let object = store.adopt_image(path.clone()).unwrap();
    assert!(!path.exists());
    assert_eq!(object.size, size);
    let index = store.index(&object.digest).unwrap();
    let numbers: Vec<_> = index.chunks().iter().map(|chunk| chunk.number).collect();
    assert_eq!(numbers, [0, (size / u64::from(DEFAULT_CHUNK_SIZE)) as u32]);
    assert_eq!(index.chunks()[1].digest, {
        let mut tail = vec![0; (size % u64::from(DEFAULT_CHUNK_SIZE)) as usize];
        let end = tail.len() - 3;
        tail[end..].copy_from_slice(b"end");
        Digest::of(&tail)
    });
    let metadata = fs::metadata(store.path(&object.digest).unwrap()).unwrap();
    assert_eq!(metadata.len(), size);
    assert!(metadata.blocks() * 512 < 256 * 1024, "{} blocks", metadata.blocks());
    assert_eq!(Digest::of(&index.encode()), object.digest);
    assert_eq!(ChunkIndex::decode(&index.encode(), &object.digest).unwrap(), index);
}

#[test]
fn only_staged_regular_files_are_adopted() {
    let (directory, store) = store();
    let staging = store.stage().unwrap();
    let outside = directory.path().join("outside");
    fs::write(&outside, b"x").unwrap();
    let link = staging.join("link");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    let dotted = staging.join("../../../outside");
    for path in [outside.clone(), link, dotted, staging.path().to_owned(), staging.join("none")] {
        assert!(
            matches!(store.adopt_blob(path.clone()), Err(StoreError::NotStaged { .. })),
            "{path:?}"
        );
    }
    assert!(outside.exists());
}

#[test]
fn staging_goes_when_dropped() {
    let (_directory, store) = store();
    let staging = store.stage().unwrap();
    fs::create_dir(staging.join("d")).unwrap();
    fs::write(staging.join("d/f"), b"x").unwrap();
    let path = staging.path().to_owned();
    drop(staging);
    assert!(!path.exists());
    assert_eq!(files_below(&store.root().join("stage")), 0);
    assert_eq!(files_below(&store.root().join("live")), 0);
}

#[test]
fn names_resolve_by_tag_digest_and_prefix() {
    let (_directory, store) = store();
    let digest = template(&store, b"one");
    store.tag(&name("debian:12"), &digest).unwrap();
    let expected = (Some(name("debian:12")), digest);
    for text in ["debian:12", &digest.to_string(), &digest.short(), &digest.hex()[..6]] {
        assert_eq!(store.resolve(text).unwrap(), expected, "{text}");
    }
    for text in ["debian", "debian:13", "000000000000", &Digest::of(b"no").to_string()] {
        assert!(matches!(store.resolve(text), Err(StoreError::UnknownName { .. })), "{text}");
    }
    assert!(matches!(store.resolve("Not A Name"), Err(StoreError::Name(_))));
    store.tag(&name("other"), &digest).unwrap();
    assert_eq!(store.tags().unwrap(), [(name("debian:12"), digest), (name("other"), digest)]);
    assert_eq!(store.untag(&name("debian:12")).unwrap(), digest);
    assert!(matches!(store.untag(&name("debian:12")), Err(StoreError::UnknownName { .. })));
    assert!(store.tag(&name("x"), &Digest::of(b"no")).is_err());
}

#[test]
fn a_template_with_a_part_missing_is_neither_tagged_nor_leased() {
    let (_directory, store) = store();
    let digest = template(&store, b"one");
    fs::remove_file(store.path(&Digest::of(b"initramfs")).unwrap()).unwrap();
    let error = store.tag(&name("x"), &digest).unwrap_err();
    assert!(
        matches!(error, StoreError::MissingPart { digest, .. } if digest == Digest::of(b"initramfs")),
        "{error}"
    );
    assert!(matches!(store.lease(&[digest]), Err(StoreError::MissingPart { .. })));
}

#[test]
fn collection_keeps_what_is_tagged_leased_or_held_and_nothing_else() {
    let (_directory, writer) = store();
    let root = writer.root().to_owned();
    let tagged = template(&writer, b"tagged");
    let with_snapshot = snapshot(&writer, tagged, b"snapshot");
    let leased = template(&writer, b"leased");
    let loose = template(&writer, b"loose");
    let loose_snapshot = snapshot(&writer, loose, b"loose snapshot");
    writer.tag(&name("a"), &tagged).unwrap();
    // The handle still holds all it stored.
    assert_eq!(Store::open(&root).unwrap().collect(None).unwrap().removed, 0);
    drop(writer);

    let store = Store::open(&root).unwrap();
    let lease = store.lease(&[leased]).unwrap();
    assert!(store.usage().unwrap().reclaimable_bytes > 0);
    let report = store.collect(None).unwrap();
    // Manifest, rootfs and its index; snapshot, its state, memory and its index; the empty disk
    // is shared with the kept snapshot.
    assert_eq!(report.removed, 3 + 4);
    assert!(report.freed_bytes > 0);
    for digest in [tagged, with_snapshot, leased] {
        store.check_complete(&digest).unwrap();
    }
    assert!(!store.has(&loose) && !store.has(&loose_snapshot));
    assert!(store.snapshots(&loose).unwrap().is_empty());
    assert_eq!(store.snapshots(&tagged).unwrap()[0].0, with_snapshot);
    assert_eq!(store.usage().unwrap().reclaimable_bytes, 0);
    assert!(store.verify(false).unwrap().is_clean());

    drop(lease);
    assert!(store.collect(None).unwrap().removed > 0);
    assert!(!store.has(&leased));
    store.remove_snapshot(&tagged, &with_snapshot).unwrap();
    store.collect(None).unwrap();
    assert!(!store.has(&with_snapshot));
    store.untag(&name("a")).unwrap();
    store.collect(None).unwrap();
    let trees = ["objects", "indexes", "images"];
    assert_eq!(trees.map(|tree| files_below(&root.join(tree))), [0; 3]);
}

#[test]
fn a_quota_gives_up_snapshots_but_neither_tags_nor_what_is_in_use() {
    let (_directory, writer) = store();
    let root = writer.root().to_owned();
    let tagged = template(&writer, b"tagged");
    writer.tag(&name("a"), &tagged).unwrap();
    let idle = snapshot(&writer, tagged, b"idle");
    let used = snapshot(&writer, tagged, b"used");
    drop(writer);
    let store = Store::open(&root).unwrap();
    // Whoever holds the template may be about to use either.
    let held = store.lease(&[tagged]).unwrap();
    assert_eq!(store.collect(Some(1)).unwrap().evicted, []);
    drop(held);
    let lease = store.lease(&[used]).unwrap();
    let report = store.collect(Some(1)).unwrap();
    assert_eq!(report.evicted, [idle]);
    assert_eq!(report.over_quota_bytes, Some(report.kept_bytes - 1));
    assert!(store.has(&used) && store.has(&tagged) && !store.has(&idle));
    drop(lease);
    let other = snapshot(&store, tagged, b"made later, never used");
    drop(store);
    let store = Store::open(&root).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    drop(store.lease(&[used]).unwrap());
    let kept = store.usage().unwrap().disk_bytes;
    assert_eq!(store.collect(Some(kept - 1)).unwrap().evicted, [other]);
    assert_eq!(store.collect(Some(1 << 40)).unwrap().evicted, []);
    assert_eq!(store.collect(Some(1)).unwrap().evicted, [used]);
    assert!(store.verify(false).unwrap().is_clean());
}

#[test]
fn a_quota_never_gives_up_the_run_of_a_machine() {
    let (_directory, writer) = store();
    let root = writer.root().to_owned();
    let paused = template(&writer, b"paused");
    writer.tag(&name("paused/one"), &paused).unwrap();
    let baked = snapshot(&writer, paused, b"baked");
    let run = snapshot_of(&writer, paused, b"what nobody can bake", 2);
    drop(writer);
    let store = Store::open(&root).unwrap();
    let report = store.collect(Some(1)).unwrap();
    assert_eq!(report.evicted, [baked]);
    assert!(report.over_quota_bytes.is_some() && store.has(&run));
    store.check_complete(&run).unwrap();
}

#[test]
fn verification_names_the_damage_and_repair_takes_it_out() {
    let (_directory, store) = store();
    let digest = template(&store, b"one");
    store.tag(&name("a"), &digest).unwrap();
    assert!(store.verify(false).unwrap().is_clean());
    let manifest = store.get_json::<TemplateManifest>(&digest).unwrap();
    let rootfs = store.path(&manifest.rootfs.digest).unwrap();
    let writable = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        File::options().write(true).open(path).unwrap()
    };
    // One flipped byte in what was a hole.
    writable(&rootfs).write_all_at(b"!", 3 * u64::from(DEFAULT_CHUNK_SIZE)).unwrap();
    let kernel = store.path(&Digest::of(b"kernel")).unwrap();
    writable(&kernel).set_len(3).unwrap();
    let report = store.verify(true).unwrap();
    let damaged: Vec<_> = report.damaged.iter().map(|d| (d.digest, d.chunks.clone())).collect();
    assert_eq!(damaged, [(manifest.rootfs.digest, vec![3]), (Digest::of(b"kernel"), vec![])]);
    assert_eq!(report.removed.len(), 2);
    assert_eq!(report.missing.len(), 2);
    assert!(matches!(store.lease(&[digest]), Err(StoreError::MissingPart { .. })));
    // Building again mends it.
    let _ = template(&store, b"one");
    assert!(store.verify(false).unwrap().is_clean());
}

#[test]
fn documents_that_were_tampered_with_are_not_parsed() {
    let (_directory, store) = store();
    let object = store.put_json(&MachineShape { vcpus: 1, memory_mib: 1 }).unwrap();
    let path = store.path(&object.digest).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&path, br#"{"vcpus":2,"memoryMib":1}"#).unwrap();
    assert!(matches!(
        store.get_json::<MachineShape>(&object.digest),
        Err(StoreError::Damaged { .. })
    ));
    let newer = store.put_blob(br#"{"schemaVersion":2,"news":true}"#).unwrap();
    assert!(matches!(
        store.get_json::<TemplateManifest>(&newer.digest),
        Err(StoreError::NewerDocument { version: 2, .. })
    ));
}

#[test]
fn other_directories_and_newer_stores_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    fs::write(root.join("thesis.tex"), b"x").unwrap();
    assert!(matches!(Store::open(root), Err(StoreError::NotAStore { .. })));
    assert!(matches!(Store::open_read_only(root), Err(StoreError::NotAStore { .. })));
    assert_eq!(fs::read_dir(root).unwrap().count(), 1);
    assert!(Store::open(&root.join("thesis.tex")).is_err());

    let root = root.join("store");
    drop(Store::open(&root).unwrap());
    let open_with = |format: &str| {
        fs::write(root.join("format.json"), format).unwrap();
        (Store::open(&root).map(drop), Store::open_read_only(&root).map(drop))
    };
    let (write, read) = open_with(r#"{"format":"parbake store","version":2}"#);
    assert!(matches!(write, Err(StoreError::NewerFormat { version: 2, .. })));
    assert!(matches!(read, Err(StoreError::NewerFormat { version: 2, .. })));
    let (write, read) =
        open_with(r#"{"format":"parbake store","version":1,"incompat":["packed"]}"#);
    let message = write.unwrap_err().to_string();
    assert!(message.contains("\"packed\"") && read.is_err(), "{message}");
    let (write, read) =
        open_with(r#"{"format":"parbake store","version":1,"readOnlyCompat":["packed"]}"#);
    assert!(write.is_err() && read.is_ok());
    let (write, read) =
        open_with(r#"{"format":"parbake store","version":1,"compat":["hints"],"note":1}"#);
    assert!(write.is_ok() && read.is_ok());
    assert!(open_with("{").0.is_err());
}

#[test]
fn a_store_that_cannot_be_written_to_says_so() {
    // Root ignores modes, so ask for a place where nobody can create anything.
    let error = Store::open(Path::new("/proc/parbake-store")).unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly { .. } | StoreError::Io { .. }), "{error}");
    let (_directory, store) = store();
    let digest = template(&store, b"one");
    store.tag(&name("a"), &digest).unwrap();
    let reader = Store::open_read_only(store.root()).unwrap();
    assert_eq!(reader.resolve("a").unwrap().1, digest);
    assert!(reader.verify(false).unwrap().is_clean());
    assert!(matches!(reader.put_blob(b"x"), Err(StoreError::OpenedReadOnly { .. })));
    assert!(matches!(reader.collect(None), Err(StoreError::OpenedReadOnly { .. })));
}

#[test]
fn kernels_are_remembered_by_key() {
    let (_directory, store) = store();
    let bundle = store.put_blob(b"bundle").unwrap().digest;
    assert_eq!(store.kernel("a+b").unwrap(), None);
    store.set_kernel("a+b", &bundle).unwrap();
    assert_eq!(store.kernel("a+b").unwrap(), Some(bundle));
    assert_eq!(store.kernels().unwrap(), [("a+b".to_owned(), bundle)]);
    assert!(store.remove_kernel("a+b").unwrap());
    assert!(!store.remove_kernel("a+b").unwrap());
}
