//! The same Dockerfiles through build machines: every judged one with a `RUN`, and the written ones.
//!
//! One machine is used for as many of them as it takes, so that what one step leaves behind in it
//! would show in the next case. Needs a place where guests run, and the programs: `PARBAKE_BIN` names
//! their directory, `PARBAKE_AGENT` and `PARBAKE_VMM` the two of the guests (`make e2e` sets them).

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parbake_cache::Store;
use parbake_cache::template::{KernelBundle, MachineShape};
use parbake_host::lab::{Lab, LabConfig, default_state_dir};
use parbake_host::{HostChoice, HostMode, probe};
use parbake_node::network::Egress;

use super::cases::{CASES, Input};
use super::{Case, expected_path, judged, made, skip_reason, tree, without, written};
use crate::execute::{
    Ended, ExecuteError, Executor, Ground, InLab, Job, Microvm, MicrovmOptions, Stream,
};
use crate::kernel::{self, KernelChoice};

/// Memory of a machine, in MiB.
const MEMORY_MIB: u32 = 512;

/// Where machines run, and what they are booted from.
struct Place {
    store: tempfile::TempDir,
    bin: PathBuf,
    lab: bool,
}

impl Place {
    /// Or why there is none.
    fn find() -> Result<Self, String> {
        let bin = std::env::var_os("PARBAKE_BIN").ok_or("PARBAKE_BIN is not set")?;
        for name in ["PARBAKE_AGENT", "PARBAKE_VMM"] {
            std::env::var_os(name).ok_or(format!("{name} is not set"))?;
        }
        if let Some(reason) = skip_reason() {
            return Err(reason);
        }
        let store = tempfile::tempdir().map_err(|error| error.to_string())?;
        Store::open(store.path()).map_err(|error| error.to_string())?;
        let report = probe::probe(store.path(), 3072);
        let mode = HostChoice::Auto.resolve(&report).map_err(|error| error.to_string())?;
        Ok(Self { store, bin: bin.into(), lab: mode == HostMode::Lab })
    }

    fn directory(&self) -> PathBuf {
        self.store.path().join("build")
    }

    fn options(&self) -> Result<MicrovmOptions, ExecuteError> {
        let store = Store::open(self.store.path()).unwrap();
        let bundle = kernel::ensure(&store, &KernelChoice::default(), false, |_| {}).unwrap();
        let bundle: KernelBundle = store.get_json(&bundle.digest).unwrap();
        let ground = match self.lab {
            false => Ground::Here,
            true => {
                let agent = std::env::var_os("PARBAKE_AGENT").unwrap_or_default();
                let config = LabConfig::new(self.store.path().canonicalize().unwrap(), agent);
                let lab = Lab::ensure_up(&config, &mut |_| {}).unwrap();
                let program = lab.host_path(&self.bin.join("parbake")).into_os_string();
                let store = [b"PARBAKE_STORE=", self.store.path().as_os_str().as_bytes()].concat();
                let ours =
                    ["PATH", "PARBAKE_AGENT", "PARBAKE_VMM"].into_iter().filter_map(|name| {
                        let value = std::env::var_os(name)?;
                        Some([name.as_bytes(), b"=", value.as_bytes()].concat())
                    });
                let env = ours.chain([store, b"PARBAKE_IN_LAB=1".to_vec()]).collect();
                Ground::Lab(InLab { lab, command: vec![program, "step-guest".into()], env })
            }
        };
        Ok(MicrovmOptions {
            ground,
            kernel: store.path(&bundle.vmlinux.digest).unwrap(),
            initramfs: store.path(&bundle.initramfs.digest).unwrap(),
            cmdline: bundle.cmdline,
            machine: MachineShape { vcpus: 1, memory_mib: MEMORY_MIB },
            disk_bytes: 256 << 20,
            egress: Egress::parse("*").unwrap(),
            ready_timeout: Duration::from_secs(300),
            directory: self.directory(),
            cancelled: None,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Ok(store) = self.store.path().canonicalize() {
            let _ = Lab::down(&default_state_dir(&store));
        }
    }
}

/// Machines that are kept from one stage, and one build, to the next: no case trusts another less
/// than itself.
struct Kept<'a> {
    machines: Microvm<'a>,
    steps: usize,
}

impl Executor for Kept<'_> {
    fn name(&self) -> &'static str {
        self.machines.name()
    }

    fn isolated(&self) -> bool {
        self.machines.isolated()
    }

    fn run(
        &mut self,
        job: &Job<'_>,
        output: &mut dyn FnMut(Stream, &[u8]),
    ) -> Result<Ended, ExecuteError> {
        self.steps += 1;
        self.machines.run(job, output)
    }
}

fn runs(input: &Input) -> bool {
    input.dockerfile.lines().any(|line| line.starts_with("RUN "))
}

#[test]
fn machines_do_what_was_judged() {
    let place = match Place::find() {
        Ok(place) => place,
        Err(reason) => {
            eprintln!("skipped: {reason}");
            return;
        }
    };
    let only = std::env::var("PARBAKE_CASE").ok();
    let wanted =
        |input: &&Input| runs(input) && only.as_deref().is_none_or(|only| only == input.name);
    let begun = Instant::now();
    let machines = Microvm::new(Box::new(|| place.options()));
    let mut kept = Kept { machines, steps: 0 };
    let mut build = |input: &Input| {
        let mut case = Case::new();
        // The lab sees the store, and what lies elsewhere as it was when it started.
        case.options.directory = place.directory();
        made(input, case, &mut kept).map(|(text, _)| text)
    };
    let mut wrong = Vec::new();
    let mut cases = 0;
    for input in CASES.iter().filter(wanted) {
        cases += 1;
        let recorded = fs::read_to_string(expected_path(input.name)).unwrap();
        let expected = judged(input, recorded.split_once('\n').unwrap().1);
        match build(input) {
            Ok(text) if text == expected => {}
            Ok(text) => {
                let difference = tree::line_difference(&expected, &text);
                wrong.push(format!("{}:\n{difference}", input.name));
            }
            Err(error) => wrong.push(format!("{}: {error}", input.name)),
        }
    }
    for case in written::WRITTEN.iter().filter(|case| wanted(&&case.input)) {
        cases += 1;
        let expected = format!("{}\n", case.tree.join("\n"));
        match build(&case.input) {
            Ok(text) => {
                let text = text.split_once("\n}\n").map_or("", |(_, tree)| tree);
                let text = without(text, &["/dev", "/proc", "/sys"]);
                if text != expected {
                    let difference = tree::line_difference(&expected, &text);
                    wrong.push(format!("{}:\n{difference}", case.input.name));
                }
            }
            Err(error) => wrong.push(format!("{}: {error}", case.input.name)),
        }
    }
    eprintln!("{cases} cases, {} steps in {:?}", kept.steps, begun.elapsed());
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(cases > 30 || only.is_some(), "{cases}");
    drop(kept);
    assert!(no_leftovers(&place.directory()), "a machine's files are left");
}

fn no_leftovers(directory: &Path) -> bool {
    fs::read_dir(directory.join("tmp")).is_ok_and(|mut entries| entries.next().is_none())
}
