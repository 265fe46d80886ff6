//! Which chunk goes into which segment: decided from hashes alone, so that the layout is a function of tree, options and
//! dictionaries.
//!
//! Files come in an order that puts together what is read together. A file of at least a segment gets segments of its own,
//! cut at multiples of the segment size, so that the same file gives the same segments wherever it appears. Smaller files
//! share segments; these are cut where a file's hash says so (once a quarter is full), so that a file more or less shifts
//! only its neighbourhood and the segments after it are found again on the origin.

use std::collections::HashMap;

use super::dictionary::{DictChunk, Dictionary};
use super::error::BuildError;
use super::options::{BuildOptions, FileOrder};
use super::scan::{Scanned, Unit};
use crate::format::erofs::inode::{ChunkAddr, FileMap};
use crate::format::manifest::{SEGMENT_BYTES_MAX, SEGMENTS_MAX, Segment};
use crate::ids::{BLOCK_SIZE, Digest, to_u64};
use crate::tree::{InodeId, Kind, Tree};

/// Place of a chunk: device slot (from 0) and block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addr {
    /// Index into the layer's segments: own ones first, then foreign ones.
    pub slot: usize,
    /// First block in the segment.
    pub block: u32,
    /// Blocks.
    pub blocks: u32,
}

/// A piece of a file in a planned segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The file.
    pub file: InodeId,
    /// Offset in the file.
    pub offset: u64,
    /// Blocks, the last one padded with zeros.
    pub blocks: u32,
}

/// A segment to be made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Planned {
    /// Its pieces in order.
    pub parts: Vec<Part>,
    /// Blocks in all.
    pub blocks: u32,
}

/// A dictionary's segment that the layer refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Foreign {
    /// Index into the dictionaries.
    pub layer: usize,
    /// Index of the segment there.
    pub index: usize,
    /// The segment.
    pub segment: Segment,
}

/// The whole plan.
#[derive(Debug, Default)]
pub struct Layout {
    /// Segments to make, in device order.
    pub own: Vec<Planned>,
    /// Segments to refer to, behind them.
    pub foreign: Vec<Foreign>,
    /// Every chunk's place.
    pub addrs: HashMap<Digest, Addr>,
}

/// What files are read together: the ending of the name, with all versions of shared libraries as one.
fn kind_of(name: &[u8]) -> Vec<u8> {
    if name.windows(4).any(|w| w == b".so.") {
        return b"so".to_vec();
    }
    match name.iter().rposition(|b| *b == b'.') {
        Some(dot) if dot > 0 => {
            let ending = name.get(dot + 1..).unwrap_or_default();
            if ending.len() <= 8 {
                ending.to_ascii_lowercase()
            } else {
                Vec::new()
            }
        }
        _ => Vec::new(),
    }
}

/// Files with data, each once, in layout order.
fn ordered_files(
    tree: &Tree,
    scanned: &HashMap<InodeId, Scanned>,
    order: FileOrder,
) -> Vec<InodeId> {
    let mut seen = std::collections::HashSet::new();
    let mut files: Vec<(Vec<u8>, Vec<u8>, InodeId)> = Vec::new();
    for (path, id) in tree.walk() {
        if matches!(tree.inode(id).kind, Kind::File(_))
            && scanned.contains_key(&id)
            && seen.insert(id)
        {
            let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
            let kind = if order == FileOrder::Kind {
                kind_of(name)
            } else {
                Vec::new()
            };
            files.push((kind, path, id));
        }
    }
    files.sort();
    files.into_iter().map(|(_, _, id)| id).collect()
}

/// Dictionary segments of which at least the wanted share is used, in dictionary order.
fn choose_foreign(files: &[&Scanned], dictionary: &Dictionary, share_percent: u64) -> Vec<Foreign> {
    let mut used: HashMap<(usize, usize), u64> = HashMap::new();
    let mut counted = std::collections::HashSet::new();
    for unit in files.iter().flat_map(|f| f.units.iter().flatten()) {
        if let Some(chunk) = find_in(dictionary, unit)
            && counted.insert(unit.digest)
        {
            *used.entry((chunk.layer, chunk.segment)).or_insert(0) +=
                u64::from(chunk.blocks) * BLOCK_SIZE;
        }
    }
    let segment = |layer: usize, index: usize| {
        dictionary
            .layers
            .get(layer)?
            .manifest
            .segments
            .get(index)
            .copied()
    };
    let mut out: Vec<Foreign> = used
        .into_iter()
        .filter_map(|((layer, index), bytes)| {
            let segment = segment(layer, index)?;
            (bytes * 100 >= segment.len() * share_percent).then_some(Foreign {
                layer,
                index,
                segment,
            })
        })
        .collect();
    out.sort_by_key(|f| (f.layer, f.index));
    // One slot a segment, also where two dictionaries have it.
    let mut digests = std::collections::HashSet::new();
    out.retain(|f| digests.insert(f.segment.digest()));
    out
}

