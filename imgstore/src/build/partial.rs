//! A part of an origin that lets some workloads run without the rest.
//!
//! A workload is a trace. Its items are what a mount reads (manifest, placement, metadata, chunk table, tags of each layer)
//! and the segments that hold the traced blocks; `coverage` chooses. The part that is written is an origin like any
//! other: manifests and metadata are the same objects, the chosen segments are copied into packs of their own, and the
//! placements keep the old packs for all others. So a mount with this part alone reads what was chosen and gets an error (EIO)
//! for the rest, and one that has the whole origin as its second reads everything.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::coverage::{Choice, Curve, curve};
use super::error::BuildError;
use super::known;
use super::publish::{self, Parts, Publisher};
use super::segments::{PackWriter, Staged, StagedSegment, Stored};
use crate::fetch::plan::{RANGE_BYTES_MAX, plan};
use crate::format::placement::{Pack, Placement, Spot};
use crate::format::tag::Tag;
use crate::format::trace::{Trace, segments_of};
use crate::format::{FormatError, frame, names};
use crate::ids::{Digest, TagName, to_u64};
use crate::origin::{ByteRange, Origin};
use crate::store::bundle;
use crate::store::layer::{self, Layer, LayerError};
use crate::store::lease::hold::{PATIENCE, publishing};
use crate::store::tags;
use crate::store::trace as published;

/// Bytes that a layer costs beside its objects: a pack's seek table and name.
const LAYER_EXTRA_BYTES: u64 = 512;
/// Bytes that a segment costs beside its frame: its entry in the seek table.
const SEGMENT_EXTRA_BYTES: u64 = 8;

/// A workload.
#[derive(Debug, Clone)]
pub struct Workload {
    /// What people call it.
    pub name: String,
    /// What it reads.
    pub trace: Trace,
}

/// Why a part could not be planned or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartialError {
    /// A layer cannot be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A trace does not fit its layer.
    #[error("workload `{workload}`, layer {layer}: {source}")]
    Trace {
        /// The workload.
        workload: String,
        /// The layer.
        layer: Digest,
        /// What is wrong.
        #[source]
        source: Box<FormatError>,
    },
    /// A manifest has fields that this version would lose.
    #[error("layer {0} was written by a newer dsec, which is needed to copy it")]
    Newer(Digest),
    /// Something could not be written.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// A layer that a workload reads.
#[derive(Debug)]
struct Source {
    layer: Layer,
    tags: Vec<(TagName, Tag)>,
}

/// One thing to copy, whole or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Item {
    /// What describes a layer.
    Description(Digest),
    /// A segment, wherever it appears.
    Segment(Digest),
}

