//! Why a build failed.

use crate::format::FormatError;
use crate::format::erofs::write::EncodeError;
use crate::origin::OriginError;
use crate::source::content::ContentError;
use crate::store::layer::LayerError;
use crate::store::lease::HoldError;

/// Why a build failed. Nothing was published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// An option out of bounds.
    #[error("{option} is {found}: expected {expected}")]
    Option {
        /// Which option.
        option: &'static str,
        /// Its bounds.
        expected: &'static str,
        /// The value.
        found: u64,
    },
    /// A file could not be read, or changed.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// The source changed while it was read.
    #[error(transparent)]
    Source(#[from] crate::source::SourceError),
    /// The tree cannot be stored.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The origin failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// A dictionary or another layer on the origin could not be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A collection is removing what the layer needs.
    #[error(transparent)]
    Hold(#[from] HoldError),
    /// Something went away while it was published: removed by hand, or by a collector that was told to ignore leases.
    #[error(
        "`{}` went away from origin `{origin}` while the layer was published; no tag was written; build again",
        .objects.join("`, `")
    )]
    Vanished {
        /// The origin.
        origin: String,
        /// What went away.
        objects: Vec<String>,
    },
    /// A chunk table of a dictionary is damaged.
    #[error("dictionary `{layer}`: {source}")]
    Dictionary {
        /// The dictionary's layer.
        layer: String,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
    /// The tree needs more segments than a layer can have.
    #[error(
        "the tree needs {found} segments of 4 MiB, a layer can have 65535; split it into several layers"
    )]
    TooManySegments {
        /// How many it needs.
        found: usize,
    },
    /// No reader would accept the result.
    #[error(
        "the layer would be larger than readers accept: {0}; nothing was published; split the tree into several layers, or drop labels"
    )]
    Unreadable(#[source] FormatError),
    /// A staging file could not be written.
    #[error("cannot write staging file `{path}`: {source}")]
    Staging {
        /// The file.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// What was built does not read back as the source: a damaged dictionary, or a defect of this program, the memory or a
    /// disk.
    #[error(
        "the built image does not read back right: {what}: {found}; nothing was published; check the layers given with `--dict` (`dsec verify`), and report this if they are all right"
    )]
    ReadBack {
        /// Which part.
        what: String,
        /// How it differs.
        found: String,
    },
}
