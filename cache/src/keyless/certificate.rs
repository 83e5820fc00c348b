//! The certificate that says whose the signing key was: Fulcio's profile of X.509.
//!
//! Chains are built and checked by `webpki`, the code that checks TLS certificates, at the time that
//! the log vouches for. What is particular to signing is checked here: the use of the key, the
//! identity, the issuer of the identity, and the certificate log's signed timestamp (RFC 6962).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::{CertificateDer, UnixTime};
use sha2::{Digest as _, Sha256};
use sigstore_types::DerCertificate;
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};
use x509_cert::Certificate;
use x509_cert::der::asn1::{AnyRef, ObjectIdentifier, OctetStringRef, Utf8StringRef};
use x509_cert::der::{Decode, Encode, Reader, SliceReader, Tag, TagNumber};
use x509_cert::ext::Extension;
use x509_cert::ext::pkix::name::GeneralName;
use x509_cert::ext::pkix::{self, ExtendedKeyUsage, SubjectAltName};

use super::root::{Authority, TrustedRoot};
use super::{KeylessError, Signer};
use crate::keys::PublicKey;

/// More than any such certificate has.
const MAX_BYTES: usize = 64 * 1024;
/// More timestamps are not looked at.
const MAX_TIMESTAMPS: usize = 16;
/// The use of a certificate for signing code (RFC 5280, 4.2.1.12), and its encoding.
const CODE_SIGNING: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.3");
const CODE_SIGNING_BYTES: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x03];
/// Who vouched for the identity: a UTF8String, and as it was written before (Fulcio,
/// `docs/oid-info.md`).
const ISSUER: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.4.1.57264.1.8");
const OLD_ISSUER: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.4.1.57264.1.1");
/// The list of a certificate log's timestamps (RFC 6962, 3.3).
const TIMESTAMPS: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.6.1.4.1.11129.2.4.2");

/// A signer's certificate, taken apart. Nothing in it is believed before [`Leaf::verify`].
pub(super) struct Leaf {
    der: Vec<u8>,
    certificate: Certificate,
    /// Who it is said to be of.
    pub(super) signer: Signer,
    /// Its key.
    pub(super) key: PublicKey,
}

impl Leaf {
    /// Takes a certificate apart.
    pub(super) fn parse(der: &[u8]) -> Result<Self, KeylessError> {
        let bad = |what: &str| KeylessError::Certificate(what.to_owned());
        if der.len() > MAX_BYTES {
            return Err(bad("it is too large"));
        }
        let certificate = Certificate::from_der(der).map_err(|_| bad("it is no X.509"))?;
        let tbs = certificate.tbs_certificate();
        let usage = tbs.get_extension::<pkix::KeyUsage>();
        if !usage.is_ok_and(|usage| usage.is_some_and(|(_, usage)| usage.digital_signature())) {
            return Err(bad("its key is not for signatures"));
        }
        let uses = tbs.get_extension::<ExtendedKeyUsage>();
        if !uses.is_ok_and(|uses| uses.is_some_and(|(_, uses)| uses.0.contains(&CODE_SIGNING))) {
            return Err(bad("it is not for signing code"));
        }
        let names = tbs.get_extension::<SubjectAltName>().map_err(|_| bad("its names"))?;
        let subject = match names.as_ref().map(|(_, names)| names.0.as_slice()) {
            Some([GeneralName::Rfc822Name(email)]) => email.as_str().to_owned(),
            Some([GeneralName::UniformResourceIdentifier(uri)]) => uri.as_str().to_owned(),
            _ => return Err(bad("it does not name exactly one identity (an email or a URI)")),
        };
        let issuer = issuer(tbs.extensions().map_or(&[], Vec::as_slice))
            .ok_or_else(|| bad("it does not say who vouched for the identity"))?;
        let key = tbs.subject_public_key_info().to_der().map_err(|_| bad("its key"))?;
        let key = PublicKey::from_der(&key, "its certificate")
            .map_err(|_| bad("its key is neither of P-256 nor Ed25519"))?;
        let signer = Signer { subject, issuer };
        Ok(Self { der: der.to_vec(), certificate, signer, key })
    }

