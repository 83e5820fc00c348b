//! The microvm executor: each `RUN` in a machine of its own.
//!
//! ```text
//!  this machine                                  the build machine
//!  trees of the stack ──► ext4 images ──────────► disks, read-only ─┐
//!  an empty ext4 image, sparse ─────────────────► its root ─► upper ┴► overlay ► the program
//!  mounts, secrets ── trees over the agent ─────► root disk, memory ┘               │
//!  upper, caches ◄─── trees over the agent ────────────────────────── what changed ◄┘
//! ```
//! The step shares nothing with this machine but what is named here: no kernel, no file system, no
//! network but by policy. What comes back is made anew under bounds ([`tree`]); a step that took its
//! machine over can say anything it likes about its own result, and nothing about anything else.
//!
//! A machine lives for one step. It runs here, or in the lab, where this program starts itself once
//! more for it ([`run_guest`]); the conversation is the same.

mod disk;
mod guest;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parbake_cache::template::MachineShape;
use parbake_node::event::Watch;
use parbake_node::network::Egress;
use parbake_protocol::agent::tree::{Attributes, Limits, TreeError, pack, unpack};
use parbake_protocol::agent::{
    ClientError, ExecEvent, ExecInput, ExecOutput, ExecSession, Frame, FrameError, FrameReader,
    StepEnd, StepMount, StepRequest, Stream as Channel,
};

use super::error::{Doing as _, ExecuteError};
use super::unpack::Unpack;
use super::{Ended, Executor, Job, PreparedMount, Stream, layer};
use disk::Disks;

pub use guest::{Ground, InLab, StepGuest, run_guest, step_request};

/// How often an interruption is looked for.
const TICK: Duration = Duration::from_millis(100);

/// Frames are sent in portions of about this.
const PORTION: usize = 256 << 10;

/// Less than this left on a disk means that it is full.
const FULL: u64 = 64 << 10;

/// How long a machine may take to be gone once its step is done.
const FAREWELL: Duration = Duration::from_secs(20);

/// The end of what the machine's own programs say that is kept.
const KEPT: usize = 4 << 10;

/// What the machines of a build are.
#[derive(Debug)]
pub struct MicrovmOptions {
    /// Where they run.
    pub ground: Ground,
    /// The unpacked kernel.
    pub kernel: PathBuf,
    /// Modules and agent.
    pub initramfs: PathBuf,
    /// The kernel's command line.
    pub cmdline: String,
    /// Processors and memory.
    pub machine: MachineShape,
    /// What a step may write, in bytes. It takes space only as it is written.
    pub disk_bytes: u64,
    /// What a step with a network may reach.
    pub egress: Egress,
    /// How long a machine may take to boot.
    pub ready_timeout: Duration,
    /// The build directory; the lab sees it under the same path.
    pub directory: PathBuf,
    /// Looked at while a machine boots: give up when it returns true.
    pub cancelled: Option<fn() -> bool>,
}

/// Makes the options once they are needed: a build whose steps are all cached needs no machine.
pub type Preparation<'a> = Box<dyn FnOnce() -> Result<MicrovmOptions, ExecuteError> + 'a>;

/// Runs steps in machines of their own.
pub struct Microvm<'a> {
    preparation: Option<Preparation<'a>>,
    prepared: Option<Prepared>,
}

struct Prepared {
    options: MicrovmOptions,
    disks: Disks,
}

impl<'a> Microvm<'a> {
    /// An executor that asks for its options with the first step.
    #[must_use]
    pub fn new(preparation: Preparation<'a>) -> Self {
        Self { preparation: Some(preparation), prepared: None }
    }

    fn prepared(&mut self) -> Result<&mut Prepared, ExecuteError> {
        if let Some(preparation) = self.preparation.take() {
            let options = preparation()?;
            let disks = Disks::new(&options.directory, options.disk_bytes)?;
            self.prepared = Some(Prepared { options, disks });
        }
        self.prepared.as_mut().ok_or_else(|| ExecuteError::Host {
            what: "there is no build machine for this step".to_owned(),
            hint: "why was said with the first step that needed one".to_owned(),
        })
    }
}

