//! What a template and a snapshot consist of: the documents that name their parts.
//!
//! Every document is JSON, is stored as an object under the digest of its own bytes, and starts
//! with `schemaVersion`. A document of a newer version is refused by name; unknown fields are
//! refused too, so that nothing mandatory is ever overlooked.

use serde::{Deserialize, Serialize};

use crate::Digest;

/// The version of every document in this module.
pub const SCHEMA_VERSION: u32 = 1;

/// A stored object: its digest and its logical size in bytes.
///
/// For a plain blob the digest is the SHA-256 of its bytes. For an *image* (root filesystem,
/// memory, disk overlay: large and sparse) it is the digest of its chunk index, so that zero runs
/// cost nothing and each chunk can be verified alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ObjectRef {
    /// The content's address.
    pub digest: Digest,
    /// Logical size in bytes.
    pub size: u64,
}

/// The built thing: a root filesystem, a kernel bundle, what to run, and the machine's shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TemplateManifest {
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Guest architecture in OCI spelling, e.g. `amd64`.
    pub architecture: String,
    /// The ext4 image.
    pub rootfs: ObjectRef,
    /// The document of the kernel bundle ([`KernelBundle`]).
    pub kernel: ObjectRef,
    /// What the image says about its processes.
    pub process: ProcessConfig,
    /// The virtual machine's shape.
    pub machine: MachineShape,
    /// Where the root filesystem came from.
    pub source: TemplateSource,
    /// Labels of the image and of the build, sorted by key.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub labels: std::collections::BTreeMap<String, String>,
    /// There are to be no snapshots of it: sandboxes boot cold.
    #[serde(default, skip_serializing_if = "is_false")]
    pub no_snapshot: bool,
    /// What a bake does between boot and freeze; absent: nothing, a booted guest is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bake: Option<BakeInstructions>,
    /// What its sandboxes may reach where nobody says otherwise: destinations as `--egress` takes
    /// them; none: nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
}

/// What a bake does between boot and freeze, in the order of the fields. The checks hold once
/// more at the very end, right before the freeze.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BakeInstructions {
    /// The image's own process is started first, and must still run at the freeze.
    #[serde(default, skip_serializing_if = "is_false")]
    pub start_process: bool,
    /// When the guest counts as ready.
    #[serde(default)]
    pub ready: ReadyInstructions,
    /// What is done in the ready guest, in order; each must succeed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warmup: Vec<WarmupStep>,
    /// For all warm-up steps together, in milliseconds.
    #[serde(default)]
    pub warmup_timeout_ms: u64,
    /// File caches stay in memory: a larger snapshot, faster first reads.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keep_caches: bool,
    /// Free memory is not overwritten with zeros.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keep_free_memory: bool,
    /// Shapes to bake besides the template's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_machines: Vec<MachineShape>,
}

/// When a guest counts as ready: all checks hold, `settle` passes, and they hold again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReadyInstructions {
    /// None: a booted guest is ready.
    #[serde(default)]
    pub checks: Vec<GuestCheck>,
    /// Between rounds of checks, in milliseconds.
    pub interval_ms: u64,
    /// Until the bake fails, in milliseconds.
    pub timeout_ms: u64,
    /// Quiet time after the checks first hold, in milliseconds.
    pub settle_ms: u64,
}

/// One condition, looked at inside the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum GuestCheck {
    /// A TCP port of the guest's loopback accepts connections.
    Tcp(u16),
    /// A request is answered as expected.
    Http(HttpRequest),
    /// A path exists.
    File(String),
    /// A command exits with 0.
    Exec(Vec<String>),
    /// A process of this name runs.
    Process(String),
}

/// One step of a warm-up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum WarmupStep {
    /// A command that exits with 0.
    Exec(Vec<String>),
    /// A request that is answered as expected.
    Http(HttpRequest),
}

