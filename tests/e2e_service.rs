//! The node service with real guests: the whole life of sandboxes, by the client and by `curl`.
//!
//! Needs `PARBAKE_BIN` and `PARBAKE_IMAGE` as `e2e.rs` does, and `curl`. Service, client and guests run in the
//! lab where KVM cannot run stock guests, and the test is skipped, with the reason, where neither
//! can. `PARBAKE_STEPS` names parts of it, by words of their titles; `PARBAKE_CYCLES` is how many sandboxes are made and removed to look for what they leave.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use parbake_tests::programs::{Programs, succeeded};
use serde_json::Value;
use tempfile::TempDir;

/// Where the service of this test keeps everything, on the machine it runs on.
const HOME: &str = "/tmp/parbaked-e2e";

struct World {
    programs: Programs,
    store: TempDir,
    lab: bool,
}

impl World {
    fn new() -> Option<Self> {
        let programs = Programs::find()?;
        let store = tempfile::Builder::new().prefix("parbake-e2e-service.").tempdir().unwrap();
        let mut world = Self { programs, store, lab: false };
        if !world.programs.can_run_guests(&world.store()) {
            return None;
        }
        world.lab = !world.programs.kvm_is_usable(&world.store());
        Some(world)
    }

    fn store(&self) -> PathBuf {
        self.store.path().join("store")
    }

    fn parbake(&self, arguments: &[&str]) -> Output {
        self.programs.parbake(&self.store()).args(arguments).output().unwrap()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        succeeded(&self.parbake(arguments), &format!("{arguments:?}"))
    }

    /// Runs a script where the service is; `parbaked` and `$api` (curl on its socket) work in it.
    fn shell(&self, script: &str) -> Output {
        let bin = if self.lab {
            Path::new("/.host").join(self.programs.bin.strip_prefix("/").unwrap())
        } else {
            self.programs.bin.clone()
        };
        let script = format!(
            "set -eu; export PATH={}:$PATH PARBAKED_ADDRESS=unix:{HOME}/s; \
             api='curl -sS --unix-socket {HOME}/s'; at=http://localhost/v1/sandboxes\n{script}",
            bin.display()
        );
        if self.lab {
            return self.parbake(&["lab", "exec", "--", "sh", "-c", &script]);
        }
        Command::new("sh").arg("-c").arg(script).stdin(Stdio::null()).output().unwrap()
    }

    /// The same; it must succeed, and what it says comes back.
    fn sh(&self, script: &str) -> String {
        succeeded(&self.shell(script), script)
    }

    fn json(&self, script: &str) -> Value {
        let text = self.sh(script);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{script}: {error}: {text}"))
    }

    fn serve(&self) {
        let store = self.store();
        let guard = "#!/bin/sh\nif grep -q '\"forbidden\"'; then echo '{\"decision\":\"block\"}'; \
             else echo '{\"decision\":\"allow\"}'; fi\n";
        self.sh(&format!(
            "mkdir -p {HOME}; cd {HOME}; printf '%s' '{}' >guard; chmod +x guard\n\
             [ -e key ] || (umask 077; head -c 32 /dev/urandom >key)\n\
             setsid parbaked serve --store {} --run-dir {HOME}/run --listen unix:{HOME}/s \
             --audit-log {HOME}/audit --audit-key-file {HOME}/key --audit-file-size 1 \
             --scratch memory --fork-dir {HOME}/forks --guard-program {HOME}/guard --answer-timeout 30s --drain-timeout 5s \
             >>{HOME}/log 2>&1 </dev/null &\n\
             for n in $(seq 100); do parbaked status >/dev/null 2>&1 && exit 0; sleep 0.1; done; \
             cat {HOME}/log; exit 1",
            guard.replace('\'', "'\\''"),
            store.display()
        ));
    }

