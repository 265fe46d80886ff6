//! Layers on each other, as one disk that is read.

use std::io;
use std::sync::Arc;

use super::DiskError;
use super::layer::Layer;
use super::map::{Map, Piece};
use crate::format::overlaybd::SECTOR;
use crate::format::overlaybd::record::Record;
use crate::ids::{to_u64, to_usize};
use crate::media::Media;

/// Most layers of a stack: their number is a byte.
pub const LAYERS_MAX: usize = 255;

/// See the head of this file.
#[derive(Debug)]
pub struct Stack {
    media: Vec<Arc<dyn Media>>,
    map: Map,
    virtual_size: u64,
}

/// Checks that each layer names the one below as its parent, where both have names.
fn check_parents(layers: &[Layer]) -> Result<(), DiskError> {
    for pair in layers.windows(2) {
        let [lower, upper] = pair else { continue };
        let (Some(expected), Some(found)) = (upper.trailer.parent, lower.trailer.uuid) else {
            continue;
        };
        if expected != found {
            return Err(DiskError::WrongParent {
                upper: upper.name.clone(),
                lower: lower.name.clone(),
                expected: expected.to_string(),
                found: found.to_string(),
            });
        }
    }
    Ok(())
}

impl Stack {
    /// A disk of these layers, bottom to top. Its size is that of the newest layer that has one.
    ///
    /// # Errors
    /// [`DiskError::WrongParent`], or too many or too few layers.
    pub fn new(layers: &[Layer]) -> Result<Self, DiskError> {
        check_parents(layers)?;
        Self::unrelated(layers)
    }

    /// As [`Stack::new`], whatever parents the layers name: for files that were put together by hand.
    ///
    /// # Errors
    /// Too many or too few layers.
    pub fn unrelated(layers: &[Layer]) -> Result<Self, DiskError> {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            return Err(DiskError::Invalid(format!(
                "expected 1 to {LAYERS_MAX} layers, found {}",
                layers.len()
            )));
        }
        let sizes = layers.iter().rev().map(|layer| layer.trailer.virtual_size);
        let virtual_size = sizes.into_iter().find(|size| *size != 0).unwrap_or(0);
        let parts = layers
            .iter()
            .map(|layer| (&*layer.records, layer.sectors()));
        Ok(Self {
            media: layers
                .iter()
                .map(|layer| Arc::clone(&layer.media))
                .collect(),
            map: Map::stack(parts, virtual_size.div_ceil(SECTOR)),
            virtual_size,
        })
    }

    /// Bytes of the disk.
    pub const fn len(&self) -> u64 {
        self.virtual_size
    }

    /// Whether the disk has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.virtual_size == 0
    }

    /// The merged index.
    pub const fn map(&self) -> &Map {
        &self.map
    }

    /// Fills a buffer with a mapped record's data.
    ///
    /// # Errors
    /// What the layer's medium said.
    pub fn read_record(&self, record: Record, buffer: &mut [u8]) -> io::Result<()> {
        let media = self.media.get(usize::from(record.layer()));
        let media = media.ok_or(io::ErrorKind::InvalidData)?;
        media.read_at(buffer, record.place() * SECTOR)
    }

    /// Fills `buffer` from `offset`, any offset and length within the disk.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] past the end of the disk; else what a layer's medium said. Nothing is made up.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(to_u64(buffer.len()));
        let end = end
            .filter(|end| *end <= self.virtual_size)
            .ok_or_else(|| crate::media::past_end(offset, buffer.len(), self.virtual_size))?;
        let sectors = offset / SECTOR..end.div_ceil(SECTOR);
        let mut rest = buffer;
        let mut at = offset;
        for piece in self.map.pieces(sectors) {
            let stop = match piece {
                Piece::Hole { lba, sectors } => lba + sectors,
                Piece::Mapped(record) => record.end(),
            };
            let stop = (stop * SECTOR).min(end);
            let (now, later) = rest.split_at_mut(to_usize(stop - at));
            match piece {
                Piece::Mapped(record) if !record.is_zeroed() => {
                    let place = record.place() * SECTOR + (at - record.lba() * SECTOR);
                    let media = self.media.get(usize::from(record.layer()));
                    media
                        .ok_or(io::ErrorKind::InvalidData)?
                        .read_at(now, place)?;
                }
                _ => now.fill(0),
            }
            rest = later;
            at = stop;
        }
        Ok(())
    }
}
