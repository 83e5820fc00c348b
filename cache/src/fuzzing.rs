//! Parsers of foreign bytes that are not public, for `fuzz`.

use crate::credentials;

/// Reads a `WWW-Authenticate` header.
pub fn challenge(header: &str) {
    for challenge in crate::challenge::parse_challenges(header) {
        for name in ["realm", "service", "scope", "error"] {
            let _ = challenge.get(name);
        }
    }
}

/// Reads a file of credentials, and a helper's answer; helpers themselves are not run.
pub fn credentials(content: &[u8], host: &str, repository: &str) {
    credentials::fuzz(content, host, repository);
}

/// Reads a `registries.conf` and asks it for places.
pub fn registries(text: &str, host: &str, repository: &str) {
    crate::registries::fuzz(text, host, repository);
}

/// Matches a policy's pattern.
pub fn pattern(pattern: &[u8], text: &[u8]) -> bool {
    crate::trust::fits(pattern, text)
}

/// Reads a trusted root, a certificate, and a bundle that is checked by the root, each out of `data`.
pub fn keyless(data: &[u8]) {
    crate::keyless::fuzz(data);
}
