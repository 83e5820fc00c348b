//! After a restore: the clone becomes a machine of its own before any user code runs.
//!
//! Every item is tried and reported. User processes are thawed only if all succeeded; otherwise
//! they stay frozen, exec stays refused, and the host throws the guest away.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use parbake_protocol::agent::{Failure, FailureKind, Fixup, FixupReport};
use rustix::time::{ClockId, Timespec, clock_settime};

use crate::connection::failure;
use crate::identity::{self, IdentityFile};
use crate::quiesce::step;
use crate::serve::Agent;
use crate::{kernel, network};

const KEYGEN: &str = "/usr/bin/ssh-keygen";

/// What becomes of the environment of the run that was frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Env {
    /// It is replaced.
    Replace,
    /// The new entries come on top.
    Extend,
}

/// Lets user processes run again that a quiesce stopped.
///
/// # Errors
/// The machine is not the agent's, or the kernel's refusal; they stay frozen then.
pub fn thaw(agent: &Agent) -> Result<(), Failure> {
    agent.must_own_machine()?;
    thaw_users(agent).map_err(|e| failure(FailureKind::System, format!("cannot thaw: {e}")))
}

fn thaw_users(agent: &Agent) -> io::Result<()> {
    if let Some(cgroup) = &agent.options.cgroup {
        cgroup.thaw()?;
    }
    agent.state().frozen = false;
    Ok(())
}

/// Applies all items.
///
/// # Errors
/// The machine is not the agent's, or the message makes no sense. Nothing has been changed then.
pub fn run(agent: &Agent, fixup: Fixup, env: Env) -> Result<FixupReport, Failure> {
    agent.must_own_machine()?;
    check(&fixup)?;
    let mut report = FixupReport::default();
    let items = &mut report.items;
    let done = || Ok(String::new());
    // First of all, so that whatever follows draws fresh bytes.
    step(items, "entropy", || kernel::reseed(&fixup.entropy).and_then(|()| done()));
    step(items, "clock", || set_clock(fixup.realtime_ns).and_then(|()| done()));
    if !fixup.hostname.is_empty() {
        step(items, "hostname", || {
            rustix::system::sethostname(fixup.hostname.as_bytes())?;
            IdentityFile::Hostname.set(&format!("{}\n", fixup.hostname))?;
            let address = fixup.network.as_ref().map(|n| n.address);
            IdentityFile::Hosts.set(&identity::hosts(&fixup.hostname, address))?;
            done()
        });
    }
    step(items, "machine_id", || set_machine_id(&fixup.machine_id).and_then(|()| done()));
    step(items, "boot_id", || {
        IdentityFile::BootId.set(&format!("{}\n", identity::uuid(identity::random()?)))?;
        done()
    });
    if fixup.ssh_host_keys {
        step(items, "ssh_host_keys", || replace_ssh_keys(agent));
    }
    match &fixup.network {
        Some(config) => step(items, "network", || {
            network::configure(config)?;
            IdentityFile::Resolver.set(&network::resolver(&config.dns))?;
            done()
        }),
        None => step(items, "network", || network::off("eth0").and_then(|()| done())),
    }
    let succeeded = items.iter().all(|i| i.error.is_none());
    {
        let mut state = agent.state();
        if env == Env::Replace {
            state.run_env.clear();
        }
        state.run_env.extend(fixup.env);
        state.instance_id = fixup.instance_id;
        state.fixups = state.fixups.saturating_add(1);
        state.frozen = true;
    }
    if succeeded {
        step(items, "thaw", || thaw_users(agent).and_then(|()| done()));
        report.running = items.last().is_some_and(|i| i.error.is_none());
    }
    Ok(report)
}

fn check(fixup: &Fixup) -> Result<(), Failure> {
    let bad = |message: &str| Err(failure(FailureKind::BadRequest, message));
    // It goes into /etc/hosts: nothing that could end the line or the word.
    let fine = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.' || b == b'_';
    if fixup.hostname.len() > 64 || !fixup.hostname.bytes().all(fine) {
        return bad("a host name has at most 64 letters, digits, '-', '.' and '_'");
    }
    if fixup.entropy == [0; 64] {
        return bad("the entropy is all zeros");
    }
    if fixup.machine_id == [0; 16] {
        return bad("the machine id is all zeros");
    }
    Ok(())
}

fn set_clock(told: u64) -> io::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    // The message may have waited for a processor; the port has the time of this instant. It is
    // believed only where it says about the same, in case something else answers there.
    const PATIENCE: u64 = 600 * SECOND;
    let nanoseconds = match crate::doorbell::host_clock() {
        Ok(Some(now)) if now.abs_diff(told) < PATIENCE => now,
        _ => told,
    };
    let time = Timespec {
        tv_sec: i64::try_from(nanoseconds / SECOND).map_err(io::Error::other)?,
        tv_nsec: i64::try_from(nanoseconds % SECOND).map_err(io::Error::other)?,
    };
    Ok(clock_settime(ClockId::Realtime, time)?)
}

fn set_machine_id(id: &[u8; 16]) -> io::Result<()> {
    let text = format!("{}\n", identity::hex(id));
    IdentityFile::MachineId.set(&text)?;
    // Usually a link to the above; where it is a copy, it must follow.
    let copy = Path::new("/var/lib/dbus/machine-id");
    if fs::symlink_metadata(copy).is_ok_and(|m| m.is_file()) {
        fs::write(copy, text)?;
    }
    Ok(())
}

/// Removes the host keys there are and makes new ones of the same kinds. Making an RSA key takes
/// long (a second or more on a slow machine), so RSA is only made again where it was the only kind.
fn replace_ssh_keys(agent: &Agent) -> io::Result<String> {
    let Ok(entries) = fs::read_dir("/etc/ssh") else { return Ok("no /etc/ssh".to_owned()) };
    let mut kinds: Vec<String> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let kind = name.as_bytes().strip_prefix(b"ssh_host_")?.strip_suffix(b"_key")?;
            String::from_utf8(kind.to_vec()).ok()
        })
        .collect();
    for kind in &kinds {
        fs::remove_file(format!("/etc/ssh/ssh_host_{kind}_key"))?;
        // Of no use to anyone without the other half.
        let _ = fs::remove_file(format!("/etc/ssh/ssh_host_{kind}_key.pub"));
    }
    let found = kinds.join(", ");
    if kinds.iter().any(|k| k != "rsa") {
        kinds.retain(|k| k != "rsa");
    }
    if kinds.is_empty() || !Path::new(KEYGEN).exists() {
        return Ok(format!("removed: {found}"));
    }
    for kind in &kinds {
        let path = format!("/etc/ssh/ssh_host_{kind}_key");
        let mut command = Command::new(KEYGEN);
        command.args(["-q", "-N", "", "-t", kind, "-f", &path]).stdin(Stdio::null());
        let status = agent.children.run(&mut command)?;
        if !status.success() {
            return Err(io::Error::other(format!("ssh-keygen -t {kind}: {status}")));
        }
    }
    Ok(format!("removed: {found}; new: {}", kinds.join(", ")))
}
