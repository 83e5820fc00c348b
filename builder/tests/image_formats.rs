//! What archives and blobs may look like: tar dialects, sparse formats, compressions, and that none
//! of it shows in the image.

mod layers;

use layers::{
    Entry, Form, Layout, Stored, Tar, flatten_with, gzip, header, record, seal, show, zstd,
};
use parbake_builder::flatten::FlattenOptions;
use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::image::Event;

#[track_caller]
fn shows(tar: Vec<u8>, expected: &str) {
    assert_eq!(show([tar]).expect("flatten"), expected);
}

#[track_caller]
fn refused(tar: Vec<u8>, words: &[&str]) {
    let error = show([tar]).expect_err("refused");
    for word in ["layer 1"].iter().chain(words) {
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    }
}

#[test]
fn gnu_long_names() {
    let name = format!("{}/{}", "n".repeat(200), "m".repeat(200));
    let target = "t".repeat(300);
    let long = |letter, text: &str| {
        let data = [text.as_bytes(), b"\0"].concat();
        let entry = Entry { magic: b"ustar  \0", ..Entry::new(letter, "././@LongLink").data(data) };
        (header(&entry), entry.data)
    };
    let (name_header, name_data) = long(b'L', &name);
    let (link_header, link_data) = long(b'K', &target);
    let mut entry = Entry { magic: b"ustar  \0", ..Entry::new(b'2', "cut") };
    entry.link = b"cut".to_vec();
    let tar = Tar::new().raw(&name_header).padded(&name_data).raw(&link_header).padded(&link_data);
    let tar = tar.raw(&header(&entry)).finish();
    shows(tar, &format!("{}/ @0\n{name}->{target}\n", "n".repeat(200)));
    // PAX over GNU: the extended header is the newer one.
    let records = record(b"path", b"pax");
    let tar = Tar::new()
        .raw(&name_header)
        .padded(&name_data)
        .raw(&header(&Entry::new(b'x', "x").data(&records)))
        .padded(&records)
        .raw(&header(&Entry::new(b'0', "header")))
        .finish();
    shows(tar, "pax=\n");
}

#[test]
fn ustar_prefix_and_old_headers() {
    let mut block = header(&Entry::new(b'0', "name"));
    block[345..351].copy_from_slice(b"prefix");
    seal(&mut block);
    shows(Tar::new().raw(&block).finish(), "prefix/ @0\nprefix/name=\n");
    // GNU keeps other things in those bytes.
    let mut block = header(&Entry { magic: b"ustar  \0", ..Entry::new(b'0', "name") });
    block[345..351].copy_from_slice(b"123456");
    seal(&mut block);
    shows(Tar::new().raw(&block).finish(), "name=\n");
    // Before ustar: no magic, NUL as the type, directories by their slash.
    let old = |name| Entry { magic: &[0; 8], ..Entry::new(0, name) };
    shows(Tar::new().entry(old("f").data("1")).entry(old("d/").mode(0o755)).finish(), "d/\nf=1\n");
    shows(
        Tar::new().entry(Entry::new(b'0', "d/").mode(0o755)).file("d/f", "1").finish(),
        "d/\nd/f=1\n",
    );
    shows(Tar::new().entry(Entry::new(b'7', "contiguous").data("1")).finish(), "contiguous=1\n");
    shows(Tar::new().entry(Entry::new(b'V', "label")).file("f", "1").finish(), "f=1\n");
    // Sums of signed bytes, as some old programs made them.
    let mut block = header(&Entry::new(b'0', b"caf\xe9"));
    block[148..156].fill(b' ');
    let sum: i32 = block.iter().map(|&byte| i32::from(byte.cast_signed())).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    shows(Tar::new().raw(&block).finish(), "caf\\xe9=\n");
}

#[test]
fn pax_overrides_and_global_headers() {
    let global = record(b"mtime", b"5");
    let comment = record(b"comment", b"0123456789abcdef");
    let tar = Tar::new()
        .raw(&header(&Entry::new(b'g', "pax_global_header").data(&comment)))
        .padded(&comment)
        .raw(&header(&Entry::new(b'g', "pax_global_header").data(&global)))
        .padded(&global)
        .file("a", "1")
        .entry(Entry::new(b'0', "b").pax("mtime", "6").pax("uid", "7").pax("gid", "8"));
    shows(tar.finish(), "a=1 @5\nb= 7:8 @6\n");
    let global = record(b"path", b"x");
    let tar = Tar::new().raw(&header(&Entry::new(b'g', "g").data(&global))).padded(&global);
    refused(tar.file("a", "1").finish(), &["global"]);
    // A size in PAX is the size, whatever the header says.
    let mut entry = Entry::new(b'0', "a").data("12345").pax("size", "5");
    entry.size = Some(0);
    shows(Tar::new().entry(entry).file("b", "2").finish(), "a=12345\nb=2\n");
    // Types without contents have none, whatever their size field says.
    let mut entry = Entry::new(b'5', "d");
    entry.size = Some(4096);
    shows(Tar::new().entry(entry).file("b", "2").finish(), "b=2\nd/\n");
}

