//! The sandbox executor: `RUN` in namespaces on an overlay, through an OCI runtime.
//!
//! The runtime (`runc`, else `crun`) is a well-kept program that every container host has; it
//! makes the namespaces, drops capabilities to Docker's default set, masks `/proc` and starts the
//! program. A step shares this machine's kernel: this is for machines without KVM, not for
//! Dockerfiles that nobody trusts.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};

use super::error::{Doing as _, ExecuteError};
use super::ssh::Door;
use super::{Ended, Executor, Job, PreparedMount, RESOLVER, Stream};

/// What a step may do as root: Docker's default.
const CAPABILITIES: [&str; 14] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
];

/// Runs steps through an OCI runtime as root.
#[derive(Debug)]
pub struct Sandbox {
    runtime: PathBuf,
}

impl Sandbox {
    /// Finds a runtime. `runtime` names one; otherwise `runc` and `crun` are looked for.
    ///
    /// # Errors
    /// When this process is not root, or there is no runtime.
    pub fn new(runtime: Option<&Path>) -> Result<Self, ExecuteError> {
        if !rustix::process::geteuid().is_root() {
            return Err(ExecuteError::Host {
                what: "the sandbox executor needs root".to_owned(),
                hint: "run as root, or build with --builder microvm where KVM is usable".to_owned(),
            });
        }
        if let Some(runtime) = runtime {
            return Ok(Self { runtime: runtime.to_owned() });
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut directories: Vec<PathBuf> = std::env::split_paths(&path).collect();
        directories.extend(["/usr/sbin", "/usr/bin"].map(PathBuf::from));
        for name in ["runc", "crun"] {
            for directory in &directories {
                let candidate = directory.join(name);
                if candidate.is_file() {
                    return Ok(Self { runtime: candidate });
                }
            }
        }
        Err(ExecuteError::Host {
            what: "there is no OCI runtime (runc or crun)".to_owned(),
            hint: "install the package runc, or build with --builder microvm".to_owned(),
        })
    }
}

impl Executor for Sandbox {
    fn name(&self) -> &'static str {
        "sandbox"
    }

    fn isolated(&self) -> bool {
        false
    }

    fn run(
        &mut self,
        job: &Job<'_>,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Ended, ExecuteError> {
        let bundle = job.scratch.join("bundle");
        let state = job.scratch.join("runtime");
        for path in [&bundle, &state] {
            std::fs::create_dir_all(path).doing(|| format!("making {}", path.display()))?;
        }
        let doors = doors(job)?;
        let config = serde_json::to_vec(&config(job, &doors)).unwrap_or_default();
        std::fs::write(bundle.join("config.json"), config)
            .doing(|| "writing the step's configuration".to_owned())?;
        // The scratch directory's random name is unique on this machine, as the id has to be.
        let unique = job.scratch.file_name().unwrap_or_default().to_string_lossy();
        let id = format!("parbake-{}-{unique}", std::process::id());
        let log = job.scratch.join("runtime.log");
        let mut command = Command::new(&self.runtime);
        command.arg("--root").arg(&state).arg("--log").arg(&log);
        if self.runtime.ends_with("crun") {
            command.arg("--cgroup-manager=disabled");
        }
        command.args(["run", "--bundle"]).arg(&bundle).arg(&id);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().doing(|| format!("starting {}", self.runtime.display()))?;
        let stop = || {
            let mut kill = Command::new(&self.runtime);
            kill.arg("--root").arg(&state).args(["kill", &id, "KILL"]);
            kill.stdout(Stdio::null()).stderr(Stdio::null());
            let _ = kill.status();
        };
        let code = watch(child, job.interrupt, &stop, output);
        let mut delete = Command::new(&self.runtime);
        delete.arg("--root").arg(&state).args(["delete", "--force", &id]);
        let _ = delete.stdout(Stdio::null()).stderr(Stdio::null()).status();
        drop(doors);
        let code = code?;
        if code != 0
            && let Some(problem) = runtime_problem(&log)
        {
            // The program never started; shells and engines tell these two apart from its own code.
            output(Stream::Stderr, format!("{problem}\n").as_bytes());
            let code = if problem.contains("permission denied") { 126 } else { 127 };
            return Ok(Ended { code, shortage: None });
        }
        Ok(Ended { code, shortage: None })
    }
}

/// Why the runtime did not start the program, where it said so.
fn runtime_problem(log: &Path) -> Option<String> {
    let text = std::fs::read_to_string(log).ok()?;
    let line =
        text.lines().rev().find(|line| line.contains("level=error") || !line.contains("level="))?;
    let message = match line.split_once("msg=\"") {
        Some((_, message)) => message.trim_end_matches('"').replace("\\\"", "\""),
        None => line.to_owned(),
    };
    let message = message.rsplit("starting container process caused: ").next()?;
    let message = message.strip_prefix("runc run failed: ").unwrap_or(message);
    let message = message.strip_prefix("unable to start container process: ").unwrap_or(message);
    Some(message.to_owned())
}

