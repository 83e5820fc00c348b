//! Restoring from images that are still filling up: the host's side of
//! [`parbake_protocol::filling`].
//!
//! ```text
//! monitor ── faults of guest memory ──► pager thread ──┐
//!         ── disk: "these bytes?" ────► disk thread ───┴──► Fill::ensure (e.g. a lazy pull)
//! ```
//! When bytes do not come, a disk's reader gets an I/O error, and a machine whose memory is missing
//! ends, saying why. Nothing waits for ever: how long is [`Fill`]'s to say.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use parbake_protocol::filling::{self, Ask, DISKS, Layer, MAX_LINE, MEMORY, Region};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::pager::{Pager, Source};

/// An image of a restored machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Image {
    /// Guest memory.
    Memory,
    /// The root filesystem.
    Rootfs,
    /// The disk's part of the snapshot.
    Disk,
}

/// Whoever fills the images.
pub trait Fill: Send + Sync {
    /// Waits until the bytes are there; several threads may do so at once. The range may reach
    /// beyond the image's end.
    ///
    /// # Errors
    /// When they cannot be had, or not in time; the text is for people.
    fn ensure(&self, image: Image, range: Range<u64>) -> Result<(), String>;

    /// Whether the bytes will be wanted soon and are there, without waiting: then they come along
    /// with others that were asked for.
    fn is_there(&self, _image: Image, _range: Range<u64>) -> bool {
        false
    }
}

/// Serves one machine; ends when dropped.
pub struct Filler {
    socket: PathBuf,
    stop: Arc<AtomicBool>,
    /// Kept open: when it closes, the machine ends.
    memory: Arc<Mutex<Option<UnixStream>>>,
}

impl Filler {
    /// Listens at `socket` for the one monitor that is about to be started. `memory` is the memory
    /// image's file.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(socket: &Path, memory: &Path, fill: Arc<dyn Fill>) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        listener.set_nonblocking(true)?;
        let image = File::open(memory)?;
        let filler =
            Self { socket: socket.to_owned(), stop: Arc::default(), memory: Arc::default() };
        let (stop, kept) = (Arc::clone(&filler.stop), Arc::clone(&filler.memory));
        std::thread::Builder::new().name("filler".to_owned()).spawn(move || {
            // Two connections come, and no more.
            let mut left = 2;
            while left > 0 && !stop.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    continue;
                };
                left -= 1;
                let (stop, kept) = (Arc::clone(&stop), Arc::clone(&kept));
                let (fill, image) = (Arc::clone(&fill), image.try_clone());
                std::thread::spawn(move || {
                    let _ = image.and_then(|image| serve(stream, image, &*fill, &stop, &kept));
                });
            }
        })?;
        Ok(filler)
    }
}

impl std::fmt::Debug for Filler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filler").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.memory.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn serve(
    mut stream: UnixStream,
    image: File,
    fill: &dyn Fill,
    stop: &AtomicBool,
    kept: &Mutex<Option<UnixStream>>,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    match kind[0] {
        DISKS => loop {
            let mut bytes = [0; 16];
            stream.read_exact(&mut bytes)?;
            let outcome = match Ask::decode(&bytes) {
                Some(Ask { disk: 0, layer, len, offset }) => {
                    let image = match layer {
                        Layer::Base => Image::Rootfs,
                        Layer::Overlay => Image::Disk,
                    };
                    fill.ensure(image, offset..offset + u64::from(len))
                }
                _ => Err("there is no such disk".to_owned()),
            };
            filling::answer(&stream, outcome.as_ref().copied().map_err(String::as_str))?;
        },
        MEMORY => {
            let (regions, faults) = receive(&stream)?;
            let mut pager = Pager::new(faults, regions, image)?;
            let end = stream.try_clone()?;
            *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
            let stopped = || stop.load(Ordering::Relaxed);
            let source = Source {
                ensure: &|range| fill.ensure(Image::Memory, range),
                is_there: &|range| fill.is_there(Image::Memory, range),
            };
            let result = pager.serve(&stopped, &source);
            if let Err(why) = result {
                let line: String = why.chars().filter(|c| !c.is_control()).take(1000).collect();
                let _ = (&end).write_all(format!("its memory did not arrive: {line}\n").as_bytes());
            }
            Ok(())
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The regions, and the descriptor that comes with them.
fn receive(stream: &UnixStream) -> io::Result<(Vec<Region>, OwnedFd)> {
    let mut line = Vec::new();
    let mut faults = None;
    while line.last() != Some(&b'\n') {
        let mut bytes = [0; 4096];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            stream,
            &mut [io::IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                faults = faults.or(fds.into_iter().next());
            }
        }
        if received.bytes == 0 || line.len() > MAX_LINE {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&bytes[..received.bytes]);
    }
    let regions = serde_json::from_slice(&line).map_err(io::Error::other)?;
    Ok((regions, faults.ok_or(io::ErrorKind::InvalidData)?))
}