#[test]
fn ends_of_archives() {
    let file = || Tar::new().file("f", "1");
    shows(file().unfinished(), "f=1\n");
    shows(file().raw(&[0; 512]).unfinished(), "f=1\n");
    shows(file().raw(&[0; 1024]).raw(b"trailing garbage").unfinished(), "f=1\n");
    shows(file().raw(&[0; 10_240]).unfinished(), "f=1\n");
    shows(Vec::new(), "");
    shows(vec![0; 1024], "");
    let lone = file().raw(&[0; 512]).file("g", "2").finish();
    refused(lone, &["block of zeros"]);
    let whole = Tar::new().file("f", [b'x'; 5000]).unfinished();
    for cut in [100, 511, 600, 4000, 5512, 5600] {
        refused(whole[..cut].to_vec(), &["ends inside"]);
    }
    let pax = Tar::new().entry(Entry::new(b'0', "f").pax("mtime", "1")).unfinished();
    refused(pax[..1024].to_vec(), &["extended header"]);
    refused(pax[..700].to_vec(), &["PAX header"]);
    let mut block = header(&Entry::new(b'0', "f"));
    block[0] ^= 1;
    refused(Tar::new().raw(&block).finish(), &["checksum"]);
    refused(b"not a tar archive at all".repeat(100), &["checksum"]);
    for letter in *b"DMNZ" {
        refused(Tar::new().entry(Entry::new(letter, "odd")).finish(), &["odd", "type"]);
    }
}

/// 20,000 bytes, of which 600 at 8,192 and 100 at the end are not zero.
fn sparse() -> (Vec<u8>, Vec<(u64, Vec<u8>)>) {
    let pieces = vec![(8192, vec![b'X'; 600]), (19_900, vec![b'Y'; 100])];
    let mut full = vec![0; 20_000];
    for (at, piece) in &pieces {
        let at = usize::try_from(*at).expect("small");
        full[at..at + piece.len()].copy_from_slice(piece);
    }
    (full, pieces)
}

fn old_gnu(real: u64, map: &[(u64, u64)], stored: &[u8]) -> Vec<u8> {
    let entry = Entry { magic: b"ustar  \0", ..Entry::new(b'S', "sp").data(stored) };
    let mut block = header(&entry);
    let number = |field: &mut [u8], value: u64| {
        field.copy_from_slice(format!("{value:011o}\0").as_bytes());
    };
    let write = |block: &mut [u8], map: &[(u64, u64)]| {
        for (index, (offset, length)) in map.iter().enumerate() {
            number(&mut block[index * 24..index * 24 + 12], *offset);
            number(&mut block[index * 24 + 12..index * 24 + 24], *length);
        }
    };
    write(&mut block[386..], &map[..map.len().min(4)]);
    let rest = map.get(4..).unwrap_or(&[]);
    block[482] = u8::from(!rest.is_empty());
    number(&mut block[483..495], real);
    seal(&mut block);
    let mut tar = Tar::new().raw(&block);
    let chunks: Vec<_> = rest.chunks(21).collect();
    for (index, chunk) in chunks.iter().enumerate() {
        let mut extension = [0; 512];
        write(&mut extension, chunk);
        extension[504] = u8::from(index + 1 < chunks.len());
        tar = tar.raw(&extension);
    }
    tar.padded(stored).file("after", "1").finish()
}

