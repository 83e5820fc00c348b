//! Random access to the members of a tar file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::flatten::path::{components, display};
use crate::layer::decode::{Compression, Decoder, Expansion};
use crate::layer::tar::{EntryKind, TarLimits, TarReader};

use super::error::ImageError;

/// Members of one archive.
const MEMBERS_MAX: usize = 100_000;
/// Links followed to one member.
const LINKS_MAX: usize = 10;

/// A tar file and where its members are.
pub(super) struct Archive {
    shown: String,
    file: Arc<File>,
    members: BTreeMap<Vec<u8>, Place>,
}

enum Place {
    Data { at: u64, size: u64 },
    Link(Vec<u8>),
}

impl Archive {
    /// Reads an archive's headers. A compressed archive is unpacked into a nameless temporary file
    /// first.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let shown = path.display().to_string();
        let read = |error| ImageError::read(shown.clone(), error);
        let mut file = File::open(path).map_err(read)?;
        if file.metadata().map_err(read)?.is_dir() {
            return Err(ImageError::Archive {
                path: shown,
                problem: "a directory, not an archive (for a layout use oci:)".to_owned(),
            });
        }
        if let Some(plain) = decompress(&mut file).map_err(read)? {
            file = plain;
        }
        let length = file.metadata().map_err(read)?.len();
        file.seek(SeekFrom::Start(0)).map_err(read)?;
        let clone = file.try_clone().map_err(read)?;
        let mut reader = TarReader::new(BufReader::new(clone), TarLimits::default());
        let mut members = BTreeMap::new();
        let bad = |problem: String| ImageError::Archive { path: shown.clone(), problem };
        while let Some(entry) = reader.next_entry().map_err(|error| bad(error.to_string()))? {
            let extent = reader.seek_past_data().map_err(|error| bad(error.to_string()))?;
            let Ok(name) = components("name", &entry.path) else { continue };
            let name = name.join(&b'/');
            let place = match (entry.kind, extent) {
                (EntryKind::File, Some((at, size))) => {
                    if at.checked_add(size).is_none_or(|end| end > length) {
                        let shown = display(&name);
                        return Err(bad(format!(
                            "the archive ends inside {shown}; it is incomplete"
                        )));
                    }
                    Place::Data { at, size }
                }
                (EntryKind::HardLink, _) => Place::Link(entry.link),
                (EntryKind::Symlink, _) => {
                    let parent = name.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
                    Place::Link([&name[..parent], &entry.link].concat())
                }
                _ => continue,
            };
            members.insert(name, place);
            if members.len() > MEMBERS_MAX {
                return Err(bad(format!("it has more than {MEMBERS_MAX} members")));
            }
        }
        Ok(Self { shown, file: Arc::new(file), members })
    }

    /// The archive's path.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Opens a member, links followed inside the archive.
    pub fn member(&self, name: &[u8]) -> io::Result<Member> {
        let not_found = || {
            io::Error::new(io::ErrorKind::NotFound, format!("no {} in the archive", display(name)))
        };
        let mut name = normal(name).ok_or_else(not_found)?;
        for _ in 0..LINKS_MAX {
            match self.members.get(&name).ok_or_else(not_found)? {
                Place::Data { at, size } => {
                    return Ok(Member { file: Arc::clone(&self.file), at: *at, left: *size });
                }
                Place::Link(target) => name = normal(target).ok_or_else(not_found)?,
            }
        }
        Err(io::Error::other(format!("links to {} go round in circles", display(&name))))
    }
}

/// Resolves `.` and `..` in a member's name; `None` if it leads out of the archive.
fn normal(name: &[u8]) -> Option<Vec<u8>> {
    let mut out: Vec<&[u8]> = Vec::new();
    for component in name.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => {
                out.pop()?;
            }
            _ => out.push(component),
        }
    }
    Some(out.join(&b'/'))
}

/// Unpacks a compressed file; `None` if it is not compressed.
fn decompress(file: &mut File) -> io::Result<Option<File>> {
    let mut decoder = Decoder::new(&*file, Expansion::default());
    let mut chunk = vec![0; 256 << 10];
    let mut plain = None;
    loop {
        let step = decoder.step(&mut chunk, &mut |buffer, _| buffer);
        let (length, ended) = step.map_err(io::Error::other)?;
        if matches!(decoder.compression(), None | Some(Compression::None)) {
            return Ok(None);
        }
        let out = match &mut plain {
            Some(out) => out,
            empty => empty.insert(tempfile::tempfile()?),
        };
        out.write_all(&chunk[..length])?;
        if ended {
            return Ok(plain);
        }
    }
}

/// A member being read.
pub(super) struct Member {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Member {
    /// Bytes left to read.
    pub fn size(&self) -> u64 {
        self.left
    }
}

impl Read for Member {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.file.read_at(&mut buffer[..length], self.at)?;
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}
