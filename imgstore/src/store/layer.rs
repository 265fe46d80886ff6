//! Finding a layer on an origin and loading what describes it, every part checked before it is used.

use std::collections::BTreeSet;

use super::trace;
use crate::format::manifest::{MANIFEST_BYTES_MAX, Manifest};
use crate::format::placement::{PLACEMENT_BYTES_MAX, Placement};
use crate::format::tag::{INDEX_BYTES_MAX, Index, TAG_BYTES_MAX, Tag};
use crate::format::{FormatError, frame, names};
use crate::ids::{Digest, LayerRef, TagName};
use crate::origin::lag::named;
use crate::origin::{Origin, OriginError};

/// Why a layer could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The origin failed or has no such object.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// No such tag or layer.
    #[error(
        "no layer `{layer}` on origin `{origin}`; `dsec layers --origin {origin}` lists what is there"
    )]
    NoLayer {
        /// What was asked for.
        layer: String,
        /// The origin.
        origin: String,
    },
    /// An object is damaged. `dsec verify` shows the extent; publish the layer again or use another origin.
    #[error(
        "object `{object}` on origin `{origin}` is damaged: {source}; `dsec repair REF --from ANOTHER_ORIGIN --origin {origin}` mends it, or publish the layer again"
    )]
    Damaged {
        /// The object.
        object: String,
        /// The origin.
        origin: String,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
}

impl LayerError {
    pub(crate) fn damaged(origin: &dyn Origin, object: &str) -> impl FnOnce(FormatError) -> Self {
        let (object, origin) = (object.to_owned(), origin.address());
        move |source| Self::Damaged {
            object,
            origin,
            source,
        }
    }
}

/// A layer's name and description, verified; metadata and data stay where they are.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The layer's name.
    pub digest: Digest,
    /// Its contents.
    pub manifest: Manifest,
    /// Where they are.
    pub placement: Placement,
}

/// The tag stored under `name`.
///
/// # Errors
/// [`LayerError::NoLayer`] when there is none.
pub fn read_tag(origin: &dyn Origin, name: &TagName) -> Result<Tag, LayerError> {
    let object = names::tag(name);
    let bytes = origin
        .fetch_all(&object, TAG_BYTES_MAX)
        .map_err(|e| not_found(e, &name.to_string()))?;
    Tag::parse(&bytes, name).map_err(LayerError::damaged(origin, &object))
}

fn not_found(error: OriginError, layer: &str) -> LayerError {
    match error {
        OriginError::NotFound { origin, .. } => LayerError::NoLayer {
            layer: layer.to_owned(),
            origin,
        },
        other => other.into(),
    }
}

/// The layer that `reference` names now.
///
/// # Errors
/// [`LayerError::NoLayer`] when the tag does not exist. A digest is returned as it is.
pub fn resolve(origin: &dyn Origin, reference: &LayerRef) -> Result<Digest, LayerError> {
    match reference {
        LayerRef::Layer(digest) => Ok(*digest),
        LayerRef::Tag(name) => read_tag(origin, name).map(|tag| tag.layer),
    }
}

/// The tags of an origin.
#[derive(Debug, Default)]
pub struct Tags {
    /// Those that can be read, in order.
    pub tags: Vec<(TagName, Digest)>,
    /// Layers of which one says that it has a bundle; none where the tags come from the index.
    pub bundled: BTreeSet<Digest>,
    /// Traces that they name; none where the tags come from the index.
    pub traces: BTreeSet<Digest>,
    /// One error for each of the others; it names the object.
    pub damaged: Vec<LayerError>,
}

/// All tags of an origin: read from the tag objects where the origin can list, else from its index.
///
/// # Errors
/// When the origin fails or its index is damaged as a whole. A damaged tag is no error: it must not hide the others.
pub fn list_tags(origin: &dyn Origin) -> Result<Tags, LayerError> {
    let objects = match origin.list(names::TAGS) {
        Ok(objects) => objects,
        Err(OriginError::Unsupported { .. }) => return indexed_tags(origin),
        Err(e) => return Err(e.into()),
    };
    let mut out = Tags::default();
    for name in objects.iter().filter_map(|object| names::parse_tag(object)) {
        match read_tag(origin, &name) {
            Ok(tag) => {
                out.traces.extend(trace::of_tag(&tag));
                if tag.bundled {
                    out.bundled.insert(tag.layer);
                }
                out.tags.push((name, tag.layer));
            }
            Err(LayerError::NoLayer { .. }) => {} // removed meanwhile
            Err(
                e @ (LayerError::Damaged { .. }
                | LayerError::Origin(OriginError::WrongAnswer { .. })),
            ) => out.damaged.push(e),
            Err(e) => return Err(e),
        }
    }
    Ok(out)
}

