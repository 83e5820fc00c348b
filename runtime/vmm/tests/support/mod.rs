//! The host's side of a monitor: starts the real binary, speaks the control channel, assembles
//! bare guests.
#![allow(dead_code, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

use parbake_protocol::vmm::{Jail, Start, VmmConfig};

mod channel;
pub use channel::{Monitor, Snapshot};

pub mod number {
    pub const RESTORED: u32 = 0x1001;
    pub const NONCE: u32 = 0x8000_0000;
    pub const TICKS: u32 = 0x4000_0000;
    pub const BEAT: u32 = 0x2000_0000;
}

/// A guest from `tests/guests`, assembled once per test program.
pub fn guest(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/guests");
    let out = tempfile::Builder::new()
        .prefix(name)
        .suffix(".elf")
        .tempfile_in(env!("CARGO_TARGET_TMPDIR"))
        .expect("temporary file")
        .into_temp_path()
        .keep()
        .expect("keep");
    let mut inputs = vec![sources.join(format!("{name}.S"))];
    let c = sources.join(format!("{name}.c"));
    let object = tempfile::Builder::new().suffix(".s").tempfile().expect("temporary file");
    if c.exists() {
        // 32-bit code for a 64-bit image: the compiler's text, assembled with the rest.
        let output = Command::new("cc")
            .args(["-m32", "-O1", "-S", "-ffreestanding", "-fno-pic", "-fno-stack-protector"])
            .args([
                "-mgeneral-regs-only",
                "-fno-asynchronous-unwind-tables",
                "-fcf-protection=none",
            ])
            .args(["-Wall", "-Wextra", "-Werror", "-o", "-"])
            .arg(&c)
            .output()
            .expect("cc (package gcc) compiles the bare guests");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = [b".code32\n".as_slice(), &output.stdout].concat();
        std::fs::write(object.path(), text).expect("assembly");
        inputs.push(object.path().into());
    }
    let status = Command::new("cc")
        .current_dir(&sources)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noexecstack"])
        .args(["-Wl,--no-warn-rwx-segments", "-I.", "-T", "guest.ld", "-o"])
        .arg(&out)
        .args(&inputs)
        .status()
        .expect("cc (package gcc) assembles the bare guests");
    assert!(status.success(), "assembling {name}");
    out
}

/// Why bare guests cannot run here, if so.
pub fn skip_reason() -> Option<String> {
    match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => None,
        Err(e) => Some(format!("/dev/kvm cannot be opened: {e}")),
    }
}

#[macro_export]
macro_rules! needs_kvm {
    () => {
        if let Some(reason) = support::skip_reason() {
            eprintln!("skipped: {reason}");
            return;
        }
    };
}

pub fn binary() -> PathBuf {
    std::env::var_os("PARBAKE_VMM")
        .map_or_else(|| env!("CARGO_BIN_EXE_parbake-vmm").into(), Into::into)
}

pub fn open_jail() -> Jail {
    Jail { seccomp: false, landlock: false, namespaces: false, user: None }
}

pub fn boot(kernel: &Path, memory_mib: u32) -> VmmConfig {
    VmmConfig {
        version: parbake_protocol::vmm::VERSION,
        vcpus: 1,
        memory_mib,
        start: Start::Boot { kernel: kernel.into(), initramfs: None, cmdline: String::new() },
        disks: vec![],
        vsock: None,
        net: None,
        rng: false,
        console: None,
        console_limit: 1 << 20,
        lifetime_ms: None,
        control: None,
        jail: Jail::default(),
        filling: None,
        workspace: None,
    }
}

pub fn restore(of: &VmmConfig, snapshot: &Snapshot) -> VmmConfig {
    let mut generation_id = [0; 16];
    std::io::Read::read_exact(
        &mut std::fs::File::open("/dev/urandom").expect("urandom"),
        &mut generation_id,
    )
    .expect("random");
    VmmConfig {
        start: Start::Restore {
            state: snapshot.state.clone(),
            memory: snapshot.memory.clone(),
            difference: None,
            generation_id,
            paused: false,
        },
        disks: of
            .disks
            .iter()
            .zip(&snapshot.disks)
            .map(|(disk, overlay)| parbake_protocol::vmm::Disk {
                overlay: Some(overlay.clone()),
                ..disk.clone()
            })
            .collect(),
        ..of.clone()
    }
}

/// Starts the monitor this test was built with.
pub fn spawn(config: &VmmConfig) -> Monitor {
    Monitor::spawn_binary(&binary(), config)
}
