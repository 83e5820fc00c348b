//! Trees as frames: what is sent is what is made, and what nobody should send is refused.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use parbake_protocol::agent::Frame;
use parbake_protocol::agent::tree::{
    Attributes, Limits, TreeEntry, TreeError, TreeItem, TreeKind, Unpacked, pack, unpack,
};
use proptest::prelude::*;

fn sent(path: &Path) -> Vec<Frame> {
    let mut frames = Vec::new();
    pack(path, Attributes::Overlay, &mut |frame| {
        frames.push(frame);
        Ok(())
    })
    .unwrap();
    frames
}

fn made(frames: Vec<Frame>, dest: &Path, limits: Limits) -> Result<Unpacked, TreeError> {
    let mut frames = VecDeque::from(frames);
    let result = unpack(&mut || Ok(frames.pop_front()), dest, limits);
    if result.is_ok() {
        assert!(frames.is_empty(), "it stopped before the end");
    }
    result
}

/// Everything but what a file system chooses by itself.
fn described(root: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut links = std::collections::HashMap::new();
    let mut left = vec![PathBuf::new()];
    while let Some(path) = left.pop() {
        let full = root.join(&path);
        let meta = fs::symlink_metadata(&full).unwrap();
        let kind = meta.file_type();
        let content = if kind.is_symlink() {
            format!("{:?}", fs::read_link(&full).unwrap())
        } else if kind.is_file() {
            let bytes = fs::read(&full).unwrap();
            let sum = bytes.iter().fold(0u64, |sum, b| sum.wrapping_mul(31) + u64::from(*b));
            format!("{} {sum}", bytes.len())
        } else if kind.is_char_device() || kind.is_block_device() {
            format!("{:x}", meta.rdev())
        } else {
            String::new()
        };
        let same = (!kind.is_dir())
            .then(|| links.entry(meta.ino()).or_insert_with(|| path.clone()).display().to_string());
        let (mode, owner) = (meta.mode(), (meta.uid(), meta.gid()));
        let time = (meta.mtime(), meta.mtime_nsec());
        lines.push(format!("{path:?} {mode:o} {owner:?} {time:?} {content} {same:?}"));
        if kind.is_dir() {
            let mut names: Vec<_> =
                fs::read_dir(&full).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            left.extend(names.into_iter().rev().map(|name| path.join(name)));
        }
    }
    lines
}

