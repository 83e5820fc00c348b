//! Signatures, documents and policies: through a registry without the referrers API (Debian's), one
//! with it, and image layouts; and the configuration that leads elsewhere.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parbake_cache::artifact::Descriptor;
use parbake_cache::bundle::{SIGNATURE_PREDICATE, Signatory};
use parbake_cache::keys::{KeyKind, PublicKey, SigningKey};
use parbake_cache::layout::Layout;
use parbake_cache::publish::{PublishError, PublishOptions};
use parbake_cache::referrers::ReferrerSource as _;
use parbake_cache::registries::Registries;
use parbake_cache::registry::{Access, RegistryError, RegistryOptions, Repository};
use parbake_cache::statements::{Document, Statements};
use parbake_cache::transport::{PushOptions, PushReport, TransportError};
use parbake_cache::trust::{Policy, Trust, TrustError, signatures};
use parbake_cache::variant::Choice;
use parbake_cache::{Digest, Store, StoreError, TemplateName};

mod fixture;
#[allow(dead_code, reason = "not every test needs all of it")]
#[path = "fixture/server.rs"]
mod server;
use fixture::pages;
use server::{DockerRegistry, Scripted};

fn options() -> RegistryOptions {
    RegistryOptions { pause: Duration::from_millis(5), retries: 3, ..RegistryOptions::default() }
}

fn with(trust: Trust) -> RegistryOptions {
    RegistryOptions { trust, ..options() }
}

fn by(keys: &[&SigningKey]) -> Trust {
    let keys: Vec<_> = keys.iter().map(|key| key.public()).collect();
    Trust { signers: keys.into(), policy: None }
}

fn key(kind: KeyKind) -> Arc<SigningKey> {
    Arc::new(SigningKey::generate(kind).unwrap())
}

fn name(host: &str, rest: &str) -> TemplateName {
    format!("{host}/{rest}").parse().unwrap()
}

fn bake(directory: &Path, seed: u64) -> (Store, Digest) {
    let store = Store::open(&directory.join(format!("home{seed}"))).unwrap();
    let (template, _) = fixture::baked(&store, &pages(seed, 60), &[(4096, &pages(seed + 1, 40))]);
    (store, template)
}

fn documents() -> Vec<Document> {
    let sbom = Document {
        predicate_type: "https://spdx.dev/Document".to_owned(),
        media_type: Some("application/spdx+json".to_owned()),
        content: serde_json::json!({"spdxVersion": "SPDX-2.3"}),
    };
    let provenance = Document {
        predicate_type: "https://slsa.dev/provenance/v1".to_owned(),
        media_type: None,
        content: serde_json::json!({"buildDefinition": {}}),
    };
    vec![sbom, provenance]
}

fn push(
    store: &Store,
    template: &Digest,
    name: &TemplateName,
    key: Option<&Arc<SigningKey>>,
    documents: Vec<Document>,
) -> PushReport {
    let statements = Statements { key: key.cloned(), documents };
    let push = PushOptions { statements, ..PushOptions::default() };
    store.push(template, name, &options(), &push, &|_| ()).unwrap()
}

fn pull(directory: &Path, name: &TemplateName, trust: Trust) -> Result<Store, TransportError> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let fresh = format!("away{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let store = Store::open(&directory.join(fresh)).unwrap();
    let result = store.pull(name, None, &with(trust), &Choice::All, &|_| ());
    if result.is_err() {
        // Refused before anything was taken in.
        let usage = store.usage().unwrap();
        assert_eq!((usage.objects, usage.images), (0, 0));
        assert!(store.tags().unwrap().is_empty());
    }
    result.map(|_| store)
}

fn refused(result: Result<Store, TransportError>, words: &[&str]) {
    let error = result.unwrap_err();
    assert!(matches!(error, TransportError::Trust(TrustError::Refused { .. })), "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
    }
}

fn listed(host: &str, repository: &str, subject: Digest) -> Vec<Descriptor> {
    let repository = Repository::open(&options(), host, repository, Access::Pull).unwrap();
    repository.referrers(&subject).unwrap()
}

