//! Before the freeze: nothing running, nothing dirty, nothing left over.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use parbake_protocol::agent::{Failure, FailureKind, QuiesceReport, QuiesceRequest, Step};

use crate::connection::failure;
use crate::serve::Agent;
use crate::zero;

/// How long killed sessions may take to be gone.
const SESSIONS_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the connections may take to be gone.
const HANG_UP_TIMEOUT: Duration = Duration::from_secs(2);

/// Files that must not be cloned: every clone would start from the same seed.
const SEEDS: [&str; 4] = [
    "/var/lib/systemd/random-seed",
    "/var/lib/urandom/random-seed",
    "/var/lib/misc/random-seed",
    "/var/lib/seedrng",
];

/// Runs the steps asked for. `connection` is the one that asks, and is kept.
///
/// # Errors
/// The machine is not the agent's, or sessions run and may not be ended.
pub fn run(
    agent: &Agent,
    connection: u64,
    request: &QuiesceRequest,
) -> Result<QuiesceReport, Failure> {
    agent.must_own_machine()?;
    end_sessions(agent, request)?;
    let mut report = QuiesceReport::default();
    let steps = &mut report.steps;
    if request.freeze {
        // From here on no program can be started, whether or not the freeze succeeds.
        agent.state().frozen = true;
        step(steps, "freeze", || match &agent.options.cgroup {
            Some(cgroup) => cgroup.freeze().map(|()| String::new()),
            None => Err(io::Error::other("there is no user cgroup")),
        });
    }
    if request.forget_identity {
        step(steps, "forget_identity", forget_seeds);
    }
    if request.sync {
        step(steps, "sync", || {
            rustix::fs::sync();
            Ok(String::new())
        });
    }
    if request.drop_caches {
        step(steps, "drop_caches", || {
            fs::write("/proc/sys/vm/drop_caches", "3").map(|()| String::new())
        });
    }
    if let Some(fill) = &request.zero_free_memory {
        let mut zeroed = 0;
        step(steps, "zero_free_memory", || {
            zeroed = zero::fill(fill, &agent.children)?;
            Ok(format!("{} MiB", zeroed >> 20))
        });
        report.zeroed_bytes = zeroed;
    }
    if request.close_connections {
        step(&mut report.steps, "close_connections", || {
            agent.hang_up_all_but(connection);
            let deadline = Instant::now() + HANG_UP_TIMEOUT;
            while agent.active() > 1 && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            match agent.active() {
                0 | 1 => Ok(String::new()),
                n => Err(io::Error::other(format!("{} connections are still open", n - 1))),
            }
        });
    }
    Ok(report)
}

/// Runs one step and notes how it went and how long it took.
pub(crate) fn step(steps: &mut Vec<Step>, name: &str, run: impl FnOnce() -> io::Result<String>) {
    let begin = Instant::now();
    let (error, note) = match run() {
        Ok(note) => (None, note),
        Err(e) => (Some(e.to_string()), String::new()),
    };
    let micros = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
    steps.push(Step { name: name.to_owned(), error, note, micros });
}

fn end_sessions(agent: &Agent, request: &QuiesceRequest) -> Result<(), Failure> {
    let running = agent.sessions.count();
    if running == 0 || !(request.freeze || request.end_sessions) {
        return Ok(());
    }
    if !request.end_sessions {
        return Err(failure(
            FailureKind::BadRequest,
            format!("{running} commands are running; end them first or ask for end_sessions"),
        ));
    }
    let deadline = Instant::now() + SESSIONS_TIMEOUT;
    while agent.sessions.count() > 0 {
        agent.sessions.end_all();
        if Instant::now() > deadline {
            return Err(failure(FailureKind::System, "a command does not end"));
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn forget_seeds() -> io::Result<String> {
    let mut removed = Vec::new();
    for path in SEEDS.map(Path::new) {
        let result = match fs::symlink_metadata(path) {
            Err(_) => continue,
            Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
        };
        result.map_err(|e| io::Error::other(format!("{}: {e}", path.display())))?;
        removed.push(path.display().to_string());
    }
    Ok(removed.join(" "))
}
