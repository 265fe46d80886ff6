//! A raw image as a new layer: its data, without its holes and zeros.

use super::DiskError;
use super::map::Map;
use super::seal::commit;
use crate::format::overlaybd::SECTOR;
use crate::format::overlaybd::header::Header;
use crate::format::overlaybd::record::{Record, SECTORS_MAX};
use crate::ids::{to_u64, to_usize};
use crate::media::Media;
use crate::media::file::FileMedia;
use crate::media::padded::PaddedMedia;

/// Zeros are looked for in pieces of so many bytes: smaller ones would make more extents than they save room.
const GRAIN: u64 = 64 << 10;
/// Bytes read at a time.
const STEP_BYTES: u64 = 1 << 20;

/// Writes a committed layer with the data of `image` into `out`.
///
/// # Errors
/// What either said; [`DiskError::TooManyExtents`].
pub fn import_raw(
    image: &FileMedia,
    out: &dyn Media,
    header: Header,
    name: &str,
) -> Result<(), DiskError> {
    let from = image.path().display().to_string();
    let failed = |error| DiskError::io("read", &from)(error);
    let padded = PaddedMedia::new(image.again().map_err(failed)?).map_err(failed)?;
    let size = padded.size().map_err(failed)?;
    let mut records = Vec::new();
    let mut buffer = vec![0; to_usize(STEP_BYTES)];
    let mut at = 0;
    while let Some(data) = image.next_data(at).map_err(failed)? {
        at = data.start / GRAIN * GRAIN;
        let end = data.end.next_multiple_of(GRAIN).min(size);
        while at < end {
            let step = (end - at).min(STEP_BYTES);
            let part = buffer.get_mut(..to_usize(step)).unwrap_or_default();
            padded.read_at(part, at).map_err(failed)?;
            for piece in part.chunks(to_usize(GRAIN)) {
                let sectors = to_u64(piece.len()) / SECTOR;
                if piece.iter().any(|byte| *byte != 0) {
                    debug_assert!(sectors <= SECTORS_MAX);
                    records.push(Record::data(at / SECTOR, sectors, at / SECTOR, 0));
                }
                at += to_u64(piece.len());
            }
        }
        if at >= size {
            break;
        }
    }
    let mut read =
        |record: Record, buffer: &mut [u8]| padded.read_at(buffer, record.place() * SECTOR);
    commit(&Map::new(records), &header, &mut read, out, name)
}
