//! Plain root filesystems as a directory or a tar file, attribution, and that the image depends on
//! nothing but what it is made of.

mod judge;
mod layers;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use layers::{Entry, Form, Layout, Stored, Tar, flatten_with, open, sha256};
use parbake_builder::flatten::FlattenOptions;
use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::image::ImageSource;
use rustix::fs::{CWD, FileType, Timespec, Timestamps, XattrFlags, mknodat, utimensat};

fn text(source: &str) -> Result<String, String> {
    let source: ImageSource = source.parse().expect("a source");
    flatten_with(&open(&source)?, &FlattenOptions::default()).map(|flat| flat.text())
}

fn stamp(path: &Path, seconds: i64, nanos: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).expect("time");
}

#[test]
fn a_directory_is_taken_as_it_is() {
    let work = tempfile::tempdir().expect("temporary directory");
    let root = work.path().join("root");
    let at = |name: &str| root.join(name);
    std::fs::create_dir_all(at("d/empty")).expect("directory");
    std::fs::write(at("d/f"), "contents").expect("file");
    std::fs::hard_link(at("d/f"), at("hard")).expect("link");
    std::fs::set_permissions(at("d/f"), std::fs::Permissions::from_mode(0o4750)).expect("mode");
    symlink("d/f", at("soft")).expect("link");
    // A marker's name is a name here; and names are bytes.
    std::fs::write(at(".wh.d"), "").expect("file");
    let odd = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"caf\xe9 \n");
    std::fs::write(root.join(odd), "").expect("file");
    std::fs::write(at("n".repeat(200).as_str()), "").expect("file");
    let sparse = std::fs::File::create(at("sparse")).expect("file");
    sparse.set_len(1 << 20).expect("size");
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"x", 700_000).expect("write");
    mknodat(CWD, at("pipe"), FileType::Fifo, 0o644.into(), 0).expect("pipe");
    let socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("socket");
    let mut attributes = true;
    for (name, value) in [("user.a", &b"\0\n"[..]), ("user.empty", b"")] {
        attributes &= rustix::fs::setxattr(at("hard"), name, value, XattrFlags::empty()).is_ok();
    }
    for path in ["d/empty", "d/f", "d", "soft", ".wh.d", "sparse", "pipe"] {
        stamp(&at(path), 1_000_000_000, 0);
    }
    stamp(&root.join(odd), -2, 500_000_000);
    stamp(&at(&"n".repeat(200)), 5_000_000_000, 1);
    stamp(&root, 7, 0);
    let owner = rustix::process::geteuid().as_raw();
    let owner = match owner {
        0 => String::new(),
        id => format!(" {id}:{}", rustix::process::getegid().as_raw()),
    };
    let mut full = vec![0; 1 << 20];
    full[700_000] = b'x';
    let digest = &sha256(&full)[7..15];
    let attributes = if attributes { " user.a=\\x00\\n user.empty=" } else { "" };
    let long = "n".repeat(200);
    let shown = text(&format!("dir:{}", root.display())).expect("flatten");
    drop(socket);
    let expected = format!(
        "./{owner} @7\n.wh.d={owner}\ncaf\\xe9 \\n={owner} @-2.500000000\nd/{owner}\nd/empty/{owner}\nd/f=contents 4750{owner}{attributes} #0\nhard=contents 4750{owner}{attributes} #0\n{long}={owner} @5000000000.000000001\npipe p{owner}\nsoft->d/f{owner}\nsparse=1048576B:{digest}{owner}\n"
    );
    assert_eq!(shown, expected);
    // From another directory, by another name, the same.
    let link = work.path().join("link");
    symlink(&root, &link).expect("link");
    assert_eq!(text(&format!("dir:{}/.", link.display())).expect("flatten"), expected);
    assert!(
        text(&format!("dir:{}", at("d/f").display()))
            .expect_err("refused")
            .contains("not a directory")
    );
    assert!(text("dir:/no/such/place").expect_err("refused").contains("/no/such/place"));
}

#[test]
fn a_tar_file_is_a_root_filesystem() {
    let work = tempfile::tempdir().expect("temporary directory");
    let tar = Tar::new().file(".wh.a", "1").file("d/.wh..wh..opq", "2").finish();
    for form in [Form::Plain, Form::Gzip, Form::Zstd] {
        let path = work.path().join("root.tar");
        std::fs::write(&path, form.encode(&tar)).expect("write");
        let shown = text(&format!("tar:{}", path.display())).expect("flatten");
        assert_eq!(shown, ".wh.a=1\nd/ @0\nd/.wh..wh..opq=2\n", "{form:?}");
    }
    assert!(text(&format!("tar:{}", work.path().display())).expect_err("refused").contains("dir:"));
}

