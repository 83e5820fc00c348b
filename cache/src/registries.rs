//! `registries.conf`: where else a registry's content is, and what is not to be used.
//!
//! The file belongs to other tools (containers-registries.conf(5), version 2); of it are read, per
//! `[[registry]]`: `prefix`, `location`, `blocked`, `insecure`, `mirror` with `location`, `insecure`
//! and `pull-from-mirror`, and `mirror-by-digest-only`. Everything else is left to those tools.
//!
//! - The table whose prefix is the longest that fits decides, and no other.
//! - Mirrors are asked in their order, the location itself last; only for pulls.
//! - `insecure` allows plain HTTP. It does not make a bad certificate good.
//!
//! Files: the one given, else `CONTAINERS_REGISTRIES_CONF`, else the user's
//! `~/.config/containers/registries.conf`, else `/etc/containers/registries.conf`; unless one was
//! given, then `registries.conf.d/*.conf` of the system and of the user, of which a later table with
//! the same prefix takes the place of an earlier one.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// More than any such file has.
const MAX_BYTES: u64 = 1024 * 1024;

/// What the files say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registries {
    tables: Vec<Table>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Table {
    prefix: String,
    location: Option<String>,
    blocked: bool,
    insecure: bool,
    mirrors: Vec<Mirror>,
    file: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Mirror {
    location: String,
    insecure: bool,
    tags: bool,
    digests: bool,
}

/// A repository's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The registry, with port.
    pub host: String,
    /// The repository there.
    pub repository: String,
    /// Whether plain HTTP is allowed.
    pub insecure: bool,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the registry configuration {}: {what}", path.display())]
pub struct RegistriesError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub what: String,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    registry: Vec<RawTable>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RawTable {
    prefix: Option<String>,
    location: Option<String>,
    #[serde(default)]
    blocked: bool,
    #[serde(default)]
    insecure: bool,
    #[serde(default)]
    mirror_by_digest_only: bool,
    #[serde(default)]
    mirror: Vec<RawMirror>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RawMirror {
    location: String,
    #[serde(default)]
    insecure: bool,
    #[serde(default)]
    pull_from_mirror: Option<PullFrom>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum PullFrom {
    All,
    DigestOnly,
    TagOnly,
}

impl Place {
    /// A place.
    #[must_use]
    pub fn new(host: &str, repository: &str, insecure: bool) -> Self {
        Self { host: host.to_owned(), repository: repository.to_owned(), insecure }
    }
}

impl Registries {
    /// What this user's environment says. `explicit` is `--registries-conf`.
    ///
    /// # Errors
    /// When a file is there and cannot be used, or the one given is not there.
    pub fn from_environment(explicit: Option<&Path>) -> Result<Self, RegistriesError> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let named = explicit
            .map(Path::to_owned)
            .or_else(|| variable("CONTAINERS_REGISTRIES_CONF").map(PathBuf::from));
        if let Some(path) = named {
            let mut registries = Self::default();
            registries.add(&path, true)?;
            return Ok(registries);
        }
        let user = variable("XDG_CONFIG_HOME")
            .map(PathBuf::from)
            .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".config")))
            .map(|config| config.join("containers"));
        Self::from_directories(Path::new("/etc/containers"), user.as_deref())
    }

    /// What the system's and the user's directory say.
    ///
    /// # Errors
    /// When a file is there and cannot be used.
    pub fn from_directories(system: &Path, user: Option<&Path>) -> Result<Self, RegistriesError> {
        const NAME: &str = "registries.conf";
        let mut registries = Self::default();
        let own = user.map(|user| user.join(NAME)).filter(|path| path.exists());
        registries.add(&own.unwrap_or_else(|| system.join(NAME)), false)?;
        for directory in [Some(system), user].into_iter().flatten() {
            let directory = directory.join("registries.conf.d");
            let mut files: Vec<PathBuf> = std::fs::read_dir(&directory)
                .into_iter()
                .flatten()
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| path.extension().is_some_and(|extension| extension == "conf"))
                .collect();
            files.sort();
            for file in files {
                registries.add(&file, true)?;
            }
        }
        Ok(registries)
    }

    /// From now on, `host` is found at `place`, and may be spoken to without TLS there.
    pub fn relocate(&mut self, host: &str, place: &str) {
        let table = Table {
            prefix: host.to_owned(),
            location: Some(place.to_owned()),
            blocked: false,
            insecure: true,
            mirrors: Vec::new(),
            file: PathBuf::new(),
        };
        self.tables.retain(|other| other.prefix != table.prefix);
        self.tables.push(table);
    }

    fn add(&mut self, path: &Path, must_exist: bool) -> Result<(), RegistriesError> {
        let error = |what: String| RegistriesError { path: path.to_owned(), what };
        let bytes = match crate::object::read_bounded(path, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(absent) if absent.kind() == io::ErrorKind::NotFound && !must_exist => return Ok(()),
            Err(source) => return Err(error(source.to_string())),
        };
        let text = String::from_utf8(bytes).map_err(|_| error("it is not UTF-8".to_owned()))?;
        self.add_text(&text, path).map_err(error)
    }

    fn add_text(&mut self, text: &str, path: &Path) -> Result<(), String> {
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        for raw in file.registry {
            let prefix = match (raw.prefix.filter(|prefix| !prefix.is_empty()), &raw.location) {
                (Some(prefix), _) => prefix,
                (None, Some(location)) if !location.is_empty() => location.clone(),
                _ => return Err("a [[registry]] has neither prefix nor location".to_owned()),
            };
            let mirrors = raw.mirror.into_iter().map(|mirror| {
                let from = mirror.pull_from_mirror.unwrap_or(match raw.mirror_by_digest_only {
                    true => PullFrom::DigestOnly,
                    false => PullFrom::All,
                });
                Mirror {
                    location: mirror.location,
                    insecure: mirror.insecure,
                    tags: matches!(from, PullFrom::All | PullFrom::TagOnly),
                    digests: matches!(from, PullFrom::All | PullFrom::DigestOnly),
                }
            });
            let table = Table {
                location: raw.location.filter(|location| !location.is_empty()),
                blocked: raw.blocked,
                insecure: raw.insecure,
                mirrors: mirrors.collect(),
                file: path.to_owned(),
                prefix,
            };
            self.tables.retain(|other| other.prefix != table.prefix);
            self.tables.push(table);
        }
        Ok(())
    }

    /// Whether plain HTTP is allowed there.
    pub(crate) fn is_insecure(&self, host: &str, repository: &str) -> bool {
        self.find(&format!("{host}/{repository}")).is_some_and(|(table, _)| table.insecure)
    }

    /// Where to pull from, one after the other, by tag or by digest. The file that blocks it,
    /// if one does.
    ///
    /// # Errors
    /// The file that blocks it.
    pub fn places(
        &self,
        host: &str,
        repository: &str,
        by_digest: bool,
    ) -> Result<Vec<Place>, PathBuf> {
        let name = format!("{host}/{repository}");
        let Some((table, matched)) = self.find(&name) else {
            return Ok(vec![Place::new(host, repository, false)]);
        };
        if table.blocked {
            return Err(table.file.clone());
        }
        let at = |location: &str, insecure| {
            let whole = format!("{location}{}", &name[matched..]);
            let (host, repository) = whole.split_once('/')?;
            Some(Place::new(host, repository, insecure))
        };
        let wanted = |mirror: &&Mirror| if by_digest { mirror.digests } else { mirror.tags };
        let mut places: Vec<Place> = table
            .mirrors
            .iter()
            .filter(wanted)
            .filter_map(|mirror| at(&mirror.location, mirror.insecure))
            .collect();
        let own = table.location.as_deref().and_then(|location| at(location, table.insecure));
        places.push(own.unwrap_or_else(|| Place::new(host, repository, table.insecure)));
        Ok(places)
    }

    /// The table that decides, and how much of the name its prefix is.
    fn find(&self, name: &str) -> Option<(&Table, usize)> {
        self.tables
            .iter()
            .filter_map(|table| Some((table, matched(&table.prefix, name)?)))
            .max_by_key(|(table, _)| table.prefix.len())
    }
}

