//! Copying layers from one origin to another: only what is missing, everything verified on the way.
//!
//! A layer keeps its name; where its segments lie is the target's own affair, so the target gets a placement of its own:
//! 1. segments that the target has already, by any of its placements, are read there and referred to;
//! 2. a source pack of which most is needed is copied whole, under the same name (one object to stream, and the two
//!    origins can mend each other's packs later), if its bytes have that digest;
//! 3. other segments go, frame by frame, into new packs.
//!
//! Then chunk table, metadata, manifest, placement, bundle, and the tag last, as a build publishes: whoever stops in between leaves
//! objects that nothing refers to. Doing it again finds packs that are there and goes on. Memory is bounded by a few ranges.
//!
//! Before anything is relied on or written for a layer that is not whole yet, a lease on the target names it, so that no
//! collection takes it away. A layer that is whole is left alone, without a lease.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;

use super::bundle::{self, State};
use super::layer::{self, Layer, LayerError};
use super::lease::hold::{PATIENCE, publishing};
use super::places::{self, Places};
use super::runs::{self, Place, Sought, or_damaged};
use super::trace;
use super::transfer::{self, Staging};
use super::verify::PackState;
use super::{lease, tags};
use crate::build::BuildError;
use crate::build::publish::{self, Publisher};
use crate::build::segments::{PackWriter, StagedPack};
use crate::format::manifest::MANIFEST_BYTES_MAX;
use crate::format::names;
use crate::format::placement::Pack;
use crate::format::tag::{INDEX_BYTES_MAX, Index, TAG_BYTES_MAX};
use crate::ids::{Digest, LayerRef, TagName, to_u64};
use crate::origin::counting::{CountingOrigin, Traffic};
use crate::origin::{Origin, OriginError};

/// A pack is copied whole if at least one of this many of its bytes is needed.
const WHOLE_PACK_PART: u64 = 2;

/// Why layers could not be copied. Nothing that was being copied is visible on the target under its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// An origin failed.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// The source has no such layer, or a damaged one.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The target or its staging could not be written.
    #[error(transparent)]
    Publish(#[from] BuildError),
    /// Part of the layer is damaged on the source.
    #[error(
        "layer `{layer}` cannot be copied: `{object}` on origin `{origin}` is damaged: {what}; mend it with `dsec repair {layer} --from ANOTHER_ORIGIN --origin {origin}`, or publish the layer again"
    )]
    Damaged {
        /// The layer.
        layer: Digest,
        /// The source.
        origin: String,
        /// The damaged object.
        object: String,
        /// How it differs.
        what: String,
    },
    /// Source and target are the same.
    #[error("`{0}` is given as source and as target; copying needs two different origins")]
    SameOrigin(String),
}

/// What was copied.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct CopyReport {
    /// The layers, in the order given.
    pub layers: Vec<CopiedLayer>,
    /// Segments that the target lacked, each once.
    pub segments_copied: u64,
    /// Segments that the target had; each was read there and is right.
    pub segments_present: u64,
    /// Packs copied whole under their name.
    pub packs_whole: u64,
    /// Packs made on the target from single segments.
    pub packs_new: u64,
    /// Traces that the target lacked.
    pub traces_copied: u64,
    /// Traces that tags name and the source has not, or only damaged.
    pub traces_lost: u64,
    /// Bytes written to the target: packs, chunk tables, metadata, manifests, placements, tags.
    pub bytes_copied: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Read requests sent to the source.
    pub requests: u64,
}

/// One layer of a copy.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct CopiedLayer {
    /// What was asked for.
    pub reference: String,
    /// The layer.
    pub layer: Digest,
    /// Whether anything of it was missing on the target.
    pub changed: bool,
}

/// Stored bytes done and in all, for a progress bar.
pub type CopyProgress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// A layer as the source has it.
struct Wanted {
    reference: String,
    /// Its tag and the tag object's bytes.
    tag: Option<(TagName, Vec<u8>)>,
    layer: Layer,
    manifest: Vec<u8>,
    /// Whether its tag says that it has a bundle.
    bundled: bool,
    /// The trace that its tag names.
    trace: Option<Digest>,
}

