//! Extended inodes (64 bytes) and the chunk indexes behind those of regular files.

use super::superblock::Device;
use crate::tree::{Kind, Meta};

/// Bytes of an extended inode.
pub const SIZE: usize = 64;
/// Data layouts (`EROFS_INODE_*`).
const FLAT_PLAIN: u16 = 0;
const FLAT_INLINE: u16 = 2;
const CHUNK_BASED: u16 = 4;
/// `i_format` of a chunk-based extended inode.
pub(super) const CHUNK_BASED_EXTENDED: u16 = 1 | (CHUNK_BASED << 1);
/// The chunk format says: 8-byte indexes.
pub(super) const CHUNK_FORMAT_INDEXES: u32 = 0x20;
/// `EROFS_NULL_ADDR`: nothing is there.
pub(super) const NULL_BLOCK: u32 = u32::MAX;

/// Where one chunk of a file is: device slot (from 1) and block in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChunkAddr {
    /// Device slot.
    pub device: u16,
    /// Block within the device.
    pub block: u32,
}

/// Where a regular file's data is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileMap {
    /// log2 of the chunk size in blocks (0 to 31).
    pub chunk_bits: u8,
    /// One entry per chunk; `None` is a hole.
    pub chunks: Vec<Option<ChunkAddr>>,
}

impl FileMap {
    /// The index array: device 0 and the block in the flat address space.
    ///
    /// Not the device id and the block in the device, which the format allows too: a file-backed flat mount (kernel 6.18,
    /// `erofs_fileio_scan_folio`) then compares device-relative with flat addresses to see whether two chunks touch. It never
    /// joins chunks that do, and joins some that do not, which reads wrong bytes without an error
    /// (`docs/decisions/0003-flat-chunk-addresses.md`).
    pub fn encode(&self, devices: &[Device]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.chunks.len() * 8);
        for chunk in &self.chunks {
            let first = |addr: ChunkAddr| {
                devices
                    .get(usize::from(addr.device).checked_sub(1)?)
                    .map(|d| d.first_block)
            };
            let block = chunk.map_or(NULL_BLOCK, |addr| {
                first(addr).expect("a chunk lies in one of the layer's segments") + addr.block
            });
            out.extend_from_slice(&[0; 4]); // startblk_hi (48-bit images only), device_id
            out.extend_from_slice(&block.to_le_bytes());
        }
        out
    }
}

/// How an inode's data is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// None at all (devices, pipes, sockets, empty files).
    None,
    /// Whole blocks from this one on, and the tail behind the inode.
    Inline(Option<u32>),
    /// Whole blocks from this one on, the last one padded.
    Plain(u32),
    /// Chunk indexes with this chunk size.
    Chunks(u8),
}

/// The numbers of an inode that are not in [`Meta`].
#[derive(Debug, Clone, Copy)]
pub struct Numbers {
    /// Type and permission bits.
    pub mode: u16,
    /// `i_xattr_icount`.
    pub xattr_icount: u16,
    /// Bytes.
    pub size: u64,
    /// A small number for `stat` on 32-bit systems.
    pub ino: u32,
    /// Links.
    pub nlink: u32,
}

/// `new_encode_dev` of the kernel (include/linux/kdev_t.h): 12 bits of major, 20 of minor.
pub const fn encode_dev(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Whether [`encode_dev`] keeps both numbers whole.
pub const fn dev_fits(major: u32, minor: u32) -> bool {
    major < 1 << 12 && minor < 1 << 20
}

/// The EROFS file type of a directory entry (`EROFS_FT_*` = `FT_*`).
pub const fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Dir(_) => 2,
        Kind::Char(..) => 3,
        Kind::Block(..) => 4,
        Kind::Fifo => 5,
        Kind::Socket => 6,
        Kind::Symlink(_) => 7,
    }
}

/// The 64 bytes of an extended inode.
pub fn encode(meta: &Meta, kind: &Kind, data: Data, numbers: &Numbers) -> Vec<u8> {
    let layout = match data {
        Data::None | Data::Plain(_) => FLAT_PLAIN,
        Data::Inline(_) => FLAT_INLINE,
        Data::Chunks(_) => CHUNK_BASED,
    };
    let i_u = match (kind, data) {
        (Kind::Char(major, minor) | Kind::Block(major, minor), _) => encode_dev(*major, *minor),
        (_, Data::Plain(block) | Data::Inline(Some(block))) => block,
        (_, Data::Chunks(bits)) => u32::from(bits) | CHUNK_FORMAT_INDEXES,
        (_, Data::None | Data::Inline(None)) => NULL_BLOCK,
    };
    let mut out = Vec::with_capacity(SIZE);
    out.extend_from_slice(&(1 | (layout << 1)).to_le_bytes()); // bit 0: extended inode
    out.extend_from_slice(&numbers.xattr_icount.to_le_bytes());
    out.extend_from_slice(&numbers.mode.to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    out.extend_from_slice(&numbers.size.to_le_bytes());
    out.extend_from_slice(&i_u.to_le_bytes());
    out.extend_from_slice(&numbers.ino.to_le_bytes());
    out.extend_from_slice(&meta.uid.to_le_bytes());
    out.extend_from_slice(&meta.gid.to_le_bytes());
    out.extend_from_slice(&meta.mtime.sec.to_le_bytes());
    out.extend_from_slice(&meta.mtime.nsec.to_le_bytes());
    out.extend_from_slice(&numbers.nlink.to_le_bytes());
    out.resize(SIZE, 0);
    out
}
