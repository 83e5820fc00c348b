//! A build step: `parbake-agent step` runs one program in a root of its own and tells what it
//! changed (the exchange is described in [`parbake_protocol::agent::StepRequest`]).
//!
//! ```text
//!  step:        layers, inputs ► overlay ► namespaces ─┐                  ┌► upper tree ► kept trees
//!  step-enter:                                         └► mounts ► root ► capabilities ► exec
//! ```
//! The guest's own root is the disk that is written to. Everything lies below [`PLACE`]:
//!
//! ```text
//!  layers/N   read-only disks           upper, work, root   the overlay
//!  inputs/N   trees that came along     memory/N            those that must never be on a disk
//! ```
//! The program gets what a container runtime gives it: a root that it cannot leave, process ids,
//! names and System V objects of its own, Docker's capabilities, `/proc` with the usual parts hidden.
//! What protects the host is not that but the machine around it.

mod enter;
mod root;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use parbake_protocol::agent::tree::{Attributes, Limits, pack, unpack};
use parbake_protocol::agent::{
    DATA_CHUNK, Exit, ExitReason, FailureKind, Frame, FrameReader, StepEnd, StepLayer, StepMount,
    StepRequest, write_frame,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::connection::failure;
use crate::{kernel, mounts};

pub use enter::run as enter;

/// Where everything of a step lies.
const PLACE: &str = "/step";

/// Where the second program says why it could not start the step's.
const TROUBLE: &str = "/step/trouble";

/// How long a disk may take to appear.
const DISK_TIMEOUT: Duration = Duration::from_secs(20);

/// How every overlay is mounted: as the host does, so that both leave the same.
const OVERLAY: &str = "index=off,redirect_dir=off,metacopy=off";

/// Runs the step that standard input describes.
pub fn run() -> ExitCode {
    let mut step = Step { input: FrameReader::new(), before: out_of_memory() };
    let result = step.run();
    if let Err(error) = result {
        let failed = Frame::Failed(failure(FailureKind::System, error.to_string()));
        if write_frame(&mut io::stdout(), &failed).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

struct Step {
    input: FrameReader,
    /// Programs the kernel had ended for want of memory before the step.
    before: u64,
}

impl Step {
    fn run(&mut self) -> io::Result<()> {
        let request = match self.next()? {
            Some(Frame::Step(request)) => *request,
            _ => return Err(io::Error::other("no step came")),
        };
        let place = Path::new(PLACE);
        for name in ["layers", "inputs", "memory", "work", "root"] {
            make(&place.join(name))?;
        }
        mounts::mount("step", &place.join("memory"), "tmpfs", MountFlags::NOSUID, "mode=0700")?;
        let layers = request
            .layers
            .iter()
            .map(|layer| mount_layer(*layer))
            .collect::<io::Result<Vec<_>>>()?;
        self.receive(&place.join("upper"))?;
        for (number, mount) in request.mounts.iter().enumerate() {
            if let StepMount::Tree { kept, .. } = mount {
                let at = source(number, mount);
                if *kept {
                    self.receive_kept(number, &at)?;
                } else {
                    self.receive(&at)?;
                }
            }
        }
        overlay(&layers, &place.join("upper"), &place.join("work"), &place.join("root"))?;

        let (exit, trouble) = execute(&request)?;
        if !trouble.is_empty() {
            return Err(io::Error::other(trouble));
        }
        let _ = rustix::mount::unmount(place.join("root").as_path(), UnmountFlags::DETACH);
        let complete = exit.code == Some(0);
        let free = rustix::fs::statvfs(place)
            .map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        send(Frame::StepEnd(StepEnd {
            exit,
            free_bytes: free,
            out_of_memory: out_of_memory().saturating_sub(self.before),
        }))?;
        if complete {
            pack(&place.join("upper"), Attributes::Overlay, &mut send)?;
        }
        for (number, mount) in request.mounts.iter().enumerate() {
            if let StepMount::Tree { kept: true, .. } = mount {
                pack(&kept(number).join("upper"), Attributes::Overlay, &mut send)?;
            }
        }
        send(Frame::DataEnd)
    }

    fn next(&mut self) -> io::Result<Option<Frame>> {
        self.input.next(&mut io::stdin()).map_err(io::Error::other)
    }

    /// Receives the next tree. Its sender, the host, is trusted: it may be as large as it likes.
    fn receive(&mut self, at: &Path) -> io::Result<()> {
        let limits = Limits { entries: u64::MAX, bytes: u64::MAX, depth: usize::MAX };
        let input = &mut self.input;
        unpack(&mut || input.next(&mut io::stdin()), at, limits).map(drop).map_err(io::Error::other)
    }

    /// Receives a directory whose changes are sent back.
    fn receive_kept(&mut self, number: usize, merged: &Path) -> io::Result<()> {
        let place = kept(number);
        make(&place)?;
        let (lower, upper, work) = (place.join("lower"), place.join("upper"), place.join("work"));
        self.receive(&lower)?;
        for path in [&upper, &work, merged] {
            make(path)?;
        }
        use std::os::unix::fs::{MetadataExt, chown};
        let meta = fs::metadata(&lower)?;
        chown(&upper, Some(meta.uid()), Some(meta.gid()))?;
        fs::set_permissions(&upper, meta.permissions())?;
        overlay(&[lower], &upper, &work, merged)
    }
}

/// Where a mount's tree is seen by the program.
fn source(number: usize, mount: &StepMount) -> PathBuf {
    match mount {
        StepMount::Resolver => PathBuf::from("/etc/resolv.conf"),
        StepMount::Tree { secret: true, .. } => {
            Path::new(PLACE).join("memory").join(number.to_string())
        }
        _ => Path::new(PLACE).join("inputs").join(number.to_string()),
    }
}

/// Where the parts of a kept directory lie.
fn kept(number: usize) -> PathBuf {
    Path::new(PLACE).join("inputs").join(format!("{number}.kept"))
}

fn make(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot make {}: {e}", path.display())))
}

/// Mounts a layer's disk, unless it is, and says where the layer is.
fn mount_layer(layer: StepLayer) -> io::Result<PathBuf> {
    let letter = char::from(b'a'.saturating_add(layer.disk));
    let device = PathBuf::from(format!("/dev/vd{letter}"));
    let deadline = Instant::now() + DISK_TIMEOUT;
    while !device.exists() {
        if Instant::now() >= deadline {
            let text = format!("the disk {} did not appear", device.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let place = Path::new(PLACE).join("layers").join(layer.disk.to_string());
    if !place.is_dir() {
        let flags = MountFlags::RDONLY | MountFlags::NOATIME;
        mounts::mount(&device.to_string_lossy(), &place, "ext4", flags, "")?;
    }
    Ok(match layer.directory {
        Some(number) => place.join(number.to_string()),
        None => place,
    })
}

/// Mounts `layers` (lowest first) with changes going to `upper`.
fn overlay(layers: &[PathBuf], upper: &Path, work: &Path, at: &Path) -> io::Result<()> {
    // None of these has a character that the kernel would take for a separator.
    let lower: Vec<_> = layers.iter().rev().map(|path| path.to_string_lossy()).collect();
    let (lower, upper, work) = (lower.join(":"), upper.display(), work.display());
    let options = format!("{OVERLAY},lowerdir={lower},upperdir={upper},workdir={work}");
    mounts::mount("overlay", at, "overlay", MountFlags::empty(), &options)
}

/// Runs the program to its end; with it, why it was not even started, if so.
fn execute(request: &StepRequest) -> io::Result<(Exit, String)> {
    // From here on this process can make one child and no threads.
    kernel::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC)?;
    let mut child = Command::new("/proc/self/exe")
        .arg("step-enter")
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // What it does not read it will say.
        let _ = write_frame(&mut stdin, &Frame::Step(Box::new(request.clone())));
    }
    let relayed = relay(&mut child);
    if relayed.is_err() {
        // Nobody listens any more.
        let _ = child.kill();
    }
    let status = child.wait()?;
    relayed?;
    let exit = Exit {
        code: status.code(),
        signal: status.signal(),
        reason: ExitReason::Ended,
        truncated: false,
    };
    Ok((exit, fs::read_to_string(TROUBLE).unwrap_or_default()))
}

/// Passes both outputs on until they end. That is when the program ends: its namespace goes with it.
fn relay(child: &mut Child) -> io::Result<()> {
    let mut pipes: [Option<OwnedFd>; 2] =
        [child.stdout.take().map(Into::into), child.stderr.take().map(Into::into)];
    let mut buffer = vec![0; DATA_CHUNK];
    while pipes.iter().any(Option::is_some) {
        let open: Vec<usize> = (0..2).filter(|index| pipes[*index].is_some()).collect();
        let mut wanted: Vec<PollFd<'_>> = open
            .iter()
            .filter_map(|index| pipes[*index].as_ref())
            .map(|pipe| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN))
            .collect();
        match poll(&mut wanted, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = wanted.iter().map(|wanted| !wanted.revents().is_empty()).collect();
        for (index, ready) in open.into_iter().zip(ready) {
            let Some(pipe) = pipes[index].as_ref().filter(|_| ready) else { continue };
            match rustix::io::read(pipe, &mut buffer[..]) {
                Ok(0) => pipes[index] = None,
                Ok(length) => {
                    let bytes = buffer[..length].to_vec();
                    let frame =
                        if index == 0 { Frame::Stdout(bytes) } else { Frame::Stderr(bytes) };
                    send(frame)?;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

#[allow(clippy::needless_pass_by_value, reason = "as `pack` sends")]
fn send(frame: Frame) -> io::Result<()> {
    write_frame(&mut io::stdout().lock(), &frame).map_err(io::Error::other)
}

/// Programs that the kernel has ended for want of memory since it was booted.
fn out_of_memory() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Reads one frame from a stream that holds no other.
fn only_frame(mut stream: impl Read) -> io::Result<Option<Frame>> {
    FrameReader::new().next(&mut stream).map_err(io::Error::other)
}

/// A file to write trouble into that a later root does not hide.
fn trouble() -> io::Result<File> {
    File::options().create(true).truncate(true).write(true).open(TROUBLE)
}

fn os(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mount_has_a_place_of_its_own() {
        let tree = |secret| StepMount::Tree {
            target: b"/x".to_vec(),
            read_only: true,
            kept: false,
            secret,
        };
        assert_eq!(source(3, &tree(true)), Path::new("/step/memory/3"));
        assert_eq!(source(3, &tree(false)), Path::new("/step/inputs/3"));
        assert_ne!(kept(3), source(3, &tree(false)));
        assert_eq!(StepMount::Resolver.target(), b"/etc/resolv.conf");
    }
}
