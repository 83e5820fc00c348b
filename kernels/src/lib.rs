//! Guest-kernel bundles made from a distribution's unmodified kernel.
//!
//! ```text
//! package name ─► apt ─► .deb ─┐
//! local .deb ──────────────────┼─► FetchedKernel ─► payload → ELF      ─► vmlinux
//! local vmlinuz (+ modules) ───┘   (files)          modules + agent    ─► initramfs.cpio
//!                                                   config, digests    ─► BundleFacts
//! ```
//! Everything that comes from outside is bounded: images, packages and modules are foreign bytes
//! even when a distribution signed them.
#![forbid(unsafe_code)]

pub mod bundle;
pub mod compress;
pub mod config;
pub mod elf;
pub mod initramfs;
pub mod modules;
pub mod package;
pub mod payload;

use std::fs;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;

pub use bundle::{BundleError, BundleFacts, BundleFiles, BundleSpec, make, make_with};
pub use package::{Candidate, PackageError};

/// The package a kernel comes from when nobody says otherwise.
pub const DEFAULT_PACKAGE: &str = "linux-image-cloud-amd64";

/// The largest package or image that is hashed and read, in bytes.
const MAX_SOURCE: u64 = 1 << 30;

/// Where a kernel comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelSource {
    /// A package of the host's distribution; a metapackage stands for the kernel it depends on.
    Package {
        /// Package name, e.g. [`DEFAULT_PACKAGE`].
        name: String,
        /// Exact version; absent is the client's candidate.
        version: Option<String>,
    },
    /// A local package.
    Deb(PathBuf),
    /// A local bzImage or unpacked ELF.
    Image {
        /// The image.
        vmlinuz: PathBuf,
        /// Its module tree, `lib/modules/RELEASE`; absent when all drivers are built in.
        modules: Option<PathBuf>,
        /// Its configuration; without a module tree it alone can say what is built in.
        config: Option<PathBuf>,
    },
}

impl Default for KernelSource {
    fn default() -> Self {
        Self::Package { name: DEFAULT_PACKAGE.to_owned(), version: None }
    }
}

/// What [`fetch`] reports while it works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The package client is asked for a package.
    Resolving {
        /// The name as given.
        name: String,
    },
    /// The package client downloads a package.
    Downloading(Candidate),
    /// A package is unpacked.
    Unpacking {
        /// The file.
        path: PathBuf,
    },
}

/// A kernel as files, ready for [`make`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedKernel {
    /// Package name, or `file`.
    pub package: String,
    /// Package version; empty for a local image.
    pub version: String,
    /// Digest of the package, or of the image.
    pub source: Digest,
    /// The image.
    pub vmlinuz: PathBuf,
    /// Its module tree.
    pub modules: Option<PathBuf>,
    /// Its configuration.
    pub config: Option<PathBuf>,
}

/// Why a kernel could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The package could not be had or used.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A local file could not be read.
    #[error(transparent)]
    File(#[from] BundleError),
}

/// Gets a kernel as files below `work`, an existing folder that the caller removes afterwards.
///
/// # Errors
/// A package that is not there, cannot be downloaded or holds no kernel, and unreadable files.
pub fn fetch(
    source: &KernelSource,
    work: &Path,
    events: &mut dyn FnMut(Event),
) -> Result<FetchedKernel, FetchError> {
    match source {
        KernelSource::Package { name, version } => {
            events(Event::Resolving { name: name.clone() });
            let candidate = package::candidate(name, version.as_deref())?;
            events(Event::Downloading(candidate.clone()));
            let deb = package::download(&candidate, work)?;
            let fetched = fetch_deb(&deb, work, events);
            // Only the unpacked files are of use from here on.
            let _ = fs::remove_file(&deb);
            fetched
        }
        KernelSource::Deb(path) => fetch_deb(path, work, events),
        KernelSource::Image { vmlinuz, modules, config } => Ok(FetchedKernel {
            package: "file".to_owned(),
            version: String::new(),
            source: Digest::of(&bundle::read_bounded(vmlinuz, MAX_SOURCE)?),
            vmlinuz: vmlinuz.clone(),
            modules: modules.clone(),
            config: config.clone(),
        }),
    }
}

fn fetch_deb(
    deb: &Path,
    work: &Path,
    events: &mut dyn FnMut(Event),
) -> Result<FetchedKernel, FetchError> {
    events(Event::Unpacking { path: deb.to_owned() });
    let source = Digest::of(&bundle::read_bounded(deb, MAX_SOURCE)?);
    let unpacked = package::unpack(deb, work)?;
    Ok(FetchedKernel {
        package: unpacked.package,
        version: unpacked.version,
        source,
        vmlinuz: unpacked.vmlinuz,
        modules: unpacked.modules,
        config: unpacked.config,
    })
}