/// Passes output on until the program ends.
fn watch(
    mut child: Child,
    interrupt: Option<&AtomicBool>,
    stop: &dyn Fn(),
    output: &mut dyn FnMut(Stream, &[u8]),
) -> Result<i32, ExecuteError> {
    let (sender, receiver) = channel();
    let mut readers = Vec::new();
    let pipes: [(Stream, Option<Box<dyn Read + Send>>); 2] = [
        (Stream::Stdout, child.stdout.take().map(|pipe| Box::new(pipe) as _)),
        (Stream::Stderr, child.stderr.take().map(|pipe| Box::new(pipe) as _)),
    ];
    for (stream, pipe) in pipes {
        let Some(mut pipe) = pipe else { continue };
        let sender = sender.clone();
        readers.push(std::thread::spawn(move || {
            let mut buffer = [0; 1 << 13];
            while let Ok(read @ 1..) = pipe.read(&mut buffer) {
                if sender.send((stream, buffer[..read].to_vec())).is_err() {
                    break;
                }
            }
        }));
    }
    drop(sender);
    let mut interrupted = false;
    loop {
        match receiver.recv_timeout(Duration::from_millis(100)) {
            Ok((stream, bytes)) => output(stream, &bytes),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if !interrupted && interrupt.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
            interrupted = true;
            stop();
        }
    }
    let status = child.wait().doing(|| "waiting for a step".to_owned())?;
    for reader in readers {
        let _ = reader.join();
    }
    if interrupted {
        return Err(ExecuteError::Interrupted);
    }
    use std::os::unix::process::ExitStatusExt as _;
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// A socket for each agent that the step is offered, in the mounts' order.
fn doors(job: &Job<'_>) -> Result<Vec<Door>, ExecuteError> {
    let sockets = job.mounts.iter().filter_map(|mount| match mount {
        PreparedMount::Socket { path, mode, owner, .. } => Some((path, *mode, *owner)),
        _ => None,
    });
    sockets
        .enumerate()
        .map(|(number, (agent, mode, owner))| {
            Door::open(job.scratch, &format!("agent{number}"), agent, mode, owner)
                .doing(|| format!("offering the SSH agent at {}", agent.display()))
        })
        .collect()
}

fn config(job: &Job<'_>, doors: &[Door]) -> Value {
    let capabilities = if job.identity.uid == 0 { &CAPABILITIES[..] } else { &[] };
    let mut namespaces = vec!["pid", "ipc", "uts", "mount", "cgroup"];
    if !job.network {
        namespaces.push("network");
    }
    let namespaces: Vec<Value> = namespaces.iter().map(|kind| json!({"type": kind})).collect();
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc",
               "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
               "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]}),
        json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts",
               "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]}),
        json!({"destination": "/dev/shm", "type": "tmpfs", "source": "shm",
               "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]}),
        json!({"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue",
               "options": ["nosuid", "noexec", "nodev"]}),
        json!({"destination": "/sys", "type": "sysfs", "source": "sysfs",
               "options": ["nosuid", "noexec", "nodev", "ro"]}),
    ];
    let mut doors = doors.iter();
    mounts.extend(job.mounts.iter().map(|prepared| match prepared {
        PreparedMount::Socket { .. } => mount(prepared, doors.next().map(Door::path)),
        _ => mount(prepared, None),
    }));
    json!({
        "ociVersion": "1.0.2",
        "hostname": "parbake-build",
        "process": {
            "terminal": false,
            "args": job.args,
            "env": job.env,
            "cwd": job.working_dir,
            "user": {
                "uid": job.identity.uid,
                "gid": job.identity.gid,
                "additionalGids": job.identity.groups,
            },
            "capabilities": {
                "bounding": CAPABILITIES,
                "effective": capabilities,
                "permitted": capabilities,
                "inheritable": [],
                "ambient": [],
            },
        },
        "root": {"path": job.root, "readonly": false},
        "mounts": mounts,
        "linux": {
            "namespaces": namespaces,
            "maskedPaths": [
                "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
                "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
                "/sys/firmware", "/sys/devices/virtual/powercap",
            ],
            "readonlyPaths": [
                "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
            ],
        },
    })
}

/// A mount as runtimes are told it; `door` is where a socket lies here.
fn mount(mount: &PreparedMount, door: Option<&Path>) -> Value {
    let bind = |path: &Path, read_only: bool| {
        json!({
            "destination": mount.target(), "type": "bind", "source": path,
            "options": ["rbind", if read_only { "ro" } else { "rw" }],
        })
    };
    match mount {
        PreparedMount::Bind { path, read_only, .. }
        | PreparedMount::Cache { path, read_only, .. }
        | PreparedMount::Secret { path, read_only, .. } => bind(path, *read_only),
        PreparedMount::Socket { path, .. } => bind(door.unwrap_or(path), false),
        PreparedMount::Resolver => bind(Path::new(RESOLVER), true),
        PreparedMount::Tmpfs { target, size } => {
            let mut options = vec!["nosuid".to_owned(), "nodev".to_owned(), "mode=1777".to_owned()];
            options.extend(size.map(|bytes| format!("size={bytes}")));
            json!({"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options})
        }
    }
}
