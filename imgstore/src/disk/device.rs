//! What serves a disk to somebody: bytes by position, on the calling thread.
//!
//! [`crate::image::BlockImage`] answers in its own time, which the layers' on-demand path needs. A disk answers on the thread that
//! asks, because its files are local or block by themselves; drivers give it threads.

use std::io;

use super::stack::Stack;

/// A disk. Offsets and lengths are multiples of 512 unless said otherwise. Used from many threads at once.
pub trait BlockDevice: Send + Sync + std::fmt::Debug {
    /// Bytes.
    fn size(&self) -> u64;

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// Fills `buffer` from `offset`; both may be any.
    ///
    /// # Errors
    /// Past the end, or what a layer said. Nothing is made up.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes. It survives a loss of power after the next [`BlockDevice::flush`].
    ///
    /// # Errors
    /// [`io::ErrorKind::ReadOnlyFilesystem`], [`io::ErrorKind::InvalidInput`] for parts of sectors, [`io::ErrorKind::StorageFull`] …
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// As for [`BlockDevice::write`].
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes what was written survive a loss of power.
    ///
    /// # Errors
    /// What the disk said. After that every flush fails until the disk is opened again.
    fn flush(&self) -> io::Result<()>;
}

/// A stack of sealed layers can be read.
impl BlockDevice for Stack {
    fn size(&self) -> u64 {
        self.len()
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_at(buffer, offset)
    }

    fn write(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(crate::media::read_only())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(crate::media::read_only())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
