//! Templates on the road against a real registry server on loopback: bytes pushed, whole pulls beside
//! what other tools do for the same image, bytes before the first command of a lazy pull.
//!
//! usage: registry-bench BIN_DIR STORE TEMPLATE LAYOUT
//!
//! STORE holds TEMPLATE, baked where its guests run; it is removed from there and pulled again. LAYOUT
//! is the image it was made from. Prints one flat JSON object.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use parbake_builder::template::Template;
use parbake_cache::{Digest, Store};
use parbake_tests::{Failed, quantile};
use serde_json::{Value, json};

/// How often each pull is measured, one after the other.
const ROUNDS: usize = 3;

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [bin, store, template, layout] = arguments.as_slice() else {
        eprintln!("usage: registry-bench BIN_DIR STORE TEMPLATE LAYOUT");
        return ExitCode::from(2);
    };
    match measure(bin, store, &template.to_string_lossy(), layout) {
        Ok(figures) => {
            println!("{figures}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("registry-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Debian's docker-registry, until dropped.
struct Registry {
    child: Child,
    host: String,
}

impl Registry {
    fn start(directory: &Path) -> Result<Self, Failed> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let host = format!("127.0.0.1:{port}");
        let config = directory.join("registry.yml");
        fs::write(
            &config,
            format!(
                "version: 0.1\nlog:\n  accesslog:\n    disabled: true\n  level: error\nstorage:\n  \
                 filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {host}\n",
                directory.join("registry").display()
            ),
        )?;
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let registry = Self { child, host };
        for _ in 0..400 {
            if TcpStream::connect(&registry.host).is_ok() {
                return Ok(registry);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err("the registry did not come up".into())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn measure(bin: &Path, store: &Path, template: &str, layout: &Path) -> Result<Value, Failed> {
    let scratch = tempfile::Builder::new().prefix("parbake-road.").tempdir()?;
    let registry = Registry::start(scratch.path())?;
    let host = &registry.host;
    let parbake = |store: &Path, arguments: &[&str]| -> Result<String, Failed> {
        let mut command = Command::new(bin.join("parbake"));
        command.env("PARBAKE_STORE", store).env("PARBAKE_PROGRESS", "quiet").args(arguments);
        output(&mut command)
    };
    let name = format!("{host}/bench:1");
    let reference = references(store, template)?;
    parbake(store, &["tag", template, &name])?;

    // The gate records the working set, which shapes the packs.
    let pushed: Value =
        serde_json::from_str(&parbake(store, &["push", "--format", "json", &name])?)?;
    let sent = pushed["sentBytes"].as_f64().ok_or("no sentBytes")?;
    let again: Value = serde_json::from_str(&parbake(
        store,
        &["push", "--no-verify", "--format", "json", &name],
    )?)?;

    let image = format!("docker://{host}/image:1");
    let from = format!("oci:{}", layout.display());
    skopeo(&["--dest-tls-verify=false", &from, &image])?;
    let (mut whole, mut other) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let fresh = scratch.path().join(format!("store{round}"));
        let begun = Instant::now();
        parbake(&fresh, &["pull", "--all", &name])?;
        whole.push(begun.elapsed().as_secs_f64());
        fs::remove_dir_all(&fresh)?;
        let (copy, bundle) = (scratch.path().join("copy"), scratch.path().join("bundle"));
        let begun = Instant::now();
        skopeo(&["--src-tls-verify=false", &image, &format!("oci:{}:1", copy.display())])?;
        let mut unpack = Command::new("umoci");
        unpack.args(["unpack", "--image"]).arg(format!("{}:1", copy.display())).arg(&bundle);
        output(&mut unpack)?;
        other.push(begun.elapsed().as_secs_f64());
        fs::remove_dir_all(&copy)?;
        fs::remove_dir_all(&bundle)?;
    }
    let (whole, other) = (quantile(&mut whole, 0.5), quantile(&mut other, 0.5));

    // In the same store: a snapshot is of one lab, and each store has its own.
    for name in [template, &name] {
        parbake(store, &["rm", name])?;
    }
    parbake(store, &["prune"])?;
    let timings = store.join("lazy-timings.json");
    let words = [
        "run",
        "--pull",
        "lazy",
        "--timings",
        &timings.display().to_string(),
        &name,
        "--",
        "/bin/sh",
        "-c",
        "exit 0",
    ];
    parbake(store, &words)?;
    let lazy: Value = serde_json::from_slice(&fs::read(&timings)?)?;
    fs::remove_file(&timings)?;
    let early = lazy["fetchedBytesAtFirstExec"].as_f64().ok_or("it did not run lazily")?;
    Ok(json!({
        "store.push_bytes": sent,
        "store.push_ratio": sent / reference,
        "store.push_again_bytes": again["sentBytes"],
        "pull.whole_s.p50": whole,
        "pull.skopeo_and_unpack_s.p50": other,
        "pull.vs_skopeo_ratio": whole / other,
        "lazy.bytes_before_first_exec": early,
        "lazy.bytes_before_first_exec_pct": early * 100.0 / sent,
        "lazy.first_exec_ms": lazy["firstExecMs"],
    }))
}

/// What the parts would take without any of this: kernel, root filesystem and memory, gzipped.
fn references(store: &Path, template: &str) -> Result<f64, Failed> {
    let store = Store::open(store)?;
    let template = Template::find(&store, template)?;
    let kernel = &template.kernel;
    let mut images = vec![template.manifest.rootfs.digest];
    images.extend([kernel.vmlinux.digest, kernel.initramfs.digest]);
    for (_, snapshot) in store.snapshots(&template.digest)?.into_iter().take(1) {
        images.push(snapshot.memory.digest);
    }
    let mut sum = 0.0;
    for image in images {
        sum += gzipped(&store, &image)?;
    }
    Ok(sum)
}

/// Bytes of an image's data, gzipped at the level that tools use by default. An image's holes cost
/// about a thousandth, so a file system image is close to its tar file.
#[allow(clippy::cast_precision_loss, reason = "sizes of files")]
fn gzipped(store: &Store, image: &Digest) -> Result<f64, Failed> {
    struct Count(u64);
    impl Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut file = File::open(store.path(image)?)?;
    let mut gzip = GzEncoder::new(Count(0), Compression::new(6));
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(gzip.finish()?.0 as f64);
        }
        // Zero pages are nothing that a tar file would have.
        for page in buffer[..count].chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)) {
            gzip.write_all(page)?;
        }
    }
}

fn skopeo(arguments: &[&str]) -> Result<String, Failed> {
    output(Command::new("skopeo").args(["copy", "--quiet"]).args(arguments))
}

fn output(command: &mut Command) -> Result<String, Failed> {
    let program = command.get_program().to_owned();
    let words: Vec<_> = command.get_args().map(OsStr::to_owned).collect();
    let output = command.stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{program:?} {words:?} ended with {}: {stderr}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
