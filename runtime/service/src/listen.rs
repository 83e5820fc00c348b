//! Where callers come in, and who they are: the peer's user on a unix socket, the holder of a key
//! on TCP.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parbake_cache::Digest;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use crate::problem::{Kind, Problem};

/// Connections served at a time, on each listener.
const MAX_CONNECTIONS: usize = 1024;
/// How long a caller may take to send a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest head.
const MAX_HEAD: usize = 64 << 10;
/// How long to wait when a connection cannot be accepted for want of descriptors or memory.
const BREATH: Duration = Duration::from_millis(100);

/// Who asks; every handler is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor(pub String);

/// Keys of callers over TCP: one `NAME:KEY` a line. Kept hashed.
#[derive(Debug, Clone, Default)]
pub struct Keys(BTreeMap<Digest, String>);

/// What is wrong with a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It cannot be read.
    #[error("cannot read the key file {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others than its owner can read it.
    #[error("the key file {} can be read by others; chmod 600 it", .0.display())]
    Open(PathBuf),
    /// A line is no key.
    #[error("{}:{line}: a line is NAME:KEY, with a key of at least 16 characters", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// There is none.
    #[error("the key file {} has no key in it", .0.display())]
    Empty(PathBuf),
}

impl Keys {
    /// Reads a key file. Empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// See [`KeysError`].
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let failed = |source| KeysError::File { path: path.to_owned(), source };
        let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(KeysError::Open(path.to_owned()));
        }
        let text = fs::read_to_string(path).map_err(failed)?;
        let mut keys = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match line.split_once(':') {
                Some((name, key)) if !name.is_empty() && key.len() >= 16 => {
                    keys.insert(Digest::of(key.as_bytes()), name.to_owned());
                }
                _ => return Err(KeysError::Line { path: path.to_owned(), line: number + 1 }),
            }
        }
        if keys.is_empty() {
            return Err(KeysError::Empty(path.to_owned()));
        }
        Ok(Self(keys))
    }

    /// Whose key a request carries. What is compared are hashes, so that how long it takes tells
    /// nothing about the keys.
    fn holder(&self, request: &Request) -> Option<&str> {
        let header = request.headers().get(AUTHORIZATION)?.to_str().ok()?;
        let (scheme, key) = header.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        self.0.get(&Digest::of(key.trim().as_bytes())).map(String::as_str)
    }
}

async fn need_key(keys: Arc<Keys>, mut request: Request, next: Next) -> Response {
    let Some(name) = keys.holder(&request).map(|name| format!("key:{name}")) else {
        let problem = Problem::new(Kind::Unauthorized, "a valid key is wanted")
            .hint("Authorization: Bearer KEY (--api-key-file, PARBAKED_API_KEY)");
        return problem.into_response();
    };
    request.extensions_mut().insert(Actor(name));
    next.run(request).await
}

/// Makes a unix socket at `path`, in place of one that nobody serves any more.
///
/// # Errors
/// `AddrInUse` where somebody does, or where something else lies there.
pub fn bind_unix(path: &Path, mode: u32) -> io::Result<std::os::unix::net::UnixListener> {
    if let Ok(meta) = fs::symlink_metadata(path) {
        let alive = std::os::unix::net::UnixStream::connect(path).is_ok();
        if alive || !meta.file_type().is_socket() {
            let why = format!("{} is in use", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        fs::remove_file(path)?;
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    // Made under another name: nobody can connect before the mode is right.
    let passing = path.with_extension(format!("new-{}", std::process::id()));
    let listener = std::os::unix::net::UnixListener::bind(&passing)?;
    fs::set_permissions(&passing, fs::Permissions::from_mode(mode))?;
    fs::rename(&passing, path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves a unix socket for ever.
///
/// # Errors
/// The listener is not usable.
pub async fn serve_unix(listener: std::os::unix::net::UnixListener, app: Router) -> io::Result<()> {
    let listener = UnixListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(BREATH).await;
            continue;
        };
        // The kernel's word; a peer that has gone already is nobody.
        let Ok(peer) = stream.peer_cred() else { continue };
        let app = app.clone().layer(axum::Extension(Actor(format!("uid:{}", peer.uid()))));
        tokio::spawn(async move {
            converse(stream, app).await;
            drop(place);
        });
    }
}

/// Serves a TCP address for ever, for holders of keys.
///
/// # Errors
/// The listener is not usable.
pub async fn serve_tcp(
    listener: std::net::TcpListener,
    app: Router,
    keys: Arc<Keys>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let app = app.layer(middleware::from_fn(move |request, next| {
        need_key(Arc::clone(&keys), request, next)
    }));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(BREATH).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let app = app.clone();
        tokio::spawn(async move {
            converse(stream, app).await;
            drop(place);
        });
    }
}

async fn converse<S>(stream: S, app: Router)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    // What goes wrong on a connection is for its other end to know.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app))
        .with_upgrades()
        .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_files_are_read_strictly() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys");
        let write = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            Keys::read(&path)
        };
        let good = "# ours\n\nci:0123456789abcdef\nops:fedcba9876543210:x\n";
        assert_eq!(write(good, 0o600).unwrap().0.len(), 2);
        assert!(matches!(write(good, 0o640), Err(KeysError::Open(_))));
        assert!(matches!(write("ci:short\n", 0o600), Err(KeysError::Line { line: 1, .. })));
        assert!(matches!(write("0123456789abcdef\n", 0o600), Err(KeysError::Line { .. })));
        assert!(matches!(write("# none\n", 0o600), Err(KeysError::Empty(_))));
        let shown = format!("{:?}", write(good, 0o600).unwrap());
        assert!(!shown.contains("0123456789abcdef"), "{shown}");
    }

    #[test]
    fn a_socket_in_use_is_left_alone_and_a_dead_one_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sub/parbake.sock");
        let first = bind_unix(&path, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(bind_unix(&path, 0o600).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        bind_unix(&path, 0o660).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "a file of somebody's").unwrap();
        assert!(bind_unix(&path, 0o600).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "a file of somebody's");
    }
}
