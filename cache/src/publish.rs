//! Preparing a template for the road: from the store's objects to the blobs of an artifact.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use sha2::{Digest as _, Sha256};

use crate::artifact::{
    self, ARTIFACT_TYPE, ArtifactConfig, ArtifactError, ArtifactObject, CONFIG_TYPE,
    CONFIG_VERSION, Descriptor, INDEX_TYPE, Index, MANIFEST_TYPE, MAX_MANIFEST_BYTES, MAX_PACKS,
    Manifest, PackRecord, Platform, layer,
};
use crate::error::StoreError;
use crate::live::{Lease, Staging};
use crate::pack::{Directory, PageHash};
use crate::packer::{Cut, HashedImage, Packer, PlacedImage};
use crate::pagemap::{Extent, PageMap};
use crate::stop::Stop;
use crate::store::Store;
use crate::template::{KernelBundle, ObjectRef, SnapshotManifest, TemplateManifest};
use crate::working_set::{Role, WorkingSet};
use crate::{Digest, durable};

/// How to prepare.
#[derive(Debug, Clone)]
pub struct PublishOptions {
    /// zstd level of packs and blobs.
    pub level: i32,
    /// Pages per run at most.
    pub run_pages: u32,
    /// When the template was made, in seconds since 1970 (`SOURCE_DATE_EPOCH`); absent: not said.
    pub created: Option<u64>,
    /// Notes to add to every manifest.
    pub annotations: BTreeMap<String, String>,
    /// Packs that exist where the artifact goes and may be built upon.
    pub bases: Vec<BasePack>,
    /// A pack is built upon if at least this share of its pages is used, in percent: what it
    /// holds beyond that is carried along for nothing.
    pub min_use_percent: u64,
    /// Whether the template's snapshots go along.
    pub snapshots: bool,
}

/// A pack that exists already.
#[derive(Debug, Clone)]
pub struct BasePack {
    /// The pack and its directory.
    pub record: PackRecord,
    /// What is in it.
    pub directory: Directory,
    /// The directory's encoded length.
    pub directory_len: u64,
}

/// A template ready to be sent. The files it consists of go when it is dropped.
#[derive(Debug)]
pub struct Publication {
    /// Everything but manifests and index; parts that exist already have no content.
    pub blobs: Vec<Blob>,
    /// The manifests, one per variant.
    pub manifests: Vec<Blob>,
    /// The index over them.
    pub index: Blob,
    /// What it took.
    pub stats: PublishStats,
    /// What is said about it, in an export.
    pub attached: Vec<Blob>,
    pub(crate) stop: Stop,
    _lease: Lease,
    staging: Staging,
}

/// A part of an artifact.
#[derive(Debug, Clone)]
pub struct Blob {
    /// What it is.
    pub descriptor: Descriptor,
    /// Its bytes.
    pub content: Content,
}

/// Where a part's bytes are.
#[derive(Debug, Clone)]
pub enum Content {
    /// Here.
    Bytes(Vec<u8>),
    /// In a file that lives as long as the publication.
    File(PathBuf),
    /// Already where the artifact goes.
    Elsewhere,
}

/// What a publication consists of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishStats {
    /// Bytes of the images' pages that are not zero.
    pub data_bytes: u64,
    /// Bytes of pages that are in no pack built upon, nor earlier in these images.
    pub new_bytes: u64,
    /// Length of the new packs.
    pub new_pack_bytes: u64,
    /// Length of the packs built upon.
    pub base_pack_bytes: u64,
}

/// A template could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The result would not be a usable artifact.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl Default for PublishOptions {
    fn default() -> Self {
        Self {
            // Measured with examples/measure.rs on a Debian root of 233 MiB and 85 MiB of memory:
            // 94.4 MB at level 3 in runs of 128 KiB, 84.9 MB at level 6 in runs of 512 KiB (3.9 s
            // of processor time for adopting, publishing and installing), 84.2 MB at level 9
            // (5.0 s), 83.8 MB at level 12 (7.0 s).
            level: 9,
            run_pages: 128,
            created: None,
            annotations: BTreeMap::new(),
            bases: Vec::new(),
            min_use_percent: 20,
            snapshots: true,
        }
    }
}

/// The images of a snapshot, hashed.
struct SnapshotImages {
    memory: HashedImage,
    disk: HashedImage,
}

