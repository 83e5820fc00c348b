//! Images of every kind of node and directory, before all judges.

mod judge;

use judge::plot::{Plot, digest, meta, noise, options};
use parbake_builder::ext4::Options;
use parbake_builder::tree::{Kind, NodeId, Timestamp};

const ROOT: NodeId = NodeId::ROOT;

/// A tree with something of everything.
fn varied() -> Plot {
    let mut plot = Plot::new();
    plot.meta(ROOT).mode = 0o1751;
    plot.meta(ROOT).uid = 70_000;
    let bin = plot.directory(ROOT, "bin");
    for (name, length) in
        [("empty", 0), ("one", 1), ("block", 4096), ("more", 4097), ("long", 1 << 20)]
    {
        plot.file(bin, name, &noise(length as u64, length));
    }
    let odd = plot.directory(ROOT, b"caf\xe9 \xff\n");
    plot.meta(odd).mode = 0o7000;
    plot.file(odd, [b'x'; 255], b"long name");
    let shared = plot.file(ROOT, "shared", b"linked");
    plot.link(bin, "again", shared);
    plot.link(odd, "and again", shared);
    for length in [1, 58, 59, 60, 61, 4094, 4095] {
        let target =
            noise(length, length as usize).iter().map(|b| b'a' + b % 26).collect::<Vec<u8>>();
        let link = plot.symlink(ROOT, format!("link{length}"), &target);
        plot.link(odd, format!("same{length}"), link);
    }
    let dev = plot.directory(ROOT, "dev");
    for (major, minor) in [(1, 3), (255, 255), (256, 0), (0, 256), (4095, 1_048_575)] {
        let device = Plot::device(major, minor);
        plot.add(dev, format!("c{major}.{minor}"), Kind::CharDevice(device));
        plot.add(dev, format!("b{major}.{minor}"), Kind::BlockDevice(device));
    }
    plot.add(dev, "fifo", Kind::Fifo);
    plot.add(dev, "socket", Kind::Socket);
    let ids = plot.directory(ROOT, "ids");
    for id in [0, 65_535, 65_536, 3_000_000, 4_294_967_294] {
        let file = plot.file(ids, id.to_string(), b"");
        plot.meta(file).uid = id;
        plot.meta(file).gid = 4_294_967_294 - id;
        plot.meta(file).mode = 0o6755;
    }
    let times = plot.directory(ROOT, "times");
    for seconds in [
        i64::MIN,
        -2_147_483_649,
        -2_147_483_648,
        -5,
        0,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x1_0000_0000,
        13_569_465_600,
        15_032_385_535,
        15_032_385_536,
        i64::MAX,
    ] {
        let file = plot.file(times, seconds.to_string(), b"");
        plot.meta(file).mtime = Timestamp { seconds, nanos: 999_999_999 };
    }
    // What an upper layer hid.
    let hidden = plot.data(&noise(77, 100_000));
    plot.node(Kind::File(hidden), meta(0o644));
    plot.file(ROOT, "last", &noise(78, 10_000));
    plot
}

fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&permissions.to_le_bytes());
        out.extend_from_slice(&id.to_le_bytes());
    }
    out
}

