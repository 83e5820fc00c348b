//! Who we are to a registry: the files and helpers that other tools keep credentials in.
//!
//! Files are asked in this order, and the first that knows the registry decides
//! (containers-auth.json(5), then Docker's own):
//! 1. the file given explicitly, else `REGISTRY_AUTH_FILE`: then no other is asked;
//! 2. `$XDG_RUNTIME_DIR/containers/auth.json`;
//! 3. `$XDG_CONFIG_HOME/containers/auth.json` (`~/.config`);
//! 4. `$DOCKER_CONFIG/config.json` (`~/.docker`);
//! 5. `~/.dockercfg`.
//!
//! Within a file: a helper for the host (`credHelpers`), then the entry that fits best
//! (`host/team/py`, `host/team`, `host`), then the helper for everything (`credsStore`).
//! Nothing of a credential is ever printed.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// More than any such file or answer has.
const MAX_BYTES: u64 = 1024 * 1024;
/// A helper names its user so when the secret is an identity token.
const TOKEN_USER: &str = "<token>";

/// What a registry is shown.
#[derive(Clone, PartialEq, Eq)]
pub enum Credential {
    /// A user and a password (or access token used as one).
    Basic {
        /// The user.
        user: String,
        /// The password.
        password: String,
    },
    /// A token that is exchanged for access tokens.
    Identity(String),
}

/// Where credentials are looked for.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    files: Vec<PathBuf>,
    /// The one file was named by the user: it must be there.
    explicit: bool,
    fixed: Option<Credential>,
}

/// Credentials could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// A file cannot be read or written.
    #[error("cannot use the credentials in {path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file's entry makes no sense.
    #[error("the entry for {entry} in {path} is malformed; log in again", path = path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// Which entry.
        entry: String,
    },
    /// A helper failed.
    #[error("the credential helper {helper} failed: {what}")]
    Helper {
        /// The program.
        helper: String,
        /// What went wrong; what it printed is not repeated.
        what: String,
    },
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Basic { user, .. } => write!(f, "Basic({user:?}, …)"),
            Self::Identity(_) => f.write_str("Identity(…)"),
        }
    }
}

impl Credentials {
    /// Nobody in particular.
    #[must_use]
    pub fn anonymous() -> Self {
        Self::default()
    }

    /// The same for every registry.
    #[must_use]
    pub fn fixed(credential: Credential) -> Self {
        Self { fixed: Some(credential), ..Self::default() }
    }

    /// What this user's environment offers. `explicit` is `--authfile`.
    #[must_use]
    pub fn from_environment(explicit: Option<&Path>) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let path = |name| variable(name).map(PathBuf::from);
        if let Some(only) = explicit {
            return Self { files: vec![only.to_owned()], explicit: true, fixed: None };
        }
        if let Some(only) = path("REGISTRY_AUTH_FILE") {
            return Self::from_files(vec![only]);
        }
        let home = path("HOME");
        let in_home = |inside: &str| home.as_ref().map(|home| home.join(inside));
        let files = [
            path("XDG_RUNTIME_DIR").map(|directory| directory.join("containers/auth.json")),
            path("XDG_CONFIG_HOME")
                .or_else(|| in_home(".config"))
                .map(|directory| directory.join("containers/auth.json")),
            path("DOCKER_CONFIG")
                .or_else(|| in_home(".docker"))
                .map(|directory| directory.join("config.json")),
            in_home(".dockercfg"),
        ];
        Self::from_files(files.into_iter().flatten().collect())
    }

    /// Looks in these files only, in this order.
    #[must_use]
    pub fn from_files(files: Vec<PathBuf>) -> Self {
        Self { files, ..Self::default() }
    }

    /// Finds the credential for a repository (`host[:port]`, `team/py`).
    ///
    /// # Errors
    /// When a file or helper that should have it fails: rather that than asking as nobody.
    pub fn lookup(
        &self,
        host: &str,
        repository: &str,
    ) -> Result<Option<Credential>, CredentialError> {
        if self.fixed.is_some() {
            return Ok(self.fixed.clone());
        }
        for path in &self.files {
            let Some(content) = read(path)? else {
                if self.explicit && !path.exists() {
                    let source = io::ErrorKind::NotFound.into();
                    return Err(CredentialError::File { path: path.clone(), source });
                }
                continue;
            };
            let found = lookup_in(path, &content, host, repository)?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Where `login` keeps its credentials: the explicit file, or this session's.
    #[must_use]
    pub fn login_file(&self) -> Option<&Path> {
        self.files.first().map(PathBuf::as_path)
    }

    /// Keeps a credential for a host, readable by this user only.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn login(&self, host: &str, credential: &Credential) -> Result<(), CredentialError> {
        let entry = match credential {
            Credential::Basic { user, password } => {
                serde_json::json!({ "auth": STANDARD.encode(format!("{user}:{password}")) })
            }
            Credential::Identity(token) => serde_json::json!({ "identitytoken": token }),
        };
        self.change(|auths| {
            auths.insert(host.to_owned(), entry);
            true
        })
        .map(drop)
    }

    /// Forgets a host's credential; `false` when there was none.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn logout(&self, host: &str) -> Result<bool, CredentialError> {
        self.change(|auths| auths.remove(host).is_some())
    }

    fn change(
        &self,
        change: impl FnOnce(&mut serde_json::Map<String, Value>) -> bool,
    ) -> Result<bool, CredentialError> {
        let Some(path) = self.login_file() else { return Ok(false) };
        let error = |source| CredentialError::File { path: path.to_owned(), source };
        let mut content = read(path)?.unwrap_or_else(|| serde_json::json!({}));
        let auths = content
            .as_object_mut()
            .map(|fields| fields.entry("auths").or_insert_with(|| serde_json::json!({})))
            .and_then(Value::as_object_mut)
            .ok_or_else(|| error(io::Error::other("it is not an object with auths")))?;
        if !change(auths) {
            return Ok(false);
        }
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(error)?;
        }
        let temporary = path.with_extension(crate::live::random_id());
        let write = || -> io::Result<()> {
            use std::os::unix::fs::OpenOptionsExt as _;
            let mut file = std::fs::File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(&serde_json::to_vec_pretty(&content)?)?;
            file.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(|source| {
            let _ = std::fs::remove_file(&temporary);
            error(source)
        })?;
        Ok(true)
    }
}

