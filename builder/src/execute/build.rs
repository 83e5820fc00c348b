//! A plan from its first stage to the image.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use parbake_recipes::plan::{Action, Base, BuildPlan, Stage};
use serde_json::{Value, json};

use super::base::{self, Bases, Prepared};
use super::cache::{BuildCache, StepResult};
use super::error::{Doing as _, ExecuteError};
use super::layout::{self, Document, LayerBlob};
use super::step::{StepContext, Trees};
use super::{BuiltImage, Event, ExecuteOptions, Executor, LAYER_TYPE, secrets};
use crate::image::BlobsElsewhere;

/// A stage's files and history so far.
#[derive(Debug, Clone, Default)]
pub(super) struct State {
    /// Directories, lowest first; at least one.
    pub trees: Vec<PathBuf>,
    /// Layers of the image so far.
    pub layers: Vec<LayerBlob>,
    /// Files of the layers made here, by digest.
    pub files: BTreeMap<String, PathBuf>,
    pub history: Vec<Value>,
}

impl State {
    /// Names the files: what all layers together come to.
    pub fn digest(&self) -> parbake_cache::Digest {
        base::chain(self.layers.iter().map(|layer| layer.diff_id.as_str()))
    }

    fn push(&mut self, result: &StepResult) {
        let digest = result.record.diff_id.to_string();
        self.layers.push(LayerBlob {
            media_type: LAYER_TYPE.to_owned(),
            digest: digest.clone(),
            size: result.record.size,
            diff_id: digest.clone(),
        });
        self.files.insert(digest, result.tar.clone());
        if result.record.entries > 0 {
            self.trees.push(result.tree.clone());
        }
    }
}

