//! The recipe language and the Dockerfile front end: both lower to one [`plan::BuildPlan`].
#![forbid(unsafe_code)]

pub mod dockerfile;
mod error;
pub mod glob;
pub mod plan;

pub use error::{Diagnostic, Location, RecipeError};
