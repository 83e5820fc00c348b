//! Which extended attributes of an entry a root filesystem gets.

use crate::tree::Xattrs;

use super::path::display;

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";

/// An access control list that the kernel would refuse.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is not a valid access control list: {problem}")]
pub struct AclError {
    name: String,
    problem: &'static str,
}

/// Drops attributes that no Linux file system would take (`warn` is told of each), checks access
/// control lists, and applies what setting them would do to `mode`: the list and the permission
/// bits are two views of one thing, and a list that says no more than the bits is none.
pub fn settle(
    xattrs: &mut Xattrs,
    mode: &mut u16,
    is_directory: bool,
    is_symlink: bool,
    mut warn: impl FnMut(String),
) -> Result<(), AclError> {
    if xattrs.is_empty() {
        return Ok(());
    }
    xattrs.retain(|name, _| {
        let keep = [&b"user."[..], b"trusted.", b"security."]
            .iter()
            .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
            || (&**name == ACCESS && !is_symlink)
            || (&**name == DEFAULT && is_directory);
        if !keep {
            warn(format!(
                "extended attribute {} dropped: not one Linux can set here",
                display(name)
            ));
        }
        keep
    });
    for name in [ACCESS, DEFAULT] {
        let Some(value) = xattrs.get(name) else { continue };
        let acl = parse(value).map_err(|problem| AclError { name: display(name), problem })?;
        if name == ACCESS {
            if let Some(acl) = &acl {
                *mode = *mode & !0o777 | acl.mode;
            }
            if acl.as_ref().is_none_or(|acl| acl.minimal) {
                xattrs.remove(name);
            }
        } else if acl.is_none() {
            xattrs.remove(name);
        }
    }
    Ok(())
}

struct Acl {
    /// Permission bits the list stands for: owner, mask or group, others.
    mode: u16,
    /// Nothing beyond owner, group and others.
    minimal: bool,
}

/// Reads the form of the system calls: version 2, then tag, permissions and id of each entry.
/// `None` is a list without entries, which removes an access control list.
fn parse(value: &[u8]) -> Result<Option<Acl>, &'static str> {
    const USER_OBJ: u16 = 1;
    const USER: u16 = 2;
    const GROUP_OBJ: u16 = 4;
    const GROUP: u16 = 8;
    const MASK: u16 = 16;
    const OTHER: u16 = 32;
    let Some((version, entries)) = value.split_first_chunk::<4>() else {
        return Err("it is too short");
    };
    if u32::from_le_bytes(*version) != 2 {
        return Err("its version is not 2");
    }
    let (entries, rest) = entries.as_chunks::<8>();
    if !rest.is_empty() {
        return Err("its last entry is cut short");
    }
    if entries.is_empty() {
        return Ok(None);
    }
    let mut last = (0, None);
    let mut permissions = [None; 6];
    let mut named = false;
    for entry in entries {
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let bits = u16::from_le_bytes([entry[2], entry[3]]);
        let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        if bits > 7 {
            return Err("an entry has unknown permissions");
        }
        let id = matches!(tag, USER | GROUP).then_some(id);
        if !matches!(tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER) {
            return Err("an entry has an unknown tag");
        }
        // The kernel wants the tags in order; ids of one tag it takes in any.
        if tag < last.0 || (tag == last.0 && id.is_none()) {
            return Err("its entries are out of order or doubled");
        }
        last = (tag, id);
        named |= id.is_some();
        permissions[tag.trailing_zeros() as usize] = Some(bits);
    }
    let [Some(user), _, Some(group), _, mask, Some(other)] = permissions else {
        return Err("the entries for owner, group and others are not all there");
    };
    if named && mask.is_none() {
        return Err("it names users or groups but has no mask");
    }
    Ok(Some(Acl {
        mode: user << 6 | mask.unwrap_or(group) << 3 | other,
        minimal: !named && mask.is_none(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Box<[u8]> {
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, bits, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(bits.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value.into()
    }

    const NOBODY: u32 = u32::MAX;

    #[test]
    fn acl_and_mode_agree_afterwards() {
        let minimal = acl(&[(1, 6, NOBODY), (4, 4, NOBODY), (32, 0, NOBODY)]);
        let full =
            acl(&[(1, 7, NOBODY), (2, 6, 12), (4, 4, NOBODY), (16, 6, NOBODY), (32, 1, NOBODY)]);
        for (value, want_mode, kept) in
            [(minimal, 0o4640, false), (full, 0o4761, true), (acl(&[]), 0o4755, false)]
        {
            let mut xattrs = Xattrs::from([(ACCESS.into(), value)]);
            let mut mode = 0o4755;
            settle(&mut xattrs, &mut mode, false, false, |_| {}).unwrap();
            assert_eq!((mode, !xattrs.is_empty()), (want_mode, kept));
        }
    }

    #[test]
    fn invalid_lists_are_refused() {
        let base = [(1, 6, NOBODY), (4, 4, NOBODY), (32, 0, NOBODY)];
        for bad in [
            Box::from(&b"\x02\0\0"[..]),
            Box::from(&b"\x01\0\0\0"[..]),
            acl(&base)[..27].into(),
            acl(&base[..2]),
            acl(&[base[0], (2, 6, 5), base[1], base[2]]),
            acl(&[base[1], base[0], base[2]]),
            acl(&[(1, 8, NOBODY), base[1], base[2]]),
            acl(&[base[0], base[1], base[2], (64, 0, NOBODY)]),
            acl(&[base[0], base[0], base[1], base[2]]),
        ] {
            let mut xattrs = Xattrs::from([(ACCESS.into(), bad)]);
            assert!(settle(&mut xattrs, &mut 0, false, false, |_| {}).is_err());
        }
    }

    #[test]
    fn foreign_namespaces_are_dropped_and_overlay_marks_are_plain() {
        let mut xattrs: Xattrs = [
            "user.a",
            "user.",
            "trusted.overlay.opaque",
            "security.capability",
            "com.apple.provenance",
            "system.data",
            "system.posix_acl_default",
        ]
        .iter()
        .map(|name| (name.as_bytes().into(), b"x"[..].into()))
        .collect();
        let mut warned = 0;
        settle(&mut xattrs, &mut 0, false, false, |_| warned += 1).unwrap();
        let names: Vec<_> = xattrs.keys().map(|name| display(name)).collect();
        assert_eq!(names, ["security.capability", "trusted.overlay.opaque", "user.a"]);
        assert_eq!(warned, 4);
    }
}
