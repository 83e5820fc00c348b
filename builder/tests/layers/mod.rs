//! Makes layers and images byte by byte, also such as no tar program would write, and shows
//! flattened trees as text.
#![allow(dead_code, reason = "each test program uses some of it")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parbake_builder::flatten::{FlattenOptions, Flattened, flatten};
use parbake_builder::image::digest::{Algorithm, BlobDigest};
use parbake_builder::image::{self, Event, Image, ImageOptions, ImageSource};
use parbake_builder::tree::{Kind, Node, NodeId, Tree};

/// Modification time of every entry that says nothing else.
pub const MTIME: u64 = 1_000_000_000;

/// A tar archive in the making.
#[derive(Default, Clone)]
pub struct Tar {
    bytes: Vec<u8>,
}

/// One entry in the making; fields as the header has them.
#[derive(Clone)]
pub struct Entry<'t> {
    pub letter: u8,
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    pub data: Vec<u8>,
    pub size: Option<u64>,
    pub mode: u64,
    pub uid: u64,
    pub gid: u64,
    pub mtime: u64,
    pub device: (u64, u64),
    pub pax: Vec<(&'t [u8], Vec<u8>)>,
    pub magic: &'t [u8; 8],
}

impl Entry<'_> {
    pub fn new(letter: u8, name: impl AsRef<[u8]>) -> Self {
        Self {
            letter,
            name: name.as_ref().to_vec(),
            link: Vec::new(),
            data: Vec::new(),
            size: None,
            mode: if letter == b'5' { 0o755 } else { 0o644 },
            uid: 0,
            gid: 0,
            mtime: MTIME,
            device: (0, 0),
            pax: Vec::new(),
            magic: b"ustar\x0000",
        }
    }
}

impl<'t> Entry<'t> {
    pub fn data(mut self, data: impl AsRef<[u8]>) -> Self {
        self.data = data.as_ref().to_vec();
        self
    }

    pub fn link(mut self, link: impl AsRef<[u8]>) -> Self {
        self.link = link.as_ref().to_vec();
        self
    }

    pub fn mode(mut self, mode: u64) -> Self {
        self.mode = mode;
        self
    }

    pub fn owner(mut self, uid: u64, gid: u64) -> Self {
        (self.uid, self.gid) = (uid, gid);
        self
    }

    pub fn mtime(mut self, mtime: u64) -> Self {
        self.mtime = mtime;
        self
    }

    pub fn device(mut self, major: u64, minor: u64) -> Self {
        self.device = (major, minor);
        self
    }

    pub fn pax(
        mut self,
        keyword: &'t (impl AsRef<[u8]> + ?Sized),
        value: impl AsRef<[u8]>,
    ) -> Self {
        self.pax.push((keyword.as_ref(), value.as_ref().to_vec()));
        self
    }
}

/// One PAX record; its length counts its own digits.
pub fn record(keyword: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = keyword.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    [length.to_string().as_bytes(), b" ", keyword, b"=", value, b"\n"].concat()
}

/// A number as a tar field: octal if it fits, else base 256.
fn field(block: &mut [u8], value: u64) {
    let text = format!("{value:0width$o}", width = block.len() - 1);
    if text.len() < block.len() {
        block[..text.len()].copy_from_slice(text.as_bytes());
    } else {
        let bytes = value.to_be_bytes();
        let length = bytes.len().min(block.len());
        let start = block.len() - length;
        // With its high bit set a value means a negative number, for times.
        block.fill(if value >> 63 == 1 { 0xff } else { 0 });
        block[start..].copy_from_slice(&bytes[bytes.len() - length..]);
        block[0] |= 0x80;
    }
}

