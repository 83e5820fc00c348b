//! Build steps in machines of their own: the same result as in the sandbox, and what happens when a
//! step fails, fills its disk or is interrupted.
//!
//! Needs what `e2e_build.rs` needs, and a place where guests run (the lab where KVM cannot).
#![forbid(unsafe_code)]

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
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
        let root = tempfile::Builder::new().prefix("parbake-e2e-microvm.").tempdir().unwrap();
        fs::create_dir(root.path().join("context")).unwrap();
        let world = Self { programs, root };
        world.programs.can_run_guests(&world.path("machines")).then_some(world)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn dockerfile(&self, text: &str) {
        let text = text.replace("BASE", &self.programs.from());
        fs::write(self.path("context/Dockerfile"), text).unwrap();
    }

    /// With a store of its own, so that no step is found in the other's cache.
    fn command(&self, store: &str) -> Command {
        let mut command = self.programs.parbake(&self.path(store));
        command.current_dir(self.path("context"));
        command.env("SOURCE_DATE_EPOCH", "1000000000");
        command
    }

    fn build(&self, builder: &str, more: &[&str]) -> Output {
        let store = if builder == "microvm" { "machines" } else { "shared" };
        let mut command = self.command(store);
        command.args(["build", ".", "--builder", builder]).args(more);
        command.output().unwrap()
    }

    /// Builds, demands success, returns the result and stderr.
    fn built(&self, builder: &str, more: &[&str]) -> (Value, String) {
        let mut all = vec!["--format", "json"];
        all.extend(more);
        let output = self.build(builder, &all);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{builder}: {stderr}");
        (serde_json::from_slice(&output.stdout).unwrap(), stderr)
    }

    /// Builds, demands this exit code and every one of these words on stderr.
    fn fails(&self, builder: &str, more: &[&str], code: i32, words: &[&str]) -> String {
        failed(&self.build(builder, more), builder, code, words)
    }

    /// What a build leaves behind that is not its result.
    fn leftovers(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.path("machines/build/tmp")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// Whether guests run here and not in the lab.
    fn on_kvm(&self) -> bool {
        self.programs.kvm_is_usable(&self.path("machines"))
    }

    /// Monitors that run where guests do.
    fn monitors(&self) -> String {
        let script =
            "for p in /proc/[0-9]*/comm; do grep -h parbake-vmm $p; done 2>/dev/null; true";
        let output = if self.on_kvm() {
            Command::new("sh").args(["-c", script]).output()
        } else {
            self.command("machines").args(["lab", "exec", "--", "sh", "-c", script]).output()
        };
        String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.command("machines").args(["lab", "down"]).output();
    }
}

/// Everything a step can leave in a file system, and everything it is given.
const STEPS: &str = r#"FROM BASE AS tools
RUN mkdir -p /opt/tool/old /opt/swap/inner && echo 1 > /opt/tool/old/a && echo x > /opt/swap/inner/f \
 && ln -s /opt/tool /opt/link && echo shared > /opt/hard && chmod 711 /

FROM tools
ENV GREETING="hello world" EMPTY=
WORKDIR /srv/new/app
COPY given /given
RUN <<EOT
set -e
# Removed, replaced by another kind, replaced by a fresh directory, renamed.
rm /etc/debian_version
rm -r /opt/tool && mkdir /opt/tool && echo 2 > /opt/tool/b
rm -r /opt/swap/inner && echo file > /opt/swap/inner
mv /opt/link /opt/moved
# Names and links.
ln /opt/hard /opt/harder; ln /opt/hard hardest; ln -s ../nowhere dangling; ln dangling second-dangling
python3 -c 'import os; open(b"/srv/new/app/\xff\xfe name", "w").write("bytes"); os.makedirs("/srv/" + "/".join("d%d" % n for n in range(60)))'
touch "$(printf 'n%.0s' $(seq 1 200))"
# Bits, owners, attributes, devices, holes.
cp /bin/true setuid && chown 7:8 setuid && chmod 6755 setuid
python3 - <<'PY'
import os, socket, struct
os.setxattr("setuid", "user.note", b"\x00\xffvalue")
cap = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
open("capable", "w").close()
os.setxattr("capable", "security.capability", cap)
os.mknod("null", 0o20666, os.makedev(1, 3))
os.mkfifo("pipe", 0o600)
with open("sparse", "wb") as f:
    f.seek(40 << 20); f.write(b"end"); f.truncate(50 << 20)
