//! ext4 images as images: what our writer and `mke2fs` wrote comes back whole, and what is damaged or
//! not understood is refused.

mod layers;

use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use layers::{Entry, Layout, Tar, flatten_with, open};
use parbake_builder::flatten::FlattenOptions;
use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::image::ImageSource;
use proptest::prelude::*;

fn text(source: &str) -> Result<String, String> {
    let source: ImageSource = source.parse().expect("a source");
    flatten_with(&open(&source)?, &FlattenOptions::default()).map(|flat| flat.text())
}

fn everything() -> Vec<u8> {
    let acl = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\xe8\x03\0\0\x04\0\x04\0\xff\xff\xff\xff\x10\0\x06\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
    let capability = b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut tar = Tar::new()
        .directory("d")
        .file("d/f", b"hello".repeat(30_000))
        .hardlink("hard", "d/f")
        .symlink("short", "d/f")
        .symlink("long", "x/".repeat(100))
        .entry(Entry::new(b'0', "caps").pax("SCHILY.xattr.security.capability", capability))
        .entry(Entry::new(b'0', "acl").pax("SCHILY.xattr.system.posix_acl_access", acl))
        .entry(Entry::new(b'5', "defaults").pax("SCHILY.xattr.system.posix_acl_default", acl))
        .entry(Entry::new(b'0', "small").pax("SCHILY.xattr.user.a", b"\0\n").mode(0o4751))
        .entry(Entry::new(b'0', "large").pax("SCHILY.xattr.trusted.b", vec![7; 3000]))
        .entry(
            Entry::new(b'0', "both")
                .pax("SCHILY.xattr.user.c", "1")
                .pax("SCHILY.xattr.user.d", vec![8; 900]),
        )
        .entry(Entry::new(b'3', "null").device(1, 3))
        .entry(Entry::new(b'4', "disk").device(259, 70_000))
        .entry(Entry::new(b'6', "pipe").owner(70_000, 4_000_000_000))
        .entry(Entry::new(b'0', "before").pax("mtime", "-1.5"))
        .entry(Entry::new(b'0', "after").pax("mtime", "9999999999.123456789"))
        .entry(Entry::new(b'0', b"caf\xe9 \n"))
        .directory("many");
    for number in 0..3000 {
        tar = tar.file(format!("many/{number:0>60}"), "");
    }
    // More stretches than an inode, and than one block of the extent tree, holds.
    let mut map = format!("{}\n", 400).into_bytes();
    let mut data = Vec::new();
    for number in 0..400u64 {
        map.extend(format!("{}\n4\n", number * 16_384).bytes());
        data.extend(format!("{number:04}").bytes());
    }
    map.resize(map.len().next_multiple_of(512), 0);
    map.extend(data);
    let sparse = Entry::new(b'0', "GNUSparseFile.0/s")
        .data(map)
        .pax("GNU.sparse.major", "1")
        .pax("GNU.sparse.minor", "0")
        .pax("GNU.sparse.name", "sparse")
        .pax("GNU.sparse.realsize", (400 * 16_384).to_string());
    tar.entry(sparse).finish()
}

fn write(layers: Vec<Vec<u8>>, out: &Path) -> String {
    let layout = Layout::of(layers);
    let image = layout.open().expect("image");
    build_ext4(&image, out, &BuildOptions::default(), &mut |_| {}).expect("build");
    flatten_with(&image, &FlattenOptions::default()).expect("flatten").text()
}

#[test]
fn what_was_written_comes_back_whole() {
    let work = tempfile::tempdir().expect("temporary directory");
    let first = work.path().join("first.ext4");
    let upper = Tar::new().mark("d/.wh.f").file("d/g", "new").finish();
    let expected = write(vec![everything(), upper], &first);
    assert!(expected.lines().count() > 3000 && expected.contains("security.capability"));
    let source = format!("ext4:{}", first.display());
    assert_eq!(text(&source).expect("read"), expected);
    // And once more through a file system made of it.
    let second = work.path().join("second.ext4");
    let image = open(&source.parse().expect("source")).expect("image");
    build_ext4(&image, &second, &BuildOptions::default(), &mut |_| {}).expect("build");
    assert_eq!(text(&format!("ext4:{}", second.display())).expect("read"), expected);
}

#[test]
fn free_space_is_good_for_many_small_files() {
    let work = tempfile::tempdir().expect("temporary directory");
    let image = work.path().join("image");
    // As many files as the fewest inodes of a group, so that none is left over by chance.
    let tar = (0..2038).fold(Tar::new(), |tar, number| tar.file(format!("f{number}"), ""));
    let layout = Layout::of([tar.finish()]);
    let options = BuildOptions { free_bytes: 64 << 20, ..BuildOptions::default() };
    build_ext4(&layout.open().expect("image"), &image, &options, &mut |_| {}).expect("build");
    let bytes = std::fs::read(&image).expect("image");
    let free = u32::from_le_bytes(bytes[1040..1044].try_into().expect("four bytes"));
    assert!(free >= 4096, "{free} inodes for 64 MiB");
}

/// Runs a tool of e2fsprogs; `false` where there is none.
fn tool(program: &str, arguments: &[&str]) -> bool {
    let path = std::env::var("PATH").unwrap_or_default() + ":/sbin:/usr/sbin";
    let output = match Command::new(program).args(arguments).env("PATH", path).output() {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: {program}: {error}");
            return false;
        }
    };
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    true
}

