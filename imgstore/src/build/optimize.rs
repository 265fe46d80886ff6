//! A layer again, with what a start reads first in segments of its own at the front.
//!
//! The new layer has the same tree; `hot` decides which pieces are copied. Its segments are the hot ones, then those of
//! the old layer, by reference: nothing but the hot segments and the metadata is stored anew. The result is a layer like any
//! other (its own manifest, its own name), so all that verifies, mounts, copies or collects layers needs to know nothing
//! of it; `hot:N` in the manifest says how many segments to fetch ahead. It is a function of the old layer, the trace and
//! the options.
//!
//! Memory is bounded by a batch: the hot bytes are gathered in a staging file, old segment by old segment.

mod compare;

use std::collections::{HashMap, VecDeque};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::error::BuildError;
use super::hot::{self, Chunk, HotPlan};
use super::options::{Phase, Progress, Step};
use super::publish::{self, Publisher};
use super::readback::compare_trees;
use super::segments::{PackWriter, Staged, StagedSegment, Stored};
use crate::format::chunk_table;
use crate::format::erofs::extents::{ChunkIndex, chunk_index, data_runs};
use crate::format::erofs::inode::{ChunkAddr, FileMap};
use crate::format::flat::{FlatLayout, Piece};
use crate::format::manifest::{Blob, FORMAT, Manifest, SEGMENTS_MAX, Segment};
use crate::format::placement::{Pack, Placement, Spot};
use crate::format::tag::Tag;
use crate::format::trace::{Trace, segments_of};
use crate::format::{FormatError, erofs, frame, names};
use crate::ids::{BLOCK_SIZE, Digest, TagName, to_u64, to_usize};
use crate::origin::Origin;
use crate::store::layer::{self, Layer, LayerError};
use crate::store::lease::hold::{PATIENCE, publishing};
use crate::store::reader::{LayerReader, LayerTree, ReaderError};
use crate::tree::{InodeId, Kind};
use compare::Subject;

/// Zstd level of hot segments: few bytes that every start fetches. Decoding does not depend on it.
pub const HOT_LEVEL: i32 = 19;
/// Size of a hot segment in bytes, as that of the others: a read decodes one whole.
pub const HOT_SEGMENT_BYTES: u64 = 256 << 10;
/// In a tag's build record: the layer that was optimised.
pub const FROM: &str = "optimized-from";
/// Hot segments compressed at a time.
const BATCH: usize = 64;
/// Bytes compared at a time.
const COMPARED_BYTES: u64 = 64 << 10;
/// Old segments kept while two readers compare.
const SEGMENTS_KEPT: usize = 16;

/// What can be chosen.
#[derive(Clone)]
pub struct OptimizeOptions {
    /// Zstd level of hot segments.
    pub level: i32,
    /// Worker threads.
    pub threads: usize,
    /// Progress callback.
    pub progress: Option<Progress>,
}

impl Default for OptimizeOptions {
    fn default() -> Self {
        Self {
            level: HOT_LEVEL,
            threads: std::thread::available_parallelism().map_or(2, std::num::NonZero::get),
            progress: None,
        }
    }
}

impl std::fmt::Debug for OptimizeOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OptimizeOptions")
            .field("level", &self.level)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl OptimizeOptions {
    fn report(&self, phase: Phase, bytes: (u64, u64), items: (usize, usize)) {
        if let Some(progress) = &self.progress {
            let items = (to_u64(items.0), to_u64(items.1));
            progress(Step {
                phase,
                bytes,
                items,
            });
        }
    }
}

/// What was done. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct OptimizeReport {
    /// The new layer.
    pub layer: Digest,
    /// The layer it was made from.
    pub from: Digest,
    /// Bytes of this layer that the trace touches.
    pub bytes_traced: u64,
    /// Hot segments.
    pub segments_hot: u64,
    /// Their plain bytes.
    pub bytes_hot: u64,
    /// Their bytes as stored: what a start fetches.
    pub bytes_hot_stored: u64,
    /// Bytes that were new on the origin.
    pub bytes_stored: u64,
    /// Segments stored anew.
    pub segments_new: u64,
    /// Segments of the layer that were there before.
    pub segments_reused: u64,
    /// Bytes of the metadata image.
    pub bytes_meta: u64,
}

