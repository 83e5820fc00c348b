//! Images in a registry. Blobs stream from the connection straight into the decoder; nothing is
//! downloaded first.
//!
//! The client library is asynchronous and the builder is not: one thread runs a small runtime with
//! the connections, and readers on other threads are fed through bounded channels. A reader that
//! is slow stops its connection by the channel's bound; a connection that breaks meanwhile is
//! taken up again where it ended.
//!
//! ```text
//! reader (Blobs::open) ◄── bounded channel ◄── task: GET blob, resume on failure   ┐ one thread,
//! Blobs::document ──► command ──────────────► task: GET manifest                   ┘ one runtime
//! ```

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use oci_client::client::{BlobResponse, Client, ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::secrets::RegistryAuth;
use oci_client::{Reference, RegistryOperation};
use tokio::sync::mpsc;

use super::error::ImageError;
use super::manifest::DOCUMENT_MAX;
use super::select::{BlobPointer, Blobs, Place, Selector, image};
use super::{Image, ImageOptions, ImageSource, credentials};

const ACCEPTED: &[&str] = &[
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// Pieces of a blob that wait for their reader; each is what one read of a connection gave.
const PIECES: usize = 32;
/// Failures in a row, without a byte between them, until a blob is given up.
const ATTEMPTS: u32 = 5;
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

enum Command {
    Manifest { reference: Box<Reference>, reply: std::sync::mpsc::Sender<io::Result<Vec<u8>>> },
    Blob { digest: String, size: u64, sink: mpsc::Sender<io::Result<Vec<u8>>> },
}

/// A registry's repository.
struct Repository {
    reference: Reference,
    commands: mpsc::UnboundedSender<Command>,
}

/// Opens an image of a registry.
pub(super) fn open(
    text: &str,
    source: &ImageSource,
    options: &ImageOptions,
) -> Result<Image, ImageError> {
    let failed = |problem: String| ImageError::Registry { reference: text.to_owned(), problem };
    let reference: Reference =
        text.parse().map_err(|error| failed(format!("not a reference to an image: {error}")))?;
    let hosts = [reference.registry(), reference.resolve_registry()];
    let authfile = options.registry.authfile.as_deref();
    let found = credentials::find(authfile, &hosts, reference.repository());
    let auth = match found.map_err(|error| failed(error.to_string()))? {
        Some(found) => RegistryAuth::Basic(found.user, found.secret),
        None => RegistryAuth::Anonymous,
    };
    let anonymous = auth == RegistryAuth::Anonymous;
    let repository = Repository::connect(reference.clone(), auth, &options.registry.insecure)
        .map_err(|error| failed(error.to_string()))?;
    let document = repository.manifest(&reference).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied if anonymous => {
                "; no credentials were found for it (docker login, podman login, or an auth file)"
            }
            io::ErrorKind::PermissionDenied => "; the credentials found for it were refused",
            _ => "",
        };
        failed(format!("{error}{hint}"))
    })?;
    if document.len() as u64 > DOCUMENT_MAX {
        return Err(ImageError::TooLarge { what: text.to_owned(), limit: DOCUMENT_MAX });
    }
    let blobs: Arc<dyn Blobs> = Arc::new(repository);
    let selector = Selector::new(&*blobs, &options.platform, text.to_owned());
    image(source, &blobs, selector.select_document(&document)?)
}

impl Repository {
    fn connect(reference: Reference, auth: RegistryAuth, insecure: &[String]) -> io::Result<Self> {
        // Whoever came first has chosen; any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let registry = reference.resolve_registry().to_owned();
        let mut plain = insecure.to_vec();
        if is_loopback(&registry) {
            plain.push(registry.clone());
        }
        let config = ClientConfig {
            protocol: ClientProtocol::HttpsExcept(plain),
            read_timeout: Some(READ_TIMEOUT),
            connect_timeout: Some(CONNECT_TIMEOUT),
            user_agent: concat!("parbake/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (commands, mut received) = mpsc::unbounded_channel();
        let target = reference.clone();
        std::thread::Builder::new().name("registry".to_owned()).spawn(move || {
            runtime.block_on(async move {
                let client = Client::new(config);
                client.store_auth_if_needed(&registry, &auth).await;
                while let Some(command) = received.recv().await {
                    let (client, target, auth) = (client.clone(), target.clone(), auth.clone());
                    tokio::spawn(async move {
                        match command {
                            Command::Manifest { reference, reply } => {
                                // A caller that has gone needs no answer.
                                let _ = reply.send(manifest(&client, &reference, &auth).await);
                            }
                            Command::Blob { digest, size, sink } => {
                                blob(&client, &target, &auth, &digest, size, &sink).await;
                            }
                        }
                    });
                }
            });
        })?;
        Ok(Self { reference, commands })
    }

    fn manifest(&self, reference: &Reference) -> io::Result<Vec<u8>> {
        let (reply, answer) = std::sync::mpsc::channel();
        let command = Command::Manifest { reference: Box::new(reference.clone()), reply };
        self.commands.send(command).map_err(|_| gone())?;
        answer.recv().map_err(|_| gone())?
    }
}

fn gone() -> io::Error {
    io::Error::other("the connection's thread ended")
}

impl Blobs for Repository {
    fn open(&self, blob: &BlobPointer) -> io::Result<Box<dyn Read + Send>> {
        let (sink, pieces) = mpsc::channel(PIECES);
        let command = Command::Blob { digest: blob.digest.to_string(), size: blob.size, sink };
        self.commands.send(command).map_err(|_| gone())?;
        let commands = self.commands.clone();
        Ok(Box::new(BlobReader {
            pieces,
            piece: Vec::new(),
            at: 0,
            ended: false,
            _alive: commands,
        }))
    }

    fn document(&self, blob: &BlobPointer, place: Place) -> io::Result<Vec<u8>> {
        match place {
            Place::Manifests => {
                self.manifest(&self.reference.clone_with_digest(blob.digest.to_string()))
            }
            Place::Blobs => {
                let mut bytes = Vec::new();
                self.open(blob)?.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes)?;
                Ok(bytes)
            }
        }
    }

    fn size(&self, _: &BlobPointer) -> Option<io::Result<u64>> {
        None
    }
}

/// A blob as it arrives. Holds the connection's thread alive.
struct BlobReader {
    pieces: mpsc::Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
    ended: bool,
    _alive: mpsc::UnboundedSender<Command>,
}

impl Read for BlobReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(piece) => {
                    self.piece = piece?;
                    self.at = 0;
                }
                None => self.ended = true,
            }
        }
        let length = buffer.len().min(self.piece.len() - self.at);
        buffer[..length].copy_from_slice(&self.piece[self.at..self.at + length]);
        self.at += length;
        Ok(length)
    }
}

