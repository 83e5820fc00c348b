//! Connections: greets clients, answers plain requests, hands streams to exec and files.
//!
//! ```text
//!   accepted ──HELLO ok──► idle ──plain request──► idle
//!      │                    ├──exec/put/get──► streaming ──► closed
//!      └─bad version/token──┴──end of stream, malformed frame, quiesce──► closed
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use parbake_protocol::agent::{
    AGENT_PROTOCOL, Failure, FailureKind, Frame, FrameError, GuestConfig, GuestInfo, HelloVerdict,
    Reply, Request,
};
use rustix::net::Shutdown;

use crate::cgroup::UserCgroup;
use crate::children::Children;
use crate::connection::{Connection, failure};
use crate::exec::Sessions;
use crate::listen::Listener;
use crate::{doorbell, environment, exec, files, fixup, quiesce, users, workspace};

/// How long a client may take to greet.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Clients served at a time.
const MAX_CONNECTIONS: usize = 1024;

/// Stack of a connection's thread; pages are only taken when touched.
const STACK: usize = 256 << 10;

/// What this agent may do.
#[derive(Debug, Default)]
pub struct Options {
    /// Clients must present this.
    pub token: Option<Vec<u8>>,
    /// The machine is the agent's to change: clock, names, caches, power. Otherwise such requests
    /// are refused and only commands and files are served.
    pub owns_machine: bool,
    /// The agent is PID 1 and someone runs [`Children::reap_orphans`].
    pub init: bool,
    /// Where user processes live, so that they can be frozen.
    pub cgroup: Option<UserCgroup>,
    /// How long bringing the machine up took, for [`GuestInfo::boot_stages`].
    pub boot_stages: Vec<(String, u64)>,
}

/// The agent: what all connections share.
#[derive(Debug)]
pub struct Agent {
    /// What it may do.
    pub options: Options,
    /// The children somebody waits for.
    pub children: Children,
    /// The exec sessions that run.
    pub sessions: Sessions,
    state: Mutex<State>,
    connections: Mutex<BTreeMap<u64, OwnedFd>>,
    next_connection: AtomicU64,
}

/// What requests have told the agent so far.
#[derive(Debug, Default, Clone)]
pub struct State {
    /// The image's process defaults.
    pub config: GuestConfig,
    /// The environment of this run.
    pub run_env: Vec<Vec<u8>>,
    /// User processes are frozen.
    pub frozen: bool,
    /// The instance of the last fixup.
    pub instance_id: String,
    /// Fixups since the cold boot.
    pub fixups: u32,
    /// Where the workspace is mounted.
    pub workspace: Option<PathBuf>,
}

impl Agent {
    /// An agent that has been told nothing yet.
    pub fn new(options: Options) -> Arc<Self> {
        Arc::new(Self {
            options,
            children: Children::default(),
            sessions: Sessions::default(),
            state: Mutex::default(),
            connections: Mutex::default(),
            next_connection: AtomicU64::new(0),
        })
    }

    /// What it has been told.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what only the owner of the machine may do.
    ///
    /// # Errors
    /// This agent is a guest on its machine.
    pub fn must_own_machine(&self) -> Result<(), Failure> {
        if self.options.owns_machine {
            return Ok(());
        }
        Err(failure(
            FailureKind::NotOurs,
            "this agent does not own its machine and leaves clock, names and memory alone",
        ))
    }

    /// How many clients are connected.
    pub fn active(&self) -> usize {
        self.connections().len()
    }

