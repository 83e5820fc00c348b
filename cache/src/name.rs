//! The names templates are tagged with: `[HOST[:PORT]/]PATH[:TAG]`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The tag a name has when none is written.
pub const DEFAULT_TAG: &str = "latest";

/// The longest repository, host included (OCI distribution specification).
const MAX_REPOSITORY: usize = 255;
/// The longest tag (OCI distribution specification).
const MAX_TAG: usize = 128;

/// A template's name, e.g. `debian:12`, `team/py:3.12` or `reg.example:5000/team/py:3.12`.
///
/// As everywhere in this world, the first component is a registry's host when it contains a dot
/// or a colon or is `localhost`, and something follows it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateName {
    registry: Option<String>,
    repository: String,
    tag: String,
}

/// Text that is not a template's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a template name: {why}")]
pub struct ParseNameError {
    text: String,
    why: &'static str,
}

impl TemplateName {
    /// The registry's host and port, when the name has one.
    #[must_use]
    pub fn registry(&self) -> Option<&str> {
        self.registry.as_deref()
    }

    /// The path without host and tag, e.g. `team/py`.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag, `latest` when none was written.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The same name with another tag.
    ///
    /// # Errors
    /// When `tag` is not one.
    pub fn with_tag(&self, tag: &str) -> Result<Self, ParseNameError> {
        check_tag(tag).map_err(|why| ParseNameError::new(tag, why))?;
        Ok(Self { tag: tag.to_owned(), ..self.clone() })
    }
}

impl ParseNameError {
    fn new(text: &str, why: &'static str) -> Self {
        Self { text: text.chars().take(100).collect(), why }
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(registry) = &self.registry {
            write!(f, "{registry}/")?;
        }
        write!(f, "{}:{}", self.repository, self.tag)
    }
}

impl FromStr for TemplateName {
    type Err = ParseNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|why| ParseNameError::new(text, why))
    }
}

fn parse(text: &str) -> Result<TemplateName, &'static str> {
    if text.is_empty() {
        return Err("it is empty");
    }
    if text.contains("://") {
        return Err("write it without a scheme, e.g. reg.example/team/py:3.12");
    }
    if text.contains('@') {
        return Err("a digest pins content and cannot be part of a name");
    }
    let (registry, rest) = match text.split_once('/') {
        Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => {
            check_host(first)?;
            (Some(first.to_owned()), rest)
        }
        _ => (None, text),
    };
    let (repository, tag) = rest.split_once(':').unwrap_or((rest, DEFAULT_TAG));
    for component in repository.split('/') {
        check_component(component)?;
    }
    check_tag(tag)?;
    if registry.as_ref().map_or(0, |host| host.len() + 1) + repository.len() > MAX_REPOSITORY {
        return Err("it is longer than 255 characters");
    }
    Ok(TemplateName { registry, repository: repository.to_owned(), tag: tag.to_owned() })
}

fn check_host(text: &str) -> Result<(), &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or("its IPv6 host has no ]")?;
            address.parse::<std::net::Ipv6Addr>().map_err(|_| "its IPv6 host is malformed")?;
            match after.strip_prefix(':') {
                None if after.is_empty() => return Ok(()),
                None => return Err("something follows its IPv6 host"),
                Some(port) => ("v6", Some(port)),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if !host.split('.').all(label) {
        return Err("its registry host is malformed");
    }
    if let Some(port) = port
        && (port.is_empty()
            || !port.bytes().all(|b| b.is_ascii_digit())
            || port.parse::<u16>().is_err())
    {
        return Err("its registry port is not a number up to 65535");
    }
    Ok(())
}

fn check_component(text: &str) -> Result<(), &'static str> {
    let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    let (Some(first), Some(last)) = (bytes.first(), bytes.last()) else {
        return Err("a part of its path is empty");
    };
    if text.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("its path must be lower case");
    }
    if !bytes.iter().all(|b| alphanumeric(b) || matches!(b, b'.' | b'_' | b'-')) {
        return Err("its path may contain a-z, 0-9 and . _ - between them");
    }
    if !alphanumeric(first) || !alphanumeric(last) {
        return Err("each part of its path must start and end with a letter or digit");
    }
    // Separators: one dot, one or two underscores, any number of dashes, never mixed.
    for run in text.split(|c: char| c.is_ascii_alphanumeric()).filter(|run| !run.is_empty()) {
        if !(run == "." || run == "_" || run == "__" || run.bytes().all(|b| b == b'-')) {
            return Err("its path has separators in a row (one of . _ __ or dashes)");
        }
    }
    Ok(())
}

fn check_tag(text: &str) -> Result<(), &'static str> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    match text.as_bytes() {
        [] => Err("its tag is empty"),
        bytes if bytes.len() > MAX_TAG => Err("its tag is longer than 128 characters"),
        [first, rest @ ..]
            if word(*first) && rest.iter().all(|b| word(*b) || matches!(b, b'.' | b'-')) =>
        {
            Ok(())
        }
        _ => Err("its tag may contain letters, digits and _ . - and not start with . or -"),
    }
}

impl Serialize for TemplateName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TemplateName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_into_registry_repository_and_tag() {
        for (text, registry, repository, tag) in [
            ("debian:12", None, "debian", "12"),
            ("debian", None, "debian", "latest"),
            ("team/py:3.12", None, "team/py", "3.12"),
            ("reg.example:5000/team/py:3.12", Some("reg.example:5000"), "team/py", "3.12"),
            ("localhost/py", Some("localhost"), "py", "latest"),
            ("localhost:5000/a--b/c__d:V_1.x-2", Some("localhost:5000"), "a--b/c__d", "V_1.x-2"),
            ("[::1]:5000/py:1", Some("[::1]:5000"), "py", "1"),
            ("127.0.0.1:5000/py:1", Some("127.0.0.1:5000"), "py", "1"),
        ] {
            let name: TemplateName = text.parse().unwrap();
            assert_eq!(
                (name.registry(), name.repository(), name.tag()),
                (registry, repository, tag),
                "{text}"
            );
            assert_eq!(name.to_string().parse::<TemplateName>().unwrap(), name);
        }
    }

    #[test]
    fn malformed_names_say_why() {
        for (text, why) in [
            ("", "empty"),
            ("https://reg.example/x", "scheme"),
            ("Debian:12", "lower case"),
            ("a//b", "empty"),
            ("/a", "empty"),
            ("a/", "empty"),
            ("a/../b", "start and end"),
            ("..", "start and end"),
            ("a._b", "separators"),
            ("a___b", "separators"),
            ("debian:", "tag is empty"),
            ("debian:.x", "tag may"),
            ("debian:a:b", "tag may"),
            ("debian:a/b", "host"),
            ("reg.example:99999/x", "port"),
            ("reg.example:/x", "port"),
            ("-.example/x", "host"),
            ("x@sha256:00", "digest"),
            ("a b", "a-z"),
            ("ü", "a-z"),
            ("[::1/x", "]"),
        ] {
            let error = text.parse::<TemplateName>().unwrap_err().to_string();
            assert!(error.contains(why) || text == "debian:a/b", "{text}: {error}");
        }
        assert!(format!("a:{}", "x".repeat(129)).parse::<TemplateName>().is_err());
        assert!("x/".repeat(200).parse::<TemplateName>().is_err());
    }
}
