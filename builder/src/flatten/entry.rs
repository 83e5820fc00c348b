//! One layer's entries, laid over the tree one after the other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::image::{Event, Layer};
use crate::layer::decode::DecodeError;
use crate::layer::stream::{LayerOutcome, LayerStream};
use crate::layer::tar::{Entry, EntryKind, TarError, TarReader};
use crate::tree::{Kind, Metadata, NodeId};

use super::data::DataWriter;
use super::error::{EntryProblem, FlattenError};
use super::overlay::Overlay;
use super::path::{components, display};
use super::{Limits, check_blob, name, xattr};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// What AUFS, once Docker's storage, kept in its own layers and wrote into archives.
const AUFS: &[u8] = b".wh..wh.";
/// AUFS's directory of hard-linked files; names in it may be link targets.
const AUFS_LINKS: &[u8] = b".wh..wh.plnk";
/// Bytes of tar between two progress events.
const PROGRESS: u64 = 4 << 20;
/// Warnings sent for one layer; more would be noise.
const WARNINGS: usize = 20;
/// The first block number that a file cannot have (ext4 counts them with 32 bits).
const FILE_MAX: u64 = (u32::MAX as u64) << 12;

/// Lays layers over a tree.
pub(super) struct Applier<'a> {
    pub overlay: Overlay,
    pub data: DataWriter<'a>,
    pub limits: Limits,
    pub cancel: &'a AtomicBool,
    pub entries: u64,
}

/// A layer once it is in the tree.
pub(super) struct Applied {
    pub outcome: LayerOutcome,
    pub entries: u64,
}

/// What one layer needs beside the tree.
struct LayerState<'e> {
    whiteouts: bool,
    /// Files in AUFS's directory of hard-linked files.
    aufs: HashMap<Vec<u8>, NodeId>,
    warnings: usize,
    layer: String,
    events: &'e mut dyn FnMut(Event),
}

impl LayerState<'_> {
    fn warn(&mut self, entry: &[u8], text: &str) {
        self.warnings += 1;
        let text = match self.warnings.cmp(&WARNINGS) {
            std::cmp::Ordering::Less => format!("{}: {}: {text}", self.layer, display(entry)),
            std::cmp::Ordering::Equal => format!("{}: further warnings left out", self.layer),
            std::cmp::Ordering::Greater => return,
        };
        (self.events)(Event::Warning(text));
    }
}

