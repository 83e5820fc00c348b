//! Start and end of the service: taking over what a former one left, and leaving it to the next.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use parbake_cache::Store;
use parbake_node::event::{EventKind, SandboxEvent};
use parbake_node::rundir;
use parbake_node::sandbox::Sandbox as Machine;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use super::create::egress_of;
use super::{Config, Entry, Keyed, Manager, SELF, StartError, lock};
use crate::audit::Audit;
use crate::feed::Feed;
use crate::metrics::Metrics;
use crate::model::State;
use crate::record::Record;

/// Events waiting to be written down; a flood beyond that is counted only.
const EVENTS: usize = 1024;

/// How long a directory's monitor may take to open its door: a service that was killed while it
/// made a sandbox has left one that is just starting.
const DOOR: Duration = Duration::from_secs(2);

impl Manager {
    /// Takes over the run directory and every sandbox that lives in it.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Arc<Self>, StartError> {
        let failed = |source| StartError::RunDir { path: config.run_dir.clone(), source };
        let sandboxes = config.run_dir.join("sandboxes");
        DirBuilder::new().recursive(true).mode(0o700).create(&sandboxes).map_err(failed)?;
        let guard = File::create(config.run_dir.join("lock")).map_err(failed)?;
        if flock(&guard, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(StartError::InUse(config.run_dir));
        }
        if let Some(forks) = &config.fork_dir {
            DirBuilder::new().recursive(true).mode(0o700).create(forks).map_err(failed)?;
            sweep_forks(forks);
        }
        // Made now if need be, so that a bad --store shows at once.
        let store = Store::open(&config.store)?;
        let audit = config.audit.clone().map(Audit::open).transpose()?;
        let (events, happened) = mpsc::sync_channel(EVENTS);
        let manager = Arc::new(Self {
            config,
            entries: Mutex::default(),
            keys: Mutex::default(),
            strays: Mutex::default(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            audit,
            feed: Feed::default(),
            metrics: Metrics::default(),
            pool: OnceLock::new(),
            events,
            _lock: guard,
        });
        tell(&manager, happened);
        manager.note(SELF, "started", None, json!({ "version": env!("CARGO_PKG_VERSION") }));
        let found = fs::read_dir(&sandboxes)
            .map_err(|source| StartError::RunDir { path: sandboxes.clone(), source })?;
        for directory in found.flatten().map(|entry| entry.path()) {
            manager.take_over(&store, &directory);
        }
        Ok(manager)
    }

    fn take_over(&self, store: &Store, directory: &Path) {
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let record = match Record::read(directory) {
            Ok(record) => record,
            Err(why) => return self.clear(directory, &name, &why.to_string()),
        };
        let mut machine = match adopt(directory) {
            Ok(machine) => machine,
            Err(why) => return self.clear(directory, &name, &why),
        };
        // Without this its rules hold all the same; but names are not answered, and what is denied
        // is not told.
        let events = Some(self.events.clone());
        let network = match (egress_of(&record.egress), record.egress.is_empty()) {
            (Ok(egress), false) => {
                self.pool().map_err(|problem| problem.to_string()).and_then(|pool| {
                    let taken = machine.adopt_network(&pool, &egress, events);
                    taken.map_err(|error| error.to_string())
                })
            }
            _ => Ok(()),
        };
        if let Err(why) = network {
            eprintln!("parbaked: the network of {name} is not taken over: {why}");
        }
        if record.limits.memory_bytes.is_some() {
            machine.adopt_memory_limit();
        }
        if record.workspace.is_some() {
            machine.adopt_workspace();
        }
        let entry = Entry::new(record.clone(), directory.to_owned(), State::Running);
        let mut roots = vec![record.template_digest];
        roots.extend(record.snapshot);
        // Removed from the store meanwhile, it lives on what its monitor holds open.
        *lock(&entry.lease) = store.lease(&roots).ok();
        if let Some((key, digest)) = record.request {
            lock(&self.keys).insert(key, Keyed::Done(digest, record.id.clone()));
        }
        entry.run(machine, None);
        lock(&self.entries).insert(record.id.clone(), entry);
        self.metrics.adopted();
        self.note(SELF, "adopted", Some(&record.id), json!({}));
    }

    /// Removes a directory that is nobody's sandbox: its monitor died, or was never heard of.
    fn clear(&self, directory: &Path, name: &str, why: &str) {
        let deadline = Instant::now() + DOOR;
        loop {
            // Ends the monitor, and removes the directory.
            if adopt(directory).is_ok() {
                break;
            }
            if rundir::is_abandoned(directory) || !directory.join("lock").exists() {
                let _ = fs::remove_dir_all(directory);
                break;
            }
            if Instant::now() > deadline {
                eprintln!("parbaked: {} does not answer; it is left alone", directory.display());
                lock(&self.strays).push(directory.to_owned());
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.note(SELF, "lost", Some(name), json!({ "why": why }));
    }

    /// Removes the directories of monitors that did not answer and have ended since.
    pub(super) fn sweep_strays(&self) {
        lock(&self.strays).retain(|directory| {
            if rundir::is_abandoned(directory) {
                let _ = fs::remove_dir_all(directory);
            }
            directory.exists()
        });
    }

    /// Stops looking after sandboxes, and ends them all or leaves them to the next service.
    pub fn stop(&self, keep: bool) {
        self.stopped.store(true, Ordering::SeqCst);
        let entries = self.all();
        let detail = json!({ "sandboxes": entries.len(), "keep": keep });
        self.note(SELF, "stopped", None, detail);
        if !keep {
            // Each waits for its monitor to end.
            std::thread::scope(|scope| {
                for entry in &entries {
                    scope.spawn(move || self.end(SELF, entry, "removed", Some("drained".into())));
                }
            });
        }
        for entry in self.all() {
            if let Some(machine) = lock(&entry.machine).take() {
                machine.detach();
            }
        }
    }
}

/// Writes down what happens to sandboxes, for as long as the service lives.
fn tell(manager: &Arc<Manager>, happened: Receiver<SandboxEvent>) {
    // The service itself holds the sending side: it must not be kept alive by this.
    let manager = Arc::downgrade(manager);
    let spawned = std::thread::Builder::new().name("events".to_owned()).spawn(move || {
        while let Ok(event) = happened.recv() {
            let Some(manager) = manager.upgrade() else { return };
            let kind = match &event.kind {
                EventKind::EgressDenied { .. } => "egressDenied",
                EventKind::NameDenied { .. } => "nameDenied",
                EventKind::NameOpened { .. } => "nameOpened",
                EventKind::LimitHit(_) => "limitHit",
            };
            let mut detail = serde_json::to_value(&event.kind).unwrap_or_default();
            if let Some(detail) = detail.as_object_mut() {
                detail.remove("event");
            }
            manager.note("guest", kind, Some(&event.sandbox), detail);
        }
    });
    if let Err(error) = spawned {
        eprintln!("parbaked: what guests are denied will not be told: {error}");
    }
}

/// Takes over a monitor; why not, if not.
fn adopt(directory: &Path) -> Result<Machine, String> {
    if rundir::is_abandoned(directory) {
        return Err("its monitor has ended".to_owned());
    }
    Machine::adopt(directory).map_err(|error| error.to_string())
}

/// Removes what a service left that was killed in the middle of a fork.
fn sweep_forks(base: &Path) {
    let Ok(entries) = fs::read_dir(base) else { return };
    let old = entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("fork-"));
    for path in old.map(|entry| -> PathBuf { entry.path() }) {
        let _ = fs::remove_dir_all(path);
    }
}
