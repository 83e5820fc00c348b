//! The API's language: what is asked and answered, as JSON.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use parbake_protocol::agent::{Exit, ExitReason, FailureKind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `PUT` and `GET` take this many bytes at most unless the service was told otherwise.
pub const DEFAULT_TRANSFER_LIMIT: u64 = 4 << 30;

/// The most bytes of a JSON body.
pub const MAX_BODY: usize = 1 << 20;

/// A request for a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateRequest {
    /// A template's name or digest, as `parbake ls` shows them.
    pub template: String,
    /// Virtual CPUs; absent: the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u8>,
    /// Guest memory in MiB; absent: the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// The sandbox is removed after so many seconds; absent: the service's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// The guest's host name; absent: the sandbox's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// Environment of every command of this run. Kept in guest memory only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Files `/run/secrets/NAME`, readable by the image's user only. Kept in guest memory only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
    /// Words of the caller's own, shown and logged.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What it may reach: `allow=ADDRESS[:PORT]`, `allow=NAME[:PORT]`, `allow=*`; empty: what the
    /// template says, else nothing; only `none`: nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// What it may use of the host.
    #[serde(default)]
    pub limits: Limits,
    /// A volume that outlives it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<WorkspaceRequest>,
}

/// A volume that outlives sandboxes, for one at a time. Removing the sandbox ends its commands,
/// writes the volume and takes it off.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkspaceRequest {
    /// Its name: up to 64 letters, digits, `-`, `_` and `.`. It is made when there is none.
    pub name: String,
    /// Bytes of a new one; absent: 1 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Where it is in the guest; absent: `/workspace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// What a sandbox may use of the host. Whatever is absent follows from its machine's shape.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// Host memory in bytes, the guest's and its monitor's together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Processor time in thousandths of a processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<u32>,
    /// Share of the disks' time against other sandboxes, 1 to 10000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_weight: Option<u16>,
    /// Processes and threads it may have inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u32>,
    /// Bytes it may write to its disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

/// What a sandbox is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// It is being made.
    Starting,
    /// It takes commands.
    Running,
    /// It stands still for a moment while it is copied.
    Forking,
    /// It is being written to the store.
    Pausing,
    /// It is in the store, and uses no memory or processor.
    Paused,
    /// It is being removed.
    Ending,
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    /// What it is doing.
    pub state: State,
    /// The template, as it was asked for.
    pub template: String,
    /// Digest of the template's manifest.
    pub template_digest: String,
    /// Virtual CPUs.
    pub cpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// When it was made, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// When it will be removed; absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_unix_ms: Option<u64>,
    /// The sandbox it is a fork of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Names of its secrets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Words of the caller's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// What it may reach; empty: nothing. A sandbox that a later service took over reaches nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<String>,
    /// Isolation layers in force around its monitor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jail: Vec<String>,
    /// Its monitor's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor_pid: Option<u32>,
    /// Commands running in it.
    pub executions: u32,
    /// Where the time of its creation went; absent when a former service made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// Where the time of a creation went, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Timings {
    /// Starting the monitor to its vCPUs running.
    pub started_ms: f64,
    /// Starting the monitor to the guest being a machine of its own.
    pub ready_ms: f64,
    /// The request to the answer.
    pub total_ms: f64,
}

/// Sandboxes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxList {
    /// Oldest first.
    pub sandboxes: Vec<Sandbox>,
}

/// A request for copies of a running sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ForkRequest {
    /// How many.
    pub count: u8,
    /// As in a creation.
    pub ttl_seconds: Option<u64>,
    /// Environment on top of the parent's.
    pub env: BTreeMap<String, String>,
    /// Secrets on top of the parent's.
    pub secrets: BTreeMap<String, String>,
    /// As in a creation.
    pub labels: BTreeMap<String, String>,
    /// End the commands that run in the parent; else they are a reason to refuse.
    pub end_sessions: bool,
    /// Copy a sandbox with secrets, secrets included.
    pub with_secrets: bool,
}

impl Default for ForkRequest {
    fn default() -> Self {
        Self {
            count: 1,
            ttl_seconds: None,
            env: BTreeMap::new(),
            secrets: BTreeMap::new(),
            labels: BTreeMap::new(),
            end_sessions: false,
            with_secrets: false,
        }
    }
}

/// A request to put a sandbox into the store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PauseRequest {
    /// End the commands that run; else they are a reason to refuse.
    pub end_sessions: bool,
    /// Pause a sandbox with secrets: they are then in the store.
    pub with_secrets: bool,
}

/// A paused sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Paused {
    /// The sandbox's id.
    pub id: String,
    /// Its name in the store; `parbake push` takes it to other nodes.
    pub template: String,
    /// Digest of the snapshot.
    pub snapshot: String,
    /// Bytes of memory that are not zero.
    pub memory_data_bytes: u64,
    /// Bytes its disk differs in from the template's.
    pub disk_data_bytes: u64,
}

/// A request to let a paused sandbox go on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResumeRequest {
    /// As in a creation.
    pub ttl_seconds: Option<u64>,
    /// Environment on top of what it had.
    pub env: BTreeMap<String, String>,
    /// Secrets.
    pub secrets: BTreeMap<String, String>,
    /// As in a creation; what it could reach before does not count.
    pub egress: Vec<String>,
    /// As in a creation.
    pub limits: Limits,
    /// Keep what is in the store, to resume it from there again.
    pub keep: bool,
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters a line.
    pub columns: u16,
}

