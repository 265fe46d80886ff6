//! How a device is made.

/// What becomes of a device whose server dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Requests wait, without a limit, for [`crate::Driver::recover`]; those that were being served are served again.
    Wait,
    /// Requests fail with EIO at once, and the device is dead for good. Not for file systems: the kernel (6.12) sets a dead
    /// disk's size to 0, and what is behind the end of a block device's page cache reads as zeros, EROFS' metadata for one.
    Fail,
}

/// See the head of this file.
#[derive(Debug, Clone)]
pub struct Options {
    /// The number N of `/dev/ublkbN`; the kernel chooses a free one by default.
    pub id: Option<u32>,
    /// Queues; by default one a CPU.
    pub queues: Option<u16>,
    /// Requests in flight in each queue.
    pub depth: u16,
    /// Threads of a [`crate::Content::Disk`]: so many requests are served at a time.
    pub workers: usize,
    /// A power of two from 512 to 4,096: the smallest thing the kernel reads or writes.
    pub block_bytes: u32,
    /// Refuses writes even where the content takes them.
    pub read_only: bool,
    /// Whether the kernel looks for partitions when the device is made, which reads here and there.
    pub partitions: bool,
    /// What becomes of the device if this process dies.
    pub recovery: Recovery,
    /// Marks the device as belonging to somebody, who finds it again by [`crate::devices`] after a crash.
    pub owner: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            id: None,
            queues: None,
            depth: 64,
            workers: 4,
            block_bytes: 512,
            read_only: false,
            partitions: true,
            recovery: Recovery::Wait,
            owner: 0,
        }
    }
}
