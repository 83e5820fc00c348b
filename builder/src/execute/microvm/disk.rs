//! The disks of build machines: directories of the stack as ext4 images, in overlayfs' form.
//!
//! An image is made once for each directory and build, with the writer that makes root file systems;
//! those of base images are kept in the build directory (`disks/`). A machine has room for so many
//! disks; when a stack has more directories, neighbours share one.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use parbake_protocol::agent::StepLayer;
use rustix::fs::{lgetxattr, major, minor};

use crate::execute::error::{Doing as _, ExecuteError};
use crate::execute::layer::{OPAQUE, xattrs};
use crate::ext4;
use crate::flatten::data::DataWriter;
use crate::tree::{Device, FileData, Kind, Metadata, Node, NodeId, Timestamp, Tree, Xattrs};

/// Disks for layers; the machine has 16 devices, of which the root disk and three others are used.
const MOST_DISKS: usize = 12;

/// The images of one build.
#[derive(Debug)]
pub(super) struct Disks {
    /// The build directory.
    directory: PathBuf,
    /// Images that later builds find again.
    kept: PathBuf,
    /// Those that end with this one.
    scratch: tempfile::TempDir,
    disk_bytes: u64,
}

impl Disks {
    pub fn new(directory: &Path, disk_bytes: u64) -> Result<Self, ExecuteError> {
        let kept = directory.join("disks");
        let temporary = directory.join("tmp");
        for path in [&kept, &temporary] {
            fs::create_dir_all(path).doing(|| format!("making {}", path.display()))?;
        }
        let scratch = tempfile::Builder::new()
            .prefix("disks-")
            .tempdir_in(&temporary)
            .doing(|| format!("making a directory in {}", temporary.display()))?;
        Ok(Self { directory: directory.to_owned(), kept, scratch, disk_bytes })
    }

    /// Gone with the build.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// The disk steps write to: empty, and as large as one may write, with room for what is sent.
    pub fn work(&self) -> Result<PathBuf, ExecuteError> {
        let path = self.scratch.path().join("work.ext4");
        if !path.exists() {
            let free_bytes = self.disk_bytes.saturating_add(spare(self.disk_bytes));
            let options = ext4::Options { free_bytes, ..ext4::Options::new(uuid(b"work")) };
            make(&path, &[], &options)?;
        }
        Ok(path)
    }

    /// Where each of `trees` (lowest first) lies, and the images, `/dev/vdb` first.
    pub fn of(&self, trees: &[PathBuf]) -> Result<(Vec<StepLayer>, Vec<PathBuf>), ExecuteError> {
        let (mut layers, mut images) = (Vec::new(), Vec::new());
        for range in grouped(trees.len(), MOST_DISKS) {
            let group = &trees[range];
            images.push(self.image(group)?);
            let disk = u8::try_from(images.len()).unwrap_or(u8::MAX);
            let alone = group.len() == 1;
            layers.extend(
                (0u32..)
                    .zip(group)
                    .map(|(number, _)| StepLayer { disk, directory: (!alone).then_some(number) }),
            );
        }
        Ok((layers, images))
    }

    fn image(&self, trees: &[PathBuf]) -> Result<PathBuf, ExecuteError> {
        let mut name = Vec::new();
        for tree in trees {
            // A tree never changes once it has its name, wherever the build directory is.
            let tree = tree.strip_prefix(&self.directory).unwrap_or(tree);
            name.extend(tree.as_os_str().as_bytes());
            name.push(0);
        }
        let digest = Digest::of(&name);
        let file = format!("{}.ext4", digest.hex());
        let of_base = trees.iter().all(|tree| {
            tree.parent().and_then(Path::parent).is_some_and(|place| place.ends_with("bases"))
        });
        let path = if of_base { self.kept.join(file) } else { self.scratch.path().join(file) };
        if !path.exists() {
            make(&path, trees, &ext4::Options::new(uuid(digest.hex().as_bytes())))?;
        }
        Ok(path)
    }
}

