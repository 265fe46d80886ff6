//! Giving layers names and taking names away.
//!
//! A tag appears last and goes first. Before a tag goes, or points elsewhere, an *untagged* lease says so: the layer stays
//! for the collector's grace period, for hosts that have it mounted and cannot write leases. Whoever gives a name to a layer
//! that exists holds a lease on it first, so that it is not collected in between. The index follows every change.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use super::bundle;
use super::layer::{self, Layer, LayerError};
use super::lease::hold::publishing;
use super::lease::{self, Hold, HoldError, Wanted};
use crate::format::lease::Purpose;
use crate::format::manifest::FORMAT;
use crate::format::tag::{Index, Tag};
use crate::format::{FormatError, names};
use crate::ids::{Digest, LayerRef, TagName};
use crate::origin::{Origin, OriginError};

/// How often the index is rebuilt when others publish at the same time.
const INDEX_ATTEMPTS_MAX: usize = 16;

/// Why a name was not given or taken away.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TagError {
    /// The layer or its tag cannot be read, or the origin failed.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The origin failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// A collection is removing it.
    #[error(transparent)]
    Hold(#[from] HoldError),
    /// Not everything that the layer needs is there.
    #[error(
        "layer `{layer}` on origin `{origin}` lacks `{}`; publish it again, or `dsec repair` it from another origin",
        .objects.join("`, `")
    )]
    Incomplete {
        /// The layer.
        layer: Digest,
        /// The origin.
        origin: String,
        /// What is missing.
        objects: Vec<String>,
    },
    /// Somebody needs the layer.
    #[error(
        "layer `{layer}` is in use: {}; unmount it or release the lease first (`dsec lease ls --origin {origin}`)",
        .holders.join("; ")
    )]
    InUse {
        /// The layer.
        layer: Digest,
        /// The origin.
        origin: String,
        /// Who, and by which lease.
        holders: Vec<String>,
    },
}

/// Seconds since 1970 on this host's clock.
pub fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// Writes a tag and brings the index up to date. The layer must be complete and held.
///
/// # Errors
/// When the origin fails.
pub fn write(origin: &dyn Origin, tag: &TagName, record: &Tag) -> Result<(), LayerError> {
    write_bytes(origin, tag, record.layer, &record.to_bytes())
}

/// As [`write()`], of a tag object as another origin has it: it may have fields that this version does not know.
///
/// # Errors
/// When the origin fails.
pub(crate) fn write_bytes(
    origin: &dyn Origin,
    tag: &TagName,
    layer: Digest,
    bytes: &[u8],
) -> Result<(), LayerError> {
    match layer::read_tag(origin, tag) {
        Ok(old) if old.layer != layer => lease::write_untagged(origin, old.layer)?,
        Ok(_) | Err(LayerError::NoLayer { .. } | LayerError::Damaged { .. }) => {}
        Err(LayerError::Origin(OriginError::WrongAnswer { .. })) => {}
        Err(e) => return Err(e),
    }
    origin.replace(&names::tag(tag), bytes)?;
    rebuild_index(origin)
}

/// Writes the index from the tags. Repeats while somebody else changed the tags in between, so that the last writer of two
/// has seen both. Damaged tags are left out.
///
/// # Errors
/// When the origin fails.
pub fn rebuild_index(origin: &dyn Origin) -> Result<(), LayerError> {
    let read = || -> Result<BTreeMap<String, Digest>, LayerError> {
        let listed = layer::list_tags(origin)?;
        for error in &listed.damaged {
            tracing::warn!(%error, "tag left out of the index");
        }
        Ok(listed
            .tags
            .into_iter()
            .map(|(name, layer)| (name.to_string(), layer))
            .collect())
    };
    let mut tags = read()?;
    for _ in 0..INDEX_ATTEMPTS_MAX {
        let index = Index {
            format: FORMAT,
            tags,
        };
        origin.replace(names::INDEX, &index.to_bytes())?;
        let now = read()?;
        if now == index.tags {
            return Ok(());
        }
        tags = now;
    }
    tracing::warn!("tags kept changing; the index may lack the newest until the next publish");
    Ok(())
}

/// Which of a layer's objects are not on the origin, or have another size than the placement says.
///
/// # Errors
/// When the origin fails.
pub fn missing(origin: &dyn Origin, layer: &Layer) -> Result<Vec<String>, OriginError> {
    let packs = layer.placement.packs.iter();
    let sizes: BTreeMap<String, u64> = packs.map(|p| (names::pack(&p.digest), p.size)).collect();
    let mut out = Vec::new();
    let bundle = names::bundle(&layer.digest);
    for object in layer::objects(layer).into_iter().filter(|o| *o != bundle) {
        let right = match origin.size(&object) {
            Ok(size) => sizes.get(&object).is_none_or(|expected| *expected == size),
            Err(OriginError::NotFound { .. }) => false,
            Err(e) => return Err(e),
        };
        if !right {
            out.push(object);
        }
    }
    Ok(out)
}

