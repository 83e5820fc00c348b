//! What is asked and answered, independent of how it is framed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Text that need not be UTF-8: paths, arguments, environment entries.
pub type Bytes = Vec<u8>;

/// What the host asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Answer at once.
    Ping,
    /// Describe the guest.
    Info,
    /// Remember the image's process defaults.
    Configure(GuestConfig),
    /// Make the guest ready to be frozen.
    Quiesce(QuiesceRequest),
    /// Make a restored guest its own machine, then let user processes run.
    Fixup(Box<Fixup>),
    /// Run a program; streams from here on.
    Exec(ExecRequest),
    /// Receive a file; streams from here on.
    Put(PutRequest),
    /// Send a file; streams from here on.
    Get(GetRequest),
    /// Switch the machine off.
    Shutdown,
    /// As [`Request::Fixup`], for a machine that continues another one's run (a fork, a resumed
    /// sandbox): its environment stays, [`Fixup::env`] comes on top.
    FixupKeepingEnv(Box<Fixup>),
    /// Let user processes run again after a quiesce that was followed by no restore.
    Thaw,
    /// Mount the volume in the workspace's slot.
    MountWorkspace {
        /// Where: an absolute path, made if need be.
        path: Bytes,
    },
    /// End all user processes, write everything to that volume, and take it off.
    UnmountWorkspace,
    /// Let user processes have so many processes and threads together; absent: as many as they
    /// like. Wanting more is told once by the doorbell
    /// [`PROCESS_LIMIT`](crate::vmm::doorbell::PROCESS_LIMIT).
    LimitProcesses(Option<u32>),
}

/// What the agent answers to everything but exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done; nothing to tell.
    Done,
    /// To [`Request::Info`].
    Info(GuestInfo),
    /// To [`Request::Quiesce`].
    Quiesce(QuiesceReport),
    /// To [`Request::Fixup`].
    Fixup(FixupReport),
    /// To [`Request::Get`], before the data.
    File(FileInfo),
    /// To [`Request::Put`], after the data.
    Stored {
        /// Bytes written.
        bytes: u64,
    },
    /// Not done.
    Failed(Failure),
}

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub kind: FailureKind,
    /// For people.
    pub message: String,
}

/// Why something was not done, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// The command does not exist (shells say 127).
    NotFound,
    /// The command exists and cannot be run (shells say 126).
    NotExecutable,
    /// The user or group is not in the guest's files.
    NoSuchUser,
    /// The working directory is missing or cannot be entered.
    BadCwd,
    /// The request makes no sense, e.g. an empty argv or a NUL byte.
    BadRequest,
    /// The guest is frozen and waits for its fixup.
    Frozen,
    /// The agent does not own this machine and leaves its settings alone.
    NotOurs,
    /// A file is missing, or its path is not what was expected.
    File,
    /// Anything else the kernel refused.
    System,
}

/// The longest message shown, in characters.
const MAX_SHOWN: usize = 4096;

/// The message comes from the guest: control characters, which a terminal might obey, are not
/// passed on, nor is more than a screenful.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.message
            .chars()
            .take(MAX_SHOWN)
            .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
            .try_for_each(|c| fmt::Write::write_char(f, c))
    }
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters a line.
    pub columns: u16,
}

/// A program to run. [`ExecRequest::new`] fills in everything but the command line.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program and arguments. A program without a slash is looked up in the guest's `PATH`.
    pub argv: Vec<Bytes>,
    /// `NAME=value` entries on top of the defaults.
    pub env: Vec<Bytes>,
    /// Working directory; empty: the template's, else `/`.
    pub cwd: Bytes,
    /// `name`, `uid`, `name:group`, `uid:gid`; empty: the template's, else root.
    pub user: String,
    /// Give the program a terminal of this size; standard error is then part of standard output.
    pub tty: Option<WindowSize>,
    /// Connect standard input; otherwise it is `/dev/null` (with a terminal: silent).
    pub stdin: bool,
    /// Kill the program and everything it started after this time.
    pub timeout_ms: Option<u64>,
    /// The most output bytes forwarded; the rest is read and dropped.
    pub output_limit: Option<u64>,
    /// Start without the template's env, user and working directory.
    pub no_template_defaults: bool,
    /// Start it, report its pid and let it be: no input, no output, not ended with the stream.
    pub detach: bool,
}

