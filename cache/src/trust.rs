//! What must be known of a template before anything large of it is taken in.
//!
//! Two things are asked: what the user demands for this one command, by naming keys or identities, and what the
//! policy says. Both are about the digest that everything of a template hangs from, and both are
//! answered from what is attached to it, before its packs are fetched.
//!
//! # The policy
//! A TOML file. The first rule whose pattern fits the name decides, whatever stands below it:
//! ```toml
//! version = 1
//! otherwise = "accept"                  # or "refuse": names that no rule fits
//!
//! [[rule]]
//! match = "reg.example/team/**"         # host/repository[:tag]; * within a part, ** over parts
//! require = "signature"                 # by one of these keys, or one of these identities
//! keys = ["team.pub"]                   # PEM files, relative to this one
//! identities = [{ identity = "a@team.example", issuer = "https://accounts.example" }]
//! trusted_root = "trusted_root.json"    # with identities: whose certificates and logs count
//!
//! [[rule]]
//! match = "docker.io/**"
//! require = "digest"                    # the user must pin one (NAME@sha256:…), or it is one of:
//! digests = ["sha256:…"]
//! ```
//! `require` may also be `signature-or-digest`, `nothing` and `refuse`. What is not understood in
//! the file is an error, and then nothing is taken in.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::Digest;
use crate::artifact::Descriptor;
use crate::bundle::{self, BUNDLE_TYPE, BundleError, SIGNATURE_PREDICATE, Signatory, Signers};
use crate::keyless::{Identity, RootError, TrustedRoot};
use crate::keys::{KeyError, PublicKey};
use crate::name::TemplateName;
use crate::referrers::{ReferrerSource, attached_bytes};

/// More than any policy has.
const MAX_POLICY_BYTES: u64 = 1024 * 1024;
/// More bundles of one template are not looked at.
const MAX_BUNDLES: usize = 64;
/// What a bundle's annotation says about its statement; a hint.
pub const PREDICATE_ANNOTATION: &str = "dev.sigstore.bundle.predicateType";
/// What a bundle's annotation says about its content.
pub const CONTENT_ANNOTATION: &str = "dev.sigstore.bundle.content";

/// What is demanded.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// If any: one of these must have signed it, whatever the policy says.
    pub signers: Signers,
    /// The policy, if there is one.
    pub policy: Option<Policy>,
}

/// A policy that was read.
#[derive(Debug, Clone)]
pub struct Policy {
    file: PathBuf,
    rules: Vec<Rule>,
    refuse_others: bool,
}

#[derive(Debug, Clone)]
struct Rule {
    pattern: String,
    require: Requirement,
    signers: Signers,
    digests: Vec<Digest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Requirement {
    Signature,
    Digest,
    SignatureOrDigest,
    Nothing,
    Refuse,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    #[serde(default)]
    otherwise: Otherwise,
    #[serde(default)]
    rule: Vec<RawRule>,
}

#[derive(Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Otherwise {
    #[default]
    Accept,
    Refuse,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    #[serde(rename = "match")]
    pattern: String,
    require: Requirement,
    #[serde(default)]
    keys: Vec<PathBuf>,
    #[serde(default)]
    identities: Vec<RawIdentity>,
    #[serde(default)]
    trusted_root: Option<PathBuf>,
    #[serde(default)]
    digests: Vec<Digest>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawIdentity {
    identity: String,
    issuer: String,
}

/// Who demanded what was not met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Demand {
    /// The keys and identities of this command.
    Keys,
    /// A rule of a policy.
    Rule {
        /// Which, counted from 1.
        number: usize,
        /// Its pattern.
        pattern: String,
        /// The policy's file.
        file: PathBuf,
    },
    /// What a policy says about names that no rule fits.
    Otherwise {
        /// The policy's file.
        file: PathBuf,
    },
}

/// A template that is not taken in, or a policy that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// The policy cannot be read.
    #[error("cannot use the policy {}: {what}; nothing is taken in until it can", path.display())]
    Policy {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A key cannot be read.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A trusted root cannot be read.
    #[error(transparent)]
    Root(#[from] RootError),
    /// What is attached cannot be asked for.
    #[error("cannot see what is attached to {name}: {source}")]
    Unreachable {
        /// The template.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// A demand is not met.
    #[error("{name} ({digest}) is refused by {demand}: {why}")]
    Refused {
        /// The template.
        name: String,
        /// What it stands for.
        digest: Digest,
        /// Who demanded it.
        demand: Box<Demand>,
        /// What is missing.
        why: String,
    },
}

/// A signature that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The manifest that attaches it.
    pub manifest: Digest,
    /// What it is: a plain signature, or the kind of statement.
    pub predicate_type: String,
    /// Who has made it.
    pub by: Signatory,
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keys => f.write_str("the keys or identities given for this command"),
            Self::Rule { number, pattern, file } => {
                write!(f, "rule {number} (match = {pattern:?}) of {}", file.display())
            }
            Self::Otherwise { file } => write!(f, "`otherwise` of {}", file.display()),
        }
    }
}

