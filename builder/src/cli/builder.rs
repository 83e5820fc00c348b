//! Who runs the steps of a build, and the machines they run in.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parbake_builder::execute::{
    self, ExecuteError, Executor, Ground, InLab, Microvm, MicrovmOptions, Sandbox, StepGuest, Tool,
};
use parbake_builder::kernel::{self, KernelChoice};
use parbake_cache::template::{KernelBundle, MachineShape};
use parbake_cache::{Digest, Store};
use parbake_node::event::Watch;
use parbake_node::network::Egress;
use parbake_node::terminal::stdio::{self, Ended};

use super::error::{CliError, CliResult, Kind};
use super::guest::{self, Place};
use super::prune::size;
use super::{Context, interrupt};

/// How long a build machine may take to boot; longer where it is emulated.
const BOOT: Duration = Duration::from_secs(60);

/// How often it is told what the machine was denied.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Memory of a build machine where nothing is said, in MiB: here, and in the lab, which has little.
const MEMORY_MIB: (u32, u32) = (2048, 768);

/// What a step may write where nothing is said, in bytes. In the lab it lies in memory.
const DISK_BYTES: (u64, u64) = (16 << 30, 1 << 30);

/// Who runs the steps, and where.
#[derive(Debug, Clone, clap::Args)]
pub struct BuilderArgs {
    /// Who runs the steps
    #[arg(long, value_name = "BUILDER", default_value = "auto")]
    builder: Builder,
    /// Refuse to run steps on this machine's kernel
    #[arg(long)]
    require_isolation: bool,
    /// What steps in a build machine may reach: `*`, `none` or destinations as of `run` [default: *,
    /// which is everything but cloud metadata, this host and its sandboxes]
    #[arg(long, value_name = "POLICY", value_parser = Egress::parse)]
    egress: Option<Egress>,
    /// Virtual CPUs of a build machine [default: this machine's, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    build_cpus: Option<u8>,
    /// Memory of a build machine in MiB [default: 2048; 768 in the lab]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(128..=1_048_576))]
    build_memory: Option<u32>,
    /// What a step may write to a build machine's disk [default: 16GiB; 1GiB in the lab]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    build_disk: Option<u64>,
}

/// `--builder`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Builder {
    /// Machines where KVM runs them, else the sandbox.
    Auto,
    /// In machines of their own, one for each stage (in the lab where KVM cannot run one: slow).
    Microvm,
    /// This program, as root, steps in namespaces of this machine's kernel.
    Sandbox,
    /// An installed buildah.
    Buildah,
    /// An installed docker with buildx.
    Buildx,
}

/// Who it is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// An installed engine.
    External(Tool),
    /// Namespaces; told to those who did not ask for them.
    Sandbox {
        /// Someone asked for them.
        asked: bool,
    },
    /// Machines here.
    Here,
    /// Machines in the lab.
    Lab,
}

impl BuilderArgs {
    /// Decides; what was asked for and cannot be had is refused, with the way out.
    pub fn choice(&self, context: &Context) -> CliResult<Choice> {
        let machines = |place| match place {
            Place::Here => Choice::Here,
            Place::Lab => Choice::Lab,
        };
        let refuse = |what: &str| {
            Err(CliError::new(Kind::Refused, what)
                .hint("--builder microvm runs steps in machines of their own")
                .hint("leave out --require-isolation to let steps share a kernel"))
        };
        let choice = match self.builder {
            Builder::Auto if self.require_isolation => machines(guest::place(context)?),
            Builder::Auto => match guest::place(context) {
                Ok(Place::Here) => Choice::Here,
                Ok(Place::Lab) | Err(_) => Choice::Sandbox { asked: false },
            },
            Builder::Microvm => machines(guest::place(context)?),
            _ if self.require_isolation => {
                return refuse(
                    "isolation is required, and this builder shares a kernel with steps",
                );
            }
            Builder::Sandbox => Choice::Sandbox { asked: true },
            Builder::Buildah => Choice::External(Tool::Buildah),
            Builder::Buildx => Choice::External(Tool::Buildx),
        };
        let machines = matches!(choice, Choice::Here | Choice::Lab);
        let machine_only =
            self.build_cpus.is_some() || self.build_memory.is_some() || self.build_disk.is_some();
        if !machines && (self.egress.is_some() || machine_only) {
            let what = if machine_only {
                "--build-cpus, --build-memory and --build-disk are of build machines"
            } else {
                "only build machines are held to --egress"
            };
            return Err(CliError::new(Kind::Usage, what)
                .hint("add --builder microvm")
                .hint("--network none cuts the steps of any builder off"));
        }
        Ok(choice)
    }

    /// Whether isolation was asked for, by whichever option.
    pub fn requires_isolation(&self) -> bool {
        self.require_isolation || self.builder == Builder::Microvm
    }

