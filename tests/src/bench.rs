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

use parbake_tests::Failed;

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
