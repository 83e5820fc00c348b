//! `parbake.yaml`: the types are the schema, and their comments its documentation.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod bake;
pub mod init;
mod lower;
mod read;
mod units;

pub use bake::{
    BakeSpec, Check, Disk, Egress, HttpCheck, Kernel, Machine, NetworkPolicy, Ready, Snapshot,
    Warmup, WarmupStep,
};
pub use lower::lower;
pub use read::{Places, read};
pub use units::Time;

/// Largest recipe that is read, in bytes.
pub const MAX_SIZE: usize = 1 << 20;

/// How a template is made and what it is when it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(title = "parbake recipe")]
pub struct Recipe {
    /// Always `parbake.dev/v1`. Required.
    pub api_version: ApiVersion,
    /// Always `Template`.
    #[serde(default)]
    pub kind: Kind,
    /// Name and labels. Absent: no name, no labels.
    #[serde(default)]
    pub metadata: Metadata,
    /// What the root filesystem starts from. Required.
    pub base: BaseSpec,
    /// Packages to install, before files and steps. Absent: none.
    #[serde(default)]
    pub packages: Packages,
    /// Users to add, before packages of languages, files and steps. Absent: none.
    #[serde(default)]
    pub users: Vec<User>,
    /// Files to bring in, in order, before the steps. Absent: none.
    #[serde(default)]
    pub files: Vec<FileSpec>,
    /// Environment of every process of a sandbox, kept in the template. Absent: the base's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// What runs while the root filesystem is built. Absent: nothing.
    #[serde(default)]
    pub build: Build,
    /// What starts in a sandbox. Absent fields: the base's.
    #[serde(default)]
    pub process: Process,
    /// The guest kernel. Absent: the distribution kernel parbake finds on the host.
    #[serde(default)]
    pub kernel: Kernel,
    /// The virtual machine's shape.
    #[serde(default)]
    pub machine: Machine,
    /// Further shapes to bake a snapshot for, from the same root filesystem. Absent: none.
    #[serde(default)]
    pub more_machines: Vec<Machine>,
    /// The root disk.
    #[serde(default)]
    pub disk: Disk,
    /// What runs in the booted guest before the freeze. Absent: nothing.
    #[serde(default)]
    pub warmup: Warmup,
    /// When the guest counts as ready. Absent: the base's health check, or a booted guest.
    #[serde(default)]
    pub ready: Ready,
    /// How the snapshot is taken.
    #[serde(default)]
    pub snapshot: Snapshot,
    /// What sandboxes may reach. Absent: nothing.
    #[serde(default)]
    pub network: NetworkPolicy,
    /// What makes two builds the same bytes.
    #[serde(default)]
    pub reproducibility: Reproducibility,
}

/// The language's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// The first.
    #[serde(rename = "parbake.dev/v1")]
    V1,
}

/// The kind of document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Kind {
    /// A template.
    #[default]
    Template,
}

/// Name and labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Metadata {
    /// A short name for people. Absent: none.
    pub name: Option<String>,
    /// Labels of the image configuration. Absent: none.
    pub labels: BTreeMap<String, String>,
}

/// What the root filesystem starts from: exactly one of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum BaseSpec {
    /// An image: `registry/name:tag`, `oci:DIR[:TAG]`, `oci-archive:FILE`, `docker-archive:FILE`,
    /// or `scratch`.
    Image(String),
    /// A template of the store, by name or digest. Its files and its process are the base; its
    /// kernel, warm-up and checks are not.
    Template(String),
    /// A Dockerfile, its build context being the recipe's directory.
    Dockerfile(DockerfileSpec),
    /// A distribution installed into an empty directory by its own tool.
    Bootstrap(BootstrapSpec),
}

/// A Dockerfile as the base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DockerfileSpec {
    /// Path below the recipe's directory. Absent: `Dockerfile`.
    #[serde(default = "dockerfile_path")]
    pub path: String,
    /// The stage to build. Absent: the last.
    #[serde(default)]
    pub target: Option<String>,
    /// Values of `ARG`s. Absent: none.
    #[serde(default)]
    pub args: BTreeMap<String, String>,
}

fn dockerfile_path() -> String {
    "Dockerfile".to_owned()
}

/// A distribution bootstrap through `mmdebstrap`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BootstrapSpec {
    /// The suite, e.g. `bookworm`. Required.
    pub suite: String,
    /// How much of it. Absent: `minbase`.
    #[serde(default)]
    pub variant: Variant,
    /// The package mirror. Absent: the sources of the machine that builds.
    #[serde(default)]
    pub mirror: Option<String>,
}

/// How much of a distribution a bootstrap installs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// Essential packages only, without a package manager.
    Essential,
    /// Essential packages and apt.
    Apt,
    /// What every Debian system counts on, and apt.
    #[default]
    Minbase,
    /// Packages of priority important too.
    Important,
}

