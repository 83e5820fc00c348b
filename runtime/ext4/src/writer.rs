//! The order of work: check and place what each inode needs, then the tables, then what describes
//! them all.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use super::checksum::Checksum;
use super::directory::{Entry, Layout};
use super::extent::{BLOCK_FIELD, Extents};
use super::geometry::{
    self, BLOCK_BYTES, BLOCK_SIZE, BLOCKS_PER_GROUP, DataArea, Demand, Geometry, RESERVED_BLOCKS,
};
use super::inode;
use super::sink::Sink;
use super::superblock::{self, FIRST_INODE};
use super::survey::Survey;
use super::usage::Usage;
use super::xattr::{Attributes, SharedBlocks, Unstorable};
use super::{Options, Report, WriteError};
use crate::tree::{FileData, Kind, NodeId, Tree};

/// Longest symlink target within the inode.
pub(super) const FAST_SYMLINK: usize = BLOCK_FIELD - 1;
/// Longest symlink target at all.
const MAX_SYMLINK: usize = BLOCK_SIZE - 1;
/// Most names of a file; a directory beyond it has a link count of 1 (`dir_nlink`).
pub(super) const MAX_LINKS: u32 = 65_000;
/// Largest file: logical block numbers have 32 bits, and the last is not usable.
const MAX_FILE: u64 = (u32::MAX as u64) * BLOCK_BYTES;

/// Metadata begins at a multiple of so many blocks (256 KiB). What is the same in two images, but
/// behind data of different length, is then the same in whole chunks. The blocks left out are free.
const METADATA_ALIGNMENT: u64 = 64;
/// Bytes of free space that bring another inode.
const BYTES_PER_INODE: u64 = 16 << 10;

/// Blocks an inode was given behind the data: a directory's, a long symlink's.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Placed {
    /// Image sizes stay far below 2^32 blocks.
    pub start: u32,
    pub blocks: u32,
}

/// An extent tree that does not fit into its inode.
#[derive(Debug)]
struct Rooted {
    field: [u8; BLOCK_FIELD],
    blocks: u64,
}

pub(super) struct Writer<'t> {
    pub survey: Survey<'t>,
    pub options: &'t Options,
    pub sink: Sink<'t>,
    cursor: DataArea,
    pub usage: Usage,
    /// Groups whose reserved range is marked in `usage`, from 0 on.
    reserved_groups: u64,
    pub seed: Checksum,
    /// By place in the survey's order.
    pub placed: Vec<Placed>,
    /// By inode number; rare.
    trees: BTreeMap<u32, Rooted>,
    /// By inode number.
    pub xattr_blocks: BTreeMap<u32, u64>,
    shared: SharedBlocks<'t>,
    extents: Extents,
}

/// Does what [`super::finish`] promises.
pub fn write(
    out: &File,
    area: &DataArea,
    tree: &Tree,
    options: &Options,
) -> Result<Report, WriteError> {
    if options.label.len() > 16 {
        return Err(WriteError::Label(options.label.clone()));
    }
    if options.uuid == [0; 16] {
        return Err(WriteError::Uuid);
    }
    if area.end() > geometry::MAX_GROUPS * BLOCKS_PER_GROUP {
        return Err(WriteError::ImageTooLarge);
    }
    let survey = Survey::of(tree)?;
    let mut writer = Writer {
        placed: vec![Placed::default(); survey.len()],
        survey,
        options,
        sink: Sink::new(out),
        cursor: behind(area),
        usage: Usage::default(),
        reserved_groups: 0,
        seed: Checksum::of_uuid(&options.uuid),
        trees: BTreeMap::new(),
        xattr_blocks: BTreeMap::new(),
        shared: SharedBlocks::default(),
        extents: Extents::default(),
    };
    let data_blocks = writer.claim_data(area)?;
    let needed = area.end() * BLOCK_BYTES;
    // Whatever lies behind the data is gone, and reads as zeros where nothing is written.
    out.set_len(needed).map_err(out_of_space(needed))?;
    writer.punch_unused(area)?;
    writer.place_contents()?;
    writer.write_xattr_blocks()?;
    let journal = writer.place_journal()?;
    let resize_block = writer.claim_adjacent(1);
    let geometry = writer.solve()?;
    let size = geometry.blocks * BLOCK_BYTES;
    out.set_len(size).map_err(out_of_space(size))?;
    writer.write_tables(&geometry, journal, resize_block, data_blocks).map_err(out_of_space(size))
}

