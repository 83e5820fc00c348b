//! One step: its key, and what is done when there is no result under it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use parbake_recipes::glob::PatternSet;
use parbake_recipes::plan::{
    Action, BuildPlan, Copy, CopyFrom, CopySource, ImageSource, Mount, MountSource, Network, Run,
    Sharing, Step,
};
use rustix::fs::FlockOperation;

use super::base::{self, Bases, Prepared};
use super::build::State;
use super::cache::{BuildCache, StepRecord, StepResult};
use super::copy::{Copier, CopyError, Source};
use super::error::ExecuteError;
use super::inputs::{Inputs, add_files};
use super::mounts::{Stubs, secret_file};
use super::overlay::{self, Mounted, copy_directory_metadata};
use super::rootpath::{identity, make_directories, ownership, resolve};
use super::unpack::{Unpack, decompress, is_archive, unpack};
use super::{Event, ExecuteOptions, Executor, Job, NetworkAccess, PreparedMount, Stream, layer};

/// How much of a failing program's output is kept for the error.
const LAST_OUTPUT: usize = 4 << 10;

/// Files of other stages and of images, by what names them in a plan.
pub(super) struct Trees<'a> {
    pub states: &'a [State],
    pub images: &'a mut BTreeMap<String, Prepared>,
    pub bases: &'a mut dyn Bases,
}

/// Everything a step may look at.
pub(super) struct StepContext<'a> {
    pub cache: &'a BuildCache,
    pub options: &'a ExecuteOptions,
    pub plan: &'a BuildPlan,
    pub step: &'a Step,
    /// Names the step across builds, for explanations.
    pub place: String,
    pub trees: Trees<'a>,
    pub executor: &'a mut dyn Executor,
    pub events: &'a mut dyn FnMut(Event<'_>),
}

/// A readable directory and what keeps it there.
struct Opened {
    root: PathBuf,
    keep_owner: bool,
    ignore: PatternSet,
    _mount: Option<Mounted>,
    _scratch: Option<tempfile::TempDir>,
}

impl Opened {
    fn source(&self) -> Source<'_> {
        Source { root: &self.root, ignore: &self.ignore, keep_owner: self.keep_owner }
    }
}