/// For `fuzz`.
pub(crate) fn fuzz(text: &str, host: &str, repository: &str) {
    let mut registries = Registries::default();
    if registries.add_text(text, Path::new("")).is_ok() {
        registries.is_insecure(host, repository);
        for by_digest in [false, true] {
            let places = registries.places(host, repository, by_digest);
            assert!(places.is_err() || places.is_ok_and(|places| !places.is_empty()));
        }
    }
}

/// How much of `name` (`host/repository`) the prefix covers, if it fits.
fn matched(prefix: &str, name: &str) -> Option<usize> {
    if let Some(domain) = prefix.strip_prefix('*') {
        let host = name.split('/').next().unwrap_or(name);
        return (domain.starts_with('.') && host.ends_with(domain)).then_some(host.len());
    }
    let rest = name.strip_prefix(prefix)?;
    (rest.is_empty() || rest.starts_with('/')).then_some(prefix.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registries(text: &str) -> Registries {
        let mut registries = Registries::default();
        registries.add_text(text, Path::new("test.conf")).unwrap();
        registries
    }

    #[test]
    fn the_longest_prefix_decides_and_mirrors_come_first() {
        let registries = registries(
            r#"
            unqualified-search-registries = ["x.example"]
            short-name-mode = "permissive"
            [[registry]]
            location = "reg.example"
            [[registry.mirror]]
            location = "near.example:5000/cache"
            insecure = true
            [[registry.mirror]]
            location = "pinned.example"
            pull-from-mirror = "digest-only"
            [[registry]]
            prefix = "reg.example/team"
            location = "moved.example/old-team"
            [[registry]]
            prefix = "*.bad.example"
            blocked = true
            [[registry]]
            location = "open.example:80"
            insecure = true
            "#,
        );
        let places = |host: &str, repository: &str, by_digest| -> Vec<String> {
            let show = |place: Place| {
                let mark = if place.insecure { "!" } else { "" };
                format!("{}/{}{mark}", place.host, place.repository)
            };
            registries.places(host, repository, by_digest).unwrap().into_iter().map(show).collect()
        };
        assert_eq!(
            places("reg.example", "py", false),
            ["near.example:5000/cache/py!", "reg.example/py"]
        );
        assert_eq!(places("reg.example", "py", true)[1], "pinned.example/py");
        assert_eq!(places("reg.example", "team/py", false), ["moved.example/old-team/py"]);
        assert_eq!(places("reg.example", "teams/py", true).len(), 3);
        assert_eq!(places("reg.example.org", "py", false), ["reg.example.org/py"]);
        assert_eq!(places("open.example:80", "x", false), ["open.example:80/x!"]);
        assert!(registries.is_insecure("open.example:80", "x"));
        assert!(!registries.is_insecure("open.example", "x"));
        assert_eq!(registries.places("a.bad.example", "x", false), Err("test.conf".into()));
        assert_eq!(places("bad.example", "x", false), ["bad.example/x"]);
    }

    #[test]
    fn files_follow_one_another_and_faults_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let (system, user) = (directory.path().join("etc"), directory.path().join("home"));
        let write = |path: PathBuf, text: &str| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let table =
            |location: &str| format!("[[registry]]\nprefix='r.example'\nlocation='{location}'\n");
        let first = || {
            let registries = Registries::from_directories(&system, Some(&user)).unwrap();
            registries.places("r.example", "x", false).unwrap()[0].host.clone()
        };
        assert_eq!(first(), "r.example");
        write(system.join("registries.conf"), &table("etc.example"));
        assert_eq!(first(), "etc.example");
        write(user.join("registries.conf"), &table("home.example"));
        assert_eq!(first(), "home.example");
        write(system.join("registries.conf.d/50-x.conf"), &table("drop.example"));
        assert_eq!(first(), "drop.example");
        write(user.join("registries.conf.d/10-x.conf"), &table("late.example"));
        write(user.join("registries.conf.d/readme"), "not TOML");
        assert_eq!(first(), "late.example");
        for bad in ["[[registry]]\nblocked = true", "[[registry", "[[registry]]\nlocation = 1"] {
            write(user.join("registries.conf.d/99.conf"), bad);
            let error = Registries::from_directories(&system, Some(&user)).unwrap_err();
            assert!(error.to_string().contains("99.conf"), "{error}");
        }
        assert!(Registries::from_environment(Some(&directory.path().join("none"))).is_err());
    }
}