    /// Ends every connection but one.
    pub fn hang_up_all_but(&self, kept: u64) {
        for (id, socket) in self.connections().iter() {
            if *id != kept {
                let _ = rustix::net::shutdown(socket, Shutdown::Both);
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, OwnedFd>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn info(&self) -> GuestInfo {
        let state = self.state().clone();
        let names = rustix::system::uname();
        let system = rustix::system::sysinfo();
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        GuestInfo {
            protocol: AGENT_PROTOCOL,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: names.release().to_string_lossy().into_owned(),
            boot_id: boot_id.unwrap_or_default().trim().to_owned(),
            hostname: names.nodename().to_string_lossy().into_owned(),
            instance_id: state.instance_id,
            init: self.options.init,
            frozen: state.frozen,
            fixups: state.fixups,
            sessions: u32::try_from(self.sessions.count()).unwrap_or(u32::MAX),
            memory_bytes: system.totalram.saturating_mul(system.mem_unit.into()),
            uptime_ms: u64::try_from(now.tv_sec).unwrap_or(0) * 1000
                + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000,
            boot_stages: self.options.boot_stages.clone(),
        }
    }

    fn configure(&self, config: GuestConfig) -> Result<(), Failure> {
        if self.options.owns_machine && !config.cwd.is_empty() && config.cwd.starts_with(b"/") {
            make_working_directory(&config)?;
        }
        self.state().config = config;
        Ok(())
    }

    fn shut_down(&self) -> Result<(), Failure> {
        self.must_own_machine()?;
        if let Some(cgroup) = &self.options.cgroup {
            cgroup.kill();
            let _ = cgroup.thaw();
        }
        rustix::fs::sync();
        Ok(())
    }
}

fn limit_processes(agent: &Agent, most: Option<u32>) -> Result<(), Failure> {
    agent.must_own_machine()?;
    let refused = |error: io::Error| {
        let message = format!("user processes cannot be limited: {error}");
        failure(FailureKind::System, message)
    };
    match &agent.options.cgroup {
        Some(cgroup) => cgroup.limit_processes(most, tell_process_limit).map_err(refused),
        None => Err(refused(io::Error::other("there is no user cgroup"))),
    }
}

fn tell_process_limit() {
    let _ = doorbell::ring(parbake_protocol::vmm::doorbell::PROCESS_LIMIT);
}

/// As `docker run` does with a WORKDIR that the image does not have.
fn make_working_directory(config: &GuestConfig) -> Result<(), Failure> {
    let path = files::path(&config.cwd)?;
    if path.exists() {
        return Ok(());
    }
    std::fs::create_dir_all(path).map_err(|e| {
        failure(FailureKind::BadCwd, format!("cannot make the directory {}: {e}", path.display()))
    })?;
    let user = users::resolve(&config.user, "/".as_ref())?;
    let _ = std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid));
    Ok(())
}

/// Switches the machine off. Returns only if it cannot be.
pub fn power_off() {
    rustix::fs::sync();
    let _ = doorbell::ring(parbake_protocol::vmm::doorbell::POWER_OFF);
    // The monitor stops the vCPU at the doorbell; without one the kernel is asked.
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
}

/// Serves clients until the listener fails.
///
/// # Errors
/// The listener's.
pub fn serve(listener: &Listener, options: Options) -> io::Result<()> {
    serve_agent(listener, &Agent::new(options))
}

/// As [`serve`], for an agent that others hold on to.
///
/// # Errors
/// The listener's.
pub fn serve_agent(listener: &Listener, agent: &Arc<Agent>) -> io::Result<()> {
    loop {
        let socket = match listener.accept() {
            Ok(socket) => socket,
            // Out of descriptors or memory: a moment later there may be some again.
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) =>
            {
                thread::sleep(Duration::from_millis(50));
                continue;
            }
            Err(e) => return Err(e),
        };
        if agent.connections().len() >= MAX_CONNECTIONS {
            continue;
        }
        let agent = Arc::clone(agent);
        let thread = thread::Builder::new().stack_size(STACK).name("connection".to_owned());
        // Without a thread the socket is dropped, which tells the client.
        let _ = thread.spawn(move || connection(&agent, socket));
    }
}

