//! The first read of every file: split into units, hash them, find the holes.
//!
//! Files are independent, so worker threads take them from a shared list; what comes out does not depend on who took what.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::error::BuildError;
use super::options::{BuildOptions, Phase, Step};
use crate::format::manifest::SEGMENT_BYTES_MAX;
use crate::ids::{BLOCK_SIZE, Digest, round_up_to_block, to_u64, to_usize};
use crate::source::content::ContentReader;
use crate::tree::{Content, InodeId, Kind, Tree};

/// Most chunk indexes of a file at the finest grain: 2 MiB of metadata.
const INDEXES_MAX: u64 = 1 << 18;
/// Largest unit in which the zero blocks are kept apart (one bit a block).
const MASKED_UNIT_MAX: u64 = 64 * BLOCK_SIZE;

/// A unit with data: one chunk as deduplication sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unit {
    /// BLAKE3 of the bytes, padded with zeros to whole blocks.
    pub digest: Digest,
    /// Blocks.
    pub blocks: u32,
    /// Bit n is set where block n is all zeros; only kept for units of up to 64 blocks.
    pub zero_mask: u64,
}

/// A file's units. `None` is a unit of zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scanned {
    /// Bytes of a unit (the last one may be shorter).
    pub unit_bytes: u64,
    /// The units in order.
    pub units: Vec<Option<Unit>>,
    /// log2 of the EROFS chunk size in blocks: the unit, or finer where the file is sparse.
    pub chunk_bits: u8,
    /// File size in bytes.
    pub len: u64,
}

impl Scanned {
    /// Offset and padded length in bytes of unit `index`.
    pub fn span(&self, index: usize) -> (u64, u64) {
        let offset = to_u64(index) * self.unit_bytes;
        (
            offset,
            round_up_to_block(self.len - offset).min(self.unit_bytes),
        )
    }
}

/// The unit for a file of this length: `chunk_bytes`, or larger for files so long that their index would grow too big.
fn unit_bytes(len: u64, chunk_bytes: u64) -> u64 {
    let mut unit = chunk_bytes;
    while unit < SEGMENT_BYTES_MAX && len / unit >= INDEXES_MAX {
        unit *= 2;
    }
    unit
}

/// A file with at least one zero block in eight gets the finest index that stays small, so that `SEEK_HOLE` is exact.
fn chunk_bits(len: u64, unit: u64, zero_blocks: u64) -> u8 {
    let mut chunk = unit;
    if unit <= MASKED_UNIT_MAX && zero_blocks * 8 >= len.div_ceil(BLOCK_SIZE) {
        while chunk > BLOCK_SIZE && len / (chunk / 2) <= INDEXES_MAX {
            chunk /= 2;
        }
    }
    u8::try_from((chunk / BLOCK_SIZE).trailing_zeros()).expect("a chunk has at most 1024 blocks")
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<32>();
    words.iter().all(|word| *word == [0; 32]) && rest.iter().all(|byte| *byte == 0)
}

fn scan_file(
    content: &Content,
    options: &BuildOptions,
    buf: &mut Vec<u8>,
    done: &dyn Fn(u64),
) -> Result<Scanned, BuildError> {
    let reader = ContentReader::open(content)?;
    let unit_bytes = unit_bytes(content.len, options.chunk_bytes);
    let mut scanned = Scanned {
        unit_bytes,
        units: Vec::new(),
        chunk_bits: 0,
        len: content.len,
    };
    let mut zero_blocks = 0;
    for index in 0..to_usize(content.len.div_ceil(unit_bytes)) {
        let (offset, padded) = scanned.span(index);
        let len = padded.min(content.len - offset);
        let blocks = padded / BLOCK_SIZE;
        let mut unit = None;
        if !reader.is_hole(offset, len) {
            buf.clear();
            buf.resize(to_usize(padded), 0);
            reader.read_exact_at(buf.get_mut(..to_usize(len)).unwrap_or_default(), offset)?;
            unit = hash_unit(buf, blocks);
        }
        zero_blocks += unit.map_or(blocks, |u| u64::from(u.zero_mask.count_ones()));
        scanned.units.push(unit);
        done(len);
    }
    reader.check_unchanged()?;
    scanned.chunk_bits = chunk_bits(content.len, unit_bytes, zero_blocks);
    Ok(scanned)
}

fn hash_unit(bytes: &[u8], blocks: u64) -> Option<Unit> {
    let mut zero_mask = 0u64;
    let mut zeros = 0;
    for (i, block) in bytes.chunks(to_usize(BLOCK_SIZE)).enumerate() {
        if is_zero(block) {
            zeros += 1;
            if i < 64 {
                zero_mask |= 1 << i;
            }
        }
    }
    if zeros == blocks {
        return None;
    }
    if blocks > 64 {
        zero_mask = 0;
    }
    let blocks = u32::try_from(blocks).expect("a unit has at most 1024 blocks");
    Some(Unit {
        digest: Digest::of(bytes),
        blocks,
        zero_mask,
    })
}

/// Scans every regular file with data that a name reaches.
///
/// # Errors
/// The first file, in path order, that cannot be read or changed.
pub fn scan(tree: &Tree, options: &BuildOptions) -> Result<HashMap<InodeId, Scanned>, BuildError> {
    options.check()?;
    let mut files: Vec<(InodeId, &Content)> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (_, id) in tree.walk() {
        if let Kind::File(content) = &tree.inode(id).kind
            && content.len > 0
            && seen.insert(id)
        {
            files.push((id, content));
        }
    }
    let total = files
        .iter()
        .map(|(_, c)| c.len)
        .fold(0, u64::saturating_add);
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let failed = AtomicBool::new(false);
    let results: Mutex<Vec<(usize, Result<Scanned, BuildError>)>> = Mutex::new(Vec::new());
    let work = || {
        let mut buf = Vec::new();
        let progress = |n| {
            let bytes = (done.fetch_add(n, Ordering::Relaxed) + n, total);
            let started = next.load(Ordering::Relaxed).min(files.len());
            let items = (to_u64(started), to_u64(files.len()));
            options.report(Step {
                phase: Phase::Scan,
                bytes,
                items,
            });
        };
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((_, content)) = files.get(index) else {
                break;
            };
            let result = scan_file(content, options, &mut buf, &progress);
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            results
                .lock()
                .expect("no scan panics while it holds the lock")
                .push((index, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..options.threads {
            scope.spawn(work);
        }
        work();
    });
    let mut results = results.into_inner().expect("all threads have ended");
    results.sort_by_key(|(index, _)| *index);
    let mut out = HashMap::with_capacity(results.len());
    for (index, result) in results {
        let (id, _) = files.get(index).expect("the index came from this list");
        out.insert(*id, result?);
    }
    Ok(out)
}
