//! What software is in a template: read from the package databases in its root filesystem, and
//! written as SPDX or CycloneDX.
//!
//! Only what a package manager has written down is found: dpkg (and distroless images' pieces of
//! it), apk, Python's and npm's installed packages. An rpm database is a Berkeley, ndb or SQLite file
//! that no small library reads; that there is one is said, not passed over. Files that nobody
//! declared are in no SBOM.
//!
//! The documents are a function of the template: sorted, and with no time but the one given.

mod cyclonedx;
mod databases;
mod spdx;

use std::collections::{BTreeMap, BTreeSet};

use parbake_cache::Digest;
use parbake_cache::statements::Document;
use parbake_recipes::lock::Packages;
use serde_json::Value;

use crate::contents::{ContentsError, RootFs};
use crate::template::Template;

/// SPDX as a statement's predicate.
const SPDX_PREDICATE: &str = "https://spdx.dev/Document";
/// CycloneDX as a statement's predicate.
const CYCLONEDX_PREDICATE: &str = "https://cyclonedx.org/bom";

/// A form of SBOM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// SPDX 2.3, JSON.
    Spdx,
    /// CycloneDX 1.6, JSON.
    CycloneDx,
}

/// Whose package it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Manager {
    /// Debian's.
    Dpkg,
    /// Alpine's.
    Apk,
    /// Python's.
    Python,
    /// Node.js's.
    Npm,
}

/// An installed package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Package {
    /// Who installed it.
    pub manager: Manager,
    /// Its name.
    pub name: String,
    /// Its version, as the manager writes it.
    pub version: String,
    /// For which processor, where the manager says so.
    pub architecture: Option<String>,
    /// The source package it was built from, if that has another name.
    pub source: Option<String>,
    /// Its licence, as it says itself: not always an SPDX expression.
    pub license: Option<String>,
    /// Where the manager wrote that down.
    pub location: String,
}

impl Manager {
    /// As lock files name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dpkg => "dpkg",
            Self::Apk => "apk",
            Self::Python => "python",
            Self::Npm => "npm",
        }
    }
}

/// Everything that was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// `ID` of os-release, e.g. `debian`.
    pub distribution: Option<String>,
    /// `VERSION_ID` of os-release, e.g. `12`.
    pub release: Option<String>,
    /// The packages, sorted.
    pub packages: BTreeSet<Package>,
    /// Databases that are there and were not read, and why.
    pub unread: Vec<String>,
}

impl Inventory {
    /// Reads the databases in a root filesystem.
    ///
    /// # Errors
    /// When it cannot be read. A database that makes no sense is named in `unread`.
    pub fn of(root: &RootFs) -> Result<Self, ContentsError> {
        databases::read(root)
    }

    /// The versions alone, as a lock file has them.
    #[must_use]
    pub fn versions(&self) -> Packages {
        let mut found: BTreeMap<String, BTreeMap<String, BTreeSet<&str>>> = BTreeMap::new();
        for package in &self.packages {
            let packages = found.entry(package.manager.name().to_owned()).or_default();
            packages.entry(package.name.clone()).or_default().insert(&package.version);
        }
        let join = |versions: BTreeSet<&str>| versions.into_iter().collect::<Vec<_>>().join(", ");
        found
            .into_iter()
            .map(|(manager, packages)| {
                let packages = packages.into_iter().map(|(name, all)| (name, join(all)));
                (manager, packages.collect())
            })
            .collect()
    }
}

impl Format {
    /// The document about a template. `created` is in seconds since 1970; 0 when nobody says.
    #[must_use]
    pub fn write(self, template: &Template, inventory: &Inventory, created: u64) -> Value {
        match self {
            Self::Spdx => spdx::write(template, inventory, created),
            Self::CycloneDx => cyclonedx::write(template, inventory, created),
        }
    }

    /// The same to be attached.
    #[must_use]
    pub fn document(self, template: &Template, inventory: &Inventory, created: u64) -> Document {
        let (predicate_type, media_type) = match self {
            Self::Spdx => (SPDX_PREDICATE, "application/spdx+json"),
            Self::CycloneDx => (CYCLONEDX_PREDICATE, "application/vnd.cyclonedx+json"),
        };
        Document {
            predicate_type: predicate_type.to_owned(),
            media_type: Some(media_type.to_owned()),
            content: self.write(template, inventory, created),
        }
    }
}

