//! Bytes in memory, for tests and for small things.

use std::io;
use std::sync::{PoisonError, RwLock};

use super::Media;
use crate::ids::{to_u64, to_usize};

/// Bytes in memory. There is nothing to sync.
#[derive(Debug, Default)]
pub struct MemMedia {
    bytes: RwLock<Vec<u8>>,
}

impl MemMedia {
    /// These bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes: RwLock::new(bytes),
        }
    }

    /// A copy of all of it.
    pub fn snapshot(&self) -> Vec<u8> {
        let bytes = self.bytes.read();
        bytes.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Media for MemMedia {
    fn size(&self) -> io::Result<u64> {
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        Ok(to_u64(bytes.len()))
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        let from = usize::try_from(offset).ok();
        let part = from
            .and_then(|from| Some(from..from.checked_add(buffer.len())?))
            .and_then(|range| bytes.get(range))
            .ok_or_else(|| super::past_end(offset, buffer.len(), to_u64(bytes.len())))?;
        buffer.copy_from_slice(part);
        Ok(())
    }

    fn write_at(&self, new: &[u8], offset: u64) -> io::Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        let from = to_usize(offset);
        let end = from
            .checked_add(new.len())
            .ok_or(io::ErrorKind::FileTooLarge)?;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        if let Some(place) = bytes.get_mut(from..end) {
            place.copy_from_slice(new);
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        bytes.resize(to_usize(len), 0);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
