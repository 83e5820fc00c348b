//! The generator of sample cases, if it is on this machine (`PARBAKE_CASES`, or `shared/cases`
//! beside the checkout): each case is built, checked by e2fsck, mounted, and compared with what
//! the case expects.

mod judge;

use std::path::{Path, PathBuf};
use std::process::Command;

use parbake_builder::flatten::build::{BuildOptions, build_ext4};
use parbake_builder::image::{self, ImageOptions, ImageSource};

fn cases() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/cases");
    let path = std::env::var_os("PARBAKE_CASES").map_or(beside, PathBuf::from);
    path.join("gen.py").exists().then_some(path)
}

fn build(layout: &Path, out: &Path) -> Result<(), String> {
    let source = ImageSource::OciLayout { path: layout.to_owned(), reference: None };
    let image = image::open(&source, &ImageOptions::default(), &mut |_| {});
    let image = image.map_err(|error| error.to_string())?;
    build_ext4(&image, out, &BuildOptions::default(), &mut |_| {})
        .map(|_| ())
        .map_err(|error| error.to_string())
}

#[test]
fn sample_cases() {
    let Some(cases) = cases() else {
        println!("skipped: no generator of sample cases on this machine (PARBAKE_CASES)");
        return;
    };
    let work = tempfile::tempdir().expect("temporary directory");
    let status = Command::new("python3").arg(cases.join("gen.py")).arg(work.path()).status();
    assert!(status.expect("python3").success());
    let mut names: Vec<_> =
        work.path().read_dir().expect("cases").map(|entry| entry.expect("case").path()).collect();
    names.sort();
    let mut wrong = Vec::new();
    for case in &names {
        let name = case.file_name().expect("name").to_string_lossy().into_owned();
        let out = work.path().join(format!("{name}.ext4"));
        let expect = std::fs::read_to_string(case.join("expect.json")).expect("expectation");
        let refuse = expect.contains("\"error\": true");
        match build(&case.join("layout"), &out) {
            Err(error) if refuse => {
                println!("{name}: refused: {error}");
                assert!(!out.exists(), "{name}: something was left");
            }
            Err(error) => wrong.push(format!("{name}: {error}")),
            Ok(()) if refuse => wrong.push(format!("{name}: accepted")),
            Ok(()) => {
                judge::fsck(&out);
                let Some(mount) = judge::mounted::Mount::new(&out, "ro") else { continue };
                let check = Command::new("python3")
                    .arg(cases.join("check.py"))
                    .arg(mount.path())
                    .arg(case.join("expect.json"))
                    .output()
                    .expect("python3");
                if !check.status.success() {
                    wrong.push(format!("{name}: {}", judge::text(&check)));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), names.len(), wrong.join("\n"));
}
