//! Conversations with build machines: a step is told, and what comes back is kept or shown.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use parbake_node::sandbox::SandboxError;
use parbake_protocol::agent::tree::{Attributes, Limits, TreeError, pack, unpack};
use parbake_protocol::agent::{
    ClientError, ExecEvent, ExecInput, ExecOutput, ExecSession, Frame, FrameError, FrameReader,
    SocketFrame, StepEnd, StepMount, StepRequest, Stream as Channel,
};

use super::guest;
use crate::execute::error::{Doing as _, ExecuteError};
use crate::execute::ssh::Connections;
use crate::execute::unpack::Unpack;
use crate::execute::{Job, PreparedMount, Stream, layer};

/// How often an interruption is looked for.
const TICK: Duration = Duration::from_millis(100);

/// Frames are sent in portions of about this.
const PORTION: usize = 256 << 10;

/// How long a machine may take to be gone once its last step is done.
const FAREWELL: Duration = Duration::from_secs(20);

/// The end of what the machine's own programs say that is kept.
const KEPT: usize = 4 << 10;

/// A step as a machine is told it.
pub(super) struct Step<'a> {
    pub job: &'a Job<'a>,
    pub request: &'a StepRequest,
    /// The trees that [`StepRequest::sent`] numbers.
    pub trees: Vec<&'a Path>,
    /// SSH agents by the number of their mount.
    pub agents: HashMap<u32, PathBuf>,
    pub limits: Limits,
    /// Nothing comes after it.
    pub last: bool,
}

