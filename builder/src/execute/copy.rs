//! `COPY` and `ADD`: which files, where they go, and what they become.
//!
//! The rules are BuildKit's: the contents of a directory are copied, never the directory; what is
//! there stays and is merged into; a directory named as source gives its metadata to nothing but
//! what is below it; `*` that matches nothing copies nothing.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use parbake_recipes::glob::{Glob, PatternSet, has_wildcards};
use parbake_recipes::plan::Chmod;
use rustix::fs::{AtFlags, CWD, FileType, Mode, linkat, lsetxattr, mknodat};

use super::layer::xattrs;
use super::overlay::set_time;
use super::rootpath::{chown, make_directories, resolve, resolve_parent};

/// A place files come from.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    /// Directory.
    pub root: &'a Path,
    /// What of it does not exist for the build.
    pub ignore: &'a PatternSet,
    /// Owners are kept; otherwise everything is root's (the context).
    pub keep_owner: bool,
}

/// What is wrong with a copy: a sentence and what to do.
#[derive(Debug)]
pub(crate) enum CopyError {
    /// The instruction asks for something that is not there or cannot be.
    Wrong { message: String, hint: String },
    /// The system failed.
    Io(io::Error),
}

impl From<io::Error> for CopyError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for CopyError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

fn wrong<T>(message: impl Into<String>, hint: impl Into<String>) -> Result<T, CopyError> {
    Err(CopyError::Wrong { message: message.into(), hint: hint.into() })
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

impl Source<'_> {
    /// Whether a path below the root exists for the build.
    fn visible(&self, relative: &Path) -> bool {
        self.ignore.is_empty() || !self.ignore.matches(&text(relative))
    }

    /// What a source of an instruction names, as paths below the root, in name order.
    pub fn select(&self, pattern: &str) -> Result<Vec<PathBuf>, CopyError> {
        let clean = parbake_recipes::glob::clean(&format!("/{pattern}"));
        let parts: Vec<&str> = clean.split('/').filter(|part| !part.is_empty()).collect();
        let split = parts.iter().position(|part| has_wildcards(part)).unwrap_or(parts.len());
        let fixed: PathBuf = parts[..split].iter().map(|part| unescape(part)).collect();
        let start = resolve(self.root, &fixed)?;
        let below = |path: &Path| path.strip_prefix(self.root).map(Path::to_owned);
        let Ok(relative) = below(&start) else {
            return wrong(format!("{pattern} leaves its root"), "name a path inside");
        };
        if split == parts.len() {
            let there = fs::symlink_metadata(&start);
            let directory = there.as_ref().is_ok_and(|meta| meta.is_dir());
            let shown = relative.as_os_str().is_empty()
                || self.visible(&relative)
                || (directory && self.ignore.has_exceptions() && self.any_visible(&start)?);
            if there.is_err() {
                return wrong(
                    format!("{pattern} does not exist"),
                    "correct the path; it is relative to the root of the build context or stage",
                );
            }
            if !shown {
                return wrong(
                    format!("{pattern} is left out by .dockerignore"),
                    format!("add !{} to it", relative.display()),
                );
            }
            return Ok(vec![fixed]);
        }
        let glob = Glob::new(&parts[split..].join("/")).map_err(|error| CopyError::Wrong {
            message: error.to_string(),
            hint: "close its brackets or escape them".to_owned(),
        })?;
        let mut found = Vec::new();
        self.matching(&start, &PathBuf::new(), &glob, &mut found)?;
        Ok(found.into_iter().map(|path| fixed.join(path)).collect())
    }

    fn matching(
        &self,
        base: &Path,
        relative: &Path,
        glob: &Glob,
        found: &mut Vec<PathBuf>,
    ) -> Result<(), CopyError> {
        let directory = base.join(relative);
        if !directory.is_dir() {
            return Ok(());
        }
        for name in sorted(&directory)? {
            let path = relative.join(&name);
            let full = base.join(&path);
            let inside = full.strip_prefix(self.root).unwrap_or(&full);
            let is_dir = fs::symlink_metadata(&full)?.is_dir();
            let shown = self.visible(inside)
                || (is_dir && self.ignore.has_exceptions() && self.any_visible(&full)?);
            if shown && glob.matches(&text(&path)) {
                found.push(path);
            } else if is_dir {
                self.matching(base, &path, glob, found)?;
            }
        }
        Ok(())
    }

    /// Whether an ignored directory holds anything that was taken back.
    fn any_visible(&self, directory: &Path) -> io::Result<bool> {
        for name in sorted(directory)? {
            let path = directory.join(name);
            let inside = path.strip_prefix(self.root).unwrap_or(&path);
            if self.visible(inside)
                || (fs::symlink_metadata(&path)?.is_dir() && self.any_visible(&path)?)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn unescape(part: &str) -> String {
    let mut out = String::new();
    let mut chars = part.chars();
    while let Some(c) = chars.next() {
        out.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    out
}

fn sorted(directory: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let mut names = fs::read_dir(directory)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<Vec<_>, _>>()?;
    names.sort();
    Ok(names)
}

/// How files arrive.
#[derive(Debug)]
pub(crate) struct Copier<'a> {
    /// The stage.
    pub root: &'a Path,
    /// `--chown`.
    pub owner: Option<(u32, u32)>,
    /// `--chmod`.
    pub chmod: Option<&'a Chmod>,
    /// `--exclude`.
    pub exclude: &'a PatternSet,
    /// `--parents`: only what matches, with its directories.
    pub include: Option<&'a PatternSet>,
    /// Files of this copy with several names, by device and inode.
    links: HashMap<(u64, u64), PathBuf>,
}

impl<'a> Copier<'a> {
    /// For one instruction.
    pub fn new(
        root: &'a Path,
        owner: Option<(u32, u32)>,
        chmod: Option<&'a Chmod>,
        exclude: &'a PatternSet,
    ) -> Self {
        Self { root, owner, chmod, exclude, include: None, links: HashMap::new() }
    }

    /// Copies what `relative` (below the source's root) is to `dest`, following the link rules of
    /// a source: one that is a link itself is followed.
    pub fn copy(
        &mut self,
        source: &Source<'_>,
        relative: &Path,
        dest: &str,
    ) -> Result<(), CopyError> {
        let from = resolve(source.root, relative)?;
        let meta = fs::symlink_metadata(&from)?;
        let name = relative.file_name().map(Path::new);
        if !meta.is_dir()
            && (name.is_some_and(|name| self.exclude.matches(&text(name)))
                || self.exclude.matches(&text(relative)))
        {
            return Ok(());
        }
        let is_directory = dest.ends_with('/');
        let dest_path = Path::new(dest.trim_matches('/'));
        let ensure = if is_directory { dest_path } else { dest_path.parent().unwrap_or(dest_path) };
        self.directories(ensure)?;
        let mut target = resolve(self.root, dest_path)?;
        let there = fs::metadata(&target).ok();
        if meta.is_dir() {
            if there.as_ref().is_some_and(|there| !there.is_dir()) {
                return wrong(
                    format!("{dest} is a file and {} a directory", relative.display()),
                    "choose another destination",
                );
            }
            self.directories(target.strip_prefix(self.root).unwrap_or(&target))?;
        } else if there.is_some_and(|there| there.is_dir()) {
            target = target.join(name.unwrap_or(Path::new("file")));
        }
        self.item(source, &from, &PathBuf::new(), &target, false)
    }

    /// Makes a directory of the destination and what leads to it.
    pub fn directories(&self, path: &Path) -> Result<PathBuf, CopyError> {
        make_directories(self.root, path, self.owner).map_err(|error| {
            if error.raw_os_error() == Some(rustix::io::Errno::NOTDIR.raw_os_error()) {
                CopyError::Wrong {
                    message: format!("/{} goes through a file", path.display()),
                    hint: "choose another destination".to_owned(),
                }
            } else {
                CopyError::Io(error)
            }
        })
    }

    /// Copies one thing; `relative` is its path below the named source, empty for that itself.
    fn item(
        &mut self,
        source: &Source<'_>,
        from: &Path,
        relative: &Path,
        target: &Path,
        nested: bool,
    ) -> Result<(), CopyError> {
        let meta = fs::symlink_metadata(from)?;
        let inside = from.strip_prefix(source.root).unwrap_or(from);
        let mut wanted = true;
        if nested {
            wanted = source.visible(inside)
                && !self.exclude.matches(&text(relative))
                && self.include.is_none_or(|include| include.matches(&text(relative)));
        }
        if meta.is_dir() {
            let had = fs::symlink_metadata(target).ok();
            let look_inside = wanted
                || source.ignore.has_exceptions()
                || self.exclude.has_exceptions()
                || self.include.is_some();
            if !look_inside {
                return Ok(());
            }
            if wanted {
                self.directory(from, &meta, target, nested, source)?;
            }
            for name in sorted(from)? {
                let from = from.join(&name);
                let child = target.join(&name);
                self.item(source, &from, &relative.join(&name), &child, true)?;
            }
            // The children just made changed its time.
            if wanted && (nested || had.is_none()) {
                set_time(target, meta.mtime(), meta.mtime_nsec())?;
            }
            return Ok(());
        }
        if !wanted {
            return Ok(());
        }
        self.parents(source, from, target)?;
        match fs::symlink_metadata(target) {
            Ok(there) if there.is_dir() => {
                return wrong(
                    format!("{} would replace a directory by a file", self.shown(target)),
                    "choose another destination",
                );
            }
            Ok(_) => fs::remove_file(target)?,
            Err(_) => {}
        }
        let kind = meta.file_type();
        if meta.nlink() > 1 && kind.is_file() {
            let key = (meta.dev(), meta.ino());
            if let Some(first) = self.links.get(&key) {
                return Ok(linkat(CWD, first, CWD, target, AtFlags::empty())?);
            }
            self.links.insert(key, target.to_owned());
        }
        if kind.is_symlink() {
            symlink(fs::read_link(from)?, target)?;
        } else if kind.is_file() {
            let mut input = File::open(from)?;
            let mut output = File::create_new(target)?;
            io::copy(&mut input, &mut output)?;
        } else {
            let (kind, device) = if kind.is_fifo() {
                (FileType::Fifo, 0)
            } else if kind.is_socket() {
                (FileType::Socket, 0)
            } else if kind.is_block_device() {
                (FileType::BlockDevice, meta.rdev())
            } else {
                (FileType::CharacterDevice, meta.rdev())
            };
            mknodat(CWD, target, kind, Mode::from_raw_mode(0o600), device)?;
        }
        self.metadata(from, &meta, target, source)
    }

    fn shown(&self, target: &Path) -> String {
        format!("/{}", target.strip_prefix(self.root).unwrap_or(target).display())
    }

    fn directory(
        &self,
        from: &Path,
        meta: &fs::Metadata,
        target: &Path,
        nested: bool,
        source: &Source<'_>,
    ) -> Result<(), CopyError> {
        match fs::symlink_metadata(target) {
            Ok(there) if !there.is_dir() => {
                return wrong(
                    format!(
                        "{} is no directory, so nothing can be copied into it",
                        self.shown(target)
                    ),
                    "copy to where the link leads, or remove it first",
                );
            }
            // What the instruction names itself keeps what it was; below, the source decides.
            Ok(_) if !nested => return Ok(()),
            Ok(_) => {}
            Err(_) => {
                self.parents(source, from, target)?;
                fs::create_dir(target)?;
            }
        }
        self.metadata(from, meta, target, source)
    }

    /// Directories between the source and something deep in it that were skipped so far.
    fn parents(&self, source: &Source<'_>, from: &Path, target: &Path) -> Result<(), CopyError> {
        let (Some(from), Some(target)) = (from.parent(), target.parent()) else { return Ok(()) };
        if fs::symlink_metadata(target).is_ok() || target == self.root {
            return Ok(());
        }
        self.parents(source, from, target)?;
        fs::create_dir(target)?;
        self.metadata(from, &fs::symlink_metadata(from)?, target, source)
    }

    fn metadata(
        &self,
        from: &Path,
        meta: &fs::Metadata,
        target: &Path,
        source: &Source<'_>,
    ) -> Result<(), CopyError> {
        let (uid, gid) = match self.owner {
            Some(owner) => owner,
            None if source.keep_owner => (meta.uid(), meta.gid()),
            None => (0, 0),
        };
        chown(target, uid, gid)?;
        if !meta.is_symlink() {
            let mode = meta.permissions().mode() & 0o7777;
            let mode = match self.chmod {
                Some(chmod) => apply_chmod(chmod, mode, meta.is_dir()),
                None => mode,
            };
            fs::set_permissions(target, fs::Permissions::from_mode(mode))?;
        }
        for (name, value) in xattrs(from)? {
            let name = CString::new(name).map_err(io::Error::from)?;
            match lsetxattr(target, name.as_c_str(), &value, rustix::fs::XattrFlags::empty()) {
                Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(set_time(target, meta.mtime(), meta.mtime_nsec())?)
    }

    /// Writes a here-document.
    pub fn inline(&self, name: &str, data: &str, dest: &str) -> Result<(), CopyError> {
        let is_directory = dest.ends_with('/');
        let dest_path = Path::new(dest.trim_matches('/'));
        let ensure = if is_directory { dest_path } else { dest_path.parent().unwrap_or(dest_path) };
        self.directories(ensure)?;
        let mut target = resolve(self.root, dest_path)?;
        if target.is_dir() {
            target = resolve_parent(self.root, &dest_path.join(name.trim_start_matches('/')))?;
            if let Some(parent) = target.parent() {
                self.directories(parent.strip_prefix(self.root).unwrap_or(parent))?;
            }
        }
        if target.is_dir() {
            return wrong(format!("{} is a directory", self.shown(&target)), "choose another name");
        }
        if fs::symlink_metadata(&target).is_ok() {
            fs::remove_file(&target)?;
        }
        fs::write(&target, data)?;
        let (uid, gid) = self.owner.unwrap_or((0, 0));
        chown(&target, uid, gid)?;
        let mode = self.chmod.map_or(0o644, |chmod| apply_chmod(chmod, 0o644, false));
        Ok(fs::set_permissions(&target, fs::Permissions::from_mode(mode))?)
    }
}

/// The permission bits after `--chmod`.
pub(crate) fn apply_chmod(chmod: &Chmod, mode: u32, directory: bool) -> u32 {
    let clauses = match chmod {
        Chmod::Octal(bits) => return *bits,
        Chmod::Symbolic(clauses) => clauses,
    };
    let mut mode = mode;
    for clause in clauses.split(',') {
        let operator = clause.find(['+', '-', '=']).unwrap_or(clause.len());
        let (who, mut rest) = clause.split_at(operator);
        let everyone = who.is_empty() || who.contains('a');
        let shifts: Vec<u32> = [('u', 6), ('g', 3), ('o', 0)]
            .into_iter()
            .filter(|(name, _)| everyone || who.contains(*name))
            .map(|(_, shift)| shift)
            .collect();
        while let Some(operator) = rest.chars().next() {
            let end = rest[1..].find(['+', '-', '=']).map_or(rest.len(), |at| at + 1);
            let letters = &rest[1..end];
            rest = &rest[end..];
            let mut bits = 0;
            let mut special = 0;
            for letter in letters.chars() {
                bits |= match letter {
                    'r' => 4,
                    'w' => 2,
                    'x' => 1,
                    'X' if directory || mode & 0o111 != 0 => 1,
                    'u' => mode >> 6 & 7,
                    'g' => mode >> 3 & 7,
                    'o' => mode & 7,
                    _ => 0,
                };
                if letter == 's' {
                    special |= if shifts.contains(&6) { 0o4000 } else { 0 };
                    special |= if shifts.contains(&3) { 0o2000 } else { 0 };
                }
                special |= if letter == 't' { 0o1000 } else { 0 };
            }
            let mask: u32 = shifts.iter().map(|shift| bits << shift).sum::<u32>() | special;
            match operator {
                '+' => mode |= mask,
                '-' => mode &= !mask,
                _ => {
                    let cleared: u32 = shifts.iter().map(|shift| 7 << shift).sum();
                    mode = mode & !cleared | mask;
                }
            }
        }
    }
    mode
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbolic_modes() {
        for (text, mode, directory, expected) in [
            ("u=rwX,go=rX", 0o600, false, 0o644),
            ("u=rwX,go=rX", 0o700, false, 0o755),
            ("u=rwX,go=rX", 0o600, true, 0o755),
            ("+x", 0o644, false, 0o755),
            ("a-w", 0o666, false, 0o444),
            ("go=", 0o777, false, 0o700),
            ("g=u", 0o640, false, 0o660),
            ("u+s,+t", 0o755, false, 0o5755),
            ("u+x-w", 0o600, false, 0o500),
        ] {
            let chmod = Chmod::Symbolic(text.to_owned());
            assert_eq!(apply_chmod(&chmod, mode, directory), expected, "{text}");
        }
    }
}
