//! Chunk indexes.

use parbake_cache::index::ChunkIndex;

/// Runs one input.
pub fn run(data: &[u8]) {
    let _ = ChunkIndex::parse(data);
}
