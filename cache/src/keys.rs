//! Keys that templates are signed with: P-256 and Ed25519, in PEM as OpenSSL and others write them.
//!
//! Both give the same signature for the same bytes (RFC 6979, RFC 8032), so that signing twice does
//! not make two signatures.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use p256::ecdsa::signature::{Signer as _, Verifier as _};
use p256::pkcs8::{
    DecodePrivateKey as _, DecodePublicKey as _, EncodePrivateKey as _, EncodePublicKey as _,
    LineEnding,
};

use crate::Digest;

/// More than any key has.
const MAX_BYTES: u64 = 64 * 1024;

/// A key that signs.
pub struct SigningKey(Private);

enum Private {
    P256(p256::SecretKey),
    Ed25519(ed25519_dalek::SigningKey),
}

/// A key that signatures are checked with.
#[derive(Clone, PartialEq, Eq)]
pub struct PublicKey {
    key: Public,
    label: String,
}

#[derive(Clone, PartialEq, Eq)]
enum Public {
    P256(p256::ecdsa::VerifyingKey),
    Ed25519(ed25519_dalek::VerifyingKey),
}

/// Which kind of key to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyKind {
    /// ECDSA on P-256 with SHA-256, what cosign makes.
    P256,
    /// Ed25519.
    Ed25519,
}

/// A key that cannot be used. Nothing of a key is ever printed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file.
    #[error("cannot read the key {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its content.
    #[error("{label} is not a usable key: {what}")]
    Format {
        /// Where it is from.
        label: String,
        /// What is wrong, and the way out.
        what: &'static str,
    },
    /// No entropy.
    #[error("the system gives no random bytes for a key")]
    Entropy,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({:?})", self.public())
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.hint())
    }
}

impl SigningKey {
    /// Reads a private key: PKCS #8, or SEC 1 for P-256.
    ///
    /// # Errors
    /// When it cannot be read or is no such key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        Self::from_pem(&read(path)?, &path.display().to_string())
    }

    /// The same from a text; `label` is for messages.
    ///
    /// # Errors
    /// When it is no such key.
    pub fn from_pem(text: &str, label: &str) -> Result<Self, KeyError> {
        let text = text.trim();
        if let Ok(key) = p256::SecretKey::from_pkcs8_pem(text) {
            return Ok(Self(Private::P256(key)));
        }
        if let Ok(key) = ed25519_dalek::SigningKey::from_pkcs8_pem(text) {
            return Ok(Self(Private::Ed25519(key)));
        }
        // `openssl ecparam -genkey` writes the curve's parameters before the key.
        let sec1 = text.find("-----BEGIN EC PRIVATE KEY-----").map(|at| &text[at..]);
        if let Some(Ok(key)) = sec1.map(p256::SecretKey::from_sec1_pem) {
            return Ok(Self(Private::P256(key)));
        }
        let what = if text.contains("ENCRYPTED") {
            "it is encrypted; decrypt it first, e.g. with `openssl pkey -in KEY -out PLAIN`"
        } else if text.contains("PUBLIC KEY") {
            "it is the public half; signing takes the private one"
        } else {
            "expected a PEM private key for P-256 or Ed25519 (`openssl genpkey -algorithm ed25519`)"
        };
        Err(KeyError::Format { label: label.to_owned(), what })
    }

    /// Makes a new key.
    ///
    /// # Errors
    /// When the system has no entropy.
    pub fn generate(kind: KeyKind) -> Result<Self, KeyError> {
        loop {
            let mut seed = [0; 32];
            getrandom::fill(&mut seed).map_err(|_| KeyError::Entropy)?;
            match kind {
                KeyKind::Ed25519 => {
                    let key = ed25519_dalek::SigningKey::from_bytes(&seed);
                    return Ok(Self(Private::Ed25519(key)));
                }
                // One in 2³² is out of range.
                KeyKind::P256 => {
                    if let Ok(key) = p256::SecretKey::from_slice(&seed) {
                        return Ok(Self(Private::P256(key)));
                    }
                }
            }
        }
    }

    /// The key as PKCS #8 in PEM.
    ///
    /// # Errors
    /// Never for a key that was made or read here.
    pub fn to_pem(&self) -> Result<String, KeyError> {
        let pem = match &self.0 {
            Private::P256(key) => key.to_pkcs8_pem(LineEnding::LF),
            Private::Ed25519(key) => key.to_pkcs8_pem(LineEnding::LF),
        };
        pem.map(|pem| pem.to_string()).map_err(|_| KeyError::Format {
            label: "the key".to_owned(),
            what: "it cannot be encoded",
        })
    }

    /// The public half.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        let key = match &self.0 {
            Private::P256(key) => Public::P256(*p256::ecdsa::SigningKey::from(key).verifying_key()),
            Private::Ed25519(key) => Public::Ed25519(key.verifying_key()),
        };
        PublicKey { key, label: "the signing key".to_owned() }
    }

    /// Signs: DER for P-256, 64 bytes for Ed25519.
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        match &self.0 {
            Private::P256(key) => {
                let signature: p256::ecdsa::Signature =
                    p256::ecdsa::SigningKey::from(key).sign(message);
                signature.to_der().as_bytes().to_vec()
            }
            Private::Ed25519(key) => key.sign(message).to_bytes().to_vec(),
        }
    }
}

