//! How the service says no: a stable word, a status, a sentence, and what to do next.

use std::error::Error;

use parbake_cache::StoreError;
use parbake_node::monitor::MonitorError;
use parbake_node::sandbox::SandboxError;
use parbake_node::template::TemplateError;
use parbake_node::terminal::failure::Kind as Exit;
use parbake_protocol::agent::{ClientError, Failure, FailureKind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was refused; each has one status and, in the client, one exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// The request makes no sense.
    BadRequest,
    /// No key, or an unknown one.
    Unauthorized,
    /// No such path.
    UnknownPath,
    /// The path does not do this.
    WrongMethod,
    /// No such sandbox.
    UnknownSandbox,
    /// No such template or snapshot.
    UnknownTemplate,
    /// The template has no snapshot for this host and machine.
    NotBaked,
    /// The sandbox is not in a state that allows this.
    WrongState,
    /// Commands run in the sandbox that would be ended.
    Busy,
    /// The same request is being worked on.
    InProgress,
    /// The idempotency key belongs to another request.
    KeyReused,
    /// The sandbox has secrets, and a snapshot would hold them.
    HoldsSecrets,
    /// The body is larger than allowed.
    TooLarge,
    /// The guard said no.
    GuardBlocked,
    /// The guard wants a person's confirmation.
    GuardAsks,
    /// The guard gave no answer; nothing runs without one.
    GuardFailed,
    /// The guest refused: a missing file, an unknown user, a program that is not there.
    GuestRefused,
    /// The guest does not answer.
    GuestUnresponsive,
    /// The sandbox ended by itself.
    GuestGone,
    /// The guest was not ready in time.
    NotReady,
    /// No more sandboxes here.
    Full,
    /// The service is about to end.
    Draining,
    /// The store or a disk is full.
    NoSpace,
    /// This host cannot run it.
    HostCannot,
    /// The audit log cannot be written; nothing happens without.
    AuditFailed,
    /// A fault in parbaked.
    Internal,
}

impl Kind {
    /// The HTTP status.
    #[must_use]
    pub const fn status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Unauthorized => 401,
            Self::GuardBlocked | Self::GuardAsks | Self::GuardFailed => 403,
            Self::UnknownPath | Self::UnknownSandbox | Self::UnknownTemplate => 404,
            Self::WrongMethod => 405,
            Self::NotBaked
            | Self::WrongState
            | Self::Busy
            | Self::InProgress
            | Self::HoldsSecrets => 409,
            Self::GuestGone => 410,
            Self::TooLarge => 413,
            Self::KeyReused | Self::GuestRefused => 422,
            Self::Internal | Self::AuditFailed => 500,
            Self::HostCannot | Self::Full | Self::Draining => 503,
            Self::GuestUnresponsive | Self::NotReady => 504,
            Self::NoSpace => 507,
        }
    }

    /// The client's exit code.
    #[must_use]
    pub const fn exit(self) -> Exit {
        match self {
            Self::UnknownSandbox | Self::UnknownTemplate | Self::UnknownPath => Exit::NotFound,
            Self::Unauthorized
            | Self::GuardBlocked
            | Self::GuardAsks
            | Self::GuardFailed
            | Self::HoldsSecrets => Exit::Refused,
            Self::NotReady | Self::GuestUnresponsive => Exit::NotReady,
            Self::HostCannot | Self::Full | Self::Draining => Exit::Host,
            Self::Internal => Exit::Internal,
            _ => Exit::User,
        }
    }

    /// The word.
    #[must_use]
    pub fn word(self) -> String {
        serde_json::to_value(self)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}

/// A refusal.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[serde(rename_all = "camelCase")]
#[error("{message}")]
pub struct Problem {
    /// For programs.
    pub kind: Kind,
    /// For people.
    pub message: String,
    /// What lies behind it, outermost first.
    #[serde(default)]
    pub causes: Vec<String>,
    /// What to do next.
    #[serde(default)]
    pub hints: Vec<String>,
}

/// The body of every response that is not a success.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Refusal {
    /// Why.
    pub error: Problem,
}

