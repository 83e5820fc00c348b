//! The lab's state directory: who holds it, and what is recorded there.
//!
//! ```text
//! STATE/           0700
//!   lock           flock: held while a lab is started, ended or looked at
//!   lab.json       0600: port, token, shape; written before anything is started
//!   initrd         0600: removed once the lab is up
//!   root.sock      file server of /          (unix socket)
//!   store.sock     file server of the store  (unix socket)
//!   serial.log qemu.log root.log store.log
//! ```
//! The directory may vanish or its contents be stale at any time: what runs is found by its
//! command line ([`super::process`]), never by a recorded process number.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::LabError;

/// Version of [`Record`].
const VERSION: u32 = 1;
/// Unix socket paths hold 107 bytes; ours add a file name.
const MAX_PATH: usize = 90;
/// How long another process may take to start or end the lab.
const LOCK_TIMEOUT: Duration = Duration::from_secs(180);

/// What is known about a lab that was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Record {
    pub version: u32,
    /// TCP port on 127.0.0.1.
    pub port: u16,
    /// What a client must present: 64 hexadecimal digits.
    pub token: String,
    pub store: PathBuf,
    pub memory_mib: u32,
    pub vcpus: u8,
    /// Seconds since 1970.
    pub started: u64,
}

/// The directory.
#[derive(Debug, Clone)]
pub(super) struct StateDir {
    path: PathBuf,
}

/// Held while the lab's state may change.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl StateDir {
    /// Opens the directory, making it when it is not there.
    pub fn open(path: &Path) -> Result<Self, LabError> {
        // A comma would end a path among the emulator's options.
        let comma = path.as_os_str().as_encoded_bytes().contains(&b',');
        if !path.is_absolute() || path.as_os_str().len() > MAX_PATH || comma {
            return Err(LabError::StatePath { path: path.to_owned(), limit: MAX_PATH });
        }
        let error = |source| LabError::State { path: path.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(error)?;
        // The token is in it: nobody else may own it or look into it.
        let meta = fs::symlink_metadata(path).map_err(error)?;
        let own = rustix::process::geteuid().as_raw();
        if !meta.is_dir() || meta.uid() != own || meta.mode() & 0o077 != 0 {
            return Err(LabError::StateNotOurs { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn error(&self, name: &str) -> impl FnOnce(io::Error) -> LabError {
        let path = self.file(name);
        move |source| LabError::State { path, source }
    }

    /// Waits until no other process starts or ends this lab.
    pub fn lock(&self) -> Result<Lock, LabError> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            // Whoever ends a lab removes the directory: each try opens what is there now.
            Self::open(&self.path)?;
            let mut options = File::options();
            let file = options.create(true).truncate(false).write(true).mode(0o600);
            let path = self.file("lock");
            match file.open(&path).and_then(|file| {
                flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                let (held, named) = (file.metadata()?.ino(), fs::metadata(&path)?.ino());
                if held == named { Ok(file) } else { Err(io::ErrorKind::NotFound.into()) }
            }) {
                Ok(file) => return Ok(Lock { _file: file }),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::Interrupted
                    | io::ErrorKind::NotFound => {}
                    _ => return Err(self.error("lock")(error)),
                },
            }
            if Instant::now() > deadline {
                return Err(LabError::Busy { path: self.file("lock") });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The record; `None` when there is none or it is unreadable, which is the same as no lab.
    pub fn read(&self) -> Option<Record> {
        let mut text = Vec::new();
        File::open(self.file("lab.json")).ok()?.take(64 << 10).read_to_end(&mut text).ok()?;
        let record: Record = serde_json::from_slice(&text).ok()?;
        (record.version == VERSION).then_some(record)
    }

    pub fn write(&self, record: &Record) -> Result<(), LabError> {
        let text = serde_json::to_vec_pretty(record).map_err(io::Error::from);
        self.write_private("lab.json", &text.map_err(self.error("lab.json"))?)
    }

    /// Writes a file that only we may read.
    pub fn write_private(&self, name: &str, bytes: &[u8]) -> Result<(), LabError> {
        let _ = fs::remove_file(self.file(name));
        let mut options = File::options();
        let file = options.create_new(true).write(true).mode(0o600).open(self.file(name));
        file.and_then(|mut file| file.write_all(bytes)).map_err(self.error(name))
    }

    /// Creates an empty log.
    pub fn log(&self, name: &str) -> Result<File, LabError> {
        let mut options = File::options();
        let file = options.create(true).truncate(true).write(true).mode(0o600);
        file.open(self.file(name)).map_err(self.error(name))
    }

    /// Removes everything but the logs, which may tell why a lab ended.
    pub fn clear(&self) {
        for name in ["lab.json", "initrd", "root.sock", "store.sock"] {
            let _ = fs::remove_file(self.file(name));
        }
    }

    /// Removes the directory, while the lock is held.
    pub fn remove(&self, _lock: Lock) {
        self.clear();
        for name in ["serial.log", "qemu.log", "root.log", "store.log", "lock"] {
            let _ = fs::remove_file(self.file(name));
        }
        // Somebody may be making a new lab here by now; then it stays.
        let _ = fs::remove_dir(&self.path);
    }
}

impl Record {
    pub fn new(port: u16, token: String, config: &super::LabConfig) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            version: VERSION,
            port,
            token,
            store: config.store.clone(),
            memory_mib: config.memory_mib,
            vcpus: config.vcpus,
            started: now.map_or(0, |since| since.as_secs()),
        }
    }
}

/// 32 random bytes in hexadecimal digits.
pub(super) fn new_token() -> io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
