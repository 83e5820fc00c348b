//! What is done in a booted guest before the freeze: its process, its checks, its warm-up.
//!
//! ```text
//! start ─► checks hold ─► settle ─► checks hold ─► warm-up ─► checks hold ─► (freeze)
//!            ▲     │ no: wait, look again, until the time is up
//!            └─────┘
//! ```
//! Everything goes through the guest agent: commands with the image's environment and user, the
//! other checks as the agent's own `check`, which needs nothing of the image.

use std::path::Path;
use std::time::{Duration, Instant};

use parbake_cache::template::{
    BakeInstructions, GuestCheck, HttpRequest, ProcessConfig, WarmupStep,
};
use parbake_node::sandbox::{Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::{ClientError, ExecEvent, ExecRequest};

use super::{BakeError, BakeEvent};

/// The agent inside the guest, whatever has become of the initramfs it came from.
const AGENT: &str = "/proc/1/exe";

/// The end of what a command or the console said that is shown.
const SHOWN: usize = 2 << 10;

/// The most that a command may say.
const OUTPUT_LIMIT: u64 = 1 << 20;

/// How long a look takes that asks for no time of its own.
const LOOK: Duration = Duration::from_secs(15);

/// How long a restored guest's checks may take to hold, at most.
const CONFIRM: Duration = Duration::from_secs(20);

/// How often an interruption is looked for.
const TICK: Duration = Duration::from_millis(200);

/// A guest being brought to the point where it is frozen.
pub(super) struct Guest<'a> {
    pub sandbox: &'a mut Sandbox,
    pub process: &'a ProcessConfig,
    pub instructions: &'a BakeInstructions,
    pub options: &'a SandboxOptions,
    /// All times count this often.
    pub patience: u32,
    /// The image's process, once it was started.
    pub pid: Option<u32>,
}

/// How a command ended.
struct Ended {
    ok: bool,
    how: String,
    output: String,
}

/// A check that does not hold.
struct Miss {
    check: String,
    output: String,
}

