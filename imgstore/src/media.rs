//! What a disk's layers lie on: a run of bytes that is read, written, cut and synced by position.
//!
//! The seam between the disk code and a file, memory, or a test that cuts the power after any write.

pub mod file;
pub mod mem;
pub mod padded;
pub mod power_cut;
pub mod slice;

use std::io;

/// A file-like thing, used from many threads at once. A read or write is whole or an error.
pub trait Media: Send + Sync + std::fmt::Debug {
    /// Bytes.
    ///
    /// # Errors
    /// What the disk said.
    fn size(&self) -> io::Result<u64>;

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] past the end, else what the disk said.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`, growing the file where needed.
    ///
    /// # Errors
    /// What the disk said; how much was written is unknown then.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Cuts or extends (with zeros).
    ///
    /// # Errors
    /// What the disk said.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Makes everything written so far survive a loss of power.
    ///
    /// # Errors
    /// What the disk said. What was written since the last success may be lost then, also if a later call succeeds.
    fn sync(&self) -> io::Result<()>;
}

/// A read past the end, in words.
pub(crate) fn past_end(offset: u64, wanted: usize, len: u64) -> io::Error {
    io::Error::new(
        io::ErrorKind::UnexpectedEof,
        format!("expected {wanted} bytes at offset {offset}, found an end at {len}"),
    )
}

/// What can only be read refuses to be written.
pub(crate) fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "this layer is read-only")
}
