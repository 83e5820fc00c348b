//! The audit log: one JSON document a line, each with the hash of the one before.
//!
//! ```text
//! {"line":7,"unixMs":…,"kind":"execStarted","actor":"uid:0","sandbox":"abc…","detail":{…},
//!  "previous":"<hash of line 6>","hash":"<hash of this line without its hash>"}
//!
//! audit.jsonl.000001 ─► audit.jsonl.000002 ─► audit.jsonl      one chain over all files
//! audit.jsonl.anchor    how many lines there are, and the last one's hash
//! ```
//! Changing, removing or inserting a line breaks the chain at that place. Hashes are SHA-256, which
//! everybody can make anew from there on; with a [`Key`] they are HMACs, which only those can make
//! who have the key. Lines cut off the end are missed by the anchor; without one, compare the last
//! hash with one kept elsewhere (`GET /v1/node` tells it).
//!
//! The file is only ever appended to, by one process, which holds a lock on it. One that has grown
//! large enough is finished: it gets a number, and the chain goes on in a new one. Finished files
//! may be put away, oldest first; the rest verifies from its first line on. A line that a crash cut
//! short is taken out at the next start, and that is written down, too.

mod anchor;
mod chain;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde_json::{Value, json};

use self::anchor::Anchor;
pub use self::chain::Key;
use self::chain::{AFTER_HASH, BEFORE_HASH, Place};

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// A file.
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
        /// Which file.
        path: PathBuf,
        /// Counted from 1, over all files.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// The anchor is not what was written, or the log is not what was anchored.
    #[error("audit anchor {}: {why}", path.display())]
    Anchor {
        /// The anchor.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

/// How a log is kept.
#[derive(Debug, Clone)]
pub struct AuditConfig {
    /// The file that is written.
    pub path: PathBuf,
    /// What makes its hashes.
    pub key: Option<Key>,
    /// Where its end is written down.
    pub anchor: Option<PathBuf>,
    /// How large a file may grow, in bytes, before it is finished.
    pub file_bytes: u64,
}

impl AuditConfig {
    /// A log at `path`, with neither key nor anchor, in files of 64 MiB.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), key: None, anchor: None, file_bytes: 64 << 20 }
    }
}

/// A log that was read from end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// The number of the first line there is: 1, unless finished files were put away.
    pub first: u64,
    /// How many lines were ever written.
    pub lines: u64,
    /// The hash of the last one.
    pub head: String,
    /// Bytes after the last complete line.
    pub torn_bytes: u64,
    /// How many files there are.
    pub files: usize,
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
    config: AuditConfig,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    anchor: Option<Anchor>,
    lines: u64,
    head: String,
    /// The number of the next file that is finished.
    next: u32,
}

impl Audit {
    /// Opens or makes the log, reads it from end to end, and continues it.
    ///
    /// # Errors
    /// See [`AuditError`]: a log whose chain is broken, or that is shorter than its anchor says, is
    /// not continued.
    pub fn open(config: AuditConfig) -> Result<Self, AuditError> {
        let path = &config.path;
        let failed = |source| AuditError::File { path: path.clone(), source };
        let mut file = open_locked(path)?;
        let (found, anchored) = read_all(&config, Some(&file))?;
        let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if found.torn_bytes > 0 {
            file.set_len(length - found.torn_bytes).map_err(failed)?;
        }
        let next = chain::finished(path).map_err(failed)?.last().map_or(1, |(n, _)| n + 1);
        let anchor = config.anchor.as_deref().map(|path| {
            Anchor::open(path).map_err(|source| AuditError::File { path: path.to_owned(), source })
        });
        let missing = config.anchor.is_some() && !anchored && found.lines > 0;
        let state =
            State { file, anchor: anchor.transpose()?, lines: found.lines, head: found.head, next };
        let audit = Self { config, state: Mutex::new(state) };
        if found.torn_bytes > 0 {
            audit.remark("auditLineTorn", &json!({ "bytes": found.torn_bytes }))?;
        }
        if missing {
            // The first start with one; or somebody took it away.
            audit.remark("auditAnchorMissing", &json!({ "lines": found.lines }))?;
        }
        Ok(audit)
    }

    fn remark(&self, kind: &str, detail: &Value) -> Result<(), AuditError> {
        let (actor, unix_ms) = ("parbaked", crate::feed::unix_ms());
        self.write(&Entry { kind, actor, sandbox: None, unix_ms, detail })
    }

