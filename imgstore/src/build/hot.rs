//! Which pieces of which files go into hot segments, and where: decided from a layer's chunk indexes and a trace. Pure.
//!
//! A traced block is a block of the layer's data; every file that refers to it has it hot, since deduplication may have made
//! one block of several files. A file with hot blocks gets chunks as large as they can be without bringing along more than
//! a sixteenth of blocks that nobody touched; its hot chunks are placed in the order in which their first block was touched,
//! window by window, and cut into segments. Within a window they keep the order of the old layer: the start that was traced has
//! the whole window on its way anyway, and another one, which reads the same files in the order of their names, does not jump
//! about. All other chunks stay where they are.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::format::erofs::extents::ChunkIndex;
use crate::format::trace::Blocks;
use crate::ids::{BLOCK_SIZE, to_u64};
use crate::tree::InodeId;

/// Most chunk indexes of a file: 2 MiB of metadata (as in `scan`).
const INDEXES_MAX: u64 = 1 << 18;
/// One block in so many may come along untouched.
const SLACK_PART: usize = 16;
/// Touched blocks in a window: 4 MiB, about a megabyte as fetched.
const WINDOW_BLOCKS: usize = 1024;

/// A run of blocks of the old layer that is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Piece {
    /// First block in the old flat image.
    pub from: u32,
    /// Blocks.
    pub blocks: u32,
}

/// Where a piece is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotAddr {
    /// Hot segment.
    pub segment: usize,
    /// First block in it.
    pub block: u32,
}

/// A hot segment: its pieces in order, by their old address, so that what touched before touches again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HotSegment {
    /// The pieces.
    pub pieces: Vec<Piece>,
    /// Blocks in all.
    pub blocks: u32,
}

/// Where one chunk of a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk {
    /// Nowhere: zeros.
    Hole,
    /// In the old layer, at this block of its flat image.
    Old(u32),
    /// In a hot segment.
    Hot(HotAddr),
}

/// A file's new chunk index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlan {
    /// log2 of the chunk size in blocks.
    pub bits: u8,
    /// The chunks.
    pub chunks: Vec<Chunk>,
}

/// The plan.
#[derive(Debug, Default)]
pub struct HotPlan {
    /// The hot segments, first touched first.
    pub segments: Vec<HotSegment>,
    /// Every file that has data.
    pub files: HashMap<InodeId, FilePlan>,
    /// Blocks of files that the trace touches.
    pub touched_blocks: u64,
}

/// Chunks of all files by their place in the flat image.
struct Places {
    /// (first flat block, blocks, index into the files, first block in the file), sorted.
    chunks: Vec<(u32, u32, usize, u32)>,
    longest: u32,
}

fn small(n: u64) -> u32 {
    u32::try_from(n).expect(
        "a file whose index fits 1 GiB has less than 2^37 blocks, its chunks less than 2^32",
    )
}

/// Blocks of a file of this size.
fn file_blocks(index: &ChunkIndex) -> u64 {
    index.size.div_ceil(BLOCK_SIZE)
}

impl Places {
    fn of(files: &[(InodeId, ChunkIndex)]) -> Self {
        let mut chunks = Vec::new();
        for (number, (_, index)) in files.iter().enumerate() {
            for (n, block) in index.blocks.iter().enumerate() {
                let Some(block) = block else { continue };
                let first = to_u64(n) << index.bits;
                let blocks = (file_blocks(index) - first).min(1 << index.bits);
                // A hot block beyond 16 TiB of a file is left where it is.
                if let Ok(first) = u32::try_from(first) {
                    chunks.push((*block, small(blocks), number, first));
                }
            }
        }
        chunks.sort_unstable();
        let longest = chunks.iter().map(|c| c.1).max().unwrap_or(0);
        Self { chunks, longest }
    }

    /// The chunks that lie in `[start, end)`, whole or in part.
    fn within(&self, start: u32, end: u32) -> impl Iterator<Item = &(u32, u32, usize, u32)> {
        let from = start.saturating_sub(self.longest);
        let first = self.chunks.partition_point(|c| c.0 < from);
        let rest = self.chunks.get(first..).unwrap_or_default();
        rest.iter()
            .take_while(move |c| c.0 < end)
            .filter(move |c| c.0.saturating_add(c.1) > start)
    }
}

/// A file's touched blocks, with the order in which they were touched first.
pub type Touched = BTreeMap<u32, usize>;

