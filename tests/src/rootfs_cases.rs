//! What images that share layers share of their root filesystems, and how long unusual images take:
//! a directory of 100,000 files, a million files, a large sparse file, and the same image through
//! `umoci` and `mke2fs`.
//!
//! usage: rootfs-cases LAYOUT      all cases; prints one flat JSON object
//!        rootfs-cases build LAYOUT OUT      one build; prints its seconds and peak memory
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use flate2::Compression;
use flate2::write::GzEncoder;
use parbake_cache::index::DEFAULT_CHUNK_SIZE;
use parbake_cache::{Digest, chunk};
use parbake_tests::Failed;
use serde_json::{Value, json};

type Figures = BTreeMap<String, f64>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["build", layout, out] => build(Path::new(layout), Path::new(out)),
        [layout] => fs::canonicalize(layout).map_err(Into::into).and_then(|layout| cases(&layout)),
        _ => {
            eprintln!("usage: rootfs-cases LAYOUT | rootfs-cases build LAYOUT OUT");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(figures) => {
            println!("{}", serde_json::to_string(&figures).expect("numbers"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("rootfs-cases: {error}");
            ExitCode::FAILURE
        }
    }
}

fn build(layout: &Path, out: &Path) -> Result<Figures, Failed> {
    let begun = Instant::now();
    parbake_tests::build_rootfs(layout, out)?;
    let seconds = begun.elapsed().as_secs_f64();
    let status = fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|text| text.trim().strip_suffix(" kB")).ok_or("no VmHWM")?;
    let peak: f64 = peak.trim().parse()?;
    Ok(figures([("s", seconds), ("peak_mib", peak / 1024.0)]))
}

fn cases(layout: &Path) -> Result<Figures, Failed> {
    let scratch = tempfile::Builder::new().prefix("parbake-cases.").tempdir()?;
    let dir = scratch.path();
    let mut found = Figures::new();
    eprintln!("rootfs-cases: images that share layers");
    found.extend(sharing(layout, dir)?);
    eprintln!("rootfs-cases: the image through umoci and mke2fs");
    found.extend(peers(layout, dir)?);
    for (name, what, fill) in [
        ("directory_100k", "100,000 files in a directory", directory as fn(&mut Tar) -> _),
        ("files_1m", "a million small files", many),
        ("sparse_5g", "a sparse file of 5 GiB", sparse),
    ] {
        eprintln!("rootfs-cases: {what}");
        let image = dir.join(name);
        let layer = Layer::new(fill)?;
        write_layout(&image, None, &[layer])?;
        let one = build_apart(&image, &dir.join("case.ext4"))?;
        found.insert(format!("rootfs.{name}_s"), one["s"]);
        found.insert(format!("rootfs.{name}_peak_mib"), one["peak_mib"]);
        fs::remove_dir_all(&image)?;
    }
    Ok(found)
}

fn figures<const N: usize>(values: [(&str, f64); N]) -> Figures {
    let round = |value: f64| (value * 1000.0).round() / 1000.0;
    values.into_iter().map(|(name, value)| (name.to_owned(), round(value))).collect()
}

/// Builds in a process of its own, whose peak memory is that of this build alone.
fn build_apart(layout: &Path, out: &Path) -> Result<Figures, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("build").arg(layout).arg(out);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("building {} failed", layout.display()).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// A base image (the layout's first layer), with a package (its second), and with one changed line.
fn sharing(layout: &Path, dir: &Path) -> Result<Figures, Failed> {
    let line = || {
        Layer::new(|tar| {
            tar.file("etc/issue", b"Debian GNU/Linux 12, the second edition\n")?;
            Ok(())
        })
    };
    let chunks = |name: &str, keep: usize, more: &[Layer]| -> Result<BTreeSet<Digest>, Failed> {
        let (image, out) = (dir.join(name), dir.join(format!("{name}.ext4")));
        write_layout(&image, Some((layout, keep)), more)?;
        build_apart(&image, &out)?;
        let index = chunk::scan(&File::open(&out)?, DEFAULT_CHUNK_SIZE, false)?;
        Ok(index.chunks().iter().map(|chunk| chunk.digest).collect())
    };
    let base = chunks("base", 1, &[])?;
    let package = chunks("package", 2, &[])?;
    let changed = chunks("changed", 1, &[line()?])?;
    #[allow(clippy::cast_precision_loss, reason = "counts of chunks")]
    let percent = |part: usize, of: usize| 100.0 * part as f64 / of.max(1) as f64;
    let kept = |other: &BTreeSet<Digest>| base.intersection(other).count();
    let new = changed.difference(&base).count();
    Ok(figures([
        ("rootfs.base_shared_with_package_pct", percent(kept(&package), base.len())),
        ("rootfs.base_shared_with_changed_line_pct", percent(kept(&changed), base.len())),
        ("rootfs.changed_line_new_pct", percent(new, changed.len())),
    ]))
}

/// The usual way: unpack as root, then make a file system from the directory.
fn peers(layout: &Path, dir: &Path) -> Result<Figures, Failed> {
    let (bundle, out) = (dir.join("bundle"), dir.join("peer.ext4"));
    let own = build_apart(layout, &dir.join("own.ext4"))?["s"];
    let run = |command: &mut Command| -> Result<(), Failed> {
        let done = command.stdin(Stdio::null()).stdout(Stdio::null()).output()?;
        if done.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        Err(format!("{:?} failed: {text}", command.get_program()).into())
    };
    let begun = Instant::now();
    let image = format!("{}:latest", layout.display());
    run(Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle))?;
    let root = bundle.join("rootfs");
    run(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(&out).arg("2g"))?;
    File::open(&out)?.sync_all()?;
    let peer = begun.elapsed().as_secs_f64();
    fs::remove_dir_all(&bundle)?;
    Ok(figures([("rootfs.umoci_mke2fs_s", peer), ("rootfs.umoci_mke2fs_over_build", peer / own)]))
}

