//! What a driver serves: a run of bytes that answers reads from any thread, in its own time.

/// Why a read failed. Every failure reaches the kernel as EIO; the text is for the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReadError(pub String);

/// Called exactly once with the bytes or the failure.
pub type ReadDone = Box<dyn FnOnce(Result<&[u8], ReadError>) + Send>;

/// An image of fixed length. Implementations must not block in [`BlockImage::read_at`] on anything that may be slow:
/// they answer now if they can, and later from another thread if not.
pub trait BlockImage: Send + Sync + std::fmt::Debug {
    /// Bytes.
    fn len(&self) -> u64;

    /// Whether the image has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `len` bytes at `offset`, fewer only at the end of the image, and gives them to `done`.
    fn read_at(&self, offset: u64, len: u32, done: ReadDone);
}
