//! A file system in a file as an image of one layer, and with it the templates of a store.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use parbake_cache::template::TemplateManifest;
use parbake_cache::{Store, StoreError};

use super::error::ImageError;
use super::select::OWN_ALGORITHM;
use super::tree_tar::{Data, Facts, Files, Piece, TreeTar, Type};
use super::{Image, ImageConfig, ImageSource};
use crate::ext4::read::{ReadError, Reader};

/// Opens an ext4 file system in a file.
pub(super) fn open(path: &Path, source: &ImageSource) -> Result<Image, ImageError> {
    let shown = path.display().to_string();
    let failed = |error: ReadError| match error {
        ReadError::Io(error) => ImageError::read(shown.clone(), error),
        other => ImageError::Archive { path: shown.clone(), problem: other.to_string() },
    };
    let file = File::open(path).map_err(|error| ImageError::read(shown.clone(), error))?;
    // What cannot be read at all is said now.
    Reader::open(file.try_clone().map_err(|error| failed(error.into()))?).map_err(failed)?;
    let open = move || {
        let files = FileSystem::new(Reader::open(file.try_clone()?)?, shown.clone());
        Ok(Box::new(TreeTar::new(files)) as Box<dyn Read + Send>)
    };
    Ok(Image::of_one_layer(source, Arc::new(open), OWN_ALGORITHM))
}

/// Opens a template of the store in `root`.
pub(super) fn open_template(
    root: Option<&Path>,
    name: &str,
    source: &ImageSource,
) -> Result<Image, ImageError> {
    let failed = |error: StoreError| match error {
        StoreError::UnknownName { .. } | StoreError::Missing { .. } => {
            ImageError::NoTemplate { name: name.to_owned(), reason: error.to_string() }
        }
        other => ImageError::read(format!("template:{name}"), io::Error::other(other)),
    };
    let Some(root) = root else {
        let reason = "no store is used here".to_owned();
        return Err(ImageError::NoTemplate { name: name.to_owned(), reason });
    };
    let store = Store::open_read_only(root).map_err(failed)?;
    let (_, digest) = store.resolve(name).map_err(failed)?;
    let manifest: TemplateManifest = store.get_json(&digest).map_err(failed)?;
    // Opened here and now: whatever becomes of the name, the bytes stay.
    let mut image = open(&store.path(&manifest.rootfs.digest).map_err(failed)?, source)?;
    let process = manifest.process;
    let list = |words: Vec<String>| (!words.is_empty()).then_some(words);
    image.config = ImageConfig {
        os: "linux".to_owned(),
        architecture: manifest.architecture,
        env: process.env,
        user: process.user,
        working_dir: process.working_dir,
        entrypoint: list(process.entrypoint),
        cmd: list(process.cmd),
        stop_signal: process.stop_signal,
        labels: manifest.labels,
        ..ImageConfig::default()
    };
    image.manifest_digest = Some(digest);
    image.layers[0].created_by = Some(format!("template {}", manifest.rootfs.digest));
    Ok(image)
}

/// The files of an ext4 file system. Sockets are left out, as is an empty `lost+found`.
struct FileSystem {
    reader: Reader,
    shown: String,
    /// Directories that were entered: none has two names.
    entered: HashSet<u32>,
}

impl FileSystem {
    fn new(reader: Reader, shown: String) -> Self {
        Self { reader, shown, entered: HashSet::new() }
    }
}

impl Files for FileSystem {
    type Handle = u32;

    fn root(&self) -> u32 {
        crate::ext4::read::ROOT
    }

    fn facts(&mut self, number: &u32) -> io::Result<Option<Facts>> {
        let inode = self.reader.inode(*number)?;
        let kind = match inode.mode() & 0xf000 {
            0x1000 => Type::Fifo,
            0x2000 => Type::CharDevice(inode.device().0, inode.device().1),
            0x4000 => Type::Directory { enter: true },
            0x6000 => Type::BlockDevice(inode.device().0, inode.device().1),
            0x8000 => Type::File,
            0xa000 => Type::Symlink(self.reader.target(&inode)?),
            0xc000 => return Ok(None),
            other => {
                return Err(io::Error::other(format!("inode {number} is of type {other:#x}")));
            }
        };
        Ok(Some(Facts {
            mode: u32::from(inode.mode() & 0o7777),
            uid: inode.uid(),
            gid: inode.gid(),
            mtime: inode.mtime(),
            size: if kind == Type::File { inode.size() } else { 0 },
            several: (inode.links() > 1).then(|| (0, u64::from(*number))),
            xattrs: self.reader.xattrs(&inode)?,
            kind,
        }))
    }

    fn children(&mut self, number: &u32) -> io::Result<Vec<(Vec<u8>, u32)>> {
        if !self.entered.insert(*number) {
            return Err(io::Error::other(format!(
                "it is damaged: directory {number} has two names"
            )));
        }
        let mut names = self.reader.names(&self.reader.inode(*number)?)?;
        if *number == self.root()
            && let Some(at) = names.iter().position(|(name, _)| name == b"lost+found")
        {
            let inode = self.reader.inode(names[at].1)?;
            if inode.mode() & 0xf000 == 0x4000 && self.reader.names(&inode)?.is_empty() {
                names.remove(at);
            }
        }
        Ok(names)
    }

    fn data(&mut self, number: &u32, _: u64) -> io::Result<Data> {
        let stretches = self.reader.stretches(&self.reader.inode(*number)?)?;
        let pieces = stretches
            .into_iter()
            .map(|stretch| Piece { at: stretch.at, source: stretch.source, length: stretch.length })
            .collect();
        Ok(Data { source: self.reader.file().try_clone()?, pieces })
    }

    fn shown(&self, path: &[u8]) -> String {
        format!("{}: /{}", self.shown, String::from_utf8_lossy(path))
    }
}