fn connection(agent: &Agent, socket: OwnedFd) {
    let Ok(connection) = Connection::new(socket) else { return };
    let Ok(handle) = connection.handle() else { return };
    let id = agent.next_connection.fetch_add(1, Ordering::Relaxed);
    agent.connections().insert(id, handle);
    // Whatever ends the conversation, the client sees it in the stream; there is nobody else to
    // tell.
    let after = talk(agent, id, connection).unwrap_or(After::Nothing);
    agent.connections().remove(&id);
    if after == After::PowerOff {
        power_off();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Nothing,
    PowerOff,
}

fn talk(agent: &Agent, id: u64, mut client: Connection) -> Result<After, FrameError> {
    if !greet(agent, &mut client)? {
        client.finish();
        return Ok(After::Nothing);
    }
    while let Some(frame) = client.receive(None)? {
        let Frame::Request(request) = frame else {
            let message = "expected a request";
            client.reply(Err(failure(FailureKind::BadRequest, message)))?;
            client.finish();
            break;
        };
        let reply = match request {
            Request::Ping => Ok(Reply::Done),
            Request::Info => Ok(Reply::Info(agent.info())),
            Request::Configure(config) => agent.configure(config).map(|()| Reply::Done),
            Request::Fixup(fixup) => {
                fixup::run(agent, *fixup, fixup::Env::Replace).map(Reply::Fixup)
            }
            Request::FixupKeepingEnv(fixup) => {
                fixup::run(agent, *fixup, fixup::Env::Extend).map(Reply::Fixup)
            }
            Request::Thaw => fixup::thaw(agent).map(|()| Reply::Done),
            Request::MountWorkspace { path } => {
                workspace::mount(agent, &path).map(|()| Reply::Done)
            }
            Request::LimitProcesses(most) => limit_processes(agent, most).map(|()| Reply::Done),
            Request::UnmountWorkspace => workspace::unmount(agent).map(|()| Reply::Done),
            Request::Quiesce(request) => {
                let close = request.close_connections;
                let report = quiesce::run(agent, id, &request);
                client.reply(report.map(Reply::Quiesce))?;
                if close {
                    // Closed at once and for good: the machine is about to be frozen.
                    break;
                }
                continue;
            }
            Request::Exec(request) => {
                exec::session(agent, client, &request)?;
                break;
            }
            Request::Put(request) => {
                let stored = files::put(&mut client, &request)?;
                client.reply(stored)?;
                client.finish();
                break;
            }
            Request::Get(request) => {
                files::get(&mut client, &request)?;
                client.finish();
                break;
            }
            Request::Shutdown => {
                let result = agent.shut_down();
                let accepted = result.is_ok();
                client.reply(result.map(|()| Reply::Done))?;
                if accepted {
                    client.finish();
                    return Ok(After::PowerOff);
                }
                continue;
            }
        };
        client.reply(reply)?;
    }
    Ok(After::Nothing)
}

fn greet(agent: &Agent, client: &mut Connection) -> Result<bool, FrameError> {
    let verdict = match client.receive(Some(HELLO_TIMEOUT))? {
        Some(Frame::Hello { protocol, .. }) if protocol != AGENT_PROTOCOL => HelloVerdict::Version,
        Some(Frame::Hello { token, .. }) => match &agent.options.token {
            Some(wanted) if !same(wanted, &token) => HelloVerdict::Token,
            _ => HelloVerdict::Accepted,
        },
        _ => return Ok(false),
    };
    client.send(&Frame::Welcome { protocol: AGENT_PROTOCOL, verdict })?;
    Ok(verdict == HelloVerdict::Accepted)
}

/// Compares in a time that depends on the lengths only.
fn same(a: &[u8], b: &[u8]) -> bool {
    let difference = a.iter().zip(b).fold(0, |d, (x, y)| d | std::hint::black_box(x ^ y));
    a.len() == b.len() && difference == 0
}

/// The environment of a program: defaults, then the image's, then this run's, then the request's.
pub(crate) fn environment(
    state: &State,
    request: &parbake_protocol::agent::ExecRequest,
    user: &users::User,
) -> environment::Environment {
    let mut env = environment::Environment::default();
    if !request.no_template_defaults {
        env.merge(&state.config.env);
    }
    env.merge(&state.run_env);
    env.merge(&request.env);
    env.set_default(b"PATH", environment::DEFAULT_PATH);
    env.set_default(b"HOSTNAME", rustix::system::uname().nodename().to_bytes());
    env.set_default(b"HOME", &user.home);
    if !user.name.is_empty() {
        env.set_default(b"USER", &user.name);
    }
    if request.tty.is_some() {
        env.set_default(b"TERM", b"xterm");
    }
    env
}
