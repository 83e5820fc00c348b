//! `parbake doctor`: what this host can do, what is missing, and how to mend it.

use parbake_host::probe::{self, State};
use serde_json::json;

use super::error::CliResult;
use super::{Context, guest, output};

/// Show what this host can do, what is missing, and how to mend it
///
/// Exits with 0 if guests can run, natively or in the lab, and with 7 otherwise.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Probes and prints.
pub fn run(context: &Context, _args: &Args) -> CliResult<u8> {
    let report = probe::probe(&context.store_root(), guest::LAB_MEMORY_MIB);
    let programs = [
        ("parbake-vmm", parbake_node::programs::vmm()),
        ("parbake-agent", parbake_node::programs::agent()),
    ];
    let complete = programs.iter().all(|(_, found)| found.is_ok());
    let able = (report.kvm_usable || report.lab_usable) && complete;
    let code = if able { 0 } else { 7 };
    if context.json() {
        let programs: serde_json::Map<_, _> = programs
            .iter()
            .map(|(name, found)| ((*name).to_owned(), json!(found.as_ref().ok())))
            .collect();
        output::json(&json!({ "host": report, "programs": programs, "able": able }))?;
        return Ok(code);
    }
    for item in &report.items {
        match &item.state {
            State::Ok { detail } => output::line(&format!("ok       {}: {detail}", item.title))?,
            State::Missing { why, fix } => {
                output::line(&format!(
                    "missing  {}: {why}  (for {})",
                    item.title, item.needed_for
                ))?;
                output::line(&format!("         {fix}"))?;
            }
        }
    }
    for (name, found) in &programs {
        match found {
            Ok(path) => output::line(&format!("ok       {name}: {}", path.display()))?,
            Err(error) => output::line(&format!("missing  {error}"))?,
        }
    }
    output::line("")?;
    output::line(if !complete {
        "Templates can be neither built nor run: programs of this build are missing."
    } else if report.kvm_usable {
        "Sandboxes run natively on this host."
    } else if report.lab_usable {
        "Building works natively. Sandboxes run in the lab, an emulated KVM host that starts by \
         itself; its times are not a real host's."
    } else {
        "Building works. Sandboxes cannot run: mend what is missing for KVM or for the lab."
    })?;
    Ok(code)
}
