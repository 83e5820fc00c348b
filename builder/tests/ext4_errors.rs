//! What ext4 cannot hold is refused, by path.

mod judge;

use judge::plot::{Plot, options};
use parbake_builder::ext4::{DataArea, Options, WriteError};
use parbake_builder::tree::{FileData, Kind, NodeId, Run, Runs};

const ROOT: NodeId = NodeId::ROOT;

fn refusal(plot: &Plot) -> String {
    plot.try_finish(&options()).expect_err("not storable").to_string()
}

/// A plot with a directory `d`, and the directory.
fn plot() -> (Plot, NodeId) {
    let mut plot = Plot::new();
    plot.file(ROOT, "before", b"x");
    let directory = plot.directory(ROOT, "d");
    (plot, directory)
}

#[test]
fn names() {
    for (name, why) in [
        (&b""[..], "it is empty"),
        (b".", "it is reserved"),
        (b"..", "it is reserved"),
        (b"a/b", "it contains a slash"),
        (b"a\0b", "it contains a zero byte"),
        (&[b'n'; 256], "it is longer than 255 bytes"),
    ] {
        let (mut plot, directory) = plot();
        plot.file(directory, name, b"");
        let message = refusal(&plot);
        assert!(message.starts_with("/d"), "{message}");
        assert!(message.ends_with(why), "{message}");
    }
}

#[test]
fn symlink_targets() {
    for target in [&b""[..], &[b't'; 4096], b"a\0b"] {
        let (mut plot, directory) = plot();
        plot.symlink(directory, "link", target);
        let message = refusal(&plot);
        let start = format!("/d/link: the target of the symbolic link has {} bytes", target.len());
        assert!(message.starts_with(&start), "{message}");
    }
}

#[test]
fn device_numbers() {
    for (major, minor) in [(4096, 0), (0, 1 << 20), (u32::MAX, u32::MAX)] {
        let (mut plot, directory) = plot();
        plot.add(directory, "dev", Kind::BlockDevice(Plot::device(major, minor)));
        let message = refusal(&plot);
        let start = format!("/d/dev: the device number {major}:{minor} is larger");
        assert!(message.starts_with(&start), "{message}");
    }
}

#[test]
fn attributes() {
    let acl = |version: u32| version.to_le_bytes().to_vec();
    for (name, value, why) in [
        ("user.", vec![], "cannot store an attribute of this name"),
        ("system.data", vec![], "cannot store an attribute of this name"),
        ("gnu.translator", vec![], "cannot store an attribute of this name"),
        ("system.posix_acl_default", acl(2), "only a directory can have a default ACL"),
        ("system.posix_acl_access", acl(1), "its version is 1, not 2"),
        ("system.posix_acl_access", vec![2], "its length 1"),
    ] {
        let (mut plot, directory) = plot();
        let file = plot.file(directory, "file", b"");
        plot.xattr(file, name, value);
        let message = refusal(&plot);
        let start = format!("/d/file: extended attribute {name:?}: ");
        assert!(message.starts_with(&start), "{message}");
        assert!(message.contains(why), "{message}");
    }
    let (mut plot, directory) = plot();
    let file = plot.file(directory, "file", b"");
    plot.xattr(file, "user.v", [0; 4100]);
    let message = refusal(&plot);
    assert!(message.starts_with("/d/file: the extended attributes take"), "{message}");
}

#[test]
fn attributes_fit_exactly_or_not_at_all() {
    // 88 bytes in the inode and 4060 in the block, 16 + 4 of each for an entry. In name order the
    // short one would take the inode's room and the rest would overflow the block.
    let make = |last: usize| {
        let (mut plot, directory) = plot();
        let file = plot.file(directory, "file", b"");
        plot.xattr(file, "user.a", [1; 24]);
        plot.xattr(file, "user.bb", [2; 68]);
        plot.xattr(file, "user.ccc", vec![3; last]);
        plot
    };
    let fits = make(4060 - 20 - 24 - 20);
    fits.finish(&options());
    fits.judge();
    let message = refusal(&make(4060 - 20 - 24 - 20 + 1));
    assert!(message.starts_with("/d/file: the extended attributes take"), "{message}");
}

#[test]
fn contradictory_trees() {
    let (mut looped, directory) = plot();
    let below = looped.directory(directory, "below");
    looped.link(below, "up", directory);
    assert!(refusal(&looped).starts_with("/d/below/up: the directory has a second name"));
    let (mut rooted, directory) = plot();
    rooted.link(directory, "root", ROOT);
    assert!(refusal(&rooted).starts_with("/d/root: the directory has a second name"));
    let (mut dangling, directory) = plot();
    dangling.link(directory, "gone", NodeId(1000));
    assert!(refusal(&dangling).starts_with("/d/gone: the entry names a node that does not exist"));
    let (mut file, _) = plot();
    file.tree.nodes[0].kind = Kind::Fifo;
    assert!(refusal(&file).starts_with("/: the root is not a directory"));
    file.tree.nodes.clear();
    assert!(refusal(&file).starts_with("/: the root is not a directory"));
}

