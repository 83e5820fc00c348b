//! Sandboxes: machines made from a template, used once, and gone.
//!
//! [`monitor`] holds one `parbake-vmm` process and its control channel; [`sandbox`] gives it a
//! life: boot or restore, fix up, exec, freeze, destroy. [`programs`] finds the programs both
//! need and [`rundir`] owns the directory with a sandbox's sockets.
#![deny(unsafe_code)]

pub mod filling;
pub mod monitor;
pub mod pager;
pub mod programs;
pub mod rundir;
pub mod sandbox;
