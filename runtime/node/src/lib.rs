//! Sandboxes: machines made from a template, used once, and gone.
//!
//! [`monitor`] holds one `parbake-vmm` process and its control channel; [`sandbox`] gives it a
//! life: boot or restore, fix up, exec, freeze, destroy. [`programs`] finds the programs both
//! need, [`rundir`] owns the directory with a sandbox's sockets, and [`template`] reads what
//! sandboxes are made from. [`terminal`] is what our programs have in common.
#![forbid(unsafe_code)]

pub mod monitor;
pub mod programs;
pub mod rundir;
pub mod sandbox;
pub mod template;
pub mod terminal;