fn find_in<'a>(dictionary: &'a Dictionary, unit: &Unit) -> Option<&'a DictChunk> {
    dictionary
        .chunks
        .get(&unit.digest)
        .filter(|chunk| chunk.blocks == unit.blocks)
}

struct Packer {
    target: u32,
    cap: u32,
    own: Vec<Planned>,
    current: Planned,
}

impl Packer {
    fn close(&mut self) {
        if self.current.blocks > 0 {
            self.own.push(std::mem::take(&mut self.current));
        }
    }

    /// Room for `blocks` more in the current segment, or a new one.
    fn push(&mut self, part: Part, limit: u32) -> Addr {
        if self.current.blocks > 0 && self.current.blocks + part.blocks > limit {
            self.close();
        }
        let addr = Addr {
            slot: self.own.len(),
            block: self.current.blocks,
            blocks: part.blocks,
        };
        self.current.blocks += part.blocks;
        self.current.parts.push(part);
        addr
    }
}

/// The units of a file that are new in this layer, with their index; marks them as placed.
fn new_units<'a>(
    file: &'a Scanned,
    addrs: &HashMap<Digest, Addr>,
    foreign: &HashMap<Digest, Addr>,
) -> Vec<(usize, &'a Unit)> {
    let mut inside = std::collections::HashSet::new();
    file.units
        .iter()
        .enumerate()
        .filter_map(|(i, unit)| unit.as_ref().map(|u| (i, u)))
        .filter(|(_, u)| {
            !addrs.contains_key(&u.digest)
                && !foreign.contains_key(&u.digest)
                && inside.insert(u.digest)
        })
        .collect()
}

fn pack_file(
    packer: &mut Packer,
    addrs: &mut HashMap<Digest, Addr>,
    id: InodeId,
    file: &Scanned,
    units: &[(usize, &Unit)],
) {
    let blocks: u32 = units
        .iter()
        .fold(0, |sum, (_, u)| sum.saturating_add(u.blocks));
    let large = blocks >= packer.target;
    if large || packer.current.blocks.saturating_add(blocks) > packer.target {
        packer.close();
    }
    // The end of a large file joins its last whole segment if it is short.
    let mut left = blocks;
    for (index, unit) in units {
        let (offset, _) = file.span(*index);
        let short_end =
            large && left <= packer.target / 4 && packer.current.blocks + left <= packer.cap;
        let limit = if short_end { packer.cap } else { packer.target };
        let addr = packer.push(
            Part {
                file: id,
                offset,
                blocks: unit.blocks,
            },
            limit,
        );
        addrs.insert(unit.digest, addr);
        left -= unit.blocks;
    }
    // One file in eight ends a segment that is at least a quarter full.
    let ends = units
        .last()
        .is_some_and(|(_, u)| u.digest.as_bytes().first().is_some_and(|b| *b < 32));
    if large || (ends && packer.current.blocks >= packer.target / 4) {
        packer.close();
    }
}

