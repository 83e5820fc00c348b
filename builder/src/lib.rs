//! Images to root filesystems, root filesystems to templates, templates to snapshots.
#![forbid(unsafe_code)]

pub mod ext4;
pub mod flatten;
pub mod image;
pub mod layer;
pub mod tree;
