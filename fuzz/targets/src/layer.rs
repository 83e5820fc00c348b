//! Any bytes as two layers, compressed or not: no panic, and what is accepted is a file system
//! that can be written.

use parbake_builder::ext4;
use parbake_builder::flatten::{FlattenOptions, flatten};
use parbake_builder::image::{Image, ImageSource};

/// Runs one input: the length of the first layer in four bytes, then both.
pub fn run(bytes: &[u8]) {
    let Some((length, layers)) = bytes.split_first_chunk() else { return };
    let cut = (u32::from_le_bytes(*length) as usize).min(layers.len());
    let (one, other) = layers.split_at(cut);
    let (one, other) = (one.to_vec(), other.to_vec());
    let source = ImageSource::Tar { path: "fuzz".into() };
    let image = Image::of_memory(&source, vec![one.into(), other.into()]);
    let mut options = FlattenOptions { threads: 1, ..FlattenOptions::default() };
    options.limits.expansion.floor = 1 << 24;
    options.limits.expansion.total = 1 << 25;
    options.limits.data_bytes = 1 << 24;
    options.limits.entries = 10_000;
    options.limits.tree.nodes = 20_000;
    options.limits.tree.steps = 1_000_000;
    let file = tempfile::tempfile().expect("temporary file");
    if let Ok(flattened) = flatten(&image, &file, &options, &mut |_| {}) {
        // Some trees ext4 cannot hold; none may make the writer panic.
        let _ = ext4::finish(
            &file,
            &flattened.area,
            &flattened.tree,
            &ext4::Options::new([1; 16]),
        );
    }
}
