//! The standard streams of a program: pipes, a terminal, or nothing.

use std::io;
use std::os::fd::OwnedFd;

use parbake_protocol::agent::ExecRequest;
use rustix::fs::{Mode, OFlags};

use crate::spawn::pipe;
use crate::terminal::Terminal;
use crate::users::User;

/// The program's three streams and our ends of them.
#[derive(Debug)]
pub struct Streams {
    /// Its standard input, output and error.
    pub theirs: [OwnedFd; 3],
    /// What we write is its input.
    pub input: Option<OwnedFd>,
    /// Its output, or its terminal's.
    pub output: Option<OwnedFd>,
    /// Its errors, unless it has a terminal.
    pub errors: Option<OwnedFd>,
}

impl Streams {
    /// Opens what the request asks for. Our ends never block.
    ///
    /// # Errors
    /// No descriptor or terminal left.
    pub fn open(request: &ExecRequest, user: &User) -> io::Result<Self> {
        let null = || {
            rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(io::Error::from)
        };
        if request.detach {
            return Ok(Self {
                theirs: [null()?, null()?, null()?],
                input: None,
                output: None,
                errors: None,
            });
        }
        let streams = if let Some(size) = request.tty {
            let Terminal { master, slave } = Terminal::open(size, user)?;
            Self {
                theirs: [slave.try_clone()?, slave.try_clone()?, slave],
                input: if request.stdin { Some(master.try_clone()?) } else { None },
                output: Some(master),
                errors: None,
            }
        } else {
            let (output, their_output) = pipe()?;
            let (errors, their_errors) = pipe()?;
            let (their_input, input) = if request.stdin {
                let (theirs, ours) = pipe()?;
                (theirs, Some(ours))
            } else {
                (null()?, None)
            };
            for end in [&their_input, &their_output, &their_errors] {
                // /proc/self/fd/1 must open for the program's user, as under a shell.
                let _ = rustix::fs::fchown(end, Some(rustix::fs::Uid::from_raw(user.uid)), None);
            }
            Self {
                theirs: [their_input, their_output, their_errors],
                input,
                output: Some(output),
                errors: Some(errors),
            }
        };
        for ours in [&streams.input, &streams.output, &streams.errors].into_iter().flatten() {
            rustix::io::ioctl_fionbio(ours, true)?;
        }
        Ok(streams)
    }
}
