//! Pseudo-terminals.

use std::io;
use std::os::fd::OwnedFd;

use parbake_protocol::agent::WindowSize;
use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, SpecialCodeIndex, Winsize};

use crate::users::User;

/// The group that owns terminals, by custom.
const TTY_GROUP: u32 = 5;

/// Both ends of a new terminal: ours, and the program's.
#[derive(Debug)]
pub struct Terminal {
    /// What the program writes appears here, and the other way round.
    pub master: OwnedFd,
    /// The program's standard streams.
    pub slave: OwnedFd,
}

impl Terminal {
    /// Opens a terminal of the given size that belongs to `user`.
    ///
    /// # Errors
    /// No devpts, or no terminal left.
    pub fn open(size: WindowSize, user: &User) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let slave =
            rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        resize(&master, size)?;
        let owner = rustix::fs::Uid::from_raw(user.uid);
        let group = rustix::fs::Gid::from_raw(TTY_GROUP);
        if rustix::fs::fchown(&slave, Some(owner), Some(group)).is_ok() {
            rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620))?;
        }
        Ok(Self { master, slave })
    }
}

/// Gives a terminal a new size; the kernel sends SIGWINCH to whom it concerns.
///
/// # Errors
/// The terminal is gone.
pub fn resize(master: &OwnedFd, size: WindowSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

/// The character that means end of file to the terminal's line discipline, if it has one now.
pub fn end_of_file(master: &OwnedFd) -> Option<u8> {
    let settings = rustix::termios::tcgetattr(master).ok()?;
    settings
        .local_modes
        .contains(LocalModes::ICANON)
        .then(|| settings.special_codes[SpecialCodeIndex::VEOF])
}
