//! No bytes make the state reader panic, and what it accepts it writes again unchanged.

use parbake_vmm::snapshot::format::{Section, decode, encode};
use parbake_vmm::snapshot::state::MachineState;
use proptest::prelude::*;

fn section() -> impl Strategy<Value = Section> {
    (
        prop_oneof![
            "[a-z-]{0,12}",
            prop::sample::select(vec![
                "shape",
                "contract",
                "vcpu",
                "irqchip",
                "clock",
                "serial",
                "virtio-mmio",
            ])
            .prop_map(str::to_owned),
        ],
        0u32..3,
        any::<bool>(),
        prop::collection::vec(any::<u8>(), 0..600),
    )
        .prop_map(|(kind, version, mandatory, payload)| Section {
            kind,
            version,
            mandatory,
            payload,
        })
}

proptest! {
    #[test]
    fn sections_survive_a_round_trip(sections in prop::collection::vec(section(), 0..8)) {
        let file = encode(&sections);
        prop_assert_eq!(decode(&file).expect("own encoding"), sections);
    }

    #[test]
    fn any_bytes_are_an_error_at_worst(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        prop_assert!(MachineState::decode(&bytes).is_err());
    }

    /// With a valid checksum, everything behind it is reached.
    #[test]
    fn any_sections_are_an_error_at_worst(sections in prop::collection::vec(section(), 0..12)) {
        prop_assert!(MachineState::decode(&encode(&sections)).is_err());
    }

    /// A header that lies about lengths, with its checksum made right again.
    #[test]
    fn lying_lengths_are_an_error_at_worst(
        sections in prop::collection::vec(section(), 1..4),
        at in 8usize..400,
        byte in any::<u8>(),
    ) {
        let mut file = encode(&sections);
        let at = at % file.len();
        file[at] = byte;
        let sum = crc32c::crc32c_append(crc32c::crc32c(&file[..36]), &file[40..]);
        file[36..40].copy_from_slice(&sum.to_le_bytes());
        let _ = MachineState::decode(&file);
    }

    #[test]
    fn every_flipped_bit_is_noticed(
        sections in prop::collection::vec(section(), 1..4),
        at in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let mut file = encode(&sections);
        let at = at.index(file.len());
        file[at] ^= 1 << bit;
        prop_assert!(decode(&file).is_err());
    }
}