with open("large", "wb") as f:
    for n in range(300):
        f.write(bytes([n % 251 + 1]) * 10007)
socket.socket(socket.AF_UNIX).bind("socket")
PY
chmod 640 large; chown 1234:5678 .; mkdir -m 1777 sticky; echo more >> /etc/issue
# What it is given.
test "$GREETING" = "hello world"; test -z "$EMPTY"; test "$(pwd)" = /srv/new/app
test "$HOME" = /root; test "$(umask)" = 0022; test "$(hostname)" = parbake-build; test $$ -lt 20
id > id; cat /given > given; grep -E '^Cap(Bnd|Eff|Prm|Inh|Amb)' /proc/self/status > capabilities
ls /dev | grep -vx core > devices; cat < /dev/stdin > stdin; test ! -s stdin
! touch /proc/sys/kernel/hostname-x 2>/dev/null; grep -c . /etc/hosts > hosts
env | sort | grep -v '^_=' > environment
EOT
USER 1000:50
RUN --network=none ["/bin/sh", "-c", "id > /tmp/id; grep ^Cap /proc/self/status > /tmp/capabilities; ls /sys/class/net > /tmp/net; test ! -w /etc"]
USER root
RUN --mount=type=secret,id=token --mount=type=secret,id=token,env=TOKEN,target=/s,mode=0440,gid=7 \
    --mount=type=cache,target=/cache,id=c --mount=type=tmpfs,target=/mem \
    --mount=type=bind,source=given,target=/deep/down/given --mount=type=bind,from=tools,source=/opt,target=/o,rw \
    set -e; test ! -e /etc/debian_version; test ! -e /opt/tool/a; test "$(stat -c %h /opt/hard)" = 3; \
    grep -qx 'correct-[h]orse' /run/secrets/token; test "$(stat -c %a:%g /s)" = 440:7; case "$TOKEN" in correct-[h]orse) ;; *) exit 9;; esac; \
    ! echo x 2>/dev/null > /deep/down/given; echo x > /o/hard; test "$(cat /o/tool/old/a)" = 1; \
    echo one > /cache/kept; mkdir /cache/gone; echo x > /cache/gone/x; ln /cache/kept /cache/linked; \
    echo x > /mem/x; cmp /deep/down/given /given; test "$(stat -f -c %T /mem)" = tmpfs
RUN --mount=type=cache,target=/cache,id=c set -e; cat /cache/kept > /seen; echo two >> /cache/kept; rm -r /cache/gone; \
    mkdir /cache/gone; test ! -e /deep; test ! -e /mem; test ! -e /run/secrets
