//! `parbake kernel`: the kernel bundles in the store.

use parbake_builder::kernel::{self, KernelChoice, KernelError};
use parbake_cache::template::KernelBundle;
use parbake_kernels::{FetchError, PackageError};
use serde_json::json;

use super::error::{Classify, CliError, CliResult, Kind};
use super::progress::bytes;
use super::{Context, guest, output};

/// List, fetch and remove kernel bundles
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// List the kernel bundles in the store
    Ls,
    /// Fetch a kernel and make its bundle, even if the store has one of that name
    Fetch {
        /// NAME[=VERSION] of a package, deb:PATH or image:PATH
        #[arg(value_name = "KERNEL", default_value_t)]
        kernel: KernelChoice,
    },
}

/// Does what was asked.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let store = context.store()?;
    match &args.verb {
        Verb::Fetch { kernel: choice } => {
            let mut step = context.progress.step(format!("kernel {choice}"));
            let bundle = kernel::ensure(&store, choice, true, |detail| step.update(detail))
                .map_err(kernel_error)?;
            step.done(bundle.digest.short());
            output::line(&bundle.digest.to_string())
        }
        Verb::Ls => {
            let mut rows = Vec::new();
            let mut documents = Vec::new();
            for (key, digest) in store.kernels().kind(Kind::User)? {
                let bundle: KernelBundle = store.get_json(&digest).map_err(guest::store_error)?;
                rows.push(vec![
                    bundle.package.clone(),
                    bundle.version.clone(),
                    bundle.release.clone(),
                    digest.short(),
                    bytes(bundle.vmlinux.size),
                    bytes(bundle.initramfs.size),
                ]);
                documents.push(json!({ "key": key, "digest": digest, "bundle": bundle }));
            }
            if context.json() {
                return output::json(&documents);
            }
            output::table(
                &["PACKAGE", "VERSION", "RELEASE", "DIGEST", "KERNEL", "INITRAMFS"],
                &rows,
            )
        }
    }
}

/// A kernel's failure, with its exit code and the way out.
pub fn kernel_error(error: KernelError) -> CliError {
    let kind = match &error {
        KernelError::Fetch(FetchError::Package(package)) => match package {
            PackageError::NotFound { .. } => Kind::NotFound,
            PackageError::NoClient { .. } => Kind::Host,
            PackageError::Download { .. } => Kind::Registry,
            _ => Kind::User,
        },
        KernelError::Store(_) | KernelError::Program(_) => Kind::User,
        _ => Kind::User,
    };
    CliError::new(kind, error)
}