impl Policy {
    /// Where a policy is looked for: `explicit` (`--policy`), else `PARBAKE_POLICY`, else
    /// `parbake/policy.toml` in the user's configuration, else in `/etc`.
    ///
    /// # Errors
    /// When one is there and cannot be used, or the one named is not there.
    pub fn from_environment(explicit: Option<&Path>) -> Result<Option<Self>, TrustError> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let named =
            explicit.map(Path::to_owned).or_else(|| variable("PARBAKE_POLICY").map(PathBuf::from));
        if let Some(path) = named {
            return Self::read(&path).map(Some);
        }
        let user = variable("XDG_CONFIG_HOME")
            .map(PathBuf::from)
            .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".config")));
        let found = [user, Some(PathBuf::from("/etc"))]
            .into_iter()
            .flatten()
            .map(|directory| directory.join("parbake/policy.toml"))
            .find(|path| std::fs::symlink_metadata(path).is_ok());
        found.map(|path| Self::read(&path)).transpose()
    }

    /// Reads a policy and the keys it names.
    ///
    /// # Errors
    /// When anything in it is not understood.
    pub fn read(path: &Path) -> Result<Self, TrustError> {
        let error = |what: String| TrustError::Policy { path: path.to_owned(), what };
        let bytes = crate::object::read_bounded(path, MAX_POLICY_BYTES)
            .map_err(|source| error(source.to_string()))?;
        let text = String::from_utf8(bytes).map_err(|_| error("it is not UTF-8".to_owned()))?;
        let file: File = toml::from_str(&text).map_err(|source| error(source.to_string()))?;
        if file.version != 1 {
            return Err(error(format!("it has version {}, and 1 is known", file.version)));
        }
        let directory = path.parent().unwrap_or(Path::new("."));
        let mut rules = Vec::new();
        for (number, raw) in (1..).zip(file.rule) {
            let needs_keys =
                matches!(raw.require, Requirement::Signature | Requirement::SignatureOrDigest);
            if needs_keys == (raw.keys.is_empty() && raw.identities.is_empty()) {
                let word = match needs_keys {
                    true => "names no keys and no identities",
                    false => "names keys or identities it does not use",
                };
                return Err(error(format!("rule {number} {word}")));
            }
            if raw.identities.is_empty() != raw.trusted_root.is_none() {
                let what = "identities and trusted_root (sigstore's trusted_root.json) go together";
                return Err(error(format!("rule {number}: {what}")));
            }
            if raw.pattern.is_empty() {
                return Err(error(format!("rule {number} matches nothing")));
            }
            let mut keys = Vec::new();
            for key in &raw.keys {
                keys.push(
                    PublicKey::read(&directory.join(key))
                        .map_err(|source| error(format!("rule {number}: {source}")))?,
                );
            }
            let mut identities = Vec::new();
            if let Some(root) = &raw.trusted_root {
                let root = TrustedRoot::read(&directory.join(root))
                    .map_err(|source| error(format!("rule {number}: {source}")))?;
                let root = Arc::new(root);
                for RawIdentity { identity: subject, issuer } in raw.identities {
                    identities.push(Identity { subject, issuer, root: Arc::clone(&root) });
                }
            }
            rules.push(Rule {
                pattern: raw.pattern,
                require: raw.require,
                signers: Signers { keys, identities },
                digests: raw.digests,
            });
        }
        let refuse_others = file.otherwise == Otherwise::Refuse;
        Ok(Self { file: path.to_owned(), rules, refuse_others })
    }

    /// The policy's file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }
}

