//! Templates in the store: reading one with its kernel, and the files a guest needs from it.

use parbake_cache::template::{
    CompatContract, KernelBundle, MachineShape, SCHEMA_VERSION, SnapshotManifest, TemplateManifest,
};
use parbake_cache::{Digest, Store, StoreError, TemplateName};
use parbake_protocol::agent::AGENT_PROTOCOL;
use parbake_vmm::snapshot::contract;
use parbake_vmm::snapshot::state::STATE_VERSION;

use crate::sandbox::{BootFiles, RestoreFiles};

/// A template as the store has it.
#[derive(Debug, Clone)]
pub struct Template {
    /// The name it was found by, if it was found by one.
    pub name: Option<TemplateName>,
    /// Digest of the manifest.
    pub digest: Digest,
    /// The manifest.
    pub manifest: TemplateManifest,
    /// Its kernel.
    pub kernel: KernelBundle,
}

/// What can be wrong with a template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A document of a newer parbake.
    #[error("{what} {digest} has schema version {found}; this parbake knows {SCHEMA_VERSION}")]
    Newer {
        /// Which document.
        what: &'static str,
        /// Its digest.
        digest: Digest,
        /// Its version.
        found: u32,
    },
    /// For another architecture.
    #[error("template {digest} is for {architecture}; this host is amd64")]
    Architecture {
        /// The manifest's digest.
        digest: Digest,
        /// What it is for.
        architecture: String,
    },
}

impl Template {
    /// Finds a template by name or digest and reads its documents.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn find(store: &Store, name_or_digest: &str) -> Result<Self, TemplateError> {
        let (name, digest) = store.resolve(name_or_digest)?;
        Self::load(store, name, digest)
    }

    /// Reads the documents of the template whose manifest is `digest`.
    ///
    /// # Errors
    /// See [`TemplateError`].
    pub fn load(
        store: &Store,
        name: Option<TemplateName>,
        digest: Digest,
    ) -> Result<Self, TemplateError> {
        let manifest: TemplateManifest = store.get_json(&digest)?;
        let newer = |what, digest, found| TemplateError::Newer { what, digest, found };
        if manifest.schema_version != SCHEMA_VERSION {
            return Err(newer("template", digest, manifest.schema_version));
        }
        if manifest.architecture != "amd64" {
            let architecture = manifest.architecture;
            return Err(TemplateError::Architecture { digest, architecture });
        }
        let kernel: KernelBundle = store.get_json(&manifest.kernel.digest)?;
        if kernel.schema_version != SCHEMA_VERSION {
            return Err(newer("kernel bundle", manifest.kernel.digest, kernel.schema_version));
        }
        Ok(Self { name, digest, manifest, kernel })
    }

    /// What people call it.
    #[must_use]
    pub fn label(&self) -> String {
        self.name.as_ref().map_or_else(|| self.digest.short(), ToString::to_string)
    }

    /// The files for a cold boot.
    ///
    /// # Errors
    /// [`TemplateError::Store`] where one is missing.
    pub fn boot_files(&self, store: &Store) -> Result<BootFiles, TemplateError> {
        Ok(BootFiles {
            kernel: store.path(&self.kernel.vmlinux.digest)?,
            initramfs: store.path(&self.kernel.initramfs.digest)?,
            cmdline: self.kernel.cmdline.clone(),
            rootfs: store.path(&self.manifest.rootfs.digest)?,
            more_disks: Vec::new(),
        })
    }

    /// The files to restore one of its snapshots.
    ///
    /// # Errors
    /// [`TemplateError::Store`] where one is missing.
    pub fn restore_files(
        &self,
        store: &Store,
        snapshot: &SnapshotManifest,
    ) -> Result<RestoreFiles, TemplateError> {
        Ok(RestoreFiles {
            state: store.path(&snapshot.state.digest)?,
            memory: store.path(&snapshot.memory.digest)?,
            difference: None,
            disk: store.path(&snapshot.disk.digest)?,
            rootfs: store.path(&self.manifest.rootfs.digest)?,
        })
    }

    /// The newest snapshot of this template that this kind of host can restore, for `shape`.
    ///
    /// # Errors
    /// [`TemplateError::Store`].
    pub fn snapshot(
        &self,
        store: &Store,
        shape: MachineShape,
        host: &HostClass,
    ) -> Result<Option<(Digest, SnapshotManifest)>, TemplateError> {
        Ok(store
            .snapshots(&self.digest)?
            .into_iter()
            .find(|(_, snapshot)| snapshot.machine == shape && host.can_restore(&snapshot.compat)))
    }

    /// Why each snapshot there is cannot be used for `shape` on this kind of host, in the order in
    /// which the store lists them.
    ///
    /// # Errors
    /// [`TemplateError::Store`].
    pub fn unfit(
        &self,
        store: &Store,
        shape: MachineShape,
        host: &HostClass,
    ) -> Result<Vec<(Digest, Vec<String>)>, TemplateError> {
        let reasons = |snapshot: &SnapshotManifest| {
            let mut reasons = host.unmet(&snapshot.compat);
            let other = snapshot.machine;
            if other != shape {
                reasons.push(format!(
                    "it is of a machine with {} vCPU and {} MiB, not {} vCPU and {} MiB",
                    other.vcpus, other.memory_mib, shape.vcpus, shape.memory_mib
                ));
            }
            reasons
        };
        let snapshots = store.snapshots(&self.digest)?;
        Ok(snapshots.iter().map(|(digest, snapshot)| (*digest, reasons(snapshot))).collect())
    }
}

/// What decides whether a snapshot can be restored here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostClass {
    /// CPUID vendor string.
    pub cpu_vendor: String,
    /// `svm`, `vmx` or `soft`.
    pub kvm_kind: String,
    /// The monitor's state format.
    pub state_version: u32,
    /// The agent protocol this program speaks.
    pub agent_protocol: u32,
}

impl HostClass {
    /// This machine's.
    #[must_use]
    pub fn of_this_machine() -> Self {
        Self {
            cpu_vendor: contract::host_vendor(),
            kvm_kind: contract::kvm_kind().to_owned(),
            state_version: STATE_VERSION,
            agent_protocol: AGENT_PROTOCOL,
        }
    }

    /// Whether a snapshot with this contract can be restored here. The monitor checks the CPU's
    /// features once more, against what KVM really offers.
    #[must_use]
    pub fn can_restore(&self, compat: &CompatContract) -> bool {
        self.unmet(compat).is_empty()
    }

    /// Why a snapshot with this contract cannot be restored here; empty when it can.
    #[must_use]
    pub fn unmet(&self, compat: &CompatContract) -> Vec<String> {
        let mut reasons = Vec::new();
        let mut same = |what: &str, needs: &dyn std::fmt::Display, has: &dyn std::fmt::Display| {
            let (needs, has) = (needs.to_string(), has.to_string());
            if needs != has {
                reasons.push(format!("it needs {what} {needs} and this host has {has}"));
            }
        };
        same("architecture", &compat.architecture, &"amd64");
        same("CPU vendor", &compat.cpu_vendor, &self.cpu_vendor);
        same("virtualization", &compat.kvm_kind, &self.kvm_kind);
        same("state format", &compat.state_version, &self.state_version);
        same("agent protocol", &compat.agent_protocol, &self.agent_protocol);
        reasons
    }
}
