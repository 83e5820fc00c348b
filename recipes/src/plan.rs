//! The build plan: what a Dockerfile and a recipe both lower to and what every executor runs.
//!
//! Nothing in a plan is left to evaluate: variables are expanded, stages that the target does not
//! need are gone, the configuration of the result is known. Paths are inside the build (context,
//! stage or image); no directory of the machine appears.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Location;

/// `os/architecture[/variant]` in OCI spelling.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Platform {
    /// Always `linux` here.
    pub os: String,
    /// e.g. `amd64`.
    pub architecture: String,
    /// e.g. `v8`.
    pub variant: Option<String>,
}

impl Platform {
    /// The platform this program was built for.
    #[must_use]
    pub fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant: None }
    }

    /// Reads `linux/amd64`, `amd64`, `linux/arm64/v8`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let word = |part: &str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
        };
        if !parts.iter().all(|part| word(part)) {
            return None;
        }
        let architecture = |name: &str| {
            match name {
                "x86_64" | "x86-64" => "amd64",
                "aarch64" => "arm64",
                other => other,
            }
            .to_owned()
        };
        let known = ["amd64", "arm64", "arm", "386", "riscv64", "ppc64le", "s390x"];
        match parts.as_slice() {
            ["linux"] => Some(Self::host()),
            [one] if known.contains(&architecture(one).as_str()) => {
                Some(Self { os: "linux".into(), architecture: architecture(one), variant: None })
            }
            [os, arch] => {
                Some(Self { os: (*os).to_owned(), architecture: architecture(arch), variant: None })
            }
            [os, arch, variant] => {
                let architecture = architecture(arch);
                // v8 is what arm64 always is; images spell it both ways.
                let variant =
                    (architecture != "arm64" || *variant != "v8").then(|| (*variant).to_owned());
                Some(Self { os: (*os).to_owned(), architecture, variant })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// A whole build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildPlan {
    /// What is built for.
    pub platform: Platform,
    /// Only what the target needs, each after everything it uses; the last is the result.
    pub stages: Vec<Stage>,
    /// Patterns of files of the context that do not exist for the build.
    pub ignore: Vec<String>,
    /// Secrets that `RUN` steps ask for, and whether a step fails without.
    pub secrets: BTreeMap<String, bool>,
    /// Things a person should know that do not stop the build.
    pub warnings: Vec<Warning>,
}

/// Something worth knowing, with its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Where.
    pub at: Location,
    /// What.
    pub message: String,
}

/// Index of a stage in [`BuildPlan::stages`].
pub type StageId = usize;

/// A sequence of steps on a base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stage {
    /// `AS name`, lower case.
    pub name: Option<String>,
    /// Where it begins.
    pub at: Location,
    /// What it starts from.
    pub base: Base,
    /// In order.
    pub steps: Vec<Step>,
    /// Configuration after the last step.
    pub config: ImageConfig,
    /// From `MAINTAINER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
}

/// What a stage starts from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Base {
    /// Nothing.
    Scratch,
    /// An image.
    Image(ImageSource),
    /// An earlier stage's result.
    Stage {
        /// Which.
        stage: StageId,
    },
    /// A distribution installed into an empty directory.
    Bootstrap(Bootstrap),
}

/// An image by name and by content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageSource {
    /// As written, variables expanded.
    pub reference: String,
    /// Its manifest's digest for the platform; empty when it was not resolved (`check` only).
    pub digest: String,
    /// What it was resolved for.
    pub platform: Platform,
}

/// A distribution's base system, made by its own tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bootstrap {
    /// e.g. `bookworm`.
    pub suite: String,
    /// `minbase`, `apt`, `essential` or `important`.
    pub variant: String,
    /// Packages besides.
    pub packages: Vec<String>,
    /// Where packages come from; the host's own sources when absent.
    pub mirror: Option<String>,
}

/// One instruction that is part of the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// Where it is written.
    pub at: Location,
    /// As written, for progress and errors; here-documents shortened.
    pub text: String,
    /// For the image's history.
    pub created_by: String,
    /// What to do.
    pub action: Action,
}

/// What a step does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Action {
    /// Runs a program in the stage.
    Run(Box<Run>),
    /// Brings files in.
    Copy(Box<Copy>),
    /// Makes a directory and its parents.
    MakeDirectory {
        /// Absolute.
        path: String,
        /// `USER` at this line; empty is root.
        user: String,
    },
    /// Only the configuration changes; it is in [`Stage::config`].
    Configure,
}

/// A program to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Run {
    /// Program and arguments; the shell is already in front where the shell form was used.
    pub args: Vec<String>,
    /// `NAME=value`: image environment and build arguments.
    pub env: Vec<String>,
    /// Environment that does not count as an input (proxies).
    pub uncached_env: Vec<String>,
    /// Absolute.
    pub working_dir: String,
    /// Empty is root; names are looked up in the stage.
    pub user: String,
    /// Besides the stage itself.
    pub mounts: Vec<Mount>,
    /// What it may reach.
    pub network: Network,
    /// A script from a here-document with `#!`, mounted read-only at its path.
    pub script: Option<InlineFile>,
}

/// A `RUN` step's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Network {
    /// Whatever the build allows.
    Default,
    /// Loopback only.
    None,
    /// The machine's own; must be allowed for the build.
    Host,
}

/// Text that becomes a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineFile {
    /// Path or name.
    pub name: String,
    /// Content.
    pub data: String,
}

