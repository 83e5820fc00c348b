//! What each layer and each path costs.

use std::collections::HashSet;

use crate::tree::{Kind, NodeId, Tree};

const BLOCK: u64 = 4096;

/// What was measured while a layer was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerInput {
    /// Bytes of its blob.
    pub blob_bytes: u64,
    /// Bytes of blocks its files' contents were written to, whether they are still used or not.
    pub written_bytes: u64,
    /// Entries in its tar.
    pub entries: u64,
}

/// Which layer made each node of a tree. Two bytes for each node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attribution {
    origin: Vec<u16>,
    inputs: Vec<LayerInput>,
}

/// What a layer costs in the finished image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerCost {
    /// What was measured while it was read.
    pub input: LayerInput,
    /// Bytes of file contents that are still used, in whole blocks.
    pub live_bytes: u64,
    /// Its files, directories and other nodes that are still there.
    pub live_nodes: u64,
}

impl LayerCost {
    /// Bytes written for files that a higher layer hid or replaced.
    #[must_use]
    pub fn hidden_bytes(&self) -> u64 {
        self.input.written_bytes.saturating_sub(self.live_bytes)
    }
}

/// What a path costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathCost {
    /// The path from the root, without a leading slash; empty for the root.
    pub path: Vec<u8>,
    /// Bytes of file contents in and below it, in whole blocks. A file with several names counts
    /// at the first of them in name order.
    pub bytes: u64,
    /// Nodes in and below it.
    pub nodes: u64,
    /// The layer that made it, counted from 0.
    pub layer: u16,
}

impl Attribution {
    pub(super) fn new(origin: Vec<u16>, inputs: Vec<LayerInput>) -> Self {
        Self { origin, inputs }
    }

    /// The layer that made a node, counted from 0.
    #[must_use]
    pub fn layer(&self, node: NodeId) -> Option<u16> {
        self.origin.get(node.0 as usize).copied()
    }

    /// What each layer costs, lowest first.
    #[must_use]
    pub fn layers(&self, tree: &Tree) -> Vec<LayerCost> {
        let mut costs: Vec<LayerCost> =
            self.inputs.iter().map(|&input| LayerCost { input, ..LayerCost::default() }).collect();
        walk(tree, |_, node, first| {
            let layer = self.layer(node).unwrap_or(0);
            if let Some(cost) = costs.get_mut(usize::from(layer)).filter(|_| first) {
                cost.live_bytes += bytes(tree, node);
                cost.live_nodes += 1;
            }
        });
        costs
    }

    /// What each path down to `depth` components costs (1: the root's own entries), in name order;
    /// the root itself is the first.
    #[must_use]
    pub fn paths(&self, tree: &Tree, depth: usize) -> Vec<PathCost> {
        let mut costs: Vec<PathCost> = Vec::new();
        // Where the directories around the current node stand in `costs`.
        let mut around: Vec<usize> = Vec::new();
        walk(tree, |path, node, first| {
            if path.len() <= depth {
                around.truncate(path.len());
                around.push(costs.len());
                costs.push(PathCost {
                    path: path.join(&b'/'),
                    bytes: 0,
                    nodes: 0,
                    layer: self.layer(node).unwrap_or(0),
                });
            }
            if first {
                for &index in &around[..around.len().min(path.len() + 1)] {
                    costs[index].bytes += bytes(tree, node);
                    costs[index].nodes += 1;
                }
            }
        });
        costs
    }
}

fn bytes(tree: &Tree, node: NodeId) -> u64 {
    match &tree.nodes[node.0 as usize].kind {
        Kind::File(file) => file.runs.iter().map(|run| u64::from(run.blocks) * BLOCK).sum(),
        _ => 0,
    }
}

/// Visits every name of the tree in depth-first name order; `visit` gets the path, the node, and
/// whether this is the node's first name. Not recursive: trees may be deeper than the stack.
fn walk<'t>(tree: &'t Tree, mut visit: impl FnMut(&[&'t [u8]], NodeId, bool)) {
    let mut seen = HashSet::new();
    let mut path: Vec<&[u8]> = Vec::new();
    let children = |node: NodeId| match &tree.nodes[node.0 as usize].kind {
        Kind::Directory(entries) => Some(entries.iter()),
        _ => None,
    };
    visit(&path, NodeId::ROOT, true);
    let mut stack: Vec<_> = children(NodeId::ROOT).into_iter().collect();
    while let Some(entries) = stack.last_mut() {
        let Some((name, &node)) = entries.next() else {
            stack.pop();
            path.pop();
            continue;
        };
        path.push(name);
        match children(node) {
            Some(entries) => {
                visit(&path, node, true);
                stack.push(entries);
            }
            None => {
                // Only files can have several names; remembering the rest would cost for nothing.
                let first =
                    !matches!(tree.nodes[node.0 as usize].kind, Kind::File(_)) || seen.insert(node);
                visit(&path, node, first);
                path.pop();
            }
        }
    }
}