/// Puts the checksum into a header.
pub fn seal(block: &mut [u8; 512]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// A header block for an entry; the name is cut at 100 bytes.
pub fn header(entry: &Entry<'_>) -> [u8; 512] {
    let mut block = [0; 512];
    let name = &entry.name[..entry.name.len().min(100)];
    block[..name.len()].copy_from_slice(name);
    field(&mut block[100..108], entry.mode);
    field(&mut block[108..116], entry.uid);
    field(&mut block[116..124], entry.gid);
    field(&mut block[124..136], entry.size.unwrap_or(entry.data.len() as u64));
    field(&mut block[136..148], entry.mtime);
    block[156] = entry.letter;
    let link = &entry.link[..entry.link.len().min(100)];
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(entry.magic);
    if matches!(entry.letter, b'3' | b'4') {
        field(&mut block[329..337], entry.device.0);
        field(&mut block[337..345], entry.device.1);
    }
    seal(&mut block);
    block
}

impl Tar {
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends bytes as they are.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    /// Appends bytes, filled up to whole blocks.
    pub fn padded(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self
    }

    /// Appends an entry; PAX records and names over 100 bytes get a PAX header before it.
    pub fn entry(self, mut entry: Entry<'_>) -> Self {
        if entry.name.len() > 100 {
            entry.pax.push((b"path", entry.name.clone()));
        }
        if entry.link.len() > 100 {
            entry.pax.push((b"linkpath", entry.link.clone()));
        }
        let records: Vec<u8> = entry.pax.iter().flat_map(|(k, v)| record(k, v)).collect();
        let mut tar = self;
        if !records.is_empty() {
            tar = tar.raw(&header(&Entry::new(b'x', "pax").data(&records))).padded(&records);
        }
        tar.raw(&header(&entry)).padded(&entry.data)
    }

    pub fn file(self, name: impl AsRef<[u8]>, data: impl AsRef<[u8]>) -> Self {
        self.entry(Entry::new(b'0', name).data(data))
    }

    pub fn directory(self, name: impl AsRef<[u8]>) -> Self {
        self.entry(Entry::new(b'5', name))
    }

    pub fn symlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(Entry::new(b'2', name).link(target))
    }

    pub fn hardlink(self, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(Entry::new(b'1', name).link(target))
    }

    /// An empty file, as whiteouts are.
    pub fn mark(self, name: impl AsRef<[u8]>) -> Self {
        self.file(name, "")
    }

    /// The bytes so far, without the end mark.
    pub fn unfinished(self) -> Vec<u8> {
        self.bytes
    }

    /// The archive with its end mark.
    pub fn finish(self) -> Vec<u8> {
        self.raw(&[0; 1024]).bytes
    }
}

/// How a layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Plain,
    Gzip,
    Zstd,
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).expect("memory")
}

impl Form {
    pub fn encode(self, tar: &[u8]) -> Vec<u8> {
        match self {
            Self::Plain => tar.to_vec(),
            Self::Gzip => gzip(tar),
            Self::Zstd => zstd(tar),
        }
    }

    pub fn media_type(self) -> &'static str {
        match self {
            Self::Plain => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }
}

/// An OCI layout in a temporary directory.
pub struct Layout {
    directory: tempfile::TempDir,
}

/// A layer as a layout stores it.
#[derive(Clone)]
pub struct Stored {
    pub blob: Vec<u8>,
    pub tar: Vec<u8>,
    pub media_type: String,
}

impl Stored {
    pub fn new(tar: Vec<u8>, form: Form) -> Self {
        Self { blob: form.encode(&tar), tar, media_type: form.media_type().to_owned() }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    BlobDigest::of(Algorithm::Sha256, bytes).to_string()
}

impl Layout {
    pub fn empty() -> Self {
        let layout = Self { directory: tempfile::tempdir().expect("temporary directory") };
        std::fs::create_dir_all(layout.path().join("blobs/sha256")).expect("blobs");
        std::fs::write(layout.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)
            .expect("oci-layout");
        layout
    }

    /// A layout of one image with these layers, gzip-compressed.
    pub fn of(layers: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Self::stored(layers.into_iter().map(|tar| Stored::new(tar, Form::Gzip)))
    }