/// The same on every kind of registry.
fn signed_and_unsigned(directory: &Path, host: &str) {
    let (home, template) = bake(directory, 1);
    let at = name(host, "team/py:1");
    let (ours, theirs) = (key(KeyKind::P256), key(KeyKind::Ed25519));

    let report = push(&home, &template, &at, None, vec![]);
    assert!(report.attached.is_empty());
    pull(directory, &at, Trust::default()).unwrap();
    refused(
        pull(directory, &at, by(&[&ours])),
        &["identities given", "no signature", "nothing that is signed"],
    );

    // Documents alone are no signature.
    let report = push(&home, &template, &at, None, documents());
    assert_eq!(report.attached.len(), 2);
    let root = report.digest.unwrap();
    let kinds: Vec<_> =
        listed(host, "team/py", root).into_iter().filter_map(|entry| entry.artifact_type).collect();
    assert_eq!(kinds, ["application/spdx+json", "application/vnd.in-toto+json"]);
    refused(pull(directory, &at, by(&[&ours])), &["nothing that is signed"]);

    // An attestation by the right key is none, either.
    let report = push(&home, &template, &at, Some(&theirs), documents());
    assert_eq!((report.attached.len(), report.digest), (3, Some(root)));
    pull(directory, &at, by(&[&theirs])).unwrap();
    refused(pull(directory, &at, by(&[&ours])), &["another key", &theirs.public().hint()]);

    // A second signer; either will do, and pushing again adds nothing.
    let report = push(&home, &template, &at, Some(&ours), vec![]);
    assert_eq!(report.digest, Some(root));
    let before = listed(host, "team/py", root);
    assert_eq!(before.len(), 6);
    let again = push(&home, &template, &at, Some(&ours), vec![]);
    assert_eq!((again.attached, again.sent_bytes), (report.attached, 0));
    assert_eq!(listed(host, "team/py", root), before);
    for trust in [by(&[&ours]), by(&[&theirs]), by(&[&key(KeyKind::P256), &ours])] {
        let store = pull(directory, &at, trust).unwrap();
        assert!(store.verify(false).unwrap().is_clean());
    }
    let repository = Repository::open(&options(), host, "team/py", Access::Pull).unwrap();
    let found =
        signatures("x", &root, &repository, &vec![ours.public(), theirs.public()].into()).unwrap();
    let mut predicates: Vec<_> = found
        .valid
        .iter()
        .map(|valid| (valid.by == Signatory::Key(1), valid.predicate_type.as_str()))
        .collect();
    predicates.sort_unstable();
    let mut expected = vec![
        (false, SIGNATURE_PREDICATE),
        (true, SIGNATURE_PREDICATE),
        (true, "https://slsa.dev/provenance/v1"),
        (true, "https://spdx.dev/Document"),
    ];
    expected.sort_unstable();
    assert_eq!(predicates, expected);

    // Another template under the same tag does not inherit the signature.
    let (other, changed) = bake(directory, 5);
    push(&other, &changed, &at, None, vec![]);
    refused(pull(directory, &at, by(&[&ours])), &["no signature"]);
}

#[test]
fn signatures_in_a_registry_without_the_api() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), false) else { return };
    signed_and_unsigned(directory.path(), &registry.host);
    // There, the list is a tag.
    let (home, template) = bake(directory.path(), 1);
    let root = push(&home, &template, &name(&registry.host, "b:1"), None, documents()).digest;
    let repository = Repository::open(&options(), &registry.host, "b", Access::Pull).unwrap();
    let list = repository.manifest(&format!("sha256-{}", root.unwrap().hex())).unwrap();
    assert!(String::from_utf8(list.bytes).unwrap().contains("application/spdx+json"));
}

