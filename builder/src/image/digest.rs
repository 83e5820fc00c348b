//! Digests as images write them: `sha256:…` or `sha512:…`.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256, Sha512};

/// A hash algorithm an image may use for its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// SHA-256.
    Sha256,
    /// SHA-512.
    Sha512,
}

/// A digest of a blob. Its hexadecimal part is checked, so it is safe as a file name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlobDigest {
    algorithm: Algorithm,
    hex: Box<str>,
}

/// A string that is no digest this program can check.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a digest this program can verify (expected sha256: or sha512: and lower-case hexadecimal digits)"
)]
pub struct BadDigest {
    text: String,
}

impl BlobDigest {
    /// Hashes `bytes`.
    #[must_use]
    pub fn of(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The algorithm's name as the directory below `blobs/` spells it.
    #[must_use]
    pub fn algorithm_name(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }

    /// The hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.hex
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm_name(), self.hex)
    }
}

impl FromStr for BlobDigest {
    type Err = BadDigest;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadDigest { text: text.chars().take(160).collect() };
        let (name, hex) = text.split_once(':').ok_or_else(bad)?;
        let (algorithm, digits) = match name {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => return Err(bad()),
        };
        if hex.len() != digits || !hex.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(bad());
        }
        Ok(Self { algorithm, hex: hex.into() })
    }
}

/// Hashes a stream by either algorithm.
pub enum Hasher {
    /// SHA-256.
    Sha256(Box<Sha256>),
    /// SHA-512.
    Sha512(Box<Sha512>),
}

impl Hasher {
    /// An empty stream.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Sha256 => Self::Sha256(Box::default()),
            Algorithm::Sha512 => Self::Sha512(Box::default()),
        }
    }

    /// Appends `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(state) => state.update(bytes),
            Self::Sha512(state) => state.update(bytes),
        }
    }

    /// The digest of everything appended.
    #[must_use]
    pub fn finish(self) -> BlobDigest {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        match self {
            Self::Sha256(state) => {
                BlobDigest { algorithm: Algorithm::Sha256, hex: hex(&state.finalize()).into() }
            }
            Self::Sha512(state) => {
                BlobDigest { algorithm: Algorithm::Sha512, hex: hex(&state.finalize()).into() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_algorithms_round_trip() {
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            let digest = BlobDigest::of(algorithm, b"abc");
            assert_eq!(digest.to_string().parse::<BlobDigest>().unwrap(), digest);
        }
        assert!(BlobDigest::of(Algorithm::Sha512, b"abc").hex().starts_with("ddaf35a193617aba"));
    }

    #[test]
    fn what_is_no_digest_is_refused() {
        let good = BlobDigest::of(Algorithm::Sha256, b"").to_string();
        for bad in [
            "",
            "sha256",
            "sha256:",
            "md5:d41d8cd98f00b204e9800998ecf8427e",
            "sha256:../../../../../../../../../../../../../../../../../../../../../etc",
            &good.to_uppercase(),
            &good[..70],
            &format!("{good}0"),
            &good.replace("sha256", "sha512"),
        ] {
            assert!(bad.parse::<BlobDigest>().is_err(), "{bad}");
        }
    }
}