/// A blob's layer.
struct BlobLayer {
    object: ObjectRef,
    descriptor: Descriptor,
}

/// An image with its pages placed, and the object it is.
struct Placed {
    object: ObjectRef,
    role: &'static str,
    image: PlacedImage,
}

struct Publisher<'a> {
    store: &'a Store,
    options: &'a PublishOptions,
    staging: Staging,
    blobs: Vec<Blob>,
    have: HashSet<Digest>,
}

impl Store {
    /// Prepares a template, with its snapshots if asked for.
    ///
    /// # Errors
    /// When a part is missing or damaged, the disk is full, or the result would be too large.
    pub fn publish(
        &self,
        template: &Digest,
        options: &PublishOptions,
    ) -> Result<Publication, PublishError> {
        // Its snapshots stay while they are looked at.
        let _held = self.lease(&[*template])?;
        let manifest: TemplateManifest = self.get_json(template)?;
        let mut snapshots = if options.snapshots { self.snapshots(template)? } else { Vec::new() };
        // By what they are, not by when they were made.
        snapshots.sort_by(|a, b| {
            let key =
                |s: &(Digest, SnapshotManifest)| (s.1.machine, s.1.compat.cpu_vendor.clone(), s.0);
            key(a).cmp(&key(b))
        });
        let mut roots = vec![*template];
        roots.extend(snapshots.iter().map(|(digest, _)| *digest));
        let lease = self.lease(&roots)?;
        let publisher = Publisher {
            store: self,
            options,
            staging: self.stage()?,
            blobs: Vec::new(),
            have: HashSet::new(),
        };
        publisher.run(template, &manifest, &snapshots, lease)
    }
}

