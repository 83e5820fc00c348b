//! Images to root filesystems, root filesystems to templates, templates to snapshots.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod bake;
pub mod contents;
pub mod execute;
pub mod flatten;
pub mod image;
pub mod kernel;
pub mod layer;
pub mod provenance;
pub mod sbom;
pub mod source;

pub use parbake_ext4::{self as ext4, tree};
pub use parbake_node::template;