RUN --mount=type=cache,target=/cache,id=c set -e; cat /cache/kept >> /seen; ls -A /cache/gone >> /seen; \
    rm -rf /var/cache/* /srv/d0; sleep 1000 &
LABEL last=one
CMD ["/bin/cat", "/seen"]
"#;

#[test]
fn machines_leave_what_the_sandbox_leaves() {
    let Some(world) = World::new() else { return };
    world.dockerfile(STEPS);
    fs::write(world.path("context/given"), "given\n").unwrap();
    fs::write(world.path("token"), "correct-horse\n").unwrap();
    let secret = format!("id=token,src={}", world.path("token").display());
    let build = |builder: &str| {
        let out = world.path(&format!("{builder}.ext4"));
        let rootfs = format!("rootfs={}", out.display());
        let options = ["--secret", &secret, "-o", &rootfs, "-t", "x", "--network", "none"];
        let begun = Instant::now();
        let (built, said) = world.built(builder, &options);
        println!("{builder}: {:?} for\n{said}", begun.elapsed());
        assert_eq!(built["steps"]["cached"], 0, "{built}");
        let store = if builder == "microvm" { "machines" } else { "shared" };
        let found = world.command(store).args(["inspect", "x", "--format", "json"]).output();
        let found: Value = serde_json::from_slice(&found.unwrap().stdout).unwrap();
        (found["template"].clone(), out)
    };
    let (sandbox, shared) = build("sandbox");
    let (microvm, machines) = build("microvm");
    // Layer for layer, with names, kinds, owners, bits, attributes, contents and times.
    for (one, other) in [(&sandbox, &microvm)] {
        let layers = |template: &Value| {
            let layers = template["source"]["layers"].as_array().unwrap().clone();
            layers.into_iter().map(|layer| (layer["createdBy"].clone(), layer["diffId"].clone()))
        };
        for (one, other) in layers(one).zip(layers(other)) {
            assert_eq!(one, other);
        }
        assert_eq!(one["process"], other["process"]);
        assert_eq!(one["rootfs"], other["rootfs"]);
    }
    assert_eq!(fs::read(shared).unwrap(), fs::read(&machines).unwrap());
    let seen = Command::new("debugfs").args(["-R", "cat /seen"]).arg(&machines).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&seen.stdout), "one\none\ntwo\n");
    assert!(world.leftovers().is_empty(), "{:?}", world.leftovers());

    // Nothing is done again, and no machine is asked for.
    let (again, _) = world.built("microvm", &["--secret", &secret, "-t", "x", "--network", "none"]);
    assert_eq!(again["steps"]["executed"], 0, "{again}");
    assert_eq!(world.monitors(), "");
}

/// Steps that say in which machine they ran.
const MACHINES: &str = r#"FROM BASE AS one
RUN cat /proc/sys/kernel/random/boot_id > /a; mkdir /gone; echo 1 > /gone/x; echo 1 > /dev/shm/x; echo 1 > /left
COPY given /given
WORKDIR /w
RUN set -e; cat /proc/sys/kernel/random/boot_id > /b; cmp /given /left; test "$(pwd)" = /w; test ! -e /dev/shm/x; \
    rm -r /gone; mkdir /gone
RUN --mount=type=secret,id=token cat /proc/sys/kernel/random/boot_id > /c; test ! -e /gone/x
RUN cat /proc/sys/kernel/random/boot_id > /d; test ! -e /run/secrets
RUN --network=none cat /proc/sys/kernel/random/boot_id > /e
FROM one
RUN cat /proc/sys/kernel/random/boot_id > /f
RUN cat /proc/sys/kernel/random/boot_id > /g
"#;

#[test]
fn a_machine_is_shared_within_a_stage_and_never_with_a_secret() {
    let Some(world) = World::new() else { return };
    world.dockerfile(MACHINES);
    fs::write(world.path("context/given"), "1\n").unwrap();
    fs::write(world.path("token"), "correct-horse\n").unwrap();
    let secret = format!("id=token,src={}", world.path("token").display());
    let out = world.path("out.ext4");
    let rootfs = format!("rootfs={}", out.display());
    let begun = Instant::now();
    let (_, said) = world.built("microvm", &["--secret", &secret, "-o", &rootfs]);
    println!("{:?} for\n{said}", begun.elapsed());
    let booted = |name: &str| file_of(&out, &format!("/{name}"));
    assert_eq!(booted("a").trim().len(), 36, "{}", booted("a"));
    assert_eq!(booted("a"), booted("b"));
    assert_eq!(booted("f"), booted("g"));
    let different: std::collections::BTreeSet<String> =
        ["a", "c", "d", "e", "f"].into_iter().map(booted).collect();
    assert_eq!(different.len(), 5, "{different:?}");
    assert!(world.leftovers().is_empty(), "{:?}", world.leftovers());
    assert_eq!(world.monitors(), "");
}

/// A file of a root filesystem.
fn file_of(image: &std::path::Path, path: &str) -> String {
    let output =
        Command::new("debugfs").args(["-R", &format!("cat {path}")]).arg(image).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// An SSH agent that holds a key.
struct Agent {
    child: std::process::Child,
    socket: PathBuf,
    fingerprint: String,
}

impl Agent {
    fn new(directory: &std::path::Path) -> Self {
        let (socket, key) = (directory.join("agent"), directory.join("key"));
        let done = |command: &mut Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        done(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key));
        let mut child = Command::new("ssh-agent");
        child.args(["-D", "-a"]).arg(&socket).stdout(Stdio::null());
        let child = child.spawn().unwrap();
        let limit = Instant::now() + Duration::from_secs(20);
        while !socket.exists() {
            assert!(Instant::now() < limit, "no agent");
            std::thread::sleep(Duration::from_millis(20));
        }
        done(Command::new("ssh-add").arg(&key).env("SSH_AUTH_SOCK", &socket));
        let fingerprint = done(Command::new("ssh-add").arg("-l").env("SSH_AUTH_SOCK", &socket));
        Self { child, socket, fingerprint }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_ssh_agent_is_offered_and_nothing_of_it_stays() {
    let Some(world) = World::new() else { return };
    let agent = Agent::new(world.root.path());
    // `ssh-add` of this machine, with the libraries it was linked against.
    let tool = world.path("context/ssh");
    fs::create_dir(&tool).unwrap();
    let take = |path: &str| {
        let name = path.rsplit('/').next().unwrap();
        fs::copy(path, tool.join(name)).unwrap();
    };
    take("/usr/bin/ssh-add");
    fs::copy(world.path("key.pub"), tool.join("key.pub")).unwrap();
    let libraries = Command::new("ldd").arg("/usr/bin/ssh-add").output().unwrap();
    let libraries = String::from_utf8(libraries.stdout).unwrap();
    libraries.split_whitespace().filter(|word| word.starts_with('/')).for_each(take);
    let script = "#!/bin/sh\nexec /opt/ssh/ld-linux-*.so.* --library-path /opt/ssh /opt/ssh/ssh-add \"$@\"\n";
    fs::write(tool.join("run"), script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(tool.join("run"), mode).unwrap();
    world.dockerfile(
        r#"FROM BASE
COPY ssh /opt/ssh
RUN --mount=type=ssh,required set -e; test "$SSH_AUTH_SOCK" = /run/buildkit/ssh_agent.0; /opt/ssh/run -l > /listed; \
    /opt/ssh/run -T /opt/ssh/key.pub; for n in 1 2 3 4 5 6 7 8; do /opt/ssh/run -l > /l$n & done; wait; \
    for n in 1 2 3 4 5 6 7 8; do cmp /l$n /listed; done
USER 1000:50
RUN --mount=type=ssh,id=deploy,uid=1000,gid=50,mode=0600,target=/tmp/agent set -e; test "$SSH_AUTH_SOCK" = /tmp/agent; \
    test "$(stat -c %a:%u:%g:%F /tmp/agent)" = 600:1000:50:socket; /opt/ssh/run -l > /tmp/listed
USER root
RUN set -e; test ! -e /run/buildkit; test ! -e /tmp/agent; test -z "$SSH_AUTH_SOCK"
RUN --mount=type=ssh,id=absent test -z "$SSH_AUTH_SOCK"
"#,
    );
    let [first, second] =
        ["default", "deploy"].map(|id| format!("{id}={}", agent.socket.display()));
    let mut made = Vec::new();
    for builder in ["sandbox", "microvm"] {
        let out = world.path(&format!("{builder}.ext4"));
        let rootfs = format!("rootfs={}", out.display());
        let begun = Instant::now();
        world.built(builder, &["-o", &rootfs, "--ssh", &first, "--ssh", &second]);
        println!("{builder}: {:?}", begun.elapsed());
        for name in ["/listed", "/tmp/listed"] {
            assert_eq!(file_of(&out, name), agent.fingerprint, "{builder}: {name}");
        }
        made.push(fs::read(&out).unwrap());
    }
    assert!(made[0] == made[1], "the two executors differ");
    assert!(world.leftovers().is_empty(), "{:?}", world.leftovers());

    let out = format!("rootfs={}", world.path("out.ext4").display());
    drop(agent);
    for builder in ["sandbox", "microvm"] {
        let again = ["-o", &out, "--no-cache"];
        world.fails(builder, &again, 5, &["Dockerfile:3", "no SSH agent default", "--ssh default"]);
        let gone = [&again[..], &["--ssh", &first]].concat();
        world.fails(builder, &gone, 5, &["Dockerfile:3", "default", "does not answer"]);
    }
    assert!(!world.path("out.ext4").exists());
}

#[test]
fn steps_that_fail_in_machines_say_so() {
    let Some(world) = World::new() else { return };
    let out = format!("rootfs={}", world.path("out.ext4").display());
    world.dockerfile("FROM BASE\n\nRUN echo first\nRUN echo out of cheese >&2; exit 3\n");
    for builder in ["sandbox", "microvm"] {
        world.fails(builder, &["-o", &out], 5, &["Dockerfile:4", "out of cheese", "exit code 3"]);
    }
    world.dockerfile("FROM BASE\nRUN [\"/no/such\", \"program\"]\n");
    world.fails("microvm", &["-o", &out], 5, &["Dockerfile:2", "exit code 127", "/no/such"]);
    world.dockerfile("FROM BASE\nRUN dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null\n");
    let small = ["-o", &out, "--build-disk", "64MiB"];
    world.fails("microvm", &small, 5, &["Dockerfile:2", "64 MiB", "--build-disk"]);

    // A step that took its machine over still cannot lay a file anywhere but in its own result; what
    // it may say about that is bounded.
    world.dockerfile("FROM BASE\nRUN python3 -c 'open(\"/s\", \"w\").truncate(1 << 40)'\n");
    world.fails("microvm", &small, 7, &["/s", "--build-disk"]);

    let refused = ["-o", &out, "--require-isolation"];
    world.fails("sandbox", &refused, 4, &["--builder microvm"]);
    world.fails("sandbox", &["-o", &out, "--egress", "none"], 2, &["--builder microvm"]);
    assert!(world.leftovers().is_empty(), "{:?}", world.leftovers());
    assert!(!world.path("out.ext4").exists());
}

#[test]
fn machines_reach_what_their_policy_says() {
    let Some(world) = World::new() else { return };
    if world.on_kvm() {
        println!("skipped: what listens here is this host's, which no policy but its name opens");
        return;
    }
    // What is this machine's loopback is the lab's neighbour.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut stream, b"hello");
        }
    });
    let program = format!(
        "import socket; print(\"said\", socket.create_connection((\"10.0.2.2\", {port}), 20).recv(9))"
    );
    world.dockerfile(&format!("FROM BASE\nRUN cat /etc/resolv.conf; python3 -c '{program}'\n"));
    let out = format!("rootfs={}", world.path("out.ext4").display());
    for policy in [&[][..], &["--egress", &format!("allow=10.0.2.2:{port}")]] {
        let (_, said) = world.built("microvm", &[&["-o", &out, "--no-cache"][..], policy].concat());
        assert!(said.contains("said b'hello'") && said.contains("nameserver"), "{said}");
    }
    for policy in [&["--egress", "allow=10.0.2.2:1"][..], &["--network", "none"]] {
        let words = ["exit code 1", "Error"];
        let all = [&["-o", &out, "--no-cache"][..], policy].concat();
        let said = world.fails("microvm", &all, 5, &words);
        assert!(!said.contains("said b'hello'"), "{said}");
        let told = said.contains("denied: tcp to 10.0.2.2");
        assert_eq!(told, policy[0] == "--egress", "{said}");
    }
}

#[test]
fn an_interrupted_machine_leaves_nothing() {
    let Some(world) = World::new() else { return };
    world.dockerfile("FROM BASE\nRUN echo it runs; sleep 1000\n");
    let out = format!("rootfs={}", world.path("out.ext4").display());
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
        let mut command = world.command("machines");
        command.args(["build", ".", "--builder", "microvm", "-o", &out, "--progress", "plain"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let (mut said, mut byte) = (Vec::new(), [0]);
        while stderr.read(&mut byte).unwrap() == 1 {
            said.push(byte[0]);
            if said.ends_with(b"| it runs\n") {
                break;
            }
        }
        assert!(said.ends_with(b"| it runs\n"), "{}", String::from_utf8_lossy(&said));
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, signal).unwrap();
        stderr.read_to_end(&mut said).unwrap();
        let status = child.wait().unwrap();
        let said = String::from_utf8_lossy(&said);
        if signal == rustix::process::Signal::INT {
            assert_eq!(status.code(), Some(130), "{said}");
            assert!(world.leftovers().is_empty(), "{:?}", world.leftovers());
        }
        let limit = Instant::now() + Duration::from_secs(60);
        while !world.monitors().is_empty() {
            assert!(Instant::now() < limit, "a machine outlived its build");
            std::thread::sleep(Duration::from_millis(500));
        }
    }
    assert!(!world.path("out.ext4").exists());
}
