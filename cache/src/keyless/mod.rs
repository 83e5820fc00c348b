//! Signatures by identities instead of keys, as Fulcio and Rekor make them possible: what proves that
//! somebody whom an identity provider knows has signed an envelope.
//!
//! ```text
//! trusted root: whose certificates and logs count, and from when to when           (root)
//! bundle ─► entry: promised and proved by a log, and about this envelope           (log)
//!        ─► certificate: of an authority, valid when the entry was made, listed    (certificate)
//!        ─► signature: by the certificate's key, which is then an identity's
//! ```
//! A certificate is valid for minutes, so the time that counts is the log's. Nothing is asked over
//! the network when a bundle is checked. Making such a bundle takes a login with an identity provider,
//! and is left to cosign, whose bundles these are.
//!
//! Entries are those of Rekor 1 (`dsse` 0.0.1) with promise and proof. Rekor 2 gives neither a time
//! nor a promise, and timestamps (RFC 3161) in their place: such bundles are refused by name.
//!
//! `sigstore-verify` does the same and more; it comes with a second cryptographic library (aws-lc), and
//! with older versions of the certificate crates beside those that are here already.

use std::fmt;
use std::sync::Arc;

use sigstore_types::{DsseEnvelope, VerificationMaterial};

mod certificate;
mod log;
mod root;

pub use root::{RootError, TrustedRoot};

/// More entries of one bundle are not looked at.
const MAX_ENTRIES: usize = 8;

/// An identity whose signatures count.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Who: an email address or a URI, exactly as the certificate has it.
    pub subject: String,
    /// Whose word it is: the URL of the identity provider.
    pub issuer: String,
    /// What makes a certificate credible.
    pub root: Arc<TrustedRoot>,
}

/// Who a certificate says has signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signer {
    /// An email address or a URI.
    pub subject: String,
    /// The identity provider.
    pub issuer: String,
}

/// A keyless signature that proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeylessError {
    /// The certificate cannot be used.
    #[error("its certificate is not one for signing: {0}")]
    Certificate(String),
    /// Nobody in the trusted root has given it.
    #[error("its certificate is of no authority in the trusted root: {0}")]
    Authority(String),
    /// It did not count at the time.
    #[error("it was made at another time than its certificate is for: {0}")]
    Time(String),
    /// The certificate is not listed.
    #[error("its certificate is in no certificate log of the trusted root: {0}")]
    CertificateLog(String),
    /// Nothing says when it was made.
    #[error("it has no entry of a transparency log")]
    NoEntry,
    /// The log's entry lacks something.
    #[error("its log entry has no {0}")]
    Missing(&'static str),
    /// No log of the trusted root.
    #[error("its log entry is of no log in the trusted root")]
    UnknownLog,
    /// The log has not said so.
    #[error("its log entry is not what the log has taken in: {0}")]
    Entry(String),
    /// The log's entry does not belong to it.
    #[error("its log entry is about something else: {0}")]
    OtherEntry(String),
    /// The signature.
    #[error("its signature is not by its certificate's key")]
    Signature,
    /// All is right, but it is somebody else.
    #[error("it is signed by {}", shown(.0))]
    OtherIdentity(Signer),
}

fn shown(signer: &Signer) -> String {
    let clean =
        |text: &str| -> String { text.chars().filter(char::is_ascii_graphic).take(200).collect() };
    format!("{} (of {})", clean(&signer.subject), clean(&signer.issuer))
}

/// Checks that one of `identities` has signed the envelope with the key of `certificate` (DER).
/// Returns which.
///
/// # Errors
/// When it is not so.
pub(crate) fn verify(
    envelope: &DsseEnvelope,
    material: &VerificationMaterial,
    certificate: &[u8],
    identities: &[Identity],
) -> Result<usize, KeylessError> {
    let mut last: Option<(&Arc<TrustedRoot>, Result<Signer, KeylessError>)> = None;
    let mut why = KeylessError::UnknownLog;
    for (number, identity) in identities.iter().enumerate() {
        let known = last.take().filter(|(root, _)| Arc::ptr_eq(root, &identity.root));
        let signer = match known {
            Some((_, signer)) => signer,
            None => attest(envelope, material, certificate, &identity.root),
        };
        match &signer {
            Ok(signer) if *signer == Signer::of(identity) => return Ok(number),
            Ok(signer) => why = KeylessError::OtherIdentity(signer.clone()),
            // That somebody else has signed says more than that one root does not know them.
            Err(_) if matches!(why, KeylessError::OtherIdentity(_)) => {}
            Err(error) => why = error.clone(),
        }
        last = Some((&identity.root, signer));
    }
    Err(why)
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (of {})", self.subject, self.issuer)
    }
}

impl Signer {
    fn of(identity: &Identity) -> Self {
        Self { subject: identity.subject.clone(), issuer: identity.issuer.clone() }
    }
}

/// Who has signed the envelope, by everything that `root` makes credible.
fn attest(
    envelope: &DsseEnvelope,
    material: &VerificationMaterial,
    certificate: &[u8],
    root: &TrustedRoot,
) -> Result<Signer, KeylessError> {
    let leaf = certificate::Leaf::parse(certificate)?;
    let mut time = Err(KeylessError::NoEntry);
    for entry in material.tlog_entries.iter().take(MAX_ENTRIES) {
        time = log::verify(entry, root, envelope, certificate);
        if time.is_ok() {
            break;
        }
    }
    leaf.verify(root, time?)?;
    if !leaf.key.verify(&envelope.pae(), envelope.signature.sig.as_bytes()) {
        return Err(KeylessError::Signature);
    }
    Ok(leaf.signer)
}

/// Reads `data` as everything that is read here; where it is a JSON document with `root` and `bundle`,
/// one is checked by the other.
pub(crate) fn fuzz(data: &[u8]) {
    let _ = TrustedRoot::parse(data, "x");
    if let Ok(leaf) = certificate::Leaf::parse(data) {
        leaf.fuzz();
    }
    let Ok(document) = serde_json::from_slice::<serde_json::Value>(data) else { return };
    let part = |name: &str| document[name].to_string().into_bytes();
    let Ok(root) = TrustedRoot::parse(&part("root"), "x") else { return };
    let identity = Identity { subject: String::new(), issuer: String::new(), root: Arc::new(root) };
    let signers = crate::bundle::Signers { keys: Vec::new(), identities: vec![identity] };
    let _ = crate::bundle::verify(&part("bundle"), &crate::Digest::of(b""), &signers);
}
