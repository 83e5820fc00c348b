//! The tree while layers are laid over it, lowest first.
//!
//! The rules are those of the OCI image specification's layer document; where it is silent:
//!
//! - Entries apply in archive order; the last one of a name wins.
//! - Whiteouts and opaque markers hide what *lower* layers have, wherever in the layer they stand.
//!   What the same layer adds stays, before or after the marker.
//! - A parent that is a symbolic link is followed, inside the root only: absolute targets begin at
//!   the root, `..` at the root stays there. The last component of a name is never followed.
//! - Parents that do not exist are made: directories 0755, owned by 0:0, with a fixed time. A
//!   parent that is neither directory nor link is replaced by one.
//! - A hard link takes the file its target is *now*; later changes of either name leave the other
//!   alone. A target that a marker of the same layer has hidden is still found, so that the order
//!   of marker and link does not matter. Attributes in the link's own entry are ignored.
//! - A directory entry over a directory replaces its attributes and keeps its children; over
//!   anything else it replaces the thing. Anything else over a directory removes the subtree.
//!
//! Which entries belong to the layer being applied is known without a mark on each: nodes are
//! numbered in order, so those of the layer have the highest numbers. Only what a layer says about
//! lower nodes (links to them, new attributes of directories, additions below them) is kept in
//! side sets, and those are forgotten at the layer's end.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::tree::{Kind, Metadata, Node, NodeId, Timestamp, Tree, Xattrs};

use super::path::{NAME_MAX, display};

/// Symbolic links followed in one path, as in the kernel.
const MAX_LINKS: u32 = 40;

/// Bounds on the tree.
#[derive(Debug, Clone, Copy)]
pub struct TreeLimits {
    /// Nodes, dead ones included.
    pub nodes: u32,
    /// Directories inside one another.
    pub depth: usize,
    /// Bytes of names, link targets and extended attributes together.
    pub metadata_bytes: u64,
    /// Steps taken to find the parents of all entries; a tree of symbolic links could make each
    /// entry walk far.
    pub steps: u64,
}

impl Default for TreeLimits {
    fn default() -> Self {
        Self { nodes: 10_000_000, depth: 2_100, metadata_bytes: 1 << 30, steps: 1 << 30 }
    }
}

/// Why an entry cannot be laid over the tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OverlayError {
    /// The target of a hard link is not there.
    #[error("hard link to {target:?}, which does not exist")]
    LinkTargetMissing {
        /// The target.
        target: String,
    },
    /// A hard link to itself.
    #[error("hard link to itself ({target:?})")]
    LinkToItself {
        /// The target.
        target: String,
    },
    /// The target of a hard link is a directory.
    #[error("hard link to {target:?}, which is a directory")]
    LinkToDirectory {
        /// The target.
        target: String,
    },
    /// Symbolic links in the parents go round in circles.
    #[error("more than 40 symbolic links in the parent directories")]
    TooManyLinks,
    /// A symbolic link in the parents names something no directory can have.
    #[error("a symbolic link in the parent directories has a component of more than 255 bytes")]
    LinkComponentTooLong,
    /// The root is given as something other than a directory.
    #[error("the root is not a directory")]
    RootNotDirectory,
    /// A limit was reached.
    #[error("more than {limit} {what}; raise the limit if this is meant")]
    Limit {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}

/// Where a path leads: existing directories, then names that do not exist yet.
struct Place {
    existing: Vec<NodeId>,
    missing: Vec<Box<[u8]>>,
}

/// The tree and what the layer being applied has done to lower nodes.
pub struct Overlay {
    tree: Tree,
    origin: Vec<u16>,
    limits: TreeLimits,
    implied_mtime: Timestamp,
    metadata_bytes: u64,
    steps: u64,
    layer: u16,
    /// First node of the layer.
    first: u32,
    /// Names that this layer hard-linked to lower nodes.
    linked: HashSet<(NodeId, Box<[u8]>)>,
    /// Lower directories whose attributes this layer set.
    restated: HashSet<NodeId>,
    /// Lower directories below which this layer added something.
    touched: HashSet<NodeId>,
    /// Lower directories that hold nothing of lower layers any more.
    cleared: HashSet<NodeId>,
    /// What markers of this layer removed, by directory.
    hidden: HashMap<NodeId, BTreeMap<Box<[u8]>, NodeId>>,
    /// For directories made where a marker of this layer removed one: that one.
    behind: HashMap<NodeId, NodeId>,
    /// The last parent found and its path, until something is replaced or removed.
    recent: Option<(Vec<u8>, Vec<NodeId>)>,
}

