//! Small kernels, modules and packages that do not exist anywhere, for tests.
#![allow(dead_code)]

/// An ELF64 x86 file with one loaded segment of `body`, entered at its start, and maybe a PVH note.
pub fn kernel_elf(body: &[u8], pvh_entry: Option<u32>) -> Vec<u8> {
    let note: Vec<u8> = match pvh_entry {
        Some(entry) => {
            let mut note = Vec::new();
            for word in [4u32, 4, 18] {
                note.extend(word.to_le_bytes());
            }
            note.extend(b"Xen\0");
            note.extend(entry.to_le_bytes());
            note
        }
        None => Vec::new(),
    };
    let count: u16 = if note.is_empty() { 1 } else { 2 };
    let body_at = 64 + 56 * u64::from(count);
    let note_at = body_at + body.len() as u64;
    let mut elf = header(0x100_0000, 64, count, 0, 0, 0);
    elf.extend(segment(1, body_at, 0x100_0000, body.len() as u64));
    if !note.is_empty() {
        elf.extend(segment(4, note_at, 0, note.len() as u64));
    }
    elf.extend(body);
    elf.extend(note);
    elf
}

fn header(
    entry: u64,
    segments: u64,
    count: u16,
    sections: u64,
    section_count: u16,
    names: u16,
) -> Vec<u8> {
    let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
    elf.resize(16, 0);
    elf.extend(2u16.to_le_bytes());
    elf.extend(62u16.to_le_bytes());
    elf.extend(1u32.to_le_bytes());
    for word in [entry, segments, sections] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    for word in [64u16, 56, count, 64, section_count, names] {
        elf.extend(word.to_le_bytes());
    }
    elf
}

fn segment(kind: u32, offset: u64, physical: u64, size: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(kind.to_le_bytes());
    bytes.extend(5u32.to_le_bytes());
    for word in [offset, physical, physical, size, size, 4] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// A static program, as far as its headers tell.
pub fn static_program() -> Vec<u8> {
    kernel_elf(b"agent", None)
}

/// A program that asks for a dynamic linker.
pub fn dynamic_program() -> Vec<u8> {
    let mut elf = static_program();
    elf[64..68].copy_from_slice(&3u32.to_le_bytes());
    elf
}

/// A module with the given dependencies.
pub fn module(release: &str, depends: &str) -> Vec<u8> {
    let info = format!("license=GPL\0depends={depends}\0vermagic={release} SMP preempt \0");
    let names = b"\0.modinfo\0.shstrtab\0";
    let (info_at, names_at) = (64u64, 64 + info.len() as u64);
    let table = names_at + names.len() as u64;
    let mut elf = header(0, 0, 0, table, 3, 2);
    elf.extend(info.as_bytes());
    elf.extend(names);
    for (name, offset, size) in
        [(0u32, 0, 0), (1, info_at, info.len() as u64), (10, names_at, names.len() as u64)]
    {
        let mut section = name.to_le_bytes().to_vec();
        section.resize(24, 0);
        section.extend(offset.to_le_bytes());
        section.extend(size.to_le_bytes());
        section.resize(64, 0);
        elf.extend(section);
    }
    elf
}

/// The compressions of a payload.
#[derive(Debug, Clone, Copy)]
pub enum Packer {
    Lz4,
    Zstd,
    Gzip,
    Xz,
}

pub const PACKERS: [Packer; 4] = [Packer::Lz4, Packer::Zstd, Packer::Gzip, Packer::Xz];

/// Compresses, as the kernel's build does, without the size word.
pub fn pack(packer: Packer, bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    match packer {
        Packer::Lz4 => {
            let mut out = 0x184c_2102u32.to_le_bytes().to_vec();
            for block in bytes.chunks(8 << 20) {
                let packed = lz4_flex::block::compress(block);
                out.extend(u32::try_from(packed.len()).unwrap().to_le_bytes());
                out.extend(packed);
            }
            out
        }
        Packer::Zstd => zstd::encode_all(bytes, 3).unwrap(),
        Packer::Gzip => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Packer::Xz => {
            // Kernels for x86 are packed behind the branch filter.
            let mut options = lzma_rust2::XzOptions::with_preset(1);
            options.prepend_pre_filter(lzma_rust2::filter::FilterType::BcjX86, 0);
            let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            writer.write_all(bytes).unwrap();
            writer.finish().unwrap()
        }
    }
}

/// A bzImage around `elf`.
pub fn bzimage(packer: Packer, elf: &[u8], release: &str) -> Vec<u8> {
    let mut payload = pack(packer, elf);
    if !matches!(packer, Packer::Gzip) {
        payload.extend(u32::try_from(elf.len()).unwrap().to_le_bytes());
    }
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&0xaa55u16.to_le_bytes());
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
    image[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&64u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    let banner = format!("{release} (someone@somewhere) #1 SMP\0");
    image[0x300..0x300 + banner.len()].copy_from_slice(banner.as_bytes());
    image.extend([0; 64]);
    image.extend(payload);
    image.extend([0x90; 100]);
    image
}
