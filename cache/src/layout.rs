//! Artifacts in files: OCI image layouts, as directories and as tar archives.
//!
//! What is written here any OCI tool can read and copy to a registry and back.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Seek as _, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::Digest;
use crate::artifact::{
    self, ARTIFACT_TYPE, ArtifactError, Descriptor, INDEX_TYPE, Index, MANIFEST_TYPE, MAX_ITEMS,
    MAX_MANIFEST_BYTES,
};
use crate::error::StoreError;
use crate::install::{BlobSource, InstallError};
use crate::name::TemplateName;
use crate::publish::{Blob, Content, Publication};
use crate::referrers::{ReferrerSource, fallback_tag, is_fallback_tag, refers_to};
use crate::statements::Statements;

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const LAYOUT_FILE: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
pub(crate) const BLOCK: usize = 512;
/// The most files an archive may have.
const MAX_ENTRIES: usize = 100_000;

/// An image layout to read from.
#[derive(Debug)]
pub struct Layout {
    path: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Directory,
    /// Where each file's bytes start, and how many they are.
    Archive {
        file: File,
        entries: HashMap<String, (u64, u64)>,
    },
}

impl Publication {
    /// Writes an image layout to the new or empty directory `path`.
    ///
    /// # Errors
    /// When it exists with something in it, or cannot be written; nothing is left then.
    pub fn export_directory(&self, path: &Path, name: &TemplateName) -> Result<(), StoreError> {
        if fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some()) {
            let source = io::ErrorKind::DirectoryNotEmpty.into();
            return Err(StoreError::Io { action: "export to", path: path.to_owned(), source });
        }
        let temporary = beside(path);
        let written = (|| {
            let blobs = temporary.join("blobs/sha256");
            fs::create_dir_all(&blobs).map_err(StoreError::io("create", &blobs, 0))?;
            for blob in self.all() {
                blob.content.write_to(&blobs.join(blob.descriptor.digest.hex()), self.stop)?;
            }
            for (name, bytes) in [("oci-layout", LAYOUT_FILE), ("index.json", &self.top(name))] {
                crate::durable::write_file(&temporary.join(name), bytes)?;
            }
            // An empty directory gives way to another.
            fs::rename(&temporary, path).map_err(StoreError::io("create", path, 0))
        })();
        written.inspect_err(|_| drop(fs::remove_dir_all(&temporary)))
    }

    /// Writes an image layout as a tar archive.
    ///
    /// # Errors
    /// When it cannot be written; nothing is left then.
    pub fn export_archive(&self, path: &Path, name: &TemplateName) -> Result<(), StoreError> {
        let temporary = beside(path);
        let top = self.top(name);
        let size: u64 = self.all().map(|blob| blob.descriptor.size).sum();
        let written = (|| {
            let file = File::create_new(&temporary)?;
            let mut tar = io::BufWriter::with_capacity(1 << 20, file);
            for (name, bytes) in [("oci-layout", LAYOUT_FILE), ("index.json", &top)] {
                write_entry(&mut tar, name, bytes.len() as u64, bytes)?;
            }
            let blobs: BTreeMap<Digest, &Blob> =
                self.all().map(|blob| (blob.descriptor.digest, blob)).collect();
            for (digest, blob) in blobs {
                let name = format!("blobs/sha256/{}", digest.hex());
                let size = blob.descriptor.size;
                match &blob.content {
                    Content::Bytes(bytes) => write_entry(&mut tar, &name, size, &**bytes)?,
                    Content::File(path) => {
                        let content = self.stop.watch(File::open(path)?);
                        write_entry(&mut tar, &name, size, content)?;
                    }
                    Content::Elsewhere => {}
                }
            }
            tar.write_all(&[0; 2 * BLOCK])?;
            tar.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
            fs::rename(&temporary, path)
        })();
        written.map_err(|error| {
            let _ = fs::remove_file(&temporary);
            StoreError::io("write", path, size)(error)
        })
    }

    /// Every blob, manifests and index included.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Blob> {
        self.blobs.iter().chain(&self.manifests).chain([&self.index]).chain(&self.attached)
    }

    /// The layout's `index.json`.
    fn top(&self, name: &TemplateName) -> Vec<u8> {
        let attached = self
            .attached
            .iter()
            .map(|blob| blob.descriptor.clone())
            .filter(|descriptor| descriptor.media_type == MANIFEST_TYPE);
        let mut descriptor = self.index.descriptor.clone();
        descriptor.annotations.insert(REF_NAME.to_owned(), name.tag().to_owned());
        descriptor.annotations.insert("io.containerd.image.name".to_owned(), name.to_string());
        artifact::to_json(&Index {
            schema_version: 2,
            media_type: Some(INDEX_TYPE.to_owned()),
            artifact_type: None,
            manifests: std::iter::once(descriptor).chain(attached).collect(),
            annotations: BTreeMap::new(),
        })
    }

    /// Adds what is to be said about it to what is exported.
    pub fn attach(&mut self, statements: &Statements, name: &TemplateName) {
        let root = self.index.descriptor.clone();
        for attachment in statements.attachments(&root.digest, &name.to_string()) {
            for blob in attachment.blobs(&root) {
                // All have the same config, which says nothing.
                if self.attached.iter().all(|kept| kept.descriptor.digest != blob.descriptor.digest)
                {
                    self.attached.push(blob);
                }
            }
        }
    }
}