#[test]
fn every_kind_of_file_arrives() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    fs::create_dir_all(from.join("a/b/c")).unwrap();
    fs::create_dir_all(from.join("closed")).unwrap();
    fs::write(from.join("a/file"), vec![7; 200_000]).unwrap();
    fs::write(from.join("a/empty"), "").unwrap();
    fs::hard_link(from.join("a/file"), from.join("a/b/hard")).unwrap();
    fs::hard_link(from.join("a/file"), from.join("zz")).unwrap();
    symlink("../nowhere", from.join("a/soft")).unwrap();
    fs::hard_link(from.join("a/soft"), from.join("a/softer")).unwrap();
    fs::write(from.join(OsStr::from_bytes(b"\xff\xfe")), "bytes").unwrap();
    let sparse = fs::File::create(from.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", 9 << 20).unwrap();
    sparse.set_len(20 << 20).unwrap();
    fs::set_permissions(from.join("a/file"), fs::Permissions::from_mode(0o6751)).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, from.join("fifo"), rustix::fs::Mode::RUSR).unwrap();
    std::os::unix::net::UnixListener::bind(from.join("socket")).unwrap();
    let root = rustix::process::geteuid().is_root();
    if root {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
        let device = |name: &str, kind, number| {
            mknodat(CWD, from.join(name), kind, Mode::RUSR, number).unwrap();
        };
        device("whiteout", FileType::CharacterDevice, makedev(0, 0));
        device("null", FileType::CharacterDevice, makedev(1, 3));
        device("disk", FileType::BlockDevice, makedev(7, 200));
        std::os::unix::fs::chown(from.join("a/b"), Some(1234), Some(70_000)).unwrap();
        std::os::unix::fs::lchown(from.join("a/soft"), Some(5), Some(6)).unwrap();
    }
    fs::set_permissions(from.join("closed"), fs::Permissions::from_mode(0o1100)).unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::new(1_000_000, 5);
    fs::File::open(from.join("a/b/c")).unwrap().set_modified(old).unwrap();

    let done = made(sent(&from), &to, Limits::default()).unwrap();
    assert!(done.entries > 10 && done.bytes > 20 << 20, "{done:?}");
    fs::remove_file(from.join("socket")).unwrap();
    // The directory that held it was changed by that.
    let time = fs::metadata(&to).unwrap().modified().unwrap();
    fs::File::open(&from).unwrap().set_modified(time).unwrap();
    assert_eq!(described(&to), described(&from));
    let blocks = fs::metadata(to.join("sparse")).unwrap().blocks();
    assert!(blocks * 512 < 1 << 20, "holes take {blocks} blocks");
    if root {
        assert!(fs::symlink_metadata(to.join("disk")).unwrap().file_type().is_block_device());
    }

    // A single file is a tree, too.
    let done = made(sent(&from.join("a/file")), &directory.path().join("one"), Limits::default());
    assert_eq!(done.unwrap(), Unpacked { entries: 1, bytes: 200_000 });
    assert_eq!(fs::read(directory.path().join("one")).unwrap(), vec![7; 200_000]);
}

fn entry(name: &[u8], kind: TreeKind) -> TreeEntry {
    TreeEntry {
        name: name.to_vec(),
        kind,
        number: None,
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: (0, 0),
        xattrs: Vec::new(),
    }
}

fn item(name: &[u8], kind: TreeKind) -> Frame {
    Frame::Tree(TreeItem::Entry(Box::new(entry(name, kind))))
}

const DIRECTORY: TreeKind = TreeKind::Directory;

fn leave() -> Frame {
    Frame::Tree(TreeItem::Leave)
}

fn hole(length: u64) -> Frame {
    Frame::Tree(TreeItem::Hole(length))
}

