//! A tree of files as the tar stream of one layer: walked in name order, written as PAX. The stream
//! depends only on what the tree holds, not on how it is stored.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use crate::layer::tar::header::BLOCK;

/// What a tree is read from.
pub(super) trait Files: Send {
    /// Finds a file again.
    type Handle: Send;

    /// The root directory.
    fn root(&self) -> Self::Handle;

    /// What a file is; `None` for one that is left out.
    fn facts(&mut self, handle: &Self::Handle) -> io::Result<Option<Facts>>;

    /// Names in a directory, in any order, without `.` and `..`.
    fn children(&mut self, handle: &Self::Handle) -> io::Result<Vec<(Vec<u8>, Self::Handle)>>;

    /// A regular file's contents.
    fn data(&mut self, handle: &Self::Handle, size: u64) -> io::Result<Data>;

    /// How a path of the tree is called in messages.
    fn shown(&self, path: &[u8]) -> String;
}

/// A file's type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Type {
    File,
    /// `enter`: what is in it belongs to the tree.
    Directory {
        enter: bool,
    },
    Symlink(Vec<u8>),
    /// Major and minor number.
    CharDevice(u32, u32),
    BlockDevice(u32, u32),
    Fifo,
}

/// All about a file but its names and contents.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub kind: Type,
    /// Permissions, setuid, setgid, sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds since 1970, and nanoseconds on top.
    pub mtime: (i64, u32),
    /// Bytes of a regular file.
    pub size: u64,
    /// The same for all names of a file that has several.
    pub several: Option<(u64, u64)>,
    /// Names as the system calls have them.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A regular file's contents.
pub(super) struct Data {
    /// Where they are read.
    pub source: File,
    /// What is not a hole, ascending.
    pub pieces: Vec<Piece>,
}

/// Some bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where they are in the file.
    pub at: u64,
    /// Where they are in the source.
    pub source: u64,
    pub length: u64,
}

/// The tar stream of a tree.
pub(super) struct TreeTar<F: Files> {
    files: F,
    /// Paths still to come, relative to the root; the next one last.
    pending: Vec<(Vec<u8>, F::Handle)>,
    /// First path of each file with several names.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// Bytes made but not read yet.
    buffer: Vec<u8>,
    at: usize,
    file: Option<Contents>,
    ended: bool,
}

/// The file being copied: pieces still to come, next one last.
struct Contents {
    source: File,
    shown: String,
    pieces: Vec<Piece>,
    padding: usize,
}

impl<F: Files> TreeTar<F> {
    pub fn new(files: F) -> Self {
        let root = files.root();
        Self {
            files,
            pending: vec![(Vec::new(), root)],
            links: HashMap::new(),
            buffer: Vec::new(),
            at: 0,
            file: None,
            ended: false,
        }
    }