impl Layout {
    /// Opens a layout directory or a tar archive of one.
    ///
    /// # Errors
    /// When it is neither.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let io = |error| StoreError::io("read", path, 0)(error);
        let metadata = fs::metadata(path).map_err(io)?;
        let place = if metadata.is_dir() {
            Place::Directory
        } else {
            let file = File::open(path).map_err(io)?;
            let entries = read_entries(&file).map_err(io)?;
            Place::Archive { file, entries }
        };
        let layout = Self { path: path.to_owned(), place };
        let marker = layout.read("oci-layout", 4096).map_err(io)?;
        let version: serde_json::Value = serde_json::from_slice(&marker).unwrap_or_default();
        if version["imageLayoutVersion"] != "1.0.0" {
            let source = io::Error::other("it is not an OCI image layout of version 1.0.0");
            return Err(io(source));
        }
        Ok(layout)
    }

    /// Finds the artifact tagged `tag`, or the only one.
    ///
    /// # Errors
    /// When there is none, or more than one to choose from.
    pub fn root(&self, tag: Option<&str>) -> Result<(Descriptor, Option<String>), InstallError> {
        let io = |error| StoreError::io("read", &self.path, 0)(error);
        let bytes = self.read("index.json", MAX_MANIFEST_BYTES).map_err(io)?;
        let mut index = Index::parse(&bytes, &Digest::of(&bytes))?;
        // What is attached to others is no choice.
        let named = |entry: &Descriptor| entry.annotations.get(REF_NAME).cloned();
        index.manifests.retain(|entry| !named(entry).is_some_and(|name| is_fallback_tag(&name)));
        if let Some(tag) = tag {
            index.manifests.retain(|entry| named(entry).is_some_and(|name| name == tag));
        } else if index.manifests.iter().any(|entry| named(entry).is_some()) {
            index.manifests.retain(|entry| named(entry).is_some());
        }
        let found = index.manifests.len();
        match index.manifests.pop() {
            Some(descriptor) if found == 1 => {
                let name = ["io.containerd.image.name", REF_NAME]
                    .iter()
                    .find_map(|key| descriptor.annotations.get(*key).cloned());
                Ok((descriptor, name))
            }
            _ => {
                let what = format!("the layout has {found} artifacts to choose from; name a tag");
                Err(ArtifactError::Inconsistent(what).into())
            }
        }
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(name, 0, limit)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn open_file(
        &self,
        name: &str,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>> {
        match &self.place {
            Place::Directory => {
                let mut file = File::open(self.path.join(name))?;
                file.seek(SeekFrom::Start(offset))?;
                Ok(Box::new(file.take(len)))
            }
            Place::Archive { file, entries } => {
                let &(start, size) = entries.get(name).ok_or(io::ErrorKind::NotFound)?;
                let left = size.saturating_sub(offset).min(len);
                Ok(Box::new(Section { file, position: start + offset.min(size), left }))
            }
        }
    }
}

impl BlobSource for Layout {
    fn open(
        &self,
        blob: &Descriptor,
        offset: u64,
        len: u64,
    ) -> io::Result<Box<dyn Read + Send + '_>> {
        self.open_file(&format!("blobs/sha256/{}", blob.digest.hex()), offset, len)
    }

    fn parallel(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }
}

