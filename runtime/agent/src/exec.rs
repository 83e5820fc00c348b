//! One running program and its client: a single poll loop moves everything between them.
//!
//! ```text
//!  running ──program exits──► draining ──streams empty──► flushing ──► EXITED sent, closed
//!     │                                                      ▲
//!     ├──timeout, quiesce: kill──────────► (exits) ──────────┘
//!     └──client gone: kill──► (exits) ──► closed, nothing sent
//! ```
//!
//! Output is read only while there is room to forward it, so a slow client slows the program, not
//! the agent. After the program's own exit only what its streams hold at that moment is delivered:
//! a background process that keeps them open does not keep the session open.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use parbake_protocol::agent::{
    DATA_CHUNK, ExecRequest, Exit, ExitReason, Failure, FailureKind, Frame, FrameError,
    STDIN_WINDOW,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::cgroup::SessionCgroup;
use crate::connection::{Connection, failure, to_timespec};
use crate::serve::{Agent, environment};
use crate::spawn::{Program, Running, spawn};
use crate::streams::Streams;
use crate::terminal;
use crate::{environment as env, kernel, users};

/// Output waiting for the client beyond which the program's streams are not read.
const BACKLOG: usize = 4 * DATA_CHUNK;

/// Credit is given back in portions of at least this, or when all input has been written.
const CREDIT_STEP: usize = 32 << 10;

/// How long a terminal may take to hang up after its program's exit.
const HANGUP: Duration = Duration::from_secs(1);

/// Serves one exec request to its end.
///
/// # Errors
/// The client's stream failed or carried nonsense; the program has been killed then.
pub fn session(
    agent: &Agent,
    mut client: Connection,
    request: &ExecRequest,
) -> Result<(), FrameError> {
    match start(agent, request) {
        Ok(started) if request.detach => {
            detach(agent, &mut client, started)?;
            client.finish();
        }
        Ok(started) => {
            let mut session = Session::new(agent, client, request, started);
            session.run()?;
            session.client.finish();
        }
        Err(failed) => {
            client.send(&Frame::Failed(failed))?;
            client.finish();
        }
    }
    Ok(())
}

/// What others need in order to end a session.
#[derive(Debug)]
pub struct SessionHandle {
    cgroup: Option<SessionCgroup>,
    ended: AtomicBool,
}

/// The sessions that run, by their program's pid. An entry is there exactly as long as the program
/// has not been reaped, so the pid cannot be another's.
#[derive(Debug, Default)]
pub struct Sessions(Mutex<BTreeMap<i32, SessionHandle>>);

