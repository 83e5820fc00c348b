//! The steps of a build on stderr, and what is said when one fails.

use parbake_builder::execute::{Event, ExecuteError, Stream};

use super::error::{CliError, Kind};
use super::progress::{self, Progress, Step, bytes};

/// The longest line of a program that is shown while it runs.
const LONGEST_LINE: usize = 4096;

/// Shows what happens during a build.
pub struct StepView<'a> {
    progress: &'a Progress,
    explain: bool,
    stage: String,
    label: String,
    /// Begun when the step turns out to be one that must be done.
    step: Option<Step>,
    lines: [Vec<u8>; 2],
}

impl<'a> StepView<'a> {
    /// Shows on `progress`; with `explain`, also why each step is done.
    pub fn new(progress: &'a Progress, explain: bool) -> Self {
        let lines = [Vec::new(), Vec::new()];
        Self { progress, explain, stage: String::new(), label: String::new(), step: None, lines }
    }

    /// Takes the next event.
    pub fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Executor { .. } => {}
            Event::Stage { stage, stages, name } => {
                let number = || format!("stage-{stage}");
                let name = name.map_or_else(number, str::to_owned);
                self.stage = if *stages > 1 { format!("{name} ") } else { String::new() };
            }
            Event::StepStarted { step, steps, text, .. } => {
                let line = text.lines().next().unwrap_or_default();
                let more = if line.len() < text.trim_end().len() { " …" } else { "" };
                self.label = format!("[{}{step}/{steps}] {line}{more}", self.stage);
                self.step = None;
            }
            Event::StepCached => self.progress.cached(&self.label),
            Event::StepReason { reason } => {
                let step = self.progress.step(self.label.clone());
                if self.explain {
                    step.reason(reason);
                }
                self.step = Some(step);
            }
            Event::Output { stream, bytes } => self.output(*stream, bytes),
            Event::StepFinished { size, .. } => {
                self.flush();
                if let Some(step) = self.step.take() {
                    step.done(bytes(*size));
                }
            }
            Event::Warning { at, message } => {
                let place = at.map(|at| format!("{at}: ")).unwrap_or_default();
                self.progress.note(&format!("warning: {place}{message}"));
            }
        }
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        let index = usize::from(stream == Stream::Stderr);
        for byte in bytes {
            if matches!(byte, b'\n' | b'\r') || self.lines[index].len() >= LONGEST_LINE {
                self.line(index);
            }
            if !matches!(byte, b'\n' | b'\r') {
                self.lines[index].push(*byte);
            }
        }
    }

    fn line(&mut self, index: usize) {
        let line = std::mem::take(&mut self.lines[index]);
        if line.is_empty() {
            return;
        }
        let text: String =
            String::from_utf8_lossy(&line).chars().filter(|c| !c.is_control()).collect();
        let stream = [progress::Stream::Stdout, progress::Stream::Stderr][index];
        match &mut self.step {
            Some(step) => step.output(stream, &text),
            None => self.progress.note(&text),
        }
    }

    /// Shows lines that have no end yet.
    fn flush(&mut self) {
        self.line(0);
        self.line(1);
    }
}

impl Drop for StepView<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

/// A build's failure, with its exit code.
pub fn execute_error(error: ExecuteError) -> CliError {
    let code = error.step_exit_code();
    let kind = match &error {
        ExecuteError::StepFailed { .. }
        | ExecuteError::Step { .. }
        | ExecuteError::NoSpace { .. } => Kind::Step,
        ExecuteError::SecretLeaked { .. } => Kind::Refused,
        // A finding under --strict comes this way, too, and is no matter of the host.
        ExecuteError::Host { what, .. } if what.contains(" looks like ") => Kind::Refused,
        // What another program was told to do, and could not.
        ExecuteError::Host { what, .. } if what.contains(" failed:\n") => Kind::Step,
        ExecuteError::Host { .. } => Kind::Host,
        ExecuteError::Interrupted => Kind::Interrupted,
        ExecuteError::SecretMissing { .. }
        | ExecuteError::Base { .. }
        | ExecuteError::Io { .. } => Kind::User,
    };
    let mut failure = CliError::new(kind, error);
    failure.step_exit_code = code;
    failure
}