impl Problem {
    /// A refusal with a sentence of its own.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), causes: Vec::new(), hints: Vec::new() }
    }

    /// A refusal because of `error`.
    pub fn because(kind: Kind, error: &dyn Error) -> Self {
        let message = error.to_string();
        let mut causes: Vec<String> = Vec::new();
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            // Wrappers that only repeat what they wrap add nothing for a reader.
            if !message.ends_with(&text) && !causes.iter().any(|cause| cause.ends_with(&text)) {
                causes.push(text);
            }
            next = cause.source();
        }
        Self { kind, message, causes, hints: Vec::new() }
    }

    /// Adds what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// There is no sandbox of that name.
    #[must_use]
    pub fn unknown(id: &str) -> Self {
        // Whatever was asked for may be long, and may be anything.
        let shown: String = id.chars().filter(|c| !c.is_control()).take(64).collect();
        Self::new(Kind::UnknownSandbox, format!("there is no sandbox {shown}"))
            .hint("`parbaked ps` shows which there are")
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let kind = match &error {
            StoreError::UnknownName { .. }
            | StoreError::Missing { .. }
            | StoreError::MissingPart { .. } => Kind::UnknownTemplate,
            StoreError::Full { .. } => Kind::NoSpace,
            _ => Kind::HostCannot,
        };
        let problem = Self::because(kind, &error);
        match kind {
            Kind::UnknownTemplate => problem.hint("`parbake ls` shows what is in the store"),
            _ => problem,
        }
    }
}

impl From<TemplateError> for Problem {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Store(error) => error.into(),
            error => Self::because(Kind::HostCannot, &error),
        }
    }
}

impl From<SandboxError> for Problem {
    fn from(error: SandboxError) -> Self {
        let kind = match &error {
            SandboxError::Agent(source) => {
                return Self { kind: of_client(source), ..Self::because(Kind::Internal, &error) };
            }
            SandboxError::NotReady { .. } => Kind::NotReady,
            SandboxError::OldAgent => Kind::NotBaked,
            SandboxError::GuestEnded { .. } => Kind::GuestGone,
            SandboxError::Monitor(MonitorError::Failed { kind, .. }) if kind == "mismatch" => {
                return Self::because(Kind::NotBaked, &error)
                    .hint("`parbake bake TEMPLATE` on this host makes a snapshot that fits");
            }
            SandboxError::Monitor(MonitorError::Failed { kind, .. }) if kind == "workspace" => {
                Kind::WrongState
            }
            SandboxError::Monitor(MonitorError::Timeout(_)) => Kind::GuestUnresponsive,
            SandboxError::Monitor(MonitorError::Died { .. }) => Kind::GuestGone,
            SandboxError::RunDir { source, .. } if out_of_space(source) => Kind::NoSpace,
            SandboxError::Program(_)
            | SandboxError::RunDir { .. }
            | SandboxError::Entropy(_)
            | SandboxError::Monitor(_) => Kind::HostCannot,
            SandboxError::Fixup(_) | SandboxError::Quiesce(_) => Kind::GuestRefused,
            SandboxError::Network(_) | SandboxError::Cgroup(_) => Kind::HostCannot,
            SandboxError::Limit(_) => Kind::GuestGone,
            SandboxError::Interrupted => Kind::Draining,
        };
        Self::because(kind, &error)
    }
}

fn out_of_space(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

impl From<ClientError> for Problem {
    fn from(error: ClientError) -> Self {
        Self::because(of_client(&error), &error)
    }
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        Self::new(of_failure(failure.kind), failure.to_string())
    }
}

fn of_client(error: &ClientError) -> Kind {
    match error {
        ClientError::TimedOut => Kind::GuestUnresponsive,
        ClientError::Failed(failure) => of_failure(failure.kind),
        ClientError::TooLarge { .. } => Kind::TooLarge,
        ClientError::Local(_) => Kind::BadRequest,
        ClientError::Version { .. } | ClientError::Token => Kind::HostCannot,
        ClientError::Closed | ClientError::Frame(_) | ClientError::Unexpected => Kind::GuestGone,
    }
}

fn of_failure(kind: FailureKind) -> Kind {
    match kind {
        FailureKind::BadRequest => Kind::BadRequest,
        _ => Kind::GuestRefused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_told_once() {
        let error = SandboxError::Agent(ClientError::TimedOut);
        let problem = Problem::from(error);
        assert_eq!(problem.kind, Kind::GuestUnresponsive);
        assert_eq!(problem.causes, ["the guest agent did not answer in time"]);
        assert_eq!(problem.kind.word(), "guestUnresponsive");
    }

    #[test]
    fn names_that_are_anything_are_shown_in_bounds() {
        let problem = Problem::unknown(&format!("\u{1b}[31m{}", "x".repeat(10_000)));
        assert!(problem.message.len() < 100, "{}", problem.message.len());
        assert!(!problem.message.contains('\u{1b}'));
    }
}
