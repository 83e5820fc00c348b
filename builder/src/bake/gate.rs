//! The bake gate: proof that a snapshot makes sound machines, and no two alike.
//!
//! ```text
//! snapshot ─► restore ─► look ┐ both alive at once
//!        └──► restore ─► look ┴► compare ─► checks
//! ```
//! Everything is read through the agent and from `/proc` and `/sys`, so that it works for images
//! without a shell or any program at all.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parbake_cache::template::SnapshotManifest;
use parbake_cache::working_set::{Role, WorkingSet};
use parbake_cache::{Digest, Store, StoreError};
use parbake_node::filling::{Fill, Image};
use parbake_node::pager;
use parbake_node::sandbox::{Sandbox, SandboxError, SandboxOptions};
use parbake_protocol::agent::{ClientError, ExecRequest};

use super::BakeError;
use super::guest::Guest;
use crate::template::{Template, TemplateError};

/// How far a restored guest's clock may be off.
pub const CLOCK_TOLERANCE: Duration = Duration::from_millis(500);
/// How many random values are drawn from each machine.
const DRAWS: usize = 4;
/// More than any file looked at has.
const MAX_FILE: u64 = 4 << 20;

/// One thing that must hold.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Check {
    /// A stable word.
    pub name: &'static str,
    /// Whether it holds.
    pub passed: bool,
    /// What was found, for people.
    pub detail: String,
}

/// Why the gate could not even be tried. A machine that does not come up is one reason.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The guest.
    #[error("restore {number} of 2: {source}")]
    Sandbox {
        /// Which.
        number: usize,
        /// Why.
        source: SandboxError,
    },
}

/// What one restored machine looks like from within.
#[derive(Debug, Clone, Default, PartialEq)]
struct Seen {
    ready_ms: f64,
    hostname: String,
    instance: String,
    machine_id: Reading,
    random: Vec<String>,
    /// How far the clock is ahead of the host's, at least and at most.
    clock_ms: Option<(f64, f64)>,
    filesystem: Reading,
    frozen: bool,
    /// The template's own checks; absent where it has none.
    own: Reading,
}

/// What was read, or why it was not.
type Reading = Option<Result<String, String>>;

/// Restores `snapshot` twice, checks that each is ready as the template says, and compares the
/// machines. The template's times count `patience` times.
///
/// # Errors
/// When a machine does not come up; that something does not hold is a finding, not an error.
pub fn gate(
    store: &Store,
    template: &Template,
    (digest, snapshot): (&Digest, &SnapshotManifest),
    options: &SandboxOptions,
    patience: u32,
    mut events: impl FnMut(&str),
) -> Result<Vec<Check>, GateError> {
    let _lease = store.lease(&[template.digest])?;
    let files = template.restore_files(store, snapshot)?;
    // Names are what the gate compares: each machine gets its own.
    let options = SandboxOptions { hostname: None, ..options.clone() };
    let (mut machines, mut seen) = (Vec::new(), Vec::new());
    // What both touch is what every sandbox touches. Recorded once, as another order would make
    // another artifact of the same snapshot.
    let record = pager::available().is_ok() && store.working_set(digest)?.is_none();
    let mut touched = Vec::new();
    for number in 1..=2 {
        events(&format!("restore {number} of 2"));
        let failed = |source| GateError::Sandbox { number, source };
        let recorder = Arc::new(Recorder { memory: snapshot.memory.size, pages: Mutex::default() });
        let fill = record.then(|| Arc::clone(&recorder) as Arc<dyn Fill>);
        let mut sandbox =
            Sandbox::restore_from(&files, snapshot.machine, &options, fill).map_err(failed)?;
        let mut one = look(&mut sandbox).map_err(failed)?;
        one.own = confirm(&mut sandbox, template, &options, patience).map_err(failed)?;
        seen.push(one);
        if record {
            use_it(&mut sandbox);
            let pages = recorder.pages.lock().unwrap_or_else(PoisonError::into_inner).clone();
            touched.push(WorkingSet::of(*digest, pages));
        }
        // Both live at once, as in a node.
        machines.push(sandbox);
    }
    drop(machines);
    let checks = judge(&seen[0], &seen[1]);
    if let [one, two] = touched.as_slice()
        && checks.iter().all(|check| check.passed)
    {
        store.set_working_set(&one.common(std::slice::from_ref(two)))?;
    }
    Ok(checks)
}