/// A conversation, wherever the machine is.
pub(super) trait Conversation {
    /// Runs a step to its end.
    fn step(
        &mut self,
        step: &Step<'_>,
        show: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<StepEnd, Failed>;

    /// What the programs between here and there have said since this was asked last.
    fn said(&mut self) -> String;

    /// Lets the machine go, and waits a moment for it; what was said.
    fn end(&mut self) -> String;
}

/// Why a conversation broke off.
pub(super) struct Failed {
    error: Box<ExecuteError>,
    /// The end of the machine may say more.
    broken: bool,
}

impl Failed {
    pub fn explain(self, ended: impl FnOnce() -> Option<SandboxError>) -> ExecuteError {
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

/// A conversation over one stream.
pub(super) struct Line<S: Channel> {
    input: ExecInput<S>,
    incoming: Incoming<S>,
}

impl<S: Channel> Line<S> {
    /// With a session of [`super::step_request`].
    pub fn new(session: ExecSession<S>) -> Result<Self, ExecuteError> {
        let (input, output) = session.split();
        Ok(Self { input, incoming: Incoming::new(output)? })
    }
}

/// Towards a machine; whole frames of several threads.
struct Outgoing<S: Channel>(Mutex<ExecInput<S>>);

impl<S: Channel> Outgoing<S> {
    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_stdin(bytes)
    }
}

impl<S: Channel + Send + 'static> Conversation for Line<S> {
    fn step(
        &mut self,
        step: &Step<'_>,
        show: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<StepEnd, Failed> {
        let outgoing = Arc::new(Outgoing(Mutex::new(self.input.clone())));
        std::thread::scope(|scope| {
            let sender = scope.spawn({
                let outgoing = Arc::clone(&outgoing);
                move || send(&outgoing, step)
            });
            let tell = move |frame: SocketFrame| {
                let mut bytes = Vec::new();
                Frame::Socket(frame).encode(&mut bytes).map_err(io::Error::other)?;
                outgoing.write(&bytes)
            };
            let mut hearing = Hearing {
                incoming: &mut self.incoming,
                interrupt: step.job.interrupt,
                show,
                sockets: Connections::new(scope, step.agents.clone(), Arc::new(tell)),
            };
            let result = hearing.step(step);
            // Ends connections that are still open.
            drop(hearing);
            if result.is_err() {
                // Nothing more is sent, and a sender that waits is let go.
                self.incoming.hang_up();
            } else if step.last {
                let _ = self.input.close_stdin();
                self.incoming.finish();
            }
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

    fn said(&mut self) -> String {
        self.incoming.take_said()
    }

    fn end(&mut self) -> String {
        let _ = self.input.close_stdin();
        self.incoming.finish();
        self.incoming.take_said()
    }
}

/// Sends the step, then the trees it is given.
fn send<S: Channel>(outgoing: &Outgoing<S>, step: &Step<'_>) -> io::Result<()> {
    let mut portion = Vec::with_capacity(2 * PORTION);
    let mut put = |frame: Frame| -> io::Result<()> {
        frame.encode(&mut portion).map_err(io::Error::other)?;
        if portion.len() >= PORTION || matches!(frame, Frame::DataEnd) {
            outgoing.write(&portion)?;
            portion.clear();
        }
        Ok(())
    };
    put(Frame::Step(Box::new(step.request.clone())))?;
    for tree in &step.trees {
        pack(tree, Attributes::Overlay, &mut put)?;
    }
    pack(step.job.upper, Attributes::Overlay, &mut put)?;
    for mount in step.job.mounts {
        match mount {
            PreparedMount::Bind { path, .. }
            | PreparedMount::Cache { path, .. }
            | PreparedMount::Secret { path, .. } => {
                pack(path, Attributes::Portable, &mut put)?;
            }
            _ => {}
        }
    }
    put(Frame::DataEnd)
}

/// Lays what changed in a directory over it; both are this machine's by now.
fn merge(changes: &Path, directory: &Path, scratch: &Path) -> io::Result<()> {
    let tar = scratch.join("changes.tar");
    layer::write(changes, io::BufWriter::new(File::create(&tar)?), None, false)?;
    let how = Unpack { layer: true, whiteouts: true, owner: None };
    crate::execute::unpack::unpack(io::BufReader::new(File::open(&tar)?), directory, how)?;
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
struct Incoming<S: Channel> {
    output: Option<ExecOutput<S>>,
    frames: FrameReader,
    /// The end of what the programs between here and there said.
    said: Vec<u8>,
    /// Why no more frames come.
    ended: Option<ExecuteError>,
}

impl<S: Channel> Incoming<S> {
    fn new(mut output: ExecOutput<S>) -> Result<Self, ExecuteError> {
        output.set_timeout(Some(TICK)).doing(|| "talking to a build machine".to_owned())?;
        Ok(Self { output: Some(output), frames: FrameReader::new(), said: Vec::new(), ended: None })
    }

    /// Ends the machine's program and with it the machine.
    fn hang_up(&mut self) {
        self.output = None;
    }

    /// The next frame; without one, why there is none is in `ended`.
    fn next(&mut self, interrupt: Option<&AtomicBool>) -> Result<Option<Frame>, FrameError> {
        loop {
            if let Some(frame) = self.frames.next_buffered()? {
                return Ok(Some(frame));
            }
            if interrupt.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
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

    /// Waits a moment for an orderly end, so that the next machine does not meet this one, and to
    /// hear what the programs between here and there have to say.
    fn finish(&mut self) {
        let limit = Instant::now() + FAREWELL;
        while let Some(output) = &mut self.output {
            match output.next_event() {
                Ok(ExecEvent::Stderr(bytes)) => self.keep(&bytes),
                Err(ClientError::TimedOut) | Ok(ExecEvent::Stdout(_)) if Instant::now() < limit => {
                }
                _ => self.output = None,
            }
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.said.extend_from_slice(bytes);
        let surplus = self.said.len().saturating_sub(KEPT);
        self.said.drain(..surplus);
    }

    fn take_said(&mut self) -> String {
        let said = std::mem::take(&mut self.said);
        let said = String::from_utf8_lossy(&said);
        let said: String =
            said.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
        said.trim().to_owned()
    }

    fn over(&mut self, how: &str) -> Option<Frame> {
        self.output = None;
        let said = self.take_said();
        let tail = if said.is_empty() { String::new() } else { format!("; it said:\n{said}") };
        self.ended = Some(ExecuteError::Host {
            what: format!("the build machine broke off before the step was done: {how}{tail}"),
            hint: "`parbake doctor` shows what this host can do".to_owned(),
        });
        None
    }
}

/// What comes while one step runs.
struct Hearing<'o, 'scope, 'env, S: Channel> {
    incoming: &'o mut Incoming<S>,
    interrupt: Option<&'o AtomicBool>,
    show: &'o mut dyn FnMut(Stream, &[u8]),
    sockets: Connections<'scope, 'env>,
}

impl<S: Channel> Hearing<'_, '_, '_, S> {
    fn step(&mut self, step: &Step<'_>) -> Result<StepEnd, Failed> {
        let Step { job, request, limits, .. } = step;
        let end = loop {
            match self.expect()? {
                Frame::Stdout(bytes) => (self.show)(Stream::Stdout, &bytes),
                Frame::Stderr(bytes) => (self.show)(Stream::Stderr, &bytes),
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
            self.tree(job.upper, *limits)?;
        }
        let kept = |mount: &&StepMount| matches!(mount, StepMount::Tree { kept: true, .. });
        let caches = job.mounts.iter().filter_map(|mount| match mount {
            PreparedMount::Cache { path, read_only: false, .. } => Some(path),
            _ => None,
        });
        for (number, (_, path)) in request.mounts.iter().filter(kept).zip(caches).enumerate() {
            let changes = job.scratch.join(format!("changes{number}"));
            self.tree(&changes, *limits)?;
            merge(&changes, path, job.scratch)
                .doing(|| format!("keeping what a step wrote to {}", path.display()))?;
        }
        match self.expect()? {
            Frame::DataEnd => Ok(end),
            _ => Err(senseless("more than a step's result").into()),
        }
    }

    /// The next frame that is not a connection's.
    fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            match self.incoming.next(self.interrupt)? {
                Some(Frame::Socket(frame)) => {
                    if let Err(what) = self.sockets.take(frame) {
                        self.incoming.ended = Some(senseless(what));
                        return Ok(None);
                    }
                }
                frame => return Ok(frame),
            }
        }
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
        let error = self.incoming.ended.take();
        let error = error.unwrap_or_else(|| senseless("less than a step's result"));
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
