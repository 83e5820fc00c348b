//! Executes a build plan: steps on top of bases, layers out of steps, an image out of layers.
//!
//! A stage's files are a stack of directories in overlayfs' form. A step is looked up in the build
//! directory by a key over everything it depends on; what is not there is done on an overlay of
//! the stack, and what it changed becomes the next directory and a layer. `COPY` and `WORKDIR` are
//! done by this program, `RUN` by an [`Executor`]: in namespaces of this machine ([`Sandbox`]) or
//! in a machine of its own ([`Microvm`]).

mod base;
mod build;
mod cache;
mod copy;
mod error;
mod external;
mod images;
mod inputs;
mod layer;
mod layout;
mod microvm;
mod mounts;
mod overlay;
mod rootpath;
mod sandbox;
mod secrets;
mod ssh;
mod step;
#[cfg(test)]
mod tests;
mod unpack;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parbake_cache::Digest;
use parbake_recipes::Location;
use parbake_recipes::plan::ImageConfig;

use crate::image::BlobsElsewhere;

pub use base::{BaseLayer, BaseLayers, Bases, NoImages};
pub use build::build;
pub use cache::{Claim, claim, clear, disk_bytes};
pub use error::ExecuteError;
pub use external::{ExternalOptions, Tool, build_external};
pub use images::SourceImages;
pub(crate) use images::config as plan_config;
pub use microvm::{
    Ground, InLab, Microvm, MicrovmOptions, Preparation, StepGuest, run_guest, step_request,
};
pub(crate) use rootpath::Identity;
pub use sandbox::Sandbox;
pub use secrets::{Finding, SHORTEST as SHORTEST_SECRET, search_file};

/// Media type of the layers made here. They are not compressed: the next reader is this machine.
pub(crate) const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";

/// How a plan is executed.
#[derive(Debug, Clone, Default)]
pub struct ExecuteOptions {
    /// The build directory: caches and work in progress.
    pub directory: PathBuf,
    /// The build context.
    pub context: PathBuf,
    /// `--build-context name=DIR`.
    pub contexts: BTreeMap<String, PathBuf>,
    /// Where the result goes: an OCI layout, made anew.
    pub output: PathBuf,
    /// Leaves layers of base images where they are: the layout then lacks what
    /// [`BuiltImage::elsewhere`] names, and nothing is copied, or fetched, that is not needed.
    pub partial: bool,
    /// Name of the image in the layout.
    pub tag: Option<String>,
    /// Secrets by id.
    pub secrets: BTreeMap<String, Vec<u8>>,
    /// Sockets of SSH agents by id.
    pub ssh: BTreeMap<String, PathBuf>,
    /// What `RUN` may reach.
    pub network: NetworkAccess,
    /// Does every step again.
    pub no_cache: bool,
    /// Time of everything the build makes.
    pub source_date_epoch: Option<i64>,
    /// Refuses an executor that shares this machine's kernel.
    pub require_isolation: bool,
    /// Fails on what looks like a credential instead of only listing it.
    pub strict: bool,
    /// Set from elsewhere to stop.
    pub interrupt: Option<Arc<AtomicBool>>,
}

/// What `RUN` steps may reach unless they ask for less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NetworkAccess {
    /// What this machine can reach.
    #[default]
    Host,
    /// Loopback only.
    None,
}

/// What happens during a build.
#[derive(Debug, Clone)]
pub enum Event<'a> {
    /// Who executes, once.
    Executor {
        /// Name.
        name: &'static str,
        /// Steps run behind a machine boundary.
        isolated: bool,
    },
    /// A stage begins.
    Stage {
        /// Counted from 0.
        stage: usize,
        /// Stages of the plan.
        stages: usize,
        /// `AS name`.
        name: Option<&'a str>,
    },
    /// A step is looked at.
    StepStarted {
        /// Counted from 0.
        stage: usize,
        /// Counted from 1.
        step: usize,
        /// Steps of the stage that do something.
        steps: usize,
        /// Where it is written.
        at: &'a Location,
        /// As written.
        text: &'a str,
    },
    /// Its result is in the cache.
    StepCached,
    /// Why it has to be done: what differs from last time, or that there was none.
    StepReason {
        /// A sentence without a full stop.
        reason: &'a str,
    },
    /// A program says something.
    Output {
        /// Where.
        stream: Stream,
        /// What, not cut at lines.
        bytes: &'a [u8],
    },
    /// The step is done.
    StepFinished {
        /// It took this long.
        milliseconds: u128,
        /// Size of its layer in bytes.
        size: u64,
    },
    /// Something to know that stops nothing.
    Warning {
        /// Where, if it has a place.
        at: Option<&'a Location>,
        /// What.
        message: &'a str,
    },
}

