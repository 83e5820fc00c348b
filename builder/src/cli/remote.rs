//! Registries: what `push`, `pull`, `login` and `verify --repair` have in common.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use parbake_cache::StoreError;
use parbake_cache::artifact::ArtifactError;
use parbake_cache::credentials::{CredentialError, Credentials};
use parbake_cache::install::{InstallError, InstallEvent};
use parbake_cache::publish::PublishError;
use parbake_cache::registries::Registries;
use parbake_cache::registry::{RegistryError, RegistryOptions};
use parbake_cache::template::CompatContract;
use parbake_cache::transport::TransportError;
use parbake_protocol::agent::AGENT_PROTOCOL;
use parbake_vmm::snapshot::contract;
use parbake_vmm::snapshot::state::STATE_VERSION;

use super::error::{CliError, CliResult, Kind};
use super::progress::{Step, bytes};
use super::{guest, interrupt, trust};

/// What becomes of a transfer that was cut short.
pub const KEPT: &str =
    "what was transferred is kept: the same command goes on where this one stopped";
/// How long an interrupted transfer may take to end: a line on which nothing happens does not notice.
const PATIENCE: Duration = Duration::from_secs(5);

/// How to reach registries.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct RegistryArgs {
    /// Speak plain HTTP to this registry; may be given again (loopback needs no permission)
    #[arg(long, visible_alias = "plain-http", value_name = "HOST[:PORT]")]
    pub insecure_registry: Vec<String>,
    /// Registry credentials, instead of the usual places
    #[arg(long, value_name = "FILE")]
    pub authfile: Option<PathBuf>,
    /// Mirrors and blocked registries, instead of the usual registries.conf
    #[arg(long, value_name = "FILE")]
    pub registries_conf: Option<PathBuf>,
}

impl RegistryArgs {
    /// As the transport wants it. From now on, what is under way ends in an orderly way when the
    /// user wants it to.
    pub fn options(&self) -> CliResult<RegistryOptions> {
        interrupt::watch();
        interrupt::end_within(PATIENCE);
        Ok(RegistryOptions { cancelled: Some(interrupt::asked), ..self.for_sandboxes()? })
    }

    /// The same for what goes on beside a command in a sandbox, to which interrupts belong.
    pub fn for_sandboxes(&self) -> CliResult<RegistryOptions> {
        let registries = Registries::from_environment(self.registries_conf.as_deref())
            .map_err(|error| CliError::new(Kind::User, error))?;
        Ok(RegistryOptions {
            credentials: self.credentials(),
            plain_http: self.insecure_registry.clone(),
            registries,
            ..RegistryOptions::default()
        })
    }

    /// Where credentials are kept.
    pub fn credentials(&self) -> Credentials {
        Credentials::from_environment(self.authfile.as_deref())
    }
}

/// What snapshots that are to be restored on this very machine may need.
pub fn offers() -> CompatContract {
    CompatContract {
        architecture: "amd64".to_owned(),
        cpu_vendor: contract::host_vendor(),
        cpu_features: contract::offered_features(),
        kvm_kind: contract::kvm_kind().to_owned(),
        state_version: STATE_VERSION,
        agent_protocol: AGENT_PROTOCOL,
        page_size: 4096,
    }
}

/// The same for the lab, as far as it can be told from out here: its processor's vendor and how it
/// virtualizes. Which of the processor's features its KVM offers the monitor checks when it restores.
pub fn lab_offers() -> CompatContract {
    let any = |leaf: String| (leaf, u32::MAX);
    CompatContract {
        cpu_vendor: parbake_host::lab::CPU_VENDOR.to_owned(),
        cpu_features: contract::offered_features().into_keys().map(any).collect(),
        kvm_kind: parbake_host::lab::KVM_KIND.to_owned(),
        ..offers()
    }
}

/// Counts what arrives, for the progress.
pub struct Arrivals {
    state: Mutex<(Step, u64, u64)>,
}

impl Arrivals {
    /// Counts for `step`.
    pub fn new(step: Step) -> Self {
        Self { state: Mutex::new((step, 0, 0)) }
    }

