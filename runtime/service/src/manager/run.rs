//! Commands in sandboxes, and what sandboxes cost the host.

use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parbake_protocol::agent::{
    self, AGENT_PORT, Client, ClientError, ExecEvent, ExecInput, ExecOutput, ExecRequest as Order,
    WindowSize,
};
use serde_json::{Value, json};

use super::{Entry, Manager, lock, running};
use crate::model::{ExecRequest, ExitStatus, StartFailure, Word};
use crate::problem::{Kind, Problem};

/// Clock ticks a second in `/proc`; the same on every Linux there is.
const TICKS: u64 = 100;

/// A command in a sandbox. Dropping it ends the command and everything it started.
#[derive(Debug)]
pub struct Execution {
    /// What goes to it; for other threads.
    pub input: ExecInput<UnixStream>,
    output: ExecOutput<UnixStream>,
    first: Option<ExecEvent>,
    manager: Arc<Manager>,
    actor: String,
    ticket: Ticket,
    begun: Instant,
    output_bytes: u64,
    told: bool,
}

/// A place among a sandbox's commands.
#[derive(Debug)]
pub(super) struct Ticket(Arc<Entry>);

impl Ticket {
    pub(super) fn entry(&self) -> &Entry {
        &self.0
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut facts = lock(&self.0.facts);
        facts.executions = facts.executions.saturating_sub(1);
    }
}

impl Execution {
    /// Waits for what happens next. `Exited` and `Failed` are last.
    ///
    /// # Errors
    /// The guest is gone, or says what makes no sense.
    pub fn next_event(&mut self) -> Result<ExecEvent, ClientError> {
        let event = match self.first.take() {
            Some(event) => event,
            None => self.output.next_event()?,
        };
        match &event {
            ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => {
                self.output_bytes += bytes.len() as u64;
            }
            ExecEvent::Exited(exit) => self.tell(json!({ "exit": ExitStatus::from(exit) })),
            ExecEvent::Failed(failure) => self.tell(json!({
                "failed": StartFailure {
                    exit_code: failure.shell_code(),
                    message: failure.to_string(),
                }
            })),
            ExecEvent::Started { .. } => {}
        }
        Ok(event)
    }

    /// Writes down how it ended.
    fn tell(&mut self, mut detail: Value) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        detail["outputBytes"] = json!(self.output_bytes);
        detail["ms"] = json!(u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX));
        self.manager.note(&self.actor, "execEnded", Some(&self.ticket.0.id), detail);
    }

    /// A command that was started to be let alone has nothing more to tell.
    pub fn leave(mut self) {
        self.tell(json!({ "detached": true }));
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        let _ = self.input.hang_up();
        // The caller went away, or the guest did.
        self.tell(json!({ "hungUp": true }));
    }
}

impl Manager {
    /// Starts a command: it runs, or could not be started, when this returns.
    ///
    /// # Errors
    /// The sandbox, the guard, the audit log, or a guest that does not answer.
    pub fn exec(
        self: &Arc<Self>,
        actor: &str,
        id: &str,
        request: &ExecRequest,
    ) -> Result<Execution, Problem> {
        self.exec_inner(actor, id, request)
            .map_err(|problem| self.failed(actor, "exec", Some(id), problem))
    }

    fn exec_inner(
        self: &Arc<Self>,
        actor: &str,
        id: &str,
        request: &ExecRequest,
    ) -> Result<Execution, Problem> {
        let begun = Instant::now();
        self.refuse_when_draining()?;
        let order = order(request)?;
        let (ticket, first) = self.ticket(id)?;
        let mut question = json!({
            "argv": request.argv,
            "env": request.env.keys().collect::<Vec<_>>(),
            "cwd": request.cwd,
            "user": request.user,
            "tty": request.tty.is_some(),
            "detach": request.detach,
            "confirmed": request.confirmed,
        });
        if let Some(guard) = &self.config.guard {
            let mut full = question.clone();
            {
                let facts = lock(&ticket.0.facts);
                full["version"] = json!(1);
                full["actor"] = json!(actor);
                full["sandbox"] = json!(id);
                full["template"] = json!(facts.record.template);
                full["labels"] = json!(facts.record.labels);
            }
            guard.ask(&full)?;
            question["guard"] = json!("allowed");
        }
        self.report(actor, "exec", Some(id), question)?;
        let (input, output, event) = self.launch(&ticket.0, order)?;
        self.metrics.executed(first, begun.elapsed());
        Ok(Execution {
            input,
            output,
            first: Some(event),
            manager: Arc::clone(self),
            actor: actor.to_owned(),
            ticket,
            begun,
            output_bytes: 0,
            told: false,
        })
    }

    /// Takes a place among the sandbox's commands; the second of the pair says whether it is the
    /// first ever.
    pub(super) fn ticket(&self, id: &str) -> Result<(Ticket, bool), Problem> {
        let entry = self.entry(id)?;
        let mut facts = lock(&entry.facts);
        running(id, &facts)?;
        facts.executions += 1;
        facts.executed += 1;
        let first = facts.executed == 1;
        drop(facts);
        Ok((Ticket(entry), first))
    }

    /// A connection to a sandbox's agent.
    pub(super) fn connect(&self, ticket: &Ticket) -> Result<Client<UnixStream>, Problem> {
        self.connect_to(&ticket.0)
    }

