//! What this machine can do ([`probe`]), which way guests therefore run ([`mode`]), and the
//! emulated KVM host for machines whose own KVM cannot run them ([`lab`]).
#![forbid(unsafe_code)]

pub mod lab;
pub mod mode;
pub mod probe;
pub mod tools;

pub use lab::{Lab, LabConfig, LabError, LabStatus};
pub use mode::{HostChoice, HostMode, ModeError};
pub use probe::{HostReport, Item, State};
