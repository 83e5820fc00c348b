//! Debian packages: found and downloaded by the host's own package client, which checks their
//! signatures, and unpacked in this process. No archive's address is known here.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use crate::compress::Compression;

/// Bounds on what one package may unpack to: distribution kernels stay under 600 MiB.
const MAX_UNPACKED: u64 = 4 << 30;
const MAX_ENTRIES: usize = 100_000;
/// The control archive of a kernel package is a few KiB.
const MAX_CONTROL: u64 = 1 << 20;

/// A package the host's client can download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The package that holds the kernel itself, never a metapackage.
    pub package: String,
    /// Its exact version.
    pub version: String,
}

/// Why a package could not be had or used.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// The host has no apt.
    #[error("{program} cannot be run ({source}): give the kernel as a local .deb or image instead")]
    NoClient {
        /// The program.
        program: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A name or version that is not one.
    #[error("{0:?} is not a package name or version")]
    BadName(String),
    /// The client knows no such package.
    #[error(
        "no package {name}: run `apt-get update`, or give a local .deb (the client said: {said})"
    )]
    NotFound {
        /// What was asked for.
        name: String,
        /// The client's last words.
        said: String,
    },
    /// The download failed.
    #[error("apt-get download {name} failed: {said}")]
    Download {
        /// What was asked for.
        name: String,
        /// The client's last words.
        said: String,
    },
    /// Not a Debian package, or a damaged one.
    #[error("{path} is not a usable Debian package: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The package holds no kernel.
    #[error("{path} holds no kernel image (boot/vmlinuz-*): name the package of the kernel itself")]
    NoKernel {
        /// The file.
        path: PathBuf,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The parts of an unpacked kernel package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// Package name, from the package itself.
    pub package: String,
    /// Package version, from the package itself.
    pub version: String,
    /// The bootable image.
    pub vmlinuz: PathBuf,
    /// `lib/modules/RELEASE`, when the package has modules.
    pub modules: Option<PathBuf>,
    /// The build configuration, when the package has it.
    pub config: Option<PathBuf>,
}

/// Refuses what a package client could take for an option or a path.
fn check_word(word: &str) -> Result<(), PackageError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.~:".contains(&byte);
    if word.len() < 256
        && word.starts_with(|c: char| c.is_ascii_alphanumeric())
        && word.bytes().all(plain)
    {
        return Ok(());
    }
    Err(PackageError::BadName(word.chars().take(80).collect()))
}

fn run(
    program: &'static str,
    arguments: &[&str],
    folder: Option<&Path>,
) -> Result<std::process::Output, PackageError> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("LC_ALL", "C")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null());
    if let Some(folder) = folder {
        command.current_dir(folder);
    }
    command.output().map_err(|source| PackageError::NoClient { program, source })
}

/// The last lines a program wrote to stderr, short enough for a message.
fn last_words(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(2)..].join("; ").chars().take(400).collect()
}

/// Asks the host's package client which package `name` stands for: a metapackage is followed to
/// the kernel it depends on.
///
/// # Errors
/// No client, or no such package.
pub fn candidate(name: &str, version: Option<&str>) -> Result<Candidate, PackageError> {
    let (mut name, mut version) = (name.to_owned(), version.map(str::to_owned));
    // linux-image-amd64 → linux-image-6.1.0-57-amd64; one step in practice, three for safety.
    for _ in 0..3 {
        check_word(&name)?;
        let wanted = match &version {
            Some(version) => {
                check_word(version)?;
                format!("{name}={version}")
            }
            None => name.clone(),
        };
        let output = run("apt-cache", &["show", "--no-all-versions", &wanted], None)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let said = || last_words(&output.stderr);
        let found = control_field(&text, "Version");
        let Some(found) = found.filter(|_| output.status.success()) else {
            return Err(PackageError::NotFound { name: wanted, said: said() });
        };
        match control_field(&text, "Depends").and_then(kernel_dependency) {
            Some((next, exact)) => (name, version) = (next, exact),
            None => return Ok(Candidate { package: name, version: found.to_owned() }),
        }
    }
    Err(PackageError::NotFound { name, said: "its dependencies lead to no kernel".into() })
}

/// The value of a field in the first stanza of a control file.
fn control_field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let lines = text.lines().take_while(|line| !line.is_empty());
    let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    values.next().map(str::trim)
}

