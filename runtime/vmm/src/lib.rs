//! The KVM monitor: one small process per sandbox.
//!
//! ```text
//! main ─► control (config line) ─► machine::open ─┬─ boot::load      (cold)
//!                                                 └─ snapshot::restore
//!                                        │
//!                                      jail::enter ─► vcpu threads run ─► run::event_loop
//! ```
//! Everything named in the configuration is opened before the jail closes; from then on the only
//! way to reach a file is a descriptor the host sends along with a request.

#[deny(unsafe_code)]
pub mod boot;
#[deny(unsafe_code)]
pub mod control;
#[deny(unsafe_code)]
pub mod cpuid;
pub mod device;
#[deny(unsafe_code)]
pub mod error;
pub mod filling;
pub mod jail;
#[deny(unsafe_code)]
pub mod layout;
pub mod machine;
pub mod memory;
#[deny(unsafe_code)]
pub mod ports;
pub mod run;
pub mod snapshot;
pub mod vcpu;
