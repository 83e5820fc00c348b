//! What can go wrong while an image is flattened.

use std::io;

use crate::layer::decode::DecodeError;
use crate::layer::tar::TarError;

use super::overlay::OverlayError;
use super::path::PathError;
use super::xattr::AclError;

/// Why an image could not be flattened.
#[derive(Debug, thiserror::Error)]
pub enum FlattenError {
    /// A layer's blob cannot be opened or read.
    #[error("{layer}: cannot read its blob: {source}")]
    Blob {
        /// The layer.
        layer: String,
        /// Why.
        source: io::Error,
    },
    /// A layer's blob cannot be decompressed.
    #[error("{layer}: {source}")]
    Decode {
        /// The layer.
        layer: String,
        /// Why.
        source: DecodeError,
    },
    /// A layer's blob is not as long as the manifest says.
    #[error(
        "{layer}: the blob has {actual} bytes, the manifest says {expected}; the image is damaged or incomplete"
    )]
    BlobSize {
        /// The layer.
        layer: String,
        /// The size it should have.
        expected: u64,
        /// The size it has, or one byte more than it should have.
        actual: u64,
    },
    /// A layer's blob is not what its digest says.
    #[error(
        "{layer}: the blob's digest is {actual}, expected {expected}; the image is damaged or was tampered with"
    )]
    BlobDigest {
        /// The layer.
        layer: String,
        /// The digest it should have.
        expected: String,
        /// The digest it has.
        actual: String,
    },
    /// A layer's tar is not what the configuration says.
    #[error(
        "{layer}: the uncompressed layer's digest is {actual}, the configuration says {expected}; manifest and configuration do not belong together"
    )]
    DiffId {
        /// The layer.
        layer: String,
        /// The digest it should have.
        expected: String,
        /// The digest it has.
        actual: String,
    },
    /// An entry cannot be put into the tree.
    #[error("{layer}: {entry}: {source}")]
    Entry {
        /// The layer.
        layer: String,
        /// The entry's name.
        entry: String,
        /// Why.
        source: Box<EntryProblem>,
    },
    /// Writing file contents failed.
    #[error("cannot write the image: {0}")]
    Write(#[source] io::Error),
    /// The file system of the image is full.
    #[error(
        "no space left for the image: its files alone need {needed} bytes; free some space or write it elsewhere"
    )]
    NoSpace {
        /// Bytes of file contents.
        needed: u64,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// What is wrong with an entry.
#[derive(Debug, thiserror::Error)]
pub enum EntryProblem {
    /// The archive.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// Its name or link target.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Its place in the tree.
    #[error(transparent)]
    Overlay(#[from] OverlayError),
    /// Its access control list.
    #[error(transparent)]
    Acl(#[from] AclError),
    /// A whiteout of nothing or of something that cannot be.
    #[error("a whiteout must name what it hides")]
    EmptyWhiteout,
    /// A directory called like a marker.
    #[error("names beginning with \".wh.\" are markers and cannot hold anything")]
    BelowMarker,
    /// A symbolic link's target that no file system can hold.
    #[error("the symbolic link's target has {length} bytes; it must have 1 to 4095")]
    SymlinkTarget {
        /// Its length.
        length: usize,
    },
    /// A file larger than ext4 can hold.
    #[error("the file has {size} bytes; ext4 files end at 16 TiB")]
    TooLarge {
        /// Its size.
        size: u64,
    },
    /// Something else.
    #[error("more than {limit} {what}; raise the limit if this is meant")]
    Limit {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// Writing the file's contents failed.
    #[error("cannot write the image: {0}")]
    Write(#[source] io::Error),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}
