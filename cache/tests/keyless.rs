//! Keyless signatures: by the public sigstore instance, and by an authority and a log of our own that
//! sign a template as cosign has them sign it.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parbake_cache::artifact::Descriptor;
use parbake_cache::bundle::{
    self, BUNDLE_TYPE, BundleError, SIGNATURE_PREDICATE, Signatory, Signers,
};
use parbake_cache::keyless::{Identity, KeylessError, Signer, TrustedRoot};
use parbake_cache::keys::{KeyKind, SigningKey};
use parbake_cache::referrers::Attachment;
use parbake_cache::registry::{Access, RegistryOptions, Repository};
use parbake_cache::transport::{PushOptions, TransportError};
use parbake_cache::trust::{PREDICATE_ANNOTATION, Policy, Trust, TrustError};
use parbake_cache::variant::Choice;
use parbake_cache::{Digest, Store, TemplateName};
use serde_json::{Value, json};

mod fixture;
#[path = "fixture/instance.rs"]
mod instance;
#[allow(dead_code, reason = "not every test needs all of it")]
#[path = "fixture/server.rs"]
mod server;
use fixture::pages;
use instance::{CODE_SIGNING, ISSUER, Instance, NOW, SERVER, email, statement};

const PUBLIC: &str = include_str!("keyless/public.sigstore.json");
const REKOR2: &str = include_str!("keyless/rekor2.sigstore.json");
const ROOT: &str = include_str!("keyless/trusted_root.json");

/// Who has signed what is public.
const THEM: (&str, &str) = (
    "https://github.com/prefix-dev/sigstore-example/.github/workflows/action.yaml@refs/heads/main",
    "https://token.actions.githubusercontent.com",
);

fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn signers(root: &Value, subject: &str, issuer: &str) -> Signers {
    let root = TrustedRoot::parse(root.to_string().as_bytes(), "root.json").unwrap();
    let (subject, issuer) = (subject.to_owned(), issuer.to_owned());
    Signers { keys: vec![], identities: vec![Identity { subject, issuer, root: Arc::new(root) }] }
}

fn check(
    root: &Value,
    bundle: &Value,
    about: &Digest,
    who: (&str, &str),
) -> Result<(), BundleError> {
    let signers = signers(root, who.0, who.1);
    let verified = bundle::verify(bundle.to_string().as_bytes(), about, &signers)?;
    assert_eq!(verified.by, Signatory::Identity(0));
    Ok(())
}

