//! Forks, and sandboxes that rest in the store.
//!
//! A fork stands still while its disk and those pages of memory are written out that differ from
//! the snapshot it was restored from, and goes on. Its copies are restored from that snapshot with
//! those pages over it; they share both until they write. A fork of a fork of a fork is written
//! against the same snapshot, so it restores as fast as the first. The files have no names once all
//! copies run; the snapshot is kept in the store for as long as one of them lives.
//!
//! A paused sandbox is a template like any other: the manifest of its own template with labels
//! that say so, tagged `paused/ID`, with one snapshot. So it can be pushed and pulled, and nobody
//! who asks for the template it came from is ever given its snapshot.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::Instant;

use parbake_cache::template::{CompatContract, SCHEMA_VERSION, SnapshotManifest};
use parbake_cache::{Digest, Store, StoreError, TemplateName};
use parbake_node::sandbox::{
    Extent, FreezeFiles, Frozen, RestoreFiles, Sandbox as Machine, SandboxError, new_id,
};
use parbake_node::template::Template;
use parbake_protocol::agent::AGENT_PROTOCOL;
use serde_json::json;

use super::create::{Extras, Origin, check, without_none};
use super::{Entry, Manager, lock};
use crate::model::{ForkRequest, PauseRequest, Paused, ResumeRequest, Sandbox, SandboxList, State};
use crate::problem::{Kind, Problem};
use crate::record::Record;

/// The most copies of one request.
const MAX_FORKS: u8 = 64;
/// How many of them are restored at the same time.
const AT_ONCE: usize = 8;
/// What paused sandboxes are tagged with.
const REPOSITORY: &str = "paused";

/// Labels of a paused sandbox's template.
mod label {
    pub const ID: &str = "parbake.paused.id";
    pub const TEMPLATE: &str = "parbake.paused.template";
    pub const CREATED: &str = "parbake.paused.created";
    pub const SECRETS: &str = "parbake.paused.secrets";
    pub const LABELS: &str = "parbake.paused.labels";
}

impl Manager {
    /// Makes copies of a running sandbox.
    ///
    /// # Errors
    /// The parent goes on, and there are no copies, unless a copy cannot be restored: those before
    /// it are removed again.
    pub fn fork(
        &self,
        actor: &str,
        id: &str,
        request: &ForkRequest,
    ) -> Result<SandboxList, Problem> {
        self.fork_inner(actor, id, request)
            .map_err(|problem| self.failed(actor, "fork", Some(id), problem))
    }

