//! A directory in overlayfs' form → a layer tar: sorted, PAX, the same bytes for the same tree.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use rustix::fs::{lgetxattr, llistxattr, major, minor};
use sha2::{Digest as _, Sha256};

/// A written layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Written {
    /// Of the tar, which is not compressed: digest of the blob and of its content are the same.
    pub digest: Digest,
    pub size: u64,
    pub entries: u64,
}

/// The mark of a directory that hides what is below it in lower layers.
pub(crate) const OPAQUE: &str = "trusted.overlay.opaque";

struct Tar<W> {
    out: W,
    hash: Sha256,
    size: u64,
    entries: u64,
    /// Times later than this become this.
    epoch: Option<i64>,
}

/// Writes what `upper` holds. `include_root` adds the root directory itself.
///
/// # Errors
/// When something cannot be read or written.
pub(crate) fn write(
    upper: &Path,
    out: impl Write,
    epoch: Option<i64>,
    include_root: bool,
) -> io::Result<Written> {
    let mut tar = Tar { out, hash: Sha256::new(), size: 0, entries: 0, epoch };
    let mut links = HashMap::new();
    if include_root {
        let meta = fs::symlink_metadata(upper)?;
        tar.entry(upper, b"./", &meta, b'5', b"", 0)?;
    }
    walk(&mut tar, upper, &PathBuf::new(), &mut links)?;
    tar.put(&[0; 1024])?;
    tar.out.flush()?;
    Ok(Written {
        digest: Digest::from_bytes(tar.hash.finalize().into()),
        size: tar.size,
        entries: tar.entries,
    })
}

fn walk<W: Write>(
    tar: &mut Tar<W>,
    upper: &Path,
    relative: &Path,
    links: &mut HashMap<(u64, u64), Vec<u8>>,
) -> io::Result<()> {
    let mut entries = fs::read_dir(upper.join(relative))?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = relative.join(entry.file_name());
        let full = upper.join(&path);
        let meta = fs::symlink_metadata(&full)?;
        let kind = meta.file_type();
        let name = path.as_os_str().as_bytes();
        if kind.is_char_device() && meta.rdev() == 0 {
            let mut name = relative.as_os_str().as_bytes().to_vec();
            if !name.is_empty() {
                name.push(b'/');
            }
            name.extend(b".wh.");
            name.extend(entry.file_name().as_bytes());
            tar.marker(&name)?;
            continue;
        }
        if kind.is_dir() {
            let mut name = name.to_vec();
            name.push(b'/');
            tar.entry(&full, &name, &meta, b'5', b"", 0)?;
            let mut value = [0; 8];
            if lgetxattr(&full, OPAQUE, &mut value).is_ok_and(|len| value[..len] == *b"y") {
                name.extend(b".wh..wh..opq");
                tar.marker(&name)?;
            }
            walk(tar, upper, &path, links)?;
            continue;
        }
        if meta.nlink() > 1 {
            if let Some(first) = links.get(&(meta.dev(), meta.ino())) {
                let first = first.clone();
                tar.entry(&full, name, &meta, b'1', &first, 0)?;
                continue;
            }
            links.insert((meta.dev(), meta.ino()), name.to_vec());
        }
        if kind.is_symlink() {
            let target = fs::read_link(&full)?;
            tar.entry(&full, name, &meta, b'2', target.as_os_str().as_bytes(), 0)?;
        } else if kind.is_file() {
            tar.entry(&full, name, &meta, b'0', b"", meta.len())?;
            tar.content(&mut File::open(&full)?, meta.len())?;
        } else if kind.is_char_device() {
            tar.entry(&full, name, &meta, b'3', b"", 0)?;
        } else if kind.is_block_device() {
            tar.entry(&full, name, &meta, b'4', b"", 0)?;
        } else if kind.is_fifo() {
            tar.entry(&full, name, &meta, b'6', b"", 0)?;
        }
        // A socket has no form in a tar; it means nothing without its process.
    }
    Ok(())
}