#[test]
fn what_nobody_should_send_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("victim"), "safe").unwrap();
    let up = || TreeKind::Symlink(b"..".to_vec());
    let file = |size| TreeKind::File { size };
    let numbered = |name: &[u8], number| {
        let entry = TreeEntry { number: Some(number), ..entry(name, file(0)) };
        Frame::Tree(TreeItem::Entry(Box::new(entry)))
    };
    let with = |change: &dyn Fn(&mut TreeEntry)| {
        let mut changed = entry(b"x", file(0));
        change(&mut changed);
        Frame::Tree(TreeItem::Entry(Box::new(changed)))
    };
    let xattr = |name: &[u8], value: &[u8]| {
        let (name, value) = (name.to_vec(), value.to_vec());
        with(&move |entry| entry.xattrs = vec![(name.clone(), value.clone())])
    };
    let long = vec![b'n'; 256];
    let cases: Vec<(&str, Vec<Frame>)> = vec![
        ("nothing", vec![]),
        ("no tree", vec![Frame::DataEnd]),
        ("no root", vec![leave()]),
        ("a root that is a link", vec![item(b"", up())]),
        ("a root with a name", vec![item(b"x", DIRECTORY), leave()]),
        ("no end", vec![item(b"", DIRECTORY)]),
        ("a way up", vec![item(b"", DIRECTORY), item(b"..", DIRECTORY), leave(), leave()]),
        ("a path", vec![item(b"", DIRECTORY), item(b"../victim", file(0)), leave()]),
        ("an absolute path", vec![item(b"", DIRECTORY), item(b"/victim", file(0)), leave()]),
        ("no name", vec![item(b"", DIRECTORY), item(b"", DIRECTORY), leave(), leave()]),
        ("a dot", vec![item(b"", DIRECTORY), item(b".", file(0)), leave()]),
        ("a NUL", vec![item(b"", DIRECTORY), item(b"a\0b", file(0)), leave()]),
        ("a long name", vec![item(b"", DIRECTORY), item(&long, file(0)), leave()]),
        (
            "one name twice",
            vec![item(b"", DIRECTORY), item(b"a", file(0)), item(b"a", file(0)), leave()],
        ),
        (
            "through a link",
            vec![
                item(b"", DIRECTORY),
                item(b"a", up()),
                item(b"a", DIRECTORY),
                item(b"victim", file(0)),
                leave(),
                leave(),
            ],
        ),
        (
            "a file through a link",
            vec![
                item(b"", DIRECTORY),
                item(b"victim", TreeKind::Symlink(b"../victim".to_vec())),
                item(b"victim", file(4)),
                Frame::Data(b"evil".to_vec()),
                leave(),
            ],
        ),
        (
            "an empty link",
            vec![item(b"", DIRECTORY), item(b"a", TreeKind::Symlink(Vec::new())), leave()],
        ),
        (
            "a link to nothing sent",
            vec![item(b"", DIRECTORY), item(b"a", TreeKind::Link { number: 1 }), leave()],
        ),
        (
            "a link to what came later",
            vec![
                item(b"", DIRECTORY),
                item(b"a", TreeKind::Link { number: 1 }),
                numbered(b"b", 1),
                leave(),
            ],
        ),
        (
            "more content",
            vec![item(b"", DIRECTORY), item(b"a", file(3)), Frame::Data(b"four".to_vec()), leave()],
        ),
        (
            "less content",
            vec![item(b"", DIRECTORY), item(b"a", file(3)), Frame::Data(b"tw".to_vec()), leave()],
        ),
        (
            "empty content",
            vec![item(b"", DIRECTORY), item(b"a", file(3)), Frame::Data(Vec::new()), leave()],
        ),
        (
            "a hole that is too long",
            vec![item(b"", DIRECTORY), item(b"a", file(3)), hole(u64::MAX), leave()],
        ),
        ("a hole nowhere", vec![item(b"", DIRECTORY), hole(1), leave()]),
        ("content nowhere", vec![item(b"", DIRECTORY), Frame::Data(vec![1]), leave()]),
        (
            "a redirection",
            vec![item(b"", DIRECTORY), xattr(b"trusted.overlay.redirect", b"/etc"), leave()],
        ),
        (
            "an opaque file",
            vec![item(b"", DIRECTORY), xattr(b"trusted.overlay.opaque", b"y"), leave()],
        ),
        ("a label", vec![item(b"", DIRECTORY), xattr(b"security.selinux", b"x"), leave()]),
        ("an attribute with a NUL", vec![item(b"", DIRECTORY), xattr(b"user.a\0b", b"x"), leave()]),
        ("nobody's file", vec![item(b"", DIRECTORY), with(&|entry| entry.uid = u32::MAX), leave()]),
        (
            "a time that is none",
            vec![item(b"", DIRECTORY), with(&|entry| entry.mtime.1 = u32::MAX), leave()],
        ),
        (
            "a mode that is none",
            vec![item(b"", DIRECTORY), with(&|entry| entry.mode = 0o10_0644), leave()],
        ),
    ];
    for (number, (what, frames)) in cases.into_iter().enumerate() {
        let dest = directory.path().join(format!("dest{number}"));
        let error = made(frames, &dest, Limits::default()).expect_err(what);
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(fs::read_to_string(directory.path().join("victim")).unwrap(), "safe");
}

