//! Measures what templates weigh on the road: bytes pushed against what tar+gzip would take, and
//! what a second template adds to a first.
//!
//! ```text
//! measure [--chunk KIB] [--run KIB] [--level N] ROOTFS[,MEMORY[,DISK]] …
//! ```
//! Each argument is one template: a root filesystem image and perhaps a snapshot's memory and
//! disk. They are published in order, each built upon all before. Prints one JSON object a line.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use parbake_cache::artifact::{ArtifactConfig, Manifest};
use parbake_cache::layout::Layout;
use parbake_cache::pack::Directory;
use parbake_cache::publish::{BasePack, Content, Publication, PublishOptions};
use parbake_cache::template::{
    CompatContract, KernelBundle, MachineShape, ObjectRef, ProcessConfig, SnapshotManifest,
    TemplateManifest, TemplateSource,
};
use parbake_cache::variant::{self, Choice};
use parbake_cache::{Digest, Store};

type Error = Box<dyn std::error::Error>;

struct Arguments {
    chunk: u32,
    run_pages: u32,
    level: i32,
    templates: Vec<Vec<PathBuf>>,
}

fn main() -> Result<(), Error> {
    let arguments = arguments()?;
    let scratch = tempfile::tempdir_in(std::env::var_os("TMPDIR").unwrap_or("/var/tmp".into()))?;
    let store = Store::open(&scratch.path().join("home"))?;
    let away = Store::open(&scratch.path().join("away"))?;
    let mut bases: BTreeMap<Digest, BasePack> = BTreeMap::new();
    let blobs = scratch.path().join("blobs");
    for (number, files) in arguments.templates.iter().enumerate() {
        let started = Instant::now();
        let template = install_files(&store, files, arguments.chunk)?;
        let adopted = started.elapsed();
        let options = PublishOptions {
            level: arguments.level,
            run_pages: arguments.run_pages,
            bases: bases.values().cloned().collect(),
            ..PublishOptions::default()
        };
        let started = Instant::now();
        let publication = store.publish(&template, &options)?;
        let published = started.elapsed();
        let new = keep(&publication, &blobs, &mut bases)?;
        let raw: u64 = files.iter().map(|file| gzip(file)).sum::<io::Result<u64>>()?;
        let pushed: u64 = new.values().sum();
        // Everything that is in the directory is at the registry.
        std::fs::write(blobs.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let layout = Layout::open(&blobs)?;
        let started = Instant::now();
        let report = variant::install(
            &away,
            &layout,
            &publication.index.descriptor,
            "measure",
            &Choice::All,
            &|_| (),
        )?;
        let installed = started.elapsed();
        let line = serde_json::json!({
            "template": number,
            "stats": publication.stats,
            "pushedBytes": pushed,
            "pushedByKind": new,
            "rawGzipBytes": raw,
            "pushedToRawGzip": pushed as f64 / raw as f64,
            "adoptSeconds": adopted.as_secs_f64(),
            "publishSeconds": published.as_secs_f64(),
            "installSeconds": installed.as_secs_f64(),
            "fetchedBytes": report.installed.iter().map(|one| one.fetched_bytes).sum::<u64>(),
            "reusedBytes": report.installed.iter().map(|one| one.reused_bytes).sum::<u64>(),
        });
        println!("{line}");
    }
    Ok(())
}

fn arguments() -> Result<Arguments, Error> {
    let mut arguments = Arguments { chunk: 64, run_pages: 128, level: 9, templates: Vec::new() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || -> Result<u32, Error> { Ok(words.next().ok_or("a number")?.parse()?) };
        match word.as_str() {
            "--chunk" => arguments.chunk = number()?,
            "--run" => arguments.run_pages = number()? / 4,
            "--level" => arguments.level = i32::try_from(number()?)?,
            files => arguments.templates.push(files.split(',').map(PathBuf::from).collect()),
        }
    }
    if arguments.templates.is_empty() {
        return Err(
            "usage: measure [--chunk KIB] [--run KIB] [--level N] ROOTFS[,MEMORY[,DISK]] …".into(),
        );
    }
    arguments.chunk *= 1024;
    Ok(arguments)
}

/// Makes a template of image files, with a kernel of no weight.
fn install_files(store: &Store, files: &[PathBuf], chunk: u32) -> Result<Digest, Error> {
    let staging = store.stage()?;
    let mut images = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let copy = staging.join(number.to_string());
        let status = Command::new("cp").arg("--sparse=always").arg(file).arg(&copy).status()?;
        if !status.success() {
            return Err(format!("cannot copy {}", file.display()).into());
        }
        images.push(store.adopt_image_in_chunks(copy, chunk)?);
    }
    let empty = |name: &str| -> Result<ObjectRef, Error> {
        let path = staging.join(name);
        File::create_new(&path)?.set_len(4096)?;
        Ok(store.adopt_image(path)?)
    };
    let machine = MachineShape { vcpus: 1, memory_mib: 512 };
    let kernel = KernelBundle {
        schema_version: 1,
        package: "file".to_owned(),
        version: String::new(),
        release: String::new(),
        source: Digest::of(b""),
        vmlinux: store.put_blob(b"vmlinux")?,
        initramfs: store.put_blob(b"initramfs")?,
        agent: Digest::of(b""),
        modules: Vec::new(),
        cmdline: String::new(),
        config: BTreeMap::new(),
    };
    let mut images = images.into_iter();
    let template = TemplateManifest {
        schema_version: 1,
        architecture: "amd64".to_owned(),
        rootfs: images.next().ok_or("a root filesystem")?,
        kernel: store.put_json(&kernel)?,
        process: ProcessConfig::default(),
        machine,
        source: TemplateSource {
            reference: "measure".to_owned(),
            manifest: None,
            layers: Vec::new(),
        },
        labels: BTreeMap::new(),
        bake: None,
        egress: Vec::new(),
        no_snapshot: false,
    };
    let template = store.put_json(&template)?.digest;
    if let Some(memory) = images.next() {
        let snapshot = SnapshotManifest {
            schema_version: 1,
            template,
            machine,
            compat: CompatContract {
                architecture: "amd64".to_owned(),
                cpu_vendor: String::new(),
                cpu_features: BTreeMap::new(),
                kvm_kind: String::new(),
                state_version: 1,
                agent_protocol: 1,
                page_size: 4096,
            },
            state: store.put_blob(b"state")?,
            memory,
            disk: images.next().map_or_else(|| empty("disk"), Ok)?,
            generation: 1,
        };
        let snapshot = store.put_json(&snapshot)?.digest;
        store.set_snapshot(&template, &snapshot)?;
    }
    Ok(template)
}

