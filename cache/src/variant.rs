//! Choosing among a tag's variants, before anything large is fetched.

use crate::Digest;
use crate::artifact::{
    ARTIFACT_TYPE, ArtifactConfig, ArtifactError, Descriptor, INDEX_TYPE, Index, MANIFEST_TYPE,
    MAX_MANIFEST_BYTES, Manifest,
};
use crate::compat_image::{Undressed, undress};
use crate::install::{
    BlobSource, InstallError, InstallEvent, Installed, Installer, fetch_verified,
};
use crate::store::Store;
use crate::template::{CompatContract, MachineShape};

/// Which variants to install.
#[derive(Debug, Clone)]
pub enum Choice {
    /// The bare template only; snapshots can be baked here.
    Template,
    /// The bare template's parts and the one snapshot that fits this node best.
    Node {
        /// What the node offers.
        offers: CompatContract,
        /// The machine shape wanted; absent: the template's own, or else any.
        machine: Option<MachineShape>,
    },
    /// Everything, fitting or not, as a mirror does.
    All,
}

/// What was installed of a tag, and what was not.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PullReport {
    /// The template's digest.
    pub template: Digest,
    /// What came with each variant.
    pub installed: Vec<Installed>,
    /// Snapshots that this node cannot restore, and why.
    pub refused: Vec<Refusal>,
}

/// A snapshot that a node cannot restore.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// The variant's manifest.
    pub manifest: Digest,
    /// One sentence per reason.
    pub reasons: Vec<String>,
}

/// Why a node cannot restore a snapshot; empty when it can.
#[must_use]
pub fn unmet(needs: &CompatContract, offers: &CompatContract) -> Vec<String> {
    let mut reasons = Vec::new();
    let mut same = |what: &str, needs: &dyn std::fmt::Display, offers: &dyn std::fmt::Display| {
        let (needs, offers) = (needs.to_string(), offers.to_string());
        if needs != offers {
            reasons.push(format!("it needs {what} {needs} and this node has {offers}"));
        }
    };
    same("architecture", &needs.architecture, &offers.architecture);
    same("CPU vendor", &needs.cpu_vendor, &offers.cpu_vendor);
    same("virtualization", &needs.kvm_kind, &offers.kvm_kind);
    same("state format", &needs.state_version, &offers.state_version);
    same("agent protocol", &needs.agent_protocol, &offers.agent_protocol);
    same("page size", &needs.page_size, &offers.page_size);
    for (leaf, word) in &needs.cpu_features {
        let offered = offers.cpu_features.get(leaf).copied().unwrap_or(0);
        let lacking = word & !offered;
        if lacking != 0 {
            reasons.push(format!("the CPU lacks the feature bits {lacking:#010x} of {leaf}"));
        }
    }
    reasons
}

/// A variant whose config has been read.
struct Variant<'a> {
    manifest: Manifest,
    /// Serves the parts of one that is dressed as an image.
    undressed: Option<Undressed<'a>>,
    digest: Digest,
    config: ArtifactConfig,
}

/// Installs the variants of `root` (an index, or a single manifest) that are chosen.
///
/// # Errors
/// When it is no template, or what is chosen cannot be installed.
pub fn install(
    store: &Store,
    source: &dyn BlobSource,
    root: &Descriptor,
    what: &str,
    choice: &Choice,
    observer: &(dyn Fn(InstallEvent) + Sync),
) -> Result<PullReport, InstallError> {
    let mut variants = Vec::new();
    for descriptor in manifests(source, root, what)? {
        let bytes = fetch_verified(source, &descriptor, "manifest", MAX_MANIFEST_BYTES)?;
        let manifest = Manifest::parse(&bytes, &descriptor.digest, what)?;
        let (manifest, undressed) = match undress(&manifest, source)? {
            Some((bare, parts)) => (bare, Some(parts)),
            None => (manifest, None),
        };
        let parts = undressed.as_ref().map_or(source, |parts| parts as &dyn BlobSource);
        let config = Installer::new(store, parts, &manifest, observer).config()?;
        variants.push(Variant { manifest, undressed, digest: descriptor.digest, config });
    }
    let Some(template) = variants.first().map(|variant| variant.config.template) else {
        return Err(ArtifactError::Inconsistent("its index is empty".to_owned()).into());
    };
    if variants.iter().any(|variant| variant.config.template != template) {
        let what = "its variants are of different templates".to_owned();
        return Err(ArtifactError::Inconsistent(what).into());
    }
    let (mut refused, mut chosen) = (Vec::new(), Vec::new());
    for variant in &variants {
        match (choice, &variant.config.compat) {
            (Choice::All, _) | (_, None) => chosen.push(variant),
            (Choice::Template, Some(_)) => {}
            (Choice::Node { offers, .. }, Some(needs)) => match unmet(needs, offers) {
                reasons if reasons.is_empty() => chosen.push(variant),
                reasons => refused.push(Refusal { manifest: variant.digest, reasons }),
            },
        }
    }
    if let Choice::Node { machine, .. } = choice {
        let fitting: Vec<_> =
            chosen.iter().copied().filter(|variant| variant.config.snapshot.is_some()).collect();
        let best = match machine {
            Some(machine) => fitting.iter().find(|v| v.config.machine == Some(*machine)).copied(),
            None => fitting.first().copied(),
        };
        // A snapshot's variant has all that the bare one has.
        match best {
            Some(best) => chosen = vec![best],
            None => chosen.retain(|variant| variant.config.snapshot.is_none()),
        }
    }
    if chosen.is_empty() {
        // Any snapshot's variant carries the whole template, too.
        let Some(variant) = variants.first() else { unreachable!("checked above") };
        let config = bare(variant.config.clone());
        let installer = variant.installer(store, source, observer);
        return Ok(PullReport { template, installed: vec![installer.install(&config)?], refused });
    }
    let mut installed = Vec::new();
    for variant in chosen {
        let installer = variant.installer(store, source, observer);
        installed.push(installer.install(&variant.config)?);
    }
    Ok(PullReport { template, installed, refused })
}