    fn fork_inner(
        &self,
        actor: &str,
        id: &str,
        request: &ForkRequest,
    ) -> Result<SandboxList, Problem> {
        let begun = Instant::now();
        self.refuse_when_draining()?;
        if request.count == 0 || request.count > MAX_FORKS {
            return Err(Problem::new(Kind::BadRequest, format!("count is 1 to {MAX_FORKS}")));
        }
        let entry = self.entry(id)?;
        let parent = lock(&entry.facts).record.clone();
        let extras = Extras {
            ttl_seconds: request.ttl_seconds,
            hostname: None,
            env: request.env.clone(),
            secrets: request.secrets.clone(),
            labels: request.labels.clone(),
            egress: parent.egress.clone(),
            limits: parent.limits.clone(),
            workspace: None,
        };
        check(&extras)?;
        refuse_secrets(&parent, request.with_secrets, "fork")?;
        refuse_workspace(&parent)?;
        let store = self.store()?;
        let template = Template::load(&store, None, parent.template_digest)?;
        let directory = self.fork_directory(&store)?;
        self.report(actor, "fork", Some(id), json!({ "count": request.count }))?;
        let base = base_of(&store, &parent);
        let extent = if base.is_some() { Extent::Difference } else { Extent::Whole };
        let frozen = {
            let _held = entry.enter(State::Forking, request.end_sessions)?;
            let end_sessions = request.end_sessions;
            let frozen = self.suspend(&entry, directory.path(), extent, end_sessions)?;
            self.thaw(&entry)?;
            frozen
        };
        let written = directory.path().join("memory");
        let (memory, difference) = match base {
            Some(base) if frozen.snapshot.difference => (base, Some(written)),
            _ => (written, None),
        };
        let origin = Origin {
            files: RestoreFiles {
                state: directory.path().join("state"),
                memory,
                difference,
                disk: directory.path().join("disk"),
                rootfs: store.path(&template.manifest.rootfs.digest)?,
            },
            shape: parent.machine,
            continues: true,
            user: template.manifest.process.user.clone(),
        };
        let copy = || {
            let copy = new_id()?;
            let digest = parent.template_digest;
            let mut record = Record::new(&copy, &parent.template, digest, parent.machine);
            record.parent = Some(id.to_owned());
            // Kept in the store for as long as it lives.
            record.snapshot = parent.snapshot;
            record.secrets.clone_from(&parent.secrets);
            let detail = json!({ "parent": id });
            self.bring_up(actor, "forked", &store, record, &origin, &extras, begun, detail)
        };
        let (mut made, mut failure) = (Vec::new(), None);
        let mut left = usize::from(request.count);
        while left > 0 && failure.is_none() {
            let now = left.min(AT_ONCE);
            left -= now;
            let copies = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..now).map(|_| scope.spawn(copy)).collect();
                threads.into_iter().map(ScopedJoinHandle::join).collect::<Vec<_>>()
            });
            for copy in copies {
                match copy {
                    Ok(Ok(sandbox)) => made.push(sandbox),
                    Ok(Err(problem)) => failure = Some(problem),
                    Err(_) => failure = Some(Problem::new(Kind::Internal, "a copy's thread died")),
                }
            }
        }
        if let Some(problem) = failure {
            for sandbox in made {
                let _ = self.remove(actor, &sandbox.id);
            }
            return Err(problem);
        }
        Ok(SandboxList { sandboxes: made })
    }

    /// Writes a sandbox into the store and ends it.
    ///
    /// # Errors
    /// The sandbox goes on.
    pub fn pause(&self, actor: &str, id: &str, request: &PauseRequest) -> Result<Paused, Problem> {
        self.pause_inner(actor, id, request)
            .map_err(|problem| self.failed(actor, "pause", Some(id), problem))
    }

    fn pause_inner(
        &self,
        actor: &str,
        id: &str,
        request: &PauseRequest,
    ) -> Result<Paused, Problem> {
        let entry = self.entry(id)?;
        let record = lock(&entry.facts).record.clone();
        refuse_secrets(&record, request.with_secrets, "pause")?;
        refuse_workspace(&record)?;
        let store = self.store()?;
        let staging = store.stage()?;
        self.report(actor, "paused", Some(id), json!({ "withSecrets": request.with_secrets }))?;
        let held = entry.enter(State::Pausing, request.end_sessions)?;
        let frozen = self.suspend(&entry, staging.path(), Extent::Whole, request.end_sessions)?;
        let paused = match install(&store, staging.path(), &record, &frozen) {
            Ok(paused) => paused,
            Err(problem) => {
                self.thaw(&entry)?;
                return Err(problem);
            }
        };
        lock(&entry.facts).state = State::Ending;
        drop(held);
        self.discard(&entry);
        Ok(paused)
    }

    /// Lets a paused sandbox go on, under its old id. `name` is that id, or the name of a template
    /// that a paused sandbox came as.
    ///
    /// # Errors
    /// It stays paused.
    pub fn resume(
        &self,
        actor: &str,
        name: &str,
        request: &ResumeRequest,
    ) -> Result<Sandbox, Problem> {
        self.resume_inner(actor, name, request)
            .map_err(|problem| self.failed(actor, "resume", Some(name), problem))
    }

    fn resume_inner(
        &self,
        actor: &str,
        name: &str,
        request: &ResumeRequest,
    ) -> Result<Sandbox, Problem> {
        let begun = Instant::now();
        self.refuse_when_draining()?;
        let extras = Extras {
            ttl_seconds: request.ttl_seconds,
            hostname: None,
            env: request.env.clone(),
            secrets: request.secrets.clone(),
            egress: without_none(&request.egress),
            limits: request.limits.clone(),
            ..Extras::default()
        };
        check(&extras)?;
        if self.is_here(name) {
            let message = format!("sandbox {name} is not paused");
            return Err(Problem::new(Kind::WrongState, message));
        }
        let store = self.store()?;
        let template = find_paused(&store, name)?;
        let mut record = record_of(&template).ok_or_else(|| {
            Problem::new(Kind::WrongState, format!("{name} is no paused sandbox"))
                .hint("`parbaked create` makes sandboxes from templates")
        })?;
        let shape = template.manifest.machine;
        let (snapshot, mut origin) = self.origin(&store, &template, shape)?;
        origin.continues = true;
        let tag = template.name;
        let id = record.id.clone();
        record.snapshot = Some(snapshot);
        let detail = json!({ "snapshot": snapshot });
        let sandbox =
            self.bring_up(actor, "resumed", &store, record, &origin, &extras, begun, detail)?;
        if let (false, Some(tag)) = (request.keep, tag)
            && let Err(error) = store.untag(&tag)
        {
            eprintln!("parbaked: sandbox {id} is running and still in the store: {error}");
        }
        Ok(sandbox)
    }

    /// The sandboxes that rest in the store.
    pub(super) fn paused(&self) -> Result<Vec<Sandbox>, Problem> {
        let store = self.store()?;
        let mut found = Vec::new();
        for (name, digest) in store.tags().map_err(Problem::from)? {
            if !is_ours(&name) {
                continue;
            }
            // Removed this moment, or damaged: not for us to say.
            let Ok(template) = Template::load(&store, Some(name), digest) else { continue };
            let Some(record) = record_of(&template) else { continue };
            let mut sandbox = Entry::new(record, PathBuf::new(), State::Paused).view();
            sandbox.expires_unix_ms = None;
            found.push(sandbox);
        }
        Ok(found)
    }

    /// Removes a paused sandbox from the store.
    pub(super) fn forget_paused(
        &self,
        actor: &str,
        id: &str,
        unknown: Problem,
    ) -> Result<(), Problem> {
        let Some(name) = tag_of(id) else { return Err(unknown) };
        let store = self.store()?;
        if store.resolve(&name.to_string()).is_err() {
            return Err(unknown);
        }
        self.report(actor, "removed", Some(id), json!({ "paused": true }))?;
        match store.untag(&name) {
            Ok(_) => Ok(()),
            Err(StoreError::UnknownName { .. }) => Err(unknown),
            Err(error) => Err(error.into()),
        }
    }

    /// Stops the machine and writes it into `directory`. If that fails, it goes on.
    fn suspend(
        &self,
        entry: &Arc<Entry>,
        directory: &Path,
        extent: Extent,
        end_sessions: bool,
    ) -> Result<Frozen, Problem> {
        let files = FreezeFiles::create_in(directory)
            .map_err(|error| Problem::because(Kind::NoSpace, &error))?;
        let suspended = match lock(&entry.machine).as_mut() {
            Some(machine) => machine.suspend(&files, extent, end_sessions),
            None => return Err(Problem::unknown(&entry.id)),
        };
        match suspended {
            Ok(frozen) => Ok(frozen),
            Err(error) => {
                self.thaw(entry)?;
                Err(error.into())
            }
        }
    }

    /// Lets the machine go on. One that cannot is of no use any more, and goes.
    fn thaw(&self, entry: &Arc<Entry>) -> Result<(), Problem> {
        let thawed = match lock(&entry.machine).as_mut() {
            Some(machine) => Machine::thaw(machine),
            None => return Err(Problem::unknown(&entry.id)),
        };
        thawed.map_err(|error: SandboxError| {
            let why = json!({ "why": format!("it did not go on after a copy: {error}") });
            self.note(super::SELF, "ended", Some(&entry.id), why);
            lock(&entry.facts).state = State::Ending;
            self.discard(entry);
            Problem::from(error)
        })
    }

    fn fork_directory(&self, store: &Store) -> Result<ForkDirectory, Problem> {
        match &self.config.fork_dir {
            None => Ok(ForkDirectory::Staging(store.stage()?)),
            Some(base) => tempfile::Builder::new()
                .prefix("fork-")
                .tempdir_in(base)
                .map(ForkDirectory::Own)
                .map_err(|error| Problem::because(Kind::HostCannot, &error)),
        }
    }
}

