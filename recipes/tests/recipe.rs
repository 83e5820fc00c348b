//! The recipe language as a user meets it: schema, mistakes, defaults, lock.

use std::path::Path;

use parbake_recipes::dockerfile::{BaseImage, BaseImages, LowerOptions};
use parbake_recipes::lock::Lock;
use parbake_recipes::plan::{Action, Base, Network, Platform};
use parbake_recipes::recipe::{self, Check, init::STARTERS};
use parbake_recipes::{LoadRequest, Loaded, check, load};

fn write(dir: &Path, name: &str, text: &str) {
    std::fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
    std::fs::write(dir.join(name), text).unwrap();
}

fn request(dir: &Path) -> LoadRequest {
    LoadRequest { context: dir.to_owned(), file: None, options: LowerOptions::default() }
}

fn loaded(text: &str) -> Loaded {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "parbake.yaml", text);
    check(&request(dir.path())).unwrap()
}

#[test]
fn the_committed_schema_is_fresh() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipe.v1.schema.json");
    if std::env::var_os("PARBAKE_UPDATE").is_some() {
        std::fs::write(&path, recipe::schema()).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(committed, recipe::schema(), "run with PARBAKE_UPDATE=1 and commit");
}

#[test]
fn every_ready_made_recipe_lowers_and_shows_itself() {
    for starter in &STARTERS {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "parbake.yaml", starter.text);
        let loaded =
            check(&request(dir.path())).unwrap_or_else(|e| panic!("{}: {e}", starter.name));
        assert!(matches!(loaded.plan.stages[0].base, Base::Bootstrap(_)));
        assert!(!loaded.bake.ready.checks.is_empty(), "{}", starter.name);
        // What is shown is itself a recipe, and the same one.
        let shown = loaded.show_resolved().unwrap();
        let (again, _) = recipe::read("shown", &shown).unwrap_or_else(|e| panic!("{e}\n{shown}"));
        assert_eq!(Some(again), loaded.recipe, "{}", starter.name);
        assert!(shown.contains("memoryMib:") && shown.contains("settle:"), "{shown}");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(starter.name).join("parbake.yaml");
        assert_eq!(std::fs::read_to_string(path).unwrap(), starter.text);
    }
}

const HEAD: &str = "apiVersion: parbake.dev/v1\nbase: {image: scratch}\n";

