//! A disk for clients that write any bytes: parts of sectors are read, changed and written back, one at a time.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use super::device::BlockDevice;
use crate::format::overlaybd::SECTOR;
use crate::ids::{to_u64, to_usize};

/// See the head of this file. Used from many threads at once.
#[derive(Debug)]
pub struct Bytewise {
    disk: Arc<dyn BlockDevice>,
    /// Held alone while a part of a sector is changed, and shared by every other change.
    parts: RwLock<()>,
}

/// A range cut at sector edges: a part at the front, whole sectors, a part at the end. Each may be empty.
fn cut(offset: u64, len: u64) -> [(u64, u64); 3] {
    let end = offset + len;
    let front = offset.next_multiple_of(SECTOR).min(end);
    let back = (end / SECTOR * SECTOR).max(front);
    [(offset, front), (front, back), (back, end)]
}

impl Bytewise {
    /// Any bytes of `disk` can be written from now on, through this only.
    pub fn new(disk: Arc<dyn BlockDevice>) -> Self {
        Self {
            disk,
            parts: RwLock::new(()),
        }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.disk.size()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// As for [`BlockDevice::read`].
    pub fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.disk.read(buffer, offset)
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        let size = self.size();
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(crate::media::past_end(
                offset,
                usize::try_from(len).unwrap_or(usize::MAX),
                size,
            )),
        }
    }

    /// Reads the sector around a part, lets `change` change it, writes it back.
    fn change_part(&self, from: u64, to: u64, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        if from == to {
            return Ok(());
        }
        let start = from / SECTOR * SECTOR;
        let mut sector = vec![0; to_usize(SECTOR)];
        let alone = self.parts.write().unwrap_or_else(PoisonError::into_inner);
        self.disk.read(&mut sector, start)?;
        let part = sector.get_mut(to_usize(from - start)..to_usize(to - start));
        change(part.unwrap_or_default());
        let written = self.disk.write(&sector, start);
        drop(alone);
        written
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// As for [`BlockDevice::write`].
    pub fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.check(offset, to_u64(bytes.len()))?;
        let [front, whole, back] = cut(offset, to_u64(bytes.len()));
        let part = |(from, to): (u64, u64)| {
            let range = to_usize(from - offset)..to_usize(to - offset);
            bytes.get(range).unwrap_or_default()
        };
        self.change_part(front.0, front.1, |old| old.copy_from_slice(part(front)))?;
        if whole.0 < whole.1 {
            let shared = self.parts.read().unwrap_or_else(PoisonError::into_inner);
            let written = self.disk.write(part(whole), whole.0);
            drop(shared);
            written?;
        }
        self.change_part(back.0, back.1, |old| old.copy_from_slice(part(back)))
    }

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// As for [`BlockDevice::discard`].
    pub fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check(offset, len)?;
        let [front, whole, back] = cut(offset, len);
        self.change_part(front.0, front.1, |old| old.fill(0))?;
        if whole.0 < whole.1 {
            let shared = self.parts.read().unwrap_or_else(PoisonError::into_inner);
            let done = self.disk.discard(whole.0, whole.1 - whole.0);
            drop(shared);
            done?;
        }
        self.change_part(back.0, back.1, |old| old.fill(0))
    }

    /// Makes what was written survive a loss of power.
    ///
    /// # Errors
    /// As for [`BlockDevice::flush`].
    pub fn flush(&self) -> io::Result<()> {
        self.disk.flush()
    }
}
