//! `parbaked serve`: the service, from its first socket to its last sandbox.

use std::ffi::OsString;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use parbake_cache::Store;
use parbake_node::terminal::failure::{Classify, CliError, CliResult, Kind};
use parbake_protocol::vmm::Jail;
use parbake_service::audit::{AuditConfig, Key};
use parbake_service::client::Endpoint;
use parbake_service::guard::Guard;
use parbake_service::listen::{self, Keys};
use parbake_service::manager::{Config, Manager, StartError};
use parbake_service::{api, model};
use tokio::signal::unix::{SignalKind, signal};

use super::values::duration;
use super::{Context, default_socket};

/// Run the service
///
/// Sandboxes outlive it: one that crashes or is ended takes nothing along, and the next takes over
/// what it finds in --run-dir. On SIGTERM or SIGINT it takes no more work, waits for running
/// commands, and ends.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where to listen: unix:PATH, or HOST:PORT with --api-key-file
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<Endpoint>,
    /// The mode of unix sockets; whoever may open one may do everything
    #[arg(long, value_name = "OCTAL", default_value = "600", value_parser = octal)]
    socket_mode: u32,
    /// Keys for callers over TCP: NAME:KEY lines, readable by nobody else
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Listen on an address that other machines reach, in plain text
    #[arg(long)]
    allow_remote: bool,
    /// Where templates, snapshots and kernels are kept
    #[arg(long, env = "PARBAKE_STORE", value_name = "DIR")]
    store: Option<PathBuf>,
    /// Where sandboxes' sockets, logs and records are
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Where guests' writes go; `memory`: nowhere else
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Where a fork's memory lies while its copies are made and until they end
    #[arg(long, value_name = "DIR")]
    fork_dir: Option<PathBuf>,
    /// The most sandboxes
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_sandboxes: usize,
    /// How long a sandbox lives when its maker does not say
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    default_ttl: Option<Duration>,
    /// How long a guest may take until it is ready
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    ready_timeout: Duration,
    /// How long a guest may take to answer
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    answer_timeout: Duration,
    /// The most bytes of a file or archive
    #[arg(long, value_name = "BYTES", default_value_t = model::DEFAULT_TRANSFER_LIMIT)]
    transfer_limit: u64,
    /// The audit log; `none`: there is none
    #[arg(long, value_name = "FILE")]
    audit_log: Option<PathBuf>,
    /// A file with 32 bytes or more that only this service and those who verify can read: without
    /// it, nobody can make hashes that fit; there is an anchor beside the log, too
    #[arg(long, value_name = "FILE")]
    audit_key_file: Option<PathBuf>,
    /// Where the end of the log is written down, best where those who could cut the log cannot
    /// write; absent: beside the log if there is a key
    #[arg(long, value_name = "FILE")]
    audit_anchor: Option<PathBuf>,
    /// How large a file of the log may grow, in MiB, before the chain goes on in a new one
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    audit_file_size: u64,
    /// A program that is asked before each command: JSON on its stdin, its answer on stdout
    #[arg(long, value_name = "PROGRAM", conflicts_with = "guard_socket")]
    guard_program: Option<OsString>,
    /// A service on a unix socket that is asked before each command, by POST
    #[arg(long, value_name = "PATH")]
    guard_socket: Option<PathBuf>,
    /// How long the guard may take
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5s")]
    guard_timeout: Duration,
    /// What becomes of the sandboxes when the service is asked to end
    #[arg(long, value_enum, default_value_t = OnStop::Keep)]
    on_stop: OnStop,
    /// How long to wait for running commands then
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    drain_timeout: Duration,
    /// Networks prepared in advance, so that sandboxes with --egress need not wait for theirs
    #[arg(long, value_name = "N", default_value_t = 0)]
    networks_ready: usize,
    /// Become this user and group in each monitor, e.g. 65534:65534; needs root
    #[arg(long, value_name = "UID:GID", value_parser = user)]
    monitor_user: Option<(u32, u32)>,
}

