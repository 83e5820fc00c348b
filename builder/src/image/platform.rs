//! Which of an image's platforms is wanted.

use std::fmt;
use std::str::FromStr;

/// An operating system, an architecture and its variant, in OCI spelling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v8`, `v7`, …; absent means any for which the architecture's own default fits.
    pub variant: Option<String>,
}

impl Default for Platform {
    /// Linux on this machine's architecture.
    fn default() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }
}

impl Platform {
    /// Whether an image that says it is for `os`/`architecture`/`variant` will do. What the image
    /// does not say is not held against it.
    #[must_use]
    pub fn accepts(&self, os: &str, architecture: &str, variant: Option<&str>) -> bool {
        // arm64 has one variant in use, and many images do not write it.
        let normal = |variant: Option<&str>| match (architecture, variant) {
            ("arm64", None | Some("" | "v8")) | (_, None | Some("")) => None,
            (_, Some(variant)) => Some(variant.to_owned()),
        };
        (os.is_empty() || os == self.os)
            && (architecture.is_empty() || architecture == self.architecture)
            && match (normal(self.variant.as_deref()), normal(variant)) {
                (Some(want), Some(have)) => want == have,
                (Some(_), None) => architecture != "arm" && architecture != "amd64",
                (None, _) => true,
            }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// A string that is no `os/architecture[/variant]`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a platform (expected os/architecture or os/architecture/variant, e.g. linux/amd64)"
)]
pub struct BadPlatform(String);

impl FromStr for Platform {
    type Err = BadPlatform;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = text.split('/').collect();
        let (os, architecture, variant) = match parts[..] {
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant)),
            _ => return Err(BadPlatform(text.to_owned())),
        };
        if os.is_empty() || architecture.is_empty() || variant == Some("") {
            return Err(BadPlatform(text.to_owned()));
        }
        let (os, architecture) = (os.to_owned(), architecture.to_owned());
        Ok(Self { os, architecture, variant: variant.map(str::to_owned) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matching() {
        let arm64: Platform = "linux/arm64".parse().unwrap();
        assert!(arm64.accepts("linux", "arm64", None));
        assert!(arm64.accepts("linux", "arm64", Some("v8")));
        assert!("linux/arm64/v8".parse::<Platform>().unwrap().accepts("linux", "arm64", None));
        assert!(!arm64.accepts("linux", "amd64", None));
        assert!(!arm64.accepts("windows", "arm64", None));
        let v7: Platform = "linux/arm/v7".parse().unwrap();
        assert!(v7.accepts("linux", "arm", Some("v7")));
        assert!(!v7.accepts("linux", "arm", Some("v6")));
        assert!(!v7.accepts("linux", "arm", None));
        assert!(v7.accepts("", "", None));
        assert!("linux".parse::<Platform>().is_err());
        assert!("linux//v7".parse::<Platform>().is_err());
    }
}
