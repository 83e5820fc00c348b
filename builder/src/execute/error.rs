//! Why a build failed, at which line, and what to do.

use std::io;
use std::path::PathBuf;

use parbake_recipes::Location;

/// Why a plan could not be executed.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// A program of a `RUN` step did not exit with 0. Nothing of the step is kept.
    #[error("{at}: {text}: exit code {code}{}{}", because(shortage.as_deref()), tail(last_output))]
    StepFailed {
        /// The instruction.
        at: Location,
        /// As written.
        text: String,
        /// What it exited with; 128 and the signal's number when it was killed.
        code: i32,
        /// What there was not enough of, and what to do, where that is known.
        shortage: Option<String>,
        /// The end of what it said.
        last_output: String,
    },
    /// The guest's disk, here the build cache's, is full.
    #[error("{at}: no space left in {}; free some or name another build directory", path.display())]
    NoSpace {
        /// The instruction.
        at: Location,
        /// The build directory.
        path: PathBuf,
    },
    /// A step cannot be done as written.
    #[error("{at}: {message}; {hint}")]
    Step {
        /// The instruction.
        at: Location,
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
    /// A secret that a step requires was not given.
    #[error("{at}: secret {id} was not given; pass --secret id={id},src=FILE or id={id},env=NAME")]
    SecretMissing {
        /// The instruction.
        at: Location,
        /// Which.
        id: String,
    },
    /// A secret's bytes are in the result.
    #[error(
        "secret {id} is in the result, in {place} ({form}); a step wrote it there: use it only \
         while the step runs, and remove what keeps it"
    )]
    SecretLeaked {
        /// Which.
        id: String,
        /// File and layer.
        place: String,
        /// Plain, base64 or URL-encoded.
        form: &'static str,
    },
    /// A base image cannot be had.
    #[error("{at}: base image {reference}: {reason}")]
    Base {
        /// The `FROM`.
        at: Location,
        /// As written.
        reference: String,
        /// Why, and what to do.
        reason: String,
    },
    /// This machine cannot execute plans this way.
    #[error("{what}; {hint}")]
    Host {
        /// What is missing.
        what: String,
        /// What to do.
        hint: String,
    },
    /// The machine failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// Someone asked to stop.
    #[error("interrupted")]
    Interrupted,
}

fn because(shortage: Option<&str>) -> String {
    shortage.map(|shortage| format!("; {shortage}")).unwrap_or_default()
}

fn tail(output: &str) -> String {
    let output = output.trim_end();
    if output.is_empty() { String::new() } else { format!("; its last output:\n{output}") }
}

impl ExecuteError {
    /// The failing program's exit code, where one failed.
    #[must_use]
    pub fn step_exit_code(&self) -> Option<i32> {
        match self {
            Self::StepFailed { code, .. } => Some(*code),
            _ => None,
        }
    }
}

/// Says what was being done when an operation of the system failed.
pub(crate) trait Doing<T> {
    /// Adds it.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, ExecuteError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, ExecuteError> {
        self.map_err(|source| ExecuteError::Io { what: what(), source: source.into() })
    }
}