/// Where a fork's files are until its copies run; removed on drop.
enum ForkDirectory {
    Staging(parbake_cache::Staging),
    Own(tempfile::TempDir),
}

impl ForkDirectory {
    fn path(&self) -> &Path {
        match self {
            Self::Staging(staging) => staging.path(),
            Self::Own(directory) => directory.path(),
        }
    }
}

fn refuse_secrets(record: &Record, asked: bool, verb: &str) -> Result<(), Problem> {
    if asked || record.secrets.is_empty() {
        return Ok(());
    }
    let names = record.secrets.join(", ");
    let message = format!("sandbox {} has secrets ({names}), which a copy would hold", record.id);
    Err(Problem::new(Kind::HoldsSecrets, message)
        .hint(format!("if that is what you want: {verb} --with-secrets")))
}

/// A workspace is for one at a time, and what a copy has mounted would change behind its back.
fn refuse_workspace(record: &Record) -> Result<(), Problem> {
    let Some(name) = &record.workspace else { return Ok(()) };
    let message = format!("sandbox {} has workspace {name}, which no copy can share", record.id);
    Err(Problem::new(Kind::WrongState, message)
        .hint("copy what is to be kept with `parbaked cp`, or do without the workspace"))
}

/// The memory image a sandbox was restored from. None where its record does not say, and where the
/// store does not have it any more; then a copy is written out whole.
fn base_of(store: &Store, parent: &Record) -> Option<PathBuf> {
    let snapshot: SnapshotManifest = store.get_json(&parent.snapshot?).ok()?;
    store.path(&snapshot.memory.digest).ok()
}

