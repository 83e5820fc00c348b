//! Any text as a Dockerfile, as a `.dockerignore`, and as a pattern.

use parbake_recipes::dockerfile::{LowerOptions, Unresolved, ignore, lower};
use parbake_recipes::glob::PatternSet;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = lower(text, &LowerOptions::default(), &mut Unresolved);
    if let Ok(patterns) = PatternSet::new(&ignore::patterns(text)) {
        let _ = patterns.matches("a/b/c");
    }
}
