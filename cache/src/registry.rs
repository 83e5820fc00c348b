//! Talking to a registry: the OCI distribution protocol, as much of it as templates need.
//!
//! The client is small and blocking on purpose: there are a handful of connections, each in a
//! thread that decompresses what it reads, so an asynchronous runtime would only add weight. What
//! a general client leaves to chance is settled here: every answer is bounded, redirects are
//! followed by hand, and credentials go where they belong and nowhere else.
//!
//! # Why not a general client
//! `oci-client` 0.18 was tried against scripted servers. Told by a registry to fetch a token from a
//! plain-HTTP address on another host, it sent the user's password there, and it has no hook to
//! refuse; and it read a manifest of 200 MiB into memory. By its source, it has no identity tokens
//! (`RegistryAuth`), asks for a token for the target repository only when it mounts from another
//! (`mount_blob`, `_auth`), and its errors carry no headers, so that `Retry-After` is lost. Its range
//! reads, and its care not to show credentials to an upload location elsewhere, were in order.
//!
//! # Where credentials go
//! - To the registry itself, and to the token service it names.
//! - Over TLS; over plain HTTP only to loopback or to a host the user has named for that.
//! - Not along redirects to another host, scheme or port, and not to upload locations there.
//!
//! # Retries
//! Refused connections, timeouts, 408, 429 and 5xx are tried again with growing pauses, or after
//! what `Retry-After` says. A 401 fetches a new token once. Anything else is an answer.

use std::collections::HashMap;
use std::fmt::Display;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use ureq::http::{Method, Response, header};
use ureq::{Agent, Body, SendBody};

use crate::Digest;
use crate::artifact::{Descriptor, INDEX_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES};
use crate::conversation::{is_transient, no_body};
use crate::credentials::{Credential, CredentialError, Credentials};
use crate::install::BlobSource;
use crate::registries::{Place, Registries};
use crate::trust::Trust;

/// More than any token or error answer has.
pub(crate) const MAX_ANSWER_BYTES: u64 = 1024 * 1024;

/// How to reach registries.
#[derive(Debug, Clone)]
pub struct RegistryOptions {
    /// Where credentials come from.
    pub credentials: Credentials,
    /// Hosts (with port) that may be spoken to without TLS, beyond loopback.
    pub plain_http: Vec<String>,
    /// How often a request is tried again.
    pub retries: u32,
    /// The first pause before trying again.
    pub pause: Duration,
    /// How many requests run side by side.
    pub parallel: usize,
    /// The longest silence in the middle of an answer.
    pub stall: Duration,
    /// What `registries.conf` says: mirrors, other places, registries that are blocked.
    pub registries: Registries,
    /// What must be known of a template before it is taken in.
    pub trust: Trust,
    /// Whether to stop: asked between requests and while bytes flow.
    pub cancelled: Option<fn() -> bool>,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self {
            credentials: Credentials::anonymous(),
            plain_http: Vec::new(),
            retries: 5,
            pause: Duration::from_millis(250),
            parallel: 4,
            stall: Duration::from_secs(30),
            registries: Registries::default(),
            trust: Trust::default(),
            cancelled: None,
        }
    }
}

impl RegistryOptions {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.is_some_and(|cancelled| cancelled())
    }
}

/// What may be done with a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reading.
    Pull,
    /// Reading and writing.
    Push,
}

/// One repository of one registry.
#[derive(Debug)]
pub struct Repository {
    pub(crate) agent: Agent,
    pub(crate) options: RegistryOptions,
    pub(crate) host: String,
    pub(crate) repository: String,
    pub(crate) base: String,
    pub(crate) access: Access,
    /// Whether the registry is spoken to without TLS.
    pub(crate) plain: bool,
    /// The current `Authorization` by scope.
    pub(crate) authorization: Mutex<HashMap<String, String>>,
    pub(crate) credential: Option<Credential>,
}

