//! Reading and writing ZFiles: a medium that decompresses, and a writer that compresses.
//!
//! Reads decode whole blocks, check their checksums where there are any, and keep a few decoded blocks, for
//! neighbours are read next. A damaged block is an error of that block alone.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use super::DiskError;
use crate::format::FormatError;
use crate::format::overlaybd::zfile::{
    Algorithm, CHECKSUM_BYTES, DATA, DIGEST, HEADER, HEADER_BYTES, JumpTable, OVERWRITTEN, SEALED,
    ZHeader, block_crc, table_crc,
};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;

/// Decoded blocks kept: 2 MiB of the largest ones.
const KEPT: usize = 32;
/// Level of zstd blocks, as the other writers use it.
const LEVEL: i32 = 3;

/// A decompressed view of a ZFile.
#[derive(Debug)]
pub struct ZFileMedia {
    stored: Arc<dyn Media>,
    name: String,
    header: ZHeader,
    table: JumpTable,
    /// Most recently used last.
    kept: Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>,
}

impl ZFileMedia {
    /// Opens a ZFile; `name` is for messages.
    ///
    /// # Errors
    /// [`DiskError::Damaged`] names the field that is wrong.
    pub fn open(stored: Arc<dyn Media>, name: &str) -> Result<Self, DiskError> {
        let read = |offset: u64, len: usize| -> Result<Vec<u8>, DiskError> {
            let mut bytes = vec![0; len];
            stored
                .read_at(&mut bytes, offset)
                .map_err(DiskError::io("read", name))?;
            Ok(bytes)
        };
        let damaged = DiskError::damaged;
        let len = stored.size().map_err(DiskError::io("read", name))?;
        let mut header =
            ZHeader::parse(&read(0, HEADER_BYTES)?, "header").map_err(damaged(name))?;
        let mut limit = len;
        if !header.must_begin().map_err(damaged(name))? {
            limit = len.saturating_sub(to_u64(HEADER_BYTES));
            let trailer = read(limit, HEADER_BYTES)?;
            header = ZHeader::parse(&trailer, "trailer").map_err(damaged(name))?;
            header.must_end().map_err(damaged(name))?;
        }
        let (offset, bytes) = header.table(limit).map_err(damaged(name))?;
        let table = read(offset, to_usize(bytes))?;
        let found = table_crc(&table);
        if header.flags & DIGEST != 0 && found != header.index_crc {
            let expected = format!("{:#010x}", header.index_crc);
            let found = format!("{found:#010x}");
            let error = FormatError::new("checksum of the jump table", expected, found);
            return Err(damaged(name)(error));
        }
        let table = JumpTable::parse(&table, &header).map_err(damaged(name))?;
        Ok(Self {
            stored,
            name: name.to_owned(),
            header,
            table,
            kept: Mutex::new(VecDeque::new()),
        })
    }

    /// The header that counts.
    pub const fn header(&self) -> &ZHeader {
        &self.header
    }

    /// Stored lengths of the blocks.
    pub fn stored_lengths(&self) -> &[u32] {
        self.table.lengths()
    }

    fn block(&self, number: u64) -> io::Result<Arc<Vec<u8>>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|(n, _)| *n == number)
            && let Some(found) = kept.remove(at)
        {
            let block = Arc::clone(&found.1);
            kept.push_back(found);
            return Ok(block);
        }
        drop(kept);
        let block = Arc::new(self.decode(number)?);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back((number, Arc::clone(&block)));
        Ok(block)
    }

    fn decode(&self, number: u64) -> io::Result<Vec<u8>> {
        let damaged = |expected: String, found: String| {
            let text = format!(
                "`{}`: block {number} is damaged: expected {expected}, found {found}",
                self.name
            );
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let (offset, len) = self
            .table
            .find(number)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        let mut stored = vec![0; to_usize(u64::from(len))];
        self.stored.read_at(&mut stored, offset)?;
        if self.header.verify {
            let (block, sum) = stored
                .split_last_chunk::<CHECKSUM_BYTES>()
                .ok_or(io::ErrorKind::InvalidData)?;
            let (expected, found) = (u32::from_le_bytes(*sum), block_crc(block));
            if expected != found {
                return Err(damaged(
                    format!("{expected:#010x}"),
                    format!("{found:#010x}"),
                ));
            }
            stored.truncate(stored.len() - CHECKSUM_BYTES);
        }
        let plain_len = to_usize(self.header.plain_len(number));
        let mut plain = vec![0; plain_len];
        let written = match self.header.algorithm {
            Algorithm::Lz4 => lz4_flex::block::decompress_into(&stored, &mut plain)
                .map_err(|error| error.to_string()),
            Algorithm::Zstd => zstd::bulk::decompress_to_buffer(&stored, &mut plain)
                .map_err(|error| error.to_string()),
        };
        match written {
            Ok(len) if len == plain_len => Ok(plain),
            Ok(len) => Err(damaged(format!("{plain_len} bytes"), format!("{len}"))),
            Err(error) => Err(damaged(format!("{plain_len} bytes"), error)),
        }
    }
}