#[test]
fn mistakes_name_line_column_and_remedy() {
    for (text, expected) in [
        ("base: {image: x}\n".to_owned(), "write apiVersion: parbake.dev/v1"),
        (format!("{HEAD}machin: {{}}\n"), "parbake.yaml:3:1: unknown field `machin`"),
        (format!("{HEAD}machine: {{vcpu: 1}}\n"), "parbake.yaml:3:11: unknown field `vcpu`"),
        (format!("{HEAD}machine: {{vcpus: two}}\n"), "parbake.yaml:3:18: "),
        (
            format!("{HEAD}machine: {{vcpus: 1}}\nmachine: {{vcpus: 2}}\n"),
            "parbake.yaml:4:1: duplicate",
        ),
        (format!("{HEAD}machine: {{memoryMib: 8}}\n"), "at least 1 vCPU and 64 MiB"),
        (format!("{HEAD}snapshot: {{enabled: no}}\n"), "parbake.yaml:3:"),
        (format!("{HEAD}ready: {{interval: 5}}\n"), "no duration"),
        (format!("{HEAD}ready: {{checks: [{{tpc: 1}}]}}\n"), "unknown variant `tpc`"),
        (
            format!("{HEAD}ready: {{checks: [{{http: {{get: https://x}}}}]}}\n"),
            "no http:// address",
        ),
        (format!("{HEAD}files:\n  - {{src: a}}\n"), "missing field `dest`"),
        (format!("{HEAD}files:\n  - {{dest: /a}}\n"), "parbake.yaml:4: file /a needs exactly one"),
        (format!("{HEAD}files:\n  - {{src: a, dest: b}}\n"), "write /b"),
        (format!("{HEAD}files:\n  - {{src: a, dest: /b, mode: \"9\"}}\n"), "is not octal"),
        (format!("{HEAD}users:\n  - {{name: 'a;b', uid: 1}}\n"), "parbake.yaml:4: user name"),
        (
            format!("{HEAD}env: {{T: x}}\nbuild: {{secrets: [{{id: t, env: T}}]}}\n"),
            "secret T is also set in env",
        ),
        (
            format!("{HEAD}build:\n  steps:\n    - run: x\n      secrets: [t]\n"),
            "parbake.yaml:5: step uses secret t, which is not declared",
        ),
        (
            format!("{HEAD}build:\n  secrets: [{{id: t}}]\n  steps:\n    - run: x\n"),
            "secret t is declared in build.secrets, and no step sees it; add secrets: [t]",
        ),
        (
            format!("{HEAD}build:\n  network: none\n  steps:\n    - run: x\n      network: full\n"),
            "parbake.yaml:6: step asks for a network, and build.network is none",
        ),
        (
            format!("{HEAD}files:\n  - {{content: a, dest: /b, exclude: [c]}}\n"),
            "parbake.yaml:4: file /b has content",
        ),
        ("apiVersion: parbake.dev/v2\nbase: {image: x}\n".to_owned(), "parbake.yaml:1:13: "),
        (
            "apiVersion: parbake.dev/v1\nbase: {image: x, bootstrap: {suite: y}}\n".to_owned(),
            "parbake.yaml:2:",
        ),
        (format!("{HEAD}\tx: 1\n"), "parbake.yaml:3:"),
        ("a: &a [*a]\n".to_owned(), "parbake.yaml:1"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "parbake.yaml", &text);
        let error = check(&request(dir.path())).expect_err(&text).to_string();
        assert!(error.contains(expected), "{text}\n got {error}\nwant {expected}");
        assert!(error.starts_with("parbake.yaml"), "{error}");
        assert!(error.contains("; "), "a remedy follows: {error}");
    }
}

#[test]
fn nothing_there_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = check(&request(dir.path())).unwrap_err().to_string();
    assert!(
        error.ends_with("name one with -f, or write one with `parbake recipe init`"),
        "{error}"
    );
}

#[test]
fn what_comes_to_nothing_without_a_snapshot_is_told() {
    let warned = |more: &str| {
        let text = format!("{HEAD}snapshot: {{enabled: false{more}");
        let warnings = loaded(&text).plan.warnings;
        warnings.into_iter().map(|warning| warning.message).collect::<Vec<_>>()
    };
    assert!(warned("}\n").is_empty());
    let all =
        "}\nwarmup: {steps: [exec: x]}\nready: {checks: [tcp: 1]}\nmoreMachines: [{vcpus: 2}]\n";
    assert_eq!(
        warned(all),
        ["snapshot.enabled is false, so nothing comes of warmup, ready, moreMachines"]
    );
    assert!(warned(", dropCaches: false}\n")[0].ends_with("the rest of snapshot"));
}

#[test]
fn a_recipe_lowers_to_ordinary_steps() {
    let loaded = loaded(
        "apiVersion: parbake.dev/v1\nbase: {image: img}\npackages: {apt: [curl, 'a b'], pip: [x]}\n\
         users: [{name: app, uid: 7}]\nfiles: [{content: hi, dest: /etc/x, owner: app, mode: '0600'}]\n\
         env: {A: '1'}\nbuild:\n  env: {B: '2'}\n  network: none\n  secrets: [{id: tok}]\n  steps:\n\
         \x20   - run: [make, it]\n      cache: [/c]\n      secrets: [tok]\n\
         process: {entrypoint: [/x], workingDir: /w, user: app}\n",
    );
    let stage = &loaded.plan.stages[0];
    let texts: Vec<&str> = stage.steps.iter().map(|step| step.text.as_str()).collect();
    assert_eq!(
        texts,
        [
            "apt packages curl 'a b'",
            "user app",
            "pip packages x",
            "file content → /etc/x",
            "run it",
            "working directory /w",
        ]
    );
    assert_eq!(stage.steps[4].at.line, 12);
    let Action::Run(run) = &stage.steps[4].action else { panic!() };
    assert_eq!((run.network, run.mounts.len()), (Network::None, 2));
    assert!(run.env.contains(&"B=2".to_owned()));
    assert!(stage.config.env.contains(&"A=1".to_owned()));
    assert!(!stage.config.env.iter().any(|line| line.starts_with("B=")), "build env stays out");
    assert_eq!(stage.config.user, "app");
    assert!(loaded.plan.secrets["tok"]);
}

