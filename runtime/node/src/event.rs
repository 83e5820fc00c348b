//! What happened to a sandbox that whoever runs it should know.

use std::net::Ipv4Addr;
use std::sync::mpsc::SyncSender;
use std::time::SystemTime;

use serde::Serialize;

use crate::limits::LimitHit;

/// Where events go. The channel's bound is the caller's; what does not fit is dropped, as a
/// sandbox must neither wait for its listener nor fill memory.
pub type EventSender = SyncSender<SandboxEvent>;

/// One event of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxEvent {
    /// The sandbox's id.
    pub sandbox: String,
    /// When it was noticed.
    #[serde(serialize_with = "seconds")]
    pub at: SystemTime,
    /// What.
    #[serde(flatten)]
    pub kind: EventKind,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "event")]
pub enum EventKind {
    /// A packet was not let out. Not every one of a flood is told; all are counted.
    EgressDenied {
        /// Where it would have gone.
        destination: String,
        /// Its port, where the protocol has ports.
        port: Option<u16>,
        /// `tcp`, `udp`, `icmp`, or the protocol's number.
        protocol: String,
        /// `not allowed`, `blocked`, `forged source`, `IPv6`, `too many connections`,
        /// `kept back by the host`.
        reason: String,
    },
    /// A name was asked for that no rule allows, or in a way that could carry data out.
    NameDenied {
        /// The name, cut to 253 characters.
        name: String,
        /// Why it was not looked up.
        reason: String,
    },
    /// An allowed name was looked up and its addresses were opened.
    NameOpened {
        /// The name.
        name: String,
        /// What it stands for right now.
        addresses: Vec<Ipv4Addr>,
        /// For how long they are open.
        ttl_seconds: u32,
    },
    /// A limit was reached.
    LimitHit(LimitHit),
}

fn seconds<S: serde::Serializer>(at: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64())
}
