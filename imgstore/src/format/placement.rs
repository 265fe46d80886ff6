//! The placement: which pack and offset holds each segment of a layer. Free to change without renaming the layer.

use serde::{Deserialize, Serialize};

use super::FormatError;
use super::frame::frame_len_max;
use super::manifest::{FORMAT, Manifest};
use crate::ids::Digest;
use crate::origin::ByteRange;

/// Largest placement a reader accepts, in bytes.
pub const PLACEMENT_BYTES_MAX: u64 = 16 << 20;

/// A pack object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pack {
    /// BLAKE3 of the whole object.
    pub digest: Digest,
    /// Size of the whole object in bytes.
    pub size: u64,
}

/// Where one segment's frame is: (index into `packs`, byte offset, stored bytes). Written as `[pack, offset, len]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot(pub u32, pub u64, pub u32);

/// A layer's placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// [`FORMAT`].
    pub format: u32,
    /// The layer.
    pub layer: Digest,
    /// Packs used.
    pub packs: Vec<Pack>,
    /// One spot per segment, in the manifest's order.
    pub segments: Vec<Spot>,
}

impl Placement {
    /// The bytes to store.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a placement has only strings and integers")
    }

    /// Parses a placement and checks that it fits the layer's manifest.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn parse(bytes: &[u8], layer: &Digest, manifest: &Manifest) -> Result<Self, FormatError> {
        let placement: Self = serde_json::from_slice(bytes)
            .map_err(|e| FormatError::new("placement", "JSON of format version 1", e))?;
        if placement.format != FORMAT {
            return Err(FormatError::new(
                "placement field `format`",
                "1",
                placement.format,
            ));
        }
        if placement.layer != *layer {
            return Err(FormatError::new(
                "placement field `layer`",
                layer.to_hex(),
                placement.layer,
            ));
        }
        if placement.segments.len() != manifest.segments.len() {
            return Err(FormatError::new(
                "segments in placement",
                format!("{} as in the manifest", manifest.segments.len()),
                placement.segments.len(),
            ));
        }
        for (index, segment) in manifest.segments.iter().enumerate() {
            if placement.find(index).is_none() {
                return Err(FormatError::new(
                    format!("spot of segment {index}"),
                    "a listed pack and a range inside it",
                    format!("{:?}", placement.segments.get(index)),
                ));
            }
            // The pack's size comes from here too: only the segment, which the digest vouches for, bounds what is fetched.
            let stored = placement.segments.get(index).map_or(0, |spot| spot.2);
            let stored_max = frame_len_max(segment.len());
            if u64::from(stored) > stored_max {
                return Err(FormatError::new(
                    format!("stored bytes of segment {index}"),
                    format!("at most {stored_max}"),
                    stored,
                ));
            }
        }
        Ok(placement)
    }

    /// The pack and byte range of segment `index`; `None` if there is no such segment or it lies outside its pack.
    pub fn find(&self, index: usize) -> Option<(&Pack, ByteRange)> {
        let Spot(pack, offset, len) = *self.segments.get(index)?;
        let pack = self.packs.get(usize::try_from(pack).ok()?)?;
        let end = offset.checked_add(u64::from(len))?;
        (len > 0 && end <= pack.size).then_some((
            pack,
            ByteRange {
                start: offset,
                len: u64::from(len),
            },
        ))
    }
}