impl Executor for Microvm<'_> {
    fn name(&self) -> &'static str {
        "microvm"
    }

    fn isolated(&self) -> bool {
        true
    }

    fn run(
        &mut self,
        job: &Job<'_>,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Ended, ExecuteError> {
        for mount in job.mounts {
            if let PreparedMount::Socket { .. } = mount {
                return Err(ExecuteError::Host {
                    what: "an SSH agent's socket cannot be taken into a build machine".to_owned(),
                    hint: "build with --builder sandbox, or mount a deploy key as a secret"
                        .to_owned(),
                });
            }
        }
        let Prepared { options, disks } = self.prepared()?;
        let (layers, mut images) = disks.of(job.lower)?;
        images.insert(0, disks.work()?);
        let guest = StepGuest {
            kernel: options.kernel.clone(),
            initramfs: options.initramfs.clone(),
            cmdline: options.cmdline.clone(),
            disks: images,
            machine: options.machine,
            egress: if job.network { options.egress.clone() } else { Egress::default() },
            scratch: options.ground.is_here().then(|| job.scratch.to_owned()),
            ready_timeout_ms: u64::try_from(options.ready_timeout.as_millis()).unwrap_or(u64::MAX),
        };
        let request = StepRequest {
            argv: job.args.iter().map(|word| word.clone().into_bytes()).collect(),
            env: job.env.iter().map(|entry| entry.clone().into_bytes()).collect(),
            cwd: job.working_dir.as_bytes().to_vec(),
            uid: job.identity.uid,
            gid: job.identity.gid,
            groups: job.identity.groups.clone(),
            layers,
            mounts: job.mounts.iter().filter_map(|mount| step_mount(mount, job.network)).collect(),
        };
        let limits = Limits { bytes: options.disk_bytes, ..Limits::default() };
        let mut talk = Talk { job, request: &request, limits, output };
        let (end, denied) = match &options.ground {
            Ground::Here => {
                let (events, watch) = Watch::new();
                let mut sandbox = run_guest(&guest, options.cancelled, events)
                    .map_err(|error| guest::boot_failed(&error))?;
                let session = guest::step_session(&mut sandbox)
                    .map_err(|error| guest::boot_failed(&error))?;
                let (end, _) = talk
                    .run(session)
                    .map_err(|failed| failed.explain(|| sandbox.ended_by_itself()))?;
                drop(sandbox);
                (end, watch.lines().join("\n"))
            }
            Ground::Lab(lab) => {
                let session = lab.session(&guest)?;
                talk.run(session).map_err(|failed| failed.explain(|| None))?
            }
        };
        if !denied.is_empty() {
            output(Stream::Stderr, format!("{denied}\n").as_bytes());
        }
        let shortage = (end.exit.code != Some(0)).then(|| shortage(&end, options)).flatten();
        Ok(Ended { code: end.exit.shell_code(), shortage })
    }
}

/// What the machine did not have enough of.
fn shortage(end: &StepEnd, options: &MicrovmOptions) -> Option<String> {
    let mib = |bytes: u64| bytes >> 20;
    if end.free_bytes < FULL {
        let size = mib(options.disk_bytes);
        return Some(format!(
            "the build machine's disk ({size} MiB) is full; give it more with --build-disk"
        ));
    }
    (end.out_of_memory > 0).then(|| {
        let size = options.machine.memory_mib;
        format!(
            "the build machine ran out of memory ({size} MiB); give it more with --build-memory"
        )
    })
}

/// A mount as the agent is told it; a step without a network has no name servers.
fn step_mount(mount: &PreparedMount, network: bool) -> Option<StepMount> {
    let tree = |read_only: bool, kept: bool, secret: bool| StepMount::Tree {
        target: mount.target().as_bytes().to_vec(),
        read_only,
        kept,
        secret,
    };
    Some(match mount {
        PreparedMount::Bind { read_only, .. } => tree(*read_only, false, false),
        PreparedMount::Cache { read_only, .. } => tree(*read_only, !read_only, false),
        PreparedMount::Secret { read_only, .. } => tree(*read_only, false, true),
        PreparedMount::Tmpfs { target, size } => {
            StepMount::Memory { target: target.clone().into_bytes(), size: *size }
        }
        PreparedMount::Resolver if network => StepMount::Resolver,
        PreparedMount::Resolver | PreparedMount::Socket { .. } => return None,
    })
}

/// One step's conversation with its machine.
struct Talk<'a, 'o> {
    job: &'a Job<'a>,
    request: &'a StepRequest,
    limits: Limits,
    output: &'o mut dyn FnMut(Stream, &[u8]),
}

/// Why a conversation broke off.
struct Failed {
    error: Box<ExecuteError>,
    /// The end of the machine may say more.
    broken: bool,
}

impl Failed {
    fn explain(
        self,
        ended: impl FnOnce() -> Option<parbake_node::sandbox::SandboxError>,
    ) -> ExecuteError {
        match (self.broken, self.broken.then(ended).flatten()) {
            (true, Some(ended)) => guest::boot_failed(&ended),
            _ => *self.error,
        }
    }
}

