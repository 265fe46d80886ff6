//! Does a metadata image belong to its manifest? Checked before an image is published, exported or called right.

use super::superblock;
use crate::format::FormatError;
use crate::format::flat::FlatLayout;
use crate::format::manifest::Manifest;
use crate::ids::{BLOCK_SIZE, round_up_to_block, to_u64};

/// Checks superblock and device table of `image` against `manifest`: every slot names the segment of its place, with its
/// length and flat address. (The digest of the whole image is checked by whoever loaded it.)
///
/// # Errors
/// Names the first slot or field that differs.
pub fn check(image: &[u8], manifest: &Manifest) -> Result<(), FormatError> {
    check_start(image, to_u64(image.len()), manifest)
}

/// How many bytes from its start [`check_start`] needs of the image of this manifest.
pub fn start_len(manifest: &Manifest) -> u64 {
    let slots = superblock::SLOTS_OFFSET + manifest.segments.len() * superblock::SLOT_SIZE;
    round_up_to_block(to_u64(slots))
}

/// As [`check`], of the start of an image of `len` bytes.
///
/// # Errors
/// As for [`check`].
pub fn check_start(start: &[u8], len: u64, manifest: &Manifest) -> Result<(), FormatError> {
    let (_, devices) = superblock::read_start(start, len)?;
    if devices.len() != manifest.segments.len() {
        return Err(FormatError::new(
            "device slots",
            format!("{} as in the manifest", manifest.segments.len()),
            devices.len(),
        ));
    }
    let layout = FlatLayout::new(manifest);
    for (i, (device, segment)) in devices.iter().zip(&manifest.segments).enumerate() {
        let same = device.digest == segment.digest()
            && u64::from(device.blocks) * BLOCK_SIZE == segment.len()
            && layout.segment_start(i) == Some(u64::from(device.first_block) * BLOCK_SIZE);
        if !same {
            return Err(FormatError::new(
                format!("device slot {}", i + 1),
                format!(
                    "segment {} of {} bytes at {:?}",
                    segment.digest(),
                    segment.len(),
                    layout.segment_start(i)
                ),
                format!("{device:?}"),
            ));
        }
    }
    Ok(())
}
