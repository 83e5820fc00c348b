//! `WWW-Authenticate`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|header: &str| parbake_cache::fuzzing::challenge(header));
