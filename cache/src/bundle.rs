//! What is said about a template, and who says it: in-toto statements in sigstore bundles.
//!
//! ```text
//! bundle ─ envelope (DSSE) ─┬ payload: statement ─┬ subject: the digest of the template's index
//!                           └ signature           └ predicate: a signature's, an SBOM, provenance
//! ```
//! The bundle's and the statement's types are those of the `sigstore-types` crate, the signatures
//! those of the RustCrypto and dalek crates. Whose a signature is, a key says that is given, or a
//! certificate (see [`crate::keyless`]).
//!
//! cosign 3 writes and reads the same: its `sign/v1` predicate, no transparency log.

use serde_json::Value;
use sigstore_types::{
    Bundle, DsseEnvelope, DsseSignature, KeyId, MediaType, PayloadBytes, PublicKeyIdentifier,
    Sha256Hash, SignatureBytes, SignatureContent, Statement, Subject, VerificationMaterial,
    VerificationMaterialContent,
};

use crate::Digest;
use crate::keyless::{self, Identity, KeylessError};
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
    /// Who has signed it.
    pub by: Signatory,
}

/// Whose signatures count.
#[derive(Debug, Clone, Default)]
pub struct Signers {
    /// These keys',
    pub keys: Vec<PublicKey>,
    /// and these identities'.
    pub identities: Vec<Identity>,
}

/// One of [`Signers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signatory {
    /// The key of this number.
    Key(usize),
    /// The identity of this number.
    Identity(usize),
}

impl From<Vec<PublicKey>> for Signers {
    fn from(keys: Vec<PublicKey>) -> Self {
        Self { keys, identities: Vec::new() }
    }
}

impl Signers {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.identities.is_empty()
    }

    /// What messages call one of them.
    ///
    /// # Panics
    /// When it is of others.
    #[must_use]
    pub fn label(&self, signatory: Signatory) -> String {
        match signatory {
            Signatory::Key(number) => self.keys[number].label().to_owned(),
            Signatory::Identity(number) => self.identities[number].to_string(),
        }
    }

    /// What messages call them together.
    pub(crate) fn labels(&self) -> String {
        match (self.keys.as_slice(), self.identities.as_slice()) {
            ([key], []) => key.label().to_owned(),
            ([], [identity]) => identity.to_string(),
            (keys, []) => format!("one of {} keys", keys.len()),
            ([], identities) => format!("one of {} identities", identities.len()),
            (keys, identities) => {
                format!("one of {} keys or {} identities", keys.len(), identities.len())
            }
        }
    }
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
    /// By a certificate that does not make it one of the identities'.
    #[error("{0}")]
    Keyless(#[from] KeylessError),
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

/// Checks that one of `signers` has signed the bundle, and that it is about `subject`.
///
/// # Errors
/// When it is not so.
pub fn verify(bytes: &[u8], subject: &Digest, signers: &Signers) -> Result<Verified, BundleError> {
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
    let by = signatory(envelope, &bundle.verification_material, signers)?;
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
    Ok(Verified { predicate_type: statement.predicate_type, predicate: statement.predicate, by })
}

/// Which of `signers` has signed the envelope.
fn signatory(
    envelope: &DsseEnvelope,
    material: &VerificationMaterial,
    signers: &Signers,
) -> Result<Signatory, BundleError> {
    let (signed, signature) = (envelope.pae(), envelope.signature.sig.as_bytes());
    if let Some(number) = signers.keys.iter().position(|key| key.verify(&signed, signature)) {
        return Ok(Signatory::Key(number));
    }
    let certificate = match &material.content {
        VerificationMaterialContent::PublicKey(identifier) => {
            return Err(BundleError::OtherKey(identifier.hint.clone()));
        }
        VerificationMaterialContent::Certificate(certificate) => Some(&certificate.raw_bytes),
        // As bundles before version 0.3 have it: the signer's own comes first.
        VerificationMaterialContent::X509CertificateChain { certificates } => {
            certificates.first().map(|certificate| &certificate.raw_bytes)
        }
        _ => None,
    };
    match certificate {
        Some(der) if !signers.identities.is_empty() => {
            let identities = &signers.identities;
            let number = keyless::verify(envelope, material, der.as_bytes(), identities)?;
            Ok(Signatory::Identity(number))
        }
        _ => Err(BundleError::OtherKey("by a certificate".to_owned())),
    }
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
            let keys = Signers::from(vec![other.public(), key.public()]);
            let verified = verify(&bytes, &subject, &keys).unwrap();
            assert_eq!((verified.by, &verified.predicate), (Signatory::Key(1), &said));
            assert_eq!(verified.predicate_type, "https://p");
            let refused = verify(&bytes, &subject, &vec![other.public()].into()).unwrap_err();
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
            proptest::prop_assert!(verify(&bytes, &Digest::of(b""), &vec![key.public()].into()).is_err());
        }
    }
}