/// The kernel package among the dependencies of a metapackage, with the version if it is exact.
fn kernel_dependency(depends: &str) -> Option<(String, Option<String>)> {
    depends.split(',').find_map(|clause| {
        let clause = clause.split('|').next()?.trim();
        let (name, rest) = clause.split_once(' ').unwrap_or((clause, ""));
        let release = name.strip_prefix("linux-image-")?;
        if !release.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let exact = rest.trim().strip_prefix("(= ").and_then(|rest| rest.strip_suffix(')'));
        Some((name.to_owned(), exact.map(str::to_owned)))
    })
}

/// Downloads `candidate` into `folder` and returns the file.
///
/// # Errors
/// No client, or a failed download.
pub fn download(candidate: &Candidate, folder: &Path) -> Result<PathBuf, PackageError> {
    let Candidate { package, version } = candidate;
    check_word(package)?;
    check_word(version)?;
    let io = |source| PackageError::Io { path: folder.to_owned(), source };
    // A folder of its own, so that the one .deb in it is the one just fetched.
    let own = tempfile::Builder::new().prefix("download-").tempdir_in(folder).map_err(io)?;
    let name = format!("{package}={version}");
    // Without the sandbox user apt warns that it cannot enter a private folder.
    let arguments = ["-q", "-o", "APT::Sandbox::User=root", "download", &name];
    let output = run("apt-get", &arguments, Some(own.path()))?;
    let failed = || PackageError::Download { name: name.clone(), said: last_words(&output.stderr) };
    if !output.status.success() {
        return Err(failed());
    }
    let mut entries = fs::read_dir(own.path()).map_err(io)?;
    let file = entries.find_map(|entry| {
        let path = entry.ok()?.path();
        path.extension().is_some_and(|extension| extension == "deb").then_some(path)
    });
    let file = file.ok_or_else(failed)?;
    let kept = folder.join(file.file_name().unwrap_or_default());
    fs::rename(&file, &kept).map_err(io)?;
    Ok(kept)
}

/// Unpacks the kernel, its configuration and its modules out of the package `deb` into `folder`.
/// Nothing else of the package is written, and no link or device ever is.
///
/// # Errors
/// A file that is not a package, is damaged, or holds no kernel.
pub fn unpack(deb: &Path, folder: &Path) -> Result<Unpacked, PackageError> {
    let io = |source| PackageError::Io { path: deb.to_owned(), source };
    let damaged = |what: String| PackageError::Damaged { path: deb.to_owned(), what };
    let mut file = BufReader::new(File::open(deb).map_err(io)?);
    let members = read_members(&mut file).map_err(|error| damaged(error.to_string()))?;

    let control = open_member(&mut file, &members, "control.tar")
        .map_err(|error| damaged(error.to_string()))?;
    let control =
        read_control(control).map_err(|error| damaged(format!("control archive: {error}")))?;
    let field = |name| control_field(&control, name).map(str::to_owned);
    let package = field("Package").ok_or_else(|| damaged("it has no name".into()))?;
    let version = field("Version").ok_or_else(|| damaged("it has no version".into()))?;
    check_word(&package)?;
    check_word(&version)?;

    let data =
        open_member(&mut file, &members, "data.tar").map_err(|error| damaged(error.to_string()))?;
    let mut unpacked =
        Unpacked { package, version, vmlinuz: PathBuf::new(), modules: None, config: None };
    let mut archive = tar::Archive::new(data.take(MAX_UNPACKED));
    let bad = |error: io::Error| damaged(format!("data archive: {error}"));
    for (count, entry) in archive.entries().map_err(bad)?.enumerate() {
        let mut entry = entry.map_err(bad)?;
        if count > MAX_ENTRIES {
            return Err(damaged(format!("more than {MAX_ENTRIES} files")));
        }
        if entry.header().entry_type() != tar::EntryType::Regular {
            continue;
        }
        let path = entry.path().map_err(bad)?.into_owned();
        let Some((target, kind)) = place(&path) else { continue };
        let target = folder.join(target);
        let write = |source| PackageError::Io { path: target.clone(), source };
        fs::create_dir_all(target.parent().unwrap_or(folder)).map_err(write)?;
        let mut output = File::create(&target).map_err(write)?;
        copy(&mut entry, &mut output).map_err(|error| match error {
            CopyError::Read(error) => bad(error),
            CopyError::Write(error) => write(error),
        })?;
        match kind {
            Part::Kernel if !unpacked.vmlinuz.as_os_str().is_empty() => {
                return Err(damaged("it holds more than one kernel".into()));
            }
            Part::Kernel => unpacked.vmlinuz = target,
            Part::Config => unpacked.config = Some(target),
            Part::Modules(root) => unpacked.modules = Some(folder.join(root)),
        }
    }
    if unpacked.vmlinuz.as_os_str().is_empty() {
        return Err(PackageError::NoKernel { path: deb.to_owned() });
    }
    Ok(unpacked)
}

enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

/// Copies, telling a damaged source from a full disk.
fn copy(from: &mut impl Read, to: &mut impl io::Write) -> Result<(), CopyError> {
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer).map_err(CopyError::Read)? {
            0 => return Ok(()),
            count => to.write_all(&buffer[..count]).map_err(CopyError::Write)?,
        }
    }
}

enum Part {
    Kernel,
    Config,
    Modules(PathBuf),
}

/// Where a file of the package goes, or `None` if it is of no use.
fn place(path: &Path) -> Option<(PathBuf, Part)> {
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) => names.push(name.to_str()?),
            _ => return None,
        }
    }
    // Packages of merged-/usr releases say usr/lib.
    let names = names.strip_prefix(["usr"].as_slice()).unwrap_or(&names);
    match names {
        ["boot", name] if name.starts_with("vmlinuz-") => Some(("vmlinuz".into(), Part::Kernel)),
        ["boot", name] if name.starts_with("config-") => Some(("config".into(), Part::Config)),
        ["lib", "modules", release, rest @ ..] => {
            let name = rest.last()?;
            let wanted = *name == "modules.builtin" || name.contains(".ko");
            let root = PathBuf::from("modules").join(release);
            wanted.then(|| (root.join(rest.iter().collect::<PathBuf>()), Part::Modules(root)))
        }
        _ => None,
    }
}

/// A member of the outer `ar` archive.
struct Member {
    name: String,
    at: u64,
    size: u64,
}

/// Reads the table of an `ar` archive: an 8-byte magic, then 60-byte headers each followed by its
/// content, padded to even (deb(5), ar(5)).
fn read_members<R: Read + Seek>(file: &mut R) -> io::Result<Vec<Member>> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(0))?;
    let mut magic = [0; 8];
    file.read_exact(&mut magic)?;
    if &magic != b"!<arch>\n" {
        return Err(bad("it does not start like an ar archive"));
    }
    let mut members = Vec::new();
    let mut at = 8;
    while at + 60 <= end && members.len() < 16 {
        file.seek(SeekFrom::Start(at))?;
        let mut header = [0; 60];
        file.read_exact(&mut header)?;
        if header[58..] != *b"`\n" {
            return Err(bad("a member's header is damaged"));
        }
        let text =
            |range: std::ops::Range<usize>| std::str::from_utf8(&header[range]).map(str::trim);
        let name = text(0..16).map_err(|_| bad("a member's name is damaged"))?;
        let size = text(48..58).ok().and_then(|size| size.parse::<u64>().ok());
        let size = size.ok_or_else(|| bad("a member's size is damaged"))?;
        if size > end - at - 60 {
            return Err(bad("truncated"));
        }
        members.push(Member { name: name.trim_end_matches('/').to_owned(), at: at + 60, size });
        at += 60 + size + size % 2;
    }
    Ok(members)
}

/// Opens the member whose name is `stem` and, maybe, a compression's suffix.
fn open_member<'a, R: Read + Seek>(
    file: &'a mut R,
    members: &[Member],
    stem: &str,
) -> io::Result<Box<dyn Read + 'a>> {
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let named = |member: &&Member| {
        member.name.strip_prefix(stem).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let member = members.iter().find(named).ok_or_else(|| bad(format!("it has no {stem}")))?;
    file.seek(SeekFrom::Start(member.at))?;
    let content = file.take(member.size);
    match &member.name[stem.len()..] {
        "" => Ok(Box::new(content)),
        ".xz" => Compression::Xz.reader(content),
        ".zst" => Compression::Zstd.reader(content),
        ".gz" => Compression::Gzip.reader(content),
        other => Err(bad(format!("{stem}{other} has an unknown compression"))),
    }
}

fn read_control(archive: impl Read) -> io::Result<String> {
    let mut archive = tar::Archive::new(archive.take(MAX_CONTROL));
    for entry in archive.entries()? {
        let entry = entry?;
        let path = entry.path()?;
        if path.file_name().is_some_and(|name| name == "control") {
            let mut text = String::new();
            entry.take(MAX_CONTROL).read_to_string(&mut text)?;
            return Ok(text);
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "no control file"))
}
