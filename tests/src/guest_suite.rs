//! The tests that need a Linux guest: run on a host that can run one, or in the lab.
//!
//! usage: guest-suite STORE TEMPLATE [FILTER]
//!
//! Prints one line a test and a closing `N passed, N failed` line; exits 1 if any failed.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parbake_cache::template::SnapshotManifest;
use parbake_kernels::elf;
use parbake_node::rundir;
use parbake_node::sandbox::{FreezeFiles, RestoreFiles, Sandbox};
use parbake_protocol::agent::{ExecEvent, ExecRequest};
use parbake_tests::{Failed, Fixture, says, sh};

type Test = (&'static str, fn(&Suite) -> Result<(), Failed>);

const TESTS: &[Test] = &[
    ("cold boot and exec", cold_boot),
    ("a kernel without a PVH note", entry_64),
    ("the image's process configuration is applied", process_configuration),
    ("exit codes", exit_codes),
    ("twenty restores in a row", twenty_restores),
    ("two at once are different machines", two_at_once),
    ("what one sandbox writes no other sees", writes_are_private),
    ("timers fire on every vCPU after a restore", smp_timers),
    ("second and third generation", generations),
    ("freeze under disk and processor load", freeze_under_load),
    ("big output and input", big_streams),
    ("a killed monitor leaves nothing", killed_monitor),
    ("a client that vanishes takes its processes along", vanished_client),
    ("damaged snapshots are refused", damaged_snapshots),
    ("kernel panic and power-off end the sandbox", endings),
];

struct Suite {
    fixture: Fixture,
    snapshot: SnapshotManifest,
}

macro_rules! check {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+).into());
        }
    };
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [store, template, filter @ ..] = arguments.as_slice() else {
        eprintln!("usage: guest-suite STORE TEMPLATE [FILTER]");
        return ExitCode::from(2);
    };
    let suite = match prepare(Path::new(store), template) {
        Ok(suite) => suite,
        Err(error) => {
            println!("bake: FAILED: {error}");
            println!("0 passed, 1 failed");
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in TESTS {
        if !filter.iter().all(|word| name.contains(word.as_str())) {
            continue;
        }
        let begun = Instant::now();
        match test(&suite).and_then(|()| leftovers()) {
            Ok(()) => {
                passed += 1;
                println!("{name} … ok ({:.1} s)", begun.elapsed().as_secs_f64());
            }
            Err(error) => {
                failed += 1;
                println!("{name} … FAILED ({:.1} s): {error}", begun.elapsed().as_secs_f64());
                let mut cause = error.source();
                while let Some(next) = cause {
                    println!("    caused by: {next}");
                    cause = next.source();
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn prepare(store: &Path, template: &str) -> Result<Suite, Failed> {
    let fixture = Fixture::open(store, template)?;
    let baked = fixture.bake(fixture.template.manifest.machine)?;
    println!(
        "baked in {:.1} s (cold boot {:.1}, quiesce {:.1}, write {:.1}, install {:.1}); memory {} KiB, disk {} KiB",
        baked.timings.total.as_secs_f64(),
        baked.timings.cold_boot.as_secs_f64(),
        baked.timings.quiesce.as_secs_f64(),
        baked.timings.write.as_secs_f64(),
        baked.timings.install.as_secs_f64(),
        baked.memory_data_bytes >> 10,
        baked.disk_data_bytes >> 10,
    );
    Ok(Suite { fixture, snapshot: baked.snapshot })
}

/// No sandbox's directory and no monitor may outlive its test.
fn leftovers() -> Result<(), Failed> {
    let left: Vec<PathBuf> = fs::read_dir(rundir::base())
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    check!(left.is_empty(), "left behind: {left:?}");
    let mut monitors = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.trim() == "parbake-vmm" {
            monitors.push(entry.file_name());
        }
    }
    check!(monitors.is_empty(), "monitors still running: {monitors:?}");
    Ok(())
}

impl Suite {
    fn restore(&self) -> Result<Sandbox, Failed> {
        self.fixture.restore(&self.snapshot)
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn cold_boot(suite: &Suite) -> Result<(), Failed> {
    let mut sandbox = suite.fixture.boot(suite.fixture.template.manifest.machine)?;
    let release = says(&mut sandbox, "uname -r")?;
    check!(release == suite.fixture.template.kernel.release, "uname -r says {release}");
    let answer = says(&mut sandbox, "python3 -c 'print(6*7)'")?;
    check!(answer == "42", "6*7 is {answer}");
    Ok(())
}

/// The stock kernel with its PVH note made one that means nothing: what is left is the 64-bit entry.
fn entry_64(suite: &Suite) -> Result<(), Failed> {
    const NOTE: &[u8] = b"\x12\0\0\0Xen\0";
    let template = &suite.fixture.template;
    let mut files = template.boot_files(&suite.fixture.store)?;
    let mut kernel = fs::read(&files.kernel)?;
    check!(elf::inspect(&kernel)?.pvh_entry.is_some(), "the stock kernel has no PVH note");
    let notes: Vec<usize> = kernel
        .windows(NOTE.len())
        .enumerate()
        .filter(|(_, it)| *it == NOTE)
        .map(|it| it.0)
        .collect();
    for at in notes {
        kernel[at] = 0x7f;
    }
    check!(elf::inspect(&kernel)?.pvh_entry.is_none(), "the note is still there");
    let altered = tempfile::NamedTempFile::new()?;
    fs::write(&altered, &kernel)?;
    files.kernel = altered.path().to_owned();
    let process = &template.manifest.process;
    let mut sandbox =
        Sandbox::boot(&files, template.manifest.machine, process, &Fixture::options())?;
    let release = says(&mut sandbox, "uname -r")?;
    check!(release == template.kernel.release, "uname -r says {release}");
    Ok(())
}

fn process_configuration(suite: &Suite) -> Result<(), Failed> {
    let process = &suite.fixture.template.manifest.process;
    let mut sandbox = suite.restore()?;
    for entry in &process.env {
        let (name, value) = entry.split_once('=').unwrap_or((entry, ""));
        let found = says(&mut sandbox, &format!("printenv {name}"))?;
        check!(found == value, "{name} is {found:?}, not {value:?}");
    }
    let directory = says(&mut sandbox, "pwd")?;
    check!(directory == process.working_dir, "started in {directory}");
    let mut request = ExecRequest::new(["sh", "-c", "id -u; id -g; echo $EXTRA; pwd"]);
    request.user = "1234:5678".to_owned();
    request.env = vec![b"EXTRA=more".to_vec()];
    request.cwd = b"/tmp".to_vec();
    let output = sandbox.connect()?.exec(request)?.wait_with_output(4096)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    check!(text == "1234\n5678\nmore\n/tmp\n", "an exec of its own says {text:?}");
    Ok(())
}

fn exit_codes(suite: &Suite) -> Result<(), Failed> {
    let mut sandbox = suite.restore()?;
    for code in [0, 1, 42, 255] {
        let output = sh(&mut sandbox, &format!("exit {code}"))?;
        check!(output.exit.code == Some(code), "exit {code}: {:?}", output.exit);
    }
    let output = sh(&mut sandbox, "kill -9 $$")?;
    check!(output.exit.shell_code() == 137, "kill -9: {:?}", output.exit);
    for (argv, code) in [("/no/such/program", 127), ("no-such-program", 127), ("/etc/passwd", 126)]
    {
        let mut session = sandbox.connect()?.exec(ExecRequest::new([argv]))?;
        match session.next_event()? {
            ExecEvent::Failed(failure) => {
                check!(failure.shell_code() == code, "{argv}: {failure:?}");
            }
            other => return Err(format!("{argv}: {other:?}").into()),
        }
    }
    Ok(())
}

fn twenty_restores(suite: &Suite) -> Result<(), Failed> {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for round in 0..20 {
        let mut sandbox = suite.restore()?;
        let before = now();
        // One exec: a timer on an idle vCPU, the clock, and everything that must be unique.
        let script = "date +%s.%N; cat /proc/sys/kernel/random/uuid; \
            head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo; \
            python3 -c 'import os; print(os.getrandom(16).hex())'; \
            cat /etc/machine-id; hostname; \
            s=$(date +%s%N); sleep 0.2; e=$(date +%s%N); echo $(( (e - s) / 1000000 ))";
        let text = says(&mut sandbox, script)?;
        let after = now();
        let lines: Vec<&str> = text.lines().collect();
        check!(lines.len() == 7, "round {round}: {text}");
        let clock: f64 = lines[0].parse()?;
        check!(
            clock > before - 0.1 && clock < after + 0.1,
            "round {round}: the guest's clock is {clock}, the host's {before} to {after}"
        );
        for unique in &lines[1..6] {
            check!(seen.insert((*unique).to_owned()), "round {round}: {unique} came twice");
        }
        let slept: u64 = lines[6].parse()?;
        check!((190..5000).contains(&slept), "round {round}: a sleep of 200 ms took {slept} ms");
    }
    Ok(())
}

fn two_at_once(suite: &Suite) -> Result<(), Failed> {
    let mut one = suite.restore()?;
    let mut two = suite.restore()?;
    let script =
        "cat /proc/sys/kernel/random/uuid /etc/machine-id /etc/hostname 2>/dev/null; hostname";
    let (first, second) = (says(&mut one, script)?, says(&mut two, script)?);
    for (a, b) in first.lines().zip(second.lines()) {
        check!(a != b, "both say {a}");
    }
    says(&mut one, "echo one > /tmp/who")?;
    says(&mut two, "echo two > /tmp/who")?;
    let (first, second) = (says(&mut one, "cat /tmp/who")?, says(&mut two, "cat /tmp/who")?);
    check!(first == "one" && second == "two", "they share a disk: {first} {second}");
    Ok(())
}

fn writes_are_private(suite: &Suite) -> Result<(), Failed> {
    let mut writer = suite.restore()?;
    says(&mut writer, "echo gone > /etc/left-behind; rm /etc/passwd; sync")?;
    drop(writer);
    let mut reader = suite.restore()?;
    says(&mut reader, "test ! -e /etc/left-behind && test -e /etc/passwd")?;
    Ok(())
}

fn smp_timers(suite: &Suite) -> Result<(), Failed> {
    let baked = suite.fixture.bake(suite.fixture.shape(2))?;
    for round in 0..10 {
        let mut sandbox = suite.fixture.restore(&baked.snapshot)?;
        let text = says(
            &mut sandbox,
            "nproc; for cpu in 0 1; do s=$(date +%s%N); taskset -c $cpu sleep 0.2; \
             e=$(date +%s%N); echo $(( (e - s) / 1000000 )); done",
        )?;
        let numbers: Vec<u64> = text.lines().map(str::parse).collect::<Result<_, _>>()?;
        check!(numbers.first() == Some(&2), "round {round}: {text}");
        for slept in &numbers[1..] {
            check!((190..5000).contains(slept), "round {round}: sleep 0.2 took {slept} ms");
        }
    }
    Ok(())
}

fn freeze_into(
    sandbox: &mut Sandbox,
    directory: &Path,
    rootfs: PathBuf,
) -> Result<(RestoreFiles, u32), Failed> {
    let frozen = sandbox.freeze(&FreezeFiles::create_in(directory)?)?;
    let files = RestoreFiles {
        state: directory.join("state"),
        memory: directory.join("memory"),
        difference: None,
        disk: directory.join("disk"),
        rootfs,
    };
    Ok((files, frozen.snapshot.generation))
}

fn generations(suite: &Suite) -> Result<(), Failed> {
    let rootfs =
        suite.fixture.template.restore_files(&suite.fixture.store, &suite.snapshot)?.rootfs;
    let shape = suite.snapshot.machine;
    let mut sandbox = suite.restore()?;
    let mut random = BTreeSet::new();
    // Only in memory, so that a reboot cannot pass for a restore.
    let nonce = says(&mut sandbox, "cat /proc/sys/kernel/random/uuid | tee /dev/shm/nonce")?;
    for generation in 2..=3 {
        // In memory and on disk, so that both must have travelled together.
        says(
            &mut sandbox,
            &format!("echo g{generation} > /dev/shm/note; echo g{generation} > /root/note"),
        )?;
        let directory = tempfile::tempdir()?;
        let (files, number) = freeze_into(&mut sandbox, directory.path(), rootfs.clone())?;
        check!(number == generation, "generation {number}, not {generation}");
        drop(sandbox);
        sandbox = Sandbox::restore(&files, shape, &Fixture::options())?;
        let text = says(&mut sandbox, "cat /dev/shm/note /root/note /dev/shm/nonce")?;
        check!(
            text == format!("g{generation}\ng{generation}\n{nonce}"),
            "generation {generation} says {text}"
        );
        let uuid = says(&mut sandbox, "cat /proc/sys/kernel/random/uuid; sleep 0.1")?;
        check!(random.insert(uuid), "generation {generation} repeats random bytes");
        // The other way round: two machines from this generation, too.
        let mut twin = Sandbox::restore(&files, shape, &Fixture::options())?;
        let uuid = says(&mut twin, "cat /proc/sys/kernel/random/uuid; sleep 0.1")?;
        check!(random.insert(uuid), "a twin of generation {generation} repeats random bytes");
    }
    Ok(())
}

fn freeze_under_load(suite: &Suite) -> Result<(), Failed> {
    let rootfs =
        suite.fixture.template.restore_files(&suite.fixture.store, &suite.snapshot)?.rootfs;
    let mut sandbox = suite.restore()?;
    let mut request = ExecRequest::new([
        "sh",
        "-c",
        "i=0; while :; do i=$((i+1)); echo $i > /root/count; cp /usr/bin/openssl /root/copy; \
         sync /root/copy; cmp /usr/bin/openssl /root/copy || echo bad >> /root/bad; done",
    ]);
    request.detach = true;
    let mut session = sandbox.connect()?.exec(request)?;
    let event = session.next_event()?;
    check!(matches!(event, ExecEvent::Started { .. }), "the load did not start: {event:?}");
    drop(session);
    std::thread::sleep(Duration::from_millis(500));
    let directory = tempfile::tempdir()?;
    let (files, _) = freeze_into(&mut sandbox, directory.path(), rootfs)?;
    drop(sandbox);
    let mut sandbox = Sandbox::restore(&files, suite.snapshot.machine, &Fixture::options())?;
    let first: u64 = says(&mut sandbox, "cat /root/count")?.parse()?;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let count: u64 = says(&mut sandbox, "sleep 0.2; cat /root/count")?.parse().unwrap_or(first);
        if count > first {
            break;
        }
        check!(Instant::now() < deadline, "the load stands still at {first} after the restore");
    }
    says(&mut sandbox, "test ! -e /root/bad")?;
    let log = says(
        &mut sandbox,
        "dmesg 2>/dev/null | grep -iE 'ext4.*error|i/o error|soft lockup' || true",
    )?;
    check!(log.is_empty(), "the kernel complains: {log}");
    Ok(())
}

fn big_streams(suite: &Suite) -> Result<(), Failed> {
    let mut sandbox = suite.restore()?;
    let output = sh(&mut sandbox, "head -c 8000000 /dev/zero; seq 10000 >&2")?;
    check!(output.stdout.len() == 8_000_000, "{} bytes of output", output.stdout.len());
    check!(output.stderr.ends_with(b"\n10000\n"), "standard error was cut");
    let mut request = ExecRequest::new(["sha256sum"]);
    request.stdin = true;
    let session = sandbox.connect()?.exec(request)?;
    let (input, mut output) = session.split();
    let data: Vec<u8> =
        (0..4_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let expected = parbake_cache::Digest::of(&data).hex();
    let writer = std::thread::spawn(move || {
        data.chunks(50_000).try_for_each(|part| input.write_stdin(part))?;
        input.close_stdin()
    });
    let mut text = Vec::new();
    loop {
        match output.next_event()? {
            ExecEvent::Stdout(bytes) => text.extend(bytes),
            ExecEvent::Exited(exit) => {
                check!(exit.code == Some(0), "{exit:?}");
                break;
            }
            _ => {}
        }
    }
    writer.join().map_err(|_| "the writer panicked")??;
    check!(text.starts_with(expected.as_bytes()), "the input arrived changed");
    Ok(())
}

fn killed_monitor(suite: &Suite) -> Result<(), Failed> {
    let mut sandbox = suite.restore()?;
    let mut session = sandbox.connect()?.exec(ExecRequest::new(["sleep", "1000"]))?;
    check!(matches!(session.next_event()?, ExecEvent::Started { .. }), "sleep did not start");
    let pid = i32::try_from(sandbox.monitor_pid())?;
    let pid = rustix::process::Pid::from_raw(pid).ok_or("no pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
    let begun = Instant::now();
    check!(session.next_event().is_err(), "the exec went on without a machine");
    check!(begun.elapsed() < Duration::from_secs(5), "the client noticed too late");
    drop(sandbox);
    leftovers()
}

fn vanished_client(suite: &Suite) -> Result<(), Failed> {
    let mut sandbox = suite.restore()?;
    let mut session =
        sandbox.connect()?.exec(ExecRequest::new(["sh", "-c", "sleep 1001 & sleep 1001"]))?;
    check!(matches!(session.next_event()?, ExecEvent::Started { .. }), "sleep did not start");
    drop(session);
    let deadline = Instant::now() + Duration::from_secs(20);
    while says(&mut sandbox, "grep -lsx 'sleep' /proc/[0-9]*/comm | wc -l")? != "0" {
        check!(Instant::now() < deadline, "the processes of a client that vanished live on");
    }
    Ok(())
}

fn damaged_snapshots(suite: &Suite) -> Result<(), Failed> {
    let good = suite.fixture.template.restore_files(&suite.fixture.store, &suite.snapshot)?;
    let directory = tempfile::tempdir()?;
    let shape = suite.snapshot.machine;
    let state = fs::read(&good.state)?;
    let refused = |name: &str, state: &[u8], memory: Option<u64>| -> Result<(), Failed> {
        let mut files = good.clone();
        files.state = directory.path().join(name);
        fs::write(&files.state, state)?;
        if let Some(size) = memory {
            files.memory = directory.path().join("short");
            fs::File::create(&files.memory)?.set_len(size)?;
        }
        let begun = Instant::now();
        match Sandbox::restore(&files, shape, &Fixture::options()) {
            Ok(_) => Err(format!("{name}: restored").into()),
            Err(error) => {
                check!(begun.elapsed() < Duration::from_secs(10), "{name}: refused too late");
                println!("    {name}: {error}");
                Ok(())
            }
        }
    };
    refused("truncated", &state[..state.len() / 2], None)?;
    refused("empty", &[], None)?;
    let mut flipped = state.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    refused("flipped bit", &flipped, None)?;
    refused("short memory", &state, Some(1 << 20))?;
    Ok(())
}

fn endings(suite: &Suite) -> Result<(), Failed> {
    for (how, script) in [
        ("panic", "sleep 0.1; echo c > /proc/sysrq-trigger"),
        ("power-off", "sleep 0.1; echo o > /proc/sysrq-trigger; sleep 100"),
    ] {
        let mut sandbox = suite.restore()?;
        says(&mut sandbox, "echo 1 > /proc/sys/kernel/sysrq")?;
        let begun = Instant::now();
        let result = sh(&mut sandbox, script);
        check!(result.is_err(), "{how}: the exec ended as if nothing had happened: {result:?}");
        check!(begun.elapsed() < Duration::from_secs(30), "{how}: noticed too late");
    }
    Ok(())
}
