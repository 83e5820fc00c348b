//! The store: templates, snapshots and the content-addressed objects they are made of.
//!
//! This is the lowest room: it knows what a template *is* ([`template`]), how its parts are named
//! ([`digest`]) and kept ([`store`]), but not how one is built or run.
#![forbid(unsafe_code)]

pub mod artifact;
mod assembly;
mod authorization;
pub mod bundle;
mod challenge;
pub mod chunk;
mod closure;
mod compat_image;
mod conversation;
pub mod credentials;
pub mod digest;
mod durable;
pub mod error;
mod fetch_plan;
pub mod find;
pub mod format;
#[doc(hidden)]
pub mod fuzzing;
pub mod gc;
pub mod index;
pub mod install;
pub mod keyless;
pub mod keys;
pub mod layout;
pub mod lazy;
pub mod live;
mod lock;
pub mod name;
pub mod object;
pub mod pack;
mod packer;
pub mod pagemap;
pub mod publish;
mod reference;
pub mod referrers;
pub mod registries;
pub mod registry;
pub mod resume;
mod sign_in;
pub mod statements;
mod stop;
pub mod store;
pub mod template;
pub mod transport;
pub mod trust;
pub mod variant;
pub mod verify;
pub mod working_set;

pub use digest::Digest;
pub use error::StoreError;
pub use gc::{GcReport, Usage};
pub use live::{Lease, Staging};
pub use name::TemplateName;
pub use store::Store;
pub use verify::VerifyReport;