/// One of a program's two outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What a build made.
#[derive(Debug, Clone)]
pub struct BuiltImage {
    /// The image, as a layout any tool reads.
    pub oci_layout: PathBuf,
    /// The blobs it does not hold; none unless [`ExecuteOptions::partial`] was asked for.
    pub elsewhere: BlobsElsewhere,
    /// Its manifest.
    pub manifest: Digest,
    /// Its configuration.
    pub config: ImageConfig,
    /// Steps that were done.
    pub executed: usize,
    /// Steps whose results were in the cache.
    pub cached: usize,
    /// What looks like a credential.
    pub findings: Vec<Finding>,
}

/// A mount that is ready on this machine.
#[derive(Debug, Clone)]
pub enum PreparedMount {
    /// A file or directory.
    Bind {
        /// In the stage.
        target: String,
        /// On this machine.
        path: PathBuf,
        /// Writes fail; otherwise they are allowed and forgotten.
        read_only: bool,
    },
    /// A directory that keeps what is written.
    Cache {
        /// In the stage.
        target: String,
        /// On this machine.
        path: PathBuf,
        /// Writes fail.
        read_only: bool,
    },
    /// A file that lies in memory and must never lie on a disk.
    Secret {
        /// In the stage.
        target: String,
        /// On this machine.
        path: PathBuf,
        /// Writes fail.
        read_only: bool,
    },
    /// A socket that leads to an SSH agent.
    Socket {
        /// In the stage.
        target: String,
        /// The agent's own, on this machine.
        path: PathBuf,
        /// Permissions of the one in the stage.
        mode: u32,
        /// Its owner and group.
        owner: (u32, u32),
    },
    /// Memory.
    Tmpfs {
        /// In the stage.
        target: String,
        /// Limit in bytes.
        size: Option<u64>,
    },
    /// `/etc/resolv.conf`, as it has to be where the step runs.
    Resolver,
}

/// Where programs look for their name servers.
pub(crate) const RESOLVER: &str = "/etc/resolv.conf";

impl PreparedMount {
    /// Where it appears in the stage.
    #[must_use]
    pub fn target(&self) -> &str {
        match self {
            Self::Bind { target, .. }
            | Self::Cache { target, .. }
            | Self::Secret { target, .. }
            | Self::Socket { target, .. }
            | Self::Tmpfs { target, .. } => target,
            Self::Resolver => RESOLVER,
        }
    }
}

/// A `RUN` step, ready to be run.
#[derive(Debug)]
pub struct Job<'a> {
    /// Program and arguments.
    pub args: &'a [String],
    /// `NAME=value`, secrets among them.
    pub env: &'a [String],
    /// Absolute.
    pub working_dir: &'a str,
    /// Who.
    pub(crate) identity: &'a Identity,
    /// The stage's root directory, writable; there only for executors that run on this machine's
    /// kernel.
    pub root: &'a Path,
    /// The stack the root is made of, lowest first, without [`Job::upper`]: an isolated executor
    /// mounts it itself and fills `upper`.
    pub lower: &'a [PathBuf],
    /// What the step changes, in overlayfs' form: a directory like the stack's root, empty.
    pub upper: &'a Path,
    /// Besides the root.
    pub mounts: &'a [PreparedMount],
    /// More than loopback.
    pub network: bool,
    /// It is given what no other step may see: a secret, or an SSH agent.
    pub private: bool,
    /// A directory of the step's own on this machine.
    pub scratch: &'a Path,
    /// Set from elsewhere to stop.
    pub interrupt: Option<&'a AtomicBool>,
}

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code; 128 and the signal's number for a killed one.
    pub code: i32,
    /// What there was not enough of, and what to do, where it failed and that is known.
    pub shortage: Option<String>,
}

/// Who runs `RUN` steps.
pub trait Executor {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// Whether steps run behind a machine boundary.
    fn isolated(&self) -> bool;

    /// Runs a program to its end. Called for one step at a time; everything in the job is ready
    /// and is taken away afterwards.
    ///
    /// # Errors
    /// When the program could not be run at all, or someone asked to stop.
    fn run(
        &mut self,
        job: &Job<'_>,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Ended, ExecuteError>;

    /// A stage is done: whatever was kept for its next step is let go, as the steps of another must
    /// not meet it. What there is to be told.
    fn leave_stage(&mut self) -> Vec<String> {
        Vec::new()
    }
}
