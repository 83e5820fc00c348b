//! The programs under test from the outside: where they are, and what must come back.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The programs of one build, and an image to make templates from.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The directory with the programs (`PARBAKE_BIN`).
    pub bin: PathBuf,
    /// An OCI layout (`PARBAKE_IMAGE`).
    pub image: PathBuf,
}

impl Programs {
    /// Those that the environment names, or `None` with the reason on stdout. `make e2e` names them.
    #[must_use]
    pub fn find() -> Option<Self> {
        let (Some(bin), Some(image)) =
            (std::env::var_os("PARBAKE_BIN"), std::env::var_os("PARBAKE_IMAGE"))
        else {
            println!("skipped: PARBAKE_BIN and PARBAKE_IMAGE are not set (use `make e2e`)");
            return None;
        };
        Some(Self { bin: bin.into(), image: image.into() })
    }

    /// The same, for what only root can do.
    #[must_use]
    pub fn find_as_root() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: this needs root");
            return None;
        }
        Self::find()
    }

    /// `parbake` with a store, and with nothing else of the caller's environment that it heeds.
    #[must_use]
    pub fn parbake(&self, store: &Path) -> Command {
        let mut command = Command::new(self.bin.join("parbake"));
        command.env("PARBAKE_STORE", store).stdin(Stdio::null());
        for name in ["PARBAKE_HOST", "PARBAKE_PROGRESS", "SOURCE_DATE_EPOCH"] {
            command.env_remove(name);
        }
        command
    }

    /// The image as `--from` and `FROM` take it.
    #[must_use]
    pub fn from(&self) -> String {
        format!("oci:{}", self.image.display())
    }

    /// What `doctor` says of this host.
    ///
    /// # Panics
    /// When it says nothing.
    #[must_use]
    pub fn doctor(&self, store: &Path) -> Value {
        let output = self.parbake(store).args(["doctor", "--format", "json"]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Whether guests run here or in the lab; says so if not.
    #[must_use]
    pub fn can_run_guests(&self, store: &Path) -> bool {
        let doctor = self.doctor(store);
        let able = doctor["able"] == true;
        if !able {
            println!("skipped: this host can run no guests: {doctor}");
        }
        able
    }

    /// Whether guests run here, not in the lab.
    #[must_use]
    pub fn kvm_is_usable(&self, store: &Path) -> bool {
        self.doctor(store)["host"]["kvmUsable"] == true
    }
}

/// Demands success; trimmed stdout comes back.
///
/// # Panics
/// When it failed, with all it said.
pub fn succeeded(output: &Output, what: &str) -> String {
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{what}\nended with {:?}: {stdout}{}",
        output.status.code(),
        String::from_utf8_lossy(&output.stderr)
    );
    stdout.trim().to_owned()
}

/// Demands this exit code and every one of these words on stderr, which comes back.
///
/// # Panics
/// When it is not so.
pub fn failed(output: &Output, what: &str, code: i32, words: &[&str]) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{what}: {stderr}");
    // Or, for programs, a document.
    let said = stderr.contains("error: ") || stderr.contains("{\"error\"");
    assert!(said, "{what}: no error line: {stderr}");
    for word in words {
        assert!(stderr.contains(word), "{what}: {word:?} is not in: {stderr}");
    }
    stderr
}
