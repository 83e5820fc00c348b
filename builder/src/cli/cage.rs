//! What one sandbox may reach and use: the options every command has that makes one.

use std::sync::Arc;
use std::time::Duration;

use parbake_cache::template::TemplateManifest;
use parbake_node::event::Watch;
use parbake_node::limits::{CgroupPolicy, Limits};
use parbake_node::network::egress::Rule;
use parbake_node::network::{Egress, Pool, PoolOptions};
use parbake_node::sandbox::SandboxOptions;

use super::error::{CliError, CliResult, Kind};
use super::prune::size;

/// What one sandbox may reach and use.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CageArgs {
    /// What may be reached: `none`, or allow=DEST[:PORT[-PORT]][/tcp|udp|icmp] with an IPv4
    /// address, a network, a host name (also *.NAME) or *, several with commas; cloud metadata and
    /// this host only where they are named exactly [default: what the template says, else none]
    #[arg(long, value_name = "POLICY", value_parser = Egress::parse)]
    egress: Vec<Egress>,
    /// End the sandbox after this time, e.g. 15m
    #[arg(long, value_name = "TIME", value_parser = time)]
    ttl: Option<Duration>,
    /// The most the guest may write to its disk, e.g. 1GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk_limit: Option<u64>,
    /// The most processes and threads the guest may have
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    process_limit: Option<u32>,
    /// The most host memory the sandbox may use; absent: what a machine of its shape can need
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory_limit: Option<u64>,
    /// Processor time the sandbox may use, in processors, e.g. 0.5
    #[arg(long, value_name = "N", value_parser = processors)]
    cpu_limit: Option<u32>,
    /// Do not start where the host cannot hold the sandbox to its limits (no cgroups)
    #[arg(long)]
    require_limits: bool,
}

impl CageArgs {
    /// What was asked for; where nothing was, what the template says.
    fn egress(&self, template: &TemplateManifest) -> CliResult<Egress> {
        if self.egress.is_empty() && !template.egress.is_empty() {
            return Egress::parse(&template.egress.join(",")).map_err(|error| {
                CliError::new(Kind::Sandbox, format!("the template's network policy: {error}"))
                    .hint("--egress says what this sandbox may reach instead")
            });
        }
        let rules: Vec<Rule> =
            self.egress.iter().flat_map(|egress| egress.rules.iter().cloned()).collect();
        Ok(Egress { rules })
    }

    /// Puts the options into a sandbox's.
    pub fn apply(
        &self,
        template: &TemplateManifest,
        options: &mut SandboxOptions,
    ) -> CliResult<Watch> {
        options.egress = self.egress(template)?;
        options.limits = Limits {
            memory_bytes: self.memory_limit,
            cpu_milli: self.cpu_limit,
            disk_bytes: self.disk_limit,
            guest_processes: self.process_limit,
            lifetime: self.ttl,
            cgroup: if self.require_limits {
                CgroupPolicy::Required
            } else {
                CgroupPolicy::IfPossible
            },
            ..Limits::default()
        };
        if !options.egress.is_none() {
            // It is made while the snapshot is looked for.
            let pool = Pool::new(PoolOptions { ready: 1, most: 1, ..PoolOptions::default() });
            let pool = pool.map_err(|error| CliError::new(Kind::Sandbox, error))?;
            options.network_pool = Some(Arc::new(pool));
        }
        let (sender, watch) = Watch::new();
        options.events = Some(sender);
        Ok(watch)
    }
}

/// Reads a time such as `30s`, `15m`, `2h`, `500ms`; a bare number is seconds.
pub fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time; write e.g. 30s, 15m or 2h");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let millis = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(wrong()),
    };
    let millis = number.checked_mul(millis).filter(|&millis| millis > 0).ok_or_else(wrong)?;
    Ok(Duration::from_millis(millis))
}

fn processors(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is not a number of processors from 0.01 to 1024");
    let number: f64 = text.parse().map_err(|_| wrong())?;
    if !(0.01..=1024.0).contains(&number) {
        return Err(wrong());
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok((number * 1000.0).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(egress: &[&str]) -> TemplateManifest {
        let empty = serde_json::json!({
            "digest": format!("sha256:{}", "0".repeat(64)), "size": 0,
        });
        serde_json::from_value(serde_json::json!({
            "schemaVersion": 1, "architecture": "amd64", "rootfs": empty, "kernel": empty,
            "process": {}, "machine": { "vcpus": 1, "memoryMib": 64 },
            "source": { "reference": "x" }, "egress": egress,
        }))
        .unwrap()
    }

    #[test]
    fn who_says_something_is_not_told_by_the_template() {
        let says = |options: &[&str], rules: &[&str]| {
            let egress = options.iter().map(|text| Egress::parse(text).unwrap()).collect();
            let cage = CageArgs { egress, ..CageArgs::default() };
            cage.egress(&template(rules)).map(|egress| egress.to_string())
        };
        assert_eq!(says(&[], &[]).unwrap(), "none");
        let of_template = "allow=a.example:443,allow=10.0.0.0/8";
        assert_eq!(says(&[], &["a.example:443", "10.0.0.0/8"]).unwrap(), of_template);
        assert_eq!(says(&["none"], &["a.example:443"]).unwrap(), "none");
        assert_eq!(says(&["allow=10.0.0.5"], &["*"]).unwrap(), "allow=10.0.0.5");
        assert!(says(&[], &["nonsense"]).unwrap_err().to_string().contains("network policy"));
    }

    #[test]
    fn times_and_processors_are_read() {
        let table =
            [("30s", 30_000), ("30", 30_000), ("15m", 900_000), ("2h", 7_200_000), ("5ms", 5)];
        for (text, millis) in table {
            assert_eq!(time(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "-1s", "0", "1y", "1.5s", "99999999999999999999h"] {
            assert!(time(text).is_err(), "{text:?}");
        }
        assert_eq!(processors("0.5"), Ok(500));
        for text in ["0", "-1", "many", "NaN", "inf"] {
            assert!(processors(text).is_err(), "{text:?}");
        }
    }
}
