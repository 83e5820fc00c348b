//! How lines hang together: their hashes, and the files they are in, oldest first.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use hmac::{Hmac, KeyInit, Mac};
use parbake_cache::Digest;
use serde_json::Value;
use sha2::Sha256;

use super::AuditError;

/// What precedes the first line.
pub(super) const ORIGIN: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// The longest line: a request's body and a bit.
const MAX_LINE: u64 = 4 << 20;
/// How a line ends: this, the hash, and [`AFTER_HASH`].
pub(super) const BEFORE_HASH: &str = ",\"hash\":\"";
pub(super) const AFTER_HASH: &str = "\"}";
/// Digits of a finished file's number.
const DIGITS: usize = 6;
/// The shortest key, in bytes.
const KEY_MIN: usize = 32;

/// What only those who may write the log know. Without one, hashes are plain SHA-256.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Reads a key: all bytes of the file, 32 or more.
    ///
    /// # Errors
    /// [`AuditError::File`].
    pub fn read(path: &Path) -> Result<Self, AuditError> {
        let failed = |source| AuditError::File { path: path.to_owned(), source };
        let mut bytes = Vec::new();
        File::open(path).and_then(|f| f.take(4096).read_to_end(&mut bytes)).map_err(failed)?;
        if bytes.len() < KEY_MIN {
            let message = format!(
                "a key has {KEY_MIN} bytes or more, this file has {}; make one with \
                 `head -c 32 /dev/urandom`",
                bytes.len()
            );
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, message)));
        }
        Ok(Self(bytes))
    }
}

/// The hash of `bytes`, in hexadecimal digits: HMAC-SHA-256 with a key, SHA-256 without.
pub(super) fn hash(key: Option<&Key>, bytes: &[u8]) -> String {
    let Some(Key(key)) = key else { return Digest::of(bytes).hex() };
    // Keys of any length are fine.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return String::new() };
    mac.update(bytes);
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The finished files of a log by number, oldest first.
pub(super) fn finished(path: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let other = entry.file_name().to_string_lossy().into_owned();
        let number = other.strip_prefix(&name).and_then(|rest| rest.strip_prefix('.'));
        let digits = |n: &&str| n.len() == DIGITS && n.bytes().all(|b| b.is_ascii_digit());
        if let Some(number) = number.filter(digits).and_then(|number| number.parse().ok()) {
            found.push((number, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// What a file of the log is called once it is finished.
pub(super) fn finished_name(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number:0DIGITS$}"));
    name.into()
}

/// Where reading a log has come to.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// The number of the first line there is; 0 before there was any.
    pub first: u64,
    /// Lines so far, those of files that are not there any more included.
    pub lines: u64,
    /// The last one's hash.
    pub head: String,
    /// Bytes after the last complete line of the last file.
    pub torn: u64,
}

impl Place {
    pub(super) fn start() -> Self {
        Self { first: 0, lines: 0, head: ORIGIN.to_owned(), torn: 0 }
    }
}

/// Checks one file line by line from `place` on, and tells each line's number and hash.
pub(super) fn read(
    path: &Path,
    file: &File,
    key: Option<&Key>,
    place: &mut Place,
    each: &mut dyn FnMut(u64, &str),
) -> Result<(), AuditError> {
    let mut reader = BufReader::new(file);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let count = (&mut reader)
            .take(MAX_LINE)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| AuditError::File { path: path.to_owned(), source })?;
        if count == 0 {
            return Ok(());
        }
        let line = place.lines + 1;
        let broken =
            |why: &str| AuditError::Broken { path: path.to_owned(), line, why: why.to_owned() };
        if place.torn > 0 {
            return Err(broken("the file before it ends in the middle of a line"));
        }
        if bytes.pop() != Some(b'\n') {
            if count as u64 == MAX_LINE {
                return Err(broken("it is longer than any line"));
            }
            place.torn = count as u64;
            return Ok(());
        }
        let checked = check(&bytes, key).map_err(|why| broken(&why))?;
        if place.first == 0 {
            // Finished files may have been put away; what is left then begins in the middle.
            place.first = checked.number;
            place.lines = checked.number.saturating_sub(1);
            place.head.clone_from(&checked.previous);
            if checked.number == 1 && checked.previous != ORIGIN {
                return Err(broken("it is the first one and does not say so"));
            }
        }
        if checked.previous != place.head {
            return Err(broken("it does not follow the line before: one was removed or put in"));
        }
        if checked.number != place.lines + 1 {
            return Err(broken(&format!("it says that it is line {}", checked.number)));
        }
        place.lines = checked.number;
        place.head = checked.hash;
        each(place.lines, &place.head);
    }
}

struct Checked {
    number: u64,
    previous: String,
    hash: String,
}

/// Checks a line against its own hash.
fn check(bytes: &[u8], key: Option<&Key>) -> Result<Checked, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not text".to_owned())?;
    let (open, found) = text
        .strip_suffix(AFTER_HASH)
        .and_then(|text| text.rsplit_once(BEFORE_HASH))
        .ok_or("it does not end with a hash")?;
    if hash(key, format!("{open}}}").as_bytes()) != found {
        let what = if key.is_some() { "; or this is not the key" } else { "; or there is a key" };
        return Err(format!("it was changed: its hash does not fit{what}"));
    }
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let number = value["line"].as_u64().filter(|number| *number > 0);
    Ok(Checked {
        number: number.ok_or("it has no number")?,
        previous: value["previous"].as_str().unwrap_or_default().to_owned(),
        hash: found.to_owned(),
    })
}
