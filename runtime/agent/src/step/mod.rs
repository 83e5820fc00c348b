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
//!  trees/N    layers that were sent     inputs/N            trees that came along, sockets
//!  memory/N   trees that must never be on a disk
//! ```
//! The program gets what a container runtime gives it: a root that it cannot leave, process ids,
//! names and System V objects of its own, Docker's capabilities, `/proc` with the usual parts hidden.
//! What protects the host is not that but the machine around it.

mod enter;
mod relay;
mod root;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use parbake_protocol::agent::tree::{Attributes, Limits, pack, unpack};
use parbake_protocol::agent::{
    Exit, ExitReason, FailureKind, Frame, FrameReader, StepEnd, StepLayer, StepMount, StepRequest,
    write_frame,
};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::connection::failure;
use crate::{kernel, mounts};

pub use enter::run as enter;

/// Where everything of a step lies.
const PLACE: &str = "/step";

/// Where the second program says why it could not start the step's.
const TROUBLE: &str = "/step/trouble";

/// Where layers lie that were sent, by number.
const TREES: &str = "trees";

/// How long a disk may take to appear.
const DISK_TIMEOUT: Duration = Duration::from_secs(20);

/// How a process says that there was no step for it.
const NO_MORE: i32 = 3;

/// How every overlay is mounted: as the host does, so that both leave the same.
const OVERLAY: &str = "index=off,redirect_dir=off,metacopy=off";

/// Runs the steps that standard input describes, one after the other, each by a process of its own:
/// one can enter a new process-id namespace only once.
pub fn run() -> ExitCode {
    loop {
        let Ok(status) = Command::new("/proc/self/exe").arg("step-once").status() else {
            return ExitCode::FAILURE;
        };
        match status.code() {
            Some(0) => {}
            Some(NO_MORE) => return ExitCode::SUCCESS,
            _ => return ExitCode::FAILURE,
        }
    }
}

/// Runs one step.
pub fn run_once() -> ExitCode {
    let mut step = Step { input: FrameReader::new(), before: out_of_memory() };
    match step.run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(NO_MORE as u8),
        Err(error) => {
            let failed = Frame::Failed(failure(FailureKind::System, error.to_string()));
            let _ = write_frame(&mut io::stdout(), &failed);
            ExitCode::FAILURE
        }
    }
}

struct Step {
    input: FrameReader,
    /// Programs the kernel had ended for want of memory before the step.
    before: u64,
}

impl Step {
    /// Whether there was one.
    fn run(&mut self) -> io::Result<bool> {
        let request = match self.next()? {
            Some(Frame::Step(request)) => *request,
            None => return Ok(false),
            _ => return Err(io::Error::other("no step came")),
        };
        let place = Path::new(PLACE);
        // What is mounted for a step is gone with this process, and what the one before left behind
        // is none of this one's.
        kernel::unshare(libc::CLONE_NEWNS)?;
        root::stay_private()?;
        for name in ["inputs", "memory", "upper", "work", "root"] {
            clear(&place.join(name))?;
        }
        let _ = fs::remove_file(TROUBLE);
        for name in ["layers", TREES, "inputs", "memory", "work", "root"] {
            make(&place.join(name))?;
        }
        mounts::mount("step", &place.join("memory"), "tmpfs", MountFlags::NOSUID, "mode=0700")?;
        for number in &request.sent {
            self.receive(&place.join(TREES).join(number.to_string()))?;
        }
        let mut mounted = BTreeSet::new();
        let layers = request
            .layers
            .iter()
            .map(|layer| find_layer(*layer, &mut mounted))
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
        if self.next()? != Some(Frame::DataEnd) {
            return Err(io::Error::other("more came than the step has"));
        }
        overlay(&layers, &place.join("upper"), &place.join("work"), &place.join("root"))?;

        if !request.network {
            // There is a device in every guest, and where it leads nowhere a step need not see it.
            kernel::unshare(libc::CLONE_NEWNET)?;
            kernel::change_link("lo", kernel::LinkChange::Up)?;
        }
        let mut sockets = relay::Sockets::default();
        for (number, mount) in request.mounts.iter().enumerate() {
            sockets.listen(number, mount, &source(number, mount))?;
        }
        let (exit, trouble) = execute(&request, &mut sockets, &mut self.input)?;
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
        send(Frame::DataEnd)?;
        Ok(true)
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

/// Where a mount's tree or socket is seen by the program.
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

/// Removes a directory of the step before.
fn clear(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let text = format!("cannot clear {}: {error}", path.display());
            Err(io::Error::new(error.kind(), text))
        }
        _ => Ok(()),
    }
}

/// Says where a layer is, and mounts its disk unless it is `mounted`.
fn find_layer(layer: StepLayer, mounted: &mut BTreeSet<u8>) -> io::Result<PathBuf> {
    if layer.disk == 0 {
        let number = layer.directory.unwrap_or_default();
        return Ok(Path::new(PLACE).join(TREES).join(number.to_string()));
    }
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
    if mounted.insert(layer.disk) {
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
fn execute(
    request: &StepRequest,
    sockets: &mut relay::Sockets,
    input: &mut FrameReader,
) -> io::Result<(Exit, String)> {
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
    let relayed = relay::relay(&mut child, sockets, input);
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
