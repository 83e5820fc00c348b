//! Bad images: each ends in an error that names what is wrong, leaves nothing behind, and leaves
//! what was there before alone.

mod judge;
mod layers;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use layers::{Entry, Form, Layout, Stored, Tar, flatten_with, gzip, sha256, zstd};
use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::flatten::{FlattenOptions, Limits};

fn simple() -> Vec<u8> {
    Tar::new().directory("d").file("d/f", b"hello".repeat(5000)).finish()
}

/// Builds over an existing file; asserts that the build fails with all of `words`, that the file
/// is as before, and that nothing lies beside it.
#[track_caller]
fn fails(layout: &Layout, options: &BuildOptions, words: &[&str]) {
    let work = tempfile::tempdir().expect("temporary directory");
    let out = work.path().join("rootfs.ext4");
    std::fs::write(&out, "what was there before").expect("write");
    for threads in [1, 2] {
        let mut options = options.clone();
        options.flatten.threads = threads;
        let result = layout.open().and_then(|image| {
            build_ext4(&image, &out, &options, &mut |_| {}).map_err(|error| error.to_string())
        });
        let error = result.expect_err("refused");
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
        assert_eq!(std::fs::read_to_string(&out).expect("read"), "what was there before");
        assert_eq!(work.path().read_dir().expect("list").count(), 1, "something was left");
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).expect("blob");
    bytes[at] ^= 1;
    std::fs::write(path, bytes).expect("blob");
}

#[test]
fn damaged_blobs() {
    let options = BuildOptions::default();
    for form in [Form::Gzip, Form::Zstd, Form::Plain] {
        let stored = Stored::new(simple(), form);
        let digest = sha256(&stored.blob);
        // In the middle, and in a byte of the gzip header that no decompressor looks at.
        for at in [4, stored.blob.len() / 2] {
            let layout = Layout::stored([stored.clone()]);
            flip(&layout.blob_path(&digest), at);
            fails(&layout, &options, &["layer 1", &digest[..19], "digest"]);
        }
        let layout = Layout::stored([stored.clone()]);
        let path = layout.blob_path(&digest);
        std::fs::write(&path, &stored.blob[..stored.blob.len() - 20]).expect("blob");
        fails(&layout, &options, &["layer 1", "bytes", "incomplete"]);
        std::fs::write(&path, [&stored.blob[..], b"x"].concat()).expect("blob");
        fails(&layout, &options, &["layer 1", "bytes"]);
        std::fs::remove_file(&path).expect("blob");
        fails(&layout, &options, &["layer 1", &digest, "missing"]);
    }
}

#[test]
fn a_layer_that_is_not_the_one_the_configuration_means() {
    let layout = Layout::empty();
    let stored = Stored::new(simple(), Form::Gzip);
    for wrong in ["sha256", "sha512"] {
        let digits = if wrong == "sha256" { 64 } else { 128 };
        let config = layers::config([format!("{wrong}:{}", "0".repeat(digits))]);
        let manifest = layout.manifest(&config, std::slice::from_ref(&stored));
        layout.index(&[manifest]);
        fails(
            &layout,
            &BuildOptions::default(),
            &["layer 1", "configuration", &"0".repeat(digits)],
        );
    }
}

#[test]
fn sha512_digests_are_verified() {
    use parbake_builder::image::digest::{Algorithm, BlobDigest};
    let layout = Layout::empty();
    let stored = Stored::new(simple(), Form::Gzip);
    let diff_id = BlobDigest::of(Algorithm::Sha512, &stored.tar);
    let digest = BlobDigest::of(Algorithm::Sha512, &stored.blob);
    std::fs::create_dir(layout.path().join("blobs/sha512")).expect("directory");
    let path = layout.path().join("blobs/sha512").join(digest.hex());
    std::fs::write(&path, &stored.blob).expect("blob");
    let config = layers::config([diff_id.to_string()]);
    let config =
        layout.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let layer = serde_json::json!({"mediaType": stored.media_type, "digest": digest.to_string(), "size": stored.blob.len()});
    let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": [layer]});
    let manifest =
        layout.blob("application/vnd.oci.image.manifest.v1+json", manifest.to_string().as_bytes());
    layout.index(&[manifest]);
    flatten_with(&layout.open().expect("image"), &FlattenOptions::default()).expect("flatten");
    flip(&path, 4);
    fails(&layout, &BuildOptions::default(), &["layer 1", "sha512:", "digest"]);
}