/// Makes sure that a layer that is there stays there while `hold` is held.
///
/// # Errors
/// When it is not complete, or a collection that removes it does not end within `patience`.
pub fn hold_layer(
    origin: &dyn Origin,
    digest: Digest,
    hold: &Hold,
    patience: Duration,
) -> Result<Layer, TagError> {
    let relied_on = layer::objects(&layer::open(origin, &digest)?);
    let wanted = Wanted {
        layers: BTreeSet::from([digest]),
        objects: relied_on.clone(),
    };
    hold.claim(origin, &wanted, &relied_on, patience)?;
    // Only now does it stay as it is.
    let layer = layer::open(origin, &digest)?;
    let objects = missing(origin, &layer)?;
    if objects.is_empty() {
        return Ok(layer);
    }
    Err(TagError::Incomplete {
        layer: digest,
        origin: origin.address(),
        objects,
    })
}

/// Points `tag` to the layer that `reference` names; the layer.
///
/// # Errors
/// When there is no such layer, not all of it is there, or the origin fails.
pub fn tag(
    origin: &dyn Origin,
    reference: &LayerRef,
    tag: &TagName,
    patience: Duration,
) -> Result<Digest, TagError> {
    publishing(origin, |hold| {
        let old = match reference {
            LayerRef::Tag(name) => Some(layer::read_tag(origin, name)?),
            LayerRef::Layer(_) => None,
        };
        let digest = match (reference, &old) {
            (LayerRef::Layer(digest), _) => *digest,
            (_, Some(old)) => old.layer,
            (LayerRef::Tag(_), None) => layer::resolve(origin, reference)?,
        };
        hold_layer(origin, digest, hold, patience)?;
        let (build, labels) = old.map(|old| (old.build, old.labels)).unwrap_or_default();
        let record = Tag {
            build,
            bundled: bundle::is_there(origin, &digest)?,
            created: unix_now(),
            format: FORMAT,
            labels,
            layer: digest,
            tag: tag.to_string(),
        };
        write(origin, tag, &record)?;
        Ok(digest)
    })
}

/// Takes a tag away; the layer it pointed to, if it could be read. The layer's bytes stay until they are collected.
///
/// # Errors
/// When there is no such tag or the origin fails.
pub fn untag(origin: &dyn Origin, tag: &TagName) -> Result<Option<Digest>, TagError> {
    let layer = take_away(origin, tag);
    // Also when there is no such tag: the index may still have it, after a crash.
    rebuild_index(origin)?;
    layer
}

fn take_away(origin: &dyn Origin, tag: &TagName) -> Result<Option<Digest>, TagError> {
    let layer = match layer::read_tag(origin, tag) {
        Ok(record) => Some(record.layer),
        Err(LayerError::Damaged { source, .. }) => {
            tracing::warn!(%tag, %source, "a damaged tag is taken away");
            None
        }
        Err(e) => return Err(e.into()),
    };
    if let Some(layer) = layer {
        lease::write_untagged(origin, layer)?;
    }
    origin.remove(&names::tag(tag))?;
    Ok(layer)
}

/// What `remove` took away.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Removed {
    /// The layer.
    pub layer: Digest,
    /// Its tags.
    pub tags: Vec<String>,
}

/// Takes away all tags of the layer that `reference` names.
///
/// # Errors
/// [`TagError::InUse`] while a lease names the layer; nothing is changed then.
pub fn remove(origin: &dyn Origin, reference: &LayerRef) -> Result<Removed, TagError> {
    let layer = layer::resolve(origin, reference)?;
    // A digest must name something, or a typing error would look like success.
    let listed = layer::list_tags(origin)?;
    let tags: Vec<TagName> = listed
        .tags
        .into_iter()
        .filter(|(_, l)| *l == layer)
        .map(|(name, _)| name)
        .collect();
    if tags.is_empty() {
        layer::read_manifest(origin, &layer)?;
    }
    let holders = holders(origin, &layer)?;
    if !holders.is_empty() {
        return Err(TagError::InUse {
            layer,
            origin: origin.address(),
            holders,
        });
    }
    for tag in &tags {
        match take_away(origin, tag) {
            // Somebody else was faster.
            Err(TagError::Layer(LayerError::NoLayer { .. })) => {}
            taken => drop(taken?),
        }
    }
    rebuild_index(origin)?;
    Ok(Removed {
        layer,
        tags: tags.iter().map(ToString::to_string).collect(),
    })
}

/// Who holds a lease on a layer, in words.
fn holders(origin: &dyn Origin, layer: &Digest) -> Result<Vec<String>, TagError> {
    let leases = match lease::read_all(origin) {
        Err(OriginError::Unsupported { .. }) => return Ok(Vec::new()),
        leases => leases?,
    };
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    let now = lease::clock::origin_now(origin)?;
    let mut out = Vec::new();
    for found in leases.iter().filter(|found| !found.is_over(now)) {
        let name = &found.info.name;
        match &found.lease {
            Ok(lease) if lease.purpose == Purpose::Untagged || !lease.layers.contains(layer) => {}
            Ok(lease) => out.push(format!(
                "{} lease `{name}` of {}",
                lease.purpose.as_str(),
                lease.holder
            )),
            Err(error) => out.push(unreadable(name, error)),
        }
    }
    Ok(out)
}

fn unreadable(name: &str, error: &FormatError) -> String {
    format!("lease `{name}` cannot be read: {error}")
}
