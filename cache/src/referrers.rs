//! What is attached to a template without being part of it: signatures, SBOMs, provenance.
//!
//! Each is a manifest of its own whose `subject` is the template's index (OCI image and distribution
//! specifications 1.1). A registry with the referrers API lists them itself; for one without, they
//! are listed in an index with the tag `sha256-<hex>` (the referrers tag schema), which whoever
//! attaches something keeps. Two that do so at once may each overwrite what the other wrote, so
//! each looks again afterwards.
//!
//! In an image layout, they stand in `index.json` without a name, as other tools write them; an
//! index with such a tag is read, too.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use ureq::http::{Method, header};

use crate::Digest;
use crate::artifact::{
    self, Descriptor, INDEX_TYPE, Index, MANIFEST_TYPE, MAX_ITEMS, MAX_MANIFEST_BYTES,
};
use crate::conversation::{resolve, same_authority};
use crate::install::{BlobSource, InstallError, fetch_verified};
use crate::publish::{Blob, Content};
use crate::registry::{RegistryError, Repository, media_type};

/// The most bytes one attached document may have.
pub const MAX_ATTACHED_BYTES: u64 = 32 * 1024 * 1024;
/// The media type of a config that says nothing (OCI image specification, guidance).
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
const EMPTY: &[u8] = b"{}";
/// More pages of a list of referrers are not read.
const MAX_PAGES: usize = 16;
/// How long after writing the index of the tag schema it is looked at again, at least.
const SETTLE: Duration = Duration::from_millis(200);
/// How often the index of the tag schema is written until it holds.
const WRITES: u64 = 12;

/// Something to attach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// What it is, and the media type of its bytes.
    pub artifact_type: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Notes.
    pub annotations: BTreeMap<String, String>,
}

/// The manifest of something attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReferrerManifest {
    schema_version: u32,
    #[serde(default)]
    media_type: Option<String>,
    #[serde(default)]
    artifact_type: Option<String>,
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default)]
    subject: Option<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

/// Where attached things can be found.
pub trait ReferrerSource: BlobSource {
    /// What is attached to `subject`, as far as the place knows.
    ///
    /// # Errors
    /// When it cannot be asked. That nothing is attached is an answer.
    fn referrers(&self, subject: &Digest) -> io::Result<Vec<Descriptor>>;
}

/// The tag under which a registry without the API keeps the list.
pub(crate) fn fallback_tag(subject: &Digest) -> String {
    format!("sha256-{}", subject.hex())
}

/// Whether a tag is such a list's.
pub(crate) fn is_fallback_tag(tag: &str) -> bool {
    tag.strip_prefix("sha256-").is_some_and(|hex| hex.len() == 64)
}

impl Attachment {
    /// The blobs that attach it to `subject`: config, bytes and, last, the manifest.
    #[must_use]
    pub fn blobs(&self, subject: &Descriptor) -> [Blob; 3] {
        let blob = |media_type: &str, bytes: Vec<u8>| Blob {
            descriptor: Descriptor::new(media_type, Digest::of(&bytes), bytes.len() as u64),
            content: Content::Bytes(bytes),
        };
        let config = blob(EMPTY_TYPE, EMPTY.to_vec());
        let layer = blob(&self.artifact_type, self.bytes.clone());
        let manifest = artifact::to_json(&ReferrerManifest {
            schema_version: 2,
            media_type: Some(MANIFEST_TYPE.to_owned()),
            artifact_type: Some(self.artifact_type.clone()),
            config: config.descriptor.clone(),
            layers: vec![layer.descriptor.clone()],
            subject: Some(Descriptor::new(&subject.media_type, subject.digest, subject.size)),
            annotations: self.annotations.clone(),
        });
        let mut manifest = blob(MANIFEST_TYPE, manifest);
        manifest.descriptor.artifact_type = Some(self.artifact_type.clone());
        manifest.descriptor.annotations.clone_from(&self.annotations);
        [config, layer, manifest]
    }
}

/// The bytes of something attached to `subject`, verified.
///
/// # Errors
/// When they cannot be had, or the manifest is not one that attaches something to it.
pub fn attached_bytes(
    source: &dyn BlobSource,
    descriptor: &Descriptor,
    subject: &Digest,
) -> Result<Vec<u8>, InstallError> {
    let bad = |what: &str| {
        let what = format!("{} {what}", descriptor.digest);
        artifact::ArtifactError::Inconsistent(what)
    };
    let bytes = fetch_verified(source, descriptor, "manifest", MAX_MANIFEST_BYTES)?;
    let manifest: ReferrerManifest =
        serde_json::from_slice(&bytes).map_err(|_| bad("is no manifest"))?;
    if manifest.subject.is_none_or(|about| about.digest != *subject) {
        return Err(bad("is not attached to what it was listed for").into());
    }
    let [layer] = manifest.layers.as_slice() else {
        return Err(bad("has not exactly one document").into());
    };
    fetch_verified(source, layer, "attached document", MAX_ATTACHED_BYTES)
}

/// Whether a manifest is attached to `subject`.
pub(crate) fn refers_to(bytes: &[u8], subject: &Digest) -> bool {
    serde_json::from_slice::<ReferrerManifest>(bytes)
        .is_ok_and(|manifest| manifest.subject.is_some_and(|about| about.digest == *subject))
}

impl ReferrerSource for Repository {
    fn referrers(&self, subject: &Digest) -> io::Result<Vec<Descriptor>> {
        Ok(self.list_referrers(subject)?)
    }
}

impl Repository {
    fn list_referrers(&self, subject: &Digest) -> Result<Vec<Descriptor>, RegistryError> {
        match self.referrers_by_api(subject)? {
            Some(found) => Ok(found),
            None => {
                Ok(self.referrers_by_tag(subject)?.map(|index| index.manifests).unwrap_or_default())
            }
        }
    }