#[test]
fn damaged_documents() {
    let options = BuildOptions::default();
    let index = |layout: &Layout| -> serde_json::Value {
        let text = std::fs::read_to_string(layout.path().join("index.json")).expect("index");
        serde_json::from_str(&text).expect("JSON")
    };
    let layout = Layout::of([simple()]);
    let manifest = index(&layout)["manifests"][0]["digest"].as_str().expect("digest").to_owned();
    flip(&layout.blob_path(&manifest), 3);
    fails(&layout, &options, &["manifest", &manifest, "damaged"]);
    std::fs::remove_file(layout.blob_path(&manifest)).expect("remove");
    fails(&layout, &options, &["manifest", &manifest, "missing"]);

    let layout = Layout::of([simple()]);
    std::fs::write(layout.path().join("index.json"), "{").expect("index");
    fails(&layout, &options, &["index.json", "not a valid manifest"]);
    std::fs::write(layout.path().join("index.json"), " ".repeat(9 << 20)).expect("index");
    fails(&layout, &options, &["index.json", "8388608"]);
    std::fs::remove_file(layout.path().join("index.json")).expect("remove");
    fails(&layout, &options, &["no index.json"]);
    std::fs::write(layout.path().join("oci-layout"), r#"{"imageLayoutVersion":"2.0"}"#)
        .expect("write");
    fails(&layout, &options, &["version", "2.0"]);
    std::fs::remove_file(layout.path().join("oci-layout")).expect("remove");
    fails(&layout, &options, &["no oci-layout"]);

    for (digest, word) in [
        ("sha256:../../../../etc/passwd", "not a digest"),
        ("md5:00", "not a digest"),
        ("", "not a digest"),
    ] {
        let layout = Layout::of([simple()]);
        layout.index(&[serde_json::json!({"digest": digest, "size": 1})]);
        fails(&layout, &options, &[word]);
    }
}

#[test]
fn contradictions_between_documents() {
    let layout = Layout::empty();
    let stored = Stored::new(simple(), Form::Gzip);
    let diff_id = sha256(&stored.tar);
    let attempt = |config: serde_json::Value, stored: &[Stored], words: &[&str]| {
        let manifest = layout.manifest(&config, stored);
        layout.index(&[manifest]);
        fails(&layout, &BuildOptions::default(), words);
    };
    let one = std::slice::from_ref(&stored);
    attempt(layers::config([diff_id.clone(), diff_id.clone()]), one, &["2 layers", "manifest 1"]);
    attempt(layers::config([]), one, &["0 layers", "manifest 1"]);
    attempt(layers::config(["sha256:x".to_owned()]), one, &["diff_id of layer 1", "not a digest"]);
    let mut config = layers::config([diff_id.clone()]);
    config["rootfs"]["type"] = "blobs".into();
    attempt(config, one, &["rootfs.type", "blobs"]);
    let mut config = layers::config([diff_id.clone()]);
    config["architecture"] = "s390x".into();
    attempt(config, one, &["no image for linux/", "linux/s390x"]);
    let mut odd = stored.clone();
    odd.media_type = "application/vnd.oci.image.layer.v1.tar+gzip+encrypted".to_owned();
    attempt(layers::config([diff_id]), &[odd], &["layer 1", "encrypted"]);
}

#[test]
fn what_is_no_image() {
    let layout = Layout::empty();
    let options = BuildOptions::default();
    let manifest = |value: serde_json::Value| {
        layout.blob("application/vnd.oci.image.manifest.v1+json", value.to_string().as_bytes())
    };
    layout.index(&[manifest(serde_json::json!({"schemaVersion": 1, "fsLayers": []}))]);
    fails(&layout, &options, &["schema 1"]);
    let config = layout.blob("application/vnd.oci.empty.v1+json", b"{}");
    layout.index(&[manifest(serde_json::json!({"schemaVersion": 2, "artifactType": "a/b", "config": config, "layers": []}))]);
    fails(&layout, &options, &["artifact", "a/b"]);
    layout.index(&[]);
    fails(&layout, &options, &["no image for"]);
    // A blob that is only elsewhere.
    let config = layers::config([sha256(b"elsewhere")]);
    let config =
        layout.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let layer = serde_json::json!({
        "mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "digest": sha256(b"elsewhere"), "size": 9, "urls": ["https://elsewhere.test/blob"]});
    layout.index(&[manifest(
        serde_json::json!({"schemaVersion": 2, "config": config, "layers": [layer]}),
    )]);
    fails(&layout, &options, &["layer 1", "missing", "https://elsewhere.test/blob"]);
}

#[test]
fn blobs_that_are_links_out_of_the_layout_or_no_files() {
    let stored = Stored::new(simple(), Form::Gzip);
    let layout = Layout::stored([stored.clone()]);
    let path = layout.blob_path(&sha256(&stored.blob));
    let elsewhere = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(elsewhere.path(), &stored.blob).expect("blob");
    std::fs::remove_file(&path).expect("blob");
    std::os::unix::fs::symlink(elsewhere.path(), &path).expect("link");
    fails(&layout, &BuildOptions::default(), &["layer 1", "leads out of the layout"]);
    std::fs::remove_file(&path).expect("blob");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .expect("pipe");
    fails(&layout, &BuildOptions::default(), &["layer 1", "not a regular file"]);
    // A link that stays inside is fine.
    std::fs::remove_file(&path).expect("blob");
    std::fs::write(layout.path().join("blobs/elsewhere"), &stored.blob).expect("blob");
    std::os::unix::fs::symlink("../elsewhere", &path).expect("link");
    layout.open().expect("image");
}

fn limited(change: impl FnOnce(&mut Limits)) -> BuildOptions {
    let mut options = BuildOptions::default();
    change(&mut options.flatten.limits);
    options
}

#[test]
fn bombs_end_in_bounds() {
    // A huge file of zeros in a few kilobytes: stopped by the ratio.
    let mut tar = Tar::new().file("first", "1").unfinished();
    let mut entry = Entry::new(b'0', "zeros");
    entry.size = Some(1 << 40);
    tar.extend(layers::header(&entry));
    tar.resize(tar.len() + (64 << 20), 0);
    for (blob, media_type) in
        [(zstd(&tar), Form::Zstd.media_type()), (gzip(&tar), Form::Gzip.media_type())]
    {
        let layout =
            Layout::stored([Stored { blob, tar: tar.clone(), media_type: media_type.to_owned() }]);
        let options = limited(|limits| {
            limits.expansion.floor = 1 << 20;
            limits.expansion.ratio = 20;
        });
        fails(&layout, &options, &["layer 1", "decompresses to more than", "limit"]);
        // Without that limit it is what it is: a tar that ends early.
        fails(&layout, &BuildOptions::default(), &["layer 1", "zeros", "ends inside"]);
    }
    let layout = Layout::of([Tar::new().file("f", vec![7; 1 << 20]).finish()]);
    fails(
        &layout,
        &limited(|limits| limits.data_bytes = 1 << 19),
        &["layer 1", ": f:", "524288 bytes"],
    );
}

#[test]
fn floods_of_entries_end_in_bounds() {
    let many = (0..3000).fold(Tar::new(), |tar, at| tar.file(format!("{}", at % 10), ""));
    let layout = Layout::of([many.finish()]);
    fails(&layout, &limited(|limits| limits.entries = 2000), &["layer 1", "2000 entries"]);
    fails(
        &layout,
        &limited(|limits| limits.tree.nodes = 2000),
        &["layer 1", "2000 files and directories"],
    );
    // One entry that makes a thousand directories.
    let deep = Tar::new().file(["x"; 1000].join("/"), "1").finish();
    let layout = Layout::of([deep]);
    fails(
        &layout,
        &limited(|limits| limits.tree.depth = 100),
        &["layer 1", "x/x/x", "100 directories"],
    );
    fails(
        &layout,
        &limited(|limits| limits.tree.nodes = 500),
        &["layer 1", "500 files and directories"],
    );
    // Attributes and long names.
    let attributes = (0..100).fold(Tar::new(), |tar, at| {
        tar.entry(Entry::new(b'0', format!("f{at}")).pax("SCHILY.xattr.user.a", vec![b'x'; 2000]))
    });
    let layout = Layout::of([attributes.finish()]);
    fails(
        &layout,
        &limited(|limits| limits.tree.metadata_bytes = 100_000),
        &["layer 1", ": f49:", "100000 bytes"],
    );
    fails(
        &layout,
        &limited(|limits| limits.tar.header_bytes = 1000),
        &["layer 1", "PAX header has"],
    );
    fails(
        &layout,
        &limited(|limits| limits.tar.xattr_value = 1000),
        &["layer 1", "user.a has 2000 bytes"],
    );
    // Links that make every entry walk far.
    let mut tar = Tar::new();
    for at in 0..30 {
        tar = tar.symlink(format!("l{at}"), format!("l{}/{}", at + 1, "./".repeat(40)));
    }
    tar = (0..100).fold(tar, |tar, at| tar.file(format!("l0/x{at}/y"), ""));
    let layout = Layout::of([tar.finish()]);
    fails(&layout, &limited(|limits| limits.tree.steps = 10_000), &["layer 1", "10000 steps"]);
}

#[test]
fn what_ext4_cannot_hold_is_named() {
    let big =
        Tar::new().entry(Entry::new(b'0', "d/f").pax("SCHILY.xattr.user.big", vec![b'x'; 60_000]));
    fails(&Layout::of([big.finish()]), &BuildOptions::default(), &["d/f", "attributes"]);
    let device = Tar::new().entry(Entry::new(b'3', "d/dev").device(5000, 1));
    fails(&Layout::of([device.finish()]), &BuildOptions::default(), &["d/dev", "5000:1"]);
    let target = Tar::new().symlink("d/l", "x".repeat(4096));
    fails(
        &Layout::of([target.finish()]),
        &BuildOptions::default(),
        &["layer 1", "d/l", "4096 bytes"],
    );
    let empty = Tar::new().symlink("d/l", "");
    fails(&Layout::of([empty.finish()]), &BuildOptions::default(), &["layer 1", "d/l", "0 bytes"]);
}

#[test]
fn cancelling_stops_soon() {
    let noise: Vec<u8> =
        (0u32..(40 << 20)).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let layout = Layout::stored([Stored::new(Tar::new().file("f", noise).finish(), Form::Plain)]);
    let image = layout.open().expect("image");
    for threads in [1, 2] {
        let cancel = Arc::new(AtomicBool::new(false));
        let options =
            FlattenOptions { threads, cancel: cancel.clone(), ..FlattenOptions::default() };
        let file = tempfile::tempfile().expect("temporary file");
        let started = Instant::now();
        let result = parbake_builder::flatten::flatten(&image, &file, &options, &mut |_| {
            cancel.store(true, Ordering::Relaxed);
        });
        assert_eq!(result.expect_err("cancelled").to_string(), "cancelled");
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn a_full_disk_says_what_is_needed() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: mounting needs root");
        return;
    }
    let small = tempfile::tempdir().expect("temporary directory");
    let mount = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"])
        .arg(small.path())
        .status();
    if !mount.is_ok_and(|status| status.success()) {
        println!("skipped: cannot mount a small file system");
        return;
    }
    let noise: Vec<u8> =
        (0u32..(8 << 20)).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8 | 1).collect();
    let layout = Layout::of([Tar::new().file("f", noise).finish()]);
    let out = small.path().join("rootfs.ext4");
    let result =
        build_ext4(&layout.open().expect("image"), &out, &BuildOptions::default(), &mut |_| {});
    let left = small.path().read_dir().expect("list").count();
    let unmount = std::process::Command::new("umount").arg(small.path()).status();
    assert!(unmount.expect("umount").success());
    let error = result.expect_err("no space").to_string();
    assert!(error.contains("no space") && error.contains("8388608"), "{error}");
    assert_eq!(left, 0);
}

#[test]
fn outputs_that_cannot_be_written() {
    let layout = Layout::of([simple()]);
    let image = layout.open().expect("image");
    let build = |out: &Path| {
        build_ext4(&image, out, &BuildOptions::default(), &mut |_| {})
            .expect_err("refused")
            .to_string()
    };
    assert!(build(Path::new("/nowhere/at/all/x.ext4")).contains("/nowhere/at/all/x.ext4"));
    assert!(build(layout.path()).contains("not the name of a file"));
}
