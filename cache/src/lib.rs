//! The store: templates, snapshots and the content-addressed objects they are made of.
//!
//! This is the lowest room: it knows what a template *is* ([`template`]) and how its parts are
//! named ([`digest`]), but not how one is built or run.
#![forbid(unsafe_code)]

pub mod digest;
pub mod template;

pub use digest::Digest;
