//! A medium of whole sectors: the rest of the last one reads as zeros, as a loop device shows it.

use std::io;
use std::sync::Arc;

use super::{Media, past_end, read_only};
use crate::format::overlaybd::SECTOR;
use crate::ids::{to_u64, to_usize};

/// See the head of this file.
#[derive(Debug)]
pub struct PaddedMedia {
    inner: Arc<dyn Media>,
    bytes: u64,
}

impl PaddedMedia {
    /// Pads `inner` as long as it is now.
    ///
    /// # Errors
    /// What it said.
    pub fn new(inner: Arc<dyn Media>) -> io::Result<Self> {
        let bytes = inner.size()?;
        Ok(Self { inner, bytes })
    }
}

impl Media for PaddedMedia {
    fn size(&self) -> io::Result<u64> {
        Ok(self.bytes.next_multiple_of(SECTOR))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let padded = self.size()?;
        let end = offset.checked_add(to_u64(buffer.len()));
        if end.is_none_or(|end| end > padded) {
            return Err(past_end(offset, buffer.len(), padded));
        }
        let there = self.bytes.saturating_sub(offset).min(to_u64(buffer.len()));
        let (inside, past) = buffer.split_at_mut(to_usize(there));
        past.fill(0);
        if inside.is_empty() {
            return Ok(());
        }
        self.inner.read_at(inside, offset)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