#[test]
fn trees_without_end_end() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits { entries: 50, bytes: 1 << 20, depth: 10 };
    let run = |name: &str, frames: &mut dyn FnMut(usize) -> Frame| {
        let mut number = 0;
        let mut next = || {
            number += 1;
            assert!(number < 10_000, "{name} has no end");
            Ok(Some(if number == 1 { item(b"", DIRECTORY) } else { frames(number) }))
        };
        unpack(&mut next, &directory.path().join(name), limits).unwrap_err().to_string()
    };
    let error = run("wide", &mut |n| item(format!("{n}").as_bytes(), TreeKind::Fifo));
    assert!(error.contains("more than 50 entries"), "{error}");
    let error = run("deep", &mut |_| item(b"d", DIRECTORY));
    assert!(error.contains("more than 10 directories"), "{error}");
    let error = run("large", &mut |_| item(b"f\x1b[2J", TreeKind::File { size: 1 << 50 }));
    assert!(error.contains("more than 1048576 bytes") && !error.contains('\x1b'), "{error}");
    let mut at = 0;
    let error = run("many", &mut |n| {
        at += 1;
        if at % 2 == 1 {
            item(format!("{n}").as_bytes(), TreeKind::File { size: 300 << 10 })
        } else {
            hole(300 << 10)
        }
    });
    assert!(error.contains("bytes of content"), "{error}");
}

#[test]
fn a_receiver_without_room_or_a_sender_that_stops_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "x").unwrap();
    let result = pack(directory.path(), Attributes::Portable, &mut |_| {
        Err(io::Error::from(io::ErrorKind::BrokenPipe))
    });
    assert!(result.is_err());
    let error = pack(&directory.path().join("none"), Attributes::Portable, &mut |_| Ok(()));
    assert!(error.unwrap_err().to_string().contains("none"));
    let there = directory.path().join("file");
    assert!(made(sent(&there), &there, Limits::default()).is_err(), "what is there is replaced");
}

fn frames() -> impl Strategy<Value = Vec<Frame>> {
    let name = prop_oneof![
        Just(Vec::new()),
        Just(b"..".to_vec()),
        Just(b"a".to_vec()),
        Just(b"b".to_vec()),
        proptest::collection::vec(any::<u8>(), 0..4),
    ];
    let kind = prop_oneof![
        4 => Just(TreeKind::Directory),
        2 => (0u64..9000).prop_map(|size| TreeKind::File { size }),
        1 => (0u64..3).prop_map(|number| TreeKind::Link { number }),
        1 => Just(TreeKind::Symlink(b"../..".to_vec())),
        1 => Just(TreeKind::Fifo),
    ];
    let entry = (name, kind, 0u32..0o20_000, proptest::option::of(0u64..3)).prop_map(
        |(name, kind, mode, number)| {
            let entry = TreeEntry { mode, number, ..entry(&name, kind) };
            Frame::Tree(TreeItem::Entry(Box::new(entry)))
        },
    );
    let frame = prop_oneof![
        6 => entry,
        4 => Just(leave()),
        1 => (0u64..9000).prop_map(hole),
        2 => proptest::collection::vec(any::<u8>(), 0..9000).prop_map(Frame::Data),
    ];
    proptest::collection::vec(frame, 0..40)
        .prop_map(|rest| std::iter::once(item(b"", TreeKind::Directory)).chain(rest).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever comes, nothing is made but below the destination.
    #[test]
    fn nothing_lands_outside(frames in frames()) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a"), "safe").unwrap();
        let mut frames = VecDeque::from(frames);
        let dest = directory.path().join("dest");
        let _ = unpack(&mut || Ok(frames.pop_front()), &dest, Limits::default());
        let mut names: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name != "dest")
            .collect();
        names.sort();
        prop_assert_eq!(names, ["a"]);
        prop_assert_eq!(fs::read_to_string(directory.path().join("a")).unwrap(), "safe");
        // So that what was made without permissions can be removed.
        if let Ok(meta) = fs::symlink_metadata(&dest) && meta.is_dir() {
            let _ = fs::set_permissions(&dest, fs::Permissions::from_mode(0o700));
        }
    }
}
