//! Push and pull: a template from this store to a registry, and back.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::Digest;
use crate::artifact::{
    ArtifactConfig, ArtifactError, CONFIG_TYPE, MAX_CONFIG_BYTES, MAX_MANIFEST_BYTES, Manifest,
    PackRecord,
};
use crate::error::StoreError;
use crate::find;
use crate::install::{InstallError, InstallEvent, fetch_verified};
use crate::name::TemplateName;
use crate::pack::{Directory, MAX_DIRECTORY_BYTES};
use crate::publish::{BasePack, Blob, Content, Publication, PublishError, PublishOptions};
use crate::reference;
use crate::registry::{Access, RegistryError, RegistryOptions, Repository};
use crate::statements::Statements;
use crate::store::Store;
use crate::trust::TrustError;
use crate::variant::{self, Choice, PullReport, manifests};

/// How many places are looked at for packs to build upon, besides the tag itself.
const MAX_BASES: usize = 6;

/// How to push.
#[derive(Debug, Clone, Default)]
pub struct PushOptions {
    /// How to prepare the template. Bases found at the registry are added.
    pub publish: PublishOptions,
    /// Names on the same registry to look at first for packs to build upon.
    pub build_upon: Vec<TemplateName>,
    /// Dress it as an ordinary image, for registries that refuse what they do not know. Implies
    /// `fresh`.
    pub compat_image: bool,
    /// Send everything afresh: neither this tag's packs nor any other's are built upon.
    pub fresh: bool,
    /// What to say about it, signed or not.
    pub statements: Statements,
}

/// What happens while pushing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PushEvent {
    /// The template is prepared.
    Prepared {
        /// Bytes of everything the artifact links.
        total_bytes: u64,
    },
    /// A blob was at the registry already, in this repository or another.
    Existed {
        /// Its size.
        bytes: u64,
    },
    /// A blob was sent.
    Sent {
        /// Its size.
        bytes: u64,
    },
}

/// What a push did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PushReport {
    /// Digest of the index that now has the tag.
    pub digest: Option<Digest>,
    /// What had the tag before, if anything.
    pub replaced: Option<Digest>,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes taken over from other repositories.
    pub mounted_bytes: u64,
    /// Bytes that were there already.
    pub existing_bytes: u64,
    /// Bytes of all that the artifact links.
    pub total_bytes: u64,
    /// What is attached to it now, of what was to be.
    pub attached: Vec<Digest>,
}

/// A push or pull failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The name has no registry in it.
    #[error("{0} does not say which registry; write e.g. reg.example/{0}")]
    NoRegistry(TemplateName),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// It is not to be trusted.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The artifact.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// Preparing.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// Installing.
    #[error(transparent)]
    Install(#[from] InstallError),
}

/// Packs to build upon, and the repository each is in.
#[derive(Default)]
struct Bases {
    packs: Vec<BasePack>,
    seen: HashSet<Digest>,
    repository_of: HashMap<Digest, String>,
}

