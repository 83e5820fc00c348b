use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::device::guest::{Guest, READ, WRITE};

const BLOCK: usize = 4096;

struct Bench {
    dir: TempDir,
    disk: Disk,
    base: Vec<u8>,
}

fn bench(len: usize) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let base: Vec<u8> = (0..len).map(|i| (i / 512 % 251) as u8 + 1).collect();
    let path = dir.path().join("base");
    std::fs::write(&path, &base).unwrap();
    let disk = Disk { base: path, overlay: None, scratch: None, read_only: false, write_limit: 0 };
    Bench { dir, disk, base }
}

impl Bench {
    fn guest(&self, event_idx: bool) -> Guest {
        Guest::boot(Box::new(Block::open(&self.disk).unwrap()), event_idx)
    }

    fn overlay(&self, guest: &Guest, name: &str) -> (PathBuf, u64) {
        let path = self.dir.path().join(name);
        let file = File::create_new(&path).unwrap();
        let bytes = guest.transport.device().write_disk(&file).unwrap().unwrap();
        (path, bytes)
    }
}

fn header(guest: &mut Guest, kind: u32, sector: u64) -> u64 {
    let mut raw = Vec::from(kind.to_le_bytes());
    raw.extend(0u32.to_le_bytes());
    raw.extend(sector.to_le_bytes());
    guest.put(&raw)
}

/// Does one request; its status and the `len` in the used ring.
pub(super) fn request(
    guest: &mut Guest,
    kind: u32,
    sector: u64,
    data: &[(u64, u32, bool)],
) -> (u8, u32) {
    let status = guest.put(&[0xff]);
    let mut segments = vec![(header(guest, kind, sector), 16, READ)];
    segments.extend(data);
    segments.push((status, 1, WRITE));
    let head = guest.offer(0, &segments);
    guest.run();
    let finished = guest.finished(0);
    assert_eq!(finished.len(), 1);
    assert_eq!(finished[0].0, head);
    (guest.bytes(status, 1)[0], finished[0].1)
}

pub(super) fn read(guest: &mut Guest, sector: u64, len: usize) -> Vec<u8> {
    let at = guest.alloc(len);
    let half = len as u32 / 2;
    let parts = [(at, half, WRITE), (at + u64::from(half), len as u32 - half, WRITE)];
    assert_eq!(request(guest, T_IN, sector, &parts), (S_OK, len as u32 + 1));
    guest.bytes(at, len)
}

pub(super) fn write(guest: &mut Guest, sector: u64, data: &[u8]) {
    let at = guest.put(data);
    assert_eq!(request(guest, T_OUT, sector, &[(at, data.len() as u32, READ)]), (S_OK, 1));
}

#[test]
fn reads_see_the_base_and_writes_stay_private() {
    let bench = bench(64 * BLOCK);
    let mut guest = bench.guest(true);
    let mut other = bench.guest(false);
    assert_eq!(read(&mut guest, 0, 8 * BLOCK), bench.base[..8 * BLOCK]);
    // Not aligned to blocks at either end.
    let data = vec![0xee; 3 * BLOCK + 512];
    write(&mut guest, 3, &data);
    let mut expected = bench.base.clone();
    expected[3 * 512..][..data.len()].copy_from_slice(&data);
    assert_eq!(read(&mut guest, 0, 64 * BLOCK), expected);
    assert_eq!(read(&mut other, 0, 64 * BLOCK), bench.base);
    assert_eq!(std::fs::read(&bench.disk.base).unwrap(), bench.base);
    assert_eq!(guest.transport.device().overlay_bytes(), Some(4 * BLOCK as u64));
}