fn load(from: &dyn Origin, reference: &LayerRef) -> Result<Wanted, CopyError> {
    let mut trace = None;
    let (digest, tag, bundled) = match reference {
        LayerRef::Layer(digest) => (*digest, None, false),
        LayerRef::Tag(name) => {
            let record = layer::read_tag(from, name)?;
            let bytes = from.fetch_all(&names::tag(name), TAG_BYTES_MAX)?;
            trace = trace::of_tag(&record);
            (record.layer, Some((name.clone(), bytes)), record.bundled)
        }
    };
    // Its own bytes and not ours: they may have fields that this version does not know.
    let (bytes, manifest) = layer::read_manifest_bytes(from, &digest)?;
    let placement = layer::read_placement(from, &digest, &manifest)?;
    Ok(Wanted {
        reference: reference.to_string(),
        tag,
        layer: Layer {
            digest,
            manifest,
            placement,
        },
        manifest: bytes,
        bundled,
        trace,
    })
}

/// Copies the layers that `references` name on `from` to `to`, and their tags.
///
/// # Errors
/// [`CopyError`]; layers that come earlier in `references` are copied then.
pub fn copy(
    from: Arc<dyn Origin>,
    to: &dyn Origin,
    references: &[LayerRef],
    progress: CopyProgress<'_>,
) -> Result<CopyReport, CopyError> {
    if from.address() == to.address() && from.address() != "mem:" {
        return Err(CopyError::SameOrigin(to.address()));
    }
    let traffic = Arc::new(Traffic::default());
    let from = CountingOrigin::new(from, Arc::clone(&traffic));
    let wanted: Vec<Wanted> = references
        .iter()
        .map(|reference| load(&from, reference))
        .collect::<Result<_, _>>()?;
    let layers: Vec<Digest> = wanted.iter().map(|w| w.layer.digest).collect();
    let segments: HashSet<Digest> = wanted
        .iter()
        .flat_map(|w| w.layer.manifest.segments.iter().map(|s| s.digest()))
        .collect();
    let mut report = publishing(to, |hold| -> Result<CopyReport, CopyError> {
        let mut copier = Copier {
            from: &from,
            to,
            publisher: Publisher {
                origin: to,
                hold,
                patience: PATIENCE,
            },
            staging: Staging::of(to)?,
            places: places::find(to, &layers, &segments)?,
            verified: HashMap::new(),
            report: CopyReport::default(),
            progress,
            done: 0,
            total: 0,
        };
        for wanted in &wanted {
            let before = copier.report.bytes_copied;
            copier.layer(wanted)?;
            copier.report.layers.push(CopiedLayer {
                reference: wanted.reference.clone(),
                layer: wanted.layer.digest,
                changed: copier.report.bytes_copied > before,
            });
        }
        Ok(copier.report)
    })?;
    (report.requests, report.bytes_read) = (traffic.requests(), traffic.bytes());
    Ok(report)
}

struct Copier<'a> {
    from: &'a dyn Origin,
    to: &'a dyn Origin,
    publisher: Publisher<'a>,
    staging: Staging,
    /// Where the target should have segments.
    places: Places,
    /// Where it has them: read and right.
    verified: HashMap<Digest, Place>,
    report: CopyReport,
    progress: CopyProgress<'a>,
    /// Stored bytes.
    done: u64,
    total: u64,
}

/// Segments whose pack is not finished yet.
struct Loose {
    writer: PackWriter,
    pending: Vec<(Digest, crate::origin::ByteRange)>,
}