#[test]
fn contradictory_runs() {
    let run = |logical, blocks, physical| Run { logical, blocks, physical };
    for (size, runs, why) in [
        (4096, vec![run(0, 1, 1_000_000)], "was never allocated"),
        (4096, vec![run(0, 1, u64::MAX)], "was never allocated"),
        (4096, vec![run(0, 1, 3)], "reserved or another file's"),
        (4096, vec![run(0, 1, 65)], "reserved or another file's"),
        (8192, vec![run(0, 1, 70), run(1, 1, 70)], "reserved or another file's"),
        (4096, vec![run(0, 2, 70)], "beyond the file's end"),
        (4096, vec![run(0, 0, 70)], "empty or out of order"),
        (8192, vec![run(1, 1, 70), run(0, 1, 71)], "empty or out of order"),
        (8192, vec![run(0, 2, 70), run(1, 1, 72)], "empty or out of order"),
    ] {
        let (mut plot, directory) = plot();
        plot.area.allocate(100, |_, _| ());
        plot.add(directory, "file", Kind::File(FileData { size, runs: runs.clone().into() }));
        let message = refusal(&plot);
        assert!(message.starts_with("/d/file: the run of "), "{message}");
        assert!(message.contains(why), "{runs:?}: {message}");
    }
}

#[test]
fn sizes() {
    let (mut plot, directory) = plot();
    let size = u64::from(u32::MAX) * 4096 + 1;
    plot.add(directory, "file", Kind::File(FileData { size, runs: Runs::new() }));
    assert!(refusal(&plot).starts_with("/d/file: the file has 17592186040321 bytes"));

    let (plot, _) = self::plot();
    for asked in [
        Options { free_bytes: 1 << 40, ..options() },
        Options { free_bytes: u64::MAX, ..options() },
        Options { free_bytes: u64::MAX, journal: true, ..options() },
        Options { free_inodes: 200_000_000, ..options() },
    ] {
        let error = plot.try_finish(&asked).expect_err("too large");
        assert!(matches!(error, WriteError::ImageTooLarge), "{error}");
    }
    for free_inodes in [1 << 32, u64::MAX] {
        let asked = Options { free_inodes, ..options() };
        let error = plot.try_finish(&asked).expect_err("too many");
        assert!(matches!(error, WriteError::TooManyInodes), "{error}");
    }
    let mut huge = Plot::new();
    huge.area.allocate(1 << 40, |_, _| ());
    let error = huge.try_finish(&options()).expect_err("too large");
    assert!(matches!(error, WriteError::ImageTooLarge), "{error}");
}

#[test]
fn labels_and_uuids() {
    let (plot, _) = plot();
    let label = "seventeen letters".to_string();
    let error = plot.try_finish(&Options { label, ..options() }).expect_err("too long");
    assert!(error.to_string().contains("seventeen letters"));
    let error = plot.try_finish(&Options { uuid: [0; 16], ..options() }).expect_err("no UUID");
    assert!(matches!(error, WriteError::Uuid));
}

#[test]
fn a_file_that_cannot_be_written() {
    let (plot, _) = plot();
    let file = std::fs::File::open(&plot.path).expect("read only");
    let error = parbake_builder::ext4::finish(&file, &plot.area, &plot.tree, &options())
        .expect_err("not writable");
    assert!(matches!(error, WriteError::Io(_)), "{error}");
}

#[test]
fn a_full_file_system() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: mounting needs root");
        return;
    }
    // A small ext4 image of our own is the file system that runs full.
    let outer = Plot::new();
    outer.finish(&Options { free_bytes: 4 << 20, free_inodes: 10, ..options() });
    let Some(mount) = judge::mounted::Mount::new(&outer.path, "rw") else {
        return;
    };
    let (mut plot, directory) = plot();
    for number in 0..2000 {
        // Every directory takes a block.
        plot.directory(directory, number.to_string());
    }
    let file = std::fs::File::create(mount.path().join("image")).expect("create");
    let error =
        parbake_builder::ext4::finish(&file, &plot.area, &plot.tree, &options()).expect_err("full");
    assert!(matches!(error, WriteError::OutOfSpace { needed } if needed > 4 << 20), "{error}");
    drop(file);
}

#[test]
fn the_area_of_another_file_is_harmless() {
    let plot = Plot::new();
    let mut area = DataArea::new();
    area.allocate(40_000, |_, _| ());
    parbake_builder::ext4::finish(&plot.file, &area, &plot.tree, &options()).expect("finish");
    plot.judge();
}
