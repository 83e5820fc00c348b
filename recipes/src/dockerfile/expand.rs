//! Words of a Dockerfile: quotes, escapes and `$variables`, the way BuildKit's lexer reads them.
//!
//! Supported: `$v` `${v}` `${v:-x}` `${v-x}` `${v:+x}` `${v+x}` `${v:?x}` `${v?x}` `${v#p}`
//! `${v##p}` `${v%p}` `${v%%p}` `${v/p/x}` `${v//p/x}`. Everything else is refused.

/// How a word is read.
#[derive(Debug, Clone, Copy)]
pub struct Lexer {
    /// `\` or, after `# escape=`, a backquote.
    pub escape: char,
    /// Keep quote characters.
    pub raw_quotes: bool,
    /// Keep escape characters.
    pub raw_escapes: bool,
    /// Quotes mean nothing (text of a here-document).
    pub ignore_quotes: bool,
    /// Leave variables that are not set as they are written.
    pub keep_unset: bool,
}

impl Lexer {
    /// The ordinary reading: quotes removed, escapes applied, unset variables empty.
    #[must_use]
    pub fn new(escape: char) -> Self {
        Self {
            escape,
            raw_quotes: false,
            raw_escapes: false,
            ignore_quotes: false,
            keep_unset: false,
        }
    }

    /// Expands `text` to one string.
    ///
    /// # Errors
    /// When a quote or brace is not closed, or a substitution is none of the supported ones.
    pub fn word(
        &self,
        text: &str,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Expansion, String> {
        let mut run = Run {
            lexer: *self,
            chars: text.chars().collect(),
            at: 0,
            depth: 0,
            lookup,
            unset: Vec::new(),
        };
        let (text, words) = run.until(None, self.raw_escapes)?;
        Ok(Expansion { text, words, unset: run.unset })
    }
}

/// What a word expanded to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expansion {
    /// The whole as one string, spaces kept.
    pub text: String,
    /// Split at unquoted white space, also at white space from variables.
    pub words: Vec<String>,
    /// Variables used plainly (without a default or an alternative) that are not set.
    pub unset: Vec<String>,
}

#[derive(Default)]
struct Words {
    done: Vec<String>,
    current: String,
}

impl Words {
    fn soft(&mut self, c: char) {
        if !c.is_whitespace() {
            self.current.push(c);
        } else if !self.current.is_empty() {
            self.done.push(std::mem::take(&mut self.current));
        }
    }

    fn finish(mut self) -> Vec<String> {
        if !self.current.is_empty() {
            self.done.push(self.current);
        }
        self.done
    }
}

struct Run<'a> {
    lexer: Lexer,
    chars: Vec<char>,
    at: usize,
    depth: u32,
    lookup: &'a dyn Fn(&str) -> Option<String>,
    unset: Vec<String>,
}

/// Nesting of `${a:-${b:-…}}`; nobody writes more, and the recursion must end.
const MAX_DEPTH: u32 = 64;

