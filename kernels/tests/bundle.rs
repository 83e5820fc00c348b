//! Bundles: module order, refusals by name, and the same bytes for the same input.

mod forge;

use std::fs;
use std::path::{Path, PathBuf};

use forge::{PACKERS, Packer, bzimage, kernel_elf, module, pack};
use parbake_kernels::bundle::{BundleError, BundleSpec, make_with};
use parbake_kernels::modules::{Driver, ModuleError, ModuleTree};
use parbake_kernels::{FetchedKernel, KernelSource, fetch, make};

const RELEASE: &str = "6.1.0-9-test-amd64";

const DRIVERS: &[Driver] = &[
    Driver { module: "virtio_blk", option: "CONFIG_VIRTIO_BLK" },
    Driver { module: "ext4", option: "CONFIG_EXT4_FS" },
    Driver { module: "virtio_rng", option: "CONFIG_HW_RANDOM_VIRTIO" },
];

struct Kernel {
    folder: tempfile::TempDir,
    root: PathBuf,
}

impl Kernel {
    /// A kernel with four modules, each in another compression, and ext4 built in.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("modules");
        let kernel = Self { folder, root };
        kernel.put("kernel/drivers/virtio/virtio.ko", &module(RELEASE, "virtio_ring"));
        let ring = pack(Packer::Xz, &module(RELEASE, ""));
        kernel.put("kernel/drivers/virtio/virtio_ring.ko.xz", &ring);
        let block = pack(Packer::Zstd, &module(RELEASE, "virtio,virtio_ring"));
        kernel.put("kernel/drivers/block/virtio_blk.ko.zst", &block);
        let random = pack(Packer::Gzip, &module(RELEASE, "virtio"));
        kernel.put("kernel/drivers/char/virtio-rng.ko.gz", &random);
        kernel.put("modules.builtin", b"kernel/fs/ext4/ext4.ko\n");
        fs::write(kernel.folder.path().join("agent"), forge::static_program()).unwrap();
        let image = bzimage(PACKERS[0], &kernel_elf(b"kernel", Some(1)), RELEASE);
        fs::write(kernel.folder.path().join("vmlinuz"), image).unwrap();
        kernel
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn fetched(&self) -> FetchedKernel {
        let source = KernelSource::Image {
            vmlinuz: self.folder.path().join("vmlinuz"),
            modules: Some(self.root.clone()),
            config: None,
        };
        fetch(&source, self.folder.path(), &mut |_| {}).unwrap()
    }

    fn make(&self, out: &Path) -> Result<parbake_kernels::BundleFiles, BundleError> {
        let spec = BundleSpec { drivers: DRIVERS, cmdline: "quiet" };
        make_with(&self.fetched(), &self.folder.path().join("agent"), &spec, out)
    }

    fn resolve(&self) -> Result<Vec<String>, ModuleError> {
        let modules = ModuleTree::open(&self.root)?.resolve(DRIVERS, RELEASE)?;
        Ok(modules.into_iter().map(|module| module.name).collect())
    }
}

#[test]
fn what_a_module_needs_comes_before_it_and_built_in_drivers_do_not_come_at_all() {
    let order = Kernel::new().resolve().unwrap();
    assert_eq!(order, ["virtio_ring", "virtio", "virtio_blk", "virtio_rng"]);
}

#[test]
fn missing_and_foreign_modules_are_refused_by_name() {
    let kernel = Kernel::new();
    fs::remove_file(kernel.root.join("kernel/drivers/block/virtio_blk.ko.zst")).unwrap();
    let error = kernel.resolve().unwrap_err().to_string();
    assert!(error.contains("lacks the driver virtio_blk (CONFIG_VIRTIO_BLK)"), "{error}");

    let kernel = Kernel::new();
    fs::remove_file(kernel.root.join("kernel/drivers/virtio/virtio_ring.ko.xz")).unwrap();
    let error = kernel.resolve().unwrap_err().to_string();
    assert!(error.contains("depends on virtio_ring"), "{error}");

    let kernel = Kernel::new();
    kernel.put("kernel/drivers/virtio/virtio.ko", &module("5.10.0", "virtio_ring"));
    let error = kernel.resolve().unwrap_err().to_string();
    assert!(error.contains("virtio was built for 5.10.0"), "{error}");

    let kernel = Kernel::new();
    kernel.put("kernel/drivers/virtio/virtio.ko", &module(RELEASE, "virtio_blk"));
    assert!(matches!(kernel.resolve(), Err(ModuleError::Circular(_))));

    let kernel = Kernel::new();
    kernel.put("kernel/drivers/virtio/virtio.ko", b"\x7fELF and then nothing");
    assert!(matches!(kernel.resolve(), Err(ModuleError::NotAModule { .. })));
}

#[test]
fn without_a_module_tree_only_the_configuration_can_vouch_for_a_driver() {
    let kernel = Kernel::new();
    let config = kernel.folder.path().join("config");
    fs::write(&config, "CONFIG_VIRTIO_BLK=y\nCONFIG_EXT4_FS=y\nCONFIG_HW_RANDOM_VIRTIO=m\n")
        .unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut fetched = kernel.fetched();
    fetched.modules = None;
    fetched.config = Some(config.clone());
    let agent = kernel.folder.path().join("agent");
    let spec = BundleSpec { drivers: DRIVERS, cmdline: "quiet" };
    let error = make_with(&fetched, &agent, &spec, out.path()).unwrap_err().to_string();
    assert!(error.contains("virtio_rng"), "{error}");
    fs::write(&config, "CONFIG_VIRTIO_BLK=y\nCONFIG_EXT4_FS=y\nCONFIG_HW_RANDOM_VIRTIO=y\n")
        .unwrap();
    let bundle = make_with(&fetched, &agent, &spec, out.path()).unwrap();
    assert!(bundle.facts.modules.is_empty());
    assert_eq!(bundle.facts.config["CONFIG_EXT4_FS"], "y");
    assert_eq!(bundle.facts.config["CONFIG_VMGENID"], "n");
}

