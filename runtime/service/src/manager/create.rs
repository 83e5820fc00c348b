//! Making sandboxes: from a template's snapshot, or from any frozen machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parbake_cache::template::MachineShape;
use parbake_cache::{Digest, Store};
use parbake_node::limits::Limits;
use parbake_node::network::{Egress, Pool, PoolOptions};
use parbake_node::sandbox::{
    RestoreFiles, Sandbox as Machine, SandboxError, SandboxOptions, new_id,
};
use parbake_node::template::{HostClass, Template};
use parbake_node::workspace::{self, Workspace, WorkspaceError};
use parbake_protocol::agent::PutRequest;
use serde_json::json;

use super::{Entry, Keyed, Manager, lock};
use crate::feed::unix_ms;
use crate::model::{self, CreateRequest, Sandbox, State, Timings};
use crate::problem::{Kind, Problem};
use crate::record::Record;

/// Where secrets are in the guest: a file system in memory.
const SECRETS: &str = "/run/secrets";
/// How much later than the service the monitor ends a sandbox whose time is up.
const GRACE: Duration = Duration::from_secs(5);
/// The longest idempotency key.
const MAX_KEY: usize = 128;
/// The longest label, key or value.
const MAX_LABEL: usize = 256;
const MAX_LABELS: usize = 64;
/// The longest time to live: beyond it nobody means it.
const MAX_TTL_SECONDS: u64 = 10 * 365 * 24 * 3600;

/// What a new sandbox gets besides what it is made from.
#[derive(Debug, Clone, Default)]
pub(super) struct Extras {
    pub ttl_seconds: Option<u64>,
    pub hostname: Option<String>,
    pub env: BTreeMap<String, String>,
    pub secrets: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    pub egress: Vec<String>,
    pub limits: model::Limits,
    pub workspace: Option<model::WorkspaceRequest>,
}

/// What a new sandbox is made from.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub files: RestoreFiles,
    pub shape: MachineShape,
    /// It continues a run: the environment of that run stays.
    pub continues: bool,
    /// Who owns secrets in the guest.
    pub user: String,
}

/// An entry that goes away again unless its sandbox comes to life.
struct Planned<'a> {
    manager: &'a Manager,
    entry: Arc<Entry>,
    done: bool,
}

impl Drop for Planned<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.manager.discard(&self.entry);
        }
    }
}

impl Manager {
    /// Makes a sandbox from a template. With a `key`, the same request again finds the sandbox
    /// that was made, for as long as it is there; the second of the pair says whether it did.
    ///
    /// # Errors
    /// Nothing is left of a sandbox that could not be made.
    pub fn create(
        &self,
        actor: &str,
        request: &CreateRequest,
        key: Option<&str>,
    ) -> Result<(Sandbox, bool), Problem> {
        let key = match key {
            None => None,
            Some(key) if key.is_empty() || key.len() > MAX_KEY => {
                let message = format!("an idempotency key has 1 to {MAX_KEY} bytes");
                return Err(Problem::new(Kind::BadRequest, message));
            }
            // Each caller has his own.
            Some(key) => Some((format!("{actor} {key}"), digest_of(request))),
        };
        if let Some((key, digest)) = &key
            && let Some(sandbox) = self.claim(key, *digest)?
        {
            return Ok((sandbox, true));
        }
        let made = self.create_anew(actor, request, key.as_ref());
        if let (Err(_), Some((key, _))) = (&made, &key) {
            lock(&self.keys).remove(key);
        }
        made.map(|sandbox| (sandbox, false))
            .map_err(|problem| self.failed(actor, "create", None, problem))
    }

    /// Looks what a key stands for, and makes it stand for work that is going on.
    fn claim(&self, key: &str, digest: Digest) -> Result<Option<Sandbox>, Problem> {
        let mut keys = lock(&self.keys);
        let known = match keys.get(key) {
            None => None,
            Some(Keyed::Working(known) | Keyed::Done(known, _)) if *known != digest => {
                let message = "this idempotency key belongs to another request";
                return Err(Problem::new(Kind::KeyReused, message));
            }
            Some(Keyed::Working(_)) => {
                let message = "the same request is being worked on";
                return Err(Problem::new(Kind::InProgress, message).hint("ask again in a moment"));
            }
            Some(Keyed::Done(_, id)) => Some(id.clone()),
        };
        if let Some(id) = known
            && let Ok(entry) = self.entry(&id)
        {
            return Ok(Some(entry.view()));
        }
        keys.insert(key.to_owned(), Keyed::Working(digest));
        Ok(None)
    }

