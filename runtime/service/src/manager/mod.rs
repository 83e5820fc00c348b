//! All sandboxes of this node, and what may happen to each of them when.
//!
//! ```text
//!            create, fork, resume            fork
//!  (none) ─────► Starting ─────► Running ◄────────► Forking
//!                   │               │ └──pause──► Pausing ──► Paused (in the store, see `copy`)
//!                   └─failed─►(none)│                │
//!                                   └─rm, ttl, ended by itself─► Ending ──► (none)
//! ```
//! An [`Entry`]'s state changes under its lock; what takes long happens outside of it, with the
//! state saying so, so that everybody else is refused rather than kept waiting. The machine itself
//! has a lock of its own, which is held for as long as somebody talks to its monitor; commands and
//! files go straight to the guest's socket and need neither.
//!
//! Everything is written down before it happens: what cannot be logged does not happen.

mod adopt;
mod copy;
mod create;
mod files;
mod run;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use parbake_cache::{Digest, Lease, Store};
use parbake_node::event::EventSender;
use parbake_node::network::{EgressCounts, Pool};
use parbake_node::sandbox::Sandbox as Machine;
use parbake_protocol::vmm::Jail;
use serde_json::{Value, json};

pub use files::Transfer;
pub use run::{Execution, gone};

use crate::audit::{Audit, AuditConfig, AuditError, Entry as AuditEntry};
use crate::feed::{Feed, unix_ms};
use crate::guard::Guard;
use crate::metrics::{Metrics, Now};
use crate::model::{Event, NodeStatus, Sandbox, SandboxList, State, Stats, Timings};
use crate::problem::{Kind, Problem};
use crate::record::Record;

/// How often sandboxes are looked after.
const TICK: Duration = Duration::from_millis(500);
/// Every how many ticks denied packets are counted: that asks the kernel a few questions for each
/// sandbox with a network.
const COUNT: u32 = 10;

/// Who acts when nobody asked.
pub const SELF: &str = "parbaked";

/// How a service is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The store's directory.
    pub store: PathBuf,
    /// Where sandboxes' directories and the lock are.
    pub run_dir: PathBuf,
    /// Where guests' writes go; absent: memory.
    pub scratch: Option<PathBuf>,
    /// Where forks' memory goes; absent: the store.
    pub fork_dir: Option<PathBuf>,
    /// The most sandboxes there may be.
    pub max_sandboxes: usize,
    /// How long a sandbox lives when its maker does not say; absent: for ever.
    pub default_ttl: Option<Duration>,
    /// How long a guest may take to be ready.
    pub ready_timeout: Duration,
    /// How long a guest may take to answer.
    pub answer_timeout: Duration,
    /// The most bytes of a file or archive.
    pub transfer_limit: u64,
    /// The audit log; absent: there is none.
    pub audit: Option<AuditConfig>,
    /// Who is asked before a command.
    pub guard: Option<Guard>,
    /// How tightly monitors lock themselves in.
    pub jail: Jail,
    /// Networks prepared in advance.
    pub networks_ready: usize,
}

