//! Programs of other packages: where they lie and how to get them.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program that some package provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tool {
    /// Its name.
    pub name: &'static str,
    /// Places outside of `PATH` where distributions put it.
    pub places: &'static [&'static str],
    /// The command that installs it.
    pub install: &'static str,
}

/// The emulator.
pub const QEMU: Tool = Tool {
    name: "qemu-system-x86_64",
    places: &[],
    install: "apt-get install qemu-system-x86 qemu-system-common",
};

/// The file server of the lab.
pub const VIRTIOFSD: Tool = Tool {
    name: "virtiofsd",
    places: &["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"],
    install: "apt-get install qemu-system-common (from Debian 13 on: virtiofsd)",
};

/// The package client.
pub const APT_GET: Tool = Tool { name: "apt-get", places: &[], install: "" };

/// The file system checker.
pub const E2FSCK: Tool = Tool {
    name: "e2fsck",
    places: &["/usr/sbin/e2fsck", "/sbin/e2fsck"],
    install: "apt-get install e2fsprogs",
};

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

impl Tool {
    /// Where the tool lies on this machine.
    #[must_use]
    pub fn find(&self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        self.find_in(&path)
    }

    fn find_in(&self, path: &OsStr) -> Option<PathBuf> {
        let folders = std::env::split_paths(path).filter(|folder| folder.is_absolute());
        let named = folders.map(|folder| folder.join(self.name));
        named.chain(self.places.iter().map(PathBuf::from)).find(|path| is_program(path))
    }
}

/// The first line a program prints when asked for its version.
#[must_use]
pub fn version_line(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
    let line = String::from_utf8_lossy(&text).lines().next()?.trim().to_owned();
    (!line.is_empty()).then(|| line.chars().take(120).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_found_in_path_first_and_only_if_they_can_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("virtiofsd");
        std::fs::write(&file, "").unwrap();
        let tool = Tool { name: "virtiofsd", places: &["/nonexistent/virtiofsd"], install: "" };
        let path = std::env::join_paths([Path::new("relative"), folder.path()]).unwrap();
        assert_eq!(tool.find_in(&path), None);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(tool.find_in(&path), Some(file));
        assert_eq!(tool.find_in(OsStr::new("")), None);
    }
}
