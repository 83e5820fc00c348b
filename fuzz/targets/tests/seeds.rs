//! Every seed, and some thousands of its mutations, through its target: what the fuzzer found once
//! stays found, with an ordinary compiler and always the same inputs.

use std::any::Any;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use parbake_fuzz_targets::TARGETS;

/// Mutations of each target; `PARBAKE_FUZZ_MUTATIONS` asks for more.
const MUTATIONS: usize = 4000;

/// Numbers that tend to lie on a border.
const BORDERS: [u64; 8] = [0, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX];

/// xorshift64*: always the same numbers.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound.max(1) as u64) as usize
    }

    /// Changes an input in one to four places; `others` lend it stretches.
    fn mutate(&mut self, input: &mut Vec<u8>, others: &[(PathBuf, Vec<u8>)], most: usize) {
        for _ in 0..=self.below(4) {
            let at = self.below(input.len());
            match self.below(7) {
                0 if !input.is_empty() => input[at] ^= 1 << self.below(8),
                1 if !input.is_empty() => input[at] = self.below(256) as u8,
                2 => {
                    let border = BORDERS[self.below(BORDERS.len())].to_le_bytes();
                    let width = [1, 2, 4, 8][self.below(4)].min(input.len() - at);
                    input[at..at + width].copy_from_slice(&border[..width]);
                }
                3 => input.truncate(at),
                4 => {
                    let end = at + self.below((input.len() - at).min(64) + 1);
                    input.drain(at..end);
                }
                5 => {
                    let end = at + self.below((input.len() - at).min(64) + 1);
                    let stretch = input[at..end].to_vec();
                    input.splice(at..at, stretch);
                }
                _ => {
                    let other = &others[self.below(others.len())].1;
                    let from = self.below(other.len());
                    let end = from + self.below((other.len() - from).min(256) + 1);
                    input.splice(at..at, other[from..end].iter().copied());
                }
            }
        }
        input.truncate(most);
    }
}

fn seeds(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../seeds").join(name);
    let entries =
        fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    assert!(!paths.is_empty(), "{} has no seeds", directory.display());
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

/// What broke, if anything.
fn replay(name: &str, most: usize, run: fn(&[u8])) -> Result<(), String> {
    let seeds = seeds(name);
    for (path, bytes) in &seeds {
        catch_unwind(|| run(bytes))
            .map_err(|panic| format!("{name}: {}: {}", path.display(), message(&*panic)))?;
    }
    let wanted = std::env::var("PARBAKE_FUZZ_MUTATIONS").ok();
    let count = wanted.map_or(MUTATIONS, |number| number.parse().expect("a number"));
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15 ^ most as u64);
    for _ in 0..count {
        let mut input = seeds[numbers.below(seeds.len())].1.clone();
        numbers.mutate(&mut input, &seeds, most);
        catch_unwind(|| run(&input)).map_err(|panic| {
            let kept = std::env::temp_dir().join(format!("parbake-fuzz-{name}"));
            fs::write(&kept, &input).expect("the input is kept");
            format!("{name}: {}: {}", kept.display(), message(&*panic))
        })?;
    }
    Ok(())
}

#[test]
fn seeds_and_their_mutations_break_nothing() {
    let (next, broken) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(&(name, most, run)) = TARGETS.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(what) = replay(name, most, run) {
                broken.lock().unwrap().push(what);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_target_has_its_program_and_every_seed_its_target() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let listed = |directory: &str| {
        let entries = fs::read_dir(fuzz.join(directory)).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    let names: Vec<String> = TARGETS.iter().map(|target| target.0.to_owned()).collect();
    assert_eq!(listed("fuzz_targets"), names);
    assert_eq!(listed("seeds"), names);
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    for name in names {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
    }
}