/// Takes note of what a restored machine touches, in order; everything is there already.
struct Recorder {
    memory: u64,
    pages: Mutex<Vec<(Role, u32)>>,
}

impl Fill for Recorder {
    fn ensure(&self, image: Image, range: Range<u64>) -> Result<(), String> {
        let (role, end) = match image {
            Image::Memory => (Role::Memory, range.end.min(self.memory)),
            Image::Rootfs => (Role::Rootfs, range.end),
            Image::Disk => (Role::Disk, range.end),
        };
        let page = |at: u64| u32::try_from(at / 4096).unwrap_or(u32::MAX);
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        pages
            .extend((page(range.start)..page(end.next_multiple_of(4096))).map(|page| (role, page)));
        Ok(())
    }
}

/// Does what most sandboxes do first, for the record only: an image may have no shell.
fn use_it(sandbox: &mut Sandbox) {
    let Ok(client) = sandbox.connect() else { return };
    if let Ok(session) = client.exec(ExecRequest::new(["/bin/sh", "-c", "true"])) {
        let _ = session.wait_with_output(1 << 16);
    }
}

fn look(sandbox: &mut Sandbox) -> Result<Seen, SandboxError> {
    // First: a clock that is right only after a while is not right.
    let (before, list) = (now(), read(sandbox, "/proc/timer_list")?);
    let after = now();
    let clock_ms = list.ok().and_then(|list| realtime_of(&list)).map(|guest| {
        let off = |host: Duration| (guest.as_secs_f64() - host.as_secs_f64()) * 1000.0;
        // Read between the two, so it is off by at least the one and at most the other.
        (off(after), off(before))
    });
    let info = sandbox.info()?;
    let mut random = Vec::new();
    for _ in 0..DRAWS {
        match read(sandbox, "/proc/sys/kernel/random/uuid")? {
            Ok(uuid) => random.push(uuid.trim().to_owned()),
            Err(_) => break,
        }
    }
    let machine_id = read(sandbox, "/etc/machine-id")?.map(|id| id.trim().to_owned());
    let filesystem = filesystem(sandbox)?;
    Ok(Seen {
        ready_ms: sandbox.timings().ready.as_secs_f64() * 1000.0,
        hostname: info.hostname,
        instance: info.instance_id,
        machine_id: Some(machine_id),
        random,
        clock_ms,
        filesystem: Some(filesystem),
        frozen: info.frozen,
        own: None,
    })
}

/// Whether what the template calls ready holds in the restored machine.
fn confirm(
    sandbox: &mut Sandbox,
    template: &Template,
    options: &SandboxOptions,
    patience: u32,
) -> Result<Reading, SandboxError> {
    let Some(instructions) = &template.manifest.bake else { return Ok(None) };
    let count = instructions.ready.checks.len();
    if count == 0 {
        return Ok(None);
    }
    let process = &template.manifest.process;
    let mut guest = Guest { sandbox, process, instructions, options, patience, pid: None };
    match guest.confirm() {
        Ok(None) => Ok(Some(Ok(format!("{count} hold")))),
        Ok(Some(miss)) => Ok(Some(Err(miss))),
        Err(BakeError::Sandbox(error)) => Err(error),
        Err(error) => Ok(Some(Err(error.to_string()))),
    }
}

/// Whether the kernel has found faults in the root filesystem, and still writes to it.
fn filesystem(sandbox: &mut Sandbox) -> Result<Result<String, String>, SandboxError> {
    let mounts = match read(sandbox, "/proc/self/mountinfo")? {
        Ok(mounts) => mounts,
        Err(error) => return Ok(Err(error)),
    };
    let Some(root) = root_mount(&mounts) else {
        return Ok(Err("no root in /proc/self/mountinfo".to_owned()));
    };
    if root.filesystem != "ext4" {
        return Ok(Err(format!("the root is {}, not ext4", root.filesystem)));
    }
    if root.read_only {
        return Ok(Err("the root became read-only".to_owned()));
    }
    let uevent = match read(sandbox, &format!("/sys/dev/block/{}/uevent", root.device))? {
        Ok(uevent) => uevent,
        Err(error) => return Ok(Err(error)),
    };
    let Some(name) = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME=")) else {
        return Ok(Err(format!("the device {} has no name", root.device)));
    };
    let errors = read(sandbox, &format!("/sys/fs/ext4/{name}/errors_count"))?;
    Ok(match errors.as_deref().map(str::trim) {
        Ok("0") => Ok(format!("no errors on {name}")),
        Ok(count) => Err(format!("the kernel counted {count} errors on {name}")),
        Err(error) => Err(error.to_owned()),
    })
}