    /// What sandboxes could leave behind, counted.
    fn leftovers(&self) -> String {
        self.sh(&format!(
            "pid=$(pidof -s parbaked)
             echo monitors $(pidof parbake-vmm | wc -w)
             echo descriptors $(ls /proc/$pid/fd | wc -l)
             echo threads-under-64 $(( $(ls /proc/$pid/task | wc -l) < 64 ))
             echo run $(find {HOME}/run -mindepth 2 | wc -l)
             echo forks $(ls {HOME}/forks | wc -l)
             echo live $(ls {0}/live | wc -l) stage $(ls {0}/stage | wc -l)
             echo netns $(ls /run/netns 2>/dev/null | wc -l) links $(ls /sys/class/net | wc -l)
             echo cgroups $(find /sys/fs/cgroup -path '*parbake*' -type d 2>/dev/null | wc -l)
             echo mounts $(wc -l </proc/self/mounts)",
            self.store().display()
        ))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.shell(&format!("cat {HOME}/log; parbaked events | tail -n 20"));
            println!("{}", String::from_utf8_lossy(&log.stdout));
        }
        if self.lab {
            self.parbake(&["lab", "down"]);
        } else {
            self.shell(&format!("parbaked rm --all; pkill -x parbaked; rm -rf {HOME}"));
        }
    }
}