#[test]
fn signatures_in_a_registry_with_the_api() {
    let directory = tempfile::tempdir().unwrap();
    let registry = server::in_memory(true);
    signed_and_unsigned(directory.path(), &registry.host);
    let received = registry.received.lock().unwrap();
    assert!(received.iter().any(|request| request.target.contains("?page=5")));
    // The registry keeps the list itself.
    assert!(received.iter().all(|request| !request.target.contains("/manifests/sha256-")));
}

#[test]
fn signers_at_once_all_stay_in_the_list() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), false) else { return };
    let (home, template) = bake(directory.path(), 1);
    let at = name(&registry.host, "many:1");
    let root = push(&home, &template, &at, None, vec![]).digest.unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| push(&home, &template, &at, Some(&key(KeyKind::Ed25519)), vec![]));
        }
    });
    assert_eq!(listed(&registry.host, "many", root).len(), 4);
}

#[test]
fn a_policy_decides_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let registry = server::in_memory(false);
    let host = &registry.host;
    let (home, template) = bake(directory.path(), 1);
    let ours = key(KeyKind::P256);
    let signed = name(host, "team/signed:1");
    let unsigned = name(host, "team/unsigned:1");
    let other = name(host, "other/x:1");
    push(&home, &template, &signed, Some(&ours), vec![]);
    let root = push(&home, &template, &unsigned, None, vec![]).digest.unwrap();
    push(&home, &template, &other, None, vec![]);
    std::fs::write(directory.path().join("team.pub"), ours.public().to_pem().unwrap()).unwrap();
    let file = directory.path().join("policy.toml");
    let policy = |text: &str| {
        std::fs::write(&file, format!("version = 1\n{text}")).unwrap();
        Trust { policy: Some(Policy::read(&file).unwrap()), ..Trust::default() }
    };
    let team =
        format!("[[rule]]\nmatch = '{host}/team/*'\nrequire = 'signature'\nkeys = ['team.pub']\n");
    pull(directory.path(), &signed, policy(&team)).unwrap();
    pull(directory.path(), &other, policy(&team)).unwrap();
    refused(
        pull(directory.path(), &unsigned, policy(&team)),
        &["rule 1", "team/*", "policy.toml", "team.pub", &root.to_string()],
    );
    // Nothing large was asked for.
    let strict = format!("otherwise = 'refuse'\n{team}");
    refused(pull(directory.path(), &other, policy(&strict)), &["`otherwise`", "policy.toml"]);

    // Pins: the user's own, or the policy's.
    let pin = "[[rule]]\nmatch = '**'\nrequire = 'digest'\n";
    refused(pull(directory.path(), &unsigned, policy(pin)), &["@sha256:", "rule 1"]);
    let store = Store::open(&directory.path().join("pinned")).unwrap();
    store.pull(&unsigned, Some(&root), &with(policy(pin)), &Choice::All, &|_| ()).unwrap();
    let listed = format!("{pin}digests = ['{root}']\n");
    pull(directory.path(), &unsigned, policy(&listed)).unwrap();
    let wrong = format!("{pin}digests = ['{}']\n", Digest::of(b"x"));
    refused(pull(directory.path(), &unsigned, policy(&wrong)), &["not one of the 1"]);
    let both = team.replace("'signature'", "'signature-or-digest'");
    refused(pull(directory.path(), &unsigned, policy(&both)), &["no signature", "@sha256:"]);
    store.pull(&unsigned, Some(&root), &with(policy(&both)), &Choice::All, &|_| ()).unwrap();
    // The first rule that fits decides.
    let never = "[[rule]]\nmatch = '**/unsigned'\nrequire = 'refuse'\n";
    refused(
        pull(directory.path(), &unsigned, policy(&format!("{never}{listed}"))),
        &["refuses all"],
    );
    pull(directory.path(), &unsigned, policy(&format!("{listed}{never}"))).unwrap();
    // Keys of the command come on top of the policy.
    let trust = Trust { signers: vec![key(KeyKind::P256).public()].into(), ..policy(&team) };
    refused(pull(directory.path(), &signed, trust), &["identities given"]);
}

