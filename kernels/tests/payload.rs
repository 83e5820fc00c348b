//! Kernel images of every compression unpack to the ELF that went in; damaged ones are refused.

mod forge;

use forge::{PACKERS, Packer, bzimage, kernel_elf, pack};
use parbake_kernels::compress::{Compression, DecompressError};
use parbake_kernels::elf::{ElfError, inspect};
use parbake_kernels::payload::{PayloadError, unpack};
use proptest::prelude::*;

const RELEASE: &str = "6.1.0-9-test-amd64";

/// Something like code: calls, repetition and noise, over more than one 8 MiB block.
fn body(size: usize) -> Vec<u8> {
    let mut state = 1u32;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if state >> 28 == 0 { 0xe8 } else { (state >> 24) as u8 & 0x1f }
    });
    noise.take(size).collect()
}

#[test]
fn every_compression_gives_back_the_elf() {
    let elf = kernel_elf(&body(9 << 20), Some(0x100_0850));
    for packer in PACKERS {
        let kernel = unpack(&bzimage(packer, &elf, RELEASE)).unwrap();
        assert!(kernel.elf == elf, "{packer:?} changed the kernel");
        assert_eq!(kernel.release, RELEASE);
        assert_eq!(kernel.facts.pvh_entry, Some(0x100_0850));
        assert_eq!(kernel.facts.memory_end, 0x100_0000 + (9 << 20));
    }
}

#[test]
fn an_unpacked_kernel_is_taken_as_it_is() {
    let elf = kernel_elf(b"Linux version %s\0Linux version 5.4.0 (x) #1", None);
    let kernel = unpack(&elf).unwrap();
    assert_eq!((kernel.elf, kernel.release.as_str()), (elf, "5.4.0"));
}

#[test]
fn a_kernel_without_any_entry_is_refused() {
    let mut elf = kernel_elf(b"body", None);
    elf[24..32].copy_from_slice(&7u64.to_le_bytes());
    assert_eq!(inspect(&elf), Err(ElfError::NoEntry));
    let mut elf = kernel_elf(b"body", Some(0x1000));
    elf[24..32].copy_from_slice(&7u64.to_le_bytes());
    assert_eq!(inspect(&elf).unwrap().pvh_entry, Some(0x1000));
}

#[test]
fn images_that_cannot_be_used_say_why() {
    let elf = kernel_elf(&body(100_000), None);
    let image = bzimage(Packer::Zstd, &elf, RELEASE);
    let start = 1024 + 64;

    assert!(matches!(unpack(b"#!/bin/sh"), Err(PayloadError::NotAKernel)));
    assert!(matches!(unpack(&image[..image.len() / 2]), Err(PayloadError::Truncated { .. })));

    let mut old = image.clone();
    old[0x206] = 7;
    let error = unpack(&{
        old[0x207] = 2;
        old
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "boot protocol 2.07 is too old: 2.08 or newer names its payload");

    for packer in [Packer::Gzip, Packer::Xz] {
        let mut flipped = bzimage(packer, &elf, RELEASE);
        flipped[start + 5000] ^= 1;
        let error = unpack(&flipped).unwrap_err();
        assert!(matches!(error, PayloadError::Payload(DecompressError::Damaged { .. })), "{error}");
    }

    let mut bzip2 = image.clone();
    bzip2[start..start + 4].copy_from_slice(b"BZh9");
    let error = unpack(&bzip2).unwrap_err();
    assert!(
        matches!(error, PayloadError::Payload(DecompressError::Unsupported("bzip2"))),
        "{error}"
    );

    let mut size = image;
    let end = size.len() - 100;
    size[end - 4] ^= 1;
    assert!(matches!(unpack(&size), Err(PayloadError::WrongSize { .. })));
}

#[test]
fn output_is_bounded() {
    for packer in PACKERS {
        let bomb = pack(packer, &vec![0; 32 << 20]);
        let kind = Compression::detect(&bomb).unwrap();
        let error = kind.decompress(&bomb, 1 << 20).unwrap_err();
        assert!(
            matches!(error, DecompressError::TooLarge { limit } if limit == 1 << 20),
            "{error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let _ = unpack(&bytes);
        let _ = inspect(&bytes);
    }

    #[test]
    fn no_damage_makes_it_panic(
        packer in 0usize..4,
        hits in proptest::collection::vec((0usize..6000, any::<u8>()), 1..8),
        cut in 0usize..6000,
    ) {
        let elf = kernel_elf(&body(5000), Some(1));
        let mut image = bzimage(PACKERS[packer], &elf, RELEASE);
        for (at, value) in hits {
            if let Some(byte) = image.get_mut(at) {
                *byte = value;
            }
        }
        image.truncate(image.len().saturating_sub(cut / 4));
        // Whatever still unpacks is a kernel by its own headers.
        if let Ok(kernel) = unpack(&image) {
            prop_assert!(inspect(&kernel.elf).is_ok());
        }
        let mut bare = elf;
        let at = cut % bare.len();
        bare[at] ^= 0xff;
        let _ = inspect(&bare);
    }
}
