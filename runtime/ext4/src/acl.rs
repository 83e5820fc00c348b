//! POSIX ACLs: from the form of the system calls to the one ext4 stores, and back.

/// What is wrong with an ACL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AclError {
    /// Not 4 bytes and a multiple of 8.
    #[error("its length {0} is not that of an access control list")]
    Length(usize),
    /// Another format version.
    #[error("its version is {0}, not 2")]
    Version(u32),
    /// An unknown or misplaced tag.
    #[error("its entry {0} has an unknown tag or permissions, or is out of order")]
    Entry(usize),
    /// One of the entries every list has is not there.
    #[error("it lacks an owner, group, other or, with named users or groups, mask entry")]
    Incomplete,
}

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Re-encodes a version 2 list (8-byte entries) as ext4's version 1 (4-byte entries for the classes
/// without an id). Returns `None` for an empty list, and for one that says no more than the mode
/// does, unless `default` (a directory's default list, which is never implied by the mode).
///
/// The checks are those of Linux: the kernel refuses to read a stored list that breaks them.
pub fn encode(list: &[u8], default: bool) -> Result<Option<Vec<u8>>, AclError> {
    let Some((version, entries)) = list.split_first_chunk::<4>() else {
        return Err(AclError::Length(list.len()));
    };
    let (entries, []) = entries.as_chunks::<8>() else {
        return Err(AclError::Length(list.len()));
    };
    let version = u32::from_le_bytes(*version);
    if version != 2 {
        return Err(AclError::Version(version));
    }
    if entries.is_empty() {
        return Ok(None);
    }
    let mut out = 1u32.to_le_bytes().to_vec();
    let mut seen = 0;
    for (number, entry) in entries.iter().enumerate() {
        let tag = u16::from_le_bytes([entry[0], entry[1]]);
        let permissions = u16::from_le_bytes([entry[2], entry[3]]);
        let named = matches!(tag, USER | GROUP);
        let known = named || matches!(tag, USER_OBJ | GROUP_OBJ | MASK | OTHER);
        // Tags ascend; only the named ones may come more than once.
        let misplaced = seen >= u32::from(tag) << 1 || (!named && seen & u32::from(tag) != 0);
        if !known || misplaced || permissions > 7 {
            return Err(AclError::Entry(number));
        }
        seen |= u32::from(tag);
        out.extend_from_slice(&entry[..4]);
        if named {
            out.extend_from_slice(&entry[4..]);
        }
    }
    let base = u32::from(USER_OBJ | GROUP_OBJ | OTHER);
    let named = seen & u32::from(USER | GROUP) != 0;
    if seen & base != base || (named && seen & u32::from(MASK) == 0) {
        return Err(AclError::Incomplete);
    }
    if seen == base && !default {
        return Ok(None);
    }
    Ok(Some(out))
}

/// The other direction; `None` for what is no list.
pub fn decode(stored: &[u8]) -> Option<Vec<u8>> {
    let (version, mut rest) = stored.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != 1 {
        return None;
    }
    let mut out = 2u32.to_le_bytes().to_vec();
    while let Some((entry, after)) = rest.split_first_chunk::<4>() {
        out.extend_from_slice(entry);
        rest = after;
        if matches!(u16::from_le_bytes([entry[0], entry[1]]), USER | GROUP) {
            let (id, after) = rest.split_first_chunk::<4>()?;
            out.extend_from_slice(id);
            rest = after;
        } else {
            out.extend_from_slice(&u32::MAX.to_le_bytes());
        }
    }
    rest.is_empty().then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut out = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            out.extend_from_slice(&tag.to_le_bytes());
            out.extend_from_slice(&permissions.to_le_bytes());
            out.extend_from_slice(&id.to_le_bytes());
        }
        out
    }

    const NONE: u32 = u32::MAX;

    #[test]
    fn named_entries_keep_their_ids_and_the_rest_loses_them() {
        let full = list(&[
            (USER_OBJ, 6, NONE),
            (USER, 4, 1000),
            (USER, 7, 70_000),
            (GROUP_OBJ, 4, NONE),
            (GROUP, 5, 3),
            (MASK, 7, NONE),
            (OTHER, 0, NONE),
        ]);
        let stored = encode(&full, false).expect("valid").expect("not minimal");
        assert_eq!(stored.len(), 4 + 4 * 4 + 3 * 8);
        assert_eq!(&stored[..8], [1, 0, 0, 0, 1, 0, 6, 0]);
        assert_eq!(&stored[8..16], [2, 0, 4, 0, 0xe8, 3, 0, 0]);
        assert_eq!(&stored[40..], [0x20, 0, 0, 0]);
    }

    #[test]
    fn a_list_equal_to_the_mode_is_not_stored() {
        let minimal = list(&[(USER_OBJ, 6, NONE), (GROUP_OBJ, 4, NONE), (OTHER, 4, NONE)]);
        assert_eq!(encode(&minimal, false), Ok(None));
        assert!(encode(&minimal, true).expect("valid").is_some());
        assert_eq!(encode(&list(&[]), true), Ok(None));
    }

    #[test]
    fn refuses_what_the_kernel_would_not_read() {
        let base = [(USER_OBJ, 6, NONE), (GROUP_OBJ, 4, NONE), (OTHER, 4, NONE)];
        assert_eq!(encode(b"", false), Err(AclError::Length(0)));
        assert_eq!(encode(&list(&base)[..11], false), Err(AclError::Length(11)));
        assert_eq!(encode(&[1, 0, 0, 0], false), Err(AclError::Version(1)));
        for (entries, error) in [
            (vec![(USER_OBJ, 6, NONE)], AclError::Incomplete),
            (vec![base[0], (USER, 6, 1), base[1], base[2]], AclError::Incomplete),
            (vec![base[1], base[0], base[2]], AclError::Entry(1)),
            (vec![base[0], base[0], base[1], base[2]], AclError::Entry(1)),
            (vec![base[0], base[1], (0x40, 1, 1), base[2]], AclError::Entry(2)),
            (vec![base[0], base[1], (3, 1, 1), base[2]], AclError::Entry(2)),
            (vec![base[0], base[1], (OTHER, 8, NONE)], AclError::Entry(2)),
        ] {
            assert_eq!(encode(&list(&entries), false), Err(error), "{entries:?}");
        }
    }
}