impl Sessions {
    /// How many.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Kills everything they started.
    pub fn end_all(&self) {
        for (pid, session) in self.lock().iter() {
            session.ended.store(true, Ordering::SeqCst);
            session.kill(*pid);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<i32, SessionHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SessionHandle {
    fn kill(&self, pid: i32) {
        // The program may have moved on to its end; that is as good.
        let _ = kernel::kill(-pid, libc::SIGKILL);
        if let Some(cgroup) = &self.cgroup {
            let _ = cgroup.kill();
        }
    }
}

struct Started {
    running: Running,
    cgroup: Option<SessionCgroup>,
    input: Option<OwnedFd>,
    output: Option<OwnedFd>,
    errors: Option<OwnedFd>,
    terminal: bool,
}

fn start(agent: &Agent, request: &ExecRequest) -> Result<Started, Failure> {
    let state = agent.state().clone();
    if state.frozen {
        return Err(failure(
            FailureKind::Frozen,
            "the guest is frozen for a snapshot; send its fixup first",
        ));
    }
    let Some(command) = request.argv.first().filter(|c| !c.is_empty()) else {
        return Err(failure(FailureKind::BadRequest, "no command given"));
    };
    let defaults = !request.no_template_defaults;
    let name = if request.user.is_empty() && defaults { &state.config.user } else { &request.user };
    let user = users::resolve(name, "/".as_ref())?;
    let cwd: &[u8] = match (&*request.cwd, &*state.config.cwd) {
        ([], template) if defaults && !template.is_empty() => template,
        ([], _) => b"/",
        (wanted, _) => wanted,
    };
    let environment = environment(&state, request, &user);
    let path = environment.get(b"PATH").unwrap_or(env::DEFAULT_PATH);
    let candidates = env::candidates(command, path);
    let system = |e: io::Error| failure(FailureKind::System, format!("cannot start: {e}"));

    let streams = Streams::open(request, &user).map_err(system)?;
    let cgroup = match &agent.options.cgroup {
        Some(user_cgroup) => Some(user_cgroup.session().map_err(system)?),
        None => None,
    };
    let entrance = match &cgroup {
        Some(cgroup) => Some(cgroup.entrance().map_err(system)?),
        None => None,
    };
    let program = Program {
        argv: &request.argv,
        env: environment.entries(),
        candidates: &candidates,
        cwd,
        user: &user,
        stdio: [&streams.theirs[0], &streams.theirs[1], &streams.theirs[2]],
        terminal: request.tty.is_some(),
        cgroup: entrance.as_ref(),
    };
    match spawn(&program, &agent.children) {
        Ok(running) => Ok(Started {
            running,
            cgroup,
            input: streams.input,
            output: streams.output,
            errors: streams.errors,
            terminal: request.tty.is_some(),
        }),
        Err(failed) => {
            retire(agent, cgroup);
            Err(failed)
        }
    }
}

fn retire(agent: &Agent, cgroup: Option<SessionCgroup>) {
    if let (Some(all), Some(one)) = (&agent.options.cgroup, cgroup) {
        all.retire(one);
    }
}

/// Reports the pid and leaves the program to itself.
fn detach(agent: &Agent, client: &mut Connection, started: Started) -> Result<(), FrameError> {
    let Running { pid, pidfd } = started.running;
    if agent.options.init {
        agent.children.reaped(pid);
    } else {
        let reaper = std::thread::Builder::new().stack_size(64 << 10);
        let _ = reaper.spawn(move || {
            let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
        });
    }
    retire(agent, started.cgroup);
    client.send(&Frame::Started(pid.unsigned_abs()))
}

/// What is left to be read from a stream of the program.
struct Source {
    fd: Option<OwnedFd>,
    stderr: bool,
    /// Once the program has exited: the bytes still to be delivered.
    remaining: Option<usize>,
}

struct Session<'a> {
    agent: &'a Agent,
    client: Connection,
    pid: i32,
    pidfd: OwnedFd,
    terminal: bool,
    input: Option<OwnedFd>,
    /// Input accepted from the client and not yet written.
    queue: VecDeque<u8>,
    input_ended: bool,
    /// The last byte written, to know whether a terminal's line is open.
    last_input: u8,
    owed_credit: usize,
    sources: [Source; 2],
    /// Encoded frames waiting for the client, from `sent` on.
    backlog: Vec<u8>,
    sent: usize,
    output_left: Option<u64>,
    truncated: bool,
    deadline: Option<Instant>,
    /// When to stop waiting for a terminal to hang up.
    hangup: Option<Instant>,
    timed_out: bool,
    exit: Option<Exit>,
    announced: bool,
}

impl<'a> Session<'a> {
    fn new(agent: &'a Agent, client: Connection, request: &ExecRequest, started: Started) -> Self {
        let source = |fd, stderr| Source { fd, stderr, remaining: None };
        let Running { pid, pidfd } = started.running;
        let handle = SessionHandle { cgroup: started.cgroup, ended: AtomicBool::new(false) };
        agent.sessions.lock().insert(pid, handle);
        Self {
            agent,
            client,
            pid,
            pidfd,
            terminal: started.terminal,
            input: started.input,
            queue: VecDeque::new(),
            input_ended: false,
            last_input: b'\n',
            owed_credit: 0,
            sources: [source(started.output, false), source(started.errors, true)],
            backlog: Vec::new(),
            sent: 0,
            output_left: request.output_limit,
            truncated: false,
            deadline: request
                .timeout_ms
                .and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms))),
            hangup: None,
            timed_out: false,
            exit: None,
            announced: false,
        }
    }

    fn run(&mut self) -> Result<(), FrameError> {
        let mut result = self.queue_frame(&Frame::Started(self.pid.unsigned_abs()));
        while result.is_ok() && !(self.announced && self.sent >= self.backlog.len()) {
            result = self.turn();
        }
        if self.exit.is_none() {
            // No client, or one that talks nonsense. Nobody sees the end, but it must come.
            self.kill();
            self.collect(WaitIdOptions::EXITED);
        }
        result
    }

    /// Waits until something can be done, and does it.
    fn turn(&mut self) -> Result<(), FrameError> {
        let ready = self.wait()?;
        if self.deadline.is_some_and(|d| d <= Instant::now()) {
            self.deadline = None;
            if self.exit.is_none() {
                self.timed_out = true;
                self.kill();
            }
        }
        if ready.client {
            self.flush()?;
            self.listen()?;
        }
        if ready.input {
            self.write_input()?;
        }
        for (index, ready) in ready.sources.into_iter().enumerate() {
            if ready {
                self.read_output(index)?;
            }
        }
        if ready.program && self.collect(WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            self.begin_draining();
        }
        if self.hangup.is_some_and(|h| h <= Instant::now()) {
            self.hangup = None;
            self.sources.iter_mut().for_each(|s| s.fd = None);
        }
        let drained = self.sources.iter().all(|s| s.fd.is_none());
        if drained
            && !self.announced
            && let Some(exit) = self.exit.clone()
        {
            let exit = Exit { truncated: self.truncated, ..exit };
            self.queue_frame(&Frame::Exited(exit))?;
            self.announced = true;
        }
        self.flush()
    }

    fn wait(&self) -> Result<Ready, FrameError> {
        let room = self.backlog.len() - self.sent < BACKLOG;
        let mut client_events = PollFlags::IN;
        client_events.set(PollFlags::OUT, self.sent < self.backlog.len());
        let [output, errors] = &self.sources;
        let wanted = [
            (Some(&self.pidfd).filter(|_| self.exit.is_none()), PollFlags::IN),
            (self.input.as_ref().filter(|_| !self.queue.is_empty()), PollFlags::OUT),
            (output.fd.as_ref().filter(|_| room), PollFlags::IN),
            (errors.fd.as_ref().filter(|_| room), PollFlags::IN),
        ];
        let mut fds = vec![PollFd::from_borrowed_fd(self.client.fd(), client_events)];
        for (fd, events) in wanted {
            if let Some(fd) = fd {
                fds.push(PollFd::new(fd, events));
            }
        }
        let deadline = [self.deadline, self.hangup].into_iter().flatten().min();
        let timeout = deadline.map(|d| to_timespec(d.saturating_duration_since(Instant::now())));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(io::Error::from(e).into()),
        }
        // In the order they were put in.
        let mut answers = fds.iter().map(|f| !f.revents().is_empty());
        let client = answers.next().unwrap_or(false);
        let [program, input, output, errors] =
            wanted.map(|(fd, _)| fd.is_some() && answers.next().unwrap_or(false));
        Ok(Ready { client, program, input, sources: [output, errors] })
    }

    /// Takes what the client says.
    fn listen(&mut self) -> Result<(), FrameError> {
        let open = self.client.fill()?;
        while let Some(frame) = self.client.buffered()? {
            match frame {
                Frame::Stdin(data) => self.accept_input(&data)?,
                Frame::StdinEnd => {
                    self.input_ended = true;
                    self.write_input()?;
                }
                Frame::Resize(size) => {
                    if let Some(master) = self.sources[0].fd.as_ref().filter(|_| self.terminal) {
                        // A terminal that has hung up has no size to change.
                        let _ = terminal::resize(master, size);
                    }
                }
                Frame::Signal(number) if (1..=64).contains(&number) => {
                    if self.exit.is_none() {
                        // Everyone in the group may have ended; the exit says so.
                        let _ = kernel::kill(-self.pid, number);
                    }
                }
                _ => {
                    return Err(io::Error::other("a message that has no place in a session").into());
                }
            }
        }
        if open { Ok(()) } else { Err(io::Error::from(io::ErrorKind::ConnectionReset).into()) }
    }

    fn accept_input(&mut self, data: &[u8]) -> Result<(), FrameError> {
        if self.exit.is_some() {
            // Without credit the client hears of the end instead of sending more.
            return Ok(());
        }
        if self.input.is_none() || self.input_ended {
            // Nobody reads it any more; the client must not wait for that.
            self.owed_credit += data.len();
            return self.give_credit();
        }
        if self.queue.len() + self.owed_credit + data.len() > STDIN_WINDOW {
            return Err(io::Error::other("more input than there was credit for").into());
        }
        self.queue.extend(data);
        self.write_input()
    }

    /// Writes what the program takes of its input now.
    fn write_input(&mut self) -> Result<(), FrameError> {
        while let Some(input) = &self.input
            && !self.queue.is_empty()
        {
            let (now, _) = self.queue.as_slices();
            match rustix::io::write(input, now) {
                Ok(n) => {
                    self.last_input = now.get(n.wrapping_sub(1)).copied().unwrap_or(b'\n');
                    self.queue.drain(..n);
                    self.owed_credit += n;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // It has closed its input, or its terminal is gone.
                Err(_) => {
                    self.owed_credit += self.queue.len();
                    self.queue.clear();
                    self.input = None;
                }
            }
        }
        if self.input_ended && self.queue.is_empty() {
            self.end_input();
        }
        self.give_credit()
    }

    fn end_input(&mut self) {
        let Some(input) = self.input.take() else { return };
        if self.terminal
            && let Some(end) = terminal::end_of_file(&input)
        {
            // The first one ends an open line, the second one the input.
            let both = [end, end];
            let wanted = if self.last_input == b'\n' { &both[..1] } else { &both };
            let _ = rustix::io::write(&input, wanted);
        }
    }

    fn give_credit(&mut self) -> Result<(), FrameError> {
        if self.owed_credit >= CREDIT_STEP || (self.owed_credit > 0 && self.queue.is_empty()) {
            let credit = u32::try_from(self.owed_credit).unwrap_or(u32::MAX);
            self.owed_credit = 0;
            self.queue_frame(&Frame::Credit(credit))?;
        }
        Ok(())
    }

    /// Reads once from a stream of the program.
    fn read_output(&mut self, index: usize) -> Result<(), FrameError> {
        let Some(source) = self.sources.get_mut(index) else { return Ok(()) };
        let Some(fd) = &source.fd else { return Ok(()) };
        let wanted = source.remaining.unwrap_or(DATA_CHUNK).min(DATA_CHUNK);
        let mut data = vec![0; wanted];
        match rustix::io::read(fd, &mut data) {
            // End of file; from a terminal that has hung up, EIO.
            Ok(0) => source.fd = None,
            Ok(n) => {
                data.truncate(n);
                if let Some(remaining) = &mut source.remaining {
                    *remaining = remaining.saturating_sub(n);
                    if *remaining == 0 {
                        source.fd = None;
                    }
                }
                let stderr = source.stderr;
                self.forward(data, stderr)?;
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if source.remaining.is_none() => {}
            Err(_) => source.fd = None,
        }
        Ok(())
    }

    fn forward(&mut self, mut data: Vec<u8>, stderr: bool) -> Result<(), FrameError> {
        if let Some(left) = &mut self.output_left {
            let room = usize::try_from(*left).unwrap_or(usize::MAX);
            self.truncated |= data.len() > room;
            data.truncate(room);
            *left -= data.len() as u64;
        }
        if data.is_empty() {
            return Ok(());
        }
        self.queue_frame(&if stderr { Frame::Stderr(data) } else { Frame::Stdout(data) })
    }

    /// The program has exited: only what its streams hold now is still delivered.
    fn begin_draining(&mut self) {
        self.input = None;
        self.queue.clear();
        if self.terminal {
            // The kernel hangs the terminal up once it has passed everything on.
            self.hangup = Some(Instant::now() + HANGUP);
            return;
        }
        for source in &mut self.sources {
            let held = source.fd.as_ref().map_or(0, kernel::readable_bytes);
            source.remaining = Some(held);
            if held == 0 {
                source.fd = None;
            }
        }
    }

    /// Notes the exit if there is one.
    fn collect(&mut self, options: WaitIdOptions) -> bool {
        // Waiting is done outside of the lock; with an exit noted, reaping does not wait.
        if !options.contains(WaitIdOptions::NOHANG) {
            let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), options | WaitIdOptions::NOWAIT);
        }
        let mut sessions = self.agent.sessions.lock();
        let waited = waitid(WaitId::PidFd(self.pidfd.as_fd()), options | WaitIdOptions::NOHANG);
        let (code, signal) = match waited {
            Ok(Some(status)) => (status.exit_status(), status.terminating_signal()),
            Ok(None) | Err(Errno::INTR) => return false,
            Err(_) => (None, None),
        };
        let handle = sessions.remove(&self.pid);
        drop(sessions);
        self.agent.children.reaped(self.pid);
        let ended = handle.as_ref().is_some_and(|h| h.ended.load(Ordering::SeqCst));
        retire(self.agent, handle.and_then(|h| h.cgroup));
        let reason = match (self.timed_out, ended) {
            (true, _) => ExitReason::Timeout,
            (false, true) => ExitReason::Killed,
            (false, false) => ExitReason::Ended,
        };
        self.exit = Some(Exit { code, signal, reason, truncated: false });
        true
    }

    /// Kills everything the program has started.
    fn kill(&self) {
        if let Some(session) = self.agent.sessions.lock().get(&self.pid) {
            session.kill(self.pid);
        }
    }

    fn queue_frame(&mut self, frame: &Frame) -> Result<(), FrameError> {
        if self.sent >= self.backlog.len() {
            self.backlog.clear();
            self.sent = 0;
        }
        frame.encode(&mut self.backlog)
    }

    /// Sends what the client takes now.
    fn flush(&mut self) -> Result<(), FrameError> {
        while let Some(rest) = self.backlog.get(self.sent..).filter(|r| !r.is_empty()) {
            match self.client.send_some(rest)? {
                0 => break,
                n => self.sent += n,
            }
        }
        if self.sent > BACKLOG {
            self.backlog.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }
}

/// What a poll found.
struct Ready {
    client: bool,
    program: bool,
    input: bool,
    sources: [bool; 2],
}
