//! The node service: sandboxes for many callers, over HTTP, that outlive a crash of the service.
//!
//! ```text
//!  socket ─► listen (who is it?) ─► api (HTTP ↔ model) ─► manager (what may happen when) ─► node
//!                                                          ├─► guard   asked before each exec
//!                                                          ├─► audit   hash-chained log of all that happens
//!                                                          ├─► feed    the same, for `events --follow`
//!                                                          ├─► metrics
//!                                                          └─► record  what a successor needs to take over
//! ```
//! [`model`] is the API's language, shared with [`client`]; [`problem`] is how it says no; [`wire`]
//! carries a running command. Everything below [`manager`] blocks and runs in threads; only
//! [`listen`], [`api`] and [`client`] are asynchronous.
#![forbid(unsafe_code)]

pub mod api;
pub mod attach;
pub mod audit;
pub mod client;
pub mod feed;
pub mod guard;
pub mod listen;
pub mod manager;
pub mod metrics;
pub mod model;
pub mod problem;
pub mod record;
pub mod socket;
pub mod wire;
