//! Dockerfiles and recipes through the real `parbake`: what a user writes, and what comes of it.
//!
//! Needs `PARBAKE_BIN` and `PARBAKE_IMAGE` as `e2e.rs` does, and root with `runc` or `crun` for
//! build steps. The part that needs a guest is skipped, with the reason, where there can be none.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use parbake_tests::programs::{Programs, failed};
use serde_json::Value;
use tempfile::TempDir;

struct World {
    programs: Programs,
    root: TempDir,
}

impl World {
    fn new() -> Option<Self> {
        let programs = Programs::find_as_root()?;
        let root = tempfile::Builder::new().prefix("parbake-e2e-build.").tempdir().unwrap();
        fs::create_dir(root.path().join("context")).unwrap();
        Some(Self { programs, root })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Writes a file of the context; `BASE` stands for the image.
    fn write(&self, name: &str, text: &str) {
        let path = self.path("context").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text.replace("BASE", &self.programs.from())).unwrap();
    }

    /// In the context's directory.
    fn command(&self) -> Command {
        let mut command = self.programs.parbake(&self.path("store"));
        command.current_dir(self.path("context"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command().args(arguments).output().unwrap()
    }

    /// Runs, demands success, returns trimmed stdout and stderr.
    fn ok(&self, arguments: &[&str]) -> (String, String) {
        let output = self.run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code();
        assert!(output.status.success(), "{arguments:?} ended with {code:?}: {stderr}");
        (String::from_utf8_lossy(&output.stdout).trim().to_owned(), stderr)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let mut all = arguments.to_vec();
        all.extend(["--format", "json"]);
        let (text, _) = self.ok(&all);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Runs, demands this exit code and every one of these words on stderr.
    fn fails(&self, arguments: &[&str], code: i32, words: &[&str]) -> String {
        failed(&self.run(arguments), &format!("{arguments:?}"), code, words)
    }

    fn rootfs(&self) -> String {
        format!("rootfs={}", self.path("out.ext4").display())
    }

    /// Asks the finished file system, without mounting it.
    fn debugfs(&self, request: &str) -> String {
        let output =
            Command::new("debugfs").args(["-R", request]).arg(self.path("out.ext4")).output();
        String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
    }

    fn templates(&self) -> usize {
        self.json(&["ls"]).as_array().unwrap().len()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.run(&["lab", "down"]);
    }
}

const APP: &str = r#"ARG IMAGE=BASE
FROM ${IMAGE} AS build
ARG VERSION=1
COPY source /src/
RUN ["/bin/sh", "-c", "mkdir /out && echo \"app $VERSION\" > /out/app && cat /src/* >> /out/app"]

FROM ${IMAGE} AS unused
RUN exit 99

FROM ${IMAGE} AS run
ENV GREETING="hello world"
LABEL from=file
WORKDIR /srv/app
COPY --from=build --chown=1001:1002 --chmod=640 /out/app bin/
RUN --mount=type=secret,id=token grep -qx 'c.*-horse' /run/secrets/token
USER 1001:1002
STOPSIGNAL SIGQUIT
ENTRYPOINT ["/bin/cat"]
CMD ["/srv/app/bin/app"]
"#;

#[test]
fn a_dockerfile_becomes_a_template() {
    let Some(world) = World::new() else { return };
    world.write("Dockerfile", APP);
    world.write("source/a.txt", "one\n");
    fs::write(world.path("token"), "correct-horse\n").unwrap();
    let secret = format!("id=token,src={}", world.path("token").display());
    let out = world.rootfs();
    let build = |more: &[&str]| {
        let mut arguments = vec!["build", ".", "--secret", &secret, "--build-arg", "VERSION=7"];
        arguments.extend(more);
        world.json(&arguments)
    };
    let first = build(&["-o", &out]);
    assert_eq!(first["steps"]["cached"], 0, "{first}");
    assert_eq!(world.debugfs("cat /srv/app/bin/app"), "app 7\none\n");
    let stat = world.debugfs("stat /srv/app/bin/app");
    assert!(stat.contains("User:  1001") && stat.contains("Group:  1002"), "{stat}");
    assert!(stat.contains("Mode:  0640"), "{stat}");
    let bytes = fs::read(world.path("out.ext4")).unwrap();

    // Again: nothing is done, and the bytes are the same.
    let again = build(&["-o", &out]);
    assert_eq!(again["steps"]["executed"], 0, "{again}");
    assert!(bytes == fs::read(world.path("out.ext4")).unwrap(), "the same steps, other bytes");
    drop(bytes);

    let template = build(&["-t", "team/app:1", "--label", "team=ml", "--memory", "300"]);
    let found = world.json(&["inspect", "team/app:1"]);
    assert_eq!(found["digest"], template["digest"]);
    let found = &found["template"];
    let process = &found["process"];
    assert_eq!(process["user"], "1001:1002");
    assert_eq!(process["workingDir"], "/srv/app");
    assert_eq!(process["entrypoint"], serde_json::json!(["/bin/cat"]));
    assert_eq!(process["cmd"], serde_json::json!(["/srv/app/bin/app"]));
    assert_eq!(process["stopSignal"], "SIGQUIT");
    let env = process["env"].as_array().unwrap();
    assert!(env.contains(&"GREETING=hello world".into()), "{env:?}");
    assert!(!env.iter().any(|entry| entry.as_str().unwrap().starts_with("VERSION")), "{env:?}");
    assert_eq!(
        (&found["labels"]["from"], &found["labels"]["team"]),
        (&"file".into(), &"ml".into())
    );
    assert_eq!(found["machine"]["memoryMib"], 300);
    // Nothing of the machine it was built on.
    assert_eq!(found["source"]["reference"], "Dockerfile");

    // Wholly cached, even the file system: fast. The limit is for a machine under load; what is
    // measured on a quiet one is in the benchmarks.
    let begun = Instant::now();
    let cached = build(&["-t", "team/app:1", "--label", "team=ml", "--memory", "300"]);
    let took = begun.elapsed();
    println!("a wholly cached build took {took:?}");
    assert_eq!(cached["digest"], template["digest"]);
    assert!(took < Duration::from_secs(2), "{took:?}");

    // A change reruns what depends on it, and says what it was.
    world.write("source/a.txt", "two\n");
    let (_, why) = world.ok(&[
        "build",
        ".",
        "--secret",
        &secret,
        "--build-arg",
        "VERSION=7",
        "-o",
        &out,
        "--explain",
    ]);
    assert!(why.contains("file a.txt changed") || why.contains("a.txt"), "{why}");
    assert!(why.contains("WORKDIR /srv/app: cached"), "{why}");
    assert_eq!(world.debugfs("cat /srv/app/bin/app"), "app 7\ntwo\n");

    // Another stage, another file, another directory.
    world
        .write("other/one.Dockerfile", "FROM scratch AS a\nCOPY a.txt /a\nFROM a\nCOPY a.txt /b\n");
    world.ok(&["build", "-f", "other/one.Dockerfile", "--target", "a", "source", "-o", &out]);
    assert_eq!(world.debugfs("cat /a"), "two\n");
    assert_eq!(world.debugfs("cat /b"), "");
}

#[test]
fn what_cannot_be_built_says_where_and_why() {
    let Some(world) = World::new() else { return };
    let out = world.rootfs();
    let build = |text: &str, more: &[&str], code: i32, words: &[&str]| {
        world.write("Dockerfile", text);
        let mut arguments = vec!["build", ".", "-o", &out];
        arguments.extend(more);
        let said = world.fails(&arguments, code, words);
        assert!(!world.path("out.ext4").exists(), "a failed build left its file");
        said
    };
    let failing = "FROM BASE\n\nRUN echo first\nRUN echo out of cheese >&2; exit 3\n";
    build(failing, &[], 5, &["Dockerfile:4", "out of cheese", "exit code 3"]);
    let said = build(failing, &["--format", "json"], 5, &[]);
    let document = said.lines().find(|line| line.starts_with("{\"error\"")).unwrap();
    let document: Value = serde_json::from_str(document).unwrap();
    assert_eq!(document["error"]["stepExitCode"], 3, "{document}");
    assert_eq!(document["error"]["kind"], "stepFailed");
    // The step before it was kept; the failing one was not.
    let said = build(failing, &[], 5, &[]);
    assert!(said.contains("RUN echo first: cached"), "{said}");

    build("FROM BASE\nCOPY nothing /\n", &[], 5, &["Dockerfile:2", "nothing"]);
    build("FROM BASE AS one\n", &["--target", "tow"], 1, &["tow", "one"]);
    build("FROM BASE\nRUM x\n", &[], 1, &["Dockerfile:2", "RUM", "RUN"]);
    build("FROM oci:/no/such\n", &[], 1, &["Dockerfile:1", "/no/such"]);
    build("FROM BASE\nCOPY --from=later /a /a\n", &[], 1, &["Dockerfile:2", "later"]);
    let wanting =
        "FROM BASE\nRUN --mount=type=secret,id=token,required=true cat /run/secrets/token\n";
    build(wanting, &[], 1, &["Dockerfile:2", "token", "--secret"]);

    fs::write(world.path("token"), "correct-horse-battery").unwrap();
    let secret = format!("id=token,src={}", world.path("token").display());
    for leak in ["cat /run/secrets/token > /leak", "base64 /run/secrets/token > /leak"] {
        let text = format!("FROM BASE\nRUN --mount=type=secret,id=token {leak}\n");
        let said = build(&text, &["--secret", &secret], 4, &["token", "/leak"]);
        assert!(!said.contains("correct-horse"), "the secret is in the message: {said}");
    }
    let netrc = "FROM BASE\nRUN echo machine x login y password z > /root/.netrc\n";
    build(netrc, &["--strict"], 4, &["/root/.netrc"]);

    // What to build from is said exactly once.
    world.fails(&["build", ".", "--from", "oci:x", "-t", "x"], 2, &["--from"]);
    world.fails(&["build", "-t", "x"], 2, &[]);
    world.fails(&["build", "Dockerfile", "-t", "x"], 2, &["-f Dockerfile"]);
    world.fails(&["build", "no-such", "-t", "x"], 3, &["no-such"]);
    world.fails(&["build", "../context/..", "-t", "x"], 1, &["parbake.yaml", "-f"]);
    assert_eq!(world.templates(), 0);
}

#[test]
fn a_template_is_the_base_of_others() {
    let Some(world) = World::new() else { return };
    let first = "FROM BASE\nENV A=1\nRUN mkdir /srv/d && echo x >/srv/d/f && ln /srv/d/f /srv/g\n\
                 USER nobody\nCMD [\"/bin/true\"]\n";
    world.write("Dockerfile", first);
    world.ok(&["build", ".", "-t", "first"]);
    // The same files and the same process, by way of a file system.
    world.ok(&["build", "--from", "template:first", "-t", "copy"]);
    let difference = world.json(&["diff", "first", "copy"]);
    assert_eq!(difference["files"].as_array().map(Vec::len), Some(0), "{}", difference["files"]);
    let of = |name: &str| world.json(&["inspect", name])["template"]["process"].clone();
    assert_eq!(of("first"), of("copy"));
    let second = "FROM template:first AS one\nRUN test $A = 1 && test $(id -un) = nobody\nUSER root\n\
                  RUN test /srv/d/f -ef /srv/g && rm -r /srv/d\n\
                  FROM template:copy\nCOPY --from=one /srv /two\n";
    world.write("Dockerfile", second);
    world.ok(&["build", ".", "-t", "second"]);
    let again = world.json(&["build", ".", "-t", "second"]);
    assert_eq!(again["steps"]["executed"], 0, "{again}");
    world.write(
        "parbake.yaml",
        "apiVersion: parbake.dev/v1\nbase: {template: first}\nbuild: {steps: [run: test -e /srv/d/f]}\n",
    );
    world.ok(&[
        "build",
        "-f",
        &world.path("context/parbake.yaml").display().to_string(),
        "-t",
        "third",
    ]);
    world.fails(&["build", "--from", "template:none", "-t", "x"], 3, &["none"]);
    world.write("Dockerfile", "FROM scratch\nCOPY --from=template:none / /\n");
    world.fails(&["build", "-f", "Dockerfile", ".", "-t", "x"], 1, &["Dockerfile:2", "none"]);
}

const RECIPE: &str = "apiVersion: parbake.dev/v1
metadata: {name: served}
base: {image: 'BASE'}
files:
  - {dest: /srv/index.html, content: served}
env: {GREETING: hi}
build:
  steps:
    - run: echo built > /srv/built
process:
  cmd: [/usr/bin/python3, -c, 'SERVER']
  workingDir: /srv
machine: {memoryMib: 256}
disk: {freeMib: 64}
ready:
  checks:
    - http: {get: 'http://127.0.0.1:8000/'}
    - tcp: 8000
    - file: /srv/built
    - process: python3
    - exec: [/bin/grep, -q, hi, /proc/self/environ]
  timeout: 20s
warmup:
  steps:
    - exec: echo warm > /srv/warm
";

/// An HTTP server that needs only what a minimal Python has.
const SERVER: &str = "import socket\n\
    s = socket.socket()\n\
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
    s.bind((\"127.0.0.1\", 8000))\n\
    s.listen()\n\
    while True:\n\
    \x20   c = s.accept()[0]\n\
    \x20   c.recv(4096)\n\
    \x20   c.sendall(b\"HTTP/1.0 200 OK\\r\\n\\r\\nhello\")\n\
    \x20   c.close()\n";

fn recipe() -> String {
    // In single quotes, YAML folds lines: so the program is written in double ones.
    let quoted = serde_json::to_string(SERVER).unwrap();
    RECIPE.replace("'SERVER'", &quoted)
}

#[test]
fn a_recipe_is_checked_shown_and_locked() {
    let Some(world) = World::new() else { return };
    world.ok(&["recipe", "init", "python"]);
    world.fails(&["recipe", "init"], 1, &["parbake.yaml", "there already"]);
    world.fails(&["recipe", "init", "cobol", "-C", "x"], 3, &["--list"]);
    assert!(world.ok(&["recipe", "init", "--list"]).0.contains("python"));
    world.ok(&["recipe", "check"]);
    let schema: Value = serde_json::from_str(&world.ok(&["recipe", "schema"]).0).unwrap();
    assert!(schema["properties"]["warmup"].is_object());

    world.write("parbake.yaml", &recipe());
    world.ok(&["recipe", "check"]);
    let (resolved, _) = world.ok(&["recipe", "show", "--resolved"]);
    assert!(resolved.contains("settle: 500ms"), "{resolved}");
    world.fails(&["build", ".", "--locked", "-o", &world.rootfs()], 3, &["recipe lock"]);
    world.ok(&["recipe", "lock"]);
    let lock: Value =
        serde_json::from_slice(&fs::read(world.path("context/parbake.lock")).unwrap()).unwrap();
    assert!(lock["kernel"]["version"].is_string(), "{lock}");
    // The lock file does not lock itself.
    assert!(world.ok(&["recipe", "outdated"]).0.contains("everything is as"));
    // What was installed is known after a build only.
    world.ok(&["build", ".", "--lock", "-t", "first"]);
    let path = world.path("context/parbake.lock");
    let lock = fs::read_to_string(&path).unwrap();
    let read: Value = serde_json::from_str(&lock).unwrap();
    let version = read["packages"]["dpkg"]["dpkg"].as_str().unwrap_or_else(|| panic!("{lock}"));
    world.ok(&["build", ".", "--locked", "-t", "served"]);
    fs::write(&path, lock.replace(version, "0.1")).unwrap();
    fs::write(world.rootfs().strip_prefix("rootfs=").unwrap(), "mine").unwrap();
    let moved = format!("dpkg dpkg {version} now, locked 0.1");
    world.fails(&["build", ".", "--locked", "-t", "drifted"], 4, &["parbake.lock", &moved]);
    world.fails(&["inspect", "drifted"], 3, &["drifted"]);
    world.fails(&["build", ".", "--locked", "-o", &world.rootfs()], 4, &[&moved]);
    assert_eq!(fs::read(world.rootfs().strip_prefix("rootfs=").unwrap()).unwrap(), b"mine");
    fs::write(&path, lock).unwrap();
    let found = world.json(&["inspect", "served"]);
    let bake = &found["template"]["bake"];
    assert_eq!(bake["startProcess"], true, "{bake}");
    assert_eq!(bake["ready"]["checks"][1]["tcp"], 8000);
    assert_eq!(found["template"]["machine"]["memoryMib"], 256);

    world.write("parbake.yaml", &recipe().replace("GREETING: hi", "GREETING: ho"));
    world.fails(&["build", ".", "--locked", "-o", &world.rootfs()], 4, &["parbake.lock", "recipe"]);
    assert!(world.ok(&["recipe", "outdated"]).0.contains("recipe"));
    let network = |rule: &str| format!("{}network: {{egress: {{allow: ['{rule}']}}}}\n", recipe());
    world.write("parbake.yaml", &network("packages.example"));
    world.fails(&["build", ".", "-t", "x"], 1, &["packages.example", "network.egress.allow"]);
    let policy = network("packages.example:443");
    world.write("parbake.yaml", &format!("{policy}snapshot: {{enabled: false}}\n"));
    world.ok(&["build", ".", "-t", "reaching"]);
    world.fails(&["bake", "reaching"], 4, &["snapshot.enabled"]);
    let found = world.json(&["inspect", "reaching"]);
    assert_eq!(found["template"]["egress"], serde_json::json!(["packages.example:443"]));
    world.write("parbake.yaml", &recipe().replace("freeMib: 64", "freeMib: much"));
    world.fails(&["recipe", "check"], 1, &["parbake.yaml:"]);
    world.write("parbake.yaml", &format!("{}surprise: 1\n", recipe()));
    world.fails(&["build", ".", "-t", "x"], 1, &["parbake.yaml:", "surprise"]);
}

/// Process, checks and warm-up in a real guest; then what happens when they fail.
#[test]
fn a_recipe_is_baked_ready() {
    let Some(world) = World::new() else { return };
    let doctor = world.command().args(["doctor", "--format", "json"]).output().unwrap();
    let doctor: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    if doctor["able"] != true {
        println!("skipped: this host can run no guests: {doctor}");
        return;
    }
    world.write("parbake.yaml", &recipe());
    world.ok(&["build", ".", "-t", "served", "--bake"]);
    let snapshots = world.json(&["inspect", "served"])["snapshots"].as_array().unwrap().len();
    assert_eq!(snapshots, 1);
    // The server and the warm-up's file are in every sandbox from its first moment.
    let client = "import socket; s = socket.create_connection((\"127.0.0.1\", 8000)); \
        s.sendall(b\"GET / HTTP/1.0\\r\\n\\r\\n\"); print(s.recv(99)); print(open(\"/srv/warm\").read())";
    let (said, _) = world.ok(&["-q", "run", "served", "--", "python3", "-c", client]);
    assert!(said.contains("200 OK") && said.contains("warm"), "{said}");

    // A check that never holds: what it said, exit code 6, and no name.
    let never = recipe().replace("file: /srv/built", "file: /srv/never").replace("20s", "2s");
    world.write("parbake.yaml", &never);
    world.fails(&["build", ".", "-t", "never", "--bake"], 6, &["/srv/never", "No such file"]);
    world.fails(&["inspect", "never"], 3, &[]);
    // A warm-up step that fails, with its output.
    let cold = recipe().replace("echo warm > /srv/warm", "echo no heating >&2; exit 4");
    world.write("parbake.yaml", &cold);
    world.fails(
        &["build", ".", "-t", "cold", "--bake"],
        6,
        &["warm-up", "no heating", "exit code 4"],
    );
    // A start command that ends.
    let brief = recipe().replace("import socket", "raise SystemExit(\\\"bye bye\\\")");
    world.write("parbake.yaml", &brief);
    world.fails(&["build", ".", "-t", "brief", "--bake"], 6, &["start command", "bye bye"]);
    assert_eq!(world.templates(), 1);

    // A warm-up that keeps a secret in memory.
    fs::write(world.path("token"), "correct-horse-battery").unwrap();
    let secret = format!("id=token,src={}", world.path("token").display());
    let leak = recipe()
        .replace("build:\n", "build:\n  secrets: [{id: token}]\n")
        .replace(
            "- run: echo built > /srv/built",
            "- {run: echo built > /srv/built, secrets: [token]}",
        )
        .replace("echo warm > /srv/warm", "printf 'correct-%s' horse-battery > /dev/shm/x");
    world.write("parbake.yaml", &leak);
    world.fails(
        &["build", ".", "-t", "leak", "--bake", "--secret", &secret],
        4,
        &["token", "memory"],
    );
    world.fails(&["inspect", "leak"], 3, &[]);
}

#[test]
fn other_engines_build_the_same_file() {
    let Some(world) = World::new() else { return };
    world.write("Dockerfile", "FROM BASE\nCOPY a.txt /a.txt\nCMD [\"/bin/cat\", \"/a.txt\"]\n");
    world.write("a.txt", "one\n");
    if !on_path("buildah") {
        println!("skipped: buildah is not installed");
        world.fails(
            &["build", ".", "-o", &world.rootfs(), "--builder", "buildah"],
            7,
            &["buildah"],
        );
        return;
    }
    world.ok(&["build", ".", "-o", &world.rootfs(), "--builder", "buildah"]);
    assert_eq!(world.debugfs("cat /a.txt"), "one\n");
    world.write("parbake.yaml", &recipe());
    world.fails(
        &["build", "-f", "parbake.yaml", "-t", "x", "--builder", "buildah"],
        1,
        &["recipe"],
    );
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .any(|directory: PathBuf| Path::new(&directory).join(program).is_file())
}