#[test]
fn sparse_files_of_every_format() {
    let (full, pieces) = sparse();
    let expected = format!("sp=20000B:{}\n", &layers::sha256(&full)[7..15]);
    let stored: Vec<u8> = pieces.iter().flat_map(|(_, piece)| piece.clone()).collect();
    let map: Vec<(u64, u64)> = pieces.iter().map(|(at, piece)| (*at, piece.len() as u64)).collect();
    let after = format!("after=1\n{expected}");
    shows(old_gnu(20_000, &map, &stored), &after);
    shows(old_gnu(20_000, &[&map[..], &[(20_000, 0)]].concat(), &stored), &after);
    // PAX 0.0: pairs of keywords.
    let mut entry = Entry::new(b'0', "sp").data(&stored).pax("GNU.sparse.size", "20000");
    entry = entry.pax("GNU.sparse.numblocks", "2");
    for (offset, length) in &map {
        entry = entry.pax("GNU.sparse.offset", offset.to_string());
        entry = entry.pax("GNU.sparse.numbytes", length.to_string());
    }
    shows(Tar::new().entry(entry).file("after", "1").finish(), &after);
    // PAX 0.1: one list, the name in a keyword.
    let entry = Entry::new(b'0', "GNUSparseFile.0/sp")
        .data(&stored)
        .pax("GNU.sparse.size", "20000")
        .pax("GNU.sparse.numblocks", "2")
        .pax("GNU.sparse.name", "sp")
        .pax("GNU.sparse.map", "8192,600,19900,100");
    shows(Tar::new().entry(entry).file("after", "1").finish(), &after);
    // PAX 1.0: the map before the data.
    let entry = |map: &str, stored: &[u8], real: &str| {
        let mut data = map.as_bytes().to_vec();
        data.resize(data.len().next_multiple_of(512), 0);
        data.extend(stored);
        let entry = Entry::new(b'0', "GNUSparseFile.0/sp").data(data);
        let entry = entry.pax("GNU.sparse.major", "1").pax("GNU.sparse.minor", "0");
        let entry = entry.pax("GNU.sparse.name", "sp").pax("GNU.sparse.realsize", real);
        Tar::new().entry(entry).file("after", "1").finish()
    };
    shows(entry("2\n8192\n600\n19900\n100\n", &stored, "20000"), &after);
    shows(entry("0\n", b"", "5"), "after=1\nsp=\\x00\\x00\\x00\\x00\\x00\n");
    for (map, stored, real) in [
        ("2\n8192\n600\n8000\n100\n", &stored[..], "20000"),
        ("2\n8192\n600\n19900\n101\n", &stored, "20000"),
        ("1\n8192\n600\n", &stored, "20000"),
        ("2\n8192\n600\n19900\n100\n", &stored, "19999"),
        ("2\n8192\n600\n19900\n99999999999999999999\n", &stored, "20000"),
        ("1\n18446744073709551615\n700\n", &stored, "20000"),
        ("999999999\n", &stored, "20000"),
        ("x\n", &stored, "20000"),
        ("", b"", "20000"),
    ] {
        let error = show([entry(map, stored, real)]).expect_err(map);
        assert!(error.contains("sparse map") && error.contains("sp"), "{error}");
    }
}

#[test]
fn sparse_maps_longer_than_a_header() {
    let map: Vec<(u64, u64)> = (0..100).map(|index| (index * 8192, 1)).collect();
    let mut full = vec![0; 100 * 8192];
    for (at, _) in &map {
        full[usize::try_from(*at).expect("small")] = b'z';
    }
    let tar = old_gnu(full.len() as u64, &map, &[b'z'; 100]);
    let digest = &layers::sha256(&full)[7..15];
    shows(tar, &format!("after=1\nsp={}B:{digest}\n", full.len()));
}

fn stored_as(tar: &[u8], blob: Vec<u8>, media_type: &str) -> Layout {
    let tar = tar.to_vec();
    Layout::stored([Stored { blob, tar, media_type: media_type.to_owned() }])
}

#[test]
fn compressions_of_every_make() {
    const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
    let tar = Tar::new().file("f", b"hello".repeat(200_000)).file("g", "1").finish();
    let (one, two) = tar.split_at(tar.len() / 2);
    let skippable = [&0x184d_2a50u32.to_le_bytes()[..], &4u32.to_le_bytes(), b"abcd"].concat();
    let no_size = {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("memory");
        encoder.include_checksum(true).expect("memory");
        std::io::Write::write_all(&mut encoder, &tar).expect("memory");
        encoder.finish().expect("memory")
    };
    let named_gzip = {
        let builder =
            flate2::GzBuilder::new().filename("layer.tar").comment("c").extra(vec![1; 300]);
        let mut encoder = builder.write(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut encoder, &tar).expect("memory");
        encoder.finish().expect("memory")
    };
    let good: [(&str, Vec<u8>); 12] = [
        (GZIP, gzip(&tar)),
        (GZIP, named_gzip),
        (GZIP, [gzip(one), gzip(two)].concat()),
        (GZIP, [gzip(b""), gzip(one), gzip(b""), gzip(two), gzip(b"")].concat()),
        (GZIP, [gzip(one), gzip(two), vec![0; 1000]].concat()),
        (GZIP, tar.chunks(100_000).flat_map(gzip).collect()),
        (ZSTD, zstd(&tar)),
        (ZSTD, no_size),
        (ZSTD, [zstd(one), skippable.clone(), zstd(two), skippable.clone()].concat()),
        (ZSTD, [skippable, zstd(&tar)].concat()),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", gzip(&tar)),
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", gzip(&tar)),
    ];
    let expected = show([tar.clone()]).expect("flatten");
    for (index, (media_type, blob)) in good.into_iter().enumerate() {
        let layout = stored_as(&tar, blob, media_type);
        let image = layout.open().expect("image");
        for threads in [1, 2] {
            let options = FlattenOptions { threads, ..FlattenOptions::default() };
            let flat =
                flatten_with(&image, &options).unwrap_or_else(|error| panic!("{index}: {error}"));
            assert_eq!(flat.text(), expected, "{index}");
        }
    }
}