impl Overlay {
    /// A tree of the root directory alone, 0755, owned by 0:0.
    pub fn new(limits: TreeLimits, implied_mtime: Timestamp) -> Self {
        let mut overlay = Self {
            tree: Tree { nodes: Vec::new() },
            origin: Vec::new(),
            limits,
            implied_mtime,
            metadata_bytes: 0,
            steps: 0,
            layer: 0,
            first: 0,
            linked: HashSet::new(),
            restated: HashSet::new(),
            touched: HashSet::new(),
            cleared: HashSet::new(),
            hidden: HashMap::new(),
            behind: HashMap::new(),
            recent: None,
        };
        let meta = overlay.implied();
        overlay.tree.nodes.push(Node { meta, kind: Kind::Directory(BTreeMap::new()) });
        overlay.origin.push(0);
        overlay
    }

    /// Begins layer `layer`, counted from 0; what is there now is lower from here on.
    pub fn begin_layer(&mut self, layer: u16) {
        self.layer = layer;
        // The root is never the layer's own: it is there before the first.
        self.first = u32::try_from(self.tree.nodes.len()).unwrap_or(u32::MAX).max(1);
        self.linked.clear();
        self.restated.clear();
        self.touched.clear();
        self.cleared.clear();
        self.hidden.clear();
        self.behind.clear();
        self.recent = None;
    }

    /// The tree, and for each node the layer that made it.
    pub fn into_tree(self) -> (Tree, Vec<u16>) {
        (self.tree, self.origin)
    }

    /// The tree as it is.
    #[cfg(test)]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// A new node that no directory holds yet.
    pub fn add_node(&mut self, meta: Metadata, kind: Kind) -> Result<NodeId, OverlayError> {
        let count = u32::try_from(self.tree.nodes.len()).unwrap_or(u32::MAX);
        if count >= self.limits.nodes {
            return Err(OverlayError::Limit {
                what: "files and directories",
                limit: self.limits.nodes.into(),
            });
        }
        self.charge(xattr_bytes(&meta.xattrs))?;
        if let Kind::Symlink(target) = &kind {
            self.charge(target.len())?;
        }
        self.tree.nodes.push(Node { meta, kind });
        self.origin.push(self.layer);
        Ok(NodeId(count))
    }

    /// Puts `node`, which is no directory, at `path`.
    pub fn put(&mut self, path: &[&[u8]], node: NodeId) -> Result<(), OverlayError> {
        let Some((name, parents)) = path.split_last() else {
            return Err(OverlayError::RootNotDirectory);
        };
        let parent = self.make_parents(parents)?;
        self.set_entry(parent, name, node)
    }

    /// Puts a directory at `path`, or gives the one that is there new attributes.
    pub fn put_directory(&mut self, path: &[&[u8]], meta: Metadata) -> Result<(), OverlayError> {
        let existing;
        let mut place = None;
        match path.split_last() {
            None => existing = Some(NodeId::ROOT),
            Some((name, parents)) => {
                let parent = self.make_parents(parents)?;
                existing = self.entry(parent, name).filter(|&node| self.is_directory(node));
                place = Some((parent, *name));
            }
        }
        if let Some(node) = existing {
            self.charge(xattr_bytes(&meta.xattrs))?;
            self.node_mut(node).meta = meta;
            if self.is_lower(node) {
                self.restated.insert(node);
            }
            return Ok(());
        }
        if let Some((parent, name)) = place {
            self.add_directory(parent, name, meta)?;
        }
        Ok(())
    }

    fn add_directory(
        &mut self,
        parent: NodeId,
        name: &[u8],
        meta: Metadata,
    ) -> Result<NodeId, OverlayError> {
        let node = self.add_node(meta, Kind::Directory(BTreeMap::new()))?;
        if !self.hidden.is_empty()
            && let Some(behind) = self.hidden_entry(parent, name)
            && self.is_directory(behind)
        {
            self.behind.insert(node, behind);
        }
        self.set_entry(parent, name, node)?;
        Ok(node)
    }

    /// Makes `path` another name of what `target` is now.
    pub fn link(&mut self, path: &[&[u8]], target: &[&[u8]]) -> Result<(), OverlayError> {
        let shown = || display(&target.join(&b'/'));
        let Some((name, parents)) = path.split_last() else {
            return Err(OverlayError::RootNotDirectory);
        };
        let Some((target_name, target_parents)) = target.split_last() else {
            return Err(OverlayError::LinkToDirectory { target: shown() });
        };
        let target_place = self.walk(target_parents, true)?;
        let missing = || OverlayError::LinkTargetMissing { target: shown() };
        if !target_place.missing.is_empty() {
            return Err(missing());
        }
        let target_parent = last(&target_place.existing);
        let node = self
            .entry(target_parent, target_name)
            .or_else(|| self.hidden_entry(target_parent, target_name));
        let node = node.ok_or_else(missing)?;
        if self.is_directory(node) {
            return Err(OverlayError::LinkToDirectory { target: shown() });
        }
        let parent = self.make_parents(parents)?;
        if parent == target_parent && name == target_name {
            return Err(OverlayError::LinkToItself { target: shown() });
        }
        self.link_node(parent, name, node)
    }

