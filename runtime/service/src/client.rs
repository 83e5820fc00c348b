//! The client's side of the API, for threads.

use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};

use crate::attach::{RemoteInput, RemoteOutput};
use crate::model::ExecRequest;
use crate::problem::{Problem, Refusal};
use crate::socket::Socket;
use crate::wire;

/// The most of an answer that is kept in memory.
const MAX_ANSWER: u64 = 64 << 20;
/// How much of a file is sent at a time.
const CHUNK: usize = 64 << 10;

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// Where a service listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A unix socket.
    Unix(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

impl std::str::FromStr for Endpoint {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("unix: wants a path".to_owned()),
            Some(path) => Ok(Self::Unix(path.into())),
            None if text.contains(':') => Ok(Self::Tcp(text.to_owned())),
            None => Err(format!("{text} is neither unix:PATH nor HOST:PORT")),
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

/// Why there was no answer, or none to be glad about.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("cannot reach parbaked at {endpoint}")]
    Connect {
        /// Where.
        endpoint: String,
        /// Why.
        source: io::Error,
    },
    /// The conversation failed.
    #[error("talking to parbaked")]
    Http(#[from] hyper::Error),
    /// This side failed.
    #[error(transparent)]
    Local(#[from] io::Error),
    /// The service refused.
    #[error("{0}")]
    Refused(Problem),
    /// The answer is none of its kind.
    #[error("parbaked answered {status} with something else than was expected")]
    Unexpected {
        /// The status.
        status: StatusCode,
    },
    /// No answer in time.
    #[error("no answer within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// More than was allowed.
    #[error("the answer has more than {0} bytes")]
    TooLarge(u64),
}

/// Talks to one service; one connection a request.
#[derive(Debug)]
pub struct Client {
    endpoint: Endpoint,
    key: Option<String>,
    runtime: Runtime,
}

impl Client {
    /// A client; connects when asked something.
    ///
    /// # Errors
    /// [`ClientError::Local`].
    pub fn new(endpoint: Endpoint, key: Option<String>) -> Result<Self, ClientError> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { endpoint, key, runtime })
    }

    /// Asks for a document.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.document(Method::GET, path, empty(), &[])
    }

    /// Sends a document and gets one back.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        headers: &[(&str, &str)],
    ) -> Result<T, ClientError> {
        self.document(Method::POST, path, json(body)?, headers)
    }

    /// Removes something.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.runtime.block_on(async {
            let response = self.send(Method::DELETE, path, empty(), &[]).await?;
            collect(response, MAX_ANSWER).await.map(drop)
        })
    }

    /// Sends a document and waits for the answer so long.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn post_within(
        &self,
        limit: Duration,
        path: &str,
        body: &impl Serialize,
        most: u64,
    ) -> Result<Vec<u8>, ClientError> {
        let body = json(body)?;
        self.runtime.block_on(async {
            let answer = async {
                let response = self.send(Method::POST, path, body, &[]).await?;
                collect(response, most).await
            };
            tokio::time::timeout(limit, answer).await.map_err(|_| ClientError::TimedOut(limit))?
        })
    }

    /// Asks for something long. The reader delivers it as it comes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn read(
        &self,
        method: Method,
        path: &str,
        body: Option<&[u8]>,
    ) -> Result<Long<'_>, ClientError> {
        let body = body.map_or_else(empty, |bytes| full(bytes.to_vec()));
        let response = self.runtime.block_on(async {
            let response = self.send(method, path, body, &[]).await?;
            refuse(response).await
        })?;
        Ok(Long { client: self, response, left: Bytes::new() })
    }

    /// Sends something long and gets a document back.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        mut data: impl Read + Send + 'static,
    ) -> Result<T, ClientError> {
        let (send, receive) = tokio::sync::mpsc::channel::<io::Result<Frame<Bytes>>>(4);
        std::thread::spawn(move || {
            let mut buffer = vec![0; CHUNK];
            loop {
                let piece = match data.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(count) => Ok(Frame::data(Bytes::copy_from_slice(&buffer[..count]))),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => Err(error),
                };
                let failed = piece.is_err();
                if send.blocking_send(piece).is_err() || failed {
                    return;
                }
            }
        });
        let pieces = futures_util::stream::unfold(receive, |mut receive| async move {
            receive.recv().await.map(|piece| (piece, receive))
        });
        let body = StreamBody::new(pieces).boxed_unsync();
        self.document(Method::PUT, path, body, &[])
    }

    /// Starts a command with its streams.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn exec(
        &self,
        path: &str,
        request: &ExecRequest,
    ) -> Result<(RemoteInput, RemoteOutput), ClientError> {
        let headers = [(CONNECTION.as_str(), "upgrade"), (UPGRADE.as_str(), wire::PROTOCOL)];
        let body = json(request)?;
        let (socket, rest) = self.runtime.block_on(async {
            let response = self.send(Method::POST, path, body, &headers).await?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                let status = refuse(response).await?.status();
                return Err(ClientError::Unexpected { status });
            }
            Ok(Socket::of(hyper::upgrade::on(response).await?)?)
        })?;
        Ok(RemoteOutput::over(socket, rest)?)
    }

    fn document<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Body,
        headers: &[(&str, &str)],
    ) -> Result<T, ClientError> {
        self.runtime.block_on(async {
            let response = self.send(method, path, body, headers).await?;
            let status = response.status();
            let bytes = collect(response, MAX_ANSWER).await?;
            serde_json::from_slice(&bytes).map_err(|_| ClientError::Unexpected { status })
        })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Body,
        headers: &[(&str, &str)],
    ) -> Result<Response<Incoming>, ClientError> {
        let mut sender = self.connect().await?;
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, "parbaked")
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(body).map_err(io::Error::other)?;
        Ok(sender.send_request(request).await?)
    }

    async fn connect(&self) -> Result<SendRequest<Body>, ClientError> {
        let failed = |source| ClientError::Connect { endpoint: self.endpoint.to_string(), source };
        match &self.endpoint {
            Endpoint::Unix(path) => {
                handshake(UnixStream::connect(path).await.map_err(failed)?).await
            }
            Endpoint::Tcp(address) => {
                handshake(TcpStream::connect(address).await.map_err(failed)?).await
            }
        }
    }
}