impl PublicKey {
    /// Reads a public key in PEM.
    ///
    /// # Errors
    /// When it cannot be read or is no such key.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        Self::from_pem(&read(path)?, &path.display().to_string())
    }

    /// The same from a text; `label` is what messages call it.
    ///
    /// # Errors
    /// When it is no such key.
    pub fn from_pem(text: &str, label: &str) -> Result<Self, KeyError> {
        let text = text.trim();
        let label = label.to_owned();
        if let Ok(key) = p256::ecdsa::VerifyingKey::from_public_key_pem(text) {
            return Ok(Self { key: Public::P256(key), label });
        }
        if let Ok(key) = ed25519_dalek::VerifyingKey::from_public_key_pem(text) {
            return Ok(Self { key: Public::Ed25519(key), label });
        }
        let what = if text.contains("PRIVATE KEY") {
            "it is the private half; give only the public one away (`openssl pkey -pubout`)"
        } else {
            "expected a PEM public key for P-256 or Ed25519"
        };
        Err(KeyError::Format { label, what })
    }

    /// The same from its DER form (a `SubjectPublicKeyInfo`).
    ///
    /// # Errors
    /// When it is no such key.
    pub fn from_der(der: &[u8], label: &str) -> Result<Self, KeyError> {
        let label = label.to_owned();
        if let Ok(key) = p256::ecdsa::VerifyingKey::from_public_key_der(der) {
            return Ok(Self { key: Public::P256(key), label });
        }
        match ed25519_dalek::VerifyingKey::from_public_key_der(der) {
            Ok(key) => Ok(Self { key: Public::Ed25519(key), label }),
            Err(_) => {
                let what = "expected a public key for P-256 or Ed25519";
                Err(KeyError::Format { label, what })
            }
        }
    }

    /// The key in PEM.
    ///
    /// # Errors
    /// Never for a key that was made or read here.
    pub fn to_pem(&self) -> Result<String, KeyError> {
        let pem = match &self.key {
            Public::P256(key) => key.to_public_key_pem(LineEnding::LF),
            Public::Ed25519(key) => key.to_public_key_pem(LineEnding::LF),
        };
        pem.map_err(|_| KeyError::Format {
            label: self.label.clone(),
            what: "it cannot be encoded",
        })
    }

    /// What messages call it.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// What bundles call it: base64 of the SHA-256 of its DER form, as sigstore's tools do.
    #[must_use]
    pub fn hint(&self) -> String {
        let der = match &self.key {
            Public::P256(key) => key.to_public_key_der(),
            Public::Ed25519(key) => key.to_public_key_der(),
        };
        der.map(|der| STANDARD.encode(Digest::of(der.as_bytes()).as_bytes())).unwrap_or_default()
    }

    /// Whether this key has signed `message` so.
    #[must_use]
    pub fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        match &self.key {
            Public::P256(key) => p256::ecdsa::Signature::from_der(signature)
                .is_ok_and(|signature| key.verify(message, &signature).is_ok()),
            Public::Ed25519(key) => ed25519_dalek::Signature::from_slice(signature)
                .is_ok_and(|signature| key.verify_strict(message, &signature).is_ok()),
        }
    }
}

