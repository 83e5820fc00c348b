//! Init of the lab, the emulated KVM host: the machine's own files as a copy-on-write root, the
//! store shared with the machine, KVM, and the same server that sandboxes have.
//!
//! ```text
//!  /modules  ─► drivers     virtiofs "root" (ro) ─┬─► /.host      the files as they are now
//!  /lab.conf ─► settings                          └─► overlay ◄── tmpfs   ─► /
//!                           virtiofs "store" (rw) ──► the store, at its own path
//!  eth0 ─► 10.0.2.15        TCP, token ─► server ─► powers off when idle
//! ```
//! Files that change on the machine while the lab runs are seen fresh below `/.host` only: an
//! overlay does not allow its lower layer to change.
//!
//! The words on the console are for the host's lab module, which waits for them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parbake_protocol::agent::NetworkConfig;
use rustix::mount::{MountFlags, mount_move};

use crate::cgroup::UserCgroup;
use crate::identity::{self, IdentityFile};
use crate::listen::Listener;
use crate::serve::{self, Agent, Options};
use crate::{modules, mounts, network};

/// The settings that the host puts into the initial file system.
const SETTINGS: &str = "/lab.conf";
/// Where the machine's files are seen as they are at this moment.
const HOST: &str = "/newroot/.host";
const NEW_ROOT: &str = "/newroot";
const HOSTNAME: &str = "parbake-lab";

/// What the host tells its lab.
#[derive(Debug, Default, PartialEq, Eq)]
struct Settings {
    /// What a client must present.
    token: Vec<u8>,
    /// TCP port of the server.
    port: u16,
    /// The store's absolute path.
    store: Option<PathBuf>,
    /// How long the lab stays up with nobody connected and nothing running; absent: for ever.
    idle: Option<Duration>,
    /// Module parameters by module name.
    parameters: BTreeMap<String, String>,
}

impl Settings {
    /// Parses `key=value` lines; a value is all bytes up to the end of the line.
    fn parse(bytes: &[u8]) -> io::Result<Self> {
        let mut settings = Self::default();
        for line in bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let bad = || {
                let line = String::from_utf8_lossy(line).into_owned();
                io::Error::new(io::ErrorKind::InvalidData, format!("bad setting {line}"))
            };
            let at = line.iter().position(|byte| *byte == b'=').ok_or_else(bad)?;
            let (key, value) = (&line[..at], &line[at + 1..]);
            let text = || std::str::from_utf8(value).map_err(|_| bad());
            match key {
                b"token" => settings.token = value.to_vec(),
                b"port" => settings.port = text()?.parse().map_err(|_| bad())?,
                b"store" => {
                    settings.store = Some(std::ffi::OsString::from_vec(value.to_vec()).into());
                }
                b"idle" => {
                    let seconds = text()?.parse().map_err(|_| bad())?;
                    settings.idle = Some(Duration::from_secs(seconds));
                }
                _ => {
                    let key = std::str::from_utf8(key).map_err(|_| bad())?;
                    let module = key.strip_prefix("module.").ok_or_else(bad)?;
                    settings.parameters.insert(module.to_owned(), text()?.to_owned());
                }
            }
        }
        // Without a token whoever reaches the port could run commands.
        if settings.token.len() < 16 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no token in the settings"));
        }
        Ok(settings)
    }
}

/// Runs as PID 1; never returns.
pub fn run() -> ! {
    let error = match boot() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("parbake-lab: failed: {error}");
    loop {
        serve::power_off();
        thread::sleep(Duration::from_secs(1));
    }
}

fn boot() -> io::Result<Infallible> {
    let settings = Settings::parse(&named(SETTINGS, fs::read(SETTINGS))?)?;
    mounts::early()?;
    let kvm = modules::load_all_but("kvm", Path::new("/modules"), &|name| {
        settings.parameters.get(name).cloned().unwrap_or_default()
    })?;
    mount_root(settings.store.as_deref())?;
    mounts::switch_root(Path::new(NEW_ROOT))?;
    mounts::late()?;
    tune();
    rustix::system::sethostname(HOSTNAME.as_bytes())?;
    identity::install(HOSTNAME)?;
    attach_network()?;
    let cgroup = UserCgroup::create(Path::new("/sys/fs/cgroup"))?;
    await_time_stamp_frequency();
    kvm.into_iter().try_for_each(modules::Opened::load)?;

    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, settings.port))?;
    // Accepted connections inherit it: answers are small and must not wait for one another.
    rustix::net::sockopt::set_tcp_nodelay(&listener, true)?;
    let agent = Agent::new(Options {
        token: Some(settings.token),
        owns_machine: true,
        init: true,
        cgroup: Some(cgroup),
        boot_stages: Vec::new(),
    });
    let small = |name: &str| thread::Builder::new().name(name.to_owned()).stack_size(64 << 10);
    let reaper = Arc::clone(&agent);
    small("reaper").spawn(move || reaper.children.reap_orphans())?;
    if let Some(limit) = settings.idle {
        let agent = Arc::clone(&agent);
        small("idle").spawn(move || power_off_when_idle(&agent, limit))?;
    }
    eprintln!("parbake-lab: ready");
    serve::serve_agent(&Listener::from(listener), &agent)?;
    Err(io::Error::other("the listener ended"))
}

