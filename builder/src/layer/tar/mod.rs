//! A tar reader that gives names, times and attributes exactly as the archive has them, and file
//! contents as (offset, bytes) pieces, whatever sparse format they were stored in.
//!
//! The `tar` crate is not used: it knows neither the PAX sparse formats nor binary PAX values
//! that contain newlines. Everything is bounded by [`TarLimits`].

pub(crate) mod header;
pub(crate) mod pax;
pub(crate) mod sparse;

use std::io::{self, BufRead};

use crate::tree::{Device, Timestamp, Xattrs};
use header::{BLOCK, Dialect, Header, text};
use pax::{Pax, PaxLimits};
use sparse::Segment;

/// What a tar archive can be wrong about. The caller adds layer and entry.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// Reading the archive failed.
    #[error(transparent)]
    Input(io::Error),
    /// The archive ends inside something.
    #[error("the archive ends inside {what}")]
    Truncated {
        /// Inside what.
        what: &'static str,
    },
    /// A header's checksum is wrong.
    #[error("at byte {at}: not a tar header (its checksum does not match)")]
    Checksum {
        /// Offset in the archive.
        at: u64,
    },
    /// One block of zeros, then more entries: what follows would silently be lost.
    #[error("at byte {at}: a single block of zeros in the middle of the archive")]
    LoneZeroBlock {
        /// Offset in the archive.
        at: u64,
    },
    /// A header field is not a number, or not one that can be meant.
    #[error("the header's {field} is not valid{hint}")]
    Field {
        /// The field.
        field: &'static str,
        /// What is expected, as a parenthesis.
        hint: &'static str,
    },
    /// A PAX extended header is malformed.
    #[error("PAX header: {problem}")]
    Pax {
        /// What is wrong.
        problem: String,
    },
    /// A sparse map is malformed.
    #[error("sparse map: {problem}")]
    Sparse {
        /// What is wrong.
        problem: &'static str,
    },
    /// An extended header or long name is beyond the limit.
    #[error("{what} has {size} bytes, more than the limit of {limit}")]
    HeaderTooLarge {
        /// What.
        what: &'static str,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// An entry of a type that cannot be put into a file system.
    #[error("entry type {letter:?} is not supported")]
    UnknownType {
        /// The type letter.
        letter: char,
    },
}

/// Bounds on what one entry's headers may take.
#[derive(Debug, Clone, Copy)]
pub struct TarLimits {
    /// Bytes of one extended header.
    pub header_bytes: u64,
    /// Extended headers before one entry.
    pub headers: u32,
    /// Segments of one sparse map.
    pub segments: usize,
    /// Bytes of one extended attribute's value (Linux allows 65,536).
    pub xattr_value: usize,
}

impl Default for TarLimits {
    fn default() -> Self {
        Self { header_bytes: 1 << 20, headers: 64, segments: 1 << 20, xattr_value: 65_536 }
    }
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file; its data must be read with [`TarReader::data`].
    File,
    /// Another name for an earlier file.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice(Device),
    /// A block device.
    BlockDevice(Device),
    /// A directory.
    Directory,
    /// A named pipe.
    Fifo,
}

/// One entry of an archive. Names are as written, neither cleaned nor checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name.
    pub path: Vec<u8>,
    /// Target of a hard or symbolic link.
    pub link: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Low 12 bits of the mode.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Size of the file once its holes are filled.
    pub size: u64,
    /// Extended attributes by full name.
    pub xattrs: Xattrs,
    /// There was an ACL in text form, which is not read.
    pub text_acl: bool,
}

/// Reads entries from a stream.
pub struct TarReader<R> {
    input: R,
    limits: TarLimits,
    at: u64,
    /// Stored bytes of the current entry not read yet.
    remaining: u64,
    padding: u64,
    segments: Vec<Segment>,
    global: Pax,
    name: Vec<u8>,
    ended: bool,
}

impl<R: BufRead> TarReader<R> {
    /// A reader at the start of an archive.
    pub fn new(input: R, limits: TarLimits) -> Self {
        Self {
            input,
            limits,
            at: 0,
            remaining: 0,
            padding: 0,
            segments: Vec::new(),
            global: Pax::default(),
            name: Vec::new(),
            ended: false,
        }
    }

    /// Name of the entry last begun, for error messages; empty before the first.
    pub fn entry_name(&self) -> &[u8] {
        &self.name
    }

