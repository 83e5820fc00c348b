//! Any bytes as frames of a tree: no panic, and nothing outside of where it is made.

use std::fs;

use parbake_protocol::agent::FrameReader;
use parbake_protocol::agent::tree::{Limits, unpack};

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut reader = FrameReader::new();
    reader.push(data);
    let limits = Limits { entries: 100, bytes: 1 << 20, depth: 20 };
    let dest = directory.path().join("dest");
    let _ = unpack(&mut || reader.next_buffered(), &dest, limits);
    for entry in fs::read_dir(directory.path()).expect("the directory is still there") {
        assert_eq!(entry.expect("an entry").file_name(), "dest");
    }
}
