//! File name patterns in the two dialects a Dockerfile uses.
//!
//! [`Glob`] is what `COPY *.txt /` means: `*` and `?` never cross a slash. [`PatternSet`] is what
//! `.dockerignore` and `--exclude` mean: ordered patterns, `**` crosses slashes, a pattern that
//! matches a directory covers what is below it, `!` takes back. Matching works on sets of
//! positions, so no pattern makes it exponential.

/// A compiled pattern.
#[derive(Debug, Clone)]
pub struct Glob {
    tokens: Vec<Token>,
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Literal(char),
    /// Any character but a slash.
    One,
    /// Any run of characters without a slash.
    Star,
    /// `**` at the end: anything.
    Anything,
    /// `**/`: nothing, or anything up to and including a slash.
    Directories,
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
}

/// A pattern that is not well formed, e.g. an unclosed `[`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a well-formed pattern")]
pub struct PatternError(pub String);

impl Glob {
    /// Compiles a `COPY` source pattern.
    ///
    /// # Errors
    /// When a bracket is unclosed, a range is empty, or the pattern ends in a backslash.
    pub fn new(pattern: &str) -> Result<Self, PatternError> {
        Self::compile(pattern, false)
    }

    fn compile(pattern: &str, double_star: bool) -> Result<Self, PatternError> {
        let bad = || PatternError(pattern.to_owned());
        let mut tokens = Vec::new();
        let mut chars = pattern.chars().peekable();
        while let Some(c) = chars.next() {
            tokens.push(match c {
                '*' if double_star && chars.peek() == Some(&'*') => {
                    chars.next();
                    if chars.peek() == Some(&'/') {
                        chars.next();
                    }
                    if chars.peek().is_none() { Token::Anything } else { Token::Directories }
                }
                '*' => Token::Star,
                '?' => Token::One,
                '\\' => Token::Literal(chars.next().ok_or_else(bad)?),
                '[' => {
                    let negated = chars.next_if_eq(&'^').is_some();
                    let mut ranges = Vec::new();
                    loop {
                        let mut bound = || match chars.next().ok_or_else(bad)? {
                            '\\' => chars.next().ok_or_else(bad).map(Some),
                            ']' => Ok(None),
                            c => Ok(Some(c)),
                        };
                        let Some(low) = bound()? else {
                            if ranges.is_empty() {
                                return Err(bad());
                            }
                            break;
                        };
                        let mut high = low;
                        if chars.next_if_eq(&'-').is_some() {
                            high = match chars.next().ok_or_else(bad)? {
                                '\\' => chars.next().ok_or_else(bad)?,
                                ']' => return Err(bad()),
                                c => c,
                            };
                        }
                        if low > high {
                            return Err(bad());
                        }
                        ranges.push((low, high));
                    }
                    Token::Class { negated, ranges }
                }
                c => Token::Literal(c),
            });
        }
        Ok(Self { tokens })
    }

    /// Whether the whole of `text` matches.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let mut at = vec![false; text.len() + 1];
        at[0] = true;
        for token in &self.tokens {
            let mut next = vec![false; text.len() + 1];
            match token {
                Token::Literal(_) | Token::One | Token::Class { .. } => {
                    for i in 0..text.len() {
                        next[i + 1] = at[i] && token.takes(text[i]);
                    }
                }
                Token::Star => {
                    let mut on = false;
                    for i in 0..=text.len() {
                        on |= at[i];
                        next[i] = on;
                        on &= text.get(i) != Some(&'/');
                    }
                }
                Token::Anything => {
                    let mut on = false;
                    for i in 0..=text.len() {
                        on |= at[i];
                        next[i] = on;
                    }
                }
                Token::Directories => {
                    let mut before = false;
                    for i in 0..=text.len() {
                        next[i] = at[i] || (before && i > 0 && text[i - 1] == '/');
                        before |= at[i];
                    }
                }
            }
            at = next;
        }
        at[text.len()]
    }
}

impl Token {
    fn takes(&self, c: char) -> bool {
        match self {
            Self::Literal(l) => *l == c,
            Self::One => c != '/',
            Self::Class { negated, ranges } => {
                c != '/' && ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != *negated
            }
            _ => false,
        }
    }
}

/// Whether `text` holds an unescaped `*`, `?` or `[`.
#[must_use]
pub fn has_wildcards(text: &str) -> bool {
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            '*' | '?' | '[' => return true,
            _ => {}
        }
    }
    false
}

