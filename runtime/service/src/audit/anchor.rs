//! The anchor: how many lines a log has and the hash of the last, kept in a file of its own, so
//! that lines cut off the log's end are missed. It is worth most where who can write the log cannot
//! write it; with a key, nobody without the key can write one that fits.
//!
//! One line of fixed length, written in place after each line of the log: after a crash it is one
//! line behind at most.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::AuditError;
use super::chain::{Key, hash};

/// Bytes: twenty digits, two hashes, what is between them.
const LENGTH: usize = 20 + 1 + 64 + 1 + 64 + 1;

/// What an anchor says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Said {
    /// Lines of the log.
    pub lines: u64,
    /// The last one's hash.
    pub head: String,
}

/// An anchor being written.
#[derive(Debug)]
pub(super) struct Anchor {
    file: File,
}

impl Anchor {
    /// Opens or makes it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
        Ok(Self { file })
    }

    /// Writes down where the log is now.
    pub(super) fn set(&self, key: Option<&Key>, lines: u64, head: &str) -> io::Result<()> {
        self.file.write_all_at(text(key, lines, head).as_bytes(), 0)
    }
}

/// Reads an anchor; none where there is no file, or an empty one.
pub(super) fn read(path: &Path, key: Option<&Key>) -> Result<Option<Said>, AuditError> {
    let failed = |source| AuditError::File { path: path.to_owned(), source };
    let mut found = String::new();
    match File::open(path) {
        Ok(file) => file.take(LENGTH as u64 + 1).read_to_string(&mut found).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    if found.is_empty() {
        return Ok(None);
    }
    let mut words = found.split_ascii_whitespace();
    let lines = words.next().and_then(|word| word.parse().ok());
    let head = words.next().map(str::to_owned);
    match (lines, head) {
        (Some(lines), Some(head)) if found == text(key, lines, &head) => {
            Ok(Some(Said { lines, head }))
        }
        _ => Err(AuditError::Anchor {
            path: PathBuf::from(path),
            why: "it was changed, or belongs to another key".to_owned(),
        }),
    }
}

fn text(key: Option<&Key>, lines: u64, head: &str) -> String {
    let seal = hash(key, format!("audit anchor {lines} {head}").as_bytes());
    format!("{lines:020} {head} {seal}\n")
}
