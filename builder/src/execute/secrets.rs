//! Looks for build secrets, and for what looks like credentials, in what a build made.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::Path;

use memchr::memmem::Finder;

use super::error::{Doing as _, ExecuteError};

/// A secret shorter than this is in every image by chance.
pub const SHORTEST: usize = 6;

/// Something that looks like a credential.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Path in the image.
    pub path: String,
    /// What it looks like.
    pub what: &'static str,
}

struct Needle<'a> {
    id: &'a str,
    form: &'static str,
    finder: Finder<'static>,
    len: usize,
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte))
            << (8 * (3 - chunk.len()));
        for index in 0..=chunk.len() {
            out.push(char::from(ALPHABET[(word >> (18 - 6 * index) & 63) as usize]));
        }
    }
    out
}

/// What of a secret's base64 does not depend on what stands around it, for each alignment.
fn base64_cores(value: &[u8]) -> Vec<String> {
    (0..3)
        .filter_map(|shift| {
            let padded = [vec![0; shift], value.to_vec()].concat();
            let text = base64(&padded);
            let start = [0, 2, 3][shift];
            let end = padded.len() / 3 * 4;
            (end > start + 6).then(|| text[start..end].to_owned())
        })
        .collect()
}

fn url_encoded(value: &[u8]) -> String {
    value
        .iter()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(*byte).to_string()
            }
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

fn needles(secrets: &BTreeMap<String, Vec<u8>>) -> Vec<Needle<'_>> {
    let mut needles: Vec<Needle<'_>> = Vec::new();
    for (id, value) in secrets {
        // A file's last newline is not part of what leaks.
        let value = value.trim_ascii();
        if value.len() < SHORTEST {
            continue;
        }
        let mut add = |form, bytes: &[u8]| {
            let finder = Finder::new(bytes).into_owned();
            needles.push(Needle { id, form, finder, len: bytes.len() });
        };
        add("plain", value);
        for core in base64_cores(value) {
            add("base64", core.as_bytes());
            let url_safe = core.replace('+', "-").replace('/', "_");
            if url_safe != core {
                add("base64", url_safe.as_bytes());
            }
        }
        let encoded = url_encoded(value);
        if encoded.as_bytes() != value {
            add("URL-encoded", encoded.as_bytes());
        }
    }
    needles
}

/// Searches text, such as the configuration document.
pub(crate) fn search_text(
    place: &str,
    text: &[u8],
    secrets: &BTreeMap<String, Vec<u8>>,
) -> Result<(), ExecuteError> {
    match needles(secrets).into_iter().find(|needle| needle.finder.find(text).is_some()) {
        Some(needle) => Err(ExecuteError::SecretLeaked {
            id: needle.id.to_owned(),
            place: place.to_owned(),
            form: needle.form,
        }),
        None => Ok(()),
    }
}

/// Searches an uncompressed layer: names, attributes and contents.
pub(crate) fn search_layer(
    place: &str,
    tar: &Path,
    secrets: &BTreeMap<String, Vec<u8>>,
) -> Result<(), ExecuteError> {
    let needles = needles(secrets);
    let found = search(tar, &needles).doing(|| format!("searching {place} for secrets"))?;
    match found {
        None => Ok(()),
        Some((needle, offset)) => {
            let file = holder(tar, offset).unwrap_or_else(|| "a name or attribute".to_owned());
            Err(ExecuteError::SecretLeaked {
                id: needle.id.to_owned(),
                place: format!("{file} ({place})"),
                form: needle.form,
            })
        }
    }
}

/// Searches any file, such as a disk or what was a machine's memory.
///
/// # Errors
/// [`ExecuteError::SecretLeaked`] where one is in it, and when the file cannot be read.
pub fn search_file(
    place: &str,
    path: &Path,
    secrets: &BTreeMap<String, Vec<u8>>,
) -> Result<(), ExecuteError> {
    let needles = needles(secrets);
    match search(path, &needles).doing(|| format!("searching {place} for secrets"))? {
        None => Ok(()),
        Some((needle, offset)) => Err(ExecuteError::SecretLeaked {
            id: needle.id.to_owned(),
            place: format!("{place} (near byte {offset})"),
            form: needle.form,
        }),
    }
}

