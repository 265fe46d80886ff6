//! Disks made of OverlayBD layers: read-only ones below, at most one writable one on top.
//!
//! [`layer`] opens a file, whatever it is wrapped in; [`zfile`] decompresses; [`map`] is what the merged index of a stack
//! answers from; [`stack`] is the disk. Nothing is ever written to a lower layer.

pub mod bytewise;
pub mod committed;
pub mod compare;
pub mod device;
pub mod export;
pub mod folder;
pub mod import;
pub mod inspect;
pub mod layer;
pub mod live;
pub mod live_map;
pub mod map;
pub mod open;
pub mod pair;
pub mod published;
mod recent;
pub mod seal;
pub mod stack;
pub mod state;
pub mod zfile;

use std::io;

use crate::format::FormatError;

/// Why a disk cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// A file is not what it should be.
    #[error("`{file}` is damaged or no OverlayBD layer: {source}")]
    Damaged {
        /// The file's name.
        file: String,
        /// What is wrong and where.
        #[source]
        source: FormatError,
    },
    /// A file could not be read or written.
    #[error("cannot {what} `{file}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file's name.
        file: String,
        /// What the disk said.
        #[source]
        source: io::Error,
    },
    /// Layers that cannot lie on each other.
    #[error("`{upper}` cannot lie on `{lower}`: expected parent {expected}, found {found}")]
    WrongParent {
        /// The layer above.
        upper: String,
        /// The layer below.
        lower: String,
        /// The parent that the upper one names.
        expected: String,
        /// The lower one's own name.
        found: String,
    },
    /// A layer would have more mappings than a sealed one can.
    #[error(
        "`{name}` has {found} separate extents, a sealed layer at most {max}; it stays as it is until more of it is written over"
    )]
    TooManyExtents {
        /// The layer.
        name: String,
        /// Its extents.
        found: u64,
        /// The most.
        max: u64,
    },
    /// A request that no disk can answer.
    #[error("{0}")]
    Invalid(String),
}

impl DiskError {
    fn io(what: &'static str, file: &str) -> impl FnOnce(io::Error) -> Self + use<> {
        let file = file.to_owned();
        move |source| Self::Io { what, file, source }
    }

    fn damaged(file: &str) -> impl FnOnce(FormatError) -> Self + use<> {
        let file = file.to_owned();
        move |source| Self::Damaged { file, source }
    }
}
