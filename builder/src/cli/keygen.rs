//! `parbake keygen`: a pair of keys to sign templates with.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use parbake_cache::keys::{KeyKind, SigningKey};
use serde_json::json;

use super::error::{CliError, CliResult, Kind};
use super::{Context, output};

/// Make a pair of keys to sign templates with
///
/// The private key is not encrypted, and readable by this user only. Keys made by `openssl genpkey`
/// will do as well.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where to write the private key; the public one gets .pub instead of its extension
    #[arg(short, long, value_name = "FILE", default_value = "parbake.pem")]
    output: PathBuf,
    /// Which kind
    #[arg(long, value_name = "KIND", default_value = "p256")]
    kind: Choice,
}

/// `--kind`.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Choice {
    /// ECDSA on P-256, which all of sigstore's tools read.
    P256,
    /// Ed25519.
    Ed25519,
}

/// Makes both files, or none.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let user = |error: &dyn std::fmt::Display| CliError::new(Kind::User, error.to_string());
    let kind = match args.kind {
        Choice::P256 => KeyKind::P256,
        Choice::Ed25519 => KeyKind::Ed25519,
    };
    let key = SigningKey::generate(kind).map_err(|error| user(&error))?;
    let public = args.output.with_extension("pub");
    let pem = key.public().to_pem().map_err(|error| user(&error))?;
    write(&public, &pem, 0o644)?;
    let written =
        key.to_pem().map_err(|error| user(&error)).and_then(|pem| write(&args.output, &pem, 0o600));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&public);
        return Err(error);
    }
    if context.json() {
        return output::json(&json!({
            "private": args.output,
            "public": public,
            "keyHint": key.public().hint(),
        }));
    }
    output::line(&public.display().to_string())
}

fn write(path: &Path, text: &str, mode: u32) -> CliResult {
    let file = File::options().write(true).create_new(true).mode(mode).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
        CliError::new(Kind::User, format!("cannot write {}: {error}", path.display()))
    })
}
