//! What can be wrong with a Dockerfile or a recipe, and where.

use std::fmt;
use std::path::PathBuf;

/// Why a Dockerfile or a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// A mistake in the text, with its place and the way out.
    #[error("{0}")]
    At(Box<Diagnostic>),
    /// A file cannot be read.
    #[error("cannot read {}: {source}; check that the path exists and is readable", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A base image cannot be resolved.
    #[error("{at}: base image {reference}: {reason}")]
    BaseImage {
        /// `file:line` that names the image.
        at: Location,
        /// The image as written, after expansion.
        reference: String,
        /// Why, and the way out.
        reason: String,
    },
    /// The lock file does not fit the recipe.
    #[error(
        "{} differs from {what}: {detail}; run `parbake recipe lock` to accept the change",
        path.display()
    )]
    LockDrift {
        /// The lock file.
        path: PathBuf,
        /// Which part.
        what: &'static str,
        /// Recorded and present value.
        detail: String,
    },
}

/// A place in a file a person wrote.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Location {
    /// The file as the person named it, never made absolute.
    pub file: String,
    /// Line, from 1; 0 stands for the file as a whole.
    pub line: u32,
    /// Column, from 1, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<u32>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if let Some(column) = self.column {
            write!(f, ":{column}")?;
        }
        Ok(())
    }
}

/// A mistake, its place, and what to write instead. Shown as `file:line: message; hint`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Where.
    pub at: Location,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.message)?;
        if !self.hint.is_empty() {
            write!(f, "; {}", self.hint)?;
        }
        Ok(())
    }
}

impl Location {
    /// A line of a file.
    #[must_use]
    pub fn line(file: &str, line: u32) -> Self {
        Self { file: file.to_owned(), line, column: None }
    }

    /// An error at this place.
    pub fn error(&self, message: impl Into<String>, hint: impl Into<String>) -> RecipeError {
        RecipeError::At(Box::new(Diagnostic {
            at: self.clone(),
            message: message.into(),
            hint: hint.into(),
        }))
    }
}

/// The candidate nearest to `word`, when it is near enough to be what was meant.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = word.to_lowercase();
    candidates
        .into_iter()
        .map(|candidate| (edit_distance(&word, &candidate.to_lowercase()), candidate))
        .filter(|(distance, _)| *distance > 0 && *distance <= 2.min(word.len().div_ceil(2)).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let cost = if ca == *cb { diagonal } else { diagonal + 1 };
            diagonal = row[j + 1];
            row[j + 1] = cost.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
