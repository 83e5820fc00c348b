//! What a successor needs to take a sandbox over: one file in the sandbox's own directory.
//!
//! `sandbox.json` is written whole under another name, synced and renamed, once the sandbox is
//! ready. A directory without it holds a sandbox nobody was ever told about. Nothing secret is in
//! it: environment and secrets are in guest memory only.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use parbake_cache::Digest;
use parbake_cache::template::MachineShape;
use serde::{Deserialize, Serialize};

use crate::model::Limits;

/// The version of the file.
const VERSION: u32 = 1;
const NAME: &str = "sandbox.json";
const PASSING: &str = ".sandbox.json.new";
/// Far more than a record needs; a request's body is no larger.
const MAX_BYTES: u64 = 4 << 20;

/// A sandbox, for the next service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    version: u32,
    /// Its id.
    pub id: String,
    /// The template, as it was asked for.
    pub template: String,
    /// The template's manifest.
    pub template_digest: Digest,
    /// The snapshot it was restored from; absent for a fork.
    pub snapshot: Option<Digest>,
    /// Its machine.
    pub machine: MachineShape,
    /// When it was made.
    pub created_unix_ms: u64,
    /// When it is to be removed.
    pub expires_unix_ms: Option<u64>,
    /// What it is a fork of.
    pub parent: Option<String>,
    /// Names of its secrets.
    pub secrets: Vec<String>,
    /// Words of the caller's own.
    pub labels: BTreeMap<String, String>,
    /// What it may reach.
    pub egress: Vec<String>,
    /// What it may use.
    pub limits: Limits,
    /// The name of its workspace.
    #[serde(default)]
    pub workspace: Option<String>,
    /// The idempotency key of the request that made it, and the request's digest.
    pub request: Option<(String, Digest)>,
}

impl Record {
    /// A record of a sandbox with nothing special about it.
    #[must_use]
    pub fn new(id: &str, template: &str, template_digest: Digest, machine: MachineShape) -> Self {
        Self {
            version: VERSION,
            id: id.to_owned(),
            template: template.to_owned(),
            template_digest,
            snapshot: None,
            machine,
            created_unix_ms: crate::feed::unix_ms(),
            expires_unix_ms: None,
            parent: None,
            secrets: Vec::new(),
            labels: BTreeMap::new(),
            egress: Vec::new(),
            limits: Limits::default(),
            workspace: None,
            request: None,
        }
    }

    /// Writes it into the sandbox's directory, whole or not at all.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let passing = directory.join(PASSING);
        let bytes = serde_json::to_vec(self).map_err(io::Error::other)?;
        let mut file = File::create(&passing)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&passing, directory.join(NAME))?;
        File::open(directory)?.sync_all()
    }

    /// Reads it from a sandbox's directory.
    ///
    /// # Errors
    /// `NotFound` where there is none; `InvalidData` where it is not a record of this version, or
    /// of another sandbox.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let mut bytes = Vec::new();
        File::open(directory.join(NAME))?.take(MAX_BYTES).read_to_end(&mut bytes)?;
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let record: Self =
            serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        if record.version != VERSION {
            return Err(invalid(format!("its version is {}", record.version)));
        }
        if directory.file_name().is_none_or(|name| name != record.id.as_str()) {
            return Err(invalid(format!("it is of sandbox {}", record.id)));
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_anything_else_is_not() {
        let base = tempfile::tempdir().unwrap();
        let directory = base.path().join("abc");
        fs::create_dir(&directory).unwrap();
        assert_eq!(Record::read(&directory).unwrap_err().kind(), io::ErrorKind::NotFound);
        let shape = MachineShape { vcpus: 1, memory_mib: 128 };
        let mut record = Record::new("abc", "py:3.12", Digest::of(b"x"), shape);
        record.request = Some(("key".to_owned(), Digest::of(b"request")));
        record.write(&directory).unwrap();
        assert_eq!(Record::read(&directory).unwrap(), record);
        let whole = fs::read(directory.join(NAME)).unwrap();
        fs::write(directory.join(NAME), &whole[..whole.len() / 2]).unwrap();
        assert_eq!(Record::read(&directory).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let other = base.path().join("def");
        fs::create_dir(&other).unwrap();
        fs::write(other.join(NAME), &whole).unwrap();
        assert!(Record::read(&other).unwrap_err().to_string().contains("abc"));
    }
}
