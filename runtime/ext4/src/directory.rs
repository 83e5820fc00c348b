//! Directory blocks: one linear block for a small directory, a hashed index over leaf blocks for a
//! larger one.

use super::checksum::Checksum;
use super::geometry::BLOCK_SIZE;
use super::hash::{self, NameHash};

/// Room for entries in a block; the rest is the checksum's disguised entry.
const ROOM: usize = BLOCK_SIZE - TAIL;
const TAIL: usize = 12;
/// Bytes of `.` and `..` together.
const DOTS: usize = 24;
/// Index entries in the root, behind the dots and the index header.
const IN_ROOT: usize = (BLOCK_SIZE - ROOT_ENTRIES) / 8 - 1;
const ROOT_ENTRIES: usize = DOTS + 8;
/// Index entries in an inner node.
const IN_NODE: usize = (BLOCK_SIZE - NODE_ENTRIES) / 8 - 1;
const NODE_ENTRIES: usize = 8;
/// Half MD4, as the index names it.
const HASH_VERSION: u8 = 1;

/// A directory entry to be written.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'t> {
    /// The name, 1 to 255 bytes.
    pub name: &'t [u8],
    /// The inode it leads to.
    pub inode: u32,
    /// That inode's kind in ext4's numbering.
    pub file_type: u8,
}

/// File type of a directory.
pub const DIRECTORY: u8 = 2;

/// A directory that has been laid out in blocks.
#[derive(Debug)]
pub struct Layout<'t> {
    own: u32,
    parent: u32,
    seed: Checksum,
    entries: Vec<Entry<'t>>,
    /// Empty for a linear directory.
    leaves: Vec<Leaf>,
    nodes: usize,
}

#[derive(Debug)]
struct Leaf {
    /// The index's key: the first name's hash, with the lowest bit set where the leaf before has
    /// names of the same hash.
    key: u32,
    /// Number of entries.
    entries: u32,
}

/// The directory has more blocks than a two-level index can name.
#[derive(Debug, PartialEq, Eq)]
pub struct TooLarge;

impl<'t> Layout<'t> {
    /// Lays out a directory. `seed` is the directory inode's checksum seed; `entries` are without
    /// the dots and sorted by name.
    pub fn new(
        own: u32,
        parent: u32,
        seed: Checksum,
        hash_seed: &[u8; 16],
        mut entries: Vec<Entry<'t>>,
    ) -> Result<Self, TooLarge> {
        let mut leaves = Vec::new();
        let bytes: usize = entries.iter().map(|entry| length(entry.name)).sum();
        if DOTS + bytes > ROOM {
            leaves = index(&mut entries, hash_seed);
        }
        let nodes = nodes_above(leaves.len())?;
        Ok(Self { own, parent, seed, entries, leaves, nodes })
    }

    /// Whether the directory has an index.
    pub fn is_indexed(&self) -> bool {
        !self.leaves.is_empty()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        (1 + self.nodes + self.leaves.len()) as u64
    }

