//! The messages that cross a process boundary in the runtime: host ↔ monitor ([`vmm`], [`filling`]) and
//! host ↔ guest agent ([`agent`]).
#![forbid(unsafe_code)]

pub mod agent;
pub mod filling;
pub mod vmm;
