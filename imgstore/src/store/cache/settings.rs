//! What a cache is opened with, and what it tells of itself.

use std::sync::atomic::{AtomicBool, AtomicU64};

use super::health::DiskState;
use super::ledger::FILES_MAX;

/// How large the cache may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheSettings {
    /// Most bytes of disk.
    pub bytes_max: u64,
    /// Free bytes of the file system that are left to others; `None`: 512 MiB, and at most a twentieth of it.
    pub reserve_bytes: Option<u64>,
    /// Most segments; smaller in tests.
    pub files_max: usize,
}

impl CacheSettings {
    /// At most `bytes_max` bytes, and what is usual otherwise.
    pub const fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            reserve_bytes: None,
            files_max: FILES_MAX,
        }
    }

    /// Leaves this much free space to others.
    #[must_use]
    pub const fn with_reserve(mut self, bytes: Option<u64>) -> Self {
        self.reserve_bytes = bytes;
        self
    }

    /// At most this many segments.
    #[must_use]
    pub const fn with_files_max(mut self, files: usize) -> Self {
        self.files_max = files;
        self
    }
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kept {
    /// It is in the cache.
    Yes,
    /// There is no place for it: what is there is pinned, described by mounted layers or being written.
    No,
}

/// What the cache has done since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheDeeds {
    /// Segments evicted.
    pub evicted: u64,
    /// Descriptions of layers evicted.
    pub evicted_layers: u64,
    /// Segments that were served and not kept, for whatever reason.
    pub not_kept: u64,
    /// Errors of the disk.
    pub errors: u64,
    /// Whether the files of earlier runs are counted.
    pub scanned: bool,
    /// How the disk is.
    pub disk: DiskState,
}

#[derive(Debug, Default)]
pub(super) struct Deeds {
    pub(super) evicted: AtomicU64,
    pub(super) evicted_layers: AtomicU64,
    pub(super) not_kept: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) scanned: AtomicBool,
}