/// A registry did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Nobody there, or the line is bad.
    #[error("cannot reach {host}: {what}")]
    Unreachable {
        /// The host.
        host: String,
        /// What went wrong.
        what: String,
    },
    /// Without credentials, or with the wrong ones.
    #[error("{host} wants other credentials for {repository}; try: parbake login {host}")]
    Unauthorized {
        /// The registry.
        host: String,
        /// The repository.
        repository: String,
    },
    /// With the right credentials, but not allowed to.
    #[error("{host} does not allow this in {repository}{detail}")]
    Denied {
        /// The registry.
        host: String,
        /// The repository.
        repository: String,
        /// What it says, after a colon.
        detail: String,
    },
    /// It has no such thing.
    #[error("{host} has no {what}")]
    NotFound {
        /// The registry.
        host: String,
        /// What was asked for.
        what: String,
    },
    /// Any other answer.
    #[error("{host} answered {status} to {what}{detail}")]
    Status {
        /// The registry.
        host: String,
        /// The HTTP status.
        status: u16,
        /// What was asked for.
        what: String,
        /// What it says, after a colon.
        detail: String,
    },
    /// An answer that breaks the protocol, or a bound.
    #[error("{host} gave an answer that cannot be used: {what}")]
    Protocol {
        /// The registry.
        host: String,
        /// What is wrong with it.
        what: String,
    },
    /// Credentials would have to go over an open line.
    #[error("{host} is not spoken to without TLS; if it must be, name it with --plain-http")]
    Plain {
        /// Where they would have gone.
        host: String,
    },
    /// The user's own configuration forbids it.
    #[error("{host}/{repository} is blocked by {file}", file = file.display())]
    Blocked {
        /// The registry.
        host: String,
        /// The repository.
        repository: String,
        /// The file that says so.
        file: PathBuf,
    },
    /// The caller wanted to stop.
    #[error("interrupted")]
    Interrupted,
    /// Credentials could not be read.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
    /// A local file could not be read.
    #[error("cannot read {what}: {source}")]
    Local {
        /// Which.
        what: String,
        /// Why.
        source: io::Error,
    },
}