#[test]
fn a_dockerfile_can_be_the_base_and_its_health_check_the_ready_check() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "docker/Dockerfile",
        "FROM img\nARG V=1\nENV V=$V\nHEALTHCHECK --interval=30s --start-period=2m CMD curl x\n",
    );
    write(
        dir.path(),
        "parbake.yaml",
        "apiVersion: parbake.dev/v1\nbase: {dockerfile: {path: docker/Dockerfile, args: {V: '5'}}}\n",
    );
    let loaded = check(&request(dir.path())).unwrap();
    assert_eq!(loaded.plan.stages.len(), 2);
    assert!(loaded.plan.stages[1].config.env.contains(&"V=5".to_owned()));
    assert!(matches!(&loaded.bake.ready.checks[0], Check::Exec(command)
        if command.args() == ["/bin/sh", "-c", "curl x"]));
    assert_eq!(loaded.bake.ready.timeout.to_string(), "150s");
    assert_eq!(loaded.bake.ready.interval.to_string(), "1s");
}

struct Tagged(&'static str);

impl BaseImages for Tagged {
    fn resolve(&mut self, reference: &str, _: &Platform) -> Result<BaseImage, String> {
        let digest = reference.split_once('@').map_or(self.0, |(_, digest)| digest);
        Ok(BaseImage { digest: digest.to_owned(), ..BaseImage::default() })
    }
}

#[test]
fn the_lock_pins_bases_and_refuses_drift() {
    use parbake_recipes::resolve::Locked;

    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "Dockerfile", "FROM host:5000/img:1\nCOPY a /\n");
    write(dir.path(), "a", "1");
    let now = |images: &mut dyn BaseImages| load(&request(dir.path()), images).unwrap();
    let lock = now(&mut Tagged("sha256:aa")).lock().unwrap();
    let path = dir.path().parent().unwrap().join("no-such.lock");
    assert_eq!(Lock::read(&path).unwrap(), None);
    let reread: Lock = serde_json::from_str(&lock.to_text()).unwrap();
    assert_eq!(reread, lock);
    lock.verify(&now(&mut Tagged("sha256:aa")).lock().unwrap(), &path).unwrap();
    // The tag moved: unlocked builds differ, locked ones get the old image.
    assert_eq!(lock.outdated(&mut Tagged("sha256:bb")).len(), 1);
    let moved = now(&mut Tagged("sha256:bb")).lock().unwrap();
    assert!(lock.verify(&moved, &path).is_err());
    let mut inner = Tagged("sha256:bb");
    let locked = now(&mut Locked::new(&mut inner, &lock));
    assert_eq!(locked.bases[0].digest, "sha256:aa");
    lock.verify(&locked.lock().unwrap(), &path).unwrap();
    // Content counts, and the error says what to run.
    write(dir.path(), "a", "2");
    let changed = now(&mut Tagged("sha256:aa")).lock().unwrap();
    let error = lock.verify(&changed, &path).unwrap_err().to_string();
    assert!(error.contains("the context") && error.contains("parbake recipe lock"), "{error}");
    for (text, expected) in [
        ("{", "x.lock:1:1"),
        ("{\"schemaVersion\": 9}", "lock file of version 9"),
        ("{\"schemaVersion\": 1, \"surprise\": 1}", "unknown field"),
    ] {
        write(dir.path(), "x.lock", text);
        let error = Lock::read(&dir.path().join("x.lock")).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