fn directory(tar: &mut Tar) -> io::Result<()> {
    (0..100_000).try_for_each(|n| tar.file(&format!("many/file-{n:06}"), b"x"))
}

fn many(tar: &mut Tar) -> io::Result<()> {
    (0..1_000_000).try_for_each(|n| tar.file(&format!("d{:03}/f{:03}", n / 1000, n % 1000), b"x"))
}

/// In the old GNU form: one piece of data at the end of 5 GiB.
fn sparse(tar: &mut Tar) -> io::Result<()> {
    const SIZE: u64 = 5 << 30;
    let mut header = Tar::header("sparse", 512, b'S');
    let mut number = |at: usize, value: u64| {
        header[at..at + 12].copy_from_slice(format!("{value:011o}\0").as_bytes());
    };
    number(386, SIZE - 512);
    number(398, 512);
    number(483, SIZE);
    tar.entry(header, &[7; 512])
}

/// Just enough of a tar writer for entries that differ in name and contents only.
struct Tar(Box<dyn Write>);

impl Tar {
    fn header(name: &str, size: u64, kind: u8) -> [u8; 512] {
        let mut header = [0; 512];
        let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
        put(0, name.as_bytes());
        put(100, b"0000644\x000000000\x000000000\0");
        put(124, format!("{size:011o}\x0000000000000\0").as_bytes());
        put(156, &[kind]);
        put(257, if kind == b'S' { b"ustar  \0" } else { b"ustar\x0000" });
        header
    }

    fn file(&mut self, name: &str, contents: &[u8]) -> io::Result<()> {
        self.entry(Self::header(name, contents.len() as u64, b'0'), contents)
    }

    fn entry(&mut self, mut header: [u8; 512], contents: &[u8]) -> io::Result<()> {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.write_all(&header)?;
        self.0.write_all(contents)?;
        self.0.write_all(&[0; 512][..contents.len().next_multiple_of(512) - contents.len()])
    }
}

/// A gzip layer and the digest of what is in it.
struct Layer {
    blob: tempfile::NamedTempFile,
    diff_id: Digest,
}

impl Layer {
    fn new(fill: impl FnOnce(&mut Tar) -> io::Result<()>) -> Result<Self, Failed> {
        let plain = tempfile::NamedTempFile::new()?;
        let mut tar = Tar(Box::new(BufWriter::with_capacity(1 << 20, plain.reopen()?)));
        fill(&mut tar)?;
        tar.0.write_all(&[0; 1024])?;
        tar.0.flush()?;
        let diff_id = digest(plain.path())?;
        let blob = tempfile::NamedTempFile::new()?;
        let mut gzip = GzEncoder::new(blob.reopen()?, Compression::fast());
        io::copy(&mut plain.reopen()?, &mut gzip)?;
        gzip.finish()?;
        Ok(Self { blob, diff_id })
    }
}

fn digest(path: &Path) -> Result<Digest, Failed> {
    use sha2::Digest as _;
    let mut hasher = sha2::Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = io::Read::read(&mut file, &mut buffer)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
    }
    let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("sha256:{hex}").parse()?)
}

/// A layout with the first `keep` layers of `base`, and then `more`.
fn write_layout(to: &Path, base: Option<(&Path, usize)>, more: &[Layer]) -> Result<(), Failed> {
    let blobs = to.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let (mut layers, mut diff_ids): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    if let Some((layout, keep)) = base {
        let read = |digest: &Value| -> Result<Value, Failed> {
            let hex = digest.as_str().and_then(|text| text.strip_prefix("sha256:"));
            let path = layout.join("blobs/sha256").join(hex.ok_or("not a sha256 digest")?);
            Ok(serde_json::from_slice(&fs::read(path)?)?)
        };
        let index: Value = serde_json::from_slice(&fs::read(layout.join("index.json"))?)?;
        let manifest = read(&index["manifests"][0]["digest"])?;
        let config = read(&manifest["config"]["digest"])?;
        let first = |list: &Value| list.as_array().map_or(&[][..], |all| &all[..keep]).to_vec();
        layers = first(&manifest["layers"]);
        diff_ids = first(&config["rootfs"]["diff_ids"]);
        for layer in &layers {
            let hex = layer["digest"].as_str().ok_or("no digest")?.replace("sha256:", "");
            let (from, to) = (layout.join("blobs/sha256").join(&hex), blobs.join(&hex));
            fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop))?;
        }
    }
    let put = |path: &Path, kind: &str| -> Result<Value, Failed> {
        let digest = digest(path)?;
        fs::copy(path, blobs.join(digest.hex()))?;
        let size = fs::metadata(path)?.len();
        Ok(json!({ "mediaType": kind, "digest": digest.to_string(), "size": size }))
    };
    for layer in more {
        layers.push(put(layer.blob.path(), "application/vnd.oci.image.layer.v1.tar+gzip")?);
        diff_ids.push(json!(layer.diff_id.to_string()));
    }
    let document = |value: &Value, kind: &str| -> Result<Value, Failed> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), value.to_string())?;
        put(file.path(), kind)
    };
    let config = json!({ "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids } });
    let config = document(&config, "application/vnd.oci.image.config.v1+json")?;
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({ "schemaVersion": 2, "mediaType": kind, "config": config,
        "layers": layers });
    let manifest = document(&manifest, kind)?;
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(to.join("index.json"), index.to_string())?;
    fs::write(to.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    Ok(())
}
