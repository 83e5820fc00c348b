//! What happened to a sandbox that whoever runs it should know.

use std::net::Ipv4Addr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::SystemTime;

use serde::Serialize;

use crate::limits::LimitHit;

/// Most events kept until they are shown.
const MOST_EVENTS: usize = 1024;
/// Most of them shown; the rest is counted.
const MOST_SHOWN: usize = 20;

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

/// A sandbox being watched by somebody who reads lines.
#[derive(Debug)]
pub struct Watch {
    events: Receiver<SandboxEvent>,
}

impl Watch {
    /// Where the events go, and where they come out.
    #[must_use]
    pub fn new() -> (EventSender, Self) {
        let (sender, events) = sync_channel(MOST_EVENTS);
        (sender, Self { events })
    }

    /// What happened, one line each, the same only once.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut seen = Vec::new();
        for event in self.events.try_iter() {
            let line = match event.kind {
                EventKind::EgressDenied { destination, port, protocol, reason } => {
                    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
                    format!("denied: {protocol} to {destination}{port} ({reason})")
                }
                EventKind::NameDenied { name, reason } => format!("denied: name {name} ({reason})"),
                EventKind::LimitHit(hit) => format!("limit reached: {}", hit.detail),
                EventKind::NameOpened { .. } => continue,
            };
            match seen.iter_mut().find(|(text, _)| *text == line) {
                Some((_, count)) => *count += 1,
                None => seen.push((line, 1usize)),
            }
        }
        let more = seen.len().saturating_sub(MOST_SHOWN);
        let mut lines: Vec<String> = seen
            .into_iter()
            .take(MOST_SHOWN)
            .map(|(line, count)| if count > 1 { format!("{line}, {count} times") } else { line })
            .collect();
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        lines
    }
}
