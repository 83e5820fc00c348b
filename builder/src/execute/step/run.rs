//! `RUN` steps: who, with which mounts, and what came of it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use parbake_recipes::glob::PatternSet;
use parbake_recipes::plan::{CopyFrom, Mount, MountSource, Network, Run, Sharing};
use rustix::fs::FlockOperation;

use super::{Opened, StepContext};
use crate::execute::build::State;
use crate::execute::copy::{Copier, CopyError, Source};
use crate::execute::error::ExecuteError;
use crate::execute::mounts::{Stubs, secret_file};
use crate::execute::overlay::{self, Mounted, Writable, copy_directory_metadata};
use crate::execute::rootpath::{self, identity, resolve};
use crate::execute::{Ended, Event, Job, NetworkAccess, PreparedMount, RESOLVER, Stream, ssh};

/// How much of a failing program's output is kept for the error.
const LAST_OUTPUT: usize = 4 << 10;

impl StepContext<'_> {
    pub(super) fn run(
        &mut self,
        run: &Run,
        state: &State,
        merged: &mut Writable<'_>,
        upper: &Path,
        scratch: &Path,
    ) -> Result<(), ExecuteError> {
        let root = merged.path().to_owned();
        let root = root.as_path();
        let identity = identity(root, &run.user).map_err(|message| {
            self.wrong(message, "add the user in a step before, or use numbers")
        })?;
        let network = match (run.network, self.options.network) {
            (Network::None, _) | (Network::Default, NetworkAccess::None) => false,
            (Network::Default | Network::Host, NetworkAccess::Host) => true,
            (Network::Host, NetworkAccess::None) => {
                return Err(self.wrong(
                    "the step asks for the host's network, which this build does not allow",
                    "remove --network=host, or allow the network for the build",
                ));
            }
        };
        let mut env = run.env.clone();
        env.extend(run.uncached_env.iter().cloned());
        let mut held = Held::default();
        let mut mounts = Vec::new();
        for (number, mount) in run.mounts.iter().enumerate() {
            let place = scratch.join(format!("mount{number}"));
            mounts.extend(self.mount(mount, &place, &mut env, &mut held)?);
        }
        if let Some(script) = &run.script {
            let path = scratch.join("script");
            secret_file(&path, script.data.as_bytes(), 0o755, 0, 0)
                .map_err(|error| self.failed(|| "writing a script".to_owned(), error))?;
            let target = script.name.clone();
            mounts.push(PreparedMount::Bind { target, path, read_only: true });
        }
        // A machine of its own has name servers of its own.
        if network && (self.executor.isolated() || Path::new(RESOLVER).exists()) {
            mounts.push(PreparedMount::Resolver);
        }
        let hosts = scratch.join("hosts");
        fs::write(&hosts, "127.0.0.1\tlocalhost parbake-build\n::1\tlocalhost\n")
            .map_err(|error| self.failed(|| "writing hosts".to_owned(), error))?;
        let target = "/etc/hosts".to_owned();
        mounts.push(PreparedMount::Bind { target, path: hosts, read_only: true });
        let targets = mounts.iter().map(PreparedMount::target);
        // Not /proc, /dev and /sys: they stay where they were missing, as with BuildKit.
        let stubs = Stubs::note(root, targets)
            .map_err(|error| self.failed(|| "looking at mount points".to_owned(), error))?;
        let private = run.mounts.iter().any(|mount| match &mount.source {
            MountSource::Secret { id, .. } => self.options.secrets.contains_key(id),
            MountSource::Ssh { id, .. } => self.options.ssh.contains_key(id),
            _ => false,
        });
        let job = Job {
            args: &run.args,
            env: &env,
            working_dir: &run.working_dir,
            identity: &identity,
            root,
            lower: &state.trees,
            upper,
            mounts: &mounts,
            network,
            private,
            scratch,
            interrupt: self.options.interrupt.as_deref(),
        };
        let isolated = self.executor.isolated();
        if isolated {
            merged.unmount();
        }
        let mut last = Vec::new();
        let events = &mut self.events;
        let ended = self.executor.run(&job, &mut |stream: Stream, bytes: &[u8]| {
            events(Event::Output { stream, bytes });
            last.extend_from_slice(bytes);
            if last.len() > 2 * LAST_OUTPUT {
                last.drain(..last.len() - LAST_OUTPUT);
            }
        });
        let Ended { code, shortage } = ended.map_err(|error| match error {
            ExecuteError::Io { what, source } => self.failed(|| what, source),
            error => error,
        })?;
        drop(held);
        if isolated {
            merged
                .mount_again()
                .map_err(|error| self.failed(|| "mounting the stage again".to_owned(), error))?;
        }
        stubs
            .remove()
            .map_err(|error| self.failed(|| "removing mount points".to_owned(), error))?;
        if code == 0 {
            return Ok(());
        }
        let free = rustix::fs::statvfs(self.cache.root())
            .map_or(u64::MAX, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        if free < 1 << 20 {
            let path = self.cache.root().to_owned();
            return Err(ExecuteError::NoSpace { at: self.step.at.clone(), path });
        }
        let from = last.len().saturating_sub(LAST_OUTPUT);
        let mut last_output = String::from_utf8_lossy(&last[from..]).into_owned();
        for value in self.options.secrets.values() {
            let value = String::from_utf8_lossy(value.trim_ascii()).into_owned();
            if !value.is_empty() {
                last_output = last_output.replace(&value, "***");
            }
        }
        Err(ExecuteError::StepFailed {
            at: self.step.at.clone(),
            text: self.step.text.clone(),
            code,
            shortage,
            last_output,
        })
    }

    fn mount(
        &mut self,
        mount: &Mount,
        place: &Path,
        env: &mut Vec<String>,
        held: &mut Held,
    ) -> Result<Option<PreparedMount>, ExecuteError> {
        let target = mount.target.clone();
        let read_only = mount.read_only;
        let bind =
            |path: PathBuf| Some(PreparedMount::Bind { target: target.clone(), path, read_only });
        let io_failed = |this: &Self, error| this.failed(|| format!("mounting {target}"), error);
        match &mount.source {
            MountSource::Tmpfs { size } => {
                Ok(Some(PreparedMount::Tmpfs { target: target.clone(), size: *size }))
            }
            MountSource::Bind { from, path } => {
                let view = self.view(from, path, place)?;
                if read_only {
                    let path = view.path.clone();
                    held.views.push(view);
                    return Ok(bind(path));
                }
                // Writes are allowed and forgotten: they go to a directory of the step's own.
                let (upper, work) = (place.join("upper"), place.join("work"));
                let over = || -> io::Result<Mounted> {
                    fs::create_dir_all(&upper)?;
                    copy_directory_metadata(&view.path, &upper)?;
                    overlay::overlay(
                        std::slice::from_ref(&view.path),
                        Some((&upper, &work)),
                        &place.join("merged"),
                    )
                };
                let mounted = over().map_err(|error| io_failed(self, error))?;
                let path = mounted.path().to_owned();
                held.views.push(view);
                held.mounts.push(mounted);
                Ok(bind(path))
            }
            MountSource::Cache { id, sharing, from, path, mode, uid, gid } => {
                let mut directory = self.cache.mount(id);
                let lock = |directory: &Path| -> io::Result<File> {
                    fs::create_dir_all(directory)?;
                    File::create(directory.join("lock"))
                };
                let file = lock(&directory).map_err(|error| io_failed(self, error))?;
                match sharing {
                    Sharing::Shared => {}
                    Sharing::Locked => rustix::fs::flock(&file, FlockOperation::LockExclusive)
                        .map_err(|error| io_failed(self, error.into()))?,
                    Sharing::Private => {
                        let lock = FlockOperation::NonBlockingLockExclusive;
                        if rustix::fs::flock(&file, lock).is_err() {
                            directory = place.join("private");
                        }
                    }
                }
                held.locks.push(file);
                let data = directory.join("data");
                if !data.exists() {
                    let view = match from {
                        Some(from) => Some(self.view(from, path, place)?),
                        None => None,
                    };
                    let fill = || -> Result<(), CopyError> {
                        let fresh = directory.join("fresh");
                        let _ = fs::remove_dir_all(&fresh);
                        fs::create_dir_all(&fresh)?;
                        secret_permissions(&fresh, *mode, *uid, *gid)?;
                        if let Some(view) = &view {
                            let none = PatternSet::default();
                            let source =
                                Source { root: &view.path, ignore: &none, keep_owner: true };
                            Copier::new(&fresh, None, None, &none).copy(
                                &source,
                                Path::new(""),
                                "/",
                            )?;
                        }
                        Ok(fs::rename(&fresh, &data)?)
                    };
                    fill().map_err(|error| self.copy_failed(error))?;
                }
                Ok(Some(PreparedMount::Cache { target: target.clone(), path: data, read_only }))
            }
            MountSource::Secret { id, env: variable, required, mode, uid, gid } => {
                let Some(value) = self.options.secrets.get(id) else {
                    if *required {
                        return Err(ExecuteError::SecretMissing {
                            at: self.step.at.clone(),
                            id: id.clone(),
                        });
                    }
                    return Ok(None);
                };
                if let Some(variable) = variable {
                    let value = String::from_utf8_lossy(value);
                    env.push(format!("{variable}={}", value.trim_end_matches('\n')));
                }
                if target.is_empty() {
                    return Ok(None);
                }
                let memory = overlay::memory(place).map_err(|error| io_failed(self, error))?;
                let path = place.join("secret");
                secret_file(&path, value, *mode, *uid, *gid)
                    .map_err(|error| io_failed(self, error))?;
                held.mounts.push(memory);
                Ok(Some(PreparedMount::Secret { target: target.clone(), path, read_only }))
            }
            MountSource::Ssh { id, required, mode, uid, gid } => {
                let Some(socket) = self.options.ssh.get(id) else {
                    if *required {
                        return Err(self.wrong(
                            format!("no SSH agent {id} was given"),
                            format!("pass --ssh {id}, with an agent running"),
                        ));
                    }
                    return Ok(None);
                };
                // Said now: a program in the step would only see its connection end.
                ssh::connect_agent(socket).map_err(|error| {
                    self.wrong(
                        format!(
                            "the SSH agent {id} at {} does not answer: {error}",
                            socket.display()
                        ),
                        format!("start one and pass --ssh {id}, or --ssh {id}=SOCKET"),
                    )
                })?;
                env.push(format!("SSH_AUTH_SOCK={target}"));
                let path = socket.clone();
                let (mode, owner) = (*mode, (*uid, *gid));
                Ok(Some(PreparedMount::Socket { target: target.clone(), path, mode, owner }))
            }
        }
    }

    /// A path of another tree as a file or directory that can be mounted.
    fn view(&mut self, from: &CopyFrom, path: &str, place: &Path) -> Result<View, ExecuteError> {
        let opened = self.open(from)?;
        let source = opened.source();
        let selected = source.select(path).map_err(|error| self.copy_failed(error))?;
        let relative = selected.into_iter().next().unwrap_or_default();
        let resolved = resolve(source.root, &relative)
            .map_err(|error| self.failed(|| format!("reading {path}"), error))?;
        if source.keep_owner {
            return Ok(View { path: resolved, _opened: opened });
        }
        // The context as the build sees it: without what is ignored, and all of it root's.
        let copy = place.join("view");
        let none = PatternSet::default();
        let materialize = || -> Result<PathBuf, CopyError> {
            fs::create_dir_all(&copy)?;
            let mut copier = Copier::new(&copy, None, None, &none);
            if resolved.is_dir() {
                copier.copy(&source, &relative, "/d")?;
                return Ok(copy.join("d"));
            }
            copier.copy(&source, &relative, "/f")?;
            Ok(copy.join("f"))
        };
        let path = materialize().map_err(|error| self.copy_failed(error))?;
        Ok(View { path, _opened: opened })
    }
}

pub(super) fn secret_permissions(path: &Path, mode: u32, uid: u32, gid: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    rootpath::chown(path, uid, gid)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

struct View {
    path: PathBuf,
    _opened: Opened,
}

/// What a step's mounts need until it ends. Mounts go before what they show.
#[derive(Default)]
struct Held {
    mounts: Vec<Mounted>,
    views: Vec<View>,
    locks: Vec<File>,
}