    /// Writes a line.
    ///
    /// # Errors
    /// [`AuditError::File`]; what should have been written down must not happen then.
    pub fn write(&self, entry: &Entry<'_>) -> Result<(), AuditError> {
        let failed = |source| AuditError::File { path: self.config.path.clone(), source };
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
        let hash = chain::hash(self.config.key.as_ref(), text.as_bytes());
        let open = text.strip_suffix('}').unwrap_or(&text);
        let whole = format!("{open}{BEFORE_HASH}{hash}{AFTER_HASH}\n");
        let mut before = state.file.seek(SeekFrom::End(0)).map_err(failed)?;
        if before > 0 && before.saturating_add(whole.len() as u64) > self.config.file_bytes {
            self.finish(&mut state)?;
            before = 0;
        }
        if let Err(error) = state.file.write_all(whole.as_bytes()) {
            // A full disk: half a line would break the chain for all that follow.
            let _ = state.file.set_len(before);
            return Err(failed(error));
        }
        state.lines += 1;
        state.head = hash;
        if let (Some(anchor), Some(path)) = (&state.anchor, &self.config.anchor) {
            let set = anchor.set(self.config.key.as_ref(), state.lines, &state.head);
            set.map_err(|source| AuditError::File { path: path.clone(), source })?;
        }
        Ok(())
    }

    /// Gives the file its number, and goes on in a new one. After a crash in between, the next
    /// start makes the new one.
    fn finish(&self, state: &mut State) -> Result<(), AuditError> {
        let path = &self.config.path;
        let failed = |source| AuditError::File { path: path.clone(), source };
        let name = chain::finished_name(path, state.next);
        state.file.sync_data().map_err(failed)?;
        std::fs::rename(path, &name).map_err(failed)?;
        match open_locked(path) {
            Ok(file) => {
                state.file = file;
                state.next += 1;
                Ok(())
            }
            Err(error) => {
                // As it was.
                let _ = std::fs::rename(&name, path);
                Err(error)
            }
        }
    }

    /// How many lines there are, and the hash of the last one.
    pub fn head(&self) -> (u64, String) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.lines, state.head.clone())
    }
}

fn open_locked(path: &Path) -> Result<File, AuditError> {
    use std::os::unix::fs::OpenOptionsExt;
    let failed = |source| AuditError::File { path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    let file = options.read(true).append(true).create(true).mode(0o600).open(path);
    let file = file.map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(AuditError::InUse(path.to_owned())),
        Err(error) => Err(failed(error.into())),
    }
}

/// Checks a log from end to end, over all its files, and against its anchor if the configuration
/// names one. Bytes after the last complete line, of a write that is going on or was cut short, are
/// told and are no failure.
///
/// # Errors
/// [`AuditError::Broken`] at the first line that is not what was written there,
/// [`AuditError::Anchor`] where lines were cut off, or there is no anchor.
pub fn verify(config: &AuditConfig) -> Result<Verified, AuditError> {
    let (found, anchored) = read_all(config, None)?;
    match &config.anchor {
        Some(path) if !anchored => {
            Err(AuditError::Anchor { path: path.clone(), why: "it is not there".to_owned() })
        }
        _ => Ok(found),
    }
}

/// Reads all files, the current one through `current` if it is open already; and whether there was
/// an anchor, which then agreed.
fn read_all(config: &AuditConfig, current: Option<&File>) -> Result<(Verified, bool), AuditError> {
    let path = &config.path;
    let key = config.key.as_ref();
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| AuditError::File { path, source }
    };
    // Before the log: it may grow meanwhile, and the anchor never is ahead of it.
    let said = config.anchor.as_deref().map(|anchor| anchor::read(anchor, key)).transpose()?;
    let said = said.flatten();
    let finished = chain::finished(path).map_err(failed(path))?;
    let (mut place, mut agrees) = (Place::start(), said.as_ref().is_none_or(|s| s.lines == 0));
    let mut each = |line: u64, hash: &str| {
        agrees |= said.as_ref().is_some_and(|said| said.lines == line && said.head == hash);
    };
    for (_, path) in &finished {
        let file = File::open(path).map_err(failed(path))?;
        chain::read(path, &file, key, &mut place, &mut each)?;
    }
    let opened;
    let file = match current {
        Some(file) => Some(file),
        None => match File::open(path) {
            Ok(file) => {
                opened = file;
                Some(&opened)
            }
            // Finished this moment, or a crash was quicker than the next file.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !finished.is_empty() => None,
            Err(error) => return Err(failed(path)(error)),
        },
    };
    if let Some(file) = file {
        chain::read(path, file, key, &mut place, &mut each)?;
    }
    if let (Some(said), Some(anchor), false) = (&said, &config.anchor, agrees) {
        let why = if said.lines > place.lines {
            format!("the log had {} lines and has {}: some were cut off", said.lines, place.lines)
        } else {
            format!("line {} is not the one that was written", said.lines)
        };
        return Err(AuditError::Anchor { path: anchor.clone(), why });
    }
    let found = Verified {
        first: place.first,
        lines: place.lines,
        head: place.head,
        torn_bytes: place.torn,
        files: finished.len() + usize::from(file.is_some()),
    };
    Ok((found, said.is_some()))
}

#[cfg(test)]
mod tests;
