//! Names of tar entries: cleaned, checked, split into components.

/// Longest name of a directory entry in bytes (ext4, and every other Linux file system).
pub const NAME_MAX: usize = 255;
/// Longest path accepted in bytes; the kernel's own limit.
pub const PATH_MAX: usize = 4096;

/// Why a name cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// The name is empty.
    #[error("the {what} is empty")]
    Empty {
        /// Name or link target.
        what: &'static str,
    },
    /// The name contains `..`.
    #[error("the {what} contains \"..\", which could lead out of the root")]
    DotDot {
        /// Name or link target.
        what: &'static str,
    },
    /// A component is too long.
    #[error("a component of the {what} has {length} bytes, more than 255")]
    ComponentTooLong {
        /// Name or link target.
        what: &'static str,
        /// Its length.
        length: usize,
    },
    /// The whole is too long.
    #[error("the {what} has {length} bytes, more than 4096")]
    TooLong {
        /// Name or link target.
        what: &'static str,
        /// Its length.
        length: usize,
    },
}

/// Splits a name into its components; leading, doubled and trailing slashes and `.` mean nothing.
/// No components is the root itself.
pub fn components<'a>(what: &'static str, path: &'a [u8]) -> Result<Vec<&'a [u8]>, PathError> {
    if path.is_empty() {
        return Err(PathError::Empty { what });
    }
    if path.len() > PATH_MAX {
        return Err(PathError::TooLong { what, length: path.len() });
    }
    let mut out = Vec::new();
    for component in path.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return Err(PathError::DotDot { what }),
            _ if component.len() > NAME_MAX => {
                return Err(PathError::ComponentTooLong { what, length: component.len() });
            }
            _ => out.push(component),
        }
    }
    Ok(out)
}

/// A path as text for messages: unprintable bytes escaped, cut at 300 characters.
pub fn display(path: &[u8]) -> String {
    match std::str::from_utf8(&path[..path.len().min(300)]) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => path[..path.len().min(300)].escape_ascii().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cleaned_and_checked() {
        let ok = |path: &'static [u8]| components("name", path).unwrap().join(&b"|"[..]);
        assert_eq!(ok(b"a/b"), b"a|b");
        assert_eq!(ok(b"/a//./b/"), b"a|b");
        assert_eq!(ok(b"./"), b"");
        assert_eq!(ok(b"/"), b"");
        assert_eq!(ok(b"..."), b"...");
        for bad in [&b""[..], b"..", b"a/../b", b"a/..", &[b'x'; 256], &b"x/".repeat(2100)] {
            assert!(components("name", bad).is_err(), "{}", display(bad));
        }
        assert!(components("name", &[b'x'; 255]).is_ok());
    }
}
