//! A disk that is being written: sealed layers below, the writable pair on top, and a switch to a new pair while I/O goes on.
//!
//! ```text
//!           top      the pair that takes writes
//!           frozen   pairs that took writes until a snapshot, on their way to be sealed
//!           base     the stack of sealed layers, one merged index
//! ```
//! A read keeps the view it began with, however long it takes. A switch waits for the writes in flight, exchanges one
//! pointer, and lets new ones go on: sealing and syncing happen outside that window.

use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use super::device::BlockDevice;
use super::map::Piece;
use super::pair::Pair;
use super::stack::Stack;
use crate::format::overlaybd::SECTOR;
use crate::ids::{to_u64, to_usize};

/// What a request sees.
#[derive(Debug, Clone)]
pub struct View {
    /// Sealed layers; `None` for a disk that began empty.
    pub base: Option<Arc<Stack>>,
    /// Pairs that take no writes any more, bottom to top.
    pub frozen: Vec<Arc<Pair>>,
    /// The pair that takes writes.
    pub top: Arc<Pair>,
}

impl View {
    /// Reads what the layers below `pairs` (bottom to top) show, through them.
    fn read(&self, pairs: &[&Arc<Pair>], sectors: Range<u64>, buffer: &mut [u8]) -> io::Result<()> {
        let Some((top, below)) = pairs.split_last() else {
            return self.read_base(sectors, buffer);
        };
        let mut rest = buffer;
        for piece in top.pieces(sectors) {
            let count = match piece {
                Piece::Hole { sectors, .. } => sectors,
                Piece::Mapped(record) => record.sectors(),
            };
            let (now, later) = rest.split_at_mut(to_usize(count * SECTOR));
            match piece {
                Piece::Hole { lba, sectors } => self.read(below, lba..lba + sectors, now)?,
                Piece::Mapped(record) if record.is_zeroed() => now.fill(0),
                Piece::Mapped(record) => top.data().read_at(now, record.place() * SECTOR)?,
            }
            rest = later;
        }
        Ok(())
    }

    fn read_base(&self, sectors: Range<u64>, buffer: &mut [u8]) -> io::Result<()> {
        let offset = sectors.start * SECTOR;
        let len = self.base.as_ref().map_or(0, |base| base.len());
        // The disk may be larger than what it began with.
        let there = len.saturating_sub(offset).min(to_u64(buffer.len()));
        let (inside, past) = buffer.split_at_mut(to_usize(there));
        past.fill(0);
        match &self.base {
            Some(base) if !inside.is_empty() => base.read_at(inside, offset),
            _ => Ok(()),
        }
    }
}

/// See the head of this file.
#[derive(Debug)]
pub struct LiveDisk {
    size: u64,
    view: RwLock<Arc<View>>,
    /// Held by every write and discard while it runs, and by a switch alone.
    gate: RwLock<()>,
}

impl LiveDisk {
    /// A disk of `size` bytes (a multiple of 512).
    pub fn new(view: View, size: u64) -> Self {
        Self {
            size,
            view: RwLock::new(Arc::new(view)),
            gate: RwLock::new(()),
        }
    }

    /// What requests see now.
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.view.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes what requests see, between two writes, and how long writes were held for it. Nothing slow may happen in
    /// `change`.
    pub fn switch(&self, change: impl FnOnce(&mut View)) -> Duration {
        let begun = Instant::now();
        let gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut view = View::clone(&self.view());
        change(&mut view);
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(view);
        drop(gate);
        begun.elapsed()
    }

    /// From now on writes go to `top`; nobody writes any more to what took them until now. How long writes were held.
    pub fn freeze(&self, top: Arc<Pair>) -> Duration {
        self.switch(|view| {
            let old = std::mem::replace(&mut view.top, top);
            view.frozen.push(old);
        })
    }

    /// Writes to the top, and flushes it where too much waits for that: not behind the gate, where a switch would wait for
    /// the disk.
    fn change(&self, change: impl FnOnce(&Pair) -> io::Result<()>) -> io::Result<()> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let top = Arc::clone(&self.view().top);
        let done = change(&top);
        drop(gate);
        done?;
        top.flush_if_full()
    }

    fn sectors(&self, offset: u64, len: u64) -> io::Result<Range<u64>> {
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let end = end.ok_or_else(|| crate::media::past_end(offset, to_usize(len), self.size))?;
        if !offset.is_multiple_of(SECTOR) || !len.is_multiple_of(SECTOR) {
            let text = format!("{len} bytes at {offset} are not whole sectors of {SECTOR} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(offset / SECTOR..end / SECTOR)
    }
}

impl BlockDevice for LiveDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let len = to_u64(buffer.len());
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let end = end.ok_or_else(|| crate::media::past_end(offset, buffer.len(), self.size))?;
        let view = self.view();
        let pairs: Vec<_> = view.frozen.iter().chain([&view.top]).collect();
        let (first, last) = (offset / SECTOR, end.div_ceil(SECTOR));
        if offset.is_multiple_of(SECTOR) && end.is_multiple_of(SECTOR) {
            return view.read(&pairs, first..last, buffer);
        }
        let mut whole = vec![0; to_usize((last - first) * SECTOR)];
        view.read(&pairs, first..last, &mut whole)?;
        let from = to_usize(offset - first * SECTOR);
        buffer.copy_from_slice(whole.get(from..from + buffer.len()).unwrap_or_default());
        Ok(())
    }

    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let sectors = self.sectors(offset, to_u64(bytes.len()))?;
        if sectors.is_empty() {
            return Ok(());
        }
        self.change(|top| top.write(sectors.start, bytes))
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let sectors = self.sectors(offset, len)?;
        if sectors.is_empty() {
            return Ok(());
        }
        self.change(|top| top.discard(sectors.start, sectors.end - sectors.start))
    }

    fn flush(&self) -> io::Result<()> {
        // Pairs that are frozen but not sealed may hold what was written before a switch; below first, as it was written.
        let view = self.view();
        for pair in view.frozen.iter().chain([&view.top]) {
            pair.flush()?;
        }
        Ok(())
    }
}
