//! Sandboxes: machines made from a template, used once, and gone.
//!
//! [`monitor`] holds one `parbake-vmm` process and its control channel; [`sandbox`] gives it a
//! life: boot or restore, fix up, exec, freeze, destroy. [`programs`] finds the programs both
//! need, [`rundir`] owns the directory with a sandbox's sockets, [`template`] reads what sandboxes
//! are made from, [`network`] is their way out and [`limits`] what they may use. [`workspace`] is
//! what outlives them, [`terminal`] what our programs have in common.
#![deny(unsafe_code)]

pub mod event;
pub mod filling;
mod launch;
pub mod limits;
pub mod monitor;
pub mod network;
pub mod pager;
pub mod programs;
pub mod rundir;
pub mod sandbox;
pub mod template;
pub mod terminal;
pub mod workspace;