/// Executes a plan and writes the image.
///
/// # Errors
/// When a step fails or cannot be done, a base cannot be had, or a secret is in the result; with
/// file and line. Steps that were finished stay in the build directory.
pub fn build(
    plan: &BuildPlan,
    options: &ExecuteOptions,
    executor: &mut dyn Executor,
    bases: &mut dyn Bases,
    events: &mut dyn FnMut(Event<'_>),
) -> Result<BuiltImage, ExecuteError> {
    if options.require_isolation && !executor.isolated() {
        return Err(ExecuteError::Host {
            what: format!("the {} executor shares this machine's kernel", executor.name()),
            hint: "isolation was asked for: build with --builder microvm, or without it".to_owned(),
        });
    }
    events(Event::Executor { name: executor.name(), isolated: executor.isolated() });
    for warning in &plan.warnings {
        events(Event::Warning { at: Some(&warning.at), message: &warning.message });
    }
    for (id, value) in &options.secrets {
        if !plan.secrets.contains_key(id) {
            let message = format!("secret {id} is not used by any step");
            events(Event::Warning { at: None, message: &message });
        } else if value.trim_ascii().len() < secrets::SHORTEST {
            let message = format!("secret {id} is too short to be searched for in the result");
            events(Event::Warning { at: None, message: &message });
        }
    }
    let cache = BuildCache::open(&options.directory)?;
    super::overlay::usable(&cache.scratch()?.path().join("o")).map_err(|error| {
        ExecuteError::Host {
            what: format!("overlays cannot be mounted in {}: {error}", cache.root().display()),
            hint: "run as root, with the build directory on ext4, xfs, btrfs or tmpfs".to_owned(),
        }
    })?;
    let mut states: Vec<State> = Vec::new();
    let mut images = BTreeMap::new();
    let (mut executed, mut cached) = (0, 0);
    for (number, stage) in plan.stages.iter().enumerate() {
        events(Event::Stage {
            stage: number,
            stages: plan.stages.len(),
            name: stage.name.as_deref(),
        });
        let mut state = start(stage, &states, &cache, options, bases)?;
        let steps = stage.steps.iter().filter(|step| step.action != Action::Configure).count();
        let mut index = 0;
        for step in &stage.steps {
            let mut history = json!({"created_by": step.created_by});
            if let Some(epoch) = options.source_date_epoch {
                history["created"] = json!(layout::rfc3339(epoch));
            }
            if step.action == Action::Configure {
                history["empty_layer"] = json!(true);
                state.history.push(history);
                continue;
            }
            index += 1;
            events(Event::StepStarted {
                stage: number,
                step: index,
                steps,
                at: &step.at,
                text: &step.text,
            });
            let started = std::time::Instant::now();
            let mut context = StepContext {
                cache: &cache,
                options,
                plan,
                step,
                place: format!("{}#{number}.{index}", step.at.file),
                trees: Trees { states: &states, images: &mut images, bases },
                executor,
                events,
            };
            let (result, was_cached) = context.perform(&state)?;
            if was_cached {
                cached += 1;
                events(Event::StepCached);
            } else {
                executed += 1;
                events(Event::StepFinished {
                    milliseconds: started.elapsed().as_millis(),
                    size: result.record.size,
                });
            }
            state.push(&result);
            state.history.push(history);
        }
        for line in executor.leave_stage() {
            events(Event::Warning { at: None, message: &line });
        }
        states.push(state);
    }
    let Some((state, stage)) = states.pop().zip(plan.stages.last()) else {
        return Err(ExecuteError::Host {
            what: "the plan has no stage".to_owned(),
            hint: "start it with FROM".to_owned(),
        });
    };
    let document = Document {
        platform: &plan.platform,
        config: &stage.config,
        author: stage.author.as_deref(),
        history: &state.history,
        layers: &state.layers,
        epoch: options.source_date_epoch,
    };
    let config_text = layout::config_text(&document);
    secrets::search_text("the image's configuration", &config_text, &options.secrets)?;
    let mut findings = Vec::new();
    for (digest, file) in &state.files {
        let place = format!("layer {digest}");
        secrets::search_layer(&place, file, &options.secrets)?;
        findings.extend(
            secrets::credentials(file).doing(|| format!("searching {place} for credentials"))?,
        );
    }
    findings.sort();
    findings.dedup();
    for finding in &findings {
        let message = format!("{} looks like {}", finding.path, finding.what);
        if options.strict {
            return Err(ExecuteError::Host {
                what: message,
                hint: "remove it in the step that makes it, or build without --strict".to_owned(),
            });
        }
        events(Event::Warning { at: None, message: &message });
    }
    if options.output.exists() {
        fs::remove_dir_all(&options.output)
            .doing(|| format!("replacing {}", options.output.display()))?;
    }
    layout::create(&options.output)?;
    for layer in &state.layers {
        if let Some(file) = state.files.get(&layer.digest) {
            layout::add_file(&options.output, &layer.digest, file)?;
        }
    }
    let elsewhere = add_base_blobs(plan, stage, &state, options, bases)?;
    let manifest = layout::finish(&options.output, &document, options.tag.as_deref())?;
    Ok(BuiltImage {
        oci_layout: options.output.clone(),
        elsewhere,
        manifest,
        config: stage.config.clone(),
        executed,
        cached,
        findings,
    })
}

fn start(
    stage: &Stage,
    states: &[State],
    cache: &BuildCache,
    options: &ExecuteOptions,
    bases: &mut dyn Bases,
) -> Result<State, ExecuteError> {
    let from = |prepared: Prepared| State {
        trees: vec![prepared.tree],
        layers: prepared.layers,
        files: BTreeMap::new(),
        history: prepared.history,
    };
    match &stage.base {
        Base::Scratch => Ok(State { trees: vec![cache.empty()], ..State::default() }),
        Base::Stage { stage } => Ok(states[*stage].clone()),
        Base::Image(source) => {
            let layers = bases.layers(source).map_err(|reason| ExecuteError::Base {
                at: stage.at.clone(),
                reference: source.reference.clone(),
                reason,
            })?;
            Ok(from(base::image(cache, &layers)?))
        }
        Base::Bootstrap(spec) => {
            let epoch = options.source_date_epoch;
            let (prepared, tar) = base::bootstrap(cache, spec, epoch, options.no_cache)?;
            let mut state = from(prepared);
            state.files.insert(state.layers[0].digest.clone(), tar);
            Ok(state)
        }
    }
}

/// Layers that were not made here go into the result as they are in the base, or stay there.
fn add_base_blobs(
    plan: &BuildPlan,
    stage: &Stage,
    state: &State,
    options: &ExecuteOptions,
    bases: &mut dyn Bases,
) -> Result<BlobsElsewhere, ExecuteError> {
    let mut elsewhere = BlobsElsewhere::default();
    let mut root = stage;
    while let Base::Stage { stage } = &root.base {
        root = &plan.stages[*stage];
    }
    let Base::Image(source) = &root.base else { return Ok(elsewhere) };
    let failed = |reason| ExecuteError::Base {
        at: root.at.clone(),
        reference: source.reference.clone(),
        reason,
    };
    let image = bases.layers(source).map_err(failed)?;
    for layer in image.layers {
        if state.files.contains_key(&layer.digest) {
            continue;
        }
        if options.partial {
            elsewhere.0.insert(layer.digest, layer.open);
            continue;
        }
        let blob = (layer.open)().doing(|| format!("opening layer {}", layer.digest))?;
        layout::add_stream(&options.output, &layer.digest, blob)?;
    }
    Ok(elsewhere)
}