impl Copier<'_> {
    fn layer(&mut self, wanted: &Wanted) -> Result<(), CopyError> {
        let mut seen = HashSet::new();
        let all: Vec<Sought> = runs::sought(&wanted.layer.manifest, &wanted.layer.placement)
            .into_iter()
            .filter(|s| !self.verified.contains_key(&s.segment.digest()))
            .filter(|s| seen.insert(s.segment.digest()))
            .collect();
        self.total += all.iter().map(|s| s.place.range.len).sum::<u64>();
        let mut missing = self.find_present(all)?;
        if missing.is_empty() && self.is_whole(wanted)? {
            return Ok(());
        }
        missing.extend(self.claim(&wanted.layer, &missing)?);
        let loose = self.whole_packs(missing)?;
        self.loose(&wanted.layer, loose)?;
        self.publish(wanted)
    }

    /// Reads what the target should have; gives what it does not.
    fn find_present(&mut self, mut missing: Vec<Sought>) -> Result<Vec<Sought>, CopyError> {
        for choice in 0.. {
            let at = |s: &Sought| self.places.get(&s.segment.digest())?.get(choice).copied();
            let tried: Vec<Sought> = missing
                .iter()
                .filter_map(|s| at(s).map(|place| Sought { place, ..*s }))
                .collect();
            if tried.is_empty() {
                break;
            }
            self.keep_right(tried)?;
            missing.retain(|s| !self.verified.contains_key(&s.segment.digest()));
        }
        // An interrupted copy may have brought packs of the source that no placement names yet.
        let mut packs: HashMap<Digest, bool> = HashMap::new();
        let mut tried = Vec::new();
        for one in &missing {
            let pack = one.place.pack;
            let there = match packs.get(&pack.digest) {
                Some(there) => *there,
                None => {
                    let size = or_damaged(self.to.size(&names::pack(&pack.digest)))?;
                    *packs.entry(pack.digest).or_insert(size == Ok(pack.size))
                }
            };
            if there {
                tried.push(*one);
            }
        }
        self.keep_right(tried)?;
        missing.retain(|s| !self.verified.contains_key(&s.segment.digest()));
        Ok(missing)
    }

    /// Whether the target has all of the layer, and its tag.
    fn is_whole(&self, wanted: &Wanted) -> Result<bool, CopyError> {
        let Layer {
            digest, manifest, ..
        } = &wanted.layer;
        for (object, blob) in [
            (names::chunks(&manifest.chunks.digest), manifest.chunks),
            (names::meta(&manifest.meta.digest), manifest.meta),
        ] {
            if transfer::check_frame_object(self.to, &object, blob)?.is_err() {
                return Ok(false);
            }
        }
        let there = or_damaged(
            self.to
                .fetch_all(&names::manifest(digest), MANIFEST_BYTES_MAX),
        )?;
        if there.as_deref() != Ok(wanted.manifest.as_slice()) || !self.is_placed(&wanted.layer) {
            return Ok(false);
        }
        match &wanted.tag {
            _ if !self.is_bundled(wanted)? || !self.has_trace(wanted)? => Ok(false),
            None => Ok(true),
            Some((name, bytes)) => self.is_tagged(name, bytes, digest),
        }
    }

    /// Whether the target has the bundle that the tag speaks of, and no other one.
    fn is_bundled(&self, wanted: &Wanted) -> Result<bool, CopyError> {
        let there = layer::open(self.to, &wanted.layer.digest)?;
        Ok(match bundle::state(self.to, &there)? {
            State::Right => true,
            State::Absent => !wanted.bundled,
            State::Wrong(_) => false,
        })
    }

    /// Makes the lease name all that is known of the layer on the target. Gives the segments that a collection took before.
    fn claim(&mut self, layer: &Layer, missing: &[Sought]) -> Result<Vec<Sought>, CopyError> {
        let mut packs: HashSet<Pack> = HashSet::new();
        let mine = layer.manifest.segments.iter();
        packs.extend(mine.filter_map(|s| Some(self.verified.get(&s.digest())?.pack)));
        let objects = layer::objects(layer).into_iter();
        let to_come = missing.iter().map(|s| names::pack(&s.place.pack.digest));
        let relied_on = packs.iter().map(|pack| names::pack(&pack.digest));
        self.publisher
            .claim_objects(objects.chain(to_come).chain(relied_on))?;
        let mut gone = HashSet::new();
        for pack in packs {
            if PackState::of(self.to, &pack)? != PackState::Sized {
                gone.insert(pack);
            }
        }
        self.verified.retain(|_, place| !gone.contains(&place.pack));
        let mut seen: HashSet<Digest> = missing.iter().map(|s| s.segment.digest()).collect();
        let mut lost = runs::sought(&layer.manifest, &layer.placement);
        lost.retain(|s| !self.verified.contains_key(&s.segment.digest()));
        lost.retain(|s| seen.insert(s.segment.digest()));
        self.report.segments_present -= to_u64(lost.len()).min(self.report.segments_present);
        Ok(lost)
    }

    /// Notes those that the target really has.
    fn keep_right(&mut self, tried: Vec<Sought>) -> Result<(), CopyError> {
        let Self {
            to,
            verified,
            report,
            progress,
            done,
            total,
            ..
        } = self;
        runs::read::<OriginError>(*to, tried, &mut |one, frame| {
            match frame {
                Ok(_) => {
                    verified.insert(one.segment.digest(), one.place);
                    report.segments_present += 1;
                    *done += one.place.range.len;
                    progress(*done, *total);
                }
                Err(what) => {
                    let (segment, pack) = (one.segment.digest(), one.place.pack.digest);
                    tracing::warn!(%segment, %pack, what, "the target's copy is damaged: copied anew");
                }
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Copies packs of which most is needed; gives the segments that are left.
    fn whole_packs(&mut self, missing: Vec<Sought>) -> Result<Vec<Sought>, CopyError> {
        let mut by_pack: Vec<(Pack, Vec<Sought>)> = Vec::new();
        let mut index: HashMap<Digest, usize> = HashMap::new();
        for one in missing {
            let pack = one.place.pack;
            let at = *index.entry(pack.digest).or_insert_with(|| {
                by_pack.push((pack, Vec::new()));
                by_pack.len() - 1
            });
            if let Some((_, list)) = by_pack.get_mut(at) {
                list.push(one);
            }
        }
        let mut loose = Vec::new();
        for (pack, list) in by_pack {
            let needed: u64 = list.iter().map(|s| s.place.range.len).sum();
            if needed.saturating_mul(WHOLE_PACK_PART) < pack.size
                || !self.whole_pack(&pack, &list)?
            {
                loose.extend(list);
            }
        }
        Ok(loose)
    }

    /// Whether the pack could be copied as it is: its bytes have its digest, and every needed frame is in it.
    fn whole_pack(&mut self, pack: &Pack, list: &[Sought]) -> Result<bool, CopyError> {
        let object = names::pack(&pack.digest);
        let staged = match transfer::stage(self.from, &object, pack.size, &self.staging)? {
            Ok(staged) if staged.digest == pack.digest => staged,
            Ok(staged) => {
                tracing::warn!(object, found = %staged.digest, "pack is damaged on the source: segments are copied one by one");
                return Ok(false);
            }
            Err(what) => {
                tracing::warn!(object, what, "pack cannot be copied whole");
                return Ok(false);
            }
        };
        let file = File::open(staged.file.path()).map_err(|e| self.staging.error(e))?;
        for one in list {
            let frame =
                transfer::read_staged(&file, one.place.range).map_err(|e| self.staging.error(e))?;
            if runs::check_frame(one.segment, &frame).is_err() {
                return Ok(false); // the placement points elsewhere; the error is told where the segment is read
            }
            self.done += one.place.range.len;
            (self.progress)(self.done, self.total);
        }
        let sealed = StagedPack::seal(staged.file, *pack);
        let staged = sealed.map_err(|e| self.staging.error(e))?;
        self.report.bytes_copied += publish::put_pack(self.to, &staged)?;
        self.report.packs_whole += 1;
        self.report.segments_copied += to_u64(list.len());
        let digests = list.iter().map(|s| (s.segment.digest(), s.place));
        self.verified.extend(digests);
        Ok(true)
    }

    /// Copies segments one by one into new packs.
    fn loose(&mut self, layer: &Layer, list: Vec<Sought>) -> Result<(), CopyError> {
        let mut loose = Loose {
            writer: PackWriter::new(self.staging.folder(), self.to.chunk_bytes()),
            pending: Vec::new(),
        };
        let from = self.from;
        runs::read::<CopyError>(from, list, &mut |one, frame| {
            let frame = frame.map_err(|what| CopyError::Damaged {
                layer: layer.digest,
                origin: from.address(),
                object: names::pack(&one.place.pack.digest),
                what: format!(
                    "segment {} at offset {}: {what}",
                    one.index, one.place.range.start
                ),
            })?;
            let range = loose.writer.append(&frame, one.segment.len())?;
            loose.pending.push((one.segment.digest(), range));
            self.done += one.place.range.len;
            (self.progress)(self.done, self.total);
            self.put_finished(&mut loose)
        })?;
        loose.writer.finish()?;
        self.put_finished(&mut loose)
    }

    /// Publishes the pack that was just finished, if one was.
    fn put_finished(&mut self, loose: &mut Loose) -> Result<(), CopyError> {
        for staged in loose.writer.take_done() {
            self.publisher
                .claim_objects([names::pack(&staged.pack.digest)])?;
            self.report.bytes_copied += publish::put_pack(self.to, &staged)?;
            self.report.packs_new += 1;
            let pack = staged.pack;
            for (digest, range) in loose.pending.drain(..) {
                self.verified.insert(digest, Place { pack, range });
                self.report.segments_copied += 1;
            }
        }
        Ok(())
    }

    /// Everything but the packs, the tag last.
    fn publish(&mut self, wanted: &Wanted) -> Result<(), CopyError> {
        let Layer {
            digest, manifest, ..
        } = &wanted.layer;
        for (object, blob) in [
            (names::chunks(&manifest.chunks.digest), manifest.chunks),
            (names::meta(&manifest.meta.digest), manifest.meta),
        ] {
            let copied =
                transfer::copy_frame_object(self.from, self.to, (&object, blob), &self.staging)?;
            self.report.bytes_copied += copied.map_err(|what| CopyError::Damaged {
                layer: *digest,
                origin: self.from.address(),
                object: object.clone(),
                what,
            })?;
        }
        let object = names::manifest(digest);
        let there = or_damaged(self.to.fetch_all(&object, MANIFEST_BYTES_MAX))?;
        if there.as_deref() != Ok(wanted.manifest.as_slice()) {
            publish::put(self.to, &object, &wanted.manifest)?;
            self.report.bytes_copied += to_u64(wanted.manifest.len());
        }
        let placed = self.placement(&wanted.layer)?;
        // The target's own: it says where the segments are there.
        self.report.bytes_copied += bundle::renew(self.to, digest)?.unwrap_or(0);
        self.trace(wanted)?;
        self.publisher.confirm(&placed)?;
        match &wanted.tag {
            Some((name, bytes)) if !self.is_tagged(name, bytes, digest)? => {
                tags::write_bytes(self.to, name, *digest, bytes)?;
                self.report.bytes_copied += to_u64(bytes.len());
            }
            Some(_) => {}
            // Nothing names it: the grace of layers that lose their tag gives time to.
            None => lease::write_untagged(self.to, *digest)?,
        }
        Ok(())
    }

    /// Brings the trace that the tag names, if there is one. It only makes mounts faster: a layer whose trace is lost is copied
    /// without.
    fn trace(&mut self, wanted: &Wanted) -> Result<(), CopyError> {
        let Some(digest) = wanted.trace else {
            return Ok(());
        };
        if self.has_trace(wanted)? {
            return Ok(());
        }
        match trace::read(self.from, &digest) {
            Ok(found) => {
                trace::write(&self.publisher, &found)?;
                self.report.traces_copied += 1;
                self.report.bytes_copied += to_u64(found.to_bytes().len());
            }
            Err(
                error @ (LayerError::Damaged { .. }
                | LayerError::Origin(
                    OriginError::NotFound { .. } | OriginError::WrongAnswer { .. },
                )),
            ) => {
                tracing::warn!(layer = wanted.reference, %error, "copied without its trace");
                self.report.traces_lost += 1;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn has_trace(&self, wanted: &Wanted) -> Result<bool, CopyError> {
        let Some(digest) = wanted.trace else {
            return Ok(true);
        };
        match trace::read(self.to, &digest) {
            Ok(_) => Ok(true),
            Err(LayerError::Origin(error)) => Ok(or_damaged::<()>(Err(error))?.is_ok()),
            Err(_) => Ok(false),
        }
    }

    fn is_placed(&self, layer: &Layer) -> bool {
        let there = layer::read_placement(self.to, &layer.digest, &layer.manifest);
        let ours = places::placement(&layer.digest, &layer.manifest, &self.verified);
        matches!((there, ours), (Ok(there), Some(ours)) if places::same(&there, &ours))
    }

    /// Writes the target's placement if it has none that says the same; gives the layer as it is there.
    fn placement(&mut self, layer: &Layer) -> Result<Layer, CopyError> {
        let placement = places::placement(&layer.digest, &layer.manifest, &self.verified)
            .expect("every segment of the layer was found or copied");
        if !self.is_placed(layer) {
            let (object, bytes) = (names::placement(&layer.digest), placement.to_bytes());
            self.to.replace(&object, &bytes)?;
            self.report.bytes_copied += to_u64(bytes.len());
        }
        Ok(Layer {
            placement,
            ..layer.clone()
        })
    }

    fn is_tagged(&self, name: &TagName, bytes: &[u8], layer: &Digest) -> Result<bool, CopyError> {
        let there = or_damaged(self.to.fetch_all(&names::tag(name), TAG_BYTES_MAX))?;
        if there.as_deref() != Ok(bytes) {
            return Ok(false);
        }
        let bytes = or_damaged(self.to.fetch_all(names::INDEX, INDEX_BYTES_MAX))?;
        let index = bytes.ok().and_then(|bytes| Index::parse(&bytes).ok());
        Ok(index.is_some_and(|index| index.tags.get(&name.to_string()) == Some(layer)))
    }
}
