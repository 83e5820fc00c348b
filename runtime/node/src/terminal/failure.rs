//! What our programs say when something fails, and with which exit code.
//!
//! | code | meaning |
//! | --- | --- |
//! | 0 | done |
//! | 1 | a failure the user can mend |
//! | 2 | wrong usage |
//! | 3 | something named does not exist |
//! | 4 | a verification failed or a policy refused |
//! | 5 | a build step failed |
//! | 6 | the guest did not become ready in time |
//! | 7 | this host cannot |
//! | 8 | a registry or the network failed |
//! | 70 | a fault in parbake itself |
//! | 130 | interrupted |
//!
//! `run` and `exec` return the guest command's own code instead; 125, 126 and 127 mean, as
//! elsewhere, that the sandbox failed, that the command cannot be executed, that it does not exist.

use std::error::Error;
use std::fmt;
use std::io::Write;

use serde_json::json;

/// Kinds of failure; each has one exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The user can mend it.
    User,
    /// The command line is wrong.
    Usage,
    /// Something named does not exist.
    NotFound,
    /// Verification failed or policy refused.
    Refused,
    /// A build step failed.
    Step,
    /// The guest was not ready in time.
    NotReady,
    /// This host cannot.
    Host,
    /// Registry or network.
    Registry,
    /// A fault in parbake.
    Internal,
    /// Interrupted.
    Interrupted,
    /// `run` and `exec`: the sandbox failed before the command could.
    Sandbox,
    /// `run` and `exec`: the command cannot be executed.
    NotExecutable,
    /// `run` and `exec`: the command does not exist.
    CommandNotFound,
}

impl Kind {
    /// The process's exit code.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::User => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Refused => 4,
            Self::Step => 5,
            Self::NotReady => 6,
            Self::Host => 7,
            Self::Registry => 8,
            Self::Internal => 70,
            Self::Interrupted => 130,
            Self::Sandbox => 125,
            Self::NotExecutable => 126,
            Self::CommandNotFound => 127,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::User => "failed",
            Self::Usage => "usage",
            Self::NotFound => "notFound",
            Self::Refused => "refused",
            Self::Step => "stepFailed",
            Self::NotReady => "notReady",
            Self::Host => "hostCannot",
            Self::Registry => "registry",
            Self::Internal => "internal",
            Self::Interrupted => "interrupted",
            Self::Sandbox => "sandbox",
            Self::NotExecutable => "notExecutable",
            Self::CommandNotFound => "commandNotFound",
        }
    }
}

/// A failure on its way to the user.
#[derive(Debug)]
pub struct CliError {
    /// Decides the exit code.
    pub kind: Kind,
    /// The failure, with its causes.
    pub source: Box<dyn Error + Send + Sync>,
    /// What to do next.
    pub hints: Vec<String>,
    /// What the failing program of a build step exited with.
    pub step_exit_code: Option<i32>,
}

/// What every verb returns.
pub type CliResult<T = ()> = Result<T, CliError>;

impl CliError {
    /// A failure of `kind`.
    pub fn new(kind: Kind, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { kind, source: source.into(), hints: Vec::new(), step_exit_code: None }
    }

    /// The user asked for an end.
    pub fn interrupted() -> Self {
        Self::new(Kind::Interrupted, "interrupted")
    }

    /// Adds what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// `error:`, `caused by:` and `hint:` lines, or one JSON document, on stderr.
    pub fn print(&self, as_json: bool) {
        let mut causes: Vec<String> = Vec::new();
        let mut next = self.source.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            // Wrappers that only repeat what they wrap add nothing for a reader.
            let repeated = |earlier: &String| earlier.ends_with(&text);
            if !causes.last().is_some_and(repeated) && !self.source.to_string().ends_with(&text) {
                causes.push(text);
            }
            next = cause.source();
        }
        let mut err = std::io::stderr().lock();
        if as_json {
            let mut document = json!({ "error": {
                "kind": self.kind.name(),
                "exitCode": self.kind.exit_code(),
                "message": self.source.to_string(),
                "causes": causes,
                "hints": self.hints,
            }});
            if let Some(code) = self.step_exit_code {
                document["error"]["stepExitCode"] = json!(code);
            }
            let _ = writeln!(err, "{document}");
            return;
        }
        let _ = writeln!(err, "error: {}", self.source);
        for cause in causes {
            let _ = writeln!(err, "caused by: {cause}");
        }
        for hint in &self.hints {
            let _ = writeln!(err, "hint: {hint}");
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

/// Gives a library's error its kind.
pub trait Classify<T> {
    /// The error becomes a [`CliError`] of `kind`.
    fn kind(self, kind: Kind) -> CliResult<T>;
}

impl<T, E: Into<Box<dyn Error + Send + Sync>>> Classify<T> for Result<T, E> {
    fn kind(self, kind: Kind) -> CliResult<T> {
        self.map_err(|error| CliError::new(kind, error))
    }
}