    /// The executor of a choice; nothing for an external engine. Kernel and lab are only looked for
    /// once a step needs a machine.
    pub fn executor<'a>(
        &'a self,
        context: &'a Context,
        choice: Choice,
        directory: &'a Path,
        kernel: KernelChoice,
    ) -> CliResult<Option<Box<dyn Executor + 'a>>> {
        let place = match choice {
            Choice::External(_) => return Ok(None),
            Choice::Sandbox { .. } => {
                let sandbox = Sandbox::new(None).map_err(super::steps::execute_error)?;
                return Ok(Some(Box::new(sandbox)));
            }
            Choice::Here => Place::Here,
            Choice::Lab => Place::Lab,
        };
        let prepare = move || {
            self.prepare(context, place, directory, &kernel).map_err(|error| {
                let hint = error.hints.join("; ");
                let what = format!("steps get no machine: {error}");
                ExecuteError::Host { what, hint }
            })
        };
        Ok(Some(Box::new(Microvm::new(Box::new(prepare)))))
    }

    fn prepare(
        &self,
        context: &Context,
        place: Place,
        directory: &Path,
        kernel: &KernelChoice,
    ) -> CliResult<MicrovmOptions> {
        let store = context.store()?;
        let bundle =
            kernel::ensure(&store, kernel, false, |_| {}).map_err(super::kernel::kernel_error)?;
        let bundle: KernelBundle = store.get_json(&bundle.digest).map_err(guest::store_error)?;
        let (ground, patience) = match place {
            Place::Here => (Ground::Here, guest::patience()),
            Place::Lab => (Ground::Lab(in_lab(context)?), 8),
        };
        let lab = patience > 1;
        let either = |here, in_lab| if lab { in_lab } else { here };
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
        let processors = u8::try_from(processors).unwrap_or(1);
        Ok(MicrovmOptions {
            ground,
            kernel: file(&store, &bundle.vmlinux.digest)?,
            initramfs: file(&store, &bundle.initramfs.digest)?,
            cmdline: bundle.cmdline,
            machine: MachineShape {
                vcpus: self.build_cpus.unwrap_or(either(processors, 1)),
                memory_mib: self.build_memory.unwrap_or(if lab {
                    MEMORY_MIB.1
                } else {
                    MEMORY_MIB.0
                }),
            },
            disk_bytes: self.build_disk.unwrap_or(if lab { DISK_BYTES.1 } else { DISK_BYTES.0 }),
            egress: self.egress.clone().unwrap_or_else(everywhere),
            ready_timeout: BOOT * patience,
            directory: directory.to_owned(),
            cancelled: Some(interrupt::asked),
        })
    }
}

/// What a build usually needs, and no policy narrows.
fn everywhere() -> Egress {
    Egress::parse("*").unwrap_or_default()
}

fn file(store: &Store, digest: &Digest) -> CliResult<std::path::PathBuf> {
    store.path(digest).map_err(guest::store_error)
}

/// This program in the lab, asked for one step's machine.
fn in_lab(context: &Context) -> CliResult<InLab> {
    let lab = guest::lab(context)?;
    let (program, env) = guest::program_in_lab(context, &lab)?;
    Ok(InLab { lab, command: vec![program.into_os_string(), "step-guest".into()], env })
}

/// Boot a machine for build steps and connect this process's streams to it
#[derive(Debug, clap::Args)]
pub struct StepGuestArgs {
    /// The machine, as JSON
    #[arg(value_name = "MACHINE")]
    machine: String,
}

/// Runs a machine for steps.
pub fn step_guest(args: &StepGuestArgs) -> CliResult<u8> {
    interrupt::watch();
    let machine: StepGuest =
        serde_json::from_str(&args.machine).map_err(|error| CliError::new(Kind::Usage, error))?;
    let failed = |error| guest::sandbox_error(error, Kind::Sandbox);
    let (events, watch) = Watch::new();
    let mut sandbox =
        execute::run_guest(&machine, Some(interrupt::asked), events).map_err(failed)?;
    let client = sandbox.connect().map_err(failed)?;
    let over = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        // Steps follow each other, and what one was denied is told while it is remembered.
        let over = &over;
        scope.spawn(move || {
            loop {
                let last = over.load(Ordering::Relaxed);
                for line in watch.lines() {
                    eprintln!("{line}");
                }
                if last {
                    break;
                }
                std::thread::park_timeout(TELL_EVERY);
            }
        });
        let ended = stdio::run(client, execute::step_request(), || {});
        over.store(true, Ordering::Relaxed);
        ended
    });
    match ended {
        Ok(Ended::Exited(exit)) => Ok(u8::try_from(exit.shell_code()).unwrap_or(125)),
        Ok(Ended::HungUp) => Err(CliError::interrupted()),
        Ok(Ended::Failed(failure)) => Err(CliError::new(Kind::Sandbox, failure.message)),
        Err(error) => Err(failed(sandbox.blame(error))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        builder: BuilderArgs,
    }

    #[test]
    fn everything_is_what_builds_reach_unless_told() {
        assert_eq!(everywhere().to_string(), "allow=*");
        let line = Line::try_parse_from(["x", "--egress", "none"]).unwrap();
        assert!(line.builder.egress.unwrap().is_none());
        assert!(Line::try_parse_from(["x", "--egress", "packages"]).is_err());
    }

    #[test]
    fn isolation_is_asked_for_in_two_ways() {
        let asks = |words: &[&str]| {
            let words = std::iter::once("x").chain(words.iter().copied());
            Line::try_parse_from(words).unwrap().builder.requires_isolation()
        };
        assert!(asks(&["--builder", "microvm"]) && asks(&["--require-isolation"]));
        assert!(!asks(&[]) && !asks(&["--builder", "sandbox"]));
    }
}
