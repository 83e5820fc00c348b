//! Where each block of a disk is to be found: two bits a block.
//!
//! The words come zeroed from the allocator, so a map of a disk nobody wrote to costs no memory
//! and no time, whatever the disk's size.

use serde::{Deserialize, Serialize};

/// Size of a block in bytes.
pub(super) const BLOCK: u64 = 4096;

const PER_WORD: u64 = 32;
const LOW_BITS: u64 = 0x5555_5555_5555_5555;

/// Who has a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Place {
    /// The shared base image.
    Base = 0,
    /// The frozen overlay of a snapshot.
    Frozen = 1,
    /// The private overlay.
    Private = 2,
    /// Nobody: it reads as zeroes.
    Zero = 3,
}

impl Place {
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Base,
            1 => Self::Frozen,
            2 => Self::Private,
            _ => Self::Zero,
        }
    }
}

/// A run of blocks in the same place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u64,
    pub(super) count: u64,
    pub(super) place: Place,
}

/// The map.
pub(super) struct BlockMap {
    words: Vec<u64>,
    blocks: u64,
    private: u64,
}

impl BlockMap {
    /// A map in which the base has everything.
    pub(super) fn new(blocks: u64) -> Self {
        let words = vec![0; blocks.div_ceil(PER_WORD) as usize];
        Self { words, blocks, private: 0 }
    }

    /// How many blocks the disk has.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// How many blocks the private overlay has.
    pub(super) fn private(&self) -> u64 {
        self.private
    }

    /// Who has `block`; the base, if there is no such block.
    pub(super) fn get(&self, block: u64) -> Place {
        let word = self.words.get((block / PER_WORD) as usize).copied().unwrap_or(0);
        Place::from_bits(word >> (block % PER_WORD * 2))
    }

    /// Notes that `place` has the `count` blocks from `start`; those past the end are left out.
    pub(super) fn set(&mut self, start: u64, count: u64, place: Place) {
        let end = start.saturating_add(count).min(self.blocks);
        let mut block = start;
        while block < end {
            let first = block % PER_WORD;
            let here = (PER_WORD - first).min(end - block);
            let mask = (u64::MAX >> (64 - here * 2)) << (first * 2);
            let word = &mut self.words[(block / PER_WORD) as usize];
            self.private -= private_in(*word);
            *word = *word & !mask | (LOW_BITS * place as u64) & mask;
            self.private += private_in(*word);
            block += here;
        }
    }

    /// The run that starts at `start`, at most `limit` blocks of it.
    pub(super) fn run(&self, start: u64, limit: u64) -> Run {
        let place = self.get(start);
        let whole = LOW_BITS * place as u64;
        let end = start.saturating_add(limit).min(self.blocks);
        let mut block = start;
        while block < end {
            if block.is_multiple_of(PER_WORD)
                && block + PER_WORD <= end
                && self.words[(block / PER_WORD) as usize] == whole
            {
                block += PER_WORD;
            } else if self.get(block) == place {
                block += 1;
            } else {
                break;
            }
        }
        Run { start, count: block - start, place }
    }

    /// All runs in order, without those of the base.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            while next < self.blocks {
                let run = self.run(next, u64::MAX);
                next += run.count;
                if run.place != Place::Base {
                    return Some(run);
                }
            }
            None
        })
    }
}

fn private_in(word: u64) -> u64 {
    ((word >> 1) & !word & LOW_BITS).count_ones().into()
}

/// The map of a frozen overlay, as a snapshot stores it: alternating gap and run lengths in blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedMap {
    /// Blocks of the disk.
    pub(super) blocks: u64,
    /// `(gap since the last run, blocks, reads as zeroes)`.
    pub(super) runs: Vec<(u64, u64, bool)>,
}

impl SavedMap {
    /// What a snapshot of `map` has: frozen and private blocks become one frozen overlay.
    pub(super) fn flatten(map: &BlockMap) -> Self {
        let mut runs: Vec<(u64, u64, bool)> = Vec::new();
        let mut end = 0;
        for run in map.runs() {
            let zero = run.place == Place::Zero;
            match runs.last_mut() {
                Some(last) if run.start == end && last.2 == zero => last.1 += run.count,
                _ => runs.push((run.start - end, run.count, zero)),
            }
            end = run.start + run.count;
        }
        Self { blocks: map.blocks(), runs }
    }

    /// The map of a disk restored from this, and where the last data block ends; an error text for
    /// runs that leave the disk.
    pub(super) fn revive(&self) -> Result<(BlockMap, u64), &'static str> {
        let mut map = BlockMap::new(self.blocks);
        let (mut end, mut data_end) = (0u64, 0);
        for &(gap, count, zero) in &self.runs {
            let start = end.checked_add(gap).ok_or("a run that overflows")?;
            end = start.checked_add(count).ok_or("a run that overflows")?;
            if end > self.blocks {
                return Err("a run past the end of the disk");
            }
            map.set(start, count, if zero { Place::Zero } else { Place::Frozen });
            if !zero {
                data_end = end;
            }
        }
        Ok((map, data_end))
    }
}