fn plan_with(
    order: &[(InodeId, &Scanned)],
    foreign: &[Foreign],
    dictionary: &Dictionary,
    target: u64,
) -> Layout {
    let slots: HashMap<Digest, usize> = foreign
        .iter()
        .enumerate()
        .map(|(i, f)| (f.segment.digest(), i))
        .collect();
    let foreign_addr = |unit: &Unit| {
        let chunk = find_in(dictionary, unit)?;
        let digest = dictionary
            .layers
            .get(chunk.layer)?
            .manifest
            .segments
            .get(chunk.segment)?
            .digest();
        Some(Addr {
            slot: *slots.get(&digest)?,
            block: chunk.block,
            blocks: chunk.blocks,
        })
    };
    let mut borrowed: HashMap<Digest, Addr> = HashMap::new();
    for unit in order.iter().flat_map(|(_, f)| f.units.iter().flatten()) {
        if let Some(addr) = foreign_addr(unit) {
            borrowed.insert(unit.digest, addr);
        }
    }
    let blocks =
        |bytes: u64| u32::try_from(bytes / BLOCK_SIZE).expect("a segment has at most 1024 blocks");
    let mut packer = Packer {
        target: blocks(target),
        cap: blocks(SEGMENT_BYTES_MAX),
        own: Vec::new(),
        current: Planned::default(),
    };
    let mut addrs: HashMap<Digest, Addr> = HashMap::new();
    for (id, file) in order {
        let units = new_units(file, &addrs, &borrowed);
        if !units.is_empty() {
            pack_file(&mut packer, &mut addrs, *id, file, &units);
        }
    }
    packer.close();
    let own = packer.own;
    for (digest, addr) in borrowed {
        addrs.insert(
            digest,
            Addr {
                slot: addr.slot + own.len(),
                ..addr
            },
        );
    }
    Layout {
        own,
        foreign: foreign.to_vec(),
        addrs,
    }
}

/// Plans the segments. A tree that needs more than 65,535 of them gets larger ones.
///
/// # Errors
/// [`BuildError::TooManySegments`] when even 4 MiB are not enough.
pub fn plan(
    tree: &Tree,
    scanned: &HashMap<InodeId, Scanned>,
    dictionary: &Dictionary,
    options: &BuildOptions,
) -> Result<Layout, BuildError> {
    let order: Vec<(InodeId, &Scanned)> = ordered_files(tree, scanned, options.order)
        .into_iter()
        .filter_map(|id| scanned.get(&id).map(|file| (id, file)))
        .collect();
    let files: Vec<&Scanned> = order.iter().map(|(_, f)| *f).collect();
    let foreign = choose_foreign(&files, dictionary, options.dict_share_percent);
    let mut target = options.segment_bytes;
    loop {
        let layout = plan_with(&order, &foreign, dictionary, target);
        let count = layout.own.len() + layout.foreign.len();
        if count <= SEGMENTS_MAX {
            return Ok(layout);
        }
        if target >= SEGMENT_BYTES_MAX {
            return Err(BuildError::TooManySegments { found: count });
        }
        target *= 2;
    }
}

/// The chunk indexes of every file.
pub fn file_maps(
    scanned: &HashMap<InodeId, Scanned>,
    layout: &Layout,
) -> HashMap<InodeId, FileMap> {
    scanned
        .iter()
        .map(|(id, file)| (*id, file_map(file, layout)))
        .collect()
}

fn file_map(file: &Scanned, layout: &Layout) -> FileMap {
    let chunk_blocks = 1u32 << file.chunk_bits;
    let mut chunks = Vec::new();
    for (index, unit) in file.units.iter().enumerate() {
        let (_, padded) = file.span(index);
        let blocks = u32::try_from(padded / BLOCK_SIZE).expect("a unit has at most 1024 blocks");
        let addr = unit.as_ref().map(|u| {
            layout
                .addrs
                .get(&u.digest)
                .expect("the layout placed every unit")
        });
        for first in (0..blocks).step_by(usize::try_from(chunk_blocks).expect("fits")) {
            let here = chunk_blocks.min(blocks - first);
            let zero = unit
                .as_ref()
                .is_none_or(|u| all_zero(u, first, here, blocks));
            chunks.push(match addr {
                Some(addr) if !zero => Some(ChunkAddr {
                    device: u16::try_from(addr.slot + 1).expect("at most 65535 segments"),
                    block: addr.block + first,
                }),
                _ => None,
            });
        }
    }
    debug_assert_eq!(
        to_u64(chunks.len()),
        file.len.div_ceil(u64::from(chunk_blocks) * BLOCK_SIZE)
    );
    FileMap {
        chunk_bits: file.chunk_bits,
        chunks,
    }
}

/// Whether the blocks `[first, first + count)` of a unit are known to be zeros. A whole unit never is: it would be `None`.
fn all_zero(unit: &Unit, first: u32, count: u32, blocks: u32) -> bool {
    if count == blocks || first + count > 64 {
        return false;
    }
    let mask = (if count >= 64 {
        u64::MAX
    } else {
        (1u64 << count) - 1
    }) << first;
    unit.zero_mask & mask == mask
}
