//! `WWW-Authenticate`.

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let Ok(header) = std::str::from_utf8(bytes) else { return };
    parbake_cache::fuzzing::challenge(header);
}