impl Applier<'_> {
    /// Lays a whole layer over the tree.
    pub fn layer(
        &mut self,
        layer: &Layer,
        index: usize,
        stream: LayerStream,
        events: &mut dyn FnMut(Event),
    ) -> Result<Applied, FlattenError> {
        self.overlay.begin_layer(u16::try_from(index).unwrap_or(u16::MAX));
        let mut reader = TarReader::new(stream, self.limits.tar);
        let before = self.entries;
        let mut state = LayerState {
            whiteouts: layer.has_whiteouts(),
            aufs: HashMap::new(),
            warnings: 0,
            layer: name(layer, index),
            events,
        };
        let applied = self.apply_all(&mut reader, &mut state, index);
        let entry = display(reader.entry_name());
        let stream = reader.into_inner();
        let problem = match applied {
            Ok(()) => None,
            Err(EntryProblem::Cancelled) => return Err(FlattenError::Cancelled),
            Err(EntryProblem::Write(error)) => return Err(FlattenError::Write(error)),
            // Limits stop at once: reading on is what they are there to prevent.
            Err(
                source @ (EntryProblem::Limit { .. }
                | EntryProblem::Overlay(super::overlay::OverlayError::Limit { .. })),
            ) => {
                return Err(FlattenError::Entry {
                    layer: state.layer,
                    entry,
                    source: source.into(),
                });
            }
            Err(problem) => Some(problem),
        };
        // Damage in the blob explains whatever damage was found in what it decodes to.
        let blob = |source| FlattenError::Blob { layer: name(layer, index), source };
        let mut outcome = stream.finish().map_err(blob)?;
        check_blob(layer, index, &outcome)?;
        match (outcome.error.take(), problem) {
            (Some(DecodeError::Read(source)), _) => Err(blob(source)),
            (Some(source), _) => Err(FlattenError::Decode { layer: state.layer, source }),
            (None, Some(source)) => {
                Err(FlattenError::Entry { layer: state.layer, entry, source: source.into() })
            }
            (None, None) => Ok(Applied { outcome, entries: self.entries - before }),
        }
    }

    fn apply_all(
        &mut self,
        reader: &mut TarReader<LayerStream>,
        state: &mut LayerState<'_>,
        index: usize,
    ) -> Result<(), EntryProblem> {
        let mut reported = 0;
        while let Some(entry) = reader.next_entry()? {
            self.entries += 1;
            if self.entries > self.limits.entries {
                return Err(EntryProblem::Limit { what: "entries", limit: self.limits.entries });
            }
            if self.cancel.load(Ordering::Relaxed) {
                return Err(EntryProblem::Cancelled);
            }
            self.apply(entry, reader, state)?;
            if reader.position() >= reported + PROGRESS {
                reported = reader.position();
                (state.events)(Event::Progress { layer: index, tar_bytes: reported });
            }
        }
        Ok(())
    }

    fn apply(
        &mut self,
        mut entry: Entry,
        reader: &mut TarReader<LayerStream>,
        state: &mut LayerState<'_>,
    ) -> Result<(), EntryProblem> {
        let entry_path = std::mem::take(&mut entry.path);
        let path = components("name", &entry_path)?;
        if state.whiteouts {
            match path.iter().position(|component| component.starts_with(WHITEOUT)) {
                None => {}
                Some(at) if path[at] == OPAQUE && at + 1 == path.len() => {
                    return Ok(self.overlay.opaque(&path[..at])?);
                }
                Some(at) if path[at].starts_with(AUFS) => {
                    if path[at] == AUFS_LINKS && path.len() == at + 2 {
                        return self.aufs_link(&path, entry, reader, state);
                    }
                    return Ok(());
                }
                Some(at) if at + 1 == path.len() => {
                    let hidden = &path[at][WHITEOUT.len()..];
                    if matches!(hidden, b"" | b"." | b"..") {
                        return Err(EntryProblem::EmptyWhiteout);
                    }
                    return Ok(self.overlay.whiteout(&path[..at], hidden)?);
                }
                Some(_) => return Err(EntryProblem::BelowMarker),
            }
        }
        if entry.kind == EntryKind::HardLink {
            let target = components("link target", &entry.link)?;
            if state.whiteouts
                && let [.., directory, file] = target[..]
                && directory == AUFS_LINKS
                && let Some(&node) = state.aufs.get(file)
            {
                return Ok(self.overlay.link_to_node(&path, node)?);
            }
            return Ok(self.overlay.link(&path, &target)?);
        }
        if entry.kind == EntryKind::Directory {
            let meta = metadata(&entry_path, entry, state)?;
            return Ok(self.overlay.put_directory(&path, meta)?);
        }
        if path.is_empty() {
            return Err(super::overlay::OverlayError::RootNotDirectory.into());
        }
        let node = self.node(&entry_path, entry, reader, state)?;
        Ok(self.overlay.put(&path, node)?)
    }

    /// Makes the node of an entry that is neither directory nor hard link, contents included.
    fn node(
        &mut self,
        path: &[u8],
        mut entry: Entry,
        reader: &mut TarReader<LayerStream>,
        state: &mut LayerState<'_>,
    ) -> Result<NodeId, EntryProblem> {
        let kind = match entry.kind {
            EntryKind::File => {
                if entry.size > FILE_MAX {
                    return Err(EntryProblem::TooLarge { size: entry.size });
                }
                self.data.begin(entry.size);
                let limit = self.limits.data_bytes;
                let (data, cancel) = (&mut self.data, self.cancel);
                reader.data(|offset, bytes| {
                    if cancel.load(Ordering::Relaxed) {
                        return Err(EntryProblem::Cancelled);
                    }
                    data.write(offset, bytes).map_err(EntryProblem::Write)?;
                    if data.bytes_allocated() > limit {
                        return Err(EntryProblem::Limit { what: "bytes of file contents", limit });
                    }
                    Ok(())
                })?;
                Kind::File(self.data.end().map_err(EntryProblem::Write)?)
            }
            EntryKind::Symlink => {
                let target = std::mem::take(&mut entry.link);
                if !(1..=4095).contains(&target.len()) {
                    return Err(EntryProblem::SymlinkTarget { length: target.len() });
                }
                Kind::Symlink(target.into())
            }
            EntryKind::CharDevice(device) => Kind::CharDevice(device),
            EntryKind::BlockDevice(device) => Kind::BlockDevice(device),
            EntryKind::Fifo => Kind::Fifo,
            EntryKind::HardLink | EntryKind::Directory => {
                return Err(TarError::UnknownType { letter: '?' }.into());
            }
        };
        let meta = metadata(path, entry, state)?;
        Ok(self.overlay.add_node(meta, kind)?)
    }

    /// Keeps a file of AUFS's link directory for the links to it, outside the tree.
    fn aufs_link(
        &mut self,
        path: &[&[u8]],
        entry: Entry,
        reader: &mut TarReader<LayerStream>,
        state: &mut LayerState<'_>,
    ) -> Result<(), EntryProblem> {
        if entry.kind == EntryKind::File
            && let Some(file) = path.last()
        {
            let node = self.node(file, entry, reader, state)?;
            state.aufs.insert(file.to_vec(), node);
        }
        Ok(())
    }
}

fn metadata(
    path: &[u8],
    entry: Entry,
    state: &mut LayerState<'_>,
) -> Result<Metadata, EntryProblem> {
    let mut meta = Metadata {
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime,
        xattrs: entry.xattrs,
    };
    if entry.text_acl && !meta.xattrs.keys().any(|name| name.starts_with(b"system.posix_acl_")) {
        state.warn(path, "its access control list is in text form and was left out");
    }
    let is_symlink = entry.kind == EntryKind::Symlink;
    let is_directory = entry.kind == EntryKind::Directory;
    if is_symlink {
        meta.mode = 0o777;
    }
    xattr::settle(&mut meta.xattrs, &mut meta.mode, is_directory, is_symlink, |text| {
        state.warn(path, &text);
    })?;
    Ok(meta)
}