impl ReferrerSource for Layout {
    fn referrers(&self, subject: &Digest) -> io::Result<Vec<Descriptor>> {
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let parse = |bytes: &[u8]| Index::parse(bytes, &Digest::of(bytes)).map_err(invalid);
        let index = parse(&self.read("index.json", MAX_MANIFEST_BYTES)?)?;
        let tag = fallback_tag(subject);
        let mut found = Vec::new();
        for entry in index.manifests {
            let name = format!("blobs/sha256/{}", entry.digest.hex());
            if entry.annotations.get(REF_NAME).is_some_and(|name| *name == tag) {
                found.extend(parse(&self.read(&name, MAX_MANIFEST_BYTES)?)?.manifests);
            } else if entry.media_type == MANIFEST_TYPE
                && entry.artifact_type.as_deref() != Some(ARTIFACT_TYPE)
                && refers_to(&self.read(&name, MAX_MANIFEST_BYTES)?, subject)
            {
                found.push(entry);
            }
        }
        found.truncate(MAX_ITEMS);
        Ok(found)
    }
}

/// A stretch of a file.
struct Section<'a> {
    file: &'a File,
    position: u64,
    left: u64,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.file.read_at(&mut buffer[..len], self.position)?;
        self.position += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// A name for work in progress beside `path`, so that it can be renamed to it.
fn beside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", crate::live::random_id()));
    path.with_file_name(name)
}

/// Writes one regular file with fixed owner, mode and time (POSIX.1-1988 ustar).
pub(crate) fn write_entry(
    out: &mut impl Write,
    name: &str,
    size: u64,
    content: impl Read,
) -> io::Result<()> {
    if size >= 1 << 33 || name.len() > 100 {
        return Err(io::Error::other(format!("{name} does not fit a ustar header")));
    }
    let mut header = [0u8; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0000644\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{size:011o}\0").as_bytes());
    put(136, b"00000000000\0");
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().copied().map(u32::from).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.write_all(&header)?;
    if io::copy(&mut content.take(size), out)? != size {
        return Err(io::Error::other(format!("{name} changed while it was written")));
    }
    out.write_all(&[0; BLOCK][..size.wrapping_neg() as usize % BLOCK])
}

/// Lists the regular files of a tar archive: where each lies.
fn read_entries(file: &File) -> io::Result<HashMap<String, (u64, u64)>> {
    let bad = |what: &str| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("not a tar archive of an image layout: {what}"),
        )
    };
    let length = file.metadata()?.len();
    let mut entries = HashMap::new();
    let mut position = 0;
    while position + BLOCK as u64 <= length {
        let mut header = [0u8; BLOCK];
        file.read_exact_at(&mut header, position)?;
        position += BLOCK as u64;
        if header == [0; BLOCK] {
            break;
        }
        let sum: u32 = header
            .iter()
            .enumerate()
            .map(|(at, byte)| u32::from(if (148..156).contains(&at) { b' ' } else { *byte }))
            .sum();
        if octal(&header[148..156]) != Some(sum.into()) {
            return Err(bad("a header has the wrong checksum"));
        }
        let size = octal(&header[124..136]).ok_or_else(|| bad("a size is not a number"))?;
        if size > length - position {
            return Err(bad("it is cut short"));
        }
        let name = header[..100].split(|byte| *byte == 0).next().unwrap_or_default();
        if let (Ok(name), b'0' | 0) = (std::str::from_utf8(name), header[156]) {
            let name = name.strip_prefix("./").unwrap_or(name);
            entries.entry(name.to_owned()).or_insert((position, size));
        }
        if entries.len() > MAX_ENTRIES {
            return Err(bad("it has too many files"));
        }
        position += size.next_multiple_of(BLOCK as u64);
    }
    if entries.is_empty() {
        return Err(bad("it has no files"));
    }
    Ok(entries)
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    u64::from_str_radix(text.trim_matches([' ', '\0']), 8).ok()
}