/// Ordered patterns of a `.dockerignore` or of `--exclude`; the last that matches decides.
#[derive(Debug, Clone, Default)]
pub struct PatternSet {
    patterns: Vec<(bool, String, Glob)>,
}

impl PatternSet {
    /// Compiles patterns, `!` in front taking back; each is cleaned like a path.
    ///
    /// # Errors
    /// When a pattern is not well formed or is a lone `!`.
    pub fn new<S: AsRef<str>>(patterns: &[S]) -> Result<Self, PatternError> {
        let mut compiled = Vec::new();
        for pattern in patterns {
            let pattern = pattern.as_ref().trim();
            if pattern.is_empty() {
                continue;
            }
            let (negated, body) = match pattern.strip_prefix('!') {
                Some(body) => (true, body),
                None => (false, pattern),
            };
            if body.is_empty() {
                return Err(PatternError(pattern.to_owned()));
            }
            let body = clean(body);
            compiled.push((negated, body.clone(), Glob::compile(&body, true)?));
        }
        Ok(Self { patterns: compiled })
    }

    /// Whether there are no patterns.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Whether any pattern takes back, so that an excluded directory has to be looked into.
    #[must_use]
    pub fn has_exceptions(&self) -> bool {
        self.patterns.iter().any(|(negated, ..)| *negated)
    }

    /// Whether the relative path, or a directory above it, is matched in the end.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        let mut matched = false;
        for (negated, _, glob) in &self.patterns {
            if *negated == matched && Self::covers(glob, path) {
                matched = !negated;
            }
        }
        matched
    }

    fn covers(glob: &Glob, path: &str) -> bool {
        glob.matches(path) || path.match_indices('/').any(|(slash, _)| glob.matches(&path[..slash]))
    }
}

/// Cleans a slash path lexically: no empty, `.` or resolvable `..` components, no trailing slash.
#[must_use]
pub fn clean(path: &str) -> String {
    let absolute = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => match parts.last() {
                Some(&last) if last != ".." => {
                    parts.pop();
                }
                _ if absolute => {}
                _ => parts.push(".."),
            },
            part => parts.push(part),
        }
    }
    let joined = parts.join("/");
    match (absolute, joined.is_empty()) {
        (true, _) => format!("/{joined}"),
        (false, true) => ".".to_owned(),
        (false, false) => joined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_patterns_never_cross_a_slash() {
        for (pattern, text, expected) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "d/a.txt", false),
            ("**", "a/b", false),
            ("d/*", "d/a", true),
            ("d?", "d1", true),
            ("d?", "d/", false),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            ("[!a]x", "ax", true),
            ("a\\*b", "a*b", true),
            ("a\\*b", "axb", false),
            ("*", ".hidden", true),
            ("", "", true),
            ("ü*", "üb", true),
        ] {
            assert_eq!(Glob::new(pattern).unwrap().matches(text), expected, "{pattern} {text}");
        }
        for bad in ["[", "[]", "[a", "a\\", "[z-a]", "[a-]"] {
            assert!(Glob::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ignore_patterns_are_ordered_and_cover_what_is_below() {
        for (patterns, path, expected) in [
            (&["*.md"][..], "a.md", true),
            (&["*.md"], "d/a.md", false),
            (&["**/*.md"], "d/e/a.md", true),
            (&["**/*.md"], "a.md", true),
            (&["d"], "d/e/f", true),
            (&["d/"], "d/e", true),
            (&["/d"], "d", false), // stripped by the file reader, not here
            (&["d/**"], "d", false),
            (&["d/**"], "d/e/f", true),
            (&["a/**/z"], "a/z", true),
            (&["a/**/z"], "a/b/c/z", true),
            (&["*", "!keep"], "keep", false),
            (&["*", "!keep"], "keep/x", false),
            (&["*", "!keep", "keep/x"], "keep/x", true),
            (&["!keep", "*"], "keep", true),
            (&["d", "!d/keep"], "d/keep", false),
            (&["d", "!d/keep"], "d/other", true),
            (&["**"], "x/y", true),
            (&["."], "x", false),
        ] {
            let set = PatternSet::new(patterns).unwrap();
            assert_eq!(set.matches(path), expected, "{patterns:?} {path}");
        }
        assert!(PatternSet::new(&["!"]).is_err());
        assert!(PatternSet::new(&["[a"]).is_err());
    }

    #[test]
    fn a_hostile_pattern_stays_cheap() {
        let pattern = "*a".repeat(200);
        assert!(!Glob::new(&pattern).unwrap().matches(&"a".repeat(199)));
    }
}
