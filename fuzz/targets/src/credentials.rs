//! Files of credentials, and what helpers answer.

/// Runs one input.
pub fn run(data: &[u8]) {
    for host in ["reg.example", "reg.example:5000", "docker.io"] {
        parbake_cache::fuzzing::credentials(data, host, "team/py");
    }
}
