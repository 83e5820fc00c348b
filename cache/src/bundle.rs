//! What is said about a template, and who says it: in-toto statements in sigstore bundles.
//!
//! ```text
//! bundle ─ envelope (DSSE) ─┬ payload: statement ─┬ subject: the digest of the template's index
//!                           └ signature           └ predicate: a signature's, an SBOM, provenance
//! ```
//! The bundle's and the statement's types are those of the `sigstore-types` crate, the signatures
//! those of the RustCrypto and dalek crates. `sigstore-verify` would bring keyless verification, and
//! with it certificates, transparency logs, timestamps and a trust root to keep fresh, 97 crates in
//! all; that is not wanted for a user's own keys. A bundle that is signed by a certificate counts as
//! one by a key that is not known.
//!
//! cosign 3 writes and reads the same: its `sign/v1` predicate, no transparency log.

use serde_json::Value;
use sigstore_types::{
    Bundle, DsseEnvelope, DsseSignature, KeyId, MediaType, PayloadBytes, PublicKeyIdentifier,
    Sha256Hash, SignatureBytes, SignatureContent, Statement, Subject, VerificationMaterial,
    VerificationMaterialContent,
};

use crate::Digest;
use crate::keys::{PublicKey, SigningKey};

/// The media type of a bundle.
pub const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// The media type of a statement.
pub const STATEMENT_TYPE: &str = "application/vnd.in-toto+json";
/// The predicate of a plain signature, which says nothing more.
pub const SIGNATURE_PREDICATE: &str = "https://sigstore.dev/cosign/sign/v1";

/// A statement whose signature was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// What kind of statement it is.
    pub predicate_type: String,
    /// What it says.
    pub predicate: Value,
    /// Which of the keys has signed it.
    pub key: usize,
}

/// A bundle that proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// It cannot be read.
    #[error("it is malformed: {0}")]
    Malformed(String),
    /// None of the keys.
    #[error("it is signed by another key{}", hint(.0))]
    OtherKey(String),
    /// The right key, but about something else.
    #[error("it is about something else")]
    OtherSubject,
}

fn hint(text: &str) -> String {
    // Not authenticated, and shown to people.
    let clean: String = text.chars().filter(|c| c.is_ascii_graphic()).take(80).collect();
    if clean.is_empty() { String::new() } else { format!(" ({clean})") }
}

/// A statement about `subject`.
#[must_use]
pub fn statement(
    subject: &Digest,
    name: &str,
    predicate_type: &str,
    predicate: Value,
) -> Statement {
    let hash = Sha256Hash::from_hex(&subject.hex()).expect("64 hexadecimal digits");
    let digest = sigstore_types::Digest::sha256(hash);
    Statement::new(vec![Subject::new(name, digest)], predicate_type, predicate)
}

/// Signs a statement.
#[must_use]
pub fn sign(key: &SigningKey, statement: &Statement) -> Vec<u8> {
    let payload = crate::artifact::to_json(statement);
    let signature = key.sign(&sigstore_types::pae(STATEMENT_TYPE, &payload));
    let envelope = DsseEnvelope::new(
        STATEMENT_TYPE,
        PayloadBytes::new(payload),
        DsseSignature::new(SignatureBytes::new(signature), KeyId::new("")),
    );
    let hint = PublicKeyIdentifier::new(key.public().hint());
    let material = VerificationMaterial::new(VerificationMaterialContent::PublicKey(hint));
    let content = SignatureContent::DsseEnvelope(envelope);
    crate::artifact::to_json(&Bundle::new(MediaType::Bundle0_3, material, content))
}

