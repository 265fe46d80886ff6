//! ZFile: a file compressed in blocks that can be read one by one.
//!
//! ```text
//! header (512) | blocks | jump table: u32 stored length of every block | trailer (512)
//! ```
//! Every block holds `block_size` bytes of the original (the last one what is left) as a raw lz4 block or one zstd frame,
//! with a checksum of the stored bytes behind it where `verify` is set. There is no stored form. The header alone
//! counts where it says that it was overwritten at the end; else the trailer.

use super::crc::{SEED_BLOCK, SEED_HEADER, crc};
use super::{u32_at, u64_at};
use crate::format::FormatError;
use crate::ids::to_u64;

/// Bytes of header and trailer.
pub const HEADER_BYTES: usize = 512;
const MAGIC: [u8; 24] = [
    0x5A, 0x46, 0x69, 0x6C, 0x65, 0x00, 0x01, 0x00, // "ZFile", 0, 1, 0
    0x74, 0x75, 0x6A, 0x69, 0x2E, 0x79, 0x79, 0x66, 0x40, 0x41, 0x6C, 0x69, 0x62, 0x61, 0x62, 0x61,
];
const SIZE: u32 = 96;
/// This is the header, not the trailer.
pub const HEADER: u32 = 1 << 0;
/// Data file.
pub const DATA: u32 = 1 << 1;
/// Complete.
pub const SEALED: u32 = 1 << 2;
/// The header was overwritten at the end and holds the final values.
pub const OVERWRITTEN: u32 = 1 << 3;
/// Digests of header, trailer and jump table are there.
pub const DIGEST: u32 = 1 << 4;
/// Bytes of a block's checksum.
pub const CHECKSUM_BYTES: usize = 4;
/// Block sizes that readers take: powers of two between these.
const BLOCK_MIN: u32 = 4096;
const BLOCK_MAX: u32 = 65_536;
/// Most blocks of a file we open: their table takes 256 MiB.
pub const BLOCKS_MAX: u64 = 1 << 26;

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// Raw lz4 blocks.
    Lz4,
    /// One zstd frame a block.
    Zstd,
}

/// The fields of a header or trailer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZHeader {
    /// See the constants of this file.
    pub flags: u32,
    /// Where the jump table starts, in bytes.
    pub index_offset: u64,
    /// Blocks.
    pub blocks: u64,
    /// Bytes of the original.
    pub original_size: u64,
    /// Checksum of the jump table.
    pub index_crc: u32,
    /// Original bytes in a block.
    pub block_size: u32,
    /// How blocks are compressed.
    pub algorithm: Algorithm,
    /// Whether a checksum follows every block.
    pub verify: bool,
}

