//! Packing, exporting and installing end at the next piece when they are told to stop, and leave
//! nothing but what the next try takes up.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use parbake_cache::install::InstallError;
use parbake_cache::layout::Layout;
use parbake_cache::publish::{PublishError, PublishOptions};
use parbake_cache::variant::{self, Choice};
use parbake_cache::{Store, StoreError, TemplateName};

mod fixture;
use fixture::pages;

/// How often it may be asked until it is time to stop, and how often it was asked after that.
static LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);
static LATE: AtomicUsize = AtomicUsize::new(0);

fn stop() -> bool {
    let left = LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    if left.is_err() {
        LATE.fetch_add(1, Ordering::Relaxed);
    }
    left.is_err()
}

/// Stops `work` at its first question, at its second, and so on (the further on, the wider apart)
/// until it is through. `check` looks at what each leaves. Returns the result and how often it
/// was stopped.
#[track_caller]
fn at_every_piece<T>(
    mut work: impl FnMut() -> Result<T, StoreError>,
    mut check: impl FnMut(),
) -> (T, usize) {
    // One question of each thread that is still at a piece; of those that look through the store,
    // each may have set as many to an image.
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let most = threads * threads;
    let mut stopped = 0;
    let mut after = 0;
    loop {
        LATE.store(0, Ordering::Relaxed);
        LEFT.store(after, Ordering::Relaxed);
        let result = work();
        LEFT.store(usize::MAX, Ordering::Relaxed);
        match result {
            Ok(value) => return (value, stopped),
            Err(StoreError::Interrupted) => stopped += 1,
            Err(error) => panic!("stopped after {after}: {error}"),
        }
        let late = LATE.load(Ordering::Relaxed);
        assert!(late <= most, "stopped after {after}, and {late} questions more were asked");
        check();
        after += 1 + after / 8;
    }
}

fn files_in(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn long_work_ends_at_the_next_piece() {
    let directory = tempfile::tempdir().unwrap();
    let home = Store::open(&directory.path().join("home")).unwrap();
    let (template, _) = fixture::baked(&home, &pages(1, 1500), &[(4096, &pages(2, 700))]);
    let name: TemplateName = "team/py:1".parse().unwrap();
    let whole = home.publish(&template, &PublishOptions::default()).unwrap();
    let staged = home.root().join("stage");
    let before = files_in(&staged);
    let stopping = home.until(stop);

    let pack = || match stopping.publish(&template, &PublishOptions::default()) {
        Ok(publication) => Ok(publication),
        Err(PublishError::Store(error)) => Err(error),
        Err(error) => panic!("{error}"),
    };
    let (publication, stopped) = at_every_piece(pack, || assert_eq!(files_in(&staged), before));
    assert!(stopped >= 15, "{stopped}");
    assert_eq!(publication.index.descriptor, whole.index.descriptor);

    let out = directory.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let nothing = || assert_eq!(files_in(&out), Vec::<String>::new());
    let archive = out.join("py.tar");
    let (_, stopped) = at_every_piece(|| publication.export_archive(&archive, &name), nothing);
    assert!(stopped >= 5, "{stopped}");
    whole.export_archive(&directory.path().join("whole.tar"), &name).unwrap();
    assert!(
        std::fs::read(&archive).unwrap()
            == std::fs::read(directory.path().join("whole.tar")).unwrap()
    );
    std::fs::rename(&archive, directory.path().join("py.tar")).unwrap();
    let tree = out.join("py");
    let (_, stopped) = at_every_piece(|| publication.export_directory(&tree, &name), nothing);
    assert!(stopped >= 5, "{stopped}");

    // What was dressed as an image is hashed anew.
    let dress = || match pack()?.into_compat_image() {
        Ok(publication) => Ok(publication),
        Err(PublishError::Store(error)) => Err(error),
        Err(error) => panic!("{error}"),
    };
    let while_whole = files_in(&staged);
    let (dressed, stopped) = at_every_piece(dress, || assert_eq!(files_in(&staged), while_whole));
    assert!(stopped >= 20, "{stopped}");
    drop(dressed);

    let layout = Layout::open(&directory.path().join("py.tar")).unwrap();
    let (root, _) = layout.root(None).unwrap();
    let away = Store::open(&directory.path().join("away")).unwrap();
    let stopping = away.clone().until(stop);
    let install = || match variant::install(&stopping, &layout, &root, "x", &Choice::All, &|_| ()) {
        Ok(report) => Ok(report),
        Err(InstallError::Store(error)) => Err(error),
        Err(error) => panic!("{error}"),
    };
    let (report, stopped) = at_every_piece(install, || {
        assert!(away.verify(false).unwrap().is_clean());
    });
    assert!(stopped >= 15, "{stopped}");
    assert_eq!(report.template, template);
    away.tag(&name, &template).unwrap();
    assert!(away.verify(false).unwrap().is_clean());
    // Hashing what is there ends, too.
    let stopping = away.until(stop);
    let (report, stopped) = at_every_piece(|| stopping.verify(false), || ());
    assert!(report.is_clean() && stopped >= 10, "{stopped}");
}
