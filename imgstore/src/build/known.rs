//! Segments that the origin has already, whoever put them there: they are referred to, never stored twice.

use std::collections::HashMap;

use super::error::BuildError;
use crate::format::names;
use crate::format::placement::Pack;
use crate::ids::Digest;
use crate::origin::{ByteRange, Origin, OriginError};
use crate::store::layer;

/// Segment digest to pack and range.
pub type Known = HashMap<Digest, (Pack, ByteRange)>;

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
                known.entry(segment.digest()).or_insert((*pack, range));
            }
        }
    }
    Ok(known)
}

fn is_present(origin: &dyn Origin, pack: &Pack) -> Result<bool, OriginError> {
    match origin.size(&names::pack(&pack.digest)) {
        Ok(size) => Ok(size == pack.size),
        Err(OriginError::NotFound { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}
