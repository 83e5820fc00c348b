//! PAX extended headers: `length keyword=value\n` records with binary values.

use crate::tree::{Timestamp, Xattrs};

use super::TarError;
use super::sparse::Segment;

/// What extended headers say about the entry that follows. Absent fields leave the tar header's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pax {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<Timestamp>,
    /// `SCHILY.xattr.*`, raw bytes.
    pub xattrs: Xattrs,
    /// `LIBARCHIVE.xattr.*`, decoded; used where no `SCHILY` twin is.
    pub libarchive_xattrs: Xattrs,
    /// `SCHILY.acl.*` in text form was there.
    pub text_acl: bool,
    pub sparse: PaxSparse,
}

/// The `GNU.sparse.*` keywords of all three PAX sparse formats.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PaxSparse {
    pub major: Option<u64>,
    pub minor: Option<u64>,
    pub name: Option<Vec<u8>>,
    pub real_size: Option<u64>,
    pub blocks: Option<u64>,
    /// Pairs of format 0.0 (repeated keywords) or 0.1 (one list).
    pub map: Option<Vec<Segment>>,
    offset: Option<u64>,
}

impl PaxSparse {
    fn is_empty(&self) -> bool {
        self == &Self::default()
    }
}

/// Bounds on one entry's extended headers.
#[derive(Debug, Clone, Copy)]
pub struct PaxLimits {
    pub segments: usize,
    pub xattr_value: usize,
}

impl Pax {
    /// Applies the records of one extended header; later ones win, an empty value withdraws an
    /// earlier one (POSIX pax, "extended header keyword precedence").
    pub fn apply(&mut self, mut records: &[u8], limits: PaxLimits) -> Result<(), TarError> {
        while !records.is_empty() {
            let [keyword, value, rest] = split_record(records)?;
            self.set(keyword, value, limits)?;
            records = rest;
        }
        if self.sparse.offset.is_some() {
            return Err(bad("GNU.sparse.offset without GNU.sparse.numbytes"));
        }
        Ok(())
    }

    /// Whether the records say something that only makes sense for one entry.
    pub fn names_an_entry(&self) -> bool {
        self.path.is_some() || self.link.is_some() || self.size.is_some() || !self.sparse.is_empty()
    }

    fn set(&mut self, keyword: &[u8], value: &[u8], limits: PaxLimits) -> Result<(), TarError> {
        match keyword {
            b"path" => self.path = pathname("path", value)?,
            b"linkpath" => self.link = pathname("linkpath", value)?,
            b"size" => self.size = unsigned("size", value)?,
            b"uid" => self.uid = unsigned("uid", value)?,
            b"gid" => self.gid = unsigned("gid", value)?,
            b"mtime" => {
                self.mtime = match value {
                    [] => None,
                    _ => Some(timestamp(value).ok_or_else(|| bad_value("mtime", value))?),
                }
            }
            b"SCHILY.acl.access" | b"SCHILY.acl.default" => self.text_acl = true,
            _ => {
                if let Some(name) = keyword.strip_prefix(b"SCHILY.xattr.") {
                    check_xattr(name, value.len(), limits)?;
                    self.xattrs.insert(name.into(), value.into());
                } else if let Some(name) = keyword.strip_prefix(b"LIBARCHIVE.xattr.") {
                    let name = percent_decode(name);
                    let value =
                        base64(value).ok_or_else(|| bad("LIBARCHIVE.xattr is not base64"))?;
                    check_xattr(&name, value.len(), limits)?;
                    self.libarchive_xattrs.insert(name.into(), value.into());
                } else if let Some(name) = keyword.strip_prefix(b"GNU.sparse.") {
                    self.set_sparse(name, value, limits)?;
                }
            }
        }
        Ok(())
    }

