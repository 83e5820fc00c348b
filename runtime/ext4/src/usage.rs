//! Which blocks of the image are used: one bit each, in the form of ext4's own block bitmaps.

/// A bit per block; grows as blocks are marked.
#[derive(Debug, Default)]
pub struct Usage {
    words: Vec<u64>,
}

impl Usage {
    /// Marks a range used. Returns the first block that was used before, if any.
    pub fn mark(&mut self, start: u64, blocks: u64) -> Result<(), u64> {
        let end = start + blocks;
        let words = usize::try_from(end.div_ceil(64)).unwrap_or(usize::MAX);
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        for (index, mask) in masks(start, end) {
            let taken = self.words[index] & mask;
            if taken != 0 {
                return Err(index as u64 * 64 + u64::from(taken.trailing_zeros()));
            }
            self.words[index] |= mask;
        }
        Ok(())
    }

    /// Number of used blocks in a range.
    pub fn count(&self, start: u64, end: u64) -> u64 {
        masks(start, end)
            .map(|(index, mask)| u64::from((self.word(index) & mask).count_ones()))
            .sum()
    }

    /// Calls `each` with every maximal range of free blocks below `end`, ascending.
    pub fn free_ranges<E>(
        &self,
        end: u64,
        mut each: impl FnMut(u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut block = 0;
        while block < end {
            let free = self.find(block, end, false);
            let used = self.find(free, end, true);
            if free < used {
                each(free, used - free)?;
            }
            block = used;
        }
        Ok(())
    }

    /// The bits of one group, as they are stored; blocks at and behind `end` count as used.
    pub fn bitmap(&self, group: u64, end: u64, out: &mut [u8; 4096]) {
        let first = group * 32_768;
        for (index, bytes) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let start = first + index as u64 * 64;
            let mut word = self.word(usize::try_from(start / 64).unwrap_or(usize::MAX));
            if start + 64 > end {
                word |= u64::MAX << end.saturating_sub(start).min(63);
                if start >= end {
                    word = u64::MAX;
                }
            }
            *bytes = word.to_le_bytes();
        }
    }

    fn word(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    /// First block from `start` on that is used (or free), or `end`.
    fn find(&self, start: u64, end: u64, used: bool) -> u64 {
        let mut block = start;
        while block < end {
            let word = self.word(usize::try_from(block / 64).unwrap_or(usize::MAX));
            let word = if used { word } else { !word };
            let wanted = word >> (block % 64);
            if wanted != 0 {
                return (block + u64::from(wanted.trailing_zeros())).min(end);
            }
            block = (block / 64 + 1) * 64;
        }
        end
    }
}

/// The words of a range of bits, and which of their bits belong to it.
fn masks(start: u64, end: u64) -> impl Iterator<Item = (usize, u64)> {
    (start / 64..end.div_ceil(64)).map(move |index| {
        let low = start.saturating_sub(index * 64);
        let high = (end - index * 64).min(64);
        let mask = if high <= low { 0 } else { (u64::MAX >> (64 - (high - low))) << low };
        (usize::try_from(index).unwrap_or(usize::MAX), mask)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(usage: &Usage, end: u64) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let Ok(()) = usage.free_ranges(end, |start, blocks| {
            found.push((start, blocks));
            Ok::<_, std::convert::Infallible>(())
        });
        found
    }

    #[test]
    fn marks_count_and_list() {
        let mut usage = Usage::default();
        assert_eq!(usage.mark(10, 0), Ok(()));
        assert_eq!(usage.mark(3, 200), Ok(()));
        assert_eq!(usage.mark(300, 1), Ok(()));
        assert_eq!(usage.mark(0, 4), Err(3));
        assert_eq!(usage.mark(202, 1), Err(202));
        assert_eq!(usage.count(0, 1000), 201);
        assert_eq!(usage.count(100, 301), 104);
        assert_eq!(ranges(&usage, 400), [(0, 3), (203, 97), (301, 99)]);
        assert_eq!(ranges(&usage, 2), [(0, 2)]);
        assert_eq!(ranges(&usage, 250), [(0, 3), (203, 47)]);
    }

    #[test]
    fn bits_behind_the_end_are_set() {
        let mut usage = Usage::default();
        usage.mark(32_768 + 5, 1).expect("free");
        let mut out = [0; 4096];
        for end in [32_768 + 6, 32_768 + 64, 32_768 + 100, 65_535, 65_536] {
            usage.bitmap(1, end, &mut out);
            for block in 32_768..65_536u64 {
                let bit = out[(block as usize - 32_768) / 8] >> (block % 8) & 1;
                assert_eq!(bit == 1, block >= end || block == 32_773, "{block} of {end}");
            }
        }
    }
}
