//! Random stacks of layers against a model that is too simple to be wrong in the same way: a map
//! from paths to things, in which markers are applied to the whole lower map before anything of
//! their layer is added.

mod layers;

use std::collections::{BTreeMap, BTreeSet};

use layers::{Entry, Tar, show};
use proptest::prelude::*;

type Path = Vec<&'static str>;

#[derive(Debug, Clone)]
enum Op {
    File(Path, u8),
    Directory(Path, u64),
    Symlink(Path),
    Link(Path, Path),
}

#[derive(Debug, Clone)]
enum Marker {
    Whiteout(Path),
    Opaque(Path),
}

#[derive(Debug, Clone, Default)]
struct Layer {
    ops: Vec<Op>,
    /// With the place among the operations, as a fraction of 256.
    markers: Vec<(Marker, u8)>,
}

#[derive(Debug, Clone, PartialEq)]
enum Thing {
    /// Mode and whether it is only implied.
    Directory(u64, bool),
    /// Index of an inode.
    Inode(usize),
}

#[derive(Debug, Clone, Default)]
struct Model {
    things: BTreeMap<Path, Thing>,
    /// What each inode shows.
    inodes: Vec<String>,
}

impl Op {
    fn path(&self) -> &Path {
        match self {
            Self::File(path, _)
            | Self::Directory(path, _)
            | Self::Symlink(path)
            | Self::Link(path, _) => path,
        }
    }
}

impl Model {
    fn remove_below(&mut self, path: &[&str]) {
        self.things.retain(|other, _| !(other.len() > path.len() && other.starts_with(path)));
    }

    fn put(&mut self, path: &Path, thing: Thing) {
        for length in 1..path.len() {
            let parent = &path[..length];
            if !matches!(self.things.get(parent), Some(Thing::Directory(..))) {
                self.things.insert(parent.to_vec(), Thing::Directory(0o755, true));
            }
        }
        let stays = matches!(
            (&thing, self.things.get(path)),
            (Thing::Directory(..), Some(Thing::Directory(..)))
        );
        if !stays {
            self.remove_below(path);
        }
        self.things.insert(path.clone(), thing);
    }

    fn target(&self, lower: &Self, target: &Path) -> Option<usize> {
        for length in 1..target.len() {
            if let Some(Thing::Inode(_)) = self.things.get(&target[..length]) {
                return None;
            }
        }
        match self.things.get(target).or_else(|| lower.things.get(target))? {
            Thing::Inode(inode) => Some(*inode),
            Thing::Directory(..) => None,
        }
    }

    /// Lays a layer over the model, and takes out of it what makes no sense.
    fn apply(&mut self, layer: &mut Layer) {
        let lower = self.clone();
        for (marker, _) in &layer.markers {
            match marker {
                Marker::Whiteout(path) => {
                    self.remove_below(path);
                    self.things.remove(path);
                }
                Marker::Opaque(path) => self.remove_below(path),
            }
        }
        let mut used: BTreeMap<Path, bool> = BTreeMap::new();
        layer.ops.retain(|op| {
            let path = op.path();
            let directory = matches!(op, Op::Directory(..));
            // One layer does not say two things about one name (OCI layer.md), nor that it is a
            // file and a directory.
            let clash = used.contains_key(path)
                || (1..path.len()).any(|length| used.get(&path[..length]) == Some(&false))
                || (!directory && used.keys().any(|other| other.starts_with(path)));
            let link = match op {
                Op::Link(path, target) if path != target => self.target(&lower, target),
                Op::Link(..) => None,
                _ => Some(usize::MAX),
            };
            let Some(link) = link.filter(|_| !clash) else { return false };
            used.insert(path.clone(), directory);
            let thing = match op {
                Op::Directory(_, mode) => Thing::Directory(*mode, false),
                Op::Link(..) => Thing::Inode(link),
                Op::File(_, byte) => {
                    self.inodes.push(format!("={}", byte.escape_ascii()));
                    Thing::Inode(self.inodes.len() - 1)
                }
                Op::Symlink(_) => {
                    self.inodes.push("->x y".to_owned());
                    Thing::Inode(self.inodes.len() - 1)
                }
            };
            self.put(path, thing);
            true
        });
    }