/// Bytes: as text where they are UTF-8, else in base64.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Data {
    /// The bytes, if they are UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The bytes in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

impl Data {
    /// Wraps bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self { text: Some(text), base64: None },
            Err(error) => Self { text: None, base64: Some(BASE64.encode(error.as_bytes())) },
        }
    }

    /// The bytes.
    ///
    /// # Errors
    /// Both or neither are there, or it is not base64.
    pub fn bytes(&self) -> Result<Vec<u8>, String> {
        match (&self.text, &self.base64) {
            (Some(text), None) => Ok(text.clone().into_bytes()),
            (None, Some(base64)) => {
                BASE64.decode(base64).map_err(|error| format!("not base64: {error}"))
            }
            _ => Err("exactly one of text and base64 is wanted".to_owned()),
        }
    }
}

/// A word of a command line: text, or an object with its bytes in base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Word {
    /// UTF-8.
    Text(String),
    /// Anything.
    Data(Data),
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments. A program without a slash is looked up in the guest's `PATH`.
    pub argv: Vec<Word>,
    /// Environment on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; absent: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// `name`, `uid`, `name:group`, `uid:gid`; absent: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Give it a terminal of this size. Only on an upgraded connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<WindowSize>,
    /// Connect standard input. Only on an upgraded connection.
    #[serde(default)]
    pub stdin: bool,
    /// Standard input, all of it. Only on a connection that is not upgraded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<Data>,
    /// Kill it and everything it started after this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// The most output forwarded, in bytes; the rest is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_limit_bytes: Option<u64>,
    /// Start it and let it be: no input, no output, not ended with the connection.
    #[serde(default)]
    pub detach: bool,
    /// A person has confirmed it after the guard asked.
    #[serde(default)]
    pub confirmed: bool,
}

/// What happens to a running command, one JSON document a line. `exited` and `failed` are last; with
/// `detach`, `started` is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum ExecEvent {
    /// It runs.
    #[serde(rename_all = "camelCase")]
    Started {
        /// Its process id in the guest.
        pid: u32,
    },
    /// It wrote to standard output.
    Stdout(Data),
    /// It wrote to standard error.
    Stderr(Data),
    /// It is gone.
    Exited(ExitStatus),
    /// It could not be started, or the guest is gone.
    Failed(StartFailure),
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExitStatus {
    /// What a shell would show: its exit code, 128+n for signal n, 124 for a timeout.
    pub exit_code: i32,
    /// Its own exit code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// `ended`, `timeout` or `killed`.
    pub reason: String,
    /// Output beyond the limit was dropped.
    pub truncated: bool,
}

impl From<&Exit> for ExitStatus {
    fn from(exit: &Exit) -> Self {
        let reason = match exit.reason {
            ExitReason::Ended => "ended",
            ExitReason::Timeout => "timeout",
            ExitReason::Killed => "killed",
        };
        Self {
            exit_code: exit.shell_code(),
            code: exit.code,
            signal: exit.signal,
            reason: reason.to_owned(),
            truncated: exit.truncated,
        }
    }
}

impl From<&ExitStatus> for Exit {
    fn from(status: &ExitStatus) -> Self {
        let reason = match status.reason.as_str() {
            "timeout" => ExitReason::Timeout,
            "killed" => ExitReason::Killed,
            _ => ExitReason::Ended,
        };
        Self { code: status.code, signal: status.signal, reason, truncated: status.truncated }
    }
}

/// Why a command could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct StartFailure {
    /// What a shell would show: 127 not found, 126 not executable, else 125.
    pub exit_code: i32,
    /// For people.
    pub message: String,
}

impl StartFailure {
    /// What kind of failure the exit code stands for.
    #[must_use]
    pub const fn kind(&self) -> FailureKind {
        match self.exit_code {
            127 => FailureKind::NotFound,
            126 => FailureKind::NotExecutable,
            _ => FailureKind::System,
        }
    }
}

/// The answer to a stored file or archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stored {
    /// Bytes received.
    pub bytes: u64,
}

/// What a sandbox uses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// The sandbox's id.
    pub id: String,
    /// Since it was made, in milliseconds.
    pub age_ms: u64,
    /// Processor time of its monitor, guest included, in milliseconds.
    pub cpu_ms: u64,
    /// Memory that nobody else uses, in bytes.
    pub memory_private_bytes: u64,
    /// Memory with shared pages counted in proportion, in bytes.
    pub memory_proportional_bytes: u64,
    /// What the guest has written to its disk, in bytes.
    pub disk_written_bytes: u64,
    /// Packets and names it was denied; absent: it has no network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_denied: Option<u64>,
    /// Commands running.
    pub executions: u32,
    /// Commands started since the service knows it.
    pub executions_total: u64,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// Counts from 1, in each run of the service.
    pub sequence: u64,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// What: a stable word, as in the audit log.
    pub kind: String,
    /// Who asked.
    pub actor: String,
    /// The sandbox, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// More, by kind.
    pub detail: serde_json::Value,
}

/// The service itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// The store.
    pub store: String,
    /// Sandboxes there are.
    pub sandboxes: usize,
    /// The most there may be.
    pub max_sandboxes: usize,
    /// It ends soon and takes no new sandboxes.
    pub draining: bool,
    /// The last line of the audit log: how many there are, and its hash.
    pub audit_lines: u64,
    /// See there.
    pub audit_head: String,
}