/// What can be covered with how much.
#[derive(Debug)]
pub struct Plan {
    /// The workloads' names.
    pub names: Vec<String>,
    /// Bytes of each workload on its own.
    pub alone: Vec<u64>,
    /// Least bytes for each number of workloads.
    pub curve: Curve,
    needs: Vec<Vec<(Digest, Vec<usize>)>>,
    sources: BTreeMap<Digest, Source>,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Written {
    /// Layers that can be mounted from the part.
    pub layers: u64,
    /// Segments in it.
    pub segments: u64,
    /// Bytes that were new on the target.
    pub bytes_stored: u64,
}

fn open_source(
    origin: &dyn Origin,
    digest: &Digest,
    tags: &[(TagName, Digest)],
) -> Result<(Source, u64), PartialError> {
    let (bytes, manifest) = layer::read_manifest_bytes(origin, digest)?;
    if manifest.to_bytes() != bytes {
        return Err(PartialError::Newer(*digest));
    }
    let placement = layer::read_placement(origin, digest, &manifest)?;
    let objects = [
        names::manifest(digest),
        names::placement(digest),
        names::meta(&manifest.meta.digest),
        names::chunks(&manifest.chunks.digest),
    ];
    let mut cost = LAYER_EXTRA_BYTES;
    for object in objects {
        cost += origin.size(&object).map_err(LayerError::from)?;
    }
    let mut own = Vec::new();
    for (name, _) in tags.iter().filter(|(_, layer)| layer == digest) {
        let tag = layer::read_tag(origin, name)?;
        cost += to_u64(tag.to_bytes().len());
        own.push((name.clone(), tag));
    }
    let layer = Layer {
        digest: *digest,
        manifest,
        placement,
    };
    Ok((Source { layer, tags: own }, cost))
}

/// Finds out what the workloads need and what each number of them costs at least.
///
/// # Errors
/// [`PartialError`] names the layer that is missing or damaged, or the trace that does not fit.
pub fn plan_part(origin: &dyn Origin, workloads: &[Workload]) -> Result<Plan, PartialError> {
    let tags = layer::list_tags(origin)?.tags;
    let mut sources: BTreeMap<Digest, Source> = BTreeMap::new();
    let mut numbers: HashMap<Item, usize> = HashMap::new();
    let mut costs: Vec<u64> = Vec::new();
    let mut number = |item: Item, cost: u64| {
        *numbers.entry(item).or_insert_with(|| {
            costs.push(cost);
            costs.len() - 1
        })
    };
    let mut descriptions: HashMap<Digest, u64> = HashMap::new();
    let (mut items, mut needs) = (Vec::new(), Vec::new());
    for workload in workloads {
        let (mut own, mut need) = (Vec::new(), Vec::new());
        for digest in &workload.trace.layers {
            if !sources.contains_key(digest) {
                let (source, cost) = open_source(origin, digest, &tags)?;
                sources.insert(*digest, source);
                descriptions.insert(*digest, cost);
            }
            let Some(Source { layer, .. }) = sources.get(digest) else {
                continue;
            };
            let runs = workload.trace.of_layer(digest);
            let segments = segments_of(&layer.manifest, &runs).map_err(|source| {
                let (workload, layer) = (workload.name.clone(), *digest);
                PartialError::Trace {
                    workload,
                    layer,
                    source: Box::new(source),
                }
            })?;
            let cost = descriptions.get(digest).copied().unwrap_or(0);
            own.push(number(Item::Description(*digest), cost));
            for index in &segments {
                let segment = layer.manifest.segments.get(*index);
                let place = layer.placement.find(*index);
                if let (Some(segment), Some((_, range))) = (segment, place) {
                    let cost = range.len + SEGMENT_EXTRA_BYTES;
                    own.push(number(Item::Segment(segment.digest()), cost));
                }
            }
            need.push((*digest, segments));
        }
        items.push(own);
        needs.push(need);
    }
    let cost = |item: &usize| costs.get(*item).copied().unwrap_or(0);
    let alone = |own: &Vec<usize>| {
        let distinct: BTreeSet<&usize> = own.iter().collect();
        distinct.into_iter().map(cost).sum()
    };
    Ok(Plan {
        names: workloads.iter().map(|w| w.name.clone()).collect(),
        alone: items.iter().map(alone).collect(),
        curve: curve(&costs, &items),
        needs,
        sources,
    })
}

/// Writes the part that `choice` needs to `target`. `progress` is called with segments done and in all.
///
/// # Errors
/// When a segment is damaged or an origin fails. What was written so far is whole, layer by layer.
pub fn write_part(
    plan: &Plan,
    choice: &Choice,
    origin: &dyn Origin,
    target: &dyn Origin,
    progress: &dyn Fn(u64, u64),
) -> Result<Written, PartialError> {
    let mut wanted: BTreeMap<Digest, BTreeSet<usize>> = BTreeMap::new();
    for workload in &choice.workloads {
        for (layer, segments) in plan.needs.get(*workload).into_iter().flatten() {
            wanted.entry(*layer).or_default().extend(segments);
        }
    }
    let total = wanted.values().map(|s| to_u64(s.len())).sum();
    let mut written = Written {
        layers: 0,
        segments: 0,
        bytes_stored: 0,
    };
    publishing(target, |hold| {
        let publisher = Publisher {
            origin: target,
            hold,
            patience: PATIENCE,
        };
        for (digest, segments) in &wanted {
            let Some(source) = plan.sources.get(digest) else {
                continue;
            };
            let step = |done: u64| progress(written.segments + done, total);
            written.bytes_stored += write_layer(source, segments, origin, &publisher, &step)?;
            written.layers += 1;
            written.segments += to_u64(segments.len());
            progress(written.segments, total);
        }
        Ok(written)
    })
}

fn write_layer(
    source: &Source,
    segments: &BTreeSet<usize>,
    origin: &dyn Origin,
    publisher: &Publisher<'_>,
    progress: &dyn Fn(u64),
) -> Result<u64, PartialError> {
    let target = publisher.origin;
    let Layer {
        digest,
        manifest,
        placement,
    } = &source.layer;
    let staged = copy_frames(&source.layer, segments, origin, target, progress)?;
    let meta = layer::read_meta(origin, manifest)?;
    let blob = manifest.chunks;
    let chunks = layer::read_frame(origin, &names::chunks(&blob.digest), blob.digest, blob.size)?;
    let place = place(placement, segments, &staged);
    // What is there may know of more segments than this part has: then they stay.
    let place = match layer::read_placement(target, digest, manifest) {
        Ok(old) => keep_places(target, &old, place, segments)?,
        Err(_) => place,
    };
    let parts = Parts {
        meta: &meta,
        chunks: &chunks,
        manifest,
        placement: &place,
    };
    publisher.claim(&Layer {
        digest: *digest,
        manifest: manifest.clone(),
        placement: place.clone(),
    })?;
    let (mut stored, _) = publish::publish_objects(publisher, &staged, &parts)?;
    // A part is to be small: it has no bundle of its own. One that is there follows the placement.
    let bundled = bundle::is_there(target, digest).map_err(LayerError::from)?;
    if bundled {
        stored += bundle::renew(target, digest)?.unwrap_or(0);
    }
    for (name, tag) in &source.tags {
        if let Some(trace) = published::of_tag(tag)
            && let Ok(trace) = published::read(origin, &trace)
        {
            published::write(publisher, &trace)?;
        }
        let tag = Tag {
            bundled,
            ..tag.clone()
        };
        tags::write(target, name, &tag)?;
    }
    Ok(stored)
}

/// Fetches, verifies and stages the frames of these segments that the target lacks.
fn copy_frames(
    layer: &Layer,
    segments: &BTreeSet<usize>,
    origin: &dyn Origin,
    target: &dyn Origin,
    progress: &dyn Fn(u64),
) -> Result<Staged, PartialError> {
    let known = known::load(target)?;
    let folder = target.staging().unwrap_or_else(std::env::temp_dir);
    std::fs::create_dir_all(&folder).map_err(|source| BuildError::Staging {
        path: folder.display().to_string(),
        source,
    })?;
    let mut writer = PackWriter::new(folder, target.chunk_bytes());
    let mut stored: BTreeMap<usize, Stored> = BTreeMap::new();
    let mut missing = Vec::new();
    for index in segments {
        let segment = layer.manifest.segments.get(*index).copied();
        match segment.and_then(|s| known::find(target, &known, s)) {
            Some((pack, range)) => drop(stored.insert(*index, Stored::Known(pack, range))),
            None => missing.push(*index),
        }
    }
    for range in plan(&layer.placement, missing, RANGE_BYTES_MAX) {
        let object = names::pack(&range.pack);
        let bytes = origin
            .fetch(&object, range.range)
            .map_err(LayerError::from)?;
        for (part, frame) in range.split(&bytes) {
            let segment = layer.manifest.segments.get(part.index);
            let (Some(segment), Some(frame)) = (segment, frame) else {
                continue;
            };
            let plain = frame::decode(frame, segment.len());
            let found = plain.as_ref().map(|plain| Digest::of(plain));
            if found != Ok(segment.digest()) {
                let what = format!("segment {} at offset {}", part.index, part.offset);
                let found = found.map_or_else(|e| e.to_string(), Digest::to_hex);
                return Err(LayerError::Damaged {
                    object,
                    origin: origin.address(),
                    source: FormatError::new(what, segment.digest().to_hex(), found),
                }
                .into());
            }
            stored.insert(part.index, writer.store(frame, segment.len())?);
            progress(to_u64(stored.len()));
        }
    }
    let own = stored.iter().filter_map(|(index, stored)| {
        let segment = *layer.manifest.segments.get(*index)?;
        let stored = *stored;
        Some(StagedSegment { segment, stored })
    });
    Ok(Staged {
        own: own.collect(),
        packs: writer.into_packs()?,
    })
}

/// The old placement with the chosen segments in their new places.
fn place(old: &Placement, segments: &BTreeSet<usize>, staged: &Staged) -> Placement {
    let mut new = old.clone();
    for (index, own) in segments.iter().zip(&staged.own) {
        let (pack, range) = match own.stored {
            Stored::Known(pack, range) => (pack, range),
            Stored::New(pack, range) => {
                let pack = staged.packs.get(pack).expect("the pack was finished");
                (pack.pack, range)
            }
        };
        put(&mut new, *index, pack, range);
    }
    without_unused(new)
}

fn put(placement: &mut Placement, index: usize, pack: Pack, range: ByteRange) {
    let at = placement.packs.iter().position(|p| p.digest == pack.digest);
    let at = at.unwrap_or_else(|| {
        placement.packs.push(pack);
        placement.packs.len() - 1
    });
    let number = u32::try_from(at).expect("at most two packs a segment");
    let len = u32::try_from(range.len).expect("a frame has at most 5 MiB");
    if let Some(spot) = placement.segments.get_mut(index) {
        *spot = Spot(number, range.start, len);
    }
}

fn without_unused(placement: Placement) -> Placement {
    let mut packs: Vec<Pack> = Vec::new();
    let mut numbers: HashMap<u32, u32> = HashMap::new();
    let mut segments = Vec::with_capacity(placement.segments.len());
    for Spot(pack, start, len) in placement.segments {
        let next = u32::try_from(packs.len()).expect("no more than there were");
        let number = *numbers.entry(pack).or_insert(next);
        if number == next
            && let Some(pack) = usize::try_from(pack)
                .ok()
                .and_then(|n| placement.packs.get(n))
        {
            packs.push(*pack);
        }
        segments.push(Spot(number, start, len));
    }
    Placement {
        packs,
        segments,
        ..placement
    }
}

/// Adds the places of an earlier part of the same layer whose packs are on the target.
fn keep_places(
    target: &dyn Origin,
    old: &Placement,
    mut new: Placement,
    segments: &BTreeSet<usize>,
) -> Result<Placement, PartialError> {
    let mut there: HashMap<Digest, bool> = HashMap::new();
    for index in (0..old.segments.len()).filter(|index| !segments.contains(index)) {
        let Some((pack, range)) = old.find(index) else {
            continue;
        };
        let present = match there.get(&pack.digest) {
            Some(present) => *present,
            None => {
                let size = target.size(&names::pack(&pack.digest));
                let present = size.is_ok_and(|size| size == pack.size);
                there.insert(pack.digest, present);
                present
            }
        };
        if present {
            put(&mut new, index, *pack, range);
        }
    }
    Ok(without_unused(new))
}