impl Store {
    /// Pushes a template with its snapshots to the registry in `name`.
    ///
    /// # Errors
    /// When the registry refuses something or cannot be reached. What was sent stays there, and
    /// the next push does not send it again; the tag is only set at the very end.
    pub fn push(
        &self,
        template: &Digest,
        name: &TemplateName,
        registry: &RegistryOptions,
        options: &PushOptions,
        observer: &(dyn Fn(PushEvent) + Sync),
    ) -> Result<PushReport, TransportError> {
        let this = self.clone().stopping_with(registry);
        let host = registry_of(name)?;
        let target = Repository::open(registry, host, name.repository(), Access::Push)?;
        let replaced = match target.manifest(name.tag()) {
            Ok(fetched) => Some(fetched.descriptor.digest),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error.into()),
        };
        let mut bases = Bases::default();
        if !options.fresh && !options.compat_image {
            let mut names = vec![name.clone()];
            names.extend(options.build_upon.iter().cloned());
            names.extend(self.known_remotes(host)?);
            let mut looked_at = HashSet::new();
            names.retain(|name| name.registry() == Some(host) && looked_at.insert(name.clone()));
            for base in names.iter().take(1 + MAX_BASES) {
                // A base that cannot be had just does not help.
                let _ = bases.look_at(base, registry);
            }
        }
        let mut publish = options.publish.clone();
        publish.bases.extend(bases.packs.iter().cloned());
        let mut publication = this.publish(template, &publish)?;
        if !take_over(&target, &publication, &bases)? {
            // The registry would not share them after all: send everything.
            publish.bases.clear();
            publication = this.publish(template, &publish)?;
        }
        if options.compat_image {
            publication = publication.into_compat_image()?;
        }
        let mut report = send(&target, &publication, &bases, observer)?;
        for manifest in &publication.manifests {
            put(&target, manifest, &manifest.descriptor.digest.to_string())?;
        }
        // Attached before the tag is set: whoever demands a signature finds it.
        let root = &publication.index.descriptor;
        let attachments = options.statements.attachments(&root.digest, &what_it_is(name));
        if !attachments.is_empty() {
            put(&target, &publication.index, &root.digest.to_string())?;
        }
        report.attached = target.attach(root, &attachments)?;
        put(&target, &publication.index, name.tag())?;
        report.digest = Some(publication.index.descriptor.digest);
        report.replaced = replaced;
        self.remember_remote(name, &publication.index.descriptor.digest)?;
        Ok(report)
    }

    /// Pulls what `name` stands for, and gives it that name here.
    ///
    /// Everything after the tag is fetched by digest: a tag that moves meanwhile changes nothing.
    ///
    /// # Errors
    /// When it is not there, not a template, or comes damaged. With `pinned`, that digest is
    /// pulled, whatever the tag stands for by now.
    pub fn pull(
        &self,
        name: &TemplateName,
        pinned: Option<&Digest>,
        registry: &RegistryOptions,
        choice: &Choice,
        observer: &(dyn Fn(InstallEvent) + Sync),
    ) -> Result<PullReport, TransportError> {
        let this = self.clone().stopping_with(registry);
        let found = find::template(name, pinned, registry)?;
        let (source, root) = (found.source, found.root.descriptor);
        let report = variant::install(&this, &source, &root, &name.to_string(), choice, observer)?;
        self.tag(name, &report.template)?;
        self.remember_remote(name, &root.digest)?;
        Ok(report)
    }

    /// What the line is told to stop by stops the work before and behind it, too.
    fn stopping_with(self, registry: &RegistryOptions) -> Self {
        match registry.cancelled {
            Some(cancelled) => self.until(cancelled),
            None => self,
        }
    }

    /// Names on `host` that were pushed or pulled here, the latest first.
    fn known_remotes(&self, host: &str) -> Result<Vec<TemplateName>, StoreError> {
        let mut known = Vec::new();
        for (path, reference) in reference::list(&self.root().join("refs/remotes"))? {
            let Ok(name) = reference.key.parse::<TemplateName>() else { continue };
            if name.registry() == Some(host) {
                let when = std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
                known.push((when, name));
            }
        }
        known.sort_by(|a, b| b.cmp(a));
        Ok(known.into_iter().map(|(_, name)| name).collect())
    }
}

impl Bases {
    /// Adds the packs of what `name` stands for.
    fn look_at(
        &mut self,
        name: &TemplateName,
        registry: &RegistryOptions,
    ) -> Result<(), TransportError> {
        let host = registry_of(name)?;
        let source = Repository::open(registry, host, name.repository(), Access::Pull)?;
        let root = source.manifest(name.tag())?.descriptor;
        let what = name.to_string();
        for descriptor in manifests(&source, &root, &what)? {
            let bytes = fetch_verified(&source, &descriptor, "manifest", MAX_MANIFEST_BYTES)?;
            let manifest = Manifest::parse(&bytes, &descriptor.digest, &what)?;
            if manifest.config.media_type != CONFIG_TYPE {
                continue;
            }
            let bytes = fetch_verified(&source, &manifest.config, "config", MAX_CONFIG_BYTES)?;
            let config = ArtifactConfig::parse(&bytes, &manifest.config.digest)?;
            for record in config.packs {
                if !self.seen.insert(record.pack) {
                    continue;
                }
                self.packs.push(base_pack(&source, &manifest, record)?);
                for digest in [record.pack, record.directory] {
                    self.repository_of.insert(digest, name.repository().to_owned());
                }
            }
        }
        Ok(())
    }
}

