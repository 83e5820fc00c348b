//! Time and memory at scale. Limits on time hold in optimised builds and are only printed in
//! others.

mod judge;

use std::time::{Duration, Instant};

use judge::plot::{Plot, meta, noise, options};
use parbake_builder::ext4::Options;
use parbake_builder::tree::{Kind, NodeId};

const ROOT: NodeId = NodeId::ROOT;

fn within(what: &str, start: Instant, limit: Duration) {
    let took = start.elapsed();
    println!("{what}: {took:?}");
    assert!(cfg!(debug_assertions) || took < limit, "{what}: {took:?}");
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
    let start = Instant::now();
    plot.finish(&Options { free_bytes: 1 << 30, ..options() });
    within("finish of 12,000 entries", start, Duration::from_millis(100));
    judge::fsck(&plot.path);
}

#[test]
fn a_hundred_thousand_files_in_one_directory() {
    let mut plot = Plot::new();
    let start = Instant::now();
    let directory = plot.directory(ROOT, "flat");
    for number in 0..100_000 {
        plot.file(directory, format!("file-{number:06}"), b"x");
    }
    let data = start.elapsed();
    plot.finish(&options());
    println!("of which data and tree: {data:?}");
    within("100,000 files", start, Duration::from_millis(1500));
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
    plot.judge();
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
        let start = Instant::now();
        let report = plot.finish(&options());
        let took = start.elapsed();
        println!(
            "{thousands},000 files: finish {took:?}, peak {before} KiB before, {} after, {report:?}",
            peak_kib()
        );
        if let Some(previous) = previous {
            assert!(took < previous * 4, "not linear: {previous:?}, {took:?}");
        }
        previous = Some(took);
        judge::fsck(&plot.path);
    }
}
