//! Manifests, indexes and configs, and what is attached.

use parbake_cache::Digest;
use parbake_cache::artifact::{ArtifactConfig, Index, Manifest};
use parbake_cache::bundle;
use parbake_cache::keys::{PublicKey, SigningKey};

/// Runs one input.
pub fn run(data: &[u8]) {
    let digest = Digest::of(data);
    let _ = Manifest::parse(data, &digest, "x");
    let _ = Index::parse(data, &digest);
    let _ = ArtifactConfig::parse(data, &digest);
    let _ = bundle::verify(data, &digest, &bundle::Signers::default());
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = PublicKey::from_pem(text, "x");
        let _ = SigningKey::from_pem(text, "x");
    }
}
