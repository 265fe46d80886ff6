//! OverlayBD files: LSMT layers, ZFile compression, and the tar wrapping around them. Pure.
//!
//! ```text
//! tar (optional) ⊃ ZFile (optional) ⊃ LSMT layer
//! ```
//! An LSMT layer maps 512-byte sectors of a virtual disk to places in its own data part; a stack of layers, the newest
//! first, is a disk. The bytes are described in `docs/format.md`; they are those of the format's two other
//! implementations (containerd/overlaybd and kvcache-ai/AgentENV), whose files the tests read. We read more strictly than both: whatever
//! is out of place is an error here, never another reading of the same bytes.

pub mod crc;
pub mod header;
pub mod record;
pub mod wrap;
pub mod zfile;

/// Bytes in a sector, the unit of every map.
pub const SECTOR: u64 = 512;
/// Bytes of a layer's header and trailer.
pub const HEADER_BYTES: usize = 4096;

/// What a file is, outermost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outermost {
    /// A tar with one file.
    Tar,
    /// A compressed file.
    ZFile,
    /// A layer, or a writable file.
    Lsmt,
}

/// What a file that begins with `head` (4,096 bytes, or all of a shorter one) is; `None` if it is none of ours.
pub fn kind_of(head: &[u8]) -> Option<Outermost> {
    if wrap::payload(head).is_some() {
        return Some(Outermost::Tar);
    }
    if zfile::has_magic(head) {
        return Some(Outermost::ZFile);
    }
    header::Header::parse(head).ok().map(|_| Outermost::Lsmt)
}

/// Little-endian field of a header; `None` past its end.
fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let field = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_le_bytes(field.try_into().ok()?))
}

/// Little-endian field of a header; `None` past its end.
fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let field = bytes.get(offset..offset.checked_add(8)?)?;
    Some(u64::from_le_bytes(field.try_into().ok()?))
}