/// Why a layer could not be optimised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizeError {
    /// The trace is of other layers.
    #[error("the trace has nothing of layer {layer}: it was recorded on {found}")]
    OtherLayers {
        /// The layer.
        layer: Digest,
        /// The trace's layers.
        found: String,
    },
    /// The trace names blocks that the layer does not have.
    #[error("the trace does not fit layer {layer}: {source}")]
    Foreign {
        /// The layer.
        layer: Digest,
        /// What is wrong.
        #[source]
        source: Box<FormatError>,
    },
    /// The layer cannot be read.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The metadata of the layer is not one of ours.
    #[error("metadata of layer {layer}: {what}")]
    Metadata {
        /// The layer.
        layer: Digest,
        /// What is wrong.
        what: String,
    },
    /// Building or publishing failed.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// The old layer, opened.
struct Old<'a> {
    origin: &'a dyn Origin,
    layer: Layer,
    meta: Vec<u8>,
    flat: FlatLayout,
    kept: Mutex<VecDeque<(usize, Arc<Vec<u8>>)>>,
}

impl Old<'_> {
    fn odd(&self, what: impl std::fmt::Display) -> OptimizeError {
        OptimizeError::Metadata {
            layer: self.layer.digest,
            what: what.to_string(),
        }
    }

    /// A verified segment.
    fn segment(&self, index: usize) -> Result<Arc<Vec<u8>>, LayerError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plain)) = kept.iter().find(|(i, _)| *i == index) {
            return Ok(Arc::clone(plain));
        }
        drop(kept);
        let plain = Arc::new(layer::read_segment(self.origin, &self.layer, index)?);
        kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= SEGMENTS_KEPT {
            kept.pop_front();
        }
        kept.push_back((index, Arc::clone(&plain)));
        Ok(plain)
    }

    /// Segment and block of a block of the flat image.
    fn find(&self, block: u32) -> Option<(usize, u32)> {
        match self.flat.pieces(u64::from(block) * BLOCK_SIZE, 1).first()? {
            Piece::Segment { index, offset, .. } => {
                Some((*index, u32::try_from(offset / BLOCK_SIZE).ok()?))
            }
            Piece::Meta { .. } => None,
        }
    }
}

/// What is published under the new name.
#[derive(Debug, Clone)]
pub struct Target {
    /// The tag to write.
    pub tag: TagName,
    /// The tag of the old layer: labels and build record are kept.
    pub old: Tag,
}

/// Makes a layer whose first segments hold what `trace` touches of `layer`, and writes the tag.
///
/// # Errors
/// [`OptimizeError`]; the tag is as it was then.
pub fn optimize(
    origin: &dyn Origin,
    layer: &Digest,
    trace: &Trace,
    target: Target,
    options: &OptimizeOptions,
) -> Result<OptimizeReport, OptimizeError> {
    let runs = trace.of_layer(layer);
    if runs.is_empty() {
        let layers: Vec<String> = trace.layers.iter().map(|l| l.to_hex()).collect();
        return Err(OptimizeError::OtherLayers {
            layer: *layer,
            found: layers.join(", "),
        });
    }
    let opened = layer::open(origin, layer)?;
    let meta = layer::read_meta(origin, &opened.manifest)?;
    segments_of(&opened.manifest, &runs).map_err(|source| OptimizeError::Foreign {
        layer: *layer,
        source: Box::new(source),
    })?;
    let old = Old {
        origin,
        flat: FlatLayout::new(&opened.manifest),
        layer: opened,
        meta,
        kept: Mutex::new(VecDeque::new()),
    };
    erofs::check::check(&old.meta, &old.layer.manifest).map_err(|e| old.odd(e))?;
    let none = |_: usize| Err("no data is read".to_owned());
    let reader =
        LayerReader::open(&old.meta, &old.layer.manifest, &none).map_err(|e| old.odd(e))?;
    let tree = reader.tree().map_err(|e| old.odd(e))?;
    let files = indexes(&old, &tree)?;
    let first = u32::try_from(old.layer.manifest.meta.size / BLOCK_SIZE).map_err(|e| old.odd(e))?;
    let blocks = u32::try_from(HOT_SEGMENT_BYTES / BLOCK_SIZE).expect("a constant");
    let plan = hot::plan(&files, &runs, first, blocks);
    publishing(origin, |hold| {
        let publisher = Publisher {
            origin,
            hold,
            patience: PATIENCE,
        };
        make(&old, &tree, &plan, target, &publisher, options)
    })
}

