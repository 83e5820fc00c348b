//! The lab's kernel and initramfs: made once for an agent and a kernel, then kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parbake_cache::Digest;
use parbake_kernels::bundle::BundleSpec;
use parbake_kernels::{FetchError, KernelSource, fetch, make_with, modules};

use super::{Event, LabConfig, LabError};

/// Images kept beside the newest: rebuilding the agent leaves one behind each time.
const KEPT: usize = 2;

/// The lab's kernel command line.
///
/// `mitigations=off`: nothing in the lab is protected from anything else in it, and emulated
/// barriers are slow. `nokaslr`: no relocation. `cryptomgr.notests`: half of a boot. What follows
/// `--` goes to init.
///
/// `init_on_alloc=1` is the distribution's default and must stay: the file servers write file
/// contents into the machine's memory behind the emulator's back, which would go on executing
/// translations of what lay there before. Zeroing a page as it is allocated makes it forget them.
pub(super) const CMDLINE: &str = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr \
                                  cryptomgr.notests init_on_alloc=1 -- lab";

const SPEC: BundleSpec<'static> = BundleSpec { drivers: modules::LAB, cmdline: CMDLINE };

/// What the emulator boots.
#[derive(Debug, Clone)]
pub(super) struct Image {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
}

impl Image {
    fn at(folder: &Path) -> Self {
        Self { kernel: folder.join("vmlinux"), initramfs: folder.join("initramfs.cpio") }
    }
}

/// Names an image by all that goes into it. A package without a version stands for whatever was
/// newest when the image was made: the lab need not follow every kernel update.
fn key(config: &LabConfig) -> Result<String, LabError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| LabError::State { path, source }
    };
    let agent = fs::read(&config.agent).map_err(io(&config.agent))?;
    let stamp = |path: &Path| {
        let meta = fs::metadata(path).map_err(io(path))?;
        let changed =
            meta.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        Ok::<_, LabError>(format!("{} {changed:?}", meta.len()))
    };
    let kernel = match &config.kernel {
        KernelSource::Package { .. } => String::new(),
        KernelSource::Deb(path) | KernelSource::Image { vmlinuz: path, .. } => stamp(path)?,
    };
    let text = format!("{:?} {kernel} {} {SPEC:?}", config.kernel, Digest::of(&agent));
    Ok(Digest::of(text.as_bytes()).hex()[..32].to_owned())
}

/// The image for `config`, made if it is not there yet.
pub(super) fn prepare(
    config: &LabConfig,
    events: &mut dyn FnMut(Event),
) -> Result<Image, LabError> {
    let folder = &config.image_dir;
    let error = |source| LabError::State { path: folder.clone(), source };
    let finished = folder.join(key(config)?);
    if finished.join("initramfs.cpio").exists() {
        return Ok(Image::at(&finished));
    }
    events(Event::MakingImage);
    fs::create_dir_all(folder).map_err(error)?;
    let work = tempfile::Builder::new().prefix("making-").tempdir_in(folder).map_err(error)?;
    let kernel = fetch(&config.kernel, work.path(), &mut |event| events(Event::Kernel(event)))
        .map_err(|source: FetchError| LabError::Kernel(Box::new(source)))?;
    let out = work.path().join("image");
    fs::create_dir(&out).map_err(error)?;
    make_with(&kernel, &config.agent, &SPEC, &out)
        .map_err(|source| LabError::Bundle(Box::new(source)))?;
    // Another process may have been faster; its image is the same.
    if let Err(source) = fs::rename(&out, &finished)
        && !finished.join("initramfs.cpio").exists()
    {
        return Err(error(source));
    }
    prune(folder, &finished);
    Ok(Image::at(&finished))
}

/// Removes all but the newest images, and what an interrupted run left.
fn prune(folder: &Path, current: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut old: Vec<(SystemTime, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .filter(|(_, path)| path != current)
        .collect();
    old.sort();
    let hour_ago = SystemTime::now() - std::time::Duration::from_secs(3600);
    let mut keep = KEPT;
    for (changed, path) in old.into_iter().rev() {
        let making =
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"making-"));
        if making && changed > hour_ago {
            continue;
        }
        if !making && keep > 0 {
            keep -= 1;
            continue;
        }
        let _ = fs::remove_dir_all(path);
    }
}
