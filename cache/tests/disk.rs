//! Full and read-only disks: a clear error, and nothing left half done.

use std::path::{Path, PathBuf};
use std::process::Command;

use parbake_cache::artifact::Descriptor;
use parbake_cache::install::InstallError;
use parbake_cache::layout::Layout;
use parbake_cache::publish::PublishOptions;
use parbake_cache::variant::{self, Choice};
use parbake_cache::{Store, StoreError};

mod fixture;

/// A small file system of its own, until dropped.
struct Disk(PathBuf);

impl Disk {
    fn new(path: &Path, mib: u32) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m,mode=755"), "tmpfs"])
            .arg(path)
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(path.to_owned()));
        }
        eprintln!("skipped: mounting a small file system needs root");
        None
    }

    fn remount(&self, how: &str) {
        let status =
            Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(&self.0).status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn is_full(error: &StoreError) -> bool {
    matches!(error, StoreError::Full { needed, available, .. } if needed > available)
}

#[test]
fn a_full_disk_is_said_with_numbers_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::new(&directory.path().join("disk"), 8) else { return };
    let store = Store::open(&disk.0.join("store")).unwrap();
    let kept = store.put_blob(b"kept").unwrap();
    let before = store.usage().unwrap();
    let error = store.put_blob(&vec![1; 9 << 20]).unwrap_err();
    assert!(is_full(&error), "{error}");
    assert!(error.to_string().contains("parbake prune"), "{error}");
    assert_eq!(store.usage().unwrap(), before);
    assert!(is_full(&store.ensure_free(100 << 20).unwrap_err()));
    // Smaller things still fit.
    store.put_blob(&vec![2; 1 << 20]).unwrap();
    assert!(store.has(&kept.digest) && store.verify(false).unwrap().is_clean());
}

#[test]
fn a_template_that_does_not_fit_is_refused_before_it_is_fetched() {
    let directory = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::new(&directory.path().join("disk"), 3) else { return };
    let home = Store::open(&directory.path().join("home")).unwrap();
    let rootfs = fixture::pages(1, 1500);
    let (template, _) = fixture::baked(&home, &rootfs, &[(0, &fixture::pages(2, 400))]);
    let publication = home.publish(&template, &PublishOptions::default()).unwrap();
    let archive = directory.path().join("a.tar");
    publication.export_archive(&archive, &"a:1".parse().unwrap()).unwrap();
    let layout = Layout::open(&archive).unwrap();
    let root: Descriptor = layout.root(None).unwrap().0;
    let small = Store::open(&disk.0.join("store")).unwrap();
    let install =
        |store: &Store| variant::install(store, &layout, &root, "a:1", &Choice::All, &|_| ());
    let error = install(&small).unwrap_err();
    assert!(matches!(&error, InstallError::Store(error) if is_full(error)), "{error}");
    assert!(small.verify(false).unwrap().is_clean());
    assert!(small.usage().unwrap().disk_bytes < 512 * 1024);
    // With more room, the same call completes.
    disk.remount("size=64m");
    install(&small).unwrap();
    assert!(small.has(&template) && small.verify(false).unwrap().is_clean());
    // And an archive that does not fit leaves none.
    let target = disk.0.join("out/a.tar");
    std::fs::create_dir(target.parent().unwrap()).unwrap();
    let used = small.usage().unwrap().disk_bytes / (1 << 20) + 2;
    disk.remount(&format!("size={used}m"));
    let error = publication.export_archive(&target, &"a:1".parse().unwrap()).unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert_eq!(std::fs::read_dir(target.parent().unwrap()).unwrap().count(), 0);
    let error = publication
        .export_directory(&disk.0.join("out/layout"), &"a:1".parse().unwrap())
        .unwrap_err();
    assert!(matches!(error, StoreError::Full { .. }), "{error}");
    assert_eq!(std::fs::read_dir(target.parent().unwrap()).unwrap().count(), 0);
}

#[test]
fn a_read_only_disk_can_be_looked_at_and_says_so_when_written_to() {
    let directory = tempfile::tempdir().unwrap();
    let Some(disk) = Disk::new(&directory.path().join("disk"), 8) else { return };
    let root = disk.0.join("store");
    let store = Store::open(&root).unwrap();
    let blob = store.put_blob(b"kept").unwrap();
    drop(store);
    disk.remount("ro");
    for error in [Store::open(&root).unwrap_err(), Store::open(&disk.0.join("new")).unwrap_err()] {
        assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
        assert!(error.to_string().contains("--store"), "{error}");
    }
    let reader = Store::open_read_only(&root).unwrap();
    assert!(reader.has(&blob.digest) && reader.verify(false).unwrap().is_clean());
    assert!(reader.usage().unwrap().objects == 1);
    assert!(matches!(reader.stage(), Err(StoreError::OpenedReadOnly { .. })));
}