/// The chunk indexes of all files with data, in the order of their paths.
fn indexes(old: &Old<'_>, tree: &LayerTree) -> Result<Vec<(InodeId, ChunkIndex)>, OptimizeError> {
    let mut seen = std::collections::HashSet::new();
    let mut files = Vec::new();
    for (_, id) in tree.tree.walk() {
        if let Kind::File(content) = &tree.tree.inode(id).kind
            && content.len > 0
            && seen.insert(id)
        {
            let nid = tree
                .nid(id)
                .ok_or_else(|| old.odd("a file without inode"))?;
            let index = chunk_index(&old.meta, nid).map_err(|e| old.odd(e))?;
            files.push((id, index));
        }
    }
    Ok(files)
}

/// Which old segments go on, and their new numbers.
struct Kept {
    /// Old numbers, in order.
    segments: Vec<usize>,
    /// Old number to new device slot (from 0).
    slots: HashMap<usize, usize>,
}

/// All old segments but those hot ones of an earlier optimisation that no file refers to any more.
fn keep(old: &Old<'_>, plan: &HotPlan) -> Kept {
    let chunks = plan.files.values().flat_map(|f| &f.chunks);
    let used: std::collections::HashSet<usize> = chunks
        .filter_map(|chunk| match chunk {
            Chunk::Old(block) => old.find(*block).map(|(index, _)| index),
            Chunk::Hole | Chunk::Hot(_) => None,
        })
        .collect();
    let manifest = &old.layer.manifest;
    let segments: Vec<usize> = (0..manifest.segments.len())
        .filter(|index| *index >= manifest.hot_segments() || used.contains(index))
        .collect();
    let slot = |(n, index): (usize, &usize)| (*index, plan.segments.len() + n);
    let slots = segments.iter().enumerate().map(slot).collect();
    Kept { segments, slots }
}

fn file_maps(
    old: &Old<'_>,
    plan: &HotPlan,
    kept: &Kept,
) -> Result<HashMap<InodeId, FileMap>, OptimizeError> {
    let addr = |slot: usize, block| -> Result<ChunkAddr, OptimizeError> {
        let device = u16::try_from(slot + 1).map_err(|_e| {
            let found = slot + 1;
            OptimizeError::Build(BuildError::TooManySegments { found })
        })?;
        Ok(ChunkAddr { device, block })
    };
    let one = |chunk: &Chunk| match chunk {
        Chunk::Hole => Ok(None),
        Chunk::Hot(at) => addr(at.segment, at.block).map(Some),
        Chunk::Old(block) => {
            let found = old.find(*block);
            let place = found.and_then(|(index, b)| Some((*kept.slots.get(&index)?, b)));
            let (slot, block) = place
                .ok_or_else(|| old.odd(format_args!("block {block} lies outside the segments")))?;
            addr(slot, block).map(Some)
        }
    };
    let mut maps = HashMap::new();
    for (id, file) in &plan.files {
        let chunks = file.chunks.iter().map(one).collect::<Result<_, _>>()?;
        let chunk_bits = file.bits;
        maps.insert(*id, FileMap { chunk_bits, chunks });
    }
    Ok(maps)
}

fn make(
    old: &Old<'_>,
    tree: &LayerTree,
    plan: &HotPlan,
    target: Target,
    publisher: &Publisher<'_>,
    options: &OptimizeOptions,
) -> Result<OptimizeReport, OptimizeError> {
    let kept = keep(old, plan);
    let count = plan.segments.len() + kept.segments.len();
    if count > SEGMENTS_MAX {
        return Err(BuildError::TooManySegments { found: count }.into());
    }
    let staged = stage(old, plan, options)?;
    let manifest = &old.layer.manifest;
    let mut table: Vec<Segment> = staged.own.iter().map(|s| s.segment).collect();
    table.extend(
        kept.segments
            .iter()
            .filter_map(|i| manifest.segments.get(*i)),
    );
    let maps = file_maps(old, plan, &kept)?;
    let meta = erofs::write::image(&tree.tree, &maps, &table).map_err(BuildError::from)?;
    let chunks = chunks(old, &kept)?;
    let blob = |bytes: &[u8]| Blob {
        digest: Digest::of(bytes),
        size: to_u64(bytes.len()),
    };
    let new = Manifest {
        chunks: blob(&chunks),
        features_compat: vec![Manifest::hot_feature(plan.segments.len())],
        features_incompat: Vec::new(),
        format: FORMAT,
        meta: blob(&meta),
        totals: manifest.totals,
        segments: table,
    };
    let placement = placement(old, &new, &staged, &kept);
    let record = record(old, &target, new.layer());
    publish::check_readable(&new, &placement, &record)?;
    erofs::check::check(&meta, &new).map_err(|e| BuildError::ReadBack {
        what: "metadata image".into(),
        found: e.to_string(),
    })?;
    let subject = Subject {
        old,
        tree,
        meta: &meta,
        manifest: &new,
        staged: &staged,
        kept: &kept,
    };
    publisher.claim(&Layer {
        digest: new.layer(),
        manifest: new.clone(),
        placement: placement.clone(),
    })?;
    subject.compare(options)?;
    let parts = publish::Parts {
        meta: &meta,
        chunks: &chunks,
        manifest: &new,
        placement: &placement,
    };
    let stored = publish::publish(publisher, &staged, &parts, &target.tag, &record)?;
    // Nothing is new if the origin had this very layer.
    let fresh = staged.own.iter().filter(|s| stored > 0 && s.is_new());
    let fresh = to_u64(fresh.count());
    let stored_len = |s: &StagedSegment| match s.stored {
        Stored::New(_, range) | Stored::Known(_, range) => range.len,
    };
    Ok(OptimizeReport {
        layer: placement.layer,
        from: old.layer.digest,
        bytes_traced: plan.touched_blocks * BLOCK_SIZE,
        segments_hot: to_u64(plan.segments.len()),
        bytes_hot: staged.own.iter().map(|s| s.segment.len()).sum(),
        bytes_hot_stored: staged.own.iter().map(stored_len).sum(),
        bytes_stored: stored,
        segments_new: fresh,
        segments_reused: to_u64(count) - fresh,
        bytes_meta: new.meta.size,
    })
}