/// The touched blocks of each file; `first` is the first block of the layer's data in the flat image.
pub fn touched(
    files: &[(InodeId, ChunkIndex)],
    runs: &[Blocks],
    first: u32,
) -> BTreeMap<usize, Touched> {
    let places = Places::of(files);
    let mut out: BTreeMap<usize, Touched> = BTreeMap::new();
    let mut rank = 0;
    for run in runs {
        let start = first.saturating_add(run.first);
        let end = start.saturating_add(run.count);
        for (flat, blocks, file, in_file) in places.within(start, end) {
            let (from, to) = (start.max(*flat), end.min(flat.saturating_add(*blocks)));
            let touched = out.entry(*file).or_default();
            for block in from..to {
                let at = rank + usize::try_from(block - start).unwrap_or(0);
                touched.entry(in_file + (block - flat)).or_insert(at);
            }
        }
        rank += usize::try_from(run.count).unwrap_or(0);
    }
    out
}

/// The largest chunks, as log2 of blocks, that bring along few blocks that nobody touched.
fn choose_bits(index: &ChunkIndex, touched: &Touched) -> u8 {
    let total = file_blocks(index);
    for bits in (0..=index.bits).rev() {
        let units: BTreeSet<u32> = touched.keys().map(|b| b >> bits).collect();
        let span = |unit: &u32| (total - (u64::from(*unit) << bits)).min(1 << bits);
        let blocks: u64 = units.iter().map(span).sum();
        let slack = to_u64(touched.len() / SLACK_PART);
        let finer_is_too_long = bits == 0 || (total >> (bits - 1)) > INDEXES_MAX;
        if blocks <= to_u64(touched.len()) + slack || finer_is_too_long {
            return bits;
        }
    }
    0
}

/// Plans the hot segments of `files` for the touched `runs` of a layer whose data begins at flat block `first`; a segment has
/// about `segment_blocks` blocks.
pub fn plan(
    files: &[(InodeId, ChunkIndex)],
    runs: &[Blocks],
    first: u32,
    segment_blocks: u32,
) -> HotPlan {
    let touched = touched(files, runs, first);
    let mut plan = HotPlan::default();
    // (the window in which it was touched, piece, file, chunk)
    let mut hot: Vec<(usize, Piece, usize, u32)> = Vec::new();
    for (number, (id, index)) in files.iter().enumerate() {
        let touched = touched.get(&number);
        let bits = touched.map_or(index.bits, |t| choose_bits(index, t));
        let file = split(index, bits);
        if let Some(touched) = touched {
            plan.touched_blocks += to_u64(touched.len());
            let mut first_touch: BTreeMap<u32, usize> = BTreeMap::new();
            for (block, rank) in touched {
                let at = first_touch.entry(block >> bits).or_insert(*rank);
                *at = (*at).min(*rank);
            }
            for (chunk, rank) in first_touch {
                let at = usize::try_from(chunk).unwrap_or(usize::MAX);
                if let Some(Chunk::Old(from)) = file.chunks.get(at) {
                    let left = file_blocks(index) - (u64::from(chunk) << bits);
                    let blocks = small(left.min(1 << bits));
                    let from = *from;
                    let piece = Piece { from, blocks };
                    hot.push((rank / WINDOW_BLOCKS, piece, number, chunk));
                }
            }
        }
        plan.files.insert(*id, file);
    }
    hot.sort_unstable();
    let places = cut(&mut plan, hot.iter().map(|h| h.1), segment_blocks);
    for (_, piece, number, chunk) in hot {
        let id = files.get(number).map(|(id, _)| *id);
        let file = id.and_then(|id| plan.files.get_mut(&id));
        let at = usize::try_from(chunk).unwrap_or(usize::MAX);
        let slot = file.and_then(|f| f.chunks.get_mut(at));
        if let (Some(slot), Some(place)) = (slot, places.get(&piece)) {
            *slot = Chunk::Hot(*place);
        }
    }
    plan
}

/// The same places in chunks of `bits`, which is at most what they have now.
fn split(index: &ChunkIndex, bits: u8) -> FilePlan {
    let per = 1_u32 << (index.bits - bits);
    let total = file_blocks(index).div_ceil(1 << bits);
    let mut chunks = Vec::new();
    for block in &index.blocks {
        for n in 0..per {
            if to_u64(chunks.len()) == total {
                break;
            }
            chunks.push(block.map_or(Chunk::Hole, |b| Chunk::Old(b + (n << bits))));
        }
    }
    FilePlan { bits, chunks }
}

