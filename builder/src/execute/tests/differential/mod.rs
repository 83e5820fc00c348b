//! The same Dockerfiles through this executor and through BuildKit and buildah.
//!
//! What the judges said is committed in `expected/`, so that the comparison runs without them:
//! first line who judged, then the configuration, then what of the tree differs from the root
//! filesystem all cases start from. `PARBAKE_JUDGE=1` asks them again: BuildKit through `docker`
//! (`DOCKER_HOST` names its engine, `PARBAKE_DOCKER` the program), buildah where it is installed.
//! BuildKit decides; `DISAGREEMENTS.md` beside this file lists where others say something else.

mod cases;
mod machines;
mod tree;
mod written;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use self::cases::{CASES, Input, Item, MOUNT_POINTS};
use super::support::{Case, rootfs, skip_reason};
use crate::execute::unpack::{Unpack, unpack};
use crate::execute::{Executor, Sandbox};

const BASE: &str = "FROM scratch{as}\nADD rootfs.tar /";

/// Lines of `BASE` and `BASE AS name` become what they stand for.
fn dockerfile(input: &Input) -> String {
    let mut out = String::new();
    for line in input.dockerfile.lines() {
        match line.strip_prefix("BASE") {
            Some(name) => out.push_str(&BASE.replace("{as}", name)),
            None if line == "RUNLESS" => {}
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

fn archive(to: &Path, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("t");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(root.join("file"), "from the archive").unwrap();
    fs::write(root.join("sub/other"), "x").unwrap();
    fs::hard_link(root.join("file"), root.join("hard")).unwrap();
    symlink("file", root.join("soft")).unwrap();
    fs::set_permissions(root.join("file"), fs::Permissions::from_mode(0o4750)).unwrap();
    fs::set_permissions(root.join("sub"), fs::Permissions::from_mode(0o711)).unwrap();
    let compression = match name.rsplit('.').next() {
        Some("gz") => "-z",
        Some("bz2") => "-j",
        Some("xz") => "-J",
        _ => "-v",
    };
    let status = Command::new("tar")
        .args(["--sort=name", "--mtime=@1000", "--owner=21", "--group=22", "--numeric-owner"])
        .arg(compression)
        .arg("-cf")
        .arg(to.join(name))
        .arg("-C")
        .arg(dir.path())
        .arg("t")
        .output()
        .unwrap();
    assert!(status.status.success());
}

fn context(case: &Case, input: &Input) {
    let root = &case.options.context;
    for item in input.context {
        match item {
            Item::File(name, text) => {
                fs::write(root.join(name), text).unwrap();
                fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o644)).unwrap();
            }
            Item::Mode(name, text, mode) => {
                fs::write(root.join(name), text).unwrap();
                fs::set_permissions(root.join(name), fs::Permissions::from_mode(*mode)).unwrap();
            }
            Item::Dir(name, mode) => {
                fs::create_dir(root.join(name)).unwrap();
                fs::set_permissions(root.join(name), fs::Permissions::from_mode(*mode)).unwrap();
            }
            Item::Link(name, target) => symlink(target, root.join(name)).unwrap(),
            Item::Tar(name) => archive(root, name),
        }
    }
}

/// Configuration and tree as text.
fn describe(config: &parbake_recipes::plan::ImageConfig, root: &Path) -> String {
    let base = tempfile::tempdir().unwrap();
    let file = fs::File::open(rootfs()).unwrap();
    unpack(file, base.path(), Unpack::default()).unwrap();
    let mut config = config.clone();
    config.env.sort();
    let config = serde_json::to_string_pretty(&config).unwrap();
    format!("{config}\n{}", tree::difference(base.path(), root))
}

/// What the sandbox makes of a case.
fn ours(input: &Input) -> Result<(String, Case), String> {
    let case = Case::new();
    let mut sandbox = Sandbox::new(None).map_err(|error| error.to_string())?;
    made(input, case, &mut sandbox)
}

fn made(
    input: &Input,
    mut case: Case,
    executor: &mut dyn Executor,
) -> Result<(String, Case), String> {
    context(&case, input);
    case.secret("tok", "sup3rs3cret");
    for (name, value) in input.args {
        case.lower.build_args.insert((*name).to_owned(), (*value).to_owned());
    }
    case.lower.target = input.target.map(str::to_owned);
    case.dockerfile(&dockerfile(input));
    let built = case.build_with(executor).map_err(|error| error.to_string())?;
    let root = case.path("unpacked");
    unpack_layout(&built.oci_layout, &root);
    Ok((describe(&built.config, &root), case))
}

fn unpack_layout(layout: &Path, root: &Path) {
    let read = |digest: &str| {
        let path = layout.join("blobs").join(digest.replacen(':', "/", 1));
        fs::read(path).unwrap()
    };
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let manifest: serde_json::Value =
        serde_json::from_slice(&read(index["manifests"][0]["digest"].as_str().unwrap())).unwrap();
    fs::create_dir_all(root).unwrap();
    for layer in manifest["layers"].as_array().unwrap() {
        let bytes = read(layer["digest"].as_str().unwrap());
        let bytes = crate::execute::unpack::decompress(std::io::Cursor::new(bytes)).unwrap();
        unpack(bytes, root, Unpack { layer: true, whiteouts: true, owner: None }).unwrap();
    }
}

fn expected_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/execute/tests/differential/expected")
        .join(format!("{name}.txt"))
}

