//! The recipe language and the Dockerfile front end: both lower to one [`plan::BuildPlan`].
//!
//! [`load`] finds and lowers; [`check`] does so without a network; [`recipe::schema`] is the
//! published schema; [`recipe::init`] holds the ready-made recipes; [`lock`] and [`resolve`] make
//! a build repeatable.
#![forbid(unsafe_code)]

pub mod dockerfile;
mod error;
pub mod glob;
mod load;
pub mod lock;
pub mod plan;
pub mod recipe;
pub mod resolve;

pub use error::{Diagnostic, Location, RecipeError};
pub use load::{FILE_NAMES, LoadRequest, Loaded, check, load};
