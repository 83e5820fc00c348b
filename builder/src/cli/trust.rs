//! Signatures, documents and policies: what `push`, `pull`, `export`, `import` and `verify
//! --signature` have in common.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parbake_builder::sbom::{Format, Inventory};
use parbake_builder::template::Template;
use parbake_builder::{contents::RootFs, provenance};
use parbake_cache::bundle::{SIGNATURE_PREDICATE, Signatory, Signers};
use parbake_cache::find;
use parbake_cache::keyless::{Identity, TrustedRoot};
use parbake_cache::keys::{PublicKey, SigningKey};
use parbake_cache::registry::RegistryOptions;
use parbake_cache::statements::Statements;
use parbake_cache::trust::{self, Policy, Trust, TrustError};
use parbake_cache::{Digest, Store, TemplateName};
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::remote::{self, RegistryArgs};
use super::{Context, guest, output, push};

/// What must be known of a template before it is taken in.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TrustArgs {
    /// Demand a signature by this public key (PEM), or by one of several; may be given again
    #[arg(long, value_name = "FILE")]
    verify_key: Vec<PathBuf>,
    /// Demand a keyless signature by this identity, an email address or URI as its certificate has it
    #[arg(long, value_name = "IDENTITY", requires_all = ["certificate_oidc_issuer", "trusted_root"])]
    certificate_identity: Option<String>,
    /// With --certificate-identity: the URL of the identity provider that must have vouched for it
    #[arg(long, value_name = "URL", requires = "certificate_identity")]
    certificate_oidc_issuer: Option<String>,
    /// With --certificate-identity: whose certificates and logs count (sigstore's trusted_root.json)
    #[arg(long, value_name = "FILE", requires = "certificate_identity")]
    trusted_root: Option<PathBuf>,
    /// The policy, instead of policy.toml in the configuration of this user or this machine
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
}

/// What to say about a template that is published.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct StatementArgs {
    /// Sign with this private key (PEM, P-256 or Ed25519); SBOM and provenance are attached, too
    #[arg(long, value_name = "FILE")]
    sign: Option<PathBuf>,
    /// Attach SBOM (SPDX and CycloneDX) and provenance, signed only with --sign
    #[arg(long)]
    attest: bool,
    /// With --sign: attach nothing but the signature
    #[arg(long, conflicts_with = "attest")]
    no_attest: bool,
}

impl TrustArgs {
    /// As the transport wants it.
    pub fn trust(&self) -> CliResult<Trust> {
        let signers = Signers { keys: self.keys()?, identities: self.identities()? };
        let policy = Policy::from_environment(self.policy.as_deref()).map_err(trust_error)?;
        Ok(Trust { signers, policy })
    }

    fn identities(&self) -> CliResult<Vec<Identity>> {
        let (Some(subject), Some(issuer), Some(root)) =
            (&self.certificate_identity, &self.certificate_oidc_issuer, &self.trusted_root)
        else {
            return Ok(Vec::new());
        };
        let root = TrustedRoot::read(root).map_err(|error| trust_error(TrustError::Root(error)))?;
        let (subject, issuer) = (subject.clone(), issuer.clone());
        Ok(vec![Identity { subject, issuer, root: Arc::new(root) }])
    }

    fn keys(&self) -> CliResult<Vec<PublicKey>> {
        let read = |path: &PathBuf| PublicKey::read(path);
        let keys: Result<Vec<_>, _> = self.verify_key.iter().map(read).collect();
        keys.map_err(|error| CliError::new(Kind::User, error))
    }
}

impl StatementArgs {
    /// What is to be said about `template` and its snapshots.
    pub fn statements(
        &self,
        context: &Context,
        store: &Store,
        template: &Template,
        snapshots: &[Digest],
    ) -> CliResult<Statements> {
        let key = self.sign.as_deref().map(SigningKey::read).transpose();
        let key = key.map_err(|error| CliError::new(Kind::User, error))?.map(Arc::new);
        let mut documents = Vec::new();
        if self.attest || (key.is_some() && !self.no_attest) {
            let created = push::source_date_epoch()?.unwrap_or(0);
            let inventory = inventory(context, store, template)?;
            for format in [Format::Spdx, Format::CycloneDx] {
                documents.push(format.document(template, &inventory, created));
            }
            documents.push(provenance::document(template, snapshots));
        }
        Ok(Statements { key, documents })
    }
}