    /// Makes the next bytes.
    fn advance(&mut self) -> io::Result<()> {
        self.buffer.clear();
        self.at = 0;
        if let Some(contents) = &mut self.file {
            if contents.read(&mut self.buffer)? {
                self.file = None;
            }
            return Ok(());
        }
        let Some((path, handle)) = self.pending.pop() else {
            self.buffer.resize(2 * BLOCK, 0);
            self.ended = true;
            return Ok(());
        };
        self.entry(&path, &handle).map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}", self.files.shown(&path)))
        })
    }

    fn entry(&mut self, path: &[u8], handle: &F::Handle) -> io::Result<()> {
        let Some(facts) = self.files.facts(handle)? else { return Ok(()) };
        let name = [b"./", path].concat();
        if let Type::Directory { enter } = facts.kind {
            if enter {
                let mut children = self.files.children(handle)?;
                children.sort_unstable_by(|(a, _), (b, _)| b.cmp(a));
                let below = |name: &[u8]| match path {
                    b"" => name.to_vec(),
                    _ => [path, b"/", name].concat(),
                };
                self.pending.extend(children.into_iter().map(|(name, at)| (below(&name), at)));
            }
            self.header(&name, b'5', &[], 0, &facts, Vec::new());
            return Ok(());
        }
        if let Some(id) = facts.several {
            if let Some(first) = self.links.get(&id).cloned() {
                self.header(&name, b'1', &first, 0, &facts, Vec::new());
                return Ok(());
            }
            self.links.insert(id, name.clone());
        }
        let (letter, target): (u8, &[u8]) = match &facts.kind {
            Type::Symlink(target) => (b'2', target),
            Type::CharDevice(..) => (b'3', &[]),
            Type::BlockDevice(..) => (b'4', &[]),
            Type::Fifo => (b'6', &[]),
            Type::File | Type::Directory { .. } => return self.file(&name, path, handle, &facts),
        };
        self.header(&name, letter, target, 0, &facts, Vec::new());
        Ok(())
    }

    fn file(
        &mut self,
        name: &[u8],
        path: &[u8],
        handle: &F::Handle,
        facts: &Facts,
    ) -> io::Result<()> {
        let Data { source, pieces } = self.files.data(handle, facts.size)?;
        let mut stored: u64 = pieces.iter().map(|piece| piece.length).sum();
        let (mut records, mut map) = (Vec::new(), Vec::new());
        if stored < facts.size {
            // PAX sparse format 1.0: the map stands before the data.
            let mut stretches: Vec<(u64, u64)> = Vec::new();
            for piece in &pieces {
                match stretches.last_mut() {
                    Some((at, length)) if *at + *length == piece.at => *length += piece.length,
                    _ => stretches.push((piece.at, piece.length)),
                }
            }
            map.extend(format!("{}\n", stretches.len()).bytes());
            for (offset, length) in &stretches {
                map.extend(format!("{offset}\n{length}\n").bytes());
            }
            map.resize(map.len().next_multiple_of(BLOCK), 0);
            stored += map.len() as u64;
            record(&mut records, b"GNU.sparse.major", b"1");
            record(&mut records, b"GNU.sparse.minor", b"0");
            record(&mut records, b"GNU.sparse.name", name);
            record(&mut records, b"GNU.sparse.realsize", facts.size.to_string().as_bytes());
        }
        self.header(name, b'0', &[], stored, facts, records);
        self.buffer.extend(map);
        let padding = stored.next_multiple_of(BLOCK as u64) - stored;
        self.file = Some(Contents {
            source,
            shown: self.files.shown(path),
            pieces: pieces.into_iter().rev().collect(),
            padding: usize::try_from(padding).unwrap_or(0),
        });
        Ok(())
    }

    /// Writes an entry's PAX header and its ustar header. All that may not fit goes into PAX.
    fn header(
        &mut self,
        name: &[u8],
        letter: u8,
        link: &[u8],
        size: u64,
        facts: &Facts,
        mut records: Vec<u8>,
    ) {
        let (seconds, nanos) = facts.mtime;
        let mtime = match (seconds < 0, nanos) {
            (_, 0) => seconds.to_string(),
            (false, _) => format!("{seconds}.{nanos:09}"),
            (true, _) if seconds == -1 => format!("-0.{:09}", 1_000_000_000 - nanos),
            (true, _) => format!("{}.{:09}", seconds + 1, 1_000_000_000 - nanos),
        };
        record(&mut records, b"path", name);
        if !link.is_empty() {
            record(&mut records, b"linkpath", link);
        }
        record(&mut records, b"mtime", mtime.as_bytes());
        record(&mut records, b"uid", facts.uid.to_string().as_bytes());
        record(&mut records, b"gid", facts.gid.to_string().as_bytes());
        record(&mut records, b"size", size.to_string().as_bytes());
        if letter != b'1' {
            for (name, value) in &facts.xattrs {
                record(&mut records, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
            }
        }
        let mut block = block(b'x', records.len() as u64, 0);
        finish(&mut block);
        self.buffer.extend(block);
        self.buffer.extend(&records);
        self.buffer.resize(self.buffer.len().next_multiple_of(BLOCK), 0);
        let mut block = self::block(letter, size, facts.mode & 0o7777);
        if let Type::CharDevice(major, minor) | Type::BlockDevice(major, minor) = facts.kind
            && letter != b'1'
        {
            base256(&mut block[329..337], u64::from(major));
            base256(&mut block[337..345], u64::from(minor));
        }
        finish(&mut block);
        self.buffer.extend(block);
    }
}

impl Contents {
    /// Reads the next piece; `true` once all is read.
    fn read(&mut self, buffer: &mut Vec<u8>) -> io::Result<bool> {
        const AT_ONCE: u64 = 256 << 10;
        let Some(piece) = self.pieces.last_mut() else {
            buffer.resize(self.padding, 0);
            return Ok(true);
        };
        let length = piece.length.min(AT_ONCE);
        buffer.resize(usize::try_from(length).unwrap_or(0), 0);
        self.source.read_exact_at(buffer, piece.source).map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error} (did it change?)", self.shown))
        })?;
        piece.source += length;
        piece.length -= length;
        if piece.length == 0 {
            self.pieces.pop();
        }
        Ok(false)
    }
}

impl<F: Files> Read for TreeTar<F> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.buffer.len() {
            if self.ended {
                return Ok(0);
            }
            self.advance()?;
        }
        let length = out.len().min(self.buffer.len() - self.at);
        out[..length].copy_from_slice(&self.buffer[self.at..self.at + length]);
        self.at += length;
        Ok(length)
    }
}

/// Appends `length keyword=value\n`, the length including its own digits.
fn record(records: &mut Vec<u8>, keyword: &[u8], value: &[u8]) {
    let rest = keyword.len() + value.len() + 3;
    let mut length = rest;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend(length.to_string().bytes());
    records.push(b' ');
    records.extend(keyword);
    records.push(b'=');
    records.extend(value);
    records.push(b'\n');
}

fn block(letter: u8, size: u64, mode: u32) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block[..1].copy_from_slice(b"-");
    block[100..107].copy_from_slice(format!("{mode:07o}").as_bytes());
    base256(&mut block[124..136], size);
    block[156] = letter;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block
}

fn base256(field: &mut [u8], value: u64) {
    let bytes = value.to_be_bytes();
    let length = field.len();
    field.fill(0);
    let take = bytes.len().min(length);
    field[length - take..].copy_from_slice(&bytes[bytes.len() - take..]);
    field[0] |= 0x80;
}

fn finish(block: &mut [u8; BLOCK]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}