    /// Bytes of the archive read so far.
    pub fn position(&self) -> u64 {
        self.at
    }

    /// Gives the input back.
    pub fn into_inner(self) -> R {
        self.input
    }

    /// The next entry, or `None` at the end of the archive: two blocks of zeros, or the end of the
    /// stream where a header would begin. Data of the entry before that was not read is skipped.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        if self.ended {
            return Ok(None);
        }
        self.skip(self.remaining.saturating_add(self.padding), "an entry's data")?;
        (self.remaining, self.padding) = (0, 0);
        self.segments.clear();
        let mut pax = self.global.clone();
        let mut long_name = None;
        let mut long_link = None;
        let mut headers = 0;
        loop {
            let at = self.at;
            let Some(block) = self.block_or_end("a header")? else {
                if headers > 0 {
                    return Err(TarError::Truncated { what: "an extended header's entry" });
                }
                self.ended = true;
                return Ok(None);
            };
            let header = Header(&block);
            if header.is_zero() {
                if headers > 0 {
                    return Err(TarError::Truncated { what: "an extended header's entry" });
                }
                if self.block_or_end("a header")?.is_some_and(|second| !Header(&second).is_zero()) {
                    return Err(TarError::LoneZeroBlock { at });
                }
                self.ended = true;
                return Ok(None);
            }
            if !header.checksum_holds() {
                return Err(TarError::Checksum { at });
            }
            let size = header.size().and_then(|size| u64::try_from(size).ok());
            match header.kind() {
                b'x' | b'X' | b'g' => {
                    let records = self.extended("a PAX header", size, self.limits.header_bytes)?;
                    let limits = PaxLimits {
                        segments: self.limits.segments,
                        xattr_value: self.limits.xattr_value,
                    };
                    if header.kind() == b'g' {
                        self.global.apply(&records, limits)?;
                        if self.global.names_an_entry() {
                            return Err(TarError::Pax {
                                problem: "a global header sets a name, a size or a sparse map"
                                    .to_owned(),
                            });
                        }
                        pax.apply(&records, limits)?;
                    } else {
                        pax.apply(&records, limits)?;
                    }
                }
                b'L' => {
                    let name = self.extended("a long name", size, self.limits.header_bytes)?;
                    long_name = Some(text(&name).to_vec());
                }
                b'K' => {
                    let name = self.extended("a long link name", size, self.limits.header_bytes)?;
                    long_link = Some(text(&name).to_vec());
                }
                // A volume label is about the tape, not about any file.
                b'V' => {
                    self.name = header.name();
                    let size = size.ok_or(TarError::Field { field: "size", hint: "" })?;
                    let padded = size.checked_next_multiple_of(BLOCK as u64);
                    let padded = padded.ok_or(TarError::Field { field: "size", hint: "" })?;
                    self.skip(padded, "a volume label")?;
                }
                _ => return self.entry(header, pax, long_name, long_link).map(Some),
            }
            headers += 1;
            if headers > self.limits.headers {
                return Err(TarError::Pax {
                    problem: format!("more than {} extended headers in a row", self.limits.headers),
                });
            }
        }
    }

    /// Hands the current entry's stored bytes to `sink` with their offsets in the file, ascending;
    /// what is not handed over is a hole. To be called at most once per entry.
    pub fn data<E: From<TarError>>(
        &mut self,
        mut sink: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let segments = std::mem::take(&mut self.segments);
        for segment in &segments {
            let mut offset = segment.offset;
            let mut left = segment.length;
            while left > 0 {
                let piece = fill(&mut self.input)?;
                if piece.is_empty() {
                    return Err(TarError::Truncated { what: "a file's data" }.into());
                }
                let length = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                sink(offset, &piece[..length])?;
                self.input.consume(length);
                self.at += length as u64;
                self.remaining -= length as u64;
                offset += length as u64;
                left -= length as u64;
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        header: Header<'_>,
        mut pax: Pax,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Entry, TarError> {
        let field = |field| TarError::Field { field, hint: "" };
        let mut path = pax.path.take().or(long_name).unwrap_or_else(|| header.name());
        self.name.clone_from(&path);
        let link = pax.link.take().or(long_link).unwrap_or_else(|| header.link().to_vec());
        let letter = header.kind();
        let kind = match letter {
            // Archives older than ustar mark a directory only by the slash at its name's end.
            b'0' | 0 if path.last() == Some(&b'/') => EntryKind::Directory,
            b'0' | 0 | b'7' | b'S' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' | b'4' => {
                let (major, minor) = header.device().ok_or(field("device number"))?;
                let number = |value| u32::try_from(value).map_err(|_| field("device number"));
                let device = Device { major: number(major)?, minor: number(minor)? };
                if letter == b'3' {
                    EntryKind::CharDevice(device)
                } else {
                    EntryKind::BlockDevice(device)
                }
            }
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => return Err(TarError::UnknownType { letter: char::from(other) }),
        };
        // Only what was written as a file has data; other types' size fields mean other things.
        let stored = match (letter, pax.size) {
            (b'0' | 0 | b'7' | b'S', Some(size)) => size,
            (b'0' | 0 | b'7' | b'S', None) => {
                header.size().and_then(|size| u64::try_from(size).ok()).ok_or(field("size"))?
            }
            _ => 0,
        };
        let mut size = stored;
        self.remaining = stored;
        self.padding = stored.wrapping_neg() % BLOCK as u64;
        self.segments = vec![Segment { offset: 0, length: stored }];
        if kind == EntryKind::File {
            if letter == b'S' {
                size = self.old_gnu_map(header)?;
                sparse::check(&self.segments, size, self.remaining)?;
            } else if let Some(real_size) = self.pax_map(&mut pax, &mut path)? {
                size = real_size;
                sparse::check(&self.segments, size, self.remaining)?;
            }
        }
        let mut xattrs = pax.libarchive_xattrs;
        xattrs.append(&mut pax.xattrs);
        let id = |pax: Option<u64>, header: Option<i64>, name| {
            pax.or_else(|| header.and_then(|id| u64::try_from(id).ok()))
                .and_then(|id| u32::try_from(id).ok())
                // The last value is "no change" to the kernel; no file can have it.
                .filter(|&id| id != u32::MAX)
                .ok_or(TarError::Field { field: name, hint: " (0 to 4294967294)" })
        };
        Ok(Entry {
            link,
            kind,
            mode: u16::try_from(header.mode().ok_or(field("mode"))? & 0o7777)
                .map_err(|_| field("mode"))?,
            uid: id(pax.uid, header.uid(), "uid")?,
            gid: id(pax.gid, header.gid(), "gid")?,
            mtime: match pax.mtime {
                Some(mtime) => mtime,
                None => Timestamp { seconds: header.mtime().ok_or(field("mtime"))?, nanos: 0 },
            },
            size,
            xattrs,
            text_acl: pax.text_acl,
            path,
        })
    }

    /// Reads the map of an old GNU sparse file from its header and the blocks behind it; returns
    /// the real size.
    fn old_gnu_map(&mut self, header: Header<'_>) -> Result<u64, TarError> {
        if header.dialect() != Dialect::Gnu {
            return Err(TarError::Sparse {
                problem: "an old GNU sparse file in a header that is not GNU's",
            });
        }
        let mut map = Vec::new();
        sparse::old_gnu(&header.0[386..482], &mut map, self.limits.segments)?;
        let mut more = header.0[482] != 0;
        while more {
            let block = self.block_or_end("a sparse map")?;
            let block = block.ok_or(TarError::Truncated { what: "a sparse map" })?;
            let before = map.len();
            sparse::old_gnu(&block[..504], &mut map, self.limits.segments)?;
            more = block[504] != 0;
            if more && map.len() == before {
                return Err(TarError::Sparse { problem: "an empty continuation block" });
            }
        }
        self.segments = map;
        header::number(&header.0[483..495])
            .and_then(|size| u64::try_from(size).ok())
            .ok_or(TarError::Field { field: "real size", hint: "" })
    }

    /// Takes the map of any PAX sparse format; returns the real size if the entry is sparse.
    fn pax_map(&mut self, pax: &mut Pax, path: &mut Vec<u8>) -> Result<Option<u64>, TarError> {
        let sparse = std::mem::take(&mut pax.sparse);
        let version = (sparse.major, sparse.minor);
        let map = match (version, sparse.map) {
            ((Some(1), Some(0)), _) => {
                let mut stored = self.remaining;
                let map = sparse::pax_1_0(self.limits.segments, || {
                    stored = stored
                        .checked_sub(BLOCK as u64)
                        .ok_or(TarError::Truncated { what: "a sparse map" })?;
                    self.block_or_end("a sparse map")?
                        .ok_or(TarError::Truncated { what: "a sparse map" })
                })?;
                self.remaining = stored;
                map
            }
            ((None | Some(0), None | Some(0 | 1)), Some(map)) => {
                if sparse.blocks.is_some_and(|blocks| blocks != map.len() as u64) {
                    return Err(TarError::Sparse {
                        problem: "GNU.sparse.numblocks is not the map's length",
                    });
                }
                map
            }
            ((None, None), None) if sparse.blocks.unwrap_or(0) == 0 => {
                // Some producers write the size alone; without a map nothing is sparse.
                return Ok(None);
            }
            ((None, None), None) => return Err(TarError::Sparse { problem: "the map is missing" }),
            _ => return Err(TarError::Sparse { problem: "an unknown version of the format" }),
        };
        let real_size = sparse
            .real_size
            .ok_or(TarError::Sparse { problem: "the file's real size is missing" })?;
        if let Some(name) = sparse.name {
            self.name.clone_from(&name);
            *path = name;
        }
        self.segments = map;
        Ok(Some(real_size))
    }

    /// Reads the data of an extended header, padding included.
    fn extended(
        &mut self,
        what: &'static str,
        size: Option<u64>,
        limit: u64,
    ) -> Result<Vec<u8>, TarError> {
        let size = size.ok_or(TarError::Field { field: "size", hint: "" })?;
        let length = usize::try_from(size).ok().filter(|_| size <= limit);
        let length = length.ok_or(TarError::HeaderTooLarge { what, size, limit })?;
        let mut data = Vec::new();
        while data.len() < length {
            let piece = fill(&mut self.input)?;
            if piece.is_empty() {
                return Err(TarError::Truncated { what });
            }
            let take = piece.len().min(length - data.len());
            data.extend_from_slice(&piece[..take]);
            self.input.consume(take);
            self.at += take as u64;
        }
        self.skip(size.next_multiple_of(BLOCK as u64) - size, what)?;
        Ok(data)
    }

    fn skip(&mut self, mut bytes: u64, what: &'static str) -> Result<(), TarError> {
        while bytes > 0 {
            let piece = fill(&mut self.input)?;
            if piece.is_empty() {
                return Err(TarError::Truncated { what });
            }
            let length = piece.len().min(usize::try_from(bytes).unwrap_or(usize::MAX));
            self.input.consume(length);
            self.at += length as u64;
            bytes -= length as u64;
        }
        Ok(())
    }

    /// The next block, or `None` when the stream ends exactly here.
    fn block_or_end(&mut self, what: &'static str) -> Result<Option<[u8; BLOCK]>, TarError> {
        let mut block = [0; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            let piece = fill(&mut self.input)?;
            if piece.is_empty() {
                if have == 0 {
                    return Ok(None);
                }
                return Err(TarError::Truncated { what });
            }
            let take = piece.len().min(BLOCK - have);
            block[have..have + take].copy_from_slice(&piece[..take]);
            self.input.consume(take);
            self.at += take as u64;
            have += take;
        }
        Ok(Some(block))
    }
}

/// `fill_buf` that is not stopped by a signal.
fn fill<R: BufRead>(input: &mut R) -> Result<&[u8], TarError> {
    loop {
        match input.fill_buf() {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(TarError::Input(error)),
        }
    }
    // A second call because the first one's borrow cannot leave the loop; it reads nothing more.
    input.fill_buf().map_err(TarError::Input)
}

impl<R: BufRead + io::Seek> TarReader<R> {
    /// Seeks past the current entry's data and says where in the stream it is and how long, if it
    /// is one piece.
    pub fn seek_past_data(&mut self) -> Result<Option<(u64, u64)>, TarError> {
        let at = self.at;
        let length = self.remaining;
        let whole = match *self.segments {
            [Segment { offset: 0, length: stored }] => stored == length,
            _ => false,
        };
        let step =
            i64::try_from(length).map_err(|_| TarError::Truncated { what: "a file's data" })?;
        self.input.seek_relative(step).map_err(TarError::Input)?;
        self.at = at.checked_add(length).ok_or(TarError::Truncated { what: "a file's data" })?;
        self.remaining = 0;
        self.segments.clear();
        Ok(whole.then_some((at, length)))
    }
}