    /// A layout of one image with layers as given.
    pub fn stored(layers: impl IntoIterator<Item = Stored>) -> Self {
        let layout = Self::empty();
        let layers: Vec<Stored> = layers.into_iter().collect();
        let config = config(layers.iter().map(|layer| sha256(&layer.tar)));
        let manifest = layout.manifest(&config, &layers);
        layout.index(&[manifest]);
        layout
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Stores a blob; gives its descriptor.
    pub fn blob(&self, media_type: &str, bytes: &[u8]) -> serde_json::Value {
        let digest = sha256(bytes);
        let path = self.path().join("blobs").join(digest.replace(':', "/"));
        std::fs::write(path, bytes).expect("blob");
        serde_json::json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    }

    /// Stores configuration, layers and manifest; gives the manifest's descriptor.
    pub fn manifest(&self, config: &serde_json::Value, layers: &[Stored]) -> serde_json::Value {
        let config =
            self.blob("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
        let layers: Vec<_> =
            layers.iter().map(|layer| self.blob(&layer.media_type, &layer.blob)).collect();
        let manifest = serde_json::json!({"schemaVersion": 2, "config": config, "layers": layers});
        self.blob("application/vnd.oci.image.manifest.v1+json", manifest.to_string().as_bytes())
    }

    pub fn index(&self, manifests: &[serde_json::Value]) {
        let index = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
        std::fs::write(self.path().join("index.json"), index.to_string()).expect("index.json");
    }

    /// Path of a blob.
    pub fn blob_path(&self, digest: &str) -> PathBuf {
        self.path().join("blobs").join(digest.replace(':', "/"))
    }

    pub fn source(&self) -> ImageSource {
        ImageSource::OciLayout { path: self.path().to_owned(), reference: None }
    }

    pub fn open(&self) -> Result<Image, String> {
        open(&self.source())
    }
}

pub fn config(diff_ids: impl IntoIterator<Item = String>) -> serde_json::Value {
    let diff_ids: Vec<_> = diff_ids.into_iter().collect();
    serde_json::json!({
        "architecture": image::Platform::default().architecture,
        "os": "linux",
        "config": {"Env": ["A=1"]},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": diff_ids.iter().map(|_| serde_json::json!({"created_by": "x"})).collect::<Vec<_>>(),
    })
}

pub fn open(source: &ImageSource) -> Result<Image, String> {
    image::open(source, &ImageOptions::default(), &mut |_| {}).map_err(|error| error.to_string())
}

/// A flattened image and the file its contents were written to.
pub struct Flat {
    pub flattened: Flattened,
    pub file: std::fs::File,
    pub events: Vec<Event>,
}

pub fn flatten_with(image: &Image, options: &FlattenOptions) -> Result<Flat, String> {
    let file = tempfile::tempfile().expect("temporary file");
    let mut events = Vec::new();
    let flattened = flatten(image, &file, options, &mut |event| events.push(event))
        .map_err(|error| error.to_string())?;
    Ok(Flat { flattened, file, events })
}

/// Flattens layers, each a whole tar; gives the tree as text, or the error.
pub fn show(layers: impl IntoIterator<Item = Vec<u8>>) -> Result<String, String> {
    let layout = Layout::of(layers);
    let flat = flatten_with(&layout.open()?, &FlattenOptions::default())?;
    Ok(flat.text())
}

impl Flat {
    pub fn tree(&self) -> &Tree {
        &self.flattened.tree
    }

    /// A file's contents, read from its blocks.
    pub fn contents(&self, node: &Node) -> Vec<u8> {
        contents(&self.file, node)
    }

    /// The tree as text, one name per line; see [`show_tree`].
    pub fn text(&self) -> String {
        show_tree(self.tree(), &self.file)
    }
}

pub fn contents(image: &std::fs::File, node: &Node) -> Vec<u8> {
    let Kind::File(file) = &node.kind else { panic!("not a file") };
    let size = usize::try_from(file.size).expect("a small file");
    let mut bytes = vec![0; size.next_multiple_of(4096)];
    for run in &file.runs {
        let at = run.logical as usize * 4096;
        let length = run.blocks as usize * 4096;
        image.read_exact_at(&mut bytes[at..at + length], run.physical * 4096).expect("blocks");
    }
    assert!(bytes[size..].iter().all(|&byte| byte == 0), "the tail of the last block is zero");
    bytes.truncate(size);
    bytes
}

/// A tree as text, one name per line in depth-first order: path, kind (`/` directory, `=contents`,
/// `->target`, `c8:1`, ...), and whatever is not the default: mode (0755 of directories, 0777 of
/// links, else 0644), owner (0:0), time ([`MTIME`]; implied directories have 0), attributes, and
/// `#n` for the nth file that has several names. The root is left out if it is as implied.
pub fn show_tree(tree: &Tree, image: &std::fs::File) -> String {
    let mut names = vec![0u32; tree.nodes.len()];
    let mut lines = Vec::new();
    visit(tree, NodeId::ROOT, &mut Vec::new(), &mut |path, id| {
        names[id.0 as usize] += 1;
        lines.push((path.escape_ascii().to_string(), id));
    });
    let mut shared: Vec<NodeId> = Vec::new();
    let mut text = String::new();
    for (path, id) in lines {
        let node = &tree.nodes[id.0 as usize];
        let path = if path.is_empty() { "." } else { &path };
        let (shown, mode) = match &node.kind {
            Kind::Directory(_) => ("/".to_owned(), 0o755),
            Kind::File(file) if file.size > 64 => {
                (format!("={}B:{}", file.size, &sha256(&contents(image, node))[7..15]), 0o644)
            }
            Kind::File(_) => (format!("={}", contents(image, node).escape_ascii()), 0o644),
            Kind::Symlink(target) => (format!("->{}", target.escape_ascii()), 0o777),
            Kind::CharDevice(device) => (format!(" c{}:{}", device.major, device.minor), 0o644),
            Kind::BlockDevice(device) => (format!(" b{}:{}", device.major, device.minor), 0o644),
            Kind::Fifo => (" p".to_owned(), 0o644),
            Kind::Socket => (" s".to_owned(), 0o644),
        };
        write!(text, "{path}{shown}").expect("memory");
        let meta = &node.meta;
        if meta.mode != mode {
            write!(text, " {:o}", meta.mode).expect("memory");
        }
        if (meta.uid, meta.gid) != (0, 0) {
            write!(text, " {}:{}", meta.uid, meta.gid).expect("memory");
        }
        match (meta.mtime.seconds, meta.mtime.nanos) {
            (1_000_000_000, 0) => {}
            (seconds, 0) => write!(text, " @{seconds}").expect("memory"),
            (seconds, nanos) => write!(text, " @{seconds}.{nanos:09}").expect("memory"),
        }
        for (name, value) in &meta.xattrs {
            write!(text, " {}={}", name.escape_ascii(), value.escape_ascii()).expect("memory");
        }
        if names[id.0 as usize] > 1 {
            let number = shared.iter().position(|&other| other == id).unwrap_or_else(|| {
                shared.push(id);
                shared.len() - 1
            });
            write!(text, " #{number}").expect("memory");
        }
        text.push('\n');
    }
    text.strip_prefix("./ @0\n").map_or(text.clone(), str::to_owned)
}

fn visit(tree: &Tree, id: NodeId, path: &mut Vec<u8>, each: &mut impl FnMut(&[u8], NodeId)) {
    each(path, id);
    if let Kind::Directory(entries) = &tree.nodes[id.0 as usize].kind {
        for (name, &child) in entries {
            let length = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(&name[..]);
            visit(tree, child, path, each);
            path.truncate(length);
        }
    }
}