/// What software is in a template, with a note about what was not read.
pub fn inventory(context: &Context, store: &Store, template: &Template) -> CliResult<Inventory> {
    let image = store.path(&template.manifest.rootfs.digest).map_err(guest::store_error)?;
    inventory_of(context, &image)
}

/// What package managers have written down in a root filesystem.
pub fn inventory_of(context: &Context, image: &Path) -> CliResult<Inventory> {
    let user = |error: &dyn std::fmt::Display| CliError::new(Kind::User, error.to_string());
    let root = RootFs::open(image).map_err(|error| user(&error))?;
    let step = context.progress.step("look for packages");
    let inventory = Inventory::of(&root).map_err(|error| user(&error))?;
    step.done(format!("{} packages", inventory.packages.len()));
    for what in &inventory.unread {
        context.progress.note(&format!("not in the SBOM: {what}"));
    }
    Ok(inventory)
}

/// `parbake verify --signature`.
pub fn verify(
    context: &Context,
    text: &str,
    args: &TrustArgs,
    registry: &RegistryArgs,
) -> CliResult {
    let usage = |error: &dyn std::fmt::Display| CliError::new(Kind::Usage, error.to_string());
    let (name, pinned) = match text.split_once('@') {
        None => (text, None),
        Some((name, digest)) => {
            (name, Some(digest.parse::<Digest>().map_err(|error| usage(&error))?))
        }
    };
    let name: TemplateName = name.parse().map_err(|error| usage(&error))?;
    let trust = args.trust()?;
    if trust.signers.is_empty() && trust.policy.is_none() {
        let what = "there is no key, no identity and no policy to verify against";
        return Err(CliError::new(Kind::Usage, what)
            .hint("--verify-key FILE names a public key")
            .hint("--certificate-identity names who must have signed without one"));
    }
    let signers = trust.signers.clone();
    // What is demanded is checked on the way.
    let options = RegistryOptions { trust, ..registry.options()? };
    let found =
        find::template(&name, pinned.as_ref(), &options).map_err(remote::transport_error)?;
    let digest = found.root.descriptor.digest;
    let signatures = trust::signatures(&name.to_string(), &digest, &found.source, &signers)
        .map_err(trust_error)?;
    if context.json() {
        let valid = signatures.valid.iter().map(|signature| {
            let mut document = json!({
                "manifest": signature.manifest,
                "predicateType": signature.predicate_type,
            });
            match signature.by {
                Signatory::Key(number) => {
                    document["key"] = signers.keys[number].label().into();
                    document["keyHint"] = signers.keys[number].hint().into();
                }
                Signatory::Identity(number) => {
                    document["identity"] = signers.identities[number].subject.clone().into();
                    document["issuer"] = signers.identities[number].issuer.clone().into();
                }
            }
            document
        });
        return output::json(&json!({
            "name": name,
            "digest": digest,
            "valid": valid.collect::<Vec<_>>(),
            "refused": signatures.refused,
        }));
    }
    output::line(&digest.to_string())?;
    if !context.global.quiet {
        for signature in &signatures.valid {
            let what = match signature.predicate_type.as_str() {
                SIGNATURE_PREDICATE => "signature",
                other => other,
            };
            output::line(&format!("ok: {what} by {}", signers.label(signature.by)))?;
        }
        if signers.is_empty() {
            output::line("ok: the policy accepts it")?;
        }
    }
    Ok(())
}

/// Something that is not trusted, or cannot be judged.
pub fn trust_error(error: TrustError) -> CliError {
    match &error {
        TrustError::Refused { .. } => CliError::new(Kind::Refused, error),
        TrustError::Unreachable { .. } => CliError::new(Kind::Registry, error),
        _ => CliError::new(Kind::User, error),
    }
}
