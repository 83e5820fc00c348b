//! Archives into directories: `ADD archive.tar.xz /x`, and the layers of base images.
//!
//! Entries are placed inside the destination and nowhere else: links on the way are followed as
//! if the destination were `/`.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, linkat, lsetxattr, makedev, mknodat};
use tar::EntryType;

use super::overlay::set_time;
use super::rootpath::{chown, resolve, resolve_parent};

/// How an archive is unpacked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Unpack {
    /// Owner and group of everything, instead of the archive's.
    pub owner: Option<(u32, u32)>,
    /// The archive is an image's layer.
    pub layer: bool,
    /// `.wh.` names remove what earlier layers left.
    pub whiteouts: bool,
}

/// Opens what may be compressed with gzip, bzip2, xz or zstd.
///
/// # Errors
/// The system's, or a damaged header.
pub(crate) fn decompress(mut input: impl BufRead + Send + 'static) -> io::Result<Box<dyn Read>> {
    let head = input.fill_buf()?;
    Ok(match head {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        [b'B', b'Z', b'h', ..] => Box::new(bzip2::bufread::MultiBzDecoder::new(input)),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Box::new(lzma_rust2::XzReader::new(input, true)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(zstd::stream::read::Decoder::with_buffer(input)?),
        _ => Box::new(input),
    })
}

/// Whether a regular file is a tar archive, compressed or not: its first header holds together.
pub(crate) fn is_archive(path: &Path) -> bool {
    let Ok(meta) = fs::symlink_metadata(path) else { return false };
    if !meta.is_file() {
        return false;
    }
    let Ok(file) = File::open(path) else { return false };
    let Ok(mut input) = decompress(BufReader::new(file)) else { return false };
    let mut block = [0; 512];
    if input.read_exact(&mut block).is_err() {
        return false;
    }
    if block.iter().all(|byte| *byte == 0) {
        // An archive of nothing: two zero blocks.
        return input.read_exact(&mut block).is_ok() && block.iter().all(|byte| *byte == 0);
    }
    let header = tar::Header::from_byte_slice(&block);
    let sum: u32 =
        block[..148].iter().chain(&block[156..]).map(|byte| u32::from(*byte)).sum::<u32>()
            + 8 * u32::from(b' ');
    header.cksum().is_ok_and(|stored| stored == sum)
}

/// Unpacks a tar stream into `dest`.
///
/// # Errors
/// When the archive is damaged, names something outside, or the system fails.
pub(crate) fn unpack(input: impl Read, dest: &Path, how: Unpack) -> io::Result<()> {
    let mut archive = tar::Archive::new(input);
    let mut directories = Vec::new();
    let mut made: HashSet<PathBuf> = HashSet::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path_bytes().into_owned();
        let Some(name) = clean_name(&name)? else { continue };
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader | EntryType::XHeader) {
            continue;
        }
        let parent = resolve(dest, name.parent().unwrap_or(Path::new("")))?;
        make_parents(dest, &parent, how.owner)?;
        let base = name.file_name().unwrap_or_default();
        if how.whiteouts
            && let Some(hidden) = base.as_bytes().strip_prefix(b".wh.")
        {
            if hidden == b".wh..opq" {
                for child in fs::read_dir(&parent)? {
                    remove_lower(&child?.path(), &made)?;
                }
            } else if !hidden.starts_with(b".wh.") {
                remove_lower(&parent.join(std::ffi::OsStr::from_bytes(hidden)), &made)?;
            }
            continue;
        }
        let mut path = parent.join(base);
        // `ADD` merges into what a link leads to; a layer's directory takes the link's place.
        if kind == EntryType::Directory && !how.layer {
            path = resolve(dest, path.strip_prefix(dest).unwrap_or(&path))?;
        }
        if let Ok(existing) = fs::symlink_metadata(&path)
            && !(existing.is_dir() && kind == EntryType::Directory)
        {
            if existing.is_dir() {
                fs::remove_dir_all(&path)?;
            } else {
                fs::remove_file(&path)?;
            }
        }
        make(&mut entry, kind, &path, dest)?;
        made.insert(path.clone());
        let header = entry.header();
        let mode = header.mode()? & 0o7777;
        let (uid, gid) = match how.owner {
            Some(owner) => owner,
            None => (number(header.uid()?)?, number(header.gid()?)?),
        };
        let mtime = i64::try_from(header.mtime().unwrap_or(0)).unwrap_or(0);
        let (mut uid, mut gid, mut time) = (uid, gid, (mtime, 0));
        let mut attributes = Vec::new();
        if let Some(extensions) = entry.pax_extensions()? {
            for extension in extensions {
                let extension = extension?;
                let value = extension.value_bytes();
                let text = || std::str::from_utf8(value).ok();
                match extension.key_bytes() {
                    b"uid" if how.owner.is_none() => {
                        uid = text().and_then(|text| text.parse().ok()).unwrap_or(uid);
                    }
                    b"gid" if how.owner.is_none() => {
                        gid = text().and_then(|text| text.parse().ok()).unwrap_or(gid);
                    }
                    b"mtime" => time = text().and_then(parse_time).unwrap_or(time),
                    key => {
                        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                            attributes.push((name.to_vec(), value.to_vec()));
                        }
                    }
                }
            }
        }
        chown(&path, uid, gid)?;
        if kind != EntryType::Symlink {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
        }
        for (name, value) in attributes {
            let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidData)?;
            match lsetxattr(&path, name.as_c_str(), &value, rustix::fs::XattrFlags::empty()) {
                // Attributes the file system does not know cannot be kept by anyone.
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if kind == EntryType::Directory {
            directories.push((path, time));
        } else {
            set_time(&path, time.0, time.1)?;
        }
    }
    for (path, (seconds, nanos)) in directories.into_iter().rev() {
        if path.exists() {
            set_time(&path, seconds, nanos)?;
        }
    }
    Ok(())
}

