//! Paths and people inside a root directory: links resolve within it, names are looked up in it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Gid, Uid, chownat};

/// Links followed before a path counts as a loop.
const MAX_LINKS: usize = 255;

/// The real path of `path` in `root`: every link, also the last, is followed as if `root` were
/// `/`. What does not exist is appended as it is, so the result never leaves `root`.
///
/// # Errors
/// For a loop of links.
pub(crate) fn resolve(root: &Path, path: &Path) -> io::Result<PathBuf> {
    resolve_links(root, path, true)
}

/// As [`resolve`], but a link at the end is not followed.
///
/// # Errors
/// For a loop of links.
pub(crate) fn resolve_parent(root: &Path, path: &Path) -> io::Result<PathBuf> {
    resolve_links(root, path, false)
}

fn resolve_links(root: &Path, path: &Path, follow_last: bool) -> io::Result<PathBuf> {
    let mut pending: Vec<OsString> = components(path).rev().collect();
    let mut inside = PathBuf::new();
    let mut links = 0;
    while let Some(part) = pending.pop() {
        if part == ".." {
            inside.pop();
            continue;
        }
        let candidate = root.join(&inside).join(&part);
        let is_link = (follow_last || !pending.is_empty())
            && fs::symlink_metadata(&candidate).is_ok_and(|meta| meta.is_symlink());
        if !is_link {
            inside.push(part);
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(io::Error::from(rustix::io::Errno::LOOP));
        }
        let target = fs::read_link(&candidate)?;
        if target.is_absolute() {
            inside = PathBuf::new();
        }
        pending.extend(components(&target).rev());
    }
    Ok(root.join(inside))
}

fn components(path: &Path) -> impl DoubleEndedIterator<Item = OsString> + '_ {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
    })
}