#[test]
fn damaged_compression_is_refused() {
    const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
    let tar = Tar::new().file("f", b"hello".repeat(1000)).finish();
    let mut wrong_crc = gzip(&tar);
    let at = wrong_crc.len() - 8;
    wrong_crc[at] ^= 1;
    let mut wrong_size = gzip(&tar);
    let at = wrong_size.len() - 4;
    wrong_size[at] ^= 1;
    let (z, g) = (zstd(&tar), gzip(&tar));
    for (blob, word) in [
        (g[..g.len() - 4].to_vec(), "cut short"),
        (g[..g.len() / 2].to_vec(), "cut short"),
        (g[..10].to_vec(), "cut short"),
        (z[..z.len() - 1].to_vec(), "cut short"),
        (z[..6].to_vec(), "cut short"),
        (wrong_crc, "damaged"),
        (wrong_size, "damaged"),
        ([g.clone(), b"garbage".to_vec()].concat(), "damaged"),
        ([g.clone(), vec![0; 10], g.clone()].concat(), "damaged"),
        ([z, b"garbage".to_vec()].concat(), "damaged"),
        (b"BZh91AY&SYxxxxxxxxxxxxx".to_vec(), "bzip2"),
        (b"\xfd7zXZ\0\0\0\0\0\0".to_vec(), "xz"),
    ] {
        let layout = stored_as(&tar, blob, GZIP);
        let image = layout.open().expect("image");
        for threads in [1, 2] {
            let options = FlattenOptions { threads, ..FlattenOptions::default() };
            let Err(error) = flatten_with(&image, &options) else { panic!("accepted: {word}") };
            assert!(error.contains(word) && error.contains("layer 1"), "{word:?}: {error}");
        }
    }
}

#[test]
fn a_wrong_media_type_is_only_a_warning() {
    let tar = Tar::new().file("f", "1").finish();
    let layout = stored_as(&tar, zstd(&tar), "application/vnd.oci.image.layer.v1.tar+gzip");
    let flat = flatten_with(&layout.open().expect("image"), &FlattenOptions::default());
    let events = flat.expect("flatten").events;
    let warned = |event: &Event| matches!(event, Event::Warning(text) if text.contains("zstd") && text.contains("gzip"));
    assert!(events.iter().any(warned), "{events:?}");
}

/// Several layers, with holes, links and attributes.
fn stack() -> Vec<Vec<u8>> {
    let noise: Vec<u8> =
        (0u32..700_000).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut holes = noise.clone();
    holes[100_000..300_000].fill(0);
    vec![
        Tar::new().directory("d").file("d/noise", &noise).file("d/holes", &holes).finish(),
        Tar::new()
            .file("d/noise", &noise[..99_999])
            .hardlink("d/link", "d/holes")
            .entry(Entry::new(b'0', "x").pax("SCHILY.xattr.user.a", "b"))
            .finish(),
        Tar::new()
            .mark("d/.wh.holes")
            .file("e/last", &noise[5..60_000])
            .symlink("s", "d/link")
            .finish(),
    ]
}

#[test]
fn the_image_does_not_depend_on_form_or_threads() {
    let work = tempfile::tempdir().expect("temporary directory");
    let mut digests = Vec::new();
    for forms in
        [[Form::Gzip; 3], [Form::Zstd; 3], [Form::Plain; 3], [Form::Zstd, Form::Plain, Form::Gzip]]
    {
        let layout = Layout::stored(
            stack().into_iter().zip(forms).map(|(tar, form)| Stored::new(tar, form)),
        );
        let image = layout.open().expect("image");
        for threads in [1, 2, 8] {
            let out = work.path().join("image");
            let mut options = BuildOptions::default();
            options.flatten.threads = threads;
            build_ext4(&image, &out, &options, &mut |_| {}).expect("build");
            digests.push(layers::sha256(&std::fs::read(&out).expect("image")));
        }
    }
    digests.dedup();
    assert_eq!(digests.len(), 1, "{digests:?}");
}
