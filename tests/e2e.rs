//! The `parbake` program from the outside: what a user types, and what must come back.
//!
//! Needs `PARBAKE_BIN` (a directory with the programs of one build) and `PARBAKE_IMAGE` (an OCI
//! layout); `make e2e` sets both. Tests that need a guest run it in the lab where KVM cannot run
//! stock guests, and are skipped, with the reason, where neither can.
#![forbid(unsafe_code)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use parbake_tests::programs::{Programs, failed, succeeded};
use tempfile::TempDir;

struct World {
    programs: Programs,
    store: TempDir,
}

impl World {
    fn new() -> Option<Self> {
        let programs = Programs::find()?;
        let store = tempfile::Builder::new().prefix("parbake-e2e.").tempdir().unwrap();
        Some(Self { programs, store })
    }

    fn store(&self) -> PathBuf {
        self.store.path().join("store")
    }

    fn command(&self) -> Command {
        self.programs.parbake(&self.store())
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    fn from(&self) -> String {
        self.programs.from()
    }

    fn can_run_guests(&self) -> bool {
        self.programs.can_run_guests(&self.store())
    }

    fn kvm_is_usable(&self) -> bool {
        self.programs.kvm_is_usable(&self.store())
    }

    /// Runs, demands success, returns trimmed stdout.
    fn ok(&self, arguments: &[&str]) -> String {
        succeeded(&self.run(arguments), &format!("{arguments:?}"))
    }

    /// Runs, demands this exit code and every one of these words on stderr.
    fn fails(&self, arguments: &[&str], code: i32, words: &[&str]) {
        failed(&self.run(arguments), &format!("{arguments:?}"), code, words);
    }

    /// No template and no work in progress is left in the store.
    fn assert_empty(&self) {
        let listed = self.ok(&["ls", "--format", "json"]);
        assert_eq!(listed, "[]", "templates were left behind");
        let tmp = self.store().join("tmp");
        let left: Vec<_> = fs::read_dir(&tmp)
            .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
            .unwrap_or_default();
        assert!(left.is_empty(), "left in the store: {left:?}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.run(&["lab", "down"]);
    }
}

/// A copy of the image's layout with hard-linked blobs, to be damaged.
fn copy_layout(from: &Path, to: &Path) {
    fs::create_dir_all(to.join("blobs/sha256")).unwrap();
    for name in ["index.json", "oci-layout"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    for blob in fs::read_dir(from.join("blobs/sha256")).unwrap().flatten() {
        fs::hard_link(blob.path(), to.join("blobs/sha256").join(blob.file_name()))
            .or_else(|_| {
                fs::copy(blob.path(), to.join("blobs/sha256").join(blob.file_name())).map(|_| ())
            })
            .unwrap();
    }
}

/// The layout's manifest and where it lies.
fn manifest(layout: &Path) -> (PathBuf, serde_json::Value) {
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap().replace("sha256:", "");
    let path = layout.join("blobs/sha256").join(digest);
    let document = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (path, document)
}

/// Replaces a layer's blob of the layout by `change` of its bytes.
fn change_layer(layout: &Path, layer: usize, change: impl FnOnce(&mut Vec<u8>)) {
    let (_, manifest) = manifest(layout);
    let digest = manifest["layers"][layer]["digest"].as_str().unwrap().replace("sha256:", "");
    let path = layout.join("blobs/sha256").join(digest);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
}

#[test]
fn usage_errors_exit_with_2() {
    let Some(world) = World::new() else { return };
    world.fails(&[], 2, &["Usage"]);
    world.fails(&["no-such-verb"], 2, &["no-such-verb"]);
    world.fails(&["build", "--no-such-option"], 2, &["--no-such-option"]);
    world.fails(&["build", "-t", "x"], 2, &[]);
    let help = world.ok(&["--help"]);
    for verb in ["build", "bake", "run", "ls", "inspect", "rm", "kernel", "lab", "doctor"] {
        assert!(help.contains(verb), "{verb} is missing from the help");
    }
    assert!(world.ok(&["completions", "bash"]).contains("complete"));
}

#[test]
fn doctor_explains_the_host() {
    let Some(world) = World::new() else { return };
    let text = world.ok(&["doctor"]);
    assert!(text.contains("/dev/kvm"), "{text}");
    let document: serde_json::Value =
        serde_json::from_str(&world.ok(&["doctor", "--format", "json"])).unwrap();
    assert_eq!(document["able"], true, "{document}");
    // Without QEMU and without usable KVM: what is missing, how to get it, and exit code 7.
    let kvm = document["host"]["kvmUsable"] == true;
    let output = world.command().arg("doctor").env("PATH", "/nonexistent").output().unwrap();
    if !kvm {
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(7), "{text}");
        assert!(text.contains("apt-get install"), "{text}");
    }
}

#[test]
fn bad_images_are_refused_and_leave_nothing() {
    let Some(world) = World::new() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let build = |from: &str| world.run(&["build", "--from", from, "-t", "x:1"]);

    let empty = scratch.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let from = format!("oci:{}", empty.display());
    failed(&build(&from), "not a layout", 1, &["oci-layout"]);
    failed(&build("oci:/no/such/place"), "no such place", 3, &["/no/such/place"]);
    let from = format!("{}:no-such-tag", world.from());
    failed(&build(&from), "unknown reference", 3, &["no-such-tag", "latest"]);
    failed(&build("ftp://x"), "unknown kind", 2, &["ftp"]);

    let arm = format!("{}/arm", scratch.path().display());
    copy_layout(&world.programs.image, Path::new(&arm));
    let output = world.run(&[
        "build",
        "--from",
        &format!("oci:{arm}"),
        "--platform",
        "linux/arm64",
        "-t",
        "x:1",
    ]);
    failed(&output, "wrong architecture", 1, &["arm64", "amd64"]);

    let bad = scratch.path().join("digest");
    copy_layout(&world.programs.image, &bad);
    // A byte of the gzip header that does not change what it decompresses to.
    change_layer(&bad, 0, |bytes| bytes[4] ^= 1);
    failed(&build(&format!("oci:{}", bad.display())), "digest", 4, &["sha256:", "layer"]);

    let cut = scratch.path().join("cut");
    copy_layout(&world.programs.image, &cut);
    change_layer(&cut, 1, |bytes| bytes.truncate(bytes.len() - 1000));
    let output = build(&format!("oci:{}", cut.display()));
    assert!(matches!(output.status.code(), Some(1 | 4)), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("layer"), "{text}");
    world.assert_empty();

    // An output file that was there survives a failed build, byte for byte.
    let out = scratch.path().join("root.ext4");
    fs::write(&out, "precious").unwrap();
    let to = format!("rootfs={}", out.display());
    let from = format!("oci:{}", cut.display());
    assert!(!world.run(&["build", "--from", &from, "-o", &to]).status.success());
    assert_eq!(fs::read(&out).unwrap(), b"precious");
    assert_eq!(
        fs::read_dir(scratch.path())
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_type().unwrap().is_file())
            .count(),
        1
    );
}

#[test]
fn bad_kernels_are_refused_by_name() {
    let Some(world) = World::new() else { return };
    let from = world.from();
    world.fails(
        &["build", "--from", &from, "-t", "x", "--kernel", "linux-image-no-such"],
        3,
        &["linux-image-no-such"],
    );
    let scratch = tempfile::tempdir().unwrap();
    let junk = scratch.path().join("vmlinuz");
    fs::write(&junk, vec![7; 100_000]).unwrap();
    let kernel = format!("image:{}", junk.display());
    world.fails(&["build", "--from", &from, "-t", "x", "--kernel", &kernel], 1, &["vmlinuz"]);
    world.assert_empty();
}

#[test]
fn stores_that_cannot_be_written_are_named() {
    let Some(world) = World::new() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    fs::write(&file, "x").unwrap();
    let store = file.join("store");
    let output = world.command().args(["ls", "--store"]).arg(&store).output().unwrap();
    failed(&output, "a file in the way", 1, &["file"]);

    // A small file system that fills up in the middle of a build.
    let small = scratch.path().join("small");
    fs::create_dir(&small).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=40m", "tmpfs"])
        .arg(&small)
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        println!("skipped the full disk: cannot mount a tmpfs here");
        return;
    }
    let store = small.join("store");
    let output = world
        .command()
        .args(["build", "--from", &world.from(), "-t", "x", "--store"])
        .arg(&store)
        .output()
        .unwrap();
    let listed = world.command().args(["ls", "--format", "json", "--store"]).arg(&store).output();
    let used = Command::new("du").arg("-sk").arg(&small).output().unwrap();
    Command::new("umount").arg(&small).status().unwrap();
    failed(&output, "disk full", 1, &["space"]);
    assert_eq!(String::from_utf8_lossy(&listed.unwrap().stdout).trim(), "[]");
    let used = String::from_utf8_lossy(&used.stdout).split_whitespace().next().unwrap().to_owned();
    assert!(used.parse::<u64>().unwrap() < 1024, "{used} KiB are left of a failed build");
}

