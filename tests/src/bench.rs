//! All benchmarks in one run: restores on `/dev/kvm` beside the bare ioctl floor, a real guest where
//! one can run, and image to ext4 beside decode and digests. Prints a table and writes one flat
//! JSON object.
//!
//! usage: bench BIN_DIR OUT.json SMALL_LAYOUT LARGE_LAYOUT
//!
//! BIN_DIR holds parbake and its programs, guest-bench, rootfs-bench and registry-bench. Run it in the workspace:
//! the monitor's own benchmark is started through cargo.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use parbake_tests::{Failed, quantile};

type Figures = BTreeMap<String, f64>;

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [bin, out, small, large] = arguments.as_slice() else {
        eprintln!("usage: bench BIN_DIR OUT.json SMALL_LAYOUT LARGE_LAYOUT");
        return ExitCode::from(2);
    };
    let mut figures = Figures::new();
    let mut failed = false;
    let mut take = |what: &str, result: Result<Figures, Failed>| match result {
        Ok(more) => figures.extend(more),
        Err(error) => {
            eprintln!("bench: {what}: {error}");
            failed = true;
        }
    };
    eprintln!("bench: restoring a bare guest on /dev/kvm");
    let words = ["bench", "-q", "-p", "parbake-vmm", "--bench", "restore", "--", "--vmm"];
    let vmm = std::path::absolute(bin.join("parbake-vmm"));
    take(
        "restore",
        vmm.map_err(Into::into).and_then(|vmm| run(Command::new("cargo").args(words).arg(vmm))),
    );
    eprintln!("bench: image to ext4");
    take("rootfs", run(Command::new(bin.join("rootfs-bench")).arg(large)));
    take("rootfs cases", run(Command::new(bin.join("rootfs-cases")).arg(large)));
    eprintln!("bench: a Dockerfile of twenty steps");
    take("steps", steps(bin, small));
    eprintln!("bench: a Debian guest");
    take("guest", guest(bin, small));
    for (name, value) in &figures {
        println!("{name:<50} {value:>12.3}");
    }
    let text = serde_json::to_string_pretty(&figures).expect("numbers");
    if let Err(error) = std::fs::write(out, text + "\n") {
        eprintln!("bench: cannot write {}: {error}", out.display());
        failed = true;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs a program whose standard output ends with one line of flat JSON.
fn run(command: &mut Command) -> Result<Figures, Failed> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("{:?} ended with {}", command.get_program(), output.status).into());
    }
    let text = String::from_utf8(output.stdout)?;
    let start = text.find('{').ok_or("no figures")?;
    let values: BTreeMap<String, serde_json::Value> = serde_json::from_str(&text[start..])?;
    Ok(values.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?))).collect())
}

/// A build of twenty steps on a real base: the first time, and with everything in the cache.
fn steps(bin: &Path, image: &Path) -> Result<Figures, Failed> {
    let scratch = tempfile::Builder::new().prefix("parbake-bench.").tempdir()?;
    let context = scratch.path().join("context");
    std::fs::create_dir(&context)?;
    let mut text = format!("FROM oci:{}\n", image.canonicalize()?.display());
    for number in 0..10 {
        std::fs::write(context.join(format!("f{number}")), format!("{number}\n"))?;
        text.push_str(&format!("COPY f{number} /srv/\nRUN cat /srv/f{number} >/srv/n{number}\n"));
    }
    std::fs::write(context.join("Dockerfile"), text)?;
    let build = || -> Result<f64, Failed> {
        let begun = Instant::now();
        let mut command = Command::new(bin.join("parbake"));
        command.env("PARBAKE_STORE", scratch.path().join("store"));
        command.args(["-q", "build", "-t", "bench:1"]).arg(&context).stdout(Stdio::null());
        if !command.status()?.success() {
            return Err("the build failed".into());
        }
        Ok(begun.elapsed().as_secs_f64() * 1000.0)
    };
    let first = build()?;
    let mut again = (0..15).map(|_| build()).collect::<Result<Vec<_>, _>>()?;
    let cached = quantile(&mut again, 0.5);
    Ok(Figures::from([
        ("build.twenty_steps_ms".to_owned(), first),
        ("build.twenty_steps_cached_ms.p50".to_owned(), cached),
        ("build.twenty_steps_over_cached".to_owned(), first / cached),
    ]))
}

fn guest(bin: &Path, image: &Path) -> Result<Figures, Failed> {
    let scratch = tempfile::Builder::new().prefix("parbake-bench.").tempdir()?;
    let store = scratch.path().canonicalize()?.join("store");
    let parbake = |arguments: &[&OsStr]| {
        let mut command = Command::new(bin.join("parbake"));
        command.env("PARBAKE_STORE", &store).args(arguments);
        command
    };
    let from = format!("oci:{}", image.display());
    let words = ["-q", "build", "--from", &from, "-t", "bench:1"].map(OsStr::new);
    if !parbake(&words).stdout(Stdio::null()).status()?.success() {
        return Err("the template could not be built".into());
    }
    let doctor = parbake(&["doctor", "--format", "json"].map(OsStr::new)).output()?;
    let doctor: serde_json::Value = serde_json::from_slice(&doctor.stdout)?;
    let bench = bin.join("guest-bench");
    let figures = if doctor["host"]["kvmUsable"] == true {
        run(Command::new(bench).arg(&store).args(["bench:1", "kvm"]))
    } else if doctor["host"]["labUsable"] == true {
        // The lab sees this machine's files as they are now below /.host.
        let inside = |path: &Path| Path::new("/.host").join(path.strip_prefix("/").unwrap_or(path));
        let bin = bin.canonicalize()?;
        let mut vmm = std::ffi::OsString::from("PARBAKE_VMM=");
        vmm.push(inside(&bin.join("parbake-vmm")));
        let bench = inside(&bin.join("guest-bench"));
        run(parbake(&["-q", "lab", "exec", "--", "env"].map(OsStr::new))
            .arg(vmm)
            .arg(bench)
            .arg(&store)
            .args(["bench:1", "lab"]))
    } else {
        Err("this host can run no guest".into())
    };
    // On the road, with what was baked there.
    let road = figures.and_then(|mut figures| {
        let mut bench = Command::new(bin.join("registry-bench"));
        figures.extend(run(bench.arg(bin).arg(&store).arg("bench:1").arg(image))?);
        Ok(figures)
    });
    let _ = parbake(&["lab", "down"].map(OsStr::new)).status();
    road
}