fn base_pack(
    source: &Repository,
    manifest: &Manifest,
    record: PackRecord,
) -> Result<BasePack, TransportError> {
    let layer = manifest.layer(&record.directory)?;
    let bytes = fetch_verified(source, layer, "pack directory", MAX_DIRECTORY_BYTES)?;
    let directory = Directory::parse(&bytes)
        .map_err(|source| ArtifactError::Format { digest: record.directory, source })?;
    Ok(BasePack { record, directory, directory_len: bytes.len() as u64 })
}

/// Makes sure that what the publication builds upon is in its repository.
fn take_over(
    target: &Repository,
    publication: &Publication,
    bases: &Bases,
) -> Result<bool, RegistryError> {
    for blob in &publication.blobs {
        let digest = &blob.descriptor.digest;
        if !matches!(blob.content, Content::Elsewhere) || target.has_blob(digest)? {
            continue;
        }
        let from = bases.repository_of.get(digest);
        let mounted = from.map(|from| target.mount(digest, from)).transpose()?;
        if mounted != Some(true) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Sends the blobs that the registry lacks.
fn send(
    target: &Repository,
    publication: &Publication,
    bases: &Bases,
    observer: &(dyn Fn(PushEvent) + Sync),
) -> Result<PushReport, RegistryError> {
    let total_bytes = publication.blobs.iter().map(|blob| blob.descriptor.size).sum();
    observer(PushEvent::Prepared { total_bytes });
    let elsewhere: BTreeMap<&str, ()> = bases
        .repository_of
        .values()
        .filter(|repository| *repository != target.repository())
        .map(|repository| (repository.as_str(), ()))
        .collect();
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let (sent, mounted, existing) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let one = |blob: &Blob| -> Result<(), RegistryError> {
        let (digest, bytes) = (&blob.descriptor.digest, blob.descriptor.size);
        if matches!(blob.content, Content::Elsewhere) || target.has_blob(digest)? {
            existing.fetch_add(bytes, Ordering::Relaxed);
            observer(PushEvent::Existed { bytes });
            return Ok(());
        }
        // What is large is worth asking other repositories for: the kernel above all.
        const WORTH_ASKING: u64 = 256 * 1024;
        for repository in elsewhere.keys().filter(|_| bytes >= WORTH_ASKING) {
            if target.mount(digest, repository)? {
                mounted.fetch_add(bytes, Ordering::Relaxed);
                observer(PushEvent::Existed { bytes });
                return Ok(());
            }
        }
        target.put_blob(&blob.descriptor, &|| open(&blob.content))?;
        sent.fetch_add(bytes, Ordering::Relaxed);
        observer(PushEvent::Sent { bytes });
        Ok(())
    };
    let worker = || {
        while let Some(blob) = publication.blobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = one(blob) {
                next.store(publication.blobs.len(), Ordering::Relaxed);
                let mut failure = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                failure.get_or_insert(error);
            }
        }
    };
    std::thread::scope(|scope| {
        use crate::install::BlobSource as _;
        for _ in 0..target.parallel().min(publication.blobs.len()) {
            scope.spawn(worker);
        }
    });
    match failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(PushReport {
            sent_bytes: sent.into_inner(),
            mounted_bytes: mounted.into_inner(),
            existing_bytes: existing.into_inner(),
            total_bytes,
            ..PushReport::default()
        }),
    }
}

fn open(content: &Content) -> io::Result<Box<dyn Read + Send>> {
    Ok(match content {
        Content::Bytes(bytes) => Box::new(io::Cursor::new(bytes.clone())),
        Content::File(path) => Box::new(File::open(path)?),
        Content::Elsewhere => Box::new(io::empty()),
    })
}

fn put(target: &Repository, blob: &Blob, reference: &str) -> Result<(), RegistryError> {
    match &blob.content {
        Content::Bytes(bytes) => target.put_manifest(reference, &blob.descriptor.media_type, bytes),
        Content::File(_) | Content::Elsewhere => Ok(()),
    }
}

/// A name without its tag, which may move.
fn what_it_is(name: &TemplateName) -> String {
    match name.registry() {
        Some(host) => format!("{host}/{}", name.repository()),
        None => name.repository().to_owned(),
    }
}

fn registry_of(name: &TemplateName) -> Result<&str, TransportError> {
    name.registry().ok_or_else(|| TransportError::NoRegistry(name.clone()))
}
