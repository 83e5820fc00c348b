//! The working set: what a snapshot touches first, in the order it does.
//!
//! Recorded where the snapshot is baked, by restoring it and running the warm-up command; shipped
//! with it; fetched first by a lazy pull, and read ahead by a restore from a cold disk. It is a
//! hint: a restore is right without it.

use std::collections::HashSet;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::durable;
use crate::error::StoreError;
use crate::lock::Mode;
use crate::reference::{self, Reference};
use crate::store::Store;
use crate::template::SCHEMA_VERSION;

/// The most stretches a working set may have.
pub const MAX_TOUCHES: usize = 200_000;

/// Which image of a snapshot a page is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// The template's root filesystem.
    Rootfs,
    /// Guest memory.
    Memory,
    /// The disk's overlay.
    Disk,
}

/// A stretch of pages: where, the first, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Touch(pub Role, pub u32, pub u32);

/// What a snapshot touches, first touches first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkingSet {
    /// Always [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The snapshot's manifest.
    pub snapshot: Digest,
    /// The stretches.
    pub touches: Vec<Touch>,
}

impl WorkingSet {
    /// A working set of the pages in the order they were touched; later touches of the same page
    /// do not count.
    #[must_use]
    pub fn of(snapshot: Digest, pages: impl IntoIterator<Item = (Role, u32)>) -> Self {
        let mut seen = HashSet::new();
        let mut touches: Vec<Touch> = Vec::new();
        for (role, page) in pages.into_iter().filter(|page| seen.insert(*page)) {
            match touches.last_mut() {
                Some(Touch(last, first, count))
                    if *last == role && first.checked_add(*count) == Some(page) =>
                {
                    *count += 1;
                }
                _ => touches.push(Touch(role, page, 1)),
            }
        }
        Self { schema_version: SCHEMA_VERSION, snapshot, touches }
    }

    /// The pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = (Role, u32)> {
        let pages = |&Touch(role, first, count): &Touch| {
            (first..first.saturating_add(count)).map(move |page| (role, page))
        };
        self.touches.iter().flat_map(pages)
    }

    /// What this one and all others touch, in the order of this one: what several restores have
    /// in common is the snapshot's, the rest is chance.
    #[must_use]
    pub fn common(&self, others: &[Self]) -> Self {
        let others: Vec<HashSet<_>> = others.iter().map(|other| other.pages().collect()).collect();
        let common = |page: &(Role, u32)| others.iter().all(|other| other.contains(page));
        Self::of(self.snapshot, self.pages().filter(common))
    }
}

impl Store {
    /// Records a snapshot's working set, in place of any before.
    ///
    /// # Errors
    /// When the snapshot is missing or the set is too large.
    pub fn set_working_set(&self, set: &WorkingSet) -> Result<Digest, StoreError> {
        if set.touches.len() > MAX_TOUCHES {
            let (size, limit) = (set.touches.len() as u64, MAX_TOUCHES as u64);
            return Err(StoreError::DocumentTooLarge { size, limit });
        }
        let digest = self.put_json(set)?.digest;
        self.refer_to_working_set(&set.snapshot, &digest)?;
        Ok(digest)
    }

    /// A snapshot's working set, if one was recorded: the document and its digest.
    ///
    /// # Errors
    /// When it is damaged or belongs to another snapshot.
    pub fn working_set(
        &self,
        snapshot: &Digest,
    ) -> Result<Option<(Digest, WorkingSet)>, StoreError> {
        let Some(digest) = self.working_set_reference(snapshot)? else { return Ok(None) };
        let set: WorkingSet = self.get_json(&digest)?;
        if set.snapshot != *snapshot || set.touches.len() > MAX_TOUCHES {
            let what = format!("it is not a working set of {snapshot}");
            return Err(StoreError::Damaged { digest, what });
        }
        Ok(Some((digest, set)))
    }

    pub(crate) fn working_set_reference(
        &self,
        snapshot: &Digest,
    ) -> Result<Option<Digest>, StoreError> {
        let path = self.root().join("refs/working-sets").join(snapshot.hex());
        Ok(reference::read(&path)?.map(|reference| reference.digest))
    }

    pub(crate) fn refer_to_working_set(
        &self,
        snapshot: &Digest,
        digest: &Digest,
    ) -> Result<(), StoreError> {
        let reference = Reference { key: snapshot.to_string(), digest: *digest };
        let bytes = serde_json::to_vec(&reference).expect("plain structures always encode");
        let scratch = self.scratch()?;
        durable::write_file(&scratch, &bytes)?;
        let path = self.root().join("refs/working-sets").join(snapshot.hex());
        let _lock = self.lock(Mode::Shared)?;
        self.check_complete(snapshot)
            .and_then(|()| durable::publish(&scratch, &path))
            .inspect_err(|_| drop(fs::remove_file(&scratch)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_kept_in_first_touch_order_and_common_ones_found() {
        let snapshot = Digest::of(b"s");
        let memory = |pages: &[u32]| pages.iter().map(|p| (Role::Memory, *p)).collect::<Vec<_>>();
        let set = WorkingSet::of(snapshot, memory(&[9, 3, 4, 5, 3, 10, 4]));
        assert_eq!(
            set.touches,
            [Touch(Role::Memory, 9, 1), Touch(Role::Memory, 3, 3), Touch(Role::Memory, 10, 1)]
        );
        assert_eq!(set.pages().count(), 5);
        let other = WorkingSet::of(snapshot, memory(&[10, 5, 4, 3, 7]));
        let common = set.common(&[other]);
        assert_eq!(common.touches, [Touch(Role::Memory, 3, 3), Touch(Role::Memory, 10, 1)]);
        let text = serde_json::to_string(&common).unwrap();
        assert!(text.contains(r#"["memory",3,3]"#), "{text}");
    }
}
