//! Where the programs are that must come from the same build: the monitor and the agent.

use std::path::{Path, PathBuf};

/// A program that was looked for in vain.
#[derive(Debug, thiserror::Error)]
#[error("{name} was not found beside {} nor in its ../libexec/parbake", beside.display())]
pub struct ProgramMissing {
    name: &'static str,
    beside: PathBuf,
}

/// `parbake-vmm`: `PARBAKE_VMM`, else beside the running program, else in `../libexec/parbake`.
pub fn vmm() -> Result<PathBuf, ProgramMissing> {
    find("parbake-vmm", "PARBAKE_VMM")
}

/// `parbake-agent`: `PARBAKE_AGENT`, else beside the running program, else in
/// `../libexec/parbake`.
pub fn agent() -> Result<PathBuf, ProgramMissing> {
    find("parbake-agent", "PARBAKE_AGENT")
}

fn find(name: &'static str, variable: &str) -> Result<PathBuf, ProgramMissing> {
    if let Some(path) = std::env::var_os(variable).filter(|value| !value.is_empty()) {
        return Ok(PathBuf::from(path));
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(Path::to_owned))
        .unwrap_or_else(|| PathBuf::from("/usr/bin"));
    [beside.join(name), beside.join("../libexec/parbake").join(name)]
        .into_iter()
        .find(|path| path.is_file())
        .ok_or(ProgramMissing { name, beside })
}
