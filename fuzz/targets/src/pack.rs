//! Pack directories, their frames, and page maps.

use parbake_cache::pack::{self, Directory};
use parbake_cache::pagemap::PageMap;

/// Runs one input.
pub fn run(data: &[u8]) {
    let _ = PageMap::parse(data);
    if let Ok(directory) = Directory::parse(data) {
        // The bytes themselves stand for a pack.
        for frame in directory.frames().iter().take(4) {
            let _ = pack::decompress(frame, data);
        }
    }
}
