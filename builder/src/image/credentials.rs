//! Who we are to a registry: the files that `docker login`, `podman login` and their helpers keep.
//!
//! The first file that knows the registry decides: the one given, `$REGISTRY_AUTH_FILE`,
//! `$XDG_RUNTIME_DIR/containers/auth.json`, `$XDG_CONFIG_HOME/containers/auth.json` (or
//! `~/.config`), `$DOCKER_CONFIG/config.json` (or `~/.docker`). Within a file, a helper of the
//! registry's own (`credHelpers`) comes before stored credentials, the most specific of those
//! before the host's, and the general helper (`credsStore`) last.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::layer::tar::pax::base64;

/// Largest file of credentials read, in bytes; and largest answer of a helper.
const FILE_MAX: u64 = 1 << 20;

/// A user name and what proves it. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    pub user: String,
    pub secret: String,
}

/// Why credentials could not be read. Says nothing of their contents.
#[derive(Debug, thiserror::Error)]
pub(super) enum CredentialError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path} is not a file of registry credentials")]
    Format { path: PathBuf },
    #[error("the credentials for {registry} in {path} are not base64 of user:password")]
    Entry { registry: String, path: PathBuf },
    #[error(
        "{path} holds an identity token for {registry}, which is not supported; log in with a user name and an access token"
    )]
    IdentityToken { registry: String, path: PathBuf },
    #[error("the credential helper {helper} failed: {problem}")]
    Helper { helper: String, problem: String },
}

#[derive(Default, Deserialize)]
struct AuthFile {
    #[serde(default)]
    auths: Option<BTreeMap<String, AuthEntry>>,
    #[serde(default, rename = "credHelpers")]
    helpers: Option<BTreeMap<String, String>>,
    #[serde(default, rename = "credsStore")]
    store: Option<String>,
}

#[derive(Default, Deserialize)]
struct AuthEntry {
    #[serde(default)]
    auth: Option<String>,
    #[serde(default)]
    username: Option<String>,
    #[serde(default)]
    password: Option<String>,
    #[serde(default, rename = "identitytoken")]
    identity_token: Option<String>,
}

#[derive(Deserialize)]
struct HelperAnswer {
    #[serde(rename = "Username")]
    user: String,
    #[serde(rename = "Secret")]
    secret: String,
}

/// Finds credentials for `repository` of the registry that goes by any of `hosts`; none is normal.
pub(super) fn find(
    explicit: Option<&Path>,
    hosts: &[&str],
    repository: &str,
) -> Result<Option<Credentials>, CredentialError> {
    let variable =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    find_in(&files(explicit, &variable), explicit.is_some(), hosts, repository)
}

