//! A blob that outlives its connections.

use std::io::{self, Read};
use std::sync::Arc;

use crate::registry::{RegistryError, Repository};

/// Failures in a row, without a byte between them, until a blob is given up.
const ATTEMPTS: u32 = 5;

/// Reads a blob from its beginning; a connection that breaks is taken up again where it broke. The
/// first request is a plain one, as some registries answer ranges badly.
pub struct ResumingBlob {
    repository: Arc<Repository>,
    digest: String,
    size: u64,
    position: u64,
    failures: u32,
    current: Option<Box<dyn Read + Send>>,
}

impl ResumingBlob {
    /// Prepares to read; asks for nothing yet. `size` is what the blob is said to have: less than
    /// that is taken for a broken connection, more is delivered as it comes.
    #[must_use]
    pub fn new(repository: Arc<Repository>, digest: String, size: u64) -> Self {
        Self { repository, digest, size, position: 0, failures: 0, current: None }
    }

    fn once(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let current = match &mut self.current {
            Some(current) => current,
            None => {
                let range = self.position..u64::MAX;
                let blob = self.repository.blob(&self.digest, range, self.size)?;
                self.current.insert(Box::new(blob))
            }
        };
        match current.read(buffer)? {
            0 if self.position < self.size => Err(io::ErrorKind::UnexpectedEof.into()),
            count => Ok(count),
        }
    }
}

impl Read for ResumingBlob {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            let error = match self.once(buffer) {
                Ok(count) => {
                    self.position += count as u64;
                    self.failures = 0;
                    return Ok(count);
                }
                Err(error) => error,
            };
            self.current = None;
            self.failures += 1;
            // What the registry said is final: it was asked often enough before.
            let said = error.get_ref().and_then(|inner| inner.downcast_ref::<RegistryError>());
            if said.is_some() || self.failures >= ATTEMPTS {
                return Err(error);
            }
            self.repository.wait(self.failures, None)?;
        }
    }
}