#[test]
fn what_is_attached_is_believed_for_nothing() {
    // Bundles that lie, in every place a registry could put them.
    let directory = tempfile::tempdir().unwrap();
    let registry = server::in_memory(false);
    let (home, template) = bake(directory.path(), 1);
    let (other, changed) = bake(directory.path(), 5);
    let ours = key(KeyKind::P256);
    let good = name(&registry.host, "x:good");
    let bad = name(&registry.host, "x:bad");
    let signed = push(&home, &template, &good, Some(&ours), vec![]).digest.unwrap();
    let unsigned = push(&other, &changed, &bad, None, vec![]).digest.unwrap();
    let repository = Repository::open(&options(), &registry.host, "x", Access::Push).unwrap();
    let tag = |digest: Digest| format!("sha256-{}", digest.hex());
    let kind = "application/vnd.oci.image.index.v1+json";
    // The list of one template under the name of another.
    let list = repository.manifest(&tag(signed)).unwrap().bytes;
    repository.put_manifest(&tag(unsigned), kind, &list).unwrap();
    refused(pull(directory.path(), &bad, by(&[&ours])), &["not attached to what"]);
    // The other's bundle attached to it: about something else.
    let entry = &listed(&registry.host, "x", signed)[0];
    let bundle = parbake_cache::referrers::attached_bytes(&repository, entry, &signed).unwrap();
    let subject = repository.manifest("bad").unwrap().descriptor;
    let attachment = parbake_cache::referrers::Attachment {
        artifact_type: parbake_cache::bundle::BUNDLE_TYPE.to_owned(),
        bytes: bundle,
        annotations: entry.annotations.clone(),
    };
    repository
        .put_manifest(&tag(unsigned), kind, br#"{"schemaVersion":2,"manifests":[]}"#)
        .unwrap();
    repository.attach(&subject, std::slice::from_ref(&attachment)).unwrap();
    refused(pull(directory.path(), &bad, by(&[&ours])), &["about something else"]);
    // Nonsense, and lists that are none.
    for bytes in [&b"{}"[..], b"x", b"{\"mediaType\":1}"] {
        let nonsense =
            parbake_cache::referrers::Attachment { bytes: bytes.to_vec(), ..attachment.clone() };
        repository.attach(&subject, &[nonsense]).unwrap();
    }
    refused(pull(directory.path(), &bad, by(&[&ours])), &["malformed"]);
    repository.put_manifest(&tag(unsigned), kind, b"[]").unwrap();
    let error = pull(directory.path(), &bad, by(&[&ours])).unwrap_err();
    assert!(matches!(error, TransportError::Trust(TrustError::Unreachable { .. })), "{error}");
    pull(directory.path(), &good, by(&[&ours])).unwrap();
}

#[test]
fn layouts_carry_signatures_too() {
    let directory = tempfile::tempdir().unwrap();
    let (home, template) = bake(directory.path(), 1);
    let ours = key(KeyKind::Ed25519);
    let at: TemplateName = "team/py:1".parse().unwrap();
    for archive in [false, true] {
        let path = directory.path().join(if archive { "a.tar" } else { "a" });
        let mut publication = home.publish(&template, &PublishOptions::default()).unwrap();
        let statements = Statements { key: Some(Arc::clone(&ours)), documents: documents() };
        publication.attach(&statements, &at);
        match archive {
            true => publication.export_archive(&path, &at).unwrap(),
            false => publication.export_directory(&path, &at).unwrap(),
        }
        let layout = Layout::open(&path).unwrap();
        for tag in [None, Some("1")] {
            let (root, _) = layout.root(tag).unwrap();
            assert_eq!(layout.referrers(&root.digest).unwrap().len(), 3);
            by(&[&ours]).check(&at, false, &root, &layout).unwrap();
            let error = by(&[&key(KeyKind::P256)]).check(&at, false, &root, &layout).unwrap_err();
            assert!(error.to_string().contains("another key"), "{error}");
        }
    }
}

/// Copied with their tag, signatures hold as long as the tool leaves the index as it is. Old skopeo
/// (1.9) writes it anew without the fields it does not know: then it is another, and unsigned.
#[test]
fn signatures_hold_for_what_was_copied_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let Some(registry) = DockerRegistry::start(directory.path(), false) else { return };
    if Command::new("skopeo").arg("--version").output().is_err() {
        eprintln!("skipped: there is no skopeo here");
        return;
    }
    let (home, template) = bake(directory.path(), 1);
    let ours = key(KeyKind::P256);
    let from = name(&registry.host, "a:1");
    let root = push(&home, &template, &from, Some(&ours), documents()).digest.unwrap();
    let tag = format!("sha256-{}", root.hex());
    let copy = |how: &[&str], from: &str, to: &str| {
        let output = Command::new("skopeo")
            .args(["copy", "--all", "--quiet"])
            .args(["--src-tls-verify=false", "--dest-tls-verify=false"])
            .args(how)
            .args([from, to].map(|rest| format!("docker://{}/{rest}", registry.host)))
            .output()
            .unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    };
    for (repository, how) in [("b", &[][..]), ("c", &["--preserve-digests"])] {
        // The list goes along in any case, whatever becomes of the artifact types in it.
        copy(&[], &format!("a:{tag}"), &format!("{repository}:{tag}")).unwrap();
        match copy(how, "a:1", &format!("{repository}:2")) {
            Ok(()) => {}
            // Told to leave the index as it is, it copies nothing rather than another one.
            Err(error) if !how.is_empty() => {
                println!("skopeo {how:?}: {error}");
                assert!(error.contains("digest"), "{error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        let at = Repository::open(&options(), &registry.host, repository, Access::Pull).unwrap();
        let found = signatures("x", &root, &at, &vec![ours.public()].into()).unwrap();
        assert_eq!(found.valid.len(), 3, "{found:?}");
        let copied = at.manifest("2").unwrap().descriptor.digest;
        let name = name(&registry.host, &format!("{repository}:2"));
        let pulled = pull(directory.path(), &name, by(&[&ours]));
        println!("skopeo {how:?}: the index is the same: {}", copied == root);
        match copied == root {
            true => drop(pulled.unwrap()),
            false => {
                assert!(how.is_empty(), "the digest was to be preserved");
                refused(pulled, &["no signature"]);
            }
        }
    }
}

#[test]
fn mirrors_are_asked_first_and_blocked_registries_never() {
    let directory = tempfile::tempdir().unwrap();
    let (upstream, mirror) = (server::in_memory(false), server::in_memory(false));
    let (home, template) = bake(directory.path(), 1);
    push(&home, &template, &name(&upstream.host, "team/py:1"), None, vec![]);
    let root =
        push(&home, &template, &name(&mirror.host, "cache/py:1"), None, vec![]).digest.unwrap();
    let file = directory.path().join("registries.conf");
    let with = |text: String| {
        std::fs::write(&file, text).unwrap();
        let registries = Registries::from_environment(Some(&file)).unwrap();
        RegistryOptions { registries, ..options() }
    };
    let count = |server: &Scripted| server.received.lock().unwrap().len();
    let get = |label: &str, options: &RegistryOptions, pinned: Option<&Digest>| {
        let store = Store::open(&directory.path().join(label)).unwrap();
        let name = "reg.invalid/team/py:1".parse().unwrap();
        store.pull(&name, pinned, options, &Choice::All, &|_| ()).map(|_| {
            assert!(store.verify(false).unwrap().is_clean());
            assert_eq!(store.resolve("reg.invalid/team/py:1").unwrap().1, template);
        })
    };
    // One that is away, one that has it; the registry itself does not exist.
    let before = count(&upstream);
    let options = with(format!(
        "[[registry]]\nprefix = 'reg.invalid/team'\nlocation = '{}/team'\n\
         [[registry.mirror]]\nlocation = '127.0.0.1:1/x'\n\
         [[registry.mirror]]\nlocation = '{}/cache'\n",
        upstream.host, mirror.host
    ));
    get("mirrored", &options, None).unwrap();
    assert_eq!(count(&upstream), before);
    // Mirrors for digests only: the location itself is asked.
    let seen = count(&mirror);
    let options = with(format!(
        "[[registry]]\nprefix = 'reg.invalid/team'\nlocation = '{}/team'\nmirror-by-digest-only = true\n\
         [[registry.mirror]]\nlocation = '{}/cache'\n",
        upstream.host, mirror.host
    ));
    get("located", &options, None).unwrap();
    assert_eq!(count(&mirror), seen);
    get("pinned", &options, Some(&root)).unwrap();
    assert!(count(&mirror) > seen);
    // What a mirror lacks the location has.
    let empty = server::in_memory(false);
    let options = with(format!(
        "[[registry]]\nprefix = 'reg.invalid/team'\nlocation = '{}/team'\n\
         [[registry.mirror]]\nlocation = '{}/cache'\n",
        upstream.host, empty.host
    ));
    get("passed over", &options, None).unwrap();
    assert!(count(&empty) > 0);
    let options = with("[[registry]]\nlocation = 'reg.invalid'\nblocked = true\n".to_owned());
    let error = get("blocked", &options, None).unwrap_err();
    assert!(matches!(&error, TransportError::Registry(RegistryError::Blocked { .. })), "{error}");
    assert!(error.to_string().contains("registries.conf"), "{error}");
}

#[test]
fn an_interrupted_push_and_pull_end_soon_and_go_on_later() {
    static LEFT: AtomicUsize = AtomicUsize::new(usize::MAX);
    fn stop() -> bool {
        LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| match left {
            0 | usize::MAX => None,
            left => Some(left - 1),
        })
        .unwrap_or_else(|left| left)
            == 0
    }
    let directory = tempfile::tempdir().unwrap();
    let registry = server::in_memory(false);
    let (home, template) = bake(directory.path(), 1);
    let at = name(&registry.host, "x:1");
    let options = RegistryOptions { cancelled: Some(stop), ..options() };
    // While it is packed, and on the line.
    let (mut packing, mut interrupted) = (0, 0);
    for after in (1..).step_by(4) {
        LEFT.store(after, Ordering::Relaxed);
        match home.push(&template, &at, &options, &PushOptions::default(), &|_| ()) {
            Err(TransportError::Registry(RegistryError::Interrupted)) => interrupted += 1,
            Err(TransportError::Publish(PublishError::Store(StoreError::Interrupted))) => {
                packing += 1;
            }
            result => {
                result.unwrap();
                break;
            }
        }
    }
    assert!(packing >= 2 && interrupted >= 2, "{packing} {interrupted}");
    LEFT.store(usize::MAX, Ordering::Relaxed);
    home.push(&template, &at, &options, &PushOptions::default(), &|_| ()).unwrap();
    let away = Store::open(&directory.path().join("away")).unwrap();
    interrupted = 0;
    for after in [1, 10, 15, 20, 25] {
        LEFT.store(after, Ordering::Relaxed);
        if let Err(error) = away.pull(&at, None, &options, &Choice::All, &|_| ()) {
            assert!(error.to_string().contains("interrupted"), "{error}");
            interrupted += 1;
            assert!(away.verify(false).unwrap().is_clean());
        }
    }
    assert!(interrupted >= 2, "{interrupted}");
    LEFT.store(usize::MAX, Ordering::Relaxed);
    away.pull(&at, None, &options, &Choice::All, &|_| ()).unwrap();
    assert!(away.verify(false).unwrap().is_clean());
}

#[test]
fn keys_in_files_are_read_or_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none.pub");
    let error = PublicKey::read(&path).unwrap_err().to_string();
    assert!(error.contains("none.pub"), "{error}");
    std::fs::write(&path, [0xff; 100]).unwrap();
    let error = PublicKey::read(&path).unwrap_err().to_string();
    assert!(error.contains("not text"), "{error}");
}
