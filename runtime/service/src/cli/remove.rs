//! `parbaked rm`.

use parbake_node::terminal::failure::{CliResult, Kind};
use parbake_node::terminal::output;
use parbake_service::model::SandboxList;

use super::{Context, part, refused};

/// Remove sandboxes, running or paused
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The sandboxes
    #[arg(value_name = "ID", required_unless_present = "all")]
    ids: Vec<String>,
    /// All of them
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// One that is not there is fine
    #[arg(short, long)]
    force: bool,
}

/// Removes each, and reports the first failure after having tried all.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let client = context.client()?;
    let ids = if args.all {
        let list: SandboxList = client.get("/v1/sandboxes").map_err(refused)?;
        list.sandboxes.into_iter().map(|sandbox| sandbox.id).collect()
    } else {
        args.ids.clone()
    };
    let mut failed = None;
    for id in ids {
        match client.delete(&format!("/v1/sandboxes/{}", part(&id))).map_err(refused) {
            Ok(()) => output::line(&id)?,
            Err(error) if error.kind == Kind::NotFound && (args.force || args.all) => {}
            Err(error) if failed.is_none() => failed = Some(error),
            Err(error) => error.print(context.json()),
        }
    }
    failed.map_or(Ok(()), Err)
}
