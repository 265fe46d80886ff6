//! The superblock (128 bytes at byte 1,024) and the device table behind it.

use crate::format::FormatError;
use crate::ids::{BLOCK_SIZE, Digest, to_u64};

/// Byte offset of the superblock.
pub const OFFSET: usize = 1024;
/// Bytes of the superblock without extension slots.
const SIZE: usize = 128;
/// Bytes of a device slot.
pub const SLOT_SIZE: usize = 128;
/// Byte offset of the first device slot, right behind the superblock.
pub const SLOTS_OFFSET: usize = OFFSET + SIZE;
/// `EROFS_SUPER_MAGIC_V1`.
const MAGIC: u32 = 0xE0F5_E1E2;
/// The superblock's checksum is in use; times of inodes are mtimes.
const COMPAT_SB_CHKSUM_MTIME: u32 = 0x1 | 0x2;
/// Chunk-based files, and a device table.
const INCOMPAT_CHUNKED_FILE: u32 = 0x4;
const INCOMPAT_DEVICE_TABLE: u32 = 0x8;

/// One entry of the device table: a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// The segment's digest, written as hex into the slot's tag (the kernel never reads it).
    pub digest: Digest,
    /// Blocks in the segment.
    pub blocks: u32,
    /// First block of the segment in the flat address space.
    pub first_block: u32,
}

/// What the superblock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuperBlock {
    /// Inodes.
    pub inodes: u64,
    /// Blocks of the metadata image.
    pub blocks: u32,
    /// First block of the inode area.
    pub meta_block: u32,
    /// Root inode number.
    pub root_nid: u16,
    /// Entries of the device table.
    pub devices: u16,
    /// Derived from the content, so that equal images are equal byte for byte.
    pub uuid: [u8; 16],
}

fn put(image: &mut [u8], offset: usize, bytes: &[u8]) {
    image
        .get_mut(offset..offset + bytes.len())
        .expect("the first block holds the superblock, and the device table was counted")
        .copy_from_slice(bytes);
}

/// `crc32c` as EROFS keeps it: initial value all ones, no final inversion, from the superblock to the end of its block
/// with the checksum field zeroed.
fn checksum(first_block: &[u8]) -> u32 {
    !crc32c::crc32c(first_block.get(OFFSET..).unwrap_or_default())
}

/// Writes superblock and device table into the start of `image`, which is long enough and zeroed there.
pub fn write(image: &mut [u8], sb: &SuperBlock, devices: &[Device]) {
    for (i, device) in devices.iter().enumerate() {
        let slot = SLOTS_OFFSET + i * SLOT_SIZE;
        put(image, slot, device.digest.to_hex().as_bytes());
        put(image, slot + 0x40, &device.blocks.to_le_bytes());
        put(image, slot + 0x44, &device.first_block.to_le_bytes());
    }
    let slots_at = u16::try_from(SLOTS_OFFSET / SLOT_SIZE).expect("a constant");
    let incompat = INCOMPAT_CHUNKED_FILE
        | if devices.is_empty() {
            0
        } else {
            INCOMPAT_DEVICE_TABLE
        };
    let mut field = |offset: usize, bytes: &[u8]| put(image, OFFSET + offset, bytes);
    field(0x00, &MAGIC.to_le_bytes());
    field(0x08, &COMPAT_SB_CHKSUM_MTIME.to_le_bytes());
    field(0x0C, &[12]); // log2 of the block size
    field(0x0E, &sb.root_nid.to_le_bytes());
    field(0x10, &sb.inodes.to_le_bytes());
    field(0x24, &sb.blocks.to_le_bytes());
    field(0x28, &sb.meta_block.to_le_bytes());
    field(0x30, &sb.uuid);
    field(0x50, &incompat.to_le_bytes());
    field(0x56, &sb.devices.to_le_bytes());
    field(0x58, &slots_at.to_le_bytes());
    let sum = checksum(image.get(..4096).expect("an image has whole blocks"));
    put(image, OFFSET + 0x04, &sum.to_le_bytes());
}

fn bytes<const N: usize>(image: &[u8], offset: usize) -> Result<[u8; N], FormatError> {
    image
        .get(offset..)
        .and_then(|rest| rest.first_chunk::<N>())
        .copied()
        .ok_or_else(|| {
            FormatError::new(
                "EROFS image",
                format!("{N} bytes at offset {offset}"),
                format!("{} bytes in all", image.len()),
            )
        })
}

/// Reads and checks the superblock and device table of an image that this code wrote.
///
/// # Errors
/// Names the field with its offset.
pub fn read(image: &[u8]) -> Result<(SuperBlock, Vec<Device>), FormatError> {
    read_start(image, to_u64(image.len()))
}

/// As [`read`], of the start of an image of `len` bytes: superblock and device table lie in it.
///
/// # Errors
/// As for [`read`].
pub fn read_start(image: &[u8], len: u64) -> Result<(SuperBlock, Vec<Device>), FormatError> {
    let u16_at = |offset| bytes(image, OFFSET + offset).map(u16::from_le_bytes);
    let u32_at = |offset| bytes(image, OFFSET + offset).map(u32::from_le_bytes);
    if u32_at(0)? != MAGIC {
        return Err(FormatError::new(
            "EROFS magic at offset 1024",
            format!("{MAGIC:#x}"),
            format!("{:#x}", u32_at(0)?),
        ));
    }
    let mut first = bytes::<4096>(image, 0)?;
    put(&mut first, OFFSET + 4, &[0; 4]);
    let (stored, computed) = (u32_at(4)?, checksum(&first));
    if stored != computed {
        return Err(FormatError::new(
            "EROFS superblock checksum at offset 1028",
            format!("{computed:#x}"),
            format!("{stored:#x}"),
        ));
    }
    let sb = SuperBlock {
        inodes: u64::from_le_bytes(bytes(image, OFFSET + 0x10)?),
        blocks: u32_at(0x24)?,
        meta_block: u32_at(0x28)?,
        root_nid: u16_at(0x0E)?,
        devices: u16_at(0x56)?,
        uuid: bytes(image, OFFSET + 0x30)?,
    };
    if u64::from(sb.blocks) * BLOCK_SIZE != len {
        return Err(FormatError::new(
            "EROFS blocks at offset 1060",
            format!("{len} bytes in all"),
            format!("{} blocks", sb.blocks),
        ));
    }
    let mut devices = Vec::with_capacity(usize::from(sb.devices));
    for i in 0..usize::from(sb.devices) {
        let slot = SLOTS_OFFSET + i * SLOT_SIZE;
        let tag = bytes::<64>(image, slot)?;
        let digest = std::str::from_utf8(&tag)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| {
                FormatError::new(
                    format!("tag of device slot {} at offset {slot}", i + 1),
                    "a segment digest",
                    String::from_utf8_lossy(&tag),
                )
            })?;
        devices.push(Device {
            digest,
            blocks: u32::from_le_bytes(bytes(image, slot + 0x40)?),
            first_block: u32::from_le_bytes(bytes(image, slot + 0x44)?),
        });
    }
    Ok((sb, devices))
}