/// Packages, installed by the guest's own package managers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Packages {
    /// Debian packages, `name` or `name=version`. Absent: none.
    pub apt: Vec<String>,
    /// Python packages, as `pip install` takes them. Absent: none.
    pub pip: Vec<String>,
    /// A requirements file below the recipe's directory, for `pip install -r`. Absent: none.
    pub pip_requirements: Option<String>,
    /// Node packages, installed globally. Absent: none.
    pub npm: Vec<String>,
}

impl Packages {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A user to add. A user or group of the same name must not exist with another number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct User {
    /// Name. Required.
    pub name: String,
    /// Number. Required, so that every build gives the same one.
    pub uid: u32,
    /// Group number; a group of the user's name is added. Absent: the uid.
    #[serde(default)]
    pub gid: Option<u32>,
    /// Home directory, made and owned by the user. Absent: `/home/NAME`.
    #[serde(default)]
    pub home: Option<String>,
    /// Login shell. Absent: `/bin/sh`.
    #[serde(default = "bin_sh")]
    pub shell: String,
}

fn bin_sh() -> String {
    "/bin/sh".to_owned()
}

/// A file or directory to bring in: `src` copies, `content` writes; exactly one of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileSpec {
    /// Path or pattern below the recipe's directory; the contents of a directory are copied.
    #[serde(default)]
    pub src: Option<String>,
    /// The file's text.
    #[serde(default)]
    pub content: Option<String>,
    /// Absolute path in the guest; a trailing slash says directory. Required.
    pub dest: String,
    /// `user[:group]`, names or numbers. Absent: root.
    #[serde(default)]
    pub owner: Option<String>,
    /// Octal permissions as text, e.g. `"0644"`. Absent: the source's; 0644 for `content`.
    #[serde(default)]
    pub mode: Option<String>,
    /// Patterns left out, as in `.dockerignore`. Absent: none.
    #[serde(default)]
    pub exclude: Vec<String>,
}

/// What runs while the root filesystem is built.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Build {
    /// Environment of build steps only; never in the template. Absent: none.
    pub env: BTreeMap<String, String>,
    /// Secrets that steps may use, mounted for one step at a time. Absent: none.
    pub secrets: Vec<SecretSpec>,
    /// What build steps may reach. Absent: `full`.
    pub network: BuildNetwork,
    /// Commands, in order. Absent: none.
    pub steps: Vec<StepSpec>,
}

/// What build steps may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum BuildNetwork {
    /// What the machine that builds can reach.
    #[default]
    Full,
    /// Nothing.
    None,
}

/// A build secret. Its value comes from the command line (`--secret`), never from the recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretSpec {
    /// Its name; steps read `/run/secrets/ID`. Required.
    pub id: String,
    /// A variable that holds the value too. Absent: none.
    #[serde(default)]
    pub env: Option<String>,
    /// The build fails without it. Absent: true.
    #[serde(default = "yes")]
    pub required: bool,
}

fn yes() -> bool {
    true
}

/// A build step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StepSpec {
    /// A line for the guest's `/bin/sh -ec`: text, or an argument list run without a shell.
    pub run: Command,
    /// Who runs it. Absent: root.
    #[serde(default)]
    pub user: Option<String>,
    /// Where. Absent: `process.workingDir`, or the base's.
    #[serde(default)]
    pub working_dir: Option<String>,
    /// Directories kept between builds and left out of the template. Absent: none.
    #[serde(default)]
    pub cache: Vec<String>,
    /// Ids of `build.secrets` this step sees. Absent: none.
    #[serde(default)]
    pub secrets: Vec<String>,
    /// Narrows `build.network` for this step. Absent: `build.network`.
    #[serde(default)]
    pub network: Option<BuildNetwork>,
}

/// A shell line or an argument list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Command {
    /// For the shell.
    Line(String),
    /// Program and arguments.
    Args(Vec<String>),
}

impl Command {
    /// Program and arguments; a line goes to `/bin/sh -ec`.
    #[must_use]
    pub fn args(&self) -> Vec<String> {
        match self {
            Self::Line(line) => vec!["/bin/sh".into(), "-ec".into(), line.clone()],
            Self::Args(args) => args.clone(),
        }
    }
}

/// What starts in a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Process {
    /// Program and leading arguments. Absent: the base's.
    pub entrypoint: Option<Vec<String>>,
    /// Default arguments or command. Absent: the base's, or none where `entrypoint` is given.
    pub cmd: Option<Vec<String>>,
    /// Absolute. Absent: the base's.
    pub working_dir: Option<String>,
    /// `user[:group]`. Absent: the base's.
    pub user: Option<String>,
    /// e.g. `SIGTERM`. Kept in the template for who reads it; a sandbox ends with its machine, and no
    /// signal is sent. Absent: the base's.
    pub stop_signal: Option<String>,
}

/// What makes two builds the same bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Reproducibility {
    /// Time of everything the build makes, in seconds since 1970. Absent: `SOURCE_DATE_EPOCH`
    /// of the environment, or the times the steps left.
    pub source_date_epoch: Option<i64>,
}

/// The JSON Schema of a recipe, as published.
#[must_use]
pub fn schema() -> String {
    let schema = schemars::schema_for!(Recipe);
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}
