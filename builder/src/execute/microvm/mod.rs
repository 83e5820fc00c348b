//! The microvm executor: `RUN` in machines of their own.
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
//! A machine lives for the steps of one stage that follow each other and hold nothing which another
//! must not see. Each of these can put what it likes into the next one's root, its shell among it, so
//! a kernel of its own would keep nothing from it; booting is most of what a short step takes. A step
//! with a secret or an SSH agent gets a machine that ran nothing before and runs nothing after it,
//! and so does each stage, and a step that may reach something else than the one before:
//!
//! ```text
//!  (none) ──a step──► boot ──► in use ──done──► idle ──next step fits──► in use
//!                                 │              │
//!                                 └─failed, ─────┴─does not fit, the stage ends──► (gone)
//!                                   secret, out of memory
//! ```
//! What the stack got since the machine was booted is sent along with a step; when that is much, a new
//! machine, which finds it on its disks, is sooner there.
//!
//! It runs here, or in the lab, where this program starts itself once more for it ([`run_guest`]); the
//! conversation is the same.

mod disk;
mod guest;
mod talk;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parbake_cache::template::MachineShape;
use parbake_node::event::Watch;
use parbake_node::network::Egress;
use parbake_node::sandbox::Sandbox;
use parbake_protocol::agent::tree::Limits;
use parbake_protocol::agent::{StepEnd, StepLayer, StepMount, StepRequest};

use super::error::ExecuteError;
use super::{Ended, Executor, Job, PreparedMount, Stream};
use disk::Disks;
use talk::{Conversation, Line, Step};

pub use guest::{Ground, InLab, StepGuest, run_guest, step_request};

/// Less than this left on a disk means that it is full.
const FULL: u64 = 64 << 10;

/// The most that is sent to a machine in place of booting another one, in bytes. Sending this takes
/// about as long as booting.
const MOST_SENT: u64 = 32 << 20;

/// The most trees that are sent to a machine; each is a layer of its overlays.
const MOST_TREES: usize = 32;

/// What an entry of a tree counts besides its content, in bytes.
const ENTRY: u64 = 1 << 10;

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
    /// Idle, if there is one.
    machine: Option<Machine>,
}

/// A machine that runs steps.
struct Machine {
    // Dropped in this order: who is told, then the machine.
    line: Box<dyn Conversation>,
    /// Of one that runs here.
    here: Option<(Sandbox, Watch)>,
    network: bool,
    /// Where the trees lie that it has.
    known: HashMap<PathBuf, StepLayer>,
    /// How many of them were sent, and what they came to.
    sent: usize,
    sent_bytes: u64,
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
            self.prepared = Some(Prepared { options, disks, machine: None });
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
        let Prepared { options, disks, machine } = self.prepared()?;
        let mut tell = |lines: &str| {
            if !lines.is_empty() {
                output(Stream::Stderr, format!("{lines}\n").as_bytes());
            }
        };
        let most = MOST_SENT.min(disk::spare(options.disk_bytes));
        let mut current = match machine.take() {
            Some(idle) if idle.takes(job, most) => idle,
            idle => {
                // There may be room for one only.
                tell(&idle.map(Machine::end).unwrap_or_default());
                Machine::boot(options, disks, job)?
            }
        };
        let (mounts, agents): (Vec<StepMount>, Vec<Option<PathBuf>>) =
            job.mounts.iter().filter_map(|mount| step_mount(mount, job.network)).unzip();
        let new = current.extend(job.lower);
        let request = StepRequest {
            argv: job.args.iter().map(|word| word.clone().into_bytes()).collect(),
            env: job.env.iter().map(|entry| entry.clone().into_bytes()).collect(),
            cwd: job.working_dir.as_bytes().to_vec(),
            uid: job.identity.uid,
            gid: job.identity.gid,
            groups: job.identity.groups.clone(),
            network: job.network,
            sent: new.iter().filter_map(|(layer, _)| layer.directory).collect(),
            layers: job.lower.iter().filter_map(|tree| current.known.get(tree)).copied().collect(),
            mounts,
        };
        let step = Step {
            job,
            request: &request,
            trees: new.iter().map(|(_, tree)| tree.as_path()).collect(),
            agents: (0u32..).zip(agents).filter_map(|(n, agent)| Some((n, agent?))).collect(),
            limits: Limits { bytes: options.disk_bytes, ..Limits::default() },
            last: job.private,
        };
        let end = current.line.step(&step, output);
        let end = end.map_err(|failed| failed.explain(|| current.ended_by_itself()))?;
        let good = end.exit.code == Some(0);
        let said = if good && !job.private && end.out_of_memory == 0 {
            let said = current.said();
            *machine = Some(current);
            said
        } else {
            current.end()
        };
        if !said.is_empty() {
            output(Stream::Stderr, format!("{said}\n").as_bytes());
        }
        let shortage = (!good).then(|| shortage(&end, options)).flatten();
        Ok(Ended { code: end.exit.shell_code(), shortage })
    }

    fn leave_stage(&mut self) -> Vec<String> {
        let machine = self.prepared.as_mut().and_then(|prepared| prepared.machine.take());
        let said = machine.map(Machine::end).unwrap_or_default();
        said.lines().map(str::to_owned).collect()
    }
}