fn indexed_tags(origin: &dyn Origin) -> Result<Tags, LayerError> {
    let bytes = origin.fetch_all(names::INDEX, INDEX_BYTES_MAX)?;
    let index = Index::parse(&bytes).map_err(LayerError::damaged(origin, names::INDEX))?;
    let mut out = Tags::default();
    for (name, layer) in index.tags {
        match name.parse() {
            Ok(name) => out.tags.push((name, layer)),
            Err(e) => {
                let e: crate::ids::IdError = e;
                let wrong = FormatError::new("tag name in index", "axis/name:version", e);
                out.damaged
                    .push(LayerError::damaged(origin, names::INDEX)(wrong));
            }
        }
    }
    Ok(out)
}

/// The manifest of `layer`.
///
/// # Errors
/// [`LayerError::NoLayer`] when it is missing, [`LayerError::Damaged`] when its digest or a field is wrong.
pub fn read_manifest(origin: &dyn Origin, layer: &Digest) -> Result<Manifest, LayerError> {
    read_manifest_bytes(origin, layer).map(|(_, manifest)| manifest)
}

/// The manifest of `layer`, and its bytes: those that have the digest, with fields that this version does not know.
///
/// # Errors
/// As for [`read_manifest`].
pub fn read_manifest_bytes(
    origin: &dyn Origin,
    layer: &Digest,
) -> Result<(Vec<u8>, Manifest), LayerError> {
    let object = names::manifest(layer);
    let bytes = origin
        .fetch_all(&object, MANIFEST_BYTES_MAX)
        .map_err(|e| not_found(e, &layer.to_hex()))?;
    let manifest = Manifest::parse(&bytes, layer).map_err(LayerError::damaged(origin, &object))?;
    Ok((bytes, manifest))
}

/// The placement of `layer`.
///
/// # Errors
/// As for [`read_manifest`].
pub fn read_placement(
    origin: &dyn Origin,
    layer: &Digest,
    manifest: &Manifest,
) -> Result<Placement, LayerError> {
    let object = names::placement(layer);
    let bytes = named(origin, || origin.fetch_all(&object, PLACEMENT_BYTES_MAX))?;
    Placement::parse(&bytes, layer, manifest).map_err(LayerError::damaged(origin, &object))
}

/// Manifest and placement of `layer`.
///
/// # Errors
/// As for [`read_manifest`].
pub fn open(origin: &dyn Origin, layer: &Digest) -> Result<Layer, LayerError> {
    let manifest = read_manifest(origin, layer)?;
    let placement = read_placement(origin, layer, &manifest)?;
    Ok(Layer {
        digest: *layer,
        manifest,
        placement,
    })
}

/// Names of everything that belongs to a layer on its origin, each once. It may lack the bundle.
pub fn objects(layer: &Layer) -> BTreeSet<String> {
    let packs = layer.placement.packs.iter();
    packs
        .map(|pack| names::pack(&pack.digest))
        .chain([
            names::chunks(&layer.manifest.chunks.digest),
            names::meta(&layer.manifest.meta.digest),
            names::manifest(&layer.digest),
            names::placement(&layer.digest),
            names::bundle(&layer.digest),
        ])
        .collect()
}

/// The plain metadata image, verified.
///
/// # Errors
/// [`LayerError::Damaged`] when it does not decompress to the bytes the manifest names.
pub fn read_meta(origin: &dyn Origin, manifest: &Manifest) -> Result<Vec<u8>, LayerError> {
    read_frame(
        origin,
        &names::meta(&manifest.meta.digest),
        manifest.meta.digest,
        manifest.meta.size,
    )
}

/// An object that is one zstd frame of `size` plain bytes with this digest.
pub(crate) fn read_frame(
    origin: &dyn Origin,
    object: &str,
    digest: Digest,
    size: u64,
) -> Result<Vec<u8>, LayerError> {
    let stored = named(origin, || {
        origin.fetch_all(object, frame::frame_len_max(size))
    })?;
    frame::verified(&stored, &digest, size).map_err(LayerError::damaged(origin, object))
}

/// One segment's plain bytes, fetched and verified.
///
/// # Errors
/// [`LayerError::Damaged`] names the pack when the bytes are not the segment's.
pub fn read_segment(
    origin: &dyn Origin,
    layer: &Layer,
    index: usize,
) -> Result<Vec<u8>, LayerError> {
    let missing = || {
        FormatError::new(
            format!("segment {index}"),
            "an index inside the layer",
            layer.manifest.segments.len(),
        )
    };
    let object = names::manifest(&layer.digest);
    let (Some(segment), Some((pack, range))) = (
        layer.manifest.segments.get(index),
        layer.placement.find(index),
    ) else {
        return Err(LayerError::damaged(origin, &object)(missing()));
    };
    let object = names::pack(&pack.digest);
    let stored = named(origin, || origin.fetch_of(&object, pack.size, range))?;
    let at = |e: FormatError| FormatError {
        what: format!("segment {index} at offset {}: {}", range.start, e.what),
        ..e
    };
    frame::verified(&stored, &segment.digest(), segment.len())
        .map_err(at)
        .map_err(LayerError::damaged(origin, &object))
}
