//! A machine made to stand still, and written to files.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use parbake_protocol::agent::{QuiesceReport, QuiesceRequest, ZeroFill};
use parbake_protocol::vmm::SnapshotReport;

use super::{Sandbox, SandboxError};

impl Sandbox {
    /// Freezes the machine and writes it into `files`: caches dropped, free memory overwritten,
    /// user processes stopped, connections closed, devices drained. Afterwards only dropping
    /// the sandbox makes sense.
    ///
    /// # Errors
    /// See [`SandboxError`]; the files are then incomplete.
    pub fn freeze(&mut self, files: &FreezeFiles) -> Result<Frozen, SandboxError> {
        self.freeze_with(files, FreezeMemory::default())
    }

    /// As [`Sandbox::freeze`], with a choice of what becomes of memory nobody uses.
    ///
    /// # Errors
    /// See [`SandboxError`]; the files are then incomplete.
    pub fn freeze_with(
        &mut self,
        files: &FreezeFiles,
        memory: FreezeMemory,
    ) -> Result<Frozen, SandboxError> {
        let request = QuiesceRequest {
            end_sessions: false,
            freeze: true,
            forget_identity: true,
            sync: true,
            drop_caches: !memory.keep_caches,
            zero_free_memory: (!memory.keep_free_memory).then(ZeroFill::default),
            close_connections: true,
        };
        self.write_frozen(files, Extent::Whole, request)
    }

    /// Freezes the machine as it is, as quickly as may be, and writes it into `files`: user
    /// processes stopped where they are, connections closed. The machine stands still until
    /// [`Sandbox::thaw`]. Running commands are ended if `end_sessions`, else a failure. Whether
    /// the memory is whole, [`SnapshotReport::difference`] says.
    ///
    /// # Errors
    /// See [`SandboxError`]; the files are then incomplete, and the machine may stand still.
    pub fn suspend(
        &mut self,
        files: &FreezeFiles,
        extent: Extent,
        end_sessions: bool,
    ) -> Result<Frozen, SandboxError> {
        let request = QuiesceRequest {
            end_sessions,
            freeze: true,
            forget_identity: true,
            sync: true,
            drop_caches: false,
            zero_free_memory: None,
            close_connections: true,
        };
        self.write_frozen(files, extent, request)
    }

    /// Lets a machine go on that stands still after [`Sandbox::suspend`], or after one that failed.
    ///
    /// # Errors
    /// See [`SandboxError`]; the machine is of no use then.
    pub fn thaw(&mut self) -> Result<(), SandboxError> {
        self.monitor.resume()?;
        self.first = None;
        let mut client = self.connect()?;
        client.thaw().map_err(|error| self.blame(error))
    }

    fn write_frozen(
        &mut self,
        files: &FreezeFiles,
        extent: Extent,
        request: QuiesceRequest,
    ) -> Result<Frozen, SandboxError> {
        let begun = Instant::now();
        let mut client = self.connect()?;
        let report = client.quiesce(request).map_err(SandboxError::Agent)?;
        drop(client);
        if !report.complete() {
            return Err(SandboxError::Quiesce(report.steps));
        }
        let quiesced = begun.elapsed();
        self.monitor.pause()?;
        let paused = begun.elapsed();
        let snapshot = self.monitor.snapshot(
            &files.state,
            &files.memory,
            std::slice::from_ref(&files.disk),
            extent == Extent::Difference,
        )?;
        Ok(Frozen { snapshot, report, quiesced, paused, total: begun.elapsed() })
    }
}

/// How much of a machine's memory is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All that is not zero: for another host, another time.
    Whole,
    /// What differs from the image it was restored from, which a copy needs besides. All, if it
    /// was not restored, or from an image that was still filling up.
    Difference,
}

/// What becomes of memory nobody uses at the freeze.
#[derive(Debug, Clone, Copy, Default)]
pub struct FreezeMemory {
    /// File caches stay.
    pub keep_caches: bool,
    /// Free memory is not overwritten with zeros.
    pub keep_free_memory: bool,
}

/// Open, empty, writable files for [`Sandbox::freeze`].
#[derive(Debug)]
pub struct FreezeFiles {
    /// For vCPU, irqchip and device state.
    pub state: File,
    /// For guest memory.
    pub memory: File,
    /// For what the disk differs in from its base.
    pub disk: File,
}

impl FreezeFiles {
    /// Creates `state`, `memory` and `disk` in `directory`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create_in(directory: &Path) -> io::Result<Self> {
        let create = |name| {
            File::options().read(true).write(true).create_new(true).open(directory.join(name))
        };
        Ok(Self { state: create("state")?, memory: create("memory")?, disk: create("disk")? })
    }
}

/// A frozen machine.
#[derive(Debug)]
pub struct Frozen {
    /// What the monitor wrote.
    pub snapshot: SnapshotReport,
    /// What the agent did before.
    pub report: QuiesceReport,
    /// How long the agent took.
    pub quiesced: Duration,
    /// When the machine stood still, counted from the beginning.
    pub paused: Duration,
    /// How long everything took.
    pub total: Duration,
}
