//! What an object needs: following documents to their parts.
//!
//! Documents are read as plain JSON, not as the types of today, so that a collector of this
//! version keeps what a document of a newer one refers to.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::Read as _;

use serde_json::Value;

use crate::Digest;
use crate::error::StoreError;
use crate::object::{MAX_DOCUMENT_BYTES, Tree, read_bounded};
use crate::store::Store;

/// What a document says about other objects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Mentions {
    /// From `{"digest": …, "size": …}`: must be there.
    pub(crate) parts: Vec<Digest>,
    /// Any other digest: kept if it is there.
    pub(crate) others: Vec<Digest>,
}

impl Store {
    /// Fails unless `root` and all that it needs are present.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::MissingPart`].
    pub fn check_complete(&self, root: &Digest) -> Result<(), StoreError> {
        if !self.has(root) {
            return Err(StoreError::Missing { digest: *root });
        }
        let mut seen = HashSet::from([*root]);
        let mut queue = vec![*root];
        while let Some(parent) = queue.pop() {
            for digest in self.mentions(&parent)?.parts {
                if seen.insert(digest) {
                    if !self.has(&digest) {
                        return Err(StoreError::MissingPart { parent, digest });
                    }
                    queue.push(digest);
                }
            }
        }
        Ok(())
    }

    /// All objects that `roots` lead to, themselves and the snapshots of templates among them
    /// included, whether they are here or not.
    ///
    /// # Errors
    /// When a document cannot be read.
    pub fn closure(&self, roots: &[Digest]) -> Result<HashSet<Digest>, StoreError> {
        Ok(self.reach(roots.iter().copied(), true)?.0)
    }

    /// All that `roots` lead to, including themselves and, when `with_snapshots`, the snapshots of
    /// templates among it; and what is missing, with who needs it.
    pub(crate) fn reach(
        &self,
        roots: impl IntoIterator<Item = Digest>,
        with_snapshots: bool,
    ) -> Result<(HashSet<Digest>, HashMap<Digest, Digest>), StoreError> {
        let mut seen: HashSet<Digest> = HashSet::new();
        let mut missing = HashMap::new();
        let mut queue: Vec<Digest> = roots.into_iter().collect();
        while let Some(parent) = queue.pop() {
            if !seen.insert(parent) {
                continue;
            }
            let mentions = self.mentions(&parent)?;
            for digest in mentions.parts {
                if !self.has(&digest) {
                    missing.insert(digest, parent);
                }
                queue.push(digest);
            }
            queue.extend(mentions.others);
            queue.extend(self.working_set_reference(&parent)?);
            if with_snapshots {
                let snapshots = self.root().join("refs/snapshots").join(parent.hex());
                let references = crate::reference::list(&snapshots)?;
                queue.extend(references.into_iter().map(|(_, reference)| reference.digest));
            }
        }
        Ok((seen, missing))
    }

    /// What the object mentions, if it is a document at all.
    fn mentions(&self, digest: &Digest) -> Result<Mentions, StoreError> {
        let path = self.object_path(Tree::Objects, digest);
        let looks_like_one = || -> std::io::Result<bool> {
            let mut file = File::open(&path)?;
            let mut first = [0];
            Ok(file.metadata()?.len() <= MAX_DOCUMENT_BYTES
                && file.read(&mut first)? == 1
                && first == *b"{")
        };
        match looks_like_one() {
            Ok(true) => {}
            Ok(false) => return Ok(Mentions::default()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Mentions::default());
            }
            Err(error) => return Err(StoreError::io("read", &path, 0)(error)),
        }
        let bytes =
            read_bounded(&path, MAX_DOCUMENT_BYTES).map_err(StoreError::io("read", &path, 0))?;
        Ok(mentions_in(&bytes))
    }

    /// The digests of all objects in one tree, with their files' metadata.
    pub(crate) fn walk(
        &self,
        tree: Tree,
        mut visit: impl FnMut(Option<Digest>, &std::path::Path, &fs::Metadata) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let directory = self.root().join(tree.name());
        let io = StoreError::io;
        for shard in fs::read_dir(&directory).map_err(io("read", &directory, 0))? {
            let shard = shard.map_err(io("read", &directory, 0))?.path();
            let entries = match fs::read_dir(&shard) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => continue,
                Err(error) => return Err(io("read", &shard, 0)(error)),
            };
            for entry in entries {
                let path = entry.map_err(io("read", &shard, 0))?.path();
                let hex: String =
                    [&shard, &path].iter().filter_map(|part| part.file_name()?.to_str()).collect();
                // A collector elsewhere may have been here meanwhile.
                let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
                visit(format!("sha256:{hex}").parse().ok(), &path, &metadata)?;
            }
        }
        Ok(())
    }
}

/// What `bytes` mention, if they are a JSON document.
fn mentions_in(bytes: &[u8]) -> Mentions {
    fn collect(value: &Value, found: &mut Mentions) {
        match value {
            Value::String(text) => found.others.extend(text.parse::<Digest>()),
            Value::Array(values) => values.iter().for_each(|value| collect(value, found)),
            Value::Object(fields) => {
                let digest = fields.get("digest").and_then(Value::as_str).map(str::parse::<Digest>);
                match digest {
                    Some(Ok(digest)) if fields.len() == 2 && fields.contains_key("size") => {
                        found.parts.push(digest);
                    }
                    _ => {
                        for (key, value) in fields {
                            found.others.extend(key.parse::<Digest>());
                            collect(value, found);
                        }
                    }
                }
            }
            _ => {}
        }
    }
    let mut found = Mentions::default();
    // serde_json bounds the depth itself.
    if let Ok(value) = serde_json::from_slice(bytes) {
        collect(&value, &mut found);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_told_from_mentions_at_any_depth() {
        let (a, b, c) = (Digest::of(b"a"), Digest::of(b"b"), Digest::of(b"c"));
        let text = format!(
            r#"{{"x":[{{"digest":"{a}","size":1}}],"y":{{"digest":"{b}","size":1,"z":0}},"{c}":0}}"#
        );
        let found = mentions_in(text.as_bytes());
        assert_eq!(found.parts, [a]);
        assert_eq!(found.others, [c, b]);
        assert_eq!(mentions_in(b"{not json"), Mentions::default());
        let deep = "[".repeat(1 << 20);
        assert_eq!(mentions_in(deep.as_bytes()), Mentions::default());
    }
}
