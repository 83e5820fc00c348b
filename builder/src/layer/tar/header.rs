//! One 512-byte tar header block and the numbers in it.

/// The unit of a tar archive in bytes.
pub const BLOCK: usize = 512;

/// Which of the header layouts a block follows; they differ in what lies behind the magic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// No magic: name, numbers, link name, nothing else.
    V7,
    /// POSIX ustar, also under PAX.
    Ustar,
    /// `star`, which keeps times in the last bytes of ustar's prefix.
    Star,
    /// Old GNU, which keeps the sparse map where ustar has its prefix.
    Gnu,
}

/// A view of one header block.
#[derive(Clone, Copy)]
pub struct Header<'a>(pub &'a [u8; BLOCK]);

impl<'a> Header<'a> {
    /// Whether the block is all zeros: the end-of-archive mark.
    pub fn is_zero(self) -> bool {
        self.0.iter().all(|&byte| byte == 0)
    }

    /// Whether the checksum field holds the sum of the bytes, counted unsigned (POSIX) or signed
    /// (some old programs).
    pub fn checksum_holds(self) -> bool {
        let Some(want) = number(&self.0[148..156]) else { return false };
        let mut unsigned = 0i64;
        let mut signed = 0i64;
        for (at, &byte) in self.0.iter().enumerate() {
            let byte = if (148..156).contains(&at) { b' ' } else { byte };
            unsigned += i64::from(byte);
            signed += i64::from(byte.cast_signed());
        }
        want == unsigned || want == signed
    }

    /// The header's layout.
    pub fn dialect(self) -> Dialect {
        match &self.0[257..265] {
            b"ustar  \0" => Dialect::Gnu,
            magic if &magic[..6] == b"ustar\0" => {
                if &self.0[508..512] == b"tar\0" {
                    Dialect::Star
                } else {
                    Dialect::Ustar
                }
            }
            _ => Dialect::V7,
        }
    }

    /// The entry's name, with the prefix where the layout has one.
    pub fn name(self) -> Vec<u8> {
        let name = text(&self.0[..100]);
        let prefix = match self.dialect() {
            Dialect::Ustar => text(&self.0[345..500]),
            Dialect::Star => text(&self.0[345..476]),
            Dialect::V7 | Dialect::Gnu => &[],
        };
        if prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, b"/", name].concat()
    }

    /// The link target.
    pub fn link(self) -> &'a [u8] {
        text(&self.0[157..257])
    }

    /// The type letter.
    pub fn kind(self) -> u8 {
        self.0[156]
    }

    /// Mode, with whatever bits the producer put above the permissions.
    pub fn mode(self) -> Option<i64> {
        number(&self.0[100..108])
    }

    /// Owner.
    pub fn uid(self) -> Option<i64> {
        number(&self.0[108..116])
    }

    /// Group.
    pub fn gid(self) -> Option<i64> {
        number(&self.0[116..124])
    }

    /// Bytes of data stored behind the header.
    pub fn size(self) -> Option<i64> {
        number(&self.0[124..136])
    }

    /// Modification time in seconds.
    pub fn mtime(self) -> Option<i64> {
        number(&self.0[136..148])
    }

    /// Device numbers.
    pub fn device(self) -> Option<(i64, i64)> {
        Some((number(&self.0[329..337])?, number(&self.0[337..345])?))
    }
}

/// A field's bytes up to its first NUL.
pub fn text(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|&byte| byte == 0).unwrap_or(field.len())]
}

/// A numeric field: octal digits with blanks around, or base 256 when the first byte's high bit
/// is set (big-endian two's complement of the rest). Blank is 0. `None` when it is neither or
/// does not fit.
pub fn number(field: &[u8]) -> Option<i64> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let mut value: i128 = if negative { -1 } else { 0 };
        for (at, &byte) in field.iter().enumerate() {
            // The marker bit is a copy of the sign in the number itself.
            let byte = match (at, negative) {
                (0, true) => byte | 0x80,
                (0, false) => byte & 0x7f,
                _ => byte,
            };
            value = (value << 8) | i128::from(byte);
            i64::try_from(value).ok()?;
        }
        return i64::try_from(value).ok();
    }
    let mut value = 0i64;
    let mut seen = false;
    let mut ended = false;
    for &byte in field {
        match byte {
            b' ' | 0 => ended |= seen,
            b'0'..=b'7' if !ended => {
                seen = true;
                value = value.checked_mul(8)?.checked_add(i64::from(byte - b'0'))?;
            }
            // What follows the terminator is padding; some producers leave old bytes there.
            _ if ended => break,
            _ => return None,
        }
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let cases: &[(&[u8], Option<i64>)] = &[
            (b"0000644\0", Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"77777777", Some(0o77_777_777)),
            (b"0000648\0", None),
            (b"-1\0\0\0\0\0\0", None),
            (b"644\0junk", Some(0o644)),
            (b"\x80\0\0\0\0\0\0\x05", Some(5)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff", Some(-1)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00", Some(-256)),
            (b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff", Some(i64::MAX)),
            (b"\x80\0\0\0\x80\0\0\0\0\0\0\0", None),
            (b"\x80\x01\0\0\0\0\0\0\0\0\0\0", None),
            (b"\xff\xff\xff\xff\x80\0\0\0\0\0\0\0", Some(i64::MIN)),
            (b"\xff\xff\xff\xff\x7f\xff\xff\xff\xff\xff\xff\xff", None),
        ];
        for (field, want) in cases {
            assert_eq!(number(field), *want, "{field:?}");
        }
    }
}