impl Run<'_> {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek();
        self.at += usize::from(c.is_some());
        c
    }

    fn until(
        &mut self,
        stop: Option<char>,
        raw_escapes: bool,
    ) -> Result<(String, Vec<String>), String> {
        let mut out = String::new();
        let mut words = Words::default();
        while let Some(c) = self.peek() {
            if Some(c) == stop {
                self.at += 1;
                return Ok((out, words.finish()));
            }
            match c {
                '$' => {
                    let value = self.dollar()?;
                    value.chars().for_each(|c| words.soft(c));
                    out.push_str(&value);
                }
                '\'' | '"' if !self.lexer.ignore_quotes => {
                    let value = if c == '"' { self.double(raw_escapes)? } else { self.single()? };
                    words.current.push_str(&value);
                    out.push_str(&value);
                }
                _ => {
                    self.at += 1;
                    if c != self.lexer.escape {
                        words.soft(c);
                        out.push(c);
                        continue;
                    }
                    if raw_escapes {
                        words.current.push(c);
                        out.push(c);
                    }
                    if let Some(escaped) = self.next() {
                        words.current.push(escaped);
                        out.push(escaped);
                    }
                }
            }
        }
        match stop {
            Some(stop) => Err(format!("missing {stop:?} in a ${{…}} substitution")),
            None => Ok((out, words.finish())),
        }
    }

    fn single(&mut self) -> Result<String, String> {
        let mut out = String::new();
        self.at += 1;
        if self.lexer.raw_quotes {
            out.push('\'');
        }
        loop {
            match self.next() {
                None => return Err("a single quote is not closed".to_owned()),
                Some('\'') => {
                    if self.lexer.raw_quotes {
                        out.push('\'');
                    }
                    return Ok(out);
                }
                Some(c) => out.push(c),
            }
        }
    }

    fn double(&mut self, raw_escapes: bool) -> Result<String, String> {
        let mut out = String::new();
        self.at += 1;
        if self.lexer.raw_quotes {
            out.push('"');
        }
        loop {
            match self.peek() {
                None => return Err("a double quote is not closed".to_owned()),
                Some('"') => {
                    self.at += 1;
                    if self.lexer.raw_quotes {
                        out.push('"');
                    }
                    return Ok(out);
                }
                Some('$') => out.push_str(&self.dollar()?),
                Some(c) => {
                    self.at += 1;
                    if c != self.lexer.escape {
                        out.push(c);
                        continue;
                    }
                    if raw_escapes {
                        out.push(c);
                    }
                    match self.peek() {
                        None => {}
                        Some(next) if next == '"' || next == '$' || next == self.lexer.escape => {
                            self.at += 1;
                            out.push(next);
                        }
                        Some(_) => out.push(c),
                    }
                }
            }
        }
    }

    fn name(&mut self) -> String {
        let start = self.at;
        match self.peek() {
            Some(c) if c.is_ascii_digit() => {
                while self.peek().is_some_and(|c| c.is_ascii_digit()) {
                    self.at += 1;
                }
            }
            Some('@' | '*' | '#' | '?' | '-' | '$' | '!') => self.at += 1,
            _ => {
                while self.peek().is_some_and(|c| c.is_alphanumeric() || c == '_') {
                    self.at += 1;
                }
            }
        }
        self.chars[start..self.at].iter().collect()
    }

    /// The value, noting a plain use of a variable that is not set.
    fn value(&mut self, name: &str) -> Option<String> {
        let value = (self.lookup)(name);
        if value.is_none() && !self.unset.iter().any(|known| known == name) {
            self.unset.push(name.to_owned());
        }
        value
    }

    fn dollar(&mut self) -> Result<String, String> {
        self.at += 1;
        if self.peek() != Some('{') {
            let name = self.name();
            if name.is_empty() {
                return Ok("$".to_owned());
            }
            return Ok(match self.value(&name) {
                None if self.lexer.keep_unset => format!("${name}"),
                value => value.unwrap_or_default(),
            });
        }
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err("substitutions are nested too deeply".to_owned());
        }
        let out = self.braced();
        self.depth -= 1;
        out
    }

    fn braced(&mut self) -> Result<String, String> {
        self.at += 1;
        match self.peek() {
            None => return Err("missing '}' in a ${…} substitution".to_owned()),
            Some('{' | '}' | ':') => return Err("bad substitution: a name must follow ${".into()),
            _ => {}
        }
        let name = self.name();
        let Some(mut operator) = self.next() else {
            return Err("missing '}' in a ${…} substitution".to_owned());
        };
        if operator == '}' {
            return Ok(match self.value(&name) {
                None if self.lexer.keep_unset => format!("${{{name}}}"),
                value => value.unwrap_or_default(),
            });
        }
        if operator == '/' {
            return self.replace(&name);
        }
        let colon = operator == ':';
        if colon {
            operator = self.next().ok_or("missing '}' in a ${…} substitution")?;
        }
        let known = if colon { "-+?" } else { "-+?#%" };
        if !known.contains(operator) {
            let colon = if colon { ":" } else { "" };
            return Err(format!("unsupported modifier ({colon}{operator}) in ${{{name}…}}"));
        }
        let (word, _) = self.until(Some('}'), matches!(operator, '#' | '%'))?;
        let value = (self.lookup)(&name);
        if value.is_none() && self.lexer.keep_unset {
            let colon = if colon { ":" } else { "" };
            return Ok(format!("${{{name}{colon}{operator}{word}}}"));
        }
        let missing = value.as_ref().is_none_or(|value| colon && value.is_empty());
        match operator {
            '-' => Ok(if missing { word } else { value.unwrap_or_default() }),
            '+' => Ok(if missing { String::new() } else { word }),
            '?' if missing => {
                let state = if value.is_some() { "empty" } else { "unset" };
                let default = format!("is not allowed to be {state}");
                Err(format!("{name}: {}", if word.is_empty() { &default } else { &word }))
            }
            '?' => Ok(value.unwrap_or_default()),
            _ => {
                let (longest, pattern) = match word.strip_prefix(operator) {
                    Some(rest) => (true, rest),
                    None => (false, word.as_str()),
                };
                let pattern = ShellPattern::new(pattern)?;
                let value: Vec<char> = value.unwrap_or_default().chars().collect();
                Ok(pattern.trim(&value, operator == '%', longest).iter().collect())
            }
        }
    }

    fn replace(&mut self, name: &str) -> Result<String, String> {
        let all = self.peek() == Some('/');
        self.at += usize::from(all);
        let (pattern, _) = self.until(Some('/'), true)?;
        let (replacement, _) = self.until(Some('}'), true)?;
        match self.value(name) {
            None if self.lexer.keep_unset => {
                let slash = if all { "//" } else { "/" };
                Ok(format!("${{{name}{slash}{pattern}/{replacement}}}"))
            }
            value => {
                let value: Vec<char> = value.unwrap_or_default().chars().collect();
                Ok(ShellPattern::new(&pattern)?.replace(&value, &replacement, all))
            }
        }
    }
}