impl Trust {
    /// Checks that the template that `name` stands for may be taken in. `pinned` says that the user
    /// named its digest.
    ///
    /// # Errors
    /// [`TrustError::Refused`] when it may not.
    pub fn check(
        &self,
        name: &TemplateName,
        pinned: bool,
        root: &Descriptor,
        source: &dyn ReferrerSource,
    ) -> Result<(), TrustError> {
        let refused = |demand: Demand, why: String| TrustError::Refused {
            name: name.to_string(),
            digest: root.digest,
            demand: Box::new(demand),
            why,
        };
        if !self.signers.is_empty()
            && let Err(why) = signed(name, root, source, &self.signers)?
        {
            return Err(refused(Demand::Keys, why));
        }
        let Some(policy) = &self.policy else { return Ok(()) };
        let Some((number, rule)) = (1..).zip(&policy.rules).find(|(_, rule)| rule.fits(name))
        else {
            if policy.refuse_others {
                let demand = Demand::Otherwise { file: policy.file.clone() };
                return Err(refused(demand, "no rule fits its name".to_owned()));
            }
            return Ok(());
        };
        let pinned =
            if rule.digests.is_empty() { pinned } else { rule.digests.contains(&root.digest) };
        let not_pinned = || match rule.digests.len() {
            0 => format!("its digest must be named (e.g. {name}@{})", root.digest),
            count => format!("its digest is not one of the {count} that the rule names"),
        };
        let verdict = match rule.require {
            Requirement::Nothing => Ok(()),
            Requirement::Refuse => Err("the rule refuses all that it matches".to_owned()),
            Requirement::Digest if pinned => Ok(()),
            Requirement::Digest => Err(not_pinned()),
            Requirement::SignatureOrDigest if pinned => Ok(()),
            Requirement::SignatureOrDigest => signed(name, root, source, &rule.signers)?
                .map_err(|why| format!("{why}; and {}", not_pinned())),
            Requirement::Signature => signed(name, root, source, &rule.signers)?,
        };
        verdict.map_err(|why| {
            let (pattern, file) = (rule.pattern.clone(), policy.file.clone());
            refused(Demand::Rule { number, pattern, file }, why)
        })
    }
}

/// Whether one of `signers` has signed the template; if not, why.
fn signed(
    name: &TemplateName,
    root: &Descriptor,
    source: &dyn ReferrerSource,
    signers: &Signers,
) -> Result<Result<(), String>, TrustError> {
    let found = signatures(&name.to_string(), &root.digest, source, signers)?;
    if found.valid.iter().any(|signature| signature.predicate_type == SIGNATURE_PREDICATE) {
        return Ok(Ok(()));
    }
    let mut why = format!("it has no signature by {}", signers.labels());
    if found.looked_at == 0 {
        why += "; nothing that is signed is attached to it";
    } else if !found.refused.is_empty() {
        why += &format!("; {} looked at: {}", found.looked_at, found.refused.join("; "));
    }
    Ok(Err(why))
}

/// What was found attached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signatures {
    /// Those that one of the signers has made, about this very template.
    pub valid: Vec<Signature>,
    /// Why others do not count, once each.
    pub refused: Vec<String>,
    /// How many bundles there are.
    pub looked_at: usize,
}

/// Checks everything signed that is attached to `subject` against `signers`.
///
/// # Errors
/// When the source cannot be asked.
pub fn signatures(
    name: &str,
    subject: &Digest,
    source: &dyn ReferrerSource,
    signers: &Signers,
) -> Result<Signatures, TrustError> {
    let unreachable = |source| TrustError::Unreachable { name: name.to_owned(), source };
    let mut listed = source.referrers(subject).map_err(unreachable)?;
    // Tools that know no artifact types drop them when they copy a list.
    listed.retain(|entry| entry.artifact_type.as_deref().is_none_or(|kind| kind == BUNDLE_TYPE));
    // Plain signatures first: they are small, and there may be many others.
    listed.sort_by_key(|entry| {
        entry.annotations.get(PREDICATE_ANNOTATION).is_none_or(|kind| kind != SIGNATURE_PREDICATE)
    });
    let mut found = Signatures::default();
    for entry in listed.iter().take(MAX_BUNDLES) {
        found.looked_at += 1;
        let why = match attached_bytes(source, entry, subject) {
            Ok(bytes) => match bundle::verify(&bytes, subject, signers) {
                Ok(verified) => {
                    found.valid.push(Signature {
                        manifest: entry.digest,
                        predicate_type: verified.predicate_type,
                        by: verified.by,
                    });
                    continue;
                }
                Err(error @ (BundleError::OtherKey(_) | BundleError::Keyless(_))) => {
                    error.to_string()
                }
                Err(error) => format!("{}: {error}", entry.digest.short()),
            },
            Err(error) => error.to_string(),
        };
        if !found.refused.contains(&why) && found.refused.len() < 8 {
            found.refused.push(why);
        }
    }
    Ok(found)
}

