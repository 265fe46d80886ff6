//! A part of another medium, for reading.

use std::io;
use std::sync::Arc;

use super::{Media, past_end, read_only};
use crate::ids::to_u64;
use crate::origin::ByteRange;

/// A range of a medium.
#[derive(Debug)]
pub struct SliceMedia {
    whole: Arc<dyn Media>,
    range: ByteRange,
}

impl SliceMedia {
    /// `range` of `whole`, which must have that many bytes.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] when it has fewer.
    pub fn new(whole: Arc<dyn Media>, range: ByteRange) -> io::Result<Self> {
        let len = whole.size()?;
        if range
            .start
            .checked_add(range.len)
            .is_none_or(|end| end > len)
        {
            let wanted = usize::try_from(range.len).unwrap_or(usize::MAX);
            return Err(past_end(range.start, wanted, len));
        }
        Ok(Self { whole, range })
    }
}

impl Media for SliceMedia {
    fn size(&self) -> io::Result<u64> {
        Ok(self.range.len)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(to_u64(buffer.len()));
        if end.is_none_or(|end| end > self.range.len) {
            return Err(past_end(offset, buffer.len(), self.range.len));
        }
        self.whole.read_at(buffer, self.range.start + offset)
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
