//! What the end-to-end tests and benchmarks share: a sandbox from a store, and running in it.
#![forbid(unsafe_code)]

pub mod programs;

use std::sync::Arc;
use std::time::Duration;

use parbake_builder::assemble;
use parbake_builder::bake::{self, BakeOptions, Baked};
use parbake_builder::image::{self, ImageOptions, ImageSource};
use parbake_builder::template::Template;
use parbake_cache::Store;
use parbake_cache::template::{MachineShape, SnapshotManifest};
use parbake_node::sandbox::{Sandbox, SandboxOptions};
use parbake_protocol::agent::{ExecRequest, Output};

/// Any failure, with its causes in one line.
pub type Failed = Box<dyn std::error::Error>;

/// A store and the template under test.
#[derive(Debug)]
pub struct Fixture {
    /// The store.
    pub store: Store,
    /// The template.
    pub template: Template,
}

impl Fixture {
    /// Opens `store` and finds `template` in it.
    ///
    /// # Errors
    /// What the store says.
    pub fn open(store: &std::path::Path, template: &str) -> Result<Self, Failed> {
        let store = Store::open(store)?;
        let template = Template::find(&store, template)?;
        Ok(Self { store, template })
    }

    /// The template's shape with another number of vCPUs.
    #[must_use]
    pub fn shape(&self, vcpus: u8) -> MachineShape {
        MachineShape { vcpus, ..self.template.manifest.machine }
    }

    /// Boots cold.
    ///
    /// # Errors
    /// What the sandbox says.
    pub fn boot(&self, shape: MachineShape) -> Result<Sandbox, Failed> {
        let files = self.template.boot_files(&self.store)?;
        let process = &self.template.manifest.process;
        Ok(Sandbox::boot(&files, shape, process, &Self::options())?)
    }

    /// Bakes a snapshot of `shape`.
    ///
    /// # Errors
    /// What the bake says.
    pub fn bake(&self, shape: MachineShape) -> Result<Baked, Failed> {
        let options = BakeOptions { machine: Some(shape), sandbox: Self::options(), patience: 1 };
        Ok(bake::bake(&self.store, &self.template, &options, |_| {})?)
    }

    /// Restores a snapshot.
    ///
    /// # Errors
    /// What the sandbox says.
    pub fn restore(&self, snapshot: &SnapshotManifest) -> Result<Sandbox, Failed> {
        let files = self.template.restore_files(&self.store, snapshot)?;
        Ok(Sandbox::restore(&files, snapshot.machine, &Self::options())?)
    }

    /// Options for slow hosts.
    #[must_use]
    pub fn options() -> SandboxOptions {
        SandboxOptions { ready_timeout: Duration::from_secs(120), ..Default::default() }
    }
}

/// Builds the root filesystem of an OCI layout's image into `out`.
///
/// # Errors
/// What the build says.
pub fn build_rootfs(layout: &std::path::Path, out: &std::path::Path) -> Result<(), Failed> {
    let source = ImageSource::OciLayout { path: layout.to_owned(), reference: None };
    let image = image::open(&source, &ImageOptions::default(), &mut |_| {})?;
    assemble::build_rootfs(&image, out, 64 << 20, &Arc::default(), |_| {}, |_| {})?;
    Ok(())
}

/// Runs a shell command in a sandbox and returns what it wrote and how it ended.
///
/// # Errors
/// What the sandbox or the agent says.
pub fn sh(sandbox: &mut Sandbox, script: &str) -> Result<Output, Failed> {
    let session = sandbox.connect()?.exec(ExecRequest::new(["sh", "-c", script]))?;
    Ok(session.wait_with_output(64 << 20)?)
}

/// As [`sh`], for a command that must succeed; returns its trimmed standard output.
///
/// # Errors
/// As [`sh`], and when the command fails.
pub fn says(sandbox: &mut Sandbox, script: &str) -> Result<String, Failed> {
    let output = sh(sandbox, script)?;
    if output.exit.code != Some(0) {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{script:?} ended with {:?}: {stderr}", output.exit).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The value at quantile `q` (0 to 1) of `values`, which are sorted on the way; NaN for none.
#[must_use]
pub fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into a short slice"
    )]
    let index = (q * (values.len().saturating_sub(1)) as f64).round() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantiles_of_a_short_list() {
        let mut values = [3.0, 1.0, 2.0];
        assert_eq!(quantile(&mut values, 0.5), 2.0);
        assert_eq!(quantile(&mut values, 0.99), 3.0);
        assert!(quantile(&mut [], 0.5).is_nan());
    }
}
