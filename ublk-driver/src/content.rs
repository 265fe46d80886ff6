//! What a device serves.

use std::sync::Arc;

use imgstore::disk::device::BlockDevice;
use imgstore::image::BlockImage;

/// See the head of this file. Both kinds are of fixed length, a multiple of the device's block size.
#[derive(Debug, Clone)]
pub enum Content {
    /// Answers in its own time, on any thread; read-only. It is called on the loop thread and must not block there.
    Image(Arc<dyn BlockImage>),
    /// Answers on the calling thread, which is one of the device's workers; writable unless it says otherwise.
    Disk(Arc<dyn BlockDevice>),
}

impl Content {
    /// Bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Image(image) => image.len(),
            Self::Disk(disk) => disk.size(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the device takes no writes.
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Image(_) => true,
            Self::Disk(disk) => disk.is_read_only(),
        }
    }
}