#[test]
fn the_life_of_sandboxes() {
    let Some(world) = World::new() else { return };
    world.ok(&[
        "build",
        "--from",
        &format!("oci:{}", world.programs.image.display()),
        "-t",
        "debian:12",
    ]);
    world.ok(&["bake", "debian:12"]);
    world.serve();
    type Step = (&'static str, fn(&World));
    let steps: &[Step] = &[
        ("a sandbox by the client", by_the_client),
        ("a sandbox by curl", by_curl),
        ("streams", streams),
        ("callers who go away", cancelled),
        ("requests that come twice", doubled),
        ("files and trees", files),
        ("the service is killed", killed),
        ("forks", forks),
        ("pause and resume", pause),
        ("another node", another_node),
        ("workspaces", workspaces),
        ("processes in the guest", processes),
        ("time to live", ttl),
        ("nothing is left", nothing_left),
        ("the audit log", audit),
    ];
    let only = std::env::var("PARBAKE_STEPS").unwrap_or_default();
    let wanted = |name: &str| only.split(',').any(|word| name.contains(word));
    for (name, step) in steps.iter().filter(|(name, _)| wanted(name)) {
        let begun = Instant::now();
        step(&world);
        println!("{name} … ok ({:.1} s)", begun.elapsed().as_secs_f64());
    }
}

/// What all the steps before, a killed service among them, have written down.
fn audit(world: &World) {
    // More than a file may hold.
    world.sh("id=$(parbaked create debian:12); long=$(head -c 90000 /dev/zero | tr '\\0' x)
         for n in $(seq 13); do parbaked exec $id -- true $long; done; parbaked rm $id");
    let verify = |script: &str| {
        let output = world.shell(&format!(
            "cd {HOME}; rm -rf copy; mkdir copy; cp audit audit.* copy/; cd copy; {script}
             parbaked audit verify --key-file {HOME}/key {HOME}/copy/audit"
        ));
        let (said, error) = (output.stdout, output.stderr);
        (output.status.success(), String::from_utf8_lossy(&[said, error].concat()).into_owned())
    };
    let (sound, said) = verify("");
    assert!(sound, "{said}");
    let files = world.sh(&format!("ls {HOME}/copy | grep -c '^audit.0'"));
    assert!(files.parse::<u32>().unwrap() >= 1, "{files}");
    for (what, script, expected) in [
        ("a word", "sed -i '3s/unixMs/unixMS/' audit.000001", "line 3"),
        ("a line gone", "sed -i 2d audit.000001", "line"),
        ("the end gone", "sed -i '$d' audit", "anchor"),
        ("a file gone", "rm audit", "anchor"),
        ("the anchor gone", "rm audit.anchor", "anchor"),
    ] {
        let (sound, said) = verify(script);
        assert!(!sound && said.contains(expected), "{what}: {said}");
    }
    let keyless = world.shell(&format!("parbaked audit verify {HOME}/copy/audit"));
    assert!(!keyless.status.success(), "hashes that anybody can make");
    let log = world.sh(&format!("cat {HOME}/audit*"));
    assert!(!log.contains("s3cret") && !log.contains("gr33ting"), "a secret is in the log");
}

fn by_the_client(world: &World) {
    let said = world.sh(
        "id=$(parbaked create debian:12 --ttl 15m --env GREETING=gr33ting --secret TOKEN=s3cret --label job=7)
         parbaked exec $id -- sh -c 'echo $GREETING; stat -c %a:%U /run/secrets/TOKEN; cat /run/secrets/TOKEN; echo; hostname; stat -f -c %T /run/secrets'
         echo $id
         parbaked exec $id -- sh -c 'exit 7' && exit 1; echo $?
         parbaked exec $id -- /no/such/program 2>&1 && exit 1; echo $?
         parbaked exec $id -- /etc/passwd 2>/dev/null && exit 1; echo $?
         parbaked exec $id -- sh -c 'kill -9 $$' && exit 1; echo $?
         parbaked exec --timeout 2s $id -- sleep 600 && exit 1; echo $?
         parbaked exec $id -- echo forbidden 2>&1 && exit 1; echo $?
         parbaked ps | grep -c $id
         parbaked logs $id >/dev/null
         parbaked stats $id --format json | grep -c memoryProportionalBytes
         parbaked rm $id >/dev/null; parbaked exec $id -- true 2>/dev/null && exit 1; echo $?",
    );
    let lines: Vec<&str> = said.lines().collect();
    let id = lines[5];
    assert_eq!(lines[..5], ["gr33ting", "400:root", "s3cret", id, "tmpfs"], "{said}");
    assert!(lines[6] == "7" && lines[7].contains("/no/such/program"), "{said}");
    assert_eq!(lines[8..12], ["127", "126", "137", "124"], "{said}");
    assert!(said.contains("the guard forbids it"), "{said}");
    assert_eq!(lines.iter().filter(|line| **line == "125").count(), 2, "{said}");
    let inspected = world.shell(&format!("parbaked inspect {id}"));
    assert_eq!(inspected.status.code(), Some(3));
}

fn by_curl(world: &World) {
    let made = world.json(r#"$api $at -d '{"template":"debian:12","labels":{"by":"curl"}}'"#);
    let id = made["id"].as_str().unwrap_or_else(|| panic!("{made}"));
    assert_eq!(made["state"], "running");
    for layer in ["seccomp", "no_capabilities", "empty_root"] {
        assert!(made["jail"].as_array().unwrap().iter().any(|l| l == layer), "{layer}: {made}");
    }
    let events = world.sh(&format!(
        r#"$api $at/{id}/exec -d '{{"argv":["sh","-c","cat; echo err >&2; printf \"\\377\"; exit 3"],"input":{{"text":"in"}}}}'"#
    ));
    let events: Vec<Value> = events.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(events[0]["event"], "started");
    let last = events.last().unwrap();
    assert_eq!((&last["event"], &last["exitCode"]), (&"exited".into(), &3.into()));
    assert!(events.iter().any(|e| e["event"] == "stderr" && e["text"] == "err\n"), "{events:?}");
    assert!(events.iter().any(|e| e["text"] == "in"), "{events:?}");
    assert!(events.iter().any(|e| e["base64"] == "/w=="), "{events:?}");
    let list = world.json("$api $at");
    assert!(list["sandboxes"].as_array().unwrap().iter().any(|s| s["labels"]["by"] == "curl"));
    let said = world.sh(&format!(
        "echo data | $api -T - \"$at/{id}/files?path=/tmp/x/y&mode=600&parents\"; echo
         $api -D {HOME}/head \"$at/{id}/files?path=/tmp/x/y\"; grep -i parbake-mode {HOME}/head
         $api -o /dev/null -w '%{{http_code}}\\n' \"$at/{id}/files?path=/nosuch\"
         $api -o /dev/null -w '%{{http_code}}\\n' \"$at/{id}/files?path=/etc\"
         $api $at/../../metrics --path-as-is -o /dev/null
         $api http://localhost/metrics | grep -c 'parbake_jail_layers{{layer=\"seccomp\"}} 1'
         $api -X DELETE -o /dev/null -w '%{{http_code}}\\n' $at/{id}
         $api -X DELETE -o /dev/null -w '%{{http_code}}\\n' $at/{id}"
    ));
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    assert_eq!(
        lines,
        [r#"{"bytes":5}"#, "data", "parbake-mode: 600", "422", "422", "1", "204", "404"]
    );
}

fn streams(world: &World) {
    let said = world.sh(&format!(
        "id=$(parbaked create debian:12)
         parbaked exec $id -- seq 10000 | sha256sum; seq 10000 | sha256sum
         head -c 3000000 /dev/urandom >{HOME}/data
         parbaked exec $id -- sha256sum <{HOME}/data; sha256sum <{HOME}/data
         parbaked exec $id -- cat <{HOME}/data | sha256sum
         parbaked exec --output-limit 1000 $id -- cat /dev/zero 2>/dev/null | head -c 5000 | wc -c & sleep 1; kill $! 2>/dev/null || true
         parbaked exec $id -- sh -c 'exec cat >/dev/null' <{HOME}/data; echo $?
         parbaked exec $id -- true <{HOME}/data; echo $?
         parbaked exec $id -- sh -c \"printf '%s' '$(printf 'a\\377b')' | wc -c\"
         parbaked rm $id >/dev/null"
    ));
    let lines: Vec<&str> = said.lines().filter(|l| *l != "1000").collect();
    assert_eq!(lines[0], lines[1]);
    assert_eq!(lines[2], lines[3]);
    assert_eq!(lines[3], lines[4]);
    assert_eq!(lines[5..8], ["0", "0", "3"], "{said}");
}

fn cancelled(world: &World) {
    let said = world.sh(
        "id=$(parbaked create debian:12)
         count() { parbaked inspect $id | grep -o '\"executions\": [0-9]*'; }
         quiet() { for n in $(seq 60); do [ \"$(count)\" = '\"executions\": 0' ] && return; sleep 0.2; done; count; }
         parbaked exec $id -- sleep 1234 & sleep 2; count; kill -9 $!; quiet; count
         $api $at/$id/exec -d '{\"argv\":[\"sleep\",\"1234\"]}' & sleep 2; count; kill -9 $!; quiet; count
         parbaked exec $id -- sh -c 'grep -l 1234 /proc/[0-9]*/cmdline | wc -l'
         $api -m 0.05 -d '{\"template\":\"debian:12\"}' $at || true
         for n in $(seq 100); do [ \"$(parbaked ps -q | wc -l)\" = 1 ] && break; sleep 0.2; done
         parbaked ps -q | wc -l
         parbaked rm $id >/dev/null",
    );
    let lines: Vec<&str> = said.lines().filter(|l| !l.is_empty() && !l.starts_with('{')).collect();
    let (one, none) = ("\"executions\": 1", "\"executions\": 0");
    // The shell that looks has the number in its own command line.
    assert_eq!(lines[..4], [one, none, one, none], "{said}");
    assert!(matches!(lines[4], "0" | "1" | "2"), "{said}");
    assert_eq!(lines[5], "1", "{said}");
}

fn doubled(world: &World) {
    let said =
        world.sh("post() { $api -w ' %{http_code}\\n' -H \"Idempotency-Key: $1\" -d \"$2\" $at; }
         a='{\"template\":\"debian:12\",\"labels\":{\"n\":\"1\"}}'
         post k1 \"$a\" | grep -o '\"id\":\"[a-z0-9]*\"\\|.[0-9]*$'
         post k1 \"$a\" | grep -o '\"id\":\"[a-z0-9]*\"\\|.[0-9]*$'
         post k1 '{\"template\":\"debian:12\"}' | grep -o '\"kind\":\"[a-zA-Z]*\"'
         post k2 \"$a\" >/tmp/one & post k2 \"$a\" >/tmp/two; wait
         cat /tmp/one /tmp/two | grep -c '\"id\"\\|inProgress'
         parbaked ps -q | wc -l
         parbaked rm --all >/dev/null
         post k1 \"$a\" | grep -o '.[0-9]*$'
         parbaked rm --all >/dev/null");
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    assert_eq!(lines[0], lines[2], "{said}");
    assert_eq!((lines[1], lines[3]), ("201", "200"), "{said}");
    assert_eq!(lines[4], "\"kind\":\"keyReused\"");
    assert_eq!(lines[5..8], ["2", "2", "201"], "{said}");
}

fn files(world: &World) {
    let said = world.sh(&format!(
        "cd {HOME}; rm -rf tree out; mkdir -p tree/sub; echo a >tree/a; echo b >tree/sub/b; chmod 755 tree/a; ln -s a tree/link
         id=$(parbaked create debian:12)
         parbaked cp -r tree $id:/tmp/deep/dir
         parbaked exec $id -- sh -c 'cd /tmp/deep/dir && cat a sub/b && readlink link && stat -c %a a'
         parbaked cp -r $id:/tmp/deep/dir out; diff -r tree out && echo same
         parbaked cp tree/a $id:/tmp/; parbaked cp $id:/tmp/a copy; stat -c %a copy
         echo piped | parbaked cp - $id:/tmp/piped; parbaked cp $id:/tmp/piped -
         parbaked cp $id:/no/such . 2>&1 || echo $?
         parbaked cp tree $id:/tmp/x 2>/dev/null || echo $?
         parbaked cp -r $id:/no/such out2 2>/dev/null || echo $?
         ls -A | grep -c '^\\.tmp' || true
         parbaked rm $id >/dev/null"
    ));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..7], ["a", "b", "a", "755", "same", "755", "piped"], "{said}");
    assert!(lines[7].contains("/no/such"), "{said}");
    assert_eq!(lines[lines.len() - 4..], ["1", "1", "1", "0"], "{said}");
}

fn killed(world: &World) {
    let id = world.sh("parbaked create debian:12 --env KEPT=yes --secret TOKEN=s3cret");
    let said = world.sh(&format!(
        "parbaked exec -d {id} -- sh -c 'while :; do echo >>/tmp/ticks; sleep 0.2; done'
         kill -9 $(pidof -s parbaked); sleep 2; parbaked ps >/dev/null 2>&1 || echo $?"
    ));
    assert_eq!(said, "7");
    world.serve();
    let said = world.sh(&format!(
        "parbaked exec {id} -- sh -c 'echo $KEPT; [ $(wc -l </tmp/ticks) -ge 5 ] && echo ticks'
         parbaked events | grep -c 'adopted'
         $api $at/{id}/stats | grep -c executionsTotal
         pid=$(pidof -s parbaked); kill $pid
         for n in $(seq 100); do [ -d /proc/$pid ] || break; sleep 0.1; done; pidof parbake-vmm | wc -w"
    ));
    assert_eq!(said.lines().collect::<Vec<_>>(), ["yes", "ticks", "1", "1", "1"]);
    world.serve();
    let said = world.sh(&format!(
        "parbaked exec {id} -- cat /run/secrets/TOKEN; echo; parbaked rm {id}; pidof parbake-vmm | wc -w"
    ));
    assert_eq!(said.lines().collect::<Vec<_>>(), ["s3cret", &id, "0"]);
}

fn forks(world: &World) {
    let id = world.sh("id=$(parbaked create debian:12 --env GREETING=hi)
         parbaked exec $id -- sh -c 'echo parent >/root/file'
         parbaked exec -d $id -- sh -c 'while :; do echo >>/tmp/ticks; sleep 0.2; done'
         echo $id");
    let said = world.sh(&format!(
        "parbaked exec {id} -- sleep 600 & sleep 2; parbaked fork {id} 2>/dev/null || echo $?; kill $!; wait; sleep 1
         parbaked fork {id} --count 2 --env MORE=1 --label copy=yes"
    ));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "1", "{said}");
    let (one, two) = (lines[lines.len() - 2], lines[lines.len() - 1]);
    let look = |id: &str| {
        world.sh(&format!(
            "parbaked exec {id} -- sh -c 'cat /root/file; echo $GREETING$MORE; hostname; \
             a=$(wc -l </tmp/ticks); sleep 2; b=$(wc -l </tmp/ticks); [ $b -gt $a ] && echo goes on; \
             cat /proc/sys/kernel/random/uuid /etc/machine-id'"
        ))
    };
    let (parent, first, second) = (look(&id), look(one), look(two));
    for (name, said, greeting) in
        [(&*id, &parent, "hi"), (one, &first, "hi1"), (two, &second, "hi1")]
    {
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[..4], ["parent", greeting, name, "goes on"], "{said}");
    }
    let unique = |at: usize| {
        let words = [&parent, &first, &second].map(|said| said.lines().nth(at).unwrap().to_owned());
        words[0] != words[1] && words[1] != words[2] && words[0] != words[2]
    };
    assert!(unique(4) && unique(5), "copies share random bytes: {parent} {first} {second}");
    // A copy of a copy, and writes that stay where they were made.
    let said = world.sh(&format!(
        "parbaked exec {one} -- sh -c 'echo one >/root/file'
         third=$(parbaked fork {one}); parbaked exec $third -- cat /root/file
         parbaked exec {id} -- cat /root/file; parbaked exec {two} -- cat /root/file
         parbaked inspect $third | grep -c '\"parent\": \"{one}\"'
         parbaked rm --all | wc -l; ls {HOME}/forks | wc -l"
    ));
    assert_eq!(said.lines().collect::<Vec<_>>(), ["one", "parent", "parent", "1", "4", "0"]);
}

fn pause(world: &World) {
    let said = world.sh(
        "id=$(parbaked create debian:12 --env GREETING=hi --label job=7)
         parbaked exec $id -- sh -c 'echo kept >/root/file; echo memory >/dev/shm/file'
         parbaked pause $id; pidof parbake-vmm | wc -w
         parbaked ps | grep -c paused
         parbaked exec $id -- true 2>/dev/null || echo $?
         parbaked create debian:12 >/tmp/fresh; parbaked exec $(cat /tmp/fresh) -- cat /dev/shm/file 2>/dev/null || echo fresh
         parbaked resume $id --keep >/dev/null
         parbaked exec $id -- sh -c 'cat /root/file /dev/shm/file; echo $GREETING; hostname'
         parbaked resume $id 2>/dev/null || echo $?
         parbaked rm $id >/dev/null; parbaked resume $id >/dev/null; parbaked exec $id -- cat /dev/shm/file
         parbaked inspect $id | grep -c '\"job\": \"7\"'
         parbaked pause $id >/dev/null; parbaked rm $id >/dev/null; parbaked rm $id 2>/dev/null || echo $?
         parbaked rm --all >/dev/null; echo $id",
    );
    let lines: Vec<&str> = said.lines().collect();
    let id = *lines.last().unwrap();
    assert_eq!(lines[0], format!("paused/{id}:latest"), "{said}");
    let rest = ["0", "1", "125", "fresh", "kept", "memory", "hi", id, "1", "memory", "1", "3", id];
    assert_eq!(lines[1..], rest, "{said}");
}

/// Paused here, pushed, pulled into another store, and resumed by another service, which then can
/// fork it.
fn another_node(world: &World) {
    if !Path::new("/usr/bin/docker-registry").exists() {
        println!("skipped: docker-registry is not installed");
        return;
    }
    let (here, there) = (world.store(), format!("{HOME}/there"));
    let said = world.sh(&format!(
        "mkdir -p {there}; cd {there}
         printf 'version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {there}/data\nhttp:\n  addr: 127.0.0.1:5999\n' >registry.yml
         setsid docker-registry serve registry.yml >registry.log 2>&1 </dev/null & echo $! >registry.pid
         id=$(parbaked create debian:12 --env GREETING=hi --label job=7)
         parbaked exec $id -- sh -c 'echo kept >/root/file; echo memory >/dev/shm/file; sync'
         parbaked exec -d $id -- sh -c 'while :; do echo >>/tmp/ticks; sleep 0.2; done'
         parbaked pause $id >/dev/null
         for n in $(seq 50); do curl -s 127.0.0.1:5999/v2/ >/dev/null && break; sleep 0.1; done
         parbake -q --store {} push --no-verify --to 127.0.0.1:5999/team/rest:1 paused/$id >/dev/null
         parbaked rm $id >/dev/null
         parbake -q --store {there}/store pull 127.0.0.1:5999/team/rest:1 >/dev/null
         kill $(cat registry.pid)
         setsid parbaked serve --store {there}/store --run-dir {there}/run --listen unix:{there}/s \
             --audit-log none --scratch memory --fork-dir {there} --answer-timeout 30s >log 2>&1 </dev/null & echo $! >pid
         export PARBAKED_ADDRESS=unix:{there}/s
         for n in $(seq 100); do parbaked status >/dev/null 2>&1 && break; sleep 0.1; done
         [ \"$(parbaked resume 127.0.0.1:5999/team/rest:1)\" = $id ] && echo same
         parbaked exec $id -- sh -c 'cat /root/file /dev/shm/file; echo $GREETING; a=$(wc -l </tmp/ticks); sleep 2; [ $(wc -l </tmp/ticks) -gt $a ] && echo goes on'
         copy=$(parbaked fork $id); parbaked exec $copy -- cat /dev/shm/file
         parbaked inspect $id | grep -c '\"job\": \"7\"'
         parbaked rm --all >/dev/null; kill $(cat pid)
         for n in $(seq 100); do [ -d /proc/$(cat pid) ] || break; sleep 0.1; done
         pidof parbake-vmm | wc -w; cd /; rm -rf {there}",
        here.display()
    ));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines, ["same", "kept", "memory", "hi", "goes on", "memory", "1", "0"], "{said}");
}

fn workspaces(world: &World) {
    // Made, used by two sandboxes one after the other, by nobody twice, and by no copy.
    let said = world.sh(
        "id=$(parbaked create debian:12 --workspace job --workspace-size 64)
         parbaked exec $id -- sh -c 'echo kept >/workspace/file; stat -f -c %T /workspace; stat -c %a /workspace'
         parbaked create debian:12 --workspace job 2>/dev/null || echo $?
         parbaked fork $id 2>/dev/null || echo $?
         parbaked pause $id 2>/dev/null || echo $?
         parbaked create debian:12 --workspace ../job 2>/dev/null || echo $?
         parbaked exec -d $id -- sh -c 'cd /workspace; sleep 600'
         parbaked rm $id >/dev/null; pidof parbake-vmm | wc -w",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], ["ext2/ext3", "1777"], "{said}");
    assert!(lines[2..6].iter().all(|code| *code != "0"), "{said}");
    assert_eq!(lines[6..], ["0"], "{said}");
    let file = world.store().join("workspaces/job.ext4");
    let check = format!(
        "e2fsck -fn {0} >/dev/null 2>&1 && echo clean; \
         dumpe2fs -h {0} 2>/dev/null | grep -c needs_recovery || true",
        file.display()
    );
    assert_eq!(world.sh(&check).lines().collect::<Vec<_>>(), ["clean", "0"]);
    // Killed: what was synced is there again, by the journal.
    let said = world.sh(&format!(
        "id=$(parbaked create debian:12 --workspace job --workspace-path /home/me)
         parbaked exec $id -- sh -c 'cat /home/me/file; mkdir /home/me/more; echo more >/home/me/more/file; sync'
         kill -9 $(parbaked inspect $id | sed -n 's/.*\"monitorPid\": \\([0-9]*\\).*/\\1/p')
         for n in $(seq 100); do [ -z \"$(parbaked ps -q)\" ] && break; sleep 0.2; done
         dumpe2fs -h {} 2>/dev/null | grep -c needs_recovery
         id=$(parbaked create debian:12 --workspace job)
         parbaked exec $id -- cat /workspace/more/file; parbaked rm $id >/dev/null",
        file.display()
    ));
    assert_eq!(said.lines().collect::<Vec<_>>(), ["kept", "1", "more"]);
    assert_eq!(world.sh(&check).lines().collect::<Vec<_>>(), ["clean", "0"]);
    // Without the service, the same volume.
    let run = ["run", "--workspace", "job", "debian:12", "--", "sh", "-c"];
    let script = "cat /workspace/more/file; rm -r /workspace/more; echo 1 >/workspace/run";
    assert_eq!(world.ok(&[&run[..], &[script]].concat()), "more");
    assert_eq!(world.ok(&[&run[..], &["ls /workspace"]].concat()), "file\nrun");
    assert_eq!(world.sh(&check).lines().collect::<Vec<_>>(), ["clean", "0"]);
    world.sh(&format!("rm {}", file.display()));
}

/// More processes than it may have: starting another fails, is told, and harms nobody.
fn processes(world: &World) {
    let said = world.sh(
        "id=$(parbaked create debian:12 --processes 24)
         parbaked exec --timeout 60s $id -- sh -c 'for n in $(seq 60); do sleep 600 & done' >/dev/null 2>&1 || echo refused
         for n in $(seq 50); do parbaked events | grep -q guestProcesses && break; sleep 0.2; done
         parbaked events | grep -c guestProcesses
         parbaked rm --all >/dev/null",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "refused", "{said}");
    assert!(lines[1].parse::<u32>().unwrap() >= 1, "{said}");
}

fn ttl(world: &World) {
    let said = world.sh("parbaked create debian:12 --ttl 3s >/dev/null
         for n in $(seq 100); do [ -z \"$(parbaked ps -q)\" ] && break; sleep 0.2; done
         parbaked ps -q | wc -l; pidof parbake-vmm | wc -w; parbaked events | grep -c expired");
    assert_eq!(said.lines().collect::<Vec<_>>(), ["0", "0", "1"]);
}

fn nothing_left(world: &World) {
    let cycles: u32 =
        std::env::var("PARBAKE_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    // The first of everything takes what it then keeps.
    world.sh("parbaked rm $(parbaked create debian:12) >/dev/null");
    let before = world.leftovers();
    let begun = Instant::now();
    // In pieces: a command in the lab is not to take minutes.
    for _ in 0..cycles.div_ceil(10) {
        world.sh(&format!(
            "for n in $(seq {}); do parbaked rm $(parbaked create debian:12 --secret A=b) >/dev/null; done",
            cycles.min(10)
        ));
    }
    println!("  a create and a remove: {:.2} s", begun.elapsed().as_secs_f64() / f64::from(cycles));
    // Threads of the service wait for work a few seconds before they end.
    let mut after = world.leftovers();
    for _ in 0..10 {
        if after == before {
            break;
        }
        std::thread::sleep(std::time::Duration::from_secs(2));
        after = world.leftovers();
    }
    assert_eq!(after, before);
}