#[test]
fn a_dynamic_agent_is_refused() {
    let kernel = Kernel::new();
    fs::write(kernel.folder.path().join("agent"), forge::dynamic_program()).unwrap();
    let out = tempfile::tempdir().unwrap();
    assert!(matches!(kernel.make(out.path()), Err(BundleError::Agent(_))));
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn the_same_input_gives_the_same_bytes_elsewhere_and_later() {
    let (first, second) = (Kernel::new(), Kernel::new());
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    let agent = fs::File::options().write(true).open(second.folder.path().join("agent")).unwrap();
    agent.set_modified(old).unwrap();
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = first.make(here.path()).unwrap();
    let second = second.make(there.path()).unwrap();
    assert_eq!(first.facts, second.facts);
    assert_eq!(fs::read(&first.initramfs).unwrap(), fs::read(&second.initramfs).unwrap());
    assert_eq!(fs::read(&first.vmlinux).unwrap(), fs::read(&second.vmlinux).unwrap());
}

/// The archive is what the reference reader takes it for.
#[test]
fn cpio_lists_the_archive() {
    let Ok(version) = std::process::Command::new("cpio").arg("--version").output() else {
        eprintln!("skipped: cpio is not installed (apt-get install cpio)");
        return;
    };
    assert!(version.status.success());
    let kernel = Kernel::new();
    let out = tempfile::tempdir().unwrap();
    let bundle = kernel.make(out.path()).unwrap();
    let archive = fs::File::open(&bundle.initramfs).unwrap();
    let listing = std::process::Command::new("cpio")
        .args(["-itv", "--quiet"])
        .env("TZ", "UTC")
        .env("LC_ALL", "C")
        .stdin(archive)
        .output()
        .unwrap();
    assert!(listing.status.success(), "{}", String::from_utf8_lossy(&listing.stderr));
    let listing = String::from_utf8(listing.stdout).unwrap();
    let lines: Vec<(&str, &str)> = listing
        .lines()
        .map(|line| (&line[..10], line.rsplit(' ').next().unwrap()))
        .filter(|(_, name)| name.contains('/') || *name == "init")
        .collect();
    assert_eq!(
        lines,
        [
            ("crw-------", "dev/console"),
            ("-rwxr-xr-x", "init"),
            ("-rw-r--r--", "modules/00-virtio_ring.ko"),
            ("-rw-r--r--", "modules/01-virtio.ko"),
            ("-rw-r--r--", "modules/02-virtio_blk.ko"),
            ("-rw-r--r--", "modules/03-virtio_rng.ko"),
        ]
    );
    assert!(listing.lines().all(|line| line.contains("Jan  1  1970")), "{listing}");
}

/// The distribution's own package: the real thing, when it can be had.
#[test]
fn debians_cloud_kernel_makes_a_bundle() {
    let work = tempfile::tempdir().unwrap();
    let source = match std::env::var_os("PARBAKE_TEST_KERNEL_DEB") {
        Some(path) => KernelSource::Deb(path.into()),
        None => KernelSource::default(),
    };
    let kernel = match fetch(&source, work.path(), &mut |_| {}) {
        Ok(kernel) => kernel,
        Err(error) => {
            eprintln!("skipped: no Debian kernel package to be had: {error}");
            return;
        }
    };
    let agent = work.path().join("agent");
    fs::write(&agent, forge::static_program()).unwrap();
    let bundle = make(&kernel, &agent, work.path()).unwrap();
    assert!(bundle.facts.package.starts_with("linux-image-"), "{}", bundle.facts.package);
    assert!(bundle.facts.release.ends_with("-amd64"), "{}", bundle.facts.release);
    assert_eq!(bundle.facts.config["CONFIG_PVH"], "y");
    for name in ["virtio_mmio", "virtio_blk", "vmw_vsock_virtio_transport", "virtio_net", "overlay"]
    {
        assert!(bundle.facts.modules.iter().any(|module| module == name), "{name}");
    }
    let position = |name| bundle.facts.modules.iter().position(|module| module == name).unwrap();
    assert!(position("virtio_ring") < position("virtio"));
    assert!(position("virtio") < position("virtio_mmio"));
    let vmlinux = parbake_kernels::payload::unpack(&fs::read(&bundle.vmlinux).unwrap()).unwrap();
    assert!(vmlinux.facts.pvh_entry.is_some());
    assert_eq!(vmlinux.release, bundle.facts.release);

    let spec = BundleSpec { drivers: parbake_kernels::modules::LAB, cmdline: "quiet" };
    let lab = make_with(&kernel, &agent, &spec, work.path()).unwrap();
    for name in ["virtio_pci", "virtiofs", "kvm_amd"] {
        assert!(lab.facts.modules.iter().any(|module| module == name), "{name}");
    }
}
