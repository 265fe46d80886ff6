//! Segments that the origin has already, whoever put them there: they are referred to, never stored twice.
//!
//! A placement only claims where a segment is. Before a build refers to a place, [`find`] reads it: a segment whose bytes
//! are damaged counts as one that the origin does not have, so that building again repairs what it can.

use std::collections::HashMap;

use super::error::BuildError;
use crate::format::manifest::Segment;
use crate::format::placement::Pack;
use crate::format::{frame, names};
use crate::ids::Digest;
use crate::origin::{ByteRange, Origin, OriginError};
use crate::store::layer::{self, LayerError};

/// Segment digest to the packs and ranges where it should be, first choice first.
pub type Known = HashMap<Digest, Vec<(Pack, ByteRange)>>;

/// The first place of `segment` on the origin that holds its bytes.
pub fn find(origin: &dyn Origin, known: &Known, segment: Segment) -> Option<(Pack, ByteRange)> {
    let places = known.get(&segment.digest())?;
    let right = |(pack, range): &&(Pack, ByteRange)| {
        let checked = read(origin, segment, pack, *range);
        if let Err(error) = &checked {
            let (segment, pack) = (segment.digest(), pack.digest);
            tracing::warn!(%segment, %pack, offset = range.start, error, "damaged segment is stored anew");
        }
        checked.is_ok()
    };
    places.iter().find(right).copied()
}

fn read(
    origin: &dyn Origin,
    segment: Segment,
    pack: &Pack,
    range: ByteRange,
) -> Result<(), String> {
    let stored = origin
        .fetch_of(&names::pack(&pack.digest), pack.size, range)
        .map_err(|e| e.to_string())?;
    let plain = frame::decode(&stored, segment.len()).map_err(|e| e.to_string())?;
    let found = Digest::of(&plain);
    if found == segment.digest() {
        Ok(())
    } else {
        Err(format!("digest of its plain bytes: found {found}"))
    }
}

fn layer_of(object: &str) -> Option<Digest> {
    object
        .rsplit('/')
        .next()?
        .strip_suffix(".json")?
        .parse()
        .ok()
}

/// Reads the placements of all layers on the origin. A pack counts only if it is there with its size; a layer that cannot
/// be read is left out with a warning, which costs space and nothing else.
///
/// # Errors
/// When the origin cannot be listed.
pub fn load(origin: &dyn Origin) -> Result<Known, BuildError> {
    let mut known = Known::new();
    let mut packs: HashMap<Digest, bool> = HashMap::new();
    for object in origin.list(names::PLACEMENTS)? {
        let Some(digest) = layer_of(&object) else {
            continue;
        };
        let layer = match layer::open(origin, &digest) {
            Ok(layer) => layer,
            // It is being collected: the manifest goes first.
            Err(LayerError::NoLayer { .. }) => continue,
            Err(error) => {
                tracing::warn!(layer = %digest, %error, "layer left out of deduplication");
                continue;
            }
        };
        for (index, segment) in layer.manifest.segments.iter().enumerate() {
            let Some((pack, range)) = layer.placement.find(index) else {
                continue;
            };
            let present = match packs.get(&pack.digest) {
                Some(present) => *present,
                None => {
                    let present = is_present(origin, pack)?;
                    packs.insert(pack.digest, present);
                    present
                }
            };
            if present {
                let places = known.entry(segment.digest()).or_default();
                if !places.contains(&(*pack, range)) {
                    places.push((*pack, range));
                }
            }
        }
    }
    Ok(known)
}

/// Whether the pack is on the origin, with its size.
pub(crate) fn is_present(origin: &dyn Origin, pack: &Pack) -> Result<bool, OriginError> {
    match origin.size(&names::pack(&pack.digest)) {
        Ok(size) => Ok(size == pack.size),
        Err(OriginError::NotFound { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}