#[test]
fn every_case_is_as_it_was_judged() {
    if let Some(reason) = skip_reason() {
        eprintln!("skipped: {reason}");
        return;
    }
    let only = std::env::var("PARBAKE_CASE").ok();
    let judging = std::env::var("PARBAKE_JUDGE").ok();
    let mut wrong = Vec::new();
    let mut notes = BTreeMap::new();
    assert!(CASES.len() >= 60);
    for input in CASES {
        if only.as_deref().is_some_and(|only| only != input.name) {
            continue;
        }
        let path = expected_path(input.name);
        let ask = match judging.as_deref() {
            None => false,
            Some("missing") => !path.exists(),
            Some(_) => true,
        };
        let mode = judging.as_deref().unwrap_or_default();
        if ask && let Err(error) = judge(input, mode, &mut notes) {
            wrong.push(format!("{}: {error}", input.name));
        }
        let Ok(expected) = fs::read_to_string(&path) else {
            wrong.push(format!("{}: not judged yet (PARBAKE_JUDGE=1)", input.name));
            continue;
        };
        let (_, expected) = expected.split_once('\n').unwrap();
        let expected = &judged(input, expected);
        match ours(input) {
            Ok((ours, _)) if ours == *expected => {}
            Ok((ours, _)) => {
                wrong.push(format!("{}:\n{}", input.name, tree::line_difference(expected, &ours)));
            }
            Err(error) => wrong.push(format!("{}: {error}", input.name)),
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// What was judged, less what the judge has left behind that current ones do not.
fn judged(input: &Input, recorded: &str) -> String {
    let left = MOUNT_POINTS.iter().find(|(name, _)| *name == input.name);
    without(recorded, left.map_or(&[], |(_, paths)| *paths))
}

/// The description without directories that were made.
fn without(text: &str, paths: &[&str]) -> String {
    let made = |line: &str| paths.iter().any(|path| line == format!("+ {path} directory 0755 0:0"));
    text.split_inclusive('\n').filter(|line| !made(line.trim_end())).collect()
}

#[test]
fn what_no_judge_can_build_is_as_documented() {
    if let Some(reason) = skip_reason() {
        eprintln!("skipped: {reason}");
        return;
    }
    let mut wrong = Vec::new();
    for case in written::WRITTEN {
        let expected = format!("{}\n", case.tree.join("\n"));
        match ours(&case.input) {
            Ok((text, _)) => {
                let tree = text.split_once("\n}\n").map_or("", |(_, tree)| tree);
                // They appear with the first `RUN`, and are not what these cases are about.
                let tree = &without(tree, &["/dev", "/proc", "/sys"]);
                if *tree != expected {
                    let difference = tree::line_difference(&expected, tree);
                    wrong.push(format!("{}:\n{difference}", case.input.name));
                }
            }
            Err(error) => wrong.push(format!("{}: {error}", case.input.name)),
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// Asks the judges and records what they say.
fn judge(
    input: &Input,
    mode: &str,
    notes: &mut BTreeMap<&'static str, String>,
) -> Result<(), String> {
    let case = Case::new();
    context(&case, input);
    fs::write(case.path("Dockerfile"), dockerfile(input)).unwrap();
    fs::write(case.path("tok"), "sup3rs3cret").unwrap();
    // `second` asks only buildah again.
    let recorded = fs::read_to_string(expected_path(input.name)).unwrap_or_default();
    let buildkit = match (mode, recorded.split_once('\n')) {
        ("second", Some((who, text))) if who.starts_with("BuildKit") => Ok(text.to_owned()),
        _ => with_buildkit(input, &case),
    };
    let buildah = with_buildah(input, &case);
    let (who, text) = match (&buildkit, &buildah) {
        (Ok(text), _) => ("BuildKit", text),
        (Err(_), Ok(text)) => ("buildah", text),
        (Err(first), Err(second)) => return Err(format!("{first}\n{second}")),
    };
    let judges = match (&buildkit, &buildah) {
        (Ok(one), Ok(two)) if one == two => "BuildKit and buildah".to_owned(),
        _ => who.to_owned(),
    };
    let difference = match (&buildkit, &buildah) {
        (Ok(one), Ok(two)) if one != two => Some(tree::line_difference(one, two)),
        (Ok(_), Err(error)) | (Err(error), Ok(_)) => {
            Some(error.lines().last().unwrap_or_default().to_owned())
        }
        _ => None,
    };
    if let Some(difference) = difference {
        notes.insert(input.name, difference);
        write_notes(notes);
    }
    fs::write(expected_path(input.name), format!("{judges}\n{text}")).unwrap();
    Ok(())
}

fn write_notes(notes: &BTreeMap<&'static str, String>) {
    let mut text = String::from(
        "# Where the judges disagree\n\nWritten by the differential test. `-` is BuildKit 20.10, \
         which is followed; `+` is buildah 1.28. A line without either is why one of them could \
         not build the case. Left out: buildah's version label, its empty ENTRYPOINT and CMD, its \
         empty WORKDIR on scratch, and /run and empty files in /etc after every RUN.\n",
    );
    for (name, difference) in notes {
        text.push_str(&format!("\n## {name}\n```\n{}\n```\n", difference.trim_end()));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/execute/tests/differential/DISAGREEMENTS.md");
    fs::write(path, text).unwrap();
}

fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn common(command: &mut Command, input: &Input, case: &Case) {
    for (name, value) in input.args {
        command.arg(format!("--build-arg={name}={value}"));
    }
    command.args(input.target.map(|target| format!("--target={target}")));
    command.arg(format!("--secret=id=tok,src={}", case.path("tok").display()));
    command.arg("-f").arg(case.path("Dockerfile")).arg(&case.options.context);
}

fn with_buildkit(input: &Input, case: &Case) -> Result<String, String> {
    let docker = std::env::var_os("PARBAKE_DOCKER").unwrap_or_else(|| "docker".into());
    let tag = "parbake-judge:1";
    let mut build = Command::new(&docker);
    build.env("DOCKER_BUILDKIT", "1").args(["build", "--quiet", "--network=host", "-t", tag]);
    common(&mut build, input, case);
    output(&mut build)?;
    let tar = case.path("judge.tar");
    output(Command::new(&docker).args(["save", "-o"]).arg(&tar).arg(tag))?;
    let layout = case.path("judge-buildkit");
    let source = format!("docker-archive:{}", tar.display());
    output(
        Command::new("skopeo").args(["copy", &source]).arg(format!("oci:{}:x", layout.display())),
    )?;
    // The OCI form of the configuration drops what only Docker's knows: read the original.
    let inspected = output(Command::new(&docker).args(["image", "inspect", tag]))?;
    let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
    let config = serde_json::from_value(inspected[0]["Config"].clone()).unwrap();
    let root = case.path("judge-buildkit-root");
    unpack_layout(&layout, &root);
    Ok(describe(&config, &root))
}

/// What buildah leaves in every tree after a `RUN`.
const HABITS: [&str; 4] = [
    "+ /etc/hostname file 0755 0:0 \"\"",
    "+ /etc/hosts file 0755 0:0 \"\"",
    "+ /etc/resolv.conf file 0755 0:0 \"\"",
    "+ /run directory 0755 0:0",
];

/// What buildah writes into every configuration, and BuildKit does not.
fn without_habits(
    mut config: parbake_recipes::plan::ImageConfig,
) -> parbake_recipes::plan::ImageConfig {
    config.labels.remove("io.buildah.version");
    config.entrypoint = config.entrypoint.filter(|args| !args.is_empty());
    config.cmd = config.cmd.filter(|args| !args.is_empty());
    if config.working_dir.is_empty() {
        config.working_dir = "/".to_owned();
    }
    config
}

fn with_buildah(input: &Input, case: &Case) -> Result<String, String> {
    let global = |command: &mut Command| {
        command.arg("--root").arg(case.path("bs")).arg("--runroot").arg(case.path("br"));
        command.args(["--storage-driver", "overlay"]);
    };
    let mut build = Command::new("buildah");
    global(&mut build);
    let id = case.path("buildah-id");
    build.args(["bud", "--isolation=chroot", "--format=docker", "--quiet"]);
    build.arg("--iidfile").arg(&id);
    common(&mut build, input, case);
    let result = output(&mut build).and_then(|_| {
        let image = fs::read_to_string(&id).map_err(|error| error.to_string())?;
        let layout = case.path("judge-buildah");
        let mut push = Command::new("buildah");
        global(&mut push);
        push.args(["push", image.trim()]).arg(format!("oci:{}:x", layout.display()));
        output(&mut push)?;
        let mut inspect = Command::new("buildah");
        global(&mut inspect);
        let text = output(inspect.args(["inspect", "--type=image", image.trim()]))?;
        let inspected: serde_json::Value = serde_json::from_str(&text).unwrap();
        let config = serde_json::from_value(inspected["Docker"]["config"].clone()).unwrap();
        let root = case.path("judge-buildah-root");
        unpack_layout(&layout, &root);
        Ok(describe(&without_habits(config), &root)
            .split_inclusive('\n')
            .filter(|line| !HABITS.contains(&line.trim_end()))
            .collect())
    });
    let mut clean = Command::new("buildah");
    global(&mut clean);
    let _ = output(clean.args(["rmi", "--all", "--force"]));
    result.map_err(|error| error.replace(&*case.path("").to_string_lossy(), ""))
}
