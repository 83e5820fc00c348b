//! A real image against umoci, and against the clock. Both want `PARBAKE_IMAGE_LAYOUT`, an OCI
//! layout with one image of gzip layers (mmdebstrap and umoci make one; keep it outside the
//! checkout), and are skipped without it. The clock is meant for `cargo test --release`.

mod judge;
mod layers;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::image::ImageSource;
use sha2::{Digest, Sha256};

fn layout() -> Option<PathBuf> {
    let path = std::env::var_os("PARBAKE_IMAGE_LAYOUT").map(PathBuf::from);
    if path.is_none() {
        println!("skipped: PARBAKE_IMAGE_LAYOUT names no layout");
    }
    path
}

fn open(path: &Path) -> parbake_builder::image::Image {
    let source = ImageSource::OciLayout { path: path.to_owned(), reference: None };
    layers::open(&source).expect("image")
}

/// Everything about a name that two trees must agree on.
#[derive(Debug, PartialEq, Eq)]
struct Facts {
    kind: String,
    mode: u32,
    owner: (u32, u32),
    mtime: i64,
    links: u64,
    /// The first name of the same file.
    first: OsString,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

fn facts(root: &Path) -> BTreeMap<OsString, Facts> {
    let mut out = BTreeMap::new();
    let mut firsts: HashMap<u64, OsString> = HashMap::new();
    let mut pending = vec![PathBuf::new()];
    let mut files = Vec::new();
    while let Some(path) = pending.pop() {
        let full = root.join(&path);
        let metadata = std::fs::symlink_metadata(&full).expect("metadata");
        if metadata.is_dir() {
            for entry in full.read_dir().expect("directory") {
                let name = entry.expect("entry").file_name();
                if path.as_os_str().is_empty() && name == "lost+found" {
                    continue;
                }
                pending.push(path.join(name));
            }
        }
        files.push((path, full, metadata));
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    for (path, full, metadata) in files {
        let kind = metadata.file_type();
        let kind = if kind.is_file() {
            format!(
                "file {} {}",
                metadata.len(),
                layers::sha256(&std::fs::read(&full).expect("file"))
            )
        } else if kind.is_dir() {
            "directory".to_owned()
        } else if kind.is_symlink() {
            format!("link {}", full.read_link().expect("target").display())
        } else if kind.is_fifo() {
            "pipe".to_owned()
        } else {
            format!("device {:x}", metadata.rdev())
        };
        let name = path.into_os_string();
        let first = firsts.entry(metadata.ino()).or_insert_with(|| name.clone()).clone();
        let facts = Facts {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            mtime: metadata.mtime(),
            links: if metadata.is_dir() { 0 } else { metadata.nlink() },
            first,
            xattrs: xattrs(&full),
            kind,
        };
        out.insert(name, facts);
    }
    out
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0; 65_536];
    let length = rustix::fs::llistxattr(path, &mut list).expect("attributes");
    let mut out = BTreeMap::new();
    for name in list[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 65_536];
        let text = std::ffi::OsStr::from_bytes(name);
        let length = rustix::fs::lgetxattr(path, text, &mut value).expect("attribute");
        out.insert(name.to_vec(), value[..length].to_vec());
    }
    out
}

