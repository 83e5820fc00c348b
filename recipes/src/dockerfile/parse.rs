//! Text of a Dockerfile → instructions with flags, arguments and here-documents.
//!
//! The grammar is by lines, as BuildKit reads it: comment lines vanish even inside a continued
//! line, a line that ends in the escape character continues, `RUN`, `COPY` and `ADD` may open
//! here-documents anywhere in their line. The parser crate that was tried first takes one
//! here-document and only as the very first word of `RUN`, so `RUN cat <<EOF >file` and
//! `COPY <<a <<b /x/` were lost; reading lines ourselves is smaller than working around it.

use crate::RecipeError;
use crate::error::{Location, nearest};

use super::expand::Lexer;

/// Largest Dockerfile that is read, in bytes.
pub const MAX_SIZE: usize = 4 << 20;

/// All instructions there are, as written in the reference.
pub const INSTRUCTIONS: [&str; 18] = [
    "ADD",
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "RUN",
    "SHELL",
    "STOPSIGNAL",
    "USER",
    "VOLUME",
    "WORKDIR",
];

/// A Dockerfile as read.
#[derive(Debug)]
pub struct Dockerfile {
    /// `\` or a backquote.
    pub escape: char,
    /// What `# syntax=` says.
    pub syntax: Option<String>,
    /// In order.
    pub instructions: Vec<Instruction>,
}

/// One instruction.
#[derive(Debug)]
pub struct Instruction {
    /// First line.
    pub at: Location,
    /// Upper case, one of [`INSTRUCTIONS`].
    pub keyword: &'static str,
    /// `--name` or `--name=value`, quotes removed.
    pub flags: Vec<String>,
    /// What follows.
    pub arguments: Arguments,
    /// In the order they are opened.
    pub heredocs: Vec<Heredoc>,
    /// The joined line without comments, for people and for history.
    pub text: String,
}

/// What follows the keyword and its flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arguments {
    /// A JSON array of strings.
    Json(Vec<String>),
    /// The rest of the line, trimmed.
    Text(String),
}

/// A here-document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heredoc {
    /// The word that ends it.
    pub name: String,
    /// Variables inside are expanded (no part of the word was quoted).
    pub expand: bool,
    /// `<<-`: leading tabs are removed.
    pub chomp: bool,
    /// The lines between, each with its newline.
    pub content: String,
}

impl Heredoc {
    /// The content with leading tabs removed where `<<-` asked for it.
    #[must_use]
    pub fn text(&self) -> String {
        if !self.chomp {
            return self.content.clone();
        }
        self.content.split_inclusive('\n').map(|line| line.trim_start_matches('\t')).collect()
    }

    /// Reads a word such as `<<EOF`, `3<<-"END"`; anything else is no here-document.
    pub(super) fn opener(word: &str) -> Option<Self> {
        let rest = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
        let chomp = rest.starts_with('-');
        let rest = rest.strip_prefix('-').unwrap_or(rest);
        if rest.is_empty() || rest.contains('<') {
            return None;
        }
        let unset = |_: &str| None;
        let mut lexer = Lexer::new('\\');
        lexer.keep_unset = true;
        let plain = lexer.word(rest, &unset).ok()?.words;
        lexer.raw_quotes = true;
        lexer.raw_escapes = true;
        let raw = lexer.word(rest, &unset).ok()?.words;
        let [name] = plain.as_slice() else { return None };
        Some(Self { name: name.clone(), expand: raw == plain, chomp, content: String::new() })
    }
}

struct Lines<'a> {
    lines: std::str::SplitInclusive<'a, char>,
    number: u32,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let line = self.lines.next()?;
        self.number += 1;
        Some(line)
    }
}

fn without_newline(line: &str) -> &str {
    let line = line.strip_suffix('\n').unwrap_or(line);
    line.strip_suffix('\r').unwrap_or(line)
}

