//! `parbaked ps`, `inspect`, `stats`, `status`: looking.

use parbake_node::terminal::failure::{Classify, CliResult, Kind};
use parbake_node::terminal::output;
use parbake_service::feed::unix_ms;
use parbake_service::model::{NodeStatus, Sandbox, SandboxList, State, Stats};

use super::{Context, part, refused};

/// List the sandboxes, the paused ones among them
#[derive(Debug, clap::Args)]
pub struct PsArgs {
    /// Print ids only
    #[arg(short, long)]
    quiet: bool,
}

/// Show everything about sandboxes, isolation layers in force included
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The sandboxes
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
}

/// Show what sandboxes use
#[derive(Debug, clap::Args)]
pub struct StatsArgs {
    /// The sandboxes; none: all that run
    #[arg(value_name = "ID")]
    ids: Vec<String>,
}

/// Show the service's own state
#[derive(Debug, clap::Args)]
pub struct StatusArgs {}

/// Prints a table.
pub fn ps(context: &Context, args: &PsArgs) -> CliResult {
    let list: SandboxList = context.client()?.get("/v1/sandboxes").map_err(refused)?;
    if args.quiet {
        return list.sandboxes.iter().try_for_each(|sandbox| output::line(&sandbox.id));
    }
    if context.json() {
        return output::json(&list.sandboxes);
    }
    let now = unix_ms();
    let rows: Vec<Vec<String>> = list
        .sandboxes
        .iter()
        .map(|sandbox| {
            let left = sandbox.expires_unix_ms.map(|at| span(at.saturating_sub(now)));
            vec![
                sandbox.id.clone(),
                word(sandbox.state),
                sandbox.template.clone(),
                format!("{}x{}M", sandbox.cpus, sandbox.memory_mib),
                span(now.saturating_sub(sandbox.created_unix_ms)),
                left.unwrap_or_else(|| "-".to_owned()),
                sandbox.executions.to_string(),
            ]
        })
        .collect();
    output::table(&["ID", "STATE", "TEMPLATE", "MACHINE", "AGE", "LEFT", "EXECS"], &rows)
}

/// Prints documents.
pub fn inspect(context: &Context, args: &InspectArgs) -> CliResult {
    let client = context.client()?;
    let get = |id: &String| client.get(&format!("/v1/sandboxes/{}", part(id))).map_err(refused);
    let found: CliResult<Vec<Sandbox>> = args.ids.iter().map(get).collect();
    output::json(&found?)
}

/// Prints a table.
pub fn stats(context: &Context, args: &StatsArgs) -> CliResult {
    let client = context.client()?;
    let ids = if args.ids.is_empty() {
        let list: SandboxList = client.get("/v1/sandboxes").map_err(refused)?;
        let running = list.sandboxes.into_iter().filter(|s| s.state == State::Running);
        running.map(|sandbox| sandbox.id).collect()
    } else {
        args.ids.clone()
    };
    let get =
        |id: &String| client.get(&format!("/v1/sandboxes/{}/stats", part(id))).map_err(refused);
    let found: CliResult<Vec<Stats>> = ids.iter().map(get).collect();
    let found = found?;
    if context.json() {
        return output::json(&found);
    }
    let mib = |bytes: u64| format!("{:.1}M", bytes as f64 / f64::from(1 << 20));
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|stats| {
            vec![
                stats.id.clone(),
                span(stats.age_ms),
                format!("{:.1}s", stats.cpu_ms as f64 / 1000.0),
                mib(stats.memory_private_bytes),
                mib(stats.memory_proportional_bytes),
                mib(stats.disk_written_bytes),
                format!("{}/{}", stats.executions, stats.executions_total),
            ]
        })
        .collect();
    output::table(&["ID", "AGE", "CPU", "PRIVATE", "PROPORTIONAL", "WRITTEN", "EXECS"], &rows)
}

/// Prints a document.
pub fn status(context: &Context, _: &StatusArgs) -> CliResult {
    let status: NodeStatus = context.client()?.get("/v1/node").map_err(refused)?;
    if context.json() {
        return output::json(&status);
    }
    let state = if status.draining { "draining" } else { "serving" };
    output::line(&format!(
        "parbaked {} ({}), {state}: {} of {} sandboxes, store {}",
        status.version, status.pid, status.sandboxes, status.max_sandboxes, status.store
    ))?;
    if status.audit_lines == 0 {
        return Ok(());
    }
    output::line(&format!("audit log: {} lines, {}", status.audit_lines, status.audit_head))
}

/// A state's word, as in the API.
fn word(state: State) -> String {
    serde_json::to_value(state)
        .kind(Kind::Internal)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// Milliseconds for people.
fn span(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..=119 => format!("{seconds}s"),
        seconds @ 120..=7199 => format!("{}m", seconds / 60),
        seconds @ 7200..=172_799 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}
