//! `registries.conf`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| parbake_cache::fuzzing::registries(text, "reg.example", "team/py"));
