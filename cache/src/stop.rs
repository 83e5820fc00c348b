//! Ending long work when the user wants to stop, between one piece and the next.

use std::io::{self, Read};

/// Whether to stop, as whoever asked for the work says. By default, never.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stop(Option<fn() -> bool>);

/// What [`Stop::check`] says; [`crate::StoreError::Interrupted`] is made of it.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Stopped;

impl Stop {
    pub(crate) fn when(cancelled: Option<fn() -> bool>) -> Self {
        Self(cancelled)
    }

    /// Fails when it is time to stop. Not with [`io::ErrorKind::Interrupted`], which means that the
    /// same should be tried again.
    pub(crate) fn check(self) -> io::Result<()> {
        match self.0 {
            Some(cancelled) if cancelled() => Err(io::Error::other(Stopped)),
            _ => Ok(()),
        }
    }

    /// A reader that asks before each read.
    pub(crate) fn watch<R: Read>(self, inner: R) -> Watched<R> {
        Watched { inner, stop: self }
    }
}

/// See [`Stop::watch`].
pub(crate) struct Watched<R> {
    inner: R,
    stop: Stop,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stop.check()?;
        self.inner.read(buffer)
    }
}
