//! Where an origin has segments, whichever layer put them there: its placements, listed and read.
//!
//! A placement only claims; whoever refers to a place reads it first (`runs`).

use std::collections::{HashMap, HashSet};

use super::layer::{self, LayerError};
use super::runs::Place;
use crate::format::manifest::{FORMAT, Manifest};
use crate::format::names;
use crate::format::placement::{Placement, Spot};
use crate::ids::Digest;
use crate::origin::{Origin, OriginError};

/// Segment digest to the places where it should be, first choice first.
pub(crate) type Places = HashMap<Digest, Vec<Place>>;

/// Adds the places of one layer's segments that are `wanted`.
pub(crate) fn add(places: &mut Places, layer: &layer::Layer, wanted: &HashSet<Digest>) {
    for (index, segment) in layer.manifest.segments.iter().enumerate() {
        let digest = segment.digest();
        let Some((pack, range)) = layer.placement.find(index) else {
            continue;
        };
        let place = Place { pack: *pack, range };
        if wanted.contains(&digest) {
            let known = places.entry(digest).or_default();
            if !known.contains(&place) {
                known.push(place);
            }
        }
    }
}

/// The layer whose manifest or placement has this name.
pub(crate) fn layer_of(object: &str) -> Option<Digest> {
    let name = object.rsplit('/').next()?;
    name.strip_suffix(".json")?.parse().ok()
}

/// All layers on `origin` that have a placement; `None` where the origin cannot list.
///
/// # Errors
/// When the origin fails.
pub(crate) fn placed_layers(origin: &dyn Origin) -> Result<Option<Vec<Digest>>, OriginError> {
    match origin.list(names::PLACEMENTS) {
        Ok(objects) => Ok(Some(objects.iter().filter_map(|o| layer_of(o)).collect())),
        Err(OriginError::Unsupported { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Loads a layer for what it says about places; one that is damaged says nothing.
///
/// # Errors
/// When the origin fails.
pub(crate) fn open_if_right(
    origin: &dyn Origin,
    digest: &Digest,
) -> Result<Option<layer::Layer>, OriginError> {
    match layer::open(origin, digest) {
        Ok(layer) => Ok(Some(layer)),
        Err(LayerError::Origin(
            e @ (OriginError::Unavailable { .. }
            | OriginError::Busy { .. }
            | OriginError::Denied { .. }),
        )) => Err(e),
        // `dsec fsck` tells of placements without a manifest.
        Err(LayerError::NoLayer { .. } | LayerError::Origin(OriginError::NotFound { .. })) => {
            Ok(None)
        }
        Err(error) => {
            tracing::warn!(layer = %digest, %error, "layer is left out");
            Ok(None)
        }
    }
}

/// The places of `wanted` segments on `origin`. Where it cannot list, only `layers` are asked.
///
/// # Errors
/// When the origin fails.
pub(crate) fn find(
    origin: &dyn Origin,
    layers: &[Digest],
    wanted: &HashSet<Digest>,
) -> Result<Places, OriginError> {
    let mut places = Places::new();
    let mut all = layers.to_vec();
    all.extend(placed_layers(origin)?.unwrap_or_default());
    let mut seen = HashSet::new();
    for digest in all {
        if seen.insert(digest)
            && let Some(layer) = open_if_right(origin, &digest)?
        {
            add(&mut places, &layer, wanted);
        }
    }
    Ok(places)
}

/// The placement of a layer whose segments are at `spots`; `None` when one has none.
pub(crate) fn placement(
    layer: &Digest,
    manifest: &Manifest,
    spots: &HashMap<Digest, Place>,
) -> Option<Placement> {
    let mut packs = Vec::new();
    let mut index: HashMap<Digest, u32> = HashMap::new();
    let mut segments = Vec::with_capacity(manifest.segments.len());
    for segment in &manifest.segments {
        let Place { pack, range } = *spots.get(&segment.digest())?;
        let next = u32::try_from(packs.len()).ok()?;
        let pack_index = *index.entry(pack.digest).or_insert_with(|| {
            packs.push(pack);
            next
        });
        let len = u32::try_from(range.len).ok()?;
        segments.push(Spot(pack_index, range.start, len));
    }
    Some(Placement {
        format: FORMAT,
        layer: *layer,
        packs,
        segments,
    })
}

/// Whether a placement says the same as another, whatever the order of its packs.
pub(crate) fn same(a: &Placement, b: &Placement) -> bool {
    a.segments.len() == b.segments.len()
        && (0..a.segments.len()).all(|index| a.find(index) == b.find(index))
}