impl ExecRequest {
    /// A command with the template's defaults, no input, no terminal and no limits.
    pub fn new<A: Into<Bytes>>(argv: impl IntoIterator<Item = A>) -> Self {
        Self { argv: argv.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

/// Environment entries may be secrets: they are counted, not shown.
impl fmt::Debug for ExecRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let argv: Vec<_> = self.argv.iter().map(|a| String::from_utf8_lossy(a)).collect();
        f.debug_struct("ExecRequest")
            .field("argv", &argv)
            .field("env", &self.env.len())
            .field("cwd", &String::from_utf8_lossy(&self.cwd))
            .field("user", &self.user)
            .field("tty", &self.tty)
            .field("stdin", &self.stdin)
            .field("timeout_ms", &self.timeout_ms)
            .field("output_limit", &self.output_limit)
            .field("no_template_defaults", &self.no_template_defaults)
            .field("detach", &self.detach)
            .finish()
    }
}

/// What happens to a running program, in order. `Exited` and `Failed` are final; with `detach`,
/// `Started` is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// The program runs.
    Started {
        /// Its process id in the guest.
        pid: u32,
    },
    /// It wrote to standard output or to its terminal.
    Stdout(Vec<u8>),
    /// It wrote to standard error.
    Stderr(Vec<u8>),
    /// It is gone; all its output has been delivered before.
    Exited(Exit),
    /// It could not be started.
    Failed(Failure),
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Why it ended.
    pub reason: ExitReason,
    /// Output beyond the limit was dropped.
    pub truncated: bool,
}

/// Why a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitReason {
    /// By itself or by a signal from anyone.
    Ended,
    /// [`ExecRequest::timeout_ms`] ran out.
    Timeout,
    /// The agent ended it, e.g. for a quiesce that ends sessions.
    Killed,
}

impl Exit {
    /// The exit code a shell or `docker run` would show: 128+n for signal n, 124 for a timeout.
    pub fn shell_code(&self) -> i32 {
        match (self.reason, self.code, self.signal) {
            (ExitReason::Timeout, _, _) => 124,
            (_, Some(code), _) => code & 0xff,
            (_, None, Some(signal)) => 128 + (signal & 0x7f),
            (_, None, None) => 125,
        }
    }
}

impl Failure {
    /// The exit code a shell or `docker run` would show: 127, 126, else 125.
    pub fn shell_code(&self) -> i32 {
        match self.kind {
            FailureKind::NotFound => 127,
            FailureKind::NotExecutable => 126,
            _ => 125,
        }
    }
}

/// The guest, as the agent sees it. Every field is the guest's word and may be a lie.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestInfo {
    /// The protocol version the agent speaks.
    pub protocol: u32,
    /// The agent's own version.
    pub agent_version: String,
    /// `uname -r`.
    pub kernel: String,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// The host name.
    pub hostname: String,
    /// The instance the last fixup made this guest; empty before the first.
    pub instance_id: String,
    /// The agent is PID 1 and owns the machine.
    pub init: bool,
    /// User processes are frozen and wait for a fixup.
    pub frozen: bool,
    /// Fixups since the cold boot.
    pub fixups: u32,
    /// Exec sessions running.
    pub sessions: u32,
    /// Memory the kernel manages, in bytes.
    pub memory_bytes: u64,
    /// Milliseconds since boot (monotonic: does not count frozen time).
    pub uptime_ms: u64,
    /// How long the agent took to bring the machine up, by stage: `(name, microseconds)`.
    pub boot_stages: Vec<(String, u64)>,
}

/// The image's process defaults, sent once at bake and kept in the agent's memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GuestConfig {
    /// `NAME=value` entries.
    pub env: Vec<Bytes>,
    /// As [`ExecRequest::user`].
    pub user: String,
    /// Working directory; created when missing, as `docker run` does.
    pub cwd: Bytes,
}

/// What to do before the freeze. Steps run in the order of the fields; ask twice to put a warm-up
/// between them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QuiesceRequest {
    /// End running exec sessions. Without it, a running session is a failure.
    pub end_sessions: bool,
    /// Stop all user processes where they are, until the next fixup.
    pub freeze: bool,
    /// Remove what must not be cloned, e.g. a saved random seed.
    pub forget_identity: bool,
    /// Write dirty data to the disk.
    pub sync: bool,
    /// Drop clean caches.
    pub drop_caches: bool,
    /// Overwrite free memory with zeros.
    pub zero_free_memory: Option<ZeroFill>,
    /// Close every connection, this one after the reply.
    pub close_connections: bool,
}