async fn handshake<S>(stream: S) -> Result<SendRequest<Body>, ClientError>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Its failures reach whoever waits for the answer.
    tokio::spawn(connection.with_upgrades());
    Ok(sender)
}

fn empty() -> Body {
    full(Vec::new())
}

fn full(bytes: Vec<u8>) -> Body {
    Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
}

fn json(value: &impl Serialize) -> Result<Body, ClientError> {
    Ok(full(serde_json::to_vec(value).map_err(io::Error::from)?))
}

/// The response, if it is a success.
async fn refuse(response: Response<Incoming>) -> Result<Response<Incoming>, ClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let bytes = gather(response, MAX_ANSWER).await?;
    match serde_json::from_slice::<Refusal>(&bytes) {
        Ok(refusal) => Err(ClientError::Refused(refusal.error)),
        Err(_) => Err(ClientError::Unexpected { status }),
    }
}

async fn collect(response: Response<Incoming>, most: u64) -> Result<Vec<u8>, ClientError> {
    gather(refuse(response).await?, most).await
}

async fn gather(mut response: Response<Incoming>, most: u64) -> Result<Vec<u8>, ClientError> {
    let mut bytes = Vec::new();
    while let Some(frame) = response.frame().await {
        if let Ok(data) = frame?.into_data() {
            bytes.extend_from_slice(&data);
            if bytes.len() as u64 > most {
                return Err(ClientError::TooLarge(most));
            }
        }
    }
    Ok(bytes)
}

/// A long answer.
#[derive(Debug)]
pub struct Long<'a> {
    client: &'a Client,
    response: Response<Incoming>,
    left: Bytes,
}

impl Long<'_> {
    /// A header of the answer.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }
}

impl Read for Long<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left.is_empty() {
            match self.client.runtime.block_on(self.response.frame()) {
                None => return Ok(0),
                Some(frame) => {
                    if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
                        self.left = data;
                    }
                }
            }
        }
        let count = buffer.len().min(self.left.len());
        buffer[..count].copy_from_slice(&self.left.split_to(count));
        Ok(count)
    }
}