fn record(old: &Old<'_>, target: &Target, layer: Digest) -> Tag {
    let mut build = target.old.build.clone();
    build.insert(FROM.to_owned(), old.layer.digest.to_hex());
    let mut labels = target.old.labels.clone();
    // It is of the old layer.
    labels.remove(crate::format::trace::TRACE_LABEL);
    let now = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    Tag {
        build,
        bundled: false,
        created: now.map_or(0, |d| d.as_secs()),
        format: FORMAT,
        labels,
        layer,
        tag: target.tag.to_string(),
    }
}

/// The old chunk table with the new numbers: every chunk is where it was. (The copies in hot segments are cut differently.)
fn chunks(old: &Old<'_>, kept: &Kept) -> Result<Vec<u8>, OptimizeError> {
    let blob = old.layer.manifest.chunks;
    let object = names::chunks(&blob.digest);
    let table = layer::read_frame(old.origin, &object, blob.digest, blob.size)?;
    let mut records = chunk_table::parse(&table).map_err(|e| old.odd(e))?;
    let mut moved = Vec::with_capacity(records.len());
    for mut record in records.drain(..) {
        if let Some(slot) = kept.slots.get(&usize::from(record.segment)) {
            record.segment = u16::try_from(*slot).map_err(|e| old.odd(e))?;
            moved.push(record);
        }
    }
    Ok(chunk_table::encode(moved))
}

fn placement(old: &Old<'_>, new: &Manifest, staged: &Staged, kept: &Kept) -> Placement {
    let mut packs: Vec<Pack> = Vec::new();
    let mut numbers: HashMap<Digest, u32> = HashMap::new();
    let mut spots = Vec::with_capacity(new.segments.len());
    let mut add = |pack: Pack, range: crate::origin::ByteRange| {
        let next = u32::try_from(packs.len()).expect("at most one pack a segment");
        let number = *numbers.entry(pack.digest).or_insert_with(|| {
            packs.push(pack);
            next
        });
        let len = u32::try_from(range.len).expect("a frame has at most 5 MiB");
        spots.push(Spot(number, range.start, len));
    };
    for own in &staged.own {
        match own.stored {
            Stored::Known(pack, range) => add(pack, range),
            Stored::New(pack, range) => {
                let pack = staged.packs.get(pack).expect("the pack was finished");
                add(pack.pack, range);
            }
        }
    }
    for index in &kept.segments {
        let (pack, range) = old
            .layer
            .placement
            .find(*index)
            .expect("a checked placement has a spot for every segment");
        add(*pack, range);
    }
    Placement {
        format: FORMAT,
        layer: new.layer(),
        packs,
        segments: spots,
    }
}