/// The cursor for the metadata of an image with this data.
fn behind(area: &DataArea) -> DataArea {
    if *area == DataArea::new() {
        area.clone()
    } else {
        DataArea::at(area.end().next_multiple_of(METADATA_ALIGNMENT))
    }
}

/// Turns an error of the image file into ours; `needed` is what the image takes.
fn out_of_space(needed: u64) -> impl Fn(io::Error) -> WriteError {
    move |error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            WriteError::OutOfSpace { needed }
        }
        _ => WriteError::Io(error),
    }
}

impl<'t> Writer<'t> {
    fn io(&self) -> impl Fn(io::Error) -> WriteError + use<> {
        out_of_space(self.cursor.end() * BLOCK_BYTES)
    }

    /// Marks the reserved ranges and all files' blocks used. Returns how many those are.
    fn claim_data(&mut self, area: &DataArea) -> Result<u64, WriteError> {
        self.claim_reserved(geometry::groups_for(area.end()));
        let mut data_blocks = 0;
        for place in 0..self.survey.len() {
            let node = self.survey.node(place);
            let Kind::File(data) = &node.kind else {
                continue;
            };
            if data.size > MAX_FILE {
                return Err(WriteError::FileTooLarge {
                    path: self.survey.path(place),
                    size: data.size,
                });
            }
            let mut logical_end = 0;
            let limit = data.size.div_ceil(BLOCK_BYTES);
            for run in &data.runs {
                let bad = |why| WriteError::Run {
                    path: self.survey.path(place),
                    physical: run.physical,
                    blocks: run.blocks,
                    why,
                };
                let blocks = u64::from(run.blocks);
                if u64::from(run.logical) < logical_end || blocks == 0 {
                    return Err(bad("is empty or out of order"));
                }
                logical_end = u64::from(run.logical) + blocks;
                if logical_end > limit {
                    return Err(bad("reaches beyond the file's end"));
                }
                if run.physical.checked_add(blocks).is_none_or(|end| end > area.end()) {
                    return Err(bad("was never allocated"));
                }
                if self.usage.mark(run.physical, blocks).is_err() {
                    return Err(bad("has blocks that are reserved or another file's"));
                }
                data_blocks += blocks;
            }
        }
        Ok(data_blocks)
    }

    /// Marks the reserved ranges of all groups below `groups`.
    fn claim_reserved(&mut self, groups: u64) {
        for group in self.reserved_groups..groups {
            if geometry::has_superblock(group) {
                self.claim(group * BLOCKS_PER_GROUP, RESERVED_BLOCKS);
            }
        }
        self.reserved_groups = self.reserved_groups.max(groups);
    }

    /// Marks blocks used that the cursor, or the layout, gives to nobody else.
    fn claim(&mut self, start: u64, blocks: u64) {
        let claimed = self.usage.mark(start, blocks);
        debug_assert_eq!(claimed, Ok(()));
    }

    fn claim_adjacent(&mut self, blocks: u64) -> u64 {
        let start = self.cursor.allocate_adjacent(blocks);
        self.claim(start, blocks);
        start
    }

    /// Makes holes of what was written for files that are not in the tree (any more).
    fn punch_unused(&mut self, area: &DataArea) -> Result<(), WriteError> {
        let io = self.io();
        let sink = &mut self.sink;
        self.usage.free_ranges(area.end(), |start, blocks| sink.punch(start, blocks)).map_err(io)
    }

    /// Checks every node, and places and writes the blocks it needs besides its data.
    fn place_contents(&mut self) -> Result<(), WriteError> {
        let mut parents = 0;
        for place in 0..self.survey.len() {
            let node = self.survey.node(place);
            let number = self.survey.number(place);
            let links = self.survey.links(place);
            match &node.kind {
                Kind::Directory(entries) => {
                    // Both walks meet the same directories in the same order.
                    let (_, parent) = self.survey.directories[parents];
                    parents += 1;
                    self.place_directory(place, number, parent, entries)?;
                }
                _ if links > MAX_LINKS => {
                    return Err(WriteError::TooManyLinks { path: self.survey.path(place), links });
                }
                Kind::File(data) => {
                    self.collect(data);
                    self.place_tree(number)?;
                }
                Kind::Symlink(target) => self.place_symlink(place, target)?,
                Kind::CharDevice(device) | Kind::BlockDevice(device) => {
                    if inode::device_field(*device).is_none() {
                        return Err(WriteError::DeviceNumber {
                            path: self.survey.path(place),
                            major: device.major,
                            minor: device.minor,
                        });
                    }
                }
                Kind::Fifo | Kind::Socket => {}
            }
            if !node.meta.xattrs.is_empty() {
                self.place_xattrs(place, number)?;
            }
        }
        Ok(())
    }

