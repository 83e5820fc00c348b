//! Whatever is written last, when the size of the image is known: inodes, bitmaps, descriptors,
//! superblocks.

use std::io;

use super::Report;
use super::extent::BLOCK_FIELD;
use super::geometry::{
    BLOCK_BYTES, BLOCK_SIZE, BLOCKS_PER_GROUP, Geometry, INODE_SIZE, INODES_PER_BLOCK, TABLE_BLOCKS,
};
use super::inode::{self, Inode};
use super::superblock::{
    self, Descriptor, FIRST_INODE, JOURNAL_INODE, RESIZE_INODE, ROOT_INODE, Superblock,
};
use super::writer::{FAST_SYMLINK, MAX_LINKS, Placed, Writer};
use super::xattr::Attributes;
use crate::tree::{Kind, Timestamp};

impl Writer<'_> {
    /// The inode of a node of the tree.
    fn inode(&mut self, place: usize) -> Inode {
        let node = self.survey.node(place);
        let number = self.survey.number(place);
        let links = self.survey.links(place);
        let placed = self.placed[place];
        let mut inode = Inode {
            mode: inode::type_bits(&node.kind) | node.meta.mode & 0o7777,
            uid: node.meta.uid,
            gid: node.meta.gid,
            links: links as u16,
            time: node.meta.mtime,
            ..Inode::empty()
        };
        match &node.kind {
            Kind::File(data) => {
                inode.size = data.size;
                inode.blocks = data.runs.iter().map(|run| u64::from(run.blocks)).sum();
                self.collect(data);
                self.root(number, &mut inode);
            }
            Kind::Directory(_) => {
                inode.size = u64::from(placed.blocks) * BLOCK_BYTES;
                inode.blocks = u64::from(placed.blocks);
                if placed.blocks > 1 {
                    inode.flags = inode::INDEX;
                }
                if links > MAX_LINKS {
                    inode.links = 1;
                }
                self.collect_placed(placed);
                self.root(number, &mut inode);
            }
            Kind::Symlink(target) => {
                inode.mode = inode::type_bits(&node.kind) | 0o777;
                inode.size = target.len() as u64;
                if target.len() > FAST_SYMLINK {
                    inode.blocks = u64::from(placed.blocks);
                    self.collect_placed(placed);
                    self.root(number, &mut inode);
                } else {
                    inode.block[..target.len()].copy_from_slice(target);
                }
            }
            Kind::CharDevice(device) | Kind::BlockDevice(device) => {
                // Checked when its place was decided.
                inode.block = inode::device_field(*device).unwrap_or([0; BLOCK_FIELD]);
            }
            Kind::Fifo | Kind::Socket => {}
        }
        if !node.meta.xattrs.is_empty() {
            if let Ok(attributes) = Attributes::of(node) {
                attributes.write_inline(&mut inode.xattrs);
            }
            if let Some(&block) = self.xattr_blocks.get(&number) {
                inode.xattr_block = block;
                inode.blocks += 1;
            }
        }
        inode
    }

    fn root(&self, number: u32, inode: &mut Inode) {
        let (field, blocks) = self.rooted(number);
        inode.block = field;
        inode.blocks += blocks;
        inode.flags |= inode::EXTENTS;
    }

    fn own_time(&self) -> Timestamp {
        Timestamp { seconds: self.options.timestamp.max(0), nanos: 0 }
    }

    fn journal_inode(&mut self, placed: Placed) -> Inode {
        self.collect_placed(placed);
        let mut inode = Inode {
            mode: 0o100_600,
            size: u64::from(placed.blocks) * BLOCK_BYTES,
            links: 1,
            blocks: u64::from(placed.blocks),
            time: self.own_time(),
            ..Inode::empty()
        };
        self.root(JOURNAL_INODE, &mut inode);
        inode
    }

    /// The resize inode: its double indirect block leads to the unused descriptor blocks of group
    /// 0, each of which leads to its counterparts in the backups.
    fn resize_inode(&self, geometry: &Geometry, resize_block: u64) -> Inode {
        const POINTERS: u64 = BLOCK_BYTES / 4;
        const DIRECT: u64 = 12;
        const DOUBLE_INDIRECT: usize = 13;
        let spare = TABLE_BLOCKS - geometry.descriptor_blocks();
        let mut inode = Inode {
            mode: 0o100_600,
            size: (DIRECT + POINTERS + POINTERS * POINTERS) * BLOCK_BYTES,
            links: 1,
            blocks: 1 + spare * (1 + geometry.backups().count() as u64),
            time: self.own_time(),
            ..Inode::empty()
        };
        inode.block[4 * DOUBLE_INDIRECT..][..4]
            .copy_from_slice(&(resize_block as u32).to_le_bytes());
        inode
    }

    /// Writes everything whose place depends on the size of the image.
    pub(super) fn write_tables(
        &mut self,
        geometry: &Geometry,
        journal: Option<Placed>,
        resize_block: u64,
        data_blocks: u64,
    ) -> io::Result<Report> {
        let journal = journal.map(|placed| self.journal_inode(placed));
        let resize = self.resize_inode(geometry, resize_block);
        self.write_inodes(geometry, journal.as_ref(), &resize)?;
        let used = self.usage.count(0, geometry.blocks);
        let inodes = geometry.inodes_per_group * geometry.groups.len() as u32;
        let superblock = Superblock {
            options: self.options,
            blocks: geometry.blocks,
            free_blocks: geometry.blocks - used,
            inodes_per_group: geometry.inodes_per_group,
            inodes,
            free_inodes: inodes - self.used_inodes(),
            descriptor_blocks: geometry.descriptor_blocks(),
            journal: journal.map(|inode| (inode.block, inode.size)),
        };
        let mut descriptors = self.write_bitmaps(geometry)?;
        descriptors.resize(descriptors.len().next_multiple_of(BLOCK_SIZE), 0);
        for group in std::iter::once(0).chain(geometry.backups()) {
            let mut block = [0; BLOCK_SIZE];
            let offset = if group == 0 { superblock::OFFSET } else { 0 };
            let bytes = superblock.encode(group);
            block[offset..offset + bytes.len()].copy_from_slice(&bytes);
            let start = group * BLOCKS_PER_GROUP;
            self.sink.put(start, &block)?;
            self.sink.put(start + 1, &descriptors)?;
        }
        self.write_resize_blocks(geometry, resize_block)?;
        self.sink.flush()?;
        Ok(Report {
            size: geometry.blocks * BLOCK_BYTES,
            blocks: geometry.blocks,
            inodes: u64::from(inodes),
            free_blocks: geometry.blocks - used,
            data_blocks,
            metadata_blocks: used - data_blocks,
        })
    }

    fn write_inodes(
        &mut self,
        geometry: &Geometry,
        journal: Option<&Inode>,
        resize: &Inode,
    ) -> io::Result<()> {
        let last = self.last_inode();
        let mut block = [0; BLOCK_SIZE];
        let per_group = geometry.inodes_per_group;
        for first in (1..=last).step_by(INODES_PER_BLOCK as usize) {
            block.fill(0);
            for (number, out) in (first..=last).zip(block.as_chunks_mut::<INODE_SIZE>().0) {
                let inode = match number {
                    ROOT_INODE => self.inode(0),
                    RESIZE_INODE => resize.clone(),
                    JOURNAL_INODE => journal.cloned().unwrap_or_else(Inode::empty),
                    ..FIRST_INODE => Inode::empty(),
                    _ => match self.survey.place(number) {
                        Some(place) => self.inode(place),
                        None => Inode::empty(),
                    },
                };
                inode.encode(number, self.seed, out);
            }
            let index = first - 1;
            let table = geometry.groups[(index / per_group) as usize].inode_table;
            let within = u64::from(index % per_group / INODES_PER_BLOCK);
            self.sink.put(table + within, &block)?;
        }
        Ok(())
    }

    /// Writes the bitmaps and returns the group descriptors.
    fn write_bitmaps(&mut self, geometry: &Geometry) -> io::Result<Vec<u8>> {
        let last = self.last_inode();
        let per_group = geometry.inodes_per_group;
        let mut place = 1;
        let directories = self.directories_by_group(geometry);
        let mut descriptors = Vec::new();
        let mut block_bitmaps = Vec::with_capacity(geometry.groups.len());
        let mut bits = [0; BLOCK_SIZE];
        for (group, tables) in (0u64..).zip(&geometry.groups) {
            self.usage.bitmap(group, geometry.blocks, &mut bits);
            block_bitmaps.push(self.seed.with(&bits));
            if bits.iter().any(|&byte| byte != 0) {
                self.sink.put(tables.block_bitmap, &bits)?;
            }
        }
        for (group, tables) in (0u32..).zip(&geometry.groups) {
            // One less than the number of the group's first inode.
            let before = group * per_group;
            let known = last.saturating_sub(before).min(per_group);
            let mut used = 0;
            let mut inode_bitmap = None;
            if known > 0 {
                bits.fill(0);
                if group == 0 {
                    // A group has more inodes than there are reserved ones.
                    used = FIRST_INODE - 1;
                    set_bits(&mut bits, 0, used as usize);
                }
                while place < self.survey.len() && self.survey.number(place) - before <= per_group {
                    let bit = (self.survey.number(place) - before - 1) as usize;
                    set_bits(&mut bits, bit, bit + 1);
                    used += 1;
                    place += 1;
                }
                set_bits(&mut bits, per_group as usize, 8 * BLOCK_SIZE);
                inode_bitmap = Some(self.seed.with(&bits[..per_group as usize / 8]));
                self.sink.put(tables.inode_bitmap, &bits)?;
            }
            let start = u64::from(group) * BLOCKS_PER_GROUP;
            let end = (start + BLOCKS_PER_GROUP).min(geometry.blocks);
            let free_blocks = end - start - self.usage.count(start, end);
            let descriptor = Descriptor {
                tables: *tables,
                free_blocks: free_blocks as u32,
                free_inodes: per_group - used,
                untouched_inodes: per_group - known,
                directories: directories[group as usize],
                block_bitmap: block_bitmaps[group as usize],
                inode_bitmap,
            };
            descriptors.extend_from_slice(&descriptor.encode(group, self.seed));
        }
        Ok(descriptors)
    }

    fn directories_by_group(&self, geometry: &Geometry) -> Vec<u32> {
        let mut counts = vec![0; geometry.groups.len()];
        for &(place, _) in &self.survey.directories {
            let number = self.survey.number(place);
            counts[((number - 1) / geometry.inodes_per_group) as usize] += 1;
        }
        counts
    }

    fn write_resize_blocks(&mut self, geometry: &Geometry, resize_block: u64) -> io::Result<()> {
        let mut pointers = [0; BLOCK_SIZE];
        let words = pointers.as_chunks_mut::<4>().0;
        for table in geometry.descriptor_blocks()..TABLE_BLOCKS {
            words[table as usize] = (1 + table as u32).to_le_bytes();
        }
        self.sink.put(resize_block, &pointers)?;
        for table in geometry.descriptor_blocks()..TABLE_BLOCKS {
            pointers.fill(0);
            let words = pointers.as_chunks_mut::<4>().0;
            for (word, group) in words.iter_mut().zip(geometry.backups()) {
                *word = ((group * BLOCKS_PER_GROUP + 1 + table) as u32).to_le_bytes();
            }
            self.sink.put(1 + table, &pointers)?;
        }
        Ok(())
    }
}

/// Sets the bits from `start` up to `end`.
fn set_bits(bits: &mut [u8; BLOCK_SIZE], start: usize, end: usize) {
    let mut bit = start;
    while bit < end {
        if bit.is_multiple_of(8) && bit + 8 <= end {
            bits[bit / 8] = 0xff;
            bit += 8;
        } else {
            bits[bit / 8] |= 1 << (bit % 8);
            bit += 1;
        }
    }
}
