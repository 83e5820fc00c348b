//! The page map: which pages of which runs an image is put together from.
//!
//! An image's index says what it *is*; its page map says how to get it out of an artifact's packs.
//! Pages that occur more than once (a file in the root filesystem and again in the guest's page
//! cache, memory that two bakes share) are carried once and mapped many times. Pages not mapped
//! are zero.
//!
//! # Encoding (version 1, little endian, before compression)
//! | size | field |
//! | --- | --- |
//! | 12 | `pbpgmap\n`, version 1, feature bits 0 |
//! | 8 | image size in bytes |
//! | 4 | number of extents |
//! | per extent: 4 | first page in the image |
//! | 4 | number of pages |
//! | 2 | pack, counted in the artifact's list |
//! | 2 | first page in the run |
//! | 4 | frame in the pack |
//!
//! Extents are ascending and do not overlap; each lies in one run.

use crate::format::{FormatError, Kind};
use crate::index::MAX_IMAGE_BYTES;
use crate::pack::{MAX_RUN_PAGES, PAGE};

/// The largest decoded map.
pub const MAX_MAP_BYTES: u64 = 256 * 1024 * 1024;

const KIND: Kind = Kind { name: "page map", magic: *b"pbpgmap\n", version: 1 };
const EXTENT: usize = 16;

/// Consecutive pages of an image that are consecutive pages of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First page in the image.
    pub page: u32,
    /// Number of pages.
    pub count: u32,
    /// Which pack of the artifact's list.
    pub pack: u16,
    /// Which frame of the pack.
    pub frame: u32,
    /// First page in the run.
    pub first: u16,
}

/// Where an image's pages are. Its invariants hold from construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageMap {
    image_size: u64,
    extents: Vec<Extent>,
}

impl PageMap {
    /// Makes a map from ascending extents.
    ///
    /// # Errors
    /// When they overlap or lie outside the image or a run.
    pub fn new(image_size: u64, extents: Vec<Extent>) -> Result<Self, FormatError> {
        let bounds = |field, value| FormatError::Bounds { kind: KIND.name, field, value };
        if image_size > MAX_IMAGE_BYTES {
            return Err(bounds("image size", image_size));
        }
        let pages = image_size.div_ceil(PAGE as u64);
        let mut end = 0;
        for extent in &extents {
            if u64::from(extent.page) < end {
                return Err(bounds("first page", extent.page.into()));
            }
            end = u64::from(extent.page) + u64::from(extent.count);
            if extent.count == 0 || end > pages {
                return Err(bounds("page count", extent.count.into()));
            }
            if u64::from(extent.first) + u64::from(extent.count) > u64::from(MAX_RUN_PAGES) {
                return Err(bounds("page in the run", extent.first.into()));
            }
        }
        Ok(Self { image_size, extents })
    }

    /// Logical size of the image in bytes.
    #[must_use]
    pub fn image_size(&self) -> u64 {
        self.image_size
    }

    /// The extents, ascending.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The one encoding of this map.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = KIND.header();
        bytes.reserve(12 + EXTENT * self.extents.len());
        bytes.extend(self.image_size.to_le_bytes());
        bytes.extend((self.extents.len() as u32).to_le_bytes());
        for extent in &self.extents {
            bytes.extend(extent.page.to_le_bytes());
            bytes.extend(extent.count.to_le_bytes());
            bytes.extend(extent.pack.to_le_bytes());
            bytes.extend(extent.first.to_le_bytes());
            bytes.extend(extent.frame.to_le_bytes());
        }
        bytes
    }

    /// Reads a map whose checksum has been seen to.
    ///
    /// # Errors
    /// When the bytes are not a map this program can use.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut fields = KIND.open(bytes)?;
        let image_size = fields.u64()?;
        let count = fields.count(EXTENT)?;
        let mut extents = Vec::with_capacity(count);
        for _ in 0..count {
            let (page, count) = (fields.u32()?, fields.u32()?);
            let (pack, first, frame) = (fields.u16()?, fields.u16()?, fields.u32()?);
            extents.push(Extent { page, count, pack, frame, first });
        }
        fields.end()?;
        Self::new(image_size, extents)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn maps_round_trip_and_have_one_encoding(
            steps in prop::collection::vec((0..50u32, 1..20u32, 0..3u16, 0..9u32, 0..200u16), 0..50),
        ) {
            let mut page = 0;
            let extents: Vec<_> = steps
                .into_iter()
                .map(|(gap, count, pack, frame, first)| {
                    let extent = Extent { page: page + gap, count, pack, frame, first };
                    page = extent.page + count;
                    extent
                })
                .collect();
            let map = PageMap::new(u64::from(page) * PAGE as u64, extents).unwrap();
            let bytes = map.encode();
            prop_assert_eq!(PageMap::parse(&bytes).unwrap(), map);
            prop_assert!(PageMap::parse(&bytes[..bytes.len() - 1]).is_err());
        }

        #[test]
        fn any_bytes_are_a_map_or_refused(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            header in any::<bool>(),
        ) {
            if header {
                bytes.splice(0..0, KIND.header());
            }
            if let Ok(map) = PageMap::parse(&bytes) {
                prop_assert_eq!(map.encode(), bytes);
            }
        }
    }

    #[test]
    fn overlapping_and_outlying_extents_are_refused() {
        let extent = |page, count, first| Extent { page, count, pack: 0, frame: 0, first };
        let map = |extents: &[Extent]| PageMap::new(10 * PAGE as u64, extents.to_vec());
        assert!(map(&[extent(0, 5, 0), extent(5, 5, 0)]).is_ok());
        for bad in [
            &[extent(0, 5, 0), extent(4, 1, 0)][..],
            &[extent(5, 6, 0)],
            &[extent(u32::MAX, 1, 0)],
            &[extent(0, 0, 0)],
            &[extent(0, 2, 255)],
        ] {
            assert!(map(bad).is_err(), "{bad:?}");
        }
        let newer = [b"pbpgmap\n\x02\0\0\0".as_slice(), &[0; 12]].concat();
        assert!(matches!(
            PageMap::parse(&newer),
            Err(FormatError::NewerVersion { version: 2, .. })
        ));
        let features = [b"pbpgmap\n\x01\0\x01\0".as_slice(), &[0; 12]].concat();
        assert!(matches!(
            PageMap::parse(&features),
            Err(FormatError::UnknownFeatures { features: 1, .. })
        ));
    }
}
