//! The crc32c of `metadata_csum`: as in ext4, without the usual final inversion, so that one
//! checksum is the next one's seed.

/// A running checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum(u32);

impl Checksum {
    /// The state that superblock checksums begin with.
    pub const START: Self = Self(!0);

    /// The seed of all other checksums of a file system.
    pub fn of_uuid(uuid: &[u8; 16]) -> Self {
        Self::START.with(uuid)
    }

    /// The seed of everything that belongs to an inode: itself, its directory blocks and extent
    /// blocks. The generation is always 0 here.
    pub fn of_inode(self, number: u32) -> Self {
        self.with(&number.to_le_bytes()).with(&[0; 4])
    }

    /// Continues over `bytes`.
    #[must_use]
    pub fn with(self, bytes: &[u8]) -> Self {
        Self(!crc32c::crc32c_append(!self.0, bytes))
    }

    /// The value to store.
    pub fn value(self) -> u32 {
        self.0
    }

    /// The value as the two halves that some structures keep apart.
    pub fn halves(self) -> (u16, u16) {
        ((self.0 & 0xffff) as u16, (self.0 >> 16) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_published_check_value_and_chains() {
        // crc32c("123456789") is e3069283; ext4 leaves the final inversion out.
        let whole = Checksum::START.with(b"123456789");
        assert_eq!(whole.value(), !0xe306_9283);
        assert_eq!(Checksum::START.with(b"1234").with(b"56789"), whole);
        assert_eq!(whole.halves(), (0x6d7c, 0x1cf9));
    }
}