/// A manifest or index, as the registry has it.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// Its descriptor, of the bytes that came.
    pub descriptor: Descriptor,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl RegistryError {
    /// Whether the thing asked for is not there, rather than out of reach.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

impl From<RegistryError> for io::Error {
    fn from(error: RegistryError) -> Self {
        let kind = match &error {
            RegistryError::NotFound { .. } => io::ErrorKind::NotFound,
            RegistryError::Unauthorized { .. } | RegistryError::Denied { .. } => {
                io::ErrorKind::PermissionDenied
            }
            // Not the kind of the same name: whoever reads would try again.
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

impl Repository {
    /// Prepares to use `repository` on `host` (with port, if any). Says nothing to a remote host
    /// yet; on loopback, finds out whether the registry speaks TLS.
    ///
    /// # Errors
    /// When credentials cannot be read.
    pub fn open(
        options: &RegistryOptions,
        host: &str,
        repository: &str,
        access: Access,
    ) -> Result<Self, RegistryError> {
        let insecure = options.registries.is_insecure(host, repository);
        Self::open_place(options, &Place::new(host, repository, insecure), access)
    }

    /// The same for a place that the configuration led to.
    pub(crate) fn open_place(
        options: &RegistryOptions,
        place: &Place,
        access: Access,
    ) -> Result<Self, RegistryError> {
        let Place { host, repository, insecure } = place;
        let host = host.as_str();
        let loopback = is_loopback(host);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("parbake/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .max_idle_connections_per_host(options.parallel)
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(Duration::from_secs(120)))
            .timeout_per_read(Some(options.stall))
            .timeout_per_write(Some(options.stall))
            .tls_config(
                ureq::tls::TlsConfig::builder()
                    .root_certs(ureq::tls::RootCerts::PlatformVerifier)
                    .build(),
            );
        if loopback {
            config = config.proxy(None);
        }
        let agent: Agent = config.build().into();
        let named = options.plain_http.iter().any(|plain| plain == host);
        let plain = (loopback || named || *insecure) && !speaks_tls(&agent, host);
        let scheme = if plain { "http" } else { "https" };
        // The name in references and the host behind it differ for one registry only.
        let authority = if host == "docker.io" { "registry-1.docker.io" } else { host };
        Ok(Self {
            credential: options.credentials.lookup(host, repository)?,
            agent,
            options: options.clone(),
            host: host.to_owned(),
            repository: repository.clone(),
            base: format!("{scheme}://{authority}"),
            access,
            plain,
            authorization: Mutex::default(),
        })
    }

    /// The registry's host and port.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository's name.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Fetches a manifest or index by tag or digest.
    ///
    /// # Errors
    /// When it is not there or too large, or the bytes are not what was asked for.
    pub fn manifest(&self, reference: &str) -> Result<Fetched, RegistryError> {
        let (media_type, bytes) = self.document(reference)?;
        let digest = Digest::of(&bytes);
        if reference.contains(':') && reference != digest.to_string() {
            let what = format!("{reference} came with bytes that hash to {digest}");
            return Err(RegistryError::Protocol { host: self.host.clone(), what });
        }
        let descriptor = Descriptor::new(&media_type, digest, bytes.len() as u64);
        Ok(Fetched { descriptor, bytes })
    }

    /// Fetches what a tag or a digest, of whatever algorithm, stands for: its media type and bytes.
    /// The bytes are not checked.
    ///
    /// # Errors
    /// When it is not there or too large.
    pub fn document(&self, reference: &str) -> Result<(String, Vec<u8>), RegistryError> {
        let path = format!("/v2/{}/manifests/{reference}", self.repository);
        let accept = [
            INDEX_TYPE,
            MANIFEST_TYPE,
            "application/vnd.docker.distribution.manifest.list.v2+json",
            "application/vnd.docker.distribution.manifest.v2+json",
        ];
        let headers = [("accept", accept.join(", "))];
        let response = self.request(&Method::GET, &path, &headers, None, None)?;
        let what = match reference.contains(':') {
            true => format!("{}@{reference}", self.repository),
            false => format!("{}:{reference}", self.repository),
        };
        let mut response = self.expect(response, &[200], &what)?;
        let bytes = self.read_bounded(response.body_mut(), MAX_MANIFEST_BYTES, &what)?;
        Ok((media_type(&response).unwrap_or(MANIFEST_TYPE.to_owned()), bytes))
    }

    /// Stores a manifest or index under a tag or its digest.
    ///
    /// # Errors
    /// When the registry refuses it.
    pub fn put_manifest(
        &self,
        reference: &str,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<(), RegistryError> {
        self.put_document(reference, media_type, bytes).map(drop)
    }

    /// The same; tells whether the registry has taken note of the manifest's subject by itself
    /// (OCI distribution specification, pushing manifests with subject).
    pub(crate) fn put_document(
        &self,
        reference: &str,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<bool, RegistryError> {
        let path = format!("/v2/{}/manifests/{reference}", self.repository);
        let owned = bytes.to_vec();
        let body = move || {
            let len = owned.len() as u64;
            Ok((SendBody::from_owned_reader(io::Cursor::new(owned.clone())), len))
        };
        let headers = [("content-type", media_type.to_owned())];
        // While another sends the same blobs or manifest, some registries do not find them for a
        // moment, though they have them (seen with docker-registry 2.8).
        let mut pauses = [100, 300, 900].into_iter();
        loop {
            let response = self.request(&Method::PUT, &path, &headers, Some(&body), None)?;
            match self.expect(response, &[200, 201, 202], "the manifest") {
                Ok(response) => return Ok(response.headers().contains_key("oci-subject")),
                Err(error) => match (&error, pauses.next()) {
                    (RegistryError::Status { detail, .. }, Some(pause))
                        if detail.contains("BLOB_UNKNOWN") =>
                    {
                        std::thread::sleep(std::time::Duration::from_millis(pause));
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    /// Whether the repository has the blob.
    ///
    /// # Errors
    /// When the registry cannot be asked.
    pub fn has_blob(&self, digest: &Digest) -> Result<bool, RegistryError> {
        let path = format!("/v2/{}/blobs/{digest}", self.repository);
        let response = self.request(&Method::HEAD, &path, &[], None, None)?;
        match response.status().as_u16() {
            404 => Ok(false),
            _ => self.expect(response, &[200, 204], "whether it has a blob").map(|_| true),
        }
    }

    /// Opens a range of a blob of `size` bytes, known by a digest of whatever algorithm; up to
    /// `u64::MAX` is all that comes. The bytes are not checked.
    ///
    /// # Errors
    /// When it is not there.
    pub fn blob(
        &self,
        digest: &dyn Display,
        range: std::ops::Range<u64>,
        size: u64,
    ) -> Result<impl Read + Send + use<>, RegistryError> {
        let path = format!("/v2/{}/blobs/{digest}", self.repository);
        let whole = range.start == 0 && range.end >= size;
        let mut headers = Vec::new();
        if !whole {
            let last = match range.end {
                u64::MAX => String::new(),
                end => (end.max(1) - 1).to_string(),
            };
            headers.push(("range", format!("bytes={}-{last}", range.start)));
        }
        let response = self.request(&Method::GET, &path, &headers, None, None)?;
        let what = format!("blob {digest} in {}", self.repository);
        let response = self.expect(response, &[200, 206], &what)?;
        let starts_at = match response.status().as_u16() {
            206 => content_range_start(&response).unwrap_or(range.start),
            // One that knows no ranges sends everything.
            _ => 0,
        };
        let skip = range.start.checked_sub(starts_at).ok_or_else(|| RegistryError::Protocol {
            host: self.host.clone(),
            what: format!("it sent {what} from {starts_at} instead of {}", range.start),
        })?;
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
        io::copy(&mut Read::take(&mut body, skip), &mut io::sink()).map_err(|error| {
            RegistryError::Unreachable { host: self.host.clone(), what: error.to_string() }
        })?;
        let cancelled = self.options.cancelled;
        Ok(Watched { inner: body.take(range.end - range.start), cancelled })
    }

    /// Takes a blob over from another repository of the same registry; `false` when that does not
    /// work and it must be sent.
    ///
    /// # Errors
    /// When the registry cannot be asked.
    pub fn mount(&self, digest: &Digest, from: &str) -> Result<bool, RegistryError> {
        let path = format!("/v2/{}/blobs/uploads/?mount={digest}&from={from}", self.repository);
        let scope = format!("repository:{from}:pull");
        let response = self.request(&Method::POST, &path, &[], Some(&no_body), Some(&scope))?;
        match response.status().as_u16() {
            201 => Ok(true),
            202 => {
                // An upload was begun instead, which nobody wants.
                if let Some(location) = self.location(&response) {
                    let _ = self.request(&Method::DELETE, &location, &[], None, None);
                }
                Ok(false)
            }
            // Some refuse where others would begin an upload.
            400..=499 => Ok(false),
            _ => self.expect(response, &[201], "taking over a blob").map(|_| true),
        }
    }

    /// Sends a blob. `open` is called afresh for each try.
    ///
    /// # Errors
    /// When the registry refuses it, or `open` fails.
    pub fn put_blob(
        &self,
        blob: &Descriptor,
        open: &(dyn Fn() -> io::Result<Box<dyn Read + Send>> + Sync),
    ) -> Result<(), RegistryError> {
        let what = format!("blob {}", blob.digest);
        let mut tries = 0;
        loop {
            let start = format!("/v2/{}/blobs/uploads/", self.repository);
            let response = self.request(&Method::POST, &start, &[], Some(&no_body), None)?;
            let response = self.expect(response, &[202], "beginning an upload")?;
            let location = self.location(&response).ok_or_else(|| RegistryError::Protocol {
                host: self.host.clone(),
                what: "it began an upload without saying where".to_owned(),
            })?;
            let separator = if location.contains('?') { '&' } else { '?' };
            let target = format!("{location}{separator}digest={}", blob.digest);
            let cancelled = self.options.cancelled;
            let body = || {
                let watched = Watched { inner: open()?, cancelled };
                Ok((SendBody::from_owned_reader(watched), blob.size))
            };
            let headers = [("content-type", "application/octet-stream".to_owned())];
            // An upload that broke cannot be sent to the same place again.
            let sent = self.once(&Method::PUT, &target, &headers, Some(&body), None);
            match sent {
                Ok(response) if !is_transient(response.status().as_u16()) => {
                    return self.expect(response, &[201, 204], &what).map(drop);
                }
                Ok(response) if tries >= self.options.retries => {
                    return self.expect(response, &[201, 204], &what).map(drop);
                }
                Err(error @ RegistryError::Unreachable { .. })
                    if tries >= self.options.retries && !self.options.is_cancelled() =>
                {
                    return Err(error);
                }
                Ok(response) => self.wait(tries, Some(&response))?,
                Err(RegistryError::Unreachable { .. }) if self.options.is_cancelled() => {
                    // Begun uploads are not worth keeping: what is complete is there already.
                    let _ = self.once(&Method::DELETE, &location, &[], None, None);
                    return Err(RegistryError::Interrupted);
                }
                Err(RegistryError::Unreachable { .. }) => self.wait(tries, None)?,
                Err(error) => return Err(error),
            }
            tries += 1;
        }
    }
}

impl BlobSource for Repository {
    fn open(
        &self,
        blob: &Descriptor,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>> {
        if matches!(blob.media_type.as_str(), INDEX_TYPE | MANIFEST_TYPE) {
            let fetched = self.manifest(&blob.digest.to_string())?;
            let mut bytes = io::Cursor::new(fetched.bytes);
            bytes.set_position(offset);
            return Ok(Box::new(bytes.take(len)));
        }
        Ok(Box::new(self.blob(&blob.digest, offset..offset.saturating_add(len), blob.size)?))
    }

    fn parallel(&self) -> usize {
        self.options.parallel.max(1)
    }
}

/// Bytes on their way, until the caller wants to stop.
struct Watched<R> {
    inner: R,
    cancelled: Option<fn() -> bool>,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.is_some_and(|cancelled| cancelled()) {
            return Err(RegistryError::Interrupted.into());
        }
        self.inner.read(buffer)
    }
}

/// The type an answer says it has, without parameters.
pub(crate) fn media_type(response: &Response<Body>) -> Option<String> {
    let value = response.headers().get(header::CONTENT_TYPE)?.to_str().ok()?;
    Some(value.split(';').next()?.trim().to_owned())
}

/// Whether `host[:port]` is this machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost"
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Asks without credentials whether the other side speaks TLS.
fn speaks_tls(agent: &Agent, host: &str) -> bool {
    agent.get(format!("https://{host}/v2/")).call().is_ok()
}

fn content_range_start(response: &Response<Body>) -> Option<u64> {
    let value = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    value.strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}