#[test]
fn the_header_may_be_cut_anywhere() {
    let bench = bench(8 * BLOCK);
    let mut guest = bench.guest(true);
    let (front, out) = (header(&mut guest, T_IN, 0), guest.alloc(1024 + 1));
    // Header in three parts; data and status in one.
    let chain = [(front, 1, READ), (front + 1, 7, READ), (front + 8, 8, READ), (out, 1025, WRITE)];
    guest.offer(0, &chain);
    guest.run();
    assert_eq!(guest.finished(0)[0].1, 1025);
    assert_eq!(guest.bytes(out, 1024), bench.base[..1024]);
    assert_eq!(guest.bytes(out + 1024, 1), [S_OK]);
}

#[test]
fn requests_that_cannot_be_done_fail_by_themselves() {
    let bench = bench(8 * BLOCK);
    let mut guest = bench.guest(true);
    let at = guest.alloc(BLOCK);
    for (name, kind, sector, data, code) in [
        ("past the end", T_IN, 64, vec![(at, 512, WRITE)], S_IOERR),
        ("over the end", T_OUT, 63, vec![(at, 1024, READ)], S_IOERR),
        ("sector overflow", T_IN, u64::MAX / 2, vec![(at, 512, WRITE)], S_IOERR),
        ("half a sector", T_IN, 0, vec![(at, 256, WRITE)], S_IOERR),
        ("too much", T_IN, 0, vec![(0, 9 << 20, WRITE), (0, 9 << 20, WRITE)], S_IOERR),
        ("unknown type", 77, 0, vec![], S_UNSUPP),
        ("no segments", T_DISCARD, 0, vec![], S_IOERR),
        ("nothing to read", T_IN, 0, vec![], S_OK),
        ("flush", T_FLUSH, 0, vec![], S_OK),
    ] {
        assert_eq!(request(&mut guest, kind, sector, &data).0, code, "{name}");
        assert!(!guest.needs_reset(), "{name}");
    }
    assert_eq!(guest.transport.device().overlay_bytes(), Some(0));
}

#[test]
fn chains_that_are_no_requests_stop_the_device() {
    let bench = bench(8 * BLOCK);
    for chain in [
        vec![(0x10_0000, 16, READ)],
        vec![(0x10_0000, 15, READ), (0x10_1000, 1, WRITE)],
        vec![(0x10_1000, 1, WRITE)],
    ] {
        let mut guest = bench.guest(true);
        guest.offer(0, &chain);
        guest.run();
        assert!(guest.needs_reset(), "{chain:?}");
    }
}

#[test]
fn the_serial_number_is_what_was_set() {
    let bench = bench(BLOCK);
    let mut block = Block::open(&bench.disk).unwrap();
    block.set_id("a-name-longer-than-twenty-bytes");
    let mut guest = Guest::boot(Box::new(block), true);
    let at = guest.alloc(20);
    assert_eq!(request(&mut guest, T_GET_ID, 0, &[(at, 20, WRITE)]), (S_OK, 21));
    assert_eq!(guest.bytes(at, 20), *b"a-name-longer-than-t");
}

#[test]
fn a_read_only_disk_takes_no_writes() {
    let mut bench = bench(8 * BLOCK);
    bench.disk.read_only = true;
    let mut guest = bench.guest(true);
    assert_ne!(guest.offered_features() & F_RO, 0);
    assert_eq!(guest.offered_features() & (F_DISCARD | F_WRITE_ZEROES), 0);
    let at = guest.put(&[7; 512]);
    assert_eq!(request(&mut guest, T_OUT, 0, &[(at, 512, READ)]).0, S_IOERR);
    assert_eq!(read(&mut guest, 0, 512), bench.base[..512]);
}

