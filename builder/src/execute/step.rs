//! One step: its key, and what is done when there is no result under it.

mod files;
mod run;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use parbake_recipes::glob::PatternSet;
use parbake_recipes::plan::{
    Action, BuildPlan, Copy, CopyFrom, CopySource, ImageSource, MountSource, Run, Step,
};

use super::base::{self, Bases, Prepared};
use super::build::State;
use super::cache::{BuildCache, StepRecord, StepResult};
use super::copy::{CopyError, Source};
use super::error::ExecuteError;
use super::inputs::{Inputs, add_files};
use super::overlay::{self, Mounted, Writable, copy_directory_metadata};
use super::rootpath::{make_directories, ownership, resolve};
use super::{Event, ExecuteOptions, Executor, NetworkAccess, layer};

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
            if let CopySource::Url { url, checksum, .. } = item {
                let (_, digest) = self.download(url, checksum.as_deref())?;
                inputs.add_digest(format!("download {url}"), digest);
            }
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
        let mut merged = Writable::mount(&state.trees, &upper, scratch.path())
            .map_err(|error| self.failed(|| "mounting the stage".to_owned(), error))?;
        let root = merged.path().to_owned();
        match &self.step.action {
            Action::Run(run) => self.run(run, state, &mut merged, &upper, scratch.path())?,
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
