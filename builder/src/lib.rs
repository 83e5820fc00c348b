//! Images to root filesystems, root filesystems to templates, templates to snapshots.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod bake;
pub mod contents;
pub mod execute;
pub mod ext4;
pub mod flatten;
pub mod image;
pub mod kernel;
pub mod layer;
pub mod provenance;
pub mod sbom;
pub mod source;
pub mod tree;

pub use parbake_node::template;
