//! Any bytes as a tar archive: no panic, no entry that breaks the reader's promises.

use parbake_builder::layer::tar::{EntryKind, TarError, TarLimits, TarReader};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let limits = TarLimits { header_bytes: 1 << 16, segments: 1000, ..TarLimits::default() };
    let mut reader = TarReader::new(bytes, limits);
    while let Ok(Some(entry)) = reader.next_entry() {
        assert!(entry.mode <= 0o7777 && entry.mtime.nanos < 1_000_000_000);
        if entry.kind != EntryKind::File {
            continue;
        }
        let mut end = 0;
        let read = reader.data(|offset, piece| {
            assert!(offset >= end, "pieces come in order");
            end = offset + piece.len() as u64;
            assert!(end <= entry.size, "pieces end within the file");
            Ok::<_, TarError>(())
        });
        if read.is_err() {
            break;
        }
    }
    assert!(reader.position() <= bytes.len() as u64);
}