/// How free memory is overwritten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZeroFill {
    /// How often; a second pass reaches pages that the first one's own ending dirtied.
    pub passes: u8,
    /// Bytes left free at any time, on top of the kernel's own low-water mark.
    pub margin_bytes: u64,
    /// The most bytes taken in one pass; absent: all there are.
    pub limit_bytes: Option<u64>,
}

impl Default for ZeroFill {
    fn default() -> Self {
        Self { passes: 2, margin_bytes: 4 << 20, limit_bytes: None }
    }
}

/// What a quiesce did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QuiesceReport {
    /// The steps asked for, in the order they ran.
    pub steps: Vec<Step>,
    /// Bytes of free memory overwritten in the last pass.
    pub zeroed_bytes: u64,
}

impl QuiesceReport {
    /// Whether every step succeeded.
    pub fn complete(&self) -> bool {
        self.steps.iter().all(|s| s.error.is_none())
    }
}

/// One step of a longer operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// A stable word.
    pub name: String,
    /// Why it failed; absent: it succeeded.
    pub error: Option<String>,
    /// What it found, for people; may be empty.
    pub note: String,
    /// How long it took.
    pub micros: u64,
}

/// What makes a restored guest its own machine. Every item is reported; user processes stay frozen
/// unless all of them succeed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fixup {
    /// Fresh random bytes from the host, never used elsewhere.
    #[serde(with = "bytes64")]
    pub entropy: [u8; 64],
    /// Nanoseconds since the Unix epoch, taken as late as possible.
    pub realtime_ns: u64,
    /// The sandbox's id.
    pub instance_id: String,
    /// The host name; empty: unchanged.
    pub hostname: String,
    /// The machine id.
    pub machine_id: [u8; 16],
    /// `NAME=value` entries for every exec of this run, on top of the image's.
    pub env: Vec<Bytes>,
    /// Replace SSH host keys if the guest has any.
    pub ssh_host_keys: bool,
    /// The network interface's settings.
    pub network: Option<NetworkConfig>,
}

/// Entropy and environment are secrets: they are not shown.
impl fmt::Debug for Fixup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fixup")
            .field("realtime_ns", &self.realtime_ns)
            .field("instance_id", &self.instance_id)
            .field("hostname", &self.hostname)
            .field("env", &self.env.len())
            .field("network", &self.network)
            .finish_non_exhaustive()
    }
}

/// An IPv4 interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// Its name in the guest, e.g. `eth0`.
    pub interface: String,
    /// Its hardware address; absent: unchanged.
    pub mac: Option<[u8; 6]>,
    /// Its address.
    pub address: [u8; 4],
    /// How many leading bits name the network.
    pub prefix: u8,
    /// The default route, if any.
    pub gateway: Option<[u8; 4]>,
    /// Name servers for `/etc/resolv.conf`.
    pub dns: Vec<[u8; 4]>,
}

/// What a fixup did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FixupReport {
    /// Every item, in the order they ran.
    pub items: Vec<Step>,
    /// User processes run. False if any item failed.
    pub running: bool,
}

impl FixupReport {
    /// Whether user code may run: every item succeeded.
    pub fn complete(&self) -> bool {
        self.running && self.items.iter().all(|s| s.error.is_none())
    }
}

/// A file to be stored. It appears under its name complete, or not at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutRequest {
    /// Absolute path.
    pub path: Bytes,
    /// Permission bits, e.g. `0o644`.
    pub mode: u32,
    /// Owner as [`ExecRequest::user`]; empty: root.
    pub owner: String,
    /// Create missing parent directories (0755, same owner).
    pub parents: bool,
}

/// A file to be fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetRequest {
    /// Absolute path of a regular file (symlinks are followed).
    pub path: Bytes,
}

/// A file's metadata, as the guest tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Its size when opened; the data may be shorter or longer.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time in seconds since the epoch.
    pub mtime: i64,
}

mod bytes64 {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8; 64], s: S) -> Result<S::Ok, S::Error> {
        let (a, b) = bytes.split_at(32);
        (<[u8; 32]>::try_from(a).unwrap_or_default(), <[u8; 32]>::try_from(b).unwrap_or_default())
            .serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<[u8; 64], D::Error> {
        let (a, b) = <([u8; 32], [u8; 32])>::deserialize(d)?;
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&a);
        bytes[32..].copy_from_slice(&b);
        Ok(bytes)
    }
}