impl From<ExecuteError> for Failed {
    fn from(error: ExecuteError) -> Self {
        Self { error: Box::new(error), broken: false }
    }
}

impl Talk<'_, '_> {
    /// How the step ended, and what the programs between here and there said.
    fn run<S: Channel>(&mut self, session: ExecSession<S>) -> Result<(StepEnd, String), Failed> {
        let (input, output) = session.split();
        let (job, request) = (self.job, self.request);
        let mut incoming =
            Incoming::new(output, job.interrupt, &mut *self.output).map_err(Failed::from)?;
        let limits = self.limits;
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&input, request, job));
            let result = receive(&mut incoming, request, job, limits);
            let result = result.map(|end| (end, incoming.finish()));
            // Whatever the result: nothing more is sent, and a sender that waits is let go.
            incoming.hang_up();
            let sent = sender.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            match (result, sent) {
                // A file of ours that could not be read is the reason for all that follows.
                (Err(_), Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
                    let what = "handing a step its mounts".to_owned();
                    Err(ExecuteError::Io { what, source: error }.into())
                }
                (result, _) => result,
            }
        })
    }
}

/// Sends the step, then the trees it is given.
fn send<S: Channel>(input: &ExecInput<S>, request: &StepRequest, job: &Job<'_>) -> io::Result<()> {
    let mut portion = Vec::with_capacity(2 * PORTION);
    let mut put = |frame: Frame| -> io::Result<()> {
        frame.encode(&mut portion).map_err(io::Error::other)?;
        if portion.len() >= PORTION || matches!(frame, Frame::DataEnd) {
            input.write_stdin(&portion)?;
            portion.clear();
        }
        Ok(())
    };
    put(Frame::Step(Box::new(request.clone())))?;
    pack(job.upper, Attributes::Overlay, &mut put)?;
    for mount in job.mounts {
        match mount {
            PreparedMount::Bind { path, .. }
            | PreparedMount::Cache { path, .. }
            | PreparedMount::Secret { path, .. } => {
                pack(path, Attributes::Portable, &mut put)?;
            }
            _ => {}
        }
    }
    // The agent reads no further; it is what flushes.
    put(Frame::DataEnd)
}

fn receive<S: Channel>(
    incoming: &mut Incoming<'_, S>,
    request: &StepRequest,
    job: &Job<'_>,
    limits: Limits,
) -> Result<StepEnd, Failed> {
    let end = loop {
        match incoming.expect()? {
            Frame::Stdout(bytes) => (incoming.show)(Stream::Stdout, &bytes),
            Frame::Stderr(bytes) => (incoming.show)(Stream::Stderr, &bytes),
            Frame::StepEnd(end) => break end,
            Frame::Failed(failure) => {
                return Err(ExecuteError::Host {
                    what: format!("the build machine could not start the step: {failure}"),
                    hint: "look at the step's mounts and working directory".to_owned(),
                }
                .into());
            }
            _ => return Err(senseless("something else than a step's output").into()),
        }
    };
    if end.exit.code == Some(0) {
        // Prepared as the stack's root is, which is what the machine was told, too.
        fs::remove_dir(job.upper).doing(|| "making room for a step's result".to_owned())?;
        incoming.tree(job.upper, limits)?;
    }
    let kept = |mount: &&StepMount| matches!(mount, StepMount::Tree { kept: true, .. });
    let caches = job.mounts.iter().filter_map(|mount| match mount {
        PreparedMount::Cache { path, read_only: false, .. } => Some(path),
        _ => None,
    });
    for (number, (_, path)) in request.mounts.iter().filter(kept).zip(caches).enumerate() {
        let changes = job.scratch.join(format!("changes{number}"));
        incoming.tree(&changes, limits)?;
        merge(&changes, path, job.scratch)
            .doing(|| format!("keeping what a step wrote to {}", path.display()))?;
    }
    match incoming.expect()? {
        Frame::DataEnd => Ok(end),
        _ => Err(senseless("more than a step's result").into()),
    }
}

/// Lays what changed in a directory over it; both are this machine's by now.
fn merge(changes: &Path, directory: &Path, scratch: &Path) -> io::Result<()> {
    let tar = scratch.join("changes.tar");
    layer::write(changes, io::BufWriter::new(File::create(&tar)?), None, false)?;
    let how = Unpack { layer: true, whiteouts: true, owner: None };
    super::unpack::unpack(io::BufReader::new(File::open(&tar)?), directory, how)?;
    fs::remove_file(&tar)
}

fn senseless(what: &str) -> ExecuteError {
    ExecuteError::Host {
        what: format!("the build machine sent {what}"),
        hint: "nothing of the step is kept; look at what the step runs, which can take its own \
               machine over"
            .to_owned(),
    }
}

