//! What `parbake recipe init` writes: the ready-made recipes themselves.

/// A ready-made recipe.
pub struct Starter {
    /// Its directory's name.
    pub name: &'static str,
    /// The recipe.
    pub text: &'static str,
}

/// All ready-made recipes, simplest first.
pub const STARTERS: [Starter; 11] = [
    Starter { name: "blank", text: include_str!("../../blank/parbake.yaml") },
    Starter { name: "python", text: include_str!("../../python/parbake.yaml") },
    Starter { name: "python-data", text: include_str!("../../python-data/parbake.yaml") },
    Starter { name: "code-interpreter", text: include_str!("../../code-interpreter/parbake.yaml") },
    Starter { name: "node", text: include_str!("../../node/parbake.yaml") },
    Starter { name: "go", text: include_str!("../../go/parbake.yaml") },
    Starter { name: "rust", text: include_str!("../../rust/parbake.yaml") },
    Starter { name: "java", text: include_str!("../../java/parbake.yaml") },
    Starter { name: "ruby", text: include_str!("../../ruby/parbake.yaml") },
    Starter { name: "browser", text: include_str!("../../browser/parbake.yaml") },
    Starter { name: "postgres", text: include_str!("../../postgres/parbake.yaml") },
];

/// The text of a starter.
#[must_use]
pub fn starter(name: &str) -> Option<&'static str> {
    STARTERS.iter().find(|starter| starter.name == name).map(|starter| starter.text)
}
