//! The chunk table: where each chunk of a layer is, so that a later build can refer to it (`--dict`).
//!
//! Fixed-size little-endian records sorted by digest, behind a 16-byte header. Derived from the layer, stored beside it
//! because deriving it again would mean reading all data.

use super::FormatError;
use crate::ids::{Digest, to_u64};

/// First bytes of a table.
const MAGIC: &[u8; 8] = b"dsecchnk";
/// Format version.
const VERSION: u32 = 1;
const HEADER_SIZE: usize = 16;
/// Bytes of a record: digest 32, segment index u16, first block u16, blocks u16, reserved u16.
const RECORD_SIZE: usize = 40;
/// Largest table a reader accepts, in bytes: 26 million chunks, of which a layer of the largest size has 4 million at the
/// usual chunk size.
pub const TABLE_BYTES_MAX: u64 = 1 << 30;

/// One chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// BLAKE3 of the chunk's bytes, padded with zeros to whole blocks.
    pub digest: Digest,
    /// Index of the segment in the layer's manifest.
    pub segment: u16,
    /// First block in the segment.
    pub block: u16,
    /// Blocks.
    pub blocks: u16,
}

/// The table's bytes; records are sorted by digest here.
pub fn encode(mut records: Vec<Record>) -> Vec<u8> {
    records.sort_unstable_by_key(|r| r.digest);
    let mut out = Vec::with_capacity(HEADER_SIZE + records.len() * RECORD_SIZE);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(
        &u32::try_from(records.len())
            .expect("at most 65535 segments of 1024 chunks")
            .to_le_bytes(),
    );
    for r in &records {
        out.extend_from_slice(r.digest.as_bytes());
        out.extend_from_slice(&r.segment.to_le_bytes());
        out.extend_from_slice(&r.block.to_le_bytes());
        out.extend_from_slice(&r.blocks.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
    }
    out
}

fn u16_at(record: &[u8], offset: usize) -> u16 {
    record
        .get(offset..)
        .and_then(<[u8]>::first_chunk)
        .map_or(0, |b| u16::from_le_bytes(*b))
}

/// Parses a table whose digest was checked.
///
/// # Errors
/// Names the header field or the length that is wrong.
pub fn parse(bytes: &[u8]) -> Result<Vec<Record>, FormatError> {
    let (header, body) = bytes.split_at_checked(HEADER_SIZE).ok_or_else(|| {
        FormatError::new(
            "chunk table header",
            format!("{HEADER_SIZE} bytes"),
            bytes.len(),
        )
    })?;
    let version = header
        .get(8..)
        .and_then(<[u8]>::first_chunk)
        .map(|b| u32::from_le_bytes(*b));
    if !header.starts_with(MAGIC) || version != Some(VERSION) {
        return Err(FormatError::new(
            "chunk table header",
            "magic `dsecchnk`, version 1",
            format!("version {version:?}"),
        ));
    }
    let count = header
        .get(12..)
        .and_then(<[u8]>::first_chunk)
        .map_or(0, |b| u32::from_le_bytes(*b));
    if to_u64(body.len()) != u64::from(count) * to_u64(RECORD_SIZE) {
        return Err(FormatError::new(
            "chunk table length",
            format!("{count} records of {RECORD_SIZE} bytes"),
            body.len(),
        ));
    }
    let record = |r: &[u8]| {
        let digest = r.first_chunk::<32>().copied().unwrap_or_default();
        Record {
            digest: Digest::from_bytes(digest),
            segment: u16_at(r, 32),
            block: u16_at(r, 34),
            blocks: u16_at(r, 36),
        }
    };
    Ok(body.chunks_exact(RECORD_SIZE).map(record).collect())
}
