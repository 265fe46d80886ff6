//! How long things take: fixed buckets of atomic counters, cheap enough for every read.
//!
//! Observing is two relaxed additions and no lock. A snapshot may miss an observation that is being made; it never
//! counts one twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets in microseconds; one more bucket takes the rest. From a copy out of memory to the usual
/// deadline of a read.
pub(crate) const BOUNDS_US: [u64; 17] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    1_000_000, 5_000_000, 30_000_000,
];
const BUCKETS: usize = BOUNDS_US.len() + 1;

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

/// What a histogram has seen: counts by bucket (not added up), and the sum of all times.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Observed {
    /// One number a bucket of [`BOUNDS_US`], and one for the rest; empty when there was never anything.
    pub(crate) buckets: Vec<u64>,
    /// Microseconds.
    pub(crate) sum_us: u64,
}

impl Histogram {
    /// Counts one duration.
    pub(crate) fn observe(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let at = BOUNDS_US.partition_point(|bound| *bound < us);
        if let Some(bucket) = self.buckets.get(at) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// What was seen so far.
    pub(crate) fn observed(&self) -> Observed {
        let count = |bucket: &AtomicU64| bucket.load(Ordering::Relaxed);
        Observed {
            buckets: self.buckets.iter().map(count).collect(),
            sum_us: count(&self.sum_us),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket_and_what_is_longer_than_all_to_the_last() {
        let histogram = Histogram::default();
        for us in [0, 10, 11, 30_000_000, 30_000_001, 90_000_000] {
            histogram.observe(Duration::from_micros(us));
        }
        let seen = histogram.observed();
        assert_eq!(seen.buckets.len(), BUCKETS);
        assert_eq!((seen.buckets[0], seen.buckets[1]), (2, 1));
        assert_eq!((seen.buckets[16], seen.buckets[17]), (1, 2));
        assert_eq!(seen.buckets.iter().sum::<u64>(), 6);
        assert_eq!(seen.sum_us, 150_000_022);
    }
}
