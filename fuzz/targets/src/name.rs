//! Names of templates, digests, and patterns of policies.

use parbake_cache::{Digest, TemplateName};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = text.parse::<Digest>();
    if let Ok(name) = text.parse::<TemplateName>() {
        assert_eq!(name.to_string().parse::<TemplateName>().as_ref(), Ok(&name));
        assert!(name.registry().is_none_or(|host| !host.contains(['/', '@', ' '])));
        assert!(!name.repository().contains(".."));
    }
    let (pattern, text) = text.split_at(text.floor_char_boundary(text.len() / 2));
    parbake_cache::fuzzing::pattern(pattern.as_bytes(), text.as_bytes());
}
