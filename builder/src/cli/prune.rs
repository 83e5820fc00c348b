//! `parbake prune`: what nothing needs goes.

use parbake_builder::execute::{clear, disk_bytes};
use serde_json::json;

use super::build::build_directory;
use super::error::{Classify, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, output, steps};

/// Remove what nothing in the store needs, and shrink it to a limit
///
/// Templates keep their names. To get under the limit, snapshots and kernels that nobody uses are
/// given up, the least recently used first; both can be made again. What a running sandbox, build
/// or pull uses always stays.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How much disk space the store may take, e.g. 20GiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    keep_storage: Option<u64>,
    /// Forget what builds remember, too: steps, unpacked bases, cache mounts, downloads
    #[arg(long)]
    build_cache: bool,
    /// Only tell what would be freed
    #[arg(long)]
    dry_run: bool,
}

/// `20GiB`, `500M`, `1.5T`; a number alone is bytes, and all units are powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size; write e.g. 500MiB or 20GiB");
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or_else(wrong);
    }
    let value: f64 = number.parse().map_err(|_| wrong())?;
    #[allow(clippy::cast_precision_loss, reason = "a limit written with a fraction is not exact")]
    let bytes = value * (1u64 << shift) as f64;
    // 2^63 is far beyond any disk.
    if !(0.0..9.2e18).contains(&bytes) {
        return Err(wrong());
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    Ok(bytes as u64)
}

/// Collects, or tells what would be.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    let directory = build_directory(&store);
    if args.dry_run {
        let usage = store.usage().map_err(guest::store_error)?;
        let left = usage.disk_bytes - usage.reclaimable_bytes.min(usage.disk_bytes);
        let over = args.keep_storage.map_or(0, |keep| left.saturating_sub(keep));
        if context.json() {
            return output::json(&json!({
                "dryRun": true,
                "freedBytes": usage.reclaimable_bytes,
                "keptBytes": left,
                "toGiveUpBytes": over,
                "buildCacheBytes": args.build_cache.then(|| disk_bytes(&directory)),
            }));
        }
        output::line(&format!(
            "would free {} of {}",
            bytes(usage.reclaimable_bytes),
            bytes(usage.disk_bytes)
        ))?;
        if args.build_cache {
            let size = bytes(disk_bytes(&directory));
            output::line(&format!("would free {size} of the build cache"))?;
        }
        if over > 0 {
            output::line(&format!(
                "would give up unused snapshots and kernels, the least recently used first, for another {}",
                bytes(over)
            ))?;
        }
        return Ok(());
    }
    let cleared = match args.build_cache {
        true => Some(clear(&directory).map_err(steps::execute_error)?),
        false => None,
    };
    let report = store.collect(args.keep_storage).map_err(guest::store_error)?;
    if let Some(over) = report.over_quota_bytes {
        context.progress.note(&format!(
            "the store is still {} over the limit: all that is left has a name or is in use",
            bytes(over)
        ));
        context
            .progress
            .note("`parbake df` shows what each template takes, `parbake rm` removes one");
    }
    if context.json() {
        let mut report = serde_json::to_value(&report).kind(Kind::User)?;
        report["buildCacheFreedBytes"] = json!(cleared);
        return output::json(&report);
    }
    if let Some(cleared) = cleared {
        output::line(&format!("freed {} of the build cache", bytes(cleared)))?;
    }
    for digest in &report.evicted {
        context.progress.note(&format!("gave up {digest}"));
    }
    output::line(&format!("freed {}, kept {}", bytes(report.freed_bytes), bytes(report.kept_bytes)))
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1k", 1024),
            ("500MiB", 500 << 20),
            ("20GiB", 20 << 30),
            ("1.5 G", 3 << 29),
            ("2TB", 2 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "1x", "1.2.3M", "99999999999T", "nan", "inf"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