/// Puts a frozen machine into the store.
fn install(
    store: &Store,
    directory: &Path,
    record: &Record,
    frozen: &Frozen,
) -> Result<Paused, Problem> {
    let template = Template::load(store, None, record.template_digest)?;
    let mut manifest = template.manifest;
    manifest.machine = record.machine;
    // Nothing is baked from it.
    manifest.bake = None;
    let mut set = |name: &str, value: String| manifest.labels.insert(name.to_owned(), value);
    set(label::ID, record.id.clone());
    set(label::TEMPLATE, record.template.clone());
    set(label::CREATED, record.created_unix_ms.to_string());
    set(label::SECRETS, record.secrets.join(","));
    set(label::LABELS, json!(record.labels).to_string());
    let state = store.adopt_blob(directory.join("state"))?;
    let memory = store.adopt_image(directory.join("memory"))?;
    let disk = store.adopt_image(directory.join("disk"))?;
    let template = store.put_json(&manifest)?.digest;
    let report = &frozen.snapshot;
    let snapshot = SnapshotManifest {
        schema_version: SCHEMA_VERSION,
        template,
        machine: record.machine,
        compat: CompatContract {
            architecture: manifest.architecture.clone(),
            cpu_vendor: report.cpu_vendor.clone(),
            cpu_features: report.cpu_features.clone(),
            kvm_kind: report.kvm_kind.clone(),
            state_version: report.state_version,
            agent_protocol: AGENT_PROTOCOL,
            page_size: 4096,
        },
        state,
        memory,
        disk,
        generation: report.generation,
    };
    let snapshot: Digest = store.put_json(&snapshot)?.digest;
    store.set_snapshot(&template, &snapshot)?;
    let name = tag_of(&record.id).ok_or_else(|| Problem::unknown(&record.id))?;
    store.tag(&name, &template)?;
    Ok(Paused {
        id: record.id.clone(),
        template: name.to_string(),
        snapshot: snapshot.to_string(),
        memory_data_bytes: report.memory_data_bytes,
        disk_data_bytes: report.overlay_data_bytes.iter().sum(),
    })
}

/// What a paused sandbox of this id is tagged with; none where the id could be none.
fn tag_of(id: &str) -> Option<TemplateName> {
    let fine = !id.is_empty() && id.len() <= 64 && id.bytes().all(|b| b.is_ascii_alphanumeric());
    fine.then(|| format!("{REPOSITORY}/{id}").parse().ok()).flatten()
}

fn is_ours(name: &TemplateName) -> bool {
    let repository = name.repository();
    name.registry().is_none()
        && repository.strip_prefix(REPOSITORY).is_some_and(|rest| rest.starts_with('/'))
}

fn find_paused(store: &Store, name: &str) -> Result<Template, Problem> {
    if let Some(tag) = tag_of(name)
        && let Ok(template) = Template::find(store, &tag.to_string())
    {
        return Ok(template);
    }
    match Template::find(store, name) {
        Ok(template) => Ok(template),
        Err(_) => Err(Problem::unknown(name)),
    }
}

/// The record of the sandbox that a template is, if it is one.
fn record_of(template: &Template) -> Option<Record> {
    let labels = &template.manifest.labels;
    let id = labels.get(label::ID).filter(|id| tag_of(id).is_some())?;
    let of = labels.get(label::TEMPLATE)?;
    let mut record = Record::new(id, of, template.digest, template.manifest.machine);
    record.created_unix_ms = labels.get(label::CREATED)?.parse().ok()?;
    let secrets = labels.get(label::SECRETS).map_or("", String::as_str);
    record.secrets = secrets.split(',').filter(|s| !s.is_empty()).map(str::to_owned).collect();
    record.labels = serde_json::from_str(labels.get(label::LABELS)?).ok()?;
    Some(record)
}
