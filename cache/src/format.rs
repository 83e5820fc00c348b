//! Reading the small binary formats that travel: one header, bounded fields, one kind of error.
//!
//! Every such format is known by its SHA-256, which the caller has checked before the bytes come
//! here. It starts with eight magic bytes, a version and a word of mandatory feature bits.

/// Bytes that are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Something else altogether.
    #[error("not a {0}")]
    Magic(&'static str),
    /// Written by a newer program.
    #[error(
        "a {kind} of version {version}, and this program knows up to {known}; use the newer parbake"
    )]
    NewerVersion {
        /// What it is.
        kind: &'static str,
        /// What its header says.
        version: u16,
        /// The newest version known here.
        known: u16,
    },
    /// A mandatory feature of a newer program.
    #[error(
        "a {kind} that needs the feature bits {features:#06x}, which this program does not know; use the newer parbake"
    )]
    UnknownFeatures {
        /// What it is.
        kind: &'static str,
        /// The unknown bits.
        features: u16,
    },
    /// It ends early or goes on too long.
    #[error("a {0} of the wrong length")]
    Length(&'static str),
    /// A field with an impossible value.
    #[error("a {kind} whose {field} is out of bounds ({value})")]
    Bounds {
        /// What it is.
        kind: &'static str,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// A kind of file: its name in messages, its first bytes, and its newest version.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) magic: [u8; 8],
    pub(crate) version: u16,
}

impl Kind {
    /// The header of a new file.
    pub(crate) fn header(self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(0u16.to_le_bytes());
        bytes
    }

    /// Checks the header and returns a reader of what follows.
    pub(crate) fn open(self, bytes: &[u8]) -> Result<Fields<'_>, FormatError> {
        let rest = bytes.strip_prefix(&self.magic).ok_or(FormatError::Magic(self.name))?;
        let mut fields = Fields { kind: self.name, rest };
        match fields.u16()? {
            0 => Err(FormatError::Magic(self.name)),
            version if version > self.version => {
                Err(FormatError::NewerVersion { kind: self.name, version, known: self.version })
            }
            _ => match fields.u16()? {
                0 => Ok(fields),
                features => Err(FormatError::UnknownFeatures { kind: self.name, features }),
            },
        }
    }
}

/// Takes little-endian fields off the front.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    kind: &'static str,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], FormatError> {
        let (field, rest) = self.rest.split_first_chunk().ok_or(FormatError::Length(self.kind))?;
        self.rest = rest;
        Ok(field)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, FormatError> {
        self.array().map(|bytes| u16::from_le_bytes(*bytes))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(|bytes| u32::from_le_bytes(*bytes))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// A count of items that take at least `each` bytes: never more than the bytes can hold, so
    /// that it may be reserved for.
    pub(crate) fn count(&mut self, each: usize) -> Result<usize, FormatError> {
        let count = self.u32()? as usize;
        if count > self.rest.len() / each {
            return Err(FormatError::Length(self.kind));
        }
        Ok(count)
    }

    pub(crate) fn check(
        &self,
        holds: bool,
        field: &'static str,
        value: u64,
    ) -> Result<(), FormatError> {
        if holds { Ok(()) } else { Err(FormatError::Bounds { kind: self.kind, field, value }) }
    }

    pub(crate) fn end(self) -> Result<(), FormatError> {
        if self.rest.is_empty() { Ok(()) } else { Err(FormatError::Length(self.kind)) }
    }
}