/// A shell pattern with `*` and `?` only. Like BuildKit's, neither matches a newline.
struct ShellPattern(Vec<Piece>);

#[derive(Clone, Copy, PartialEq)]
enum Piece {
    Literal(char),
    One,
    Star,
}

impl ShellPattern {
    fn new(pattern: &str) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            pieces.push(match c {
                '*' => Piece::Star,
                '?' => Piece::One,
                '\\' => match chars.next() {
                    Some(c @ ('}' | '/' | '*' | '?' | '\\')) => Piece::Literal(c),
                    other => {
                        let other = other.map(String::from).unwrap_or_default();
                        return Err(format!("invalid escape \\{other} in pattern {pattern:?}"));
                    }
                },
                c => Piece::Literal(c),
            });
        }
        Ok(Self(pieces))
    }

    /// Ends of the matches that start at the beginning of `text`, as a set of positions.
    fn ends(pieces: impl Iterator<Item = Piece>, text: impl Fn(usize) -> Option<char>) -> Ends {
        let mut at = vec![0_usize];
        for piece in pieces {
            let mut next: Vec<usize> = Vec::new();
            match piece {
                Piece::Star => {
                    let mut i = at.first().copied();
                    while let Some(from) = i {
                        next.push(from);
                        i = match text(from) {
                            Some(c) if c != '\n' => Some(from + 1),
                            _ => at.iter().copied().find(|known| *known > from),
                        };
                    }
                }
                piece => {
                    for from in at {
                        if text(from).is_some_and(|c| match piece {
                            Piece::Literal(l) => l == c,
                            _ => c != '\n',
                        }) {
                            next.push(from + 1);
                        }
                    }
                }
            }
            at = next;
        }
        Ends { shortest: at.first().copied(), longest: at.last().copied() }
    }

    fn trim<'t>(&self, text: &'t [char], suffix: bool, longest: bool) -> &'t [char] {
        let len = text.len();
        let ends = if suffix {
            Self::ends(self.0.iter().rev().copied(), |i| {
                len.checked_sub(i + 1).map(|index| text[index])
            })
        } else {
            Self::ends(self.0.iter().copied(), |i| text.get(i).copied())
        };
        match if longest { ends.longest } else { ends.shortest } {
            None => text,
            Some(end) if suffix => &text[..len - end],
            Some(end) => &text[end..],
        }
    }

    fn replace(&self, text: &[char], replacement: &str, all: bool) -> String {
        let mut out = String::new();
        let mut at = 0;
        let mut after_match = false;
        while at <= text.len() {
            let rest = &text[at..];
            let end = Self::ends(self.0.iter().copied(), |i| rest.get(i).copied()).longest;
            match end {
                Some(end) if end > 0 || !after_match => {
                    out.push_str(replacement);
                    at += end;
                    if !all {
                        out.extend(&text[at..]);
                        return out;
                    }
                    if end > 0 {
                        after_match = true;
                        continue;
                    }
                }
                _ => {}
            }
            after_match = false;
            if let Some(c) = text.get(at) {
                out.push(*c);
            }
            at += 1;
        }
        out
    }
}

