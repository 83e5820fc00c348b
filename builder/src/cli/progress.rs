//! Progress on stderr: a live view on a terminal, plain lines elsewhere, JSON lines for programs.
//!
//! The JSON form is one document a line: `{"event":"start"|"update"|"done"|"note", "step":…,
//! "detail":…, "seconds":…}`. `seconds` counts from the start of the step; `update` comes at most
//! five times a second. A build's steps also have `cached` (instead of `start` and `done`),
//! `reason` (with `--explain`) and `output` (with `stream` and `text`: one line of a program).

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

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
            Form::Json => eprintln!("{}", json!({ "event": "start", "step": name })),
            Form::Live | Form::Quiet => {}
        }
        let started = Instant::now();
        Step { form: self.form, name, bar, started, updated: started }
    }

    /// A step whose result was there already.
    pub fn cached(&self, name: &str) {
        match self.form {
            Form::Live | Form::Plain => eprintln!("{name}: cached"),
            Form::Json => eprintln!("{}", json!({ "event": "cached", "step": name })),
            Form::Quiet => {}
        }
    }

    /// One line that is worth knowing.
    pub fn note(&self, text: &str) {
        match self.form {
            Form::Live | Form::Plain => eprintln!("{text}"),
            Form::Json => eprintln!("{}", json!({ "event": "note", "detail": text })),
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
            let event = json!({ "event": "update", "step": self.name, "detail": detail.into(),
                "seconds": seconds });
            eprintln!("{event}");
        }
    }

    /// A line that a program of the step wrote.
    pub fn output(&mut self, stream: &str, line: &str) {
        match self.form {
            // The last line is enough while all is well; a failure shows more.
            Form::Live => self.update(line),
            Form::Plain => eprintln!("  | {line}"),
            Form::Json => eprintln!(
                "{}",
                json!({ "event": "output", "step": self.name, "stream": stream, "text": line })
            ),
            Form::Quiet => {}
        }
    }

    /// Why the step is done at all.
    pub fn reason(&self, reason: &str) {
        match self.form {
            Form::Live | Form::Plain => self.aside(&format!("  because {reason}")),
            Form::Json => {
                let event = json!({ "event": "reason", "step": self.name, "detail": reason });
                eprintln!("{event}");
            }
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
            Form::Json => eprintln!(
                "{}",
                json!({ "event": "done", "step": self.name, "detail": detail, "seconds": seconds })
            ),
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
    fn bytes_are_readable() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
    }
}
