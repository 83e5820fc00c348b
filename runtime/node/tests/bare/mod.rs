//! Bare guests on `/dev/kvm` with all that a create prepares but an agent: for what must hold a
//! thousand times, and for what it costs.
#![allow(dead_code, missing_docs)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use parbake_node::limits::cgroup::Cgroup;
use parbake_node::monitor::Monitor;
use parbake_node::network::Lease;
use parbake_protocol::vmm::{Event, Jail, Net, Start, Tap, VERSION, VmmConfig};

pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
pub const MEMORY_MIB: u32 = 128;

/// The guest of `tests/guests/ticker.S`.
fn assemble(directory: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/guests");
    let out = directory.join("guest");
    let status = Command::new("cc")
        .current_dir(sources)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noexecstack"])
        .args(["-Wl,--no-warn-rwx-segments", "-I.", "-T", "guest.ld", "-o"])
        .arg(&out)
        .arg("ticker.S")
        .status()
        .expect("cc (package gcc) assembles the guest");
    assert!(status.success());
    out
}

/// Bare guests, and where everything of theirs is.
pub struct Bare {
    vmm: PathBuf,
    directory: PathBuf,
    guest: PathBuf,
}

/// Why there can be none, for people; where there can, the monitor.
pub fn available() -> Result<PathBuf, &'static str> {
    let vmm = std::env::var_os("PARBAKE_VMM")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("PARBAKE_BIN")?).join("parbake-vmm")));
    let vmm = vmm.ok_or("neither PARBAKE_VMM nor PARBAKE_BIN names a monitor")?;
    if File::options().read(true).write(true).open("/dev/kvm").is_err()
        || !rustix::process::geteuid().is_root()
    {
        return Err("needs root and /dev/kvm");
    }
    Ok(vmm)
}

impl Bare {
    /// With everything in `directory`.
    pub fn new(vmm: PathBuf, directory: &Path) -> Self {
        Self { vmm, guest: assemble(directory), directory: directory.to_owned() }
    }

    fn start(&self, config: &VmmConfig, lease: Option<&Lease>, group: Option<&Cgroup>) -> Monitor {
        let log = self.directory.join("log");
        let tap = lease.map(Lease::tap);
        Monitor::spawn(&self.vmm, config, &log, None, tap, group).expect("monitor")
    }

    /// A frozen guest, and how to restore it.
    pub fn freeze(&self, name: &str, net: Option<Net>) -> VmmConfig {
        let mut config = VmmConfig {
            version: VERSION,
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            start: Start::Boot {
                kernel: self.guest.clone(),
                initramfs: None,
                cmdline: String::new(),
            },
            disks: vec![],
            vsock: None,
            net,
            rng: false,
            console: None,
            console_limit: 1 << 20,
            lifetime_ms: None,
            control: None,
            jail: Jail::default(),
            filling: None,
            workspace: None,
        };
        let mut monitor = self.start(&config, None, None);
        doorbell(&mut monitor);
        doorbell(&mut monitor);
        monitor.pause().expect("pause");
        let path = |what: &str| self.directory.join(format!("{name}-{what}"));
        let create = |what: &str| File::create_new(path(what)).expect("file");
        monitor.snapshot(&create("state"), &create("memory"), &[], false).expect("snapshot");
        monitor.quit();
        config.start = Start::Restore {
            state: path("state"),
            memory: path("memory"),
            difference: None,
            generation_id: [7; 16],
            paused: false,
        };
        config
    }

    /// To the first output of the restored guest. Ending it is not part of a create.
    pub fn restore(
        &self,
        config: &VmmConfig,
        lease: Option<&Lease>,
        group: Option<&Cgroup>,
    ) -> Monitor {
        let mut config = config.clone();
        if lease.is_some() {
            config.net = Some(Net { tap: Some(Tap::Passed), mac: MAC });
        }
        let mut monitor = self.start(&config, lease, group);
        doorbell(&mut monitor);
        monitor
    }

    /// A fork: what differs is written, the parent goes on, and a copy of it says its first word.
    pub fn fork(&self, parent: &mut Monitor, config: &VmmConfig, name: &str) -> (Monitor, Fork) {
        let path = |what: &str| self.directory.join(format!("{name}-{what}"));
        let create = |what: &str| File::create_new(path(what)).expect("file");
        let (state, memory) = (create("state"), create("memory"));
        let begun = Instant::now();
        parent.pause().expect("pause");
        let paused = begun.elapsed();
        let report = parent.snapshot(&state, &memory, &[], true).expect("difference");
        assert!(report.difference);
        let written = begun.elapsed();
        parent.resume().expect("resume");
        let resumed = begun.elapsed();
        let mut config = config.clone();
        let Start::Restore { state, difference, .. } = &mut config.start else { unreachable!() };
        (*state, *difference) = (path("state"), Some(path("memory")));
        let copy = self.restore(&config, None, None);
        let total = begun.elapsed();
        std::fs::remove_file(path("state")).expect("remove");
        std::fs::remove_file(path("memory")).expect("remove");
        (copy, Fork { paused, written, resumed, total })
    }
}

/// When each stage of a fork was over.
pub struct Fork {
    pub paused: Duration,
    pub written: Duration,
    pub resumed: Duration,
    pub total: Duration,
}

/// Waits until the guest says something.
pub fn doorbell(monitor: &mut Monitor) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Event::Doorbell { .. } = monitor.next_event(deadline).expect("event") {
            return;
        }
    }
}
