//! `ROOT/cache.json`: which format a cache folder has, so that no version reads another's with a new meaning.
//!
//! ```text
//! <seal: digest of the line below>
//! {"format":1,"kind":"dsec-cache"}
//! ```
//! The rule, for every version there will be:
//! - the same format: used;
//! - another one, newer or older: refused, unless this version has a conversion written for it (none is needed yet);
//! - no marker: a folder of the time before there were markers, or a new one; its frames have the same names and meaning as
//!   in format 1, so it becomes one of format 1;
//! - a marker whose seal is wrong is damage and no format: as no marker. That is safe whatever it said, because everything in
//!   the folder is checked against its digest when it is used.
//!
//! It is synced before it gets its name: after a power cut there is the whole marker or none.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::disk::CacheDisk;
use super::error::CacheError;
use super::{kept, names};

/// The format written here.
pub const FORMAT: u64 = 1;
/// What the folder says it is.
const KIND: &str = "dsec-cache";
/// Longest marker that is read.
const MARKER_BYTES_MAX: u64 = 4096;

#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    format: u64,
    kind: String,
}

/// The bytes of a marker.
pub fn bytes(format: u64) -> Vec<u8> {
    let marker = Marker {
        format,
        kind: KIND.to_owned(),
    };
    let mut line = serde_json::to_vec(&marker).expect("a number and a word are JSON");
    line.push(b'\n');
    kept::seal(&line)
}

/// What a folder's marker says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Format 1.
    Ours,
    /// None, or damage.
    None,
}

/// Reads the marker.
///
/// # Errors
/// [`CacheError::Format`] for a format that this version must not touch.
pub(super) fn read(disk: &dyn CacheDisk, root: &Path) -> Result<Found, CacheError> {
    let path = root.join(names::MARKER);
    let sealed = disk
        .read(&path, MARKER_BYTES_MAX)
        .map_err(|source| CacheError::Open {
            path: path.clone(),
            source,
        })?;
    let Some(sealed) = sealed else {
        return Ok(Found::None);
    };
    match kept::unseal(&sealed, "digest of the marker") {
        Ok(line) => {
            let parsed: Result<Marker, _> = serde_json::from_slice(line);
            match parsed {
                Ok(marker) if marker.format == FORMAT && marker.kind == KIND => Ok(Found::Ours),
                // 0 never was a format: it stands for a marker that is whole and that we cannot read.
                other => Err(CacheError::Format {
                    root: root.to_owned(),
                    found: other.map_or(0, |marker| marker.format),
                    known: FORMAT,
                }),
            }
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the marker of the cache is damaged; writing it again");
            Ok(Found::None)
        }
    }
}

/// Writes a small file so that it is whole or not there, whatever happens.
pub(super) fn replace(
    disk: &dyn CacheDisk,
    tmp: &Path,
    path: &Path,
    bytes: &[u8],
) -> io::Result<()> {
    disk.create(tmp, bytes)?;
    disk.sync(tmp)?;
    disk.rename(tmp, path)?;
    path.parent().map_or(Ok(()), |folder| disk.sync(folder))
}