/// What becomes of sandboxes at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnStop {
    /// They go on; the next service takes them over.
    Keep,
    /// They end.
    End,
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "a mode is an octal number up to 777".to_owned())
}

fn user(text: &str) -> Result<(u32, u32), String> {
    let parsed = text.split_once(':').and_then(|(u, g)| Some((u.parse().ok()?, g.parse().ok()?)));
    parsed.ok_or_else(|| "it is UID:GID, both numbers".to_owned())
}

/// A socket that is open already: what it needs shows before anything is started.
enum Open {
    Unix(std::os::unix::net::UnixListener, PathBuf),
    Tcp(std::net::TcpListener),
}

/// Serves until a signal comes.
pub fn run(_: &Context, args: &Args) -> CliResult {
    more_descriptors();
    let config = config(args)?;
    let manager = Manager::start(config).map_err(|error| match error {
        StartError::Store(error) => CliError::new(Kind::User, error),
        error => CliError::new(Kind::Host, error),
    })?;
    let keys = Arc::new(match &args.api_key_file {
        Some(path) => Keys::read(path).kind(Kind::User)?,
        None => Keys::default(),
    });
    let mut open = Vec::new();
    let default = [Endpoint::Unix(default_socket())];
    let listen = if args.listen.is_empty() { &default[..] } else { &args.listen };
    for endpoint in listen {
        open.push(bind(args, endpoint)?);
    }
    let paths: Vec<PathBuf> = open
        .iter()
        .filter_map(|open| match open {
            Open::Unix(_, path) => Some(path.clone()),
            Open::Tcp(_) => None,
        })
        .collect();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        // Creations, transfers and logs that are followed each hold one.
        .max_blocking_threads(1024)
        .enable_all()
        .build()
        .kind(Kind::Internal)?;
    manager.look_after();
    let served = runtime.block_on(serve(&manager, open, &keys, args.drain_timeout));
    // Nobody comes in any more; what is being answered is cut off with the process.
    for path in &paths {
        let _ = std::fs::remove_file(path);
    }
    manager.stop(args.on_stop == OnStop::Keep);
    runtime.shutdown_timeout(Duration::from_millis(200));
    served.kind(Kind::Internal)
}

async fn serve(
    manager: &Arc<Manager>,
    open: Vec<Open>,
    keys: &Arc<Keys>,
    patience: Duration,
) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let app = api::app(Arc::clone(manager));
    for listener in open {
        let (app, keys) = (app.clone(), Arc::clone(keys));
        tokio::spawn(async move {
            let served = match listener {
                Open::Unix(listener, _) => listen::serve_unix(listener, app).await,
                Open::Tcp(listener) => listen::serve_tcp(listener, app, keys).await,
            };
            if let Err(error) = served {
                eprintln!("parbaked: a listener failed: {error}");
            }
        });
    }
    notify("READY=1");
    eprintln!("parbaked: serving, {} sandboxes taken over", manager.status().sandboxes);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    notify("STOPPING=1");
    manager.drain();
    let deadline = Instant::now() + patience;
    while manager.under_way() > 0 && Instant::now() < deadline {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(50)) => {}
            // Asked twice: at once.
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    // Who listens hears of the end, then that there is nothing more.
    manager.feed().close();
    let deadline = Instant::now() + FAREWELL;
    while manager.feed().listeners() > 0 && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// How long listeners have to be told of the end.
const FAREWELL: Duration = Duration::from_secs(2);

