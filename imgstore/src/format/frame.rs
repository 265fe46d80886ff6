//! Segment frames and packs: plain zstd, so that `zstd -dc pack` gives the segments in order.
//!
//! One frame per segment with its content size in the header. Where compression saves less than 1/16 the frame holds
//! raw blocks: still a zstd frame, decoded at the speed of a copy. After the last frame of a pack comes a skippable
//! frame with the seek table of zstd's "seekable format" (contrib/seekable_format in the zstd sources). On origins that store
//! files in chunks, other skippable frames between the segments keep these from crossing chunks.

use std::cell::RefCell;

use zstd::bulk::Decompressor;

use super::FormatError;
use crate::ids::{Digest, to_u64, to_usize};

/// The zstd frame magic number (RFC 8878 §3.1.1).
const ZSTD_MAGIC: u32 = 0xFD2F_B528;
/// Largest raw block (RFC 8878 §3.1.1.2.4: Block_Maximum_Size).
const RAW_BLOCK_MAX: usize = 128 << 10;
/// Magic of the skippable frame that holds a seek table.
const SEEK_SKIPPABLE_MAGIC: u32 = 0x184D_2A5E;
/// Magic of a skippable frame that holds nothing.
const PADDING_MAGIC: u32 = 0x184D_2A50;
/// Magic and size of a skippable frame.
const SKIPPABLE_HEADER_BYTES: u64 = 8;
/// Magic at the very end of a seek table.
const SEEKABLE_MAGIC: u32 = 0x8F92_EAB1;

/// Most bytes of a frame of `plain_len` plain bytes: zstd's worst case, and ours, add less than 1/128 and a header.
pub const fn frame_len_max(plain_len: u64) -> u64 {
    plain_len.saturating_add(plain_len / 128 + 1024)
}

/// Compresses segments one after another with the same working memory.
pub struct Encoder(zstd::bulk::Compressor<'static>);

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Encoder")
    }
}

impl Encoder {
    /// An encoder for a zstd level (1 to 19).
    pub fn new(level: i32) -> Self {
        Self(zstd::bulk::Compressor::new(level).expect("zstd has its working memory"))
    }

    /// Compresses one segment; deterministic for a given level and zstd version.
    pub fn encode(&mut self, plain: &[u8]) -> Vec<u8> {
        let packed = self
            .0
            .compress(plain)
            .expect("zstd compresses any memory buffer");
        if packed.len() > plain.len() - plain.len() / 16 {
            encode_raw(plain)
        } else {
            packed
        }
    }
}

/// Compresses one object.
pub fn encode(plain: &[u8], level: i32) -> Vec<u8> {
    Encoder::new(level).encode(plain)
}

/// A zstd frame of raw blocks.
fn encode_raw(plain: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(plain.len() + 64);
    out.extend_from_slice(&ZSTD_MAGIC.to_le_bytes());
    // Frame_Header_Descriptor: Frame_Content_Size_flag 3 (8 bytes), Single_Segment_flag 1.
    out.push(0b1110_0000);
    out.extend_from_slice(&to_u64(plain.len()).to_le_bytes());
    let mut blocks = plain.chunks(RAW_BLOCK_MAX).peekable();
    while let Some(block) = blocks.next() {
        let last = u32::from(blocks.peek().is_none());
        let size = u32::try_from(block.len()).expect("a raw block is at most 128 KiB");
        let header = (last | (size << 3)).to_le_bytes();
        out.extend(header.iter().take(3));
        out.extend_from_slice(block);
    }
    out
}

/// Plain bytes that any frame may claim.
const CLAIM_FREE_BYTES: u64 = 64 << 20;
/// Beyond, the most plain bytes for each stored one. Metadata and chunk tables compress to a tenth or so.
const CLAIM_RATIO_MAX: u64 = 256;

/// Whether a frame of `stored_len` bytes may hold `plain_len` plain ones: checked before memory is taken for them.
///
/// # Errors
/// When that would be a frame of almost nothing.
pub fn check_claim(stored_len: u64, plain_len: u64) -> Result<(), FormatError> {
    let max = CLAIM_FREE_BYTES.max(stored_len.saturating_mul(CLAIM_RATIO_MAX));
    if plain_len <= max {
        return Ok(());
    }
    Err(FormatError::new(
        format!("plain bytes of a frame of {stored_len} bytes"),
        format!("at most {max}"),
        plain_len,
    ))
}

/// Decompresses a frame that must hold exactly `plain_len` bytes; memory is bounded by `plain_len`, and by the frame
/// ([`check_claim`]).
///
/// # Errors
/// [`FormatError`] when the frame is damaged or holds another number of bytes. The digest is the caller's to check.
pub fn decode(frame: &[u8], plain_len: u64) -> Result<Vec<u8>, FormatError> {
    check_claim(to_u64(frame.len()), plain_len)?;
    let mut plain = vec![0; to_usize(plain_len)];
    decode_into(frame, &mut plain)?;
    Ok(plain)
}

/// Decompresses a frame that must fill `plain` exactly.
///
/// # Errors
/// As for [`decode`]; what is in `plain` then is undefined.
pub fn decode_into(frame: &[u8], plain: &mut [u8]) -> Result<(), FormatError> {
    let expected = plain.len();
    let found = decode_some(frame, plain)?;
    if found != expected {
        return Err(FormatError::new(
            "plain length of zstd frame",
            expected.to_string(),
            found,
        ));
    }
    Ok(())
}