impl<W: Write> Tar<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.hash.update(bytes);
        self.size += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, len: u64) -> io::Result<()> {
        let rest = (512 - len % 512) % 512;
        #[allow(clippy::cast_possible_truncation, reason = "below 512")]
        self.put(&[0; 512][..rest as usize])
    }

    fn content(&mut self, file: &mut File, len: u64) -> io::Result<()> {
        let mut left = len;
        let mut buffer = vec![0; 1 << 17];
        while left > 0 {
            let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = file.read(&mut buffer[..want])?;
            if read == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "a file of the layer shrank while it was read",
                ));
            }
            self.put(&buffer[..read])?;
            left -= read as u64;
        }
        self.pad(len)
    }

    /// A whiteout.
    fn marker(&mut self, name: &[u8]) -> io::Result<()> {
        let mut pax = Vec::new();
        if name.len() > 100 {
            pax_record(&mut pax, "path", name);
        }
        self.pax(&pax)?;
        self.entries += 1;
        let header =
            Header { name, kind: b'0', mtime: self.epoch.unwrap_or(0).max(0), ..Header::default() };
        self.put(&header.bytes())
    }

    fn pax(&mut self, records: &[u8]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let len = records.len() as u64;
        let header = Header {
            name: b"PaxHeaders.0/x",
            kind: b'x',
            size: len,
            mode: 0o644,
            ..Header::default()
        };
        self.put(&header.bytes())?;
        self.put(records)?;
        self.pad(len)
    }

    fn entry(
        &mut self,
        path: &Path,
        name: &[u8],
        meta: &fs::Metadata,
        kind: u8,
        link: &[u8],
        size: u64,
    ) -> io::Result<()> {
        let (seconds, nanos) = match self.epoch {
            Some(epoch) if meta.mtime() >= epoch => (epoch, 0),
            _ => (meta.mtime(), meta.mtime_nsec()),
        };
        let mut pax = Vec::new();
        if name.len() > 100 {
            pax_record(&mut pax, "path", name);
        }
        if link.len() > 100 {
            pax_record(&mut pax, "linkpath", link);
        }
        if nanos != 0 || !(0..1 << 33).contains(&seconds) {
            pax_record(&mut pax, "mtime", pax_time(seconds, nanos).as_bytes());
        }
        for (key, value, limit) in [
            ("size", size, 1 << 33),
            ("uid", u64::from(meta.uid()), 1 << 21),
            ("gid", u64::from(meta.gid()), 1 << 21),
        ] {
            if value >= limit {
                pax_record(&mut pax, key, value.to_string().as_bytes());
            }
        }
        if kind != b'1' {
            for (name, value) in xattrs(path)? {
                let key = [b"SCHILY.xattr.", name.as_slice()].concat();
                pax_bytes(&mut pax, &key, &value);
            }
        }
        self.pax(&pax)?;
        self.entries += 1;
        let header = Header {
            name,
            link,
            kind,
            mode: meta.mode() & 0o7777,
            uid: u64::from(meta.uid()),
            gid: u64::from(meta.gid()),
            size,
            mtime: seconds,
            device: matches!(kind, b'3' | b'4').then(|| (major(meta.rdev()), minor(meta.rdev()))),
        };
        self.put(&header.bytes())
    }
}

/// Extended attributes that belong to the file and not to overlayfs, sorted by name.
pub(crate) fn xattrs(path: &Path) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = vec![0; 1 << 16];
    let len = match llistxattr(path, &mut names) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut found = Vec::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let kept = name.starts_with(b"user.")
            || name == b"security.capability"
            || name.starts_with(b"system.posix_acl_");
        if !kept {
            continue;
        }
        let mut value = vec![0; 1 << 16];
        let len = lgetxattr(path, OsStr::from_bytes(name), &mut value)?;
        value.truncate(len);
        found.push((name.to_vec(), value));
    }
    found.sort();
    Ok(found)
}

#[derive(Default)]
struct Header<'a> {
    name: &'a [u8],
    link: &'a [u8],
    kind: u8,
    mode: u32,
    uid: u64,
    gid: u64,
    size: u64,
    mtime: i64,
    device: Option<(u32, u32)>,
}

impl Header<'_> {
    fn bytes(&self) -> [u8; 512] {
        let mut block = [0; 512];
        let text = |field: &mut [u8], value: &[u8]| {
            let len = value.len().min(field.len());
            field[..len].copy_from_slice(&value[..len]);
        };
        // Numbers that do not fit are in the PAX records; the field then only has to be readable.
        let octal = |field: &mut [u8], value: u64| {
            let digits = field.len() - 1;
            let max = (1_u64 << (3 * digits)) - 1;
            text(field, format!("{:0digits$o}", value.min(max)).as_bytes());
        };
        text(&mut block[..100], self.name);
        octal(&mut block[100..108], u64::from(self.mode));
        octal(&mut block[108..116], self.uid);
        octal(&mut block[116..124], self.gid);
        octal(&mut block[124..136], self.size);
        octal(&mut block[136..148], u64::try_from(self.mtime).unwrap_or(0));
        block[156] = self.kind;
        text(&mut block[157..257], self.link);
        block[257..265].copy_from_slice(b"ustar\x0000");
        if let Some((major, minor)) = self.device {
            octal(&mut block[329..337], u64::from(major));
            octal(&mut block[337..345], u64::from(minor));
        }
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }
}

fn pax_time(seconds: i64, nanos: i64) -> String {
    if nanos == 0 {
        return seconds.to_string();
    }
    // The fraction counts forward from the second below; PAX writes a decimal number.
    let text = if seconds < 0 {
        format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos)
    } else {
        format!("{seconds}.{nanos:09}")
    };
    text.trim_end_matches('0').to_owned()
}

fn pax_record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    pax_bytes(out, key.as_bytes(), value);
}

fn pax_bytes(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // The length counts its own digits.
    let body = key.len() + value.len() + 3;
    let mut len = body + body.to_string().len();
    if len.to_string().len() != body.to_string().len() {
        len = body + len.to_string().len();
    }
    out.extend(len.to_string().as_bytes());
    out.push(b' ');
    out.extend(key);
    out.push(b'=');
    out.extend(value);
    out.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_lengths_count_themselves() {
        for len in [1, 5, 88, 89, 90, 91, 92, 93, 94, 985, 986, 987, 988, 989, 990, 991, 992] {
            let mut record = Vec::new();
            pax_record(&mut record, "k", &vec![b'v'; len]);
            let text = String::from_utf8(record.clone()).unwrap();
            let (digits, _) = text.split_once(' ').unwrap();
            assert_eq!(digits.parse::<usize>().unwrap(), record.len());
        }
    }

    #[test]
    fn times_before_1970_and_fractions() {
        assert_eq!(pax_time(5, 0), "5");
        assert_eq!(pax_time(5, 500_000_000), "5.5");
        assert_eq!(pax_time(-1, 250_000_000), "-0.75");
        assert_eq!(pax_time(-3, 0), "-3");
    }
}