impl Package {
    /// Its package URL.
    #[must_use]
    pub fn url(&self, inventory: &Inventory) -> String {
        let distribution = |otherwise: &str| {
            let name = inventory.distribution.clone().unwrap_or_else(|| otherwise.to_owned());
            let release = inventory.release.as_ref().map(|release| format!("{name}-{release}"));
            (name, release)
        };
        let name = escape(&self.name, false);
        let (start, distro) = match self.manager {
            Manager::Dpkg => {
                let (name_of, release) = distribution("debian");
                (format!("deb/{}/{name}", escape(&name_of, false)), release)
            }
            Manager::Apk => {
                let (name_of, release) = distribution("alpine");
                (format!("apk/{}/{name}", escape(&name_of, false)), release)
            }
            // Names differ only in case and separators there.
            Manager::Python => (
                format!(
                    "pypi/{}",
                    escape(&self.name.to_lowercase().replace(['_', '.'], "-"), false)
                ),
                None,
            ),
            Manager::Npm => (format!("npm/{}", escape(&self.name, true)), None),
        };
        let mut url = format!("pkg:{start}@{}", escape(&self.version, false));
        let qualifiers: Vec<String> = [
            self.architecture.as_ref().map(|value| format!("arch={}", escape(value, false))),
            distro.map(|value| format!("distro={}", escape(&value, false))),
            self.source.as_ref().map(|value| format!("upstream={}", escape(value, false))),
        ]
        .into_iter()
        .flatten()
        .collect();
        if !qualifiers.is_empty() {
            url += &format!("?{}", qualifiers.join("&"));
        }
        url
    }
}

/// Percent-encoding of package URLs; a slash may separate a namespace from a name.
fn escape(text: &str, slash: bool) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        let plain =
            byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b':');
        if plain || (slash && byte == b'/') {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// The kernel, which no package database in the guest knows.
fn kernel_url(template: &Template) -> String {
    let kernel = &template.kernel;
    format!("pkg:generic/{}@{}", escape(&kernel.package, false), escape(&kernel.version, false))
}

/// Seconds since 1970 as RFC 3339, in UTC.
fn timestamp(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    jiff::Timestamp::from_second(seconds).unwrap_or(jiff::Timestamp::MAX).to_string()
}

/// What the template is called in its SBOM.
fn name(template: &Template) -> String {
    template.name.as_ref().map_or_else(|| template.digest.to_string(), ToString::to_string)
}

/// A UUID that is a function of a digest (RFC 9562, version 8).
fn uuid(digest: &Digest) -> String {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.as_bytes()[..16]);
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_they_are() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(1_700_000_000), "2023-11-14T22:13:20Z");
    }

    #[test]
    fn package_urls_are_escaped() {
        let mut package = Package {
            manager: Manager::Dpkg,
            name: "libstdc++6".to_owned(),
            version: "1:12.2-1+b1".to_owned(),
            architecture: Some("amd64".to_owned()),
            source: Some("gcc-12".to_owned()),
            license: None,
            location: String::new(),
        };
        let mut inventory = Inventory::default();
        assert_eq!(
            package.url(&inventory),
            "pkg:deb/debian/libstdc%2B%2B6@1:12.2-1%2Bb1?arch=amd64&upstream=gcc-12"
        );
        inventory.distribution = Some("ubuntu".to_owned());
        inventory.release = Some("24.04".to_owned());
        assert!(package.url(&inventory).starts_with("pkg:deb/ubuntu/libstdc%2B%2B6@"));
        assert!(package.url(&inventory).contains("distro=ubuntu-24.04"));
        package = Package {
            manager: Manager::Npm,
            name: "@types/node".to_owned(),
            version: "1.0.0".to_owned(),
            architecture: None,
            source: None,
            ..package
        };
        assert_eq!(package.url(&inventory), "pkg:npm/%40types/node@1.0.0");
        package.manager = Manager::Python;
        package.name = "Foo_Bar.baz".to_owned();
        assert_eq!(package.url(&inventory), "pkg:pypi/foo-bar-baz@1.0.0");
    }
}
