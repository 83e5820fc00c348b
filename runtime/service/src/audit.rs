//! The audit log: one JSON document a line, each with the hash of the one before.
//!
//! ```text
//! {"line":7,"unixMs":…,"kind":"execStarted","actor":"uid:0","sandbox":"abc…","detail":{…},
//!  "previous":"<hash of line 6>","hash":"<SHA-256 of this line without its hash>"}
//! ```
//! Changing, removing or inserting a line breaks the chain at that place. Cutting lines off the end
//! does not: compare the last hash with one kept elsewhere (`GET /v1/node` tells it). The file is
//! only ever appended to, by one process, which holds a lock on it. A line that a crash cut short
//! is taken out at the next start, and that is written down, too.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use parbake_cache::Digest;
use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde_json::{Value, json};

/// What precedes the first line.
const ORIGIN: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// The longest line: a request's body and a bit.
const MAX_LINE: u64 = 4 << 20;
/// How a line ends: this, the hash, and [`AFTER_HASH`].
const BEFORE_HASH: &str = ",\"hash\":\"";
const AFTER_HASH: &str = "\"}";

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The file.
    #[error("audit log {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process writes it.
    #[error("audit log {} is being written by another process", .0.display())]
    InUse(PathBuf),
    /// A line is not what was written.
    #[error("audit log {}, line {line}: {why}", path.display())]
    Broken {
        /// Which.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
}

/// A log that was read from end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// How many lines.
    pub lines: u64,
    /// The hash of the last one.
    pub head: String,
    /// Bytes after the last complete line.
    pub torn_bytes: u64,
}

/// What is written down.
#[derive(Debug, Clone)]
pub struct Entry<'a> {
    /// A stable word.
    pub kind: &'a str,
    /// Who asked.
    pub actor: &'a str,
    /// The sandbox, if it is about one.
    pub sandbox: Option<&'a str>,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// More, by kind.
    pub detail: &'a Value,
}

/// As written, in this order.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    line: u64,
    unix_ms: u64,
    kind: &'a str,
    actor: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
    detail: &'a Value,
    previous: &'a str,
}

/// A log being written.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    lines: u64,
    head: String,
}

impl Audit {
    /// Opens or makes the log, reads it from end to end, and continues it.
    ///
    /// # Errors
    /// See [`AuditError`]: a log whose chain is broken is not continued.
    pub fn open(path: &Path) -> Result<Self, AuditError> {
        use std::os::unix::fs::OpenOptionsExt;
        let failed = |source| AuditError::File { path: path.to_owned(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(AuditError::InUse(path.to_owned())),
            Err(error) => return Err(failed(error.into())),
        }
        let found = read(path, &file)?;
        let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if found.torn_bytes > 0 {
            file.set_len(length - found.torn_bytes).map_err(failed)?;
        }
        let state = Mutex::new(State { file, lines: found.lines, head: found.head });
        let audit = Self { path: path.to_owned(), state };
        if found.torn_bytes > 0 {
            let detail = json!({ "bytes": found.torn_bytes });
            audit.write(&Entry {
                kind: "auditLineTorn",
                actor: "parbaked",
                sandbox: None,
                unix_ms: crate::feed::unix_ms(),
                detail: &detail,
            })?;
        }
        Ok(audit)
    }

    /// Writes a line.
    ///
    /// # Errors
    /// [`AuditError::File`]; what should have been written down must not happen then.
    pub fn write(&self, entry: &Entry<'_>) -> Result<(), AuditError> {
        let failed = |source| AuditError::File { path: self.path.clone(), source };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let line = Line {
            line: state.lines + 1,
            unix_ms: entry.unix_ms,
            kind: entry.kind,
            actor: entry.actor,
            sandbox: entry.sandbox,
            detail: entry.detail,
            previous: &state.head,
        };
        let text = serde_json::to_string(&line).map_err(|error| failed(error.into()))?;
        let hash = Digest::of(text.as_bytes()).hex();
        let open = text.strip_suffix('}').unwrap_or(&text);
        let whole = format!("{open}{BEFORE_HASH}{hash}{AFTER_HASH}\n");
        let before = state.file.seek(SeekFrom::End(0)).map_err(failed)?;
        if let Err(error) = state.file.write_all(whole.as_bytes()) {
            // A full disk: half a line would break the chain for all that follow.
            let _ = state.file.set_len(before);
            return Err(failed(error));
        }
        state.lines += 1;
        state.head = hash;
        Ok(())
    }

    /// How many lines there are, and the hash of the last one.
    pub fn head(&self) -> (u64, String) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.lines, state.head.clone())
    }
}

/// Checks a log from end to end. Bytes after the last complete line, of a write that is going on or
/// was cut short, are told and are no failure.
///
/// # Errors
/// [`AuditError::Broken`] at the first line that is not what was written there.
pub fn verify(path: &Path) -> Result<Verified, AuditError> {
    let file =
        File::open(path).map_err(|source| AuditError::File { path: path.to_owned(), source })?;
    read(path, &file)
}

