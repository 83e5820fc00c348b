//! A directory as an image of one layer: the tree is walked in name order and written as a PAX tar
//! stream, which then goes the way of every layer. The stream depends only on what the tree holds.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{XattrFlags, lgetxattr, llistxattr};

use crate::layer::tar::header::BLOCK;

use super::error::ImageError;
use super::select::OWN_ALGORITHM;
use super::{Image, ImageSource};

/// Opens a root filesystem in a directory.
pub(super) fn open(path: &Path, source: &ImageSource) -> Result<Image, ImageError> {
    let read = |error| ImageError::read(path.display().to_string(), error);
    let root = std::fs::canonicalize(path).map_err(read)?;
    if !std::fs::symlink_metadata(&root).map_err(read)?.is_dir() {
        let problem = "not a directory (for a tar file use tar:)".to_owned();
        return Err(ImageError::Archive { path: path.display().to_string(), problem });
    }
    let open = move || Ok(Box::new(DirectoryTar::new(&root)?) as Box<dyn Read + Send>);
    Ok(Image::of_one_layer(source, Arc::new(open), OWN_ALGORITHM))
}

/// The tar stream of a directory. Sockets are left out (they are made by whoever listens), and so
/// is what other file systems mounted inside hold.
struct DirectoryTar {
    root: PathBuf,
    device: u64,
    /// Paths still to come, relative to the root; the next one last.
    pending: Vec<PathBuf>,
    /// First path of each file with several names.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// Bytes made but not read yet.
    buffer: Vec<u8>,
    at: usize,
    file: Option<Contents>,
    ended: bool,
}

/// The file being copied: stretches of data still to come, next one last.
struct Contents {
    file: File,
    path: PathBuf,
    stretches: Vec<(u64, u64)>,
    padding: usize,
}

impl DirectoryTar {
    fn new(root: &Path) -> io::Result<Self> {
        let device = std::fs::symlink_metadata(root)?.dev();
        Ok(Self {
            root: root.to_owned(),
            device,
            pending: vec![PathBuf::new()],
            links: HashMap::new(),
            buffer: Vec::new(),
            at: 0,
            file: None,
            ended: false,
        })
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
        let Some(path) = self.pending.pop() else {
            self.buffer.resize(2 * BLOCK, 0);
            self.ended = true;
            return Ok(());
        };
        let full = self.root.join(&path);
        self.entry(&path, &full)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", full.display())))
    }

    fn entry(&mut self, path: &Path, full: &Path) -> io::Result<()> {
        let metadata = std::fs::symlink_metadata(full)?;
        let kind = metadata.file_type();
        if kind.is_socket() {
            return Ok(());
        }
        let mut name = b"./".to_vec();
        name.extend(path.as_os_str().as_bytes());
        let mut records = Vec::new();
        if kind.is_dir() {
            if metadata.dev() == self.device {
                let mut names: Vec<OsString> = std::fs::read_dir(full)?
                    .map(|entry| entry.map(|entry| entry.file_name()))
                    .collect::<io::Result<_>>()?;
                names.sort_unstable_by(|a, b| b.as_bytes().cmp(a.as_bytes()));
                self.pending.extend(names.into_iter().map(|name| path.join(name)));
            }
            self.header(&name, b'5', &[], 0, &metadata, records, full)
        } else if metadata.nlink() > 1
            && let Some(first) = self.links.get(&(metadata.dev(), metadata.ino()))
        {
            let first = first.clone();
            self.header(&name, b'1', &first, 0, &metadata, records, full)
        } else {
            if metadata.nlink() > 1 {
                self.links.insert((metadata.dev(), metadata.ino()), name.clone());
            }
            if kind.is_symlink() {
                let target = std::fs::read_link(full)?.into_os_string().into_vec();
                return self.header(&name, b'2', &target, 0, &metadata, records, full);
            }
            if kind.is_char_device() || kind.is_block_device() {
                let letter = if kind.is_char_device() { b'3' } else { b'4' };
                return self.header(&name, letter, &[], 0, &metadata, records, full);
            }
            if kind.is_fifo() {
                return self.header(&name, b'6', &[], 0, &metadata, records, full);
            }
            let file = File::open(full)?;
            let stretches = stretches(&file, metadata.len())?;
            let mut stored: u64 = stretches.iter().map(|(_, length)| length).sum();
            let sparse = stored < metadata.len();
            let mut map = Vec::new();
            if sparse {
                // PAX sparse format 1.0: the map stands before the data.
                map.extend(format!("{}\n", stretches.len()).bytes());
                for (offset, length) in &stretches {
                    map.extend(format!("{offset}\n{length}\n").bytes());
                }
                map.resize(map.len().next_multiple_of(BLOCK), 0);
                stored += map.len() as u64;
                record(&mut records, b"GNU.sparse.major", b"1");
                record(&mut records, b"GNU.sparse.minor", b"0");
                record(&mut records, b"GNU.sparse.name", &name);
                record(&mut records, b"GNU.sparse.realsize", metadata.len().to_string().as_bytes());
            }
            self.header(&name, b'0', &[], stored, &metadata, records, full)?;
            self.buffer.extend(map);
            let padding = stored.next_multiple_of(BLOCK as u64) - stored;
            self.file = Some(Contents {
                file,
                path: full.to_owned(),
                stretches: stretches.into_iter().rev().collect(),
                padding: usize::try_from(padding).unwrap_or(0),
            });
            Ok(())
        }
    }

