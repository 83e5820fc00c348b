//! The KVM monitor: one small process per sandbox.

pub mod device;