    fn set_sparse(&mut self, name: &[u8], value: &[u8], limits: PaxLimits) -> Result<(), TarError> {
        let sparse = &mut self.sparse;
        let too_many = || TarError::Sparse { problem: "more segments than the limit" };
        match name {
            b"major" => sparse.major = unsigned("GNU.sparse.major", value)?,
            b"minor" => sparse.minor = unsigned("GNU.sparse.minor", value)?,
            b"name" => sparse.name = pathname("GNU.sparse.name", value)?,
            b"size" | b"realsize" => sparse.real_size = unsigned("GNU.sparse.realsize", value)?,
            b"numblocks" => sparse.blocks = unsigned("GNU.sparse.numblocks", value)?,
            b"offset" => {
                if sparse.offset.is_some() {
                    return Err(bad("two GNU.sparse.offset in a row"));
                }
                sparse.offset = unsigned("GNU.sparse.offset", value)?;
            }
            b"numbytes" => {
                let offset = sparse
                    .offset
                    .take()
                    .ok_or_else(|| bad("GNU.sparse.numbytes without GNU.sparse.offset"))?;
                let length = unsigned("GNU.sparse.numbytes", value)?.unwrap_or(0);
                let map = sparse.map.get_or_insert_default();
                if map.len() >= limits.segments {
                    return Err(too_many());
                }
                map.push(Segment { offset, length });
            }
            b"map" => {
                let mut map = Vec::new();
                let mut fields = value.split(|&byte| byte == b',');
                while let Some(offset) = fields.next() {
                    let length = fields
                        .next()
                        .ok_or_else(|| bad("GNU.sparse.map has an odd number of fields"))?;
                    if map.len() >= limits.segments {
                        return Err(too_many());
                    }
                    map.push(Segment {
                        offset: unsigned("GNU.sparse.map", offset)?
                            .ok_or_else(|| bad("GNU.sparse.map has an empty field"))?,
                        length: unsigned("GNU.sparse.map", length)?
                            .ok_or_else(|| bad("GNU.sparse.map has an empty field"))?,
                    });
                }
                sparse.map = Some(map);
            }
            _ => {}
        }
        Ok(())
    }
}

fn bad(problem: &str) -> TarError {
    TarError::Pax { problem: problem.to_owned() }
}

fn bad_value(keyword: &str, value: &[u8]) -> TarError {
    let value = &value[..value.len().min(60)];
    TarError::Pax { problem: format!("{keyword}={} is not valid", value.escape_ascii()) }
}