fn read(path: &Path, file: &File) -> Result<Verified, AuditError> {
    use std::io::Read;
    let mut reader = BufReader::new(file);
    let mut found = Verified { lines: 0, head: ORIGIN.to_owned(), torn_bytes: 0 };
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let count = (&mut reader)
            .take(MAX_LINE)
            .read_until(b'\n', &mut bytes)
            .map_err(|source| AuditError::File { path: path.to_owned(), source })?;
        if count == 0 {
            return Ok(found);
        }
        let line = found.lines + 1;
        let broken =
            |why: &str| AuditError::Broken { path: path.to_owned(), line, why: why.to_owned() };
        if bytes.pop() != Some(b'\n') {
            if count as u64 == MAX_LINE {
                return Err(broken("it is longer than any line"));
            }
            found.torn_bytes = count as u64;
            return Ok(found);
        }
        found.head = check(&bytes, line, &found.head).map_err(|why| broken(&why))?;
        found.lines = line;
    }
}

/// Checks one line against its number and its predecessor's hash, and returns its own.
fn check(bytes: &[u8], number: u64, previous: &str) -> Result<String, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not text".to_owned())?;
    let (open, hash) = text
        .strip_suffix(AFTER_HASH)
        .and_then(|text| text.rsplit_once(BEFORE_HASH))
        .ok_or("it does not end with a hash")?;
    if Digest::of(format!("{open}}}").as_bytes()).hex() != hash {
        return Err("it was changed: its hash does not fit".to_owned());
    }
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if value["previous"] != previous {
        return Err("it does not follow the line before: one was removed or put in".to_owned());
    }
    if value["line"] != number {
        return Err(format!("it says that it is line {}", value["line"]));
    }
    Ok(hash.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(audit: &Audit, kind: &str) {
        let detail = json!({ "argv": ["sh", "-c", "echo \"}\",\"hash\":\""], "kind": kind });
        let entry =
            Entry { kind, actor: "uid:0", sandbox: Some("abc"), unix_ms: 1, detail: &detail };
        audit.write(&entry).unwrap();
    }

    fn log(lines: usize) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.jsonl");
        let audit = Audit::open(&path).unwrap();
        (0..lines).for_each(|n| write(&audit, &format!("kind{n}")));
        (directory, path)
    }

    #[test]
    fn a_log_is_continued_and_verifies() {
        let (_directory, path) = log(3);
        let first = verify(&path).unwrap();
        assert_eq!((first.lines, first.torn_bytes), (3, 0));
        let audit = Audit::open(&path).unwrap();
        assert_eq!(audit.head(), (3, first.head.clone()));
        write(&audit, "more");
        let second = verify(&path).unwrap();
        assert_eq!(second.lines, 4);
        assert_ne!(second.head, first.head);
        assert!(matches!(Audit::open(&path), Err(AuditError::InUse(_))));
    }

    #[test]
    fn every_change_shows_where_it_is() {
        let (_directory, path) = log(5);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let broken = |lines: &[&str]| {
            std::fs::write(&path, lines.join("\n") + "\n").unwrap();
            match verify(&path) {
                Err(AuditError::Broken { line, .. }) => line,
                other => panic!("{other:?}"),
            }
        };
        // Removed, doubled, swapped, changed in place.
        assert_eq!(broken(&[lines[0], lines[2], lines[3], lines[4]]), 2);
        assert_eq!(broken(&[lines[1], lines[2]]), 1);
        assert_eq!(broken(&[lines[0], lines[1], lines[1], lines[2]]), 3);
        assert_eq!(broken(&[lines[0], lines[2], lines[1], lines[3]]), 2);
        for (at, _) in lines[3].char_indices() {
            let mut changed = lines[3].to_owned().into_bytes();
            changed[at] ^= 1;
            let changed = String::from_utf8(changed).unwrap();
            if changed.contains('\n') {
                continue;
            }
            assert_eq!(broken(&[lines[0], lines[1], lines[2], &changed, lines[4]]), 4, "{at}");
        }
        // A changed line with a hash that fits it again breaks the next one.
        let forged = lines[1].replace("uid:0", "uid:1");
        let open = forged.rsplit_once(BEFORE_HASH).unwrap().0.to_owned();
        let hash = Digest::of(format!("{open}}}").as_bytes()).hex();
        let forged = format!("{open}{BEFORE_HASH}{hash}{AFTER_HASH}");
        assert_eq!(broken(&[lines[0], &forged, lines[2]]), 3);
    }

    #[test]
    fn a_torn_line_is_taken_out_and_told() {
        let (_directory, path) = log(2);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], b"{\"line\":3,\"unix"].concat()).unwrap();
        assert_eq!(verify(&path).unwrap().torn_bytes, 15);
        let audit = Audit::open(&path).unwrap();
        assert_eq!(audit.head().0, 3);
        let found = verify(&path).unwrap();
        assert_eq!((found.lines, found.torn_bytes), (3, 0));
        assert!(std::fs::read_to_string(&path).unwrap().contains("auditLineTorn"));
    }

    #[test]
    fn a_broken_log_is_not_continued() {
        let (_directory, path) = log(2);
        let text = std::fs::read_to_string(&path).unwrap().replace("uid:0", "uid:1");
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Audit::open(&path), Err(AuditError::Broken { line: 1, .. })));
    }
}
