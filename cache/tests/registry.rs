//! Push and pull against Debian's docker-registry, and against servers that misbehave.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use parbake_cache::credentials::{Credential, Credentials};
use parbake_cache::registry::{Access, RegistryError, RegistryOptions, Repository};
use parbake_cache::transport::{PushOptions, TransportError};
use parbake_cache::variant::Choice;
use parbake_cache::{Digest, Store, TemplateName};

mod fixture;
#[allow(dead_code, reason = "not every test needs all of it")]
#[path = "fixture/server.rs"]
mod server;
use fixture::pages;
use server::{DockerRegistry, Scripted};

fn store(directory: &Path, name: &str) -> Store {
    Store::open(&directory.join(name)).unwrap()
}

fn options() -> RegistryOptions {
    RegistryOptions { pause: Duration::from_millis(5), retries: 3, ..RegistryOptions::default() }
}

fn bake(store: &Store, rootfs: &[u8], memory: u64) -> (Digest, Digest) {
    fixture::baked(store, rootfs, &[(4096, &pages(memory, 200)), (40 << 20, &rootfs[..16384])])
}

fn name(host: &str, rest: &str) -> TemplateName {
    format!("{host}/{rest}").parse().unwrap()
}

#[test]
fn push_sends_what_is_missing_and_pull_brings_it_all() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), false) else { return };
    let home = store(directory.path(), "home");
    let rootfs = pages(1, 500);
    let (template, snapshot) = bake(&home, &rootfs, 2);
    let push = |store: &Store, template: &Digest, name: &TemplateName| {
        store.push(template, name, &options(), &PushOptions::default(), &|_| ()).unwrap()
    };
    let (one, two) = (name(&registry.host, "team/py:3.12"), name(&registry.host, "team/py:next"));
    let first = push(&home, &template, &one);
    assert_eq!((first.existing_bytes, first.replaced), (0, None));
    assert_eq!(first.sent_bytes, first.total_bytes);
    let again = push(&home, &template, &one);
    assert_eq!((again.sent_bytes, again.digest), (0, first.digest));
    assert_eq!(again.replaced, first.digest);

    let away = store(directory.path(), "away");
    let pull = |store: &Store, name: &TemplateName, choice| {
        store.pull(name, None, &options(), &choice, &|_| ()).unwrap()
    };
    let report = pull(&away, &one, Choice::All);
    assert_eq!(report.template, template);
    assert_eq!(away.resolve(&one.to_string()).unwrap().1, template);
    assert_eq!(away.snapshots(&template).unwrap()[0].0, snapshot);
    assert!(away.verify(false).unwrap().is_clean());
    // Pulled again, nothing large comes.
    let fetched: u64 =
        pull(&away, &one, Choice::All).installed.iter().map(|i| i.fetched_bytes).sum();
    assert!(fetched < 20_000, "{fetched}");

    // A change in one place, pushed from a machine that has nothing but the new template.
    let runner = store(directory.path(), "runner");
    let mut changed = rootfs;
    changed[300 * 4096..301 * 4096].copy_from_slice(&pages(7, 1));
    let (next, _) = bake(&runner, &changed, 2);
    let options_upon = PushOptions { build_upon: vec![one], ..PushOptions::default() };
    let second = runner.push(&next, &two, &options(), &options_upon, &|_| ()).unwrap();
    assert!(second.sent_bytes * 10 < first.sent_bytes, "{second:?} after {first:?}");
    // The one that has the old one knows where to look by itself, and in another repository.
    let (third, _) = bake(&away, &changed, 3);
    let elsewhere = name(&registry.host, "other/app:1");
    let report = push(&away, &third, &elsewhere);
    assert!(report.sent_bytes < first.sent_bytes / 2, "{report:?} after {first:?}");
    assert!(report.mounted_bytes + report.existing_bytes > first.total_bytes / 3, "{report:?}");
    for (number, (name, template)) in [(&two, next), (&elsewhere, third)].iter().enumerate() {
        let fresh = store(directory.path(), &format!("fresh{number}"));
        assert_eq!(pull(&fresh, name, Choice::All).template, *template);
        assert!(fresh.verify(false).unwrap().is_clean());
        pull(&away, name, Choice::All);
    }
    assert!(away.verify(false).unwrap().is_clean());

    // A pinned digest is what is pulled, wherever the tag went.
    push(&home, &template, &two);
    let pinned = away.pull(&two, second.digest.as_ref(), &options(), &Choice::All, &|_| ());
    assert_eq!(pinned.unwrap().template, next);
    let missing = name(&registry.host, "team/py:none");
    let error = away.pull(&missing, None, &options(), &Choice::All, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("has no team/py:none"), "{error}");
}

