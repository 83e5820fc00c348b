//! From a layer's blob to its entries: decompression, digests, tar.

pub mod decode;
pub mod stream;
pub mod tar;
