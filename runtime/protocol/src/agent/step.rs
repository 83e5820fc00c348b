//! A build step in a guest: what `parbake-agent step` is told over its standard input, and what it
//! answers over its standard output. Both are frames.
//!
//! ```text
//!  STEP(...) tree* (one for each layer that is sent, one that the
//!      changes go to, one for each mount that has one) DATA_END ──►
//!                              ◄──── (STDOUT | STDERR | SOCKET)* STEP_END(...)
//!  SOCKET* ──────────────────────────────────────────────────►    (while it runs)
//!                              ◄──── tree of what changed, if it exited with 0
//!                              ◄──── tree of what changed, for each mount that is kept
//!                              ◄──── DATA_END
//!  STEP(...) … or the end of the input
//! ```
//! A socket that is mounted listens in the guest; who connects to it is, over SOCKET frames, connected
//! to what listens on the host. The guest numbers the connections and opens them; either side ends them,
//! and the guest says END for each once. Both pass over what comes for a connection that has ended.
//!
//! Whatever goes wrong before the program has run is FAILED instead of STEP_END, and the last frame.
//! After the step ran as root in it, the guest is no more to be trusted than its program.

use serde::{Deserialize, Serialize};

use super::{Bytes, Exit};

/// A build step.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepRequest {
    /// Program and arguments. A program without a slash is looked up in the step's `PATH`.
    pub argv: Vec<Bytes>,
    /// `NAME=value` entries, all there are.
    pub env: Vec<Bytes>,
    /// Working directory; made when missing.
    pub cwd: Bytes,
    /// Who runs it.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// It sees the guest's interfaces; otherwise loopback only.
    pub network: bool,
    /// Layers that come along with it, by their numbers; they stay for the steps after it.
    pub sent: Vec<u32>,
    /// What its root is made of, lowest first.
    pub layers: Vec<StepLayer>,
    /// Besides the root, in this order.
    pub mounts: Vec<StepMount>,
}

/// Environment entries may be secrets: they are counted, not shown.
impl std::fmt::Debug for StepRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let argv: Vec<_> = self.argv.iter().map(|a| String::from_utf8_lossy(a)).collect();
        f.debug_struct("StepRequest")
            .field("argv", &argv)
            .field("env", &self.env.len())
            .field("cwd", &String::from_utf8_lossy(&self.cwd))
            .field("user", &(self.uid, self.gid))
            .field("layers", &self.layers)
            .field("mounts", &self.mounts)
            .finish_non_exhaustive()
    }
}

/// Where one layer of the root lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepLayer {
    /// The disk: 1 is `/dev/vdb`, 0 the guest's own, where what was sent lies.
    pub disk: u8,
    /// The directory there, by number; absent: the whole disk.
    pub directory: Option<u32>,
}

/// Something mounted into the step's root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepMount {
    /// The tree that comes along.
    Tree {
        /// Where.
        target: Bytes,
        /// Writes fail.
        read_only: bool,
        /// What is changed is sent back.
        kept: bool,
        /// It must never be on a disk.
        secret: bool,
    },
    /// Memory.
    Memory {
        /// Where.
        target: Bytes,
        /// The most bytes it holds; absent: the kernel's own limit.
        size: Option<u64>,
    },
    /// The guest's own `/etc/resolv.conf`.
    Resolver,
    /// A socket whose connections are taken to the host.
    Socket {
        /// Where.
        target: Bytes,
        /// Its permissions.
        mode: u32,
        /// Its owner.
        uid: u32,
        /// Its group.
        gid: u32,
    },
}

impl StepMount {
    /// Where it appears.
    #[must_use]
    pub fn target(&self) -> &[u8] {
        match self {
            Self::Tree { target, .. }
            | Self::Memory { target, .. }
            | Self::Socket { target, .. } => target,
            Self::Resolver => b"/etc/resolv.conf",
        }
    }
}

/// How a step ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepEnd {
    /// How its program ended.
    pub exit: Exit,
    /// Bytes left on the disk that it wrote to.
    pub free_bytes: u64,
    /// Times the guest ran out of memory and ended a program.
    pub out_of_memory: u64,
}

/// The most connections through the sockets of a step at a time.
pub const MOST_CONNECTIONS: usize = 32;

/// Something of a connection through a socket of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFrame {
    /// Which; numbers are not used again.
    pub connection: u32,
    /// What.
    pub event: SocketEvent,
}

/// What happens to a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketEvent {
    /// Someone connected. Only a guest says so.
    Opened {
        /// The mount's number among all of the step's.
        mount: u32,
    },
    /// Bytes, at most [`super::DATA_CHUNK`].
    Data(Bytes),
    /// It ended.
    End,
}