    /// Hands out the blocks in order.
    pub fn write<E>(
        &self,
        mut each: impl FnMut(&[u8; BLOCK_SIZE]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut block = [0; BLOCK_SIZE];
        if !self.is_indexed() {
            let at = self.dots(&mut block, 12);
            fill(&mut block, at, DOTS - 12, &self.entries);
            self.seal_leaf(&mut block);
            return each(&block);
        }
        self.root(&mut block);
        each(&block)?;
        for (number, leaves) in self.leaves.chunks(IN_NODE).take(self.nodes).enumerate() {
            block.fill(0);
            block[4..6].copy_from_slice(&(BLOCK_SIZE as u16).to_le_bytes());
            let first = 1 + self.nodes + number * IN_NODE;
            let keys = leaves.iter().map(|leaf| leaf.key);
            self.seal_index(&mut block, NODE_ENTRIES, IN_NODE, first, keys);
            each(&block)?;
        }
        let mut rest = &self.entries[..];
        for leaf in &self.leaves {
            let (entries, others) = rest.split_at(leaf.entries as usize);
            rest = others;
            block.fill(0);
            fill(&mut block, 0, 0, entries);
            self.seal_leaf(&mut block);
            each(&block)?;
        }
        Ok(())
    }

    fn root(&self, block: &mut [u8; BLOCK_SIZE]) {
        self.dots(block, BLOCK_SIZE - 12);
        block[DOTS + 4] = HASH_VERSION;
        block[DOTS + 5] = 8;
        block[DOTS + 6] = u8::from(self.nodes > 0);
        if self.nodes > 0 {
            let keys = self.leaves.chunks(IN_NODE).map(|leaves| leaves[0].key);
            self.seal_index(block, ROOT_ENTRIES, IN_ROOT, 1, keys);
        } else {
            let keys = self.leaves.iter().map(|leaf| leaf.key);
            self.seal_index(block, ROOT_ENTRIES, IN_ROOT, 1, keys);
        }
    }

    /// Writes `.` and `..`, the latter with a given record length. Returns where they end.
    fn dots(&self, block: &mut [u8; BLOCK_SIZE], second: usize) -> usize {
        record(&mut block[..12], self.own, 12, b".", DIRECTORY);
        record(&mut block[12..24], self.parent, second, b"..", DIRECTORY);
        DOTS
    }

    /// Fills in an index whose targets are the blocks from `first` on, and its checksum. The first
    /// entry's key is implied; its place holds the limit and the count.
    fn seal_index(
        &self,
        block: &mut [u8; BLOCK_SIZE],
        start: usize,
        limit: usize,
        first: usize,
        keys: impl Iterator<Item = u32>,
    ) {
        let mut at = start;
        for (target, key) in (first as u32..).zip(keys) {
            block[at..at + 4].copy_from_slice(&key.to_le_bytes());
            block[at + 4..at + 8].copy_from_slice(&target.to_le_bytes());
            at += 8;
        }
        let count = (at - start) / 8;
        block[start..start + 2].copy_from_slice(&(limit as u16).to_le_bytes());
        block[start + 2..start + 4].copy_from_slice(&(count as u16).to_le_bytes());
        // The tail's reserved word and the checksum itself count as zeros.
        let sum = self.seed.with(&block[..at]).with(&[0; 8]).value();
        block[BLOCK_SIZE - 4..].copy_from_slice(&sum.to_le_bytes());
    }

    fn seal_leaf(&self, block: &mut [u8; BLOCK_SIZE]) {
        let sum = self.seed.with(&block[..ROOM]).value();
        block[ROOM + 4..ROOM + 6].copy_from_slice(&(TAIL as u16).to_le_bytes());
        block[ROOM + 7] = 0xde;
        block[ROOM + 8..].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Number of inner nodes that an index over so many leaves needs below its root.
fn nodes_above(leaves: usize) -> Result<usize, TooLarge> {
    if leaves <= IN_ROOT {
        return Ok(0);
    }
    let nodes = leaves.div_ceil(IN_NODE);
    if nodes > IN_ROOT {
        return Err(TooLarge);
    }
    Ok(nodes)
}

/// Sorts the entries by hash and cuts them into leaves.
fn index(entries: &mut Vec<Entry<'_>>, hash_seed: &[u8; 16]) -> Vec<Leaf> {
    let mut hashed: Vec<(NameHash, Entry<'_>)> =
        entries.drain(..).map(|entry| (hash::hash(entry.name, hash_seed), entry)).collect();
    hashed.sort_unstable_by(|(a, x), (b, y)| a.cmp(b).then_with(|| x.name.cmp(y.name)));
    let mut leaves: Vec<Leaf> = Vec::new();
    let mut used = ROOM;
    let mut previous = None;
    for (hash, entry) in hashed {
        let bytes = length(entry.name);
        match leaves.last_mut() {
            Some(leaf) if used + bytes <= ROOM => leaf.entries += 1,
            _ => {
                let continued = u32::from(previous == Some(hash.major));
                leaves.push(Leaf { key: hash.major | continued, entries: 1 });
                used = 0;
            }
        }
        used += bytes;
        previous = Some(hash.major);
        entries.push(entry);
    }
    leaves
}

/// Bytes an entry takes.
fn length(name: &[u8]) -> usize {
    (8 + name.len()).next_multiple_of(4)
}

/// Writes entries from `at` on; the last record, which is at `last` if there are no entries, takes
/// the rest of the room.
fn fill(block: &mut [u8; BLOCK_SIZE], mut at: usize, mut last: usize, entries: &[Entry<'_>]) {
    for entry in entries {
        let bytes = length(entry.name);
        record(&mut block[at..at + bytes], entry.inode, bytes, entry.name, entry.file_type);
        last = at;
        at += bytes;
    }
    block[last + 4..last + 6].copy_from_slice(&((ROOM - last) as u16).to_le_bytes());
}

fn record(out: &mut [u8], inode: u32, length: usize, name: &[u8], file_type: u8) {
    out[0..4].copy_from_slice(&inode.to_le_bytes());
    out[4..6].copy_from_slice(&(length as u16).to_le_bytes());
    out[6] = name.len() as u8;
    out[7] = file_type;
    out[8..8 + name.len()].copy_from_slice(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_has_two_levels_at_most() {
        assert_eq!(nodes_above(0), Ok(0));
        assert_eq!(nodes_above(507), Ok(0));
        assert_eq!(nodes_above(508), Ok(1));
        assert_eq!(nodes_above(511), Ok(2));
        assert_eq!(nodes_above(507 * 510), Ok(507));
        assert_eq!(nodes_above(507 * 510 + 1), Err(TooLarge));
    }
}
