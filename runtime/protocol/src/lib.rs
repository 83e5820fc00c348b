//! The messages that cross a process boundary in the runtime: host ↔ monitor ([`vmm`]) and
//! host ↔ guest agent.
#![forbid(unsafe_code)]

pub mod vmm;
