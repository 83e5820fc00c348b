//! What the headers of an unpacked kernel say: how it can be entered, and that all it wants loaded
//! is there.

/// The first bytes of every ELF file.
pub const MAGIC: &[u8] = b"\x7fELF";

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
/// `XEN_ELFNOTE_PHYS32_ENTRY` of the Xen public headers: the PVH entry point.
const NOTE_PVH_ENTRY: u32 = 18;
/// Kernels have fewer than ten; the bound keeps foreign files cheap.
const MAX_SEGMENTS: u16 = 64;

/// How a kernel can be entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElfFacts {
    /// Physical address of the 32-bit PVH entry point, when the kernel has one.
    pub pvh_entry: Option<u32>,
    /// The ELF's own entry point: where the 64-bit boot protocol enters an unpacked kernel.
    pub entry: u64,
    /// The end of the highest loaded segment, as a physical address.
    pub memory_end: u64,
}

/// Why an ELF is not a kernel that can be entered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ElfError {
    /// Not an ELF, or one for another machine.
    #[error("not a 64-bit x86 ELF")]
    WrongKind,
    /// A header or segment lies outside the file.
    #[error("the ELF is truncated or its {0} lie outside the file")]
    Truncated(&'static str),
    /// Nothing to load, or more segments than any kernel has.
    #[error("the ELF has {0} program headers, {MAX_SEGMENTS} at most are accepted")]
    Segments(u16),
    /// No PVH note, and no 64-bit entry inside what is loaded.
    #[error("the kernel has neither a PVH entry note (CONFIG_PVH) nor a usable 64-bit entry point")]
    NoEntry,
}

struct Segment<'a> {
    kind: u32,
    physical: u64,
    virtual_: u64,
    memory: u64,
    align: u64,
    bytes: &'a [u8],
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Reads the headers of `elf`.
///
/// # Errors
/// What makes it impossible to enter, by name.
pub fn inspect(elf: &[u8]) -> Result<ElfFacts, ElfError> {
    let header = elf.get(..64).ok_or(ElfError::WrongKind)?;
    let machine = u16::from_le_bytes([header[18], header[19]]);
    if !header.starts_with(MAGIC)
        || header[4] != CLASS_64
        || header[5] != LITTLE_ENDIAN
        || machine != MACHINE_X86_64
    {
        return Err(ElfError::WrongKind);
    }
    let headers = ElfError::Truncated("headers");
    let entry = u64::from_le_bytes(field(header, 24).ok_or(headers.clone())?);
    let table = u64::from_le_bytes(field(header, 32).ok_or(headers.clone())?);
    let size = u16::from_le_bytes([header[54], header[55]]);
    let count = u16::from_le_bytes([header[56], header[57]]);
    if size != 56 {
        return Err(headers);
    }
    if count == 0 || count > MAX_SEGMENTS {
        return Err(ElfError::Segments(count));
    }

    let mut pvh_entry = None;
    let mut entered = false;
    let mut memory_end = 0;
    for index in 0..u64::from(count) {
        let at = table.checked_add(index * 56).and_then(|at| usize::try_from(at).ok());
        let segment = read_segment(elf, at.ok_or(headers.clone())?)?;
        match segment.kind {
            SEGMENT_LOAD => {
                let end = segment.physical.checked_add(segment.memory);
                memory_end = memory_end.max(end.ok_or(ElfError::Truncated("segments"))?);
                // The entry is given as a physical or as a virtual address, by kernel version.
                for base in [segment.physical, segment.virtual_] {
                    entered |= entry >= base && entry - base < segment.bytes.len() as u64;
                }
            }
            SEGMENT_NOTE => pvh_entry = pvh_entry.or(find_pvh_entry(segment.bytes, segment.align)),
            _ => {}
        }
    }
    if memory_end == 0 || (pvh_entry.is_none() && !entered) {
        return Err(ElfError::NoEntry);
    }
    Ok(ElfFacts { pvh_entry, entry, memory_end })
}

