//! An external guard that is asked before each command: allow, ask, or block.
//!
//! The question is one JSON document: on standard input of a program, or as the body of a `POST` to
//! a unix socket. The answer is `{"decision": "allow" | "ask" | "block", "reason": "…"}`. Whatever
//! else happens (no answer in time, a crash, nonsense) blocks. After `ask` the caller may come
//! again with `confirmed`, and the guard, which sees that, has the last word.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::{Client, Endpoint};
use crate::problem::{Kind, Problem};

/// The most that an answer may have.
const MAX_ANSWER: u64 = 64 << 10;

/// How the guard is reached.
#[derive(Debug, Clone)]
pub enum Guard {
    /// A program, started for each question.
    Program {
        /// It and its arguments.
        command: Vec<OsString>,
        /// How long it may take.
        limit: Duration,
    },
    /// A service on a unix socket.
    Socket {
        /// Where it listens.
        path: PathBuf,
        /// How long it may take.
        limit: Duration,
    },
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    decision: Decision,
    #[serde(default)]
    reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Decision {
    Allow,
    Ask,
    Block,
}

impl Guard {
    /// Returns if the guard allows what `question` describes.
    ///
    /// # Errors
    /// [`Kind::GuardBlocked`], [`Kind::GuardAsks`], or [`Kind::GuardFailed`] without an answer.
    pub fn ask(&self, question: &Value) -> Result<(), Problem> {
        let answer = match self {
            Self::Program { command, limit } => run(command, question, *limit),
            Self::Socket { path, limit } => post(path, question, *limit),
        };
        let answer = answer.map_err(|why| {
            Problem::new(Kind::GuardFailed, format!("the guard gave no answer: {why}"))
                .hint("nothing runs without one; mend the guard or start parbaked without it")
        })?;
        // What it says may be shown on a terminal.
        let reason: String = answer.reason.chars().filter(|c| !c.is_control()).take(1024).collect();
        let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        match answer.decision {
            Decision::Allow => Ok(()),
            Decision::Block => {
                Err(Problem::new(Kind::GuardBlocked, format!("the guard forbids it{because}")))
            }
            Decision::Ask => Err(Problem::new(
                Kind::GuardAsks,
                format!("the guard wants a person to confirm it{because}"),
            )
            .hint("if you are sure: again with --confirm (\"confirmed\": true)")),
        }
    }
}

/// A child in a process group of its own; gone with all its own on drop.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        let group = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        if let (Some(group), Ok(None)) = (group, self.0.try_wait()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

fn run(command: &[OsString], question: &Value, limit: Duration) -> Result<Answer, String> {
    let deadline = Instant::now() + limit;
    let (program, arguments) = command.split_first().ok_or("no program")?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
    let mut group = Group(child);
    let (stdin, stdout) = (group.0.stdin.take(), group.0.stdout.take());
    let question = question.to_string();
    let (tell, told) = mpsc::channel();
    // Both end with the process group, which ends at the limit.
    std::thread::spawn(move || {
        if let Some(mut stdin) = stdin {
            // One that decides without reading everything is fine.
            let _ = stdin.write_all(question.as_bytes());
        }
    });
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.map(|stdout| stdout.take(MAX_ANSWER).read_to_end(&mut bytes));
        let _ = tell.send(matches!(read, Some(Ok(_))).then_some(bytes));
    });
    let left = deadline.saturating_duration_since(Instant::now());
    let answer = match told.recv_timeout(left) {
        Ok(Some(answer)) => answer,
        Ok(None) => return Err("its output cannot be read".to_owned()),
        Err(_) => return Err(format!("nothing within {} s", limit.as_secs_f64())),
    };
    loop {
        match group.0.try_wait() {
            Ok(Some(status)) if status.success() => return parse(&answer),
            Ok(Some(status)) => return Err(format!("it ended with {status}")),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) => return Err(format!("it did not end within {} s", limit.as_secs_f64())),
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn post(path: &std::path::Path, question: &Value, limit: Duration) -> Result<Answer, String> {
    let client = Client::new(Endpoint::Unix(path.to_owned()), None).map_err(|e| e.to_string())?;
    let body =
        client.post_within(limit, "/", question, MAX_ANSWER).map_err(|error| error.to_string())?;
    parse(&body)
}

fn parse(bytes: &[u8]) -> Result<Answer, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("not an answer: {error}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn guard(script: &str) -> Guard {
        let command = ["sh", "-c", script].map(OsString::from).to_vec();
        Guard::Program { command, limit: Duration::from_millis(1500) }
    }

    fn ask(script: &str) -> Result<(), (Kind, String)> {
        let question = json!({ "argv": ["rm", "-rf", "/"], "confirmed": false });
        guard(script).ask(&question).map_err(|problem| (problem.kind, problem.message))
    }

    #[test]
    fn answers_are_obeyed() {
        assert_eq!(ask(r#"echo '{"decision":"allow"}'"#), Ok(()));
        let blocked = ask(r#"echo '{"decision":"block","reason":"no \u001b[31mway"}'"#);
        let (kind, message) = blocked.unwrap_err();
        assert_eq!(kind, Kind::GuardBlocked);
        assert!(message.ends_with("no [31mway"), "{message}");
        let asks = ask(
            r#"grep -q '"confirmed":true' && echo '{"decision":"allow"}' || echo '{"decision":"ask"}'"#,
        );
        assert_eq!(asks.unwrap_err().0, Kind::GuardAsks);
    }

    #[test]
    fn anything_else_blocks() {
        for script in [
            "exit 0",
            "echo yes",
            r#"echo '{"decision":"perhaps"}'"#,
            r#"echo '{"decision":"allow"}'; exit 1"#,
            r#"kill -9 $$"#,
            "yes",
            "/no/such/guard",
        ] {
            assert_eq!(ask(script).unwrap_err().0, Kind::GuardFailed, "{script}");
        }
    }

    #[test]
    fn a_guard_that_hangs_is_ended_with_its_children() {
        let mark = tempfile::NamedTempFile::new().unwrap();
        let script = format!("sleep 600 & echo $! >{}; wait", mark.path().display());
        let begun = Instant::now();
        assert_eq!(ask(&script).unwrap_err().0, Kind::GuardFailed);
        assert!(begun.elapsed() < Duration::from_secs(10));
        let pid = std::fs::read_to_string(mark.path()).unwrap();
        let stat = format!("/proc/{}/stat", pid.trim());
        // Gone, or waiting for whoever is to reap it; that takes the kernel a moment.
        let over = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
        let patience = Instant::now() + Duration::from_secs(5);
        while !over() {
            assert!(Instant::now() < patience, "{stat} is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Answers one question after this time; the second of the pair is what it was asked.
    fn serve(
        answer: &'static str,
        after: Duration,
    ) -> (tempfile::TempDir, std::thread::JoinHandle<String>) {
        let directory = tempfile::tempdir().unwrap();
        let listener =
            std::os::unix::net::UnixListener::bind(directory.path().join("guard")).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            let mut buffer = [0; 4096];
            while !asked.ends_with(b"}") {
                let count = stream.read(&mut buffer).unwrap();
                asked.extend_from_slice(&buffer[..count]);
            }
            std::thread::sleep(after);
            let length = answer.len();
            // One that gave up does not mind.
            let _ = write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{answer}");
            String::from_utf8(asked).unwrap()
        });
        (directory, thread)
    }

    #[test]
    fn a_socket_is_asked_and_obeyed_in_time() {
        let ask = |answer, after| {
            let (directory, thread) = serve(answer, after);
            let path = directory.path().join("guard");
            let guard = Guard::Socket { path, limit: Duration::from_millis(1500) };
            let answer = guard.ask(&json!({ "argv": ["true"] })).map_err(|problem| problem.kind);
            (answer, thread.join().unwrap())
        };
        let (allowed, asked) = ask(r#"{"decision":"allow"}"#, Duration::ZERO);
        assert_eq!(allowed, Ok(()));
        assert!(asked.starts_with("POST / ") && asked.ends_with(r#"{"argv":["true"]}"#), "{asked}");
        let blocked = ask(r#"{"decision":"block"}"#, Duration::ZERO).0;
        assert_eq!(blocked, Err(Kind::GuardBlocked));
        let late = ask(r#"{"decision":"allow"}"#, Duration::from_secs(3)).0;
        assert_eq!(late, Err(Kind::GuardFailed));
        assert_eq!(ask("perhaps", Duration::ZERO).0, Err(Kind::GuardFailed));
    }

    #[test]
    fn a_socket_that_nobody_serves_blocks() {
        let guard = Guard::Socket { path: "/no/such/socket".into(), limit: Duration::from_secs(1) };
        assert_eq!(guard.ask(&json!({})).unwrap_err().kind, Kind::GuardFailed);
    }
}