#[test]
fn the_write_limit_holds_and_is_given_back() {
    let mut bench = bench(64 * BLOCK);
    bench.disk.write_limit = 4 * BLOCK as u64;
    let mut guest = bench.guest(true);
    write(&mut guest, 0, &[1; 3 * BLOCK]);
    let at = guest.put(&[2; 2 * BLOCK]);
    for round in 0..3 {
        let overrun = [(at, 2 * BLOCK as u32, READ)];
        assert_eq!(request(&mut guest, T_OUT, 32, &overrun).0, S_IOERR);
        let told = guest.transport.take_failure().map(|failure| failure.to_string());
        assert_eq!(told.is_some_and(|told| told.contains("limit")), round == 0);
        assert_eq!(guest.transport.take_full(), round == 0);
    }
    // What is there may be written again, and one block is left.
    write(&mut guest, 8, &[3; 3 * BLOCK]);
    assert_eq!(guest.transport.device().overlay_bytes(), Some(4 * BLOCK as u64));
    zero(&mut guest, T_DISCARD, 0, 16, 0);
    write(&mut guest, 64, &[4; 2 * BLOCK]);
    assert_eq!(read(&mut guest, 0, 2 * BLOCK), [0; 2 * BLOCK]);
}

fn zero(guest: &mut Guest, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
    let mut raw = Vec::from(sector.to_le_bytes());
    raw.extend(count.to_le_bytes());
    raw.extend(flags.to_le_bytes());
    let at = guest.put(&raw);
    request(guest, kind, 0, &[(at, 16, READ)]).0
}

#[test]
fn discard_takes_only_what_it_may() {
    let bench = bench(8 * BLOCK);
    let mut guest = bench.guest(true);
    assert_eq!(zero(&mut guest, T_DISCARD, 0, 8, 1), S_UNSUPP);
    assert_eq!(zero(&mut guest, T_WRITE_ZEROES, 0, 8, 1), S_OK);
    assert_eq!(zero(&mut guest, T_WRITE_ZEROES, 0, 8, 2), S_UNSUPP);
    assert_eq!(zero(&mut guest, T_DISCARD, 60, 8, 0), S_IOERR);
    assert_eq!(zero(&mut guest, T_DISCARD, u64::MAX, u32::MAX, 0), S_IOERR);
}

#[test]
fn a_base_that_ends_inside_a_block_is_readable_to_its_end() {
    let bench = bench(5 * 512 + 100);
    let mut guest = bench.guest(true);
    let mut expected = bench.base;
    expected.resize(6 * 512, 0);
    assert_eq!(read(&mut guest, 0, 6 * 512), expected);
    write(&mut guest, 5, &[9; 512]);
    expected[5 * 512..].fill(9);
    assert_eq!(read(&mut guest, 0, 6 * 512), expected);
    assert_eq!(zero(&mut guest, T_WRITE_ZEROES, 0, 6, 0), S_OK);
    assert_eq!(read(&mut guest, 0, 6 * 512), [0; 6 * 512]);
}

#[test]
fn three_generations_see_what_the_last_one_wrote() {
    let bench = bench(256 * BLOCK);
    let mut expected = bench.base.clone();
    let mut guest = bench.guest(true);
    for generation in 0..3u8 {
        let start = usize::from(generation) * 5 * BLOCK + 512;
        let data = vec![0xa0 + generation; 9 * BLOCK];
        write(&mut guest, start as u64 / 512, &data);
        expected[start..][..data.len()].copy_from_slice(&data);
        let gone = (100 + usize::from(generation)) * BLOCK;
        assert_eq!(zero(&mut guest, T_DISCARD, gone as u64 / 512, 8, 0), S_OK);
        expected[gone..][..BLOCK].fill(0);

        // One request is in the queue, its kick lost.
        let at = guest.put(&[0x55; BLOCK]);
        let status = guest.put(&[0xff]);
        let head = header(&mut guest, T_OUT, 200 * 8);
        guest.offer(0, &[(head, 16, READ), (at, BLOCK as u32, READ), (status, 1, WRITE)]);

        let frozen = guest.freeze();
        let (overlay, bytes) = bench.overlay(&guest, &format!("generation-{generation}"));
        assert!(bytes <= 21 * BLOCK as u64, "{bytes} bytes: the overlay grows with each life");
        let disk = Disk { overlay: Some(overlay), ..bench.disk.clone() };
        guest = Guest::thaw(&frozen, Box::new(Block::open(&disk).unwrap()));
        guest.run();
        assert_eq!(guest.finished(0).len(), 1);
        assert_eq!(guest.bytes(status, 1), [S_OK]);
        expected[200 * BLOCK..][..BLOCK].fill(0x55);
        assert_eq!(read(&mut guest, 0, 256 * BLOCK), expected);
        assert_eq!(guest.transport.device().overlay_bytes(), Some(BLOCK as u64));
    }
}

