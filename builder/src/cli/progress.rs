//! Progress on stderr: a live view on a terminal, plain lines elsewhere, JSON lines for programs.
//!
//! The JSON form is one document a line, each an [`Event`]; `progress.v1.schema.json` is their schema,
//! and `parbake schema progress` prints it.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use schemars::JsonSchema;
use serde::Serialize;

/// What a program reads: one of these a line, on stderr, with `--progress json`. Lines that begin with
/// something else than `{` are not progress: errors and hints.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "event", rename_all = "lowercase")]
#[schemars(title = "parbake progress")]
enum Event<'a> {
    /// A step begins.
    Start {
        /// Its name; steps of one command may bear the same.
        step: &'a str,
    },
    /// What the step under way is at; at most five times a second.
    Update {
        /// Its name.
        step: &'a str,
        /// For people.
        detail: &'a str,
        /// Since it began.
        seconds: f64,
    },
    /// The step is over.
    Done {
        /// Its name.
        step: &'a str,
        /// Its result, for people.
        detail: &'a str,
        /// How long it took.
        seconds: f64,
    },
    /// A build step whose result was there already; it has neither start nor end.
    Cached {
        /// Its name.
        step: &'a str,
    },
    /// Why a build step is done at all, with `--explain`.
    Reason {
        /// Its name.
        step: &'a str,
        /// For people.
        detail: &'a str,
    },
    /// A line that a program of a build step wrote.
    Output {
        /// The step's name.
        step: &'a str,
        /// Where to.
        stream: Stream,
        /// The line, without control characters.
        text: &'a str,
    },
    /// Worth knowing; of no step.
    Note {
        /// For people.
        detail: &'a str,
    },
}

/// An output of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// The standard output.
    Stdout,
    /// The standard error output.
    Stderr,
}

impl Event<'_> {
    fn print(&self) {
        if let Ok(line) = serde_json::to_string(self) {
            eprintln!("{line}");
        }
    }
}

/// The JSON Schema of the lines.
pub fn schema() -> String {
    let mut text =
        serde_json::to_string_pretty(&schemars::schema_for!(Event<'_>)).unwrap_or_default();
    text.push('\n');
    text
}

/// How progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// A live view on a terminal, plain lines elsewhere.
    Auto,
    /// One line when a step starts and one when it ends.
    Plain,
    /// JSON lines.
    Json,
    /// Nothing.
    Quiet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Live,
    Plain,
    Json,
    Quiet,
}

const UPDATE_INTERVAL: Duration = Duration::from_millis(200);

/// The reporter of one command.
#[derive(Debug)]
pub struct Progress {
    form: Form,
}

impl Progress {
    /// A reporter for stderr.
    pub fn new(mode: Mode) -> Self {
        let form = match mode {
            Mode::Auto if std::io::stderr().is_terminal() => Form::Live,
            Mode::Auto | Mode::Plain => Form::Plain,
            Mode::Json => Form::Json,
            Mode::Quiet => Form::Quiet,
        };
        Self { form }
    }

    /// Begins a step; it ends with [`Step::done`], or silently when dropped.
    pub fn step(&self, name: impl Into<String>) -> Step {
        let name = name.into();
        let bar = (self.form == Form::Live).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{spinner} {prefix}  {wide_msg} {elapsed}");
            bar.set_style(style.expect("the template is constant"));
            bar.set_prefix(name.clone());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        match self.form {
            Form::Plain => eprintln!("{name} …"),
            Form::Json => Event::Start { step: &name }.print(),
            Form::Live | Form::Quiet => {}
        }
        let started = Instant::now();
        Step { form: self.form, name, bar, started, updated: started }
    }

    /// A step whose result was there already.
    pub fn cached(&self, name: &str) {
        match self.form {
            Form::Live | Form::Plain => eprintln!("{name}: cached"),
            Form::Json => Event::Cached { step: name }.print(),
            Form::Quiet => {}
        }
    }

    /// One line that is worth knowing.
    pub fn note(&self, text: &str) {
        match self.form {
            Form::Live | Form::Plain => eprintln!("{text}"),
            Form::Json => Event::Note { detail: text }.print(),
            Form::Quiet => {}
        }
    }
}

/// A step under way.
#[derive(Debug)]
pub struct Step {
    form: Form,
    name: String,
    bar: Option<ProgressBar>,
    started: Instant,
    updated: Instant,
}

impl Step {
    /// What the step is at.
    pub fn update(&mut self, detail: impl Into<String>) {
        if let Some(bar) = &self.bar {
            bar.set_message(detail.into());
        } else if self.form == Form::Json && self.updated.elapsed() >= UPDATE_INTERVAL {
            self.updated = Instant::now();
            let seconds = self.started.elapsed().as_secs_f64();
            Event::Update { step: &self.name, detail: &detail.into(), seconds }.print();
        }
    }

    /// A line that a program of the step wrote.
    pub fn output(&mut self, stream: Stream, line: &str) {
        match self.form {
            // The last line is enough while all is well; a failure shows more.
            Form::Live => self.update(line),
            Form::Plain => eprintln!("  | {line}"),
            Form::Json => Event::Output { step: &self.name, stream, text: line }.print(),
            Form::Quiet => {}
        }
    }

    /// Why the step is done at all.
    pub fn reason(&self, reason: &str) {
        match self.form {
            Form::Live | Form::Plain => self.aside(&format!("  because {reason}")),
            Form::Json => Event::Reason { step: &self.name, detail: reason }.print(),
            Form::Quiet => {}
        }
    }

    /// A line above a live view.
    fn aside(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// The step is over; `detail` is its result in a few words.
    pub fn done(self, detail: impl AsRef<str>) {
        let (detail, seconds) = (detail.as_ref(), self.started.elapsed().as_secs_f64());
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        match self.form {
            Form::Live | Form::Plain => eprintln!("{}: {detail} ({seconds:.2} s)", self.name),
            Form::Json => Event::Done { step: &self.name, detail, seconds }.print(),
            Form::Quiet => {}
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Bytes for people: `1.5 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    #[allow(clippy::cast_precision_loss, reason = "for people")]
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_schema_is_fresh() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/progress.v1.schema.json");
        if std::env::var_os("PARBAKE_UPDATE").is_some() {
            std::fs::write(path, schema()).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert_eq!(committed, schema(), "run with PARBAKE_UPDATE=1 and commit");
    }

    #[test]
    fn lines_are_as_programs_know_them() {
        let line = |event: &Event<'_>| serde_json::to_string(event).unwrap();
        let text = line(&Event::Output { step: "[1/2] RUN x", stream: Stream::Stderr, text: "a" });
        assert_eq!(text, r#"{"event":"output","step":"[1/2] RUN x","stream":"stderr","text":"a"}"#);
        let text = line(&Event::Done { step: "bake", detail: "1 MiB", seconds: 0.5 });
        assert_eq!(text, r#"{"event":"done","step":"bake","detail":"1 MiB","seconds":0.5}"#);
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
    }
}
