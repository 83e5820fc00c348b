//! What this machine can do, item by item, with what to do about what it cannot.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;

use crate::tools::{self, Tool};

/// The KVM interface version; it has not changed since 2007.
const KVM_API: i32 = 12;
/// Free space below which building and baking are likely to fail, in bytes.
const LOW_DISK: u64 = 4 << 30;
/// Memory the lab needs beside what it gives its guest, in MiB.
const LAB_OVERHEAD_MIB: u64 = 256;

/// Whether an item is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum State {
    /// It is.
    Ok {
        /// Version, size, or place.
        detail: String,
    },
    /// It is not.
    Missing {
        /// What was found instead.
        why: String,
        /// What the user can do.
        fix: String,
    },
}

/// One thing that was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Item {
    /// Stable name for programs, e.g. `kvm-device`.
    pub id: &'static str,
    /// What it is, for people.
    pub title: &'static str,
    /// What needs it.
    pub needed_for: &'static str,
    /// Whether it is there.
    #[serde(flatten)]
    pub state: State,
}

impl Item {
    /// Whether it is there.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        matches!(self.state, State::Ok { .. })
    }
}

/// What the machine can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HostReport {
    /// Stock guests run on `/dev/kvm`.
    pub kvm_usable: bool,
    /// The lab can be started.
    pub lab_usable: bool,
    /// Every item, in the order of a report.
    pub items: Vec<Item>,
}

/// The ids of what the lab cannot do without.
const LAB_NEEDS: &[&str] = &["qemu", "virtiofsd", "memory"];

impl HostReport {
    /// The items that are missing among those with one of the given ids.
    pub fn missing<'a>(&'a self, ids: &'a [&str]) -> impl Iterator<Item = &'a Item> {
        self.items.iter().filter(move |item| ids.contains(&item.id) && !item.is_ok())
    }

    /// The items that keep KVM from running guests.
    pub fn kvm_obstacles(&self) -> impl Iterator<Item = &Item> {
        self.missing(&["kvm-device", "cpu-virtualization"])
    }

    /// The items that keep the lab from starting.
    pub fn lab_obstacles(&self) -> impl Iterator<Item = &Item> {
        self.missing(LAB_NEEDS)
    }
}

/// Looks at the machine. `store` need not exist yet; `lab_memory_mib` is what a lab would get.
#[must_use]
pub fn probe(store: &Path, lab_memory_mib: u32) -> HostReport {
    let items = vec![
        item("kvm-device", "/dev/kvm", "sandboxes on this machine's own KVM", kvm_device()),
        item(
            "cpu-virtualization",
            "CPU virtualization (svm or vmx)",
            "sandboxes on this machine's own KVM",
            cpu_virtualization(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
        ),
        item("qemu", "QEMU", "the lab", tool(&tools::QEMU)),
        item("virtiofsd", "virtiofsd", "the lab", virtiofsd()),
        item("memory", "free memory", "the lab", memory(lab_memory_mib)),
        item("apt", "apt-get", "fetching kernels by package name", apt()),
        item("disk", "disk space for the store", "building and baking", disk(store)),
        item("e2fsck", "e2fsck", "checking built file systems (tests)", tool(&tools::E2FSCK)),
        item("tun", "/dev/net/tun", "sandboxes with a network", tun()),
        item("root", "root", "the jail around each sandbox, the lab's file server", root()),
    ];
    let all_ok = |ids: &[&str]| items.iter().all(|item| item.is_ok() || !ids.contains(&item.id));
    HostReport {
        kvm_usable: all_ok(&["kvm-device", "cpu-virtualization"]),
        lab_usable: all_ok(LAB_NEEDS),
        items,
    }
}

fn item(id: &'static str, title: &'static str, needed_for: &'static str, state: State) -> Item {
    Item { id, title, needed_for, state }
}

fn ok(detail: impl Into<String>) -> State {
    State::Ok { detail: detail.into() }
}

fn missing(why: impl Into<String>, fix: impl Into<String>) -> State {
    State::Missing { why: why.into(), fix: fix.into() }
}

fn kvm_device() -> State {
    match kvm_ioctls::Kvm::new() {
        Ok(kvm) => match kvm.get_api_version() {
            KVM_API => ok(format!("API {KVM_API}")),
            other => missing(format!("API version {other}"), "use a Linux kernel with KVM API 12"),
        },
        Err(error) => {
            let error = io::Error::from(error);
            let fix = match error.kind() {
                io::ErrorKind::NotFound => {
                    "load kvm-amd or kvm-intel, allow nested virtualization, or use --host lab"
                }
                io::ErrorKind::PermissionDenied => "join the group kvm, or run as root",
                _ => "see the kernel's log, or use --host lab",
            };
            missing(error.to_string(), fix)
        }
    }
}

/// The flag in `/proc/cpuinfo` tells hardware virtualization from a KVM in software, which opens
/// and answers but cannot run stock guests.
fn cpu_virtualization(cpuinfo: &str) -> State {
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    let mut flags = flags.map(|(_, flags)| flags).unwrap_or_default().split_ascii_whitespace();
    match flags.find(|flag| matches!(*flag, "svm" | "vmx")) {
        Some(flag) => ok(flag),
        None => missing(
            "neither flag in /proc/cpuinfo",
            "switch virtualization on in the firmware, or allow nested virtualization on the outer \
             host; until then --host lab emulates a machine that has it (--host kvm tries anyway)",
        ),
    }
}

fn tool(tool: &Tool) -> State {
    match tool.find() {
        Some(path) => ok(tools::version_line(&path).unwrap_or_else(|| path.display().to_string())),
        None => missing("not found", format!("run: {}", tool.install)),
    }
}

fn virtiofsd() -> State {
    match tools::VIRTIOFSD.find() {
        Some(path) => ok(path.display().to_string()),
        None => missing(
            "not in PATH, /usr/lib/qemu or /usr/libexec",
            format!("run: {}", tools::VIRTIOFSD.install),
        ),
    }
}

fn apt() -> State {
    match tools::APT_GET.find() {
        Some(path) => ok(path.display().to_string()),
        None => missing("not found", "give kernels as a local .deb or image"),
    }
}

/// `MemAvailable` in MiB.
fn available_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? / 1024)
}

