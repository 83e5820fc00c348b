//! Chunk indexes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use parbake_cache::index::ChunkIndex;

fuzz_target!(|data: &[u8]| {
    let _ = ChunkIndex::parse(data);
});
