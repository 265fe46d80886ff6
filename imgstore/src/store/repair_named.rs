//! What a repair is asked to mend: the layer that a reference names, where the tag itself may be what is damaged.

use super::layer::{self, LayerError};
use super::repair::RepairError;
use super::runs::or_damaged;
use crate::format::names;
use crate::format::tag::TAG_BYTES_MAX;
use crate::ids::{Digest, LayerRef, TagName};
use crate::origin::{Origin, OriginError};

/// A tag object that must be written, because the origin's is missing or damaged.
pub(super) type LostTag = Option<(TagName, Vec<u8>)>;

/// What a reference names.
pub(super) struct Named {
    pub(super) digest: Digest,
    /// Whether the tag says that the layer has a bundle.
    pub(super) bundled: bool,
    pub(super) lost: LostTag,
}

pub(super) fn is_damage(error: &LayerError) -> bool {
    matches!(
        error,
        LayerError::NoLayer { .. }
            | LayerError::Damaged { .. }
            | LayerError::Origin(OriginError::NotFound { .. } | OriginError::WrongAnswer { .. })
    )
}

pub(super) fn resolve(
    origin: &dyn Origin,
    from: Option<&dyn Origin>,
    reference: &LayerRef,
) -> Result<Named, RepairError> {
    let named = |digest: Digest, bundled: bool, lost: LostTag| Named {
        digest,
        bundled,
        lost,
    };
    let name = match reference {
        LayerRef::Layer(digest) => return Ok(named(*digest, false, None)),
        LayerRef::Tag(name) => name,
    };
    let theirs = |from: &dyn Origin| -> Result<Named, RepairError> {
        let tag = layer::read_tag(from, name)?;
        let bytes = from.fetch_all(&names::tag(name), TAG_BYTES_MAX)?;
        Ok(named(tag.layer, tag.bundled, Some((name.clone(), bytes))))
    };
    match (layer::read_tag(origin, name), from) {
        // A digest that nobody knows is damage of the tag.
        (Ok(tag), Some(from))
            if !has_manifest(origin, &tag.layer)? && !has_manifest(from, &tag.layer)? =>
        {
            theirs(from)
        }
        (Ok(tag), _) => Ok(named(tag.layer, tag.bundled, None)),
        (Err(e), Some(from)) if is_damage(&e) => theirs(from),
        (Err(e), _) => Err(e.into()),
    }
}

fn has_manifest(origin: &dyn Origin, layer: &Digest) -> Result<bool, OriginError> {
    Ok(or_damaged(origin.size(&names::manifest(layer)))?.is_ok())
}