    /// Checks that one of the authorities of `root` has given it, that it was valid at `time`, and,
    /// where the root has certificate logs, that one of them has listed it.
    pub(super) fn verify(&self, root: &TrustedRoot, time: i64) -> Result<(), KeylessError> {
        let mut why = KeylessError::Authority("none that counted then".to_owned());
        for authority in root.authorities.iter().filter(|one| one.valid.contains(time)) {
            match self.issued_by(authority, time) {
                Ok(issuer_key) if root.certificate_logs.is_empty() => {
                    drop(issuer_key);
                    return Ok(());
                }
                Ok(issuer_key) => return self.verify_listed(root, &issuer_key),
                Err(error) if matches!(why, KeylessError::Time(_)) => drop(error),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Walks through all of it.
    pub(super) fn fuzz(&self) {
        let _ = without_timestamps(&self.der);
        for stamp in timestamps(&self.der).unwrap_or_default() {
            let _ = stamp.message(&[0; 32], &self.der);
        }
    }

    /// The public key of whoever signed it, if the chain leads to the authority.
    fn issued_by(&self, authority: &Authority, time: i64) -> Result<Vec<u8>, KeylessError> {
        let untrusted = |error: webpki::Error| match error {
            webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. } => {
                KeylessError::Time(error.to_string())
            }
            error => KeylessError::Authority(error.to_string()),
        };
        let chain: Vec<CertificateDer<'_>> =
            authority.chain.iter().map(|der| CertificateDer::from(der.as_slice())).collect();
        let Some((top, between)) = chain.split_last() else {
            return Err(KeylessError::Authority("it has no certificate".to_owned()));
        };
        let anchors = [anchor_from_trusted_cert(top).map_err(untrusted)?];
        let der = CertificateDer::from(self.der.as_slice());
        let leaf = EndEntityCert::try_from(&der).map_err(untrusted)?;
        let seconds =
            u64::try_from(time).map_err(|_| KeylessError::Time("it is before 1970".to_owned()))?;
        let time = UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        // Authorities may leave it out; the leaf's own was looked at.
        let usage = KeyUsage::required_if_present(CODE_SIGNING_BYTES);
        let algorithms = webpki::ALL_VERIFICATION_ALGS;
        let path = leaf
            .verify_for_usage(algorithms, &anchors, between, time, usage, None, None)
            .map_err(untrusted)?;
        Ok(path.issuer_spki().to_vec())
    }

    /// Checks that a certificate log of the root has promised to list it.
    fn verify_listed(&self, root: &TrustedRoot, issuer_key: &[u8]) -> Result<(), KeylessError> {
        let none = |what: &str| KeylessError::CertificateLog(what.to_owned());
        let extensions = self.certificate.tbs_certificate().extensions();
        let list = extensions
            .and_then(|all| all.iter().find(|one| one.extn_id == TIMESTAMPS))
            .ok_or_else(|| none("it has no timestamp of one"))?;
        let list = <&OctetStringRef>::from_der(list.extn_value.as_bytes())
            .map_err(|_| none("its timestamps cannot be read"))?;
        let stamps =
            timestamps(list.as_bytes()).ok_or_else(|| none("its timestamps cannot be read"))?;
        let signed = without_timestamps(&self.der).map_err(|_| none("it cannot be taken apart"))?;
        let issuer: [u8; 32] = Sha256::digest(issuer_key).into();
        for stamp in &stamps {
            let seconds = i64::try_from(stamp.milliseconds / 1000).unwrap_or(i64::MAX);
            let message = stamp.message(&issuer, &signed);
            let by = |log: &&super::root::Log| {
                log.id == stamp.log
                    && log.valid.contains(seconds)
                    && log.key.as_ref().is_some_and(|key| key.verify(&message, stamp.signature))
            };
            if root.certificate_logs.iter().any(|log| by(&log)) {
                return Ok(());
            }
        }
        Err(none("none of its timestamps is of one"))
    }
}

/// Who vouched for the identity.
fn issuer(extensions: &[Extension]) -> Option<String> {
    let find = |id| {
        let mut found = extensions.iter().filter(|one| one.extn_id == id);
        found.next().filter(|_| found.next().is_none()).map(|one| one.extn_value.as_bytes())
    };
    if let Some(bytes) = find(ISSUER) {
        return Utf8StringRef::from_der(bytes).ok().map(|text| text.as_str().to_owned());
    }
    find(OLD_ISSUER).and_then(|bytes| std::str::from_utf8(bytes).ok()).map(str::to_owned)
}

/// A certificate log's timestamp (RFC 6962, 3.2).
struct Timestamp<'a> {
    log: &'a [u8],
    milliseconds: u64,
    extensions: &'a [u8],
    signature: &'a [u8],
}

impl Timestamp<'_> {
    /// What it is signed over, for a certificate that was not finished.
    fn message(&self, issuer: &[u8; 32], certificate: &[u8]) -> Vec<u8> {
        // Version 1, a certificate's timestamp; a precertificate.
        let mut message = vec![0, 0];
        message.extend(self.milliseconds.to_be_bytes());
        message.extend([0, 1]);
        message.extend(issuer);
        // MAX_BYTES fit three bytes, and what was read two.
        message.extend(&(certificate.len() as u32).to_be_bytes()[1..]);
        message.extend(certificate);
        message.extend((self.extensions.len() as u16).to_be_bytes());
        message.extend(self.extensions);
        message
    }
}

