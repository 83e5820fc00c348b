//! Freezing a machine and continuing it elsewhere.

pub mod contract;
pub mod difference;
pub mod format;
pub mod residency;
pub mod restore;
pub mod save;
pub mod state;
pub mod tsc;

pub use format::StateError;