/// Reads a Dockerfile. `file` is its name in messages.
///
/// # Errors
/// An unknown instruction, a here-document without its end, and the like; with the line.
pub fn parse(file: &str, text: &str) -> Result<Dockerfile, RecipeError> {
    let whole = Location::line(file, 0);
    if text.len() > MAX_SIZE {
        return Err(whole.error(
            format!("is larger than {} MiB", MAX_SIZE >> 20),
            "a Dockerfile is text; check that -f names the right file",
        ));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (escape, syntax) = directives(file, text)?;
    let mut lines = Lines { lines: text.split_inclusive('\n'), number: 0 };
    let mut instructions = Vec::new();
    while let Some(line) = lines.next() {
        let at = Location::line(file, lines.number);
        let line = without_newline(line).trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (start, mut ended) = continuation(line, escape);
        let mut joined = start.to_owned();
        while !ended {
            let Some(line) = lines.next() else { break };
            let line = without_newline(line);
            let trimmed = line.trim();
            if trimmed.is_empty() || trimmed.starts_with('#') {
                continue;
            }
            let (part, end) = continuation(line, escape);
            joined.push_str(part);
            ended = end;
        }
        let joined = joined.trim();
        if joined.is_empty() {
            continue;
        }
        let mut instruction = instruction(at, joined, escape)?;
        if may_open_heredoc(&instruction) {
            for mut heredoc in openers(joined) {
                if instruction.keyword == "ONBUILD" {
                    break;
                }
                let opened = lines.number;
                loop {
                    let Some(line) = lines.next() else {
                        return Err(Location::line(file, opened).error(
                            format!("the here-document <<{} is never closed", heredoc.name),
                            format!("end it with a line that is only {}", heredoc.name),
                        ));
                    };
                    let bare = without_newline(line);
                    let bare = if heredoc.chomp { bare.trim_start_matches('\t') } else { bare };
                    if bare == heredoc.name {
                        break;
                    }
                    heredoc.content.push_str(line);
                }
                instruction.heredocs.push(heredoc);
            }
        }
        instructions.push(instruction);
    }
    if instructions.is_empty() {
        return Err(whole.error("holds no instruction", "start it with FROM"));
    }
    Ok(Dockerfile { escape, syntax, instructions })
}

fn may_open_heredoc(instruction: &Instruction) -> bool {
    matches!(instruction.keyword, "ADD" | "COPY" | "RUN")
        && matches!(&instruction.arguments, Arguments::Text(text) if text.contains("<<"))
}

fn openers(line: &str) -> Vec<Heredoc> {
    let mut lexer = Lexer::new('\\');
    lexer.raw_quotes = true;
    lexer.raw_escapes = true;
    lexer.keep_unset = true;
    match lexer.word(line, &|_| None) {
        Ok(expansion) => expansion.words.iter().filter_map(|word| Heredoc::opener(word)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Parser directives: comments of the form `# name=value` before anything else.
fn directives(file: &str, text: &str) -> Result<(char, Option<String>), RecipeError> {
    let mut escape = '\\';
    let mut syntax = None;
    let mut seen: Vec<String> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix('#') else { break };
        let Some((name, value)) = comment.split_once('=') else { break };
        let name = name.trim().to_lowercase();
        let value = value.trim();
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) || value.is_empty() {
            break;
        }
        let at = Location::line(file, u32::try_from(index + 1).unwrap_or(u32::MAX));
        if seen.contains(&name) {
            return Err(at.error(
                format!("the directive {name} is given twice"),
                "keep one of the two lines",
            ));
        }
        match name.as_str() {
            "escape" => {
                escape = match value {
                    "\\" => '\\',
                    "`" => '`',
                    _ => {
                        return Err(at.error(
                            format!("escape must be \\ or ` and is {value:?}"),
                            "write # escape=` or drop the line",
                        ));
                    }
                }
            }
            "syntax" => syntax = Some(value.to_owned()),
            "check" => {}
            // Any other name makes it an ordinary comment, and ends the directives.
            _ => break,
        }
        seen.push(name);
    }
    Ok((escape, syntax))
}

/// The line without its continuation character, and whether the instruction ends here.
fn continuation(line: &str, escape: char) -> (&str, bool) {
    let trimmed = line.trim_end_matches([' ', '\t']);
    match trimmed.strip_suffix(escape) {
        Some(before) if !before.ends_with(escape) => (before, false),
        _ => (line, true),
    }
}

fn instruction(at: Location, line: &str, escape: char) -> Result<Instruction, RecipeError> {
    let (word, rest) = match line.find(char::is_whitespace) {
        Some(space) => (&line[..space], line[space..].trim_start()),
        None => (line, ""),
    };
    let upper = word.to_ascii_uppercase();
    let Some(keyword) = INSTRUCTIONS.into_iter().find(|known| *known == upper) else {
        let hint = match nearest(&upper, INSTRUCTIONS) {
            Some(known) => format!("did you mean {known}?"),
            None => format!("the instructions are {}", INSTRUCTIONS.join(", ")),
        };
        return Err(at.error(format!("unknown instruction {word:?}"), hint));
    };
    let (flags, rest) = flags(rest, escape);
    let rest = rest.trim();
    // HEALTHCHECK CMD […] carries its array one word later; the lowering looks there itself.
    let json =
        matches!(keyword, "ADD" | "COPY" | "RUN" | "CMD" | "ENTRYPOINT" | "SHELL" | "VOLUME")
            .then(|| json_strings(rest))
            .flatten();
    let arguments = match json {
        Some(Json::Strings(strings)) => Arguments::Json(strings),
        Some(Json::Mixed) => {
            return Err(at.error(
                format!("{keyword} has a JSON array with something that is no string"),
                "put every element in double quotes",
            ));
        }
        None => Arguments::Text(rest.to_owned()),
    };
    Ok(Instruction { at, keyword, flags, arguments, heredocs: Vec::new(), text: line.to_owned() })
}

enum Json {
    Strings(Vec<String>),
    Mixed,
}

/// `["a", "b"]` as its strings; what is no JSON array is read as text by the caller.
fn json_strings(text: &str) -> Option<Json> {
    if !text.starts_with('[') {
        return None;
    }
    let values: Vec<serde_json::Value> = serde_json::from_str(text).ok()?;
    let strings: Option<Vec<String>> = values
        .into_iter()
        .map(|value| match value {
            serde_json::Value::String(string) => Some(string),
            _ => None,
        })
        .collect();
    Some(strings.map_or(Json::Mixed, Json::Strings))
}

pub(super) fn exec_array(text: &str) -> Option<Vec<String>> {
    match json_strings(text)? {
        Json::Strings(strings) => Some(strings),
        Json::Mixed => None,
    }
}

/// Takes the leading `--flags` off; a lone `--` ends them.
fn flags(line: &str, _escape: char) -> (Vec<String>, &str) {
    let mut flags = Vec::new();
    let mut rest = line.trim_start();
    while rest.starts_with("--") {
        let mut word = String::new();
        let mut quote = None;
        let mut end = rest.len();
        let mut chars = rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match (c, quote) {
                ('\\', _) => word.extend(chars.next().map(|(_, c)| c)),
                (c, Some(open)) if c == open => quote = None,
                (c, Some(_)) => word.push(c),
                ('\'' | '"', None) => quote = Some(c),
                (c, None) if c.is_whitespace() => {
                    end = at;
                    break;
                }
                (c, None) => word.push(c),
            }
        }
        rest = rest[end..].trim_start();
        if word == "--" {
            break;
        }
        flags.push(word);
    }
    (flags, rest)
}

/// Splits at white space outside quotes and escapes, keeping both (for `ENV`, `LABEL`, `ARG`).
pub(super) fn raw_words(text: &str, escape: char) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut started = false;
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if quote.is_none() && c.is_whitespace() {
            if started {
                words.push(std::mem::take(&mut word));
                started = false;
            }
            continue;
        }
        started = true;
        word.push(c);
        match quote {
            None if c == '\'' || c == '"' => quote = Some(c),
            Some(open) if c == open => quote = None,
            // Inside single quotes the escape character means nothing, as in a shell.
            Some('\'') => {}
            _ if c == escape => word.extend(chars.next()),
            _ => {}
        }
    }
    if started {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Instruction {
        let mut parsed = parse("Dockerfile", text).unwrap();
        assert_eq!(parsed.instructions.len(), 1, "{text}");
        parsed.instructions.remove(0)
    }

    #[test]
    fn lines_are_joined_and_comments_vanish() {
        let run = one("RUN a \\\n  # why\n\n   b && \\\n\tc\n");
        assert_eq!(run.arguments, Arguments::Text("a    b && \tc".into()));
        assert_eq!(one("run x\\\\\n").arguments, Arguments::Text("x\\\\".into()));
        assert_eq!(one("# escape=`\nRUN a `\n b\\\n").arguments, Arguments::Text("a  b\\".into()));
        assert_eq!(one("\u{feff}RUN a\r\n").arguments, Arguments::Text("a".into()));
        assert_eq!(one("RUN a \\").arguments, Arguments::Text("a".into()));
    }

    #[test]
    fn flags_are_taken_off_the_front() {
        let copy = one("COPY --chown=\"a b\":c --link -- --x /y");
        assert_eq!(copy.flags, ["--chown=a b:c", "--link"]);
        assert_eq!(copy.arguments, Arguments::Text("--x /y".into()));
        assert_eq!(one("RUN echo --x").flags, Vec::<String>::new());
    }

    #[test]
    fn exec_form_only_when_it_is_json() {
        assert_eq!(
            one("CMD [\"a\", \"b c\"]").arguments,
            Arguments::Json(vec!["a".into(), "b c".into()])
        );
        assert_eq!(one("CMD []").arguments, Arguments::Json(vec![]));
        assert_eq!(one("RUN [ -d x ]").arguments, Arguments::Text("[ -d x ]".into()));
        assert_eq!(one("CMD ['a']").arguments, Arguments::Text("['a']".into()));
        assert!(parse("Dockerfile", "CMD [\"a\", 1]").is_err());
    }

    #[test]
    fn heredocs_anywhere_in_the_line() {
        let run = one("RUN cat <<A >x && cat <<-'B' >y\n1 $v\nA\n\t2\n\tB\n");
        assert_eq!(run.heredocs.len(), 2);
        assert_eq!((run.heredocs[0].name.as_str(), run.heredocs[0].expand), ("A", true));
        assert_eq!(run.heredocs[0].content, "1 $v\n");
        assert!(run.heredocs[1].chomp && !run.heredocs[1].expand);
        assert_eq!(run.heredocs[1].text(), "2\n");
        assert_eq!(one("RUN echo $((1<<2))\n").heredocs, []);
        assert_eq!(one("RUN cat <<<x\n").heredocs, []);
        assert_eq!(one("COPY <<a <<b /d/\n1\na\n2\nb\n").heredocs.len(), 2);
        let error = parse("Dockerfile", "FROM x\nRUN <<E\nfoo").unwrap_err().to_string();
        assert!(
            error.starts_with("Dockerfile:2: the here-document <<E is never closed"),
            "{error}"
        );
    }

    #[test]
    fn mistakes_name_the_line() {
        let error = parse("d/Dockerfile", "FROM x\n\nCOPPY a b\n").unwrap_err().to_string();
        assert_eq!(error, "d/Dockerfile:3: unknown instruction \"COPPY\"; did you mean COPY?");
        assert!(parse("D", "").is_err());
        assert!(parse("D", "# only\n").is_err());
        assert!(
            parse("D", "# escape=x\nFROM a").unwrap_err().to_string().starts_with("D:1: escape")
        );
        assert!(parse("D", "# syntax=a\n# syntax=b\nFROM a").is_err());
    }

    #[test]
    fn directives_end_at_the_first_other_line() {
        let parsed = parse("D", "# syntax=docker/dockerfile:1\n#escape=`\nFROM a\n").unwrap();
        assert_eq!((parsed.escape, parsed.syntax.as_deref()), ('`', Some("docker/dockerfile:1")));
        assert_eq!(parse("D", "# hello\n# escape=`\nFROM a").unwrap().escape, '\\');
    }

    #[test]
    fn raw_words_keep_quotes() {
        assert_eq!(raw_words("a=\"x y\" b='z' c=1\\ 2", '\\'), ["a=\"x y\"", "b='z'", "c=1\\ 2"]);
    }
}