/// Makes a directory and its missing parents (0755), owned by `owner`; existing ones are left.
///
/// # Errors
/// When one of them is something else.
pub(crate) fn make_directories(
    root: &Path,
    path: &Path,
    owner: Option<(u32, u32)>,
) -> io::Result<PathBuf> {
    let resolved = resolve(root, path)?;
    let relative = resolved.strip_prefix(root).unwrap_or(Path::new("")).to_owned();
    let mut current = root.to_owned();
    for part in relative.components() {
        current.push(part);
        match fs::DirBuilder::new().mode(0o755).create(&current) {
            Ok(()) => {
                fs::set_permissions(&current, fs::Permissions::from_mode(0o755))?;
                if let Some((uid, gid)) = owner {
                    chown(&current, uid, gid)?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if !fs::metadata(&current)?.is_dir() {
                    return Err(io::Error::from(rustix::io::Errno::NOTDIR));
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(resolved)
}

/// Changes owner and group without following a link.
///
/// # Errors
/// The system's.
pub(crate) fn chown(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let owner = Some(Uid::from_raw(uid));
    let group = Some(Gid::from_raw(gid));
    Ok(chownat(CWD, path, owner, group, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Who a step runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// Largest `passwd` or `group` that is read.
const MAX_DATABASE: u64 = 16 << 20;

fn database(root: &Path, name: &str) -> String {
    let Ok(path) = resolve(root, Path::new(name)) else { return String::new() };
    match fs::metadata(&path) {
        Ok(meta) if meta.is_file() && meta.len() <= MAX_DATABASE => {
            fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        }
        _ => Ok(String::new()),
    }
    .unwrap_or_default()
}

/// Name, number, group number of each user.
fn users(root: &Path) -> Vec<(String, u32, u32)> {
    database(root, "etc/passwd")
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let uid = fields.nth(1)?.parse().ok()?;
            Some((name, uid, fields.next()?.parse().ok()?))
        })
        .collect()
}

/// Name, number, members of each group.
fn groups(root: &Path) -> Vec<(String, u32, Vec<String>)> {
    database(root, "etc/group")
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let gid = fields.nth(1)?.parse().ok()?;
            let members = fields.next().unwrap_or_default();
            Some((name, gid, members.split(',').map(str::to_owned).collect()))
        })
        .collect()
}

fn group(root: &Path, name: &str) -> Result<u32, String> {
    if let Ok(gid) = name.parse() {
        return Ok(gid);
    }
    groups(root)
        .into_iter()
        .find(|(known, ..)| known == name)
        .map(|(_, gid, _)| gid)
        .ok_or_else(|| format!("there is no group {name} in the stage's /etc/group"))
}

/// Who `USER text` is: `user[:group]`, each a name or a number.
///
/// # Errors
/// A sentence about the name that is not there.
pub(crate) fn identity(root: &Path, text: &str) -> Result<Identity, String> {
    let (user, wanted_group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let known = users(root);
    let user = if user.is_empty() { "0" } else { user };
    let entry = known.iter().find(|(name, ..)| name == user).or_else(|| {
        let uid: u32 = user.parse().ok()?;
        known.iter().find(|(_, known, _)| *known == uid)
    });
    let (name, uid, primary) = match entry {
        Some((name, uid, gid)) => (Some(name.as_str()), *uid, *gid),
        None => match user.parse() {
            Ok(uid) => (None, uid, 0),
            Err(_) if user == "root" => (None, 0, 0),
            Err(_) => return Err(format!("there is no user {user} in the stage's /etc/passwd")),
        },
    };
    if let Some(wanted) = wanted_group {
        return Ok(Identity { uid, gid: group(root, wanted)?, groups: Vec::new() });
    }
    let groups = match name {
        Some(name) => groups(root)
            .into_iter()
            .filter(|(_, _, members)| members.iter().any(|member| member == name))
            .map(|(_, gid, _)| gid)
            .collect(),
        None => Vec::new(),
    };
    Ok(Identity { uid, gid: primary, groups })
}

/// Owner and group of `--chown=text`. A number without a group is its own group, a name brings
/// its primary one.
///
/// # Errors
/// A sentence about the name that is not there.
pub(crate) fn ownership(root: &Path, text: &str) -> Result<(u32, u32), String> {
    let (user, wanted_group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (text, None),
    };
    let (uid, primary) = match user.parse() {
        Ok(uid) => (uid, uid),
        Err(_) if user.is_empty() => (0, 0),
        Err(_) => match users(root).into_iter().find(|(name, ..)| name == user) {
            Some((_, uid, gid)) => (uid, gid),
            None if user == "root" => (0, 0),
            None => return Err(format!("there is no user {user} in the stage's /etc/passwd")),
        },
    };
    match wanted_group {
        Some(name) => Ok((uid, group(root, name)?)),
        None => Ok((uid, primary)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_never_lead_out() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("a/b")).unwrap();
        symlink("/etc", root.join("abs")).unwrap();
        symlink("../../../../etc", root.join("a/up")).unwrap();
        symlink("loop2", root.join("loop1")).unwrap();
        symlink("loop1", root.join("loop2")).unwrap();
        for (path, expected) in [
            ("abs/passwd", "etc/passwd"),
            ("a/up/passwd", "etc/passwd"),
            ("../../x", "x"),
            ("a/b/../c", "a/c"),
            ("/", ""),
        ] {
            assert_eq!(resolve(root, Path::new(path)).unwrap(), root.join(expected), "{path}");
        }
        assert_eq!(resolve_parent(root, Path::new("abs")).unwrap(), root.join("abs"));
        assert!(resolve(root, Path::new("loop1/x")).is_err());
    }

    #[test]
    fn people_are_looked_up_in_the_stage() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("etc")).unwrap();
        fs::write(
            dir.path().join("etc/passwd"),
            "root:x:0:0::/root:/bin/sh\napp:x:1000:100::/home:/bin/sh\nbroken\n7:x:8:9::/:\n",
        )
        .unwrap();
        fs::write(dir.path().join("etc/group"), "g:x:5:\nwheel:x:6:root,app\n").unwrap();
        let who = |text| identity(dir.path(), text).map(|who| (who.uid, who.gid, who.groups));
        assert_eq!(who(""), Ok((0, 0, vec![6])));
        assert_eq!(who("app"), Ok((1000, 100, vec![6])));
        assert_eq!(who("1000"), Ok((1000, 100, vec![6])));
        assert_eq!(who("app:g"), Ok((1000, 5, vec![])));
        assert_eq!(who("77:88"), Ok((77, 88, vec![])));
        assert_eq!(who("77"), Ok((77, 0, vec![])));
        assert_eq!(who("7"), Ok((8, 9, vec![])), "a name may look like a number");
        assert!(who("nobody").is_err());
        let owner = |text| ownership(dir.path(), text);
        assert_eq!(owner("app"), Ok((1000, 100)));
        assert_eq!(owner("55"), Ok((55, 55)));
        assert_eq!(owner("app:g"), Ok((1000, 5)));
        assert!(owner("app:x").is_err());
    }
}
