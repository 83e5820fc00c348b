//! `parbaked cp`: files and trees between here and a sandbox.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use parbake_node::terminal::failure::{Classify, CliError, CliResult, Kind};
use parbake_service::client::Client;
use parbake_service::model::Stored;
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};

use super::{Context, part, refused};

/// Copy files between here and a sandbox
///
/// One of the two places is ID:PATH, with an absolute path. A single file keeps its permissions; `-`
/// is standard input or output. With -r the contents of one directory go into another, which is
/// made; the guest needs `tar` for that.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Copy what is in a directory
    #[arg(short, long)]
    recursive: bool,
    /// Owner in the sandbox: user, uid, user:group or uid:gid
    #[arg(long, value_name = "USER", conflicts_with = "recursive")]
    owner: Option<String>,
    /// What to copy
    #[arg(value_name = "FROM")]
    from: OsString,
    /// Where to
    #[arg(value_name = "TO")]
    to: OsString,
}

/// Either side of a copy.
enum Place {
    Here(PathBuf),
    There { id: String, path: Vec<u8> },
}

impl Place {
    fn of(text: &OsString) -> Self {
        let bytes = text.as_bytes();
        // An id has no slash in it, so a path with a colon in it can be written ./so:and:so.
        if let Some(at) = bytes.iter().position(|&b| b == b':')
            && let Ok(id) = std::str::from_utf8(&bytes[..at])
            && !id.is_empty()
            && id.bytes().all(|b| b.is_ascii_alphanumeric())
        {
            return Self::There { id: id.to_owned(), path: bytes[at + 1..].to_vec() };
        }
        Self::Here(PathBuf::from(text))
    }
}

/// Copies.
pub fn run(context: &Context, args: &Args) -> CliResult {
    let client = context.client()?;
    match (Place::of(&args.from), Place::of(&args.to)) {
        (Place::Here(from), Place::There { id, path }) => {
            if args.recursive {
                return tree_in(&client, &from, &id, &path);
            }
            let owner = args.owner.as_deref().unwrap_or_default();
            file_in(&client, &from, &id, &path, owner)
        }
        (Place::There { id, path }, Place::Here(to)) => {
            if args.recursive {
                tree_out(&client, &id, &path, &to)
            } else {
                file_out(&client, &id, &path, &to)
            }
        }
        _ => Err(CliError::new(Kind::Usage, "exactly one of the two is in a sandbox: ID:PATH")),
    }
}

fn address(id: &str, what: &str, path: &[u8]) -> String {
    format!("/v1/sandboxes/{}/{what}?path={}", part(id), percent_encode(path, NON_ALPHANUMERIC))
}

fn file_in(client: &Client, from: &Path, id: &str, path: &[u8], owner: &str) -> CliResult {
    let failed = |error: io::Error| {
        CliError::new(Kind::User, format!("cannot read {}: {error}", from.display()))
    };
    let (data, mode): (Box<dyn Read + Send>, u32) = if from.as_os_str() == "-" {
        (Box::new(io::stdin()), 0o644)
    } else {
        let file = File::open(from).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if meta.is_dir() {
            let message = format!("{} is a directory", from.display());
            return Err(CliError::new(Kind::User, message).hint("cp -r copies what is in it"));
        }
        (Box::new(file), meta.permissions().mode() & 0o7777)
    };
    let mut path = path.to_vec();
    if path.ends_with(b"/") {
        path.extend_from_slice(from.file_name().unwrap_or_default().as_bytes());
    }
    let owner = percent_encode(owner.as_bytes(), NON_ALPHANUMERIC);
    let address = format!("{}&mode={mode:o}&parents&owner={owner}", address(id, "files", &path));
    client.upload::<Stored>(&address, data).map(drop).map_err(refused)
}

fn file_out(client: &Client, id: &str, path: &[u8], to: &Path) -> CliResult {
    let mut answer =
        client.read(hyper::Method::GET, &address(id, "files", path), None).map_err(refused)?;
    if to.as_os_str() == "-" {
        let mut stdout = io::stdout().lock();
        return io::copy(&mut answer, &mut stdout).and_then(|_| stdout.flush()).kind(Kind::User);
    }
    let to = if to.is_dir() {
        let name = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
        to.join(OsString::from_vec(name.to_vec()))
    } else {
        to.to_owned()
    };
    let failed = |error: io::Error| {
        CliError::new(Kind::User, format!("cannot write {}: {error}", to.display()))
    };
    let mode = answer.header("parbake-mode").and_then(|mode| u32::from_str_radix(mode, 8).ok());
    // Under another name until it is complete. What a guest calls set-id is not, here.
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(parent).map_err(failed)?;
    io::copy(&mut answer, &mut file).map_err(failed)?;
    let mode = fs::Permissions::from_mode(mode.unwrap_or(0o644) & 0o777);
    file.as_file().set_permissions(mode).map_err(failed)?;
    file.persist(&to).map_err(|error| failed(error.error))?;
    Ok(())
}