struct RootMount {
    device: String,
    filesystem: String,
    read_only: bool,
}

/// The topmost mount at `/` (proc_pid_mountinfo(5)).
fn root_mount(mountinfo: &str) -> Option<RootMount> {
    let mut mounts = mountinfo.lines().rev().filter_map(|line| {
        let (fields, rest) = line.split_once(" - ")?;
        let fields: Vec<&str> = fields.split(' ').collect();
        let rest: Vec<&str> = rest.split(' ').collect();
        let read_only = |options: &str| options.split(',').any(|option| option == "ro");
        (*fields.get(4)? == "/").then_some(())?;
        Some(RootMount {
            device: (*fields.get(2)?).to_owned(),
            filesystem: (*rest.first()?).to_owned(),
            read_only: read_only(fields.get(5)?) || read_only(rest.get(2)?),
        })
    });
    mounts.next()
}

/// The guest's wall clock: what has passed since its boot, plus how far the wall clock is from
/// that (`/proc/timer_list`, the kernel's own view, without a program in the guest).
fn realtime_of(timer_list: &str) -> Option<Duration> {
    let nanoseconds = |text: &str| -> Option<u64> { text.split_whitespace().next()?.parse().ok() };
    let since_boot = timer_list.lines().find_map(|line| line.strip_prefix("now at "))?;
    let mut lines = timer_list.lines().map(str::trim);
    lines.find(|line| *line == "clock 1:")?;
    let offset = lines
        .take_while(|line| !line.starts_with("clock "))
        .find_map(|line| line.strip_prefix(".offset:"))?;
    Some(Duration::from_nanos(nanoseconds(since_boot)?.checked_add(nanoseconds(offset)?)?))
}