/// Checks that one of `keys` has signed the bundle, and that it is about `subject`.
///
/// # Errors
/// When it is not so.
pub fn verify(bytes: &[u8], subject: &Digest, keys: &[PublicKey]) -> Result<Verified, BundleError> {
    let malformed = |error: &dyn std::fmt::Display| {
        BundleError::Malformed(error.to_string().chars().take(200).collect())
    };
    let bundle: Bundle = serde_json::from_slice(bytes).map_err(|error| malformed(&error))?;
    let SignatureContent::DsseEnvelope(envelope) = &bundle.content else {
        return Err(BundleError::Malformed("it has no envelope".to_owned()));
    };
    if envelope.payload_type != STATEMENT_TYPE {
        return Err(BundleError::Malformed("its payload is no statement".to_owned()));
    }
    // Nothing of the payload is looked at before this.
    let (signed, signature) = (envelope.pae(), envelope.signature.sig.as_bytes());
    let Some(key) = keys.iter().position(|key| key.verify(&signed, signature)) else {
        let hint = match &bundle.verification_material.content {
            VerificationMaterialContent::PublicKey(identifier) => identifier.hint.clone(),
            _ => "by a certificate".to_owned(),
        };
        return Err(BundleError::OtherKey(hint));
    };
    let statement: Statement =
        serde_json::from_slice(envelope.payload.as_bytes()).map_err(|error| malformed(&error))?;
    if statement.type_ != Statement::TYPE_V1 {
        return Err(BundleError::Malformed("its statement is of another version".to_owned()));
    }
    let about = |about: &Subject| {
        about.digest.sha256.as_ref().is_some_and(|hash| hash.as_bytes() == subject.as_bytes())
    };
    if !statement.subject.iter().any(about) {
        return Err(BundleError::OtherSubject);
    }
    Ok(Verified { predicate_type: statement.predicate_type, predicate: statement.predicate, key })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyKind;

    #[test]
    fn a_bundle_proves_what_its_key_signed_and_nothing_else() {
        for kind in [KeyKind::P256, KeyKind::Ed25519] {
            let (key, other) =
                (SigningKey::generate(kind).unwrap(), SigningKey::generate(kind).unwrap());
            let subject = Digest::of(b"template");
            let said = serde_json::json!({"a": [1, 2]});
            let bytes =
                sign(&key, &statement(&subject, "reg.example/x", "https://p", said.clone()));
            assert_eq!(
                bytes,
                sign(&key, &statement(&subject, "reg.example/x", "https://p", said.clone()))
            );
            let keys = [other.public(), key.public()];
            let verified = verify(&bytes, &subject, &keys).unwrap();
            assert_eq!((verified.key, &verified.predicate), (1, &said));
            assert_eq!(verified.predicate_type, "https://p");
            let refused = verify(&bytes, &subject, &keys[..1]).unwrap_err();
            assert_eq!(refused, BundleError::OtherKey(key.public().hint()));
            assert_eq!(
                verify(&bytes, &Digest::of(b"other"), &keys).unwrap_err(),
                BundleError::OtherSubject
            );
            // Any change of what is signed, or of the signature, is found.
            let document: Value = serde_json::from_slice(&bytes).unwrap();
            let changed = |change: &dyn Fn(&mut Value)| {
                let mut document = document.clone();
                change(&mut document);
                verify(document.to_string().as_bytes(), &subject, &keys)
            };
            let other_payload =
                crate::artifact::to_json(&statement(&subject, "", "https://q", said));
            let payload = PayloadBytes::new(other_payload).to_base64();
            let error = changed(&|d| d["dsseEnvelope"]["payload"] = payload.clone().into());
            assert!(matches!(error, Err(BundleError::OtherKey(_))));
            let signature = SignatureBytes::new(other.sign(b"x")).to_base64();
            let error =
                changed(&|d| d["dsseEnvelope"]["signatures"][0]["sig"] = signature.clone().into());
            assert!(matches!(error, Err(BundleError::OtherKey(_))));
            for change in [
                (&|d: &mut Value| d["dsseEnvelope"]["signatures"] = Value::Array(vec![]))
                    as &dyn Fn(&mut Value),
                &|d| d["dsseEnvelope"]["payloadType"] = "text/plain".into(),
                &|d| d["mediaType"] = "x".into(),
                &|d| d["dsseEnvelope"] = Value::Null,
            ] {
                assert!(matches!(changed(change), Err(BundleError::Malformed(_))));
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_refused_without_panic(bytes: Vec<u8>) {
            let key = SigningKey::from_pem(
                "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f\n-----END PRIVATE KEY-----",
                "k",
            )
            .unwrap();
            proptest::prop_assert!(verify(&bytes, &Digest::of(b""), &[key.public()]).is_err());
        }
    }
}