impl Media for ZFileMedia {
    fn size(&self) -> io::Result<u64> {
        Ok(self.header.original_size)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let len = self.header.original_size;
        let end = offset.checked_add(to_u64(buffer.len()));
        if end.is_none_or(|end| end > len) {
            return Err(crate::media::past_end(offset, buffer.len(), len));
        }
        let size = u64::from(self.header.block_size);
        let (mut at, mut rest) = (offset, buffer);
        while !rest.is_empty() {
            let block = self.block(at / size)?;
            let from = block.get(to_usize(at % size)..).unwrap_or_default();
            let step = from.len().min(rest.len());
            let (now, later) = rest.split_at_mut(step);
            now.copy_from_slice(from.get(..step).unwrap_or_default());
            if step == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            at += to_u64(step);
            rest = later;
        }
        Ok(())
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(crate::media::read_only())
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(crate::media::read_only())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// How a ZFile is written.
#[derive(Debug, Clone, Copy)]
pub struct ZOptions {
    /// Compression.
    pub algorithm: Algorithm,
    /// Bytes of a block: a power of two from 4,096 to 32,768. (64 KiB is legal, but the other implementation cannot
    /// read such a block when it does not compress.)
    pub block_size: u32,
    /// Whether every block has a checksum.
    pub verify: bool,
}

impl Default for ZOptions {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Zstd,
            block_size: 32_768,
            verify: true,
        }
    }
}

/// Compresses all of `plain` into `out`, in order and in one pass, the header of the final values last.
///
/// # Errors
/// What either said.
pub fn compress(plain: &dyn Media, out: &dyn Media, options: ZOptions) -> io::Result<()> {
    let original_size = plain.size()?;
    let mut header = ZHeader {
        flags: HEADER | DATA | DIGEST,
        index_offset: 0,
        blocks: original_size.div_ceil(u64::from(options.block_size)),
        original_size,
        index_crc: 0,
        block_size: options.block_size,
        algorithm: options.algorithm,
        verify: options.verify,
    };
    out.write_at(&header.to_bytes(), 0)?;
    let mut at = to_u64(HEADER_BYTES);
    let mut table = Vec::new();
    for number in 0..header.blocks {
        let mut block = vec![0; to_usize(header.plain_len(number))];
        plain.read_at(&mut block, number * u64::from(options.block_size))?;
        let mut stored = match options.algorithm {
            Algorithm::Lz4 => lz4_flex::block::compress(&block),
            Algorithm::Zstd => zstd::bulk::compress(&block, LEVEL)?,
        };
        if options.verify {
            stored.extend(block_crc(&stored).to_le_bytes());
        }
        out.write_at(&stored, at)?;
        let len = u32::try_from(stored.len()).map_err(io::Error::other)?;
        table.write_all(&len.to_le_bytes())?;
        at += u64::from(len);
    }
    out.write_at(&table, at)?;
    header.index_offset = at;
    header.index_crc = table_crc(&table);
    header.flags = DATA | SEALED | DIGEST;
    out.write_at(&header.to_bytes(), at + to_u64(table.len()))?;
    out.sync()?;
    // Only now: a header that alone counts must not be there before the rest is.
    header.flags = HEADER | DATA | DIGEST | OVERWRITTEN;
    out.write_at(&header.to_bytes(), 0)?;
    out.sync()
}