impl Machine {
    /// Boots a machine whose disks hold the job's stack.
    fn boot(options: &MicrovmOptions, disks: &Disks, job: &Job<'_>) -> Result<Self, ExecuteError> {
        let (layers, mut images) = disks.of(job.lower)?;
        images.insert(0, disks.work()?);
        let guest = StepGuest {
            kernel: options.kernel.clone(),
            initramfs: options.initramfs.clone(),
            cmdline: options.cmdline.clone(),
            disks: images,
            machine: options.machine,
            egress: if job.network { options.egress.clone() } else { Egress::default() },
            // It outlives the step's own directory.
            scratch: options.ground.is_here().then(|| disks.scratch().to_owned()),
            ready_timeout_ms: u64::try_from(options.ready_timeout.as_millis()).unwrap_or(u64::MAX),
        };
        let (line, here): (Box<dyn Conversation>, _) = match &options.ground {
            Ground::Here => {
                let (events, watch) = Watch::new();
                let mut sandbox = run_guest(&guest, options.cancelled, events)
                    .map_err(|error| guest::boot_failed(&error))?;
                let session = guest::step_session(&mut sandbox)
                    .map_err(|error| guest::boot_failed(&error))?;
                (Box::new(Line::new(session)?), Some((sandbox, watch)))
            }
            Ground::Lab(lab) => (Box::new(Line::new(lab.session(&guest)?)?), None),
        };
        let known = job.lower.iter().cloned().zip(layers).collect();
        Ok(Self { line, here, network: job.network, known, sent: 0, sent_bytes: 0 })
    }

    /// What of a stack it does not have.
    fn lacks<'j>(&self, lower: &'j [PathBuf]) -> impl Iterator<Item = &'j PathBuf> {
        lower.iter().filter(|tree| !self.known.contains_key(*tree))
    }

    /// Whether a step can be run here after those that were; at most `most` bytes are sent.
    fn takes(&self, job: &Job<'_>, most: u64) -> bool {
        let mut left = most.saturating_sub(self.sent_bytes);
        !job.private
            && self.network == job.network
            && self.sent + self.lacks(job.lower).count() <= MOST_TREES
            && self.lacks(job.lower).all(|tree| weigh(tree, &mut left).is_ok())
    }

    /// Notes that it is about to get what of a stack it does not have; which, and where it will lie.
    fn extend(&mut self, lower: &[PathBuf]) -> Vec<(StepLayer, PathBuf)> {
        let mut new = Vec::new();
        for tree in self.lacks(lower).collect::<Vec<_>>() {
            let mut left = u64::MAX;
            let _ = weigh(tree, &mut left);
            self.sent_bytes = self.sent_bytes.saturating_add(u64::MAX - left);
            let directory = Some(u32::try_from(self.sent).unwrap_or(u32::MAX));
            self.sent += 1;
            new.push((StepLayer { disk: 0, directory }, tree.clone()));
        }
        self.known.extend(new.iter().map(|(layer, tree)| (tree.clone(), *layer)));
        new
    }

    fn ended_by_itself(&mut self) -> Option<parbake_node::sandbox::SandboxError> {
        self.here.as_mut().and_then(|(sandbox, _)| sandbox.ended_by_itself())
    }

    /// What it was denied since this was asked last.
    fn said(&mut self) -> String {
        match &self.here {
            Some((_, watch)) => watch.lines().join("\n"),
            None => self.line.said(),
        }
    }

    /// Ends it; what it was denied.
    fn end(mut self) -> String {
        let said = self.line.end();
        match self.here.take() {
            Some((sandbox, watch)) => {
                drop(sandbox);
                watch.lines().join("\n")
            }
            None => said,
        }
    }
}

/// Takes what a tree comes to from `left`.
fn weigh(tree: &Path, left: &mut u64) -> io::Result<()> {
    for entry in fs::read_dir(tree)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        // Holes are not sent.
        let weight = ENTRY + if meta.is_file() { meta.len().min(meta.blocks() << 9) } else { 0 };
        *left = left.checked_sub(weight).ok_or(io::ErrorKind::FileTooLarge)?;
        if meta.is_dir() {
            weigh(&entry.path(), left)?;
        }
    }
    Ok(())
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

/// A mount as the agent is told it, and the SSH agent it leads to; a step without a network has no
/// name servers.
fn step_mount(mount: &PreparedMount, network: bool) -> Option<(StepMount, Option<PathBuf>)> {
    let tree = |read_only: bool, kept: bool, secret: bool| StepMount::Tree {
        target: mount.target().as_bytes().to_vec(),
        read_only,
        kept,
        secret,
    };
    let mut agent = None;
    let mount = match mount {
        PreparedMount::Bind { read_only, .. } => tree(*read_only, false, false),
        PreparedMount::Cache { read_only, .. } => tree(*read_only, !read_only, false),
        PreparedMount::Secret { read_only, .. } => tree(*read_only, false, true),
        PreparedMount::Tmpfs { target, size } => {
            StepMount::Memory { target: target.clone().into_bytes(), size: *size }
        }
        PreparedMount::Resolver if network => StepMount::Resolver,
        PreparedMount::Resolver => return None,
        PreparedMount::Socket { target, path, mode, owner } => {
            agent = Some(path.clone());
            let (uid, gid) = *owner;
            StepMount::Socket { target: target.clone().into_bytes(), mode: *mode, uid, gid }
        }
    };
    Some((mount, agent))
}