struct Ends {
    shortest: Option<usize>,
    longest: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Option<String> {
        Some(
            match name {
                "A" => "alpha",
                "E" => "",
                "P" => "/usr/local/lib.tar.gz",
                "S" => "a b  c",
                "V" => "v1.2.3",
                _ => return None,
            }
            .to_owned(),
        )
    }

    #[test]
    fn every_form_of_substitution() {
        for (text, expected) in [
            ("$A", "alpha"),
            ("${A}x", "alphax"),
            ("$Ax", ""),
            ("\\$A", "$A"),
            ("'$A'", "$A"),
            ("\"$A\"", "alpha"),
            ("\"\\$A\"", "$A"),
            ("\"a\\b\"", "a\\b"),
            ("a\\b", "ab"),
            ("$", "$"),
            ("$ x", "$ x"),
            ("${U:-d}", "d"),
            ("${U-d}", "d"),
            ("${E:-d}", "d"),
            ("${E-d}", ""),
            ("${A:+x}", "x"),
            ("${E:+x}", ""),
            ("${E+x}", "x"),
            ("${U+x}", ""),
            ("${A:?no}", "alpha"),
            ("${E?no}", ""),
            ("${U:-${A}}", "alpha"),
            ("${U:-\"x y\"}", "x y"),
            ("${P#*/}", "usr/local/lib.tar.gz"),
            ("${P##*/}", "lib.tar.gz"),
            ("${P%.*}", "/usr/local/lib.tar"),
            ("${P%%.*}", "/usr/local/lib"),
            ("${V#v}", "1.2.3"),
            ("${V%.?}", "v1.2"),
            ("${V#x}", "v1.2.3"),
            ("${V/./-}", "v1-2.3"),
            ("${V//./-}", "v1-2-3"),
            ("${V//?/x}", "xxxxxx"),
            ("${V/v*/all}", "all"),
            ("${P//\\//:}", ":usr:local:lib.tar.gz"),
            ("${U/a/b}", ""),
            ("$1", ""),
            ("${1}", ""),
            ("a'b c'd", "ab cd"),
            ("tail\\", "tail"),
        ] {
            let expansion = Lexer::new('\\').word(text, &lookup).unwrap();
            assert_eq!(expansion.text, expected, "{text}");
        }
    }

    #[test]
    fn words_split_after_expansion_but_not_inside_quotes() {
        for (text, expected) in [
            ("x $S y", &["x", "a", "b", "c", "y"][..]),
            ("\"$S\"", &["a b  c"]),
            ("a\\ b c", &["a b", "c"]),
            ("80 $U 90", &["80", "90"]),
        ] {
            assert_eq!(Lexer::new('\\').word(text, &lookup).unwrap().words, expected, "{text}");
        }
    }

    #[test]
    fn malformed_words_are_refused() {
        for text in [
            "${",
            "${}",
            "${:}",
            "${A",
            "${A:",
            "${A:-x",
            "'x",
            "\"x",
            "${A:=x}",
            "${A^}",
            "${{A}}",
            "${A:#x}",
            "${U:?gone}",
            "${E:?gone}",
            "${A/x}",
            "${A/x/y",
            "${A#\\a}",
        ] {
            assert!(Lexer::new('\\').word(text, &lookup).is_err(), "{text}");
        }
        let nested = "${U:-".repeat(1000) + &"}".repeat(1000);
        assert!(Lexer::new('\\').word(&nested, &lookup).is_err());
        let error = Lexer::new('\\').word("${U:?set U}", &lookup).unwrap_err();
        assert_eq!(error, "U: set U");
    }

    #[test]
    fn modes() {
        let mut lexer = Lexer::new('`');
        assert_eq!(lexer.word("`$A \\x", &lookup).unwrap().text, "$A \\x");
        lexer.keep_unset = true;
        lexer.raw_quotes = true;
        assert_eq!(lexer.word("\"$U $A\" ${U:-x}", &lookup).unwrap().text, "\"$U alpha\" ${U:-x}");
        lexer.ignore_quotes = true;
        assert_eq!(lexer.word("it's $A", &lookup).unwrap().text, "it's alpha");
        assert_eq!(Lexer::new('\\').word("$U$U", &lookup).unwrap().unset, ["U"]);
    }
}