#[test]
fn a_saved_state_is_refused_where_it_does_not_belong() {
    let bench = bench(64 * BLOCK);
    let mut guest = bench.guest(true);
    write(&mut guest, 8 * 30, &[1; BLOCK]);
    guest.transport.quiesce().unwrap();
    let saved = guest.transport.device().save().unwrap();
    let (overlay, _) = bench.overlay(&guest, "overlay");
    let whole = Disk { overlay: Some(overlay.clone()), ..bench.disk.clone() };
    let restore = |disk: &Disk, saved: &SavedDevice| {
        Block::open(disk).unwrap().restore(saved, None).map_err(|error| error.to_string())
    };
    restore(&whole, &saved).unwrap();

    assert!(restore(&bench.disk, &saved).unwrap_err().contains("none is given"));
    let other = self::bench(65 * BLOCK);
    assert!(restore(&other.disk, &saved).unwrap_err().contains("65"));
    let read_only = Disk { read_only: true, ..whole.clone() };
    assert!(restore(&read_only, &saved).unwrap_err().contains("read-only"));
    for (change, what) in [
        (SavedDevice { version: 9, ..saved.clone() }, "version 9"),
        (SavedDevice { kind: "net".into(), ..saved.clone() }, "net"),
        (SavedDevice { payload: vec![], ..saved.clone() }, "decoded"),
        (
            SavedDevice { payload: [&saved.payload[..], &[0]].concat(), ..saved.clone() },
            "left over",
        ),
    ] {
        let error = restore(&whole, &change).unwrap_err();
        assert!(error.contains(what), "{error}");
    }
    File::options().write(true).open(&overlay).unwrap().set_len(30 * BLOCK as u64).unwrap();
    assert!(restore(&whole, &saved).unwrap_err().contains("its map needs"));
}

#[test]
fn an_overlay_that_is_cut_short_behind_our_back_fails_reads_and_is_told() {
    let bench = bench(64 * BLOCK);
    let mut guest = bench.guest(true);
    write(&mut guest, 8 * 30, &[1; BLOCK]);
    let frozen = guest.freeze();
    let (overlay, _) = bench.overlay(&guest, "overlay");
    let disk = Disk { overlay: Some(overlay.clone()), ..bench.disk.clone() };
    let mut next = Guest::thaw(&frozen, Box::new(Block::open(&disk).unwrap()));
    File::options().write(true).open(&overlay).unwrap().set_len(0).unwrap();
    let at = next.alloc(BLOCK);
    assert_eq!(request(&mut next, T_IN, 240, &[(at, BLOCK as u32, WRITE)]).0, S_IOERR);
    assert!(matches!(next.transport.take_failure(), Some(DeviceError::Io { .. })));
    assert!(!next.needs_reset());
    assert_eq!(read(&mut next, 0, BLOCK), bench.base[..BLOCK]);
}

#[test]
fn a_map_that_lies_is_refused() {
    for runs in [
        vec![(0, 11, false)],
        vec![(10, 1, true)],
        vec![(u64::MAX, 2, false)],
        vec![(1, u64::MAX, false)],
        vec![(0, 5, false), (0, 6, true)],
    ] {
        let map = SavedMap { blocks: 10, runs };
        assert!(map.revive().is_err(), "{map:?}");
    }
}