async fn manifest(
    client: &Client,
    reference: &Reference,
    auth: &RegistryAuth,
) -> io::Result<Vec<u8>> {
    let mut failures = 0;
    loop {
        match client.pull_manifest_raw(reference, auth, ACCEPTED).await {
            Ok((bytes, _)) => return Ok(bytes.to_vec()),
            Err(error) => {
                failures += 1;
                pause(error, failures).await?;
            }
        }
    }
}

/// Sends a blob to its reader, going on from where a connection broke.
async fn blob(
    client: &Client,
    reference: &Reference,
    auth: &RegistryAuth,
    digest: &str,
    size: u64,
    sink: &mpsc::Sender<io::Result<Vec<u8>>>,
) {
    let mut sent = 0u64;
    let mut failures = 0;
    loop {
        let before = sent;
        let result = blob_from(client, reference, digest, &mut sent, sink).await;
        if sent > before {
            failures = 0;
        }
        let error = match result {
            Ok(()) if sent >= size || sink.is_closed() => return,
            Ok(()) => OciDistributionError::IoError(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => error,
        };
        failures += 1;
        if matches!(error, OciDistributionError::UnauthorizedError { .. }) && failures < 2 {
            // A token that ran out during a long blob is asked for again, once.
            let _ = client.auth(reference, auth, RegistryOperation::Pull).await;
            continue;
        }
        if let Err(error) = pause(error, failures).await {
            // A reader that has gone needs no reason.
            let _ = sink.send(Err(error)).await;
            return;
        }
    }
}

async fn blob_from(
    client: &Client,
    reference: &Reference,
    digest: &str,
    sent: &mut u64,
    sink: &mpsc::Sender<io::Result<Vec<u8>>>,
) -> Result<(), OciDistributionError> {
    // The first request is a plain one: some registries answer ranges badly.
    let (mut stream, mut skip) = if *sent == 0 {
        (client.pull_blob_stream(reference, digest).await?, 0)
    } else {
        match client.pull_blob_stream_partial(reference, digest, *sent, None).await? {
            BlobResponse::Partial(stream) => (stream, 0),
            // It does not know ranges and begins again.
            BlobResponse::Full(stream) => (stream, *sent),
        }
    };
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        let length = piece.len() as u64;
        let from = usize::try_from(skip.min(length)).unwrap_or(piece.len());
        skip -= from as u64;
        if from < piece.len() {
            let piece = piece[from..].to_vec();
            let length = piece.len() as u64;
            if sink.send(Ok(piece)).await.is_err() {
                return Ok(());
            }
            *sent += length;
        }
    }
    Ok(())
}

/// Waits before the next attempt, or gives the error back if there is no sense in one.
async fn pause(error: OciDistributionError, failures: u32) -> io::Result<()> {
    let transient = match &error {
        OciDistributionError::RequestError(_) | OciDistributionError::IoError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code == 429 || *code >= 500,
        _ => false,
    };
    if transient && failures < ATTEMPTS {
        tokio::time::sleep(Duration::from_millis(200 << failures)).await;
        return Ok(());
    }
    let kind = match &error {
        OciDistributionError::UnauthorizedError { .. }
        | OciDistributionError::AuthenticationFailure(_) => io::ErrorKind::PermissionDenied,
        OciDistributionError::ImageManifestNotFoundError(_) => io::ErrorKind::NotFound,
        OciDistributionError::ServerError { code: 404, .. } => io::ErrorKind::NotFound,
        OciDistributionError::ServerError { code: 401 | 403, .. } => {
            io::ErrorKind::PermissionDenied
        }
        _ => io::ErrorKind::Other,
    };
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    Err(io::Error::new(kind, text))
}

/// Whether `host[:port]` is this machine itself.
fn is_loopback(registry: &str) -> bool {
    let host = match registry.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => registry,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_hosts() {
        for host in ["localhost", "localhost:5000", "127.0.0.1:1", "127.9.9.9", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "128.0.0.1:80", "example:5000", "0.0.0.0:1"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
