//! Archives with bytes changed, cut, doubled and shuffled, their checksums put right again: the
//! reader and everything behind it must end in a tree or an error, never in a panic or a hang.

mod layers;

use layers::{Entry, Tar, seal};
use parbake_builder::ext4;
use parbake_builder::flatten::{FlattenOptions, flatten};
use parbake_builder::image::{Image, ImageSource};
use proptest::prelude::*;

fn seed() -> Vec<u8> {
    let sparse = Entry::new(b'0', "GNUSparseFile.0/sp")
        .data(b"XXXXYYYY")
        .pax("GNU.sparse.size", "20000")
        .pax("GNU.sparse.numblocks", "2")
        .pax("GNU.sparse.name", "sp")
        .pax("GNU.sparse.map", "8192,4,19996,4");
    let mut map = b"1\n4096\n4\n".to_vec();
    map.resize(512, 0);
    map.extend(b"ZZZZ");
    let newer = Entry::new(b'0', "GNUSparseFile.0/sp2")
        .data(map)
        .pax("GNU.sparse.major", "1")
        .pax("GNU.sparse.minor", "0")
        .pax("GNU.sparse.name", "sp2")
        .pax("GNU.sparse.realsize", "9000");
    let acl = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x04\0\x04\0\xff\xff\xff\xff\x20\0\x04\0\xff\xff\xff\xff";
    Tar::new()
        .directory("d")
        .file("d/f", b"hello".repeat(300))
        .symlink("l", "d")
        .file("l/g", "1")
        .hardlink("h", "d/f")
        .mark("d/.wh.f")
        .mark("d/.wh..wh..opq")
        .entry(sparse)
        .entry(newer)
        .entry(Entry::new(b'0', "x").pax("SCHILY.xattr.user.a", "b").pax("mtime", "1.5"))
        .entry(Entry::new(b'0', "y").pax("SCHILY.xattr.system.posix_acl_access", acl))
        .entry(Entry::new(b'3', "dev").device(1, 3))
        .file("n".repeat(150), "long")
        .finish()
}

#[derive(Debug, Clone)]
enum Change {
    Byte(prop::sample::Index, u8),
    Digit(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Double(prop::sample::Index),
    Remove(prop::sample::Index),
    Swap(prop::sample::Index, prop::sample::Index),
}

fn change() -> impl Strategy<Value = Change> {
    use any as a;
    prop_oneof![
        6 => (a::<prop::sample::Index>(), a::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        4 => (a::<prop::sample::Index>(), b'0'..=b'9').prop_map(|(at, byte)| Change::Digit(at, byte)),
        1 => a::<prop::sample::Index>().prop_map(Change::Cut),
        2 => a::<prop::sample::Index>().prop_map(Change::Double),
        2 => a::<prop::sample::Index>().prop_map(Change::Remove),
        2 => (a::<prop::sample::Index>(), a::<prop::sample::Index>()).prop_map(|(x, y)| Change::Swap(x, y)),
    ]
}

fn mutate(mut tar: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if tar.len() < 512 {
            break;
        }
        let blocks = tar.len() / 512;
        match change {
            Change::Byte(at, byte) => {
                let at = at.index(tar.len());
                tar[at] = *byte;
            }
            Change::Digit(at, byte) => {
                let digits: Vec<usize> =
                    (0..tar.len()).filter(|&at| tar[at].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    tar[digits[at.index(digits.len())]] = *byte;
                }
            }
            Change::Cut(at) => tar.truncate(at.index(tar.len())),
            Change::Double(at) => {
                let at = at.index(blocks) * 512;
                let block = tar[at..at + 512].to_vec();
                tar.splice(at..at, block);
            }
            Change::Remove(at) => {
                let at = at.index(blocks) * 512;
                tar.drain(at..at + 512);
            }
            Change::Swap(one, two) => {
                let (one, two) = (one.index(blocks) * 512, two.index(blocks) * 512);
                for offset in 0..512 {
                    tar.swap(one + offset, two + offset);
                }
            }
        }
    }
    // Headers stay headers, so that what is in them is looked at.
    for block in tar.as_chunks_mut::<512>().0 {
        if &block[257..262] == b"ustar" {
            seal(block);
        }
    }
    tar
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn changed_archives_end_in_a_tree_or_an_error(
        one in prop::collection::vec(change(), 0..6),
        two in prop::collection::vec(change(), 0..6),
    ) {
        let source = ImageSource::Tar { path: "mutated".into() };
        let layers = vec![mutate(seed(), &one).into(), mutate(seed(), &two).into()];
        let image = Image::of_memory(&source, layers);
        let mut options = FlattenOptions { threads: 1, ..FlattenOptions::default() };
        options.limits.data_bytes = 1 << 24;
        let file = tempfile::tempfile().expect("temporary file");
        if let Ok(flattened) = flatten(&image, &file, &options, &mut |_| {}) {
            let options = ext4::Options::new([1; 16]);
            // What ext4 cannot hold is an error too.
            let _ = ext4::finish(&file, &flattened.area, &flattened.tree, &options);
        }
    }
}