impl Rule {
    fn fits(&self, name: &TemplateName) -> bool {
        let whole = match name.registry() {
            Some(host) => format!("{host}/{}", name.repository()),
            None => name.repository().to_owned(),
        };
        // A pattern without a tag is about all tags; a host's port is no tag.
        let last = self.pattern.rsplit('/').next().unwrap_or_default();
        let has_tag =
            last.contains(':') && (self.pattern.contains('/') || name.registry().is_none());
        let text = if has_tag { format!("{whole}:{}", name.tag()) } else { whole };
        fits(self.pattern.as_bytes(), text.as_bytes())
    }
}

/// Matches with `*` (within a part of a path) and `**` (over parts). Never exponential: only the
/// last of each kind of star is ever gone back to.
pub(crate) fn fits(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Behind which star, and from where in the text it is tried again.
    type Retry = Option<(usize, usize)>;
    let (mut star, mut stars): (Retry, Retry) = (None, None);
    loop {
        if pattern[p..].starts_with(b"**") {
            p += 2;
            stars = Some((p, t));
            star = None;
        } else if pattern[p..].starts_with(b"*") {
            p += 1;
            star = Some((p, t));
        } else if p == pattern.len() && t == text.len() {
            return true;
        } else if p < pattern.len() && t < text.len() && pattern[p] == text[t] {
            p += 1;
            t += 1;
        } else if let Some((after, from)) = star
            && from < text.len()
            && text[from] != b'/'
        {
            star = Some((after, from + 1));
            (p, t) = (after, from + 1);
        } else if let Some((after, from)) = stars
            && from < text.len()
        {
            stars = Some((after, from + 1));
            star = None;
            (p, t) = (after, from + 1);
        } else {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_what_they_say() {
        for (pattern, name, fitting) in [
            ("reg.example/team/*", "reg.example/team/py:1", true),
            ("reg.example/team/*", "reg.example/team/a/b:1", false),
            ("reg.example/team/**", "reg.example/team/a/b:1", true),
            ("reg.example/team/**", "reg.example/teams/a:1", false),
            ("reg.example/team/**", "reg.example.org/team/a:1", false),
            ("reg.example:5000/**", "reg.example:5000/a:1", true),
            ("reg.example:5000/**", "reg.example/a:1", false),
            ("reg.example/py:3.*", "reg.example/py:3.12", true),
            ("reg.example/py:3.*", "reg.example/py:4", false),
            ("*.example/**", "reg.example/a/b:1", true),
            ("*.example/**", "evil/x.example/b:1", false),
            ("**", "py:1", true),
            ("*", "py:1", true),
            ("*", "team/py:1", false),
            ("py:1", "py:1", true),
            ("py:1", "py:2", false),
            ("**/b*d/*c", "x/bad/bd/abc:1", true),
            ("", "py:1", false),
        ] {
            let rule = Rule {
                pattern: pattern.to_owned(),
                require: Requirement::Nothing,
                signers: Signers::default(),
                digests: vec![],
            };
            assert_eq!(rule.fits(&name.parse().unwrap()), fitting, "{pattern} {name}");
        }
        let long = "a*".repeat(2000);
        assert!(!fits(long.as_bytes(), "a".repeat(1000).as_bytes()));
    }

    #[test]
    fn a_policy_that_is_not_understood_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        let rule = "version = 1\n[[rule]]\nmatch = '**'\n";
        for (text, why) in [
            (String::new(), "version"),
            ("version = 2".to_owned(), "version 2"),
            ("version = 1\nextra = 1".to_owned(), "extra"),
            ("version = 1\notherwise = 'perhaps'".to_owned(), "perhaps"),
            (rule.to_owned(), "require"),
            (format!("{rule}require = 'signature'"), "names no keys"),
            (format!("{rule}require = 'digest'\nkeys = ['x']"), "does not use"),
            (
                format!(
                    "{rule}require = 'signature'\nidentities = [{{identity = 'a', issuer = 'b'}}]"
                ),
                "trusted_root",
            ),
            (format!("{rule}require = 'signature'\nkeys = ['x']\ntrusted_root = 'r'"), "together"),
            (format!("{rule}require = 'signature'\nkeys = ['none.pub']"), "none.pub"),
            (format!("{rule}require = 'digest'\ndigests = ['sha256:0']"), "digest"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = Policy::read(&path).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("policy.toml"), "{text}: {error}");
        }
        std::fs::write(&path, "version = 1\n").unwrap();
        assert!(Policy::from_environment(Some(&path)).unwrap().is_some());
        assert!(Policy::from_environment(Some(&directory.path().join("none"))).is_err());
    }
}