/// Whether the file begins as a ZFile does.
pub fn has_magic(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

impl ZHeader {
    /// Reads a header or trailer and checks its digest.
    ///
    /// # Errors
    /// Names the field.
    pub fn parse(bytes: &[u8], role: &str) -> Result<Self, FormatError> {
        let wrong = |what: &str, expected: &str, found: String| {
            FormatError::new(format!("{what} of the ZFile {role}"), expected, found)
        };
        let whole = bytes.get(..HEADER_BYTES).filter(|b| has_magic(b));
        let Some(bytes) = whole else {
            let start = bytes.get(..8).unwrap_or(bytes);
            let found = format!("{} bytes that begin with {start:02x?}", bytes.len());
            return Err(wrong("magic", "512 bytes that begin with `ZFile`", found));
        };
        let word = |offset| u32_at(bytes, offset).unwrap_or(0);
        let long = |offset| u64_at(bytes, offset).unwrap_or(0);
        let byte = |offset: usize| bytes.get(offset).copied().unwrap_or(0);
        let flags = word(32);
        if flags & DIGEST != 0 {
            let found = digest(bytes);
            if found != word(28) {
                let expected = format!("{:#010x}", word(28));
                return Err(wrong("digest", &expected, format!("{found:#010x}")));
            }
        }
        let algorithm = match byte(76) {
            1 => Algorithm::Lz4,
            2 => Algorithm::Zstd,
            other => return Err(wrong("algorithm", "1 (lz4) or 2 (zstd)", other.to_string())),
        };
        if byte(78) != 0 || word(84) != 0 {
            let found = format!("{} and {}", byte(78), word(84));
            return Err(wrong("dictionary", "none (0 and 0)", found));
        }
        let block_size = word(72);
        if !block_size.is_power_of_two() || !(BLOCK_MIN..=BLOCK_MAX).contains(&block_size) {
            let expected = "a power of two from 4096 to 65536";
            return Err(wrong("block size", expected, block_size.to_string()));
        }
        Ok(Self {
            flags,
            index_offset: long(40),
            blocks: long(48),
            original_size: long(56),
            index_crc: word(64),
            block_size,
            algorithm,
            verify: byte(88) != 0,
        })
    }

    /// The bytes of it, with its digest.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut put = |offset: usize, bytes: &[u8]| {
            if let Some(place) = out.get_mut(offset..offset + bytes.len()) {
                place.copy_from_slice(bytes);
            }
        };
        put(0, &MAGIC);
        put(24, &SIZE.to_le_bytes());
        put(32, &u64::from(self.flags).to_le_bytes());
        put(40, &self.index_offset.to_le_bytes());
        put(48, &self.blocks.to_le_bytes());
        put(56, &self.original_size.to_le_bytes());
        put(64, &self.index_crc.to_le_bytes());
        put(72, &self.block_size.to_le_bytes());
        let algorithm = match self.algorithm {
            Algorithm::Lz4 => 1,
            Algorithm::Zstd => 2,
        };
        put(76, &[algorithm]);
        put(88, &[u8::from(self.verify)]);
        let digest = digest(&out);
        if self.flags & DIGEST != 0
            && let Some(place) = out.get_mut(28..32)
        {
            place.copy_from_slice(&digest.to_le_bytes());
        }
        out
    }

    /// Checks that this begins a ZFile; whether it alone counts.
    ///
    /// # Errors
    /// Names the flags.
    pub fn must_begin(&self) -> Result<bool, FormatError> {
        if self.flags & HEADER == 0 {
            let found = format!("{:#x}", self.flags);
            return Err(FormatError::new(
                "flags of the ZFile header",
                "bit 0 set",
                found,
            ));
        }
        Ok(self.flags & OVERWRITTEN != 0)
    }

    /// Checks that this ends a ZFile.
    ///
    /// # Errors
    /// Names the flags.
    pub fn must_end(&self) -> Result<(), FormatError> {
        if self.flags & HEADER != 0 || self.flags & DATA == 0 || self.flags & SEALED == 0 {
            let found = format!("{:#x}", self.flags);
            let expected = "bit 0 clear, bits 1 and 2 set";
            return Err(FormatError::new(
                "flags of the ZFile trailer",
                expected,
                found,
            ));
        }
        Ok(())
    }

    /// Where the jump table lies, which ends before `limit` (the trailer, or the end of the file without one): start and
    /// bytes.
    ///
    /// # Errors
    /// When counts and sizes contradict each other.
    pub fn table(&self, limit: u64) -> Result<(u64, u64), FormatError> {
        let blocks = self.original_size.div_ceil(u64::from(self.block_size));
        if self.blocks != blocks || blocks > BLOCKS_MAX {
            return Err(FormatError::new(
                "blocks of the ZFile",
                format!(
                    "{blocks} for {} bytes, at most {BLOCKS_MAX}",
                    self.original_size
                ),
                self.blocks,
            ));
        }
        let len = blocks * 4;
        let end = self.index_offset.checked_add(len);
        if self.index_offset < to_u64(HEADER_BYTES) || end.is_none_or(|end| end > limit) {
            return Err(FormatError::new(
                "offset of the jump table",
                format!("at least {HEADER_BYTES}, with {len} bytes before {limit}"),
                self.index_offset,
            ));
        }
        Ok((self.index_offset, len))
    }

    /// Original bytes of a block.
    pub fn plain_len(&self, block: u64) -> u64 {
        let size = u64::from(self.block_size);
        self.original_size.saturating_sub(block * size).min(size)
    }
}

/// The digest of a header or trailer: over all of it, its own field as zeros.
fn digest(bytes: &[u8]) -> u32 {
    let mut zeroed = bytes.to_vec();
    if let Some(field) = zeroed.get_mut(28..32) {
        field.fill(0);
    }
    crc(SEED_HEADER, &zeroed)
}

/// The checksum of a jump table.
pub fn table_crc(table: &[u8]) -> u32 {
    crc(SEED_HEADER, table)
}

/// The checksum of a stored block.
pub fn block_crc(stored: &[u8]) -> u32 {
    crc(SEED_BLOCK, stored)
}

/// Where every block of a file is: a length each, and an offset for every 64th.
#[derive(Debug)]
pub struct JumpTable {
    lengths: Vec<u32>,
    offsets: Vec<u64>,
}

/// Blocks that share an offset: a look-up adds up at most so many lengths.
const GROUP: usize = 64;

