//! `parbake.lock`: what a recipe resolved to, so that the next build is the same one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use serde::{Deserialize, Serialize};

use crate::dockerfile::BaseImages;
use crate::plan::Platform;
use crate::{Location, RecipeError};

/// The lock file's version.
pub const SCHEMA_VERSION: u32 = 1;

/// Versions of installed packages by manager (`dpkg`, `apk`, `python`, `npm`), then by name. Where
/// one is there in several versions, all of them, sorted, with commas between.
pub type Packages = BTreeMap<String, BTreeMap<String, String>>;

/// What a recipe resolved to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Lock {
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The program's version that wrote it; another one only warns.
    pub tool: String,
    /// Digest of the effective recipe: every default and every build argument in it.
    pub recipe: Digest,
    /// Digest of the build context.
    pub context: Digest,
    /// Base images, sorted.
    pub bases: Vec<LockedBase>,
    /// The kernel, once one was chosen.
    #[serde(default)]
    pub kernel: Option<LockedKernel>,
    /// What was installed in the end; nothing in a lock that was written without a build.
    #[serde(default)]
    pub packages: Packages,
}

/// A base image and what its name stood for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LockedBase {
    /// As written, variables expanded.
    pub reference: String,
    /// What it was resolved for.
    pub platform: String,
    /// Its manifest.
    pub digest: String,
}

/// A kernel by content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LockedKernel {
    /// Package name, or `file`.
    pub package: String,
    /// Package version.
    pub version: String,
    /// Digest of the package or file.
    pub digest: Digest,
}

/// Something that is no longer what the lock file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Moved {
    /// Which.
    pub reference: String,
    /// Recorded.
    pub locked: String,
    /// Now; a sentence when it cannot be resolved.
    pub current: String,
}

impl Lock {
    /// Reads a lock file; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read, is no lock file, or is a newer version's.
    pub fn read(path: &Path) -> Result<Option<Self>, RecipeError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(RecipeError::Read { path: path.to_owned(), source }),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let at = |error: &serde_json::Error| Location {
            file: name.clone(),
            line: u32::try_from(error.line()).unwrap_or(0),
            column: u32::try_from(error.column()).ok(),
        };
        let hint = "write it anew with `parbake recipe lock`";
        let version: serde_json::Value = serde_json::from_str(&text)
            .map_err(|error| at(&error).error(error.to_string(), hint))?;
        if let Some(newer) = version["schemaVersion"].as_u64().filter(|v| *v > 1) {
            return Err(Location::line(&name, 1)
                .error(format!("lock file of version {newer}"), "use a newer parbake"));
        }
        serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| at(&error).error(error.to_string(), hint))
    }

    /// The file's text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// What a base is locked to.
    #[must_use]
    pub fn base(&self, reference: &str, platform: &Platform) -> Option<&str> {
        let platform = platform.to_string();
        self.bases
            .iter()
            .find(|base| base.reference == reference && base.platform == platform)
            .map(|base| base.digest.as_str())
    }

    /// Refuses any difference to what is there now. Kernel and packages are compared where both
    /// sides know them.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn verify(&self, now: &Self, path: &Path) -> Result<(), RecipeError> {
        let drift = |what, detail: String| {
            Err(RecipeError::LockDrift { path: PathBuf::from(path), what, detail })
        };
        if self.recipe != now.recipe {
            return drift("the recipe", format!("{} now, locked {}", now.recipe, self.recipe));
        }
        if self.context != now.context {
            return drift("the context", format!("{} now, locked {}", now.context, self.context));
        }
        for base in &now.bases {
            match self.bases.iter().find(|locked| {
                locked.reference == base.reference && locked.platform == base.platform
            }) {
                Some(locked) if locked.digest == base.digest => {}
                locked => {
                    let was = locked.map_or("not there", |locked| locked.digest.as_str());
                    let detail = format!("{}: {} now, locked {was}", base.reference, base.digest);
                    return drift("the base", detail);
                }
            }
        }
        if let (Some(locked), Some(kernel)) = (&self.kernel, &now.kernel)
            && locked.digest != kernel.digest
        {
            let detail =
                format!("{} {} now, locked {}", kernel.package, kernel.version, locked.version);
            return drift("the kernel", detail);
        }
        self.verify_packages(&now.packages, path)
    }

    /// Refuses any difference to the packages there are now, by manager and name. A lock that knows
    /// of none was written before anything was built, and a build that knows of none has not got
    /// there: either allows everything.
    ///
    /// # Errors
    /// Names the first differences, at most three.
    pub fn verify_packages(&self, now: &Packages, path: &Path) -> Result<(), RecipeError> {
        if self.packages.is_empty() || now.is_empty() {
            return Ok(());
        }
        fn flat(all: &Packages) -> BTreeMap<(&str, &str), &str> {
            all.iter()
                .flat_map(|(manager, packages)| {
                    packages.iter().map(move |(name, version)| {
                        ((manager.as_str(), name.as_str()), version.as_str())
                    })
                })
                .collect()
        }
        let (locked, now) = (flat(&self.packages), flat(now));
        let every: BTreeSet<_> = locked.keys().chain(now.keys()).copied().collect();
        let moved: Vec<String> = every
            .into_iter()
            .filter(|key| locked.get(key) != now.get(key))
            .map(|key| {
                let of =
                    |all: &BTreeMap<_, &str>| all.get(&key).map_or("none", |text| *text).to_owned();
                format!("{} {} {} now, locked {}", key.0, key.1, of(&now), of(&locked))
            })
            .collect();
        if moved.is_empty() {
            return Ok(());
        }
        let more = match moved.len() {
            0..=3 => String::new(),
            count => format!("; and {} more", count - 3),
        };
        let detail = moved[..moved.len().min(3)].join("; ") + &more;
        Err(RecipeError::LockDrift { path: path.to_owned(), what: "packages", detail })
    }

    /// Bases whose names stand for something else today.
    pub fn outdated(&self, images: &mut dyn BaseImages) -> Vec<Moved> {
        let mut moved = Vec::new();
        for base in &self.bases {
            let Some(platform) = Platform::parse(&base.platform) else { continue };
            let current = match images.resolve(&base.reference, &platform) {
                Ok(image) => image.digest,
                Err(reason) => reason,
            };
            if current != base.digest {
                moved.push(Moved {
                    reference: base.reference.clone(),
                    locked: base.digest.clone(),
                    current,
                });
            }
        }
        moved
    }
}
