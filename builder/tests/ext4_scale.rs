//! Time and memory at scale. Limits on time hold in optimised builds and are only printed in
//! others.

mod judge;

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use judge::plot::{Plot, meta, noise, options};
use parbake_builder::ext4::Options;
use parbake_builder::tree::{FileData, Kind, NodeId, Run};

const ROOT: NodeId = NodeId::ROOT;

/// Wall clock and this thread's processor time, which other load does not lengthen much.
struct Stopwatch {
    wall: Instant,
    processor: Duration,
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("not negative")
}

impl Stopwatch {
    fn start() -> Self {
        Self { wall: Instant::now(), processor: processor_time() }
    }

    fn within(&self, what: &str, limit: Duration) -> Duration {
        let took = processor_time() - self.processor;
        println!("{what}: {:?}, {took:?} of them processor time", self.wall.elapsed());
        assert!(cfg!(debug_assertions) || took < limit, "{what}: {took:?}");
        took
    }
}

#[test]
fn a_system_sized_tree_is_finished_in_milliseconds() {
    let mut plot = Plot::new();
    let piece = noise(1, 20_000);
    for directory in 0..1200 {
        let directory = plot.directory(ROOT, format!("directory{directory}"));
        for file in 0..9 {
            plot.file(directory, format!("some-file-name-{file}"), &piece);
        }
    }
    let start = Stopwatch::start();
    plot.finish(&Options { free_bytes: 1 << 30, ..options() });
    start.within("finish of 12,000 entries", Duration::from_millis(100));
    judge::fsck(&plot.path);
}

#[test]
fn a_hundred_thousand_files_in_one_directory() {
    let mut plot = Plot::new();
    let start = Stopwatch::start();
    let directory = plot.directory(ROOT, "flat");
    // As a caller does that gathers adjacent files into large writes.
    let mut first = plot.area.end();
    let mut bytes = Vec::new();
    for number in 0..100_000 {
        let mut runs = Vec::new();
        plot.area.allocate(1, |physical, blocks| {
            bytes.resize((physical - first) as usize * 4096, 0);
            bytes.extend_from_slice(b"x");
            runs.push(Run { logical: 0, blocks, physical });
        });
        if bytes.len() > 1 << 20 {
            plot.file.write_all_at(&bytes, first * 4096).expect("write");
            bytes.clear();
            first = plot.area.end();
        }
        let data = FileData { size: 1, runs: runs.into() };
        plot.add(directory, format!("file-{number:06}"), Kind::File(data));
    }
    plot.file.write_all_at(&bytes, first * 4096).expect("write");
    println!("tree and data: {:?}", start.wall.elapsed());
    plot.finish(&options());
    start.within("100,000 files", Duration::from_millis(1500));
    judge::fsck(&plot.path);
}

#[test]
fn more_subdirectories_than_a_link_count_holds() {
    let mut plot = Plot::new();
    let full = plot.directory(ROOT, "full");
    for number in 0..64_998 {
        plot.directory(full, number.to_string());
    }
    let over = plot.directory(ROOT, "over");
    for number in 0..64_999 {
        plot.directory(over, number.to_string());
    }
    plot.finish(&options());
    judge::fsck(&plot.path);
    if let Some(mount) = judge::mounted::Mount::new(&plot.path, "ro") {
        for (name, links, entries) in [("full", 65_000, 64_998), ("over", 1, 64_999)] {
            let path = mount.path().join(name);
            let found = std::fs::metadata(&path).expect("metadata");
            assert_eq!(std::os::unix::fs::MetadataExt::nlink(&found), links);
            assert_eq!(std::fs::read_dir(&path).expect("list").count(), entries);
        }
    }
}

#[test]
fn as_many_names_as_a_file_may_have() {
    let mut plot = Plot::new();
    let file = plot.file(ROOT, "file", b"x");
    let directory = plot.directory(ROOT, "d");
    for number in 1..65_000 {
        plot.link(directory, number.to_string(), file);
    }
    plot.finish(&options());
    plot.judge();
    plot.link(ROOT, "one more", file);
    let error = plot.try_finish(&options()).expect_err("too many names");
    assert_eq!(
        error.to_string(),
        "/d/1: the file has 65001 names, ext4 allows 65000; remove some, or copy the file"
    );
}

#[test]
fn deep_nesting() {
    let mut plot = Plot::new();
    let mut parent = ROOT;
    for _ in 0..100_000 {
        parent = plot.directory(parent, "d");
    }
    plot.finish(&options());
    judge::fsck(&plot.path);
}

/// Peak memory of this process in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).expect("VmHWM")
}

/// Run with `--ignored --nocapture --test-threads=1`, optimised.
#[test]
#[ignore = "takes gigabytes of sparse file and some seconds"]
fn a_million_files() {
    let mut previous = None;
    for thousands in [250u64, 500, 1000] {
        let mut plot = Plot::new();
        let mut directory = ROOT;
        for number in 0..thousands * 1000 {
            if number % 1000 == 0 {
                directory = plot.directory(ROOT, format!("directory-{number}"));
            }
            if number % 100 == 0 {
                plot.file(directory, format!("file-{number}"), b"x");
            } else {
                let data = plot.data(b"");
                let id = plot.node(Kind::File(data), meta(0o644));
                plot.link(directory, format!("file-{number}"), id);
            }
        }
        let before = peak_kib();
        let start = Stopwatch::start();
        let report = plot.finish(&options());
        let took = start.within("finish", Duration::from_secs(5));
        println!(
            "{thousands},000 files: peak {before} KiB before, {} after, {report:?}",
            peak_kib()
        );
        if let Some(previous) = previous {
            assert!(took < previous * 4, "not linear: {previous:?}, {took:?}");
        }
        previous = Some(took);
        judge::fsck(&plot.path);
    }
}