impl JumpTable {
    /// Parses a table whose checksum was compared already.
    ///
    /// # Errors
    /// Names the entry that cannot be, or says that the blocks end elsewhere than where the table starts.
    pub fn parse(bytes: &[u8], header: &ZHeader) -> Result<Self, FormatError> {
        let least = if header.verify { CHECKSUM_BYTES } else { 0 };
        // Both algorithms grow incompressible data by far less than a sixteenth and a kilobyte.
        let most = header.block_size + header.block_size / 16 + 1024;
        let (entries, _) = bytes.as_chunks::<4>();
        let mut table = Self {
            lengths: Vec::with_capacity(entries.len()),
            offsets: Vec::with_capacity(entries.len() / GROUP + 1),
        };
        let mut at = to_u64(HEADER_BYTES);
        for (block, entry) in entries.iter().enumerate() {
            let len = u32::from_le_bytes(*entry);
            if to_u64(least) >= u64::from(len) || len > most {
                return Err(FormatError::new(
                    format!("stored length of block {block}"),
                    format!("more than {least} and at most {most}"),
                    len,
                ));
            }
            if block % GROUP == 0 {
                table.offsets.push(at);
            }
            table.lengths.push(len);
            at += u64::from(len);
        }
        if at > header.index_offset {
            return Err(FormatError::new(
                "end of the last block",
                format!(
                    "at most {}, where the jump table starts",
                    header.index_offset
                ),
                at,
            ));
        }
        Ok(table)
    }

    /// Where a block is stored, its checksum included: offset and bytes.
    pub fn find(&self, block: u64) -> Option<(u64, u32)> {
        let block = usize::try_from(block).ok()?;
        let group = block / GROUP;
        let before = self.lengths.get(group * GROUP..block)?;
        let offset: u64 = before.iter().map(|len| u64::from(*len)).sum();
        Some((self.offsets.get(group)? + offset, *self.lengths.get(block)?))
    }

    /// Stored lengths in order.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> ZHeader {
        ZHeader {
            flags: DATA | SEALED | DIGEST,
            index_offset: 748,
            blocks: 3,
            original_size: 10_000,
            index_crc: 0x821A_B438,
            block_size: 4096,
            algorithm: Algorithm::Lz4,
            verify: true,
        }
    }

    #[test]
    fn the_worked_example_of_the_format() {
        let table = [0x5C, 0, 0, 0, 0x5A, 0, 0, 0, 0x36, 0, 0, 0];
        assert_eq!(table_crc(&table), 0x821A_B438);
        let table = JumpTable::parse(&table, &header()).unwrap();
        let found: Vec<_> = (0..4).map(|block| table.find(block)).collect();
        assert_eq!(
            found,
            [Some((512, 92)), Some((604, 90)), Some((694, 54)), None]
        );
        assert_eq!(header().plain_len(2), 10_000 - 8192);
        assert_eq!(header().table(760).unwrap(), (748, 12));
    }

    #[test]
    fn what_is_written_reads_back() {
        let bytes = header().to_bytes();
        assert_eq!(ZHeader::parse(&bytes, "trailer").unwrap(), header());
        for at in [30, 33, 60, 77, 400] {
            let mut bad = bytes;
            bad[at] ^= 4;
            let error = ZHeader::parse(&bad, "trailer").unwrap_err();
            assert_eq!(error.what, "digest of the ZFile trailer", "byte {at}");
        }
    }

    #[test]
    fn every_offset_of_a_long_table_is_found() {
        let lengths: Vec<u32> = (0..200).map(|n| 5 + n % 7).collect();
        let bytes: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        let big = ZHeader {
            index_offset: 1 << 20,
            ..header()
        };
        let table = JumpTable::parse(&bytes, &big).unwrap();
        let mut at = 512;
        for (block, len) in (0..).zip(lengths) {
            assert_eq!(table.find(block), Some((at, len)));
            at += u64::from(len);
        }
    }

    #[test]
    fn impossible_values_are_refused() {
        let wrong = |change: fn(&mut ZHeader)| {
            let mut header = header();
            change(&mut header);
            let parsed = ZHeader::parse(&header.to_bytes(), "header")?;
            parsed.table(760).map(drop)
        };
        wrong(|_| ()).unwrap();
        wrong(|h| h.block_size = 2048).unwrap_err();
        wrong(|h| h.block_size = 6000).unwrap_err();
        wrong(|h| h.blocks = 4).unwrap_err();
        wrong(|h| h.original_size = u64::MAX).unwrap_err();
        wrong(|h| h.index_offset = 511).unwrap_err();
        wrong(|h| h.index_offset = 749).unwrap_err();
        wrong(|h| h.index_offset = u64::MAX).unwrap_err();
        let table = |lengths: [u32; 3]| {
            let bytes: Vec<u8> = lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
            JumpTable::parse(&bytes, &header()).map(drop)
        };
        table([92, 90, 54]).unwrap();
        table([4, 90, 54]).unwrap_err();
        table([92, 91, 54]).unwrap_err();
        table([u32::MAX, 90, 54]).unwrap_err();
    }
}