    /// Writes an entry's PAX header and its ustar header. All that may not fit goes into PAX.
    #[allow(clippy::too_many_arguments, reason = "the fields of a tar header")]
    fn header(
        &mut self,
        name: &[u8],
        letter: u8,
        link: &[u8],
        size: u64,
        metadata: &Metadata,
        mut records: Vec<u8>,
        full: &Path,
    ) -> io::Result<()> {
        let (seconds, nanos) = (metadata.mtime(), metadata.mtime_nsec());
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
        record(&mut records, b"uid", metadata.uid().to_string().as_bytes());
        record(&mut records, b"gid", metadata.gid().to_string().as_bytes());
        record(&mut records, b"size", size.to_string().as_bytes());
        if letter != b'1' {
            xattrs(full, &mut records)?;
        }
        let mut block = block(b'x', records.len() as u64, 0);
        finish(&mut block);
        self.buffer.extend(block);
        self.buffer.extend(&records);
        self.buffer.resize(self.buffer.len().next_multiple_of(BLOCK), 0);
        let mut block = self::block(letter, size, metadata.mode() & 0o7777);
        if matches!(letter, b'3' | b'4') {
            let (major, minor) =
                (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
            base256(&mut block[329..337], u64::from(major));
            base256(&mut block[337..345], u64::from(minor));
        }
        finish(&mut block);
        self.buffer.extend(block);
        Ok(())
    }
}

impl Contents {
    /// Reads the next piece; `true` once all is read.
    fn read(&mut self, buffer: &mut Vec<u8>) -> io::Result<bool> {
        const PIECE: u64 = 256 << 10;
        let Some((offset, length)) = self.stretches.last_mut() else {
            buffer.resize(self.padding, 0);
            return Ok(true);
        };
        let piece = (*length).min(PIECE);
        buffer.resize(usize::try_from(piece).unwrap_or(0), 0);
        self.file.read_exact_at(buffer, *offset).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("{}: {error} (did it change?)", self.path.display()),
            )
        })?;
        *offset += piece;
        *length -= piece;
        if *length == 0 {
            self.stretches.pop();
        }
        Ok(false)
    }
}

impl Read for DirectoryTar {
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

/// Where a file has data, by its file system; one stretch of everything where it cannot say.
fn stretches(file: &File, size: u64) -> io::Result<Vec<(u64, u64)>> {
    use rustix::fs::SeekFrom;
    use rustix::io::Errno;
    let mut out = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => return Ok(vec![(0, size)]),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        if start >= end {
            break;
        }
        out.push((start, end - start));
        at = end;
    }
    Ok(out)
}

/// Appends a file's extended attributes, sorted by name.
fn xattrs(path: &Path, records: &mut Vec<u8>) -> io::Result<()> {
    use rustix::io::Errno;
    let mut list = vec![0; 65_536];
    let length = match llistxattr(path, &mut list) {
        Ok(length) => length,
        Err(Errno::NOTSUP) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut names: Vec<&[u8]> =
        list[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    let mut value = vec![0; 65_536];
    for name in names {
        let length = match lgetxattr(path, OsStr::from_bytes(name), &mut value) {
            Ok(length) => length,
            // Listed, but not to be read by this user, or gone meanwhile.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => continue,
            Err(error) => return Err(error.into()),
        };
        record(records, &[b"SCHILY.xattr.", name].concat(), &value[..length]);
    }
    let _ = XattrFlags::empty();
    Ok(())
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