#[track_caller]
fn keyless(result: Result<(), BundleError>) -> KeylessError {
    match result {
        Err(BundleError::Keyless(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// What the payload of a bundle is about.
fn subject(bundle: &Value) -> Digest {
    let payload = STANDARD.decode(bundle["dsseEnvelope"]["payload"].as_str().unwrap()).unwrap();
    let payload: Value = serde_json::from_slice(&payload).unwrap();
    format!("sha256:{}", payload["subject"][0]["digest"]["sha256"].as_str().unwrap())
        .parse()
        .unwrap()
}

/// Flips a bit in the middle of base64.
fn bent(value: &Value) -> Value {
    let mut bytes = STANDARD.decode(value.as_str().unwrap()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    STANDARD.encode(bytes).into()
}

/// Every part of what makes a bundle credible is needed, whoever has made it.
fn every_part_counts(root: &Value, bundle: &Value, who: (&str, &str)) {
    let about = subject(bundle);
    check(root, bundle, &about, who).unwrap();
    let other = check(root, bundle, &Digest::of(b"other"), who);
    assert_eq!(other, Err(BundleError::OtherSubject));
    let is = Signer { subject: who.0.to_owned(), issuer: who.1.to_owned() };
    for (subject, issuer) in [("x@y.z", who.1), (who.0, "https://elsewhere.example"), ("", "")] {
        let error = keyless(check(root, bundle, &about, (subject, issuer)));
        assert_eq!(error, KeylessError::OtherIdentity(is.clone()));
        assert!(error.to_string().contains(who.0) && error.to_string().contains(who.1), "{error}");
    }

    const ENTRY: &str = "/verificationMaterial/tlogEntries/0";
    let change = |document: &Value, place: &str, new: &dyn Fn(&Value) -> Value| {
        let mut document = document.clone();
        let part = document.pointer_mut(place).unwrap_or_else(|| panic!("no {place}"));
        *part = new(part);
        document
    };
    let entry = |rest: &str| format!("{ENTRY}{rest}");
    let null = |_: &Value| Value::Null;
    let more = |value: &Value| {
        let number: i64 = value.as_str().unwrap().parse().unwrap();
        (number + 1).to_string().into()
    };
    let head = |value: &Value| {
        // Another tree of the same size, and no signature for it.
        let text = value.as_str().unwrap();
        let mut lines: Vec<String> = text.split('\n').map(str::to_owned).collect();
        lines[2] = STANDARD.encode([7; 32]);
        lines.join("\n").into()
    };
    let signature = |value: &Value| {
        let text = value.as_str().unwrap().trim_end();
        let (body, last) = text.rsplit_once(' ').unwrap();
        format!("{body} {}\n", bent(&last.into()).as_str().unwrap()).into()
    };
    type Change<'a> = &'a dyn Fn(&Value) -> Value;
    let cases: Vec<(String, Change<'_>, &str)> = vec![
        ("/dsseEnvelope/payload".to_owned(), &bent, "about something else"),
        ("/dsseEnvelope/signatures/0/sig".to_owned(), &bent, "about something else"),
        ("/verificationMaterial/certificate/rawBytes".to_owned(), &bent, ""),
        ("/verificationMaterial/tlogEntries".to_owned(), &|_| json!([]), "no entry"),
        (entry("/canonicalizedBody"), &bent, "promise"),
        (entry("/integratedTime"), &more, "promise"),
        (entry("/logIndex"), &more, "promise"),
        (entry("/logId/keyId"), &bent, "no log in the trusted root"),
        (entry("/inclusionPromise"), &null, "has no promise"),
        (entry("/inclusionPromise/signedEntryTimestamp"), &bent, "promise"),
        (entry("/inclusionProof"), &null, "has no proof"),
        (entry("/inclusionProof/rootHash"), &bent, "proof of inclusion does not hold"),
        (entry("/inclusionProof/logIndex"), &more, "proof of inclusion does not hold"),
        (entry("/inclusionProof/hashes/0"), &bent, "proof of inclusion does not hold"),
        (entry("/inclusionProof/checkpoint/envelope"), &head, "another tree"),
        (entry("/inclusionProof/checkpoint/envelope"), &signature, "not signed by the log"),
        (entry("/kindVersion/version"), &|_| "0.0.2".into(), ""),
    ];
    for (place, new, why) in cases {
        let result = check(root, &change(bundle, &place, new), &about, who);
        let error = result.expect_err(&place).to_string();
        assert!(error.contains(why), "{place}: {error}");
    }

    // And so does every part of the root.
    let early = |_: &Value| json!({"start": "2020-01-01T00:00:00Z", "end": "2020-02-01T00:00:00Z"});
    let all = |list: &str, rest: &str, new: Change<'_>| {
        let mut root = root.clone();
        for number in 0..root[list].as_array().unwrap().len() {
            root = change(&root, &format!("/{list}/{number}{rest}"), new);
        }
        root
    };
    let spki = |_: &Value| {
        let pem = SigningKey::generate(KeyKind::P256).unwrap().public().to_pem().unwrap();
        let lines: String = pem.lines().filter(|line| !line.contains("---")).collect();
        lines.into()
    };
    for (root, why) in [
        (all("tlogs", "/publicKey/validFor", &early), "did not count then"),
        (all("tlogs", "/publicKey/rawBytes", &spki), "promise"),
        (all("ctlogs", "/publicKey/validFor", &early), "none of its timestamps"),
        (all("ctlogs", "/publicKey/rawBytes", &spki), "none of its timestamps"),
        (all("ctlogs", "/logId/keyId", &bent), "none of its timestamps"),
        (all("certificateAuthorities", "/validFor", &early), "none that counted then"),
        (
            all("certificateAuthorities", "/certChain/certificates", &|list| {
                // The top alone, without what it has let in.
                json!([list.as_array().unwrap().last().unwrap()])
            }),
            if bundle["own"].is_null() { "no authority" } else { "" },
        ),
    ] {
        match check(&root, bundle, &about, who) {
            // An authority of one certificate has nothing to lose.
            Ok(()) => assert!(why.is_empty(), "{why}"),
            Err(error) => assert!(error.to_string().contains(why), "{why}: {error}"),
        }
    }
}

#[test]
fn what_the_public_instance_has_signed_is_believed() {
    let (root, bundle) = (document(ROOT), document(PUBLIC));
    every_part_counts(&root, &bundle, THEM);
    // Rekor 2, said by name.
    let bundle = document(REKOR2);
    let error = keyless(check(&root, &bundle, &subject(&bundle), THEM));
    assert!(error.to_string().contains("hashedrekord 0.0.2"), "{error}");
    // Without anybody to look for, it is by a key that is not known.
    let nobody = Signers::from(vec![SigningKey::generate(KeyKind::P256).unwrap().public()]);
    let error = bundle::verify(PUBLIC.as_bytes(), &subject(&bundle), &nobody).unwrap_err();
    assert_eq!(error, BundleError::OtherKey("by a certificate".to_owned()));
}

const WHO: (&str, &str) = ("a@team.example", ISSUER);

#[test]
fn what_an_own_instance_has_signed_is_believed() {
    let (ours, theirs) = (Instance::new(), Instance::new());
    let said = statement(&Digest::of(b"template"));
    let mut bundle = ours.sign(&said, &email(WHO.0), CODE_SIGNING, NOW);
    bundle["own"] = json!(true);
    every_part_counts(&ours.root(), &bundle, WHO);
    let about = subject(&bundle);
    let refused = |bundle: &Value, why: &str| {
        let result = check(&ours.root(), bundle, &about, WHO);
        assert!(result.is_err(), "{why}");
        let error = keyless(result).to_string();
        assert!(error.contains(why), "{why}: {error}");
    };
    // Another instance has the same to say.
    refused(&theirs.sign(&said, &email(WHO.0), CODE_SIGNING, NOW), "no log in the trusted root");
    // Its authority, with our logs.
    let mut half = Instance::new();
    half.authority = SigningKey::from_pem(&theirs.authority.to_pem().unwrap(), "x").unwrap();
    half.log = SigningKey::from_pem(&ours.log.to_pem().unwrap(), "x").unwrap();
    refused(&half.sign(&said, &email(WHO.0), CODE_SIGNING, NOW), "no authority");
    // Logged before and after the certificate's minutes.
    for time in [NOW - 400, NOW + 400] {
        refused(&ours.sign(&said, &email(WHO.0), CODE_SIGNING, time), "another time");
    }
    // A certificate for something else, or of several, or of none.
    refused(&ours.sign(&said, &email(WHO.0), SERVER, NOW), "not for signing code");
    let two = [email(WHO.0), email("b@c.d")].concat();
    refused(&ours.sign(&said, &two, CODE_SIGNING, NOW), "exactly one identity");
    refused(&ours.sign(&said, &[], CODE_SIGNING, NOW), "not one for signing");
}

#[test]
fn a_template_that_an_identity_has_signed_is_pulled() {
    let directory = tempfile::tempdir().unwrap();
    for api in [true, false] {
        let registry = server::in_memory(api);
        let options = RegistryOptions {
            pause: Duration::from_millis(5),
            retries: 3,
            ..RegistryOptions::default()
        };
        let home = Store::open(&directory.path().join(format!("home{api}"))).unwrap();
        let (template, _) = fixture::baked(&home, &pages(1, 60), &[(4096, &pages(2, 40))]);
        let name: TemplateName = format!("{}/team/py:1", registry.host).parse().unwrap();
        let report =
            home.push(&template, &name, &options, &PushOptions::default(), &|_| ()).unwrap();
        let digest = report.digest.unwrap();
        let ours = Instance::new();
        let bundle = ours.sign(&statement(&digest), &email(WHO.0), CODE_SIGNING, NOW);
        let repository =
            Repository::open(&options, &registry.host, "team/py", Access::Push).unwrap();
        let subject: Descriptor = repository.manifest("1").unwrap().descriptor;
        let pull = |trust: Trust| {
            let away = tempfile::tempdir_in(directory.path()).unwrap();
            let store = Store::open(&away.path().join("store")).unwrap();
            let options = RegistryOptions { trust, ..options.clone() };
            let result = store.pull(&name, None, &options, &Choice::All, &|_| ());
            assert_eq!(result.is_ok(), store.usage().unwrap().images > 0);
            result.map(|report| report.template)
        };
        let by = |who: (&str, &str)| Trust {
            signers: signers(&ours.root(), who.0, who.1),
            policy: None,
        };
        let refused = |trust: Trust, words: &[&str]| {
            let error = pull(trust).unwrap_err();
            assert!(matches!(error, TransportError::Trust(TrustError::Refused { .. })), "{error}");
            for word in words {
                assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
            }
        };
        refused(by(WHO), &["no signature by a@team.example", "nothing that is signed"]);
        let attachment = Attachment {
            artifact_type: BUNDLE_TYPE.to_owned(),
            bytes: bundle.to_string().into_bytes(),
            annotations: [(PREDICATE_ANNOTATION.to_owned(), SIGNATURE_PREDICATE.to_owned())].into(),
        };
        repository.attach(&subject, &[attachment]).unwrap();
        assert_eq!(pull(by(WHO)).unwrap(), template);
        refused(by(("b@team.example", WHO.1)), &["signed by a@team.example", "b@team.example"]);

        // The same by a policy.
        let file = directory.path().join("policy.toml");
        std::fs::write(directory.path().join("root.json"), ours.root().to_string()).unwrap();
        let policy = |identity: &str| {
            let text = format!(
                "version = 1\n[[rule]]\nmatch = '**'\nrequire = 'signature'\ntrusted_root = 'root.json'\n\
                 identities = [{{ identity = '{identity}', issuer = '{}' }}]\n",
                WHO.1
            );
            std::fs::write(&file, text).unwrap();
            Trust { policy: Some(Policy::read(&file).unwrap()), ..Trust::default() }
        };
        assert_eq!(pull(policy(WHO.0)).unwrap(), template);
        refused(policy("b@team.example"), &["rule 1", "signed by a@team.example"]);
    }
}

proptest::proptest! {
    /// Where the change does no harm, what is believed is still what was signed.
    #[test]
    fn bundles_that_are_bent_anywhere_say_nothing_else(at: proptest::sample::Index, to: u8) {
        let mut bytes = PUBLIC.as_bytes().to_vec();
        let at = at.index(bytes.len());
        bytes[at] = to;
        let signers = signers(&document(ROOT), THEM.0, THEM.1);
        let about = subject(&document(PUBLIC));
        if let Ok(verified) = bundle::verify(&bytes, &about, &signers) {
            let channel = verified.predicate["targetChannel"].as_str();
            proptest::prop_assert_eq!(channel, Some("https://prefix.dev/sigstore-example"));
        }
    }
}