#[test]
fn what_others_wrote_is_read_too() {
    let work = tempfile::tempdir().expect("temporary directory");
    let root = work.path().join("root");
    std::fs::create_dir_all(root.join("d/many")).expect("directory");
    std::fs::write(root.join("d/f"), b"contents".repeat(100_000)).expect("file");
    std::fs::hard_link(root.join("d/f"), root.join("hard")).expect("link");
    std::fs::set_permissions(root.join("d/f"), std::fs::Permissions::from_mode(0o2755))
        .expect("mode");
    symlink("d/f", root.join("soft")).expect("link");
    symlink("y/".repeat(80), root.join("softer")).expect("link");
    for number in 0..2000 {
        std::fs::write(root.join(format!("d/many/{number:0>40}")), "").expect("file");
    }
    let sparse = std::fs::File::create(root.join("sparse")).expect("file");
    sparse.set_len(3 << 20).expect("size");
    sparse.write_all_at(b"x", 2_000_000).expect("write");
    let expected = text(&format!("dir:{}", root.display())).expect("directory");
    // Times of the tool's own making have whole seconds.
    let coarse = |text: &str| {
        text.split(' ')
            .map(|word| match (word.strip_prefix('@'), word.split_once('.')) {
                (Some(_), Some((seconds, rest))) => {
                    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
                    format!("{seconds}{rest}")
                }
                _ => word.to_owned(),
            })
            .collect::<Vec<_>>()
            .join(" ")
    };
    for options in [
        &["-t", "ext4"][..],
        &["-t", "ext4", "-b", "1024", "-O", "^64bit,^metadata_csum"],
        &["-t", "ext4", "-I", "128", "-O", "^has_journal,^dir_index"],
    ] {
        let image = work.path().join("made.ext4");
        let _ = std::fs::remove_file(&image);
        let (from, to) = (root.display().to_string(), image.display().to_string());
        if !tool("mke2fs", &[options, &["-q", "-d", &from, &to, "32M"]].concat()) {
            return;
        }
        let found = text(&format!("ext4:{to}")).expect("read");
        // The root directory's own time is that of the making, too.
        let (found, expected) = (coarse(&found), coarse(&expected));
        for (found, expected) in found.lines().zip(expected.lines()).skip(1) {
            assert_eq!(found, expected, "{options:?}");
        }
        assert_eq!(found.lines().count(), expected.lines().count());
    }
    let image = work.path().join("old.ext3");
    let to = image.display().to_string();
    tool("mke2fs", &["-q", "-t", "ext3", "-d", &root.display().to_string(), &to, "32M"]);
    let error = text(&format!("ext4:{to}")).expect_err("refused");
    assert!(error.contains("no extents") && error.contains("dir:"), "{error}");
}

#[test]
fn what_cannot_be_read_is_refused_with_a_way_out() {
    let work = tempfile::tempdir().expect("temporary directory");
    let image = work.path().join("image");
    write(vec![everything()], &image);
    let good = std::fs::read(&image).expect("image");
    let source = format!("ext4:{}", image.display());
    let refused = |change: &dyn Fn(&mut Vec<u8>), part: &str| {
        let mut bytes = good.clone();
        change(&mut bytes);
        std::fs::write(&image, bytes).expect("write");
        let error = text(&source).expect_err(part);
        assert!(error.contains(part), "{part}: {error}");
    };
    refused(&|bytes| bytes.truncate(1500), "no ext4 file system");
    refused(&|bytes| bytes.truncate(bytes.len() / 2), "damaged");
    refused(&|bytes| bytes[1024 + 0x38] = 0, "no ext4 file system");
    refused(&|bytes| bytes[1024 + 0x60] |= 4, "e2fsck -p");
    refused(&|bytes| bytes[1024 + 0x62] |= 1, "features 0x10000");
    refused(&|bytes| bytes[1024 + 0x18] = 9, "block size");
    refused(&|bytes| bytes[1024 + 0x28..1024 + 0x2c].fill(0), "groups");
    std::fs::remove_file(&image).expect("remove");
    assert!(text(&source).expect_err("refused").contains("image"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Damage ends in a tree or an error.
    #[test]
    fn damage_is_survived(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40)) {
        use std::sync::OnceLock;
        static IMAGE: OnceLock<(Vec<u8>, Vec<usize>)> = OnceLock::new();
        let (good, used) = IMAGE.get_or_init(|| {
            let work = tempfile::tempdir().expect("temporary directory");
            let image = work.path().join("image");
            let tar = Tar::new()
                .directory("d")
                .file("d/f", b"x".repeat(9000))
                .hardlink("h", "d/f")
                .symlink("l", "z/".repeat(50))
                .entry(Entry::new(b'0', "a").pax("SCHILY.xattr.user.a", vec![1; 500]))
                .finish();
            let options = BuildOptions { free_bytes: 0, ..BuildOptions::default() };
            let layout = Layout::of([tar]);
            build_ext4(&layout.open().expect("image"), &image, &options, &mut |_| {}).expect("build");
            let bytes = std::fs::read(&image).expect("image");
            // Zeros are mostly nothing at all.
            let used = (0..bytes.len()).filter(|&at| bytes[at] != 0).collect();
            (bytes, used)
        });
        let mut bytes = good.clone();
        for (at, byte) in &changes {
            bytes[used[at.index(used.len())]] = *byte;
        }
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), &bytes).expect("write");
        let _ = text(&format!("ext4:{}", file.path().display()));
    }
}