/// Why a service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The run directory.
    #[error("cannot use the run directory {}", path.display())]
    RunDir {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Another service uses it.
    #[error("another parbaked uses {}; give this one a --run-dir of its own", .0.display())]
    InUse(PathBuf),
    /// The audit log.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The store.
    #[error(transparent)]
    Store(#[from] parbake_cache::StoreError),
}

/// The node's sandboxes.
#[derive(Debug)]
pub struct Manager {
    config: Config,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
    keys: Mutex<HashMap<String, Keyed>>,
    /// Directories whose monitor lives and does not answer.
    strays: Mutex<Vec<PathBuf>>,
    draining: AtomicBool,
    stopped: AtomicBool,
    audit: Option<Audit>,
    feed: Feed,
    metrics: Metrics,
    /// Made when the first sandbox with a network is.
    pool: OnceLock<Arc<Pool>>,
    /// Where what sandboxes were denied is told.
    events: EventSender,
    /// Held for as long as this service uses the run directory.
    _lock: File,
}

/// What an idempotency key stands for.
#[derive(Debug, Clone)]
enum Keyed {
    Working(Digest),
    Done(Digest, String),
}

/// One sandbox.
#[derive(Debug)]
pub(crate) struct Entry {
    id: String,
    directory: PathBuf,
    facts: Mutex<Facts>,
    machine: Mutex<Option<Machine>>,
    lease: Mutex<Option<Lease>>,
}

#[derive(Debug)]
struct Facts {
    state: State,
    record: Record,
    jail: Vec<String>,
    monitor_pid: Option<u32>,
    timings: Option<Timings>,
    executions: u32,
    executed: u64,
    /// What it was denied, as far as it has been counted.
    denied: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding these in a way that leaves them half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    fn new(record: Record, directory: PathBuf, state: State) -> Arc<Self> {
        Arc::new(Self {
            id: record.id.clone(),
            directory,
            facts: Mutex::new(Facts {
                state,
                record,
                jail: Vec::new(),
                monitor_pid: None,
                timings: None,
                executions: 0,
                executed: 0,
                denied: 0,
            }),
            machine: Mutex::new(None),
            lease: Mutex::new(None),
        })
    }

    /// Gives the entry its machine: it takes commands now.
    fn run(&self, machine: Machine, timings: Option<Timings>) {
        let mut facts = lock(&self.facts);
        facts.jail.clone_from(&machine.timings().jail);
        facts.monitor_pid = Some(machine.monitor_pid());
        facts.timings = timings;
        facts.state = State::Running;
        *lock(&self.machine) = Some(machine);
    }

    fn view(&self) -> Sandbox {
        let facts = lock(&self.facts);
        let record = &facts.record;
        Sandbox {
            id: record.id.clone(),
            state: facts.state,
            template: record.template.clone(),
            template_digest: record.template_digest.to_string(),
            cpus: record.machine.vcpus,
            memory_mib: record.machine.memory_mib,
            created_unix_ms: record.created_unix_ms,
            expires_unix_ms: record.expires_unix_ms,
            parent: record.parent.clone(),
            secrets: record.secrets.clone(),
            labels: record.labels.clone(),
            egress: record.egress.clone(),
            jail: facts.jail.clone(),
            monitor_pid: facts.monitor_pid,
            executions: facts.executions,
            timings: facts.timings,
        }
    }

    /// Goes from `Running` to `state` for as long as the result lives, and then back.
    fn enter(self: &Arc<Self>, state: State, end_sessions: bool) -> Result<Held, Problem> {
        let mut facts = lock(&self.facts);
        running(&self.id, &facts)?;
        if facts.executions > 0 && !end_sessions {
            let count = facts.executions;
            let message = format!("{count} commands run in sandbox {}", self.id);
            return Err(Problem::new(Kind::Busy, message)
                .hint("wait for them, or have them ended with --end-sessions"));
        }
        facts.state = state;
        Ok(Held { entry: Arc::clone(self), state })
    }
}

/// Refuses what only a running sandbox does.
fn running(id: &str, facts: &Facts) -> Result<(), Problem> {
    let doing = match facts.state {
        State::Running => return Ok(()),
        State::Starting => "is being made",
        State::Forking => "stands still while it is copied",
        State::Pausing => "is being paused",
        State::Paused => "is paused; resume it first",
        State::Ending => "is being removed",
    };
    Err(Problem::new(Kind::WrongState, format!("sandbox {id} {doing}")))
}

/// Everything that was not let out.
fn all(counts: &EgressCounts) -> u64 {
    let EgressCounts { denied, blocked, forged, ipv6, flood, names, untold: _ } = counts;
    denied + blocked + forged + ipv6 + flood + names
}

/// An entry in a passing state.
struct Held {
    entry: Arc<Entry>,
    state: State,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut facts = lock(&self.entry.facts);
        if facts.state == self.state {
            facts.state = State::Running;
        }
    }
}

