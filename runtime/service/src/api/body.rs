//! Long bodies between threads that block and connections that do not.

use std::io::{self, Read, Write};

use axum::body::Body;
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::mpsc;

/// How many pieces wait between the two sides.
const WAITING: usize = 8;

/// A response's body, written by a thread. A write fails when the caller has gone.
pub struct Writer(mpsc::Sender<io::Result<Bytes>>);

/// A writer and the body it writes. `alive` is dropped when nobody reads any more.
pub fn writer<T: Send + 'static>(alive: T) -> (Writer, Body) {
    let (send, receive) = mpsc::channel(WAITING);
    let pieces = futures_util::stream::unfold((receive, alive), |(mut receive, alive)| async {
        receive.recv().await.map(|piece| (piece, (receive, alive)))
    });
    (Writer(send), Body::from_stream(pieces))
}

impl Writer {
    /// Sends a piece.
    ///
    /// # Errors
    /// The caller has gone.
    pub fn send(&self, bytes: impl Into<Bytes>) -> io::Result<()> {
        self.0.blocking_send(Ok(bytes.into())).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Breaks the connection off: what was sent is not all.
    pub fn fail(&self, error: io::Error) {
        // Somebody who has gone does not mind.
        let _ = self.0.blocking_send(Err(error));
    }

    /// Whether the caller has gone.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(Bytes::copy_from_slice(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A request's body, read by a thread.
pub struct Reader {
    receive: mpsc::Receiver<io::Result<Bytes>>,
    left: Bytes,
}

/// Reads a body as it comes.
pub fn reader(body: Body) -> Reader {
    let (send, receive) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        let mut pieces = body.into_data_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(io::Error::other);
            let failed = piece.is_err();
            if send.send(piece).await.is_err() || failed {
                return;
            }
        }
    });
    Reader { receive, left: Bytes::new() }
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left.is_empty() {
            match self.receive.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.left = piece?,
            }
        }
        let count = buffer.len().min(self.left.len());
        buffer[..count].copy_from_slice(&self.left.split_to(count));
        Ok(count)
    }
}