    /// Takes note of an event; several threads may do so.
    pub fn on(&self, event: &InstallEvent) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (step, planned, fetched) = &mut *state;
        match event {
            InstallEvent::Planned { fetch_bytes, .. } => *planned += fetch_bytes,
            InstallEvent::Fetched { bytes } => *fetched += bytes,
            _ => {}
        }
        // Documents and indexes come on top of what was planned.
        step.update(format!("{} of about {}", bytes(*fetched), bytes((*planned).max(*fetched))));
    }

    /// The step, to be ended.
    pub fn into_step(self) -> Step {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A registry's failure.
pub fn registry_error(error: RegistryError) -> CliError {
    match &error {
        RegistryError::NotFound { .. } => CliError::new(Kind::NotFound, error),
        RegistryError::Interrupted => interrupted(),
        RegistryError::Blocked { .. } => CliError::new(Kind::Refused, error),
        RegistryError::Credentials(_) | RegistryError::Local { .. } => {
            CliError::new(Kind::User, error)
        }
        RegistryError::Denied { host, .. } => {
            let hint = format!("`parbake login {host}` signs in as another user");
            CliError::new(Kind::Registry, error).hint(hint)
        }
        RegistryError::Unreachable { .. } => CliError::new(Kind::Registry, error)
            .hint("what has arrived is kept: the same command goes on where this one stopped"),
        RegistryError::Plain { host } => {
            let hint = format!("--insecure-registry {host} speaks to it without TLS");
            CliError::new(Kind::Registry, error).hint(hint)
        }
        _ => CliError::new(Kind::Registry, error),
    }
}

/// The user wanted to stop.
pub fn interrupted() -> CliError {
    CliError::new(Kind::Interrupted, "interrupted").hint(KEPT)
}

/// The failure of a push or a pull.
pub fn transport_error(error: TransportError) -> CliError {
    match error {
        TransportError::NoRegistry(_) => CliError::new(Kind::Usage, error)
            .hint("`parbake tag` gives a template a second name, with a registry's host in it"),
        TransportError::Registry(error) => registry_error(error),
        TransportError::Trust(error) => trust::trust_error(error),
        TransportError::Store(StoreError::Interrupted)
        | TransportError::Publish(PublishError::Store(StoreError::Interrupted))
        | TransportError::Install(InstallError::Store(StoreError::Interrupted)) => interrupted(),
        TransportError::Store(error)
        | TransportError::Publish(PublishError::Store(error))
        | TransportError::Install(InstallError::Store(error)) => guest::store_error(error),
        TransportError::Artifact(error)
        | TransportError::Publish(PublishError::Artifact(error))
        | TransportError::Install(InstallError::Artifact(error)) => artifact_error(error),
        TransportError::Install(error) => install_error(error),
        error => CliError::new(Kind::User, error),
    }
}

/// An installation's failure.
pub fn install_error(error: InstallError) -> CliError {
    match error {
        InstallError::Store(StoreError::Interrupted) => interrupted(),
        InstallError::Store(error) => guest::store_error(error),
        InstallError::Artifact(error) => artifact_error(error),
        InstallError::Fetch { digest, source } => {
            // The registry's own error is inside, with what it is about.
            let kind = match source.get_ref().and_then(|inner| inner.downcast_ref()) {
                Some(RegistryError::Interrupted) => return interrupted(),
                Some(RegistryError::NotFound { .. }) => Kind::NotFound,
                Some(_) => Kind::Registry,
                None if source.kind() == std::io::ErrorKind::NotFound => Kind::NotFound,
                None => Kind::User,
            };
            let failure = CliError::new(kind, InstallError::Fetch { digest, source });
            match kind {
                Kind::Registry => failure.hint(
                    "what has arrived is kept: the same command goes on where this one stopped",
                ),
                _ => failure,
            }
        }
        error => CliError::new(Kind::User, error),
    }
}

/// An artifact that cannot be used.
pub fn artifact_error(error: ArtifactError) -> CliError {
    let kind = match &error {
        ArtifactError::NotATemplate { .. }
        | ArtifactError::Newer { .. }
        | ArtifactError::UnknownFeature(_) => Kind::User,
        // All else contradicts a digest or a bound.
        _ => Kind::Refused,
    };
    CliError::new(kind, error)
}

/// The failure of a credential file or helper.
pub fn credential_error(error: CredentialError) -> CliError {
    CliError::new(Kind::User, error)
}