impl Manager {
    /// What happens, for those who listen.
    pub fn feed(&self) -> &Feed {
        &self.feed
    }

    /// The metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// How the service is set up.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Writes down that something is about to happen.
    ///
    /// # Errors
    /// [`Kind::AuditFailed`]: it must not happen.
    pub(crate) fn report(
        &self,
        actor: &str,
        kind: &str,
        sandbox: Option<&str>,
        detail: Value,
    ) -> Result<(), Problem> {
        let unix_ms = unix_ms();
        if let Some(audit) = &self.audit {
            let entry = AuditEntry { kind, actor, sandbox, unix_ms, detail: &detail };
            audit.write(&entry).map_err(|error| Problem::because(Kind::AuditFailed, &error))?;
        }
        self.feed.tell(Event {
            sequence: 0,
            unix_ms,
            kind: kind.to_owned(),
            actor: actor.to_owned(),
            sandbox: sandbox.map(str::to_owned),
            detail,
        });
        Ok(())
    }

    /// Writes down that something has happened; it cannot be undone.
    pub(crate) fn note(&self, actor: &str, kind: &str, sandbox: Option<&str>, detail: Value) {
        if let Err(problem) = self.report(actor, kind, sandbox, detail) {
            self.metrics.failed(kind, &problem.kind.word());
            eprintln!("parbaked: {kind}: {problem}");
        }
    }

    /// Writes down that something failed, and hands the failure on.
    pub(crate) fn failed(
        &self,
        actor: &str,
        operation: &str,
        sandbox: Option<&str>,
        problem: Problem,
    ) -> Problem {
        let word = problem.kind.word();
        self.metrics.failed(operation, &word);
        let detail = json!({ "operation": operation, "problem": word, "message": problem.message });
        self.note(actor, "failed", sandbox, detail);
        problem
    }

    fn store(&self) -> Result<Store, Problem> {
        // A handle keeps alive what went through it, so each task has its own.
        Store::open(&self.config.store).map_err(Problem::from)
    }

    fn entry(&self, id: &str) -> Result<Arc<Entry>, Problem> {
        lock(&self.entries).get(id).cloned().ok_or_else(|| Problem::unknown(id))
    }

    fn all(&self) -> Vec<Arc<Entry>> {
        lock(&self.entries).values().cloned().collect()
    }

