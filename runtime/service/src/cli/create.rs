//! `parbaked create`.

use parbake_node::terminal::failure::CliResult;
use parbake_node::terminal::output;
use parbake_service::model::{CreateRequest, Sandbox, WorkspaceRequest};

use super::values::{CageArgs, RunArgs, pair};
use super::{Context, refused};

/// Make a sandbox from a baked template
///
/// Restores the template's snapshot as a machine of its own and prints its id. It lives until its
/// time is up or it is removed, whatever becomes of the service.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The template: a name or a digest
    #[arg(value_name = "TEMPLATE")]
    template: String,
    /// Virtual CPUs; there must be a snapshot for it
    #[arg(long, value_name = "N")]
    cpus: Option<u8>,
    /// Guest memory in MiB; there must be a snapshot for it
    #[arg(long, value_name = "MIB")]
    memory: Option<u32>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    cage: CageArgs,
    /// A volume that outlives the sandbox, for one at a time; made when there is none
    #[arg(long, value_name = "NAME")]
    workspace: Option<String>,
    /// How large a new workspace is, in MiB; absent: 1024
    #[arg(long, value_name = "MIB", requires = "workspace")]
    workspace_size: Option<u64>,
    /// Where the workspace is in the guest; absent: /workspace
    #[arg(long, value_name = "DIR", requires = "workspace")]
    workspace_path: Option<String>,
    /// The guest's host name
    #[arg(long, value_name = "NAME")]
    hostname: Option<String>,
    /// A word of your own to find it by
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    label: Vec<(String, String)>,
    /// Make the request safe to repeat: the same KEY again finds the same sandbox
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
}

/// Asks for it.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let request = CreateRequest {
        template: args.template.clone(),
        cpus: args.cpus,
        memory_mib: args.memory,
        ttl_seconds: args.run.ttl_seconds(),
        hostname: args.hostname.clone(),
        env: args.run.env()?,
        secrets: args.run.secrets()?,
        labels: args.label.iter().cloned().collect(),
        egress: args.cage.egress(),
        limits: args.cage.limits(),
        workspace: args.workspace.as_ref().map(|name| WorkspaceRequest {
            name: name.clone(),
            size_bytes: args.workspace_size.map(|mib| mib.saturating_mul(1 << 20)),
            path: args.workspace_path.clone(),
        }),
    };
    let headers: Vec<(&str, &str)> =
        args.idempotency_key.iter().map(|key| ("idempotency-key", key.as_str())).collect();
    let sandbox: Sandbox =
        context.client()?.post("/v1/sandboxes", &request, &headers).map_err(refused)?;
    if context.json() { output::json(&sandbox) } else { output::line(&sandbox.id) }
}
