//! From a kernel to a bundle: the unpacked ELF, the initramfs, and the record of both.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use parbake_cache::template::{KernelBundle, ObjectRef, SCHEMA_VERSION};

use crate::modules::{self, Driver, ModuleError, ModuleTree};
use crate::payload::{self, PayloadError};
use crate::{FetchedKernel, config, elf, initramfs};

/// The largest image read, in bytes; distribution images are 10–20 MiB packed.
const MAX_IMAGE: u64 = payload::MAX_KERNEL as u64;
/// The largest agent accepted, in bytes.
const MAX_AGENT: u64 = 64 << 20;
/// The largest configuration read, in bytes; a full one is 300 KiB.
const MAX_CONFIG: u64 = 4 << 20;

/// The kernel command line of a sandbox. Each word has earned its place; what the machine is made
/// of is not among them, as ACPI describes it.
///
/// | word | why |
/// | --- | --- |
/// | `console=ttyS0` | the console log |
/// | `quiet loglevel=4` | errors only: each character is a VM exit |
/// | `nokaslr` | a snapshot is one layout anyway, and memory of two bakes then has pages in common |
/// | `clocksource=kvm-clock` | the clock that a restore corrects; a guest on the bare TSC lags by as long as it was frozen |
/// | `tsc=reliable` | no watchdog that compares the TSC with the clock twice a second, and finds it jumped after a restore |
/// | `reboot=t panic=-1` | a triple fault ends the machine at once, also after a panic; other ways time out first |
/// | `cryptomgr.notests` | half of the instructions of a boot were self-tests of ciphers (1.72 → 0.85 billion, 6.1 cloud kernel) |
///
/// Measured, and left out because they change less than 3 %: `lsm=`, `audit=0`, `nowatchdog`,
/// `mitigations=off`, `init_on_alloc=0`, `no_timer_check`, `i8042.*`, `8250.nr_uarts=1`,
/// `rcupdate.rcu_expedited=1`. `random.trust_cpu=on` is the default of distribution kernels.
pub const SANDBOX_CMDLINE: &str = "console=ttyS0 quiet loglevel=4 nokaslr clocksource=kvm-clock \
                                   tsc=reliable reboot=t panic=-1 cryptomgr.notests";

/// What goes into a bundle beside the kernel.
#[derive(Debug, Clone)]
pub struct BundleSpec<'a> {
    /// The drivers that must be there.
    pub drivers: &'a [Driver],
    /// The kernel command line.
    pub cmdline: &'a str,
}

impl BundleSpec<'static> {
    /// The bundle of a sandbox.
    #[must_use]
    pub const fn sandbox() -> Self {
        Self { drivers: modules::SANDBOX, cmdline: SANDBOX_CMDLINE }
    }
}

/// A finished bundle as files, and what is recorded about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleFiles {
    /// The unpacked ELF.
    pub vmlinux: PathBuf,
    /// Agent and modules.
    pub initramfs: PathBuf,
    /// Everything that [`KernelBundle`] holds but the references to the two files.
    pub facts: BundleFacts,
}

/// What is recorded about a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundleFacts {
    /// Package name, or `file`.
    pub package: String,
    /// Package version.
    pub version: String,
    /// `uname -r`.
    pub release: String,
    /// Digest of the package or image.
    pub source: Digest,
    /// Digest of the agent.
    pub agent: Digest,
    /// Module names in load order.
    pub modules: Vec<String>,
    /// The kernel command line.
    pub cmdline: String,
    /// Facts of the kernel's configuration.
    pub config: BTreeMap<String, String>,
}

impl BundleFacts {
    /// The bundle's document, once its two files are stored.
    #[must_use]
    pub fn into_document(self, vmlinux: ObjectRef, initramfs: ObjectRef) -> KernelBundle {
        KernelBundle {
            schema_version: SCHEMA_VERSION,
            package: self.package,
            version: self.version,
            release: self.release,
            source: self.source,
            vmlinux,
            initramfs,
            agent: self.agent,
            modules: self.modules,
            cmdline: self.cmdline,
            config: self.config,
        }
    }
}

/// Why a bundle could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The kernel image cannot be used.
    #[error("{path}: {source}")]
    Kernel {
        /// The image.
        path: PathBuf,
        /// Why.
        source: PayloadError,
    },
    /// The modules cannot be used.
    #[error(transparent)]
    Modules(#[from] ModuleError),
    /// The agent would not run in an empty guest.
    #[error("{0} is not a static x86-64 program: build it with `-C target-feature=+crt-static`")]
    Agent(PathBuf),
    /// A file is larger than anything of its kind.
    #[error("{path} is larger than the {limit} bytes accepted for it")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Reads a file of at most `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, BundleError> {
    use std::io::Read;
    let io = |source| BundleError::Io { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    fs::File::open(path).map_err(io)?.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(BundleError::TooLarge { path: path.to_owned(), limit });
    }
    Ok(bytes)
}

/// Makes the bundle of a sandbox; see [`make_with`].
///
/// # Errors
/// As [`make_with`].
pub fn make(kernel: &FetchedKernel, agent: &Path, out: &Path) -> Result<BundleFiles, BundleError> {
    make_with(kernel, agent, &BundleSpec::sandbox(), out)
}

/// Unpacks the kernel and builds the initramfs of `agent` and the modules that `spec` needs, as
/// `vmlinux` and `initramfs.cpio` in the existing folder `out`. The same input gives the same
/// bytes.
///
/// # Errors
/// A kernel that cannot be entered, lacks a driver, or an agent that is not static.
pub fn make_with(
    kernel: &FetchedKernel,
    agent: &Path,
    spec: &BundleSpec<'_>,
    out: &Path,
) -> Result<BundleFiles, BundleError> {
    let image = read_bounded(&kernel.vmlinuz, MAX_IMAGE)?;
    let unpacked = payload::unpack(&image)
        .map_err(|source| BundleError::Kernel { path: kernel.vmlinuz.clone(), source })?;
    let options = match &kernel.config {
        Some(path) => config::parse(&String::from_utf8_lossy(&read_bounded(path, MAX_CONFIG)?)),
        None => BTreeMap::new(),
    };
    let mut tree = match &kernel.modules {
        Some(root) => ModuleTree::open(root)?,
        None => ModuleTree::default(),
    };
    tree.add_configured(&options, spec.drivers);
    let modules = tree.resolve(spec.drivers, &unpacked.release)?;
    let program = read_bounded(agent, MAX_AGENT)?;
    if !elf::is_static_program(&program) {
        return Err(BundleError::Agent(agent.to_owned()));
    }

    let write = |name: &str, bytes: &[u8]| {
        let path = out.join(name);
        fs::write(&path, bytes).map_err(|source| BundleError::Io { path: path.clone(), source })?;
        Ok::<_, BundleError>(path)
    };
    Ok(BundleFiles {
        vmlinux: write("vmlinux", &unpacked.elf)?,
        initramfs: write("initramfs.cpio", &initramfs::build(&program, &modules))?,
        facts: BundleFacts {
            package: kernel.package.clone(),
            version: kernel.version.clone(),
            release: unpacked.release,
            source: kernel.source,
            agent: Digest::of(&program),
            modules: modules.into_iter().map(|module| module.name).collect(),
            cmdline: spec.cmdline.to_owned(),
            config: config::facts(&options),
        },
    })
}
