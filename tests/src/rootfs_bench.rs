//! Image to ext4, beside the floor of the same run: decompressing the layers and computing both
//! digests, on as many threads as the build uses.
//!
//! usage: rootfs-bench LAYOUT [ROUNDS]
//!
//! Prints one flat JSON object.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use parbake_tests::{Failed, quantile};
use sha2::{Digest, Sha256};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (layout, rounds) = match arguments.as_slice() {
        [layout] => (layout, 7),
        [layout, rounds] => (layout, rounds.parse().unwrap_or(7)),
        _ => {
            eprintln!("usage: rootfs-bench LAYOUT [ROUNDS]");
            return ExitCode::from(2);
        }
    };
    match measure(Path::new(layout), rounds) {
        Ok(figures) => {
            println!("{}", serde_json::to_string(&figures).expect("numbers"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("rootfs-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(layout: &Path, rounds: usize) -> Result<BTreeMap<String, f64>, Failed> {
    let layers = layers(layout)?;
    let out = tempfile::tempdir()?;
    let image = out.path().join("root.ext4");
    let (mut floor, mut build) = (Vec::new(), Vec::new());
    // In turn, so that a change of the machine's speed hits both; the first round only warms up.
    for round in 0..=rounds {
        let begun = Instant::now();
        decode(&layers)?;
        let decoded = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        parbake_tests::build_rootfs(layout, &image)?;
        let built = begun.elapsed().as_secs_f64();
        // Replacing a file means freeing the old one, which is no part of the work.
        fs::remove_file(&image)?;
        if round > 0 {
            floor.push(decoded);
            build.push(built);
        }
    }
    let (floor, build) = (quantile(&mut floor, 0.5), quantile(&mut build, 0.5));
    let round = |value: f64| (value * 1000.0).round() / 1000.0;
    Ok(BTreeMap::from([
        ("rootfs.floor_s.p50".to_owned(), round(floor)),
        ("rootfs.build_s.p50".to_owned(), round(build)),
        ("rootfs.build_over_floor".to_owned(), round(build / floor)),
    ]))
}

/// The blobs of the layout's layers, largest first.
fn layers(layout: &Path) -> Result<Vec<PathBuf>, Failed> {
    let index: serde_json::Value = serde_json::from_slice(&fs::read(layout.join("index.json"))?)?;
    let blob = |digest: &serde_json::Value| -> Result<PathBuf, Failed> {
        let hex = digest.as_str().and_then(|text| text.strip_prefix("sha256:"));
        Ok(layout.join("blobs/sha256").join(hex.ok_or("not a sha256 digest")?))
    };
    let manifest = fs::read(blob(&index["manifests"][0]["digest"])?)?;
    let manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
    let mut layers = Vec::new();
    for layer in manifest["layers"].as_array().ok_or("no layers")? {
        let path = blob(&layer["digest"])?;
        layers.push((fs::metadata(&path)?.len(), path));
    }
    layers.sort_by(|a, b| b.cmp(a));
    Ok(layers.into_iter().map(|(_, path)| path).collect())
}

/// Decompresses all layers and computes both digests of each, two layers at a time.
fn decode(layers: &[PathBuf]) -> Result<(), Failed> {
    let queue = Mutex::new(layers.iter());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(2);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| -> std::io::Result<()> {
                    loop {
                        let next = queue.lock().map(|mut queue| queue.next()).unwrap_or(None);
                        let Some(path) = next else { return Ok(()) };
                        decode_one(path)?;
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

struct Hashing<R> {
    inner: R,
    digest: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.digest.update(&buffer[..count]);
        Ok(count)
    }
}

fn decode_one(path: &Path) -> std::io::Result<()> {
    let hashing = Hashing { inner: File::open(path)?, digest: Sha256::new() };
    let buffered = std::io::BufReader::with_capacity(256 << 10, hashing);
    let mut decoder = flate2::bufread::MultiGzDecoder::new(buffered);
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = decoder.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        digest.update(&buffer[..count]);
    }
    std::hint::black_box((digest.finalize(), decoder.into_inner().into_inner().digest.finalize()));
    Ok(())
}