    fn create_anew(
        &self,
        actor: &str,
        request: &CreateRequest,
        key: Option<&(String, Digest)>,
    ) -> Result<Sandbox, Problem> {
        let begun = Instant::now();
        self.refuse_when_draining()?;
        let mut extras = Extras {
            ttl_seconds: request.ttl_seconds,
            hostname: request.hostname.clone(),
            env: request.env.clone(),
            secrets: request.secrets.clone(),
            labels: request.labels.clone(),
            egress: without_none(&request.egress),
            limits: request.limits.clone(),
            workspace: request.workspace.clone(),
        };
        check(&extras)?;
        let store = self.store()?;
        let template = Template::find(&store, &request.template)?;
        if request.egress.is_empty() {
            extras.egress.clone_from(&template.manifest.egress);
        }
        let shape = MachineShape {
            vcpus: request.cpus.unwrap_or(template.manifest.machine.vcpus),
            memory_mib: request.memory_mib.unwrap_or(template.manifest.machine.memory_mib),
        };
        let (snapshot, origin) = self.origin(&store, &template, shape)?;
        let id = new_id()?;
        let mut record = Record::new(&id, &request.template, template.digest, shape);
        record.snapshot = Some(snapshot);
        record.request = key.cloned();
        let detail = json!({
            "template": request.template,
            "templateDigest": template.digest,
            "snapshot": snapshot,
        });
        self.bring_up(actor, "created", &store, record, &origin, &extras, begun, detail)
    }

    /// The newest snapshot that fits, and what is needed to restore it.
    pub(super) fn origin(
        &self,
        store: &Store,
        template: &Template,
        shape: MachineShape,
    ) -> Result<(Digest, Origin), Problem> {
        let host = HostClass::of_this_machine();
        let Some((digest, snapshot)) =
            template.snapshot(store, shape, &host).map_err(Problem::from)?
        else {
            let label = template.label();
            let mut problem = Problem::new(
                Kind::NotBaked,
                format!(
                    "{label} has no snapshot for this host with {} vCPU and {} MiB",
                    shape.vcpus, shape.memory_mib
                ),
            );
            for (digest, reasons) in template.unfit(store, shape, &host)? {
                let reasons = reasons.join("; ");
                problem.causes.push(format!("snapshot {} does not fit: {reasons}", digest.short()));
            }
            return Err(problem.hint(format!(
                "parbake bake {label} --cpus {} --memory {}",
                shape.vcpus, shape.memory_mib
            )));
        };
        let files = template.restore_files(store, &snapshot)?;
        let user = template.manifest.process.user.clone();
        Ok((digest, Origin { files, shape, continues: false, user }))
    }

