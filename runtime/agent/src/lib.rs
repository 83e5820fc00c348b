//! The guest agent: PID 1 of a guest that has no init of its own ([`init`]), and the server that
//! runs commands, moves files and prepares and mends the guest around a snapshot ([`serve`]).
//!
//! ```text
//!  init: mounts, modules, root ──► listen ──► doorbell READY
//!                                    │
//!  serve: one thread a connection ◄──┘   Agent (config, frozen?, sessions, children)
//!     ├─ exec     spawn into the user cgroup, one poll loop a session
//!     ├─ files    put and get
//!     ├─ quiesce  freeze users, sync, drop caches, overwrite free memory, hang up
//!     └─ fixup    entropy, clock, names, network; thaw only if all of it worked
//!
//!  step: a build step's root, program and result, by an exec of this program ([`step`])
//! ```
//!
//! It runs in every sandbox and is frozen into every snapshot, so it is small, has no async
//! runtime, and touches few pages. It never panics on what it is sent: a panic of PID 1 is a
//! kernel panic. Unsafe code is confined to [`kernel`], [`spawn`], [`zero`] and [`doorbell`].
#![deny(unsafe_code)]

pub mod cgroup;
pub mod check;
pub mod children;
pub mod connection;
pub mod doorbell;
pub mod environment;
pub mod exec;
pub mod files;
pub mod fixup;
pub mod identity;
pub mod init;
pub mod kernel;
pub mod lab;
pub mod listen;
pub mod modules;
pub mod mounts;
pub mod network;
pub mod quiesce;
pub mod serve;
pub mod spawn;
pub mod step;
pub mod streams;
pub mod terminal;
pub mod users;
mod workspace;
pub mod zero;