fn read(path: &Path) -> Result<Option<Value>, CredentialError> {
    let error = |source| CredentialError::File { path: path.to_owned(), source };
    let bytes = match crate::object::read_bounded(path, MAX_BYTES) {
        Ok(bytes) => bytes,
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(error(source)),
    };
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    // The decoder's own message might quote a secret.
    let malformed = |_| error(io::Error::new(io::ErrorKind::InvalidData, "it is not JSON"));
    serde_json::from_slice(&bytes).map(Some).map_err(malformed)
}

fn lookup_in(
    path: &Path,
    content: &Value,
    host: &str,
    repository: &str,
) -> Result<Option<Credential>, CredentialError> {
    // One registry goes by a name of its own in these files.
    let hosts: &[&str] = match host {
        "docker.io" => &["docker.io", "index.docker.io"],
        host => &[host],
    };
    for host in hosts {
        if let Some(helper) = content["credHelpers"][host].as_str() {
            return ask_helper(helper, host);
        }
    }
    // `.dockercfg` has its entries at the top.
    let auths = content.get("auths").unwrap_or(content);
    let entries: BTreeMap<&str, (&str, &Value)> = auths
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, value)| (plain(key), (key.as_str(), value)))
        .collect();
    for key in hosts.iter().flat_map(|host| keys(host, repository)) {
        let Some((entry, value)) = entries.get(key.as_str()) else { continue };
        if let Some(found) = decode(value).map_err(|()| CredentialError::Entry {
            path: path.to_owned(),
            entry: (*entry).to_owned(),
        })? {
            return Ok(Some(found));
        }
    }
    match content["credsStore"].as_str() {
        Some(helper) if !helper.is_empty() => ask_helper(helper, host),
        _ => Ok(None),
    }
}

/// What an entry may be called, the most specific first.
fn keys(host: &str, repository: &str) -> Vec<String> {
    let full = format!("{host}/{repository}");
    let mut keys = vec![full.clone()];
    let mut rest = full.as_str();
    while let Some((shorter, _)) = rest.rsplit_once('/') {
        keys.push(shorter.to_owned());
        rest = shorter;
    }
    keys
}

/// An entry's key without the scheme and API path that old tools wrote.
fn plain(key: &str) -> &str {
    let without = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
    match without {
        Some(rest) => rest.split_once("/v").map_or(rest, |(host, _)| host).trim_end_matches('/'),
        None => key,
    }
}

fn decode(entry: &Value) -> Result<Option<Credential>, ()> {
    let text = |field: &str| entry[field].as_str().filter(|text| !text.is_empty());
    if let Some(token) = text("identitytoken") {
        return Ok(Some(Credential::Identity(token.to_owned())));
    }
    if let Some(auth) = text("auth") {
        let bytes = STANDARD.decode(auth).map_err(drop)?;
        let pair = String::from_utf8(bytes).map_err(drop)?;
        let (user, password) = pair.split_once(':').ok_or(())?;
        let password = password.trim_end_matches('\0').to_owned();
        return Ok(Some(Credential::Basic { user: user.to_owned(), password }));
    }
    match (text("username"), text("password")) {
        (Some(user), Some(password)) => {
            Ok(Some(Credential::Basic { user: user.to_owned(), password: password.to_owned() }))
        }
        _ => Ok(None),
    }
}

