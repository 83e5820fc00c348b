//! `registries.conf`.

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    parbake_cache::fuzzing::registries(text, "reg.example", "team/py");
}