    /// All sandboxes, the paused ones among them; oldest first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn list(&self) -> Result<SandboxList, Problem> {
        let mut sandboxes: Vec<Sandbox> = self.all().iter().map(|entry| entry.view()).collect();
        let awake: Vec<String> = sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect();
        sandboxes.extend(self.paused()?.into_iter().filter(|s| !awake.contains(&s.id)));
        sandboxes.sort_by(|a, b| (a.created_unix_ms, &a.id).cmp(&(b.created_unix_ms, &b.id)));
        Ok(SandboxList { sandboxes })
    }

    /// One sandbox.
    ///
    /// # Errors
    /// [`Kind::UnknownSandbox`].
    pub fn get(&self, id: &str) -> Result<Sandbox, Problem> {
        match self.entry(id) {
            Ok(entry) => Ok(entry.view()),
            Err(unknown) => self.paused()?.into_iter().find(|s| s.id == id).ok_or(unknown),
        }
    }

    /// Removes a sandbox, running or paused.
    ///
    /// # Errors
    /// [`Kind::UnknownSandbox`], or [`Kind::WrongState`] while something else is done to it.
    pub fn remove(&self, actor: &str, id: &str) -> Result<(), Problem> {
        match self.entry(id) {
            Ok(entry) => self.end(actor, &entry, "removed", None),
            Err(unknown) => self.forget_paused(actor, id, unknown),
        }
    }

    /// Ends a running sandbox, for the reason given.
    fn end(
        &self,
        actor: &str,
        entry: &Arc<Entry>,
        kind: &str,
        why: Option<String>,
    ) -> Result<(), Problem> {
        {
            let mut facts = lock(&entry.facts);
            running(&entry.id, &facts)?;
            facts.state = State::Ending;
        }
        let detail = why.map_or_else(|| json!({}), |why| json!({ "why": why }));
        if let Err(problem) = self.report(actor, kind, Some(&entry.id), detail) {
            lock(&entry.facts).state = State::Running;
            return Err(problem);
        }
        self.discard(entry);
        Ok(())
    }

    /// Ends the machine, removes its directory and forgets the sandbox.
    fn discard(&self, entry: &Arc<Entry>) {
        self.count_denied(entry);
        let machine = lock(&entry.machine).take();
        if let Some(mut machine) = machine
            && machine.has_workspace()
            && let Err(error) =
                machine.ended_by_itself().map_or_else(|| machine.release_workspace(), Err)
        {
            // It was gone already, or does not answer: the journal is replayed next time.
            let why = json!({ "why": error.to_string() });
            self.note(SELF, "workspaceNotReleased", Some(&entry.id), why);
        }
        drop(lock(&entry.lease).take());
        let request = lock(&entry.facts).record.request.clone();
        if let Some((key, _)) = request {
            lock(&self.keys).remove(&key);
        }
        lock(&self.entries).remove(&entry.id);
    }

    /// What a sandbox uses.
    ///
    /// # Errors
    /// [`Kind::UnknownSandbox`], [`Kind::WrongState`], or the monitor's.
    pub fn stats(&self, id: &str) -> Result<Stats, Problem> {
        let entry = self.entry(id)?;
        let (pid, created, executions, executed) = {
            let facts = lock(&entry.facts);
            running(id, &facts)?;
            let pid = facts.monitor_pid.unwrap_or(0);
            (pid, facts.record.created_unix_ms, facts.executions, facts.executed)
        };
        let (status, denied) = match lock(&entry.machine).as_mut() {
            Some(machine) => (machine.status()?, machine.egress_counts().map(|c| all(&c))),
            None => return Err(Problem::unknown(id)),
        };
        let memory = run::memory_of(pid);
        Ok(Stats {
            id: id.to_owned(),
            age_ms: unix_ms().saturating_sub(created),
            cpu_ms: run::cpu_ms_of(pid),
            memory_private_bytes: memory.private,
            memory_proportional_bytes: memory.proportional,
            disk_written_bytes: status.overlay_bytes.iter().sum(),
            egress_denied: denied,
            executions,
            executions_total: executed,
        })
    }

    /// Where a sandbox's console and its monitor's words are.
    ///
    /// # Errors
    /// [`Kind::UnknownSandbox`].
    pub fn logs(&self, id: &str) -> Result<(PathBuf, PathBuf), Problem> {
        let directory = &self.entry(id)?.directory;
        Ok((directory.join("console.log"), directory.join("monitor.log")))
    }

    /// Whether a sandbox is there, in any state but paused.
    pub fn is_here(&self, id: &str) -> bool {
        lock(&self.entries).contains_key(id)
    }

    /// The service itself.
    pub fn status(&self) -> NodeStatus {
        let (audit_lines, audit_head) =
            self.audit.as_ref().map_or_else(|| (0, String::new()), Audit::head);
        NodeStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            store: self.config.store.display().to_string(),
            sandboxes: lock(&self.entries).len(),
            max_sandboxes: self.config.max_sandboxes,
            draining: self.draining(),
            audit_lines,
            audit_head,
        }
    }

    /// Everything Prometheus wants, in its text format.
    pub fn scrape(&self) -> String {
        let mut now = Now::default();
        for entry in self.all() {
            let facts = lock(&entry.facts);
            let state = serde_json::to_value(facts.state).ok();
            now.states.extend(state.and_then(|s| s.as_str().map(str::to_owned)));
            now.layers.extend(facts.jail.iter().cloned());
            now.executions += facts.executions;
        }
        now.audit_lines = self.audit.as_ref().map_or(0, |audit| audit.head().0);
        self.metrics.encode(&now)
    }

    /// Takes no new sandboxes and commands from now on.
    pub fn drain(&self) {
        if !self.draining.swap(true, Ordering::SeqCst) {
            self.note(SELF, "draining", None, json!({}));
        }
    }

    /// Whether the service ends soon.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Commands running in all sandboxes, and sandboxes being made.
    pub fn under_way(&self) -> u32 {
        let busy = |entry: &Arc<Entry>| {
            let facts = lock(&entry.facts);
            facts.executions + u32::from(facts.state != State::Running)
        };
        self.all().iter().map(busy).sum()
    }

    fn refuse_when_draining(&self) -> Result<(), Problem> {
        if self.draining() {
            return Err(Problem::new(Kind::Draining, "this parbaked is about to end"));
        }
        Ok(())
    }

    /// Removes what has expired or ended by itself, until the service stops.
    pub fn look_after(self: &Arc<Self>) {
        let manager = Arc::clone(self);
        let thread = std::thread::Builder::new().name("reaper".to_owned());
        let spawned = thread.spawn(move || {
            let mut ticks = 0u32;
            while !manager.stopped.load(Ordering::SeqCst) {
                manager.tick();
                ticks = ticks.wrapping_add(1);
                if ticks.is_multiple_of(COUNT) {
                    manager.all().iter().for_each(|entry| manager.count_denied(entry));
                }
                std::thread::sleep(TICK);
            }
        });
        if let Err(error) = spawned {
            eprintln!("parbaked: sandboxes will not expire: {error}");
        }
    }

    /// Adds what a sandbox was denied since the last time to the metrics.
    fn count_denied(&self, entry: &Entry) {
        let Ok(machine) = entry.machine.try_lock() else { return };
        let Some(counts) = machine.as_ref().and_then(Machine::egress_counts) else { return };
        drop(machine);
        let now = all(&counts);
        let before = std::mem::replace(&mut lock(&entry.facts).denied, now);
        self.metrics.denied_egress(now.saturating_sub(before));
    }

    /// Ends a sandbox without keeping others waiting: one with a workspace may take its time to
    /// write it, or never answer.
    fn end_aside(self: &Arc<Self>, entry: &Arc<Entry>, kind: &'static str, why: Option<String>) {
        if lock(&entry.facts).record.workspace.is_none() {
            // One that is being copied this moment is met again.
            let _ = self.end(SELF, entry, kind, why);
            return;
        }
        let (manager, ending) = (Arc::clone(self), Arc::clone(entry));
        let thread = std::thread::Builder::new().name("ending".to_owned());
        // Where there is no thread to be had now, it is met again.
        let _ = thread.spawn(move || manager.end(SELF, &ending, kind, why));
    }

    fn tick(self: &Arc<Self>) {
        let now = unix_ms();
        for entry in self.all() {
            let expired = {
                let facts = lock(&entry.facts);
                facts.state == State::Running
                    && facts.record.expires_unix_ms.is_some_and(|at| at <= now)
            };
            if expired {
                self.end_aside(&entry, "expired", None);
                continue;
            }
            // Whoever holds it finds out by himself.
            let ended = match entry.machine.try_lock() {
                Ok(mut machine) => machine.as_mut().and_then(Machine::ended_by_itself),
                Err(_) => None,
            };
            if let Some(how) = ended {
                self.metrics.failed("run", "guestGone");
                self.end_aside(&entry, "ended", Some(how.to_string()));
            }
        }
        self.sweep_strays();
    }
}
