//! Images in the OCI image layout, as a directory or as a tar file.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use super::archive::Archive;
use super::error::ImageError;
use super::manifest::{DOCUMENT_MAX, Descriptor, Document, DocumentKind};
use super::select::{BlobPointer, Blobs, Place, Selector, image};
use super::{BlobsElsewhere, Image, ImageOptions, ImageSource};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// The files of a layout, and blobs that it names and does not hold.
pub(super) struct LayoutFiles {
    place: LayoutPlace,
    elsewhere: BlobsElsewhere,
}

/// Where a layout is.
enum LayoutPlace {
    /// In a directory.
    Directory { path: PathBuf, handle: File },
    /// In a tar file.
    Archive(Archive),
}

impl LayoutFiles {
    pub fn directory(path: &Path) -> Result<Self, ImageError> {
        let read = |source| ImageError::read(path.display().to_string(), source);
        let handle = File::open(path).map_err(read)?;
        if !handle.metadata().map_err(read)?.is_dir() {
            return Err(ImageError::Layout {
                path: path.display().to_string(),
                problem: "not a directory (for a tar file use oci-archive:)".to_owned(),
            });
        }
        let place = LayoutPlace::Directory { path: path.to_owned(), handle };
        Ok(Self { place, elsewhere: BlobsElsewhere::default() })
    }

    pub fn archive(archive: Archive) -> Self {
        Self { place: LayoutPlace::Archive(archive), elsewhere: BlobsElsewhere::default() }
    }

    /// The layout, where these blobs need not be in it.
    pub fn with(self, elsewhere: BlobsElsewhere) -> Self {
        Self { elsewhere, ..self }
    }

    fn shown(&self) -> String {
        match &self.place {
            LayoutPlace::Directory { path, .. } => path.display().to_string(),
            LayoutPlace::Archive(archive) => archive.shown().to_owned(),
        }
    }

    /// Opens a file by its name in the layout; gives its size too.
    fn open(&self, name: &str) -> io::Result<(Box<dyn Read + Send>, u64)> {
        match &self.place {
            LayoutPlace::Directory { handle, .. } => {
                let file = open_beneath(handle, name)?;
                let metadata = file.metadata()?;
                if !metadata.is_file() {
                    return Err(io::Error::other(format!("{name} is not a regular file")));
                }
                Ok((Box::new(file), metadata.len()))
            }
            LayoutPlace::Archive(archive) => {
                let member = archive.member(name.as_bytes())?;
                let size = member.size();
                Ok((Box::new(member), size))
            }
        }
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let (file, _) = self.open(name)?;
        let mut bytes = Vec::new();
        file.take(DOCUMENT_MAX + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// Opens `name` below `directory`; symbolic links may not lead out. Not blocking, so that a pipe
/// in a blob's place does not stop the program.
fn open_beneath(directory: &File, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve) {
        Ok(file) => Ok(file.into()),
        Err(rustix::io::Errno::XDEV) => {
            Err(io::Error::other(format!("{name} is a symbolic link that leads out of the layout")))
        }
        // Kernels before 5.6, and some sandboxes: no links at all then.
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
            let flags = flags | OFlags::NOFOLLOW;
            Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?.into())
        }
        Err(error) => Err(error.into()),
    }
}

impl Blobs for LayoutFiles {
    fn open(&self, blob: &BlobPointer) -> io::Result<Box<dyn Read + Send>> {
        match self.elsewhere.0.get(&blob.digest.to_string()) {
            Some(open) => open(),
            None => self.open(&blob_name(blob)).map(|(file, _)| file),
        }
    }

    fn document(&self, blob: &BlobPointer, _: Place) -> io::Result<Vec<u8>> {
        self.read(&blob_name(blob))
    }

    fn size(&self, blob: &BlobPointer) -> Option<io::Result<u64>> {
        if self.elsewhere.0.contains_key(&blob.digest.to_string()) {
            return None;
        }
        Some(self.open(&blob_name(blob)).map(|(_, size)| size))
    }
}

fn blob_name(blob: &BlobPointer) -> String {
    format!("blobs/{}/{}", blob.digest.algorithm_name(), blob.digest.hex())
}

#[derive(Deserialize)]
struct LayoutVersion {
    #[serde(rename = "imageLayoutVersion")]
    version: String,
}

/// Opens the image `reference` of a layout.
pub(super) fn open(
    files: LayoutFiles,
    source: &ImageSource,
    reference: Option<&str>,
    options: &ImageOptions,
) -> Result<Image, ImageError> {
    let shown = files.shown();
    let layout = |problem: String| ImageError::Layout { path: shown.clone(), problem };
    let read = |name: &str| {
        let bytes = files.read(name).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => layout(format!("it has no {name}")),
            _ => ImageError::read(format!("{shown}: {name}"), error),
        })?;
        if bytes.len() as u64 > DOCUMENT_MAX {
            return Err(ImageError::TooLarge {
                what: format!("{shown}: {name}"),
                limit: DOCUMENT_MAX,
            });
        }
        Ok(bytes)
    };
    let version: LayoutVersion = serde_json::from_slice(&read("oci-layout")?)
        .map_err(|error| layout(format!("oci-layout: {error}")))?;
    if !version.version.starts_with("1.") {
        return Err(layout(format!(
            "its version is {:?}, this program reads 1.x",
            version.version
        )));
    }
    let index = Document::parse(&read("index.json")?)
        .map_err(|source| ImageError::Document { what: format!("{shown}: index.json"), source })?;
    let DocumentKind::Index(manifests) = index else {
        return Err(layout("index.json is not an index".to_owned()));
    };
    let candidates = choose(&shown, manifests, reference)?;
    let blobs: Arc<dyn Blobs> = Arc::new(files);
    let found = Selector::new(&*blobs, &options.platform, shown).select(&candidates)?;
    image(source, &blobs, found)
}

/// The manifests of an index that `reference` means; without one, all, if they have no more than
/// one name between them.
fn choose(
    shown: &str,
    manifests: Vec<Descriptor>,
    reference: Option<&str>,
) -> Result<Vec<Descriptor>, ImageError> {
    let mut names: Vec<String> = manifests.iter().filter_map(name).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    let available = || match names.join(", ") {
        none if none.is_empty() => "one without a name".to_owned(),
        some => some,
    };
    match reference {
        None => {
            let mut digests: Vec<&str> =
                manifests.iter().filter(|m| name(m).is_some()).map(|m| m.digest.as_str()).collect();
            digests.dedup();
            if names.len() > 1 && digests.len() > 1 {
                return Err(ImageError::Ambiguous {
                    image: shown.to_owned(),
                    available: available(),
                });
            }
            Ok(manifests)
        }
        Some(reference) => {
            let wanted = |descriptor: &Descriptor| match reference.strip_prefix('@') {
                Some(digest) => descriptor.digest == digest,
                None => [REF_NAME, CONTAINERD_NAME].iter().any(|key| {
                    descriptor.annotations.get(*key).is_some_and(|name| name == reference)
                }),
            };
            let chosen: Vec<Descriptor> = manifests.into_iter().filter(wanted).collect();
            if chosen.is_empty() {
                return Err(ImageError::NoSuchReference {
                    image: shown.to_owned(),
                    wanted: reference.to_owned(),
                    available: available(),
                });
            }
            Ok(chosen)
        }
    }
}

fn name(descriptor: &Descriptor) -> Option<&str> {
    let name = |key| descriptor.annotations.get(key).map(String::as_str);
    name(REF_NAME).or_else(|| name(CONTAINERD_NAME))
}
