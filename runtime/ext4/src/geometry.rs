//! Where things are: block groups, the fixed reserved ranges, and the cursor that hands out the
//! rest in order.

/// Bytes per block; the only block size written.
pub const BLOCK_SIZE: usize = 4096;
/// Bytes per block, as a file offset factor.
pub const BLOCK_BYTES: u64 = BLOCK_SIZE as u64;
/// Blocks per group: what one block's worth of bitmap bits describes (128 MiB).
pub const BLOCKS_PER_GROUP: u64 = 8 * BLOCK_BYTES;
/// Bytes per inode.
pub const INODE_SIZE: usize = 256;
/// Inodes per block of an inode table.
pub const INODES_PER_BLOCK: u32 = (BLOCK_SIZE / INODE_SIZE) as u32;
/// Bytes per group descriptor (64bit feature).
pub const DESCRIPTOR_SIZE: usize = 64;
/// Groups described by one block of descriptors.
pub const GROUPS_PER_TABLE_BLOCK: u64 = (BLOCK_SIZE / DESCRIPTOR_SIZE) as u64;

/// Blocks set aside for group descriptors in the front area and in each backup, used or not. The
/// unused ones belong to the resize inode and are what online growth takes: 64 blocks describe
/// 4096 groups, 512 GiB.
pub const TABLE_BLOCKS: u64 = 64;
/// Length of each reserved range: the superblock and the descriptor blocks.
pub const RESERVED_BLOCKS: u64 = 1 + TABLE_BLOCKS;
/// Largest image in groups; one table block is always left to the resize inode (504 GiB).
pub const MAX_GROUPS: u64 = (TABLE_BLOCKS - 1) * GROUPS_PER_TABLE_BLOCK;

/// Whether a group begins with a reserved range: group 0 with the superblock itself, groups 1 and
/// the powers of 3, 5 and 7 with a backup (`sparse_super`).
pub fn has_superblock(group: u64) -> bool {
    if group <= 1 {
        return true;
    }
    [3u64, 5, 7].iter().any(|&base| {
        let mut power = base;
        while power < group {
            power *= base;
        }
        power == group
    })
}

/// First block of the first reserved range that begins after `group`.
fn next_reserved(group: u64) -> u64 {
    let mut best = if group == 0 { 1 } else { u64::MAX };
    for base in [3u64, 5, 7] {
        let mut power = base;
        while power <= group {
            power = power.saturating_mul(base);
        }
        best = best.min(power);
    }
    best.saturating_mul(BLOCKS_PER_GROUP)
}

/// Number of groups that `blocks` blocks fill, the last perhaps in part.
pub fn groups_for(blocks: u64) -> u64 {
    blocks.div_ceil(BLOCKS_PER_GROUP)
}

/// The cursor that gives out the image's blocks in order and steps over the reserved ranges. It
/// does arithmetic only: where a file lies depends on nothing but what was allocated before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataArea {
    next: u64,
    /// Start of the reserved range after `next`.
    limit: u64,
}

impl Default for DataArea {
    fn default() -> Self {
        Self::new()
    }
}

impl DataArea {
    /// A cursor behind the front area of an empty image.
    pub fn new() -> Self {
        Self::at(0)
    }

    /// A cursor that gives out `block` next, or what follows it where `block` is reserved.
    pub(super) fn at(block: u64) -> Self {
        let group = block / BLOCKS_PER_GROUP;
        let start = group * BLOCKS_PER_GROUP;
        let next = if has_superblock(group) { block.max(start + RESERVED_BLOCKS) } else { block };
        Self { next, limit: next_reserved(group) }
    }

    /// Takes `blocks` blocks and reports them as runs of physical blocks, in order. There is more
    /// than one run only where a reserved range lies between.
    pub fn allocate(&mut self, blocks: u64, mut runs: impl FnMut(u64, u32)) {
        let mut left = blocks;
        while left > 0 {
            if self.next >= self.limit {
                *self = Self::at(self.limit);
            }
            let room = (self.limit - self.next).min(1 << 31);
            let take = left.min(room);
            runs(self.next, u32::try_from(take).unwrap_or(u32::MAX));
            self.next += take;
            left -= take;
        }
    }