fn read(path: &Path) -> Result<String, KeyError> {
    let file = |source| KeyError::File { path: path.to_owned(), source };
    let bytes = crate::object::read_bounded(path, MAX_BYTES).map_err(file)?;
    String::from_utf8(bytes).map_err(|_| KeyError::Format {
        label: path.display().to_string(),
        what: "it is not text; expected PEM",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_and_sign_the_same_way_each_time() {
        for kind in [KeyKind::P256, KeyKind::Ed25519] {
            let key = SigningKey::generate(kind).unwrap();
            let again = SigningKey::from_pem(&key.to_pem().unwrap(), "k").unwrap();
            let public = PublicKey::from_pem(&key.public().to_pem().unwrap(), "p").unwrap();
            let signature = key.sign(b"bytes");
            assert_eq!(signature, again.sign(b"bytes"));
            assert!(public.verify(b"bytes", &signature));
            assert!(!public.verify(b"bytez", &signature));
            let mut bad = signature.clone();
            *bad.last_mut().unwrap() ^= 1;
            assert!(!public.verify(b"bytes", &bad) && !public.verify(b"bytes", &[]));
            assert_eq!(public.hint(), key.public().hint());
            let other = SigningKey::generate(kind).unwrap();
            assert!(!other.public().verify(b"bytes", &signature));
            let text = format!("{key:?}");
            assert!(!text.contains("PRIVATE") && text.contains(&public.hint()), "{text}");
            let error = PublicKey::from_pem(&key.to_pem().unwrap(), "k").unwrap_err();
            assert!(error.to_string().contains("private half"), "{error}");
            let error = SigningKey::from_pem(&public.to_pem().unwrap(), "p").unwrap_err();
            assert!(error.to_string().contains("public half"), "{error}");
        }
        for bad in [
            "",
            "x",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAA==\n-----END ENCRYPTED PRIVATE KEY-----",
        ] {
            assert!(SigningKey::from_pem(bad, "k").is_err());
            assert!(PublicKey::from_pem(bad, "k").is_err());
        }
    }

    /// What OpenSSL writes is read, and each checks what the other signed.
    #[test]
    fn openssl_agrees() {
        use std::process::Command;
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let run = |arguments: &[&str]| {
            Command::new("openssl").args(arguments).output().is_ok_and(|output| {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                true
            })
        };
        for (name, words) in [
            ("ed", vec!["genpkey", "-algorithm", "ed25519"]),
            ("ec", vec!["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]),
            ("sec1", vec!["ecparam", "-genkey", "-name", "prime256v1"]),
        ] {
            let (private, public) = (at(&format!("{name}.pem")), at(&format!("{name}.pub")));
            if !run(&[words, vec!["-out", &private]].concat()) {
                eprintln!("skipped: there is no openssl here");
                return;
            }
            run(&["pkey", "-in", &private, "-pubout", "-out", &public]);
            let key = SigningKey::read(Path::new(&private)).unwrap();
            let public_key = PublicKey::read(Path::new(&public)).unwrap();
            assert_eq!(public_key.hint(), key.public().hint());
            let (message, signature) = (at("message"), at("signature"));
            std::fs::write(&message, "bytes").unwrap();
            std::fs::write(&signature, key.sign(b"bytes")).unwrap();
            let check = match name {
                "ed" => vec!["pkeyutl", "-verify", "-pubin", "-rawin", "-inkey"],
                _ => vec!["dgst", "-sha256", "-verify"],
            };
            let rest: Vec<&str> = match name {
                "ed" => vec!["-in", &message, "-sigfile", &signature],
                _ => vec!["-signature", &signature, &message],
            };
            assert!(run(&[check, vec![&public], rest].concat()));
        }
    }
}