    /// Makes `path` another name of `node`, which is no directory.
    pub fn link_to_node(&mut self, path: &[&[u8]], node: NodeId) -> Result<(), OverlayError> {
        let Some((name, parents)) = path.split_last() else {
            return Err(OverlayError::RootNotDirectory);
        };
        let parent = self.make_parents(parents)?;
        self.link_node(parent, name, node)
    }

    fn link_node(&mut self, parent: NodeId, name: &[u8], node: NodeId) -> Result<(), OverlayError> {
        self.set_entry(parent, name, node)?;
        if self.is_lower(node) {
            self.linked.insert((parent, name.into()));
        }
        Ok(())
    }

    /// Hides what lower layers have at `path`. Nothing happens where there is nothing.
    pub fn whiteout(&mut self, parents: &[&[u8]], name: &[u8]) -> Result<(), OverlayError> {
        let place = self.walk(parents, false)?;
        if !place.missing.is_empty() {
            return Ok(());
        }
        let parent = last(&place.existing);
        let Some(node) = self.entry(parent, name) else { return Ok(()) };
        if !self.is_lower(node) || self.linked.contains(&(parent, name.into())) {
            return Ok(());
        }
        self.hide(parent, name, node);
        Ok(())
    }

    /// Hides everything that lower layers have in the directory `path`, the directory itself
    /// excepted.
    pub fn opaque(&mut self, path: &[&[u8]]) -> Result<(), OverlayError> {
        let place = self.walk(path, false)?;
        if place.missing.is_empty() {
            self.clear(last(&place.existing));
        }
        Ok(())
    }

    /// Removes a lower entry, or what is lower in it if this layer has added to it.
    fn hide(&mut self, parent: NodeId, name: &[u8], node: NodeId) {
        if self.is_directory(node)
            && (self.touched.contains(&node) || self.restated.contains(&node))
        {
            self.reset(node);
            self.clear(node);
            return;
        }
        self.recent = None;
        if let Kind::Directory(entries) = &mut self.node_mut(parent).kind
            && let Some((name, node)) = entries.remove_entry(name)
        {
            self.hidden.entry(parent).or_default().insert(name, node);
        }
    }

    /// Gives a lower directory that only this layer's additions keep alive the attributes it would
    /// have if they had made it.
    fn reset(&mut self, node: NodeId) {
        if !self.restated.contains(&node) {
            self.node_mut(node).meta = self.implied();
        }
    }

    /// Removes everything lower from a directory, to any depth.
    fn clear(&mut self, directory: NodeId) {
        let mut pending = vec![directory];
        while let Some(directory) = pending.pop() {
            if !self.is_lower(directory) || !self.cleared.insert(directory) {
                continue;
            }
            self.recent = None;
            let Kind::Directory(entries) = &mut self.node_mut(directory).kind else { continue };
            let entries = std::mem::take(entries);
            let mut kept = BTreeMap::new();
            let mut gone = BTreeMap::new();
            for (name, node) in entries {
                let own = !self.is_lower(node)
                    || (!self.linked.is_empty()
                        && self.linked.contains(&(directory, name.clone())));
                if own {
                    kept.insert(name, node);
                } else if self.is_directory(node)
                    && (self.touched.contains(&node) || self.restated.contains(&node))
                {
                    self.reset(node);
                    pending.push(node);
                    kept.insert(name, node);
                } else {
                    gone.insert(name, node);
                }
            }
            if let Kind::Directory(entries) = &mut self.node_mut(directory).kind {
                *entries = kept;
            }
            if !gone.is_empty() {
                self.hidden.entry(directory).or_default().extend(gone);
            }
        }
    }

    /// The directory at `path`, made with its parents where missing.
    fn make_parents(&mut self, path: &[&[u8]]) -> Result<NodeId, OverlayError> {
        let key = path.join(&b'/');
        let chain = match self.recent.take() {
            Some((recent, chain)) if recent == key => chain,
            _ => {
                let place = self.walk(path, false)?;
                let mut chain = place.existing;
                for name in place.missing {
                    let meta = self.implied();
                    let node = self.add_directory(last(&chain), &name, meta)?;
                    chain.push(node);
                }
                chain
            }
        };
        // From the inside out, until one is known: then those around it are known too.
        for &node in chain.iter().rev() {
            if self.is_lower(node) && !self.touched.insert(node) {
                break;
            }
        }
        let parent = last(&chain);
        self.recent = Some((key, chain));
        Ok(parent)
    }