impl Publisher<'_> {
    fn run(
        mut self,
        template: &Digest,
        manifest: &TemplateManifest,
        snapshots: &[(Digest, SnapshotManifest)],
        lease: Lease,
    ) -> Result<Publication, PublishError> {
        let stop = self.store.stop;
        let image = |object: &ObjectRef| HashedImage::new(&self.store.path(&object.digest)?, stop);
        let rootfs = image(&manifest.rootfs)?;
        let mut images = Vec::new();
        for (_, snapshot) in snapshots {
            let (memory, disk) = (image(&snapshot.memory)?, image(&snapshot.disk)?);
            images.push(SnapshotImages { memory, disk });
        }
        let mut packer =
            Packer::new(self.staging.path(), self.options.level, self.options.run_pages, stop);
        let all = || {
            let of_snapshots = images.iter().flat_map(|s| s.memory.hashes().chain(s.disk.hashes()));
            rootfs.hashes().chain(of_snapshots)
        };
        for base in useful(&self.options.bases, self.options.min_use_percent, all) {
            packer.build_upon(base.record, &base.directory, base.directory_len);
        }
        let place = |packer: &mut Packer, object: &ObjectRef, role, image, cut, first: &[u32]| {
            let image = packer.add(image, cut, first)?;
            Ok::<_, StoreError>(Placed { object: object.clone(), role, image })
        };
        let rootfs_placed =
            place(&mut packer, &manifest.rootfs, "rootfs", &rootfs, Cut::Aligned, &[])?;
        packer.close()?;
        let mut placed = Vec::new();
        for ((digest, snapshot), images) in snapshots.iter().zip(&images) {
            // What is touched first lies together, and comes in few requests.
            let set = self.store.working_set(digest)?.map(|(_, set)| set);
            let touched = |wanted: Role| -> Vec<u32> {
                let pages = set.iter().flat_map(WorkingSet::pages);
                pages.filter(|(role, _)| *role == wanted).map(|(_, page)| page).collect()
            };
            let memory = place(
                &mut packer,
                &snapshot.memory,
                "memory",
                &images.memory,
                Cut::Dense,
                &touched(Role::Memory),
            )?;
            let disk = place(
                &mut packer,
                &snapshot.disk,
                "disk",
                &images.disk,
                Cut::Dense,
                &touched(Role::Disk),
            )?;
            packer.close()?;
            placed.push([memory, disk]);
        }
        if packer.packs().len() > MAX_PACKS {
            let what = format!("it would need {} packs", packer.packs().len());
            return Err(ArtifactError::Inconsistent(what).into());
        }

        let bundle: KernelBundle = self.store.get_json(&manifest.kernel.digest)?;
        let kernel = [
            self.add_blob(&bundle.vmlinux, layer::KERNEL)?,
            self.add_blob(&bundle.initramfs, layer::KERNEL)?,
        ];
        let mut manifests = Vec::new();
        for ((digest, snapshot), placed) in snapshots.iter().zip(&placed) {
            let state = self.add_blob(&snapshot.state, layer::STATE)?;
            let images = [&rootfs_placed, &placed[0], &placed[1]];
            let blobs = [&kernel[0], &kernel[1], &state];
            let documents = [manifest.kernel.digest, *template, *digest];
            let config = self.config(manifest, template, Some((digest, snapshot)));
            manifests.push(self.variant(&packer, config, &images, &blobs, &documents)?);
        }
        let documents = [manifest.kernel.digest, *template];
        let config = self.config(manifest, template, None);
        let blobs = [&kernel[0], &kernel[1]];
        manifests.push(self.variant(&packer, config, &[&rootfs_placed], &blobs, &documents)?);

        let mut stats = PublishStats {
            data_bytes: all().count() as u64 * crate::pack::PAGE as u64,
            new_bytes: packer.new_pages * crate::pack::PAGE as u64,
            ..PublishStats::default()
        };
        for pack in packer.packs() {
            let sum = match pack.fresh {
                Some(_) => &mut stats.new_pack_bytes,
                None => &mut stats.base_pack_bytes,
            };
            *sum += pack.pack_len;
        }
        let index = Index {
            schema_version: 2,
            media_type: Some(INDEX_TYPE.to_owned()),
            artifact_type: Some(ARTIFACT_TYPE.to_owned()),
            manifests: manifests.iter().map(|blob| blob.descriptor.clone()).collect(),
            annotations: self.annotations(manifest, None),
        };
        let bytes = artifact::to_json(&index);
        let index = Blob {
            descriptor: Descriptor::new(INDEX_TYPE, Digest::of(&bytes), bytes.len() as u64),
            content: Content::Bytes(bytes),
        };
        Ok(Publication {
            blobs: self.blobs,
            manifests,
            index,
            stats,
            attached: Vec::new(),
            stop,
            _lease: lease,
            staging: self.staging,
        })
    }

    fn config(
        &self,
        manifest: &TemplateManifest,
        template: &Digest,
        snapshot: Option<(&Digest, &SnapshotManifest)>,
    ) -> ArtifactConfig {
        ArtifactConfig {
            schema_version: CONFIG_VERSION,
            features: Vec::new(),
            architecture: manifest.architecture.clone(),
            os: "linux".to_owned(),
            template: *template,
            snapshot: snapshot.map(|(digest, _)| *digest),
            machine: snapshot.map(|(_, snapshot)| snapshot.machine),
            compat: snapshot.map(|(_, snapshot)| snapshot.compat.clone()),
            working_set: None,
            objects: Vec::new(),
            packs: Vec::new(),
        }
    }

    /// Writes the layers, config and manifest of one variant.
    fn variant(
        &mut self,
        packer: &Packer,
        mut config: ArtifactConfig,
        images: &[&Placed],
        blobs: &[&BlobLayer],
        documents: &[Digest],
    ) -> Result<Blob, PublishError> {
        // The variant's own numbering of the packs it uses, in the order of their making.
        let extents: Vec<_> = images.iter().map(|placed| packer.extents(&placed.image)).collect();
        let mut used: Vec<u16> = extents.iter().flatten().map(|extent| extent.pack).collect();
        used.sort_unstable();
        used.dedup();
        let renumbered: HashMap<u16, u16> = used.iter().copied().zip(0..).collect();
        let mut layers = Vec::new();
        for digest in documents {
            let bytes = self.store.get_blob(digest, crate::object::MAX_DOCUMENT_BYTES)?;
            layers.push(self.add_bytes(layer::DOCUMENT, bytes));
        }
        let working_set = config.snapshot.map(|snapshot| self.store.working_set(&snapshot));
        if let Some((digest, _)) = working_set.transpose()?.flatten() {
            let bytes = self.store.get_blob(&digest, crate::object::MAX_DOCUMENT_BYTES)?;
            layers.push(self.add_bytes(layer::WORKING_SET, bytes));
            config.working_set = Some(digest);
        }
        for (placed, extents) in images.iter().zip(extents) {
            let index = self.store.index(&placed.object.digest)?;
            layers.push(role(self.add_bytes(layer::INDEX, index.encode()), placed.role));
            let extents = extents
                .into_iter()
                .map(|extent| Extent { pack: renumbered[&extent.pack], ..extent })
                .collect();
            let map = PageMap::new(placed.image.size, extents)
                .map_err(|source| ArtifactError::Format { digest: placed.object.digest, source })?;
            let map = crate::pack::compress(&map.encode(), self.options.level.max(9))
                .map_err(|e| StoreError::io("compress", self.staging.path(), 0)(e))?;
            let map = role(self.add_bytes(layer::MAP, map), placed.role);
            config.objects.push(ArtifactObject::Image {
                digest: placed.object.digest,
                size: placed.object.size,
                map: map.digest,
            });
            layers.push(map);
        }
        for blob in blobs {
            config.objects.push(ArtifactObject::Blob {
                digest: blob.object.digest,
                size: blob.object.size,
                layer: blob.descriptor.digest,
            });
            layers.push(blob.descriptor.clone());
        }
        for pack in used.iter().map(|&pack| &packer.packs()[usize::from(pack)]) {
            config.packs.push(pack.record);
            let descriptors = [
                Descriptor::new(layer::DIRECTORY, pack.record.directory, pack.directory_len),
                Descriptor::new(layer::PACK, pack.record.pack, pack.pack_len),
            ];
            let contents = match &pack.fresh {
                Some((path, bytes)) => [Content::Bytes(bytes.clone()), Content::File(path.clone())],
                None => [Content::Elsewhere, Content::Elsewhere],
            };
            for (descriptor, content) in descriptors.into_iter().zip(contents) {
                self.add(Blob { descriptor: descriptor.clone(), content });
                layers.push(descriptor);
            }
        }
        // Parts before what refers to them.
        config
            .objects
            .extend(documents.iter().map(|digest| ArtifactObject::Document { digest: *digest }));
        let mut seen = HashSet::new();
        layers.retain(|descriptor| seen.insert(descriptor.digest));

        let template: TemplateManifest = self.store.get_json(&config.template)?;
        let annotations = self.annotations(&template, Some(&config));
        let platform =
            Platform { architecture: config.architecture.clone(), os: config.os.clone() };
        let config = self.add_bytes(CONFIG_TYPE, artifact::to_json(&config));
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(MANIFEST_TYPE.to_owned()),
            artifact_type: Some(ARTIFACT_TYPE.to_owned()),
            config,
            layers,
            annotations: annotations.clone(),
        };
        let bytes = artifact::to_json(&manifest);
        let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
        if size > MAX_MANIFEST_BYTES {
            let limit = MAX_MANIFEST_BYTES;
            return Err(ArtifactError::TooLarge { kind: "manifest", digest, size, limit }.into());
        }
        let descriptor = Descriptor {
            artifact_type: Some(ARTIFACT_TYPE.to_owned()),
            platform: Some(platform),
            annotations,
            ..Descriptor::new(MANIFEST_TYPE, digest, size)
        };
        Ok(Blob { descriptor, content: Content::Bytes(bytes) })
    }

    fn annotations(
        &self,
        template: &TemplateManifest,
        config: Option<&ArtifactConfig>,
    ) -> BTreeMap<String, String> {
        // The image's own notes first, so that ours and the caller's win.
        let own = |(key, _): &(&String, &String)| key.starts_with("org.opencontainers.image.");
        let mut notes: BTreeMap<String, String> =
            template.labels.iter().filter(own).map(|(k, v)| (k.clone(), v.clone())).collect();
        if let Some(created) = self.options.created {
            notes.insert("org.opencontainers.image.created".to_owned(), rfc3339(created));
        }
        let mut note = |key: &str, value: String| {
            notes.insert(format!("{}{key}", artifact::ANNOTATION_PREFIX), value);
        };
        note("rootfs.size", template.rootfs.size.to_string());
        if let Some(config) = config {
            let kind = if config.snapshot.is_some() { "snapshot" } else { "template" };
            note("variant", kind.to_owned());
            if let (Some(machine), Some(compat)) = (&config.machine, &config.compat) {
                note("machine.vcpus", machine.vcpus.to_string());
                note("machine.memory-mib", machine.memory_mib.to_string());
                note("cpu.vendor", compat.cpu_vendor.clone());
                note("kvm.kind", compat.kvm_kind.clone());
                note("state.version", compat.state_version.to_string());
            }
        }
        notes.extend(self.options.annotations.clone());
        notes
    }

    fn add_bytes(&mut self, media_type: &str, bytes: Vec<u8>) -> Descriptor {
        let descriptor = Descriptor::new(media_type, Digest::of(&bytes), bytes.len() as u64);
        self.add(Blob { descriptor: descriptor.clone(), content: Content::Bytes(bytes) });
        descriptor
    }

    fn add(&mut self, blob: Blob) {
        if self.have.insert(blob.descriptor.digest) {
            self.blobs.push(blob);
        }
    }

    /// Compresses a blob into a layer.
    fn add_blob(&mut self, object: &ObjectRef, media_type: &str) -> Result<BlobLayer, StoreError> {
        let source = self.store.path(&object.digest)?;
        let path = self.staging.join(format!("blob-{}", object.digest.hex()));
        let input = File::open(&source).map_err(StoreError::io("open", &source, 0))?;
        let output = File::create(&path).map_err(StoreError::io("create", &path, 0))?;
        let compress = || -> io::Result<HashingWriter<File>> {
            let writer = HashingWriter { inner: output, hasher: Sha256::new(), len: 0 };
            let mut encoder = zstd::stream::write::Encoder::new(writer, self.options.level)?;
            encoder.set_pledged_src_size(Some(object.size))?;
            let read =
                io::copy(&mut self.store.stop.watch(input.take(object.size + 1)), &mut encoder)?;
            if read != object.size {
                return Err(io::Error::other("its size is not what its reference says"));
            }
            encoder.finish()
        };
        let written = compress().map_err(StoreError::io("write", &path, object.size))?;
        let digest = Digest::from_bytes(written.hasher.finalize().into());
        let descriptor = Descriptor::new(media_type, digest, written.len);
        self.add(Blob { descriptor: descriptor.clone(), content: Content::File(path) });
        Ok(BlobLayer { object: object.clone(), descriptor })
    }
}