/// Writes the plain bytes of all hot segments, one behind the other, into a file; gives where each begins.
fn gather(
    old: &Old<'_>,
    plan: &HotPlan,
    folder: &std::path::Path,
    options: &OptimizeOptions,
) -> Result<(std::fs::File, Vec<u64>), OptimizeError> {
    let failed = |source| BuildError::Staging {
        path: folder.display().to_string(),
        source,
    };
    let file = tempfile::tempfile_in(folder).map_err(failed)?;
    let mut starts = Vec::with_capacity(plan.segments.len());
    // Old segment to (first block in it, blocks, offset in the file): each old segment is read once.
    let mut copies: std::collections::BTreeMap<usize, Vec<(u32, u32, u64)>> =
        std::collections::BTreeMap::new();
    let mut at = 0;
    for segment in &plan.segments {
        starts.push(at);
        for piece in &segment.pieces {
            let (index, block) = old.find(piece.from).ok_or_else(|| {
                old.odd(format_args!(
                    "block {} lies outside the segments",
                    piece.from
                ))
            })?;
            let copy = (block, piece.blocks, at);
            copies.entry(index).or_default().push(copy);
            at += u64::from(piece.blocks) * BLOCK_SIZE;
        }
    }
    let mut done = 0;
    for (n, (index, pieces)) in copies.iter().enumerate() {
        let plain = old.segment(*index)?;
        for (block, blocks, to) in pieces {
            let from = to_usize(u64::from(*block) * BLOCK_SIZE);
            let len = to_usize(u64::from(*blocks) * BLOCK_SIZE);
            let bytes = plain
                .get(from..from + len)
                .ok_or_else(|| old.odd("a chunk reaches beyond its segment"))?;
            file.write_all_at(bytes, *to).map_err(failed)?;
            done += to_u64(len);
        }
        options.report(Phase::Scan, (done, at), (n + 1, copies.len()));
    }
    Ok((file, starts))
}

/// A hot segment that was made: its name and its frame.
type Made = (Segment, Vec<u8>);

/// Makes the hot segments: in batches, compressed by several threads, written in order. Also those that the origin has elsewhere
/// are written: a range that is fetched ahead must not break off.
fn stage(
    old: &Old<'_>,
    plan: &HotPlan,
    options: &OptimizeOptions,
) -> Result<Staged, OptimizeError> {
    let folder = old.origin.staging().unwrap_or_else(std::env::temp_dir);
    let failed = |source| BuildError::Staging {
        path: folder.display().to_string(),
        source,
    };
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let (file, starts) = gather(old, plan, &folder, options)?;
    let total: u64 = plan
        .segments
        .iter()
        .map(|s| u64::from(s.blocks) * BLOCK_SIZE)
        .sum();
    let make = |encoder: &mut frame::Encoder, index: usize| -> Result<Made, std::io::Error> {
        let (Some(segment), Some(start)) = (plan.segments.get(index), starts.get(index)) else {
            return Err(std::io::Error::other("no such segment"));
        };
        let mut plain = vec![0; to_usize(u64::from(segment.blocks) * BLOCK_SIZE)];
        file.read_exact_at(&mut plain, *start)?;
        let segment = Segment(Digest::of(&plain), to_u64(plain.len()));
        Ok((segment, encoder.encode(&plain)))
    };
    let mut writer = PackWriter::new(folder.clone(), old.origin.chunk_bytes());
    let mut own: Vec<StagedSegment> = Vec::with_capacity(plan.segments.len());
    let mut done = 0;
    while own.len() < plan.segments.len() {
        let batch = own.len()..(own.len() + BATCH).min(plan.segments.len());
        for (segment, frame) in in_order(batch, options, &make).map_err(failed)? {
            let stored = writer.store(&frame, segment.len())?;
            own.push(StagedSegment { segment, stored });
            done += segment.len();
        }
        options.report(
            Phase::Store,
            (done, total),
            (own.len(), plan.segments.len()),
        );
    }
    let packs = writer.into_packs()?;
    Ok(Staged { own, packs })
}

/// Makes the segments of a range with several threads; gives them in order.
fn in_order(
    range: std::ops::Range<usize>,
    options: &OptimizeOptions,
    make: &(dyn Fn(&mut frame::Encoder, usize) -> Result<Made, std::io::Error> + Sync),
) -> Result<Vec<Made>, std::io::Error> {
    let next = AtomicUsize::new(range.start);
    let results = Mutex::new(Vec::with_capacity(range.len()));
    let work = || {
        let mut encoder = frame::Encoder::new(options.level);
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= range.end {
                return;
            }
            let made = make(&mut encoder, index);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.push((index, made));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads.min(range.len()) {
            scope.spawn(work);
        }
        work();
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, made)| made).collect()
}