    /// Restores a machine, gives it what it is to have, writes its record, and lets it be known.
    #[allow(
        clippy::too_many_arguments,
        reason = "one place for what create, fork and resume share"
    )]
    pub(super) fn bring_up(
        &self,
        actor: &str,
        kind: &str,
        store: &Store,
        mut record: Record,
        origin: &Origin,
        extras: &Extras,
        begun: Instant,
        mut detail: serde_json::Value,
    ) -> Result<Sandbox, Problem> {
        record.expires_unix_ms = self.expiry(extras.ttl_seconds);
        record.labels.extend(extras.labels.clone());
        record.egress.clone_from(&extras.egress);
        record.limits = extras.limits.clone();
        record.secrets.extend(extras.secrets.keys().cloned());
        record.secrets.sort();
        record.secrets.dedup();
        record.workspace = extras.workspace.as_ref().map(|workspace| workspace.name.clone());
        let id = record.id.clone();
        let planned = self.plan(record.clone())?;
        let mut roots = vec![record.template_digest];
        roots.extend(record.snapshot);
        *lock(&planned.entry.lease) = Some(store.lease(&roots)?);
        // Before it happens; names, never values.
        detail["secrets"] = json!(record.secrets);
        detail["env"] = json!(extras.env.keys().collect::<Vec<_>>());
        detail["labels"] = json!(record.labels);
        detail["egress"] = json!(record.egress);
        detail["workspace"] = json!(record.workspace);
        self.report(actor, kind, Some(&id), detail)?;

        let options = SandboxOptions {
            scratch: self.config.scratch.clone(),
            jail: self.config.jail.clone(),
            ready_timeout: self.config.ready_timeout,
            hostname: extras.hostname.clone(),
            env: extras.env.iter().map(|(name, value)| format!("{name}={value}").into()).collect(),
            network_pool: if extras.egress.is_empty() { None } else { Some(self.pool()?) },
            egress: egress_of(&extras.egress)?,
            limits: Limits {
                memory_bytes: extras.limits.memory_bytes,
                cpu_milli: extras.limits.cpu_milli,
                io_weight: extras.limits.io_weight,
                disk_bytes: extras.limits.disk_bytes,
                guest_processes: extras.limits.processes,
                // The service comes first; the monitor sees to it when there is none.
                lifetime: record.expires_unix_ms.map(|at| {
                    Duration::from_millis(at.saturating_sub(unix_ms())).saturating_add(GRACE)
                }),
                ..Limits::default()
            },
            events: Some(self.events.clone()),
            id: Some(id.clone()),
            outlive: Some(self.config.run_dir.join("sandboxes")),
            workspace: extras.workspace.as_ref().map(|w| self.workspace(w)).transpose()?,
            continues: origin.continues,
            ..SandboxOptions::default()
        };
        let mut machine = Machine::restore(&origin.files, origin.shape, &options)?;
        for (name, value) in &extras.secrets {
            let request = PutRequest {
                path: format!("{SECRETS}/{name}").into_bytes(),
                mode: 0o400,
                owner: origin.user.clone(),
                parents: true,
            };
            let client = machine.connect()?;
            client.put_file(request, value.as_bytes()).map_err(SandboxError::Agent)?;
        }
        record.write(machine.directory()).map_err(|error| {
            Problem::because(Kind::HostCannot, &error).hint("the run directory must be writable")
        })?;
        let (started, ready) = (machine.timings().started, machine.timings().ready);
        let timings = Timings {
            started_ms: milliseconds(started),
            ready_ms: milliseconds(ready),
            total_ms: milliseconds(begun.elapsed()),
        };
        self.metrics.created(started, ready, begun.elapsed());
        let entry = planned.keep();
        entry.run(machine, Some(timings));
        if let Some((key, digest)) = record.request {
            lock(&self.keys).insert(key, Keyed::Done(digest, id));
        }
        Ok(entry.view())
    }

    /// The workspace that is asked for, made if there is none.
    fn workspace(&self, wanted: &model::WorkspaceRequest) -> Result<Workspace, Problem> {
        let bad = |error| Problem::because(Kind::BadRequest, &error);
        let directory = self.config.store.join(workspace::DIRECTORY);
        let file = workspace::named(&directory, &wanted.name).map_err(bad)?;
        let path = wanted.path.as_deref().unwrap_or(workspace::PATH).to_owned();
        workspace::ensure(&file, wanted.size_bytes.unwrap_or(workspace::SIZE)).map_err(
            |error| match error {
                WorkspaceError::TooSmall(_) | WorkspaceError::NotOne(_) => bad(error),
                error => Problem::because(Kind::NoSpace, &error),
            },
        )?;
        Ok(Workspace { file, path })
    }

    /// Takes a place among the sandboxes.
    fn plan(&self, record: Record) -> Result<Planned<'_>, Problem> {
        let directory = self.config.run_dir.join("sandboxes").join(&record.id);
        let entry = Entry::new(record, directory, State::Starting);
        let mut entries = lock(&self.entries);
        if entries.len() >= self.config.max_sandboxes {
            let most = self.config.max_sandboxes;
            return Err(Problem::new(Kind::Full, format!("there are {most} sandboxes already"))
                .hint("remove one, or start parbaked with a larger --max-sandboxes"));
        }
        if entries.contains_key(&entry.id) {
            let message = format!("sandbox {} is running", entry.id);
            return Err(Problem::new(Kind::WrongState, message));
        }
        entries.insert(entry.id.clone(), Arc::clone(&entry));
        Ok(Planned { manager: self, entry, done: false })
    }

    /// Where networks come from.
    pub(super) fn pool(&self) -> Result<Arc<Pool>, Problem> {
        if let Some(pool) = self.pool.get() {
            return Ok(Arc::clone(pool));
        }
        let options = PoolOptions {
            ready: self.config.networks_ready,
            most: self.config.max_sandboxes,
            ..PoolOptions::default()
        };
        let made =
            Pool::new(options).map_err(|error| Problem::because(Kind::HostCannot, &error))?;
        Ok(Arc::clone(self.pool.get_or_init(|| Arc::new(made))))
    }

    fn expiry(&self, ttl_seconds: Option<u64>) -> Option<u64> {
        let ttl = ttl_seconds.map(Duration::from_secs).or(self.config.default_ttl)?;
        Some(unix_ms().saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)))
    }
}

