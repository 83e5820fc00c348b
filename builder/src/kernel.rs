//! Kernel bundles in the store: made once for each kernel and agent, then reused.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use parbake_cache::template::{KernelBundle, ObjectRef};
use parbake_cache::{Digest, Store, StoreError};
use parbake_kernels::{BundleError, DEFAULT_PACKAGE, FetchError, KernelSource};
use parbake_node::programs::{self, ProgramMissing};

/// Which kernel a template gets, as a person writes it.
///
/// `NAME` or `NAME=VERSION`: a package of the host's distribution; `deb:PATH`: a local package;
/// `image:PATH`: a local `vmlinuz` or `vmlinux` that has its drivers built in or whose modules lie
/// in `/lib/modules` of its release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelChoice {
    text: String,
    source: KernelSource,
}

impl Default for KernelChoice {
    fn default() -> Self {
        Self {
            text: DEFAULT_PACKAGE.to_owned(),
            source: KernelSource::Package { name: DEFAULT_PACKAGE.to_owned(), version: None },
        }
    }
}

impl FromStr for KernelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let source = if let Some(path) = text.strip_prefix("deb:") {
            KernelSource::Deb(PathBuf::from(path))
        } else if let Some(path) = text.strip_prefix("image:") {
            KernelSource::Image { vmlinuz: PathBuf::from(path), modules: None, config: None }
        } else if text.contains('/') {
            return Err(format!("{text:?}: write deb:PATH or image:PATH for a local file"));
        } else {
            let (name, version) = match text.split_once('=') {
                Some((name, version)) => (name, Some(version.to_owned())),
                None => (text, None),
            };
            if name.is_empty() {
                return Err("a kernel package's name is empty".to_owned());
            }
            KernelSource::Package { name: name.to_owned(), version }
        };
        Ok(Self { text: text.to_owned(), source })
    }
}

impl std::fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The agent is not installed.
    #[error(transparent)]
    Program(#[from] ProgramMissing),
    /// The agent or the kernel could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel could not be had.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The kernel could not be made into a bundle.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The bundle of `choice` with this build's agent: the store's, or made now. `refresh` makes it
/// anew, so that a package name stands for what the distribution has today.
///
/// # Errors
/// See [`KernelError`].
pub fn ensure(
    store: &Store,
    choice: &KernelChoice,
    refresh: bool,
    mut events: impl FnMut(&str),
) -> Result<ObjectRef, KernelError> {
    let agent = programs::agent()?;
    let agent_bytes = read(&agent)?;
    let agent_digest = Digest::of(&agent_bytes);
    // A local file is named by what it holds, a package by what the user calls it.
    let subject = match &choice.source {
        KernelSource::Package { .. } => choice.text.clone(),
        KernelSource::Deb(path) | KernelSource::Image { vmlinuz: path, .. } => {
            Digest::of(&read(path)?).to_string()
        }
    };
    let key = format!("{subject} agent {agent_digest}");
    if !refresh && let Some(digest) = store.kernel(&key)? {
        // A bundle whose parts are gone is made again.
        let whole = store.get_json::<KernelBundle>(&digest).and_then(|bundle| {
            store.path(&bundle.vmlinux.digest)?;
            store.path(&bundle.initramfs.digest)?;
            store.get_blob(&digest, 1 << 20)
        });
        if let Ok(document) = whole {
            return Ok(ObjectRef { digest, size: document.len() as u64 });
        }
    }
    let staging = store.stage()?;
    let work = staging.path().join("kernel");
    let out = staging.path().join("bundle");
    for directory in [&work, &out] {
        fs::create_dir(directory)
            .map_err(|source| KernelError::Read { path: directory.clone(), source })?;
    }
    events(&format!("fetching kernel {choice}"));
    let fetched = parbake_kernels::fetch(&choice.source, &work, &mut |_| {})?;
    events(&format!("unpacking kernel {} {}", fetched.package, fetched.version));
    let files = parbake_kernels::make(&fetched, &agent, &out)?;
    let vmlinux = store.adopt_blob(files.vmlinux)?;
    let initramfs = store.adopt_blob(files.initramfs)?;
    let bundle = store.put_json(&files.facts.into_document(vmlinux, initramfs))?;
    store.set_kernel(&key, &bundle.digest)?;
    Ok(bundle)
}

fn read(path: &Path) -> Result<Vec<u8>, KernelError> {
    fs::read(path).map_err(|source| KernelError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_written() {
        let source = |text: &str| text.parse::<KernelChoice>().map(|choice| choice.source);
        assert_eq!(
            source("linux-image-x=1.2"),
            Ok(KernelSource::Package { name: "linux-image-x".into(), version: Some("1.2".into()) })
        );
        assert_eq!(source("deb:/k.deb"), Ok(KernelSource::Deb("/k.deb".into())));
        assert!(matches!(source("image:vmlinuz"), Ok(KernelSource::Image { .. })));
        for bad in ["", "=1", "./vmlinuz"] {
            assert!(source(bad).is_err(), "{bad}");
        }
    }
}