/// Takes apart a list of timestamps (RFC 6962, 3.3); those of other versions or algorithms are left
/// out.
fn timestamps(list: &[u8]) -> Option<Vec<Timestamp<'_>>> {
    let (mut list, rest) = counted(list)?;
    if !rest.is_empty() {
        return None;
    }
    let mut found = Vec::new();
    while !list.is_empty() && found.len() < MAX_TIMESTAMPS {
        let (one, rest) = counted(list)?;
        list = rest;
        let (version, one) = one.split_first()?;
        if *version != 0 {
            continue;
        }
        let (log, one) = one.split_at_checked(32)?;
        let (milliseconds, one) = one.split_first_chunk::<8>()?;
        let (extensions, one) = counted(one)?;
        let (algorithm, one) = one.split_first_chunk::<2>()?;
        let (signature, one) = counted(one)?;
        // SHA-256 and ECDSA (RFC 5246, 7.4.1.4.1).
        if one.is_empty() && *algorithm == [4, 3] {
            let milliseconds = u64::from_be_bytes(*milliseconds);
            found.push(Timestamp { log, milliseconds, extensions, signature });
        }
    }
    Some(found)
}

/// A stretch of bytes behind its length in two bytes, and the rest.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(*length)))
}

/// The part of a certificate that is signed, as it was before the timestamps were put in.
fn without_timestamps(certificate: &[u8]) -> x509_cert::der::Result<Vec<u8>> {
    let whole = AnyRef::from_der(certificate)?;
    let signed = AnyRef::decode(&mut SliceReader::new(whole.value())?)?;
    let mut fields = SliceReader::new(signed.value())?;
    let extensions = Tag::ContextSpecific { constructed: true, number: TagNumber(3) };
    let mut kept = Vec::new();
    while !fields.is_finished() {
        let bytes = fields.tlv_bytes()?;
        let field = AnyRef::from_der(bytes)?;
        if x509_cert::der::Tagged::tag(&field) != extensions {
            kept.extend_from_slice(bytes);
            continue;
        }
        let list = AnyRef::from_der(field.value())?;
        let mut all = SliceReader::new(list.value())?;
        let mut others = Vec::new();
        while !all.is_finished() {
            let one = all.tlv_bytes()?;
            if Extension::from_der(one)?.extn_id != TIMESTAMPS {
                others.extend_from_slice(one);
            }
        }
        let others = AnyRef::new(Tag::Sequence, &others)?.to_der()?;
        kept.extend(AnyRef::new(extensions, &others)?.to_der()?);
    }
    AnyRef::new(Tag::Sequence, &kept)?.to_der()
}

/// A certificate that is PEM in base64, as log entries have it.
pub(super) fn of_base64_pem(text: &str) -> Option<Vec<u8>> {
    let pem = String::from_utf8(STANDARD.decode(text).ok()?).ok()?;
    DerCertificate::from_pem(&pem).ok().map(|der| der.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_timestamps_are_read_within_their_bounds() {
        let mut one = vec![0];
        one.extend([7; 32]);
        one.extend(1234_u64.to_be_bytes());
        one.extend([0, 0, 4, 3, 0, 2, 9, 9]);
        let list = |items: &[&[u8]]| {
            let mut inner = Vec::new();
            for item in items {
                inner.extend((item.len() as u16).to_be_bytes());
                inner.extend_from_slice(item);
            }
            let mut list = (inner.len() as u16).to_be_bytes().to_vec();
            list.extend(inner);
            list
        };
        let whole = list(&[&one, &one]);
        let found = timestamps(&whole).unwrap();
        assert_eq!(
            (found.len(), found[1].milliseconds, found[1].signature),
            (2, 1234, &[9, 9][..])
        );
        for end in 0..whole.len() {
            assert!(timestamps(&whole[..end]).is_none(), "{end}");
        }
        // Of another version, or by another algorithm: left out, the rest stays.
        let (mut newer, mut other) = (one.clone(), one.clone());
        newer[0] = 1;
        other[44] = 1;
        assert_eq!(timestamps(&list(&[&newer, &other, &one])).unwrap().len(), 1);
        assert_eq!(timestamps(&list(&vec![&one[..]; 40])).unwrap().len(), MAX_TIMESTAMPS);
    }
}