#[test]
fn a_mount_shows_what_umoci_unpacks() {
    let Some(layout) = layout() else { return };
    let work = tempfile::tempdir().expect("temporary directory");
    let bundle = work.path().join("bundle");
    let index = std::fs::read_to_string(layout.join("index.json")).expect("index");
    let index: serde_json::Value = serde_json::from_str(&index).expect("JSON");
    let name = index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"].as_str();
    let image = format!("{}:{}", layout.display(), name.expect("a name"));
    let unpack = Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle).output();
    let Ok(unpack) = unpack else {
        println!("skipped: umoci is not installed");
        return;
    };
    assert!(unpack.status.success(), "{}", String::from_utf8_lossy(&unpack.stderr));
    let out = work.path().join("rootfs.ext4");
    build_ext4(&open(&layout), &out, &BuildOptions::default(), &mut |_| {}).expect("build");
    judge::fsck(&out);
    let Some(mount) = judge::mounted::Mount::new(&out, "ro") else { return };
    let (ours, theirs) = (facts(mount.path()), facts(&bundle.join("rootfs")));
    let mut wrong = Vec::new();
    for name in ours.keys().chain(theirs.keys()) {
        if ours.get(name) != theirs.get(name) && wrong.len() < 20 {
            wrong.push(format!(
                "{name:?}:\n  ours   {:?}\n  umoci  {:?}",
                ours.get(name),
                theirs.get(name)
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{} names agree", ours.len());
}

/// Decompresses and hashes both ways, one layer at a time on each of two threads: what any
/// verified flatten must at least do.
fn floor(blobs: &[PathBuf]) -> Duration {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(path) =
                    blobs.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    let file = std::fs::File::open(path).expect("blob");
                    let mut decoder =
                        flate2::read::MultiGzDecoder::new(Hashing(file, Sha256::new()));
                    let mut tar = Sha256::new();
                    let mut buffer = vec![0; 256 << 10];
                    loop {
                        let length = decoder.read(&mut buffer).expect("gzip");
                        if length == 0 {
                            break;
                        }
                        tar.update(&buffer[..length]);
                    }
                    std::hint::black_box((tar.finalize(), decoder.into_inner().1.finalize()));
                }
            });
        }
    });
    started.elapsed()
}

struct Hashing(std::fs::File, Sha256);

impl Read for Hashing {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.0.read(buffer)?;
        self.1.update(&buffer[..length]);
        Ok(length)
    }
}

/// Processor time of all threads so far.
fn processor() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("a duration")
}

fn memory(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with(key)).expect("line");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("number")
}

#[test]
fn time_and_memory() {
    let Some(layout) = layout() else { return };
    let image = open(&layout);
    let mut blobs: Vec<(u64, PathBuf)> = image
        .layers()
        .iter()
        .map(|layer| {
            let digest = layer.digest().expect("digest");
            (layer.size().unwrap_or(0), layout.join("blobs/sha256").join(digest.hex()))
        })
        .collect();
    blobs.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
    let blobs: Vec<PathBuf> = blobs.into_iter().map(|(_, path)| path).collect();
    let work = tempfile::tempdir_in(std::env::temp_dir()).expect("temporary directory");
    let out = work.path().join("rootfs.ext4");
    let median = |name: &str, run: &mut dyn FnMut() -> Duration| {
        let before = processor();
        let mut times: Vec<Duration> = (0..5).map(|_| run()).collect();
        let used = (processor() - before) / 5;
        times.sort();
        println!(
            "{name:40} {:>7.2?} ({:.2?} to {:.2?}), processor {used:.2?}",
            times[2], times[0], times[4]
        );
    };
    let before = memory("VmRSS");
    let mut reported = None;
    for threads in [2, 1] {
        let mut options = BuildOptions::default();
        options.flatten.threads = threads;
        median(&format!("image to ext4, threads: {threads}"), &mut || {
            let started = Instant::now();
            let report = build_ext4(&image, &out, &options, &mut |_| {}).expect("build");
            let elapsed = started.elapsed();
            reported = Some(report);
            elapsed
        });
    }
    let peak = memory("VmHWM");
    let report = reported.expect("a build");
    median("decode and both digests on two threads", &mut || floor(&blobs));
    let nodes: u64 = report.layer_costs.iter().map(|cost| cost.live_nodes).sum();
    println!("memory: {before} KiB before, {peak} KiB at most, {nodes} nodes");
    for (index, cost) in report.layer_costs.iter().enumerate() {
        println!("layer {}: {cost:?}, hidden {}", index + 1, cost.hidden_bytes());
    }
    println!("{:?}", report.filesystem);
}
