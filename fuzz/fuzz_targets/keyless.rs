#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| parbake_fuzz_targets::keyless::run(bytes));
