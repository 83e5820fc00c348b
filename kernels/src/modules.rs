//! Which modules a machine needs, and in which order they load.
//!
//! A package carries no `modules.dep`: the target's package scripts make it. Every module says
//! itself what it depends on, in its `.modinfo` section, and that is where `modules.dep` comes
//! from too; so the order is read there, for packages and installed trees alike.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::compress::{Compression, DecompressError};
use crate::elf;

/// The largest module accepted, unpacked. The largest of a distribution (GPU drivers) are 20 MiB.
const MAX_MODULE: usize = 64 << 20;
/// Bound on the files of a module tree: distributions' full kernels have about 4,500 modules.
const MAX_FILES: usize = 50_000;
/// Folders below a tree's root that are searched.
const MAX_DEPTH: usize = 16;

/// A driver that a machine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Driver {
    /// Module name with underscores, as `/proc/modules` shows it.
    pub module: &'static str,
    /// The configuration option that builds it in, for kernels that come without a module tree.
    pub option: &'static str,
}

const fn driver(module: &'static str, option: &'static str) -> Driver {
    Driver { module, option }
}

/// What a sandbox needs to reach its disk, its host and its network.
pub const SANDBOX: &[Driver] = &[
    driver("virtio_mmio", "CONFIG_VIRTIO_MMIO"),
    driver("virtio_blk", "CONFIG_VIRTIO_BLK"),
    driver("ext4", "CONFIG_EXT4_FS"),
    driver("vmw_vsock_virtio_transport", "CONFIG_VIRTIO_VSOCKETS"),
    driver("virtio_rng", "CONFIG_HW_RANDOM_VIRTIO"),
    driver("virtio_net", "CONFIG_VIRTIO_NET"),
    driver("af_packet", "CONFIG_PACKET"),
    driver("overlay", "CONFIG_OVERLAY_FS"),
];

/// What the emulated host needs: the machine's files, its network, KVM, and its sandboxes' network.
pub const LAB: &[Driver] = &[
    driver("virtio_pci", "CONFIG_VIRTIO_PCI"),
    driver("fuse", "CONFIG_FUSE_FS"),
    driver("virtiofs", "CONFIG_VIRTIO_FS"),
    driver("overlay", "CONFIG_OVERLAY_FS"),
    driver("virtio_net", "CONFIG_VIRTIO_NET"),
    driver("af_packet", "CONFIG_PACKET"),
    driver("virtio_rng", "CONFIG_HW_RANDOM_VIRTIO"),
    driver("kvm_amd", "CONFIG_KVM_AMD"),
    driver("tun", "CONFIG_TUN"),
    driver("veth", "CONFIG_VETH"),
    driver("nf_tables", "CONFIG_NF_TABLES"),
    driver("nft_ct", "CONFIG_NFT_CT"),
    driver("nft_chain_nat", "CONFIG_NFT_NAT"),
    driver("nft_masq", "CONFIG_NFT_MASQ"),
    driver("nft_log", "CONFIG_NFT_LOG"),
    driver("nfnetlink_log", "CONFIG_NETFILTER_NETLINK_LOG"),
    driver("nft_limit", "CONFIG_NFT_LIMIT"),
    driver("nft_connlimit", "CONFIG_NFT_CONNLIMIT"),
    driver("nft_objref", "CONFIG_NFT_OBJREF"),
    driver("nft_reject_inet", "CONFIG_NFT_REJECT_INET"),
];

/// A module as it goes into an initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Name with underscores.
    pub name: String,
    /// The unpacked `.ko`, signature included.
    pub bytes: Vec<u8>,
}

/// Why the modules of a kernel could not be put together.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// The kernel has a needed driver neither built in nor as a module.
    #[error(
        "the kernel lacks the driver {module} ({option}): use a kernel that has it built in or as a module"
    )]
    MissingDriver {
        /// The module's name.
        module: &'static str,
        /// The kernel option that would provide it.
        option: &'static str,
    },
    /// A module needs another one that is not there.
    #[error("module {module} depends on {dependency}, which the kernel's module tree lacks")]
    MissingDependency {
        /// The module that was found.
        module: String,
        /// The one that was not.
        dependency: String,
    },
    /// Dependencies that form a ring cannot be loaded in any order.
    #[error("module {0} depends on itself through others")]
    Circular(String),
    /// Not an ELF object with module information.
    #[error("{path} is not a kernel module (no .modinfo section)")]
    NotAModule {
        /// The file.
        path: PathBuf,
    },
    /// A module for another kernel would be refused at boot.
    #[error("module {module} was built for {actual}, the kernel is {expected}")]
    WrongRelease {
        /// The module's name.
        module: String,
        /// The release the module names.
        actual: String,
        /// The kernel's own release.
        expected: String,
    },
    /// A compressed module is damaged.
    #[error("{path}: {source}")]
    Compressed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: DecompressError,
    },
    /// The tree could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// More files than a module tree has.
    #[error("{0} has more than {MAX_FILES} files: is it a module tree (lib/modules/RELEASE)?")]
    TooMany(PathBuf),
}

/// The drivers of one kernel: what is built in and where its modules lie.
#[derive(Debug, Default)]
pub struct ModuleTree {
    built_in: BTreeSet<String>,
    files: BTreeMap<String, PathBuf>,
}

/// Module names are the same with `-` and `_`; the kernel shows them with `_`.
fn normalize(name: &str) -> String {
    name.replace('-', "_")
}

/// The name of a module's file, or `None` for other files.
fn module_name(file: &str) -> Option<String> {
    let (stem, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| normalize(stem))
}