impl Publication {
    pub(crate) fn staging_path(&self) -> &std::path::Path {
        self.staging.path()
    }
}

impl Content {
    /// Writes the content to a new file and syncs it.
    pub(crate) fn write_to(&self, path: &std::path::Path, stop: Stop) -> Result<(), StoreError> {
        stop.check().map_err(|_| StoreError::Interrupted)?;
        match self {
            Self::Bytes(bytes) => durable::write_file(path, bytes),
            // At most a pack, so it is not asked in between.
            Self::File(source) => std::fs::copy(source, path)
                .and_then(|_| File::open(path)?.sync_all())
                .map_err(StoreError::io("write", path, 0)),
            Self::Elsewhere => Ok(()),
        }
    }
}

/// The bases of which enough is used.
fn useful<I: Iterator<Item = PageHash>>(
    bases: &[BasePack],
    min_use_percent: u64,
    pages: impl Fn() -> I,
) -> Vec<&BasePack> {
    // A page that several packs have counts for the first only.
    let mut holder: HashMap<PageHash, usize> = HashMap::new();
    for (number, base) in bases.iter().enumerate() {
        for hash in base.directory.frames().iter().flat_map(|frame| &frame.pages) {
            holder.entry(*hash).or_insert(number);
        }
    }
    let mut used = vec![0; bases.len()];
    let mut counted = HashSet::new();
    for hash in pages() {
        if let Some(&number) = holder.get(&hash)
            && counted.insert(hash)
        {
            used[number] += 1;
        }
    }
    let enough = |(base, used): &(&BasePack, u64)| {
        *used > 0 && used * 100 >= base.directory.page_count() * min_use_percent
    };
    bases.iter().zip(used).filter(enough).map(|(base, _)| base).collect()
}

fn role(mut descriptor: Descriptor, role: &str) -> Descriptor {
    descriptor.annotations.insert(format!("{}role", artifact::ANNOTATION_PREFIX), role.to_owned());
    descriptor
}

/// Seconds since 1970 as `2026-11-30T12:00:00Z`.
fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years (Howard Hinnant, "chrono-compatible low-level
    // date algorithms").
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

struct HashingWriter<W> {
    inner: W,
    hasher: Sha256,
    len: u64,
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_annotation_wants_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_796_040_000, "2026-11-30T12:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
        }
    }
}