    fn place_directory(
        &mut self,
        place: usize,
        number: u32,
        parent: u32,
        names: &'t BTreeMap<Box<[u8]>, NodeId>,
    ) -> Result<(), WriteError> {
        let entries = names
            .iter()
            .map(|(name, &id)| {
                let (inode, node) = self.survey.target(id);
                Entry { name, inode, file_type: inode::file_type(&node.kind) }
            })
            .collect();
        let seed = self.seed.of_inode(number);
        let layout = Layout::new(number, parent, seed, &self.options.hash_seed, entries).map_err(
            |directory_too_large| {
                let super::directory::TooLarge = directory_too_large;
                WriteError::DirectoryTooLarge {
                    path: self.survey.path(place),
                    entries: names.len(),
                }
            },
        )?;
        self.place_blocks(place, layout.blocks());
        let io = self.io();
        let mut at = DataArea::at(u64::from(self.placed[place].start));
        let sink = &mut self.sink;
        layout
            .write(|block| {
                let mut result = Ok(());
                at.allocate(1, |physical, _| result = sink.put(physical, block));
                result
            })
            .map_err(io)?;
        self.place_tree(number)
    }

    /// Takes the next blocks for an inode and collects their extents.
    fn place_blocks(&mut self, place: usize, blocks: u64) {
        let mut cursor = self.cursor.clone();
        let mut start = None;
        self.extents.clear();
        let mut logical = 0;
        cursor.allocate(blocks, |physical, blocks| {
            start.get_or_insert(physical);
            self.extents.push(logical, physical, blocks);
            logical += blocks;
            let claimed = self.usage.mark(physical, u64::from(blocks));
            debug_assert_eq!(claimed, Ok(()));
        });
        self.cursor = cursor;
        self.placed[place] = Placed { start: start.unwrap_or(0) as u32, blocks: blocks as u32 };
    }

    fn place_symlink(&mut self, place: usize, target: &[u8]) -> Result<(), WriteError> {
        if target.is_empty() || target.len() > MAX_SYMLINK || target.contains(&0) {
            return Err(WriteError::SymlinkTarget {
                path: self.survey.path(place),
                length: target.len(),
            });
        }
        if target.len() > FAST_SYMLINK {
            self.place_blocks(place, 1);
            let mut block = [0; BLOCK_SIZE];
            block[..target.len()].copy_from_slice(target);
            let start = u64::from(self.placed[place].start);
            self.sink.put(start, &block).map_err(self.io())?;
        }
        Ok(())
    }

    /// Places and writes the tree of the collected extents, if the inode cannot hold them.
    fn place_tree(&mut self, number: u32) -> Result<(), WriteError> {
        let blocks = self.extents.tree_blocks();
        if blocks == 0 {
            return Ok(());
        }
        let io = self.io();
        let seed = self.seed.of_inode(number);
        let Self { extents, cursor, usage, sink, .. } = self;
        let field = extents
            .build(seed, |block| {
                let physical = cursor.allocate_adjacent(1);
                let claimed = usage.mark(physical, 1);
                debug_assert_eq!(claimed, Ok(()));
                sink.put(physical, block).map(|()| physical)
            })
            .map_err(io)?;
        self.trees.insert(number, Rooted { field, blocks });
        Ok(())
    }

    fn place_xattrs(&mut self, place: usize, number: u32) -> Result<(), WriteError> {
        let attributes =
            Attributes::of(self.survey.node(place)).map_err(|problem| match problem {
                Unstorable::Attribute(name, source) => WriteError::Xattr {
                    path: self.survey.path(place),
                    name: String::from_utf8_lossy(name).into_owned(),
                    source,
                },
                Unstorable::TooLarge(needed) => {
                    WriteError::XattrsTooLarge { path: self.survey.path(place), needed }
                }
            })?;
        let outside = attributes.outside();
        if !outside.is_empty() {
            let Self { shared, cursor, usage, .. } = self;
            let physical = shared.share(outside, || {
                let physical = cursor.allocate_adjacent(1);
                let claimed = usage.mark(physical, 1);
                debug_assert_eq!(claimed, Ok(()));
                physical
            });
            self.xattr_blocks.insert(number, physical);
        }
        Ok(())
    }

