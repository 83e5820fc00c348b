//! `--workspace` of commands that make a sandbox.

use std::path::PathBuf;

use parbake_node::sandbox::SandboxOptions;
use parbake_node::workspace::{self, Workspace};

use super::Context;
use super::error::{CliError, CliResult, Kind};
use super::prune::size;

/// A volume that outlives the sandbox.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct WorkspaceArgs {
    /// A volume that outlives the sandbox, for one at a time: a name, kept beside the store, or a
    /// path with a slash in it; made when there is none
    #[arg(long, value_name = "NAME|FILE")]
    workspace: Option<String>,
    /// How large a new workspace is, e.g. 10GiB; absent: 1 GiB
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "workspace")]
    workspace_size: Option<u64>,
    /// Where the workspace is in the guest
    #[arg(long, value_name = "DIR", default_value = workspace::PATH, requires = "workspace")]
    workspace_path: String,
}

impl WorkspaceArgs {
    /// Puts the workspace into a sandbox's options, and makes it first if there is none.
    pub fn apply(&self, context: &Context, options: &mut SandboxOptions) -> CliResult {
        let Some(wanted) = &self.workspace else { return Ok(()) };
        let wrong = |error| CliError::new(Kind::Usage, error);
        workspace::check_path(&self.workspace_path).map_err(wrong)?;
        let file = if wanted.contains('/') {
            PathBuf::from(wanted)
        } else {
            let directory = context.store()?.root().join(workspace::DIRECTORY);
            workspace::named(&directory, wanted).map_err(wrong)?
        };
        let file = std::path::absolute(&file).unwrap_or(file);
        let bytes = self.workspace_size.unwrap_or(workspace::SIZE);
        let made =
            workspace::ensure(&file, bytes).map_err(|error| CliError::new(Kind::Sandbox, error))?;
        if made {
            context.progress.note(&format!("made the workspace {}", file.display()));
        }
        options.workspace = Some(Workspace { file, path: self.workspace_path.clone() });
        Ok(())
    }
}
