//! `.dockerignore`: which files of the context exist for a build.

use std::path::Path;

use crate::RecipeError;
use crate::error::Location;
use crate::glob::{PatternSet, clean};

/// Reads the lines of a `.dockerignore` into patterns, in order.
#[must_use]
pub fn patterns(text: &str) -> Vec<String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut patterns = Vec::new();
    for line in text.lines() {
        // A comment starts in the first column; "  # x" is a pattern.
        if line.starts_with('#') {
            continue;
        }
        let line = line.trim();
        let (bang, body) = match line.strip_prefix('!') {
            Some(body) => ("!", body.trim()),
            None => ("", line),
        };
        if line.is_empty() {
            continue;
        }
        let mut body = if body.is_empty() { String::new() } else { clean(body) };
        if body.len() > 1 && body.starts_with('/') {
            body.remove(0);
        }
        patterns.push(format!("{bang}{body}"));
    }
    patterns
}

/// The patterns that hold for `dockerfile` in `context`: `NAME.dockerignore` beside the
/// Dockerfile wins over `.dockerignore` in the context; neither is an empty list.
///
/// # Errors
/// When the file cannot be read or a pattern is not well formed.
pub fn load(context: &Path, dockerfile: Option<&Path>) -> Result<Vec<String>, RecipeError> {
    let own = dockerfile.map(|path| {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".dockerignore");
        path.with_file_name(name)
    });
    for path in own.into_iter().chain([context.join(".dockerignore")]) {
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let found = patterns(&text);
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                PatternSet::new(&found).map_err(|error| {
                    Location::line(&name, line_of(&text, &error.0))
                        .error(error.to_string(), "close its brackets or escape them with \\")
                })?;
                return Ok(found);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(RecipeError::Read { path, source }),
        }
    }
    Ok(Vec::new())
}

fn line_of(text: &str, pattern: &str) -> u32 {
    text.lines()
        .position(|line| line.contains(pattern.trim_start_matches('!')))
        .map_or(0, |index| u32::try_from(index + 1).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_patterns() {
        let text = "\u{feff}# comment\n\n *.md \n!README.md\n/a/../b/\n ! c\n  # d\n";
        assert_eq!(patterns(text), ["*.md", "!README.md", "b", "!c", "# d"]);
    }

    #[test]
    fn the_dockerfiles_own_file_wins() {
        let dir = tempfile::tempdir().unwrap();
        let dockerfile = dir.path().join("app.Dockerfile");
        assert!(load(dir.path(), Some(&dockerfile)).unwrap().is_empty());
        std::fs::write(dir.path().join(".dockerignore"), "a\n").unwrap();
        assert_eq!(load(dir.path(), Some(&dockerfile)).unwrap(), ["a"]);
        std::fs::write(dir.path().join("app.Dockerfile.dockerignore"), "b\n").unwrap();
        assert_eq!(load(dir.path(), Some(&dockerfile)).unwrap(), ["b"]);
        std::fs::write(dir.path().join("app.Dockerfile.dockerignore"), "b\n[x\n").unwrap();
        let error = load(dir.path(), Some(&dockerfile)).unwrap_err().to_string();
        assert!(error.starts_with("app.Dockerfile.dockerignore:2: "), "{error}");
    }
}