/// Room for what is sent to a machine, besides what a step may write.
pub(super) fn spare(disk_bytes: u64) -> u64 {
    disk_bytes / 8
}

fn uuid(name: &[u8]) -> [u8; 16] {
    let digest = Digest::of(&[b"build disk ", name].concat());
    let mut uuid = [1; 16];
    for (to, from) in uuid.iter_mut().zip(digest.hex().bytes()) {
        *to = from;
    }
    uuid
}

/// Cuts `count` neighbours into at most `most` groups: the first alone, which is the base, the last
/// ones alone if possible, and those between in groups that stay the same as more come.
fn grouped(count: usize, most: usize) -> Vec<Range<usize>> {
    let rest = count.saturating_sub(1);
    let mut size = 1;
    while rest / size + rest % size + 1 > most.max(2) {
        size *= 2;
        if size > rest {
            // One group of all of them.
            return vec![0..1, 1..count];
        }
    }
    let whole = rest - rest % size;
    let mut groups: Vec<Range<usize>> = std::iter::once(0..count.min(1)).collect();
    groups.extend((0..whole / size).map(|group| 1 + group * size..1 + (group + 1) * size));
    groups.extend((whole..rest).map(|at| at + 1..at + 2));
    groups.retain(|group| !group.is_empty());
    groups
}

/// Makes an image; it has its name only when it is complete.
fn make(path: &Path, trees: &[PathBuf], options: &ext4::Options) -> Result<(), ExecuteError> {
    let passing = path.with_extension(format!("part-{}", std::process::id()));
    let result = write(&passing, trees, options)
        .and_then(|()| fs::rename(&passing, path))
        .doing(|| format!("making the disk {} of a build machine", path.display()));
    if result.is_err() {
        let _ = fs::remove_file(&passing);
    }
    result
}

fn write(path: &Path, trees: &[PathBuf], options: &ext4::Options) -> io::Result<()> {
    let out = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    let mut taker = Taker { data: DataWriter::new(&out), nodes: Vec::new(), links: HashMap::new() };
    taker.nodes.push(Node { meta: plain(), kind: Kind::Directory(BTreeMap::new()) });
    if let [only] = trees {
        taker.fill(NodeId::ROOT, only)?;
    } else {
        let mut children = BTreeMap::new();
        for (number, tree) in trees.iter().enumerate() {
            let id = taker.push(Node { meta: plain(), kind: Kind::Fifo });
            taker.fill(id, tree)?;
            children.insert(number.to_string().into_bytes().into_boxed_slice(), id);
        }
        taker.nodes[0].kind = Kind::Directory(children);
    }
    let Taker { data, nodes, .. } = taker;
    let (area, full) = data.finish()?;
    if full {
        return Err(io::ErrorKind::StorageFull.into());
    }
    match ext4::finish(&out, &area, &Tree { nodes }, options) {
        Ok(_) => Ok(()),
        Err(ext4::WriteError::Io(error)) => Err(error),
        Err(ext4::WriteError::OutOfSpace { .. }) => Err(io::ErrorKind::StorageFull.into()),
        Err(error) => Err(io::Error::other(error)),
    }
}

fn plain() -> Metadata {
    Metadata { mode: 0o755, uid: 0, gid: 0, mtime: Timestamp::default(), xattrs: Xattrs::new() }
}

/// Takes directories of this machine into an image.
struct Taker<'f> {
    data: DataWriter<'f>,
    nodes: Vec<Node>,
    /// Files with several names.
    links: HashMap<(u64, u64), NodeId>,
}

