//! Sparse maps: which parts of a file its stored bytes are.

use super::TarError;
use super::header::{BLOCK, number};

/// A stretch of a file that has bytes in the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins in the file.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
}

/// Checks that a map is ascending, lies within the file, and accounts for exactly the bytes
/// stored.
pub fn check(map: &[Segment], real_size: u64, stored: u64) -> Result<(), TarError> {
    let mut end = 0;
    let mut sum = 0u64;
    for segment in map {
        if segment.offset < end {
            return Err(TarError::Sparse { problem: "segments overlap or are out of order" });
        }
        end = segment
            .offset
            .checked_add(segment.length)
            .filter(|&end| end <= real_size)
            .ok_or(TarError::Sparse { problem: "a segment ends beyond the file's size" })?;
        sum += segment.length;
    }
    if sum != stored {
        return Err(TarError::Sparse { problem: "the segments do not add up to the bytes stored" });
    }
    Ok(())
}

/// Reads the old GNU map of `entries` (offset and length, twelve bytes each) into `map`; an entry
/// that begins with a NUL ends it.
pub fn old_gnu(entries: &[u8], map: &mut Vec<Segment>, limit: usize) -> Result<(), TarError> {
    const BAD: TarError =
        TarError::Sparse { problem: "a segment's offset or length is not a number" };
    for entry in entries.chunks_exact(24) {
        if entry[0] == 0 {
            break;
        }
        if map.len() >= limit {
            return Err(TarError::Sparse { problem: "more segments than the limit" });
        }
        let value = |field| number(field).and_then(|value| u64::try_from(value).ok());
        map.push(Segment {
            offset: value(&entry[..12]).ok_or(BAD)?,
            length: value(&entry[12..24]).ok_or(BAD)?,
        });
    }
    Ok(())
}

/// Reads the map of PAX format 1.0 from the front of the entry's data, block by block through
/// `next_block`; returns the segments. Lines are decimal: the count, then offset and length in
/// turn; the map is padded to a whole block.
pub fn pax_1_0(
    limit: usize,
    mut next_block: impl FnMut() -> Result<[u8; BLOCK], TarError>,
) -> Result<Vec<Segment>, TarError> {
    const BAD: TarError = TarError::Sparse { problem: "the map is not lines of decimal numbers" };
    let mut block = next_block()?;
    let mut at = 0;
    let mut line = || {
        let mut value = None::<u64>;
        loop {
            if at == BLOCK {
                block = next_block()?;
                at = 0;
            }
            let byte = block[at];
            at += 1;
            match byte {
                b'\n' => return value.ok_or(BAD),
                b'0'..=b'9' => {
                    let grown = value.unwrap_or(0).checked_mul(10);
                    value = Some(
                        grown
                            .and_then(|value| value.checked_add(u64::from(byte - b'0')))
                            .ok_or(BAD)?,
                    );
                }
                _ => return Err(BAD),
            }
        }
    };
    let count = line()?;
    if count > limit as u64 {
        return Err(TarError::Sparse { problem: "more segments than the limit" });
    }
    let mut map = Vec::new();
    for _ in 0..count {
        map.push(Segment { offset: line()?, length: line()? });
    }
    Ok(map)
}