fn search<'n>(tar: &Path, needles: &'n [Needle<'n>]) -> io::Result<Option<(&'n Needle<'n>, u64)>> {
    let overlap = needles.iter().map(|needle| needle.len).max().unwrap_or(0);
    if overlap == 0 {
        return Ok(None);
    }
    let mut file = File::open(tar)?;
    // Disks and memory images are mostly holes, and no secret lies in one.
    let skips = needles.iter().all(|needle| memchr::memchr(0, needle.finder.needle()).is_none());
    let mut buffer = vec![0; (1 << 20) + overlap];
    let (mut kept, mut base) = (0, 0_u64);
    loop {
        if skips && let Some(data) = next_data(&file, base + kept as u64)? {
            if data == END {
                return Ok(None);
            }
            if data > base + kept as u64 {
                file.seek(SeekFrom::Start(data))?;
                (kept, base) = (0, data);
            }
        }
        let read = file.read(&mut buffer[kept..])?;
        if read == 0 {
            return Ok(None);
        }
        let filled = kept + read;
        for needle in needles {
            if let Some(at) = needle.finder.find(&buffer[..filled]) {
                return Ok(Some((needle, base + at as u64)));
            }
        }
        let keep = overlap.min(filled);
        buffer.copy_within(filled - keep..filled, 0);
        base += (filled - keep) as u64;
        kept = keep;
    }
}

/// Where no data follows.
const END: u64 = u64::MAX;

/// Where the next data lies from `offset` on; nothing on file systems that do not tell.
fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(offset)) {
        Ok(data) => {
            rustix::fs::seek(file, rustix::fs::SeekFrom::Start(offset))?;
            Ok(Some(data))
        }
        Err(rustix::io::Errno::NXIO) => Ok(Some(END)),
        Err(_) => Ok(None),
    }
}

/// The entry of the tar whose content covers an offset.
fn holder(tar: &Path, offset: u64) -> Option<String> {
    let mut archive = tar::Archive::new(File::open(tar).ok()?);
    for entry in archive.entries().ok()? {
        let entry = entry.ok()?;
        let start = entry.raw_file_position();
        if (start..start + entry.size()).contains(&offset) {
            return Some(format!("/{}", String::from_utf8_lossy(&entry.path_bytes())));
        }
    }
    None
}

/// Names of files that hold credentials wherever they are.
const FILES: [(&str, &str); 9] = [
    (".aws/credentials", "cloud credentials"),
    (".docker/config.json", "registry credentials"),
    (".git-credentials", "git credentials"),
    (".kube/config", "cluster credentials"),
    (".netrc", "login data"),
    (".pypirc", "package index credentials"),
    ("id_ecdsa", "an SSH key"),
    ("id_ed25519", "an SSH key"),
    ("id_rsa", "an SSH key"),
];

/// Shapes of credentials in small files.
const SHAPES: [(&str, &str); 6] = [
    ("PRIVATE KEY-----", "a private key"),
    ("aws_secret_access_key", "a cloud key"),
    ("_authToken=", "a package registry token"),
    ("ghp_", "a code host token"),
    ("xoxb-", "a chat token"),
    ("AKIA", "a cloud key id"),
];

