//! Extents and the tree that holds them when four in the inode are not enough.

use super::checksum::Checksum;
use super::geometry::BLOCK_SIZE;

/// Bytes of an inode's block field.
pub const BLOCK_FIELD: usize = 60;
/// Most blocks in one extent; more would mean "unwritten".
const MAX_BLOCKS: u32 = 32_768;
/// Bytes of a header and of each entry.
const ENTRY: usize = 12;
/// Entries in the inode.
const IN_INODE: usize = BLOCK_FIELD / ENTRY - 1;
/// Entries in a block, which ends with a checksum of 4 bytes.
const IN_BLOCK: usize = (BLOCK_SIZE - ENTRY - 4) / ENTRY;
const MAGIC: u16 = 0xf30a;

/// One extent: blocks adjacent both in the file and in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block within the file.
    pub logical: u32,
    /// Number of blocks, 1 to 32,768.
    pub blocks: u16,
    /// First block within the image.
    pub physical: u64,
}

/// Collects runs into extents: merges neighbours and cuts what is too long.
#[derive(Debug, Default)]
pub struct Extents {
    list: Vec<Extent>,
}

impl Extents {
    /// Adds a run behind all earlier ones.
    pub fn push(&mut self, mut logical: u32, mut physical: u64, mut blocks: u32) {
        if let Some(last) = self.list.last_mut() {
            let length = u32::from(last.blocks);
            if last.logical + length == logical && last.physical + u64::from(length) == physical {
                let take = blocks.min(MAX_BLOCKS - length);
                last.blocks += take as u16;
                logical += take;
                physical += u64::from(take);
                blocks -= take;
            }
        }
        while blocks > 0 {
            let take = blocks.min(MAX_BLOCKS);
            self.list.push(Extent { logical, blocks: take as u16, physical });
            // The last block number of a file is below 2^32, one past it may not be.
            logical = logical.wrapping_add(take);
            physical += u64::from(take);
            blocks -= take;
        }
    }

    /// Forgets all extents, keeps the memory.
    pub fn clear(&mut self) {
        self.list.clear();
    }

    /// How many blocks the tree needs outside the inode.
    pub fn tree_blocks(&self) -> u64 {
        let mut total = 0;
        let mut entries = self.list.len();
        while entries > IN_INODE {
            entries = entries.div_ceil(IN_BLOCK);
            total += entries as u64;
        }
        total
    }

    /// Builds the tree. `place` is given each block of it, complete, and returns where it will be;
    /// it is called exactly [`Self::tree_blocks`] times. Returns the inode's part.
    pub fn build<E>(
        &self,
        seed: Checksum,
        mut place: impl FnMut(&[u8; BLOCK_SIZE]) -> Result<u64, E>,
    ) -> Result<[u8; BLOCK_FIELD], E> {
        let mut level: Vec<(u32, [u8; ENTRY])> =
            self.list.iter().map(|e| (e.logical, leaf(e))).collect();
        let mut depth = 0;
        while level.len() > IN_INODE {
            let mut above = Vec::with_capacity(level.len().div_ceil(IN_BLOCK));
            for entries in level.chunks(IN_BLOCK) {
                let mut block = [0; BLOCK_SIZE];
                fill(&mut block, entries, IN_BLOCK, depth);
                let (body, tail) = block.split_at_mut(ENTRY * (IN_BLOCK + 1));
                tail.copy_from_slice(&seed.with(body).value().to_le_bytes());
                let physical = place(&block)?;
                above.push((entries[0].0, index(entries[0].0, physical)));
            }
            level = above;
            depth += 1;
        }
        let mut root = [0; BLOCK_FIELD];
        fill(&mut root, &level, IN_INODE, depth);
        Ok(root)
    }
}

fn fill(out: &mut [u8], entries: &[(u32, [u8; ENTRY])], room: usize, depth: u16) {
    out[0..2].copy_from_slice(&MAGIC.to_le_bytes());
    out[2..4].copy_from_slice(&(entries.len() as u16).to_le_bytes());
    out[4..6].copy_from_slice(&(room as u16).to_le_bytes());
    out[6..8].copy_from_slice(&depth.to_le_bytes());
    for (to, (_, entry)) in out[ENTRY..].chunks_mut(ENTRY).zip(entries) {
        to.copy_from_slice(entry);
    }
}

fn leaf(extent: &Extent) -> [u8; ENTRY] {
    let mut out = [0; ENTRY];
    out[0..4].copy_from_slice(&extent.logical.to_le_bytes());
    out[4..6].copy_from_slice(&extent.blocks.to_le_bytes());
    out[6..8].copy_from_slice(&((extent.physical >> 32) as u16).to_le_bytes());
    out[8..12].copy_from_slice(&(extent.physical as u32).to_le_bytes());
    out
}

fn index(logical: u32, physical: u64) -> [u8; ENTRY] {
    let mut out = [0; ENTRY];
    out[0..4].copy_from_slice(&logical.to_le_bytes());
    out[4..8].copy_from_slice(&(physical as u32).to_le_bytes());
    out[8..10].copy_from_slice(&((physical >> 32) as u16).to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_neighbours_and_cuts_long_runs() {
        let mut extents = Extents::default();
        extents.push(0, 100, 30_000);
        extents.push(30_000, 30_100, 40_000);
        extents.push(70_000, 1_000_000, 1);
        extents.push(70_005, 1_000_001, 1);
        let lengths: Vec<u16> = extents.list.iter().map(|e| e.blocks).collect();
        assert_eq!(lengths, [32_768, 32_768, 4464, 1, 1]);
        assert_eq!(extents.list[2].physical, 100 + 65_536);
    }

    #[test]
    fn counts_the_blocks_it_places() {
        for (count, blocks, depth) in [
            (0u32, 0, 0),
            (4, 0, 0),
            (5, 1, 1),
            (340, 1, 1),
            (341, 2, 1),
            (1360, 4, 1),
            (1361, 6, 2),
            (340 * 340 * 4 + 1, 1361 + 5 + 2, 3),
        ] {
            let mut extents = Extents::default();
            for i in 0..count {
                extents.push(i * 2, 1000 + u64::from(i) * 2, 1);
            }
            let mut placed = 0;
            let root = extents
                .build(Checksum::START, |_| {
                    placed += 1;
                    Ok::<_, ()>(placed)
                })
                .expect("infallible");
            assert_eq!(placed, extents.tree_blocks());
            if count < 100_000 {
                assert_eq!(placed, blocks, "{count}");
                assert_eq!(root[6], depth, "{count}");
            }
        }
    }
}