fn tree_in(client: &Client, from: &Path, id: &str, path: &[u8]) -> CliResult {
    if !from.is_dir() {
        let message = format!("{} is no directory", from.display());
        return Err(CliError::new(Kind::User, message).hint("cp without -r copies a file"));
    }
    let (reader, writer) = io::pipe().kind(Kind::Internal)?;
    let root = from.to_owned();
    let packer = std::thread::spawn(move || {
        let mut archive = tar::Builder::new(writer);
        archive.follow_symlinks(false);
        archive.append_dir_all(".", root).and_then(|()| archive.into_inner().map(drop))
    });
    let address = format!("{}&parents", address(id, "archive", path));
    let sent = client.upload::<Stored>(&address, reader).map_err(refused);
    // Its pipe is closed by now, whoever closed it.
    let packed = packer.join().map_err(|_| CliError::new(Kind::Internal, "a thread died"))?;
    sent?;
    packed.map_err(|error| {
        CliError::new(Kind::User, format!("cannot read {}: {error}", from.display()))
    })
}

fn tree_out(client: &Client, id: &str, path: &[u8], to: &Path) -> CliResult {
    let failed = |error: io::Error| {
        CliError::new(Kind::User, format!("cannot write into {}: {error}", to.display()))
    };
    let answer =
        client.read(hyper::Method::GET, &address(id, "archive", path), None).map_err(refused)?;
    fs::create_dir_all(to).map_err(failed)?;
    unpack(answer, to).map_err(failed)
}

/// Unpacks an archive that a guest made, which may be anything: nothing lands outside of `to`, and
/// nothing but files, directories and links is made.
fn unpack(archive: impl Read, to: &Path) -> io::Result<()> {
    use tar::EntryType;
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_permissions(false);
    archive.set_preserve_ownerships(false);
    archive.set_unpack_xattrs(false);
    for entry in archive.entries()? {
        let mut entry = entry?;
        match entry.header().entry_type() {
            EntryType::Regular
            | EntryType::Continuous
            | EntryType::Directory
            | EntryType::GNUSparse
            | EntryType::Symlink
            | EntryType::Link => {}
            other => {
                let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
                eprintln!("left out: {name:?} ({other:?})");
                continue;
            }
        }
        if !entry.unpack_in(to)? {
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            eprintln!("left out: {name:?} leads out of the directory");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(fill: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        fill(&mut builder);
        builder.into_inner().unwrap()
    }

    fn entry(kind: tar::EntryType, name: &str, link: &str, data: &[u8]) -> (tar::Header, Vec<u8>) {
        let mut header = tar::Header::new_gnu();
        // As a hostile guest would: the library itself refuses such names.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(data.len() as u64);
        header.set_mode(0o4755);
        header.set_cksum();
        (header, data.to_vec())
    }

    #[test]
    fn nothing_lands_outside_and_nothing_dangerous_inside() {
        use tar::EntryType::{Block, Char, Directory, Fifo, Regular, Symlink};
        let base = tempfile::tempdir().unwrap();
        let to = base.path().join("to");
        fs::create_dir(&to).unwrap();
        let bytes = archive(|builder| {
            for (kind, name, link, data) in [
                (Regular, "fine", "", &b"ok"[..]),
                (Regular, "../outside", "", b"no"),
                (Regular, "/absolute-parbake-test", "", b"no"),
                (Symlink, "way", "..", b""),
                (Regular, "way/outside2", "", b"no"),
                (Char, "zero", "", b""),
                (Block, "disk", "", b""),
                (Fifo, "pipe", "", b""),
                (Directory, "sub/", "", b""),
                (Regular, "sub/file", "", b"ok"),
            ] {
                let (header, data) = entry(kind, name, link, data);
                builder.append(&header, &data[..]).unwrap();
            }
        });
        // A link that leads out may end the unpacking, too.
        let _ = unpack(&bytes[..], &to);
        assert_eq!(fs::read(to.join("fine")).unwrap(), b"ok");
        let mode = fs::metadata(to.join("fine")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7000, 0);
        assert!(!Path::new("/absolute-parbake-test").exists());
        let names: Vec<_> =
            fs::read_dir(base.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(names, ["to"]);
        assert!(
            !to.join("zero").exists() && !to.join("disk").exists() && !to.join("pipe").exists()
        );
    }

    #[test]
    fn places_are_told_apart() {
        let there = |text: &str| matches!(Place::of(&text.into()), Place::There { .. });
        assert!(there("abc123:/x"));
        assert!(!there("./abc:/x"));
        assert!(!there("/a:b"));
        assert!(!there(":x"));
        assert!(!there("plain"));
        assert!(!there("-"));
    }
}
