//! Giving everything its name, in the order in which no reader can see a part missing:
//! packs, chunk table, metadata, manifest, placement; then the tag, then the index of tags.

use std::collections::BTreeMap;
use std::collections::HashMap;

use super::error::BuildError;
use super::layout::Layout;
use super::segments::{Staged, Stored};
use crate::format::manifest::{FORMAT, Manifest};
use crate::format::placement::{Pack, Placement, Spot};
use crate::format::tag::{Index, Tag};
use crate::format::{FormatError, frame, names};
use crate::ids::{Digest, TagName, to_u64};
use crate::origin::{ByteRange, Created, Origin, OriginError};
use crate::store::layer::{self, LayerError};

use super::dictionary::Dictionary;

/// Compression level of metadata images and chunk tables: written once, fetched at every first mount.
const META_LEVEL: i32 = 12;
/// How often the index is rebuilt when others publish at the same time.
const INDEX_ATTEMPTS_MAX: usize = 16;

/// The objects of a layer besides its packs.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    /// Plain metadata image.
    pub meta: &'a [u8],
    /// Plain chunk table.
    pub chunks: &'a [u8],
    /// Manifest.
    pub manifest: &'a Manifest,
    /// Placement.
    pub placement: &'a Placement,
}

/// The placement of a layer whose own segments were staged and whose foreign ones are where the dictionaries say.
///
/// # Errors
/// [`BuildError::Dictionary`] when a dictionary does not say where a segment is.
pub fn placement(
    manifest: &Manifest,
    staged: &Staged,
    layout: &Layout,
    dictionary: &Dictionary,
) -> Result<Placement, BuildError> {
    let mut packs: Vec<Pack> = Vec::new();
    let mut index: HashMap<Digest, u32> = HashMap::new();
    let mut segments = Vec::with_capacity(manifest.segments.len());
    let mut add = |pack: Pack, range: ByteRange| {
        let next = u32::try_from(packs.len()).expect("at most one pack per segment");
        let pack_index = *index.entry(pack.digest).or_insert_with(|| {
            packs.push(pack);
            next
        });
        let len = u32::try_from(range.len).expect("a frame has at most 5 MiB");
        segments.push(Spot(pack_index, range.start, len));
    };
    for own in &staged.own {
        match own.stored {
            Stored::Known(pack, range) => add(pack, range),
            Stored::New(pack, range) => {
                add(
                    staged.packs.get(pack).expect("the pack was finished").pack,
                    range,
                );
            }
        }
    }
    for foreign in &layout.foreign {
        let layer = dictionary.layers.get(foreign.layer);
        let found = layer.and_then(|l| l.placement.find(foreign.index));
        let (pack, range) = found.ok_or_else(|| BuildError::Dictionary {
            layer: layer.map_or_else(String::new, |l| l.digest.to_hex()),
            source: FormatError::new(
                format!("spot of segment {}", foreign.index),
                "a pack and range",
                "none",
            ),
        })?;
        add(*pack, range);
    }
    Ok(Placement {
        format: FORMAT,
        layer: manifest.layer(),
        packs,
        segments,
    })
}

/// Publishes everything; returns the bytes of the objects that were new.
///
/// # Errors
/// When the origin fails. Objects published so far stay; nothing refers to them until the tag is written.
pub fn publish(
    origin: &dyn Origin,
    staged: &Staged,
    parts: &Parts<'_>,
    tag: &TagName,
    record: &Tag,
) -> Result<u64, BuildError> {
    let mut stored = 0;
    for pack in &staged.packs {
        if origin.create_from_file(&names::pack(&pack.pack.digest), pack.file.path())?
            == Created::New
        {
            stored += pack.pack.size;
        }
    }
    let mut create = |object: &str, bytes: &[u8]| -> Result<Created, BuildError> {
        let created = origin.create(object, &mut &*bytes)?;
        if created == Created::New {
            stored += to_u64(bytes.len());
        }
        Ok(created)
    };
    create(
        &names::chunks(&parts.manifest.chunks.digest),
        &frame::encode(parts.chunks, META_LEVEL),
    )?;
    create(
        &names::meta(&parts.manifest.meta.digest),
        &frame::encode(parts.meta, META_LEVEL),
    )?;
    let layer = parts.placement.layer;
    create(&names::manifest(&layer), &parts.manifest.to_bytes())?;
    let bytes = parts.placement.to_bytes();
    if create(&names::placement(&layer), &bytes)? == Created::Existed
        && !is_usable(origin, &layer, parts.manifest)?
    {
        origin.replace(&names::placement(&layer), &bytes)?;
    }
    write_tag(origin, tag, record)?;
    Ok(stored)
}

/// Whether the placement on the origin can stay: it parses, and its packs are there.
fn is_usable(origin: &dyn Origin, layer: &Digest, manifest: &Manifest) -> Result<bool, BuildError> {
    let placement = match layer::read_placement(origin, layer, manifest) {
        Ok(placement) => placement,
        Err(LayerError::Damaged { .. }) => return Ok(false),
        Err(e) => return Err(e.into()),
    };
    for pack in &placement.packs {
        match origin.size(&names::pack(&pack.digest)) {
            Ok(size) if size == pack.size => {}
            Ok(_) | Err(OriginError::NotFound { .. }) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

/// Writes a tag and brings the index up to date.
///
/// # Errors
/// When the origin fails.
pub fn write_tag(origin: &dyn Origin, tag: &TagName, record: &Tag) -> Result<(), BuildError> {
    origin.replace(&names::tag(tag), &record.to_bytes())?;
    rebuild_index(origin)
}

/// Writes the index from the tags. Repeats while somebody else changed the tags in between, so that the last writer of two
/// has seen both.
///
/// # Errors
/// When the origin fails or a tag is damaged.
pub fn rebuild_index(origin: &dyn Origin) -> Result<(), BuildError> {
    let read = || -> Result<BTreeMap<String, Digest>, BuildError> {
        let tags = layer::list_tags(origin)?;
        Ok(tags
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