/// Cuts pieces into segments, each once, and gives every piece its place.
fn cut(
    plan: &mut HotPlan,
    pieces: impl Iterator<Item = Piece>,
    segment_blocks: u32,
) -> HashMap<Piece, HotAddr> {
    let mut seen = std::collections::HashSet::new();
    let mut current = HotSegment::default();
    for piece in pieces {
        if !seen.insert(piece) {
            continue;
        }
        if current.blocks > 0 && current.blocks + piece.blocks > segment_blocks {
            plan.segments.push(std::mem::take(&mut current));
        }
        current.blocks += piece.blocks;
        current.pieces.push(piece);
    }
    if current.blocks > 0 {
        plan.segments.push(current);
    }
    let mut places = HashMap::new();
    for (number, segment) in plan.segments.iter_mut().enumerate() {
        segment.pieces.sort_unstable();
        let mut block = 0;
        for piece in &segment.pieces {
            let addr = HotAddr {
                segment: number,
                block,
            };
            places.insert(*piece, addr);
            block += piece.blocks;
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(n: usize, bits: u8, kib: u64, blocks: &[Option<u32>]) -> (InodeId, ChunkIndex) {
        let index = ChunkIndex {
            bits,
            size: kib << 10,
            blocks: blocks.to_vec(),
        };
        (InodeId(n), index)
    }

    fn blocks(first: u32, count: u32) -> Blocks {
        Blocks { first, count }
    }

    #[test]
    fn a_touched_part_is_packed_in_small_chunks_and_the_rest_stays() {
        // 64 KiB chunks at blocks 100 and 116 of the flat image; the data begins at 100.
        let files = [file(1, 4, 100, &[Some(100), Some(116)])];
        let plan = plan(&files, &[blocks(20, 2), blocks(3, 1)], 100, 64);
        let piece = |from, blocks| Piece { from, blocks };
        assert_eq!(plan.touched_blocks, 3);
        assert_eq!(plan.segments.len(), 1);
        assert_eq!(
            plan.segments[0].pieces,
            [piece(103, 1), piece(120, 1), piece(121, 1)]
        );
        let file = &plan.files[&InodeId(1)];
        assert_eq!((file.bits, file.chunks.len()), (0, 25));
        assert_eq!(file.chunks[2], Chunk::Old(102));
        let hot = |block| Chunk::Hot(HotAddr { segment: 0, block });
        assert_eq!(file.chunks[3], hot(0));
        assert_eq!((file.chunks[20], file.chunks[21]), (hot(1), hot(2)));
        assert_eq!(file.chunks[24], Chunk::Old(124));
    }

    #[test]
    fn a_file_touched_as_a_whole_keeps_its_chunks_and_shared_blocks_are_stored_once() {
        let files = [
            file(1, 4, 70, &[Some(0), Some(16)]),
            file(2, 4, 64, &[Some(0)]),
            file(3, 4, 64, &[Some(32)]),
        ];
        let plan = plan(&files, &[blocks(0, 18)], 0, 16);
        assert_eq!(plan.files[&InodeId(1)].bits, 4);
        assert_eq!(
            plan.files[&InodeId(2)].chunks,
            plan.files[&InodeId(1)].chunks[..1]
        );
        assert_eq!(plan.files[&InodeId(3)].chunks, [Chunk::Old(32)]);
        let sizes: Vec<u32> = plan.segments.iter().map(|s| s.blocks).collect();
        assert_eq!(sizes, [16, 2]);
    }

    /// Mutations: the order of the trace within a window; no windows.
    #[test]
    fn segments_come_in_the_order_of_first_touches_by_windows() {
        let files = [file(
            1,
            0,
            40 << 10,
            &(0..10 << 10).map(Some).collect::<Vec<_>>(),
        )];
        let half = 512;
        let runs = [7 * half, half, 5 * half, 3 * half].map(|first| blocks(first, half));
        let plan = plan(&files, &runs, 0, half);
        let firsts: Vec<u32> = plan.segments.iter().map(|s| s.pieces[0].from).collect();
        assert_eq!(firsts, [half, 7 * half, 3 * half, 5 * half]);
    }

    #[test]
    fn holes_stay_holes() {
        let files = [file(1, 2, 64, &[Some(4), None, Some(8), None])];
        let plan = plan(&files, &[blocks(0, 20)], 0, 64);
        let chunks = &plan.files[&InodeId(1)].chunks;
        assert!(matches!(chunks[0], Chunk::Hot(_)) && matches!(chunks[2], Chunk::Hot(_)));
        assert_eq!((chunks[1], chunks[3]), (Chunk::Hole, Chunk::Hole));
    }
}
