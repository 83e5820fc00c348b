//! What `parbake recipe init` writes: the ready-made recipes themselves.

/// A ready-made recipe: name, one line about it, text.
pub struct Starter {
    /// Its directory's name.
    pub name: &'static str,
    /// The recipe.
    pub text: &'static str,
}

/// All ready-made recipes, simplest first.
pub const STARTERS: [Starter; 3] = [
    Starter { name: "blank", text: include_str!("../../blank/parbake.yaml") },
    Starter { name: "python", text: include_str!("../../python/parbake.yaml") },
    Starter { name: "node", text: include_str!("../../node/parbake.yaml") },
];

/// The text of a starter.
#[must_use]
pub fn starter(name: &str) -> Option<&'static str> {
    STARTERS.iter().find(|starter| starter.name == name).map(|starter| starter.text)
}