    /// Takes `blocks` adjacent blocks, leaving out the rest before a reserved range where they do
    /// not fit. At most a group's worth less the reserved range.
    pub(super) fn allocate_adjacent(&mut self, blocks: u64) -> u64 {
        if self.next + blocks > self.limit {
            *self = Self::at(self.limit);
        }
        let start = self.next;
        self.next += blocks;
        start
    }

    /// One past the last block given out; everything at and behind it is untouched.
    pub fn end(&self) -> u64 {
        self.next
    }
}

/// Where a group's bitmaps and inode table are.
#[derive(Debug, Clone, Copy)]
pub struct GroupTables {
    /// Block of the block bitmap.
    pub block_bitmap: u64,
    /// Block of the inode bitmap.
    pub inode_bitmap: u64,
    /// First block of the inode table.
    pub inode_table: u64,
}

/// The size of the image and the place of its group tables.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// Size of the image in blocks.
    pub blocks: u64,
    /// Inodes per group, a multiple of 16.
    pub inodes_per_group: u32,
    /// One entry per group.
    pub groups: Vec<GroupTables>,
}

/// What the image must hold besides what the cursor has given out so far.
#[derive(Debug, Clone, Copy)]
pub struct Demand {
    /// Inodes, reserved and free ones included.
    pub inodes: u64,
    /// Blocks wanted for use by others than the kernel.
    pub free: u64,
    /// Blocks below the cursor that are free already.
    pub unused: u64,
}

/// Most inodes a group can have: one block's worth of bitmap bits.
const MAX_INODES_PER_GROUP: u64 = 8 * BLOCK_BYTES;
/// Fewest inodes per group, so that groups added by growth bring at least one inode per 64 KiB.
const MIN_INODES_PER_GROUP: u64 = 2048;

/// Fewest blocks with which an image has `count` groups.
fn shortest(count: u64) -> u64 {
    let last = (count - 1) * BLOCKS_PER_GROUP;
    if has_superblock(count - 1) { last + RESERVED_BLOCKS + 1 } else { last + 1 }
}

/// Size of an image of at least `least` blocks that is used up to `cursor`, where `have` blocks are
/// free below it, and that is to have `free` free blocks. The kernel keeps a fiftieth of all blocks,
/// at most 4096, for its own needs; they come on top.
fn size_with_free(cursor: &DataArea, free: u64, have: u64, least: u64) -> u64 {
    let mut kept = 0;
    loop {
        let mut end = cursor.clone();
        end.allocate((free + kept).saturating_sub(have), |_, _| ());
        let blocks = end.end().max(least);
        let keeps = if free == 0 { 0 } else { (blocks / 50).min(4096) };
        if keeps <= kept {
            return blocks;
        }
        kept = keeps;
    }
}

impl Geometry {
    /// Finds the smallest image with the demanded room and places the group tables from `cursor`
    /// on. Returns `None` if that is more than [`MAX_GROUPS`].
    pub fn solve(cursor: &DataArea, demand: Demand) -> Option<Self> {
        let mut count = groups_for(cursor.end().max(1))
            .max(demand.inodes.div_ceil(MAX_INODES_PER_GROUP))
            .max(1);
        // More groups need more tables, but bring far more room than those take: this ends.
        while count <= MAX_GROUPS {
            let mut end = cursor.clone();
            let (geometry, gaps) = Self::place(&mut end, count, demand.inodes);
            let have = demand.unused + gaps;
            let blocks = size_with_free(&end, demand.free, have, shortest(count));
            let needed = groups_for(blocks);
            if needed <= count {
                return Some(Self { blocks, ..geometry });
            }
            count = needed;
        }
        None
    }