    /// Follows `path`; with `hidden`, also through what markers of this layer removed.
    fn walk(&mut self, path: &[&[u8]], hidden: bool) -> Result<Place, OverlayError> {
        let mut place = Place { existing: vec![NodeId::ROOT], missing: Vec::new() };
        // What is still to be followed, last component first.
        let mut pending: Vec<Box<[u8]>> = path.iter().rev().map(|&name| name.into()).collect();
        let mut links = 0;
        while let Some(name) = pending.pop() {
            self.steps += 1;
            if self.steps > self.limits.steps {
                return Err(OverlayError::Limit {
                    what: "steps to find parent directories",
                    limit: self.limits.steps,
                });
            }
            match &*name {
                b"" | b"." => continue,
                b".." => {
                    if place.missing.pop().is_none() && place.existing.len() > 1 {
                        place.existing.pop();
                    }
                    continue;
                }
                _ if name.len() > NAME_MAX => return Err(OverlayError::LinkComponentTooLong),
                _ => {}
            }
            if place.existing.len() + place.missing.len() > self.limits.depth {
                return Err(OverlayError::Limit {
                    what: "directories inside one another",
                    limit: self.limits.depth as u64,
                });
            }
            if !place.missing.is_empty() {
                place.missing.push(name);
                continue;
            }
            let directory = last(&place.existing);
            let found = self.entry(directory, &name);
            let found =
                found.or_else(|| if hidden { self.hidden_entry(directory, &name) } else { None });
            match found.map(|node| (node, &self.node(node).kind)) {
                Some((node, Kind::Directory(_))) => place.existing.push(node),
                Some((_, Kind::Symlink(target))) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(OverlayError::TooManyLinks);
                    }
                    if target.first() == Some(&b'/') {
                        place.existing.truncate(1);
                    }
                    pending.extend(target.rsplit(|&byte| byte == b'/').map(Box::from));
                }
                // Something that is in the way counts as absent: a directory will replace it.
                _ => place.missing.push(name),
            }
        }
        Ok(place)
    }

    fn set_entry(&mut self, parent: NodeId, name: &[u8], node: NodeId) -> Result<(), OverlayError> {
        let Kind::Directory(entries) = &mut self.node_mut(parent).kind else {
            return Err(OverlayError::RootNotDirectory);
        };
        if let Some(old) = entries.get_mut(name) {
            *old = node;
            self.recent = None;
            if !self.linked.is_empty() {
                self.linked.remove(&(parent, name.into()));
            }
            return Ok(());
        }
        entries.insert(name.into(), node);
        self.charge(name.len())
    }

    fn charge(&mut self, bytes: usize) -> Result<(), OverlayError> {
        self.metadata_bytes += bytes as u64;
        if self.metadata_bytes > self.limits.metadata_bytes {
            return Err(OverlayError::Limit {
                what: "bytes of names, link targets and extended attributes",
                limit: self.limits.metadata_bytes,
            });
        }
        Ok(())
    }

    fn implied(&self) -> Metadata {
        Metadata { mode: 0o755, uid: 0, gid: 0, mtime: self.implied_mtime, xattrs: Xattrs::new() }
    }

    fn entry(&self, directory: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(directory).kind {
            Kind::Directory(entries) => entries.get(name).copied(),
            _ => None,
        }
    }

    /// What a marker of this layer removed from `directory`, or with what was there before it.
    fn hidden_entry(&self, directory: NodeId, name: &[u8]) -> Option<NodeId> {
        let removed = |directory| self.hidden.get(&directory)?.get(name).copied();
        removed(directory).or_else(|| {
            let behind = *self.behind.get(&directory)?;
            self.entry(behind, name).or_else(|| removed(behind))
        })
    }

    fn is_directory(&self, node: NodeId) -> bool {
        matches!(self.node(node).kind, Kind::Directory(_))
    }

    fn is_lower(&self, node: NodeId) -> bool {
        node.0 < self.first
    }

    fn node(&self, node: NodeId) -> &Node {
        &self.tree.nodes[node.0 as usize]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.tree.nodes[node.0 as usize]
    }
}

fn last(chain: &[NodeId]) -> NodeId {
    chain.last().copied().unwrap_or(NodeId::ROOT)
}

fn xattr_bytes(xattrs: &Xattrs) -> usize {
    xattrs.iter().map(|(name, value)| name.len() + value.len()).sum()
}
