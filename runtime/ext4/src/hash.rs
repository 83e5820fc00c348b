//! The hash that orders an indexed directory: half MD4 over the name's bytes taken as signed,
//! which the superblock's flag records.

/// A name's place in an indexed directory; ordered as the directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct NameHash {
    /// The index's key; its lowest bit is always 0.
    pub major: u32,
    /// Orders names of equal `major`.
    pub minor: u32,
}

/// The largest key is the kernel's end-of-directory mark and is never given to a name.
const END_OF_DIRECTORY: u32 = 0x7fff_ffff << 1;
/// MD4's own start, used where the seed is all zero.
const START: [u32; 4] = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];

/// Hashes a name with the file system's seed.
pub fn hash(name: &[u8], seed: &[u8; 16]) -> NameHash {
    let mut state = START;
    if seed.iter().any(|&byte| byte != 0) {
        for (word, bytes) in state.iter_mut().zip(seed.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
    }
    let mut rest = name;
    while !rest.is_empty() {
        transform(&mut state, &words(rest));
        rest = rest.get(32..).unwrap_or(&[]);
    }
    let mut major = state[1] & !1;
    if major == END_OF_DIRECTORY {
        major = END_OF_DIRECTORY - 2;
    }
    NameHash { major, minor: state[2] }
}

/// The next 32 bytes as eight words; what is missing is filled with the remaining length.
fn words(rest: &[u8]) -> [u32; 8] {
    // A name has at most 255 bytes.
    let length = (rest.len() & 0xff) as u32;
    let padding = length * 0x0101_0101;
    let mut words = [padding; 8];
    let piece = &rest[..rest.len().min(32)];
    for (word, bytes) in words.iter_mut().zip(piece.chunks(4)) {
        for &byte in bytes {
            let signed = i32::from(byte.cast_signed()).cast_unsigned();
            *word = signed.wrapping_add(*word << 8);
        }
    }
    words
}

/// MD4's three rounds, cut to eight steps each.
fn transform(state: &mut [u32; 4], input: &[u32; 8]) {
    const ROUND_2: u32 = 0x5a82_7999;
    const ROUND_3: u32 = 0x6ed9_eba1;
    let choose = |x: u32, y: u32, z: u32| z ^ (x & (y ^ z));
    let majority = |x: u32, y: u32, z: u32| (x & y).wrapping_add((x ^ y) & z);
    let parity = |x: u32, y: u32, z: u32| x ^ y ^ z;

    let mut s = *state;
    let mut round =
        |mix: &dyn Fn(u32, u32, u32) -> u32, constant: u32, order: [usize; 8], shifts: [u32; 4]| {
            for (step, &index) in order.iter().enumerate() {
                // The target moves a, d, c, b, a, ...
                let a = (4 - step % 4) % 4;
                let (b, c, d) = ((a + 1) % 4, (a + 2) % 4, (a + 3) % 4);
                s[a] = s[a]
                    .wrapping_add(mix(s[b], s[c], s[d]))
                    .wrapping_add(input[index])
                    .wrapping_add(constant)
                    .rotate_left(shifts[step % 4]);
            }
        };
    round(&choose, 0, [0, 1, 2, 3, 4, 5, 6, 7], [3, 7, 11, 19]);
    round(&majority, ROUND_2, [1, 3, 5, 7, 0, 2, 4, 6], [3, 5, 9, 13]);
    round(&parity, ROUND_3, [3, 7, 2, 6, 1, 5, 0, 4], [3, 9, 11, 15]);
    for (word, add) in state.iter_mut().zip(s) {
        *word = word.wrapping_add(add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What debugfs's `dx_hash -h half_md4` says.
    #[test]
    fn agrees_with_debugfs() {
        let seed: [u8; 16] = std::array::from_fn(|i| i as u8 + 1);
        let long = b"a-name-that-is-longer-than-thirty-two-bytes-and-then-some";
        for (name, seed, major, minor) in [
            (&b"hello"[..], &[0; 16], 0x1746_da32, 0x4200_13b5),
            (long, &seed, 0x20af_04c0, 0xa1a2_e4a5),
            (b"caf\xe9", &seed, 0x68a2_d4fe, 0xcd88_a4e8),
            (b"twelve-bytes", &seed, 0x4918_8d78, 0xd3dc_2e1a),
        ] {
            assert_eq!(hash(name, seed), NameHash { major, minor }, "{name:?}");
        }
    }
}
