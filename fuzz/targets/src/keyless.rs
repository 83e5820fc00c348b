//! Trusted roots, certificates, and bundles that are signed by them.

use parbake_cache::fuzzing;

/// Runs one input.
pub fn run(data: &[u8]) {
    fuzzing::keyless(data);
}