impl Planned<'_> {
    fn keep(mut self) -> Arc<Entry> {
        self.done = true;
        Arc::clone(&self.entry)
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// The rules of a request: `none` says that there are none.
pub(super) fn without_none(rules: &[String]) -> Vec<String> {
    if rules == ["none"] { Vec::new() } else { rules.to_vec() }
}

/// A policy as it is written.
pub(super) fn egress_of(rules: &[String]) -> Result<Egress, Problem> {
    if rules.is_empty() {
        return Ok(Egress::default());
    }
    Egress::parse(&rules.join(",")).map_err(|error| Problem::because(Kind::BadRequest, &error))
}

/// What makes two requests the same. Values of secrets are left out: the digest is written down.
fn digest_of(request: &CreateRequest) -> Digest {
    let mut request = request.clone();
    request.secrets.values_mut().for_each(String::clear);
    Digest::of(&serde_json::to_vec(&request).unwrap_or_default())
}

/// Refuses what cannot be given to a sandbox.
pub(super) fn check(extras: &Extras) -> Result<(), Problem> {
    let bad = |message: String| Err(Problem::new(Kind::BadRequest, message));
    if extras.ttl_seconds.is_some_and(|ttl| ttl == 0 || ttl > MAX_TTL_SECONDS) {
        return bad(format!("ttlSeconds is 1 to {MAX_TTL_SECONDS}"));
    }
    for (name, value) in &extras.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return bad(format!("env: {name:?} is no name, or its value has a NUL in it"));
        }
    }
    for name in extras.secrets.keys() {
        let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(fine) {
            return bad(format!(
                "secrets: {name:?} is no name; up to 64 letters, digits, '_', '-' and '.' are"
            ));
        }
    }
    if extras.limits.processes == Some(0) {
        return bad("limits: with no processes at all it could do nothing".to_owned());
    }
    egress_of(&extras.egress)?;
    if let Some(wanted) = &extras.workspace {
        let checked = workspace::named(Path::new(""), &wanted.name)
            .and_then(|_| wanted.path.as_deref().map_or(Ok(()), workspace::check_path));
        checked.map_err(|error| Problem::because(Kind::BadRequest, &error))?;
    }
    if extras.labels.len() > MAX_LABELS {
        return bad(format!("there are more than {MAX_LABELS} labels"));
    }
    for (name, value) in &extras.labels {
        if name.is_empty() || name.len() > MAX_LABEL || value.len() > MAX_LABEL {
            return bad(format!("labels have names and values of up to {MAX_LABEL} bytes"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rules_and_the_rule_none_are_two_things() {
        let rules = |rules: &[&str]| rules.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(without_none(&rules(&["none"])), rules(&[]));
        assert_eq!(without_none(&rules(&["allow=*"])), rules(&["allow=*"]));
        assert!(egress_of(&rules(&["none", "allow=*"])).is_err());
    }

    fn extras(change: impl FnOnce(&mut Extras)) -> Result<(), Problem> {
        let mut extras = Extras::default();
        change(&mut extras);
        check(&extras)
    }

    #[test]
    fn what_cannot_be_given_is_refused_by_name() {
        assert!(extras(|_| {}).is_ok());
        assert!(extras(|e| e.ttl_seconds = Some(0)).is_err());
        assert!(extras(|e| e.ttl_seconds = Some(u64::MAX)).is_err());
        for name in ["", "A=B", "A\0"] {
            assert!(extras(|e| drop(e.env.insert(name.into(), String::new()))).is_err(), "{name}");
        }
        for name in ["", "../x", "a/b", ".hidden", "ä", &"x".repeat(65)] {
            let refused = extras(|e| drop(e.secrets.insert(name.into(), "s3cret".into())));
            let problem = refused.unwrap_err();
            assert_eq!(problem.kind, Kind::BadRequest);
            assert!(!problem.message.contains("s3cret"));
        }
        assert!(extras(|e| drop(e.secrets.insert("TOKEN_1".into(), "x".into()))).is_ok());
    }

    #[test]
    fn the_digest_of_a_request_does_not_depend_on_its_secrets() {
        let mut request = CreateRequest { template: "py:3.12".into(), ..Default::default() };
        request.secrets.insert("TOKEN".into(), "one".into());
        let one = digest_of(&request);
        request.secrets.insert("TOKEN".into(), "two".into());
        assert_eq!(digest_of(&request), one);
        request.cpus = Some(2);
        assert_ne!(digest_of(&request), one);
    }
}
