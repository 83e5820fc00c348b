//! Templates on the road, through the `parbake` program: push, pull, export, import, and the
//! store's upkeep, against Debian's docker-registry and with skopeo.
//!
//! Needs `PARBAKE_BIN` (a directory with the programs of one build) and `PARBAKE_IMAGE` (an OCI
//! layout); `make e2e` sets both.
#![forbid(unsafe_code)]

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use parbake_cache::bundle::BUNDLE_TYPE;
use parbake_cache::referrers::Attachment;
use parbake_cache::registry::{Access, RegistryOptions, Repository};
use parbake_cache::template::{
    CompatContract, MachineShape, ObjectRef, SCHEMA_VERSION, SnapshotManifest,
};
use parbake_cache::{Digest, Store};
use parbake_tests::programs::{Programs, failed, succeeded};
use serde_json::Value;
use tempfile::TempDir;

#[allow(dead_code, reason = "not every test needs all of it")]
#[path = "../cache/tests/fixture/instance.rs"]
mod instance;

/// A home with a store, its own credentials, and the programs.
struct Home {
    programs: Programs,
    directory: TempDir,
}

impl Home {
    fn new() -> Option<Self> {
        let programs = Programs::find()?;
        let directory = tempfile::Builder::new().prefix("parbake-road.").tempdir().unwrap();
        Some(Self { programs, directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.programs.parbake(&self.path("store"));
        command.args(arguments).env("REGISTRY_AUTH_FILE", self.path("auth.json"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        succeeded(&self.run(arguments), &format!("{arguments:?}"))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(&[&["--format", "json"], arguments].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    /// Demands this exit code, an error line, and every one of these words on stderr.
    fn fails(&self, arguments: &[&str], code: i32, words: &[&str]) {
        failed(&self.run(arguments), &format!("{arguments:?}"), code, words);
    }

    fn store(&self) -> Store {
        Store::open(&self.path("store")).unwrap()
    }

    /// Runs where the kernel lets nobody answer another's faults: without `CAP_SYS_PTRACE` (and with
    /// `vm.unprivileged_userfaultfd` off, as it is by default).
    fn without_faults(&self, doctor: &Value, arguments: &[&str]) -> Output {
        let program = self.programs.bin.join("parbake");
        let wrapped = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"];
        if doctor["host"]["kvmUsable"] == true {
            let mut command = Command::new(wrapped[0]);
            command.args(&wrapped[1..]).arg(program).args(arguments);
            return command.env("PARBAKE_STORE", self.path("store")).output().unwrap();
        }
        // The lab has this machine's files there.
        let program = format!("/.host{}", fs::canonicalize(program).unwrap().display());
        let store = format!("PARBAKE_STORE={}", self.path("store").display());
        let lab = ["lab", "exec", "--"];
        let env = ["env", "PARBAKE_IN_LAB=1", "PARBAKE_PROGRESS=plain", &store, &program];
        self.run(&[&lab[..], &wrapped, &env, arguments].concat())
    }

    /// A template of a directory with these files.
    fn build(&self, name: &str, files: &[(&str, &[u8])]) -> String {
        let root = self.path(&format!("root-{}", name.replace([':', '/'], "-")));
        for (path, content) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
        }
        self.ok(&["build", "--from", &format!("dir:{}", root.display()), "--free", "8", "-t", name])
    }
}

/// Debian's docker-registry on loopback, until dropped.
struct Registry {
    child: Child,
    host: String,
}

impl Registry {
    fn start(directory: &Path, password: bool) -> Option<Self> {
        fs::create_dir_all(directory).unwrap();
        // Whoever takes the port in between makes the registry end, and the test say so.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let host = format!("127.0.0.1:{port}");
        let mut config = format!(
            "version: 0.1\nlog:\n  accesslog:\n    disabled: true\n  level: error\nstorage:\n  \
             filesystem:\n    rootdirectory: {}\n  delete:\n    enabled: true\nhttp:\n  addr: {host}\n",
            directory.join("data").display()
        );
        if password {
            // bcrypt of "secret", at the lowest cost.
            let hash = "$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a";
            fs::write(directory.join("htpasswd"), format!("baker:{hash}\n")).unwrap();
            config += &format!(
                "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
                directory.join("htpasswd").display()
            );
        }
        let file = directory.join("registry.yml");
        fs::write(&file, config).unwrap();
        let log = fs::File::create(directory.join("registry.log")).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let Ok(mut child) = child else {
            println!("skipped: docker-registry is not installed");
            return None;
        };
        for _ in 0..400 {
            assert!(child.try_wait().unwrap().is_none(), "the registry ended");
            if TcpStream::connect(&host).is_ok() {
                return Some(Self { child, host });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the registry did not come up");
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes that do not compress, different for each seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn bytes_of(document: &Value, field: &str) -> u64 {
    document[field].as_u64().unwrap_or_else(|| panic!("no {field} in {document}"))
}

/// A snapshot of a machine that exists nowhere: everything about it is right but its bytes.
fn foreign_snapshot(store: &Store, template: &Digest) -> Digest {
    let staging = store.stage().unwrap();
    let image = |name: &str, seed| -> ObjectRef {
        let path = staging.join(name);
        let file = fs::File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&noise(seed, 1 << 20), 8 << 20).unwrap();
        store.adopt_image(path).unwrap()
    };
    let state = staging.join("state");
    fs::write(&state, noise(3, 4096)).unwrap();
    let snapshot = SnapshotManifest {
        schema_version: SCHEMA_VERSION,
        template: *template,
        machine: MachineShape { vcpus: 1, memory_mib: 256 },
        compat: CompatContract {
            architecture: "amd64".to_owned(),
            cpu_vendor: "NobodysChips".to_owned(),
            cpu_features: [("1.ecx".to_owned(), 1)].into(),
            kvm_kind: "vmx".to_owned(),
            state_version: 1,
            agent_protocol: 1,
            page_size: 4096,
        },
        state: store.adopt_blob(state).unwrap(),
        memory: image("memory", 1),
        disk: image("disk", 2),
        generation: 1,
    };
    let digest = store.put_json(&snapshot).unwrap().digest;
    store.set_snapshot(template, &digest).unwrap();
    digest
}

#[test]
fn a_template_travels_and_only_what_is_new_is_sent() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let other = Home::new().unwrap();
    let base = noise(1, 6 << 20);
    let digest = home.build("py:1", &[("base", &base), ("etc/version", b"1\n")]);
    let name = format!("{}/team/py:1", registry.host);
    home.ok(&["tag", "py:1", &name]);
    assert_eq!(home.ok(&["ls", "-q"]), format!("{digest}\n{digest}"));

    let first = home.json(&["push", &name]);
    let sent = bytes_of(&first, "sentBytes");
    assert!(sent > 6 << 20, "{first}");
    assert_eq!(bytes_of(&first, "totalBytes"), sent);
    assert_eq!(first["replaced"], Value::Null);
    // The same again: nothing to send but the tag.
    let again = home.json(&["push", &name]);
    assert_eq!((bytes_of(&again, "sentBytes"), &again["digest"]), (0, &first["digest"]));
    assert_eq!(again["replaced"], first["digest"]);
    // Another version: about what is new.
    let next = format!("{}/team/py:2", registry.host);
    let second =
        home.build(&next, &[("base", &base), ("etc/version", b"2\n"), ("new", &noise(2, 100_000))]);
    assert_ne!(second, digest);
    let pushed = home.json(&["push", &next]);
    let new = bytes_of(&pushed, "sentBytes");
    assert!((100_000..1 << 20).contains(&new), "{pushed}");

    // Into another store: by name, pinned, and the second version costs only what is new.
    let pulled = other.json(&["pull", &format!("{name}@{}", first["digest"].as_str().unwrap())]);
    assert_eq!(pulled["digest"], digest.as_str());
    assert!(bytes_of(&pulled, "fetchedBytes") > 6 << 20, "{pulled}");
    let pulled = other.json(&["pull", &next, "-t", "py:2"]);
    assert_eq!(pulled["digest"], second.as_str());
    assert!(bytes_of(&pulled, "fetchedBytes") < 1 << 20, "{pulled}");
    assert!(bytes_of(&pulled, "reusedBytes") > 5 << 20, "{pulled}");
    assert_eq!(other.ok(&["verify"]), "clean");
    assert_eq!(other.json(&["inspect", "py:2"])["digest"], second.as_str());
    let rootfs = |home: &Home| {
        let document = home.json(&["inspect", &digest]);
        let object = document["template"]["rootfs"]["digest"].as_str().unwrap().parse().unwrap();
        Digest::of(&fs::read(home.store().path(&object).unwrap()).unwrap())
    };
    assert_eq!(rootfs(&home), rootfs(&other), "the root file system changed on the road");
    // What was measured at the build travels along.
    let sizes = other.json(&["inspect", "--size", &digest]);
    assert!(sizes["layers"][0]["cost"]["liveBytes"].as_u64().unwrap() >= 6 << 20, "{sizes}");

    // Lazily, into an empty store: the same template, and known when it was usable.
    let lazy = Home::new().unwrap();
    let pulled = lazy.json(&["pull", "--lazy", &name]);
    assert_eq!(pulled["digest"], digest.as_str());
    assert!(bytes_of(&pulled, "usableBytes") < bytes_of(&pulled, "fetchedBytes"), "{pulled}");
    assert_eq!(lazy.ok(&["verify", &name]), "clean");

    // skopeo copies it like anything else.
    let copy = other.path("copied");
    let copied = Command::new("skopeo")
        .args(["copy", "--all", "--quiet", "--src-tls-verify=false"])
        .arg(format!("docker://{name}"))
        .arg(format!("oci:{}:1", copy.display()))
        .output();
    match copied {
        Ok(output) => {
            succeeded(&output, "skopeo copy");
            let third = Home::new().unwrap();
            let from = copy.to_str().unwrap();
            third.fails(&["import", from], 2, &["--tag"]);
            let imported = third.json(&["import", from, "-t", "copied"]);
            assert_eq!(imported["digest"], digest.as_str());
            assert_eq!(third.ok(&["verify", "copied"]), "clean");
        }
        Err(_) => println!("skopeo is not installed: not tried"),
    }
}

#[test]
fn what_is_exported_can_be_imported() {
    let Some(home) = Home::new() else { return };
    let other = Home::new().unwrap();
    let digest = home.build("team/app:7", &[("a", &noise(5, 1 << 20))]);
    let tar = home.path("app.tar");
    let directory = home.path("app");
    let file = tar.to_str().unwrap();
    let slashed = format!("{}/", directory.display());
    let written = home.ok(&["export", "team/app:7", "-o", file]);
    assert_eq!(home.ok(&["export", "team/app:7", "-o", &slashed]), written);
    assert!(directory.join("oci-layout").exists());
    // The same template gives the same archive.
    let bytes = fs::read(&tar).unwrap();
    home.ok(&["export", "team/app:7", "-o", file]);
    assert!(bytes == fs::read(&tar).unwrap(), "two exports differ");

    assert_eq!(other.ok(&["import", file]), digest);
    assert_eq!(other.json(&["ls"])[0]["name"], "team/app:7");
    let again = other.json(&["import", &slashed, "-t", "again"]);
    assert_eq!(again["digest"], digest.as_str());
    // It was all here.
    assert!(bytes_of(&again, "fetchedBytes") < 64 << 10, "{again}");

    other.fails(&["import", "/no/such/file"], 3, &["/no/such/file"]);
    other.fails(&["import", file, "--reference", "nope"], 3, &["--reference"]);
    other.fails(&["import", home.path("store").to_str().unwrap()], 1, &["oci-layout"]);
    // An ordinary image: what to do instead.
    let image = other.programs.image.to_str().unwrap();
    other.fails(
        &["import", image, "-t", "x"],
        1,
        &["not a parbake template", &format!("build --from oci:{image}")],
    );
    // A damaged layout is refused, and leaves nothing behind.
    let mut blobs: Vec<_> = fs::read_dir(directory.join("blobs/sha256"))
        .unwrap()
        .flatten()
        .map(|entry| (entry.metadata().unwrap().len(), entry.path()))
        .collect();
    blobs.sort();
    let (len, largest) = blobs.pop().unwrap();
    let file = fs::File::options().write(true).open(largest).unwrap();
    file.write_all_at(&noise(9, 64), len / 2).unwrap();
    let third = Home::new().unwrap();
    third.fails(&["import", &slashed], 4, &["sha256:"]);
    assert_eq!(third.ok(&["--format", "json", "ls"]), "[]");
    third.ok(&["prune"]);
    assert_eq!(third.ok(&["verify"]), "clean");
}

#[test]
fn what_is_asked_for_wrongly_is_said() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let host = registry.host.clone();
    home.build("app", &[("a", b"a")]);
    let there = format!("{host}/app:1");
    home.ok(&["tag", "app", &there]);

    home.fails(&["push", "no-such"], 3, &["no-such", "parbake ls"]);
    home.fails(&["push", "app"], 2, &["which registry", "parbake tag"]);
    home.fails(&["pull", "app"], 2, &["which registry"]);
    home.fails(&["pull", &format!("{host}/app:1")], 3, &["app:1"]);
    home.fails(&["pull", &format!("{host}/app:1@sha256:12")], 2, &["sha256:12"]);
    home.fails(&["pull", &format!("http://{host}/app")], 2, &["scheme"]);
    home.fails(&["tag", "app", "UPPER"], 2, &["lower case"]);
    home.fails(&["tag", "nope", "x"], 3, &["nope"]);
    home.fails(&["history", "nope"], 3, &["nope"]);
    home.fails(&["diff", "app", "nope"], 3, &["nope"]);
    home.fails(&["verify", "nope"], 3, &["nope"]);
    home.fails(&["verify", "--restore", "app"], 3, &["no snapshot", "parbake bake app"]);
    home.fails(&["export", "app", "-o", "/no/such/dir/x.tar"], 1, &["/no/such/dir"]);
    home.fails(&["prune", "--keep-storage", "lots"], 2, &["lots", "20GiB"]);
    home.fails(&["logout", &host], 3, &[&host]);
    home.fails(&["login", "http://x/", "-u", "u", "--password-stdin"], 2, &["scheme"]);

    // Errors are documents for programs.
    let output =
        home.run(&["--format", "json", "--progress", "quiet", "pull", &format!("{host}/none")]);
    assert_eq!(output.status.code(), Some(3));
    let document: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!(document["error"]["kind"], "notFound");

    // An ordinary image where a template was expected.
    let image = format!("{host}/ordinary:1");
    let copied = Command::new("skopeo")
        .args(["copy", "--quiet", "--dest-tls-verify=false"])
        .arg(format!("oci:{}", home.programs.image.display()))
        .arg(format!("docker://{image}"))
        .output();
    if let Ok(output) = copied {
        succeeded(&output, "skopeo copy");
        home.fails(
            &["pull", &image],
            1,
            &["not a parbake template", &format!("parbake build --from docker://{image}")],
        );
    }

    // A registry that is not there.
    home.ok(&["push", &there]);
    drop(registry);
    home.fails(&["pull", &there], 8, &["cannot reach", &host]);
    home.fails(&["push", &there], 8, &["cannot reach", &host]);
}

#[test]
fn a_registry_with_a_password_wants_it() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), true) else { return };
    let host = registry.host.as_str();
    let name = format!("{host}/app:1");
    home.build(&name, &[("a", b"a")]);
    let login = |user: &str, password: &str| {
        let mut child = home
            .command(&["login", host, "-u", user, "--password-stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(password.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    home.fails(&["push", &name], 8, &["credentials", &format!("parbake login {host}")]);
    failed(&login("baker", "wrong\n"), "wrong password", 8, &["does not accept", host]);
    assert!(!home.path("auth.json").exists(), "a refused password was kept");
    assert!(succeeded(&login("baker", "secret\n"), "login").contains("baker"));
    let kept = fs::metadata(home.path("auth.json")).unwrap();
    assert_eq!(kept.permissions().mode() & 0o777, 0o600);

    home.ok(&["push", &name]);
    let other = Home::new().unwrap();
    other.fails(&["pull", &name], 8, &["credentials"]);
    let authfile = home.path("auth.json");
    other.ok(&["pull", &name, "--authfile", authfile.to_str().unwrap()]);
    // Nothing of the password is anywhere in what is said.
    let output = home.run(&["push", &name, "--progress", "json"]);
    let said = [output.stdout, output.stderr].concat();
    assert!(!String::from_utf8_lossy(&said).contains("secret"));
    home.ok(&["logout", host]);
    home.fails(&["push", &name], 8, &["credentials"]);
}

#[test]
fn what_is_removed_is_gone_and_what_is_damaged_is_fetched_again() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let name = format!("{}/app:1", registry.host);
    let shared = noise(1, 3 << 20);
    let digest = home.build(&name, &[("a", &shared)]);
    home.build("big", &[("a", &noise(2, 20 << 20))]);
    home.ok(&["push", &name]);

    let before = home.json(&["df"]);
    let big =
        before["templates"].as_array().unwrap().iter().find(|t| t["names"][0] == "big:latest");
    assert!(bytes_of(big.unwrap(), "ownBytes") >= 20 << 20, "{before}");
    assert!(bytes_of(&before["usage"], "diskBytes") >= 23 << 20, "{before}");
    assert!(home.ok(&["df"]).contains("big:latest"));
    // A name less: what only it needed can go, and goes.
    home.store().untag(&"big".parse().unwrap()).unwrap();
    let planned = home.json(&["prune", "--dry-run"]);
    assert!(bytes_of(&planned, "freedBytes") >= 20 << 20, "{planned}");
    assert_eq!(
        bytes_of(&home.json(&["df"])["usage"], "diskBytes"),
        bytes_of(&before["usage"], "diskBytes")
    );
    let freed = home.json(&["prune"]);
    assert!(bytes_of(&freed, "freedBytes") >= 20 << 20, "{freed}");
    assert_eq!(bytes_of(&home.json(&["prune"]), "removed"), 0);
    // Names are kept whatever the limit.
    let limited = home.json(&["prune", "--keep-storage", "1MiB"]);
    assert!(limited["overQuotaBytes"].as_u64().is_some(), "{limited}");
    assert_eq!(home.ok(&["verify", &name]), "clean");

    // One byte of the root file system is wrong.
    let rootfs = home.json(&["inspect", &name])["template"]["rootfs"]["digest"].clone();
    let path = home.store().path(&rootfs.as_str().unwrap().parse().unwrap()).unwrap();
    damage(&path, &shared);
    let output = home.run(&["verify"]);
    failed(&output, "verify", 4, &["not in order", "--repair"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains(rootfs.as_str().unwrap()));
    let repaired = home.json(&["verify", "--repair"]);
    assert_eq!(
        (&repaired["clean"], &repaired["fetchedAgain"][0]),
        (&true.into(), &name.as_str().into())
    );
    assert_eq!(home.ok(&["verify", &digest]), "clean");
    // Where nothing can be fetched, it stays wrong, and is said.
    drop(registry);
    damage(&path, &shared);
    home.fails(&["verify", "--repair", &name], 4, &["cannot fetch", "again"]);
}

/// Changes a byte in the middle of `content`, which the file holds.
fn damage(path: &Path, content: &[u8]) {
    let bytes = fs::read(path).unwrap();
    let needle = &content[..64];
    let at = bytes.windows(64).position(|window| window == needle).unwrap() + (1 << 20);
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o444)).unwrap();
}

#[test]
fn two_templates_are_compared_file_by_file() {
    let Some(home) = Home::new() else { return };
    let files: [(&str, &[u8]); 5] = [
        ("etc/same", b"same"),
        ("etc/changed", b"before"),
        ("etc/touched", b"x"),
        ("old/one", b"12345"),
        ("old/two/three", b"123"),
    ];
    home.build("a", &files);
    let root = home.path("root-b");
    home.build(
        "b",
        &[
            ("etc/same", b"same"),
            ("etc/changed", b"after!!"),
            ("etc/touched", b"x"),
            ("new", b"1234"),
        ],
    );
    // The second build has the directory as it is now.
    fs::set_permissions(root.join("etc/touched"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("same", root.join("etc/link")).unwrap();
    let from = format!("dir:{}", root.display());
    home.ok(&[
        "build", "--from", &from, "--free", "8", "-t", "b", "--memory", "512", "--label", "k=v",
    ]);

    let document = home.json(&["diff", "a", "b"]);
    let changes: Vec<(&str, &str)> = document["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| (file["change"].as_str().unwrap(), file["path"].as_str().unwrap()))
        .collect();
    assert_eq!(
        changes,
        [
            ("changed", "/etc/changed"),
            ("added", "/etc/link"),
            ("changed", "/etc/touched"),
            ("added", "/new"),
            ("removed", "/old"),
        ]
    );
    assert_eq!(document["files"][0]["what"][0], "content");
    assert_eq!(document["files"][2]["what"][0], "mode");
    assert_eq!(
        (
            bytes_of(&document["files"][4]["before"], "bytes"),
            bytes_of(&document["files"][4]["before"], "entries")
        ),
        (8, 4)
    );
    let keys: Vec<&str> = document["config"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| change["key"].as_str().unwrap())
        .collect();
    assert!(keys.contains(&"labels.k") && keys.contains(&"machine.memoryMib"), "{keys:?}");
    let text = home.ok(&["diff", "a", "b"]);
    assert!(text.contains("D /old/  4 entries, -8 B"), "{text}");
    assert!(text.contains("M /etc/touched  mode 644 → 600"), "{text}");
    assert!(text.contains("config machine.memoryMib: 256 → 512"), "{text}");
    assert_eq!(home.run(&["diff", "a", "b", "--exit-code"]).status.code(), Some(1));
    assert_eq!(home.ok(&["diff", "a", "a", "--exit-code"]), "");
}

#[test]
fn sizes_and_history_name_layers_and_paths() {
    let Some(home) = Home::new() else { return };
    home.ok(&["build", "--from", &format!("oci:{}", home.programs.image.display()), "-t", "image"]);
    let history = home.json(&["history", "image"]);
    let layers = history["layers"].as_array().unwrap();
    let sizes = home.json(&["inspect", "--size", "image", "--depth", "1", "--top", "5"]);
    let costs = sizes["layers"].as_array().unwrap();
    assert_eq!(layers.len(), costs.len());
    assert_eq!(layers[0]["diffId"], costs[costs.len() - 1]["diffId"], "history is newest first");
    let live: u64 = costs.iter().map(|layer| bytes_of(&layer["cost"], "liveBytes")).sum();
    // Names of one file count once in the layers and each in the paths.
    let files = bytes_of(&sizes, "fileBytes");
    assert!(live > 0 && live <= files && files < 2 * live, "layers {live}, paths {files}");
    assert_eq!(sizes["paths"].as_array().unwrap().len(), 5);
    assert_eq!(sizes["files"].as_array().unwrap().len(), 5);
    let text = home.ok(&["inspect", "--size", "image"]);
    assert!(text.contains("LARGEST FILE") && text.contains("HIDDEN"), "{text}");
    assert!(home.ok(&["history", "image"]).contains("MADE BY"));
}

#[test]
fn snapshots_of_other_machines_are_left_out_by_name() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let name = format!("{}/app:1", registry.host);
    let digest = home.build(&name, &[("a", &noise(1, 1 << 20))]);
    let snapshot = foreign_snapshot(&home.store(), &digest.parse().unwrap());
    let pushed = home.json(&["push", "--no-verify", &name]);
    assert_eq!(pushed["snapshots"], 1);

    let other = Home::new().unwrap();
    // As on a host whose own KVM runs guests.
    let pulled = other.json(&["--host", "kvm", "pull", &name]);
    assert_eq!(pulled["snapshots"], Value::Array(Vec::new()));
    let reasons = pulled["refused"][0]["reasons"].to_string();
    assert!(reasons.contains("NobodysChips"), "{pulled}");
    let said = other.run(&["--host", "kvm", "pull", &name]);
    let stderr = String::from_utf8_lossy(&said.stderr);
    assert!(stderr.contains("NobodysChips") && stderr.contains("parbake bake"), "{stderr}");
    // A mirror takes everything; without snapshots there is less to fetch.
    let all = other.json(&["pull", "--all", &name]);
    assert_eq!(all["snapshots"][0], snapshot.to_string());
    let bare = Home::new().unwrap().json(&["pull", "--no-snapshots", &name]);
    assert_eq!(bare["snapshots"], Value::Array(Vec::new()));
    // Verifying by restoring says why it cannot.
    let output = other.run(&["--host", "kvm", "verify", "--restore", &name]);
    failed(&output, "foreign snapshot", 3, &["was not tried", "NobodysChips", "parbake bake"]);
    // As an image, for registries that take nothing else.
    let dressed = format!("{}/dressed:1", registry.host);
    home.ok(&["push", &name, "--to", &dressed, "--compat", "image", "--no-snapshots"]);
    assert_eq!(Home::new().unwrap().ok(&["pull", &dressed]), digest);
}

#[test]
fn signatures_are_demanded_and_found() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let file = |name: &str| home.path(name).display().to_string();
    let (ours, ours_pub) = (file("ours.pem"), file("ours.pub"));
    let (theirs, theirs_pub) = (file("theirs.pem"), file("theirs.pub"));
    assert_eq!(home.ok(&["keygen", "-o", &ours]), ours_pub);
    home.ok(&["keygen", "--kind", "ed25519", "-o", &theirs]);
    home.fails(&["keygen", "-o", &ours], 1, &["ours.pub"]);
    let mode = fs::metadata(home.path("ours.pem")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let status =
        b"Package: tool\nStatus: install ok installed\nVersion: 1.2-3\nArchitecture: amd64\n";
    let signed = format!("{}/team/signed:1", registry.host);
    let digest = home.build(&signed, &[("var/lib/dpkg/status", status), ("a", &noise(1, 1 << 20))]);
    let plain = format!("{}/team/plain:1", registry.host);
    home.ok(&["tag", &signed, &plain]);
    home.ok(&["push", &plain]);
    home.fails(&["push", &signed, "--sign", &ours_pub], 1, &["public half"]);
    let pushed = home.json(&["push", &signed, "--sign", &ours]);
    assert_eq!(pushed["attached"].as_array().unwrap().len(), 4, "{pushed}");
    // The same again: nothing new is said.
    let again = home.json(&["push", &signed, "--sign", &ours]);
    assert_eq!((&again["attached"], bytes_of(&again, "sentBytes")), (&pushed["attached"], 0));

    let verified = home.json(&["verify", "--signature", &signed, "--verify-key", &ours_pub]);
    let mut kinds: Vec<&str> = verified["valid"]
        .as_array()
        .unwrap()
        .iter()
        .map(|valid| valid["predicateType"].as_str().unwrap())
        .collect();
    kinds.sort_unstable();
    assert_eq!(
        kinds,
        [
            "https://cyclonedx.org/bom",
            "https://sigstore.dev/cosign/sign/v1",
            "https://slsa.dev/provenance/v1",
            "https://spdx.dev/Document"
        ]
    );
    assert_eq!(verified["digest"], pushed["digest"]);
    let words = ["refused", "no signature", "theirs.pub", "another key"];
    home.fails(&["verify", "--signature", &signed, "--verify-key", &theirs_pub], 4, &words);
    home.fails(
        &["verify", "--signature", &plain, "--verify-key", &ours_pub],
        4,
        &["nothing that is"],
    );
    home.fails(&["verify", "--signature", &signed], 2, &["--verify-key"]);

    let other = Home::new().unwrap();
    other.fails(&["pull", &signed, "--verify-key", &theirs_pub], 4, &words);
    other.fails(&["pull", "--lazy", &plain, "--verify-key", &ours_pub], 4, &["no signature"]);
    // Nothing was taken in.
    assert_eq!(other.ok(&["--format", "json", "ls"]), "[]");
    let pulled =
        other.ok(&["pull", &signed, "--verify-key", &theirs_pub, "--verify-key", &ours_pub]);
    assert_eq!(pulled, digest);

    // The policy says so without being asked, and names its rule and file.
    let policy = file("policy.toml");
    let rule =
        "version = 1\n[[rule]]\nmatch = '*/team/*'\nrequire = 'signature'\nkeys = ['ours.pub']\n";
    fs::write(&policy, rule).unwrap();
    let third = Home::new().unwrap();
    let words = ["refused by rule 1", "policy.toml", "ours.pub"];
    third.fails(&["pull", &plain, "--policy", &policy], 4, &words);
    let output = third.command(&["pull", &plain]).env("PARBAKE_POLICY", &policy).output().unwrap();
    failed(&output, "PARBAKE_POLICY", 4, &words);
    let config = third.path("config");
    fs::create_dir_all(config.join("parbake")).unwrap();
    fs::copy(&policy, config.join("parbake/policy.toml")).unwrap();
    let pull = |name: &str| {
        third.command(&["pull", name]).env("XDG_CONFIG_HOME", &config).output().unwrap()
    };
    // Its key is not beside it: nothing is taken in by a policy that is not whole.
    failed(&pull(&signed), "no key", 1, &["cannot use the policy", "ours.pub"]);
    fs::copy(&ours_pub, config.join("parbake/ours.pub")).unwrap();
    failed(&pull(&plain), "policy of the user", 4, &words);
    succeeded(&pull(&signed), "signed");
    // In files, too.
    let (with, without) = (file("with.tar"), file("without.tar"));
    home.ok(&["export", &signed, "-o", &with, "--sign", &ours]);
    home.ok(&["export", &signed, "-o", &without, "--attest"]);
    let fourth = Home::new().unwrap();
    fourth.fails(&["import", &without, "--policy", &policy], 4, &words);
    assert_eq!(fourth.ok(&["import", &with, "--policy", &policy]), digest);
    fourth.fails(&["import", &with, "--verify-key", &theirs_pub], 4, &["another key"]);
}

/// What cosign attaches for somebody who has logged in, checked by the program.
#[test]
fn an_identity_is_demanded_and_found() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let file = |name: &str| home.path(name).display().to_string();
    let name = format!("{}/team/app:1", registry.host);
    let digest = home.build(&name, &[("a", &noise(1, 1 << 20))]);
    home.ok(&["keygen", "-o", &file("ours.pem")]);
    home.ok(&["push", &name, "--sign", &file("ours.pem")]);
    let (ours, root) = (instance::Instance::new(), file("root.json"));
    fs::write(&root, ours.root().to_string()).unwrap();
    let by = |identity| {
        let issuer = ["--certificate-oidc-issuer", instance::ISSUER, "--trusted-root", &root];
        [&["--certificate-identity", identity][..], &issuer].concat()
    };
    let verify = |identity| [&["verify", "--signature", &name][..], &by(identity)].concat();
    home.fails(&verify("a@team.example"), 4, &["no signature by a@team.example", "another key"]);

    let options = RegistryOptions::default();
    let repository = Repository::open(&options, &registry.host, "team/app", Access::Push).unwrap();
    let subject = repository.manifest("1").unwrap().descriptor;
    let said = instance::statement(&subject.digest);
    let names = instance::email("a@team.example");
    let bundle = ours.sign(&said, &names, instance::CODE_SIGNING, instance::NOW);
    let attachment = Attachment {
        artifact_type: BUNDLE_TYPE.to_owned(),
        bytes: bundle.to_string().into_bytes(),
        annotations: [].into(),
    };
    repository.attach(&subject, &[attachment]).unwrap();

    let verified = home.json(&verify("a@team.example"));
    assert_eq!(verified["digest"], subject.digest.to_string());
    assert_eq!(verified["valid"][0]["identity"], "a@team.example", "{verified}");
    assert_eq!(verified["valid"][0]["issuer"], instance::ISSUER, "{verified}");
    assert!(home.ok(&verify("a@team.example")).contains("signature by a@team.example"));
    let words = ["refused by", "b@team.example", "signed by a@team.example"];
    home.fails(&verify("b@team.example"), 4, &words);
    let away = Home::new().unwrap();
    away.fails(&[&["pull", &name][..], &by("b@team.example")].concat(), 4, &words);
    assert_eq!(away.ok(&["--format", "json", "ls"]), "[]");
    assert_eq!(away.ok(&[&["pull", &name][..], &by("a@team.example")].concat()), digest);

    // All three belong together, and the root must be one.
    home.fails(&verify("a@team.example")[..5], 2, &["--trusted-root"]);
    fs::write(&root, "{}").unwrap();
    home.fails(&verify("a@team.example"), 1, &["root.json", "trusted_root.json"]);
}

#[test]
fn an_sbom_lists_what_is_installed() {
    let Some(home) = Home::new() else { return };
    home.ok(&["build", "--from", &format!("oci:{}", home.programs.image.display()), "-t", "image"]);
    let urls = home.ok(&["sbom", "image"]);
    for package in ["pkg:deb/debian/libc6@", "pkg:deb/debian/dpkg@", "distro=debian-12"] {
        assert!(urls.contains(package), "{package} is not in {urls}");
    }
    let spdx: Value =
        serde_json::from_str(&home.ok(&["sbom", "image", "--format", "spdx"])).unwrap();
    assert_eq!(spdx["spdxVersion"], "SPDX-2.3");
    let packages = spdx["packages"].as_array().unwrap();
    // The template, the kernel, and every package.
    assert_eq!(packages.len(), urls.lines().count() + 2);
    let first = home.ok(&["sbom", "image", "--format", "cyclonedx"]);
    assert_eq!(first, home.ok(&["sbom", "image", "--format", "cyclonedx"]));
    let cyclonedx: Value = serde_json::from_str(&first).unwrap();
    assert_eq!(cyclonedx["specVersion"], "1.6");
    let references: std::collections::BTreeSet<&str> = cyclonedx["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|component| component["bom-ref"].as_str().unwrap())
        .collect();
    assert_eq!(references.len(), packages.len() - 1);
    // What dpkg itself would say.
    let root = home.path("root-small");
    fs::create_dir_all(&root).unwrap();
    home.build(
        "languages",
        &[
            ("app/node_modules/@a/b/package.json", br#"{"name":"@a/b","version":"2.0.0"}"#),
            (
                "usr/lib/python3/dist-packages/Foo-1.0.dist-info/METADATA",
                b"Name: Foo\nVersion: 1.0\n",
            ),
            ("lib/apk/db/installed", b"P:musl\nV:1.2-r1\nA:x86_64\n"),
            ("var/lib/rpm/rpmdb.sqlite", b"SQLite format 3"),
        ],
    );
    let output = home.run(&["sbom", "languages"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("rpm databases are not read"), "{said}");
    let urls = succeeded(&output, "sbom");
    for url in
        ["pkg:npm/%40a/b@2.0.0", "pkg:pypi/foo@1.0", "pkg:apk/alpine/musl@1.2-r1?arch=x86_64"]
    {
        assert!(urls.lines().any(|line| line == url), "{url} is not in {urls}");
    }
    home.fails(&["--format", "spdx", "ls"], 2, &["parbake sbom"]);
}

/// Passes bytes on to `to`, slowly, until dropped with the process.
fn slow_line(to: &str, bytes_per_second: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let to = to.to_owned();
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(&to) else { continue };
            for (mut from, mut to) in
                [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)]
            {
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 64 << 10];
                    while let Ok(count @ 1..) = std::io::Read::read(&mut from, &mut buffer) {
                        if to.write_all(&buffer[..count]).is_err() {
                            break;
                        }
                        let time = count as f64 / bytes_per_second as f64;
                        std::thread::sleep(Duration::from_secs_f64(time));
                    }
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    host
}

#[test]
fn an_interrupted_transfer_ends_soon_and_goes_on_later() {
    let Some(home) = Home::new() else { return };
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let slow = slow_line(&registry.host, 4 << 20);
    let name = format!("{slow}/app:1");
    let digest = home.build(&name, &[("a", &noise(1, 24 << 20)), ("b", &noise(2, 24 << 20))]);
    let interrupted = |home: &Home, arguments: &[&str], signal: &str, after: Duration| {
        let mut child =
            home.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(after);
        assert!(child.try_wait().unwrap().is_none(), "{arguments:?} was done before");
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(sent.unwrap().success());
        let began = std::time::Instant::now();
        let output = child.wait_with_output().unwrap();
        failed(&output, signal, 130, &["interrupted", "goes on where"]);
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        let _ = child;
    };
    interrupted(&home, &["push", &name], "INT", Duration::from_secs(4));
    let fast = format!("{}/app:1", registry.host);
    home.ok(&["push", &name, "--to", &fast]);
    let away = Home::new().unwrap();
    for (signal, lazily) in [("TERM", false), ("INT", false), ("TERM", true)] {
        let arguments = if lazily { vec!["pull", &name, "--lazy"] } else { vec!["pull", &name] };
        interrupted(&away, &arguments, signal, Duration::from_secs(3));
        assert_eq!(away.ok(&["verify"]), "clean");
    }
    assert_eq!(away.ok(&["pull", &fast]), digest);
    assert_eq!(away.ok(&["verify"]), "clean");
    away.ok(&["prune"]);
}

/// Ends a command with a signal 20 ms after its start, then later and later, until one is through before.
/// `check` looks at what each leaves. Returns how many were interrupted.
fn ended_ever_later(
    home: &Home,
    arguments: &[&str],
    mut check: impl FnMut(),
) -> (String, usize, Duration) {
    let (mut interrupted, mut longest) = (0, Duration::ZERO);
    let mut wait = Duration::from_millis(20);
    for turn in 1.. {
        let mut child =
            home.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(wait);
        wait = wait.mul_f64(1.3);
        let signal = if turn % 2 == 0 { "INT" } else { "TERM" };
        if child.try_wait().unwrap().is_none() {
            let _ = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        }
        let began = std::time::Instant::now();
        let output = child.wait_with_output().unwrap();
        match output.status.code() {
            Some(0) => return (succeeded(&output, "through"), interrupted, longest),
            // Not yet watching for it, or orderly.
            None => {}
            Some(_) => {
                failed(&output, signal, 130, &["interrupted"]);
                longest = longest.max(began.elapsed());
                interrupted += 1;
            }
        }
        check();
    }
    unreachable!("each turn is longer than the one before")
}

#[test]
fn an_interrupted_export_or_import_ends_at_once_and_leaves_nothing_partial() {
    let Some(home) = Home::new() else { return };
    let digest = home.build("app:1", &[("a", &noise(1, 40 << 20)), ("b", &noise(2, 40 << 20))]);
    let out = home.path("out");
    fs::create_dir(&out).unwrap();
    for name in ["app.tar", "app/"] {
        // Not through `Path`, which would lose the slash.
        let to = format!("{}/{name}", out.display());
        let (_, interrupted, longest) =
            ended_ever_later(&home, &["export", "app:1", "-o", &to], || {
                let left: Vec<_> =
                    fs::read_dir(&out).unwrap().flatten().map(|e| e.path()).collect();
                assert!(left.is_empty(), "{left:?}");
            });
        println!("export: {interrupted} interrupted, {longest:?} at most");
        assert!(interrupted > 0 && longest < Duration::from_secs(5), "{interrupted} {longest:?}");
        fs::rename(&to, home.path(name.trim_end_matches('/'))).unwrap();
        home.ok(&["prune"]);
        assert_eq!(fs::read_dir(home.path("store/stage")).unwrap().count(), 0);
    }
    let away = Home::new().unwrap();
    for from in ["app.tar", "app"] {
        let from = home.path(from).display().to_string();
        let arguments = ["import", &from];
        let (got, interrupted, longest) = ended_ever_later(&away, &arguments, || {
            assert_eq!(away.ok(&["verify"]), "clean");
        });
        println!("import: {interrupted} interrupted, {longest:?} at most");
        assert!(interrupted > 0 && longest < Duration::from_secs(5), "{interrupted} {longest:?}");
        assert_eq!(got, digest);
        assert_eq!(away.ok(&["verify"]), "clean");
        away.ok(&["rm", "app:1"]);
        away.ok(&["prune"]);
    }
}

#[test]
fn proxies_are_used_and_left_aside() {
    let Some(home) = Home::new() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = format!("http://{}", listener.local_addr().unwrap());
    let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = std::sync::Arc::clone(&asked);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut line = String::new();
            let _ = std::io::BufRead::read_line(&mut std::io::BufReader::new(&stream), &mut line);
            log.lock().unwrap().push(line.trim().to_owned());
            let _ = stream.write_all(b"HTTP/1.1 403 no\r\ncontent-length: 0\r\n\r\n");
        }
    });
    let pull = |name: &str, no_proxy: &str| {
        let mut command = home.command(&["pull", name]);
        command.env("HTTPS_PROXY", &proxy).env("NO_PROXY", no_proxy);
        for other in
            ["https_proxy", "no_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"]
        {
            command.env_remove(other);
        }
        failed(&command.output().unwrap(), "pull", 8, &["cannot reach"]);
        std::mem::take(&mut *asked.lock().unwrap())
    };
    let seen = pull("registry.invalid/app:1", "");
    assert!(
        !seen.is_empty() && seen.iter().all(|line| line.contains("registry.invalid:443")),
        "{seen:?}"
    );
    assert_eq!(pull("registry.invalid/app:1", "registry.invalid"), Vec::<String>::new());
    // Loopback never goes through a proxy.
    assert_eq!(pull("127.0.0.1:1/app:1", ""), Vec::<String>::new());
}

/// The bake gate, in the lab where KVM cannot run stock guests.
#[test]
fn a_baked_template_is_proved_before_it_is_published() {
    let Some(home) = Home::new() else { return };
    let doctor: Value =
        serde_json::from_slice(&home.run(&["doctor", "--format", "json"]).stdout).unwrap();
    if doctor["able"] != true {
        println!("skipped: this host can run no guests: {doctor}");
        return;
    }
    let Some(registry) = Registry::start(&home.path("registry"), false) else { return };
    let _lab = Lab(&home);
    let name = format!("{}/team/debian:12", registry.host);
    home.ok(&["build", "--from", &format!("oci:{}", home.programs.image.display()), "-t", &name]);
    home.ok(&["bake", &name]);
    let text = home.ok(&["verify", "--restore", &name]);
    for check in ["ready", "random", "clock", "hostname", "machine-id", "filesystem"] {
        let line = text.lines().find(|line| line.starts_with(check));
        assert!(line.is_some_and(|line| line.contains("ok")), "{check}: {text}");
    }
    // One that is ready when it is baked and not when it is restored is not published. (A machine gets
    // its own host name when it is restored.)
    let never = format!("{}/team/never:1", registry.host);
    fs::create_dir(home.path("never")).unwrap();
    fs::write(
        home.path("never/parbake.yaml"),
        format!(
            "apiVersion: parbake.dev/v1\nbase: {{template: '{name}'}}\nready:\n  checks:\n    - exec: \
             [/bin/sh, -c, 'read name </proc/sys/kernel/hostname; echo I am $name; test $name = parbake']\n  \
             timeout: 2s\n"
        ),
    )
    .unwrap();
    let recipe = home.path("never/parbake.yaml").display().to_string();
    home.ok(&["build", "-f", &recipe, "-t", &never]);
    home.ok(&["bake", &never]);
    let words = ["did not pass", "--no-verify"];
    let refused = home.run(&["push", &never]);
    failed(&refused, "push of one that is not ready", 4, &words);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(stderr.contains("ready-check") && stderr.contains("I am "), "{stderr}");
    home.fails(&["pull", &never], 3, &["never:1"]);
    home.ok(&["push", "--no-verify", &never]);
    // Something that is in the template for certain, and something that is not.
    let secret = home.path("secret");
    fs::write(&secret, "root:x:0:0:root:/root\n").unwrap();
    let file = secret.to_str().unwrap();
    home.fails(
        &["verify", "--restore", &name, "--secret", file],
        4,
        &["secrets", "root filesystem"],
    );

    let pushed = home.run(&["--format", "json", "push", &name]);
    let stderr = String::from_utf8_lossy(&pushed.stderr).into_owned();
    let document: Value = serde_json::from_str(&succeeded(&pushed, "push")).unwrap();
    assert_eq!(document["snapshots"], 1);
    assert!(stderr.contains("checks passed"), "the push did not restore: {stderr}");
    // What was pulled runs without a bake. Into the same store, as every lab has a clock of its
    // own, and a snapshot does not go from one to another.
    home.ok(&["rm", &name]);
    let pulled = home.json(&["pull", &name]);
    assert!(bytes_of(&pulled, "fetchedBytes") > 10 << 20, "nothing was removed: {pulled}");
    assert_eq!(pulled["snapshots"].as_array().unwrap().len(), 1);
    let output = home.run(&["run", &name, "--", "python3", "-c", "print(6*7)"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n", "{stderr}");
    assert!(!stderr.contains("baking"), "{stderr}");

    // Before it has arrived: removed again, and run while it comes.
    let sent = bytes_of(&document, "totalBytes");
    let forget = |name: &str| {
        home.ok(&["rm", name]);
        home.ok(&["prune"]);
    };
    forget(&name);
    let timings = home.path("store/timings.json");
    let begin = ["run", "--pull", "lazy", "--timings", timings.to_str().unwrap(), &name, "--"];
    let said = home.ok(&[&begin[..], &["python3", "-c", "print(6*7)"]].concat());
    assert_eq!(said, "42");
    let lazily: Value = serde_json::from_slice(&fs::read(&timings).unwrap()).unwrap();
    assert_eq!(lazily["how"], "restored lazily", "{lazily}");
    let early = bytes_of(&lazily, "fetchedBytesAtFirstExec");
    println!("lazily: {early} of {sent} bytes before the first command");
    assert!(early * 100 <= sent * 15, "{early} of {sent}");
    // What is there is whole, and the rest can be had.
    home.ok(&["pull", &name]);
    assert_eq!(home.ok(&["verify", &name]), "clean");

    // Where memory may not be filled as it is touched, everything comes first, and that is said.
    forget(&name);
    let output =
        home.without_faults(&doctor, &["run", "--pull", "lazy", &name, "--", "echo", "whole"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(succeeded(&output, "without faults"), "whole");
    assert!(stderr.contains("userfaultfd") && stderr.contains("comes first"), "{stderr}");
    assert!(!stderr.contains("baking"), "{stderr}");
    assert_eq!(home.ok(&["verify", &name]), "clean");

    // A registry that vanishes meanwhile: an error in time, whoever needs what is missing.
    forget(&name);
    let slow = format!("{}/team/debian:12", slow_line(&registry.host, 2 << 20));
    let mut child = home
        .command(&["run", "--pull", "lazy", "--patience", "3", &slow, "--", "/bin/sh", "-c"])
        .arg("echo begun; sleep 2; cat /usr/bin/* /usr/lib/x86_64-linux-gnu/* > /dev/null")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
    assert_eq!(&line, b"begun\n");
    drop(registry);
    let since = std::time::Instant::now();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{stderr}");
    let lost = ["Input/output error", "did not arrive"];
    assert!(lost.iter().any(|lost| stderr.contains(lost)), "{stderr}");
    assert!(since.elapsed() < Duration::from_secs(90), "{:?}: {stderr}", since.elapsed());
}

/// Ends a store's lab.
struct Lab<'a>(&'a Home);

impl Drop for Lab<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&["lab", "down"]);
    }
}