/// A small file of the guest as text; the inner error is the guest's answer.
fn read(sandbox: &mut Sandbox, path: &str) -> Result<Result<String, String>, SandboxError> {
    let mut bytes = Vec::new();
    match sandbox.connect()?.get_file(path.as_bytes(), MAX_FILE, &mut bytes) {
        Ok(_) => Ok(Ok(String::from_utf8_lossy(&bytes).into_owned())),
        Err(ClientError::Failed(failure)) => Ok(Err(failure.message)),
        Err(error) => Err(SandboxError::Agent(error)),
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn judge(one: &Seen, two: &Seen) -> Vec<Check> {
    let check = |name, passed, detail| Check { name, passed, detail };
    let mut checks = vec![check(
        "ready",
        !one.frozen && !two.frozen,
        format!("after {:.0} and {:.0} ms", one.ready_ms, two.ready_ms),
    )];

    let own: Vec<&Result<String, String>> = [&one.own, &two.own].into_iter().flatten().collect();
    if !own.is_empty() {
        let said = own.iter().map(|own| own.as_ref().unwrap_or_else(|miss| miss));
        let mut said: Vec<&str> = said.map(String::as_str).collect();
        said.dedup();
        checks.push(check("ready-check", own.iter().all(|own| own.is_ok()), said.join("; ")));
    }

    let mut all: Vec<&String> = one.random.iter().chain(&two.random).collect();
    let drawn = all.len();
    all.sort_unstable();
    all.dedup();
    checks.push(check(
        "random",
        drawn == 2 * DRAWS && all.len() == drawn,
        format!("{} of {drawn} values are different", all.len()),
    ));

    let tolerance = CLOCK_TOLERANCE.as_secs_f64() * 1000.0;
    // What could be right is taken as right: a slow answer is not a wrong clock.
    let least =
        |seen: &Seen| seen.clock_ms.map(|(low, high)| if low > 0.0 { low } else { high.min(0.0) });
    let (first, second) = (least(one), least(two));
    let right = |off: Option<f64>| off.is_some_and(|off| off.abs() <= tolerance);
    let shown =
        |off: Option<f64>| off.map_or_else(|| "unknown".to_owned(), |off| format!("{off:+.1} ms"));
    checks.push(check(
        "clock",
        right(first) && right(second),
        format!("off by {} and {} (up to {tolerance:.0} ms)", shown(first), shown(second)),
    ));

    checks.push(check(
        "hostname",
        one.hostname != two.hostname && !one.hostname.is_empty(),
        format!("{} and {}", one.hostname, two.hostname),
    ));
    checks.push(check(
        "instance",
        one.instance != two.instance && !one.instance.is_empty(),
        format!("{} and {}", one.instance, two.instance),
    ));
    checks.push(match (&one.machine_id, &two.machine_id) {
        (Some(Ok(a)), Some(Ok(b))) => {
            check("machine-id", a != b && !a.is_empty(), format!("{a} and {b}"))
        }
        // An image without one has nothing that could be the same.
        (Some(Err(_)), Some(Err(_))) => check("machine-id", true, "the image has none".to_owned()),
        _ => check("machine-id", false, "only one of the two has one".to_owned()),
    });
    let states: Vec<&str> = [&one.filesystem, &two.filesystem]
        .into_iter()
        .flatten()
        .map(|state| match state {
            Ok(text) | Err(text) => text.as_str(),
        })
        .collect();
    checks.push(check(
        "filesystem",
        [&one.filesystem, &two.filesystem].into_iter().all(|state| matches!(state, Some(Ok(_)))),
        if states.windows(2).all(|pair| pair[0] == pair[1]) {
            states.first().copied().unwrap_or_default().to_owned()
        } else {
            states.join(" and ")
        },
    ));
    checks
}

/// Looks for secrets in everything a snapshot and its template consist of: memory, disk, state and
/// root filesystem. `secrets` are names and bytes.
///
/// # Errors
/// When a part cannot be read.
pub fn search(
    store: &Store,
    template: &Template,
    snapshot: Option<&SnapshotManifest>,
    secrets: &[(String, Vec<u8>)],
) -> Result<Vec<Check>, GateError> {
    let mut places = vec![("root filesystem", template.manifest.rootfs.digest)];
    if let Some(snapshot) = snapshot {
        places.extend([
            ("memory", snapshot.memory.digest),
            ("disk", snapshot.disk.digest),
            ("state", snapshot.state.digest),
        ]);
    }
    let mut found: Vec<String> = Vec::new();
    for (place, digest) in places {
        let path = store.path(&digest)?;
        let read = |source| StoreError::Io { action: "read", path: path.clone(), source };
        for index in holds(&path, secrets).map_err(read)? {
            found.push(format!("{} is in the {place}", secrets[index].0));
        }
    }
    let passed = found.is_empty();
    let detail =
        if passed { format!("{} looked for, none found", secrets.len()) } else { found.join("; ") };
    Ok(vec![Check { name: "secrets", passed, detail }])
}

/// Which of the secrets a file holds; its holes are skipped.
fn holds(path: &Path, secrets: &[(String, Vec<u8>)]) -> io::Result<Vec<usize>> {
    use rustix::fs::{SeekFrom, seek};
    const PIECE: usize = 1 << 20;
    let file = File::open(path)?;
    let finders: Vec<_> =
        secrets.iter().map(|(_, bytes)| memchr::memmem::Finder::new(bytes)).collect();
    let longest = secrets.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
    let mut buffer = vec![0; PIECE + longest];
    let mut found = vec![false; secrets.len()];
    let mut position = 0;
    loop {
        let data = match seek(&file, SeekFrom::Data(position)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(&file, SeekFrom::Hole(data))?;
        let mut at = data;
        while at < end {
            // A secret may lie across two pieces, and its end in zeros of a hole.
            let read = file.read_at(&mut buffer, at)?;
            if read == 0 {
                break;
            }
            for (found, finder) in found.iter_mut().zip(&finders) {
                *found = *found || finder.find(&buffer[..read]).is_some();
            }
            at += read.min(PIECE) as u64;
        }
        position = end.max(data + 1);
    }
    Ok((0..secrets.len()).filter(|&index| found[index]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(n: u8) -> Seen {
        Seen {
            ready_ms: 20.0,
            hostname: format!("host{n}"),
            instance: format!("host{n}"),
            machine_id: Some(Ok(format!("id{n}"))),
            random: (0..DRAWS).map(|draw| format!("{n}-{draw}")).collect(),
            clock_ms: Some((-3.0, 2.0)),
            filesystem: Some(Ok("no errors on vda".to_owned())),
            frozen: false,
            own: Some(Ok("2 hold".to_owned())),
        }
    }

    fn failed(one: &Seen, two: &Seen) -> Vec<&'static str> {
        judge(one, two).into_iter().filter(|check| !check.passed).map(|check| check.name).collect()
    }

    #[test]
    fn each_fault_fails_its_own_check() {
        assert_eq!(failed(&seen(1), &seen(2)), Vec::<&str>::new());
        type Spoil = fn(&mut Seen);
        let cases: [(&str, Spoil); 10] = [
            ("ready-check", |seen| seen.own = Some(Err("tcp port 80 does not hold".to_owned()))),
            ("ready", |seen| seen.frozen = true),
            ("random", |seen| seen.random[3] = "1-0".to_owned()),
            ("random", |seen| seen.random.truncate(1)),
            ("clock", |seen| seen.clock_ms = Some((501.0, 600.0))),
            ("clock", |seen| seen.clock_ms = Some((-800.0, -501.0))),
            ("clock", |seen| seen.clock_ms = None),
            ("hostname", |seen| seen.hostname = "host1".to_owned()),
            ("machine-id", |seen| seen.machine_id = Some(Ok("id1".to_owned()))),
            ("filesystem", |seen| seen.filesystem = Some(Err("3 errors".to_owned()))),
        ];
        for (name, spoil) in cases {
            let mut two = seen(2);
            spoil(&mut two);
            assert_eq!(failed(&seen(1), &two), [name], "{two:?}");
        }
    }

    #[test]
    fn a_template_without_checks_of_its_own_passes_without() {
        let (mut one, mut two) = (seen(1), seen(2));
        (one.own, two.own) = (None, None);
        assert!(judge(&one, &two).iter().all(|check| check.passed && check.name != "ready-check"));
    }

    #[test]
    fn a_clock_that_may_be_right_is_right() {
        let mut two = seen(2);
        two.clock_ms = Some((-900.0, 900.0));
        assert_eq!(failed(&seen(1), &two), Vec::<&str>::new());
    }

    #[test]
    fn the_kernels_clocks_are_read() {
        let list = "Timer List Version: v0.9\nHRTIMER_MAX_CLOCK_BASES: 8\nnow at 5000000001 nsecs\n\
                    \ncpu: 0\n clock 0:\n  .base:       0\n  .offset:     0 nsecs\nactive timers:\n \
                    clock 1:\n  .base:       0\n  .get_time:   ktime_get_real\n  .offset:     \
                    1700000000000000000 nsecs\nactive timers:\n clock 2:\n  .offset:     7 nsecs\n";
        assert_eq!(realtime_of(list), Some(Duration::new(1_700_000_005, 1)));
        assert_eq!(realtime_of("now at 5 nsecs\n clock 1:\n clock 2:\n  .offset: 1 nsecs\n"), None);
        assert_eq!(realtime_of(""), None);
    }

    #[test]
    fn the_root_mount_is_the_last_one() {
        let text = "1 1 0:2 / / rw - rootfs none rw\n\
                    20 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                    21 20 0:5 / /proc rw - proc proc rw\n";
        let root = root_mount(text).unwrap();
        assert_eq!((root.device.as_str(), root.filesystem.as_str()), ("254:0", "ext4"));
        assert!(!root.read_only);
        let text = text.replace("/dev/vda rw", "/dev/vda ro,errors=remount-ro");
        assert!(root_mount(&text).unwrap().read_only);
        assert!(root_mount("nonsense\n\n").is_none());
    }

    #[test]
    fn secrets_are_found_across_pieces_and_holes() {
        use std::io::{Seek, Write};
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut handle = file.as_file();
        handle.set_len(8 << 20).unwrap();
        // Across the first piece's end, and right before a hole.
        for at in [(1 << 20) - 3, (5 << 20) - 6] {
            handle.seek(io::SeekFrom::Start(at)).unwrap();
            handle.write_all(if at < 2 << 20 { b"hunter2" } else { b"s3cret" }).unwrap();
        }
        let secrets: Vec<(String, Vec<u8>)> = ["hunter2", "s3cret", "absent"]
            .iter()
            .map(|text| ((*text).to_owned(), text.as_bytes().to_vec()))
            .collect();
        assert_eq!(holds(file.path(), &secrets).unwrap(), [0, 1]);
    }
}