/// Puts what failed into the error.
fn named<T>(what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{what}: {error}")))
}

/// Mounts the machine's files, copy-on-write, and the store.
fn mount_root(store: Option<&Path>) -> io::Result<()> {
    let (quick, read_only) = (MountFlags::NOATIME, MountFlags::RDONLY | MountFlags::NOATIME);
    mounts::mount("root", Path::new("/lower"), "virtiofs", read_only, "")?;
    mounts::mount("upper", Path::new("/upper"), "tmpfs", quick, "mode=0755,size=50%")?;
    for folder in ["/upper/files", "/upper/work"] {
        fs::create_dir(folder)?;
    }
    // The lower layer is a share: nothing that needs its file handles or inode numbers.
    let layers = "lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work,index=off,xino=off";
    mounts::mount("overlay", Path::new(NEW_ROOT), "overlay", quick, layers)?;
    fs::create_dir_all(HOST)?;
    named(HOST, mount_move("/lower", HOST).map_err(Into::into))?;
    let Some(store) = store else { return Ok(()) };
    let target = Path::new(NEW_ROOT).join(store.strip_prefix("/").unwrap_or(store));
    mounts::mount("store", &target, "virtiofs", quick, "")
}

/// Settings that make guests in the lab faster; a kernel without one does without.
fn tune() {
    // Each small page of a guest's memory costs an emulated fault, and each walk through nested
    // page tables one more level.
    for file in ["enabled", "shmem_enabled"] {
        let _ = fs::write(Path::new("/sys/kernel/mm/transparent_hugepage").join(file), "always");
    }
}

/// Waits until the kernel has measured its time-stamp counter for the second time, exactly.
///
/// KVM takes the frequency of when it is loaded for its guests'. If the kernel then finds a higher
/// one, KVM tries to slow the guests' counters down, which an emulated processor cannot: they are
/// left without a scale, and every restored guest's clock leaps by as long as the lab is up.
fn await_time_stamp_frequency() {
    const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let limit = Instant::now() + Duration::from_secs(5);
    while Instant::now() < limit {
        match fs::read_to_string(CLOCK) {
            // The counter as it was first measured, or what stands in until then.
            Ok(clock) if matches!(clock.trim(), "tsc-early" | "jiffies" | "refined-jiffies") => {}
            _ => return,
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The network that the emulator provides: one machine, one gateway that also resolves names.
fn attach_network() -> io::Result<()> {
    network::loopback()?;
    network::configure(&NetworkConfig {
        interface: "eth0".to_owned(),
        mac: None,
        address: [10, 0, 2, 15],
        prefix: 24,
        gateway: Some([10, 0, 2, 2]),
        dns: Vec::new(),
    })?;
    IdentityFile::Resolver.set(&network::resolver(&[[10, 0, 2, 3]]))
}

/// Powers off once nobody has been connected and nothing has run for `limit`.
fn power_off_when_idle(agent: &Agent, limit: Duration) {
    let pause = (limit / 10).clamp(Duration::from_millis(200), Duration::from_secs(10));
    let mut since = Instant::now();
    loop {
        thread::sleep(pause);
        if agent.active() > 0 || others_run() {
            since = Instant::now();
        } else if since.elapsed() >= limit {
            eprintln!("parbake-lab: idle, powering off");
            serve::power_off();
        }
    }
}

/// Whether any program but this one runs: a sandbox outlives the command that made it.
fn others_run() -> bool {
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    // A thread of the kernel has no program, nor has a process that has ended.
    pids.into_iter().any(|pid| pid != 1 && fs::read_link(format!("/proc/{pid}/exe")).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_lines_and_a_store_is_bytes() {
        let text =
            b"token=0123456789abcdef\nport=1024\nidle=60\nstore=/a b=\xff\nmodule.kvm_amd=npt=1\n";
        let settings = Settings::parse(text).expect("settings");
        assert_eq!(settings.port, 1024);
        assert_eq!(settings.idle, Some(Duration::from_secs(60)));
        assert_eq!(settings.parameters["kvm_amd"], "npt=1");
        let store = std::ffi::OsString::from_vec(b"/a b=\xff".to_vec());
        assert_eq!(settings.store, Some(store.into()));
        let bad: [&[u8]; 4] = [b"", b"token=short", b"token=0123456789abcdef\nport=x", b"what"];
        for text in bad {
            assert!(Settings::parse(text).is_err(), "{}", String::from_utf8_lossy(text));
        }
    }
}