/// Decompresses a segment's frame and compares the plain bytes with the segment's digest: the one check between what is stored
/// anywhere and what a reader gets.
///
/// # Errors
/// [`FormatError`] when the frame is damaged or holds other bytes; nothing of `plain` may then be used.
pub fn verified_into(frame: &[u8], digest: &Digest, plain: &mut [u8]) -> Result<(), FormatError> {
    decode_into(frame, plain)?;
    let found = Digest::of(plain);
    if found == *digest {
        return Ok(());
    }
    Err(FormatError::new(
        "digest of the plain bytes",
        digest.to_hex(),
        found,
    ))
}

/// As [`verified_into`], into new memory of `plain_len` bytes.
///
/// # Errors
/// As for [`verified_into`].
pub fn verified(frame: &[u8], digest: &Digest, plain_len: u64) -> Result<Vec<u8>, FormatError> {
    check_claim(to_u64(frame.len()), plain_len)?;
    let mut plain = vec![0; to_usize(plain_len)];
    verified_into(frame, digest, &mut plain)?;
    Ok(plain)
}

/// Decompresses a frame of unknown length into the start of `plain`; how many bytes it held.
///
/// # Errors
/// As for [`decode`], also when `plain` is too short.
pub fn decode_some(frame: &[u8], plain: &mut [u8]) -> Result<usize, FormatError> {
    thread_local! {
        // Making zstd's state costs some 15 us, a tenth of what a segment takes.
        static STATE: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
    }
    let room = plain.len();
    let unpack = |state: &mut Option<Decompressor<'static>>| {
        let state = match state {
            Some(state) => state,
            None => state.insert(Decompressor::new()?),
        };
        state.decompress_to_buffer(frame, plain)
    };
    STATE
        .with_borrow_mut(unpack)
        .map_err(|e| FormatError::new("zstd frame", format!("{room} plain bytes"), e))
}

/// Bytes of padding to write at offset `at` of a pack, so that a frame of `len` bytes does not cross a multiple of `chunk`
/// if it fits between two of them. Padding is a skippable frame: 0, or at least 8 bytes.
pub const fn padding_len(at: u64, len: u64, chunk: u64) -> u64 {
    let gap = chunk - at % chunk;
    if len <= gap || len > chunk {
        return 0;
    }
    if gap >= SKIPPABLE_HEADER_BYTES {
        return gap;
    }
    // Too short for padding: it goes on into the next chunk, if the frame fits behind it there, else through it.
    if len <= gap + chunk - SKIPPABLE_HEADER_BYTES {
        SKIPPABLE_HEADER_BYTES
    } else {
        gap + chunk
    }
}

/// A skippable frame of `len` bytes in all, at least 8, which every zstd reader passes over (RFC 8878 §3.1.2).
pub fn padding(len: u64) -> Vec<u8> {
    let body = len.checked_sub(SKIPPABLE_HEADER_BYTES);
    let body = body.expect("padding has at least 8 bytes");
    let mut out = Vec::with_capacity(to_usize(len));
    out.extend_from_slice(&PADDING_MAGIC.to_le_bytes());
    let size = u32::try_from(body).expect("padding is shorter than two chunks");
    out.extend_from_slice(&size.to_le_bytes());
    out.resize(to_usize(len), 0);
    out
}

/// The seek table of a pack: (stored bytes, plain bytes) of each frame in order.
pub fn seek_table(frames: &[(u32, u32)]) -> Vec<u8> {
    let body = frames.len() * 8 + 9;
    let mut out = Vec::with_capacity(body + 8);
    out.extend_from_slice(&SEEK_SKIPPABLE_MAGIC.to_le_bytes());
    out.extend_from_slice(
        &u32::try_from(body)
            .expect("a pack has at most 65535 frames")
            .to_le_bytes(),
    );
    for (stored, plain) in frames {
        out.extend_from_slice(&stored.to_le_bytes());
        out.extend_from_slice(&plain.to_le_bytes());
    }
    out.extend_from_slice(
        &u32::try_from(frames.len())
            .expect("checked above")
            .to_le_bytes(),
    );
    out.push(0); // Seek_Table_Descriptor: no checksums, the segments have digests.
    out.extend_from_slice(&SEEKABLE_MAGIC.to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For every offset near a border and lengths around what fits: the frame then crosses no border unless it is too long.
    #[test]
    fn padding_keeps_frames_inside_of_chunks() {
        const CHUNK: u64 = 64;
        for at in 0..2 * CHUNK {
            for len in 1..CHUNK + 9 {
                let pad = padding_len(at, len, CHUNK);
                let start = at + pad;
                assert!(pad == 0 || pad >= SKIPPABLE_HEADER_BYTES, "{at} {len}");
                if len <= CHUNK {
                    assert_eq!(start / CHUNK, (start + len - 1) / CHUNK, "{at} {len}");
                } else {
                    assert_eq!(pad, 0);
                }
                if pad > 0 {
                    assert_eq!(to_u64(padding(pad).len()), pad);
                }
            }
        }
    }

    #[test]
    fn padding_decodes_to_nothing() {
        let mut pack = encode(b"one", 3);
        pack.extend(padding(8));
        pack.extend(encode(b"two", 3));
        pack.extend(padding(5000));
        assert_eq!(zstd::decode_all(&*pack).unwrap(), b"onetwo");
    }
}
