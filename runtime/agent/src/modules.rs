//! Kernel modules from the initial file system, and the devices they bring.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::connection::to_timespec;

/// `MODULE_INIT_COMPRESSED_FILE` of linux/module.h.
const COMPRESSED: i32 = 4;

/// Loads the modules in `directory` in the order of their file names (`NN-name.ko`), which is the
/// order of their dependencies. `parameters` gives each module's parameters by its name. What is
/// loaded already stays; without the directory there is nothing to load. Returns how many there
/// were.
///
/// # Errors
/// Names the module that could not be loaded.
pub fn load_all(directory: &Path, parameters: &dyn Fn(&str) -> String) -> io::Result<usize> {
    let paths = list(directory)?;
    for path in &paths {
        load(path, &parameters(name(path)))?;
    }
    Ok(paths.len())
}

/// As [`load_all`], but modules whose name begins with `later` are only opened, to be loaded with
/// [`Opened::load`] when their files are gone.
///
/// # Errors
/// Names the module that could not be loaded or opened.
pub fn load_all_but(
    later: &str,
    directory: &Path,
    parameters: &dyn Fn(&str) -> String,
) -> io::Result<Vec<Opened>> {
    let mut opened = Vec::new();
    for path in list(directory)? {
        let parameters = parameters(name(&path));
        if name(&path).starts_with(later) {
            opened.push(Opened::new(&path, &parameters)?);
        } else {
            load(&path, &parameters)?;
        }
    }
    Ok(opened)
}

/// The modules in the order of their dependencies; none without the directory.
fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = match fs::read_dir(directory) {
        Ok(entries) => entries.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>()?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    paths.sort();
    Ok(paths)
}

/// The module's name: that of the file, without order and extensions.
fn name(path: &Path) -> &str {
    let file = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let stem = file.split_once('.').map_or(file, |(stem, _)| stem);
    match stem.split_once('-') {
        Some((order, name)) if order.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => stem,
    }
}

/// Loads one module.
///
/// # Errors
/// Names the module.
pub fn load(path: &Path, parameters: &str) -> io::Result<()> {
    Opened::new(path, parameters)?.load()
}

/// A module that can be loaded.
#[derive(Debug)]
pub struct Opened {
    path: PathBuf,
    file: File,
    parameters: CString,
}

impl Opened {
    fn new(path: &Path, parameters: &str) -> io::Result<Self> {
        let file = File::open(path).map_err(|e| unloadable(path, &e))?;
        let parameters = CString::new(parameters).map_err(io::Error::other)?;
        Ok(Self { path: path.to_owned(), file, parameters })
    }

    /// Loads it; one that is loaded already stays.
    ///
    /// # Errors
    /// Names the module.
    pub fn load(self) -> io::Result<()> {
        let plain = self.path.extension().is_none_or(|e| e == "ko");
        let flags = if plain { 0 } else { COMPRESSED };
        match rustix::system::finit_module(&self.file, &self.parameters, flags) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            // The file is open: what is missing is a symbol.
            Err(Errno::NOENT) => {
                let why = io::Error::other("a module it needs comes later or never");
                Err(unloadable(&self.path, &why))
            }
            Err(e) => Err(unloadable(&self.path, &e.into())),
        }
    }
}

fn unloadable(path: &Path, error: &io::Error) -> io::Error {
    let text = format!("cannot load the module {}: {error}", path.display());
    io::Error::new(error.kind(), text)
}

/// Hears of devices as they appear. Made before the modules that bring them are loaded.
#[derive(Debug)]
pub struct DeviceEvents(rustix::fd::OwnedFd);

impl DeviceEvents {
    /// Listens to the kernel.
    ///
    /// # Errors
    /// The kernel has no device events.
    pub fn listen() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(netlink::KOBJECT_UEVENT),
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 1))?;
        Ok(Self(socket))
    }

    /// Waits until `path` exists.
    ///
    /// # Errors
    /// `TimedOut`, naming the path.
    pub fn wait_for(&self, path: &Path, timeout: Duration) -> io::Result<()> {
        let deadline = Instant::now() + timeout;
        while !path.exists() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("the device {} did not appear", path.display()),
                ));
            }
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&to_timespec(left))) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            // What happened does not matter, only whether the path is there now.
            let mut scrap = [0; 4096];
            while rustix::net::recv(&self.0, &mut scrap[..], RecvFlags::empty()).is_ok() {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_modules_without_their_order() {
        for (file, wanted) in [
            ("/modules/03-virtio_blk.ko", "virtio_blk"),
            ("/modules/10-crc32c-intel.ko.xz", "crc32c-intel"),
            ("kvm-amd.ko", "kvm-amd"),
        ] {
            assert_eq!(name(Path::new(file)), wanted);
        }
    }

    #[test]
    fn nothing_to_load_is_fine() {
        assert_eq!(load_all(Path::new("/nowhere"), &|_| String::new()).expect("none"), 0);
    }
}
