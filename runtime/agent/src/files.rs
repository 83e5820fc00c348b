//! Files in and out.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parbake_protocol::agent::{
    DATA_CHUNK, Failure, FailureKind, FileInfo, Frame, FrameError, GetRequest, PutRequest, Reply,
};

use crate::connection::{Connection, failure};
use crate::users::{self, User};

/// How long a client may leave a transfer waiting.
const IDLE: Duration = Duration::from_secs(300);

/// Distinguishes files that are being written at the same time.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// An absolute path without NUL bytes.
///
/// # Errors
/// Anything else.
pub fn path(bytes: &[u8]) -> Result<&Path, Failure> {
    if !bytes.starts_with(b"/") || bytes.contains(&0) {
        let shown = String::from_utf8_lossy(bytes);
        return Err(failure(FailureKind::BadRequest, format!("{shown:?} is no absolute path")));
    }
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Receives a file under a passing name and gives it its own once complete.
///
/// # Errors
/// The stream's; what went wrong in the guest is the inner result.
pub fn put(
    client: &mut Connection,
    request: &PutRequest,
) -> Result<Result<Reply, Failure>, FrameError> {
    let mut upload = match Upload::begin(request) {
        Ok(upload) => upload,
        Err(failed) => return Ok(Err(failed)),
    };
    loop {
        match client.receive(Some(IDLE))? {
            Some(Frame::Data(data)) => {
                if let Err(e) = upload.write(&data) {
                    return Ok(Err(upload.failed("write", &e)));
                }
            }
            Some(Frame::DataEnd) => return Ok(upload.complete()),
            Some(_) => return Err(io::Error::other("expected file data").into()),
            None => return Err(FrameError::Truncated),
        }
    }
}

struct Upload<'a> {
    target: &'a Path,
    passing: PathBuf,
    file: File,
    bytes: u64,
    complete: bool,
}

impl<'a> Upload<'a> {
    fn begin(request: &'a PutRequest) -> Result<Self, Failure> {
        let target = path(&request.path)?;
        let error = |e: &io::Error| {
            failure(FailureKind::File, format!("cannot write {}: {e}", target.display()))
        };
        let (Some(parent), Some(_)) = (target.parent(), target.file_name()) else {
            return Err(failure(FailureKind::BadRequest, "the path names no file"));
        };
        let owner = users::resolve(&request.owner, "/".as_ref())?;
        if request.parents {
            make_parents(parent, &owner).map_err(|e| error(&e))?;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let passing = parent.join(format!(".parbake-put-{}-{number}", std::process::id()));
        let file = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&passing)
            .map_err(|e| error(&e))?;
        let upload = Self { target, passing, file, bytes: 0, complete: false };
        // Owner first: a change of owner clears the set-id bits.
        fchown(&upload.file, Some(owner.uid), Some(owner.gid)).map_err(|e| error(&e))?;
        let mode = fs::Permissions::from_mode(request.mode & 0o7777);
        upload.file.set_permissions(mode).map_err(|e| error(&e))?;
        Ok(upload)
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        self.file.write_all(data)?;
        self.bytes += data.len() as u64;
        Ok(())
    }

    fn complete(mut self) -> Result<Reply, Failure> {
        fs::rename(&self.passing, self.target).map_err(|e| self.failed("replace", &e))?;
        self.complete = true;
        Ok(Reply::Stored { bytes: self.bytes })
    }

    fn failed(&self, verb: &str, error: &io::Error) -> Failure {
        let target = self.target.display();
        failure(FailureKind::File, format!("cannot {verb} {target}: {error}"))
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.complete {
            let _ = fs::remove_file(&self.passing);
        }
    }
}

fn make_parents(directory: &Path, owner: &User) -> io::Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    if let Some(parent) = directory.parent() {
        make_parents(parent, owner)?;
    }
    fs::create_dir(directory)?;
    chown(directory, Some(owner.uid), Some(owner.gid))
}

/// Sends a regular file.
///
/// # Errors
/// The stream's. What goes wrong in the guest is told the client.
pub fn get(client: &mut Connection, request: &GetRequest) -> Result<(), FrameError> {
    let (mut file, info) = match open(request) {
        Ok(opened) => opened,
        Err(failed) => return client.reply(Err(failed)),
    };
    client.reply(Ok(Reply::File(info)))?;
    let mut chunk = vec![0; DATA_CHUNK];
    loop {
        match file.read(&mut chunk) {
            Ok(0) => return client.send(&Frame::DataEnd),
            Ok(n) => client.send(&Frame::Data(chunk.get(..n).unwrap_or_default().to_vec()))?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => {
                let message =
                    format!("cannot read {}: {e}", String::from_utf8_lossy(&request.path));
                return client.reply(Err(failure(FailureKind::File, message)));
            }
        }
    }
}

fn open(request: &GetRequest) -> Result<(File, FileInfo), Failure> {
    let path = path(&request.path)?;
    let error = |what: String| {
        failure(FailureKind::File, format!("cannot read {}: {what}", path.display()))
    };
    // Without waiting, so that a FIFO cannot hold the thread.
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|e| error(e.to_string()))?;
    let meta = file.metadata().map_err(|e| error(e.to_string()))?;
    if !meta.is_file() {
        return Err(error("not a regular file".to_owned()));
    }
    let info = FileInfo {
        size: meta.len(),
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        mtime: meta.mtime(),
    };
    Ok((file, info))
}
