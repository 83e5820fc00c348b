//! A monitor's cgroup: what the host's kernel holds it to.
//!
//! Version 2 where it has the controllers, version 1 where only that has. The group is made below
//! the one this process is in, so that whatever holds us holds our sandboxes too; version 2 wants a
//! group without processes for that, so there it is the nearest one above that can be had. A cgroup
//! is a directory with a handful of files to write; that is all there is to it.
//!
//! ```text
//! version 2:  <ancestor>/parbake/<id>               memory cpu pids io
//! version 1:  <controller's mount>/<our own>/parbake/<id>, one for each controller
//! ```
//! An empty group left by a process that was killed is removed by whoever makes the next one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The directory that holds all our groups.
const OURS: &str = "parbake";

/// The controllers we use, by their names in version 2 and in version 1.
const CONTROLLERS: [(&str, &str); 4] =
    [("memory", "memory"), ("cpu", "cpu"), ("pids", "pids"), ("io", "blkio")];

/// How much of each is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shares {
    /// Bytes.
    pub memory: u64,
    /// Thousandths of a processor.
    pub cpu_milli: u32,
    /// Threads.
    pub pids: u32,
    /// 1 to 10000.
    pub io_weight: u16,
}

/// Why a process has no group.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No hierarchy with the controllers is mounted, or none that we may use.
    #[error(
        "no cgroup can be made here ({0}); mount cgroup v2 with memory, cpu and pids, or run as a \
         user who may"
    )]
    Unavailable(String),
    /// A limit was refused.
    #[error("cannot set {}: {source}", file.display())]
    Refused {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// One sandbox's group; removed on drop, when its processes have ended.
#[derive(Debug)]
pub struct Cgroup {
    version: u8,
    /// Controller names and directories: in version 2 all are the same directory.
    places: Vec<(&'static str, PathBuf)>,
}

impl Cgroup {
    /// Makes a group for sandbox `id`.
    pub fn create(id: &str, shares: &Shares) -> Result<Self, CgroupError> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(|error| CgroupError::Unavailable(error.to_string()))?;
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = match unified(&mounts, &own) {
            Some((directory, controllers)) => {
                sweep(&directory);
                let directory = make(&directory, id)?;
                let places =
                    controllers.into_iter().map(|name| (name, directory.clone())).collect();
                Self { version: 2, places }
            }
            None => Self::of_version_1(&mounts, &own, id)?,
        };
        group.set(shares)?;
        Ok(group)
    }

    /// The group that another process made for sandbox `id`, if it did.
    pub fn find(id: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let group = match unified(&mounts, &own) {
            Some((directory, controllers)) => {
                let place = directory.join(id);
                let places = controllers.into_iter().map(|name| (name, place.clone())).collect();
                Self { version: 2, places }
            }
            None => {
                let place = |(name, controller)| {
                    let parent = controller_directory(&mounts, &own, controller)?;
                    Some((name, parent.join(OURS).join(id)))
                };
                Self { version: 1, places: CONTROLLERS.into_iter().filter_map(place).collect() }
            }
        };
        let there = group.places.first().is_some_and(|(_, place)| place.is_dir());
        // One that is not there has nothing to be removed.
        there.then_some(group)
    }

    /// Leaves the group to whoever comes next.
    pub fn leave(mut self) {
        self.places.clear();
    }

    fn of_version_1(mounts: &str, own: &str, id: &str) -> Result<Self, CgroupError> {
        let mut group = Self { version: 1, places: Vec::new() };
        for (name, controller) in CONTROLLERS {
            let Some(parent) = controller_directory(mounts, own, controller) else { continue };
            sweep(&parent.join(OURS));
            // Dropping what was made so far removes it.
            group.places.push((name, make(&parent.join(OURS), id)?));
        }
        if group.places.is_empty() {
            let why = "neither version 2 with controllers nor version 1 is mounted";
            return Err(CgroupError::Unavailable(why.to_owned()));
        }
        Ok(group)
    }

    fn place(&self, controller: &str) -> Option<&Path> {
        self.places.iter().find(|(name, _)| *name == controller).map(|(_, place)| place.as_path())
    }

    fn set(&self, shares: &Shares) -> Result<(), CgroupError> {
        let write = |file: PathBuf, value: String| {
            fs::write(&file, value).map_err(|source| CgroupError::Refused { file, source })
        };
        let two = self.version == 2;
        if let Some(place) = self.place("memory") {
            let file = if two { "memory.max" } else { "memory.limit_in_bytes" };
            write(place.join(file), shares.memory.to_string())?;
            if two {
                // A machine pushed out to swap would be slow for everybody; a kernel without swap
                // has no such file. And half a machine is none.
                let _ = fs::write(place.join("memory.swap.max"), "0");
                let _ = fs::write(place.join("memory.oom.group"), "1");
            }
        }
        if let Some(place) = self.place("cpu") {
            const PERIOD: u64 = 100_000;
            let quota = (u64::from(shares.cpu_milli) * PERIOD / 1000).max(1000);
            if two {
                write(place.join("cpu.max"), format!("{quota} {PERIOD}"))?;
            } else {
                write(place.join("cpu.cfs_period_us"), PERIOD.to_string())?;
                write(place.join("cpu.cfs_quota_us"), quota.to_string())?;
            }
        }
        if let Some(place) = self.place("pids") {
            write(place.join("pids.max"), shares.pids.to_string())?;
        }
        if let Some(place) = self.place("io") {
            // Only some schedulers of the kernel have weights; without one nobody has any.
            let weight = shares.io_weight;
            let files: &[(&str, u16)] = if two {
                &[("io.weight", weight), ("io.bfq.weight", weight.min(1000))]
            } else {
                &[("blkio.bfq.weight", weight.min(1000)), ("blkio.weight", weight.clamp(10, 1000))]
            };
            for (file, weight) in files {
                let _ = fs::write(place.join(file), weight.to_string());
            }
        }
        Ok(())
    }

    /// Moves a process in, with all its threads.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        let mut done: Option<&Path> = None;
        for (_, place) in &self.places {
            if done == Some(place) {
                continue;
            }
            let file = place.join("cgroup.procs");
            fs::write(&file, pid.to_string())
                .map_err(|source| CgroupError::Refused { file, source })?;
            done = Some(place);
        }
        Ok(())
    }

    /// Moves the calling thread in, in version 1, where threads may be in groups of their own. What
    /// it starts is in the group from the beginning; and as it moves itself, nobody waits for
    /// anybody.
    pub fn enter_thread(&self) -> Result<(), CgroupError> {
        for (_, place) in &self.places {
            let file = place.join("tasks");
            fs::write(&file, "0").map_err(|source| CgroupError::Refused { file, source })?;
        }
        Ok(())
    }

    /// The directory of a group of version 2.
    #[must_use]
    pub fn unified(&self) -> Option<&Path> {
        self.places.first().filter(|_| self.version == 2).map(|(_, place)| place.as_path())
    }

    /// What it is, for the list of active layers.
    pub fn describe(&self) -> String {
        let names: Vec<_> = self.places.iter().map(|(name, _)| *name).collect();
        format!("cgroup{}:{}", self.version, names.join(","))
    }

    /// Processes of it that the kernel ended for want of memory.
    pub fn memory_kills(&self) -> u64 {
        let file = if self.version == 2 { "memory.events" } else { "memory.oom_control" };
        self.count("memory", file, "oom_kill")
    }

    /// Periods in which it got less processor time than it wanted.
    pub fn throttled(&self) -> u64 {
        self.count("cpu", "cpu.stat", "nr_throttled")
    }

    /// Threads it was denied.
    pub fn pids_denied(&self) -> u64 {
        self.count("pids", "pids.events", "max")
    }

    fn count(&self, controller: &str, file: &str, key: &str) -> u64 {
        let Some(place) = self.place(controller) else { return 0 };
        let text = fs::read_to_string(place.join(file)).unwrap_or_default();
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
            .unwrap_or(0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just been reaped may still be on its way out.
        let deadline = Instant::now() + Duration::from_millis(500);
        for (_, place) in &self.places {
            while place.exists() && fs::remove_dir(place).is_err() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

fn make(parent: &Path, id: &str) -> Result<PathBuf, CgroupError> {
    let directory = parent.join(id);
    let failed =
        |error: io::Error| CgroupError::Unavailable(format!("{}: {error}", directory.display()));
    match fs::create_dir(parent) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    fs::create_dir(&directory).map_err(failed)?;
    Ok(directory)
}

/// Removes empty groups. Those in use refuse; one being made has no process yet, and is left alone
/// for its first minute.
fn sweep(ours: &Path) {
    let Ok(entries) = fs::read_dir(ours) else { return };
    for entry in entries.flatten() {
        let old = |made: std::time::SystemTime| {
            made.elapsed().is_ok_and(|age| age > Duration::from_secs(60))
        };
        if entry.file_type().is_ok_and(|kind| kind.is_dir())
            && entry.metadata().and_then(|metadata| metadata.modified()).is_ok_and(old)
        {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Mount point and root of a hierarchy whose line in `mountinfo` has `kind` and, in version 1, the
/// controller among its options.
fn mount(mounts: &str, kind: &str, controller: Option<&str>) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        if right.next() != Some(kind) {
            return None;
        }
        if let Some(controller) = controller
            && !right.nth(1)?.split(',').any(|option| option == controller)
        {
            return None;
        }
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        Some((PathBuf::from(point), PathBuf::from(root)))
    })
}

/// Our own group's path in the hierarchy that `matches` its list of controllers.
fn own_path(own: &str, matches: impl Fn(&str) -> bool) -> Option<&str> {
    own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        matches(controllers).then_some(path)
    })
}

/// Our own group's directory.
fn directory((point, root): &(PathBuf, PathBuf), path: &str) -> PathBuf {
    // A bind mount shows a part of the hierarchy; in a namespace of groups, paths begin there.
    let inside = Path::new(path).strip_prefix(root).unwrap_or(Path::new(path));
    point.join(inside.strip_prefix("/").unwrap_or(inside))
}

fn controller_directory(mounts: &str, own: &str, controller: &str) -> Option<PathBuf> {
    let mount = mount(mounts, "cgroup", Some(controller))?;
    let path = own_path(own, |list| list.split(',').any(|name| name == controller))?;
    let directory = directory(&mount, path);
    if directory.is_dir() { Some(directory) } else { Some(mount.0) }
}

/// In version 2: the nearest place at or above our own group that passes the memory controller on,
/// and which controllers it passes on.
fn unified(mounts: &str, own: &str) -> Option<(PathBuf, Vec<&'static str>)> {
    let mount = mount(mounts, "cgroup2", None)?;
    let mut place = directory(&mount, own_path(own, str::is_empty)?);
    loop {
        let ours = place.join(OURS);
        if pass_on(&place).contains(&"memory") && (ours.is_dir() || fs::create_dir(&ours).is_ok()) {
            let controllers = pass_on(&ours);
            if controllers.contains(&"memory") {
                return Some((ours, controllers));
            }
        }
        if place == mount.0 || !place.pop() || !place.starts_with(&mount.0) {
            return None;
        }
    }
}

/// Switches our controllers on for the children of a group; which ones they have then.
fn pass_on(place: &Path) -> Vec<&'static str> {
    let file = place.join("cgroup.subtree_control");
    let has = |name: &str| {
        let text = fs::read_to_string(&file).unwrap_or_default();
        text.split_whitespace().any(|word| word == name)
    };
    CONTROLLERS
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| has(name) || (fs::write(&file, format!("+{name}")).is_ok() && has(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
";
    const OWN: &str = "4:memory:/a/b\n1:cpu,cpuacct:/\n0::/user.slice\n";

    #[test]
    fn hierarchies_are_found() {
        let two = mount(MOUNTS, "cgroup2", None).unwrap();
        assert_eq!(two, ("/sys/fs/cgroup/unified".into(), "/".into()));
        let memory = mount(MOUNTS, "cgroup", Some("memory")).unwrap();
        assert_eq!(memory.0, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(mount(MOUNTS, "cgroup", Some("pids")), None);
        let own = own_path(OWN, |list| list.split(',').any(|name| name == "memory")).unwrap();
        assert_eq!(directory(&memory, own), Path::new("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(
            directory(&two, own_path(OWN, str::is_empty).unwrap()),
            Path::new("/sys/fs/cgroup/unified/user.slice")
        );
        // In a container: the mount shows our own part only.
        let bound = ("/sys/fs/cgroup/memory".into(), "/a".into());
        assert_eq!(directory(&bound, "/a/b"), Path::new("/sys/fs/cgroup/memory/b"));
    }

    #[test]
    fn a_group_holds_a_process_and_goes_with_it() {
        let shares = Shares { memory: 64 << 20, cpu_milli: 500, pids: 8, io_weight: 100 };
        let group = match Cgroup::create(&format!("test-{}", std::process::id()), &shares) {
            Ok(group) => group,
            Err(CgroupError::Unavailable(why)) => {
                eprintln!("skipped: no cgroup can be made here ({why})");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let places: Vec<_> = group.places.iter().map(|(_, place)| place.clone()).collect();
        assert!(group.describe().contains("memory"), "{}", group.describe());
        // More memory and more threads than it may have.
        let script = "head -c 200m /dev/zero | tail -c 150m | tail -c 1; \
             for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 9 & done";
        let mut child = std::process::Command::new("sh")
            .args(["-c", &format!("read go; {script}")])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        group.add(child.id()).unwrap();
        io::Write::write_all(&mut child.stdin.take().unwrap(), b"go\n").unwrap();
        child.wait().unwrap();
        assert!(group.memory_kills() > 0, "200 MB in a group of 64 MiB");
        assert!(group.pids_denied() > 0, "14 processes in a group of 8");
        for (_, place) in &group.places {
            for pid in fs::read_to_string(place.join("cgroup.procs")).unwrap().lines() {
                let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        drop(group);
        for place in places {
            assert!(!place.exists(), "{} is left", place.display());
        }
    }
}
