//! What is written to an origin, byte for byte. Pure: bytes in, values out; no I/O. See `docs/format.md`.

pub mod bundle;
pub mod chunk_table;
pub mod condemned;
pub mod erofs;
pub mod flat;
pub mod frame;
pub mod lease;
pub mod manifest;
pub mod names;
pub mod overlaybd;
pub mod placement;
pub mod tag;
pub mod trace;

/// Why bytes are not what they should be. The caller adds which object they came from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {expected}, found {found}")]
pub struct FormatError {
    /// The part that is wrong, with its offset where it has one.
    pub what: String,
    /// What a right value looks like.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl FormatError {
    /// An error about one part.
    pub fn new(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self {
            what: what.into(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }
}