    fn connect_to(&self, entry: &Entry) -> Result<Client<UnixStream>, Problem> {
        let socket = entry.directory.join("vsock");
        let stream = agent::connect_vsock_uds(socket, AGENT_PORT, self.config.answer_timeout)
            .map_err(|error| self.blame(entry, error.into()))?;
        let mut client = Client::new(stream);
        client.set_timeout(Some(self.config.answer_timeout));
        Ok(client)
    }

    /// An agent that does not answer often means a machine that is gone; that says more.
    pub(super) fn blame(&self, entry: &Entry, error: ClientError) -> Problem {
        let ended = match entry.machine.try_lock() {
            Ok(mut machine) => machine.as_mut().and_then(|machine| machine.ended_by_itself()),
            Err(_) => None,
        };
        ended.map_or_else(|| Problem::from(error), Problem::from)
    }

    /// Hands a command to the guest and waits for the first that happens.
    pub(super) fn launch(
        &self,
        entry: &Entry,
        order: Order,
    ) -> Result<(ExecInput<UnixStream>, ExecOutput<UnixStream>, ExecEvent), Problem> {
        let client = self.connect_to(entry)?;
        let session = client.exec(order).map_err(|error| self.blame(entry, error))?;
        let (input, mut output) = session.split();
        let patience = |output: &mut ExecOutput<UnixStream>, time: Option<Duration>| {
            output.set_timeout(time).map_err(|error| Problem::from(ClientError::from(error)))
        };
        patience(&mut output, Some(self.config.answer_timeout))?;
        let event = output.next_event().map_err(|error| self.blame(entry, error))?;
        patience(&mut output, None)?;
        Ok((input, output, event))
    }
}

/// What the agent is asked.
fn order(request: &ExecRequest) -> Result<Order, Problem> {
    let bad = |why: String| Problem::new(Kind::BadRequest, why);
    let word = |word: &Word| match word {
        Word::Text(text) => Ok(text.clone().into_bytes()),
        Word::Data(data) => data.bytes(),
    };
    let argv: Result<Vec<Vec<u8>>, String> = request.argv.iter().map(word).collect();
    let argv = argv.map_err(|why| bad(format!("argv: {why}")))?;
    if argv.first().is_none_or(Vec::is_empty) {
        return Err(bad("argv has no program in it".to_owned()));
    }
    if request.detach && (request.stdin || request.tty.is_some() || request.input.is_some()) {
        return Err(bad("a detached command has neither input nor a terminal".to_owned()));
    }
    let mut order = Order::new(argv);
    for (name, value) in &request.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(bad(format!("env: {name:?} is no name, or its value has a NUL in it")));
        }
        order.env.push(format!("{name}={value}").into_bytes());
    }
    order.cwd = request.cwd.clone().unwrap_or_default().into_bytes();
    order.user = request.user.clone().unwrap_or_default();
    order.tty = request.tty.map(|size| WindowSize { rows: size.rows, columns: size.columns });
    order.stdin = request.stdin || request.input.is_some();
    order.timeout_ms = request.timeout_ms;
    order.output_limit = request.output_limit_bytes;
    order.detach = request.detach;
    Ok(order)
}

/// A process's memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Memory {
    pub private: u64,
    pub proportional: u64,
}

/// What a process's memory is; nothing where the host does not say.
pub(super) fn memory_of(pid: u32) -> Memory {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let mut memory = Memory::default();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once(':') else { continue };
        let Some(kib) = rest.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()) else {
            continue;
        };
        match name {
            "Pss" => memory.proportional = kib * 1024,
            "Private_Clean" | "Private_Dirty" => memory.private += kib * 1024,
            _ => {}
        }
    }
    memory
}

/// A process's processor time in milliseconds.
pub(super) fn cpu_ms_of(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name, which may have anything in it but is the last to have a parenthesis.
    let fields: Vec<&str> = text
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let field = |at: usize| fields.get(at).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    (field(11) + field(12)) * (1000 / TICKS)
}

/// The failure of a command whose guest went away.
#[must_use]
pub fn gone(error: &ClientError) -> StartFailure {
    StartFailure { exit_code: 125, message: format!("the sandbox is gone: {error}") }
}

/// What a stream's failure means to its reader.
pub(super) fn told(problem: &Problem) -> io::Error {
    io::Error::other(problem.message.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Data;

    #[test]
    fn command_lines_are_bytes() {
        let request = ExecRequest {
            argv: vec![
                Word::Text("echo".into()),
                Word::Data(Data::new(vec![0xff, 0xfe])),
                Word::Text("ä".into()),
            ],
            ..ExecRequest::default()
        };
        let json = serde_json::to_string(&request).unwrap();
        let back: ExecRequest = serde_json::from_str(&json).unwrap();
        assert_eq!(order(&back).unwrap().argv, [&b"echo"[..], &[0xff, 0xfe], "ä".as_bytes()]);
        let bad = |argv: Vec<Word>| order(&ExecRequest { argv, ..Default::default() }).is_err();
        assert!(bad(vec![]));
        assert!(bad(vec![Word::Text(String::new())]));
        assert!(bad(vec![Word::Data(Data { text: None, base64: Some("!".into()) })]));
        assert!(bad(vec![Word::Data(Data::default())]));
    }

    #[test]
    fn this_process_has_memory_and_takes_time() {
        let memory = memory_of(std::process::id());
        assert!(memory.proportional > 100_000, "{memory:?}");
        while cpu_ms_of(std::process::id()) == 0 {}
    }
}