#[test]
fn skopeo_copies_a_template_between_registries() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), false) else { return };
    if Command::new("skopeo").arg("--version").output().is_err() {
        eprintln!("skipped: there is no skopeo here");
        return;
    }
    let home = store(directory.path(), "home");
    let (template, _) = bake(&home, &pages(1, 300), 2);
    let from = name(&registry.host, "a:1");
    home.push(&template, &from, &options(), &PushOptions::default(), &|_| ()).unwrap();
    let to = name(&registry.host, "deep/er/b:2");
    let output = Command::new("skopeo")
        .args(["copy", "--all", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false"])
        .args([format!("docker://{from}"), format!("docker://{to}")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let away = store(directory.path(), "away");
    let report = away.pull(&to, None, &options(), &Choice::All, &|_| ()).unwrap();
    assert_eq!(report.template, template);
    assert!(away.verify(false).unwrap().is_clean());
    // Dressed as an image, it goes the same way.
    let dressed = name(&registry.host, "dressed:1");
    let image = PushOptions { compat_image: true, ..PushOptions::default() };
    home.push(&template, &dressed, &options(), &image, &|_| ()).unwrap();
    let copy = name(&registry.host, "dressed:2");
    let output = Command::new("skopeo")
        .args(["copy", "--all", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false"])
        .args([format!("docker://{dressed}"), format!("docker://{copy}")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let fresh = store(directory.path(), "fresh");
    let report = fresh.pull(&copy, None, &options(), &Choice::All, &|_| ()).unwrap();
    assert_eq!(report.template, template);
    // An ordinary image is refused, with the way out.
    let image = directory.path().join("image");
    std::fs::create_dir_all(image.join("blobs/sha256")).unwrap();
    let put = |bytes: &str| {
        let digest = Digest::of(bytes.as_bytes());
        std::fs::write(image.join("blobs/sha256").join(digest.hex()), bytes).unwrap();
        format!(r#""digest":"{digest}","size":{}"#, bytes.len())
    };
    let config =
        put(r#"{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}"#);
    let manifest = put(&format!(
        r#"{{"schemaVersion":2,"config":{{"mediaType":"application/vnd.oci.image.config.v1+json",{config}}},"layers":[]}}"#
    ));
    std::fs::write(image.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    std::fs::write(
        image.join("index.json"),
        format!(r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"application/vnd.oci.image.manifest.v1+json",{manifest}}}]}}"#),
    )
    .unwrap();
    let plain = name(&registry.host, "plain:1");
    let output = Command::new("skopeo")
        .args(["copy", "--quiet", "--dest-tls-verify=false"])
        .args([format!("oci:{}", image.display()), format!("docker://{plain}")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let error = away.pull(&plain, None, &options(), &Choice::All, &|_| ()).unwrap_err();
    assert!(error.to_string().contains("parbake build --from docker://"), "{error}");
    // And a template pushed over it is none the worse for it.
    home.push(&template, &plain, &options(), &PushOptions::default(), &|_| ()).unwrap();
    away.pull(&plain, None, &options(), &Choice::All, &|_| ()).unwrap();
}

#[test]
fn a_registry_with_passwords_wants_the_right_one() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), true) else { return };
    let home = store(directory.path(), "home");
    let (template, _) = bake(&home, &pages(1, 50), 2);
    let at = name(&registry.host, "team/py:1");
    let with = |password: &str| RegistryOptions {
        credentials: Credentials::fixed(Credential::Basic {
            user: "baker".to_owned(),
            password: password.to_owned(),
        }),
        ..options()
    };
    for wrong in [options(), with("guess")] {
        let error =
            home.push(&template, &at, &wrong, &PushOptions::default(), &|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("parbake login") && !text.contains("guess"), "{text}");
    }
    home.push(&template, &at, &with("secret"), &PushOptions::default(), &|_| ()).unwrap();
    let away = store(directory.path(), "away");
    assert!(away.pull(&at, None, &options(), &Choice::All, &|_| ()).is_err());
    away.pull(&at, None, &with("secret"), &Choice::All, &|_| ()).unwrap();
}

#[test]
fn two_pushers_of_one_tag_leave_one_of_the_two() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), false) else { return };
    let at = name(&registry.host, "race:1");
    let push = |seed: u64| {
        let store = store(directory.path(), &format!("home{seed}"));
        let (template, _) = bake(&store, &pages(seed, 200), seed);
        store.push(&template, &at, &options(), &PushOptions::default(), &|_| ()).unwrap();
        template
    };
    let templates: Vec<Digest> = std::thread::scope(|scope| {
        let running = [1, 2].map(|seed| {
            let push = &push;
            scope.spawn(move || push(seed))
        });
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let away = store(directory.path(), "away");
    let report = away.pull(&at, None, &options(), &Choice::All, &|_| ()).unwrap();
    assert!(templates.contains(&report.template));
    assert!(away.verify(false).unwrap().is_clean());
}

fn repository(options: &RegistryOptions, host: &str) -> Repository {
    Repository::open(options, host, "x", Access::Pull).unwrap()
}

fn header(name: &str, value: impl Into<String>) -> (String, String) {
    (name.to_owned(), value.into())
}

#[test]
fn credentials_go_to_the_registry_and_its_token_service_and_nowhere_else() {
    let storage = Scripted::start(|_| (200, vec![], b"blob bytes".to_vec()));
    let tokens = Scripted::start(|_| (200, vec![], br#"{"token":"abc"}"#.to_vec()));
    let (realm, elsewhere) = (tokens.host.clone(), storage.host.clone());
    let registry = Scripted::start(move |request| {
        if request.headers.get("authorization").is_none_or(|value| value != "Bearer abc") {
            let challenge = format!(r#"Bearer realm="http://{realm}/token",service="reg""#);
            return (401, vec![header("www-authenticate", challenge)], vec![]);
        }
        (307, vec![header("location", format!("http://{elsewhere}/signed"))], vec![])
    });
    let with = RegistryOptions {
        credentials: Credentials::fixed(Credential::Basic {
            user: "u".to_owned(),
            password: "p".to_owned(),
        }),
        ..options()
    };
    let repository = repository(&with, &registry.host);
    let mut read = Vec::new();
    let mut blob = repository.blob(&Digest::of(b"x"), 5..10, 10).unwrap();
    std::io::Read::read_to_end(&mut blob, &mut read).unwrap();
    // The storage knows no ranges, and what was not asked for is skipped.
    assert_eq!(read, b"bytes");
    let asked = tokens.received.lock().unwrap().clone();
    assert_eq!(asked[0].headers["authorization"], "Basic dTpw");
    assert!(asked[0].target.contains("scope=repository%3Ax%3Apull"), "{}", asked[0].target);
    assert!(asked[0].target.contains("service=reg"));
    let stored = storage.received.lock().unwrap().clone();
    assert_eq!(stored.len(), 1);
    assert!(!stored[0].headers.contains_key("authorization"), "{stored:?}");
    // The password never reached the registry itself.
    let seen = registry.received.lock().unwrap().clone();
    assert!(seen.iter().all(|r| r.headers.get("authorization").is_none_or(|v| v == "Bearer abc")));
}

#[test]
fn an_open_line_to_another_host_is_refused() {
    for realm in ["http://auth.invalid/token", "http://192.0.2.1/token"] {
        let registry = Scripted::start(move |_| {
            let challenge = format!(r#"Bearer realm="{realm}""#);
            (401, vec![header("www-authenticate", challenge)], vec![])
        });
        let with = RegistryOptions {
            credentials: Credentials::fixed(Credential::Identity("t".to_owned())),
            ..options()
        };
        let error = repository(&with, &registry.host).manifest("1").unwrap_err();
        assert!(matches!(error, RegistryError::Plain { .. }), "{error}");
    }
    let registry =
        Scripted::start(|_| (302, vec![header("location", "http://192.0.2.1/x")], vec![]));
    let error = repository(&options(), &registry.host).manifest("1").unwrap_err();
    assert!(matches!(error, RegistryError::Plain { .. }), "{error}");
}

#[test]
fn answers_that_make_no_sense_are_errors_not_hangs() {
    type Case = (&'static str, fn(&server::Received) -> server::Answer, &'static str);
    let cases: [Case; 9] = [
        ("loop", |r| (302, vec![header("location", r.target.clone())], vec![]), "redirected more"),
        ("nowhere", |_| (302, vec![], vec![]), "to nowhere"),
        ("huge", |_| (200, vec![], vec![b' '; (4 << 20) + 1]), "larger than"),
        (
            "denied",
            |_| (403, vec![], br#"{"errors":[{"code":"DENIED","message":"not yours"}]}"#.to_vec()),
            "DENIED not yours",
        ),
        ("missing", |_| (404, vec![], vec![]), "has no x:1"),
        ("broken", |_| (500, vec![], vec![]), "answered 500"),
        ("teapot", |_| (418, vec![], b"\x1b[2Jhello".to_vec()), "answered 418"),
        (
            "no token",
            |_| (401, vec![header("www-authenticate", "Bearer service=\"x\"")], vec![]),
            "without saying where",
        ),
        ("cut", |_| (200, vec![header("content-length", "100")], b"{}".to_vec()), "cannot reach"),
    ];
    for (case, answer, why) in cases {
        let registry = Scripted::start(answer);
        let error = repository(&options(), &registry.host).manifest("1").unwrap_err().to_string();
        assert!(error.contains(why) && !error.contains('\x1b'), "{case}: {error}");
    }
    let nobody = repository(&options(), "127.0.0.1:1").manifest("1").unwrap_err();
    assert!(matches!(nobody, RegistryError::Unreachable { .. }), "{nobody}");
    // Bytes that are not what the digest says.
    let registry = Scripted::start(|_| (200, vec![], b"{}".to_vec()));
    let error = repository(&options(), &registry.host).manifest(&Digest::of(b"x").to_string());
    assert!(error.unwrap_err().to_string().contains("hash to"));
}

#[test]
fn what_passes_is_waited_for() {
    let count = std::sync::atomic::AtomicU32::new(0);
    let registry =
        Scripted::start(move |_| match count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => (429, vec![header("retry-after", "0")], vec![]),
            1 => (503, vec![], vec![]),
            2 => (
                200,
                vec![header("content-type", "application/vnd.oci.image.index.v1+json")],
                b"{}".to_vec(),
            ),
            _ => (500, vec![], vec![]),
        });
    let fetched = repository(&options(), &registry.host).manifest("1").unwrap();
    assert_eq!(fetched.bytes, b"{}");
    // The probe for TLS does not count as a request: it never becomes one.
    assert_eq!(registry.received.lock().unwrap().len(), 3);
}

#[test]
fn a_name_without_a_registry_cannot_be_pushed() {
    let directory = tempfile::tempdir().unwrap();
    let home = store(directory.path(), "home");
    let name: TemplateName = "py:1".parse().unwrap();
    let template = Digest::of(b"x");
    let error =
        home.push(&template, &name, &options(), &PushOptions::default(), &|_| ()).unwrap_err();
    assert!(matches!(error, TransportError::NoRegistry(_)));
    assert!(error.to_string().contains("reg.example/py:1"), "{error}");
}
