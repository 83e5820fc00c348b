//! PID 1: from the kernel's first program to a guest that serves commands.
//!
//! ```text
//!  initial file system: /proc /sys /dev ► modules ► root device ► switch root
//!  root file system:    the other mounts ► cgroup ► names ► loopback ► listen ► doorbell READY
//! ```
//!
//! Whatever fails is written to the console as `parbake-agent: boot failed: …` and rung as
//! BOOT_FAILED. An image's own init does not run; the hook for one is [`hand_over`].

use std::convert::Infallible;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parbake_protocol::agent::AGENT_PORT;
use parbake_protocol::vmm::doorbell as value;
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;

use crate::cgroup::UserCgroup;
use crate::listen::Listener;
use crate::modules::DeviceEvents;
use crate::serve::{self, Agent, Options};
use crate::{doorbell, identity, modules, mounts, network};

/// How long the root device may take to appear.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(30);

/// The modules in the initial file system.
const MODULES: &str = "/modules";

/// Where the root file system is mounted before it becomes the root.
const NEW_ROOT: &str = "/newroot";

/// The host name until a fixup gives another.
const HOSTNAME: &str = "parbake";

/// Runs as PID 1; never returns.
pub fn run() -> ! {
    let error = match boot() {
        Ok(never) => match never {},
        Err(e) => e,
    };
    log(&format!("boot failed: {error}"));
    let _ = doorbell::ring(value::BOOT_FAILED);
    // The monitor ends the guest; without one, nothing is left to do here but to switch off.
    thread::sleep(Duration::from_secs(1));
    serve::power_off();
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}

/// Settings from the kernel's command line.
#[derive(Debug, PartialEq, Eq)]
struct CommandLine {
    root: PathBuf,
    root_kind: String,
    read_only: bool,
}

impl CommandLine {
    fn parse(text: &str) -> Self {
        let mut settings =
            Self { root: "/dev/vda".into(), root_kind: "ext4".to_owned(), read_only: false };
        for word in text.split_whitespace() {
            match word.split_once('=') {
                Some(("root", path)) if path.starts_with("/dev/") => settings.root = path.into(),
                Some(("rootfstype", kind)) => kind.clone_into(&mut settings.root_kind),
                // The kernel's own default is `ro`, which says nothing about what the guest needs.
                None if word == "parbake.ro" => settings.read_only = true,
                _ => {}
            }
        }
        settings
    }
}

/// Remembers how long each stage took.
struct Stages {
    begin: Instant,
    list: Vec<(String, u64)>,
}

impl Stages {
    fn done(&mut self, name: &str) {
        let micros = u64::try_from(self.begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.list.push((name.to_owned(), micros));
        self.begin = Instant::now();
    }
}

fn boot() -> io::Result<Infallible> {
    let mut stages = Stages { begin: Instant::now(), list: Vec::new() };
    mounts::early()?;
    console();
    let events = DeviceEvents::listen()?;
    modules::load_all(Path::new(MODULES), &|_| String::new())?;
    stages.done("modules");
    let settings = CommandLine::parse(&fs::read_to_string("/proc/cmdline")?);
    events.wait_for(&settings.root, DEVICE_TIMEOUT)?;
    drop(events);
    stages.done("device");
    mount_root(&settings)?;
    mounts::switch_root(Path::new(NEW_ROOT))?;
    stages.done("root");
    mounts::late()?;
    let cgroup = UserCgroup::create(Path::new("/sys/fs/cgroup"))?;
    rustix::system::sethostname(HOSTNAME.as_bytes())?;
    identity::install(HOSTNAME)?;
    network::loopback()?;
    limits();
    let listener = Listener::vsock(AGENT_PORT)
        .map_err(|e| io::Error::new(e.kind(), format!("cannot listen on vsock: {e}")))?;
    stages.done("services");
    let agent = Agent::new(Options {
        token: None,
        owns_machine: true,
        init: true,
        cgroup: Some(cgroup),
        boot_stages: stages.list,
    });
    hand_over(&agent)?;
    if let Err(e) = doorbell::ring(value::READY) {
        log(&format!("no doorbell: {e}"));
    }
    serve::serve_agent(&listener, &agent)?;
    Err(io::Error::other("the listener ended"))
}

/// Leaves the rest of PID 1's duties to a thread. An image's own init would be started here, in
/// its own cgroup, with this process staying PID 1.
fn hand_over(agent: &Arc<Agent>) -> io::Result<()> {
    let agent = Arc::clone(agent);
    thread::Builder::new()
        .name("reaper".to_owned())
        .stack_size(64 << 10)
        .spawn(move || agent.children.reap_orphans())
        .map(drop)
}

/// Writes a line to the console, if there is one. (`eprintln!` would panic without.)
fn log(message: &str) {
    let _ = writeln!(io::stderr(), "parbake-agent: {message}");
}

/// Connects the standard streams to the console if the kernel did not.
fn console() {
    let Ok(fd) = rustix::fs::open("/dev/console", OFlags::RDWR | OFlags::NOCTTY, Mode::empty())
    else {
        return;
    };
    let _ = rustix::stdio::dup2_stdin(&fd);
    let _ = rustix::stdio::dup2_stdout(&fd);
    let _ = rustix::stdio::dup2_stderr(&fd);
}

fn mount_root(settings: &CommandLine) -> io::Result<()> {
    let source = settings.root.to_string_lossy();
    let target = Path::new(NEW_ROOT);
    let mount = |extra| {
        let flags = MountFlags::NOATIME | extra;
        mounts::mount(&source, target, &settings.root_kind, flags, "")
    };
    if settings.read_only { mount(MountFlags::RDONLY) } else { mount(MountFlags::empty()) }
        .map_err(|e| io::Error::new(e.kind(), format!("{source}: {e}")))
}

/// Keeps the agent in memory, out of the out-of-memory killer's sight, and gives programs the
/// number of descriptors that container images are used to.
fn limits() {
    use rustix::mm::MlockAllFlags;
    use rustix::process::{Resource, Rlimit, setrlimit};
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let files = Rlimit { current: Some(1024), maximum: Some(1 << 20) };
    let _ = setrlimit(Resource::Nofile, files);
    // On fault: stacks are reserved in full and used in small part.
    let _ = rustix::mm::mlockall(
        MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_command_line() {
        let wanted = |root: &str, kind: &str, read_only| CommandLine {
            root: root.into(),
            root_kind: kind.to_owned(),
            read_only,
        };
        let table = [
            ("", wanted("/dev/vda", "ext4", false)),
            ("console=ttyS0 ro quiet root=UUID=1", wanted("/dev/vda", "ext4", false)),
            ("root=/dev/vdb rootfstype=erofs parbake.ro", wanted("/dev/vdb", "erofs", true)),
        ];
        for (text, settings) in table {
            assert_eq!(CommandLine::parse(text), settings, "{text}");
        }
    }
}