/// What comes from the machine, as frames.
struct Incoming<'o, S: Channel> {
    output: Option<ExecOutput<S>>,
    frames: FrameReader,
    interrupt: Option<&'o AtomicBool>,
    show: &'o mut dyn FnMut(Stream, &[u8]),
    /// The end of what the programs between here and there said.
    said: Vec<u8>,
    /// Why no more frames come.
    ended: Option<ExecuteError>,
}

impl<'o, S: Channel> Incoming<'o, S> {
    fn new(
        mut output: ExecOutput<S>,
        interrupt: Option<&'o AtomicBool>,
        show: &'o mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Self, ExecuteError> {
        output.set_timeout(Some(TICK)).doing(|| "talking to a build machine".to_owned())?;
        Ok(Self {
            output: Some(output),
            frames: FrameReader::new(),
            interrupt,
            show,
            said: Vec::new(),
            ended: None,
        })
    }

    /// Ends the machine's program and with it the machine.
    fn hang_up(&mut self) {
        self.output = None;
    }

    /// The next frame; without one, why there is none is in `ended`.
    fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            if let Some(frame) = self.frames.next_buffered()? {
                return Ok(Some(frame));
            }
            if self.interrupt.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                self.ended = Some(ExecuteError::Interrupted);
                return Ok(None);
            }
            let Some(output) = &mut self.output else { return Ok(None) };
            match output.next_event() {
                Ok(ExecEvent::Started { .. }) | Err(ClientError::TimedOut) => {}
                Ok(ExecEvent::Stdout(bytes)) => self.frames.push(&bytes),
                Ok(ExecEvent::Stderr(bytes)) => self.keep(&bytes),
                Ok(ExecEvent::Exited(exit)) => {
                    return Ok(self.over(&format!("ended with {}", exit.shell_code())));
                }
                Ok(ExecEvent::Failed(failure)) => {
                    return Ok(self.over(&format!("could not be started: {failure}")));
                }
                Err(error) => return Ok(self.over(&error.to_string())),
            }
        }
    }

    /// Waits a moment for an orderly end, so that the next machine does not meet this one; what the
    /// programs between here and there have said.
    fn finish(&mut self) -> String {
        let limit = Instant::now() + FAREWELL;
        while let Some(output) = &mut self.output {
            match output.next_event() {
                Ok(ExecEvent::Stderr(bytes)) => self.keep(&bytes),
                Err(ClientError::TimedOut) | Ok(ExecEvent::Stdout(_)) if Instant::now() < limit => {
                }
                _ => self.output = None,
            }
        }
        self.said()
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.said.extend_from_slice(bytes);
        let surplus = self.said.len().saturating_sub(KEPT);
        self.said.drain(..surplus);
    }

    fn said(&self) -> String {
        let said = String::from_utf8_lossy(&self.said);
        let said: String =
            said.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
        said.trim().to_owned()
    }

    fn over(&mut self, how: &str) -> Option<Frame> {
        self.output = None;
        let said = self.said();
        let tail = if said.is_empty() { String::new() } else { format!("; it said:\n{said}") };
        self.ended = Some(ExecuteError::Host {
            what: format!("the build machine broke off before the step was done: {how}{tail}"),
            hint: "`parbake doctor` shows what this host can do".to_owned(),
        });
        None
    }

    /// The next frame, or why there is none.
    fn expect(&mut self) -> Result<Frame, Failed> {
        match self.next() {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) => Err(self.broken()),
            Err(error) => Err(senseless(&format!("what is no message ({error})")).into()),
        }
    }

    fn broken(&mut self) -> Failed {
        let error = self.ended.take().unwrap_or_else(|| senseless("less than a step's result"));
        let broken = !matches!(error, ExecuteError::Interrupted);
        Failed { error: Box::new(error), broken }
    }

    /// Receives a tree.
    fn tree(&mut self, dest: &Path, limits: Limits) -> Result<(), Failed> {
        match unpack(&mut || self.next(), dest, limits) {
            Ok(_) => Ok(()),
            Err(TreeError::Ended) => Err(self.broken()),
            Err(TreeError::Io { path, source }) => {
                let what = format!("keeping /{} of a step's result", path.display());
                Err(ExecuteError::Io { what, source }.into())
            }
            Err(error @ TreeError::TooMuch { what: "bytes of content", .. }) => {
                Err(ExecuteError::Host {
                    what: format!("the step's result is refused: {error}"),
                    hint: "allow more with --build-disk".to_owned(),
                }
                .into())
            }
            Err(error) => Err(senseless(&format!("a result that is refused ({error})")).into()),
        }
    }
}
