//! `COPY` and `ADD` steps.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use parbake_cache::Digest;
use parbake_recipes::glob::PatternSet;
use parbake_recipes::plan::{Copy, CopySource};

use super::run::secret_permissions;
use super::{StepContext, parents_root};
use crate::execute::copy::{Copier, Source};
use crate::execute::error::ExecuteError;
use crate::execute::rootpath::{ownership, resolve};
use crate::execute::unpack::{Unpack, decompress, is_archive, unpack};
use crate::execute::{NetworkAccess, overlay};

impl StepContext<'_> {
    pub(super) fn copy(&mut self, copy: &Copy, root: &Path) -> Result<(), ExecuteError> {
        let owner = match &copy.chown {
            None => None,
            Some(text) => Some(ownership(root, text).map_err(|message| {
                self.wrong(message, "add the user in a step before, or use numbers")
            })?),
        };
        let opened = self.open(&copy.from)?;
        let source = opened.source();
        let exclude = self.patterns(&copy.exclude)?;
        let mut copier = Copier::new(root, owner, copy.chmod.as_ref(), &exclude);
        if copy.link {
            replace_links(root, &copy.dest)
                .map_err(|error| self.failed(|| format!("preparing {}", copy.dest), error))?;
        }
        self.refuse_overwriting(copy, &source, root)?;
        for item in &copy.sources {
            match item {
                CopySource::Inline(file) => copier
                    .inline(&file.name, &file.data, &copy.dest)
                    .map_err(|error| self.copy_failed(error))?,
                CopySource::Url { url, checksum, name } => {
                    let (file, _) = self.download(url, checksum.as_deref())?;
                    if copy.unpack && is_archive(&file) {
                        self.extract(&copier, &file, &copy.dest, owner)?;
                        continue;
                    }
                    let place = self.cache.scratch()?;
                    let named = place.path().join(name);
                    let prepare = || -> io::Result<()> {
                        fs::copy(&file, &named)?;
                        let meta = fs::metadata(&file)?;
                        secret_permissions(&named, 0o600, 0, 0)?;
                        overlay::set_time(&named, meta.mtime(), meta.mtime_nsec())
                    };
                    prepare().map_err(|error| self.failed(|| format!("copying {url}"), error))?;
                    let none = PatternSet::default();
                    let source = Source { root: place.path(), ignore: &none, keep_owner: true };
                    copier
                        .copy(&source, Path::new(name), &copy.dest)
                        .map_err(|error| self.copy_failed(error))?;
                }
                CopySource::Path { path } if copy.parents => {
                    let (above, pattern) = parents_root(path);
                    let include = self.patterns(&[pattern.to_owned()])?;
                    let has_wildcards = parbake_recipes::glob::has_wildcards(path);
                    if !has_wildcards {
                        source
                            .select(&path.replacen("/./", "/", 1))
                            .map_err(|e| self.copy_failed(e))?;
                    }
                    let mut parents = Copier::new(root, owner, copy.chmod.as_ref(), &exclude);
                    parents.include = Some(&include);
                    let dest = format!("{}/", copy.dest.trim_end_matches('/'));
                    for selected in source.select(above).map_err(|error| self.copy_failed(error))? {
                        parents
                            .copy(&source, &selected, &dest)
                            .map_err(|error| self.copy_failed(error))?;
                    }
                }
                CopySource::Path { path } => {
                    for selected in source.select(path).map_err(|error| self.copy_failed(error))? {
                        let from = resolve(source.root, &selected)
                            .map_err(|error| self.failed(|| format!("reading {path}"), error))?;
                        if copy.unpack && is_archive(&from) {
                            self.extract(&copier, &from, &copy.dest, owner)?;
                        } else {
                            copier
                                .copy(&source, &selected, &copy.dest)
                                .map_err(|error| self.copy_failed(error))?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Fetches what `ADD https://…` names. With a checksum, what was fetched before is used again.
    pub(super) fn download(
        &self,
        url: &str,
        checksum: Option<&str>,
    ) -> Result<(PathBuf, Digest), ExecuteError> {
        let expected: Option<Digest> = checksum.and_then(|text| text.parse().ok());
        let path = self.cache.download(url);
        let digest = |path: &Path| -> io::Result<Digest> { digest_of(&mut File::open(path)?) };
        if let (Some(expected), Ok(found)) = (expected, digest(&path))
            && found == expected
        {
            return Ok((path, found));
        }
        if self.options.network == NetworkAccess::None {
            return Err(self.wrong(
                format!("{url} is not here, and this build has no network"),
                "allow the network, or put the file into the build context",
            ));
        }
        let scratch = self.cache.scratch()?;
        let fresh = scratch.path().join("file");
        let mut curl = std::process::Command::new("curl");
        curl.args(["--fail", "--silent", "--show-error", "--location", "--remote-time"]);
        curl.args(["--proto", "=http,https", "--retry", "2", "--max-time", "1800", "--output"]);
        curl.arg(&fresh).arg("--").arg(url).stdin(std::process::Stdio::null());
        let output = curl.output().map_err(|_| ExecuteError::Host {
            what: format!(
                "{}: curl, which downloads are made with, is not installed",
                self.step.at
            ),
            hint: "install the package curl".to_owned(),
        })?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            return Err(self.wrong(
                format!("cannot download {url}: {}", message.trim()),
                "check the address and the machine's network",
            ));
        }
        let found =
            digest(&fresh).map_err(|error| self.failed(|| format!("reading {url}"), error))?;
        if let Some(expected) = expected
            && expected != found
        {
            return Err(self.wrong(
                format!("{url} is {found} and should be {expected}"),
                "correct --checksum if the file was meant to change",
            ));
        }
        fs::rename(&fresh, &path)
            .map_err(|error| self.failed(|| format!("storing {url}"), error))?;
        Ok((path, found))
    }

    /// Several files copied to one name would leave only the last.
    fn refuse_overwriting(
        &self,
        copy: &Copy,
        source: &Source<'_>,
        root: &Path,
    ) -> Result<(), ExecuteError> {
        if copy.dest.ends_with('/') || copy.parents {
            return Ok(());
        }
        let dest = resolve(root, Path::new(copy.dest.trim_matches('/')))
            .map_err(|error| self.failed(|| format!("reading {}", copy.dest), error))?;
        if dest.is_dir() {
            return Ok(());
        }
        let mut files = 0;
        for item in &copy.sources {
            match item {
                CopySource::Path { path } => {
                    for path in source.select(path).map_err(|error| self.copy_failed(error))? {
                        let from = resolve(source.root, &path).map_err(|error| {
                            self.failed(|| format!("reading {}", path.display()), error)
                        })?;
                        let spreads = from.is_dir() || (copy.unpack && is_archive(&from));
                        files += usize::from(!spreads);
                    }
                }
                _ => files += 1,
            }
        }
        if files > 1 {
            return Err(self.wrong(
                format!("{files} files would all become {}", copy.dest),
                format!("write {}/ to copy them into a directory", copy.dest),
            ));
        }
        Ok(())
    }

    fn extract(
        &self,
        copier: &Copier<'_>,
        archive: &Path,
        dest: &str,
        owner: Option<(u32, u32)>,
    ) -> Result<(), ExecuteError> {
        let dest = copier
            .directories(Path::new(dest.trim_matches('/')))
            .map_err(|error| self.copy_failed(error))?;
        let extract = || -> io::Result<()> {
            let input = decompress(io::BufReader::with_capacity(1 << 17, File::open(archive)?))?;
            unpack(input, &dest, Unpack { owner, ..Unpack::default() })
        };
        extract().map_err(|error| self.failed(|| format!("unpacking {}", archive.display()), error))
    }
}

fn digest_of(file: &mut File) -> io::Result<Digest> {
    use std::io::Read as _;

    use sha2::Digest as _;
    let mut hash = sha2::Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(Digest::from_bytes(hash.finalize().into()));
        }
        hash.update(&buffer[..read]);
    }
}

/// `--link` does not look at what is there: a link on the way becomes a directory.
fn replace_links(root: &Path, dest: &str) -> io::Result<()> {
    let mut current = root.to_owned();
    let parts: Vec<&str> = dest.split('/').filter(|part| !part.is_empty()).collect();
    let directories = if dest.ends_with('/') { parts.len() } else { parts.len().saturating_sub(1) };
    for part in &parts[..directories] {
        current.push(part);
        match fs::symlink_metadata(&current) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => {
                fs::remove_file(&current)?;
                fs::create_dir(&current)?;
            }
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}
