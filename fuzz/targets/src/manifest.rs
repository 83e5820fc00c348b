//! Any bytes as an index or manifest, as a digest, a source and a platform: no panic.

use parbake_builder::image::digest::BlobDigest;
use parbake_builder::image::manifest::Document;
use parbake_builder::image::{ImageSource, Platform};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let _ = Document::parse(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        if let Ok(digest) = text.parse::<BlobDigest>() {
            assert_eq!(digest.to_string(), text);
            assert!(!digest.hex().contains(['/', '.']));
        }
        if let Ok(source) = text.parse::<ImageSource>() {
            assert!(!source.portable().is_empty());
        }
        let _ = text.parse::<Platform>();
    }
}
