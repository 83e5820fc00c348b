//! Baking: boot a template once, bring it to rest, freeze it, install the snapshot.
//!
//! ```text
//! template ─► boot ─► process, checks, warm-up ─► quiesce ─► pause ─► state, memory, disk ─► store
//!                              (guest.rs)
//! ```
//! Everything is written into a staging directory of the store; the snapshot exists only once its
//! manifest, which names all three parts by digest, is in the store.

pub mod gate;
mod guest;

use std::time::{Duration, Instant};

use parbake_cache::template::{
    CompatContract, MachineShape, ObjectRef, SCHEMA_VERSION, SnapshotManifest,
};
use parbake_cache::{Digest, Store, StoreError};
use parbake_node::sandbox::{FreezeFiles, FreezeMemory, Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::AGENT_PROTOCOL;

use crate::template::{Template, TemplateError};

/// What a bake is asked for.
#[derive(Debug, Clone, Default)]
pub struct BakeOptions {
    /// The machine's shape; absent: the template's.
    pub machine: Option<MachineShape>,
    /// How the guest is run.
    pub sandbox: SandboxOptions,
    /// How often the template's times count; more than once where the guest is emulated. 0 is 1.
    pub patience: u32,
}

/// Where a bake is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BakeEvent {
    /// The guest boots.
    Booting,
    /// The agent rang.
    Ready(Duration),
    /// The image's process is started.
    Starting(String),
    /// This check does not hold yet, or this is waited for.
    Checking(String),
    /// A warm-up step runs.
    WarmUp {
        /// Counted from 1.
        step: usize,
        /// Of so many.
        steps: usize,
        /// As written, in one line.
        text: String,
    },
    /// The guest is brought to rest and written out.
    Freezing,
    /// The files are hashed and installed.
    Installing,
}

/// A finished bake.
#[derive(Debug, Clone)]
pub struct Baked {
    /// Digest of the snapshot's manifest.
    pub digest: Digest,
    /// The manifest.
    pub snapshot: SnapshotManifest,
    /// Where the time went.
    pub timings: BakeTimings,
    /// Bytes of guest memory that are not zero.
    pub memory_data_bytes: u64,
    /// Bytes the guest's disk differs in from the template's.
    pub disk_data_bytes: u64,
}

/// Where the time of a bake went.
#[derive(Debug, Clone, Copy)]
pub struct BakeTimings {
    /// Spawn to the agent's doorbell.
    pub cold_boot: Duration,
    /// Dropping caches, zero-filling, freezing user processes.
    pub quiesce: Duration,
    /// Pausing and writing.
    pub write: Duration,
    /// Hashing and installing.
    pub install: Duration,
    /// Everything.
    pub total: Duration,
}

/// Why a bake failed. Nothing of it is left behind.
#[derive(Debug, thiserror::Error)]
pub enum BakeError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The guest.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A check did not hold in time, or not any more right before the freeze.
    #[error(
        "the guest was not ready within {} s: {check} does not hold{}{}",
        after.as_secs_f64(), part("last answer", output), part("its console ends", console)
    )]
    NotReady {
        /// The limit.
        after: Duration,
        /// Which.
        check: String,
        /// What it said last.
        output: String,
        /// The end of the guest's console.
        console: String,
    },
    /// A warm-up step failed.
    #[error(
        "warm-up step {step}: {how}{}{}",
        part("its last output", output),
        part("the console ends", console)
    )]
    WarmUp {
        /// Which, and as written.
        step: String,
        /// How it ended.
        how: String,
        /// The end of what it said.
        output: String,
        /// The end of the guest's console.
        console: String,
    },
    /// The image's process is not there any more.
    #[error(
        "the start command ended before the freeze: {command} ({how}){}{}",
        part("its output", output),
        part("the console ends", console)
    )]
    Ended {
        /// As written.
        command: String,
        /// How it ended.
        how: String,
        /// The end of what it said.
        output: String,
        /// The end of the guest's console.
        console: String,
    },
    /// A file in the staging directory.
    #[error("cannot write the snapshot's files")]
    Files(#[source] std::io::Error),
}

fn part(name: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("; {name}:\n{text}") }
}

/// Bakes `template` and registers the snapshot in the store.
///
/// # Errors
/// See [`BakeError`].
pub fn bake(
    store: &Store,
    template: &Template,
    options: &BakeOptions,
    mut events: impl FnMut(BakeEvent),
) -> Result<Baked, BakeError> {
    let begun = Instant::now();
    let _lease = store.lease(&[template.digest])?;
    let staging = store.stage()?;
    let shape = options.machine.unwrap_or(template.manifest.machine);
    let files = template.boot_files(store)?;

    events(BakeEvent::Booting);
    let mut sandbox = Sandbox::boot(&files, shape, &template.manifest.process, &options.sandbox)?;
    let cold_boot = sandbox.timings().ready;
    events(BakeEvent::Ready(cold_boot));

    let mut memory = FreezeMemory::default();
    if let Some(instructions) = &template.manifest.bake {
        let mut guest = guest::Guest {
            sandbox: &mut sandbox,
            process: &template.manifest.process,
            instructions,
            options: &options.sandbox,
            patience: options.patience.max(1),
            pid: None,
        };
        guest.prepare(&mut events)?;
        memory.keep_caches = instructions.keep_caches;
        memory.keep_free_memory = instructions.keep_free_memory;
    }

    events(BakeEvent::Freezing);
    let freeze_files = FreezeFiles::create_in(staging.path()).map_err(BakeError::Files)?;
    let frozen = sandbox.freeze_with(&freeze_files, memory)?;
    drop(sandbox);
    drop(freeze_files);

    events(BakeEvent::Installing);
    let installing = Instant::now();
    let state = store.adopt_blob(staging.path().join("state"))?;
    let memory = store.adopt_image(staging.path().join("memory"))?;
    let disk = store.adopt_image(staging.path().join("disk"))?;
    let report = frozen.snapshot;
    let snapshot = SnapshotManifest {
        schema_version: SCHEMA_VERSION,
        template: template.digest,
        machine: shape,
        compat: CompatContract {
            architecture: template.manifest.architecture.clone(),
            cpu_vendor: report.cpu_vendor,
            cpu_features: report.cpu_features,
            kvm_kind: report.kvm_kind,
            state_version: report.state_version,
            agent_protocol: AGENT_PROTOCOL,
            page_size: 4096,
        },
        state,
        memory,
        disk,
        generation: report.generation,
    };
    let ObjectRef { digest, .. } = store.put_json(&snapshot)?;
    store.set_snapshot(&template.digest, &digest)?;
    Ok(Baked {
        digest,
        snapshot,
        timings: BakeTimings {
            cold_boot,
            quiesce: frozen.quiesced,
            write: frozen.total.saturating_sub(frozen.quiesced),
            install: installing.elapsed(),
            total: begun.elapsed(),
        },
        memory_data_bytes: report.memory_data_bytes,
        disk_data_bytes: report.overlay_data_bytes.iter().sum(),
    })
}
