//! Files of credentials, and what helpers answer.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for host in ["reg.example", "reg.example:5000", "docker.io"] {
        parbake_cache::fuzzing::credentials(data, host, "team/py");
    }
});