fn number(value: u64) -> io::Result<u32> {
    u32::try_from(value).map_err(|_| io::Error::other("an owner's number is out of range"))
}

/// A device's number in a header: octal digits, or, marked by the highest bit, base 256.
fn device_number(field: &[u8]) -> io::Result<u32> {
    let wrong = || io::Error::other("a device's number is out of range");
    if let [0x80, rest @ ..] = field {
        return rest.iter().try_fold(0u32, |number, byte| {
            let number = number.checked_mul(256).and_then(|n| n.checked_add((*byte).into()));
            number.ok_or_else(wrong)
        });
    }
    let text = field.split(|byte| *byte == 0).next().unwrap_or_default().trim_ascii();
    if text.is_empty() {
        return Ok(0);
    }
    let text = std::str::from_utf8(text).map_err(|_| wrong())?;
    u32::from_str_radix(text, 8).map_err(|_| wrong())
}

fn parse_time(text: &str) -> Option<(i64, i64)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: i64 = digits.parse().ok()?;
    Some(match (text.starts_with('-'), nanos) {
        (true, nanos) if nanos > 0 => (seconds - 1, 1_000_000_000 - nanos),
        _ => (seconds, nanos),
    })
}

/// An entry's name below the destination; `None` is the destination itself.
fn clean_name(name: &[u8]) -> io::Result<Option<PathBuf>> {
    let mut out = PathBuf::new();
    for part in Path::new(std::ffi::OsStr::from_bytes(name)).components() {
        match part {
            Component::Normal(part) => out.push(part),
            Component::ParentDir => {
                if !out.pop() {
                    let name = String::from_utf8_lossy(name);
                    return Err(io::Error::other(format!(
                        "the archive's entry {name:?} leaves the destination"
                    )));
                }
            }
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    Ok((!out.as_os_str().is_empty()).then_some(out))
}

fn make_parents(dest: &Path, parent: &Path, owner: Option<(u32, u32)>) -> io::Result<()> {
    if parent.is_dir() {
        return Ok(());
    }
    let relative = parent.strip_prefix(dest).unwrap_or(parent);
    super::rootpath::make_directories(dest, relative, owner).map(drop)
}

/// Removes what the current layer did not make; directories of it keep their own entries.
fn remove_lower(path: &Path, made: &HashSet<PathBuf>) -> io::Result<()> {
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(()) };
    if meta.is_dir() {
        for child in fs::read_dir(path)? {
            remove_lower(&child?.path(), made)?;
        }
        let empty = fs::read_dir(path)?.next().is_none();
        if empty && !made.contains(path) {
            fs::remove_dir(path)?;
        }
    } else if !made.contains(path) {
        fs::remove_file(path)?;
    }
    Ok(())
}

fn make<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    kind: EntryType,
    path: &Path,
    dest: &Path,
) -> io::Result<()> {
    let node = |kind, device| -> io::Result<()> {
        Ok(mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), device)?)
    };
    match kind {
        EntryType::Directory => match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result,
        },
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let mut file = File::create_new(path)?;
            io::copy(entry, &mut file).map(drop)
        }
        EntryType::Symlink => {
            let target = entry.link_name_bytes().unwrap_or_default().into_owned();
            symlink(Path::new(std::ffi::OsStr::from_bytes(&target)), path)
        }
        EntryType::Link => {
            let target = entry.link_name_bytes().unwrap_or_default().into_owned();
            let Some(target) = clean_name(&target)? else {
                return Err(io::Error::other("a hard link of the archive names its root"));
            };
            let target = resolve_parent(dest, &target)?;
            Ok(linkat(CWD, &target, CWD, path, AtFlags::empty())?)
        }
        EntryType::Fifo => node(FileType::Fifo, 0),
        EntryType::Char | EntryType::Block => {
            let header = entry.header().as_bytes();
            let device =
                makedev(device_number(&header[329..337])?, device_number(&header[337..345])?);
            let kind = match kind {
                EntryType::Char => FileType::CharacterDevice,
                _ => FileType::BlockDevice,
            };
            node(kind, device)
        }
        other => Err(io::Error::other(format!("the archive has an entry of kind {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, text) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            if matches!(kind, EntryType::Symlink | EntryType::Link) {
                header.set_size(0);
                header.as_mut_bytes()[157..157 + text.len()].copy_from_slice(text.as_bytes());
                header.set_cksum();
                builder.append(&header, io::empty()).unwrap();
            } else {
                header.set_size(text.len() as u64);
                header.set_cksum();
                builder.append(&header, text.as_bytes()).unwrap();
            }
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn entries_stay_inside() {
        let dir = tempfile::tempdir().unwrap();
        let dest = dir.path().join("dest");
        fs::create_dir(&dest).unwrap();
        fs::write(dir.path().join("victim"), "safe").unwrap();
        let bytes = archive(&[("../victim", EntryType::Regular, "evil")]);
        assert!(unpack(&bytes[..], &dest, Unpack::default()).is_err());
        let bytes = archive(&[
            ("link", EntryType::Symlink, "../.."),
            ("link/victim", EntryType::Regular, "inside"),
            ("/abs", EntryType::Regular, "x"),
        ]);
        unpack(&bytes[..], &dest, Unpack::default()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("victim")).unwrap(), "safe");
        assert_eq!(fs::read_to_string(dest.join("victim")).unwrap(), "inside");
        assert!(dest.join("abs").exists());
        let bytes = archive(&[("hard", EntryType::Link, "../victim")]);
        assert!(unpack(&bytes[..], &dest, Unpack::default()).is_err());
    }

    #[test]
    fn device_numbers_are_octal_or_of_base_256() {
        for (field, number) in [
            (&b"0000003\0"[..], 3),
            (b"  17 \0\0\0", 15),
            (b"\0\0\0\0\0\0\0\0", 0),
            (b"\x80\0\0\0\0\0\x01\x05", 261),
        ] {
            assert_eq!(device_number(field).unwrap(), number);
        }
        for field in [&b"\x80\0\x01\0\0\0\0\0"[..], b"9\0\0\0\0\0\0\0", b"\xff\xff\0\0\0\0\0\0"] {
            assert!(device_number(field).is_err(), "{field:?}");
        }
    }

    #[test]
    fn whiteouts_touch_lower_layers_only() {
        let dir = tempfile::tempdir().unwrap();
        let how = Unpack { layer: true, whiteouts: true, owner: None };
        let one = archive(&[
            ("a/old", EntryType::Regular, ""),
            ("b", EntryType::Regular, ""),
            ("c/x", EntryType::Regular, ""),
        ]);
        unpack(&one[..], dir.path(), how).unwrap();
        let two = archive(&[
            ("a/new", EntryType::Regular, ""),
            ("a/.wh..wh..opq", EntryType::Regular, ""),
            (".wh.b", EntryType::Regular, ""),
            ("c/y", EntryType::Regular, ""),
            ("c/.wh.y", EntryType::Regular, ""),
        ]);
        unpack(&two[..], dir.path(), how).unwrap();
        assert!(dir.path().join("a/new").exists() && !dir.path().join("a/old").exists());
        assert!(!dir.path().join("b").exists());
        assert!(dir.path().join("c/y").exists() && dir.path().join("c/x").exists());
    }

    #[test]
    fn archives_are_told_from_other_files() {
        let dir = tempfile::tempdir().unwrap();
        let tar = archive(&[("a", EntryType::Regular, "1")]);
        let gz = {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            io::Write::write_all(&mut out, &tar).unwrap();
            out.finish().unwrap()
        };
        let plain_gz = {
            let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            io::Write::write_all(&mut out, &[b'x'; 2000]).unwrap();
            out.finish().unwrap()
        };
        for (bytes, expected) in [
            (&tar[..], true),
            (&gz, true),
            (&zstd::encode_all(&tar[..], 1).unwrap(), true),
            (&plain_gz, false),
            (b"text", false),
            (&[b'x'; 2000], false),
            (b"", false),
        ] {
            let path = dir.path().join("file");
            fs::write(&path, bytes).unwrap();
            assert_eq!(is_archive(&path), expected);
        }
    }
}