/// A tree with extended attributes of all sizes and kinds.
fn attributed() -> Plot {
    const NONE: u32 = u32::MAX;
    let mut plot = Plot::new();
    plot.xattr(ROOT, "user.root", "yes");
    for length in [0, 1, 3, 4, 40, 59, 60, 61, 64, 68, 72, 100, 3000, 4036] {
        let file = plot.file(ROOT, format!("value{length}"), b"x");
        plot.xattr(file, "user.v", noise(length, length as usize));
    }
    let many = plot.file(ROOT, "many", b"");
    for number in 0..60 {
        plot.xattr(many, &format!("user.{}", "n".repeat(number + 1)), vec![b'v'; number % 7]);
    }
    let high = plot.file(ROOT, "high", b"");
    plot.meta(high)
        .xattrs
        .insert(b"user.caf\xe9\xff".as_slice().into(), b"\x80\xff".as_slice().into());
    plot.meta(high)
        .xattrs
        .insert([b"user.".as_slice(), &[0xe9; 200]].concat().into(), b"1".as_slice().into());
    // Label in the inode, capability in a block that all share.
    let labelled = plot.directory(ROOT, "labelled");
    let label = "system_u:object_r:bin_t:s0\0";
    plot.xattr(labelled, "security.selinux", label);
    for number in 0..2100 {
        let file = plot.file(labelled, number.to_string(), b"");
        plot.xattr(file, "security.selinux", label);
        plot.xattr(
            file,
            "security.capability",
            [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        );
    }
    let link = plot.symlink(labelled, "link", &[b't'; 59]);
    plot.xattr(link, "security.selinux", label);
    let link = plot.symlink(labelled, "long", &[b't'; 60]);
    plot.xattr(link, "trusted.long", [7; 2000]);
    let fifo = plot.add(labelled, "fifo", Kind::Fifo);
    plot.xattr(fifo, "security.selinux", label);
    let full = acl(&[
        (1, 6, NONE),
        (2, 4, 1000),
        (2, 7, 70_000),
        (4, 4, NONE),
        (8, 5, 3),
        (16, 7, NONE),
        (32, 0, NONE),
    ]);
    let minimal = acl(&[(1, 7, NONE), (4, 5, NONE), (32, 5, NONE)]);
    let directory = plot.directory(ROOT, "acl");
    plot.meta(directory).mode = 0o670;
    plot.xattr(directory, "system.posix_acl_access", &full);
    plot.xattr(directory, "system.posix_acl_default", &minimal);
    plot.xattr(directory, "user.beside", "still readable");
    let file = plot.file(directory, "file", b"");
    plot.meta(file).mode = 0o670;
    plot.xattr(file, "system.posix_acl_access", &full);
    plot.xattr(file, "user.beside", "still readable");
    let file = plot.file(directory, "minimal", b"");
    plot.meta(file).mode = 0o755;
    plot.xattr(file, "system.posix_acl_access", &minimal);
    plot.xattr(file, "user.beside", "still readable");
    plot
}

/// Directories of several sizes, at the edges of a block and of the index's first level.
fn crowded() -> Plot {
    let mut plot = Plot::new();
    for count in [1usize, 100, 339, 340, 341, 2000, 40_000] {
        let directory = plot.directory(ROOT, format!("d{count}"));
        for number in 0..count {
            plot.add(directory, format!("{number:04}"), Kind::Fifo);
        }
    }
    let long = plot.directory(ROOT, "long");
    for number in 0..9000 {
        plot.add(long, format!("{number:0>255}"), Kind::Fifo);
    }
    plot
}

#[test]
fn an_empty_tree_is_a_small_image() {
    let plot = Plot::new();
    let report = plot.finish(&options());
    assert!(report.size < 1 << 20, "{report:?}");
    assert_eq!(report.data_blocks, 0);
    plot.judge();
}

#[test]
fn every_kind_of_node_is_what_the_tree_says() {
    let plot = varied();
    let report = plot.finish(&options());
    // The hidden file's 25 blocks are free again.
    assert!(report.free_blocks >= 25, "{report:?}");
    plot.judge();
}

#[test]
fn attributes_are_what_the_tree_says() {
    let plot = attributed();
    plot.finish(&options());
    plot.judge();
}

#[test]
fn directories_of_all_sizes_list_and_look_up() {
    let plot = crowded();
    plot.finish(&options());
    plot.judge();
}

/// The names 7653 and 37355 have the same hash, and exactly one of them still fits into the first
/// leaf. Whoever looks for the other must be told to read on. (`ext4-view` does not read on.)
#[test]
fn names_of_one_hash_in_two_blocks_are_both_found() {
    let mut plot = Plot::new();
    let directory = plot.directory(ROOT, "d");
    let lower = [0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16];
    let higher = [1, 10, 12, 18, 25, 35, 51, 60, 64, 70, 71, 79, 83, 88];
    for number in lower.into_iter().chain(higher).chain([7653, 37_355]) {
        plot.add(directory, format!("{number:0>255}"), Kind::Fifo);
    }
    plot.finish(&options());
    judge::fsck(&plot.path);
    judge::mounted::compare(&plot.tree, &plot.path);
}

#[test]
fn journal_label_and_free_space_are_as_asked() {
    let plot = varied();
    let asked = Options {
        journal: true,
        free_bytes: 300 << 20,
        free_inodes: 60_000,
        label: "sixteen letters!".into(),
        ..options()
    };
    let report = plot.finish(&asked);
    assert_eq!(report.free_blocks, (300 << 20) / 4096 + report.blocks / 50);
    plot.judge();
    let Some(output) = judge::tool("dumpe2fs", &["-h", plot.path.to_str().expect("path")]) else {
        return;
    };
    let text = judge::text(&output);
    for line in [
        "Filesystem volume name:   sixteen letters!",
        "Filesystem UUID:          70617262-616b-652d-7465-73742d756964",
        "Filesystem state:         clean",
        "Total journal size:       16M",
        "has_journal ext_attr resize_inode dir_index filetype extent 64bit flex_bg sparse_super \
         large_file huge_file dir_nlink extra_isize metadata_csum",
        "Reserved block count:     0",
        "Default directory hash:   half_md4",
        "Checksum type:            crc32c",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    let free: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("Free inodes:"))
        .and_then(|rest| rest.trim().parse().ok())
        .expect("free inodes");
    assert!(free >= 60_000);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let images = [varied(), varied()];
    for image in &images {
        image.finish(&options());
    }
    assert_eq!(digest(&images[0].path), digest(&images[1].path));
}

#[test]
fn what_was_written_for_dead_files_leaves_no_trace() {
    let make = |hidden: &[u8]| {
        let mut plot = Plot::new();
        let data = plot.data(hidden);
        plot.node(Kind::File(data), meta(0o644));
        plot.file(ROOT, "seen", b"content");
        plot.finish(&options());
        digest(&plot.path)
    };
    assert_eq!(make(&[1; 50_000]), make(&[2; 50_000]));
}

/// A change of these bytes changes every image anyone builds: only on purpose.
#[test]
fn images_are_these_bytes() {
    let journal = Options {
        journal: true,
        free_bytes: 10 << 20,
        free_inodes: 3000,
        label: "golden".into(),
        ..options()
    };
    for (name, plot, asked, expected) in [
        (
            "varied",
            varied(),
            options(),
            "386fee74b30d31314cd4f8b3de3c1dfa629b9b33653cbe3484f9e883dbe47cb5",
        ),
        (
            "attributed",
            attributed(),
            journal,
            "ab2dcc9199f4e86972b2e87417ddf6ba8797fd19b54b2859d1530cafb44b149f",
        ),
        (
            "crowded",
            crowded(),
            options(),
            "206e516be651911fe8d63e9ecba49b774d83419dce6e2673e3824b2949db6b05",
        ),
    ] {
        plot.finish(&asked);
        assert_eq!(digest(&plot.path), expected, "{name}");
    }
}
