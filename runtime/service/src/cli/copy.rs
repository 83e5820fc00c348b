//! `parbaked fork`, `pause`, `resume`.

use parbake_node::terminal::failure::CliResult;
use parbake_node::terminal::output;
use parbake_service::model::{
    ForkRequest, PauseRequest, Paused, ResumeRequest, Sandbox, SandboxList,
};

use super::values::{CageArgs, RunArgs, pair};
use super::{Context, part, refused};

/// Make copies of a running sandbox
///
/// Copies share memory and disk with each other until they write; each has its own entropy and
/// identity. Processes that ran detached in the sandbox run in the copies, too.
#[derive(Debug, clap::Args)]
pub struct ForkArgs {
    /// The sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// How many copies
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: u8,
    #[command(flatten)]
    run: RunArgs,
    /// A word of your own to find them by
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    label: Vec<(String, String)>,
    /// End the commands that run in it
    #[arg(long)]
    end_sessions: bool,
    /// Copy its secrets along
    #[arg(long)]
    with_secrets: bool,
}

/// Write a sandbox into the store and end it
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// The sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// End the commands that run in it
    #[arg(long)]
    end_sessions: bool,
    /// Put its secrets into the store with it
    #[arg(long)]
    with_secrets: bool,
}

/// Let a paused sandbox go on
///
/// One that was paused on another node is named as it was pulled.
#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    /// The sandbox, or the template it was pulled as
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    cage: CageArgs,
    /// Keep it in the store, to go on from the same point again
    #[arg(long)]
    keep: bool,
}

/// Asks for copies, and prints their ids.
pub fn fork(context: &Context, args: &ForkArgs) -> CliResult {
    let request = ForkRequest {
        count: args.count,
        ttl_seconds: args.run.ttl_seconds(),
        env: args.run.env()?,
        secrets: args.run.secrets()?,
        labels: args.label.iter().cloned().collect(),
        end_sessions: args.end_sessions,
        with_secrets: args.with_secrets,
    };
    let path = format!("/v1/sandboxes/{}/fork", part(&args.id));
    let made: SandboxList = context.client()?.post(&path, &request, &[]).map_err(refused)?;
    if context.json() {
        return output::json(&made.sandboxes);
    }
    made.sandboxes.iter().try_for_each(|sandbox| output::line(&sandbox.id))
}

/// Asks for it, and prints the name in the store.
pub fn pause(context: &Context, args: &PauseArgs) -> CliResult {
    let request = PauseRequest { end_sessions: args.end_sessions, with_secrets: args.with_secrets };
    let path = format!("/v1/sandboxes/{}/pause", part(&args.id));
    let paused: Paused = context.client()?.post(&path, &request, &[]).map_err(refused)?;
    if context.json() { output::json(&paused) } else { output::line(&paused.template) }
}

/// Asks for it, and prints its id.
pub fn resume(context: &Context, args: &ResumeArgs) -> CliResult {
    let request = ResumeRequest {
        ttl_seconds: args.run.ttl_seconds(),
        env: args.run.env()?,
        secrets: args.run.secrets()?,
        egress: args.cage.egress(),
        limits: args.cage.limits(),
        keep: args.keep,
    };
    let path = format!("/v1/sandboxes/{}/resume", part(&args.id));
    let sandbox: Sandbox = context.client()?.post(&path, &request, &[]).map_err(refused)?;
    if context.json() { output::json(&sandbox) } else { output::line(&sandbox.id) }
}
