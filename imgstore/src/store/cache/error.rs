//! Why something was not kept. What was fetched is served all the same.

use std::io;
use std::path::PathBuf;

use super::lock::LockError;
use crate::ids::Digest;

/// See the head of this file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The cache's folders cannot be used.
    #[error("cannot use `{path}` as cache: {source}")]
    Open {
        /// The folder.
        path: PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// Another process uses the folder.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The folder was written by another version.
    #[error(
        "the cache `{root}` has format {found}, this version knows {known}; use a version that knows it, or another folder, or delete the folder: everything in it but `rw` can be fetched again"
    )]
    Format {
        /// The folder.
        root: PathBuf,
        /// What its marker says.
        found: u64,
        /// What is known here.
        known: u64,
    },
    /// A file could not be written.
    #[error("cannot write `{path}`: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// The disk holds too much that is not ours, or that must stay.
    #[error(
        "cannot cache segment {digest}: `{path}` has {free} bytes free, {reserve} are left to others, and nothing more may be evicted"
    )]
    NoRoom {
        /// The segment.
        digest: Digest,
        /// The cache.
        path: PathBuf,
        /// Free bytes of its file system.
        free: u64,
        /// Bytes the cache does not touch.
        reserve: u64,
    },
    /// The disk is full or failing and left alone for a moment.
    #[error(
        "cannot cache segment {digest}: the disk of `{path}` is {state}; it is tried again in a while"
    )]
    LeftAlone {
        /// The segment.
        digest: Digest,
        /// The cache.
        path: PathBuf,
        /// `full` or `failing`.
        state: &'static str,
    },
    /// A layer cannot be pinned.
    #[error(
        "cannot pin layer {layer}: it takes up to {needed} bytes in the cache, and {pinned} of its limit of {limit} bytes are pinned or described by mounted layers already; unpin something or use a larger `--cache-size`"
    )]
    PinTooLarge {
        /// The layer.
        layer: Digest,
        /// Bytes that it can take.
        needed: u64,
        /// Bytes that others are sure of.
        pinned: u64,
        /// The limit.
        limit: u64,
    },
    /// There are too many pins.
    #[error(
        "cannot pin layer {layer}: there are {count} pinned layers, which is the most; unpin one"
    )]
    TooManyPins {
        /// The layer.
        layer: Digest,
        /// Pinned layers.
        count: usize,
    },
}
