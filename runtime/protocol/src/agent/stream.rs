//! Byte streams a client can speak over.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A bidirectional byte stream with its two halves usable from two threads.
pub trait Stream: Read + Write + Send + Sized + 'static {
    /// A second handle on the same stream.
    ///
    /// # Errors
    /// No descriptor left.
    fn try_clone(&self) -> io::Result<Self>;
    /// Tells the other side that nothing more will come.
    ///
    /// # Errors
    /// The stream is gone.
    fn shutdown_write(&self) -> io::Result<()>;
    /// Ends both directions, for every handle.
    ///
    /// # Errors
    /// The stream is gone.
    fn shutdown_both(&self) -> io::Result<()>;
    /// How long a read may wait; `None`: for ever.
    ///
    /// # Errors
    /// The stream is gone.
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;
    /// How long a write may wait; `None`: for ever.
    ///
    /// # Errors
    /// The stream is gone.
    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;
}

macro_rules! stream {
    ($type:ty) => {
        impl Stream for $type {
            fn try_clone(&self) -> io::Result<Self> {
                <$type>::try_clone(self)
            }
            fn shutdown_write(&self) -> io::Result<()> {
                self.shutdown(Shutdown::Write)
            }
            fn shutdown_both(&self) -> io::Result<()> {
                self.shutdown(Shutdown::Both)
            }
            fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                <$type>::set_read_timeout(self, timeout)
            }
            fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                <$type>::set_write_timeout(self, timeout)
            }
        }
    };
}

stream!(UnixStream);
stream!(TcpStream);

/// The longest answer to `CONNECT` that is read.
const MAX_ANSWER: usize = 64;

/// Connects to `port` of a guest through its monitor's unix socket: sends `CONNECT <port>`, expects
/// `OK <number>`. The stream returned has no timeouts set.
///
/// # Errors
/// The socket's; `ConnectionRefused` when the monitor closes, i.e. nobody listens in the guest;
/// `InvalidData` for any other answer; `TimedOut`.
pub fn connect_vsock_uds(
    path: impl AsRef<Path>,
    port: u32,
    timeout: Duration,
) -> io::Result<UnixStream> {
    let deadline = Instant::now() + timeout;
    let mut stream = UnixStream::connect(path)?;
    stream.set_write_timeout(Some(timeout.max(Duration::from_millis(1))))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    // Byte by byte: whatever follows the line belongs to the guest's stream.
    let mut line = Vec::with_capacity(MAX_ANSWER);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the monitor did not answer CONNECT {port}"),
            ));
        }
        stream.set_read_timeout(Some(left))?;
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(0) => {
                return Err(io::Error::new(
                    io::ErrorKind::ConnectionRefused,
                    format!("nobody listens on port {port} of the guest"),
                ));
            }
            Ok(_) if byte[0] == b'\n' => break,
            Ok(_) => line.push(byte[0]),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::Interrupted
                        | io::ErrorKind::WouldBlock
                        | io::ErrorKind::TimedOut
                ) => {}
            Err(e) => return Err(e),
        }
        if line.len() > MAX_ANSWER {
            break;
        }
    }
    let accepted = line
        .strip_prefix(b"OK ")
        .is_some_and(|n| !n.is_empty() && n.iter().all(u8::is_ascii_digit));
    if !accepted {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the monitor answered {:?} to CONNECT {port}", String::from_utf8_lossy(&line)),
        ));
    }
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}
