//! Values of options: durations, names with values, secrets.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use parbake_node::terminal::env;
use parbake_node::terminal::failure::{CliError, CliResult, Kind};
use parbake_service::model::Limits;

/// `90s`, `15m`, `2h`, `7d`, or seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&text[..at], unit),
        _ => (text, 's'),
    };
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err("a duration is a number with s, m, h or d".to_owned()),
    };
    let number: u64 =
        number.parse().map_err(|_| "a duration is a number with s, m, h or d".to_owned())?;
    match number.checked_mul(seconds) {
        Some(seconds @ 1..) => Ok(Duration::from_secs(seconds)),
        _ => Err("a duration is more than nothing".to_owned()),
    }
}

/// `NAME=VALUE`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("it is NAME=VALUE".to_owned()),
    }
}

/// What a sandbox may reach and use.
#[derive(Debug, clap::Args)]
pub struct CageArgs {
    /// What it may reach, e.g. allow=10.0.0.5:443,allow=packages.example:443, or none; absent: what
    /// the template says, else nothing
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    egress: Vec<String>,
    /// The most host memory, guest and monitor together, in MiB
    #[arg(long, value_name = "MIB")]
    host_memory: Option<u64>,
    /// The most processor time, in thousandths of a processor
    #[arg(long, value_name = "N")]
    cpu_milli: Option<u32>,
    /// Its share of the disks' time, 1 to 10000
    #[arg(long, value_name = "N")]
    io_weight: Option<u16>,
    /// The most processes and threads it may have inside
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    processes: Option<u32>,
    /// The most it may write to its disk, in MiB
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
}

impl CageArgs {
    /// What it may reach.
    pub fn egress(&self) -> Vec<String> {
        self.egress.clone()
    }

    /// What it may use.
    pub fn limits(&self) -> Limits {
        let bytes = |mib: u64| mib.saturating_mul(1 << 20);
        Limits {
            memory_bytes: self.host_memory.map(bytes),
            cpu_milli: self.cpu_milli,
            io_weight: self.io_weight,
            disk_bytes: self.disk.map(bytes),
            processes: self.processes,
        }
    }
}

/// What a sandbox is given for its run.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Set NAME=VALUE for every command; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Read NAME=VALUE lines from a file
    #[arg(long, value_name = "FILE")]
    env_file: Vec<PathBuf>,
    /// Put VALUE into /run/secrets/NAME; NAME alone takes the value from the environment here,
    /// which others cannot see
    #[arg(long, value_name = "NAME[=VALUE]")]
    secret: Vec<String>,
    /// Put a file's content into /run/secrets/NAME
    #[arg(long, value_name = "NAME=FILE", value_parser = pair)]
    secret_file: Vec<(String, String)>,
    /// Remove the sandbox after this time, e.g. 90s, 15m, 2h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    ttl: Option<Duration>,
}

impl RunArgs {
    /// The environment; entries that are not UTF-8 cannot be sent.
    pub fn env(&self) -> CliResult<BTreeMap<String, String>> {
        env::read(&self.env_file, &self.env)?.into_iter().map(text).collect()
    }

    /// The secrets.
    pub fn secrets(&self) -> CliResult<BTreeMap<String, String>> {
        let mut secrets = BTreeMap::new();
        for entry in &self.secret {
            let (name, value) = match entry.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.to_owned()),
                None => match std::env::var(entry) {
                    Ok(value) => (entry.clone(), value),
                    Err(_) => {
                        let message = format!("--secret {entry}: there is no such variable");
                        return Err(CliError::new(Kind::User, message));
                    }
                },
            };
            secrets.insert(name, value);
        }
        for (name, path) in &self.secret_file {
            let value = std::fs::read_to_string(path).map_err(|error| {
                CliError::new(Kind::User, format!("--secret-file {name}: {path}: {error}"))
            })?;
            secrets.insert(name.clone(), value);
        }
        Ok(secrets)
    }

    /// How long it is to live.
    pub fn ttl_seconds(&self) -> Option<u64> {
        self.ttl.map(|ttl| ttl.as_secs())
    }
}

/// An entry as a pair of names and values.
pub fn text(entry: Vec<u8>) -> CliResult<(String, String)> {
    let entry = String::from_utf8(entry).map_err(|error| {
        let shown = String::from_utf8_lossy(error.as_bytes()).into_owned();
        CliError::new(Kind::User, format!("the variable {shown:?} is not UTF-8"))
    })?;
    let (name, value) = entry.split_once('=').unwrap_or((&entry, ""));
    Ok((name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86_400)]
        {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in
            ["", "m", "1w", "-1s", "0", "1.5h", "99999999999999999999s", "9999999999999999d", "5é"]
        {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