impl Variant<'_> {
    fn installer<'b>(
        &'b self,
        store: &'b Store,
        source: &'b dyn BlobSource,
        observer: &'b (dyn Fn(InstallEvent) + Sync),
    ) -> Installer<'b> {
        let source = self.undressed.as_ref().map_or(source, |parts| parts as &dyn BlobSource);
        Installer::new(store, source, &self.manifest, observer)
    }
}

/// A snapshot's config reduced to its template.
fn bare(mut config: ArtifactConfig) -> ArtifactConfig {
    use crate::artifact::ArtifactObject;
    // The publisher puts the template's objects first of their kind: image 0, blobs 0 and 1.
    let (mut images, mut blobs) = (0, 0);
    let snapshot = config.snapshot;
    config.objects.retain(|object| match object {
        ArtifactObject::Image { .. } => {
            images += 1;
            images == 1
        }
        ArtifactObject::Blob { .. } => {
            blobs += 1;
            blobs <= 2
        }
        ArtifactObject::Document { digest } => Some(*digest) != snapshot,
    });
    ArtifactConfig { snapshot: None, machine: None, compat: None, working_set: None, ..config }
}

/// The manifests behind a descriptor: those of an index that are of variants, or it itself.
///
/// # Errors
/// When the index cannot be had, or is none of a template.
pub fn manifests(
    source: &dyn BlobSource,
    root: &Descriptor,
    what: &str,
) -> Result<Vec<Descriptor>, InstallError> {
    if root.media_type == MANIFEST_TYPE {
        return Ok(vec![root.clone()]);
    }
    let not_a_template = |found: String| -> InstallError {
        ArtifactError::NotATemplate { what: what.to_owned(), found }.into()
    };
    if root.media_type != INDEX_TYPE {
        return Err(not_a_template(match root.media_type.as_str() {
            "application/vnd.docker.distribution.manifest.v2+json"
            | "application/vnd.docker.distribution.manifest.list.v2+json" => {
                "an ordinary image".to_owned()
            }
            other => format!("something of type {other:?}"),
        }));
    }
    let bytes = fetch_verified(source, root, "index", MAX_MANIFEST_BYTES)?;
    let index = Index::parse(&bytes, &root.digest)?;
    // Signatures and the like may stand beside the variants.
    let ours: Vec<_> = index
        .manifests
        .iter()
        .filter(|entry| {
            entry.media_type == MANIFEST_TYPE
                && (entry.artifact_type.as_deref() == Some(ARTIFACT_TYPE)
                    || index.artifact_type.as_deref() == Some(ARTIFACT_TYPE)
                    || entry.annotations.contains_key("dev.parbake.variant"))
        })
        .cloned()
        .collect();
    if ours.is_empty() {
        let any = index.manifests.iter().any(|entry| entry.platform.is_some());
        let found = if any { "an ordinary image" } else { "an index without one" };
        return Err(not_a_template(found.to_owned()));
    }
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contract() -> CompatContract {
        CompatContract {
            architecture: "amd64".to_owned(),
            cpu_vendor: "AuthenticAMD".to_owned(),
            cpu_features: [("1.ecx".to_owned(), 0b0110)].into(),
            kvm_kind: "svm".to_owned(),
            state_version: 1,
            agent_protocol: 1,
            page_size: 4096,
        }
    }

    #[test]
    fn a_node_must_offer_what_a_snapshot_needs_and_may_offer_more() {
        let needs = contract();
        assert_eq!(unmet(&needs, &contract()), Vec::<String>::new());
        let mut offers = contract();
        offers.cpu_features.insert("1.ecx".to_owned(), 0b1111);
        offers.cpu_features.insert("7.ebx".to_owned(), 1);
        assert_eq!(unmet(&needs, &offers), Vec::<String>::new());
        offers.cpu_features.insert("1.ecx".to_owned(), 0b0100);
        assert_eq!(unmet(&needs, &offers), ["the CPU lacks the feature bits 0x00000002 of 1.ecx"]);
        offers.cpu_features.clear();
        offers.cpu_vendor = "GenuineIntel".to_owned();
        offers.state_version = 2;
        assert_eq!(unmet(&needs, &offers).len(), 3);
    }
}
