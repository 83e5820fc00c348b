//! Which `ARG` and `ENV` values hold at a line.
//!
//! Global `ARG`s (before the first `FROM`) serve `FROM` lines only; a stage sees one after it
//! declares it again without a value. Within a stage the last of `ENV` and `ARG` wins, as in
//! current BuildKit; a stage built `FROM` another inherits both.

use std::collections::BTreeMap;

use crate::plan::Platform;

/// Ordered variables; setting one again keeps its place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Variables(Vec<(String, String)>);

impl Variables {
    /// The value, where set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Sets a value.
    pub fn set(&mut self, name: &str, value: &str) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some(entry) => value.clone_into(&mut entry.1),
            None => self.0.push((name.to_owned(), value.to_owned())),
        }
    }

    /// `NAME=value` lines in order.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    /// Names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// From `NAME=value` lines; one without `=` is an empty value.
    #[must_use]
    pub fn from_lines(lines: &[String]) -> Self {
        let mut variables = Self::default();
        for line in lines {
            let (name, value) = line.split_once('=').unwrap_or((line, ""));
            variables.set(name, value);
        }
        variables
    }
}

/// Arguments that exist without being passed: the two platforms, split into their parts.
#[must_use]
pub fn platform_arguments(build: &Platform, target: &Platform, stage: Option<&str>) -> Variables {
    let mut variables = Variables::default();
    for (prefix, platform) in [("BUILD", build), ("TARGET", target)] {
        variables.set(&format!("{prefix}PLATFORM"), &platform.to_string());
        variables.set(&format!("{prefix}OS"), &platform.os);
        variables.set(&format!("{prefix}OSVERSION"), "");
        variables.set(&format!("{prefix}ARCH"), &platform.architecture);
        variables.set(&format!("{prefix}VARIANT"), platform.variant.as_deref().unwrap_or(""));
    }
    variables.set("TARGETSTAGE", stage.filter(|s| !s.is_empty()).unwrap_or("default"));
    variables
}

/// Proxy arguments reach `RUN` without an `ARG` line and never become part of the image.
pub const PROXY_ARGUMENTS: [&str; 5] =
    ["http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy"];

/// Environment for `RUN` from proxy build arguments, in both spellings.
#[must_use]
pub fn proxy_environment(arguments: &BTreeMap<String, String>) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, value) in arguments {
        let lower = name.to_lowercase();
        if PROXY_ARGUMENTS.contains(&lower.as_str()) {
            lines.push(format!("{}={value}", lower.to_uppercase()));
            lines.push(format!("{lower}={value}"));
        }
    }
    lines.sort();
    lines.dedup();
    lines
}