impl StepContext<'_> {
    fn wrong(&self, message: impl Into<String>, hint: impl Into<String>) -> ExecuteError {
        ExecuteError::Step { at: self.step.at.clone(), message: message.into(), hint: hint.into() }
    }

    /// A failure of the system; a full disk is said as such.
    fn failed(&self, what: impl FnOnce() -> String, error: io::Error) -> ExecuteError {
        if error.kind() == io::ErrorKind::StorageFull {
            let path = self.cache.root().to_owned();
            return ExecuteError::NoSpace { at: self.step.at.clone(), path };
        }
        ExecuteError::Io { what: format!("{}: {}", self.step.at, what()), source: error }
    }

    fn copy_failed(&self, error: CopyError) -> ExecuteError {
        match error {
            CopyError::Wrong { message, hint } => self.wrong(message, hint),
            CopyError::Io(error) => self.failed(|| self.step.text.clone(), error),
        }
    }

    /// Does the step, or finds that it was done; says which.
    pub fn perform(&mut self, state: &State) -> Result<(StepResult, bool), ExecuteError> {
        if self
            .options
            .interrupt
            .as_ref()
            .is_some_and(|flag| flag.load(std::sync::atomic::Ordering::Relaxed))
        {
            return Err(ExecuteError::Interrupted);
        }
        let mut inputs = Inputs::default();
        inputs.add_digest("the files below the step", state.digest());
        if let Some(epoch) = self.options.source_date_epoch {
            inputs.add("SOURCE_DATE_EPOCH", epoch.to_string().as_bytes());
        }
        match &self.step.action {
            Action::Run(run) => self.run_inputs(run, &mut inputs)?,
            Action::Copy(copy) => self.copy_inputs(copy, &mut inputs)?,
            action => {
                inputs.add("the instruction", &serde_json::to_vec(action).unwrap_or_default());
            }
        }
        let key = inputs.key();
        let difference = self.cache.remember(&self.place, &inputs);
        if !self.options.no_cache
            && let Some(result) = self.cache.step(key)
        {
            return Ok((result, true));
        }
        let reason = match (self.options.no_cache, difference) {
            (true, _) => "the cache is switched off".to_owned(),
            (false, Some(difference)) => difference,
            (false, None) => "it was never done before".to_owned(),
        };
        (self.events)(Event::StepReason { reason: &reason });
        let result = self.execute(state, key)?;
        Ok((result, false))
    }

    fn run_inputs(&mut self, run: &Run, inputs: &mut Inputs) -> Result<(), ExecuteError> {
        let mut shown = run.clone();
        shown.env.clear();
        shown.uncached_env.clear();
        inputs.add("the instruction", &serde_json::to_vec(&shown).unwrap_or_default());
        for line in &run.env {
            let (name, value) = line.split_once('=').unwrap_or((line, ""));
            inputs.add(format!("variable {name}"), value.as_bytes());
        }
        if self.options.network == NetworkAccess::None {
            inputs.add("the network", b"none");
        }
        for mount in &run.mounts {
            if let MountSource::Bind { from, path } = &mount.source {
                let opened = self.open(from)?;
                let selected =
                    opened.source().select(path).map_err(|error| self.copy_failed(error))?;
                add_files(inputs, &opened.source(), &selected, &PatternSet::default())
                    .map_err(|error| self.failed(|| format!("reading {path}"), error))?;
            }
        }
        Ok(())
    }

    fn copy_inputs(&mut self, copy: &Copy, inputs: &mut Inputs) -> Result<(), ExecuteError> {
        // Where files come from does not count, only what they are.
        let mut shown = copy.clone();
        shown.from = CopyFrom::Scratch;
        inputs.add("the instruction", &serde_json::to_vec(&shown).unwrap_or_default());
        let opened = self.open(&copy.from)?;
        let source = opened.source();
        let exclude = self.patterns(&copy.exclude)?;
        for item in &copy.sources {
            let CopySource::Path { path } = item else { continue };
            let path = if copy.parents { parents_root(path).0 } else { path.as_str() };
            let selected = source.select(path).map_err(|error| self.copy_failed(error))?;
            if selected.is_empty() {
                let message = format!("{path} matches nothing, so nothing is copied for it");
                (self.events)(Event::Warning { at: Some(&self.step.at), message: &message });
            }
            let result = if copy.parents {
                let (_, pattern) = parents_root(path_of(item));
                let include = self.patterns(&[pattern.to_owned()])?;
                add_included(inputs, &source, &selected, &include)
            } else {
                add_files(inputs, &source, &selected, &exclude)
            };
            result.map_err(|error| self.failed(|| format!("reading {path}"), error))?;
        }
        Ok(())
    }

    fn patterns(&self, patterns: &[String]) -> Result<PatternSet, ExecuteError> {
        PatternSet::new(patterns)
            .map_err(|error| self.wrong(error.to_string(), "close its brackets or escape them"))
    }

    fn image(&mut self, source: &ImageSource) -> Result<Prepared, ExecuteError> {
        let key = format!("{} {}", source.reference, source.platform);
        if let Some(known) = self.trees.images.get(&key) {
            return Ok(known.clone());
        }
        let layers = self.trees.bases.layers(source).map_err(|reason| ExecuteError::Base {
            at: self.step.at.clone(),
            reference: source.reference.clone(),
            reason,
        })?;
        let prepared = base::image(self.cache, &layers)?;
        self.trees.images.insert(key, prepared.clone());
        Ok(prepared)
    }

    /// Opens what files come from, for reading.
    fn open(&mut self, from: &CopyFrom) -> Result<Opened, ExecuteError> {
        let plain = |root: PathBuf, keep_owner: bool, ignore: PatternSet| Opened {
            root,
            keep_owner,
            ignore,
            _mount: None,
            _scratch: None,
        };
        match from {
            CopyFrom::Context => {
                let ignore = self.patterns(&self.plan.ignore)?;
                Ok(plain(self.options.context.clone(), false, ignore))
            }
            CopyFrom::Named { name } => match self.options.contexts.get(name) {
                Some(path) => Ok(plain(path.clone(), false, PatternSet::default())),
                None => Err(self.wrong(
                    format!("there is no build context {name}"),
                    format!("pass --build-context {name}=DIRECTORY"),
                )),
            },
            CopyFrom::Scratch => Ok(plain(self.cache.empty(), true, PatternSet::default())),
            CopyFrom::Image(source) => {
                Ok(plain(self.image(source)?.tree, true, PatternSet::default()))
            }
            CopyFrom::Stage { stage } => {
                let trees = &self.trees.states[*stage].trees;
                if let [only] = trees.as_slice() {
                    return Ok(plain(only.clone(), true, PatternSet::default()));
                }
                let scratch = self.cache.scratch()?;
                let mount = overlay::overlay(trees, None, &scratch.path().join("stage"))
                    .map_err(|error| self.failed(|| "mounting a stage".to_owned(), error))?;
                Ok(Opened {
                    root: mount.path().to_owned(),
                    keep_owner: true,
                    ignore: PatternSet::default(),
                    _mount: Some(mount),
                    _scratch: Some(scratch),
                })
            }
        }
    }

    fn execute(&mut self, state: &State, key: Digest) -> Result<StepResult, ExecuteError> {
        let scratch = self.cache.scratch()?;
        let result = scratch.path().join("result");
        let upper = result.join("tree");
        let top = state.trees.last().cloned().unwrap_or_else(|| self.cache.empty());
        let prepare = || -> io::Result<()> {
            fs::create_dir_all(&upper)?;
            copy_directory_metadata(&top, &upper)
        };
        prepare().map_err(|error| self.failed(|| "preparing a step".to_owned(), error))?;
        let merged = overlay::overlay(
            &state.trees,
            Some((&upper, &scratch.path().join("work"))),
            &scratch.path().join("merged"),
        )
        .map_err(|error| self.failed(|| "mounting the stage".to_owned(), error))?;
        let root = merged.path().to_owned();
        match &self.step.action {
            Action::Run(run) => self.run(run, state, &root, &upper, scratch.path())?,
            Action::Copy(copy) => self.copy(copy, &root)?,
            Action::MakeDirectory { path, user } => {
                let owner = match user.as_str() {
                    "" => None,
                    user => Some(ownership(&root, user).map_err(|message| {
                        self.wrong(message, "add the user in a step before, or use numbers")
                    })?),
                };
                make_directories(&root, Path::new(path), owner)
                    .map_err(|error| self.failed(|| format!("making {path}"), error))?;
            }
            Action::Configure => {}
        }
        drop(merged);
        let written = self.write_layer(&top, &upper, &result)?;
        let record =
            StepRecord { diff_id: written.digest, size: written.size, entries: written.entries };
        self.cache.keep(key, &result, &record)
    }

    fn write_layer(
        &self,
        top: &Path,
        upper: &Path,
        result: &Path,
    ) -> Result<layer::Written, ExecuteError> {
        let write = || -> io::Result<layer::Written> {
            let (before, after) = (fs::symlink_metadata(top)?, fs::symlink_metadata(upper)?);
            let key = |meta: &fs::Metadata| (meta.mode(), meta.uid(), meta.gid());
            let out =
                io::BufWriter::with_capacity(1 << 18, File::create(result.join("layer.tar"))?);
            let include_root = key(&before) != key(&after);
            layer::write(upper, out, self.options.source_date_epoch, include_root)
        };
        write().map_err(|error| self.failed(|| "writing the step's layer".to_owned(), error))
    }

    fn copy(&mut self, copy: &Copy, root: &Path) -> Result<(), ExecuteError> {
        let owner = match &copy.chown {
            None => None,
            Some(text) => Some(ownership(root, text).map_err(|message| {
                self.wrong(message, "add the user in a step before, or use numbers")
            })?),
        };
        let opened = self.open(&copy.from)?;
        let source = opened.source();
        let exclude = self.patterns(&copy.exclude)?;
        let mut copier = Copier::new(root, owner, copy.chmod.as_ref(), &exclude);
        if copy.link {
            replace_links(root, &copy.dest)
                .map_err(|error| self.failed(|| format!("preparing {}", copy.dest), error))?;
        }
        self.refuse_overwriting(copy, &source, root)?;
        for item in &copy.sources {
            match item {
                CopySource::Inline(file) => copier
                    .inline(&file.name, &file.data, &copy.dest)
                    .map_err(|error| self.copy_failed(error))?,
                CopySource::Url { url, .. } => {
                    return Err(self.wrong(
                        format!("ADD {url}: downloads are not made by this executor"),
                        "fetch it in a RUN step, or put the file into the build context",
                    ));
                }
                CopySource::Path { path } if copy.parents => {
                    let (above, pattern) = parents_root(path);
                    let include = self.patterns(&[pattern.to_owned()])?;
                    let has_wildcards = parbake_recipes::glob::has_wildcards(path);
                    if !has_wildcards {
                        source
                            .select(&path.replacen("/./", "/", 1))
                            .map_err(|e| self.copy_failed(e))?;
                    }
                    let mut parents = Copier::new(root, owner, copy.chmod.as_ref(), &exclude);
                    parents.include = Some(&include);
                    let dest = format!("{}/", copy.dest.trim_end_matches('/'));
                    for selected in source.select(above).map_err(|error| self.copy_failed(error))? {
                        parents
                            .copy(&source, &selected, &dest)
                            .map_err(|error| self.copy_failed(error))?;
                    }
                }
                CopySource::Path { path } => {
                    for selected in source.select(path).map_err(|error| self.copy_failed(error))? {
                        let from = resolve(source.root, &selected)
                            .map_err(|error| self.failed(|| format!("reading {path}"), error))?;
                        if copy.unpack && is_archive(&from) {
                            self.extract(&copier, &from, &copy.dest, owner)?;
                        } else {
                            copier
                                .copy(&source, &selected, &copy.dest)
                                .map_err(|error| self.copy_failed(error))?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Several files copied to one name would leave only the last.
    fn refuse_overwriting(
        &self,
        copy: &Copy,
        source: &Source<'_>,
        root: &Path,
    ) -> Result<(), ExecuteError> {
        if copy.dest.ends_with('/') || copy.parents {
            return Ok(());
        }
        let dest = resolve(root, Path::new(copy.dest.trim_matches('/')))
            .map_err(|error| self.failed(|| format!("reading {}", copy.dest), error))?;
        if dest.is_dir() {
            return Ok(());
        }
        let mut files = 0;
        for item in &copy.sources {
            match item {
                CopySource::Path { path } => {
                    for path in source.select(path).map_err(|error| self.copy_failed(error))? {
                        let from = resolve(source.root, &path).map_err(|error| {
                            self.failed(|| format!("reading {}", path.display()), error)
                        })?;
                        let spreads = from.is_dir() || (copy.unpack && is_archive(&from));
                        files += usize::from(!spreads);
                    }
                }
                _ => files += 1,
            }
        }
        if files > 1 {
            return Err(self.wrong(
                format!("{files} files would all become {}", copy.dest),
                format!("write {}/ to copy them into a directory", copy.dest),
            ));
        }
        Ok(())
    }

    fn extract(
        &self,
        copier: &Copier<'_>,
        archive: &Path,
        dest: &str,
        owner: Option<(u32, u32)>,
    ) -> Result<(), ExecuteError> {
        let dest = copier
            .directories(Path::new(dest.trim_matches('/')))
            .map_err(|error| self.copy_failed(error))?;
        let extract = || -> io::Result<()> {
            let input = decompress(io::BufReader::with_capacity(1 << 17, File::open(archive)?))?;
            unpack(input, &dest, Unpack { owner, ..Unpack::default() })
        };
        extract().map_err(|error| self.failed(|| format!("unpacking {}", archive.display()), error))
    }

    fn run(
        &mut self,
        run: &Run,
        state: &State,
        root: &Path,
        upper: &Path,
        scratch: &Path,
    ) -> Result<(), ExecuteError> {
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
        if network {
            let resolv = PathBuf::from("/etc/resolv.conf");
            if resolv.exists() {
                let target = "/etc/resolv.conf".to_owned();
                mounts.push(PreparedMount::Bind { target, path: resolv, read_only: true });
            }
        }
        let hosts = scratch.join("hosts");
        fs::write(&hosts, "127.0.0.1\tlocalhost parbake-build\n::1\tlocalhost\n")
            .map_err(|error| self.failed(|| "writing hosts".to_owned(), error))?;
        let target = "/etc/hosts".to_owned();
        mounts.push(PreparedMount::Bind { target, path: hosts, read_only: true });
        let targets = mounts.iter().map(|mount| match mount {
            PreparedMount::Bind { target, .. } | PreparedMount::Tmpfs { target, .. } => {
                target.as_str()
            }
        });
        let stubs = Stubs::note(root, targets.chain(["/proc", "/dev", "/sys"]))
            .map_err(|error| self.failed(|| "looking at mount points".to_owned(), error))?;
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
            scratch,
            interrupt: self.options.interrupt.as_deref(),
        };
        let mut last = Vec::new();
        let events = &mut self.events;
        let code = self.executor.run(&job, &mut |stream: Stream, bytes: &[u8]| {
            events(Event::Output { stream, bytes });
            last.extend_from_slice(bytes);
            if last.len() > 2 * LAST_OUTPUT {
                last.drain(..last.len() - LAST_OUTPUT);
            }
        })?;
        drop(held);
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
                Ok(bind(data))
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
                Ok(bind(path))
            }
            MountSource::Ssh { id, required, .. } => {
                let Some(socket) = self.options.ssh.get(id) else {
                    if *required {
                        return Err(self.wrong(
                            format!("no SSH agent {id} was given"),
                            format!("pass --ssh {id}, with an agent running"),
                        ));
                    }
                    return Ok(None);
                };
                env.push(format!("SSH_AUTH_SOCK={target}"));
                Ok(bind(socket.clone()))
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

fn secret_permissions(path: &Path, mode: u32, uid: u32, gid: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    super::rootpath::chown(path, uid, gid)?;
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

fn path_of(item: &CopySource) -> &str {
    match item {
        CopySource::Path { path } => path,
        _ => "",
    }
}

/// `--parents a/./b/c`: what is left out of the destination, and the pattern below it.
fn parents_root(path: &str) -> (&str, &str) {
    match path.split_once("/./") {
        Some((above, pattern)) => (above, pattern.trim_start_matches('/')),
        None => ("/", path.trim_start_matches("./").trim_start_matches('/')),
    }
}

/// The inputs of `--parents`: whatever the pattern covers.
fn add_included(
    inputs: &mut Inputs,
    source: &Source<'_>,
    selected: &[PathBuf],
    include: &PatternSet,
) -> io::Result<()> {
    fn walk(
        source: &Source<'_>,
        base: &Path,
        relative: &Path,
        include: &PatternSet,
        found: &mut Vec<PathBuf>,
    ) -> io::Result<()> {
        let mut names = fs::read_dir(base.join(relative))?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect::<Result<Vec<_>, _>>()?;
        names.sort();
        for name in names {
            let path = relative.join(name);
            let full = base.join(&path);
            let shown = full.strip_prefix(source.root).unwrap_or(&full);
            if include.matches(&path.to_string_lossy())
                && !source.ignore.matches(&shown.to_string_lossy())
            {
                found.push(shown.to_owned());
            } else if fs::symlink_metadata(&full)?.is_dir() {
                walk(source, base, &path, include, found)?;
            }
        }
        Ok(())
    }
    for root in selected {
        let base = resolve(source.root, root)?;
        let mut found = Vec::new();
        if base.is_dir() {
            walk(source, &base, Path::new(""), include, &mut found)?;
        }
        add_files(inputs, source, &found, &PatternSet::default())?;
    }
    Ok(())
}

/// `--link` does not look at what is there: a link on the way becomes a directory.
fn replace_links(root: &Path, dest: &str) -> io::Result<()> {
    let mut current = root.to_owned();
    let parts: Vec<&str> = dest.split('/').filter(|part| !part.is_empty()).collect();
    let directories = if dest.ends_with('/') { parts.len() } else { parts.len().saturating_sub(1) };
    for part in &parts[..directories] {
        current.push(part);
        match fs::symlink_metadata(&current) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => {
                fs::remove_file(&current)?;
                fs::create_dir(&current)?;
            }
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}
