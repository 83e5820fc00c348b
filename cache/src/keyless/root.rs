//! Whose certificates and whose logs count, and from when to when: sigstore's `trusted_root.json`.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::keys::PublicKey;

/// More than any trusted root has.
const MAX_BYTES: u64 = 1024 * 1024;
/// More authorities or logs of a kind than any has.
const MAX_ENTRIES: usize = 64;
/// The media type of version 0.1 and 0.2, up to the version.
const MEDIA_TYPE: &str = "application/vnd.dev.sigstore.trustedroot";

/// A trusted root that was read. Timestamp authorities in it are not used.
#[derive(Clone)]
pub struct TrustedRoot {
    label: String,
    pub(super) authorities: Vec<Authority>,
    pub(super) logs: Vec<Log>,
    pub(super) certificate_logs: Vec<Log>,
}

/// A certificate authority.
#[derive(Clone)]
pub(super) struct Authority {
    /// From the one that signs to the self-signed one, in DER.
    pub(super) chain: Vec<Vec<u8>>,
    pub(super) valid: Window,
}

/// A log of entries or of certificates.
#[derive(Clone)]
pub(super) struct Log {
    pub(super) id: Vec<u8>,
    /// Absent: of a kind that is not known here.
    pub(super) key: Option<PublicKey>,
    pub(super) valid: Window,
}

/// A stretch of time, in seconds since 1970, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    start: i64,
    end: Option<i64>,
}

/// A trusted root that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    /// The file.
    #[error("cannot read the trusted root {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its content.
    #[error("{label} is not a usable trusted root: {what}; expected sigstore's trusted_root.json")]
    Format {
        /// Where it is from.
        label: String,
        /// What is wrong.
        what: String,
    },
}

/// The document, as far as it is used (sigstore protobuf-specs, `sigstore_trustroot.proto`).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    media_type: String,
    #[serde(default)]
    tlogs: Vec<RawLog>,
    #[serde(default)]
    certificate_authorities: Vec<RawAuthority>,
    #[serde(default)]
    ctlogs: Vec<RawLog>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawLog {
    public_key: RawKey,
    log_id: RawId,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawKey {
    raw_bytes: String,
    #[serde(default)]
    valid_for: Option<RawWindow>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawId {
    key_id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawAuthority {
    cert_chain: RawChain,
    #[serde(default)]
    valid_for: Option<RawWindow>,
}

#[derive(Deserialize)]
struct RawChain {
    certificates: Vec<RawCertificate>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawCertificate {
    raw_bytes: String,
}

#[derive(Deserialize)]
struct RawWindow {
    #[serde(default)]
    start: Option<jiff::Timestamp>,
    #[serde(default)]
    end: Option<jiff::Timestamp>,
}

impl TrustedRoot {
    /// Reads a trusted root.
    ///
    /// # Errors
    /// When it cannot be read, or something in it is not understood.
    pub fn read(path: &Path) -> Result<Self, RootError> {
        let bytes = crate::object::read_bounded(path, MAX_BYTES)
            .map_err(|source| RootError::File { path: path.to_owned(), source })?;
        Self::parse(&bytes, &path.display().to_string())
    }

    /// The same from its bytes; `label` is what messages call it.
    ///
    /// # Errors
    /// When something in it is not understood.
    pub fn parse(bytes: &[u8], label: &str) -> Result<Self, RootError> {
        let bad = |what: String| RootError::Format { label: label.to_owned(), what };
        if bytes.len() as u64 > MAX_BYTES {
            return Err(bad(format!("it has more than {MAX_BYTES} bytes")));
        }
        let document: Document =
            serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))?;
        if !document.media_type.starts_with(MEDIA_TYPE) {
            return Err(bad(format!("its media type is {:?}", document.media_type)));
        }
        let counts =
            [document.tlogs.len(), document.ctlogs.len(), document.certificate_authorities.len()];
        if counts.iter().any(|count| *count > MAX_ENTRIES) {
            return Err(bad(format!("it has more than {MAX_ENTRIES} entries of a kind")));
        }
        let decode =
            |text: &str| STANDARD.decode(text).map_err(|error| bad(format!("base64: {error}")));
        let log = |raw: RawLog| -> Result<Log, RootError> {
            let key = decode(&raw.public_key.raw_bytes)?;
            let id = decode(&raw.log_id.key_id)?;
            let key = PublicKey::from_der(&key, "the log").ok();
            Ok(Log { id, key, valid: Window::of(raw.public_key.valid_for) })
        };
        let authority = |raw: RawAuthority| -> Result<Authority, RootError> {
            let certificates = raw.cert_chain.certificates;
            if certificates.is_empty() || certificates.len() > MAX_ENTRIES {
                return Err(bad("an authority has no certificate, or too many".to_owned()));
            }
            let chain: Result<_, _> =
                certificates.iter().map(|one| decode(&one.raw_bytes)).collect();
            Ok(Authority { chain: chain?, valid: Window::of(raw.valid_for) })
        };
        let all = |logs: Vec<RawLog>| logs.into_iter().map(log).collect::<Result<Vec<_>, _>>();
        let (logs, certificate_logs) = (all(document.tlogs)?, all(document.ctlogs)?);
        let authorities: Result<Vec<_>, _> =
            document.certificate_authorities.into_iter().map(authority).collect();
        let authorities = authorities?;
        if authorities.is_empty() || logs.is_empty() {
            return Err(bad("it has no certificate authority, or no log".to_owned()));
        }
        Ok(Self { label: label.to_owned(), authorities, logs, certificate_logs })
    }

    /// What messages call it.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }
}

impl fmt::Debug for TrustedRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "TrustedRoot({}: {} authorities, {} logs, {} certificate logs)",
            self.label,
            self.authorities.len(),
            self.logs.len(),
            self.certificate_logs.len()
        )
    }
}