/// A mount of a `RUN` step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Absolute; for a secret that is only an environment variable, empty.
    pub target: String,
    /// What is mounted.
    pub source: MountSource,
    /// Writes fail.
    pub read_only: bool,
}

/// What is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum MountSource {
    /// Files of the context, a stage or an image; writes vanish after the step.
    Bind {
        /// From where.
        from: CopyFrom,
        /// Path there.
        path: String,
    },
    /// A directory kept between builds, not part of the result.
    Cache {
        /// Which.
        id: String,
        /// How concurrent steps share it.
        sharing: Sharing,
        /// Its first content.
        from: Option<CopyFrom>,
        /// Path there.
        path: String,
        /// Of the directory when it is made.
        mode: u32,
        /// Owner when it is made.
        uid: u32,
        /// Group when it is made.
        gid: u32,
    },
    /// Memory.
    Tmpfs {
        /// Limit in bytes.
        size: Option<u64>,
    },
    /// A secret, as a file and/or an environment variable.
    Secret {
        /// Which.
        id: String,
        /// Variable that holds its value.
        env: Option<String>,
        /// The step fails without.
        required: bool,
        /// Of the file.
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// An SSH agent's socket.
    Ssh {
        /// Which.
        id: String,
        /// The step fails without.
        required: bool,
        /// Of the socket.
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
    },
}

/// How concurrent steps use one cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Sharing {
    /// At once.
    Shared,
    /// Each its own.
    Private,
    /// One after the other.
    Locked,
}

/// Where copied files come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum CopyFrom {
    /// The build context.
    Context,
    /// Another stage.
    Stage {
        /// Which.
        stage: StageId,
    },
    /// An image.
    Image(ImageSource),
    /// An empty tree.
    Scratch,
    /// `--build-context name=…`: another directory of the machine, by its name.
    Named {
        /// Name.
        name: String,
    },
}

/// Files to bring in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Copy {
    /// Where the paths of `sources` are.
    pub from: CopyFrom,
    /// In order.
    pub sources: Vec<CopySource>,
    /// Absolute; a trailing slash says directory.
    pub dest: String,
    /// `user[:group]`, names or numbers; absent keeps (stages) or is root (context).
    pub chown: Option<String>,
    /// Absent keeps.
    pub chmod: Option<Chmod>,
    /// A layer of its own that does not look at what is below.
    pub link: bool,
    /// Keep the sources' directories.
    pub parents: bool,
    /// Patterns left out.
    pub exclude: Vec<String>,
    /// Local archives are unpacked.
    pub unpack: bool,
}

/// One source of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum CopySource {
    /// A path or pattern.
    Path {
        /// As written, expanded.
        path: String,
    },
    /// A here-document.
    Inline(InlineFile),
    /// Something to download.
    Url {
        /// Address.
        url: String,
        /// `sha256:…` that must hold.
        checksum: Option<String>,
        /// File name at the destination.
        name: String,
    },
}

/// A permission change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Chmod {
    /// Exactly these bits.
    Octal(u32),
    /// `u=rwX,go=rX`, applied to the source's bits.
    Symbolic(String),
}

/// An image's configuration, in the field names of the image format (with Docker's `Healthcheck`
/// and `Shell`, which the plain OCI document lacks).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageConfig {
    /// Empty is root.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// `80/tcp`.
    #[serde(skip_serializing_if = "BTreeSet::is_empty", with = "set_as_map")]
    pub exposed_ports: BTreeSet<String>,
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub env: Vec<String>,
    /// Absent and empty are the same to a runtime, but not to a later `FROM`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Default command or arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmd: Option<Vec<String>>,
    /// Directories that hold data.
    #[serde(skip_serializing_if = "BTreeSet::is_empty", with = "set_as_map")]
    pub volumes: BTreeSet<String>,
    /// Absolute, or empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
    /// Sorted.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "null_is_default")]
    pub labels: BTreeMap<String, String>,
    /// Signal name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// The ready check.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub healthcheck: Option<Healthcheck>,
    /// For the shell form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<Vec<String>>,
    /// Instructions for whoever builds on the image; never made here, refused in a base.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub on_build: Vec<String>,
}

/// `HEALTHCHECK`. Durations in nanoseconds, 0 is "not said", as in the image format.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Healthcheck {
    /// `NONE`; `CMD` and arguments; or `CMD-SHELL` and a line.
    pub test: Vec<String>,
    /// Between checks.
    #[serde(skip_serializing_if = "is_zero")]
    pub interval: u64,
    /// Of one check.
    #[serde(skip_serializing_if = "is_zero")]
    pub timeout: u64,
    /// Failures within it do not count.
    #[serde(skip_serializing_if = "is_zero")]
    pub start_period: u64,
    /// Between checks within the start period.
    #[serde(skip_serializing_if = "is_zero")]
    pub start_interval: u64,
    /// Failures in a row that make it unhealthy.
    #[serde(skip_serializing_if = "is_zero")]
    pub retries: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// The image format writes sets as maps to empty objects.
mod set_as_map {
    use std::collections::{BTreeMap, BTreeSet};

    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(serde::Serialize, Deserialize)]
    struct Empty {}

    pub fn serialize<S: Serializer>(set: &BTreeSet<String>, out: S) -> Result<S::Ok, S::Error> {
        out.collect_map(set.iter().map(|name| (name, Empty {})))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<BTreeSet<String>, D::Error> {
        let map = Option::<BTreeMap<String, Empty>>::deserialize(input)?;
        Ok(map.unwrap_or_default().into_keys().collect())
    }
}