/// The files to look in, in order.
fn files(
    explicit: Option<&Path>,
    variable: &dyn Fn(&'static str) -> Option<PathBuf>,
) -> Vec<PathBuf> {
    if let Some(explicit) = explicit {
        return vec![explicit.to_owned()];
    }
    let home = variable("HOME");
    let below_home = |path: &str| home.as_ref().map(|home| home.join(path));
    [
        variable("REGISTRY_AUTH_FILE"),
        variable("XDG_RUNTIME_DIR").map(|directory| directory.join("containers/auth.json")),
        variable("XDG_CONFIG_HOME")
            .or_else(|| below_home(".config"))
            .map(|directory| directory.join("containers/auth.json")),
        variable("DOCKER_CONFIG")
            .or_else(|| below_home(".docker"))
            .map(|directory| directory.join("config.json")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn find_in(
    files: &[PathBuf],
    must_exist: bool,
    hosts: &[&str],
    repository: &str,
) -> Result<Option<Credentials>, CredentialError> {
    for path in files {
        let mut text = Vec::new();
        let read =
            std::fs::File::open(path).and_then(|file| file.take(FILE_MAX).read_to_end(&mut text));
        match read {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => continue,
            Err(source) => return Err(CredentialError::Read { path: path.clone(), source }),
        }
        let file: AuthFile = serde_json::from_slice(&text)
            .map_err(|_| CredentialError::Format { path: path.clone() })?;
        if let Some(found) = in_file(&file, path, hosts, repository)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn in_file(
    file: &AuthFile,
    path: &Path,
    hosts: &[&str],
    repository: &str,
) -> Result<Option<Credentials>, CredentialError> {
    let helpers = file.helpers.iter().flatten();
    for (host, helper) in helpers {
        if hosts.contains(&normal(host)) {
            return ask(helper, host);
        }
    }
    for wanted in scopes(hosts, repository) {
        let auths = file.auths.iter().flatten();
        for (key, entry) in auths.filter(|(key, _)| normal(key) == wanted) {
            if let Some(credentials) = stored(entry, key, path)? {
                return Ok(Some(credentials));
            }
        }
    }
    match &file.store {
        Some(store) if !store.is_empty() => {
            // A store knows registries under the names they were logged in by.
            let known = file.auths.iter().flatten().map(|(key, _)| key.as_str());
            let mut names: Vec<&str> = known.filter(|key| hosts.contains(&normal(key))).collect();
            names.extend(hosts);
            for name in names {
                if let Some(found) = ask(store, name)? {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// `host/a/b`, `host/a`, `host` for each host: the names under which credentials may be kept.
fn scopes(hosts: &[&str], repository: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut scope = repository;
    while !scope.is_empty() {
        out.extend(hosts.iter().map(|host| format!("{host}/{scope}")));
        scope = scope.rsplit_once('/').map_or("", |(parent, _)| parent);
    }
    out.extend(hosts.iter().map(|&host| host.to_owned()));
    out
}

/// A key as `docker login` may have written it, without scheme and API version.
fn normal(key: &str) -> &str {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let key = key.trim_end_matches('/');
    key.strip_suffix("/v1").or_else(|| key.strip_suffix("/v2")).unwrap_or(key)
}

fn stored(
    entry: &AuthEntry,
    registry: &str,
    path: &Path,
) -> Result<Option<Credentials>, CredentialError> {
    let bad = || CredentialError::Entry { registry: registry.to_owned(), path: path.to_owned() };
    if entry.identity_token.as_ref().is_some_and(|token| !token.is_empty()) {
        return Err(CredentialError::IdentityToken {
            registry: registry.to_owned(),
            path: path.to_owned(),
        });
    }
    if let Some(auth) = entry.auth.as_ref().filter(|auth| !auth.is_empty()) {
        let text = base64(auth.trim().as_bytes()).and_then(|bytes| String::from_utf8(bytes).ok());
        let text = text.ok_or_else(bad)?;
        let (user, secret) = text.split_once(':').ok_or_else(bad)?;
        let secret = secret.trim_end_matches('\0').to_owned();
        return Ok(Some(Credentials { user: user.to_owned(), secret }));
    }
    match (&entry.username, &entry.password) {
        (Some(user), Some(secret)) if !user.is_empty() => {
            Ok(Some(Credentials { user: user.clone(), secret: secret.clone() }))
        }
        _ => Ok(None),
    }
}

/// Asks `docker-credential-<helper>` by its protocol: the registry on its input, JSON back.
fn ask(helper: &str, registry: &str) -> Result<Option<Credentials>, CredentialError> {
    let program = format!("docker-credential-{helper}");
    let failed = |problem: String| CredentialError::Helper { helper: program.clone(), problem };
    // A helper is found in the path; a file of credentials does not get to name a program elsewhere.
    if helper.contains('/') {
        return Err(failed("its name contains a slash".to_owned()));
    }
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    if let Some(mut input) = child.stdin.take() {
        // A helper that does not read its input will say so by failing.
        let _ = input.write_all(registry.as_bytes());
    }
    let mut answer = Vec::new();
    if let Some(output) = child.stdout.take() {
        output
            .take(FILE_MAX)
            .read_to_end(&mut answer)
            .map_err(|error| failed(error.to_string()))?;
    }
    let status = child.wait().map_err(|error| failed(error.to_string()))?;
    if !status.success() {
        let text = String::from_utf8_lossy(&answer);
        if text.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(format!("{status}")));
    }
    let answer: HelperAnswer = serde_json::from_slice(&answer)
        .map_err(|_| failed("its answer is not what the protocol says".to_owned()))?;
    if answer.user == "<token>" {
        return Err(failed("it gave an identity token, which is not supported".to_owned()));
    }
    Ok(Some(Credentials { user: answer.user, secret: answer.secret }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, hosts: &[&str], repository: &str) -> Option<(String, String)> {
        let file: AuthFile = serde_json::from_str(text).unwrap();
        in_file(&file, Path::new("auth.json"), hosts, repository)
            .unwrap()
            .map(|found| (found.user, found.secret))
    }

    #[test]
    fn the_most_specific_entry_wins() {
        // user:secret, team:deep
        let text = r#"{"auths":{"localhost:5000":{"auth":"dXNlcjpzZWNyZXQ="},
            "localhost:5000/a/b":{"auth":"dGVhbTpkZWVw"},
            "https://other.test/v1/":{"username":"u","password":"p"},"empty.test":{}}}"#;
        let pair = |a: &str, b: &str| Some((a.to_owned(), b.to_owned()));
        assert_eq!(found(text, &["localhost:5000"], "a/c"), pair("user", "secret"));
        assert_eq!(found(text, &["localhost:5000"], "a/b/c"), pair("team", "deep"));
        assert_eq!(found(text, &["alias.test", "other.test"], "x"), pair("u", "p"));
        assert_eq!(found(text, &["empty.test"], "x"), None);
        assert_eq!(found(text, &["localhost"], "a/b"), None);
        assert_eq!(found("{}", &["localhost"], "a"), None);
    }

    #[test]
    fn what_cannot_be_used_is_an_error_without_the_secret() {
        for text in [
            r#"{"auths":{"h":{"auth":"c2VjcmV0"}}}"#,
            r#"{"auths":{"h":{"auth":"!!secret"}}}"#,
            r#"{"auths":{"h":{"identitytoken":"secret"}}}"#,
            r#"{"credHelpers":{"h":"../secret"}}"#,
            r#"{"credHelpers":{"h":"no-such-helper-exists"}}"#,
        ] {
            let file: AuthFile = serde_json::from_str(text).unwrap();
            let error = match in_file(&file, Path::new("auth.json"), &["h"], "r") {
                Err(error) => error.to_string(),
                Ok(_) => panic!("{text}"),
            };
            assert!(!error.contains("c2VjcmV0") && !error.contains("secret\""), "{error}");
        }
    }

    #[test]
    fn files_are_read_in_order() {
        let variables = |name: &str| match name {
            "HOME" => Some(PathBuf::from("/home/u")),
            "XDG_RUNTIME_DIR" => Some(PathBuf::from("/run/user/1")),
            _ => None,
        };
        assert_eq!(
            files(None, &variables),
            [
                "/run/user/1/containers/auth.json",
                "/home/u/.config/containers/auth.json",
                "/home/u/.docker/config.json"
            ]
            .map(PathBuf::from)
        );
        assert_eq!(files(Some(Path::new("x")), &variables), [PathBuf::from("x")]);
        let directory = tempfile::tempdir().unwrap();
        let (one, two) = (directory.path().join("1"), directory.path().join("2"));
        std::fs::write(&two, r#"{"auths":{"h":{"auth":"dXNlcjpzZWNyZXQ="}}}"#).unwrap();
        let credentials = find_in(&[one.clone(), two], false, &["h"], "r").unwrap().unwrap();
        assert_eq!(credentials.user, "user");
        assert!(find_in(&[one], true, &["h"], "r").is_err());
    }
}