impl ModuleTree {
    /// Reads a module tree (`lib/modules/RELEASE`): the list of built-in drivers and the place of
    /// each module.
    ///
    /// # Errors
    /// An unreadable tree, or a folder that is not one.
    pub fn open(root: &Path) -> Result<Self, ModuleError> {
        let read = |path: &Path, source| ModuleError::Read { path: path.to_owned(), source };
        let mut tree = Self::default();
        let list = root.join("modules.builtin");
        match fs::read_to_string(&list) {
            Ok(text) => tree.add_built_in(&text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(read(&list, error)),
        }
        let mut folders = vec![(root.to_owned(), 0)];
        let mut seen = 0;
        while let Some((folder, depth)) = folders.pop() {
            for entry in fs::read_dir(&folder).map_err(|error| read(&folder, error))? {
                let entry = entry.map_err(|error| read(&folder, error))?;
                let kind = entry.file_type().map_err(|error| read(&entry.path(), error))?;
                seen += 1;
                if seen > MAX_FILES {
                    return Err(ModuleError::TooMany(root.to_owned()));
                }
                // `build` and `source` are links out of the tree; links are never followed.
                if kind.is_dir() && depth < MAX_DEPTH {
                    folders.push((entry.path(), depth + 1));
                } else if kind.is_file()
                    && let Some(name) = entry.file_name().to_str().and_then(module_name)
                {
                    // The same name twice (updates/ beside kernel/): the first in path order.
                    let path = entry.path();
                    let place = tree.files.entry(name).or_insert_with(|| path.clone());
                    if path < *place {
                        *place = path;
                    }
                }
            }
        }
        Ok(tree)
    }

    /// Adds the drivers that `modules.builtin` lists: a path per line.
    pub fn add_built_in(&mut self, text: &str) {
        let names = text.lines().filter_map(|line| module_name(line.rsplit('/').next()?));
        self.built_in.extend(names);
    }

    /// Adds drivers whose configuration option is `y`.
    pub fn add_configured(&mut self, config: &BTreeMap<String, String>, drivers: &[Driver]) {
        let built_in = drivers
            .iter()
            .filter(|driver| config.get(driver.option).is_some_and(|value| value == "y"));
        self.built_in.extend(built_in.map(|driver| driver.module.to_owned()));
    }

    /// The modules that `drivers` need, unpacked and in load order; built-in drivers need none.
    ///
    /// # Errors
    /// A driver or a dependency that is missing, by name, and modules of another release.
    pub fn resolve(&self, drivers: &[Driver], release: &str) -> Result<Vec<Module>, ModuleError> {
        let mut order = Order { tree: self, release, loaded: Vec::new(), open: Vec::new() };
        for driver in drivers {
            let known =
                self.built_in.contains(driver.module) || self.files.contains_key(driver.module);
            if !known {
                let Driver { module, option } = *driver;
                return Err(ModuleError::MissingDriver { module, option });
            }
            order.add(driver.module)?;
        }
        Ok(order.loaded)
    }

    fn read(
        &self,
        name: &str,
        path: &Path,
        release: &str,
    ) -> Result<(Module, Vec<String>), ModuleError> {
        let bytes =
            fs::read(path).map_err(|source| ModuleError::Read { path: path.to_owned(), source })?;
        let bytes = if bytes.starts_with(elf::MAGIC) {
            bytes
        } else {
            Compression::detect(&bytes)
                .and_then(|kind| kind.decompress(&bytes, MAX_MODULE))
                .map_err(|source| ModuleError::Compressed { path: path.to_owned(), source })?
        };
        let info = elf::section(&bytes, b".modinfo")
            .ok_or_else(|| ModuleError::NotAModule { path: path.to_owned() })?;
        let mut needs = Vec::new();
        for field in info.split(|byte| *byte == 0) {
            let Ok(field) = std::str::from_utf8(field) else { continue };
            if let Some(list) = field.strip_prefix("depends=") {
                needs.extend(list.split(',').filter(|name| !name.is_empty()).map(normalize));
            } else if let Some(magic) = field.strip_prefix("vermagic=") {
                let actual = magic.split(' ').next().unwrap_or_default();
                if actual != release {
                    return Err(ModuleError::WrongRelease {
                        module: name.to_owned(),
                        actual: actual.to_owned(),
                        expected: release.to_owned(),
                    });
                }
            }
        }
        Ok((Module { name: name.to_owned(), bytes }, needs))
    }
}

/// A depth-first walk over dependencies: what a module needs comes before it.
struct Order<'a> {
    tree: &'a ModuleTree,
    release: &'a str,
    loaded: Vec<Module>,
    open: Vec<String>,
}

impl Order<'_> {
    fn add(&mut self, name: &str) -> Result<(), ModuleError> {
        if self.tree.built_in.contains(name) || self.loaded.iter().any(|module| module.name == name)
        {
            return Ok(());
        }
        if self.open.iter().any(|open| open == name) {
            return Err(ModuleError::Circular(name.to_owned()));
        }
        let Some(path) = self.tree.files.get(name) else {
            return Err(ModuleError::MissingDependency {
                module: self.open.last().cloned().unwrap_or_default(),
                dependency: name.to_owned(),
            });
        };
        let (module, needs) = self.tree.read(name, path, self.release)?;
        self.open.push(name.to_owned());
        for need in &needs {
            self.add(need)?;
        }
        self.open.pop();
        self.loaded.push(module);
        Ok(())
    }
}