#[test]
fn costs_are_attributed_to_layers_and_paths() {
    let layout = Layout::of([
        Tar::new()
            .file("a/big", vec![1; 40_960])
            .file("a/gone", vec![2; 8192])
            .file("b", "3")
            .finish(),
        Tar::new()
            .mark("a/.wh.gone")
            .file("a/new", vec![4; 12_288])
            .hardlink("link", "a/big")
            .finish(),
    ]);
    let work = tempfile::tempdir().expect("temporary directory");
    let image = layout.open().expect("image");
    let options = BuildOptions { path_depth: 1, ..BuildOptions::default() };
    let report = build_ext4(&image, &work.path().join("x"), &options, &mut |_| {}).expect("build");
    let layers: Vec<_> = report
        .layer_costs
        .iter()
        .map(|cost| {
            (cost.input.written_bytes, cost.live_bytes, cost.hidden_bytes(), cost.live_nodes)
        })
        .collect();
    assert_eq!(layers, [(53_248, 45_056, 8192, 4), (12_288, 12_288, 0, 1)]);
    let paths: Vec<_> = report
        .paths
        .iter()
        .map(|cost| {
            (String::from_utf8_lossy(&cost.path).into_owned(), cost.bytes, cost.nodes, cost.layer)
        })
        .collect();
    let path = |text: &str, bytes, nodes, layer| (text.to_owned(), bytes, nodes, layer);
    assert_eq!(
        paths,
        [
            path("", 57_344, 5, 0),
            path("a", 53_248, 3, 0),
            path("b", 4096, 1, 0),
            path("link", 0, 0, 0)
        ]
    );
}

fn images() -> [Layout; 2] {
    let noise: Vec<u8> =
        (0u32..300_000).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    [
        Layout::of([
            Tar::new().directory("etc").file("etc/passwd", "root:x:0:0::/:/bin/sh\n").finish(),
            Tar::new()
                .file("bin/app", &noise)
                .symlink("app", "bin/app")
                .hardlink("app2", "bin/app")
                .finish(),
        ]),
        Layout::stored([Stored::new(
            (0..3000)
                .fold(Tar::new(), |tar, at| {
                    tar.entry(
                        Entry::new(b'0', format!("many/{at:05}"))
                            .data(&noise[at * 50..at * 50 + at % 60])
                            .pax("mtime", format!("{at}.5")),
                    )
                })
                .finish(),
            Form::Zstd,
        )]),
    ]
}

/// Digests of the images that [`images`] give. A change here is a change of every image built:
/// it is to be meant, and to be told to those who compare digests.
const GOLDEN: [&str; 2] = [
    "sha256:240af9bc00ee66f5646af0ceef5a79da1ba14e0fc5789a9fd1bdd83a673e0171",
    "sha256:3d5adf12ce77646da1dad3902dabf58569f524a7dc0343a8213ac714d35824fb",
];

#[test]
fn images_are_the_same_everywhere() {
    // The child part: builds in another directory, under another clock's zone and locale.
    if let (Some(from), Some(to)) =
        (std::env::var_os("PARBAKE_TEST_FROM"), std::env::var_os("PARBAKE_TEST_TO"))
    {
        let source = ImageSource::OciLayout { path: from.into(), reference: None };
        let image = open(&source).expect("image");
        build_ext4(&image, Path::new(&to), &BuildOptions::default(), &mut |_| {}).expect("build");
        return;
    }
    for (layout, golden) in images().iter().zip(GOLDEN) {
        let work = tempfile::tempdir().expect("temporary directory");
        let out = work.path().join("here.ext4");
        let image = layout.open().expect("image");
        build_ext4(&image, &out, &BuildOptions::default(), &mut |_| {}).expect("build");
        judge::fsck(&out);
        let digest = sha256(&std::fs::read(&out).expect("image"));
        assert_eq!(digest, golden);
        std::fs::create_dir(work.path().join("elsewhere")).expect("directory");
        let child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "images_are_the_same_everywhere"])
            .current_dir(work.path().join("elsewhere"))
            .env("TZ", "Pacific/Kiritimati")
            .env("LC_ALL", "tr_TR.UTF-8")
            .env("PARBAKE_TEST_FROM", layout.path())
            .env("PARBAKE_TEST_TO", "there.ext4")
            .status();
        assert!(child.expect("run").success());
        let other = std::fs::read(work.path().join("elsewhere/there.ext4")).expect("image");
        assert_eq!(sha256(&other), golden);
    }
}
