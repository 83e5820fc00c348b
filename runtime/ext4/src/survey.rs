//! One walk over the tree: which nodes live, their inode numbers, their link counts.

use super::WriteError;
use super::superblock::{FIRST_INODE, ROOT_INODE};
use crate::tree::{Kind, Node, NodeId, Tree};

/// What the walk found.
#[derive(Debug)]
pub struct Survey<'t> {
    tree: &'t Tree,
    /// Live nodes in the order of their inode numbers.
    order: Vec<NodeId>,
    /// Inode number of each node of the tree; 0 for dead ones.
    numbers: Vec<u32>,
    /// Names of each live node, in `order`; for a directory, its `..`s and `.` are counted.
    links: Vec<u32>,
    /// Each directory's place in `order` and its parent's inode number, in `order`.
    pub directories: Vec<(usize, u32)>,
}

/// Inode number of a node. All nodes have one, also those that a higher layer removed: what a layer
/// brings is numbered alike whatever lies above it, and the numbers of the dead are free inodes.
fn number_of(id: NodeId) -> u32 {
    match id {
        NodeId::ROOT => ROOT_INODE,
        // Survey::of keeps the number of nodes that far below 2^32.
        NodeId(index) => FIRST_INODE - 1 + index,
    }
}

impl<'t> Survey<'t> {
    /// Walks the tree.
    pub fn of(tree: &'t Tree) -> Result<Self, WriteError> {
        let bad = |why| WriteError::Tree { path: "/".into(), why };
        let Some(Kind::Directory(root)) = tree.nodes.first().map(|node| &node.kind) else {
            return Err(bad("the root is not a directory"));
        };
        // First what lives, with its names counted, by node; 0 names for what does not.
        let mut names = vec![0u32; tree.nodes.len()];
        let mut parents = vec![NodeId::ROOT; tree.nodes.len()];
        names[0] = 2;
        let mut live = 1usize;
        let mut open = vec![(NodeId::ROOT, root.iter())];
        while let Some((parent, entries)) = open.last_mut() {
            let parent = *parent;
            let Some((name, &id)) = entries.next() else {
                open.pop();
                continue;
            };
            if let Err(why) = check_name(name) {
                return Err(WriteError::Name { path: path_below(tree, parent, name), why });
            }
            let Some(node) = tree.nodes.get(id.0 as usize) else {
                return Err(WriteError::Tree {
                    path: path_below(tree, parent, name),
                    why: "the entry names a node that does not exist",
                });
            };
            let known = &mut names[id.0 as usize];
            if *known != 0 {
                if matches!(node.kind, Kind::Directory(_)) {
                    return Err(WriteError::Tree {
                        path: path_below(tree, parent, name),
                        why: "the directory has a second name",
                    });
                }
                *known += 1;
                continue;
            }
            *known = 1;
            live += 1;
            if let Kind::Directory(entries) = &node.kind {
                *known = 2;
                names[parent.0 as usize] += 1;
                parents[id.0 as usize] = parent;
                open.push((id, entries.iter()));
            }
        }
        if tree.nodes.len() > (u32::MAX - FIRST_INODE) as usize {
            return Err(WriteError::TooManyInodes);
        }
        let mut survey = Self {
            tree,
            order: Vec::with_capacity(live),
            numbers: vec![0; tree.nodes.len()],
            links: Vec::with_capacity(live),
            directories: Vec::new(),
        };
        for (id, &names) in (0..).map(NodeId).zip(&names).filter(|&(_, &names)| names > 0) {
            survey.numbers[id.0 as usize] = number_of(id);
            survey.order.push(id);
            survey.links.push(names);
        }
        for (place, id) in survey.order.iter().enumerate() {
            if matches!(tree.nodes[id.0 as usize].kind, Kind::Directory(_)) {
                let parent = survey.numbers[parents[id.0 as usize].0 as usize];
                survey.directories.push((place, parent));
            }
        }
        Ok(survey)
    }

    /// Number of live nodes.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Inode number of the node at a place in the order.
    pub fn number(&self, place: usize) -> u32 {
        number_of(self.order[place])
    }

    /// The place of an inode number in the order, if it is in use. Not for reserved inodes.
    pub fn place(&self, number: u32) -> Option<usize> {
        self.order.binary_search(&NodeId(number - (FIRST_INODE - 1))).ok()
    }

    /// The node at a place in the order.
    pub fn node(&self, place: usize) -> &'t Node {
        &self.tree.nodes[self.order[place].0 as usize]
    }

    /// A live node.
    pub fn target(&self, id: NodeId) -> (u32, &'t Node) {
        let index = id.0 as usize;
        (self.numbers[index], &self.tree.nodes[index])
    }

    /// Number of names of the node at a place in the order.
    pub fn links(&self, place: usize) -> u32 {
        self.links[place]
    }

    /// The first path of the node at a place in the order. Searches the tree: for errors only.
    pub fn path(&self, place: usize) -> String {
        path_below(self.tree, self.order[place], b"")
    }
}

/// A path of a node, and perhaps a name below it.
fn path_below(tree: &Tree, wanted: NodeId, name: &[u8]) -> String {
    let mut path = Vec::new();
    for name in find(tree, wanted) {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    if path.is_empty() || !name.is_empty() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    String::from_utf8_lossy(&path).escape_debug().to_string()
}

/// The names that lead from the root to a node; none for the root and for what is not found.
fn find(tree: &Tree, wanted: NodeId) -> Vec<&[u8]> {
    let entries = |id: NodeId| match tree.nodes.get(id.0 as usize).map(|node| &node.kind) {
        Some(Kind::Directory(entries)) => Some(entries.iter()),
        _ => None,
    };
    let mut names: Vec<&[u8]> = Vec::new();
    // A tree that is none (a directory below itself) must not keep the search from ending.
    let mut visited = vec![false; tree.nodes.len()];
    let mut open = Vec::from_iter(entries(NodeId::ROOT));
    if wanted == NodeId::ROOT {
        return names;
    }
    while let Some(level) = open.last_mut() {
        let Some((name, &id)) = level.next() else {
            open.pop();
            names.pop();
            continue;
        };
        if id == wanted {
            names.push(name);
            return names;
        }
        if let Some(below) = entries(id)
            && !std::mem::replace(&mut visited[id.0 as usize], true)
        {
            names.push(name);
            open.push(below);
        }
    }
    names
}

fn check_name(name: &[u8]) -> Result<(), &'static str> {
    match name {
        b"" => Err("it is empty"),
        b"." | b".." => Err("it is reserved"),
        _ if name.len() > 255 => Err("it is longer than 255 bytes"),
        _ if name.contains(&b'/') => Err("it contains a slash"),
        _ if name.contains(&0) => Err("it contains a zero byte"),
        _ => Ok(()),
    }
}