/// Lists what looks like a credential in a layer. A match is a reason to look, not a proof.
pub(crate) fn credentials(tar: &Path) -> io::Result<Vec<Finding>> {
    const LARGEST: u64 = 64 << 10;
    let mut findings = Vec::new();
    let mut archive = tar::Archive::new(File::open(tar)?);
    for entry in archive.entries()? {
        let mut entry = entry?;
        if entry.header().entry_type() != tar::EntryType::Regular {
            continue;
        }
        let path = format!("/{}", String::from_utf8_lossy(&entry.path_bytes()));
        let ends = |name: &str| path.ends_with(&format!("/{name}"));
        if let Some((_, what)) = FILES.iter().find(|(name, _)| ends(name)) {
            findings.push(Finding { path, what });
            continue;
        }
        // Programs and libraries hold such words as constants; keys live in small text files.
        if entry.size() > LARGEST || path.starts_with("/usr/") || path.contains("/test") {
            continue;
        }
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        if bytes.contains(&0) {
            continue;
        }
        let found = SHAPES.iter().find(|(shape, _)| {
            memchr::memmem::find_iter(&bytes, shape.as_bytes()).any(|at| {
                // Tokens go on after their mark; a word in prose does not.
                let after = &bytes[at + shape.len()..];
                !matches!(*shape, "ghp_" | "xoxb-" | "AKIA")
                    || after.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count() >= 16
            })
        });
        if let Some((_, what)) = found {
            findings.push(Finding { path, what });
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_found_at_every_alignment() {
        let secrets = BTreeMap::from([("tok".to_owned(), b"s3cr3t/+value\n".to_vec())]);
        let leaked = |text: &[u8]| search_text("x", text, &secrets).is_err();
        assert!(leaked(b"export T=s3cr3t/+value;"));
        assert!(leaked(b"https://h/?t=s3cr3t%2F%2Bvalue"));
        for before in ["", "a", "ab", "abc"] {
            for after in ["", "x", "xy", "xyz"] {
                let text = base64(format!("{before}s3cr3t/+value{after}").as_bytes());
                assert!(leaked(text.as_bytes()), "{before}…{after}: {text}");
            }
        }
        assert!(!leaked(b"s3cr3t is a word"));
        let short = BTreeMap::from([("x".to_owned(), b"abc".to_vec())]);
        assert!(search_text("x", b"abc", &short).is_ok());
    }

    #[test]
    fn holes_are_passed_over_and_nothing_beside_them() {
        use std::os::unix::fs::FileExt as _;
        let secrets = BTreeMap::from([("tok".to_owned(), b"the-secret-value".to_vec())]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let found = |at: &[u64]| {
            let file = File::create(&path).unwrap();
            file.set_len(5 << 30).unwrap();
            file.write_all_at(b"something else", 3 << 30).unwrap();
            for offset in at {
                file.write_all_at(b"the-secret-value", *offset).unwrap();
            }
            search_file("disk", &path, &secrets).is_err()
        };
        assert!(!found(&[]));
        let blocks = [0, 4096, (1 << 20) - 8, 4 << 30, (4 << 30) + 4088, (5 << 30) - 16];
        for offset in blocks {
            assert!(found(&[offset]), "{offset}");
        }
    }

    #[test]
    fn the_file_is_named_even_across_read_buffers() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("t")).unwrap();
        let mut big = vec![b'x'; (1 << 20) - 520];
        big.extend(b"the-secret-value");
        std::fs::write(dir.path().join("t/a"), &big).unwrap();
        std::fs::write(dir.path().join("t/.netrc"), "login").unwrap();
        std::fs::write(dir.path().join("t/note"), "AKIAABCDEFGHIJKLMNOP").unwrap();
        std::fs::write(dir.path().join("t/prose"), "ghp_ is a prefix").unwrap();
        let tar = dir.path().join("layer.tar");
        let mut file = File::create(&tar).unwrap();
        super::super::layer::write(&dir.path().join("t"), &mut file, None, false).unwrap();
        let secrets = BTreeMap::from([("tok".to_owned(), b"the-secret-value".to_vec())]);
        let error = search_layer("layer 1", &tar, &secrets).unwrap_err().to_string();
        assert!(error.contains("/a (layer 1)"), "{error}");
        let found = credentials(&tar).unwrap();
        let paths: Vec<&str> = found.iter().map(|finding| finding.path.as_str()).collect();
        assert_eq!(paths, ["/.netrc", "/note"]);
    }
}