fn memory(lab_mib: u32) -> State {
    let needed = u64::from(lab_mib) + LAB_OVERHEAD_MIB;
    match available_mib(&fs::read_to_string("/proc/meminfo").unwrap_or_default()) {
        Some(available) if available < needed => missing(
            format!("{available} MiB available, a lab of {lab_mib} MiB needs {needed}"),
            "end other programs, or give the lab less memory",
        ),
        Some(available) => ok(format!("{available} MiB available")),
        None => ok("unknown"),
    }
}

fn disk(store: &Path) -> State {
    // The store may not exist yet: its file system is that of the nearest folder that does.
    let existing = store.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(existing) {
        Ok(stat) => {
            let free = stat.f_bavail.saturating_mul(stat.f_frsize);
            let text = format!("{} MiB free at {}", free >> 20, existing.display());
            if free < LOW_DISK {
                missing(text, "free some space, or choose another place with --store")
            } else {
                ok(text)
            }
        }
        Err(error) => {
            let why = format!("{}: {}", existing.display(), io::Error::from(error));
            missing(why, "choose another place with --store")
        }
    }
}

fn tun() -> State {
    if Path::new("/dev/net/tun").exists() {
        ok("present")
    } else {
        missing("not there", "load the module tun; without it sandboxes have no network")
    }
}

fn root() -> State {
    if rustix::process::geteuid().is_root() {
        ok("yes")
    } else {
        missing("not root", "run as root; building file systems needs no root")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_kvm_is_told_from_hardware_by_the_flag() {
        let with = "processor : 0\nflags\t\t: fpu vme svm nx\n";
        assert_eq!(cpu_virtualization(with), ok("svm"));
        for without in ["", "flags\t\t: fpu svm_lock vmxnet\n", "vmx flags : 1\n"] {
            assert!(matches!(cpu_virtualization(without), State::Missing { .. }), "{without:?}");
        }
    }

    #[test]
    fn meminfo_is_read_in_mib() {
        let text = "MemTotal:       25165824 kB\nMemAvailable:    2097152 kB\n";
        assert_eq!(available_mib(text), Some(2048));
        assert_eq!(available_mib("MemAvailable: lots"), None);
    }

    #[test]
    fn what_is_missing_always_says_what_to_do() {
        let report = probe(Path::new("/nonexistent/store"), u32::MAX);
        assert!(!report.lab_usable, "no machine has this much memory");
        assert!(report.lab_obstacles().any(|item| item.id == "memory"));
        for item in &report.items {
            if let State::Missing { why, fix } = &item.state {
                assert!(!why.is_empty() && !fix.is_empty(), "{item:?}");
            }
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["items"][4]["state"], "missing");
        assert_eq!(json["items"][4]["id"], "memory");
    }
}
