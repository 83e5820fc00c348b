//! `parbaked events` and `logs`: what streams out.

use std::io::{self, BufRead, BufReader, Write};

use parbake_node::terminal::failure::{Classify, CliError, CliResult, Kind};
use parbake_node::terminal::output;
use parbake_service::model::Event;

use super::{Context, part, refused};

/// Show what happened, and with --follow what happens
#[derive(Debug, clap::Args)]
pub struct EventsArgs {
    /// Go on with those to come
    #[arg(short, long)]
    follow: bool,
    /// Only those with a higher number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    since: u64,
}

/// Show a sandbox's console
#[derive(Debug, clap::Args)]
pub struct LogsArgs {
    /// Go on as it grows
    #[arg(short, long)]
    follow: bool,
    /// What its monitor said, in place of the console
    #[arg(long)]
    monitor: bool,
    /// The sandbox
    #[arg(value_name = "ID")]
    id: String,
}

/// Prints a line each.
pub fn events(context: &Context, args: &EventsArgs) -> CliResult {
    let client = context.client()?;
    let path = format!("/v1/events?follow={}&since={}", args.follow, args.since);
    let answer = client.read(hyper::Method::GET, &path, None).map_err(refused)?;
    for line in BufReader::new(answer).lines() {
        let line = line.kind(Kind::Host)?;
        if context.json() {
            output::line(&line)?;
            continue;
        }
        let event: Event = serde_json::from_str(&line).kind(Kind::Internal)?;
        output::line(&format!(
            "{} {} {} {} {}",
            event.sequence,
            event.unix_ms,
            event.sandbox.as_deref().unwrap_or("-"),
            event.kind,
            event.detail
        ))?;
    }
    if args.follow {
        return Err(CliError::new(Kind::Host, "parbaked ended"));
    }
    Ok(())
}

/// Prints it as it is, but for what a terminal might obey.
pub fn logs(context: &Context, args: &LogsArgs) -> CliResult {
    use std::io::{IsTerminal, Read};
    let client = context.client()?;
    let id = part(&args.id);
    let path = format!("/v1/sandboxes/{id}/logs?follow={}&monitor={}", args.follow, args.monitor);
    let mut answer = client.read(hyper::Method::GET, &path, None).map_err(refused)?;
    let mut stdout = io::stdout().lock();
    let careful = stdout.is_terminal();
    let mut buffer = vec![0; 16 << 10];
    loop {
        let count = answer.read(&mut buffer).kind(Kind::Host)?;
        if count == 0 {
            return Ok(());
        }
        let bytes = &mut buffer[..count];
        if careful {
            for byte in &mut *bytes {
                if byte.is_ascii_control() && !matches!(byte, b'\n' | b'\r' | b'\t') {
                    *byte = b'?';
                }
            }
        }
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written.kind(Kind::User)?,
        }
    }
}
