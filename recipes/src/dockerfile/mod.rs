//! The Dockerfile front end: text → [`crate::plan::BuildPlan`].

mod evaluate;
mod expand;
mod flags;
pub mod ignore;
mod lower;
mod mount;
mod parse;
mod scope;

pub use expand::{Expansion, Lexer};
pub use flags::{bytes as parse_bytes, duration as parse_duration};
pub use lower::{BaseImage, BaseImages, LowerOptions, NamedContext, Unresolved, lower};
pub(crate) use lower::{DEFAULT_PATH, collect_secrets};
pub use parse::INSTRUCTIONS;
pub use scope::Variables;