fn read_segment(elf: &[u8], at: usize) -> Result<Segment<'_>, ElfError> {
    let headers = || ElfError::Truncated("headers");
    let bytes = at.checked_add(56).and_then(|end| elf.get(at..end)).ok_or_else(headers)?;
    let word = |at| field(bytes, at).map(u64::from_le_bytes).ok_or_else(headers);
    let kind = u32::from_le_bytes(field(bytes, 0).ok_or_else(headers)?);
    let (offset, size) = (word(8)?, word(32)?);
    let content = match kind {
        SEGMENT_LOAD | SEGMENT_NOTE => {
            let range = offset
                .checked_add(size)
                .and_then(|end| Some(usize::try_from(offset).ok()?..usize::try_from(end).ok()?));
            range.and_then(|range| elf.get(range)).ok_or(ElfError::Truncated("segments"))?
        }
        _ => &[],
    };
    Ok(Segment {
        kind,
        physical: word(24)?,
        virtual_: word(16)?,
        memory: word(40)?,
        align: word(48)?,
        bytes: content,
    })
}

/// Walks the notes of a segment for the PVH entry point.
fn find_pvh_entry(notes: &[u8], align: u64) -> Option<u32> {
    let align = if align == 8 { 8 } else { 4 };
    let padded = |size: u32| (size as usize).checked_next_multiple_of(align);
    let mut at = 0usize;
    loop {
        let name_size = u32::from_le_bytes(field(notes, at)?);
        let size = u32::from_le_bytes(field(notes, at + 4)?);
        let kind = u32::from_le_bytes(field(notes, at + 8)?);
        let name_at = at + 12;
        let value_at = name_at.checked_add(padded(name_size)?)?;
        let name = notes.get(name_at..name_at.checked_add(name_size as usize)?)?;
        if kind == NOTE_PVH_ENTRY && name == b"Xen\0" {
            // Four bytes, or eight of which the upper four are zero.
            return match size {
                4 => field(notes, value_at).map(u32::from_le_bytes),
                8 => u32::try_from(u64::from_le_bytes(field(notes, value_at)?)).ok(),
                _ => None,
            };
        }
        at = value_at.checked_add(padded(size)?)?;
    }
}

/// The bytes of the section called `name`, or `None` when there is none within the file.
#[must_use]
pub fn section<'a>(elf: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    if !elf.starts_with(MAGIC) || *elf.get(4)? != CLASS_64 {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(field(elf, 40)?)).ok()?;
    let size = usize::from(u16::from_le_bytes(field(elf, 58)?));
    let count = usize::from(u16::from_le_bytes(field(elf, 60)?));
    let names_index = usize::from(u16::from_le_bytes(field(elf, 62)?));
    if size != 64 {
        return None;
    }
    let header = |index: usize| table.checked_add(index * 64);
    let content = |at: usize| {
        let offset = usize::try_from(u64::from_le_bytes(field(elf, at.checked_add(24)?)?)).ok()?;
        let length = usize::try_from(u64::from_le_bytes(field(elf, at.checked_add(32)?)?)).ok()?;
        elf.get(offset..offset.checked_add(length)?)
    };
    let names = content(header(names_index)?)?;
    for index in 0..count {
        let at = header(index)?;
        let start = u32::from_le_bytes(field(elf, at)?) as usize;
        let rest = names.get(start..)?;
        if rest.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0)) {
            return content(at);
        }
    }
    None
}

/// Whether `elf` is a 64-bit x86 program that needs no dynamic linker.
#[must_use]
pub fn is_static_program(elf: &[u8]) -> bool {
    const SEGMENT_INTERPRETER: u32 = 3;
    let Some(header) = elf.get(..64) else { return false };
    let machine = u16::from_le_bytes([header[18], header[19]]);
    if !header.starts_with(MAGIC) || header[4] != CLASS_64 || machine != MACHINE_X86_64 {
        return false;
    }
    let count = u16::from_le_bytes([header[56], header[57]]);
    let Some(table) = field(header, 32).map(u64::from_le_bytes) else { return false };
    (0..u64::from(count)).all(|index| {
        let at = table.checked_add(index * 56).and_then(|at| usize::try_from(at).ok());
        let kind = at.and_then(|at| field(elf, at)).map(u32::from_le_bytes);
        kind.is_some_and(|kind| kind != SEGMENT_INTERPRETER)
    })
}