impl Taker<'_> {
    fn push(&mut self, node: Node) -> NodeId {
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.nodes.push(node);
        id
    }

    /// Makes the node `id` the directory `path`.
    fn fill(&mut self, id: NodeId, path: &Path) -> io::Result<()> {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let meta = metadata(path).map_err(named)?;
        let mut names = fs::read_dir(path)
            .and_then(|entries| {
                entries.map(|entry| entry.map(|e| e.file_name())).collect::<io::Result<Vec<_>>>()
            })
            .map_err(named)?;
        names.sort_unstable();
        let mut children = BTreeMap::new();
        for name in names {
            let child = self.take(&path.join(&name))?;
            children.insert(name.into_vec().into_boxed_slice(), child);
        }
        self.nodes[id.0 as usize] = Node { meta, kind: Kind::Directory(children) };
        Ok(())
    }

    fn take(&mut self, path: &Path) -> io::Result<NodeId> {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let meta = fs::symlink_metadata(path).map_err(named)?;
        let kind = meta.file_type();
        if kind.is_dir() {
            let id = self.push(Node { meta: plain(), kind: Kind::Fifo });
            self.fill(id, path)?;
            return Ok(id);
        }
        let several = meta.nlink() > 1;
        if several && let Some(id) = self.links.get(&(meta.dev(), meta.ino())) {
            return Ok(*id);
        }
        let device = Device { major: major(meta.rdev()), minor: minor(meta.rdev()) };
        let kind = if kind.is_symlink() {
            let target = fs::read_link(path).map_err(named)?.into_os_string().into_vec();
            Kind::Symlink(target.into_boxed_slice())
        } else if kind.is_char_device() {
            Kind::CharDevice(device)
        } else if kind.is_block_device() {
            Kind::BlockDevice(device)
        } else if kind.is_fifo() {
            Kind::Fifo
        } else if kind.is_socket() {
            Kind::Socket
        } else {
            Kind::File(self.content(path, meta.len()).map_err(named)?)
        };
        let described = metadata(path).map_err(named)?;
        let id = self.push(Node { meta: described, kind });
        if several {
            self.links.insert((meta.dev(), meta.ino()), id);
        }
        Ok(id)
    }

    fn content(&mut self, path: &Path, size: u64) -> io::Result<FileData> {
        let mut file = File::open(path)?;
        self.data.begin(size);
        let mut buffer = vec![0; 256 << 10];
        let mut at = 0;
        while at < size {
            let want = usize::try_from(size - at).unwrap_or(usize::MAX).min(buffer.len());
            let read = file.read(&mut buffer[..want])?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.data.write(at, &buffer[..read])?;
            at += read as u64;
        }
        self.data.end()
    }
}

fn metadata(path: &Path) -> io::Result<Metadata> {
    let meta = fs::symlink_metadata(path)?;
    let mut attributes: Xattrs = xattrs(path)?
        .into_iter()
        .map(|(name, value)| (name.into_boxed_slice(), value.into_boxed_slice()))
        .collect();
    let mut value = [0; 8];
    if meta.is_dir() && lgetxattr(path, OPAQUE, &mut value).is_ok_and(|len| value[..len] == *b"y") {
        attributes.insert(OPAQUE.as_bytes().into(), b"y"[..].into());
    }
    Ok(Metadata {
        // The low twelve bits are all there are.
        mode: u16::try_from(meta.mode() & 0o7777).unwrap_or(0),
        uid: meta.uid(),
        gid: meta.gid(),
        mtime: Timestamp {
            seconds: meta.mtime(),
            nanos: u32::try_from(meta.mtime_nsec()).unwrap_or(0),
        },
        xattrs: attributes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_of_any_height_fit_and_groups_stay_the_same() {
        let mut before: Vec<Range<usize>> = Vec::new();
        let mut remade = 0;
        for count in 1..=300 {
            let groups = grouped(count, MOST_DISKS);
            assert!(groups.len() <= MOST_DISKS, "{count}: {}", groups.len());
            let all: Vec<usize> = groups.iter().cloned().flatten().collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            assert_eq!(groups[0], 0..1, "the base is alone");
            remade += groups.iter().filter(|group| !before.contains(group)).count();
            before = groups;
        }
        // Where each step made all of its images again, it would be some 3,000.
        assert!(remade < 900, "{remade}");
        assert_eq!(grouped(3, MOST_DISKS), [0..1, 1..2, 2..3]);
    }
}
