//! The state file's envelope: what is checked before anything in it is believed.
//!
//! ```text
//!  0  magic "PBKSTATE"                  32  number of sections, u32
//!  8  format version, u32               36  CRC-32C of bytes 0..36 and the body, u32
//! 12  compat features, u32              40  body: sections
//! 16  read-only-compat features, u32
//! 20  incompat features, u32            section: kind length u16, kind, version u32,
//! 24  length of the body, u64                    flags u32 (bit 0: mandatory), length u64, payload
//! ```
//! All little-endian. A reader refuses unknown incompat features and unknown mandatory sections by
//! name, and skips other unknown sections. The read-only-compat set concerns tools that edit a
//! state; the monitor never does. The checksum catches damage, not malice: whoever installs a
//! snapshot checks its digest, and every length and index in here is bounded all the same.

/// Version of this envelope. A different one is refused.
pub const VERSION: u32 = 1;
/// The largest state file that is read.
pub const MAX_BYTES: u64 = 256 << 20;
/// Incompat features this reader knows.
pub const KNOWN_INCOMPAT: u32 = 0;

const MAGIC: [u8; 8] = *b"PBKSTATE";
const HEADER: usize = 40;
const CHECKSUM_AT: usize = 36;
const MANDATORY: u32 = 1;
const MAX_SECTIONS: u32 = 4096;

/// Why a state file is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StateError {
    /// Not a state file.
    #[error("this is not a parbake state file")]
    NotAState,
    /// Shorter or longer than it says.
    #[error(
        "the state file is {found} bytes long, but says {said}; it was cut off or overwritten: fetch or bake the snapshot again"
    )]
    Length {
        /// Bytes there are.
        found: u64,
        /// Bytes there should be.
        said: u64,
    },
    /// Too large to be one.
    #[error("the state file has {0} bytes, more than {MAX_BYTES}")]
    TooLarge(u64),
    /// Made by another version.
    #[error(
        "the state file has format version {found}, this monitor reads {VERSION}; use the parbake it was baked with, or bake the template again"
    )]
    Version {
        /// Its version.
        found: u32,
    },
    /// It needs something this monitor does not have.
    #[error(
        "the state file needs features this monitor does not know (incompat {0:#x}); use a newer parbake, or bake the template again"
    )]
    Features(u32),
    /// Damaged.
    #[error(
        "the state file is damaged: its checksum does not match; fetch or bake the snapshot again"
    )]
    Checksum,
    /// A mandatory section nobody knows.
    #[error(
        "the state file holds {kind} version {version}, which this monitor does not know; use a newer parbake, or bake the template again"
    )]
    UnknownSection {
        /// Its kind.
        kind: String,
        /// Its version.
        version: u32,
    },
    /// A section that must be there is not.
    #[error("the state file lacks its {0} section")]
    Missing(&'static str),
    /// Well-formed from outside, impossible inside.
    #[error("the state file's {what} is impossible: {why}")]
    Invalid {
        /// Which part.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// For another machine shape, processor or hypervisor.
    #[error("the snapshot does not fit: {0}")]
    Mismatch(String),
    /// The file cannot be read or written.
    #[error("the state file: {0}")]
    Io(String),
}

/// One part of a machine's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// What it is.
    pub kind: String,
    /// Version of `payload`.
    pub version: u32,
    /// Whether a reader that does not know it must refuse the file.
    pub mandatory: bool,
    /// Its own encoding.
    pub payload: Vec<u8>,
}

/// The file's bytes.
pub fn encode(sections: &[Section]) -> Vec<u8> {
    let mut out = vec![0; HEADER];
    for section in sections {
        out.extend_from_slice(&(section.kind.len() as u16).to_le_bytes());
        out.extend_from_slice(section.kind.as_bytes());
        out.extend_from_slice(&section.version.to_le_bytes());
        let flags = if section.mandatory { MANDATORY } else { 0 };
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&(section.payload.len() as u64).to_le_bytes());
        out.extend_from_slice(&section.payload);
    }
    let body = (out.len() - HEADER) as u64;
    out[0..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[24..32].copy_from_slice(&body.to_le_bytes());
    out[32..36].copy_from_slice(&(sections.len() as u32).to_le_bytes());
    let sum = checksum(&out);
    out[CHECKSUM_AT..HEADER].copy_from_slice(&sum.to_le_bytes());
    out
}

fn checksum(file: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&file[..CHECKSUM_AT]), &file[HEADER..])
}

/// The sections of a file, in order.
pub fn decode(file: &[u8]) -> Result<Vec<Section>, StateError> {
    let mut header = Reader { rest: file };
    if header.array::<8>().ok_or(StateError::NotAState)? != MAGIC {
        return Err(StateError::NotAState);
    }
    let found = file.len() as u64;
    let short = || StateError::Length { found, said: HEADER as u64 };
    let version = header.u32().ok_or_else(short)?;
    if version != VERSION {
        return Err(StateError::Version { found: version });
    }
    let (_compat, _read_only) = (header.u32(), header.u32());
    let incompat = header.u32().ok_or_else(short)?;
    let body = header.u64().ok_or_else(short)?;
    let count = header.u32().ok_or_else(short)?;
    let sum = header.u32().ok_or_else(short)?;
    let said = body.saturating_add(HEADER as u64);
    if said != found {
        return Err(StateError::Length { found, said });
    }
    if sum != checksum(file) {
        return Err(StateError::Checksum);
    }
    if incompat & !KNOWN_INCOMPAT != 0 {
        return Err(StateError::Features(incompat & !KNOWN_INCOMPAT));
    }
    let invalid = |why: &str| StateError::Invalid { what: "section table".into(), why: why.into() };
    if count > MAX_SECTIONS {
        return Err(invalid("too many sections"));
    }
    let mut sections = Vec::new();
    for _ in 0..count {
        sections.push(header.section().ok_or_else(|| invalid("it ends too early"))?);
    }
    if header.rest.is_empty() { Ok(sections) } else { Err(invalid("something follows it")) }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let length = usize::try_from(length).ok()?;
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N as u64)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn section(&mut self) -> Option<Section> {
        let length = self.array().map(u16::from_le_bytes)?;
        let kind = String::from_utf8_lossy(self.take(u64::from(length))?).into_owned();
        let version = self.u32()?;
        let mandatory = self.u32()? & MANDATORY != 0;
        let length = self.u64()?;
        let payload = self.take(length)?.to_vec();
        Some(Section { kind, version, mandatory, payload })
    }
}
