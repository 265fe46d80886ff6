//! How long readers wait for pieces of segments, by what became of them.

use std::time::{Duration, Instant};

use crate::histogram::Histogram;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Latency {
    /// How far a reader's deadline is from its start.
    patience: Duration,
    /// From memory or the cache on disk.
    pub(super) hit: Histogram,
    /// From an origin.
    pub(super) miss: Histogram,
    /// EIO.
    pub(super) failed: Histogram,
}

impl Latency {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            patience,
            hit: Histogram::default(),
            miss: Histogram::default(),
            failed: Histogram::default(),
        }
    }

    /// How long ago the reader with this deadline came.
    pub(super) fn since(&self, deadline: Instant) -> Duration {
        (Instant::now() + self.patience).saturating_duration_since(deadline)
    }
}