#[test]
fn an_interrupted_build_leaves_nothing() {
    let Some(world) = World::new() else { return };
    let mut child = world
        .command()
        .args(["build", "--from", &world.from(), "-t", "x:1"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(150));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    world.assert_empty();
}

#[test]
fn a_root_filesystem_alone_needs_neither_root_nor_kvm() {
    let Some(world) = World::new() else { return };
    let scratch = tempfile::tempdir().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let first = scratch.path().join("first.ext4");
    let second = scratch.path().join("second.ext4");
    world.ok(&["build", "--from", &world.from(), "-o", &format!("rootfs={}", first.display())]);
    // Another user, another directory, another time zone: the same bytes.
    let readable = scratch.path().join("image");
    copy_readable(&world.programs.image, &readable);
    let bin = scratch.path().join("parbake");
    fs::copy(world.programs.bin.join("parbake"), &bin).unwrap();
    let status = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&bin)
        .args(["build", "--from", &format!("oci:{}", readable.display()), "-o"])
        .arg(format!("rootfs={}", second.display()))
        .env("TZ", "Asia/Tokyo")
        .env("HOME", "/nonexistent")
        .current_dir("/")
        .status()
        .unwrap();
    assert!(status.success());
    let digest = |path: &Path| parbake_cache::Digest::of(&fs::read(path).unwrap());
    assert_eq!(digest(&first), digest(&second), "another user's image differs");
    let fsck = Command::new("e2fsck").args(["-fn"]).arg(&first).output().unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
}