/// Puts a publication's new blobs where an installation finds them; returns their sizes by kind.
fn keep(
    publication: &Publication,
    directory: &Path,
    bases: &mut BTreeMap<Digest, BasePack>,
) -> Result<BTreeMap<String, u64>, Error> {
    let place = directory.join("blobs/sha256");
    std::fs::create_dir_all(&place)?;
    let mut new = BTreeMap::new();
    let all = publication.blobs.iter().chain(&publication.manifests).chain([&publication.index]);
    for blob in all {
        let path = place.join(blob.descriptor.digest.hex());
        if path.exists() {
            continue;
        }
        match &blob.content {
            Content::Bytes(bytes) => std::fs::write(&path, bytes)?,
            Content::File(file) => drop(std::fs::copy(file, &path)?),
            Content::Elsewhere => continue,
        }
        *new.entry(blob.descriptor.media_type.clone()).or_insert(0) += blob.descriptor.size;
    }
    for manifest in &publication.manifests {
        let read = |digest: &Digest| std::fs::read(place.join(digest.hex()));
        let digest = &manifest.descriptor.digest;
        let manifest = Manifest::parse(&read(digest)?, digest, "measure")?;
        let config =
            ArtifactConfig::parse(&read(&manifest.config.digest)?, &manifest.config.digest)?;
        for record in config.packs {
            let bytes = read(&record.directory)?;
            let directory_len = bytes.len() as u64;
            let directory = Directory::parse(&bytes)?;
            bases.insert(record.pack, BasePack { record, directory, directory_len });
        }
    }
    Ok(new)
}

/// What `gzip` makes of a file.
fn gzip(file: &Path) -> io::Result<u64> {
    let mut child = Command::new("gzip")
        .args(["-6", "-c"])
        .stdin(File::open(file)?)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut out = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let size = io::copy(&mut out, &mut io::sink())?;
    child.wait()?;
    Ok(size)
}
