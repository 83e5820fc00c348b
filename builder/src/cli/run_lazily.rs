//! `parbake run --pull lazy`: a sandbox from a template that is still arriving.
//!
//! ```text
//! registry ──► lazy pull ──► files that fill up ◄── restored machine
//!                 ▲ ensure: memory faults, disk reads ──┘
//! ```
//! The machine starts when documents, state and indexes are there. What it touches comes first; the
//! rest is let in once its first command runs. Where the host forbids that memory is filled as it is
//! touched, all of the template comes first, and that is said. Where guests run in the lab, all of this
//! happens there, and this machine's loopback is found behind the lab's gateway.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parbake_builder::template::Template;
use parbake_cache::find;
use parbake_cache::install::BlobSource;
use parbake_cache::lazy::{LazyPull, Patience, Progress};
use parbake_cache::registry::RegistryOptions;
use parbake_cache::template::SnapshotManifest;
use parbake_cache::variant::Choice;
use parbake_cache::{Digest, Store, TemplateName};
use parbake_node::filling::{Fill, Image};
use parbake_node::sandbox::RestoreFiles;

use super::error::{CliError, CliResult, Kind};
use super::remote;
use super::{Context, guest, pull_lazily};

/// Where only a failure ends the wait.
const NO_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// A template on its way, as a sandbox sees it.
pub struct Arriving {
    fill: Arc<Filling>,
    /// The template.
    pub template: Template,
    /// Its snapshot, if there is one that fits this host.
    pub snapshot: Option<SnapshotManifest>,
    name: TemplateName,
}

struct Filling {
    pull: LazyPull,
    images: [(Image, Digest); 3],
    patience: Patience,
}

impl Fill for Filling {
    fn ensure(&self, image: Image, range: Range<u64>) -> Result<(), String> {
        let digest = self.images.iter().find(|(known, _)| *known == image);
        let (_, digest) = digest.ok_or("there is no such image")?;
        self.pull.ensure(digest, range, self.patience).map_err(|error| error.to_string())
    }

    fn is_there(&self, image: Image, range: Range<u64>) -> bool {
        let digest = self.images.iter().find(|(known, _)| *known == image);
        digest.is_some_and(|(_, digest)| self.pull.is_there(digest, range))
    }
}

/// Finds the template and fetches what is small.
pub fn begin(
    context: &Context,
    store: &Store,
    name: &TemplateName,
    registry: RegistryOptions,
    choice: &Choice,
    deadline: Duration,
) -> CliResult<Arriving> {
    let mut registry = registry;
    if guest::is_lab()
        && let Some(host) = name.registry()
        && let Some(outside) = parbake_host::lab::from_inside(host)
    {
        registry.registries.relocate(host, &outside);
    }
    let step = context.progress.step(format!("pull {name} lazily"));
    let found = find::template(name, None, &registry).map_err(remote::transport_error)?;
    let root = found.root.descriptor;
    let (manifest, config, refused) =
        pull_lazily::choose(store, &found.source, &root, name, choice)?;
    for reason in refused {
        context.progress.note(&reason);
    }
    let (template, snapshot) = (config.template, config.snapshot);
    let source: Arc<dyn BlobSource + Send + Sync> = Arc::new(found.source);
    let pull =
        LazyPull::begin_held(store, source, manifest, config).map_err(remote::install_error)?;
    let template = Template::load(store, Some(name.clone()), template)
        .map_err(|error| CliError::new(Kind::User, error))?;
    let snapshot: Option<SnapshotManifest> = match snapshot {
        None => None,
        Some(digest) => Some(store.get_json(&digest).map_err(guest::store_error)?),
    };
    let digest = |of: fn(&SnapshotManifest) -> Digest| {
        snapshot.as_ref().map_or(template.manifest.rootfs.digest, of)
    };
    let images = [
        (Image::Rootfs, template.manifest.rootfs.digest),
        (Image::Memory, digest(|snapshot| snapshot.memory.digest)),
        (Image::Disk, digest(|snapshot| snapshot.disk.digest)),
    ];
    let fail_fast = deadline.is_zero();
    let patience = Patience { deadline: if fail_fast { NO_DEADLINE } else { deadline }, fail_fast };
    step.done(format!("{} of it is here", super::progress::bytes(pull.progress().fetched_bytes)));
    let fill = Arc::new(Filling { pull, images, patience });
    Ok(Arriving { fill, template, snapshot, name: name.clone() })
}

impl Arriving {
    /// The files to restore from, which fill up, and who fills them.
    pub fn files(
        &self,
        store: &Store,
        snapshot: &SnapshotManifest,
    ) -> CliResult<(RestoreFiles, Arc<dyn Fill>)> {
        let path = |digest: &Digest| self.fill.pull.path(digest).map_err(guest::store_error);
        let files = RestoreFiles {
            state: store.path(&snapshot.state.digest).map_err(guest::store_error)?,
            memory: path(&snapshot.memory.digest)?,
            difference: None,
            disk: path(&snapshot.disk.digest)?,
            rootfs: path(&self.template.manifest.rootfs.digest)?,
        };
        Ok((files, Arc::clone(&self.fill) as Arc<dyn Fill>))
    }

    /// How far it has come.
    pub fn progress(&self) -> Progress {
        self.fill.pull.progress()
    }

    /// Lets the rest come.
    pub fn release(&self) {
        self.fill.pull.release();
    }

    /// Waits until everything is here, for a machine that cannot begin before.
    pub fn complete(self, context: &Context, store: &Store) -> CliResult<Template> {
        self.release();
        let mut step = context.progress.step(format!("pull {}", self.name));
        let name = self.name.clone();
        let template = self.template.clone();
        let Some(mut filling) = Arc::into_inner(self.fill) else {
            return Err(CliError::new(Kind::Internal, "the pull is still in use"));
        };
        loop {
            let Progress { fetched_bytes, left_bytes } = filling.pull.progress();
            let all = super::progress::bytes(fetched_bytes + left_bytes);
            step.update(format!("{} of {all}", super::progress::bytes(fetched_bytes)));
            if pull_lazily::wait(&mut filling.pull, fetched_bytes)?.is_some() {
                break;
            }
        }
        store.tag(&name, &template.digest).map_err(guest::store_error)?;
        step.done("complete");
        Ok(template)
    }

    /// After the machine is gone: keeps what is here, and gives it its name if that is all.
    pub fn end(self, context: &Context, store: &Store) {
        let Progress { fetched_bytes, left_bytes } = self.progress();
        // Threads that served the machine notice its end.
        for _ in 0..100 {
            if Arc::strong_count(&self.fill) == 1 {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let Some(mut filling) = Arc::into_inner(self.fill) else { return };
        let now = Patience { deadline: Duration::ZERO, fail_fast: false };
        if left_bytes == 0
            && filling.pull.finish(now).is_ok()
            && store.tag(&self.name, &self.template.digest).is_ok()
        {
            return;
        }
        context.progress.note(&format!(
            "{} of {} have arrived and are kept; `parbake pull {}` brings the rest",
            super::progress::bytes(fetched_bytes),
            super::progress::bytes(fetched_bytes + left_bytes),
            self.name
        ));
    }
}