fn copy_readable(from: &Path, to: &Path) {
    copy_layout(from, to);
    let blobs = fs::read_dir(to.join("blobs/sha256")).unwrap().flatten().map(|blob| blob.path());
    for path in blobs.chain([to.join("index.json"), to.join("oci-layout")]) {
        // A copy first: a hard link shares its permissions with the original.
        let copy = to.join("copy");
        fs::copy(&path, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o644)).unwrap();
        fs::rename(&copy, &path).unwrap();
    }
}

/// A full disk and Ctrl-C in the middle of a bake: said plainly, nothing left, and the next bake
/// works.
#[test]
fn a_bake_that_cannot_finish_leaves_nothing() {
    let Some(world) = World::new() else { return };
    if !world.can_run_guests() {
        return;
    }
    let volume = world.store.path().join("store");
    fs::create_dir(&volume).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=900m", "tmpfs"])
        .arg(&volume)
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        println!("skipped: cannot mount a tmpfs here");
        return;
    }
    let _mount = Mount(volume.clone());
    world.ok(&["build", "--from", &world.from(), "-t", "debian:12"]);
    let snapshots = || {
        let text = world.ok(&["inspect", "debian:12", "--format", "json"]);
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        document["snapshots"].as_array().unwrap().len()
    };

    // All but 25 MiB taken: less than the memory image needs.
    let stat = rustix::fs::statvfs(&volume).unwrap();
    let filler = volume.join("filler");
    let size = stat.f_bavail * stat.f_frsize - (25 << 20);
    let file = fs::File::create(&filler).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size).unwrap();
    drop(file);
    world.fails(&["bake", "debian:12"], 1, &["No space left on device"]);
    fs::remove_file(&filler).unwrap();
    assert_eq!(snapshots(), 0);
    world.ok(&["verify"]);

    let mut bake = world.command().args(["bake", "debian:12"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let pid = rustix::process::Pid::from_child(&bake);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(bake.wait().unwrap().code(), Some(130));
    assert_eq!(snapshots(), 0);
    world.ok(&["verify"]);
    let left = fs::read_dir(volume.join("tmp")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "an interrupted bake left work behind");

    world.ok(&["bake", "debian:12"]);
    assert_eq!(snapshots(), 1);
    world.ok(&["lab", "down"]);
}

/// A file system of a test's own.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Neither KVM nor an emulator: what is missing, and how to get it.
#[test]
fn a_run_that_no_host_can_serve_says_what_to_install() {
    let Some(world) = World::new() else { return };
    if world.kvm_is_usable() {
        println!("skipped: KVM runs guests here");
        return;
    }
    world.ok(&["build", "--from", &world.from(), "-t", "debian:12"]);
    for (verb, code) in [("bake", 7), ("run", 125)] {
        let output =
            world.command().args([verb, "debian:12"]).env("PATH", "/nonexistent").output().unwrap();
        failed(&output, verb, code, &["QEMU", "apt-get install qemu-system-x86"]);
    }
}

/// From an image to a sandbox, with everything that needs a guest, in one story: the lab and the
/// template are made once.
#[test]
fn from_image_to_sandbox() {
    let Some(world) = World::new() else { return };
    if !world.can_run_guests() {
        return;
    }
    world.ok(&["build", "--from", &world.from(), "-t", "debian:12"]);
    let listed: serde_json::Value =
        serde_json::from_str(&world.ok(&["ls", "--format", "json"])).unwrap();
    assert_eq!(listed[0]["name"], "debian:12");
    assert_eq!(world.ok(&["ls", "-q"]), listed[0]["digest"]);
    assert!(world.ok(&["kernel", "ls"]).contains("linux-image"));

    // The first run bakes, and says so.
    let first = world.run(&["run", "debian:12", "--", "python3", "-c", "print(6*7)"]);
    let stderr = String::from_utf8_lossy(&first.stderr);
    assert_eq!(String::from_utf8_lossy(&first.stdout), "42\n", "{stderr}");
    assert!(stderr.contains("baking it first"), "{stderr}");
    let inspected: serde_json::Value =
        serde_json::from_str(&world.ok(&["inspect", "debian:12", "--format", "json"])).unwrap();
    assert_eq!(inspected["snapshots"].as_array().unwrap().len(), 1, "{inspected}");

    // The image's default command, its environment, its directory.
    assert!(world.ok(&["-q", "run", "debian:12"]).starts_with("hello from"));
    assert_eq!(
        world.ok(&["-q", "run", "debian:12", "--", "sh", "-c", "echo $GREETING; pwd"]),
        "hello\n/app"
    );
    assert_eq!(
        world.ok(&[
            "-q",
            "run",
            "-e",
            "GREETING=bye",
            "-w",
            "/tmp",
            "-u",
            "1001",
            "debian:12",
            "--",
            "sh",
            "-c",
            "echo $GREETING; pwd; id -u"
        ]),
        "bye\n/tmp\n1001"
    );
    // Exit codes: the command's own, and the reserved ones.
    let code = |words: &[&str]| {
        let mut arguments = vec!["-q", "run", "debian:12", "--"];
        arguments.extend(words);
        world.run(&arguments).status.code()
    };
    assert_eq!(code(&["sh", "-c", "exit 42"]), Some(42));
    assert_eq!(code(&["/no/such"]), Some(127));
    assert_eq!(code(&["/etc/passwd"]), Some(126));
    assert_eq!(code(&["sh", "-c", "kill -TERM $$"]), Some(143));
    assert_eq!(world.run(&["run", "no-such-template", "--", "true"]).status.code(), Some(125));

    // Standard input, error and output are three streams.
    let mut child = world
        .command()
        .args(["-q", "run", "debian:12", "--", "sh", "-c", "tr a-z A-Z; echo oops >&2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"hello\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.stdout, b"HELLO\n");
    assert_eq!(output.stderr, b"oops\n");

    // A terminal: the guest sees one, of the right size.
    let script = format!(
        "stty rows 33 cols 99; exec {} -q run -it debian:12 -- sh -c 'tty; stty size'",
        world.programs.bin.join("parbake").display()
    );
    let output = Command::new("script")
        .args(["-qec", &format!("sh -c \"{script}\""), "/dev/null"])
        .env("PARBAKE_STORE", world.store.path().join("store"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("/dev/pts/") && text.contains("33 99"), "{text}");

    // Ctrl-C reaches the command; its answer decides the exit code.
    let begun = Instant::now();
    let mut child = world
        .command()
        .args([
            "-q",
            "run",
            "debian:12",
            "--",
            "sh",
            "-c",
            "trap 'exit 9' INT; echo up; sleep 300 & wait",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(9));
    assert!(begun.elapsed() < Duration::from_secs(60));

    // A run that is killed takes its machine along.
    let mut child = world
        .command()
        .args(["-q", "run", "debian:12", "--", "sh", "-c", "echo up; sleep 300"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let gone = |world: &World| {
        let text =
            world.ok(&["-q", "lab", "exec", "--", "sh", "-c", "pgrep -c parbake-vmm || true"]);
        text == "0"
    };
    if !world.kvm_is_usable() {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !gone(&world) {
            assert!(Instant::now() < deadline, "the machine of a killed run lives on");
        }
        guest_suite(&world, &["-q", "lab", "exec", "--"]);
    } else {
        guest_suite(&world, &[]);
    }

    world.ok(&["rm", "debian:12"]);
    assert_eq!(world.ok(&["ls", "--format", "json"]), "[]");
    world.fails(&["inspect", "debian:12"], 3, &["debian:12"]);
}

/// The suite that needs a guest, on this host or through the lab.
fn guest_suite(world: &World, through: &[&str]) {
    let suite = env!("CARGO_BIN_EXE_guest-suite");
    let store = world.store.path().join("store");
    let vmm = world.programs.bin.join("parbake-vmm");
    let mut command = if through.is_empty() {
        Command::new("env")
    } else {
        let mut command = world.command();
        command.args(through).arg("env");
        command
    };
    let output = command
        .arg(format!("PARBAKE_VMM={}", vmm.display()))
        .arg(suite)
        .arg(&store)
        .arg("debian:12")
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "the guest suite failed:\n{text}");
}