impl Window {
    fn of(raw: Option<RawWindow>) -> Self {
        let raw = raw.unwrap_or(RawWindow { start: None, end: None });
        let seconds = |time: jiff::Timestamp| time.as_second();
        Self { start: raw.start.map_or(i64::MIN, seconds), end: raw.end.map(seconds) }
    }

    pub(super) fn contains(self, time: i64) -> bool {
        time >= self.start && self.end.is_none_or(|end| time <= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_refused() {
        let whole = serde_json::json!({
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [{
                "baseUrl": "https://log.example",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {"rawBytes": "AAAA", "keyDetails": "x", "validFor": {"start": "2021-01-12T11:53:27Z"}},
                "logId": {"keyId": "AAAA"},
            }],
            "certificateAuthorities": [{
                "subject": {"organization": "x"},
                "certChain": {"certificates": [{"rawBytes": "AAAA"}]},
                "validFor": {"start": "2021-03-07T03:20:29Z", "end": "2022-12-31T23:59:59.999Z"},
            }],
            "timestampAuthorities": [{}],
        });
        let parse = |document: &serde_json::Value| {
            TrustedRoot::parse(document.to_string().as_bytes(), "root.json")
        };
        let root = parse(&whole).unwrap();
        assert!(root.logs[0].key.is_none() && root.logs[0].valid.contains(1_700_000_000));
        let valid = root.authorities[0].valid;
        assert!(valid.contains(1_640_000_000));
        assert!(!valid.contains(1_600_000_000) && !valid.contains(1_672_531_201));
        for (place, value, why) in [
            ("/mediaType", serde_json::json!("x"), "media type"),
            ("/tlogs", serde_json::json!([]), "no log"),
            ("/certificateAuthorities", serde_json::json!([]), "no certificate authority"),
            ("/certificateAuthorities/0/certChain/certificates", serde_json::json!([]), "no cert"),
            ("/tlogs/0/publicKey/rawBytes", serde_json::json!("?"), "base64"),
            ("/tlogs/0/publicKey/validFor/start", serde_json::json!("soon"), "year"),
            ("/tlogs", serde_json::json!(vec![whole["tlogs"][0].clone(); 65]), "more than 64"),
        ] {
            let mut changed = whole.clone();
            *changed.pointer_mut(place).unwrap() = value;
            let error = parse(&changed).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("root.json"), "{place}: {error}");
        }
        assert!(TrustedRoot::parse(b"", "x").is_err());
        assert!(TrustedRoot::read(Path::new("/none/root.json")).is_err());
    }
}
