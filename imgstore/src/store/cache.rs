//! The cache on disk: stored frames of segments as they came from the origin, and descriptions of layers. `cache/names` lists
//! the files.
//!
//! **The digest is the state.** Nothing here is trusted: whoever loads a frame decodes the whole segment and compares its
//! BLAKE3 before one byte is used. So a file may be torn, stale, cut off or foreign after a crash: it is a mismatch, and the
//! segment is fetched again. That is why frames are not synced, why there is no index on disk, and why a file may be
//! unlinked while somebody reads it: an open file keeps its bytes.
//!
//! Two processes share the folder: the data plane only reads ([`SegmentFiles`]), the control process writes, counts and
//! evicts ([`SegmentCache`]) and holds the [`lock`]. It is bounded by what `ledger` counts, `writer` makes room, `scan` counts what
//! earlier runs left, `health` leaves a full or failing disk alone, `layers` and `pins` say what must stay, `fsck` checks a folder
//! that nobody uses, and `disk` is the seam below all of it.

pub mod disk;
mod error;
mod files;
pub mod fsck;
pub mod health;
pub mod kept;
mod layers;
mod ledger;
pub mod lock;
pub mod marker;
pub mod names;
pub mod pins;
mod scan;
mod settings;
mod writer;

pub use error::CacheError;
pub use files::SegmentFiles;
pub use layers::{DescribedLayer, LayerHold};
pub use ledger::Usage;
pub use settings::{CacheDeeds, CacheSettings, Kept};
pub use writer::SegmentCache;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod trouble_tests;
