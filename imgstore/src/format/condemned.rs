//! The collector's announcement: what is about to be removed, and until when. See `docs/format.md`.

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::manifest::FORMAT;

/// Largest record a reader accepts, in bytes.
pub const CONDEMNED_BYTES_MAX: u64 = 16 << 20;
/// Most objects of one record: its bytes stay well below the limit.
pub const CONDEMNED_OBJECTS_MAX: usize = 50_000;

/// Longest time a record can hold. One that cannot be read counts as that long, and as naming everything.
pub const CONDEMNED_SECONDS_MAX: u64 = 3600;

/// What a collector is about to remove. It holds for `seconds` from when the object was written, by the origin's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condemned {
    /// [`FORMAT`].
    pub format: u32,
    /// Who collects, for people.
    pub holder: String,
    /// Names of the objects. Empty while the collector still looks.
    pub objects: Vec<String>,
    /// The process that collects.
    pub process: String,
    /// How long the record holds after it was written.
    pub seconds: u64,
}

impl Condemned {
    /// The bytes to store.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record has only strings and integers")
    }

    /// Parses a record.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let record: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("gc record", "JSON of format version 1", e))?;
        if record.format != FORMAT {
            return Err(FormatError::new(
                "gc record field `format`",
                "1",
                record.format,
            ));
        }
        if record.seconds > CONDEMNED_SECONDS_MAX {
            return Err(FormatError::new(
                "gc record field `seconds`",
                format!("at most {CONDEMNED_SECONDS_MAX}"),
                record.seconds,
            ));
        }
        Ok(record)
    }
}