/// A GET request to the guest itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpRequest {
    /// `http://` and an address of the guest.
    pub url: String,
    /// The status that counts.
    pub status: u16,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// How processes start in a sandbox: the image's own configuration, applied to every exec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProcessConfig {
    /// `NAME=value`, last one wins, order kept.
    #[serde(default)]
    pub env: Vec<String>,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty is root. Resolved inside the guest.
    #[serde(default)]
    pub user: String,
    /// Absolute; empty is `/`.
    #[serde(default)]
    pub working_dir: String,
    /// The image's entrypoint.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// The image's default arguments or command.
    #[serde(default)]
    pub cmd: Vec<String>,
    /// A signal's name or number; absent is `SIGTERM`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
}

/// The virtual machine's shape. A snapshot belongs to exactly one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineShape {
    /// Virtual CPUs, at least 1.
    pub vcpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
}

/// Where a template's root filesystem came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TemplateSource {
    /// As the user wrote it, without credentials and without the machine's own directories.
    pub reference: String,
    /// The image manifest's digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<Digest>,
    /// The layers, lowest first.
    #[serde(default)]
    pub layers: Vec<LayerRecord>,
}

/// One layer of the source image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LayerRecord {
    /// Digest of the uncompressed tar, as written in the image (`sha256:…` or `sha512:…`).
    pub diff_id: String,
    /// Size of the uncompressed tar in bytes.
    pub size: u64,
    /// What made the layer, as its history entry says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    /// What it costs in the root filesystem; absent where nobody measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<LayerCost>,
}

/// What one layer costs in the finished root filesystem. Depends on nothing but the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LayerCost {
    /// Bytes of its file contents that are still there, in whole blocks.
    pub live_bytes: u64,
    /// Bytes written for files of its that a higher layer hid or replaced, in whole blocks.
    pub hidden_bytes: u64,
    /// Its files, directories and other nodes that are still there.
    pub live_nodes: u64,
    /// Entries in its tar.
    pub entries: u64,
}

/// A kernel ready to boot: the unpacked ELF, the initramfs, and where both came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelBundle {
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Package name, or `file` for a local image.
    pub package: String,
    /// Package version.
    pub version: String,
    /// `uname -r` of the kernel.
    pub release: String,
    /// Digest of the package or file the bundle was made from.
    pub source: Digest,
    /// The unpacked ELF.
    pub vmlinux: ObjectRef,
    /// Modules and agent, uncompressed newc cpio.
    pub initramfs: ObjectRef,
    /// Digest of the agent inside the initramfs.
    pub agent: Digest,
    /// Module names in load order.
    pub modules: Vec<String>,
    /// Kernel command line; the machine adds nothing to it.
    pub cmdline: String,
    /// Facts read from the kernel's configuration, e.g. `CONFIG_PVH=y`; sorted.
    pub config: std::collections::BTreeMap<String, String>,
}

/// A frozen machine: belongs to one template, one machine shape and one CPU class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SnapshotManifest {
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Digest of the template's manifest.
    pub template: Digest,
    /// The machine that was frozen.
    pub machine: MachineShape,
    /// What a node must offer to restore it.
    pub compat: CompatContract,
    /// vCPU, irqchip, clock, device and queue state.
    pub state: ObjectRef,
    /// Guest memory, zero pages elided.
    pub memory: ObjectRef,
    /// What the disk differed in from the template's rootfs at that instant; the bitmap of
    /// changed blocks is in `state`.
    pub disk: ObjectRef,
    /// 1 for a snapshot of a cold-booted machine, n+1 for one of a restored generation n.
    pub generation: u32,
}

/// What a snapshot needs of a node; checked before anything large is fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CompatContract {
    /// OCI spelling, e.g. `amd64`.
    pub architecture: String,
    /// CPUID vendor string, e.g. `AuthenticAMD`.
    pub cpu_vendor: String,
    /// Hex words of the guest's CPUID feature leaves, sorted by name; each must be a subset of
    /// the node's.
    pub cpu_features: std::collections::BTreeMap<String, u32>,
    /// How the host virtualizes: `svm`, `vmx` or `soft`.
    pub kvm_kind: String,
    /// The monitor's state format.
    pub state_version: u32,
    /// The agent protocol.
    pub agent_protocol: u32,
    /// Guest page size in bytes.
    pub page_size: u32,
}