    /// Places the tables of `count` groups; also returns how many blocks were left out between.
    fn place(cursor: &mut DataArea, count: u64, inodes: u64) -> (Self, u64) {
        let per_group = inodes
            .div_ceil(count)
            .max(MIN_INODES_PER_GROUP)
            .next_multiple_of(u64::from(INODES_PER_BLOCK));
        let table = per_group / u64::from(INODES_PER_BLOCK);
        let mut groups = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
        let mut push = |block: u64, blocks: u32| {
            for block in block..block + u64::from(blocks) {
                groups.push(GroupTables { block_bitmap: block, inode_bitmap: 0, inode_table: 0 });
            }
        };
        cursor.allocate(count, &mut push);
        for group in &mut groups {
            group.inode_bitmap = cursor.allocate_adjacent(1);
        }
        let mut gaps = 0;
        for group in &mut groups {
            let before = cursor.clone();
            group.inode_table = cursor.allocate_adjacent(table);
            if group.inode_table != before.end() {
                gaps += before.limit - before.end();
            }
        }
        let geometry = Self {
            blocks: 0,
            inodes_per_group: u32::try_from(per_group).unwrap_or(u32::MAX),
            groups,
        };
        (geometry, gaps)
    }

    /// Blocks per inode table.
    pub fn table_blocks(&self) -> u64 {
        u64::from(self.inodes_per_group / INODES_PER_BLOCK)
    }

    /// Blocks of group descriptors in use.
    pub fn descriptor_blocks(&self) -> u64 {
        (self.groups.len() as u64).div_ceil(GROUPS_PER_TABLE_BLOCK)
    }

    /// Groups after the first that begin with a backup, ascending.
    pub fn backups(&self) -> impl Iterator<Item = u64> + use<> {
        (1..self.groups.len() as u64).filter(|&group| has_superblock(group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reserved blocks below block `end`, which must not lie inside a reserved range.
    fn reserved_below(end: u64) -> u64 {
        (0..groups_for(end)).filter(|&group| has_superblock(group)).count() as u64 * RESERVED_BLOCKS
    }

    #[test]
    fn backups_are_at_powers_of_three_five_and_seven() {
        let found: Vec<u64> = (0..400).filter(|&group| has_superblock(group)).collect();
        assert_eq!(found, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125, 243, 343]);
        for group in 0..400 {
            let next = (group + 1..).find(|&group| has_superblock(group)).unwrap_or(0);
            assert_eq!(next_reserved(group), next * BLOCKS_PER_GROUP, "after {group}");
        }
    }

    #[test]
    fn cursor_never_gives_out_a_reserved_block_and_leaves_no_other_out() {
        for step in [1u64, 7, 1000, 32_768, 40_000, 1_000_000] {
            let mut area = DataArea::new();
            let mut expected = RESERVED_BLOCKS;
            let mut total = 0;
            while area.end() < 30 * BLOCKS_PER_GROUP {
                area.allocate(step, |start, blocks| {
                    let group = start / BLOCKS_PER_GROUP;
                    if start != expected {
                        assert!(has_superblock(group));
                        assert_eq!(start % BLOCKS_PER_GROUP, RESERVED_BLOCKS);
                        assert_eq!(expected, group * BLOCKS_PER_GROUP);
                    }
                    expected = start + u64::from(blocks);
                    total += u64::from(blocks);
                });
                assert_eq!(area.end(), expected);
                assert_eq!(area.end(), total + reserved_below(area.end()));
            }
        }
    }

    #[test]
    fn no_last_group_is_shorter_than_its_reserved_range() {
        for used in (BLOCKS_PER_GROUP - 3000..BLOCKS_PER_GROUP + 10).step_by(1) {
            let mut cursor = DataArea::new();
            cursor.allocate(used - RESERVED_BLOCKS, |_, _| ());
            let demand = Demand { inodes: 100, free: 0, unused: 0 };
            let geometry = Geometry::solve(&cursor, demand).expect("small");
            assert_eq!(geometry.groups.len() as u64, groups_for(geometry.blocks));
            let tail = geometry.blocks % BLOCKS_PER_GROUP;
            assert!(geometry.groups.len() == 1 || tail == 0 || tail > RESERVED_BLOCKS);
        }
    }

    #[test]
    fn refuses_more_than_the_descriptor_tables_can_describe() {
        let mut cursor = DataArea::new();
        let demand = |free| Demand { inodes: 100, free, unused: 0 };
        assert!(Geometry::solve(&cursor, demand(4000 * BLOCKS_PER_GROUP)).is_some());
        assert!(Geometry::solve(&cursor, demand(4032 * BLOCKS_PER_GROUP)).is_none());
        cursor.allocate(4032 * BLOCKS_PER_GROUP, |_, _| ());
        assert!(Geometry::solve(&cursor, demand(0)).is_none());
    }
}