    /// What the API says; nothing when the registry has none.
    fn referrers_by_api(&self, subject: &Digest) -> Result<Option<Vec<Descriptor>>, RegistryError> {
        let mut target = format!("/v2/{}/referrers/{subject}", self.repository());
        let mut found = Vec::new();
        for _ in 0..MAX_PAGES {
            let headers = [("accept", INDEX_TYPE.to_owned())];
            let response = self.request(&Method::GET, &target, &headers, None, None)?;
            // Some answer with a page of their own for what they do not know.
            let is_index = media_type(&response).is_some_and(|kind| kind == INDEX_TYPE);
            if matches!(response.status().as_u16(), 200 | 400 | 404 | 405 | 406 | 501)
                && !(response.status() == 200 && is_index)
            {
                return Ok(None);
            }
            let mut response = self.expect(response, &[200], "what is attached")?;
            let next = next_page(&response, &self.uri(&target)?);
            let bytes = self.read_bounded(response.body_mut(), MAX_MANIFEST_BYTES, "a list")?;
            found.extend(self.parse_list(&bytes)?.manifests);
            match next {
                Some(next) if found.len() < MAX_ITEMS => target = next,
                _ => break,
            }
        }
        found.truncate(MAX_ITEMS);
        Ok(Some(found))
    }

    fn referrers_by_tag(&self, subject: &Digest) -> Result<Option<Index>, RegistryError> {
        match self.document(&fallback_tag(subject)) {
            Ok((_, bytes)) => self.parse_list(&bytes).map(Some),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn parse_list(&self, bytes: &[u8]) -> Result<Index, RegistryError> {
        Index::parse(bytes, &Digest::of(bytes)).map_err(|error| RegistryError::Protocol {
            host: self.host().to_owned(),
            what: format!("its list of what is attached: {error}"),
        })
    }

    /// Attaches things to `subject`, which must be there already. What is attached already is left as
    /// it is. Returns the digests of their manifests.
    ///
    /// # Errors
    /// When the registry refuses it, or others keep overwriting the list.
    pub fn attach(
        &self,
        subject: &Descriptor,
        attachments: &[Attachment],
    ) -> Result<Vec<Digest>, RegistryError> {
        let mut digests = Vec::new();
        if attachments.is_empty() {
            return Ok(digests);
        }
        let listed = self.list_referrers(&subject.digest)?;
        let is_listed =
            |list: &[Descriptor], digest: &Digest| list.iter().any(|entry| entry.digest == *digest);
        let mut left: Vec<Descriptor> = Vec::new();
        for attachment in attachments {
            let blobs = attachment.blobs(subject);
            let manifest = &blobs[2].descriptor;
            digests.push(manifest.digest);
            if !is_listed(&listed, &manifest.digest) && !self.send_attached(&blobs)? {
                left.push(manifest.clone());
            }
        }
        if left.is_empty() {
            return Ok(digests);
        }
        // One that lists them by itself without having said so.
        if let Some(listed) = self.referrers_by_api(&subject.digest)? {
            left.retain(|entry| !is_listed(&listed, &entry.digest));
        }
        for round in 1..=WRITES {
            let mut index = self.referrers_by_tag(&subject.digest)?.unwrap_or_else(|| Index {
                schema_version: 2,
                media_type: Some(INDEX_TYPE.to_owned()),
                artifact_type: None,
                manifests: Vec::new(),
                annotations: BTreeMap::new(),
            });
            left.retain(|entry| !is_listed(&index.manifests, &entry.digest));
            if left.is_empty() {
                return Ok(digests);
            }
            index.manifests.extend(left.iter().cloned());
            let bytes = artifact::to_json(&index);
            self.put_manifest(&fallback_tag(&subject.digest), INDEX_TYPE, &bytes)?;
            // Long enough that another who read before this was written has written, too; and not
            // the same for everybody, further apart each time.
            let spread = u64::from(crate::live::random_id().as_bytes()[0] % 16);
            std::thread::sleep(SETTLE + Duration::from_millis(20 * spread * round));
        }
        let written = self.referrers_by_tag(&subject.digest)?.map(|index| index.manifests);
        if left.iter().all(|entry| is_listed(written.as_deref().unwrap_or_default(), &entry.digest))
        {
            return Ok(digests);
        }
        Err(RegistryError::Protocol {
            host: self.host().to_owned(),
            what: format!(
                "its tag {} does not keep what is written",
                fallback_tag(&subject.digest)
            ),
        })
    }

    /// Sends what makes up something attached; tells whether the registry lists it by itself.
    fn send_attached(&self, blobs: &[Blob; 3]) -> Result<bool, RegistryError> {
        let [config, layer, manifest] = blobs;
        for blob in [config, layer] {
            let Content::Bytes(bytes) = &blob.content else { continue };
            if !self.has_blob(&blob.descriptor.digest)? {
                self.put_blob(&blob.descriptor, &|| {
                    Ok(Box::new(io::Cursor::new(bytes.clone())) as Box<dyn io::Read + Send>)
                })?;
            }
        }
        let Content::Bytes(bytes) = &manifest.content else { return Ok(false) };
        self.put_document(&manifest.descriptor.digest.to_string(), MANIFEST_TYPE, bytes)
    }
}

/// The next page of a list (RFC 8288), if it is on the same host.
fn next_page(
    response: &ureq::http::Response<ureq::Body>,
    base: &ureq::http::Uri,
) -> Option<String> {
    let link = response.headers().get(header::LINK)?.to_str().ok()?;
    let (target, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
    parameters.contains("next").then_some(())?;
    let next = resolve(base, target)?;
    same_authority(&next, base).then(|| next.to_string())
}