    fn write_xattr_blocks(&mut self) -> Result<(), WriteError> {
        let io = self.io();
        for block in &self.shared.blocks {
            self.sink.put(block.physical, &block.encode(self.seed)).map_err(&io)?;
        }
        Ok(())
    }

    /// Places the journal and writes its first block; the rest is zeros.
    fn place_journal(&mut self) -> Result<Option<Placed>, WriteError> {
        if !self.options.journal {
            return Ok(None);
        }
        let expected = self.cursor.end() + self.options.free_bytes / BLOCK_BYTES;
        // 4 MiB below 128 MiB, 16 below 1 GiB, 32 below 2 GiB: mke2fs's steps, up to 64.
        let blocks: u32 = match expected {
            0..32_768 => 1024,
            32_768..262_144 => 4096,
            262_144..524_288 => 8192,
            _ => 16_384,
        };
        let start = self.claim_adjacent(u64::from(blocks));
        let first = superblock::journal_superblock(blocks, &self.options.uuid);
        self.sink.put(start, &first).map_err(self.io())?;
        Ok(Some(Placed { start: start as u32, blocks }))
    }

    /// Number of the last inode in use.
    pub fn last_inode(&self) -> u32 {
        self.survey.number(self.survey.len() - 1).max(FIRST_INODE - 1)
    }

    /// How many inodes are in use: the reserved ones, the root among them, and the nodes.
    pub fn used_inodes(&self) -> u32 {
        // There are at least as many numbers as nodes.
        FIRST_INODE - 2 + self.survey.len() as u32
    }

    /// Decides the size of the image and claims the group tables and the remaining reserved ranges.
    fn solve(&mut self) -> Result<Geometry, WriteError> {
        let end = self.cursor.end();
        let used = u64::from(self.used_inodes());
        // As many as there can be are enough for any free space.
        let implied = (self.options.free_bytes / BYTES_PER_INODE)
            .min(u64::from(u32::MAX).saturating_sub(used));
        let inodes = used
            .saturating_add(self.options.free_inodes.max(implied))
            .max(self.last_inode().into());
        if inodes > u64::from(u32::MAX) {
            return Err(WriteError::TooManyInodes);
        }
        self.claim_reserved(geometry::groups_for(end));
        let demand = Demand {
            inodes,
            free: self.options.free_bytes.div_ceil(BLOCK_BYTES),
            unused: end - self.usage.count(0, end),
        };
        let geometry = Geometry::solve(&self.cursor, demand).ok_or(WriteError::ImageTooLarge)?;
        self.claim_reserved(geometry.groups.len() as u64);
        let table = geometry.table_blocks();
        for tables in &geometry.groups {
            self.claim(tables.block_bitmap, 1);
            self.claim(tables.inode_bitmap, 1);
            self.claim(tables.inode_table, table);
        }
        Ok(geometry)
    }

    pub fn collect(&mut self, data: &FileData) {
        self.extents.clear();
        for run in &data.runs {
            self.extents.push(run.logical, run.physical, run.blocks);
        }
    }

    pub fn collect_placed(&mut self, placed: Placed) {
        self.extents.clear();
        let mut logical = 0;
        DataArea::at(u64::from(placed.start)).allocate(
            u64::from(placed.blocks),
            |start, blocks| {
                self.extents.push(logical, start, blocks);
                logical += blocks;
            },
        );
    }

    /// The collected extents as the inode's block field, and the blocks of their tree.
    pub fn rooted(&self, number: u32) -> ([u8; BLOCK_FIELD], u64) {
        if let Some(tree) = self.trees.get(&number) {
            return (tree.field, tree.blocks);
        }
        let none = |_: &[u8; BLOCK_SIZE]| Ok::<_, std::convert::Infallible>(0);
        let Ok(field) = self.extents.build(self.seed.of_inode(number), none);
        (field, 0)
    }
}