fn config(args: &Args) -> CliResult<Config> {
    let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
    let root = rustix::process::geteuid().is_root();
    let store = absolute(args.store.clone().unwrap_or_else(Store::default_root));
    let run_dir = match (&args.run_dir, std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(dir), _) => absolute(dir.clone()),
        (None, _) if root => PathBuf::from("/run/parbaked"),
        (None, Some(dir)) if !dir.is_empty() => PathBuf::from(dir).join("parbaked"),
        (None, _) => {
            let message = "there is no XDG_RUNTIME_DIR to keep sandboxes in";
            return Err(CliError::new(Kind::User, message).hint("name a --run-dir"));
        }
    };
    // The longest that is made in it, against the length of a unix socket's name.
    let longest = run_dir.join("sandboxes").join("x".repeat(12)).join("control");
    if longest.as_os_str().len() > 107 {
        let message = format!("{} is too long for the sockets in it", run_dir.display());
        return Err(CliError::new(Kind::User, message));
    }
    let audit = match &args.audit_log {
        Some(path) if path.as_os_str() == "none" => None,
        Some(path) => Some(absolute(path.clone())),
        None if root => Some(PathBuf::from("/var/log/parbaked/audit.jsonl")),
        None => Some(run_dir.join("audit.jsonl")),
    };
    if let Some(parent) = audit.as_deref().and_then(std::path::Path::parent) {
        std::fs::create_dir_all(parent).kind(Kind::User)?;
    }
    let audit = match audit {
        None => None,
        Some(path) => {
            let key = args.audit_key_file.as_deref().map(Key::read).transpose();
            let key = key.map_err(|error| CliError::new(Kind::User, error))?;
            let beside =
                || key.as_ref().map(|_| PathBuf::from(format!("{}.anchor", path.display())));
            let anchor = args.audit_anchor.clone().map(absolute).or_else(beside);
            let file_bytes = args.audit_file_size.saturating_mul(1 << 20);
            Some(AuditConfig { path, key, anchor, file_bytes })
        }
    };
    let limit = args.guard_timeout;
    let guard = match (&args.guard_program, &args.guard_socket) {
        (Some(program), _) => Some(Guard::Program { command: vec![program.clone()], limit }),
        (None, Some(path)) => Some(Guard::Socket { path: path.clone(), limit }),
        (None, None) => None,
    };
    let scratch = match &args.scratch {
        Some(path) if path.as_os_str() == "memory" => None,
        Some(path) => Some(absolute(path.clone())),
        None => Some(store.clone()),
    };
    Ok(Config {
        store,
        run_dir,
        scratch,
        fork_dir: args.fork_dir.clone().map(absolute),
        max_sandboxes: args.max_sandboxes,
        default_ttl: args.default_ttl,
        ready_timeout: args.ready_timeout,
        answer_timeout: args.answer_timeout,
        transfer_limit: args.transfer_limit,
        audit,
        guard,
        networks_ready: args.networks_ready,
        jail: Jail { user: args.monitor_user, ..Jail::default() },
    })
}

fn bind(args: &Args, endpoint: &Endpoint) -> CliResult<Open> {
    let failed = |error: std::io::Error| {
        CliError::new(Kind::Host, format!("cannot listen on {endpoint}: {error}"))
    };
    match endpoint {
        Endpoint::Unix(path) => {
            let listener = listen::bind_unix(path, args.socket_mode).map_err(failed)?;
            Ok(Open::Unix(listener, path.clone()))
        }
        Endpoint::Tcp(address) => {
            if args.api_key_file.is_none() {
                let message = format!("listening on {address} needs keys for its callers");
                return Err(CliError::new(Kind::Usage, message).hint("--api-key-file FILE"));
            }
            let addresses: Vec<_> = address.to_socket_addrs().map_err(failed)?.collect();
            if !args.allow_remote && !addresses.iter().all(|a| a.ip().is_loopback()) {
                let message =
                    format!("{address} can be reached from elsewhere, and is not encrypted");
                return Err(CliError::new(Kind::Usage, message)
                    .hint("put something that speaks TLS before it, or say --allow-remote"));
            }
            let listener = std::net::TcpListener::bind(&addresses[..]).map_err(failed)?;
            Ok(Open::Tcp(listener))
        }
    }
}

/// Each sandbox takes a handful, and the usual limit is low.
fn more_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Tells a service manager that asked to be told (sd_notify(3)).
fn notify(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let send = |address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address);
    let _ = address.and_then(send);
}
