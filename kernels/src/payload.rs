//! From a bootable image to the ELF inside: the Linux/x86 boot protocol's setup header says where
//! the compressed kernel lies (kernel documentation, `arch/x86/boot.rst`).
//!
//! The kernel is unpacked when the bundle is made, so no guest ever spends time or memory on it,
//! and its text lies where it was linked in every snapshot.

use crate::compress::{Compression, DecompressError};
use crate::elf::{self, ElfFacts};

/// The largest unpacked kernel accepted, in bytes. Distribution kernels unpack to 50–80 MiB.
pub const MAX_KERNEL: usize = 512 << 20;

/// The first boot protocol whose header has `payload_offset` and `payload_length`.
const PROTOCOL_WITH_PAYLOAD: u16 = 0x0208;

/// An unpacked kernel.
#[derive(Debug)]
pub struct Kernel {
    /// The ELF image.
    pub elf: Vec<u8>,
    /// What its headers say about entering it.
    pub facts: ElfFacts,
    /// `uname -r`.
    pub release: String,
}

/// Why an image is not a kernel this crate can use.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// Neither a bzImage nor an ELF.
    #[error("not a Linux/x86 kernel image (neither a boot sector with \"HdrS\" nor an ELF)")]
    NotAKernel,
    /// A boot protocol from before 2008.
    #[error("boot protocol {major}.{minor:02} is too old: 2.08 or newer names its payload", major = .0 >> 8, minor = .0 & 0xff)]
    OldProtocol(u16),
    /// The header points outside the file.
    #[error("truncated: the payload ends at byte {end}, the file at {size}")]
    Truncated {
        /// Where the payload should end.
        end: u64,
        /// Size of the file.
        size: u64,
    },
    /// The payload could not be decompressed.
    #[error("the kernel's payload: {0}")]
    Payload(#[from] DecompressError),
    /// The unpacked size differs from what the image says.
    #[error("the payload unpacked to {actual} bytes, the image says {expected}")]
    WrongSize {
        /// Bytes unpacked.
        actual: usize,
        /// Bytes the image's trailer names.
        expected: u32,
    },
    /// The ELF cannot be entered.
    #[error("the unpacked kernel: {0}")]
    Elf(#[from] elf::ElfError),
    /// No version string.
    #[error("the kernel does not say its release (no \"Linux version\" in it)")]
    NoRelease,
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// Unpacks `image`, a bzImage or an already unpacked ELF, and checks that it can be entered.
///
/// # Errors
/// Whatever makes the image unusable, by name.
pub fn unpack(image: &[u8]) -> Result<Kernel, PayloadError> {
    let (elf, release) = if image.starts_with(elf::MAGIC) {
        (image.to_vec(), None)
    } else {
        (unpack_bzimage(image)?, header_release(image))
    };
    let facts = elf::inspect(&elf)?;
    let release = release.or_else(|| banner_release(&elf)).ok_or(PayloadError::NoRelease)?;
    Ok(Kernel { elf, facts, release })
}

fn unpack_bzimage(image: &[u8]) -> Result<Vec<u8>, PayloadError> {
    if word16(image, 0x1fe) != Some(0xaa55) || image.get(0x202..0x206) != Some(b"HdrS") {
        return Err(PayloadError::NotAKernel);
    }
    let protocol = word16(image, 0x206).ok_or(PayloadError::NotAKernel)?;
    if protocol < PROTOCOL_WITH_PAYLOAD {
        return Err(PayloadError::OldProtocol(protocol));
    }
    // Zero means four, for reasons of age.
    let sectors = match image[0x1f1] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let offset = word32(image, 0x248).ok_or(PayloadError::NotAKernel)?;
    let length = word32(image, 0x24c).ok_or(PayloadError::NotAKernel)?;
    let start = (sectors + 1) * 512 + u64::from(offset);
    let end = start + u64::from(length);
    let truncated = || PayloadError::Truncated { end, size: image.len() as u64 };
    let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
    let payload = range.and_then(|(start, end)| image.get(start..end)).ok_or_else(truncated)?;

    // The build appends the unpacked size as a little-endian word. gzip ends in the same word
    // itself, so there it is part of the stream.
    let (packed, trailer) =
        payload.split_at_checked(payload.len().saturating_sub(4)).ok_or_else(truncated)?;
    let expected = u32::from_le_bytes(trailer.try_into().map_err(|_| truncated())?);
    let compression = Compression::detect(payload)?;
    let input = if compression == Compression::Gzip { payload } else { packed };
    let elf = compression.decompress(input, MAX_KERNEL)?;
    if elf.len() as u64 != u64::from(expected) {
        return Err(PayloadError::WrongSize { actual: elf.len(), expected });
    }
    Ok(elf)
}

/// Reads the release out of the version string that the setup header points at.
fn header_release(image: &[u8]) -> Option<String> {
    let at = usize::from(word16(image, 0x20e)?);
    if at == 0 {
        return None;
    }
    release_word(image.get(at + 0x200..)?)
}

/// Reads the release out of the kernel's banner.
fn banner_release(elf: &[u8]) -> Option<String> {
    const BANNER: &[u8] = b"Linux version ";
    let mut rest = elf;
    while let Some(at) = find(rest, BANNER) {
        rest = &rest[at + BANNER.len()..];
        // The same words also stand in format strings: "Linux version %s".
        if rest.first().is_some_and(u8::is_ascii_digit) {
            return release_word(rest);
        }
    }
    None
}

/// Takes the first word, if it looks like a release: it becomes part of paths and documents.
fn release_word(bytes: &[u8]) -> Option<String> {
    let word: Vec<u8> =
        bytes.iter().copied().take(65).take_while(|byte| !b" \0\n".contains(byte)).collect();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-+~".contains(byte);
    if word.len() > 64 || !word.first()?.is_ascii_digit() || !word.iter().all(plain) {
        return None;
    }
    String::from_utf8(word).ok()
}

/// Finds the first occurrence of `needle`.
pub(crate) fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    while let Some(at) = haystack.get(from..)?.iter().position(|byte| *byte == first) {
        if haystack[from + at..].starts_with(needle) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}
