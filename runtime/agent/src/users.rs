//! Users and groups, from the guest's own `/etc/passwd` and `/etc/group`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use parbake_protocol::agent::{Failure, FailureKind};

use crate::connection::failure;

/// The most bytes read of either file.
const MAX_FILE: u64 = 4 << 20;

/// Who a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Login name; empty for a bare number.
    pub name: Vec<u8>,
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: Vec<u8>,
}

struct Passwd<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

struct Group<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

/// Finds the user that `spec` names: `user` or `user:group`, each a name or a number. Empty is
/// root. A number needs no entry; a user without a group named has all groups it is a member of.
///
/// # Errors
/// A name without an entry.
pub fn resolve(spec: &str, root: &Path) -> Result<User, Failure> {
    let passwd = read(&root.join("etc/passwd"));
    let group = read(&root.join("etc/group"));
    resolve_in(spec, &passwd, &group)
}

fn resolve_in(spec: &str, passwd: &[u8], group: &[u8]) -> Result<User, Failure> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|g| !g.is_empty())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number = id(user.as_bytes());
    let entries = || lines(passwd).filter_map(passwd_entry);
    let entry = entries()
        .find(|e| e.name == user.as_bytes())
        .or_else(|| entries().find(|e| Some(e.uid) == number));
    let mut found = match (entry, number) {
        (Some(e), _) => User {
            name: e.name.to_vec(),
            uid: e.uid,
            gid: e.gid,
            groups: Vec::new(),
            home: if e.home.is_empty() { b"/".to_vec() } else { e.home.to_vec() },
        },
        (None, Some(uid)) => {
            let (name, home): (&[u8], &[u8]) =
                if uid == 0 { (b"root", b"/root") } else { (b"", b"/") };
            User { name: name.to_vec(), uid, gid: 0, groups: Vec::new(), home: home.to_vec() }
        }
        (None, None) => {
            return Err(failure(
                FailureKind::NoSuchUser,
                format!("no user {user:?} in the guest's /etc/passwd; numbers need no entry"),
            ));
        }
    };
    let groups = || lines(group).filter_map(group_entry);
    match wanted_group {
        Some(wanted) => {
            let by_name = groups().find(|g| g.name == wanted.as_bytes()).map(|g| g.gid);
            found.gid = by_name.or_else(|| id(wanted.as_bytes())).ok_or_else(|| {
                failure(
                    FailureKind::NoSuchUser,
                    format!("no group {wanted:?} in the guest's /etc/group; numbers need no entry"),
                )
            })?;
        }
        None if !found.name.is_empty() => {
            found.groups = groups()
                .filter(|g| g.members.split(|b| *b == b',').any(|m| m == found.name.as_slice()))
                .map(|g| g.gid)
                .collect();
        }
        None => {}
    }
    if !found.groups.contains(&found.gid) {
        found.groups.insert(0, found.gid);
    }
    Ok(found)
}

fn read(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        // An unreadable file is as good as a missing one: names are then not found, by name.
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    bytes
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n').filter(|l| !l.starts_with(b"#"))
}

fn passwd_entry(line: &[u8]) -> Option<Passwd<'_>> {
    let mut fields = line.split(|b| *b == b':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let uid = id(fields.nth(1)?)?;
    let gid = id(fields.next()?)?;
    let home = fields.nth(1).unwrap_or_default();
    Some(Passwd { name, uid, gid, home })
}

fn group_entry(line: &[u8]) -> Option<Group<'_>> {
    let mut fields = line.split(|b| *b == b':');
    let name = fields.next().filter(|n| !n.is_empty())?;
    let gid = id(fields.nth(1)?)?;
    Some(Group { name, gid, members: fields.next().unwrap_or_default() })
}

/// A decimal id. The highest value means "unchanged" to the kernel and is no id.
fn id(text: &[u8]) -> Option<u32> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok().filter(|n| *n != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\n# note\nbroken\n\
        app:x:1000:1000::/home/app:/bin/sh\n1234:x:77:78::/odd:/bin/sh\nnohome:x:5:5\n\xff\xfe:x:9:9::/h:/s\n";
    const GROUP: &[u8] = b"root:x:0:\napp:x:1000:\nwheel:x:10:root,app\nvideo:x:44:app\n\n:x:1:\n";

    #[test]
    #[allow(clippy::type_complexity)]
    fn finds_users_as_docker_does() {
        let table: &[(&str, u32, u32, &[u32], &[u8])] = &[
            ("", 0, 0, &[0, 10], b"/root"),
            ("root", 0, 0, &[0, 10], b"/root"),
            ("app", 1000, 1000, &[1000, 10, 44], b"/home/app"),
            ("1000", 1000, 1000, &[1000, 10, 44], b"/home/app"),
            ("app:video", 1000, 44, &[44], b"/home/app"),
            ("app:7", 1000, 7, &[7], b"/home/app"),
            ("app:", 1000, 1000, &[1000, 10, 44], b"/home/app"),
            ("4242", 4242, 0, &[0], b"/"),
            ("4242:4343", 4242, 4343, &[4343], b"/"),
            // A name that looks like a number is a name first.
            ("1234", 77, 78, &[78], b"/odd"),
            ("nohome", 5, 5, &[5], b"/"),
        ];
        for (spec, uid, gid, groups, home) in table {
            let user = resolve_in(spec, PASSWD, GROUP).expect(spec);
            assert_eq!(
                (user.uid, user.gid, user.groups.as_slice()),
                (*uid, *gid, *groups),
                "{spec}"
            );
            assert_eq!(user.home, *home, "{spec}");
        }
    }

    #[test]
    fn names_what_is_missing() {
        for spec in
            ["nobody-here", "app:nogroup", "-1", "4294967295", "1:4294967295", "99999999999"]
        {
            let failed = resolve_in(spec, PASSWD, GROUP).expect_err(spec);
            assert_eq!(failed.kind, FailureKind::NoSuchUser, "{spec}");
        }
    }

    #[test]
    fn root_needs_no_files() {
        let user = resolve_in("", b"", b"").expect("root");
        assert_eq!((user.uid, user.gid, user.home.as_slice()), (0, 0, b"/root".as_slice()));
    }
}