#[test]
fn opening_copies_nothing_however_large_the_disk() {
    let mut bench = bench(0);
    let file = File::options().write(true).open(&bench.disk.base).unwrap();
    file.set_len(1 << 40).unwrap();
    bench.disk.scratch = Some(bench.dir.path().to_owned());
    let start = std::time::Instant::now();
    for _ in 0..100 {
        drop(Block::open(&bench.disk).unwrap());
    }
    // 1 TiB a hundred times: any copy, scan or zeroing would take minutes.
    assert!(start.elapsed().as_secs() < 5);
    file.set_len((8 << 40) + 1).unwrap();
    assert!(Block::open(&bench.disk).is_err());
}

#[test]
fn errors_name_the_file() {
    let mut bench = bench(0);
    bench.disk.scratch = Some("/no/such/directory".into());
    let error = Block::open(&bench.disk).err().unwrap().to_string();
    assert!(error.contains("/no/such/directory"), "{error}");
    bench.disk.base = bench.dir.path().join("missing");
    let error = Block::open(&bench.disk).err().unwrap().to_string();
    assert!(error.contains("missing"), "{error}");
    bench.disk.base = bench.dir.path().to_owned();
    let error = Block::open(&bench.disk).err().unwrap().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

#[derive(Debug, Clone)]
enum Step {
    Write { sector: u64, sectors: usize, fill: u8 },
    Zero { sector: u64, sectors: usize },
    Read { sector: u64, sectors: usize },
    Snapshot,
}

fn step(sectors: u64) -> impl Strategy<Value = Step> {
    let range = (0..sectors, 1usize..40)
        .prop_map(move |(sector, count)| (sector, count.min((sectors - sector) as usize)));
    prop_oneof![
        4 => (range.clone(), any::<u8>())
            .prop_map(|((sector, sectors), fill)| Step::Write { sector, sectors, fill }),
        2 => range.clone().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        2 => range.prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        1 => Just(Step::Snapshot),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever is done to it, the disk is an array of bytes, over any number of lives.
    #[test]
    fn a_disk_is_an_array(tail in 0usize..8, steps in prop::collection::vec(step(300), 1..60)) {
        let bench = bench((293 + tail) * 512);
        let sectors = 293 + tail;
        let mut model = bench.base.clone();
        let mut guest = bench.guest(tail % 2 == 0);
        for (index, step) in steps.into_iter().enumerate() {
            let clip = |sector: u64, count: usize| {
                let sector = (sector as usize).min(sectors - 1);
                (sector, count.min(sectors - sector))
            };
            match step {
                Step::Write { sector, sectors, fill } => {
                    let (sector, sectors) = clip(sector, sectors);
                    write(&mut guest, sector as u64, &vec![fill; sectors * 512]);
                    model[sector * 512..][..sectors * 512].fill(fill);
                }
                Step::Zero { sector, sectors } => {
                    let (sector, sectors) = clip(sector, sectors);
                    let kind = if index % 2 == 0 { T_DISCARD } else { T_WRITE_ZEROES };
                    prop_assert_eq!(
                        zero(&mut guest, kind, sector as u64, sectors as u32, 0), S_OK);
                    model[sector * 512..][..sectors * 512].fill(0);
                }
                Step::Read { sector, sectors } => {
                    let (sector, sectors) = clip(sector, sectors);
                    let data = read(&mut guest, sector as u64, sectors * 512);
                    prop_assert_eq!(&data[..], &model[sector * 512..][..sectors * 512]);
                }
                Step::Snapshot => {
                    let frozen = guest.freeze();
                    let (overlay, _) = bench.overlay(&guest, &index.to_string());
                    let disk = Disk { overlay: Some(overlay), ..bench.disk.clone() };
                    guest = Guest::thaw(&frozen, Box::new(Block::open(&disk).unwrap()));
                    guest.run();
                }
            }
        }
        prop_assert_eq!(read(&mut guest, 0, sectors * 512), model);
    }
}