/// Splits `12 key=value\n` off the front: keyword, value, rest.
fn split_record(records: &[u8]) -> Result<[&[u8]; 3], TarError> {
    let space = records.iter().take(20).position(|&byte| byte == b' ');
    let space = space.ok_or_else(|| bad("a record does not begin with its length"))?;
    let length = decimal(&records[..space]).and_then(|length| usize::try_from(length).ok());
    let length = length.ok_or_else(|| bad("a record does not begin with its length"))?;
    if length > records.len() || length < space + 2 || records[length - 1] != b'\n' {
        return Err(bad("a record's length is wrong"));
    }
    let body = &records[space + 1..length - 1];
    let equals = body.iter().position(|&byte| byte == b'=');
    let equals = equals.filter(|&at| at > 0).ok_or_else(|| bad("a record has no keyword"))?;
    Ok([&body[..equals], &body[equals + 1..], &records[length..]])
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 20 {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

fn unsigned(keyword: &str, value: &[u8]) -> Result<Option<u64>, TarError> {
    if value.is_empty() {
        return Ok(None);
    }
    decimal(value).map(Some).ok_or_else(|| bad_value(keyword, value))
}

fn pathname(keyword: &str, value: &[u8]) -> Result<Option<Vec<u8>>, TarError> {
    if value.contains(&0) {
        return Err(bad(&format!("{keyword} contains a NUL byte")));
    }
    Ok((!value.is_empty()).then(|| value.to_vec()))
}

/// Decimal seconds with an optional sign and fraction; digits beyond nanoseconds are dropped.
fn timestamp(value: &[u8]) -> Option<Timestamp> {
    let (negative, value) = match value {
        [b'-', rest @ ..] => (true, rest),
        _ => (false, value),
    };
    let dot = value.iter().position(|&byte| byte == b'.').unwrap_or(value.len());
    let seconds = i64::try_from(decimal(&value[..dot])?).ok()?;
    let mut nanos = 0u32;
    let fraction = value.get(dot + 1..).unwrap_or(&[]);
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    for at in 0..9 {
        nanos = nanos * 10 + fraction.get(at).map_or(0, |digit| u32::from(digit - b'0'));
    }
    Some(match (negative, nanos) {
        (false, _) => Timestamp { seconds, nanos },
        (true, 0) => Timestamp { seconds: -seconds, nanos: 0 },
        (true, _) => Timestamp { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
    })
}

fn check_xattr(name: &[u8], length: usize, limits: PaxLimits) -> Result<(), TarError> {
    let problem = if name.is_empty() {
        "an extended attribute has no name".to_owned()
    } else if name.contains(&0) {
        "an extended attribute's name contains a NUL byte".to_owned()
    } else if name.len() > 255 {
        format!("an extended attribute's name has {} bytes, more than 255", name.len())
    } else if length > limits.xattr_value {
        format!(
            "extended attribute {} has {length} bytes, more than {}",
            name.escape_ascii(),
            limits.xattr_value
        )
    } else {
        return Ok(());
    };
    Err(TarError::Pax { problem })
}

/// Undoes libarchive's URL encoding of attribute names; a `%` that starts no escape is itself.
fn percent_decode(name: &[u8]) -> Vec<u8> {
    let digit = |byte: Option<&u8>| byte.and_then(|&byte| char::from(byte).to_digit(16));
    let mut out = Vec::with_capacity(name.len());
    let mut at = 0;
    while let Some(&byte) = name.get(at) {
        if byte == b'%'
            && let (Some(high), Some(low)) = (digit(name.get(at + 1)), digit(name.get(at + 2)))
        {
            out.push((high * 16 + low).to_le_bytes()[0]);
            at += 3;
        } else {
            out.push(byte);
            at += 1;
        }
    }
    out
}

/// Decodes base64 with or without padding (libarchive writes none).
pub fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let padding = text.iter().rev().take_while(|&&byte| byte == b'=').count();
    let text = &text[..text.len() - padding.min(2)];
    if text.len() % 4 == 1 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3 + 2);
    let mut bits = 0u32;
    let mut count = 0;
    for &byte in text {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count).to_le_bytes()[0]);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PaxLimits = PaxLimits { segments: 4, xattr_value: 100 };

    fn apply(records: &[u8]) -> Result<Pax, TarError> {
        let mut pax = Pax::default();
        pax.apply(records, LIMITS)?;
        Ok(pax)
    }

    #[test]
    fn records_with_binary_values() {
        let pax = apply(b"9 path=a\n26 SCHILY.xattr.user.a=\n\n").unwrap_err();
        assert_eq!(pax.to_string(), "PAX header: a record's length is wrong");
        let pax = apply(b"9 path=a\n25 SCHILY.xattr.user.a=\n\n").unwrap();
        assert_eq!(pax.path.as_deref(), Some(&b"a"[..]));
        assert_eq!(&pax.xattrs[&b"user.a"[..]][..], b"\n");
        // An empty path withdraws the earlier one; an empty attribute is an attribute.
        let pax = apply(b"9 path=a\n8 path=\n24 SCHILY.xattr.user.a=\n").unwrap();
        assert_eq!(pax.path, None);
        assert_eq!(&pax.xattrs[&b"user.a"[..]][..], b"");
    }

    #[test]
    fn malformed_records_are_refused() {
        for bad in [
            &b"path=a\n"[..],
            b"99 path=a\n",
            b"9 path=ab\n",
            b"0 \n",
            b"4 =\n",
            b"7 path\n",
            b"11 path=a\0b\n",
            b"11 size=-1\n",
            b"99999999999999999999999 path=a\n",
            b"23 GNU.sparse.offset=1\n",
            b"21 GNU.sparse.map=1\n",
            b"29 GNU.sparse.map=1,2,3,4,\n",
            b"20 SCHILY.xattr.=x\n",
        ] {
            assert!(apply(bad).is_err(), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn timestamps() {
        for (text, seconds, nanos) in [
            ("0", 0, 0),
            ("1.5", 1, 500_000_000),
            ("-1", -1, 0),
            ("-1.5", -2, 500_000_000),
            ("-0.000000001", -1, 999_999_999),
            ("1.0000000019", 1, 1),
            ("4294967296.25", 4_294_967_296, 250_000_000),
        ] {
            assert_eq!(timestamp(text.as_bytes()), Some(Timestamp { seconds, nanos }), "{text}");
        }
        for bad in ["", "-", ".5", "1e9", "1.x", "99999999999999999999"] {
            assert_eq!(timestamp(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn libarchive_attributes() {
        assert_eq!(base64(b"aGVsbG8").unwrap(), b"hello");
        assert_eq!(base64(b"aGVsbG8=").unwrap(), b"hello");
        assert_eq!(base64(b"").unwrap(), b"");
        assert!(base64(b"a").is_none());
        assert!(base64(b"a*bc").is_none());
        assert_eq!(percent_decode(b"user.a%20b%zz%"), b"user.a b%zz%");
    }
}