impl Guest<'_> {
    /// Everything before the freeze.
    pub fn prepare(&mut self, events: &mut dyn FnMut(BakeEvent)) -> Result<(), BakeError> {
        if self.instructions.start_process {
            self.start(events)?;
        }
        self.wait_ready(events)?;
        self.warm_up(events)?;
        // Warming up takes time and memory, and services die of either.
        if !self.instructions.warmup.is_empty() {
            events(BakeEvent::Checking("once more".to_owned()));
            let deadline = Instant::now() + self.time(self.instructions.ready.timeout_ms);
            if let Some(miss) = self.round(deadline)? {
                let check = format!("{}, which held before,", miss.check);
                return Err(self.not_ready(Miss { check, ..miss }));
            }
        }
        self.still_running()
    }

    /// Whether the checks hold in a restored guest, which may need a moment to take up its timers
    /// and connections again; if not, which does not, and what it says.
    pub fn confirm(&mut self) -> Result<Option<String>, BakeError> {
        let ready = &self.instructions.ready;
        let limit = self.time(ready.timeout_ms).min(CONFIRM * self.patience.max(1));
        let (interval, deadline) = (ready.interval_ms.max(10), Instant::now() + limit);
        loop {
            match self.round(deadline)? {
                None => return Ok(None),
                Some(miss) if Instant::now() >= deadline => {
                    return Ok(Some(format!("{} does not hold: {}", miss.check, miss.output)));
                }
                Some(_) => self.pause(Duration::from_millis(interval))?,
            }
        }
    }

    fn start(&mut self, events: &mut dyn FnMut(BakeEvent)) -> Result<(), BakeError> {
        events(BakeEvent::Starting(shown(&self.argv())));
        let mut request = ExecRequest::new(self.argv());
        request.detach = true;
        let mut session = self.connect()?.exec(request).map_err(SandboxError::Agent)?;
        session.output.set_timeout(Some(LOOK)).map_err(BakeError::Files)?;
        match session.next_event().map_err(SandboxError::Agent)? {
            ExecEvent::Started { pid } => {
                self.pid = Some(pid);
                Ok(())
            }
            ExecEvent::Failed(failure) => {
                Err(self.start_failed(failure.to_string(), String::new()))
            }
            _ => Err(SandboxError::Agent(ClientError::Unexpected).into()),
        }
    }

    fn argv(&self) -> Vec<String> {
        self.process.entrypoint.iter().chain(&self.process.cmd).cloned().collect()
    }

    fn start_failed(&self, how: String, output: String) -> BakeError {
        let (command, console) = (shown(&self.argv()), self.console());
        BakeError::Ended { command, how, output, console }
    }

    fn still_running(&mut self) -> Result<(), BakeError> {
        let Some(pid) = self.pid else { return Ok(()) };
        let look = self.agent_check(["alive".to_owned(), pid.to_string()]);
        if self.exec(look, self.look())?.ok {
            return Ok(());
        }
        // What it said went nowhere. The guest is lost anyway, so it may say it again.
        let mut request = ExecRequest::new(self.argv());
        request.output_limit = Some(OUTPUT_LIMIT);
        let again = self.exec(request, Instant::now() + Duration::from_secs(5) * self.patience)?;
        let how = format!("started again, {}", again.how);
        Err(self.start_failed(how, again.output))
    }

    fn wait_ready(&mut self, events: &mut dyn FnMut(BakeEvent)) -> Result<(), BakeError> {
        let ready = &self.instructions.ready;
        let (interval, settle) = (ready.interval_ms.max(10), self.time(ready.settle_ms));
        if ready.checks.is_empty() {
            return if self.pid.is_some() { self.pause(settle) } else { Ok(()) };
        }
        let deadline = Instant::now() + self.time(ready.timeout_ms);
        let mut settled = settle.is_zero();
        loop {
            self.still_running()?;
            match self.round(deadline)? {
                None if settled => return Ok(()),
                None => {
                    events(BakeEvent::Checking("settling".to_owned()));
                    self.pause(settle)?;
                    settled = true;
                }
                Some(miss) if Instant::now() >= deadline => return Err(self.not_ready(miss)),
                Some(miss) => {
                    events(BakeEvent::Checking(miss.check));
                    settled = settle.is_zero();
                    self.pause(Duration::from_millis(interval))?;
                }
            }
        }
    }

    fn not_ready(&self, miss: Miss) -> BakeError {
        BakeError::NotReady {
            after: self.time(self.instructions.ready.timeout_ms),
            check: miss.check,
            output: miss.output,
            console: self.console(),
        }
    }

    /// Looks at every check once; the first that does not hold is the answer.
    fn round(&mut self, deadline: Instant) -> Result<Option<Miss>, BakeError> {
        let instructions = self.instructions;
        for check in &instructions.ready.checks {
            let (check, request) = match check {
                GuestCheck::Tcp(port) => (
                    format!("tcp port {port}"),
                    self.agent_check(["tcp".to_owned(), port.to_string()]),
                ),
                GuestCheck::Http(request) => (described(request), self.http(request)),
                GuestCheck::File(path) => {
                    (format!("file {path}"), self.agent_check(["file".to_owned(), path.clone()]))
                }
                GuestCheck::Process(name) => (
                    format!("process {name}"),
                    self.agent_check(["process".to_owned(), name.clone()]),
                ),
                GuestCheck::Exec(argv) => {
                    (format!("exec {}", shown(argv)), ExecRequest::new(argv.clone()))
                }
            };
            // A check that hangs does not hold; one that began gets its time to answer.
            let limit = deadline.max(Instant::now() + Duration::from_secs(1) * self.patience);
            let ended = self.exec(request, limit)?;
            if !ended.ok {
                let output = format!("{}\n{}", ended.how, ended.output).trim_end().to_owned();
                return Ok(Some(Miss { check, output }));
            }
        }
        Ok(None)
    }

    fn warm_up(&mut self, events: &mut dyn FnMut(BakeEvent)) -> Result<(), BakeError> {
        let instructions = self.instructions;
        let deadline = Instant::now() + self.time(instructions.warmup_timeout_ms);
        let all = instructions.warmup.len();
        for (index, step) in instructions.warmup.iter().enumerate() {
            let (text, request) = match step {
                WarmupStep::Exec(argv) => (shown(argv), ExecRequest::new(argv.clone())),
                WarmupStep::Http(request) => (described(request), self.http(request)),
            };
            events(BakeEvent::WarmUp { step: index + 1, steps: all, text: text.clone() });
            let ended = self.exec(request, deadline)?;
            if !ended.ok {
                return Err(BakeError::WarmUp {
                    step: format!("{} of {all}, {text}", index + 1),
                    how: ended.how,
                    output: ended.output,
                    console: self.console(),
                });
            }
        }
        Ok(())
    }

    fn agent_check(&self, words: [String; 2]) -> ExecRequest {
        let argv = [AGENT.to_owned(), "check".to_owned()].into_iter().chain(words);
        ExecRequest { no_template_defaults: true, ..ExecRequest::new(argv) }
    }

    fn http(&self, request: &HttpRequest) -> ExecRequest {
        let mut check = self.agent_check(["http".to_owned(), request.url.clone()]);
        check.argv.push(request.status.to_string().into_bytes());
        check
    }

    /// Runs a command to its end, at the latest until `deadline`.
    fn exec(&mut self, mut request: ExecRequest, deadline: Instant) -> Result<Ended, BakeError> {
        let time = deadline.saturating_duration_since(Instant::now()).max(TICK);
        request.timeout_ms = u64::try_from(time.as_millis()).ok();
        request.output_limit = Some(OUTPUT_LIMIT);
        let mut session = self.connect()?.exec(request).map_err(SandboxError::Agent)?;
        session.output.set_timeout(Some(TICK)).map_err(BakeError::Files)?;
        // The agent ends what takes too long; a guest that does not even do that has hung.
        let hung = deadline.max(Instant::now() + time) + LOOK * self.patience;
        let mut output = Vec::new();
        loop {
            match session.next_event() {
                Ok(ExecEvent::Started { .. }) => {}
                Ok(ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes)) => {
                    output.extend_from_slice(&bytes);
                }
                Ok(ExecEvent::Exited(exit)) => {
                    let how = match exit.shell_code() {
                        124 => format!("not done within {} s", time.as_secs().max(1)),
                        code => format!("exit code {code}"),
                    };
                    let ok = exit.code == Some(0);
                    return Ok(Ended { ok, how, output: tail(&output) });
                }
                Ok(ExecEvent::Failed(failure)) => {
                    return Ok(Ended {
                        ok: false,
                        how: failure.to_string(),
                        output: tail(&output),
                    });
                }
                Err(ClientError::TimedOut) if Instant::now() < hung => self.interruption()?,
                Err(error) => return Err(SandboxError::Agent(error).into()),
            }
        }
    }

    fn connect(
        &mut self,
    ) -> Result<parbake_protocol::agent::Client<std::os::unix::net::UnixStream>, BakeError> {
        self.interruption()?;
        Ok(self.sandbox.connect()?)
    }

    fn interruption(&self) -> Result<(), BakeError> {
        if self.options.cancelled.is_some_and(|cancelled| cancelled()) {
            return Err(SandboxError::Interrupted.into());
        }
        Ok(())
    }

    fn pause(&self, time: Duration) -> Result<(), BakeError> {
        let until = Instant::now() + time;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            self.interruption()?;
            std::thread::sleep(left.min(TICK));
        }
        Ok(())
    }

    fn time(&self, milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds).saturating_mul(self.patience.max(1))
    }

    fn look(&self) -> Instant {
        Instant::now() + LOOK * self.patience
    }

    fn console(&self) -> String {
        console(&self.sandbox.console())
    }
}