fn ask_helper(helper: &str, host: &str) -> Result<Option<Credential>, CredentialError> {
    let program = format!("docker-credential-{helper}");
    let failed = |what: String| CredentialError::Helper { helper: program.clone(), what };
    let named =
        helper.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if helper.is_empty() || !named {
        return Err(failed("its name is not one".to_owned()));
    }
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    // One that ends without reading is told apart by its status.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(host.as_bytes()));
    let mut output = Vec::new();
    let read = child.stdout.take().map(|out| out.take(MAX_BYTES).read_to_end(&mut output));
    read.transpose().map_err(|error| failed(error.to_string()))?;
    let status = child.wait().map_err(|error| failed(error.to_string()))?;
    if !status.success() {
        // The protocol's way of saying so.
        if String::from_utf8_lossy(&output).contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(status.to_string()));
    }
    answered(&output).ok_or_else(|| failed("its answer is not JSON".to_owned()))
}

/// What a helper said; the outer nothing when it is no answer.
fn answered(output: &[u8]) -> Option<Option<Credential>> {
    let answer: Value = serde_json::from_slice(output).ok()?;
    Some(match (answer["Username"].as_str(), answer["Secret"].as_str()) {
        (_, None | Some("")) => None,
        (Some(TOKEN_USER), Some(secret)) => Some(Credential::Identity(secret.to_owned())),
        (user, Some(secret)) => Some(Credential::Basic {
            user: user.unwrap_or_default().to_owned(),
            password: secret.to_owned(),
        }),
    })
}

/// For `fuzz`.
pub(crate) fn fuzz(content: &[u8], host: &str, repository: &str) {
    let _ = answered(content);
    let Ok(mut content) = serde_json::from_slice::<Value>(content) else { return };
    // No helper is run.
    if let Some(fields) = content.as_object_mut() {
        fields.remove("credHelpers");
        fields.remove("credsStore");
    }
    let _ = lookup_in(Path::new(""), &content, host, repository);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basic(user: &str, password: &str) -> Option<Credential> {
        Some(Credential::Basic { user: user.to_owned(), password: password.to_owned() })
    }

    #[test]
    fn the_most_specific_entry_of_the_first_file_that_knows_decides() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let auth = |pair: &str| STANDARD.encode(pair);
        let first = write(
            "auth.json",
            &format!(
                r#"{{"auths":{{"reg.example:5000":{{"auth":"{}"}},"reg.example:5000/team":{{"auth":"{}"}},
                    "empty.example":{{}},"id.example":{{"identitytoken":"t","auth":""}}}}}}"#,
                auth("all:a:b"),
                auth("team:t")
            ),
        );
        let second = write(
            "config.json",
            &format!(
                r#"{{"auths":{{"https://index.example/v1/":{{"auth":"{}"}},"reg.example:5000":{{"auth":"{}"}},
                    "https://index.docker.io/v1/":{{"auth":"{}"}},"bad.example":{{"auth":"%%%"}}}}}}"#,
                auth("old:o"),
                auth("late:l"),
                auth("hub:h")
            ),
        );
        let third =
            write(".dockercfg", &format!(r#"{{"empty.example":{{"auth":"{}"}}}}"#, auth("e:e")));
        let missing = directory.path().join("missing.json");
        let credentials = Credentials::from_files(vec![missing, first, second, third]);
        let found = |host: &str, repository: &str| credentials.lookup(host, repository).unwrap();
        assert_eq!(found("reg.example:5000", "team/py"), basic("team", "t"));
        assert_eq!(found("reg.example:5000", "teamster/py"), basic("all", "a:b"));
        assert_eq!(found("index.example", "x"), basic("old", "o"));
        assert_eq!(found("empty.example", "x"), basic("e", "e"));
        assert_eq!(found("id.example", "x"), Some(Credential::Identity("t".to_owned())));
        assert_eq!(found("reg.example", "x"), None);
        assert_eq!(found("docker.io", "library/x"), basic("hub", "h"));
        let error = credentials.lookup("bad.example", "x").unwrap_err();
        assert!(!error.to_string().contains("%%%"), "{error}");
        assert_eq!(format!("{:?}", basic("u", "secret")), "Some(Basic(\"u\", …))");
    }

    #[test]
    fn login_and_logout_change_their_entry_only() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("containers/auth.json");
        let credentials = Credentials::from_files(vec![path.clone()]);
        assert!(!credentials.logout("reg.example").unwrap());
        credentials.login("reg.example", &basic("u", "p").unwrap()).unwrap();
        credentials.login("other.example", &Credential::Identity("t".to_owned())).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(credentials.lookup("reg.example", "x").unwrap(), basic("u", "p"));
        assert!(credentials.logout("reg.example").unwrap());
        assert_eq!(credentials.lookup("reg.example", "x").unwrap(), None);
        assert!(credentials.lookup("other.example", "x").unwrap().is_some());
        std::fs::write(&path, "secret, not JSON").unwrap();
        let error = credentials.lookup("other.example", "x").unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn helpers_that_cannot_be_run_are_an_error_not_anonymity() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        for helper in ["no-such-helper-here", "../evil", ""] {
            std::fs::write(&path, format!(r#"{{"credHelpers":{{"reg.example":"{helper}"}}}}"#))
                .unwrap();
            let credentials = Credentials::from_files(vec![path.clone()]);
            assert!(credentials.lookup("reg.example", "x").is_err(), "{helper}");
            assert_eq!(credentials.lookup("other.example", "x").unwrap(), None);
        }
    }
}
