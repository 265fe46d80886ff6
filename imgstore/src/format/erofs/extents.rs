//! Where a regular file's data is in the flat image: the chunk index read back. `erofs-rs` keeps its own to itself.

use super::inode::{self, CHUNK_FORMAT_INDEXES, NULL_BLOCK};
use super::superblock::{self, SuperBlock};
use crate::format::FormatError;
use crate::ids::{BLOCK_SIZE, to_u64, to_usize};
use crate::tree::DataRun;

fn field<const N: usize>(image: &[u8], offset: u64) -> Result<[u8; N], FormatError> {
    let bytes = usize::try_from(offset)
        .ok()
        .and_then(|at| image.get(at..))
        .and_then(<[u8]>::first_chunk::<N>);
    bytes.copied().ok_or_else(|| {
        FormatError::new(
            format!("{N} bytes at offset {offset}"),
            "inside the metadata image",
            format!("{} bytes in all", image.len()),
        )
    })
}

/// A regular file's chunk index as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChunkIndex {
    /// log2 of the chunk size in blocks (0 to 10).
    pub bits: u8,
    /// File size in bytes.
    pub size: u64,
    /// First block of each chunk in the flat image; `None` is a hole.
    pub blocks: Vec<Option<u32>>,
}

/// The chunk index of the regular file with inode number `nid`. An empty file has none.
///
/// # Errors
/// An inode or index outside the image, or of a kind that our writer does not write.
pub fn chunk_index(image: &[u8], nid: u64) -> Result<ChunkIndex, FormatError> {
    let (SuperBlock { meta_block, .. }, _) = superblock::read(image)?;
    let at = (u64::from(meta_block) * BLOCK_SIZE).saturating_add(nid.saturating_mul(32));
    field::<{ inode::SIZE }>(image, at)?; // all of the inode, so that sums below cannot overflow
    let format = u16::from_le_bytes(field(image, at)?);
    let icount = u64::from(u16::from_le_bytes(field(image, at + 2)?));
    let size = u64::from_le_bytes(field(image, at + 8)?);
    if size == 0 {
        return Ok(ChunkIndex::default());
    }
    let chunk_format = u32::from_le_bytes(field(image, at + 0x10)?);
    let bits = u8::try_from(chunk_format & !CHUNK_FORMAT_INDEXES).unwrap_or(u8::MAX);
    if format != inode::CHUNK_BASED_EXTENDED
        || chunk_format & CHUNK_FORMAT_INDEXES == 0
        || bits > 10
    {
        let found = format!("format {format:#x}, chunk format {chunk_format:#x}");
        return Err(FormatError::new(
            format!("inode {nid} at offset {at}"),
            "an extended, chunk-based inode with 8-byte indexes",
            found,
        ));
    }
    let chunk = BLOCK_SIZE << bits;
    let xattrs = if icount == 0 {
        0
    } else {
        12 + 4 * (icount - 1)
    };
    let index = (at + to_u64(inode::SIZE) + xattrs).next_multiple_of(8);
    let chunks = size.div_ceil(chunk);
    if chunks > to_u64(image.len()) / 8 {
        let expected = format!("a size whose index fits {} bytes", image.len());
        return Err(FormatError::new(
            format!("inode {nid} at offset {at}"),
            expected,
            size,
        ));
    }
    let mut blocks = Vec::with_capacity(to_usize(chunks));
    for n in 0..chunks {
        let block = u32::from_le_bytes(field(image, index + n * 8 + 4)?);
        blocks.push((block != NULL_BLOCK).then_some(block));
    }
    Ok(ChunkIndex { bits, size, blocks })
}

/// The runs of data of the regular file with inode number `nid`; `stored_offset` is the flat address. Touching chunks are one run.
///
/// # Errors
/// As for [`chunk_index`].
pub fn data_runs(image: &[u8], nid: u64) -> Result<Vec<DataRun>, FormatError> {
    let ChunkIndex { bits, size, blocks } = chunk_index(image, nid)?;
    let chunk = BLOCK_SIZE << bits;
    let mut runs: Vec<DataRun> = Vec::new();
    for (n, block) in blocks.iter().enumerate() {
        let Some(block) = block else { continue };
        let (file_offset, stored_offset) = (to_u64(n) * chunk, u64::from(*block) * BLOCK_SIZE);
        let len = chunk.min(size - file_offset);
        match runs.last_mut() {
            Some(run)
                if run.file_offset + run.len == file_offset
                    && run.stored_offset + run.len == stored_offset =>
            {
                run.len += len
            }
            _ => runs.push(DataRun {
                file_offset,
                len,
                stored_offset,
            }),
        }
    }
    Ok(runs)
}