fn console(path: &Path) -> String {
    tail(&std::fs::read(path).unwrap_or_default())
}

/// The end of what a guest said, without what a terminal might obey.
fn tail(bytes: &[u8]) -> String {
    let start = bytes.len().saturating_sub(SHOWN);
    let text = String::from_utf8_lossy(&bytes[start..]);
    let clean: String =
        text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
    clean.trim().to_owned()
}

fn described(request: &HttpRequest) -> String {
    format!("http {} with status {}", request.url, request.status)
}

/// A command line for people: one line, not too long.
fn shown(argv: &[String]) -> String {
    let words = match argv {
        // A line for the shell is what a person wrote.
        [shell, flag, line] if shell.ends_with("sh") && flag.starts_with('-') => line.clone(),
        _ => argv.join(" "),
    };
    let line = words.lines().next().unwrap_or_default();
    let mut text: String = line.chars().take(120).collect();
    if text.len() < words.len() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_says_is_shown_safely() {
        assert_eq!(tail(b"a\x1b[2Jb\r\n\tc\n\n"), "a[2Jb\n\tc");
        let long = vec![b'x'; 10_000];
        assert_eq!(tail(&long).len(), SHOWN);
        // Cut inside of a character.
        let text = "ä".repeat(SHOWN);
        assert!(tail(&[text.as_bytes(), b"!"].concat()).ends_with("ä!"));
    }

    #[test]
    fn command_lines_are_short() {
        let argv = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(&argv(&["/bin/sh", "-ec", "a b\nc"])), "a b…");
        assert_eq!(shown(&argv(&["psql", "-c", "select 1"])), "psql -c select 1");
        assert_eq!(shown(&argv(&[&"x".repeat(500)])).chars().count(), 121);
    }
}