    fn text(&self) -> String {
        let mut names = BTreeMap::new();
        for thing in self.things.values() {
            if let Thing::Inode(inode) = thing {
                *names.entry(*inode).or_insert(0) += 1;
            }
        }
        let mut shared = Vec::new();
        let mut text = String::new();
        for (path, thing) in &self.things {
            text += &path.join("/");
            match thing {
                Thing::Directory(mode, implied) => {
                    text += "/";
                    if *mode != 0o755 {
                        text += &format!(" {mode:o}");
                    }
                    if *implied {
                        text += " @0";
                    }
                }
                Thing::Inode(inode) => {
                    text += &self.inodes[*inode];
                    if names[inode] > 1 {
                        let number =
                            shared.iter().position(|other| other == inode).unwrap_or_else(|| {
                                shared.push(*inode);
                                shared.len() - 1
                            });
                        text += &format!(" #{number}");
                    }
                }
            }
            text += "\n";
        }
        text
    }
}

fn tar(layer: &Layer) -> Vec<u8> {
    let mut tar = Tar::new();
    let mut marked = BTreeSet::new();
    for at in 0..=layer.ops.len() {
        for (index, (marker, place)) in layer.markers.iter().enumerate() {
            if usize::from(*place) * (layer.ops.len() + 1) / 256 != at {
                continue;
            }
            marked.insert(index);
            let name = match marker {
                Marker::Whiteout(path) => {
                    let (name, parents) = path.split_last().expect("a name");
                    [parents, &[&format!(".wh.{name}")[..]]].concat().join("/")
                }
                Marker::Opaque(path) => [&path[..], &[".wh..wh..opq"]].concat().join("/"),
            };
            tar = tar.mark(name);
        }
        tar = match layer.ops.get(at) {
            None => tar,
            Some(Op::File(path, byte)) => tar.file(path.join("/"), [*byte]),
            Some(Op::Directory(path, mode)) => {
                tar.entry(Entry::new(b'5', path.join("/")).mode(*mode))
            }
            Some(Op::Symlink(path)) => tar.symlink(path.join("/"), "x y"),
            Some(Op::Link(path, target)) => tar.hardlink(path.join("/"), target.join("/")),
        };
    }
    assert_eq!(marked.len(), layer.markers.len());
    tar.finish()
}

fn path() -> impl Strategy<Value = Path> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (path(), b'0'..=b'9').prop_map(|(path, byte)| Op::File(path, byte)),
        3 => (path(), prop::sample::select(vec![0o755, 0o700])).prop_map(|(path, mode)| Op::Directory(path, mode)),
        // Links with a name of their own, so that they are never anyone's parent.
        1 => path().prop_map(|mut path| { path.push("s"); Op::Symlink(path) }),
        3 => (path(), path()).prop_map(|(path, target)| Op::Link(path, target)),
    ]
}

fn layer() -> impl Strategy<Value = Layer> {
    let marker = prop_oneof![
        3 => path().prop_map(Marker::Whiteout),
        1 => prop::collection::vec(prop::sample::select(vec!["a", "b"]), 0..3).prop_map(Marker::Opaque),
    ];
    (prop::collection::vec(op(), 0..10), prop::collection::vec((marker, any::<u8>()), 0..4))
        .prop_map(|(ops, markers)| Layer { ops, markers })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn stacks_flatten_as_the_model_says(mut layers in prop::collection::vec(layer(), 1..5)) {
        let mut model = Model::default();
        for layer in &mut layers {
            model.apply(layer);
        }
        let shown = show(layers.iter().map(tar));
        prop_assert_eq!(shown, Ok(model.text()));
    }
}
