//! Random trees before all judges, and the same tree twice.

mod judge;

use judge::plot::{Plot, digest, meta, noise, options};
use parbake_builder::ext4::Options;
use parbake_builder::tree::{FileData, Kind, NodeId, Run, Timestamp};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

/// What to add to a tree. Indexes are taken modulo what is there.
#[derive(Debug, Clone)]
enum Step {
    Directory,
    /// Blocks at these logical distances, and bytes behind the last.
    File(Vec<(u8, u8)>, u16),
    Symlink(Vec<u8>),
    Char(u32, u32),
    Block(u32, u32),
    Fifo,
    Socket,
    /// One more name for an earlier node that is no directory.
    Link(usize),
    /// Takes a name away; what it led to may be dead then.
    Unlink,
    /// Many names at once, so that directories get an index.
    Crowd(u16),
}

#[derive(Debug, Clone)]
struct Adding {
    parent: usize,
    name: Vec<u8>,
    step: Step,
    mode: u16,
    uid: u32,
    gid: u32,
    seconds: i64,
    nanos: u32,
    xattrs: Vec<(u8, Vec<u8>, Vec<u8>)>,
}

fn bytes(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u8>> {
    vec(1u8.., length)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Directory),
        6 => (vec((0u8..3, 1u8..6), 0..40), any::<u16>()).prop_map(|(runs, tail)| Step::File(runs, tail)),
        2 => bytes(1..300).prop_map(Step::Symlink),
        1 => (0u32..4096, 0u32..1 << 20).prop_map(|(major, minor)| Step::Char(major, minor)),
        1 => (0u32..4096, 0u32..1 << 20).prop_map(|(major, minor)| Step::Block(major, minor)),
        1 => Just(Step::Fifo),
        1 => Just(Step::Socket),
        3 => any::<usize>().prop_map(Step::Link),
        1 => Just(Step::Unlink),
        1 => (1u16..1200).prop_map(Step::Crowd),
    ]
}

fn adding() -> impl Strategy<Value = Adding> {
    let name = prop_oneof![bytes(1..20), bytes(200..256)];
    let seconds = prop_oneof![any::<i64>(), -3_000_000_000i64..16_000_000_000];
    let xattrs = btree_map((0u8..3, bytes(1..40)), vec(any::<u8>(), 0..90), 0..4);
    let owner = (any::<u32>(), any::<u32>());
    let time = (seconds, 0u32..1_000_000_000);
    let node = (any::<usize>(), name, step(), 0u16..0o10000);
    (node, owner, time, xattrs).prop_map(|(node, (uid, gid), (seconds, nanos), xattrs)| Adding {
        parent: node.0,
        name: node.1,
        step: node.2,
        mode: node.3,
        // -1 means "no owner" to Linux.
        uid: uid & !1,
        gid: gid & !1,
        seconds,
        nanos,
        xattrs: xattrs.into_iter().map(|((prefix, name), value)| (prefix, name, value)).collect(),
    })
}

fn sparse(plot: &mut Plot, runs: &[(u8, u8)], tail: u16) -> FileData {
    let mut data = FileData::default();
    let mut logical = 0;
    for &(distance, blocks) in runs {
        logical += u32::from(distance);
        let piece = plot.data(&noise(u64::from(logical), usize::from(blocks) * 4096));
        for run in piece.runs {
            data.runs.push(Run { logical: logical + run.logical, ..run });
        }
        if distance == 2 {
            // Something else comes between, so that runs cannot be merged.
            plot.area.allocate(1, |_, _| ());
        }
        logical += u32::from(blocks);
    }
    data.size = u64::from(logical) * 4096 + u64::from(tail);
    data
}

fn grow(steps: &[Adding]) -> Plot {
    let mut plot = Plot::new();
    let mut directories = vec![NodeId::ROOT];
    let mut others = Vec::new();
    for adding in steps {
        let parent = directories[adding.parent % directories.len()];
        let mut name = adding.name.clone();
        for byte in &mut name {
            if *byte == b'/' {
                *byte = b'|';
            }
        }
        if name == b"." || name == b".." {
            name = b"...".to_vec();
        }
        let Kind::Directory(entries) = &mut plot.tree.nodes[parent.0 as usize].kind else {
            unreachable!("directories only");
        };
        if matches!(adding.step, Step::Unlink) {
            let victim = entries.iter().find(|(_, id)| !directories.contains(id));
            if let Some(name) = victim.map(|(name, _)| name.clone()) {
                entries.remove(&name);
            }
            continue;
        }
        if entries.contains_key(&*name) {
            continue;
        }
        let kind = match &adding.step {
            Step::Directory => Kind::Directory(Default::default()),
            Step::File(runs, tail) => Kind::File(sparse(&mut plot, runs, *tail)),
            Step::Symlink(target) => Kind::Symlink(target.as_slice().into()),
            Step::Char(major, minor) => Kind::CharDevice(Plot::device(*major, *minor)),
            Step::Block(major, minor) => Kind::BlockDevice(Plot::device(*major, *minor)),
            Step::Fifo => Kind::Fifo,
            Step::Socket => Kind::Socket,
            Step::Link(index) => {
                if let Some(&id) = others.get(index % others.len().max(1)) {
                    plot.link(parent, name, id);
                }
                continue;
            }
            Step::Crowd(count) => {
                let id = plot.node(Kind::Fifo, meta(0o600));
                for number in 0..*count {
                    plot.link(parent, format!("crowd {number}"), id);
                }
                continue;
            }
            Step::Unlink => continue,
        };
        let directory = matches!(kind, Kind::Directory(_));
        let node = plot.node(kind, meta(adding.mode));
        let meta = plot.meta(node);
        (meta.uid, meta.gid) = (adding.uid, adding.gid);
        meta.mtime = Timestamp { seconds: adding.seconds, nanos: adding.nanos };
        for (prefix, name, value) in &adding.xattrs {
            let prefix = [&b"user."[..], b"trusted.", b"security.x"][usize::from(*prefix)];
            let name = [prefix, name].concat();
            meta.xattrs.insert(name.into(), value.as_slice().into());
        }
        plot.link(parent, name, node);
        if directory {
            directories.push(node);
        } else {
            others.push(node);
        }
    }
    plot
}

/// A case takes several tens of milliseconds; `PROPTEST_CASES` asks for more.
fn config() -> ProptestConfig {
    let mut config = ProptestConfig { max_shrink_iters: 200, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 24;
    }
    config
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_tree_is_what_it_says_and_always_the_same_bytes(
        steps in vec(adding(), 0..120),
        journal: bool,
        free_bytes in 0u64..16 << 20,
        free_inodes in 0u64..5000,
    ) {
        let asked = Options { journal, free_bytes, free_inodes, ..options() };
        let plot = grow(&steps);
        plot.finish(&asked);
        plot.judge();
        let again = grow(&steps);
        again.finish(&asked);
        prop_assert_eq!(digest(&plot.path), digest(&again.path));
    }
}
