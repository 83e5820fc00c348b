//! Any text as a recipe.

use std::path::Path;

use parbake_recipes::dockerfile::{LowerOptions, Unresolved};
use parbake_recipes::recipe::{lower, read};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok((recipe, places)) = read("parbake.yaml", text) {
        let options = LowerOptions { file: "parbake.yaml".into(), ..LowerOptions::default() };
        let _ = lower(&recipe, &places, Path::new("/nonexistent"), &options, &mut Unresolved);
    }
}
